"""Which sequence computes how much in the next step. Pure Python, no arrays, no clocks.

One rule, no phases: every sequence has known and computed tokens, and a step lets the second catch
up with the first under a token budget. Generated tokens come first, one for each sequence that is
decoding; prompts follow in chunks, in order of arrival. When blocks run out the latest arrival
gives its blocks back and computes its tokens again later, each in its own role. The oldest sequence
can take everything, so every admitted request finishes.

A step has at most one segment of a sequence, and a segment has one role.

Not here: ids of blocks (blocks.py), how large a chunk may be (pace.py), tokens' values (engine.py).
Source: the catch-up rule is that of vLLM's v1 scheduler.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from localllm.engine.blocks import BlockPool
from localllm.engine.pace import FLOOR, Pace
from localllm.engine.sequence import Sequence

RECOMPUTE = 32  # generated tokens of one sequence that are computed again in one step


@dataclass(slots=True)
class Segment:
    """Tokens [first, first + count) of a sequence, all of one role."""

    sequence: Sequence
    first: int
    count: int
    is_generated: bool

    @property
    def is_last(self) -> bool:
        """After it all known tokens are computed: its last row gives the next token."""
        return self.first + self.count == self.sequence.num_tokens

    @property
    def num_rows(self) -> int:
        return self.count if self.sequence.wants_all_rows else int(self.is_last)


@dataclass(slots=True)
class Step:
    """Who computes what: generated segments, then prompt segments, last those of texts to pool."""

    generated: list[Segment] = field(default_factory=list)
    prompts: list[Segment] = field(default_factory=list)
    pooled: list[Segment] = field(default_factory=list)
    num_generated: int = 0
    num_prompt: int = 0

    def __iter__(self) -> Iterator[Segment]:
        yield from self.generated
        yield from self.prompts
        yield from self.pooled

    def __bool__(self) -> bool:
        return bool(self.generated or self.prompts or self.pooled)

    def add(self, segment: Segment) -> None:
        if segment.is_generated:
            self.generated.append(segment)
            self.num_generated += segment.count
        else:
            is_pooled = segment.sequence.pooler is not None
            (self.pooled if is_pooled else self.prompts).append(segment)
            self.num_prompt += segment.count


class Scheduler:
    """The waiting and the running sequences, both in order of arrival.

    max_tokens, max_rows   most tokens of a step, and most rows whose logits are wanted
    max_running            most sequences that hold blocks
    """

    def __init__(
        self, pool: BlockPool, pace: Pace, *, max_tokens: int, max_rows: int, max_running: int
    ) -> None:
        assert 0 < max_running <= min(max_tokens, max_rows)
        self.pool = pool
        self.pace = pace
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._refused_at: tuple[int, int] | None = None
        self._extra = 0
        self._rows = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, before the later arrivals."""
        place = len(self.waiting)
        while place and self.waiting[place - 1].arrival > sequence.arrival:
            place -= 1
        self.waiting.insert(place, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; its blocks are free at once."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.pool.release(sequence)
        else:
            self.waiting.remove(sequence)

    def plan(self) -> Step:
        """The next step; its blocks are taken. Empty only when nothing is known to be computed."""
        step = Step()
        num_decoding = sum(s.is_generating for s in self.running)
        # Each running sequence may take one token and one row; the rest is for whoever needs more.
        budget = self.max_tokens - num_decoding
        self._extra = min(self.pace.chunk(decoding=num_decoding > 0), budget)
        self._rows = self.max_rows - self.max_running
        preempted = self.num_preemptions
        i = 0
        while i < len(self.running):
            self._extend(step, self.running[i])
            i += 1
        if self.num_preemptions == preempted:
            self._admit(step)
        return step

    def commit(self, step: Step) -> None:
        """The step is computed."""
        for segment in step:
            segment.sequence.num_computed += segment.count
            self.pool.commit(segment.sequence)

    def _admit(self, step: Step) -> None:
        """Let the first in the queue in, as long as there is budget and room."""
        while self.waiting and len(self.running) < self.max_running and self._extra > 0:
            sequence = self.waiting[0]
            ask = (sequence.arrival, self.pool.num_given_back)
            if self.running and ask == self._refused_at:
                return
            if not self.pool.admit(sequence, self.max_tokens):
                assert self.running, "a sequence that fits alone was refused"
                self._refused_at = ask
                return
            if sequence.num_cached is None:
                sequence.num_cached = sequence.num_computed
            self.waiting.popleft()
            self.running.append(sequence)
            self._extend(step, sequence)

    def _extend(self, step: Step, sequence: Sequence) -> None:
        """Add the sequence's segment to the step, as long as budget and blocks allow."""
        generated = sequence.is_generating
        end = sequence.num_tokens if generated else sequence.num_prompt
        lacking = end - sequence.num_computed
        count = self._share(step, sequence, lacking)
        count = min(count, self._make_room(sequence, count)) if count else 0
        if count <= 0:
            return
        self.pool.grow(sequence, sequence.num_computed + count)
        segment = Segment(sequence, sequence.num_computed, count, generated)
        self._extra -= count - 1 if generated else count
        if sequence.pooler is None:
            self._rows -= max(0, segment.num_rows - 1)
        step.add(segment)

    def _share(self, step: Step, sequence: Sequence, lacking: int) -> int:
        """How many of its lacking tokens the budget lets the sequence compute."""
        if sequence.wants_all_rows and sequence.pooler is None:
            lacking = min(lacking, self._rows + 1)
        if self.pace.fixed is not None:
            lacking = min(lacking, self.pace.fixed)
        if sequence.is_generating:
            most = RECOMPUTE if self.pace.fixed is None else self.pace.fixed
            return min(lacking, 1 + self._extra, most)
        if lacking <= self._extra:
            return lacking
        if self._extra <= 0 or (self._extra < FLOOR and step.num_prompt):
            return 0
        return even_chunk(sequence.num_computed, lacking, self._extra, self.pool.block_size)

    def _make_room(self, sequence: Sequence, count: int) -> int:
        """Preempt later arrivals until `count` tokens have room, or none is left; the room."""
        while (room := self.pool.room(sequence)) < count and self.running[-1] is not sequence:
            self._preempt(self.running[-1])
        return room

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks back; the sequence waits, first among the later arrivals."""
        self.running.remove(sequence)
        self.pool.release(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.add(sequence)


def even_chunk(first: int, lacking: int, most: int, block_size: int) -> int:
    """A chunk of at most `most` of the lacking tokens, so that the chunks come out about equal.

    It ends at a block's end where that is possible.
    """
    num_chunks = -(-lacking // most)
    end = first + -(-lacking // num_chunks)
    aligned = -(-end // block_size) * block_size
    if aligned - first > most:
        aligned = (first + most) // block_size * block_size
    return aligned - first if aligned > first else min(most, lacking)
