"""Many requests at once: localllm over HTTP and as a bare engine, against llama.cpp.

    python -m benchmarks.serving chats  MODEL.gguf --peer PYTHON    16 chats that come together
    python -m benchmarks.serving chats  MODEL.gguf --rate 0.5 ...   chats that keep coming
    python -m benchmarks.serving pool   MODEL.gguf                  a small KV pool, mixed lengths
    python -m benchmarks.serving prefix MODEL.gguf                  a shared system prompt

PYTHON is an interpreter that has llama-cpp-python; how to build it: docs/benchmarks.md.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.server import ServerOfOne
from localllm.backends import BLOCK_SIZE, BackendOptions
from localllm.config import load_settings
from localllm.engine.engine import Engine
from localllm.engine.sequence import Output, Request
from localllm.gguf import GgufFile
from localllm.models import read_spec
from localllm.opening import open_backend
from localllm.sampling import SamplingParams
from localllm.traffic.records import Record, Summary

PEER = Path(__file__).parent / "peer_batching.py"
# The mixed run: tokens of prompts and answers, and how many of its sequences the pool holds.
POOL_PROMPTS, POOL_ANSWERS = (32, 768), (64, 256)
POOL_REQUESTS, POOL_SEQUENCES = 20, 6
PREFIX_TOKENS, PREFIX_REQUESTS = 2000, 5

Run = tuple[list[Record], float]


class Drive:
    """Sends requests to an engine at given times and records their tokens."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rng = random.Random(1)
        self._records: dict[str, Record] = {}
        self._began = 0.0
        self._over = threading.Condition()
        self._num_ended = 0

    def run(self, jobs: list[tuple[float, int, int]]) -> Run:
        """Jobs are (arrival, prompt tokens, new tokens); the records and the seconds it took."""
        vocab_size = self.engine.backend.spec.vocab_size
        requests = [
            Request(
                f"{i}",
                self.rng.choices(range(vocab_size), k=prompt),
                SamplingParams(temperature=0, num_predict=new, ignore_eog=True),
            )
            for i, (_, prompt, new) in enumerate(jobs)
        ]
        self._records.clear()
        self._num_ended = 0
        self._began = time.perf_counter()
        for request, (arrival, _, _) in zip(requests, jobs):
            time.sleep(max(0.0, arrival - self._now()))
            record = Record(len(self._records), 0, arrival, prompt_tokens=len(request.tokens))
            self._records[request.request_id] = record
            self.engine.submit(request, self._take)
        with self._over:
            self._over.wait_for(lambda: self._num_ended == len(jobs))
        return list(self._records.values()), self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _take(self, outputs: list[Output]) -> None:
        now = self._now()
        for output in outputs:
            record = self._records[output.request_id]
            if output.token is not None:
                record.pieces.append(now)
            if output.finish_reason is not None:
                record.ended_at, record.error = now, output.error
                record.output_tokens = len(record.pieces)
        ended = sum(o.finish_reason is not None for o in outputs)
        if ended:
            with self._over:
                self._num_ended += ended
                self._over.notify()


@contextmanager
def engine_of(
    model: Path, positions: int, longest: int, args: argparse.Namespace, *, max_running: int
) -> Iterator[Engine]:
    """An engine whose pool holds so many positions."""
    settings = replace(load_settings(), threads=args.threads)
    with GgufFile.open(model) as file:
        spec = read_spec(file)
        sizes = BackendOptions(
            num_blocks=(-(-positions // BLOCK_SIZE) + 1,) * len(spec.kv_groups),
            table_width=-(-longest // BLOCK_SIZE) + 1,
            threads=args.threads,
        )
        backend = open_backend("cpu", file, spec, sizes, settings)
        engine = Engine(backend, num_ctx=longest, max_running=max_running).start()
        try:
            # Chunk sizes settle, and memory is touched.
            Drive(engine).run([(0.0, min(512, longest - 8), 8)] * 2)
            yield engine
        finally:
            engine.close()


def chats_engine(model: Path, args: argparse.Namespace) -> Run:
    longest = args.prompt + args.new + BLOCK_SIZE
    positions = longest * args.at_once
    with engine_of(model, positions, longest, args, max_running=args.at_once) as engine:
        return Drive(engine).run([(at, args.prompt, args.new) for at in arrivals(args)])


def chats_http(model: Path, args: argparse.Namespace) -> Run:
    if args.rate is None:
        pace = ["--concurrency", str(args.at_once)]
    else:
        pace = ["--rate", str(args.rate)]
    with ServerOfOne(model, args.threads) as server:
        return records_of(
            server.bench(
                *pace,
                *("--requests", str(args.requests), "--prompt-tokens", str(args.prompt)),
                *("--output-tokens", str(args.new), "--ignore-eos", "--api", "ollama-generate"),
            )
        )


def chats_peer(model: Path, args: argparse.Namespace) -> Run:
    job = {
        **{"model": str(model), "threads": args.threads, "slots": args.at_once},
        **{"prompt": args.prompt, "new": args.new, "arrivals": arrivals(args)},
    }
    done = subprocess.run([args.peer, str(PEER), json.dumps(job)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{args.peer}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    records = [
        Record(i, 0, r["sent_at"], r["pieces"], r["pieces"][-1], args.prompt)
        for i, r in enumerate(told["requests"])
    ]
    return records, told["duration"]


SIDES: dict[str, Callable[[Path, argparse.Namespace], Run]] = {
    "http": chats_http,
    "engine": chats_engine,
    "peer": chats_peer,
}


def arrivals(args: argparse.Namespace) -> list[float]:
    """All at once, or the times of a Poisson process that is the same for every side."""
    if args.rate is None:
        return [0.0] * args.requests
    rng = random.Random(2)
    at, times = 0.0, []
    for _ in range(args.requests):
        at += rng.expovariate(args.rate)
        times.append(at)
    return times


def records_of(run: dict) -> Run:
    """The records of `bench serve`'s JSON."""
    records = []
    for i, r in enumerate(run["requests"]):
        pieces = [r["sent_at"] + r["ttft_ms"] / 1000] if r["ttft_ms"] is not None else []
        for gap in r["itl_ms"]:
            pieces.append(pieces[-1] + gap / 1000)
        record = Record(i, r["turn"], r["sent_at"], pieces, r["ended_at"], r["prompt_tokens"])
        record.cached_tokens, record.output_tokens = r["cached_tokens"], r["output_tokens"]
        record.error = r["error"]
        records.append(record)
    return records, run["duration"]


def chats(args: argparse.Namespace) -> None:
    print("| side | all t/s | output t/s | TTFT median | gap median | gap p99 | p99 / median |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    rates: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for side in args.sides:
            summary = Summary.of(*SIDES[side](args.model, args))
            total = summary.rate(summary.prompt_tokens + summary.output_tokens)
            rates.setdefault(side, []).append(total)
            first, gap = summary.spreads["ttft"], summary.spreads["itl"]
            if first is None or gap is None:
                sys.exit(f"{side}: no request gave text: {summary.errors}")
            print(
                f"| {side} | {total:.0f} | {summary.rate(summary.output_tokens):.1f} "
                f"| {first.median:.0f} ms | {gap.median:.0f} ms | {gap.p99:.0f} ms "
                f"| {gap.p99 / gap.median:.1f} |",
                flush=True,
            )
    for side in [s for s in args.sides if s != "peer" and "peer" in rates]:
        ratio = statistics.median(a / b for a, b in zip(rates[side], rates["peer"]))
        print(f"\n{side} against llama.cpp: **{ratio:.2f}** of its tokens per second")


def pool(args: argparse.Namespace) -> None:
    """A pool that a few of the sequences fill, against one request at a time."""
    rng = random.Random(3)
    jobs = [
        (0.0, rng.randint(*POOL_PROMPTS), rng.randint(*POOL_ANSWERS)) for _ in range(POOL_REQUESTS)
    ]
    positions = POOL_SEQUENCES * (sum(POOL_PROMPTS) + sum(POOL_ANSWERS)) // 2
    longest = POOL_PROMPTS[1] + POOL_ANSWERS[1] + BLOCK_SIZE
    rates = {}
    for name, max_running in (("paged and batched", args.at_once), ("one at a time", 1)):
        with engine_of(args.model, positions, longest, args, max_running=max_running) as engine:
            summary = Summary.of(*Drive(engine).run(jobs))
            load = engine.load()
        rates[name] = summary.rate(summary.prompt_tokens + summary.output_tokens)
        output = summary.rate(summary.output_tokens)
        print(f"{name}: {rates[name]:.0f} tokens per second, {output:.1f} of them generated")
        if load.fill_at_preemption is not None:
            print(
                f"pool of {positions} positions: {load.fill_at_preemption:.1%} held a token when "
                f"blocks first ran out; {load.num_preemptions} preemptions"
            )
    print(f"ratio: {rates['paged and batched'] / rates['one at a time']:.2f}")


def prefix(args: argparse.Namespace) -> None:
    """Chats one after the other that share a long system prompt."""
    with ServerOfOne(args.model, args.threads) as server:
        run = server.bench(
            *("--workload", "shared-prefix", "--prefix-tokens", str(PREFIX_TOKENS)),
            *("--concurrency", "1", "--requests", str(PREFIX_REQUESTS)),
            *("--prompt-tokens", "32", "--output-tokens", "4", "--ignore-eos"),
        )
    for r in run["requests"]:
        print(
            f"{r['prompt_tokens']} tokens, {r['cached_tokens'] or 0} cached: "
            f"first token after {r['ttft_ms']:.0f} ms"
        )
    first, *later = (r["ttft_ms"] for r in run["requests"])
    print(f"first against the median of the others: {first / statistics.median(later):.1f}")


SCENARIOS = {"chats": chats, "pool": pool, "prefix": prefix}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", help="interpreter that has llama-cpp-python")
    parser.add_argument("--sides", default="http,engine,peer", type=lambda t: t.split(","))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rate", type=float, help="arrivals per second; without: all at once")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=64)
    args = parser.parse_args()
    if args.peer is None:
        args.sides = [side for side in args.sides if side != "peer"]
    SCENARIOS[args.scenario](args)


if __name__ == "__main__":
    main()
