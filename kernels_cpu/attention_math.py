"""Vector arithmetic of the attention kernels: exponential, soft cap, transposition.

Scores are in units of log2: the query carries the factor log2(e), so that a weight is one `exp2`.
"""

import math
from collections.abc import Sequence

from llvmlite import ir
from numba import types

from kernels_cpu.kernel import isa
from kernels_cpu.simd import Ir, Value, emits, f32, i32, vec

LOG2E = math.log2(math.e)

# 2^r = 1 + c1 r + ... on [-1/2, 1/2]: least largest relative error, 9e-8 before rounding.
EXP2 = (0.6931469775966154, 0.24022242081847697, 0.05550733745610406, 0.00967151286, 0.00132647271)
EXP2_LEAST = -127.0  # everything at or below gives exactly 0
EXP2_MAGIC = 1.5 * 2.0**23  # adding it rounds a float32 to an integer, ties to even

# The maximum of no scores: finite, so that differences of maxima are numbers.
LOWEST = -1e30


def lanes() -> int:
    """float32 lanes of the vectors that attention works with at this ISA level."""
    return 16 if isa() in ("amx", "avx512") else 8


def larger(e: Ir, a: Value, b: Value) -> Value:
    """a where a > b, else b: one instruction, and what is not a number in b stays."""
    return e.b.select(e.b.fcmp_ordered(">", a, b), a, b)


def exp2(e: Ir, x: Value) -> Value:
    """2^x of float32 vectors for x < 128, to 2e-7; exactly 1 at 0, exactly 0 from -127 down."""
    integers = vec(i32, x.type.count)
    x = larger(e, e.const(EXP2_LEAST, x.type), x)
    shifted = e.b.fadd(x, e.const(EXP2_MAGIC, x.type))
    r = e.b.fsub(x, e.b.fsub(shifted, e.const(EXP2_MAGIC, x.type)))
    p = e.const(EXP2[-1], x.type)
    for c in (*EXP2[-2::-1], 1.0):
        p = e.fma(p, r, e.const(c, x.type))
    exponent = e.b.shl(e.b.bitcast(shifted, integers), e.const(23, integers))
    return e.b.bitcast(e.b.add(e.b.bitcast(p, integers), exponent), x.type)


def cap_score(e: Ir, y: Value, cap: Value) -> Value:
    """cap * tanh(y ln(2) / 2), as cap - 2 cap / (2^y + 1)."""
    limit = e.const(60.0, y.type)  # from here on the quotient vanishes in float32
    y = e.b.select(e.b.fcmp_ordered("<", limit, y), limit, y)
    quotient = e.b.fdiv(e.b.fadd(cap, cap), e.b.fadd(exp2(e, y), e.const(1.0, y.type)))
    return e.b.fsub(cap, quotient)


def broadcast(e: Ir, address: Value, n: int) -> Value:
    """The float32 at `address` in n lanes."""
    return e.splat(e.load(address, f32, align=4), n)


def transpose(e: Ir, rows: Sequence[Value]) -> list[Value]:
    """Columns of a square of n row vectors of n lanes, n a power of two.

    Zipping the first half of all values with the second rotates the index (row, column) by one bit.
    """
    n = len(rows)
    low = [lane for k in range(n // 2) for lane in (k, n + k)]
    high = [lane for k in range(n // 2, n) for lane in (k, n + k)]
    values = list(rows)
    for _ in range(n.bit_length() - 1):
        pairs = list(zip(values[: n // 2], values[n // 2 :], strict=True))
        values = [e.shuffle(a, lanes, b) for a, b in pairs for lanes in (low, high)]
    return values


def sums_of_lanes(e: Ir, vectors: Sequence[Value]) -> Value:
    """Lane i is the sum of vectors[i], by halving as in `Ir.tree_sum`; n vectors of n lanes.

    A step takes x and y with sums of `segment` lanes each, in turn: one blend brings the lower
    halves of x and the upper ones of y, one shuffle the others.
    """
    n = len(vectors)
    values = [vectors[int(f"{i:0{n.bit_length() - 1}b}"[::-1], 2)] for i in range(n)]
    segment = n
    while segment > 1:
        half = segment // 2
        is_lower = [lane % segment < half for lane in range(n)]
        stay = [lane if low else n + lane for lane, low in enumerate(is_lower)]
        move = [lane + half if low else n + lane - half for lane, low in enumerate(is_lower)]
        values = [
            e.b.fadd(e.shuffle(x, stay, y), e.shuffle(x, move, y))
            for x, y in zip(values[::2], values[1::2], strict=True)
        ]
        segment = half
    return values[0]


def zeros(e: Ir, n: int) -> ir.Constant:
    return e.const(0.0, vec(f32, n))


def padded(e: Ir, count: Value, unit: int) -> Value:
    """`count` rounded up to a multiple of `unit`, a power of two."""
    return e.b.and_(e.b.add(count, e.const(unit - 1)), e.const(-unit))


# Scalars for kernel bodies in Python.


@emits(0, types.int64)
def num_lanes(e: Ir) -> Value:
    return e.const(lanes())


@emits(1, types.int64)
def load_int(e: Ir, address: Value) -> Value:
    """The int32 at `address`."""
    return e.b.sext(e.load(address, i32, align=4), ir.IntType(64))


@emits(2)
def store_int(e: Ir, address: Value, value: Value) -> None:
    e.store(e.b.trunc(value, i32), address, align=4)


@emits(2)
def store_slot(e: Ir, address: Value, value: Value) -> None:
    e.store(value, address, align=8)
