"""Speed of a model: prompt and decode rates, by batch size and depth, through the whole engine.

    pp512         512 prompt tokens a request               pp512@d4096   after 4096 tokens of context
    tg128         128 generated tokens of one sequence      tg128b8       of 8 sequences, in total

Tokens are random, drawing is greedy, end tokens are ignored. Every row is repeated after a warm-up;
the prefix cache is off but for laying down the context in front of a deep prompt.
"""

import json
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from localllm.config import Settings
from localllm.engine.engine import Engine
from localllm.engine.pace import FLOOR
from localllm.engine.sequence import Output, Request, Stats
from localllm.errors import BadRequest, LocalLLMError
from localllm.gguf import GgufFile
from localllm.opening import EngineOptions, Progress, open_engine
from localllm.sampling import SamplingParams

WARM_UP_TOKENS = 8
FIRST_TOKEN_PROMPT = 16


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure; a row for every combination, none for a count of 0.

    prompt, generate   tokens of a prompt and of an answer
    depths             tokens already in the context
    batch_sizes        sequences that decode at once
    """

    prompt: int = 512
    generate: int = 128
    depths: Sequence[int] = (0,)
    batch_sizes: Sequence[int] = (1,)
    repetitions: int = 5
    backend: str = "cpu"
    read_bandwidth: bool = False

    def __post_init__(self) -> None:
        counts = (self.prompt, self.generate, *self.depths)
        if min(counts) < 0 or self.repetitions < 1 or min(self.batch_sizes, default=1) < 1:
            raise BadRequest("bench: counts must not be negative, batch sizes and repetitions >= 1")

    @property
    def longest(self) -> int:
        """Positions of a sequence; early ones of a batch decode while the others' prompts run."""
        depth = max(self.depths)
        early = max(self.batch_sizes) * (depth // FLOOR + 2)
        longest = max(self.prompt, self.generate + early, FIRST_TOKEN_PROMPT)
        return depth + longest + WARM_UP_TOKENS


@dataclass(frozen=True, slots=True)
class Row:
    """Median rate of the repetitions; `spread` is the largest distance of one from it."""

    test: str
    tokens_per_second: float
    spread: float


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Reading exactly the bytes that a decode step reads, and how near decoding comes to that.

    ratio   bytes that decoding one sequence moves per second, as a share of the read speed
    """

    bytes_per_step: int
    bytes_per_second: float
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """All rows of one run; times in seconds."""

    model: str
    backend: str
    threads: int | None
    weights: str
    load_seconds: float
    first_token_seconds: float
    rows: list[Row] = field(default_factory=list)
    read_bandwidth: Bandwidth | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def to_markdown(self) -> str:
        lines = [
            f"{self.model}: {self.backend} backend, loaded in {self.load_seconds:.2f} s, first "
            f"token after {self.first_token_seconds:.3f} s",
            "",
            "| test | tokens/s | spread |",
            "| --- | ---: | ---: |",
        ]
        lines += [f"| {r.test} | {r.tokens_per_second:.1f} | {r.spread:.1f} |" for r in self.rows]
        bandwidth = self.read_bandwidth
        if bandwidth is not None:
            share = (
                "" if bandwidth.ratio is None else f"; decoding moves {bandwidth.ratio:.2f} of it"
            )
            gigabytes, speed = bandwidth.bytes_per_step / 1e9, bandwidth.bytes_per_second / 1e9
            lines += ["", f"a step reads {gigabytes:.3f} GB, readable at {speed:.1f} GB/s{share}"]
        return "\n".join(lines)


def bench(
    model: Path, options: BenchOptions, settings: Settings, progress: Progress | None = None
) -> Report:
    """Measure. Raises LocalLLMError if the model cannot run what is asked for."""
    began = time.perf_counter()
    with GgufFile.open(model) as file:
        parallel = max(options.batch_sizes)
        settings = replace(settings, num_parallel=parallel)
        engine_options = EngineOptions(options.backend, room=options.longest)
        engine = open_engine(file, settings, engine_options, progress=progress)
        try:
            engine.start()
            load_seconds = time.perf_counter() - began
            if engine.max_length < options.longest:
                raise BadRequest(
                    f"bench needs {options.longest} positions, {model.name} has {engine.max_length}"
                )
            probe = Probe(engine)
            first = probe.prompt(FIRST_TOKEN_PROMPT, 0)
            rows = measure(probe, options)
            threads = getattr(engine.backend, "num_threads", settings.threads)
            return Report(
                model=model.name,
                backend=options.backend,
                threads=threads,
                weights=settings.weights,
                load_seconds=load_seconds,
                first_token_seconds=first,
                rows=rows,
                read_bandwidth=bandwidth_of(engine, rows) if options.read_bandwidth else None,
            )
        finally:
            engine.close()


def measure(probe: "Probe", options: BenchOptions) -> list[Row]:
    """Every row, after a warm-up that lets the chunk sizes settle."""
    if options.prompt:
        probe.prompt(options.prompt, 0)
        probe.prompt(options.prompt, 0)
    if options.generate:
        probe.decode(WARM_UP_TOKENS, 0, 1)
    rows = []
    for depth in options.depths:
        suffix = f"@d{depth}" if depth else ""
        if options.prompt:
            seconds = repeat(options, partial(probe.prompt, options.prompt, depth))
            rows.append(row_of(f"pp{options.prompt}{suffix}", options.prompt, seconds))
        for size in options.batch_sizes if options.generate else ():
            seconds = repeat(options, partial(probe.decode, options.generate, depth, size))
            batch = f"b{size}" if size > 1 else ""
            name = f"tg{options.generate}{batch}{suffix}"
            rows.append(row_of(name, options.generate * size, seconds))
    return rows


def repeat(options: BenchOptions, run: Callable[[], float]) -> list[float]:
    return [run() for _ in range(options.repetitions)]


def row_of(test: str, num_tokens: int, seconds: list[float]) -> Row:
    rates = [num_tokens / s for s in seconds]
    middle = statistics.median(rates)
    return Row(test, middle, max(abs(rate - middle) for rate in rates))


def bandwidth_of(engine: Engine, rows: list[Row]) -> Bandwidth | None:
    """The backend's own measurement, if it has one, beside the rate of the plain decode row."""
    read = getattr(engine.backend, "read_bandwidth", None)
    if read is None:
        return None
    num_bytes, speed = read()
    plain = [r for r in rows if r.test.startswith("tg") and r.test[2:].isdigit()]
    ratio = plain[0].tokens_per_second * num_bytes / speed if plain else None
    return Bandwidth(num_bytes, speed, ratio)


class Probe:
    """Runs timed requests on an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rng = np.random.default_rng(0)
        self.num_requests = 0

    def prompt(self, count: int, depth: int) -> float:
        """Seconds for `count` prompt tokens after `depth` others, the first new token included."""
        tokens = self._random(depth + count)
        salt = str(self.num_requests).encode()
        if depth:
            self._run(tokens[:depth], 0, salt)
        stats = self._run(tokens, 1, salt if depth else None)
        if stats.cached_tokens < depth:
            raise LocalLLMError(f"the pool is too small for a context of {depth} tokens")
        return stats.prompt_seconds * count / (len(tokens) - stats.cached_tokens)

    def decode(self, count: int, depth: int, size: int) -> float:
        """Seconds for `count` steps of `size` sequences that have `depth` tokens of context each."""
        clock = DecodeClock(size, count * size)
        requests = [self._request(self._random(max(depth, 1)), -1) for _ in range(size)]
        for request in requests:
            self.engine.submit(request, clock)
        clock.is_over.wait()
        for request in requests:
            self.engine.cancel(request.request_id)
        clock.all_ended.wait()
        if clock.error is not None:
            raise LocalLLMError(clock.error)
        return clock.ended_at - clock.began_at

    def _run(self, tokens: list[int], num_predict: int, salt: bytes | None) -> Stats:
        ends: list[Output] = []
        is_over = threading.Event()

        def watch(outputs: list[Output]) -> None:
            ends.extend(o for o in outputs if o.finish_reason is not None)
            if ends:
                is_over.set()

        self.engine.submit(self._request(tokens, num_predict, salt), watch)
        is_over.wait()
        (end,) = ends
        if end.error is not None or end.stats is None:
            raise LocalLLMError(end.error or "the engine gave no statistics")
        return end.stats

    def _request(self, tokens: list[int], num_predict: int, salt: bytes | None = None) -> Request:
        self.num_requests += 1
        params = SamplingParams(temperature=0, num_predict=num_predict, ignore_eog=True)
        return Request(
            f"bench {self.num_requests}",
            tokens,
            params,
            cache_prompt=salt is not None,
            speculate=False,
            salt=salt or b"",
        )

    def _random(self, count: int) -> list[int]:
        tokens: list[int] = self.rng.integers(
            self.engine.backend.spec.vocab_size, size=count
        ).tolist()
        return tokens


class DecodeClock:
    """A sink that times decoding from the step in which the last sequence got its first token."""

    def __init__(self, num_sequences: int, num_tokens: int) -> None:
        self.num_sequences = num_sequences
        self.num_tokens = num_tokens
        self.began_at = self.ended_at = 0.0
        self.error: str | None = None
        self.is_over = threading.Event()
        self.all_ended = threading.Event()
        self._started: set[str] = set()
        self._num_ended = 0
        self._counted = 0

    def __call__(self, outputs: list[Output]) -> None:
        now = time.perf_counter()
        if len(self._started) == self.num_sequences:
            self._counted += sum(o.token is not None for o in outputs)
            if self._counted >= self.num_tokens and not self.is_over.is_set():
                self.ended_at = now
                self.is_over.set()
        else:
            self._started.update(o.request_id for o in outputs if o.token is not None)
            self.began_at = now
        for output in outputs:
            if output.finish_reason is not None:
                self._num_ended += 1
                self.error = self.error or output.error
        if self.error is not None:
            self.is_over.set()
        if self._num_ended == self.num_sequences:
            self.all_ended.set()
