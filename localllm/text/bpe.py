"""Byte-pair merging by rank, for `tokenizer.ggml.model` = gpt2 and gemma4.

The work is done by the `tokenizers` package, which is exact here (same ids as llama.cpp on every
published test vector) and fast.

Not here: special tokens (tokenizer.py), the regular expressions (pretokenizers.py).
"""

import re
from typing import Any

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE

from localllm.errors import BadFile
from localllm.metadata import Metadata
from localllm.text.pretokenizers import PreTokenizer
from localllm.text.spm import SPACE
from localllm.text.vocabulary import KEY, Vocabulary

DIGITS = re.compile(r"\d+")


def _byte_alphabet() -> list[str]:
    """GPT-2's character for each byte: printable Latin-1 is itself, the rest is from U+0100 on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


BYTE_TO_CHAR = _byte_alphabet()
CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}


class RankMerger:
    """Text to ids."""

    def __init__(self, vocabulary: Vocabulary, metadata: Metadata, pre: PreTokenizer) -> None:
        self.vocabulary = vocabulary
        self.pre = pre
        self.model = Tokenizer(_model(vocabulary, metadata, pre))
        splits: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(p), "isolated") for p in pre.patterns
        ]
        if pre.byte_level:
            splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        if pre.escape_spaces:
            self.model.normalizer = normalizers.Replace(" ", SPACE)
        self.model.pre_tokenizer = pre_tokenizers.Sequence(splits)

    def encode(self, text: str) -> list[int]:
        """Ids of a stretch of text between special tokens."""
        if not self.pre.group_digits:
            ids: list[int] = self.model.encode(text, add_special_tokens=False).ids
            return ids
        pieces = _group_digits(text)
        ids = self.model.encode(pieces, is_pretokenized=True, add_special_tokens=False).ids
        return ids

    def words(self, text: str) -> list[str]:
        """Where `text` is cut before merging (for a look at what a pre-tokenizer does)."""
        pieces = _group_digits(text) if self.pre.group_digits else [text]
        cut = self.model.pre_tokenizer.pre_tokenize_str
        return [piece[a:b] for piece in pieces for _, (a, b) in cut(piece)]

    def byte_id(self, byte: int) -> int | None:
        """The token of one byte that is not part of any character."""
        if self.pre.byte_level:
            return self.vocabulary.ids.get(BYTE_TO_CHAR[byte])
        return self.vocabulary.byte_ids.get(byte, self.vocabulary.unknown_id)


def _group_digits(text: str) -> list[str]:
    """`text` cut around runs of digits, and these into threes from the right."""
    pieces, start = [], 0
    for match in DIGITS.finditer(text):
        pieces.append(text[start : match.start()])
        digits = match[0]
        first = len(digits) % 3
        pieces.append(digits[:first])
        pieces += [digits[i : i + 3] for i in range(first, len(digits), 3)]
        start = match.end()
    pieces.append(text[start:])
    return [piece for piece in pieces if piece]


def _model(vocabulary: Vocabulary, metadata: Metadata, pre: PreTokenizer) -> BPE:
    ids = vocabulary.ids
    lines = metadata.strs(KEY + "merges")
    unknown = vocabulary.unknown_id
    options = {
        "ignore_merges": pre.ignore_merges,
        "fuse_unk": not pre.byte_level,
        "byte_fallback": not pre.byte_level,
        "unk_token": None if pre.byte_level or unknown is None else vocabulary.texts[unknown],
    }
    # Checking the hundreds of thousands of merges of a sound file would double the time to build.
    model = _try_model(ids, _halves(lines), options)
    if model is None:
        model = _try_model(ids, _known_halves(lines, ids), options)
    if model is None:
        raise BadFile(f"{metadata.path}: its vocabulary and merges do not fit together")
    return model


def _try_model(
    ids: dict[str, int], merges: list[tuple[str, str]], options: dict[str, Any]
) -> BPE | None:
    """None if the package refuses the merges, or panics: it does both when one is of no tokens."""
    try:
        return BPE(ids, merges, **options)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        # A panic of the package is no Exception; its class cannot be imported.
        return None


def _halves(lines: list[str]) -> list[tuple[str, str]]:
    """A merge is two texts joined by a space; only the first may begin with one."""
    halves = " ".join(lines).split(" ")
    if len(halves) == 2 * len(lines):
        return list(zip(halves[::2], halves[1::2], strict=True))
    return [(line[:cut], line[cut + 1 :]) for line in lines if (cut := line.find(" ", 1)) > 0]


def _known_halves(lines: list[str], ids: dict[str, int]) -> list[tuple[str, str]]:
    """The merges of tokens to a token: the others can never apply."""
    return [(a, b) for a, b in _halves(lines) if a in ids and b in ids and a + b in ids]
