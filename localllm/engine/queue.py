"""The waiting sequences, and which of them is let in next. Pure Python, no clocks.

The lowest `priority` value goes first. Among equals go those that have run before (they gave their
blocks back, and somebody is reading their answer), then those of whose salt the fewest run, so that
nobody's burst keeps others out, then those of which most is cached, so that requests with a common
prefix run while it is hot, then the earliest. A sequence whose next blocks a running one is
computing lets others pass until they are there.

Nobody waits for ever: when the one that waits longest has seen `PATIENCE` later arrivals go first,
or has been passed over `PATIENCE_SECONDS` ago, it is next, whatever its priority, and keeps its
blocks from then on. Then the count begins anew for the one that waits longest now.

Not here: whether there is room for it (scheduler.py).
Source: longest prefix first as in SGLang's scheduler; priorities have vLLM's meaning.
"""

from collections import Counter
from collections.abc import Collection, Iterator

from localllm.engine.blocks import BlockPool
from localllm.engine.sequence import Sequence

PATIENCE = 16
PATIENCE_SECONDS = 10.0
# Positions that another must be computing for it to be worth waiting for them.
WORTH_WAITING = 128


class Queue:
    """Waiting sequences by arrival. `num_added` counts arrivals, those that come back too."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.num_added = 0
        self._line: list[Sequence] = []
        self._priorities: Counter[int] = Counter()
        self._num_passed = 0
        self._passed_at = 0.0

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    @property
    def best_priority(self) -> int:
        """The lowest value among those that wait; somebody does."""
        return min(self._priorities)

    def add(self, sequence: Sequence) -> None:
        """Put the sequence before the later arrivals."""
        place = len(self._line)
        while place and self._line[place - 1].arrival > sequence.arrival:
            place -= 1
        self._line.insert(place, sequence)
        self._priorities[sequence.request.priority] += 1
        self.num_added += 1

    def remove(self, sequence: Sequence) -> None:
        if sequence is self._line[0]:
            self._num_passed = 0
        self._line.remove(sequence)
        priority = sequence.request.priority
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]

    def let_in(self, sequence: Sequence, now: float) -> None:
        """Take the sequence out, past those that came before it."""
        if sequence is not self._line[0]:
            if not self._num_passed:
                self._passed_at = now
            self._num_passed += 1
        self.remove(sequence)

    def next(self, running: Collection[Sequence], now: float) -> Sequence | None:
        """Who should be let in, if anybody; `now` is in seconds."""
        if not self._line:
            return None
        oldest = self._line[0]
        waited = self._num_passed > 0 and now - self._passed_at >= PATIENCE_SECONDS
        if waited or self._num_passed >= PATIENCE:
            oldest.is_urgent = True
            return oldest
        prompts = [s for s in running if s.num_computed < s.num_prompt and s.keys]
        candidates = (s for s in self._line if not (prompts and self._is_coming(s, prompts)))
        num_running = Counter(s.request.salt for s in running)

        def rank(s: Sequence) -> tuple[bool, int, bool, int, int, int]:
            depth = 0 if s.was_admitted else self.pool.cached_depth(s)
            request, is_new = s.request, not s.was_admitted
            share = num_running[request.salt]
            return not s.is_urgent, request.priority, is_new, share, -depth, s.arrival

        return min(candidates, key=rank, default=None)

    def _is_coming(self, sequence: Sequence, prompts: list[Sequence]) -> bool:
        """One of the running prompts is computing what the sequence would have to compute first."""
        keys, size = self.pool.keys_of(sequence), self.pool.block_size
        depth = self.pool.cached_depth(sequence)
        last = depth + WORTH_WAITING // size - 1
        return last < len(keys) and any(
            s.keys and last < len(s.keys) and s.keys[last] == keys[last]
            for s in prompts
            if s.num_computed < (depth + 1) * size
        )
