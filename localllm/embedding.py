"""From texts to the vectors that stand for them, through the engine like any request.

Every text is a sequence of its own. As many of one request run at once as the engine runs at all,
the others follow as these end, so that a long list never fills the queue. A text's vector is the
same bits alone and in any list.

Nothing is cut in silence: a text that is too long is refused with both numbers or, where the
request allows it, loses its end, and the result says how many tokens. Control tokens in a text stay
text.

Not here: which hidden states make a vector (engine/pooling.py), the wire.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localllm.engine.engine import Engine
from localllm.engine.sequence import Output, Request, Stats
from localllm.errors import BadRequest, Busy, Cancelled, LocalLLMError, TimedOut
from localllm.models.spec import Pooling
from localllm.prompts import PromptBuilder
from localllm.sampling import SamplingParams

log = logging.getLogger(__name__)

Floats = NDArray[np.float32]
NOTHING = SamplingParams(num_predict=0)


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """A request for one vector a text.

    truncate     cut the end of a text that is too long, instead of refusing
    num_ctx      most tokens of a text, BOS and EOS included; None: the model's limit
    dimensions   only so many values from the first; 0, or more than there are: all
    normalise    to length one, after that
    salt, priority, deadline   as in `engine.Request`
    """

    request_id: str
    texts: Sequence[str]
    truncate: bool = True
    num_ctx: int | None = None
    dimensions: int = 0
    normalise: bool = True
    salt: bytes = b""
    priority: int = 0
    deadline: float | None = None


@dataclass(slots=True)
class Embedded:
    """The end of a request: a vector for each text, in order, or an error.

    vectors         float32 [texts, n]
    dropped_tokens  cut from the end of each text
    """

    request_id: str
    vectors: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    dropped_tokens: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    error: LocalLLMError | None = None


EmbedSink = Callable[[Embedded], None]


class Work:
    """One running request. Its lock is held by whoever changes it: the caller or the engine."""

    def __init__(
        self, request: EmbedRequest, sink: EmbedSink, tokens: list[list[int]], dropped: list[int]
    ) -> None:
        self.request = request
        self.sink = sink
        self.tokens = tokens
        self.result = Embedded(request.request_id, dropped_tokens=dropped)
        self.vectors: dict[int, Floats] = {}
        self.running: set[int] = set()
        self.num_submitted = 0
        self.is_over = False
        self.started = time.perf_counter()
        self.lock = threading.Lock()

    def take(self, number: int, output: Output) -> None:
        """A text is done."""
        self.running.discard(number)
        if output.stats is not None:
            add_stats(self.result.stats, output.stats)
        if output.finish_reason == "cancelled":
            raise Cancelled("the request was cancelled")
        if output.finish_reason == "timeout":
            raise TimedOut(output.error)
        if output.vector is None:
            raise LocalLLMError(output.error or "the model failed")
        self.vectors[number] = shaped(output.vector, self.request)

    def finish(self, error: LocalLLMError | None = None) -> None:
        """Tell the client, once."""
        if self.is_over:
            return
        self.is_over = True
        self.result.error = error
        if error is None and self.vectors:
            self.result.vectors = np.stack([self.vectors[i] for i in range(len(self.tokens))])
        self.result.stats.prompt_seconds = time.perf_counter() - self.started
        self.sink(self.result)


class Embeddings:
    """All running requests for vectors of one engine."""

    def __init__(self, engine: Engine, prompts: PromptBuilder, pooling: Pooling) -> None:
        self.engine = engine
        self.prompts = prompts
        self.pooling: Pooling = pooling
        self._works: dict[str, Work] = {}
        # One object, so that the engine sees one sink.
        self._sink = self._take

    def start(self, request: EmbedRequest, sink: EmbedSink) -> None:
        """Begin; `sink` is called once, on the engine's thread, or here if there is no text.

        Raises BadRequest for a text that is too long, and what `Engine.submit` raises.
        """
        limit = self._limit(request)
        pairs = [self._fitted(number, limit, request) for number in range(len(request.texts))]
        work = Work(request, sink, [ids for ids, _ in pairs], [dropped for _, dropped in pairs])
        num_cut = sum(dropped > 0 for _, dropped in pairs)
        if num_cut:
            log.warning("%d of %d texts were cut to %d tokens", num_cut, len(pairs), limit)
        if not pairs:
            work.finish()
            return
        self._works[request.request_id] = work
        try:
            with work.lock:
                self._submit(work)
        except BaseException:
            self._end(work)
            raise

    def cancel(self, request_id: str) -> bool:
        """End a request as cancelled; False if none of that name is running."""
        work = self._works.get(request_id)
        if work is None:
            return False
        with work.lock:
            self._end(work)
            work.finish(Cancelled("the request was cancelled"))
        return True

    def _limit(self, request: EmbedRequest) -> int:
        """Most tokens of a text."""
        most = self.engine.max_length
        if request.num_ctx is None:
            return most
        if request.num_ctx > most:
            log.warning("num_ctx %d: this model has %d positions", request.num_ctx, most)
        return min(request.num_ctx, most)

    def _fitted(self, number: int, limit: int, request: EmbedRequest) -> tuple[list[int], int]:
        """A text's ids with the BOS and EOS that the model wants, and how many had to go."""
        tokenizer = self.prompts.tokenizer
        start, end = tokenizer.bos_id, tokenizer.eos_id
        before = [start] if tokenizer.add_bos and start is not None else []
        after = [end] if tokenizer.add_eos and end is not None else []
        text = request.texts[number]
        fewest = tokenizer.fewest_tokens(text)
        if fewest > limit and not request.truncate:
            raise _too_long(number, f"at least {fewest}", limit)
        ids = self.prompts.encode(text)
        if not ids and not before and not after:
            # There must be something to compute; what begins or ends a text says the least.
            ids = [next(i for i in (start, end, 0) if i is not None)]
        num_tokens = len(before) + len(ids) + len(after)
        excess = num_tokens - limit
        if excess <= 0:
            return before + ids + after, 0
        if not request.truncate:
            raise _too_long(number, str(num_tokens), limit)
        if excess >= len(ids):
            raise BadRequest(
                f"input after truncation exceeds maximum context length: {limit} positions leave "
                "no room for text"
            )
        return before + ids[:-excess] + after, excess

    def _submit(self, work: Work) -> None:
        """Have as many texts running as the engine runs at once."""
        while work.num_submitted < len(work.tokens):
            if len(work.running) >= self.engine.scheduler.max_running:
                return
            number = work.num_submitted
            request = Request(
                f"{work.request.request_id}/{number}",
                work.tokens[number],
                NOTHING,
                # States that are all wanted must all be computed.
                cache_prompt=self.pooling == "last",
                exact=True,
                salt=work.request.salt,
                priority=work.request.priority,
                deadline=work.request.deadline,
                pooling=self.pooling,
            )
            try:
                self.engine.submit(request, self._sink)
            except Busy:
                if work.running:
                    return
                raise
            work.running.add(number)
            work.num_submitted += 1

    def _take(self, outputs: list[Output]) -> None:
        """Called by the engine once a step."""
        for output in outputs:
            request_id, _, number = output.request_id.rpartition("/")
            work = self._works.get(request_id)
            if work is None or output.finish_reason is None:
                continue
            with work.lock:
                self._advance(work, int(number), output)

    def _advance(self, work: Work, number: int, output: Output) -> None:
        """Take what a text has become and start the next, or end the request."""
        if work.is_over:
            return
        error = None
        try:
            work.take(number, output)
            self._submit(work)
        except LocalLLMError as found:
            error = found
        if error is not None or len(work.vectors) == len(work.tokens):
            self._end(work)
            work.finish(error)

    def _end(self, work: Work) -> None:
        """Forget a request, and cancel what of it still runs."""
        self._works.pop(work.request.request_id, None)
        for number in work.running:
            self.engine.cancel(f"{work.request.request_id}/{number}")


def shaped(vector: Floats, request: EmbedRequest) -> Floats:
    """The vector as it was asked for. Raises BadRequest if it has values that are not finite."""
    if not np.isfinite(vector).all():
        raise BadRequest("embedding contains NaN or Inf values")
    if request.dimensions > 0:
        vector = vector[: request.dimensions]
    if not request.normalise:
        return vector
    wide = vector.astype(np.float64)
    length = np.sqrt((wide * wide).sum())
    return (wide / length).astype(np.float32) if length > 0 else vector


def add_stats(total: Stats, one: Stats) -> None:
    """Add a text's costs; the times of texts that ran at once are not sums."""
    total.prompt_tokens += one.prompt_tokens
    total.cached_tokens += one.cached_tokens
    total.num_preemptions += one.num_preemptions
    total.queue_seconds = max(total.queue_seconds, one.queue_seconds)


def _too_long(number: int, num_tokens: str, limit: int) -> BadRequest:
    return BadRequest(
        f"the input length exceeds the context length: input {number} has {num_tokens} tokens, "
        f"the context holds {limit}"
    )
