"""The products of prompt attention in float32, with the forms of their operands.

The same on bfloat16 tiles is in attention_tiles.py.

    K        float32 [KEYS][head_dim + K_PAD]
    queries  float32 [head_dim][rows]
    V        float32 [head_dim / strip][KEYS][strip]
    weights  float32 [KEYS][rows], where the scores were

A micro-kernel keeps `strip()` keys, or dimensions, times VECTORS vectors of rows in registers.
"""

from collections.abc import Callable

from numba import types

from kernels_cpu import attention as a
from kernels_cpu.attention_math import broadcast, lanes, transpose, zeros
from kernels_cpu.kv import KV_TYPES, KVType
from kernels_cpu.simd import Ir, Value, emits, f32, i64, vec

BLOCK, KEYS = a.BLOCK, a.KEYS
STEP = 8  # keys are left out that many at a time: `strip()` divides it
VECTORS = 2  # of rows together
K_PAD = 16  # float32 values between rows of unpacked K, against rows that share cache sets


def rows_together() -> int:
    return VECTORS * lanes()


def strip() -> int:
    """Left operands of a micro-kernel: strip() * VECTORS sums stay in registers."""
    return 8 if lanes() == 16 else 4


def multiply(
    e: Ir,
    left: Callable[[int, Value], Value],
    right: Value,
    count: Value,
    sums: list[list[Value]],
) -> None:
    """sums[i][j] += sum over x < count of left(i, x) * vector j of right[x].

    left   gives the address of a float32
    right  float32 [count][rows_together()]
    count  a multiple of 8
    """
    n, unroll = lanes(), 4
    with e.loop(e.b.lshr(count, e.const(unroll.bit_length() - 1))) as step:
        for u in range(unroll):
            x = e.b.add(e.mul(step.index, unroll), e.const(u))
            row = e.at(right, e.mul(x, 4 * rows_together()))
            vectors = [e.load(e.at(row, 4 * n * j), vec(f32, n), 4) for j in range(VECTORS)]
            for i in range(len(sums)):
                value = broadcast(e, left(i, x), n)
                for j in range(VECTORS):
                    e.set(sums[i][j], e.fma(value, vectors[j], e.get(sums[i][j])))


@emits(6)
def score_keys(
    e: Ir, k: Value, q: Value, scores: Value, first: Value, end: Value, head_dim: Value
) -> None:
    """scores[key] of a group of rows for keys [first, end), multiples of 8.

    k       float32 [KEYS][head_dim + K_PAD]
    q       float32 [head_dim][rows]
    scores  float32 [KEYS][rows]
    """
    n, m = lanes(), strip()
    k_row = e.mul(e.b.add(head_dim, e.const(K_PAD)), 4)
    with e.loop(e.b.lshr(e.b.sub(end, first), e.const(m.bit_length() - 1))) as part:
        key = e.b.add(first, e.mul(part.index, m))
        keys = e.at(k, e.mul(key, k_row))
        rows = [e.at(keys, e.mul(k_row, i)) for i in range(m)]
        sums = [[e.variable(zeros(e, n)) for _ in range(VECTORS)] for _ in range(m)]
        multiply(e, lambda i, x: e.at(rows[i], e.mul(x, 4)), q, head_dim, sums)
        to = e.at(scores, e.mul(key, 4 * rows_together()))
        for i in range(m):
            for j in range(VECTORS):
                e.store(e.get(sums[i][j]), e.at(to, 4 * (i * rows_together() + j * n)), align=4)


@emits(7)
def add_values(
    e: Ir,
    v: Value,
    weights: Value,
    result: Value,
    keep: Value,
    first: Value,
    end: Value,
    head_dim: Value,
) -> None:
    """result = result * keep + weights * V over keys [first, end) of a group of rows.

    v        float32 [head_dim / strip][KEYS][strip]
    weights  float32 [KEYS][rows]
    result   float32 [head_dim][rows]
    keep     float32 [rows]
    """
    n, m = lanes(), strip()
    kept = [e.load(e.at(keep, 4 * n * j), vec(f32, n), 4) for j in range(VECTORS)]
    start = e.at(weights, e.mul(first, 4 * rows_together()))
    with e.loop(e.b.lshr(head_dim, e.const(m.bit_length() - 1))) as part:
        values = e.at(v, e.mul(e.b.add(e.mul(part.index, KEYS), first), 4 * m))
        to = e.at(result, e.mul(part.index, 4 * m * rows_together()))
        sums = []
        for i in range(m):
            places = [e.at(to, 4 * (i * rows_together() + j * n)) for j in range(VECTORS)]
            loads = [e.load(p, vec(f32, n), 4) for p in places]
            sums.append([e.variable(e.b.fmul(x, f)) for x, f in zip(loads, kept, strict=True)])
        multiply(
            e, lambda i, x: e.at(values, 4 * i, e.mul(x, 4 * m)), start, e.b.sub(end, first), sums
        )
        for i in range(m):
            for j in range(VECTORS):
                e.store(e.get(sums[i][j]), e.at(to, 4 * (i * rows_together() + j * n)), align=4)


@emits(3, table=KV_TYPES)
def unpack_keys(e: Ir, kv: KVType, source: Value, target: Value, head_dim: Value) -> None:
    """A part of K to float32 [32][head_dim + K_PAD]."""
    with e.loop(e.const(BLOCK)) as key:
        row = kv.row(e, source, key.index, head_dim)
        to = e.at(target, e.mul(e.mul(key.index, e.b.add(head_dim, e.const(K_PAD))), 4))
        with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
            values = kv.load(e, row, e.mul(d.index, 8), 8)
            e.store(values, e.at(to, e.mul(d.index, 32)), align=4)


@emits(3, table=KV_TYPES)
def unpack_values(e: Ir, kv: KVType, source: Value, target: Value, head_dim: Value) -> None:
    """A part of V to float32 [head_dim / strip][KEYS][strip]."""
    m = strip()
    with e.loop(e.const(BLOCK)) as key:
        row = kv.row(e, source, key.index, head_dim)
        to = e.at(target, e.mul(key.index, 4 * m))
        with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
            values = kv.load(e, row, e.mul(d.index, 8), 8)
            for part in range(8 // m):
                place = e.at(to, e.mul(d.index, 32 * KEYS), 4 * m * KEYS * part)
                e.store(e.slice(values, part * m, m), place, align=4)


@emits(4)
def pack_queries(e: Ir, rows: Value, target: Value, args: Value, head_dim: Value) -> None:
    """Queries at the addresses `rows`, times the factor, to float32 [head_dim][rows]."""
    factor = broadcast(e, e.at(args, 8 * a.QUERY_FACTOR), 8)
    with e.loop(e.const(rows_together() // 8)) as part:
        places = e.at(rows, e.mul(part.index, 64))
        sources = [e.load(e.at(places, 8 * i), i64, align=8) for i in range(8)]
        to = e.at(target, e.mul(part.index, 32))
        with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
            values = [e.load(e.at(s, e.mul(d.index, 32)), vec(f32, 8), 4) for s in sources]
            for i, column in enumerate(transpose(e, values)):
                place = e.at(to, e.mul(d.index, 32 * rows_together()), 4 * i * rows_together())
                e.store(e.b.fmul(column, factor), place, align=4)


@emits(0, types.int64)
def num_strip(e: Ir) -> Value:
    return e.const(strip())
