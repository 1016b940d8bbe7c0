"""A persistent team of threads that runs programs of kernels without the interpreter.

A *program* is an array of records, `RECORD_SLOTS` int64 each:

    0 kernel   address of the kernel's machine code (`Kernel.address`)
    1 args     address of its argument block
    2 count    address of an int64 that is read when the record's turn comes; 0 stands for a
               constant 1
    3 factor   the record has *count * factor items
    4 chunk    items that are dealt out together, at least 1: every range a kernel gets starts at a
               multiple of it
    5 flags    without CLAIM, the items are cut into as many shares as there are threads; with it,
               a share is a chunk (or several: there are at most 255 shares), which is right from
               some 50 microseconds a chunk on. SERIAL: one share, so one thread runs it in one
               call. JOINED: the next record does not need what this one writes
    6 label    for whoever looks at a program; the team does not read it
    7          0

A record starts when those before it are over, except JOINED ones directly before it; one without
items costs a few nanoseconds. A kernel is called as kernel(args, first, last, scratch) and must not
depend on how items are dealt. A count may be written by an earlier record, provided that no record
between that one and this had the same count.

Threads claim shares, and wait for shares to be done, never for each other: a thread that has lost
its core holds up nobody unless it is in the middle of a share, and finds out later what was done
meanwhile. (With barriers, a step of 2 ms took 95 ms beside busy processes on both cores; 10 ms so.)
It must not look at a program whose run has ended, so it announces when it is inside a run, and the
run's end waits until nobody is.

A waiting thread spins for `SPIN_NS`, then yields its core, and sleeps after `SLEEP_NS`: an idle
team uses no CPU. Thread 0 is whoever calls `run`. The others are daemon threads that live in
native code without the GIL.
"""

import ctypes
import threading
import weakref

import numpy as np
from numba import njit
from numpy.typing import NDArray

from kernels_cpu.cores import default_threads
from kernels_cpu.kernel import Kernel, kernel
from kernels_cpu.simd import slot
from kernels_cpu.threads import (
    atomic_add,
    atomic_load,
    atomic_store,
    atomic_swap,
    call_kernel,
    lock,
    nanoseconds,
    pause,
    quotient,
    sleep_on,
    store,
    unlock,
    wake_all,
    yield_core,
)

__all__ = ["CLAIM", "JOINED", "RECORD_SLOTS", "SERIAL", "Team", "default_threads"]

RECORD_SLOTS = 8
SERIAL = 1
CLAIM = 2
JOINED = 4

SPIN_NS = 200_000
SLEEP_NS = 2_000_000
SPINS_PER_LOOK = 64  # between two looks at the clock

# Byte offsets in a team's control block. A word that threads fight over has a cache line of its
# own; a mutex and a condition take at most 64 bytes on Linux and macOS.
EPOCH = 0  # number of the run, as a ticket word
PROGRAM, NUM_RECORDS, BASE, TIMES = 64, 72, 80, 88  # of the run; BASE is its first record's number
NUM_THREADS, IS_STOPPED, NEXT_BASE = 128, 136, 144
DONE = 192  # number of the last run that has ended
SLEEPERS = 256
POSITION = 320
MUTEX = 384
CONDITION = 512
ENTRIES = 640  # a ring of ticket words, a cache line each
NUM_ENTRIES = 128
THREADS = (
    ENTRIES + 64 * NUM_ENTRIES
)  # a line for each: address of its scratch, whether it is inside
IS_INSIDE = 8

# A ticket word: number << 24 | shares << 16 | shares claimed << 8 | shares done. The record with
# that number is in progress or, if all shares are done, over; so are all records with lower
# numbers.
MOST_SHARES = 255
MOST_JOINED = 32  # records in progress at once: well below NUM_ENTRIES


@njit
def wake(control: int) -> None:
    """Wake the sleepers, if any. The word they wait for has changed already."""
    if atomic_load(control + SLEEPERS) != 0:
        lock(control + MUTEX)
        wake_all(control + CONDITION)
        unlock(control + MUTEX)


@njit
def is_over(word: int, number: int) -> bool:
    """Whether all shares of record (or start of run) `number` are done, by the ticket word
    there.
    """
    value = atomic_load(word)
    if value >> 24 != number:
        return value >> 24 > number
    return value & 255 == value >> 16 & 255


@njit
def sleep_until_over(control: int, word: int, number: int) -> None:
    lock(control + MUTEX)
    # Either the waker sees this count, or this thread sees the waker's change of the word.
    atomic_add(control + SLEEPERS, 1)
    while not is_over(word, number):
        sleep_on(control + CONDITION, control + MUTEX)
    atomic_add(control + SLEEPERS, -1)
    unlock(control + MUTEX)


@njit
def wait_until_over(control: int, word: int, number: int) -> None:
    """Spin, then yield, then sleep until record (or start of run) `number` is over."""
    started = 0
    while True:
        for _ in range(SPINS_PER_LOOK):
            if is_over(word, number):
                return
            pause()
        if started == 0:
            started = nanoseconds()
        waited = nanoseconds() - started
        if waited > SLEEP_NS:
            sleep_until_over(control, word, number)
            return
        if waited > SPIN_NS:
            yield_core()


@njit
def entry_of(control: int, number: int) -> int:
    """Address of the ticket word of a record."""
    return control + ENTRIES + 64 * (number & (NUM_ENTRIES - 1))


@njit
def enter(control: int, thread: int, run: int) -> bool:
    """Announce that this thread looks at the run's program; False if the run has ended."""
    is_inside = control + THREADS + 64 * thread + IS_INSIDE
    atomic_store(is_inside, 1)
    if atomic_load(control + DONE) < run:
        return True
    atomic_store(is_inside, 0)
    return False


@njit
def leave(control: int, thread: int) -> None:
    atomic_store(control + THREADS + 64 * thread + IS_INSIDE, 0)


@njit
def claim(entry: int, number: int, shares: int) -> int:
    """Index of a share of the record that is now this thread's; -1 if there is none left."""
    while True:
        word = atomic_load(entry)
        if word >> 24 > number:
            return -1
        share = 0
        claimed = number << 24 | shares << 16 | 1 << 8
        if word >> 24 == number:
            share = word >> 8 & 255
            if share >= shares:
                return -1
            claimed = word + (1 << 8)
        if atomic_swap(entry, word, claimed) == word:
            return share


@njit
def run_shares(control: int, record: int, items: int, thread: int, number: int) -> None:
    """Do shares of a record until all are claimed."""
    code, args, flags = slot(record, 0), slot(record, 1), slot(record, 5)
    scratch = slot(control + THREADS, 8 * thread)
    most = min(slot(control + NUM_THREADS, 0), MOST_SHARES)
    if flags & CLAIM:
        most = MOST_SHARES
    elif flags & SERIAL:
        most = 1
    chunk = max(slot(record, 4), 1)
    chunks = quotient(items + chunk - 1, chunk)
    shares = min(chunks, most)
    entry = entry_of(control, number)
    share = claim(entry, number, shares)
    while share >= 0:
        first = quotient(chunks * share + shares - 1, shares) * chunk
        last = quotient(chunks * (share + 1) + shares - 1, shares) * chunk
        call_kernel(code, args, first, min(last, items), scratch)
        word = atomic_add(entry, 1) + 1
        if word & 255 == shares:
            wake(control)
        share = claim(entry, number, shares) if word >> 8 & 255 < shares else -1


@njit
def wait_for(control: int, thread: int, run: int, number: int, pending: int) -> bool:
    """Wait for record `number` + k for each bit k of `pending`; False if the run has ended."""
    while pending != 0:
        entry = entry_of(control, number)
        if pending & 1 != 0 and not is_over(entry, number):
            leave(control, thread)
            wait_until_over(control, entry, number)
            if not enter(control, thread, run):
                return False
        pending >>= 1
        number += 1
    return True


@njit
def run_records(control: int, thread: int, run: int) -> None:
    """Take part in a run as one of the team's threads, until its records are over."""
    if not enter(control, thread, run):
        return
    program, num_records = slot(control + PROGRAM, 0), slot(control + NUM_RECORDS, 0)
    base, times = slot(control + BASE, 0), slot(control + TIMES, 0)
    started = nanoseconds()
    first, pending = 0, 0  # bit k: record first + k is in progress
    for i in range(num_records):
        record = program + i * 8 * RECORD_SLOTS
        count, items = slot(record, 2), slot(record, 3)
        if count != 0:
            items *= slot(count, 0)
        if items > 0:
            if thread == 0:
                store(control + POSITION, i)
            run_shares(control, record, items, thread, base + i)
            pending |= 1 << (i - first)
        # An empty record still closes what was joined before it.
        is_closed = (
            slot(record, 5) & JOINED == 0 or i - first >= MOST_JOINED or i == num_records - 1
        )
        if pending != 0 and is_closed:
            if not wait_for(control, thread, run, base + first, pending):
                return
            pending = 0
        if pending == 0:
            first = i + 1
        if times != 0 and thread == 0:
            now = nanoseconds()
            store(times + 8 * i, now - started)
            started = now
    leave(control, thread)


@kernel
def team_worker(control: int, thread: int, _a: int, _b: int) -> None:
    """Life of a thread that is not thread 0: take part in runs until the team is stopped."""
    run = 0
    while True:
        wait_until_over(control, control + EPOCH, run + 1)
        run = atomic_load(control + EPOCH) >> 24
        if slot(control + IS_STOPPED, 0) != 0:
            return
        run_records(control, thread, run)


@kernel
def team_run(control: int, program: int, num_records: int, times: int) -> None:
    """Run a program as thread 0.

    times  address of int64 [num_records] for the nanoseconds of each record, or 0
    """
    run = (atomic_load(control + EPOCH) >> 24) + 1
    base = slot(control + NEXT_BASE, 0)
    store(control + PROGRAM, program)
    store(control + NUM_RECORDS, num_records)
    store(control + BASE, base)
    store(control + TIMES, times)
    store(control + NEXT_BASE, base + num_records)
    atomic_store(control + EPOCH, run << 24)
    wake(control)
    run_records(control, 0, run)
    store(control + POSITION, -1)
    atomic_store(control + DONE, run)
    # A thread that is still inside has no share left, but may read the program once more.
    for thread in range(1, slot(control + NUM_THREADS, 0)):
        spins = 0
        while atomic_load(control + THREADS + 64 * thread + IS_INSIDE) != 0:
            spins += 1
            if spins < SPINS_PER_LOOK * SPINS_PER_LOOK:
                pause()
            else:
                yield_core()


@kernel
def team_stop(control: int, _a: int, _b: int, _c: int) -> None:
    """Let the workers return."""
    store(control + IS_STOPPED, 1)
    atomic_add(control + EPOCH, 1 << 24)
    wake(control)


def native(entry: Kernel) -> "ctypes._NamedFuncPointer":
    """The kernel as a function that Python can call; the GIL is free meanwhile."""
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
    return prototype(entry.address)


class Team:
    """`num_threads` threads, each with `scratch_bytes` of 64-byte aligned private memory.

    One thread at a time may call `run` or `time`; any may.
    """

    def __init__(self, num_threads: int, scratch_bytes: int = 4 << 20) -> None:
        if num_threads < 1:
            raise ValueError(f"a team needs at least one thread, not {num_threads}")
        self.num_threads = num_threads
        self._run = native(team_run)
        control_bytes = THREADS + 64 * num_threads
        # One line more than asked for, so that equal offsets of two threads fall into different
        # cache sets.
        stride = up(scratch_bytes, 64) + 64
        memory = np.zeros(control_bytes + num_threads * stride + 64, np.uint8)
        memory = memory[-memory.ctypes.data % 64 :]
        self.control: int = memory.ctypes.data
        self._words: NDArray[np.int64] = memory[:control_bytes].view(np.int64)
        scratch = self.control + control_bytes + stride * np.arange(num_threads)
        self._words[THREADS // 8 :: 8] = scratch
        self._words[NEXT_BASE // 8] = 1
        self._words[NUM_THREADS // 8] = num_threads
        self._words[POSITION // 8] = -1
        make_mutex(self.control)
        threads = start_workers(self.control, num_threads, memory)
        self._finalizer = weakref.finalize(self, stop_workers, self.control, threads, memory)

    def run(self, program: int, num_records: int) -> None:
        """Run the program at address `program` to its end."""
        assert self._finalizer.alive, "the team is closed"
        self._run(self.control, program, num_records, 0)

    def time(self, program: int, num_records: int) -> NDArray[np.int64]:
        """Run the program and return the nanoseconds that each record took, with its barrier."""
        assert self._finalizer.alive, "the team is closed"
        times = np.zeros(num_records, np.int64)
        self._run(self.control, program, num_records, times.ctypes.data)
        return times

    @property
    def position(self) -> tuple[int, int]:
        """(runs started, index of the record that runs or -1); a run that hangs keeps both."""
        return int(self._words[EPOCH // 8]) >> 24, int(self._words[POSITION // 8])

    def close(self) -> None:
        """Stop the threads and wait until they have returned; no run may be going on."""
        self._finalizer()


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def make_mutex(control: int) -> None:
    library = ctypes.CDLL(None)
    for name, offset in (("pthread_mutex_init", MUTEX), ("pthread_cond_init", CONDITION)):
        if getattr(library, name)(ctypes.c_void_p(control + offset), None) != 0:
            raise MemoryError(name)


def start_workers(
    control: int, num_threads: int, memory: NDArray[np.uint8]
) -> list[threading.Thread]:
    """Start threads 1 and up. They keep `memory` alive, whatever happens to the team."""
    worker = native(team_worker)

    def work(thread: int, memory: NDArray[np.uint8]) -> None:
        worker(control, thread, 0, 0)

    threads = [
        threading.Thread(target=work, args=(t, memory), name=f"team-{t}", daemon=True)
        for t in range(1, num_threads)
    ]
    for thread in threads:
        thread.start()
    return threads


def stop_workers(control: int, threads: list[threading.Thread], memory: NDArray[np.uint8]) -> None:
    native(team_stop)(control, 0, 0, 0)
    for thread in threads:
        # A kernel that hangs must not keep the interpreter from exiting.
        thread.join(timeout=5)
