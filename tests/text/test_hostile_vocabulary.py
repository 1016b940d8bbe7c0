"""Vocabularies that make no sense: refused, or usable, and never another error."""

import random
from typing import Any

import pytest
from vocabularies import CONTROL, NORMAL, UNKNOWN, MakeMetadata, byte_level, score_based

from localllm.errors import BadFile, UnsupportedModel
from localllm.metadata import Metadata
from localllm.text.tokenizer import load_tokenizer

WORDPIECE = {
    "ggml.model": "bert",
    "ggml.tokens": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁a", "b", "▁"],
    "ggml.token_type": [CONTROL, UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL, NORMAL],
    "ggml.unknown_token_id": 1,
}
SOUND: list[dict[str, Any]] = [
    byte_level([("<s>", CONTROL)], ("a b", "ab c")),
    score_based({"▁": -1.0, "a": -2.0, "▁a": -1.0}),
    score_based({"▁": -1.0}) | {"ggml.model": "gemma4", "ggml.merges": ["a b"]},
    WORDPIECE,
]
ODD_TEXTS = ["", " ", "a", "▁", "<0x41>", "<0xZZ>", "<s>", "\n", "é" * 300, "  ", "\0", "##"]
ODD_LISTS: list[list[Any]] = [["a"], ["a b", " ", "b  a"], [1], [0.5, float("nan")], [True]]


def broken(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """A copy of the keys with one to three of them changed."""
    values = {k: list(v) if isinstance(v, list) else v for k, v in values.items()}
    for _ in range(rng.randint(1, 3)):
        key = rng.choice(sorted(values))
        value = values[key]
        change = rng.randrange(6)
        if change == 0:
            del values[key]
        elif change == 1:
            values[key] = rng.choice([*ODD_LISTS, 7, "gpt2", "llama", "bert", True])
        elif isinstance(value, list) and isinstance(value[0], str):
            for _ in range(rng.randint(1, 5)):
                value[rng.randrange(len(value))] = rng.choice(ODD_TEXTS)
        elif isinstance(value, list):
            value[rng.randrange(len(value))] = type(value[0])(rng.choice([0, 1, 3, 6, 9, 255]))
        else:
            values["ggml.unknown_token_id"] = rng.choice([0, 5, 99999])
        if not values:
            break
    return values


def use(metadata: Metadata) -> None:
    tokenizer = load_tokenizer(metadata)
    ids = tokenizer.encode("ab <s> é\n漢 a▁b".encode() + b"\xff", parse_special=True)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    tokenizer.decode(ids, special=True)
    tokenizer.decode(range(tokenizer.vocab_size))


def test_broken_vocabulary_is_refused_or_works(make_metadata: MakeMetadata) -> None:
    rng = random.Random(3)
    num_refused = 0
    for round_number in range(300):
        values = broken(rng, SOUND[round_number % len(SOUND)])
        try:
            use(make_metadata(values))
        except (BadFile, UnsupportedModel):
            num_refused += 1
    assert 50 < num_refused < 280


@pytest.mark.parametrize("values", SOUND)
def test_sound_vocabulary_works(values: dict[str, Any], make_metadata: MakeMetadata) -> None:
    use(make_metadata(values))
