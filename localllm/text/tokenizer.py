"""Text to token ids and back, for every tokenizer kind of GGUF.

Promises:
  1. special tokens are found first, the longest text first, and only where the caller allows it:
     control tokens that a person typed stay text;
  2. `token_bytes` of a text's ids, concatenated, are the text's bytes (WordPiece and the space
     that some vocabularies put in front excepted: `decode` removes that one);
  3. BOS and EOS are never added here: `add_bos` and `add_eos` say what the model wants.

Not here: streaming (stream.py), chat templates (template.py), the algorithms (bpe.py, spm.py,
wordpiece.py).
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from localllm.metadata import Metadata
from localllm.text.pretokenizers import DEFAULT, pre_tokenizer
from localllm.text.vocabulary import (
    BYTE,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    byte_value,
    read_vocabulary,
)

SPACE = "▁"
MARKER_BEGIN = 3
# Bytes that are not UTF-8 travel through str as these (PEP 383).
STRAY_BYTES = re.compile("([\udc80-\udcff]+)")
SURROGATES = re.compile("[\ud800-\udfff]")


class Algorithm(Protocol):
    """How the text between special tokens becomes ids."""

    def encode(self, text: str) -> list[int]: ...

    def byte_id(self, byte: int) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text and which special tokens may be recognised in it.

    Without `parse_special` only user-defined tokens are, and of these not the `refused`.
    """

    text: str
    parse_special: bool
    refused: frozenset[int] = frozenset()


class Tokenizer:
    """The tokenizer of one model. Not thread-safe: a caller that has threads holds a lock."""

    def __init__(self, vocabulary: Vocabulary, algorithm: Algorithm, *, add_bos: bool) -> None:
        self.vocabulary = vocabulary
        self.algorithm = algorithm
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.add_bos = add_bos and self.bos_id is not None
        self.add_eos = vocabulary.add_eos and self.eos_id is not None
        self.eog_ids = vocabulary.eog_ids
        self.special_ids = frozenset(vocabulary.ids_of_kind(CONTROL, UNKNOWN))
        self._token_bytes: dict[int, bytes] = {}
        self._longest: int | None = None

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary.texts)

    def fewest_tokens(self, text: str) -> int:
        """How many tokens `text` has at least, told at once.

        No token stands for more characters than its own text has; only WordPiece drops blanks.
        """
        if self.vocabulary.model == "bert":
            return 0
        if self._longest is None:
            self._longest = max(map(len, self.vocabulary.texts))
        return len(text) // max(self._longest, 1)

    def is_special(self, token: int) -> bool:
        """Whether the token is a mark that is no part of the text."""
        return token in self.special_ids

    def id_of(self, text: str) -> int | None:
        """The id of the token that is spelled exactly so in the file."""
        return self.vocabulary.ids.get(text)

    def encode(self, text: str | bytes, *, parse_special: bool) -> list[int]:
        """Ids of `text`, without BOS and EOS.

        Bytes need not be UTF-8: stray ones become byte tokens. Lone surrogates in a str become
        U+FFFD.
        """
        if isinstance(text, bytes):
            decoded = text.decode("utf-8", "surrogateescape")
        else:
            decoded = _without_surrogates(text)
        return self._encode([Piece(decoded, parse_special)])

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of the pieces' concatenation; borders between pieces do not cut words."""
        return self._encode(
            [Piece(_without_surrogates(p.text), p.parse_special, p.refused) for p in pieces]
        )

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for, a special token's being its text."""
        found = self._token_bytes.get(token)
        if found is None:
            found = self._token_bytes[token] = self._spell(token)
        return found

    def decode(self, ids: Iterable[int], *, special: bool = False) -> bytes:
        """The text of `ids` from its beginning: the space put in front by `encode` is removed."""
        spelled = [self.token_bytes(i) for i in ids if special or i not in self.special_ids]
        text = b"".join(spelled)
        if self.vocabulary.model == "bert":
            return text.removeprefix(b" ")
        if self.vocabulary.model == "llama" and self.vocabulary.space_prefix:
            return text.removeprefix(b" ")
        return text

    def _spell(self, token: int) -> bytes:
        text = self.vocabulary.texts[token]
        kind = self.vocabulary.kinds[token]
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            return text.encode()
        if self._is_byte_level:
            from localllm.text.bpe import CHAR_TO_BYTE

            codes = [CHAR_TO_BYTE.get(char) for char in text]
            known = [code for code in codes if code is not None]
            return bytes(known) if len(known) == len(codes) else text.encode()
        value = byte_value(text) if kind == BYTE else None
        if value is not None:
            return bytes((value,))
        return text.replace(SPACE, " ").encode()

    @cached_property
    def _is_byte_level(self) -> bool:
        if self.vocabulary.model != "gpt2":
            return False
        return self.vocabulary.pre is None or pre_tokenizer(self.vocabulary.pre).byte_level

    def _encode(self, pieces: Sequence[Piece]) -> list[int]:
        ids: list[int] = []
        for part in self._partition(pieces):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode_text(part)
        return ids

    def _encode_text(self, text: str) -> list[int]:
        if not text:
            return []
        if not STRAY_BYTES.search(text):
            return self.algorithm.encode(text)
        ids: list[int] = []
        for index, part in enumerate(STRAY_BYTES.split(text)):
            if index % 2 == 0:
                ids += self.algorithm.encode(part) if part else []
                continue
            found = (self.algorithm.byte_id(b) for b in part.encode("utf-8", "surrogateescape"))
            ids += [i for i in found if i is not None]
        return ids

    @cached_property
    def _markers(self) -> dict[str, list[tuple[str, int]]]:
        """Special tokens and their texts, by how they begin: some models have thousands."""
        texts = self.vocabulary.texts
        found: dict[str, list[tuple[str, int]]] = {}
        for i in self.vocabulary.ids_of_kind(CONTROL, UNKNOWN, USER_DEFINED):
            if texts[i]:
                found.setdefault(texts[i][:MARKER_BEGIN], []).append((texts[i], i))
        return found

    def _markers_in(self, text: str) -> list[tuple[str, int]]:
        """The special tokens whose texts occur, the longest first."""
        groups = (group for begin, group in self._markers.items() if begin in text)
        found = [marker for group in groups for marker in group if marker[0] in text]
        return sorted(found, key=lambda marker: -len(marker[0]))

    def _partition(self, pieces: Sequence[Piece]) -> list[str | int]:
        """The text cut at the special tokens in it.

        Each token cuts every remaining stretch at every place, the leftmost first, before shorter
        tokens get their turn.
        """
        text = "".join(p.text for p in pieces)
        rules = _Rules(pieces)
        stretches: list[str | int | tuple[int, int]] = [(0, len(text))]
        for marker, token in self._markers_in(text):
            is_control = token in self.special_ids
            found: list[str | int | tuple[int, int]] = []
            for stretch in stretches:
                if isinstance(stretch, tuple):
                    found += _cut(text, stretch, marker, token, rules, is_control=is_control)
                else:
                    found.append(stretch)
            stretches = found
        return self._texts(text, stretches)

    def _texts(
        self, text: str, stretches: Sequence[str | int | tuple[int, int]]
    ) -> list[str | int]:
        parts: list[str | int] = []
        for stretch in stretches:
            if not isinstance(stretch, tuple):
                parts.append(stretch)
                continue
            part = text[stretch[0] : stretch[1]]
            if parts and isinstance(parts[-1], int) and self._strips_after(parts[-1]):
                part = part.lstrip()
            if part:
                parts.append(part)
        return parts

    def _strips_after(self, token: int) -> bool:
        """Whether whitespace after the token is dropped: Phi-3's special tokens, but three."""
        if not self.vocabulary.strips_after_special:
            return False
        text = self.vocabulary.texts[token]
        return text not in ("<unk>", "<s>", "<|endoftext|>")


class _Rules:
    """Which special tokens are allowed where in the concatenation of some pieces."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.starts = [0]
        for piece in pieces:
            self.starts.append(self.starts[-1] + len(piece.text))

    def allow(self, token: int, start: int, end: int, *, is_control: bool) -> bool:
        """Whether the token may be recognised at [start, end): every piece it touches allows it."""
        index = bisect_right(self.starts, start) - 1
        while index < len(self.pieces) and self.starts[index] < end:
            piece = self.pieces[index]
            if not piece.parse_special and (is_control or token in piece.refused):
                return False
            index += 1
        return True


def _cut(
    text: str,
    stretch: tuple[int, int],
    marker: str,
    token: int,
    rules: _Rules,
    *,
    is_control: bool,
) -> list[int | tuple[int, int]]:
    """One stretch cut at every allowed place of one special token."""
    start, end = stretch
    parts: list[int | tuple[int, int]] = []
    search_from = start
    while (at := text.find(marker, search_from, end)) >= 0:
        if not rules.allow(token, at, at + len(marker), is_control=is_control):
            search_from = at + 1
            continue
        if at > start:
            parts.append((start, at))
        parts.append(token)
        start = search_from = at + len(marker)
    if start < end:
        parts.append((start, end))
    return parts


def _without_surrogates(text: str) -> str:
    """Surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    if not SURROGATES.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def load_tokenizer(metadata: Metadata) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Raises BadFile if its tables are inconsistent, UnsupportedModel if the kind is not known here.
    """
    vocabulary = read_vocabulary(metadata)
    if vocabulary.model == "llama":
        from localllm.text.spm import ScoreMerger

        merger = ScoreMerger(vocabulary, metadata)
        return Tokenizer(vocabulary, merger, add_bos=bool(vocabulary.add_bos))
    if vocabulary.model == "bert":
        from localllm.text.wordpiece import WordMatcher

        return Tokenizer(vocabulary, WordMatcher(vocabulary, metadata), add_bos=True)
    from localllm.text.bpe import RankMerger

    name = vocabulary.pre or ("gemma4" if vocabulary.model == "gemma4" else None)
    pre = DEFAULT if name is None else pre_tokenizer(name)
    add_bos = pre.add_bos if vocabulary.add_bos is None else vocabulary.add_bos
    return Tokenizer(
        vocabulary, RankMerger(vocabulary, metadata, pre), add_bos=add_bos and pre.has_bos
    )
