"""Streaming: whole characters, and no part of a stop string, wherever the borders fall."""

import random
from itertools import pairwise

import pytest
from vocabularies import CONTROL, MakeMetadata, byte_level

from localllm.text.stream import Detokenizer, StopMatcher
from localllm.text.tokenizer import Tokenizer, load_tokenizer

HARD = "👩‍👩‍👧‍👦🇰🇪 漢字 Ελλάδα नमस्ते ."


@pytest.fixture
def tokenizer(make_metadata: MakeMetadata) -> Tokenizer:
    """Every token is one byte, so every character of two bytes and more is split."""
    return load_tokenizer(make_metadata(byte_level([("<|end|>", CONTROL)])))


def test_no_chunk_has_part_of_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(HARD, parse_special=False)
    assert len(ids) == len(HARD.encode())
    detokenizer = Detokenizer(tokenizer)
    chunks = [detokenizer.push(i) for i in ids]
    assert "�" not in "".join(chunks)
    assert "".join(chunks) + detokenizer.finish() == HARD


def test_answer_that_ends_inside_a_character_drops_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(HARD, parse_special=False)
    for length in range(len(ids) + 1):
        detokenizer = Detokenizer(tokenizer)
        text = "".join(detokenizer.push(i) for i in ids[:length]) + detokenizer.finish()
        assert text == HARD.encode()[:length].decode(errors="ignore")


def test_bytes_that_are_no_character_become_one_replacement_each(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(b"a\xff\xc3b", parse_special=False)
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push(i) for i in ids) == "a��b"


def test_control_tokens_are_text_only_when_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|end|>b", parse_special=True)
    for special, text in ((False, "ab"), (True, "a<|end|>b")):
        detokenizer = Detokenizer(tokenizer, special=special)
        assert "".join(detokenizer.push(i) for i in ids) == text


def run(stops: list[str], chunks: list[str]) -> tuple[str, str | None]:
    """What is handed out, and the stop string that was met."""
    matcher = StopMatcher(stops)
    out = []
    for chunk in chunks:
        out.append(matcher.push(chunk))
        if matcher.stopped is not None:
            break
    return "".join(out) + matcher.finish(), matcher.stopped


# stops, text, what is handed out, stop string met
CASES = [
    (["ta gam"], "alpha beta gamma delta", "alpha be", "ta gam"),
    (["\n"], "one\ntwo", "one", "\n"),
    (["STOP"], "a STO ST STOP b", "a STO ST ", "STOP"),
    (["STOP"], "no such thing STO", "no such thing STO", None),
    (["ab", "abc"], "xabc", "x", "ab"),
    (["abc", "bc"], "xabcd", "x", "abc"),
    (["abcd", "bc"], "xabcd", "xa", "bc"),
    (["aab"], "aaaab", "aa", "aab"),
    (["abab", "x"], "abaabab!", "aba", "abab"),
    (["a", "b", "c", "d", "e"], "xyzed", "xyz", "e"),
    (["", "q"], "abq", "ab", "q"),
    ([""], "abc", "abc", None),
    ([], "abc", "abc", None),
    (["漢字"], "日本漢漢字", "日本漢", "漢字"),
    (["abc"], "abc", "", "abc"),
]


@pytest.mark.parametrize(("stops", "text", "out", "stopped"), CASES)
def test_stop_string_is_met_at_every_split_point(
    stops: list[str], text: str, out: str, stopped: str | None
) -> None:
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            chunks = [text[:first], text[first:second], text[second:]]
            assert run(stops, chunks) == (out, stopped)
    assert run(stops, list(text)) == (out, stopped)


def test_nothing_is_handed_out_that_could_begin_a_stop_string() -> None:
    matcher = StopMatcher(["ta gam"])
    assert [matcher.push(c) for c in ("be", "ta", " ga", "s")] == ["be", "", "", "ta gas"]


def test_text_is_held_no_longer_than_needed() -> None:
    matcher = StopMatcher(["abcabd"])
    assert matcher.push("abcab") == ""
    assert matcher.push("c") == "abc"
    assert matcher.finish() == "abc"


def test_nothing_comes_after_the_stop_string() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.push("abc") == "a"
    assert (matcher.push("more"), matcher.finish()) == ("", "")


def plain(stops: list[str], text: str) -> tuple[str, str | None]:
    """The rule, written as a search over all prefixes."""
    for end in range(len(text) + 1):
        ending = [s for s in stops if s and text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_random_stops_and_splits_agree_with_the_plain_rule() -> None:
    rng = random.Random(11)
    for _ in range(2000):
        text = "".join(rng.choices("ab", k=rng.randrange(16)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randrange(4))]
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(5)))
        chunks = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
        assert run(stops, chunks) == plain(stops, text)
