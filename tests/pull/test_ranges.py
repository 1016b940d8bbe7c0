"""Which bytes are there: compared with a plain set of numbers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.pull.ranges import Ranges

SIZES = st.integers(0, 40)


@st.composite
def sizes_and_spans(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    size = draw(SIZES)
    ends = st.tuples(st.integers(0, size), st.integers(0, size))
    return size, [(min(e), max(e)) for e in draw(st.lists(ends, max_size=12))]


@given(sizes_and_spans())
def test_added_spans_are_a_set_of_bytes(case: tuple[int, list[tuple[int, int]]]) -> None:
    size, spans = case
    ranges = Ranges(size, spans)
    there = {n for start, stop in spans for n in range(start, stop)}
    assert {n for start, stop in ranges.done for n in range(start, stop)} == there
    assert ranges.num_bytes == len(there)
    assert ranges.is_complete == (len(there) == size)
    assert ranges.prefix == next((n for n in range(size + 1) if n not in there), size)
    edges = [edge for span in ranges.done for edge in span]
    assert edges == sorted(set(edges)), "spans are sorted and do not touch"


@settings(max_examples=30, deadline=None)
@given(sizes_and_spans(), st.integers(1, 20), st.data())
def test_takers_get_every_missing_byte_once(
    case: tuple[int, list[tuple[int, int]]], most: int, data: st.DataObject
) -> None:
    """Takers stop early at will and let go: what they did not add is handed out again."""
    size, spans = case
    ranges = Ranges(size, spans)
    held: list[tuple[int, int]] = []
    for _ in range(10_000):
        if held and data.draw(st.booleans()):
            start, stop = held.pop(data.draw(st.integers(0, len(held) - 1)))
            ranges.add(start, data.draw(st.integers(min(start + 1, stop), stop)))
            ranges.release((start, stop))
        span = ranges.take(most)
        if span is None:
            if not held:
                break
            continue
        assert 0 < span[1] - span[0] <= most
        there = {n for start, stop in (*ranges.done, *held) for n in range(start, stop)}
        assert there.isdisjoint(range(*span))
        assert set(range(span[0])) <= there, "the lowest missing bytes come first"
        held.append(span)
    assert ranges.is_complete


@pytest.mark.parametrize("span", [(-1, 2), (3, 2), (9, 11), (11, 11)])
def test_spans_outside_the_file_are_refused(span: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is not within 10 bytes"):
        Ranges(10, [span])
