"""Keeping an engine under load: so many requests at once, some of which are cancelled midway."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from localllm.backends import BackendOptions
from localllm.backends.cpu.backend import CpuBackend
from localllm.engine.engine import Engine
from localllm.engine.sequence import Output, Request
from localllm.engine.speculation import Speculation, StepCost
from localllm.gguf import GgufFile
from localllm.models import read_spec

PATIENCE = 600
AT_ONCE = 16

Entry = tuple[int | None, float | None, tuple[tuple[int, float], ...]]


@dataclass
class Answer:
    """What came back for one request: (token, log-probability, alternatives) in order."""

    entries: list[Entry] = field(default_factory=list)
    reason: str | None = None
    error: str | None = None
    cached_tokens: int = 0
    num_preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def tokens(self) -> list[int | None]:
        return [token for token, _, _ in self.entries]

    def take(self, output: Output) -> None:
        if output.token is not None:
            alternatives = tuple(output.top_logprobs or ())
            self.entries.append((output.token, output.logprob, alternatives))
        if output.finish_reason is not None:
            self.reason, self.error = output.finish_reason, output.error
            if output.stats is not None:
                self.cached_tokens = output.stats.cached_tokens
                self.num_preemptions = output.stats.num_preemptions
                self.drafted_tokens = output.stats.drafted_tokens
                self.accepted_tokens = output.stats.accepted_tokens


class FreeGuesses(StepCost):
    """Takes longer steps for free, so that whatever can be guessed is."""

    def seconds(self, num_tokens: int) -> float:
        return 1.0


def eager() -> Speculation:
    speculation = Speculation()
    speculation.cost = FreeGuesses()
    return speculation


@dataclass(frozen=True)
class Task:
    """A request, and after how many tokens its client leaves (None: it stays)."""

    request: Request
    leaves_after: int | None = None


@contextmanager
def opened(file: GgufFile, blocks: int, *, max_length: int = 512, **options) -> Iterator[Engine]:
    """A fresh engine; `blocks` of the pool of each KV group. Its pool is checked at the end."""
    spec = read_spec(file)
    sizes = BackendOptions((blocks,) * len(spec.kv_groups), -(-max_length // 32) + 1, threads=2)
    engine = Engine(CpuBackend(file, spec, sizes), num_ctx=max_length, **options)
    engine.start()
    try:
        yield engine
        assert not engine.scheduler.has_work
        engine.pool.check()
        assert engine.pool.usage() == 0
    finally:
        engine.close()


class Crowd:
    """Serves chains of requests, each made from the answer before it, `AT_ONCE` chains at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[str, Answer] = {}
        self._leaving: dict[str, int] = {}
        self._changed = threading.Condition()

    def run(self, tasks: Iterable[Task]) -> dict[str, Answer]:
        """Single requests."""
        return self.run_chains(iter([task]) for task in tasks)

    def run_chains(self, chains: Iterable[Iterator[Task]]) -> dict[str, Answer]:
        """Advance every chain when its request has ended; an ended chain makes room for the next."""
        waiting = iter(chains)
        running: dict[str, Iterator[Task]] = {}
        while True:
            while len(running) < AT_ONCE and (chain := next(waiting, None)) is not None:
                self._advance(chain, running)
            if not running:
                return self.answers
            for request_id in self._ended(running):
                self._advance(running.pop(request_id), running)

    def _advance(self, chain: Iterator[Task], running: dict[str, Iterator[Task]]) -> None:
        task = next(chain, None)
        if task is None:
            return
        request_id = task.request.request_id
        self.answers[request_id] = Answer()
        if task.leaves_after is not None:
            self._leaving[request_id] = task.leaves_after
        running[request_id] = chain
        self.engine.submit(task.request, self._take)
        if task.leaves_after == 0:
            self.engine.cancel(request_id)

    def _take(self, outputs: list[Output]) -> None:
        """The sink, on the engine's thread."""
        with self._changed:
            for output in outputs:
                answer = self.answers[output.request_id]
                answer.take(output)
                if len(answer.entries) == self._leaving.get(output.request_id):
                    self.engine.cancel(output.request_id)
            self._changed.notify()

    def _ended(self, running: dict[str, Iterator[Task]]) -> list[str]:
        """Wait until at least one has ended."""

        def ended() -> list[str]:
            return [i for i in running if self.answers[i].reason is not None]

        with self._changed:
            assert self._changed.wait_for(ended, PATIENCE)
            return ended()


def alone(file: GgufFile, request: Request, *, max_length: int = 512, **options) -> Answer:
    """The answer on a fresh engine with the cache off."""
    blocks = -(-max_length // 32) + 1
    with opened(file, blocks, max_length=max_length, **options) as engine:
        answers = Crowd(engine).run([Task(replace(request, cache_prompt=False))])
    return answers[request.request_id]


def compare(answer: Answer, expected: Answer) -> None:
    """The same bits; of a cancelled request, as far as it came."""
    if answer.reason == "cancelled":
        assert answer.entries == expected.entries[: len(answer.entries)]
        return
    assert answer.error is None
    assert answer.reason == expected.reason
    assert answer.entries == expected.entries
