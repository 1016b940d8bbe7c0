"""Attention of prompt tokens: tiles of queries over blocks of keys, softmax on the way.

An item is up to `prompt_tile` tokens of a segment with the query heads of one KV head. A *row* is
one (token, query head). Rows lie along the lanes of vectors, `rows_together()` side by side, so
that every step of the softmax acts on each row alone, needs no sum over lanes, and neither K nor V
is ever transposed:

    scores[key][row] = sum over d of    k[key][d] * q[d][row]
    result[d][row]   = sum over keys of v[d][key] * weight[key][row]

Keys are taken in blocks at absolute multiples of KEYS. A row's operations and their order depend
on its position alone: keys that it does not see add exact zeros, so that leaving them out or not
is the same.

Arguments and work lists: attention.py.
"""

from collections.abc import Callable

from numba import njit, types

from kernels_cpu import attention as a
from kernels_cpu.attention_generated import sink_of
from kernels_cpu.attention_math import (
    LOG2E,
    LOWEST,
    broadcast,
    cap_score,
    exp2,
    lanes,
    larger,
    load_int,
    load_kv,
    quotient,
    store_int,
    store_slot,
    transpose,
    zeros,
)
from kernels_cpu.kernel import kernel
from kernels_cpu.simd import Ir, Value, emits, f32, i32, i64, slot, vec

BLOCK = a.BLOCK
KEYS = 64  # positions of a block of keys
STRIP = 8  # keys, or dimensions, that a product takes at a time
K_PAD = 16  # float32 values between rows of unpacked K, against rows that share cache sets
VECTORS = 2  # of rows together


def rows_together() -> int:
    return VECTORS * lanes()


def strip() -> int:
    """Left operands of a micro-kernel: strip() * VECTORS sums stay in registers."""
    return 8 if lanes() == 16 else 4


@emits(0, types.int64)
def num_rows_together(e: Ir) -> Value:
    return e.const(rows_together())


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


@emits(4)
def cap_keys(e: Ir, scores: Value, first: Value, end: Value, args: Value) -> None:
    """The soft cap, on keys [first, end) of a group of rows."""
    n = lanes()
    cap = broadcast(e, e.at(args, 8 * a.CAP), n)
    start = e.at(scores, e.mul(first, 4 * rows_together()))
    with e.loop(e.mul(e.b.sub(end, first), VECTORS)) as i:
        address = e.at(start, e.mul(i.index, 4 * n))
        e.store(cap_score(e, e.load(address, vec(f32, n), 4), cap), address, align=4)


@emits(6)
def hide_keys(
    e: Ir, scores: Value, first: Value, end: Value, base: Value, positions: Value, window: Value
) -> None:
    """Scores of keys that a row does not see become -inf.

    base       position of key 0
    positions  int32 [rows] of the rows' tokens
    window     a row at p sees p - window + 1 .. p
    """
    n = lanes()
    hidden = e.const(float("-inf"), vec(f32, n))
    for j in range(VECTORS):
        newest = e.load(e.at(positions, 4 * n * j), vec(i32, n), 4)
        oldest = e.b.sub(newest, e.splat(e.b.trunc(e.b.sub(window, e.const(1)), i32), n))
        with e.loop(e.b.sub(end, first)) as i:
            key = e.b.add(first, i.index)
            position = e.splat(e.b.trunc(e.b.add(base, key), i32), n)
            seen = e.b.and_(
                e.b.icmp_signed("<=", position, newest), e.b.icmp_signed(">=", position, oldest)
            )
            address = e.at(scores, e.mul(key, 4 * rows_together()), 4 * n * j)
            score = e.load(address, hidden.type, 4)
            e.store(e.b.select(seen, score, hidden), address, align=4)


@emits(5)
def weigh_keys(e: Ir, scores: Value, first: Value, end: Value, state: Value, keep: Value) -> None:
    """Scores become weights 2^(s - m), m the largest score so far; the rows' state moves on.

    state  float32 [2][rows]: m, sum of weights
    keep   float32 [rows]: factor for what was summed up so far
    """
    n = lanes()
    stride = 4 * rows_together()
    steps = e.b.lshr(e.b.sub(end, first), e.const(3))
    start = e.at(scores, e.mul(first, stride))
    for j in range(VECTORS):
        column = e.at(start, 4 * n * j)
        at_m, at_l = e.at(state, 4 * n * j), e.at(state, stride + 4 * n * j)
        before = e.load(at_m, vec(f32, n), 4)
        tops = [e.variable(before) for _ in range(4)]
        with e.loop(steps) as i:
            for u in range(8):
                s = e.load(e.at(column, e.mul(i.index, 8 * stride), u * stride), vec(f32, n), 4)
                e.set(tops[u % 4], larger(e, e.get(tops[u % 4]), s))
        t = [e.get(x) for x in tops]
        m = larger(e, larger(e, t[0], t[1]), larger(e, t[2], t[3]))
        totals = [e.variable(zeros(e, n)) for _ in range(4)]
        with e.loop(steps) as i:
            for u in range(8):
                address = e.at(column, e.mul(i.index, 8 * stride), u * stride)
                p = exp2(e, e.b.fsub(e.load(address, vec(f32, n), 4), m))
                e.store(p, address, align=4)
                e.set(totals[u % 4], e.b.fadd(e.get(totals[u % 4]), p))
        t = [e.get(x) for x in totals]
        factor = exp2(e, e.b.fsub(before, m))
        total = e.b.fadd(e.b.fadd(t[0], t[1]), e.b.fadd(t[2], t[3]))
        e.store(e.fma(e.load(at_l, vec(f32, n), 4), factor, total), at_l, align=4)
        e.store(m, at_m, align=4)
        e.store(factor, e.at(keep, 4 * n * j), align=4)


@emits(4)
def unpack_keys(e: Ir, source: Value, target: Value, count: Value, head_dim: Value) -> None:
    """float16 [count][head_dim] to float32 [count][head_dim + K_PAD]."""
    with e.loop(count) as key:
        row = e.at(source, e.mul(e.mul(key.index, head_dim), 2))
        to = e.at(target, e.mul(e.mul(key.index, e.b.add(head_dim, e.const(K_PAD))), 4))
        with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
            e.store(load_kv(e, e.at(row, e.mul(d.index, 16)), 8), e.at(to, e.mul(d.index, 32)), 4)


@emits(4)
def unpack_values(e: Ir, source: Value, target: Value, count: Value, head_dim: Value) -> None:
    """float16 [count][head_dim] to float32 [head_dim / strip][KEYS][strip]."""
    m = strip()
    with e.loop(count) as key:
        row = e.at(source, e.mul(e.mul(key.index, head_dim), 2))
        to = e.at(target, e.mul(key.index, 4 * m))
        with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
            values = load_kv(e, e.at(row, e.mul(d.index, 16)), 8)
            for part in range(8 // m):
                place = e.at(to, e.mul(d.index, 32 * KEYS), 4 * m * KEYS * part)
                e.store(e.slice(values, part * m, m), place, align=4)


@emits(4)
def clear_from(e: Ir, k: Value, v: Value, first: Value, head_dim: Value) -> None:
    """Zero keys [first, KEYS) of both unpacked blocks."""
    m = strip()
    with e.loop(e.b.sub(e.const(KEYS), first)) as i:
        key = e.b.add(first, i.index)
        with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
            row = e.at(k, e.mul(e.mul(key, e.b.add(head_dim, e.const(K_PAD))), 4))
            e.store(zeros(e, 8), e.at(row, e.mul(d.index, 32)), align=4)
            for part in range(8 // m):
                place = e.at(v, e.mul(d.index, 32 * KEYS), e.mul(key, 4 * m), 4 * m * KEYS * part)
                e.store(zeros(e, m), place, align=4)


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


@emits(4)
def store_results(e: Ir, rows: Value, result: Value, state: Value, head_dim: Value) -> None:
    """result / sum of a group of rows, to the addresses `rows`."""
    stride = 4 * rows_together()
    with e.loop(e.const(rows_together() // 8)) as part:
        places = e.at(rows, e.mul(part.index, 64))
        targets = [e.load(e.at(places, 8 * i), i64, align=8) for i in range(8)]
        total = e.load(e.at(state, stride, e.mul(part.index, 32)), vec(f32, 8), 4)
        source = e.at(result, e.mul(part.index, 32))
        with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
            columns = [
                e.load(e.at(source, e.mul(d.index, 8 * stride), stride * i), vec(f32, 8), 4)
                for i in range(8)
            ]
            values = transpose(e, [e.b.fdiv(c, total) for c in columns])
            for target, value in zip(targets, values, strict=True):
                e.store(value, e.at(target, e.mul(d.index, 32)), align=4)


@emits(3)
def start_row(e: Ir, state: Value, row: Value, sink: Value) -> None:
    """m and sum of a row before any key; `sink`: address of a logit that joins the sum, or 0."""
    at_m = e.at(state, e.mul(row, 4))
    at_l = e.at(at_m, 4 * rows_together())
    e.store(e.const(LOWEST, f32), at_m, align=4)
    e.store(e.const(0.0, f32), at_l, align=4)
    with e.b.if_then(e.b.icmp_unsigned("!=", sink, e.const(0))):
        e.store(e.b.fmul(e.load(sink, f32, align=4), e.const(LOG2E, f32)), at_m, align=4)
        e.store(e.const(1.0, f32), at_l, align=4)


@emits(2)
def clear(e: Ir, address: Value, floats: Value) -> None:
    """Zero a multiple of 8 floats."""
    with e.loop(e.b.lshr(floats, e.const(3))) as i:
        e.store(zeros(e, 8), e.at(address, e.mul(i.index, 32)), align=4)


# A group of rows in scratch: addresses of queries and of results, positions, state, keep;
# then q and result, float32 [head_dim][rows] each.
GROUP_ROWS = 32  # room for rows_together() at every ISA level
Q_ADDRESSES = 0
OUT_ADDRESSES = 8 * GROUP_ROWS
ROW_POSITIONS = 16 * GROUP_ROWS
STATE = 20 * GROUP_ROWS
KEEP = 28 * GROUP_ROWS
GROUP_BYTES = 32 * GROUP_ROWS


# This and what follows is inlined, since Numba optimises a function of its own twice.
@njit(inline="always")
def start_groups(args: int, groups: int, entry: int, kv_head: int, dump: int) -> int:
    """Lay out an item's rows; the number of groups. Rows that fill up a group write to `dump`."""
    group, head_dim = slot(args, a.GROUP), slot(args, a.HEAD_DIM)
    work = slot(args, a.PROMPTS) + 16 * entry
    token, num_tokens = load_int(work + 4), load_int(work + 8)
    together = num_rows_together()
    group_bytes = GROUP_BYTES + 8 * head_dim * together
    num_rows = num_tokens * group
    num_groups = quotient(num_rows + together - 1, together)
    row_token, head = token, 0
    for g in range(num_groups):
        at = groups + g * group_bytes
        for r in range(together):
            is_real = g * together + r < num_rows
            if not is_real:
                row_token, head = token + num_tokens - 1, 0
            column = kv_head * group + head
            q = slot(args, a.Q) + 4 * (row_token * slot(args, a.Q_STRIDE) + column * head_dim)
            out = slot(args, a.OUT) + 4 * (row_token * slot(args, a.OUT_STRIDE) + column * head_dim)
            store_slot(at + Q_ADDRESSES + 8 * r, q)
            store_slot(at + OUT_ADDRESSES + 8 * r, out if is_real else dump)
            store_int(at + ROW_POSITIONS + 4 * r, load_int(slot(args, a.POSITIONS) + 4 * row_token))
            start_row(at + STATE, r, sink_of(args, column))
            head += 1
            if head == group:
                row_token, head = row_token + 1, 0
        pack_queries(at + Q_ADDRESSES, at + GROUP_BYTES, args, head_dim)
        clear(at + GROUP_BYTES + 4 * head_dim * together, head_dim * together)
    return num_groups


@njit(inline="always")
def unpack_block(
    args: int, table: int, kv_head: int, base: int, low: int, end: int, k: int, v: int
) -> None:
    """Unpack positions [base + low, base + KEYS) of K and V, zeros from position `end` on."""
    head_dim = slot(args, a.HEAD_DIM)
    for first in range(0, KEYS, BLOCK):
        position = base + first
        if position + BLOCK > base + low and position < end:
            block = load_int(table + 4 * quotient(position, BLOCK))
            offset = 2 * BLOCK * head_dim * (block * slot(args, a.NUM_KV_HEADS) + kv_head)
            to_k, to_v = k + 4 * first * (head_dim + K_PAD), v + 4 * first * num_strip()
            unpack_keys(slot(args, a.K) + offset, to_k, BLOCK, head_dim)
            unpack_values(slot(args, a.V) + offset, to_v, BLOCK, head_dim)
    if end < base + KEYS:
        clear_from(k, v, end - base, head_dim)


@emits(0, types.int64)
def num_strip(e: Ir) -> Value:
    return e.const(strip())


@njit(inline="always")
def attend_keys(
    args: int, at: int, base: int, low: int, end: int, k: int, v: int, scores: int
) -> None:
    """A group of rows over keys [low, end) of one unpacked block."""
    head_dim, window = slot(args, a.HEAD_DIM), slot(args, a.WINDOW)
    together = num_rows_together()
    oldest = load_int(at + ROW_POSITIONS)
    newest = oldest
    for r in range(together):
        position = load_int(at + ROW_POSITIONS + 4 * r)
        oldest, newest = min(oldest, position), max(newest, position)
    seen = window if window > 0 else newest + 1
    end = min(end, (newest - base + STRIP) & -STRIP)
    low = max(low, (oldest - seen + 1 - base) & -STRIP)
    if low >= end:
        return
    q = at + GROUP_BYTES
    result = q + 4 * head_dim * together
    score_keys(k, q, scores, low, end, head_dim)
    if slot(args, a.CAP) != 0:
        cap_keys(scores, low, end, args)
    if base + end - 1 > oldest or base + low < newest - seen + 1:
        hide_keys(scores, low, end, base, at + ROW_POSITIONS, seen)
    weigh_keys(scores, low, end, at + STATE, at + KEEP)
    add_values(v, scores, result, at + KEEP, low, end, head_dim)


@kernel
def attend_prompt(args: int, first: int, last: int, scratch: int) -> None:
    """Item = (prompt work entry, KV head); arguments and entries as in attention.py."""
    num_kv_heads, head_dim = slot(args, a.NUM_KV_HEADS), slot(args, a.HEAD_DIM)
    window = slot(args, a.WINDOW)
    together = num_rows_together()
    group_bytes = GROUP_BYTES + 8 * head_dim * together
    scores = scratch
    k = scores + 4 * KEYS * together
    v = k + 4 * KEYS * (head_dim + K_PAD)
    dump = v + 4 * KEYS * head_dim
    groups = dump + 4 * (head_dim + 16)
    for item in range(first, last):
        entry = quotient(item, num_kv_heads)
        kv_head = item - entry * num_kv_heads
        num_groups = start_groups(args, groups, entry, kv_head, dump)
        work = slot(args, a.PROMPTS) + 16 * entry
        table = slot(args, a.TABLES) + 4 * load_int(work) * slot(args, a.TABLE_WIDTH)
        position = load_int(slot(args, a.POSITIONS) + 4 * load_int(work + 4))
        end = position + load_int(work + 8)
        oldest = max(0, position - window + 1) if window > 0 else 0
        base = quotient(oldest, KEYS) * KEYS
        while base < end:
            low = max(0, oldest - base) & -STRIP
            unpack_block(args, table, kv_head, base, low, end, k, v)
            for g in range(num_groups):
                attend_keys(args, groups + g * group_bytes, base, low, KEYS, k, v, scores)
            base += KEYS
        for g in range(num_groups):
            at = groups + g * group_bytes
            result = at + GROUP_BYTES + 4 * head_dim * together
            store_results(at + OUT_ADDRESSES, result, at + STATE, head_dim)
