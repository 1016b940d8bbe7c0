"""The one thread that runs a model: it plans a step, runs it, draws tokens, tells the clients.

Any thread may `submit` and `cancel`; everything else happens on the engine thread, which sleeps on
a condition while there is nothing to do. A sink is called once per step with all outputs of the
sequences that share it, on the engine thread: it must only hand them on.

An error in a step ends the requests that were running with a clear line and empties the cache; the
thread goes on. The engine knows token ids, never text.

Source of the division of labour: the engine core of vLLM's v1.
"""

import hashlib
import logging
import math
import threading
import time
from dataclasses import dataclass

from localllm.backends import BLOCK_SIZE, Backend, Edits, StepResult
from localllm.engine.batch import BatchBuilder
from localllm.engine.blocks import BlockPool
from localllm.engine.eviction import Clock
from localllm.engine.pace import Pace
from localllm.engine.scheduler import Scheduler, Segment, Step
from localllm.engine.sequence import FinishReason, Output, Request, Sequence, Sink
from localllm.engine.speculation import Speculation
from localllm.errors import BadRequest, Busy, Cancelled, PromptTooLong
from localllm.masks import masked
from localllm.sampling import Row, Sampler, top_logprobs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engine is doing.

    kv_usage             share of the KV blocks that are in use, 0 to 1
    fill_at_preemption   share of all positions of the KV pool that held a token when blocks first
                         ran out; None: they never did
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    num_preemptions: int
    fill_at_preemption: float | None


@dataclass(frozen=True, slots=True)
class Delivery:
    """A sequence that is caught up, and the row of the result that gives its next token.

    drafts   guesses of that token and the next ones; the rows after `row` follow them
    """

    sequence: Sequence
    row: int
    drafts: list[int]


class Engine:
    """Serves requests over one backend.

    eog_ids      tokens that end an answer
    identity     what the KV depends on beside the tokens (model digest, KV type), for the cache
    num_ctx      most positions of a sequence; None: what the pool and the model hold
    max_running  most sequences in a step; max_waiting: most requests in the queue (then `Busy`)
    chunk        known tokens that each sequence computes in a step; None: prompts are cut after
                 the measured times
    clock        seconds, the clock of the requests' deadlines
    speculation  guesses tokens and has them checked several at a time; None: nothing is guessed
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eog_ids: frozenset[int] = frozenset(),
        identity: bytes = b"",
        num_ctx: int | None = None,
        max_running: int = 16,
        max_waiting: int = 512,
        chunk: int | None = None,
        clock: Clock = time.monotonic,
        speculation: Speculation | None = None,
    ) -> None:
        self.backend = backend
        self.clock = clock
        self.eog_ids = eog_ids
        self.pool = BlockPool(
            backend.num_blocks,
            [group.window for group in backend.kv_groups],
            BLOCK_SIZE,
            backend.copy_block,
            hashlib.sha256(identity).digest(),
            clock,
        )
        self.max_length = min(num_ctx or 2**31, self.pool.capacity())
        self.pace = Pace(backend.max_tokens, chunk)
        self.scheduler = Scheduler(
            self.pool,
            self.pace,
            max_tokens=backend.max_tokens,
            max_rows=backend.max_rows,
            max_running=min(max_running, backend.max_segments, backend.max_rows),
        )
        self.most_requests = self.scheduler.max_running + max_waiting
        self.speculation = speculation
        self.batches = BatchBuilder(backend, self.max_length)
        self.num_steps = 0
        self._sequences: dict[str, Sequence] = {}
        self._outbox: dict[Sink, list[Output]] = {}
        self._wake = threading.Condition()
        self._submitted: list[Sequence] = []
        self._cancelled: list[str] = []
        self._arrivals = 0
        self._next_deadline = math.inf
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> "Engine":
        self._thread.start()
        return self

    def close(self) -> None:
        """End all requests as cancelled, stop the thread, close the backend."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        self.backend.close()

    def check(self) -> None:
        """Assert that an engine which is closed holds nothing."""
        assert not self._sequences
        assert not self.scheduler.has_work
        self.pool.check()
        assert self.pool.usage() == 0

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request. Raises BadRequest, Busy, or Cancelled when the engine is closed."""
        sequence = self._sequence(request, sink)
        with self._wake:
            if self._is_closing:
                raise Cancelled("the model is being unloaded")
            # A burst that is still to be let in is not yet the queue.
            if self.num_waiting + len(self.scheduler.running) >= self.most_requests:
                raise Busy(f"the queue is full: {self.num_waiting} requests are waiting")
            self._arrivals += 1
            sequence.arrival = self._arrivals
            self._submitted.append(sequence)
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """End a request within one step; nothing happens if it has ended already."""
        with self._wake:
            self._cancelled.append(request_id)
            self._wake.notify()

    @property
    def num_waiting(self) -> int:
        return len(self._submitted) + len(self.scheduler.waiting)

    def load(self) -> EngineLoad:
        """A snapshot for reports, from any thread."""
        return EngineLoad(
            num_running=len(self.scheduler.running),
            num_waiting=self.num_waiting,
            kv_usage=self.pool.usage(),
            num_preemptions=self.scheduler.num_preemptions,
            fill_at_preemption=self.scheduler.fill_at_preemption,
        )

    def _sequence(self, request: Request, sink: Sink) -> Sequence:
        vocab_size = self.backend.spec.vocab_size
        num_tokens = len(request.tokens)
        max_length = min(request.num_ctx or self.max_length, self.max_length)
        if not num_tokens:
            raise BadRequest("the prompt is empty: there is nothing to continue")
        if not 0 <= min(request.tokens) <= max(request.tokens) < vocab_size:
            raise BadRequest(f"the prompt has token ids outside 0 to {vocab_size - 1}")
        if num_tokens + (request.params.num_predict != 0) > max_length:
            raise PromptTooLong.of(num_tokens, max_length)
        sampler = Sampler(request.params, request.tokens, vocab_size)
        sequence = Sequence(request, sampler, sink, 0, max_length)
        # Here and not on the engine's thread.
        self.pool.keys_of(sequence)
        if self.speculation is not None:
            sequence.drafter = self.speculation.drafter(request)
        return sequence

    def _run(self) -> None:
        while self._receive():
            # Who was cancelled, or out of time, need not wait for the others' step.
            self._deliver()
            try:
                self._step()
            except Exception as error:
                log.exception("a step failed")
                self._fail(f"the model failed: {error or type(error).__name__}")
            self._deliver()
        for sequence in list(self._sequences.values()):
            self._finish(sequence, "cancelled")
        self._deliver()

    def _receive(self) -> bool:
        """Take in what other threads asked for; sleep while there is nothing. False: closing."""
        with self._wake:
            while not (
                self._submitted or self._cancelled or self._is_closing or self.scheduler.has_work
            ):
                self._wake.wait()
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, []
        for sequence in submitted:
            request_id = sequence.request.request_id
            if request_id in self._sequences:
                message = f"the request id {request_id} is in use"
                self._emit(sequence, Output(request_id, finish_reason="error", error=message))
                continue
            self._sequences[request_id] = sequence
            self._next_deadline = min(self._next_deadline, sequence.deadline)
            self.scheduler.add(sequence)
        for request_id in cancelled:
            if request_id in self._sequences:
                self._finish(self._sequences[request_id], "cancelled")
        if self._next_deadline <= self.clock():
            self._expire(self.clock())
        return not self._is_closing

    def _expire(self, now: float) -> None:
        """End those whose time is over."""
        for sequence in list(self._sequences.values()):
            if sequence.deadline <= now:
                self._finish(sequence, "timeout", f"the request timed out {sequence.place()}")
        deadlines = (sequence.deadline for sequence in self._sequences.values())
        self._next_deadline = min(deadlines, default=math.inf)

    def _step(self) -> None:
        if not self.scheduler.has_work:
            return
        began = time.perf_counter()
        step = self.scheduler.plan(began)
        assert step, "there is work, but no step"
        if self.speculation is not None:
            self.speculation.plan(step, self.scheduler)
        edits: dict[int, Edits] = {}
        deliveries = self._deliveries(step, began, edits)
        result = self.backend.step(self.batches.build(step, edits))
        self.num_steps += 1
        self.scheduler.commit(step)
        if step.num_generated - step.num_drafts == len(step.generated):
            seconds = time.perf_counter() - began
            self.pace.observe(step.num_generated, step.num_prompt, seconds)
            if self.speculation is not None and not step.num_prompt:
                self.speculation.observe(step, seconds)
        self._draw(step, deliveries, edits, result)

    def _deliveries(self, step: Step, began: float, edits: dict[int, Edits]) -> list[Delivery]:
        """The rows that end in a token; fills `edits` by row."""
        deliveries = []
        row = 0
        for segment in step:
            sequence = segment.sequence
            if sequence.started_at is None:
                sequence.started_at = began
            num_rows = segment.num_rows
            row += num_rows
            if num_rows and segment.is_last and sequence.pooler is None:
                first = row - 1 - len(segment.drafts)
                for i, edited in enumerate(sequence.sampler.edits_ahead(segment.drafts)):
                    if edited is not None:
                        edits[first + i] = edited
                deliveries.append(Delivery(sequence, first, segment.drafts))
        return deliveries

    def _draw(
        self,
        step: Step,
        deliveries: list[Delivery],
        edits: dict[int, Edits],
        result: StepResult,
    ) -> None:
        """Hand out logits and progress, draw a token for each sequence that is caught up."""
        self._pool(step.pooled, result)
        row = 0
        for segment in step:
            if segment.sequence.request.observer is not None:
                self._observe(segment, result, row)
            if not segment.is_generated and not segment.is_last:
                self._emit_progress(segment)
            row += segment.num_rows
        for delivery in deliveries:
            if delivery.sequence.request.request_id in self._sequences:
                self._draw_for(delivery, edits, result)

    def _draw_for(self, delivery: Delivery, edits: dict[int, Edits], result: StepResult) -> None:
        """Draw the sequence's next token, and further ones as long as they were guessed right."""
        sequence, drafts = delivery.sequence, delivery.drafts
        sequence.num_drafted += len(drafts)
        for row, draft in enumerate([*drafts, None], start=delivery.row):
            drawn_from = Row(result, row, edits.get(row))
            if not math.isfinite(drawn_from.lse):
                self._finish(sequence, "error", "the model computed a number that is not finite")
                return
            if self._advance(sequence, drawn_from) != draft or draft is None:
                return
            sequence.num_accepted += 1
            self.scheduler.accept(sequence)

    def _pool(self, segments: list[Segment], result: StepResult) -> None:
        """Take in the hidden states; a text whose last one is there is done."""
        row = 0
        for segment in segments:
            sequence, end = segment.sequence, row + segment.num_rows
            assert sequence.pooler is not None
            first = segment.first + segment.count - segment.num_rows
            sequence.pooler.add(first, result.hidden[row:end])
            row = end
            if segment.is_last:
                output = Output(sequence.request.request_id, vector=sequence.pooler.vector())
                self._emit(sequence, output)
                self._finish(sequence, "stop", output=output)

    def _observe(self, segment: Segment, result: StepResult, row: int) -> None:
        observer = segment.sequence.request.observer
        assert observer is not None
        try:
            observer(segment.first, result.logits[row : row + segment.count])
        except Exception as error:
            log.exception("an observer failed")
            self._finish(segment.sequence, "error", f"writing the logits failed: {error}")

    def _emit_progress(self, segment: Segment) -> None:
        sequence = segment.sequence
        done = segment.first + segment.count
        self._emit(sequence, Output(sequence.request.request_id, prompt_done=done))

    def _advance(self, sequence: Sequence, row: Row) -> int | None:
        """Draw the sequence's next token; None if it does not go on from there."""
        request = sequence.request
        params = request.params
        if params.num_predict == 0:
            self._finish(sequence, "length")
            return None
        token = self._drawn(sequence, row)
        if token is None:
            return None
        output = Output(request.request_id, token)
        if params.logprobs is not None:
            output.logprob = row.raw.item(token) - row.raw_lse
            output.top_logprobs = top_logprobs(row, params.logprobs)
        sequence.append(token)
        self._emit(sequence, output)
        reason = self._end(sequence, token)
        if reason is not None:
            self._finish(sequence, reason, output=output)
            return None
        if sequence.num_tokens >= sequence.max_length:
            self._shift(sequence)
            return None
        return token

    def _drawn(self, sequence: Sequence, row: Row) -> int | None:
        """The next token, under the request's constraint; None: that failed, and ended it."""
        constraint = sequence.request.constraint
        if constraint is None:
            return sequence.sampler.draw(row)
        try:
            mask = constraint.allowed()
            if mask is not None:
                row = masked(row, mask, sequence.request.params)
            token = sequence.sampler.draw(row)
            if token not in self.eog_ids:
                constraint.accept(token)
        except Exception as error:
            log.exception("a constraint failed", extra={"number": sequence.request.request_id})
            self._finish(sequence, "error", f"the answer's format: {error}")
            return None
        return token

    def _end(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Why the answer ends with this token, if it does."""
        request = sequence.request
        if token in request.stop_ids:
            return "stop"
        constraint = request.constraint
        if constraint is not None and (constraint.is_finished or token in self.eog_ids):
            return "stop"
        if token in self.eog_ids and not request.params.ignore_eog:
            return "stop"
        if sequence.emitted == request.params.num_predict:
            return "length"
        if sequence.num_tokens >= sequence.max_length and not request.shift:
            return "length"
        return None

    def _shift(self, sequence: Sequence) -> None:
        """Drop the older half; the sequence goes on as soon as the rest is computed again."""
        self.scheduler.remove(sequence)
        sequence.shift()
        if self.speculation is not None:
            sequence.drafter = self.speculation.drafter(sequence.request)
        self.scheduler.add(sequence)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        output: Output | None = None,
    ) -> None:
        """Free the sequence's blocks and tell its client, in `output` if that is on its way."""
        sequence.finished_at = time.perf_counter()
        self.scheduler.remove(sequence)
        del self._sequences[sequence.request.request_id]
        if output is None:
            output = Output(sequence.request.request_id)
            self._emit(sequence, output)
        output.finish_reason = reason
        output.error = error
        output.stats = sequence.stats()

    def _fail(self, message: str) -> None:
        """End what was running; its KV and the cache are not to be trusted."""
        for sequence in self.scheduler.running[:] or list(self.scheduler.waiting):
            self._finish(sequence, "error", message)
        self.pool.forget()

    def _emit(self, sequence: Sequence, output: Output) -> None:
        self._outbox.setdefault(sequence.sink, []).append(output)

    def _deliver(self) -> None:
        """Call every sink that has outputs, once."""
        if not self._outbox:
            return
        outbox, self._outbox = self._outbox, {}
        for sink, outputs in outbox.items():
            try:
                sink(outputs)
            except Exception:
                log.exception("a sink failed; its requests are cancelled")
                for request_id in {o.request_id for o in outputs} & self._sequences.keys():
                    self.cancel(request_id)
