"""The scheduler's rule, with sequences whose tokens are invented as they go."""

import random

import pytest
from scheduling import advance, new_scheduler, new_sequence, shape

from localllm.engine.pace import FLOOR, Pace
from localllm.engine.scheduler import even_chunk


def test_decodes_come_first_and_prompts_fill_the_step() -> None:
    scheduler = new_scheduler(chunk=128)
    scheduler.add(new_sequence(1, 10))
    assert shape(advance(scheduler)) == [("r1", 0, 10)]
    scheduler.add(new_sequence(2, 300))
    step = scheduler.plan()
    assert shape(step) == [("r1", 10, 1), ("r2", 0, 128)]
    assert (step.num_generated, step.num_prompt) == (1, 128)
    assert [s.num_rows for s in step] == [1, 0]


def test_short_prompts_share_a_step() -> None:
    scheduler = new_scheduler(chunk=256)
    for arrival, length in enumerate((20, 30, 40)):
        scheduler.add(new_sequence(arrival, length))
    assert shape(advance(scheduler)) == [("r0", 0, 20), ("r1", 0, 30), ("r2", 0, 40)]


def test_a_second_prompt_gets_no_sliver() -> None:
    scheduler = new_scheduler()
    scheduler.pace.prompt_token_seconds = 1 / 300
    scheduler.add(new_sequence(1, 200))
    scheduler.add(new_sequence(2, 1000))
    assert shape(advance(scheduler)) == [("r1", 0, 200)]
    assert shape(advance(scheduler))[0] == ("r1", 200, 1)


def test_a_segment_has_one_role() -> None:
    scheduler = new_scheduler()
    sequence = new_sequence(1, 50)
    scheduler.add(sequence)
    for _ in range(20):
        advance(scheduler)
    scheduler._preempt(sequence)
    scheduler.pool.forget()
    roles = []
    while sequence.num_computed < sequence.num_tokens:
        step = scheduler.plan()
        (segment,) = step
        end = segment.first + segment.count
        assert end <= 50 or segment.first >= 50
        roles.append(segment.is_generated)
        scheduler.commit(step)
    assert roles == [False, True]


def test_the_latest_arrival_gives_its_blocks_back() -> None:
    scheduler = new_scheduler(blocks=4)
    first, second = new_sequence(1, 60), new_sequence(2, 60)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(8):
        advance(scheduler)
    assert scheduler.running == [first]
    assert list(scheduler.waiting) == [second]
    assert second.num_preemptions == 1
    scheduler.remove(first)
    advance(scheduler)
    assert scheduler.running == [second]
    scheduler.pool.check(scheduler.running)


def test_a_preempted_sequence_waits_before_later_arrivals() -> None:
    scheduler = new_scheduler(blocks=4, max_running=2)
    sequences = [new_sequence(i, 60) for i in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in range(8):
        advance(scheduler)
    assert list(scheduler.waiting) == sequences[1:]


def test_removing_a_sequence_frees_its_blocks_in_queue_prompt_and_decode() -> None:
    scheduler = new_scheduler(max_running=2, chunk=32)
    decoding, prompting, waiting = (new_sequence(i, n) for i, n in enumerate((10, 500, 10)))
    for sequence in (decoding, prompting, waiting):
        scheduler.add(sequence)
    advance(scheduler)
    advance(scheduler)
    for sequence in (waiting, prompting, decoding):
        scheduler.remove(sequence)
        scheduler.pool.check(scheduler.running)
    assert scheduler.pool.usage() == 0
    assert not scheduler.has_work


def test_wanted_rows_stay_within_the_backends_bound() -> None:
    scheduler = new_scheduler(max_rows=40, max_running=8)
    scheduler.add(new_sequence(1, 200, observer=lambda position, logits: None))
    scheduler.add(new_sequence(2, 200, observer=lambda position, logits: None))
    total = 0
    while total < 400:
        step = advance(scheduler)
        assert 0 < sum(s.num_rows for s in step) <= 40
        total = sum(min(s.num_computed, 200) for s in scheduler.running)


@pytest.mark.parametrize(
    ("first", "lacking", "most", "expected"),
    [(0, 520, 512, 288), (0, 1000, 512, 512), (5, 300, 128, 123), (0, 40, 20, 20), (30, 33, 32, 2)],
)
def test_chunks_come_out_even_and_end_with_a_block(first, lacking, most, expected) -> None:
    assert even_chunk(first, lacking, most, 32) == expected


def test_chunk_time_follows_the_measured_steps() -> None:
    pace = Pace(2048)
    assert pace.chunk(decoding=True) == FLOOR
    pace.observe(0, 256, 0.256)
    assert pace.chunk(decoding=True) == FLOOR  # how long decoding takes is not known
    pace.observe(1, 0, 0.1)
    assert pace.chunk(decoding=True) == 200  # twice a decode step, at 1 ms a token
    pace.observe(1, 0, 2.0)
    assert pace.chunk(decoding=True) == 250  # at most 250 ms
    assert pace.chunk(decoding=False) == 1000
    slow = Pace(2048)
    slow.observe(0, 256, 25.6)
    assert slow.chunk(decoding=True) == FLOOR


@pytest.mark.parametrize("windows", [(None,), (40, None)])
@pytest.mark.parametrize("blocks", [9, 14, 40])
def test_every_request_finishes_under_random_schedules(windows, blocks) -> None:
    """Defends: bounds of a step, the order of ranks, no starvation, the pool's invariants."""
    rng = random.Random(f"{windows}{blocks}")
    scheduler = new_scheduler(blocks=blocks, windows=windows, max_tokens=96, max_running=5)
    lengths = {i: rng.randint(1, 200) for i in range(60)}
    ends = {i: min(n + rng.randint(1, 60), blocks * 32) for i, n in lengths.items()}
    todo = [
        new_sequence(i, min(n, blocks * 32 - 1), priority=rng.choice([0, 0, 1]))
        for i, n in lengths.items()
    ]
    finished = []
    for _ in range(20_000):
        if todo and rng.random() < 0.2:
            scheduler.add(todo.pop(0))
        if not scheduler.has_work:
            if not todo:
                break
            continue
        step = advance(scheduler)
        assert step
        assert step.num_generated + step.num_prompt <= 96
        ranks = [s.rank for s in scheduler.running]
        assert ranks == sorted(ranks)
        for sequence in list(scheduler.running):
            if sequence.num_tokens > ends[sequence.arrival] or rng.random() < 0.002:
                scheduler.remove(sequence)
                finished.append(sequence.arrival)
        scheduler.pool.check(scheduler.running)
    assert len(finished) == 60
    assert blocks > 20 or scheduler.num_preemptions > 0
