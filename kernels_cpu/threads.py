"""Emitted pieces of the thread team: atomics, the clock, the wait hint, and calls into the C
library.

Symbols of the C library (`pthread_*`, `sched_yield`, `clock_gettime`) are resolved in the running
process, so cached code stays valid in the next one.
"""

import sys

from llvmlite import ir
from numba import types

from kernels_cpu.simd import Ir, Value, emits, i32, i64, void

CLOCK_MONOTONIC = 6 if sys.platform == "darwin" else 1


@emits(1, types.int64)
def atomic_load(e: Ir, address: Value) -> Value:
    return e.b.load_atomic(e.pointer(address, i64), "seq_cst", 8)


@emits(2)
def atomic_store(e: Ir, address: Value, value: Value) -> None:
    e.b.store_atomic(value, e.pointer(address, i64), "seq_cst", 8)


@emits(2, types.int64)
def atomic_add(e: Ir, address: Value, value: Value) -> Value:
    """The value before the addition."""
    return e.b.atomic_rmw("add", e.pointer(address, i64), value, "seq_cst")


@emits(3, types.int64)
def atomic_swap(e: Ir, address: Value, expected: Value, value: Value) -> Value:
    """Store the value if the word is as expected; the word before."""
    pair = e.b.cmpxchg(e.pointer(address, i64), expected, value, "seq_cst", "seq_cst")
    return e.b.extract_value(pair, 0)


@emits(2)
def store(e: Ir, address: Value, value: Value) -> None:
    e.store(value, address, align=8)


@emits(2, types.int64)
def quotient(e: Ir, a: Value, b: Value) -> Value:
    """a // b of non-negative integers, b > 0: without the exception of Python's division."""
    return e.b.udiv(a, b)


@emits(5)
def call_kernel(
    e: Ir, address: Value, args: Value, first: Value, last: Value, scratch: Value
) -> None:
    kernel_type = ir.FunctionType(void, [i64] * 4)
    e.b.call(e.b.inttoptr(address, kernel_type.as_pointer()), [args, first, last, scratch])


def emit_pause(e: Ir) -> None:
    """Tell the core that this is a waiting loop."""
    target = str(e.b.module.triple)
    if target.startswith(("x86_64", "i686")):
        e.call("llvm.x86.sse2.pause", void)
    elif target.startswith(("aarch64", "arm64")):
        e.call("llvm.aarch64.hint", void, e.const(1, i32))


pause = emits(0)(emit_pause)


@emits(0, types.int64)
def nanoseconds(e: Ir) -> Value:
    """A clock that never goes backwards."""
    time = e.b.alloca(i64, size=2)
    e.call("clock_gettime", i32, e.const(CLOCK_MONOTONIC, i32), time)
    seconds = e.b.load(time)
    rest = e.b.load(e.b.gep(time, [e.const(1)]))
    return e.b.add(e.b.mul(seconds, e.const(1_000_000_000)), rest)


@emits(0)
def yield_core(e: Ir) -> None:
    e.call("sched_yield", i32)


@emits(1)
def lock(e: Ir, mutex: Value) -> None:
    e.call("pthread_mutex_lock", i32, mutex)


@emits(1)
def unlock(e: Ir, mutex: Value) -> None:
    e.call("pthread_mutex_unlock", i32, mutex)


@emits(2)
def sleep_on(e: Ir, condition: Value, mutex: Value) -> None:
    """Give back the mutex and sleep until the condition is signalled; may wake for no reason."""
    e.call("pthread_cond_wait", i32, condition, mutex)


@emits(1)
def wake_all(e: Ir, condition: Value) -> None:
    e.call("pthread_cond_broadcast", i32, condition)
