"""Which sequence computes how much in the next step. Pure Python, no arrays, no clocks.

One rule, no phases: every sequence has known and computed tokens, and a step lets the second catch
up with the first under a token budget. Generated tokens come first, one for each sequence that is
decoding; prompts follow in chunks, in order of priority and arrival. When blocks run out, or when
somebody of a better priority cannot be let in, the last in that order gives its blocks
back and computes its tokens again later, each in its own role. The first can take everything, and
nobody is passed over for ever (queue.py), so every admitted request finishes.

A step has at most one segment of a sequence, and a segment has one role.

Not here: who is let in next (queue.py), ids of blocks (blocks.py), how large a chunk may be
(pace.py), tokens' values (engine.py).
Source: the catch-up rule is that of vLLM's v1 scheduler.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from localllm.engine.blocks import BlockPool
from localllm.engine.pace import SLIVER, Pace
from localllm.engine.queue import Queue
from localllm.engine.sequence import Sequence

RECOMPUTE = 32  # generated tokens of one sequence that are computed again in one step


@dataclass(slots=True)
class Segment:
    """Tokens [first, first + count) of a sequence, all of one role.

    drafts  the last of them, which are not known but guessed
    """

    sequence: Sequence
    first: int
    count: int
    is_generated: bool
    drafts: list[int] = field(default_factory=list)

    @property
    def is_last(self) -> bool:
        """After it all known tokens are computed: its last row gives the next token."""
        return self.first + self.count - len(self.drafts) == self.sequence.num_tokens

    @property
    def num_rows(self) -> int:
        if self.sequence.wants_all_rows:
            return self.count
        return 1 + len(self.drafts) if self.is_last else 0


@dataclass(slots=True)
class Step:
    """Who computes what: generated segments, then prompt segments, last those of texts to pool."""

    generated: list[Segment] = field(default_factory=list)
    prompts: list[Segment] = field(default_factory=list)
    pooled: list[Segment] = field(default_factory=list)
    num_generated: int = 0
    num_prompt: int = 0
    num_drafts: int = 0

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
    """The waiting sequences, and the running ones in order of rank.

    max_tokens, max_rows   most tokens of a step, and most rows whose logits are wanted
    max_running            most sequences that hold blocks
    fill_at_preemption     share of the pool's positions that held a token when blocks first ran out
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
        self.waiting = Queue(pool)
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.fill_at_preemption: float | None = None
        self._refused_at: tuple[int, int] | None = None
        self._extra = 0
        self._rows = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; its blocks are free at once."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.pool.release(sequence)
        else:
            self.waiting.remove(sequence)

    def plan(self, now: float = 0.0) -> Step:
        """The next step; its blocks are taken. Empty only when nothing is known to be computed.

        now   seconds, from any beginning
        """
        step = Step()
        self._make_place()
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
            self._admit(step, now)
        return step

    def commit(self, step: Step) -> None:
        """The step is computed."""
        for segment in step:
            segment.sequence.num_computed += segment.count - len(segment.drafts)
            self.pool.commit(segment.sequence)

    def draft_room(self, step: Step, segment: Segment) -> int:
        """How many guesses the segment can have, so that nobody goes short of blocks for them."""
        num_tokens = self.max_tokens - step.num_generated - step.num_prompt
        positions = self.pool.spare(segment.sequence, len(self.running))
        return min(num_tokens, self._rows, positions)

    def draft(self, step: Step, segment: Segment, drafts: list[int]) -> None:
        """Let a segment of the step compute guesses, too, as far as there is room."""
        drafts = drafts[: max(0, self.draft_room(step, segment))]
        if not drafts:
            return
        segment.drafts = drafts
        segment.count += len(drafts)
        step.num_generated += len(drafts)
        step.num_drafts += len(drafts)
        self._rows -= len(drafts)
        self.pool.grow(segment.sequence, segment.first + segment.count)

    def accept(self, sequence: Sequence) -> None:
        """A guess was right: the newest token is computed. Wrong ones are written over."""
        sequence.num_computed += 1
        self.pool.commit(sequence)

    def _make_place(self) -> None:
        """Preempt one for somebody of a better priority, for whom there was no room."""
        if not self.waiting or not self.running:
            return
        last = self.running[-1]
        is_full = len(self.running) == self.max_running or self._refused_at == self._ask
        if is_full and not last.is_urgent and self.waiting.best_priority < last.request.priority:
            self._preempt(last)

    @property
    def _ask(self) -> tuple[int, int]:
        """Unless this changes, whoever was refused need not ask again."""
        return self.waiting.num_added, self.pool.num_given_back

    def _admit(self, step: Step, now: float) -> None:
        """Let in who is next in the queue, as long as there is budget and room."""
        while self.waiting and len(self.running) < self.max_running and self._extra > 0:
            if self.running and self._refused_at == self._ask:
                return
            sequence = self.waiting.next(self.running, now)
            if sequence is None or not self._has_share(step, sequence):
                return
            if not self.pool.admit(sequence, self.max_tokens, len(self.running)):
                assert self.running, "a sequence that fits alone was refused"
                self._refused_at = self._ask
                return
            if sequence.num_cached is None:
                sequence.num_cached = sequence.num_computed
            self.waiting.let_in(sequence, now)
            insort(self.running, sequence, key=lambda s: s.rank)
            self._extend(step, sequence, is_new=True)

    def _has_share(self, step: Step, sequence: Sequence) -> bool:
        """Whether the budget leaves it something; if not, more may be cached when it does."""
        if self._extra >= SLIVER or not step.num_prompt:
            return True
        cached = self.pool.cached_depth(sequence) * self.pool.block_size
        return sequence.num_prompt - cached <= self._extra

    def _extend(self, step: Step, sequence: Sequence, *, is_new: bool = False) -> None:
        """Add the sequence's segment to the step, as long as budget and blocks allow.

        is_new   it has been let in now: others, who have their segments, keep their blocks
        """
        generated = sequence.is_generating
        end = sequence.num_tokens if generated else sequence.num_prompt
        lacking = end - sequence.num_computed
        count = self._share(step, sequence, lacking)
        if count:
            room = self.pool.room(sequence) if is_new else self._make_room(step, sequence, count)
            count = min(count, room)
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
        if self._extra <= 0 or (self._extra < SLIVER and step.num_prompt):
            return 0
        return even_chunk(sequence.num_computed, lacking, self._extra, self.pool.block_size)

    def _make_room(self, step: Step, sequence: Sequence, count: int) -> int:
        """Preempt those of lower rank until `count` tokens have room, or none is left; the room."""
        while (room := self.pool.room(sequence)) < count and self.running[-1] is not sequence:
            if self.fill_at_preemption is None:
                planned = {s.sequence: s.count for s in step}
                positions = [(s, s.num_computed + planned.get(s, 0)) for s in self.running]
                self.fill_at_preemption = self.pool.fill(positions)
            self._preempt(self.running[-1])
        return room

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks back; the sequence waits."""
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
