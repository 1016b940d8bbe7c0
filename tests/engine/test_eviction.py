"""Which cached blocks go first, alone and in the pool."""

import random

import pytest
from pool_driver import new_pool, run

from localllm.engine.eviction import IDLE_SECONDS, FreeBlocks


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_owners_blocks_go_oldest_first() -> None:
    free = FreeBlocks(Clock())
    for block in (3, 1, 2):
        free.add(block, b"")
    free.remove(1)
    free.add(1, b"")
    assert [free.pop() for _ in range(3)] == [3, 2, 1]


def test_the_owner_of_most_blocks_gives_up_its_oldest() -> None:
    free = FreeBlocks(Clock())
    for block in (1, 2):
        free.add(block, b"few")
    for block in (3, 4, 5):
        free.add(block, b"many")
    assert free.pop() == 3
    free.check()


def test_blocks_that_nobody_comes_back_to_go_whoever_owns_them() -> None:
    clock = Clock()
    free = FreeBlocks(clock)
    free.add(1, b"gone")
    clock.now = IDLE_SECONDS - 1
    for block in (2, 3):
        free.add(block, b"busy")
    clock.now = IDLE_SECONDS
    assert [free.pop() for _ in range(3)] == [1, 2, 3]


def test_all_views_agree_under_random_use() -> None:
    rng = random.Random(3)
    clock = Clock()
    free = FreeBlocks(clock)
    for _ in range(2000):
        clock.now += rng.random()
        block = rng.randrange(40)
        if block in free:
            free.remove(block)
        elif rng.random() < 0.7:
            free.add(block, rng.choice([b"a", b"b", b"c", b"d"]))
        elif len(free):
            free.pop()
        free.check()


@pytest.mark.parametrize("windows", [(None,), (None, 48)])
def test_a_stream_of_new_prompts_leaves_another_users_prefix_alone(windows) -> None:
    """Defends: one user's traffic does not evict what another comes back to."""
    rng = random.Random(1)
    pool = new_pool(blocks=40, windows=windows)
    shared = list(range(200))
    run(pool, shared, salt=b"quiet")
    for _ in range(60):
        run(pool, [rng.randrange(1000) for _ in range(300)], salt=b"loud")
    assert run(pool, shared, salt=b"quiet").num_cached == 199


def test_without_salts_the_least_recently_used_prefix_goes() -> None:
    rng = random.Random(1)
    pool = new_pool(blocks=40)
    hot, cold = list(range(200)), list(range(500, 700))
    run(pool, cold)
    for _ in range(10):
        run(pool, hot)
        run(pool, [rng.randrange(1000) for _ in range(300)])
    assert run(pool, hot).num_cached == 199
    assert run(pool, cold).num_cached == 0
