"""A scheduler without a backend, and sequences whose tokens are invented as they go."""

import random

from localllm.engine.blocks import BlockPool
from localllm.engine.pace import Pace
from localllm.engine.scheduler import Scheduler, Step
from localllm.engine.sequence import Request, Sequence
from localllm.sampling import Sampler, SamplingParams


def new_scheduler(
    blocks=64, windows=(None,), max_tokens=512, max_running=8, chunk=None, max_rows=64
) -> Scheduler:
    pool = BlockPool([blocks] * len(windows), list(windows), 32, lambda *a: None)
    return Scheduler(
        pool,
        Pace(max_tokens, chunk),
        max_tokens=max_tokens,
        max_rows=max_rows,
        max_running=max_running,
    )


def new_sequence(arrival: int, length: int, **fields) -> Sequence:
    rng = random.Random(arrival)
    tokens = [rng.randrange(1000) for _ in range(length)]
    request = Request(f"r{arrival}", tokens, SamplingParams(temperature=0), **fields)
    return Sequence(request, Sampler(request.params, [], 1000), lambda o: None, arrival, 4096)


def advance(scheduler: Scheduler, now: float = 0.0) -> Step:
    """Plan and commit a step; every sequence that is caught up gets a token."""
    step = scheduler.plan(now)
    scheduler.commit(step)
    for segment in step:
        if segment.sequence.num_computed == segment.sequence.num_tokens:
            segment.sequence.append(segment.sequence.arrival)
    return step


def shape(step: Step) -> list[tuple[str, int, int]]:
    return [(s.sequence.request.request_id, s.first, s.count) for s in step]
