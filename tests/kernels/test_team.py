"""The thread team: every item runs once, records run in order, and it ends cleanly in all ways."""

import subprocess
import sys

import numpy as np
import pytest
from levels import CACHE, LEVELS, ROOT, run_at
from numpy.typing import NDArray

from kernels_cpu.kernel import Kernel, kernel
from kernels_cpu.simd import slot
from kernels_cpu.team import CLAIM, JOINED, SERIAL, Team
from kernels_cpu.threads import store

Ints = NDArray[np.int64]


@kernel
def count_items(args: int, first: int, last: int, scratch: int) -> None:
    """counts[i] += 1, through scratch memory; slot 0: address of the counts."""
    counts = slot(args, 0)
    for i in range(first, last):
        store(scratch, slot(counts, i))
        store(counts + 8 * i, slot(scratch, 0) + 1)


@kernel
def sum_items(args: int, first: int, last: int, scratch: int) -> None:
    """total += the sum of all counts; slot 0: the counts, 1: how many, 2: address of the total."""
    total = 0
    for i in range(slot(args, 1)):
        total += slot(slot(args, 0), i)
    store(slot(args, 2), slot(slot(args, 2), 0) + total)


@kernel
def set_count(args: int, first: int, last: int, scratch: int) -> None:
    """Slot 0: address of a word that becomes slot 1."""
    store(slot(args, 0), slot(args, 1))


def program(*records: tuple[Kernel, Ints, int, int, int, int]) -> Ints:
    rows = [
        (k.address, args.ctypes.data, count, factor, chunk, flags, 0, 0)
        for k, args, count, factor, chunk, flags in records
    ]
    return np.array(rows, np.int64)


def run(team: Team, records: Ints) -> None:
    team.run(records.ctypes.data, len(records))


def check_every_item_runs_once_however_it_is_dealt_out() -> None:
    for num_threads in (1, 2, 3):
        team = Team(num_threads, scratch_bytes=64)
        counts = np.zeros(1000, np.int64)
        args = np.array([counts.ctypes.data], np.int64)
        runs = 0
        for flags in (0, CLAIM, SERIAL):
            for chunk in (1, 7, 64, 999, 1000, 5000):
                run(team, program((count_items, args, 0, 1000, chunk, flags)))
                runs += 1
                assert (counts == runs).all(), (num_threads, flags, chunk)
        team.close()


def check_a_record_sees_all_of_the_one_before() -> None:
    team = Team(2)
    counts, total = np.zeros(100, np.int64), np.zeros(1, np.int64)
    args = np.array([counts.ctypes.data], np.int64)
    summing = np.array([counts.ctypes.data, 100, total.ctypes.data], np.int64)
    pair = (count_items, args, 0, 100, 1, 0), (sum_items, summing, 0, 1, 1, SERIAL)
    claimed = (count_items, args, 0, 100, 1, CLAIM), (sum_items, summing, 0, 1, 1, CLAIM)
    for _ in range(20):
        run(team, program(*(pair + claimed) * 5))
    # Pass k adds 100 to the sum of all counts.
    assert total[0] == 100 * 200 * 201 // 2
    team.close()


def check_joined_records_all_run_before_the_next() -> None:
    team = Team(2)
    counts, total, none = (np.zeros(n, np.int64) for n in (100, 1, 1))
    args = np.array([counts.ctypes.data], np.int64)
    summing = np.array([counts.ctypes.data, 100, total.ctypes.data], np.int64)
    # Each record has items of its own, so they may run at once.
    parts = [np.array([counts.ctypes.data + 80 * i], np.int64) for i in range(10)]
    joined = [(count_items, part, 0, 10, 1, CLAIM | JOINED) for part in parts]
    empty = (count_items, args, none.ctypes.data, 1, 1, 0)
    for _ in range(20):
        run(team, program(*joined, empty, (sum_items, summing, 0, 1, 1, SERIAL)))
    assert total[0] == 100 * 20 * 21 // 2
    team.close()


def check_random_programs_on_more_threads_than_cores() -> None:
    """Threads lose their cores at any moment: late ones must neither repeat nor miss anything."""
    rng = np.random.default_rng(11)
    team = Team(5, scratch_bytes=64)
    for _ in range(60):
        num_records = int(rng.integers(1, 90))
        sizes = rng.integers(0, 60, num_records) * (rng.random(num_records) < 0.7)
        counts = [np.zeros(60, np.int64) for _ in sizes]
        args = [np.array([c.ctypes.data], np.int64) for c in counts]
        items = sizes.astype(np.int64)
        records = [
            (
                count_items,
                a,
                items.ctypes.data + 8 * i,
                1,
                int(rng.integers(1, 9)),
                int(rng.integers(0, 8)),
            )
            for i, a in enumerate(args)
        ]
        run(team, program(*records))
        for size, count in zip(sizes, counts):
            assert (count[:size] == 1).all()
            assert (count[size:] == 0).all()
        # A late thread that looked at these would be seen.
        items[:] = 60
    team.close()


def check_counts_are_read_when_a_record_starts() -> None:
    team = Team(2)
    counts, items = np.zeros(64, np.int64), np.zeros(1, np.int64)
    args = np.array([counts.ctypes.data], np.int64)
    setting = np.array([items.ctypes.data, 5], np.int64)
    here = items.ctypes.data
    records = program(
        (set_count, setting, 0, 1, 1, SERIAL),
        (count_items, args, here, 3, 2, 0),
    )
    run(team, records)
    assert counts.tolist() == [1] * 15 + [0] * 49
    # No items, at the end of a program too.
    items[0] = 0
    run(team, program(*[(count_items, args, here, 3, 2, 0)] * 50))
    run(team, records[:0])
    assert counts.sum() == 15
    team.close()


def check_times_and_position_tell_about_records() -> None:
    team = Team(2)
    counts = np.zeros(4, np.int64)
    args = np.array([counts.ctypes.data], np.int64)
    records = program(*[(count_items, args, 0, 4, 1, 0)] * 3)
    assert team.position == (0, -1)
    assert (team.time(records.ctypes.data, 3) >= 0).all()
    assert team.position == (1, -1)
    team.close()


def check_teams_are_independent_and_close_twice() -> None:
    a, b = Team(2), Team(2)
    counts = np.zeros(10, np.int64)
    args = np.array([counts.ctypes.data], np.int64)
    records = program((count_items, args, 0, 10, 1, 0))
    run(a, records)
    a.close()
    a.close()
    run(b, records)
    del b
    assert (counts == 2).all()


@pytest.mark.parametrize("level", [LEVELS[0], LEVELS[-1]])
def test_team_runs_programs(level: str) -> None:
    run_at(level, __file__)


ENDINGS = {
    "idle": "time.sleep(0.05)",
    "closed": "team.close()",
    "collected": "del team",
    "exception": "raise SystemExit(0)",
    "spinning": "",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_interpreter_exits_with_a_team(ending: str) -> None:
    script = f"""
import sys, time
sys.path[:0] = [{str(ROOT)!r}]
from kernels_cpu import configure
from pathlib import Path
configure(Path({str(CACHE)!r}), {LEVELS[-1]!r})
from kernels_cpu.team import Team
team = Team(3)
team.run(0, 0)
{ENDINGS[ending]}
"""
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert (child.returncode, child.stderr) == (0, b"")


def test_team_outlives_a_kernel_that_raises() -> None:
    """Numba only prints it; no thread may be lost on the way."""
    script = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}]
import numpy as np
from kernels_cpu import configure
from kernels_cpu.kernel import kernel
configure(None, {LEVELS[-1]!r})
from kernels_cpu.team import Team
@kernel
def fail(args, first, last, scratch):
    raise ValueError("from a kernel")
team = Team(2)
record = np.array([[fail.address, 0, 0, 4, 1, 0, 0, 0]] * 3)
team.run(record.ctypes.data, 3)
print("survived", team.position)
"""
    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert child.stdout == "survived (1, -1)\n"
    assert child.stderr.count("from a kernel") == 6


def test_team_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Team(0)
