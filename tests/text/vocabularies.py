"""Small vocabularies as `tokenizer.` keys of GGUF."""

from collections.abc import Callable
from typing import Any

from localllm.metadata import Metadata
from localllm.text.bpe import BYTE_TO_CHAR

MakeMetadata = Callable[[dict[str, Any]], Metadata]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def byte_level(
    extra: list[tuple[str, int]], merges: tuple[str, ...] = (), **keys: Any
) -> dict[str, Any]:
    """A byte-level vocabulary: the bytes, the results of `merges`, then `extra` (text, kind)."""
    tokens = [(char, NORMAL) for char in BYTE_TO_CHAR]
    tokens += [(merge.replace(" ", ""), NORMAL) for merge in merges or ["Ġ a"]]
    tokens += extra
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": [text for text, _ in tokens],
        "ggml.token_type": [kind for _, kind in tokens],
        "ggml.merges": list(merges) or ["Ġ a"],
        **keys,
    }


def score_based(
    pieces: dict[str, float], extra: tuple[tuple[str, int], ...] = (), **keys: Any
) -> dict[str, Any]:
    """A SentencePiece vocabulary: <unk>, <s>, </s>, the bytes, `pieces` with scores, `extra`."""
    tokens = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
    tokens += [(f"<0x{i:02X}>", BYTE, 0.0) for i in range(256)]
    tokens += [(text, NORMAL, score) for text, score in pieces.items()]
    tokens += [(text, kind, 0.0) for text, kind in extra]
    return {
        "ggml.model": "llama",
        "ggml.tokens": [text for text, _, _ in tokens],
        "ggml.token_type": [kind for _, kind, _ in tokens],
        "ggml.scores": [score for _, _, score in tokens],
        **keys,
    }
