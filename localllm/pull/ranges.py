"""Which bytes of a file are there, which are being fetched, and which are next.

Spans are half open: [start, stop). The lowest missing bytes are handed out first, so that the
beginning of the file grows and can be hashed while the rest arrives.
"""

from bisect import bisect_left
from collections.abc import Iterable

Span = tuple[int, int]


class Ranges:
    """The bytes of a file of `size`.

    Invariant: `done` and `taken` are sorted, disjoint spans within the file; `done` spans do not
    touch each other.
    """

    def __init__(self, size: int, done: Iterable[Span] = ()) -> None:
        self.size = size
        self.done: list[Span] = []
        self.taken: list[Span] = []
        for start, stop in done:
            self.add(start, stop)

    @property
    def num_bytes(self) -> int:
        """Bytes that are there."""
        return sum(stop - start for start, stop in self.done)

    @property
    def is_complete(self) -> bool:
        return self.num_bytes == self.size

    @property
    def prefix(self) -> int:
        """Bytes that are there from the beginning on without a gap."""
        return self.done[0][1] if self.done and self.done[0][0] == 0 else 0

    def add(self, start: int, stop: int) -> None:
        """Bytes have arrived. Raises ValueError for what is not within the file."""
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"[{start}, {stop}) is not within {self.size} bytes")
        if start == stop:
            return
        first = bisect_left(self.done, start, key=lambda span: span[1])
        last = first
        while last < len(self.done) and self.done[last][0] <= stop:
            start, stop = min(start, self.done[last][0]), max(stop, self.done[last][1])
            last += 1
        self.done[first:last] = [(start, stop)]

    def take(self, most: int) -> Span | None:
        """The next bytes to fetch, at most `most`: nobody else gets them until `release`."""
        at = 0
        for start, stop in (*sorted((*self.done, *self.taken)), (self.size, self.size)):
            if at < start:
                span = at, min(at + most, start)
                self.taken = sorted((*self.taken, span))
                return span
            at = max(at, stop)
        return None

    def release(self, span: Span) -> None:
        """Whoever took a span has stopped; what it did not add is to be fetched again."""
        self.taken.remove(span)

    def cut(self, at: int) -> None:
        """Nothing from `at` on is there any more."""
        self.done = [(start, min(stop, at)) for start, stop in self.done if start < at]

    def clear(self) -> None:
        """Nothing is there any more."""
        self.done = []
