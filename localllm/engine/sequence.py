"""One token run with its state, and what goes into the engine and comes out of it.

A sequence has known tokens and computed tokens; the engine's whole work is to let the second catch
up with the first. Tokens [0, num_prompt) have the role *prompt* for as long as the sequence lives,
the others the role *generated*: a role decides which arithmetic computes the token, also when it is
computed again.

Not here: text, arrays, which sequence runs next (scheduler.py), what a block is (blocks.py).
"""

import math
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.engine.drafts import Drafter
from localllm.engine.pooling import Pooler
from localllm.engine.prefix import BlockHash, TextHash
from localllm.models.spec import Pooling
from localllm.sampling import Sampler, SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
LogitsObserver = Callable[[int, NDArray[np.float32]], None]


class Constraint(Protocol):
    """What the next token of one sequence may be; asked on the engine thread, once per token.

    is_finished  nothing can follow: the answer ends
    """

    @property
    def is_finished(self) -> bool: ...

    def allowed(self) -> NDArray[np.uint32] | None:
        """A bit for each token of the vocabulary, as `masks.masked` reads them; None: all."""

    def accept(self, token: int) -> None:
        """Take the token that was drawn, unless it ends the answer."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a client wants computed.

    tokens        the prompt, every token that comes first (such as BOS) included
    cache_prompt  False: neither use nor feed the prefix cache
    exact         reuse only what was computed as prompt from the first token on
    salt          requests share cached prefixes only with those of the same salt
    priority      lower values go first, in the queue and when blocks run out
    deadline      `time.monotonic()` at which the request ends, wherever it is; None: never
    stop_ids      end the answer like the model's own end-of-generation tokens, on `ignore_eog` too
    num_ctx       most positions; None: as many as the engine allows
    shift         on a full context drop the older half and go on, instead of ending with "length"
    num_keep      tokens from the start that a shift keeps
    num_prompt    how many of `tokens` are prompt, the others are taken as generated; None: all
    constraint    of the new tokens, of this request alone
    pooling       nothing is generated: the end comes with a vector, made so of the hidden states
    speculate     False: compute one token after the other, guess none
    observer      is called on the engine thread with (position, float32 logits [n, vocab]) for
                  every token in order; the array is valid during the call only
    """

    request_id: str
    tokens: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_prompt: bool = True
    exact: bool = False
    salt: bytes = b""
    priority: int = 0
    deadline: float | None = None
    stop_ids: frozenset[int] = frozenset()
    num_ctx: int | None = None
    shift: bool = False
    num_keep: int = 0
    num_prompt: int | None = None
    constraint: Constraint | None = None
    pooling: Pooling | None = None
    speculate: bool = True
    observer: LogitsObserver | None = None


@dataclass(slots=True)
class Stats:
    """What a request cost. Times in seconds.

    prompt_tokens    tokens of the prompt, those found in the prefix cache included
    queue_seconds    submitted to first scheduled
    prompt_seconds   first scheduled to first new token
    decode_seconds   first new token to the end
    drafted_tokens   guesses that were checked; accepted_tokens: those that were right
    prefix_miss      why not all of the prompt was cached, in a few words; empty when all was
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    queue_seconds: float = 0.0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_preemptions: int = 0
    num_shifts: int = 0
    prefix_miss: str = ""
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class Output:
    """What one step did for one request: a token, an end, both, or progress through the prompt.

    token         None when the step gave none
    prompt_done   prompt tokens computed so far, while the prompt is not finished
    stats, error  with the finish reason
    vector        float32 [n], not normalised, with the finish reason "stop" of a pooled request
    """

    request_id: str
    token: int | None = None
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None
    finish_reason: FinishReason | None = None
    stats: Stats | None = None
    error: str | None = None
    prompt_done: int | None = None
    vector: NDArray[np.float32] | None = None


Sink = Callable[[list[Output]], None]


class Sequence:
    """A request in the engine. The scheduler and the block pool keep their state about it here.

    tables       one block table per KV group: entry p // block size holds position p
    first_held   per group: table entries before it fell out of the window and are not ours
    drafter      guesses the next tokens; None: nobody does
    chain        hash of everything up to the last published block; text_chain: of the tokens alone
    keys         of the prompt's full blocks in the prefix index; cached_depth: known when last seen
    is_urgent    waited too long: goes before all that did not, and keeps its blocks
    """

    __slots__ = (
        "arrival",
        "cached_depth",
        "chain",
        "drafter",
        "emitted",
        "finished_at",
        "first_held",
        "first_token_at",
        "is_urgent",
        "keys",
        "max_length",
        "num_accepted",
        "num_cached",
        "num_computed",
        "num_drafted",
        "num_preemptions",
        "num_prompt",
        "num_published",
        "num_shifts",
        "pooler",
        "prefix_miss",
        "request",
        "sampler",
        "sink",
        "started_at",
        "submitted_at",
        "tables",
        "text_chain",
        "tokens",
    )

    def __init__(
        self, request: Request, sampler: Sampler, sink: Sink, arrival: int, max_length: int
    ) -> None:
        self.request = request
        self.sampler = sampler
        self.pooler = None if request.pooling is None else Pooler(request.pooling)
        self.sink = sink
        self.arrival = arrival
        self.max_length = max_length
        self.tokens = list(request.tokens)
        self.num_prompt = len(self.tokens) if request.num_prompt is None else request.num_prompt
        self.num_computed = 0
        self.emitted = 0
        self.num_cached: int | None = None
        self.prefix_miss = ""
        self.is_urgent = False
        self.keys: list[bytes] | None = None
        self.cached_depth = 0
        self.num_preemptions = 0
        self.num_shifts = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.drafter: Drafter | None = None
        self.tables: list[array[int]] = []
        self.first_held: list[int] = []
        self.num_published = 0
        self.chain = BlockHash(b"")
        self.text_chain = TextHash(b"")
        self.submitted_at = time.perf_counter()
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def is_generating(self) -> bool:
        """The next token to compute has the role generated."""
        return self.num_computed >= self.num_prompt

    @property
    def deadline(self) -> float:
        """When it ends at the latest, by `time.monotonic()`."""
        return math.inf if self.request.deadline is None else self.request.deadline

    def place(self) -> str:
        """How far it has come, for a person."""
        if not self.was_admitted:
            return "in the queue"
        if not self.emitted:
            return f"after {self.num_computed} of {len(self.request.tokens)} prompt tokens"
        return f"after {self.emitted} new tokens"

    @property
    def was_admitted(self) -> bool:
        return self.num_cached is not None

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The order of those that run: the last gives its blocks back first."""
        return not self.is_urgent, self.request.priority, self.arrival

    @property
    def wants_all_rows(self) -> bool:
        return self.request.observer is not None or (
            self.pooler is not None and self.pooler.wants_all
        )

    def append(self, token: int) -> None:
        """Make a sampled token known."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.tokens.append(token)
        self.emitted += 1

    def shift(self) -> None:
        """Forget the older half of what is not kept; the rest becomes a prompt at new positions.

        The caller has released the blocks: positions change, so everything is computed again.
        """
        keep = max(0, min(self.request.num_keep, self.num_tokens - 2))
        dropped = max(1, (self.num_tokens - keep) // 2)
        del self.tokens[keep : keep + dropped]
        self.num_prompt = len(self.tokens)
        self.keys, self.cached_depth = None, 0
        self.num_shifts += 1

    def stats(self) -> Stats:
        """What the request has cost until now."""
        end = self.finished_at or time.perf_counter()
        started = self.started_at or end
        first = self.first_token_at or end
        return Stats(
            prompt_tokens=len(self.request.tokens),
            cached_tokens=self.num_cached or 0,
            generated_tokens=self.emitted,
            queue_seconds=started - self.submitted_at,
            prompt_seconds=first - started,
            decode_seconds=end - first,
            num_preemptions=self.num_preemptions,
            num_shifts=self.num_shifts,
            prefix_miss=self.prefix_miss,
            drafted_tokens=self.num_drafted,
            accepted_tokens=self.num_accepted,
        )
