"""Work lists of attention: every position that a token sees is dealt out exactly once."""

import numpy as np
import pytest

from kernels_cpu.attention import SPLIT, generated_work, prompt_tile, prompt_work

POSITIONS = np.array([0, SPLIT - 1, SPLIT, 5 * SPLIT + 3, 5 * SPLIT + 4], np.int32)
STARTS = np.array([0, 1, 2, 3, 5], np.int32)


def splits_of(position: int, window: int | None) -> range:
    first = 0 if window is None else max(0, position - window + 1)
    return range(first // SPLIT, position // SPLIT + 1)


@pytest.mark.parametrize("window", [None, 1, SPLIT, SPLIT + 1])
@pytest.mark.parametrize("max_partials", [0, 6, 100])
def test_splits_of_every_token_are_dealt_out_once(window: int | None, max_partials: int) -> None:
    work, merges = generated_work(POSITIONS, STARTS, window, max_partials)
    seen: dict[int, list[int]] = {}
    for token, segment, split, partial in work.tolist():
        assert STARTS[segment] <= token < STARTS[segment + 1]
        splits = splits_of(POSITIONS[token], window)
        seen.setdefault(token, []).extend([split] if partial >= 0 else range(split, splits.stop))
    expected = {t: list(splits_of(p, window)) for t, p in enumerate(POSITIONS.tolist())}
    assert seen == expected
    partials = sorted(p for *_, p in work.tolist() if p >= 0)
    assert partials == list(range(len(partials)))
    assert len(partials) <= max_partials
    for token, first, count, _ in merges.tolist():
        mine = [(p, s) for t, _, s, p in work.tolist() if t == token]
        assert mine == list(zip(range(first, first + count), expected[token], strict=True))


def test_the_longest_contexts_are_split_first() -> None:
    work, merges = generated_work(POSITIONS, STARTS, None, 7)
    assert merges.tolist() == [[3, 0, 6, 0]]
    assert work[work[:, 3] < 0, 0].tolist() == [4, 2, 0, 1]


def test_a_short_context_is_never_split() -> None:
    work, merges = generated_work(POSITIONS[:2], STARTS[:3], None, 100)
    assert work.tolist() == [[0, 0, 0, -1], [1, 1, 0, -1]]
    assert len(merges) == 0


def test_no_tokens_are_no_work() -> None:
    nothing = np.zeros(0, np.int32)
    work, merges = generated_work(nothing, np.zeros(1, np.int32), None, 100)
    assert work.shape == merges.shape == (0, 4)
    assert prompt_work(nothing, np.zeros(1, np.int32), 0, 1).shape == (0, 4)


def test_prompt_tokens_are_dealt_out_once_and_long_contexts_first() -> None:
    starts = np.array([0, 1, 301, 311], np.int32)
    positions = np.concatenate([[9], np.arange(50, 350), np.arange(4000, 4010)]).astype(np.int32)
    tile = prompt_tile(3)
    work = prompt_work(positions, starts, 1, 3)
    tokens = [t for _, first, count, _ in work.tolist() for t in range(first, first + count)]
    assert sorted(tokens) == list(range(1, 311))
    assert (work[:, 2] <= tile).all()
    for segment, first, count, _ in work.tolist():
        assert starts[segment] <= first
        assert first + count <= starts[segment + 1]
    assert (np.diff(positions[work[:, 1]]) <= 0).all()
