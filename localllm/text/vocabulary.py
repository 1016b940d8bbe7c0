"""The token table of a model: texts, kinds, special ids and the tokens that end an answer.

Promises: ids outside the table never appear; a token that ends an answer is a control token,
whatever kind the file gives it.

Not here: how text becomes ids (tokenizer.py and the algorithms).
Source: the `tokenizer.ggml.*` keys of GGUF; the sets of well-known token texts follow llama.cpp's
src/llama-vocab.cpp.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from localllm.errors import BadFile, UnsupportedModel
from localllm.metadata import Metadata

KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MAX_TOKENS = 1 << 20


def _texts(line: str) -> frozenset[str]:
    return frozenset(line.split())


END_OF_TURN_TEXTS = _texts(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT] "
    "<｜end▁of▁sentence｜> <end_of_utterance>"
)
END_TEXTS = END_OF_TURN_TEXTS | _texts(
    "<|eom_id|> [EOS] </s> <eos> <|return|> <|call|> <|flush|> <|calls|> <turn|> <|tool_response> "
    "[e~["
)
# Pad, repository and separator of fill-in-the-middle models: each ends what was asked for.
FILL_END_TEXTS = _texts(
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> "
    "<reponame> <|file_sep|>"
)
FILL_END_KEYS = ("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
# Harmony's structure is part of the visible answer: parsers need these texts.
CHANNEL_TEXTS = _texts("<|channel|> <|message|> <|start|> <|constrain|>")


class Defaults(NamedTuple):
    """What a tokenizer model assumes when the keys are absent."""

    bos: int | None = None
    eos: int | None = None
    unknown: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    space_prefix: bool = False


DEFAULTS = {
    "llama": Defaults(bos=1, eos=2, unknown=0, add_bos=True, space_prefix=True),
    "gpt2": Defaults(),
    "gemma4": Defaults(bos=2, eos=1, unknown=3, add_bos=True),
    "bert": Defaults(bos=101, eos=102, unknown=100, add_bos=True, add_eos=True),
}


@dataclass(frozen=True)
class Vocabulary:
    """All tokens of a model. `kinds` is uint8 [tokens]; `declared` the same before adjustments."""

    model: str
    pre: str | None
    texts: list[str]
    kinds: npt.NDArray[np.uint8]
    declared: npt.NDArray[np.uint8]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    add_bos: bool | None
    add_eos: bool
    space_prefix: bool
    strips_after_special: bool
    eog_ids: frozenset[int]

    @cached_property
    def ids(self) -> dict[str, int]:
        """Text to id; of equal texts the last counts, as in the models' own tools."""
        return {text: i for i, text in enumerate(self.texts)}

    def ids_of_kind(self, *kinds: int) -> list[int]:
        found: list[int] = np.flatnonzero(np.isin(self.kinds, kinds)).tolist()
        return found

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """Byte value to the id of its `<0xXX>` token."""
        found = {}
        for i in self.ids_of_kind(BYTE):
            value = byte_value(self.texts[i])
            if value is not None:
                found[value] = i
        return found


def byte_value(text: str) -> int | None:
    """65 for `<0x41>`; None if the text is nothing of that form."""
    if len(text) != 6 or not text.startswith("<0x") or text[5] != ">":
        return None
    try:
        return int(text[3:5], 16)
    except ValueError:
        return None


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Read the token table; UnsupportedModel names a tokenizer kind that has no implementation."""
    model = metadata.str(KEY + "model")
    if model not in DEFAULTS:
        raise UnsupportedModel(f"{metadata.path}: the tokenizer model '{model}' is not supported")
    defaults = DEFAULTS[model]
    num_tokens = metadata.length(KEY + "tokens")
    if not 0 < num_tokens <= MAX_TOKENS:
        raise BadFile(f"{metadata.path}: the vocabulary has {num_tokens} tokens")
    texts = metadata.strs(KEY + "tokens")
    declared = _kinds(metadata, num_tokens)
    kinds = declared.copy()

    def special(name: str, default: int | None) -> int | None:
        found = metadata.int(f"{KEY}{name}_token_id", default=-1)
        if f"{KEY}{name}_token_id" not in metadata:
            found = -1 if default is None else default
        return found if 0 <= found < num_tokens else None

    bos = special("bos", defaults.bos)
    eos = special("eos", defaults.eos)
    if model == "bert":
        bos, eos = special("cls", defaults.bos), special("seperator", defaults.eos)
    ends = {special(name, None) for name in ("eot", "eom")} | {eos}
    ends |= {special(key.removesuffix("_token_id"), None) for key in FILL_END_KEYS}
    eog_ids = _end_ids(texts, kinds, {i for i in ends if i is not None})
    name = metadata.str("general.name", default="").lower()
    return Vocabulary(
        model=model,
        pre=metadata.str(KEY + "pre") if KEY + "pre" in metadata else None,
        texts=texts,
        kinds=kinds,
        declared=declared,
        bos_id=bos,
        eos_id=eos,
        unknown_id=special("unknown", defaults.unknown),
        add_bos=_flag(metadata, "add_bos_token", defaults.add_bos, may_be_none=model == "gpt2"),
        add_eos=bool(_flag(metadata, "add_eos_token", defaults.add_eos)),
        space_prefix=bool(_flag(metadata, "add_space_prefix", defaults.space_prefix)),
        strips_after_special="phi-3" in name or "phi3" in name,
        eog_ids=eog_ids,
    )


def _flag(
    metadata: Metadata, name: str, default: bool, *, may_be_none: bool = False
) -> bool | None:
    if KEY + name in metadata:
        return metadata.bool(KEY + name)
    return None if may_be_none else default


def _kinds(metadata: Metadata, num_tokens: int) -> npt.NDArray[np.uint8]:
    """uint8 [tokens]; all normal when the file does not say."""
    key = KEY + "token_type"
    if key not in metadata:
        return np.full(num_tokens, NORMAL, np.uint8)
    kinds = metadata.array(key)
    if len(kinds) != num_tokens:
        raise BadFile(f"{metadata.path}: {key} has {len(kinds)} values for {num_tokens} tokens")
    if kinds.dtype.kind not in "iu":
        raise BadFile(f"{metadata.path}: {key} is an array of {kinds.dtype}, not of integers")
    return kinds.astype(np.uint8)


def _end_ids(texts: list[str], kinds: npt.NDArray[np.uint8], ends: set[int]) -> frozenset[int]:
    """The ids that end an answer; makes them control tokens in `kinds`."""
    known = END_TEXTS | FILL_END_TEXTS | CHANNEL_TEXTS | {"<|plamo:eos|>"}
    found = {text: i for i, text in enumerate(texts) if text in known}
    for text, i in found.items():
        if text in CHANNEL_TEXTS:
            kinds[i] = USER_DEFINED
        elif text in END_TEXTS or text in FILL_END_TEXTS:
            kinds[i] = CONTROL
            ends.add(i)
    calls = "<|call|>" in found or "<|calls|>" in found
    if "<|end|>" in found and calls and ("<|return|>" in found or "<|flush|>" in found):
        # Harmony ends a message with it, not the answer.
        ends.discard(found["<|end|>"])
        kinds[found["<|end|>"]] = USER_DEFINED
    if "</s>" in found and ("<|tool_response>" in found or "<|plamo:eos|>" in found):
        ends.discard(found["</s>"])
        kinds[found["</s>"]] = NORMAL
    return frozenset(ends)
