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
from kernels_cpu import attention_floats as floats
from kernels_cpu import attention_tiles as tiles
from kernels_cpu.amx import nearest_pair
from kernels_cpu.attention_floats import VECTORS, rows_together
from kernels_cpu.attention_math import (
    LOG2E,
    LOWEST,
    broadcast,
    cap_score,
    exp2,
    lanes,
    larger,
    load_int,
    padded,
    store_int,
    store_slot,
    transpose,
    zeros,
)
from kernels_cpu.attention_places import block_offset, part_bytes, sink_of
from kernels_cpu.kernel import kernel
from kernels_cpu.kv import F16, KV_TYPES, Q8_0, KVType
from kernels_cpu.simd import Ir, Value, emits, f32, i32, i64, slot, vec
from kernels_cpu.threads import quotient

BLOCK, KEYS = a.BLOCK, a.KEYS
SCORES_BYTES = 4 * KEYS * 32  # of a group of rows, at most


@emits(0, types.int64)
def num_rows_together(e: Ir) -> Value:
    return e.const(rows_together())


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
    """Scores become weights, where they are."""
    n, stride = lanes(), 4 * rows_together()

    def put(key: Value, column: int, pair: list[Value]) -> None:
        for i, weights in enumerate(pair):
            place = e.at(scores, e.mul(key, stride), i * stride + 4 * n * column)
            e.store(weights, place, align=4)

    weigh(e, scores, first, end, state, keep, put)


@emits(6)
def weigh_key_tiles(
    e: Ir, scores: Value, weights: Value, first: Value, end: Value, state: Value, keep: Value
) -> None:
    """Scores become weights in tiles."""

    def put(key: Value, column: int, pair: list[Value]) -> None:
        place = tiles.weight_place(e, weights, key, column)
        e.store(nearest_pair(e, *pair), place, align=4)

    weigh(e, scores, first, end, state, keep, put)


def weigh(
    e: Ir,
    scores: Value,
    first: Value,
    end: Value,
    state: Value,
    keep: Value,
    put: Callable[[Value, int, list[Value]], None],
) -> None:
    """Weights 2^(s - m), m the largest score so far; the rows' state moves on.

    state  float32 [2][rows]: m, sum of weights
    keep   float32 [rows]: factor for what was summed up so far
    put    takes the weights of two keys for a vector of rows
    """
    n = lanes()
    vector = vec(f32, n)
    stride = 4 * rows_together()
    num_steps = e.b.lshr(e.b.sub(end, first), e.const(3))
    for j in range(VECTORS):
        at_m, at_l = e.at(state, 4 * n * j), e.at(state, stride + 4 * n * j)
        before = e.load(at_m, vector, 4)
        tops = [e.variable(before) for _ in range(4)]
        totals = [e.variable(zeros(e, n)) for _ in range(4)]

        def score(key: Value, u: int, j: int = j) -> Value:
            place = e.at(scores, e.mul(key, stride), u * stride + 4 * n * j)
            return e.load(place, vector, 4)

        with e.loop(num_steps) as i:
            key = e.b.add(first, e.mul(i.index, 8))
            for u in range(8):
                e.set(tops[u % 4], larger(e, e.get(tops[u % 4]), score(key, u)))
        t = [e.get(x) for x in tops]
        m = larger(e, larger(e, t[0], t[1]), larger(e, t[2], t[3]))
        with e.loop(num_steps) as i:
            key = e.b.add(first, e.mul(i.index, 8))
            for u in range(0, 8, 2):
                pair = [exp2(e, e.b.fsub(score(key, u + k), m)) for k in range(2)]
                put(e.b.add(key, e.const(u)), j, pair)
                for k, weights in enumerate(pair):
                    total = totals[(u + k) % 4]
                    e.set(total, e.b.fadd(e.get(total), weights))
        t = [e.get(x) for x in totals]
        factor = exp2(e, e.b.fsub(before, m))
        total = e.b.fadd(e.b.fadd(t[0], t[1]), e.b.fadd(t[2], t[3]))
        e.store(e.fma(e.load(at_l, vector, 4), factor, total), at_l, align=4)
        e.store(m, at_m, align=4)
        e.store(factor, e.at(keep, 4 * n * j), align=4)


@emits(4, table=KV_TYPES)
def copy_start(
    e: Ir, kv: KVType, source: Value, target: Value, count: Value, head_dim: Value
) -> None:
    """The first `count` positions of a part, zeros for the others."""
    kv.copy_start(e, source, target, count, head_dim)


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
def clear(e: Ir, address: Value, count: Value) -> None:
    """Zero `count` float32 values, a multiple of 8."""
    with e.loop(e.b.lshr(count, e.const(3))) as i:
        e.store(zeros(e, 8), e.at(address, e.mul(i.index, 32)), align=4)


# A group of rows in scratch: addresses of queries and of results, positions, state, keep;
# then the packed queries, and the result so far, float32 [dims][rows].
GROUP_ROWS = 32  # room for rows_together() at every ISA level
Q_ADDRESSES = 0
OUT_ADDRESSES = 8 * GROUP_ROWS
ROW_POSITIONS = 16 * GROUP_ROWS
STATE = 20 * GROUP_ROWS
KEEP = 28 * GROUP_ROWS
QUERIES = 32 * GROUP_ROWS


@emits(1, types.int64)
def dims_of(e: Ir, head_dim: Value) -> Value:
    """head_dim rounded up to whole tiles."""
    return padded(e, head_dim, tiles.STEP)


@emits(1, types.int64)
def result_at(e: Ir, head_dim: Value) -> Value:
    return e.at(e.mul(padded(e, head_dim, tiles.STEP), 4 * rows_together()), QUERIES)


@emits(1, types.int64)
def group_bytes(e: Ir, head_dim: Value) -> Value:
    return e.at(e.mul(padded(e, head_dim, tiles.STEP), 8 * rows_together()), QUERIES)


# This and what follows is inlined, since Numba optimises a function of its own twice; `use_tiles`
# is a constant then.
@njit(inline="always")
def start_groups(
    args: int, groups: int, entry: int, kv_head: int, dump: int, use_tiles: int
) -> int:
    """Lay out an item's rows; the number of groups. Rows that fill up a group write to `dump`."""
    group, head_dim = slot(args, a.GROUP), slot(args, a.HEAD_DIM)
    work = slot(args, a.PROMPTS) + 16 * entry
    token, num_tokens = load_int(work + 4), load_int(work + 8)
    together = num_rows_together()
    num_rows = num_tokens * group
    num_groups = quotient(num_rows + together - 1, together)
    row_token, head = token, 0
    for g in range(num_groups):
        at = groups + g * group_bytes(head_dim)
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
        clear(at + QUERIES, 2 * dims_of(head_dim) * together)
        if use_tiles == 1:
            tiles.pack_query_tiles(at + Q_ADDRESSES, at + QUERIES, args, head_dim)
        else:
            floats.pack_queries(at + Q_ADDRESSES, at + QUERIES, args, head_dim)
    return num_groups


@njit(inline="always")
def unpack_block(
    kv: int,
    args: int,
    table: int,
    kv_head: int,
    base: int,
    low: int,
    end: int,
    k: int,
    v: int,
    spare: int,
    use_tiles: int,
) -> None:
    """Unpack the blocks of positions [base + low, base + KEYS) of K and V.

    Rows from position `end` on become zeros, by way of `spare`.
    """
    head_dim = slot(args, a.HEAD_DIM)
    for first in range(0, KEYS, BLOCK):
        position = base + first
        if first + BLOCK > low and position < end:
            offset = block_offset(kv, args, table, kv_head, quotient(position, BLOCK))
            keys, values = slot(args, a.K) + offset, slot(args, a.V) + offset
            if position + BLOCK > end:
                copy_start(kv, keys, spare, end - position, head_dim)
                keys, spare_values = spare, spare + part_bytes(kv, head_dim)
                copy_start(kv, values, spare_values, end - position, head_dim)
                values = spare_values
            if use_tiles == 1:
                tiles.unpack_key_tiles(kv, keys, k + 2 * first * dims_of(head_dim), head_dim)
                tiles.unpack_value_tiles(kv, values, v + 32 * first, head_dim)
            else:
                floats.unpack_keys(kv, keys, k + 4 * first * (head_dim + floats.K_PAD), head_dim)
                floats.unpack_values(kv, values, v + 4 * first * floats.num_strip(), head_dim)


@njit(inline="always")
def attend_keys(
    args: int, at: int, base: int, low: int, k: int, v: int, scores: int, use_tiles: int
) -> None:
    """A group of rows over keys [low, KEYS) of one unpacked block."""
    head_dim, window = slot(args, a.HEAD_DIM), slot(args, a.WINDOW)
    oldest = load_int(at + ROW_POSITIONS)
    newest = oldest
    for r in range(num_rows_together()):
        position = load_int(at + ROW_POSITIONS + 4 * r)
        oldest, newest = min(oldest, position), max(newest, position)
    seen = window if window > 0 else newest + 1
    unit = floats.STEP + (tiles.STEP - floats.STEP) * use_tiles
    end = min(KEYS, (newest - base + unit) & -unit)
    low = max(low, (oldest - seen + 1 - base)) & -unit
    if low < end:
        q, result = at + QUERIES, at + result_at(head_dim)
        if use_tiles == 1:
            tiles.score_key_tiles(k, q, scores, low, end, head_dim)
        else:
            floats.score_keys(k, q, scores, low, end, head_dim)
        if slot(args, a.CAP) != 0:
            cap_keys(scores, low, end, args)
        if base + end - 1 > oldest or base + low < newest - seen + 1:
            hide_keys(scores, low, end, base, at + ROW_POSITIONS, seen)
        if use_tiles == 1:
            weights = scores + SCORES_BYTES
            weigh_key_tiles(scores, weights, low, end, at + STATE, at + KEEP)
            tiles.add_value_tiles(v, weights, result, at + KEEP, low, end, head_dim)
        else:
            weigh_keys(scores, low, end, at + STATE, at + KEEP)
            floats.add_values(v, scores, result, at + KEEP, low, end, head_dim)


@njit(inline="always")
def attend_items(kv: int, args: int, first: int, last: int, scratch: int, use_tiles: int) -> None:
    """The whole kernel; `kv` and `use_tiles` are constants.

    Scratch: scores, weights in tiles, K, V, a block with zeros, a row that nobody reads, groups.
    """
    num_kv_heads, head_dim = slot(args, a.NUM_KV_HEADS), slot(args, a.HEAD_DIM)
    window = slot(args, a.WINDOW)
    dims = dims_of(head_dim)
    scores = scratch
    k = scores + 2 * SCORES_BYTES
    v = k + 4 * KEYS * (dims + floats.K_PAD)
    spare = v + 4 * KEYS * dims
    dump = spare + 4 * BLOCK * dims
    groups = dump + 4 * dims
    if use_tiles == 1:
        tiles.begin_tiles(scores)
        clear(k, KEYS * (2 * dims + floats.K_PAD))
    for item in range(first, last):
        entry = quotient(item, num_kv_heads)
        kv_head = item - entry * num_kv_heads
        num_groups = start_groups(args, groups, entry, kv_head, dump, use_tiles)
        work = slot(args, a.PROMPTS) + 16 * entry
        table = slot(args, a.TABLES) + 4 * load_int(work) * slot(args, a.TABLE_WIDTH)
        position = load_int(slot(args, a.POSITIONS) + 4 * load_int(work + 4))
        end = position + load_int(work + 8)
        oldest = max(0, position - window + 1) if window > 0 else 0
        base = quotient(oldest, KEYS) * KEYS
        while base < end:
            low = max(0, oldest - base)
            unpack_block(kv, args, table, kv_head, base, low, end, k, v, spare, use_tiles)
            for g in range(num_groups):
                at = groups + g * group_bytes(head_dim)
                attend_keys(args, at, base, low, k, v, scores, use_tiles)
            base += KEYS
        for g in range(num_groups):
            at = groups + g * group_bytes(head_dim)
            store_results(at + OUT_ADDRESSES, at + result_at(head_dim), at + STATE, head_dim)
    if use_tiles == 1:
        tiles.end_tiles()


@kernel
def attend_prompt(args: int, first: int, last: int, scratch: int) -> None:
    """Item = (prompt work entry, KV head); arguments and entries as in attention.py."""
    attend_items(F16, args, first, last, scratch, 0)


@kernel
def attend_prompt_q8_0(args: int, first: int, last: int, scratch: int) -> None:
    """As `attend_prompt`, of K and V in q8_0."""
    attend_items(Q8_0, args, first, last, scratch, 0)


@kernel
def attend_prompt_tiles(args: int, first: int, last: int, scratch: int) -> None:
    """As `attend_prompt`, its products on bfloat16 tiles."""
    attend_items(F16, args, first, last, scratch, 1)


@kernel
def attend_prompt_tiles_q8_0(args: int, first: int, last: int, scratch: int) -> None:
    """As `attend_prompt_tiles`, of K and V in q8_0."""
    attend_items(Q8_0, args, first, last, scratch, 1)


PROMPT_KERNELS = {"f16": attend_prompt, "q8_0": attend_prompt_q8_0}
PROMPT_TILE_KERNELS = {"f16": attend_prompt_tiles, "q8_0": attend_prompt_tiles_q8_0}
