"""Sending a workload to a server, at a rate or so many at once, and recording what comes back.

An open loop (`rate`) starts conversations at the times of a Poisson process, whatever the server
does; a closed one (`concurrency`) starts the next when one ends. The turns of a conversation follow
each other at once.

Not here: what is asked (workload.py), what the records mean (records.py), what is shown (cli/).
"""

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

from localllm.address import Address
from localllm.errors import BadRequest, LocalLLMError
from localllm.traffic.records import Goal, Record, Summary
from localllm.traffic.stream import CutOff, Refused, post_lines
from localllm.traffic.wire import Ask, Dialect, Message
from localllm.traffic.workload import Conversation, Scale, Workload, words

CALIBRATION_WORDS = (16, 64)  # few, for small contexts


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send where.

    rate         conversations begun per second; None: `concurrency` of them at once
    requests     most requests; None: begin conversations for `seconds`
    """

    server: Address
    dialect: Dialect
    model: str
    workload: Workload
    rate: float | None = None
    concurrency: int = 4
    requests: int | None = 32
    seconds: float | None = None
    ignore_eos: bool = False
    api_key: str | None = None
    goal: Goal = field(default_factory=Goal)

    def __post_init__(self) -> None:
        if self.rate is not None and not self.rate > 0:
            raise BadRequest("--rate must be above 0")
        if self.seconds is not None and not self.seconds > 0:
            raise BadRequest("--seconds must be above 0")
        if self.concurrency < 1 or (self.requests is not None and self.requests < 1):
            raise BadRequest("--concurrency and --requests must be at least 1")


class Traffic:
    """One run: `prepare`, then `run`, which may be cancelled; `summary` at any time."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.scale = Scale()
        self.records: list[Record] = []
        self.began_at = 0.0
        self.ended_at: float | None = None
        self._conversations: Iterator[tuple[int, Conversation]] = iter(())
        self._num_promised = 0

    async def prepare(self) -> None:
        """Have the model loaded, and learn how many tokens words are. Raises LocalLLMError."""
        rng = random.Random(f"{self.plan.workload.seed} calibration")
        lengths = []
        for count in CALIBRATION_WORDS:
            message = {"role": "user", "content": words(rng, count)}
            record = Record(0, 0, self._now())
            await self._send(record, Ask(self.plan.model, (message,), 1))
            if record.error is not None:
                raise LocalLLMError(f"{self.plan.server}: {record.message or record.error}")
            lengths.append((count, record.prompt_tokens or 0))
        self.scale = Scale.fit(*lengths)
        self._conversations = enumerate(self.plan.workload.conversations(self.scale))

    async def run(self) -> None:
        """Send everything. When it is cancelled, what was measured stays."""
        self.began_at = time.perf_counter()
        self.records.clear()
        try:
            if self.plan.rate is None:
                workers = (self._work() for _ in range(self.plan.concurrency))
                await asyncio.gather(*workers)
            else:
                await self._arrive(self.plan.rate)
        finally:
            self.ended_at = self._now()

    @property
    def is_running(self) -> bool:
        return self.began_at > 0 and self.ended_at is None

    def summary(self) -> Summary:
        """What is known by now."""
        now = self._now() if self.began_at else 0.0
        duration = now if self.ended_at is None else self.ended_at
        return Summary.of(self.records, duration, self.plan.goal)

    def _now(self) -> float:
        return time.perf_counter() - self.began_at

    def _next(self) -> tuple[int, Conversation] | None:
        """The next conversation, cut to the requests that are left; None: enough were begun."""
        plan = self.plan
        if plan.seconds is not None and self._now() >= plan.seconds:
            return None
        number, conversation = next(self._conversations)
        if plan.requests is None:
            return number, conversation
        left = plan.requests - self._num_promised
        turns = conversation.turns[:left]
        self._num_promised += len(turns)
        return (number, Conversation(conversation.system, turns)) if turns else None

    async def _work(self) -> None:
        while (found := self._next()) is not None:
            await self._converse(*found)

    async def _arrive(self, rate: float) -> None:
        """Begin conversations at random times, however many are running."""
        rng = random.Random(f"{self.plan.workload.seed} arrivals")
        at = 0.0
        async with asyncio.TaskGroup() as group:
            while True:
                at += rng.expovariate(rate)
                if self.plan.seconds is not None and at >= self.plan.seconds:
                    return
                await asyncio.sleep(max(0.0, at - self._now()))
                found = self._next()
                if found is None:
                    return
                group.create_task(self._converse(*found))

    async def _converse(self, number: int, conversation: Conversation) -> None:
        """One conversation; a turn that fails ends it."""
        said: list[Message] = []
        if conversation.system:
            said.append({"role": "system", "content": conversation.system})
        for turn_number, turn in enumerate(conversation.turns):
            said.append({"role": "user", "content": turn.text})
            record = Record(number, turn_number, self._now())
            self.records.append(record)
            ask = Ask(self.plan.model, tuple(said), turn.max_tokens, self.plan.ignore_eos)
            answer = await self._send(record, ask)
            if record.error is not None:
                return
            said.append({"role": "assistant", "content": answer})

    async def _send(self, record: Record, ask: Ask) -> str:
        """Send one request and fill its record; the answer's text."""
        texts: list[str] = []
        try:
            await self._receive(record, ask, texts)
        except Refused as error:
            _fail(record, f"HTTP {error.status}", str(error))
        except CutOff as error:
            _fail(record, "cut off", str(error))
        except (ValueError, AttributeError, TypeError) as error:
            _fail(record, "malformed", f"an answer in another format: {error}")
        except OSError as error:
            _fail(record, "no connection", str(error) or type(error).__name__)
        record.ended_at = self._now()
        return "".join(texts)

    async def _receive(self, record: Record, ask: Ask, texts: list[str]) -> None:
        plan = self.plan
        is_over = False
        lines = post_lines(plan.server, plan.dialect.path, plan.dialect.body(ask), plan.api_key)
        async with aclosing(lines) as stream:  # type: ignore[type-var]
            async for line in stream:
                event = plan.dialect.read(line)
                if event is None:
                    continue
                if event.error is not None:
                    _fail(record, "error in the stream", event.error)
                    return
                if event.text:
                    record.pieces.append(self._now())
                    texts.append(event.text)
                for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
                    if getattr(event, name) is not None:
                        setattr(record, name, getattr(event, name))
                is_over = is_over or event.is_last
        if not is_over:
            raise CutOff("the stream ended without its last line")


def _fail(record: Record, kind: str, message: str) -> None:
    record.error, record.message = kind, message


async def run_until(traffic: Traffic, stopped: asyncio.Event) -> bool:
    """Prepare and run, until it is done or `stopped`; False: stopped."""

    async def whole() -> None:
        await traffic.prepare()
        await traffic.run()

    running = asyncio.ensure_future(whole())
    waiting = asyncio.ensure_future(stopped.wait())
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if running.done():
        running.result()
        return True
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    return False
