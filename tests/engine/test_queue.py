"""Who is let in next, and that everybody is in the end."""

import random

import pytest
from scheduling import advance, new_scheduler, new_sequence, shape

from localllm.engine.queue import PATIENCE, PATIENCE_SECONDS
from localllm.engine.scheduler import Scheduler
from localllm.engine.sequence import Request, Sequence
from localllm.sampling import Sampler, SamplingParams

SHARED = list(range(300))


def sharer(arrival: int, own: int = 20, **fields) -> Sequence:
    """A request whose prompt begins with `SHARED`."""
    tokens = [*SHARED, *(1000 + arrival * 50 + i for i in range(own))]
    request = Request(f"r{arrival}", tokens, SamplingParams(temperature=0), **fields)
    return Sequence(request, Sampler(request.params, [], 10_000), lambda o: None, arrival, 4096)


def finish(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.remove(sequence)


def warm(scheduler: Scheduler) -> None:
    """Leave the shared prefix in the cache."""
    first = sharer(0)
    scheduler.add(first)
    while not first.emitted:
        advance(scheduler)
    finish(scheduler, first)


def test_the_longest_cached_prefix_goes_first() -> None:
    scheduler = new_scheduler(max_running=1)
    warm(scheduler)
    stranger, near, friend = new_sequence(1, 400), new_sequence(2, 400), sharer(3)
    near.tokens[:64] = SHARED[:64]
    for sequence in (stranger, near, friend):
        scheduler.add(sequence)
    order = []
    for _ in range(3):
        advance(scheduler)
        (running,) = scheduler.running
        order.append(running)
        finish(scheduler, running)
    assert order == [friend, near, stranger]
    assert friend.num_cached == 300


def test_the_longest_waiting_goes_when_enough_later_ones_went_before() -> None:
    scheduler = new_scheduler(max_running=1, blocks=200)
    warm(scheduler)
    stranger = new_sequence(1, 400)
    scheduler.add(stranger)
    passed = 0
    for arrival in range(2, 100):
        scheduler.add(sharer(arrival))
        advance(scheduler)
        (running,) = scheduler.running
        if running is stranger:
            break
        passed += 1
        finish(scheduler, running)
    assert passed == PATIENCE
    assert stranger.is_urgent


def test_the_longest_waiting_goes_when_it_was_passed_over_long_ago() -> None:
    scheduler = new_scheduler(max_running=1)
    warm(scheduler)
    stranger = new_sequence(1, 400)
    for sequence in (stranger, sharer(2), sharer(3)):
        scheduler.add(sequence)
    scheduler.plan(now=100.0)
    finish(scheduler, *scheduler.running)
    scheduler.plan(now=100.0 + PATIENCE_SECONDS)
    assert scheduler.running == [stranger]


def test_waiting_alone_makes_nobody_urgent() -> None:
    scheduler = new_scheduler(max_running=1)
    first, second = new_sequence(1, 40), new_sequence(2, 40)
    scheduler.add(first)
    scheduler.plan(now=0.0)
    scheduler.add(second)
    finish(scheduler, first)
    scheduler.plan(now=1e6)
    assert scheduler.running == [second]
    assert not second.is_urgent


def test_what_another_is_computing_is_waited_for() -> None:
    """Requests with a common prefix that come at once compute it once."""
    scheduler = new_scheduler(max_tokens=128, chunk=128)
    sequences = [sharer(i) for i in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    stranger = new_sequence(9, 100)
    scheduler.add(stranger)
    assert shape(advance(scheduler)) == [("r0", 0, 128)]
    num_prompt = 128
    while any(s.num_computed < s.num_prompt for s in sequences):
        num_prompt += advance(scheduler).num_prompt
    # Under 128 positions are not worth waiting for.
    assert [s.num_cached for s in sequences] == [0, 256, 300, 300]
    assert num_prompt == 300 + 44 + 4 * 20
    scheduler.pool.check(scheduler.running)


@pytest.mark.parametrize("fields", [{"salt": b"own"}, {"cache_prompt": False}])
def test_what_cannot_be_shared_is_not_waited_for(fields) -> None:
    scheduler = new_scheduler(max_tokens=700)
    scheduler.pace.prompt_token_seconds = 1e-6
    scheduler.add(sharer(1, own=1))
    scheduler.add(sharer(2, own=1, **fields))
    assert [name for name, _, _ in shape(scheduler.plan())] == ["r1", "r2"]


def test_lower_values_go_first_and_equal_ones_in_order() -> None:
    scheduler = new_scheduler(max_running=1)
    line = [(1, 5), (2, 0), (3, -1), (4, 0), (5, 5)]
    for arrival, priority in line:
        scheduler.add(new_sequence(arrival, 20, priority=priority))
    order = []
    while scheduler.has_work:
        advance(scheduler)
        order.append(scheduler.running[0].arrival)
        finish(scheduler, *scheduler.running)
    assert order == [3, 2, 4, 1, 5]


def test_a_burst_of_one_salt_leaves_places_to_others() -> None:
    scheduler = new_scheduler(max_running=4)
    for arrival in range(10):
        scheduler.add(new_sequence(arrival, 20, salt=b"many"))
    for arrival in (10, 11):
        scheduler.add(new_sequence(arrival, 20, salt=b"few"))
    advance(scheduler)
    assert sorted(s.arrival for s in scheduler.running) == [0, 1, 10, 11]


def test_blocks_are_taken_from_the_lowest_priority_and_then_the_latest() -> None:
    scheduler = new_scheduler(blocks=8)
    ranked = [new_sequence(i, 60, priority=p) for i, p in ((1, 2), (2, 0), (3, 2), (4, 1))]
    for sequence in ranked:
        scheduler.add(sequence)
    order = []
    for _ in range(200):
        before = list(scheduler.running)
        advance(scheduler)
        order += [s.arrival for s in before if s not in scheduler.running]
    assert order == [3, 1, 4]
    assert [s.arrival for s in scheduler.running] == [2]


def test_somebody_of_a_better_priority_takes_the_place_of_the_last() -> None:
    scheduler = new_scheduler(max_running=2)
    slow = [new_sequence(i, 30, priority=1) for i in range(2)]
    for sequence in slow:
        scheduler.add(sequence)
    advance(scheduler)
    quick = new_sequence(2, 30)
    scheduler.add(quick)
    advance(scheduler)
    assert scheduler.running == [quick, slow[0]]
    finish(scheduler, quick)
    advance(scheduler)
    assert scheduler.running == slow
    scheduler.pool.check(scheduler.running)


def test_somebody_of_a_better_priority_takes_blocks_too() -> None:
    scheduler = new_scheduler(blocks=8)
    slow = [new_sequence(i, 90, priority=1) for i in range(2)]
    for sequence in slow:
        scheduler.add(sequence)
    advance(scheduler)
    quick = new_sequence(2, 100)
    scheduler.add(quick)
    for _ in range(3):
        advance(scheduler)
    assert scheduler.running == [quick, slow[0]]


def test_what_waited_too_long_keeps_its_place() -> None:
    scheduler = new_scheduler(max_running=1, blocks=200)
    patient = new_sequence(0, 30, priority=9)
    scheduler.add(patient)
    advance(scheduler)
    for arrival in range(1, PATIENCE + 3):
        scheduler.add(new_sequence(arrival, 30))
        advance(scheduler)
        if scheduler.running == [patient]:
            break
        finish(scheduler, *scheduler.running)
    assert arrival == PATIENCE + 1
    scheduler.add(new_sequence(1000, 30))
    for _ in range(100):
        advance(scheduler)
    assert scheduler.running == [patient]


@pytest.mark.parametrize("windows", [(None,), (40, None)])
@pytest.mark.parametrize("blocks", [9, 16, 40])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_finishes_whatever_comes_before_it(windows, blocks, seed) -> None:
    """Defends: no starvation under priorities, shared prefixes and small pools; the pool's
    invariants; nobody is passed over more often than is promised.
    """
    rng = random.Random(f"{windows}{blocks}{seed}")
    scheduler = new_scheduler(blocks=blocks, windows=windows, max_tokens=96, max_running=4)
    most = blocks * 32 - 70
    now, arrival, ends = 0.0, 0, {}
    low: list[Sequence] = []
    # A stream of better requests that by itself would keep all places taken for ever.
    for step in range(20_000):
        now += 0.01
        if step % 40 == 20 and len(low) < 10:
            low.append(new_sequence(arrival, rng.randint(1, most), priority=9))
            ends[low[-1]] = low[-1].num_tokens + rng.randint(1, 60)
            scheduler.add(low[-1])
            arrival += 1
        if len(scheduler.waiting) < 12 and arrival < 3000:
            priority = rng.choice([-1, 0, 0, 3])
            if rng.random() < 0.5 and most > 330:
                sequence = sharer(arrival, rng.randint(1, 20), priority=priority)
            else:
                sequence = new_sequence(arrival, rng.randint(1, min(most, 100)), priority=priority)
            ends[sequence] = sequence.num_tokens + rng.randint(1, 30)
            scheduler.add(sequence)
            arrival += 1
        assert advance(scheduler, now)
        for sequence in list(scheduler.running):
            if sequence.num_tokens > ends[sequence]:
                scheduler.remove(sequence)
                del ends[sequence]
        if step % 50 == 0:
            scheduler.pool.check(scheduler.running)
        if len(low) == 10 and not any(s in ends for s in low):
            break
    assert len(low) == 10
    assert not any(s in ends for s in low)
    assert scheduler.num_preemptions > 0


def test_the_pool_is_full_of_tokens_when_it_first_runs_out() -> None:
    """The waste is less than a block a sequence: 96 % of all positions hold a token."""
    fills = []
    for seed in range(8):
        rng = random.Random(seed)
        scheduler = new_scheduler(blocks=512, max_running=16, max_tokens=512)
        ends, arrival = {}, 0
        while scheduler.fill_at_preemption is None:
            while len(scheduler.waiting) < 4:
                sequence = new_sequence(arrival, int(rng.lognormvariate(6.5, 0.8)) + 1)
                ends[sequence] = sequence.num_tokens + rng.randint(50, 600)
                scheduler.add(sequence)
                arrival += 1
            advance(scheduler)
            for sequence in list(scheduler.running):
                if sequence.num_tokens > ends[sequence]:
                    scheduler.remove(sequence)
        fills.append(scheduler.fill_at_preemption)
    assert min(fills) >= 0.96
