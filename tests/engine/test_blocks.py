"""The block pool and the prefix cache, driven without a backend."""

import random

import pytest
from pool_driver import SIZE, compute, generate, new_pool, new_sequence, run

from localllm.engine.sequence import Sequence
from localllm.errors import OutOfBlocks


def test_blocks_are_taken_when_positions_need_them() -> None:
    pool = new_pool()
    sequence = new_sequence(range(33))
    assert pool.admit(sequence, 512)
    compute(pool, sequence, 32)
    assert len(sequence.tables[0]) == 1
    compute(pool, sequence, 33)
    assert len(sequence.tables[0]) == 2
    assert pool.usage() == 2 / 16
    pool.release(sequence)
    assert pool.usage() == 0


def test_growing_beyond_the_pool_raises_and_changes_nothing() -> None:
    pool = new_pool(blocks=2)
    sequence = new_sequence(range(64))
    assert pool.admit(sequence, 512)
    with pytest.raises(OutOfBlocks):
        pool.grow(sequence, 65)
    assert len(sequence.tables[0]) == 0
    pool.check([sequence])


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65, 100])
def test_the_same_prompt_again_computes_its_last_token_only(length: int) -> None:
    pool = new_pool()
    run(pool, range(length))
    again = run(pool, range(length))
    assert again.num_cached == length - 1


@pytest.mark.parametrize(("first", "second"), [(64, 40), (40, 64), (96, 97), (97, 96), (33, 32)])
def test_prefixes_of_any_length_are_found(first: int, second: int) -> None:
    pool = new_pool()
    run(pool, range(first))
    assert run(pool, range(second)).num_cached == min(first, second - 1)


def test_a_branch_shares_blocks_and_copies_the_first_positions_of_the_last() -> None:
    pool = new_pool()
    run(pool, range(90))
    branch = new_sequence([*range(70), 500, 501, *range(200, 250)])
    assert pool.admit(branch, 512)
    assert branch.num_computed == 70
    ((group, source, target, count),) = pool.copy_block
    assert (group, count) == (0, 6)
    assert branch.tables[0][2] == target != source
    pool.check([branch])


def test_shared_blocks_are_referenced_twice_and_survive_one_release() -> None:
    pool = new_pool()
    a, b = new_sequence(range(64)), new_sequence(range(80))
    assert pool.admit(a, 512)
    compute(pool, a)
    assert pool.admit(b, 512)
    assert list(b.tables[0]) == list(a.tables[0])
    compute(pool, b)
    pool.release(a)
    pool.check([b])
    assert pool.usage() == 3 / 16


def test_freed_cached_blocks_are_reused_oldest_first_and_leaves_before_prefixes() -> None:
    pool = new_pool(blocks=4)
    old = new_sequence(range(64))
    assert pool.admit(old, 512)
    compute(pool, old)
    _, leaf = old.tables[0]
    pool.release(old)
    run(pool, range(300, 364))
    other = new_sequence(range(400, 400 + 32))
    assert pool.admit(other, 512)
    compute(pool, other)
    assert list(other.tables[0]) == [leaf]
    pool.release(other)
    # Block 0 of the old prefix is still there.
    assert run(pool, range(64)).num_cached == 32


def test_blank_blocks_go_before_cached_ones() -> None:
    pool = new_pool(blocks=8)
    run(pool, range(64))
    run(pool, range(100, 164))
    assert run(pool, range(64)).num_cached == 63


@pytest.mark.parametrize(
    "change", [{"salt": b"other"}, {"cache_prompt": False}], ids=["salt", "cache off"]
)
def test_other_salts_and_cache_off_never_hit(change) -> None:
    pool = new_pool()
    run(pool, range(64))
    assert run(pool, range(64), **change).num_cached == 0


def test_cache_off_leaves_nothing_behind() -> None:
    pool = new_pool()
    run(pool, range(64), cache_prompt=False)
    assert run(pool, range(64)).num_cached == 0


def test_another_identity_has_other_hashes() -> None:
    a, b = new_pool(identity=b"model a"), new_pool(identity=b"model b")
    assert run(a, range(64)).chain != run(b, range(64)).chain


def test_the_next_turn_finds_blocks_that_were_written_while_generating() -> None:
    pool = new_pool()
    run(pool, range(40), answer=range(200, 260))
    turn = [*range(40), *range(200, 260), 7, 8, 9]
    assert run(pool, turn).num_cached == 100


def test_an_exact_request_takes_only_what_was_prompt() -> None:
    pool = new_pool()
    run(pool, range(40), answer=range(200, 260))
    turn = [*range(40), *range(200, 260), 7, 8, 9]
    assert run(pool, turn, exact=True).num_cached == 40
    assert run(pool, turn, exact=True).num_cached == len(turn) - 1


def test_what_is_derived_from_generated_blocks_is_not_exact() -> None:
    pool = new_pool()
    run(pool, range(32), answer=range(200, 264))
    turn = [*range(32), *range(200, 264), *range(50, 90)]
    assert run(pool, turn).num_cached == 96
    assert run(pool, turn, exact=True).num_cached == 32


def test_a_block_that_begins_with_a_copy_of_generated_tokens_is_not_exact() -> None:
    pool = new_pool()
    run(pool, range(32), answer=range(200, 264))
    turn = [*range(32), *range(200, 264)]
    assert run(pool, turn).num_cached == 95
    assert run(pool, turn, exact=True).num_cached == 32


def test_a_preempted_sequence_finds_its_own_blocks_in_their_roles() -> None:
    pool = new_pool()
    sequence = new_sequence(range(40))
    assert pool.admit(sequence, 512)
    compute(pool, sequence)
    generate(pool, sequence, range(200, 230))
    pool.release(sequence)
    assert pool.admit(sequence, 512)
    assert sequence.num_computed == 69
    pool.check([sequence])


def test_a_preempted_sequence_does_not_take_its_tokens_from_another_role() -> None:
    pool = new_pool()
    run(pool, [*range(40), *range(200, 230)])
    sequence = new_sequence(range(40), cache_prompt=True)
    assert pool.admit(sequence, 512)
    compute(pool, sequence)
    for token in range(200, 230):
        sequence.append(token)
    pool.release(sequence)
    assert pool.admit(sequence, 512)
    assert sequence.num_computed == 40


def test_blocks_behind_the_window_are_given_back() -> None:
    pool = new_pool(blocks=8, windows=(None, 48))
    sequence = new_sequence(range(200))
    assert pool.admit(sequence, 64)
    held = []
    for upto in range(40, 201, 40):
        compute(pool, sequence, upto)
        held.append(len(sequence.tables[1]) - sequence.first_held[1])
        pool.check([sequence])
    # The token at 200 sees positions 153 .. 200: blocks 4, 5, 6.
    assert sequence.first_held == [0, 4]
    assert max(held) <= 3
    pool.release(sequence)
    pool.check()


def test_a_prefix_hit_needs_every_group_but_only_the_window_of_a_window_group() -> None:
    pool = new_pool(blocks=8, windows=(None, 48))
    run(pool, range(200))
    hit = new_sequence([*range(200), 7])
    assert pool.admit(hit, 64)
    assert hit.num_computed == 200
    assert hit.first_held == [0, 4]
    pool.release(hit)
    # Fill the window group, so that its cached blocks go; the full group still has them.
    pool.groups[1].give_back(pool.groups[1].take(8))
    miss = new_sequence([*range(200), 7])
    assert pool.admit(miss, 64)
    assert miss.num_computed == 0
    pool.check([miss])


def test_a_sequence_that_lacks_blocks_is_not_admitted() -> None:
    pool = new_pool(blocks=4)
    first = new_sequence(range(64))
    assert pool.admit(first, 512)
    compute(pool, first)
    second = new_sequence(range(100, 197))
    assert not pool.admit(second, 512)
    pool.check([first])
    assert pool.capacity() == 4 * SIZE


def test_forgetting_empties_the_cache_but_not_the_tables() -> None:
    pool = new_pool()
    run(pool, range(64))
    sequence = new_sequence(range(64))
    assert pool.admit(sequence, 512)
    pool.forget()
    pool.check([sequence])
    pool.release(sequence)
    pool.check()
    assert run(pool, [5, 6]).num_cached == 0


@pytest.mark.parametrize("windows", [(None,), (None, 40), (64, None, 96)])
def test_invariants_hold_under_random_use(windows) -> None:
    """Defends invariants 1 to 4 of blocks.py under sharing, eviction, windows and preemption."""
    rng = random.Random(str(windows))
    pool = new_pool(blocks=24, windows=windows)
    alive: list[Sequence] = []
    hits = 0
    for arrival in range(400):
        base = rng.choice([range(0, 500), range(0, 500, 2), range(300, 800)])
        tokens = list(base[: rng.randint(1, 150)])
        if rng.random() < 0.3:
            tokens[-1] = rng.randint(0, 900)
        fields = {"exact": rng.random() < 0.3, "cache_prompt": rng.random() < 0.9}
        sequence = new_sequence(tokens, arrival, **fields)
        if pool.admit(sequence, 64):
            hits += sequence.num_computed > 0
            alive.append(sequence)
        for s in rng.sample(alive, min(3, len(alive))):
            if s.num_computed == s.num_tokens:
                s.append(rng.randint(0, 900))
            count = min(pool.room(s), s.num_tokens - s.num_computed, rng.randint(1, 64))
            if count > 0:
                compute(pool, s, s.num_computed + count)
        if alive and (len(alive) > 4 or rng.random() < 0.3):
            s = alive.pop(rng.randrange(len(alive)))
            pool.release(s)
        pool.check(alive)
    assert hits > 20
    for s in alive:
        pool.release(s)
    pool.check()
    assert pool.usage() == 0


def test_equal_blocks_computed_side_by_side_become_one() -> None:
    pool = new_pool(windows=(None, 40))
    twins = [new_sequence(range(70), arrival=i) for i in range(2)]
    for sequence in twins:
        assert pool.admit(sequence, 512)
        pool.grow(sequence, 70)
    for sequence in twins:
        compute(pool, sequence, 70)
    assert twins[0].tables[0][:2] == twins[1].tables[0][:2]
    assert twins[0].tables[0][2] != twins[1].tables[0][2]
    assert pool.usage() == 4 / 16
    for sequence in twins:
        pool.release(sequence)
    pool.check()


def test_a_prefix_outlives_what_hangs_on_it_though_it_was_computed_twice() -> None:
    pool = new_pool(blocks=8)
    first, second = new_sequence(range(32)), new_sequence(range(64))
    for sequence in (first, second):
        assert pool.admit(sequence, 512)
        pool.grow(sequence, sequence.num_tokens)
    compute(pool, first)
    pool.release(first)
    compute(pool, second)
    pool.release(second)
    run(pool, range(300, 300 + 7 * SIZE))
    assert run(pool, range(64)).num_cached == 32


FIRST = list(range(100))


@pytest.mark.parametrize(
    ("tokens", "fields", "reason"),
    [
        (FIRST, {}, ""),
        ([*FIRST, 1, 2], {}, "differs at token 100 of 102"),
        ([*FIRST[:70], 900, *FIRST[71:]], {}, "differs at token 70 of 100"),
        ([*FIRST[:64], 900, 901], {}, "differs at token 64 of 66"),
        ([900, *FIRST], {}, "differs at token 0 of 101"),
        (FIRST, {"salt": b"mine"}, "first request with this salt"),
        (FIRST, {"cache_prompt": False}, "cache off"),
        ([*FIRST, *range(200, 240), 1], {"exact": True}, "exact asked, generated block at 96"),
        ([*FIRST, *range(200, 240), 1, 2], {}, "new from token 140 of 142"),
    ],
)
def test_a_miss_is_explained(tokens, fields, reason) -> None:
    pool = new_pool()
    assert run(pool, FIRST, answer=range(200, 240)).prefix_miss == "first request"
    assert run(pool, tokens, **fields).prefix_miss == reason


def test_a_miss_after_an_eviction_says_so() -> None:
    pool = new_pool(blocks=8)
    run(pool, FIRST)
    run(pool, range(300, 300 + 6 * SIZE))
    again = run(pool, FIRST)
    assert (again.num_cached, again.prefix_miss) == (64, "evicted from token 64 of 100")


def test_a_miss_for_want_of_a_windows_blocks_is_an_eviction() -> None:
    pool = new_pool(blocks=8, windows=(None, 48))
    run(pool, range(200))
    pool.groups[1].give_back(pool.groups[1].take(8))
    assert run(pool, [*range(200), 7]).prefix_miss == "evicted from token 0 of 201"


@pytest.mark.parametrize("exact", [False, True])
def test_cached_depth_follows_the_cache(exact) -> None:
    pool = new_pool(blocks=8)
    waiting = new_sequence(FIRST, exact=exact)
    assert pool.cached_depth(waiting) == 0
    run(pool, FIRST)
    assert pool.cached_depth(waiting) == 3
    run(pool, range(300, 300 + 7 * SIZE))
    assert pool.cached_depth(waiting) == 1
    pool.forget()
    assert pool.cached_depth(waiting) == 0


def test_fill_counts_every_position_once() -> None:
    pool = new_pool(blocks=10)
    a, b = new_sequence(range(70)), new_sequence(range(70), arrival=1)
    assert pool.admit(a, 512)
    compute(pool, a)
    assert pool.admit(b, 512)
    compute(pool, b)
    assert pool.fill([(a, 70), (b, 70)]) == (64 + 6 + 6) / 320


def test_some_blocks_are_left_for_those_that_run() -> None:
    pool = new_pool(blocks=32, windows=(None, 40))
    running = new_sequence(range(20 * SIZE))
    assert pool.admit(running, 512)
    compute(pool, running)
    assert not pool.admit(new_sequence(range(1000, 1000 + 11 * SIZE)), 512, num_running=1)
    assert pool.admit(new_sequence(range(1000, 1000 + 10 * SIZE)), 512, num_running=15)
