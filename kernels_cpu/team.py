"""A persistent team of threads that runs programs of kernels without the interpreter.

A *program* is an array of records, `RECORD_SLOTS` int64 each:

    0 kernel   address of the kernel's machine code (`Kernel.address`)
    1 args     address of its argument block
    2 count    address of an int64 that is read when the record's turn comes; 0 stands for a
               constant 1
    3 factor   the record has *count * factor items
    4 chunk    items that are dealt out together, at least 1: every range a kernel gets starts at a
               multiple of it
    5 flags    SERIAL: thread 0 alone runs it, in one call; CLAIM: threads claim chunks from a
               counter, a call each; neither: each thread gets one range of chunks, in one call.
               JOINED: the next record does not need what this one writes
    6 label    for whoever looks at a program; the team does not read it
    7          0

All threads run the records in order, with a barrier between them except after a JOINED one; a
record without items costs a few nanoseconds. A kernel is called as kernel(args, first, last,
scratch) and must not depend on how items are dealt. A count may be written by an earlier record,
provided that no record between that one and this had the same count.

Claiming is right where a chunk takes 50 microseconds or more, beside a busy process, and for
unequal cores.

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
EPOCH = 0
PROGRAM, NUM_RECORDS, NUM_THREADS, IS_STOPPED, TIMES = 64, 72, 80, 88, 96
ARRIVED = 128
GENERATION = 192
SLEEPERS = 256
POSITION = 320
MUTEX = 384
CONDITION = 512
CLAIMED = 640  # a counter for each record that runs since the last barrier
NUM_COUNTERS = 8
SCRATCH = CLAIMED + 64 * NUM_COUNTERS


@njit
def wake(control: int) -> None:
    """Wake the sleepers, if any. The word they wait for has changed already."""
    if atomic_load(control + SLEEPERS) != 0:
        lock(control + MUTEX)
        wake_all(control + CONDITION)
        unlock(control + MUTEX)


@njit
def sleep_while(control: int, word: int, value: int) -> None:
    """Sleep until the word has another value."""
    lock(control + MUTEX)
    # Either the waker sees this count, or this thread sees the waker's change of the word.
    atomic_add(control + SLEEPERS, 1)
    while atomic_load(word) == value:
        sleep_on(control + CONDITION, control + MUTEX)
    atomic_add(control + SLEEPERS, -1)
    unlock(control + MUTEX)


@njit
def wait_while(control: int, word: int, value: int) -> None:
    """Return as soon as the word has another value: spin, then yield, then sleep."""
    started = 0
    while True:
        for _ in range(SPINS_PER_LOOK):
            if atomic_load(word) != value:
                return
            pause()
        if started == 0:
            started = nanoseconds()
        waited = nanoseconds() - started
        if waited > SLEEP_NS:
            sleep_while(control, word, value)
            return
        if waited > SPIN_NS:
            yield_core()


@njit
def barrier(control: int, num_threads: int) -> None:
    """Wait until all threads are here. The last one resets the claim counters."""
    if num_threads == 1:
        reset_counters(control)
        return
    generation = atomic_load(control + GENERATION)
    if atomic_add(control + ARRIVED, 1) == num_threads - 1:
        store(control + ARRIVED, 0)
        reset_counters(control)
        atomic_add(control + GENERATION, 1)
        wake(control)
    else:
        wait_while(control, control + GENERATION, generation)


@njit
def reset_counters(control: int) -> None:
    for i in range(NUM_COUNTERS):
        store(control + CLAIMED + 64 * i, 0)


@njit
def run_share(
    control: int, record: int, items: int, thread: int, num_threads: int, counter: int
) -> None:
    """This thread's part of one record; `counter` is the address of its claim counter."""
    code, args, flags = slot(record, 0), slot(record, 1), slot(record, 5)
    scratch = slot(control + SCRATCH, thread)
    if flags & SERIAL:
        if thread == 0:
            call_kernel(code, args, 0, items, scratch)
        return
    chunk = max(slot(record, 4), 1)
    if flags & CLAIM:
        first = atomic_add(counter, chunk)
        while first < items:
            call_kernel(code, args, first, min(first + chunk, items), scratch)
            first = atomic_add(counter, chunk)
        return
    # Rounded up, so that a single chunk is thread 0's.
    chunks = quotient(items + chunk - 1, chunk)
    first = quotient(chunks * thread + num_threads - 1, num_threads) * chunk
    last = quotient(chunks * (thread + 1) + num_threads - 1, num_threads) * chunk
    if first < min(last, items):
        call_kernel(code, args, first, min(last, items), scratch)


@njit
def run_records(control: int, thread: int) -> None:
    """Run the program in the control block as one of the team's threads."""
    program = slot(control + PROGRAM, 0)
    num_threads = slot(control + NUM_THREADS, 0)
    times = slot(control + TIMES, 0)
    started = nanoseconds()
    joined = 0  # records that have run since the last barrier
    for i in range(slot(control + NUM_RECORDS, 0)):
        record = program + i * 8 * RECORD_SLOTS
        count = slot(record, 2)
        items = slot(record, 3)
        if count != 0:
            items *= slot(count, 0)
        if items > 0:
            if thread == 0:
                store(control + POSITION, i)
            counter = control + CLAIMED + 64 * joined
            run_share(control, record, items, thread, num_threads, counter)
            joined += 1
        # An empty record still closes what was joined before it.
        if joined == NUM_COUNTERS or (joined > 0 and slot(record, 5) & JOINED == 0):
            barrier(control, num_threads)
            joined = 0
        if times != 0 and thread == 0:
            now = nanoseconds()
            store(times + 8 * i, now - started)
            started = now
    # The program may change as soon as thread 0 returns.
    barrier(control, num_threads)


@kernel
def team_worker(control: int, thread: int, _a: int, _b: int) -> None:
    """Life of a thread that is not thread 0: take part in runs until the team is stopped."""
    epoch = 0
    while True:
        wait_while(control, control + EPOCH, epoch)
        epoch += 1
        if slot(control + IS_STOPPED, 0) != 0:
            return
        run_records(control, thread)


@kernel
def team_run(control: int, program: int, num_records: int, times: int) -> None:
    """Run a program as thread 0.

    times  address of int64 [num_records] for the nanoseconds of each record, or 0
    """
    store(control + PROGRAM, program)
    store(control + NUM_RECORDS, num_records)
    store(control + TIMES, times)
    atomic_add(control + EPOCH, 1)
    wake(control)
    run_records(control, 0)
    store(control + POSITION, -1)


@kernel
def team_stop(control: int, _a: int, _b: int, _c: int) -> None:
    """Let the workers return."""
    store(control + IS_STOPPED, 1)
    atomic_add(control + EPOCH, 1)
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
        control_bytes = up(SCRATCH + 8 * num_threads, 64)
        # One line more than asked for, so that equal offsets of two threads fall into different
        # cache sets.
        stride = up(scratch_bytes, 64) + 64
        memory = np.zeros(control_bytes + num_threads * stride + 64, np.uint8)
        memory = memory[-memory.ctypes.data % 64 :]
        self.control: int = memory.ctypes.data
        self._words: NDArray[np.int64] = memory[:control_bytes].view(np.int64)
        first = SCRATCH // 8
        self._words[first : first + num_threads] = (
            self.control + control_bytes + stride * np.arange(num_threads)
        )
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
        return int(self._words[EPOCH // 8]), int(self._words[POSITION // 8])

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
