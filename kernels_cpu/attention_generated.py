"""Attention of generated tokens: all query heads of a KV head at once, so K and V are read once.

The context of a token is cut at multiples of SPLIT positions. A split gives a *state* per head
(attention_states.py), and `fold` adds the states of a token's splits in ascending order, in one
item or in the merge record alike. Within a split each lane of the sums takes every 8th or 16th
position, and the lanes are added by halving.

Arguments and work lists: attention.py.
"""

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba import njit

from kernels_cpu import attention as a
from kernels_cpu.attention_math import (
    LOWEST,
    broadcast,
    cap_score,
    exp2,
    lanes,
    larger,
    load_int,
    num_lanes,
    padded,
    sums_of_lanes,
    zeros,
)
from kernels_cpu.attention_places import block_offset, part_bytes, sink_of, upcoming
from kernels_cpu.attention_states import clear_values, finish, fold, start_state
from kernels_cpu.kernel import kernel
from kernels_cpu.kv import F16, KV_TYPES, Q8_0, KVType, Row
from kernels_cpu.simd import Ir, Value, emits, f32, i32, i64, slot, vec
from kernels_cpu.threads import quotient

BLOCK, SPLIT = a.BLOCK, a.SPLIT
SCORES_BYTES = 4 * SPLIT  # of one head
HEAD_TILES = (4, 3, 2, 1)  # heads that share the loads of K and V
AHEAD_BYTES = 1 << 13  # from what is read to what is prefetched


def head_tiles(e: Ir, group: Value) -> list[tuple[int, Value, Value]]:
    """(heads, number of tiles, first head) for each size of tile; together all heads."""
    most = HEAD_TILES[0]
    whole, rest = e.b.udiv(group, e.const(most)), e.b.urem(group, e.const(most))
    tiles = [(most, whole, e.const(0))]
    for heads in HEAD_TILES[1:]:
        is_rest = e.b.zext(e.b.icmp_unsigned("==", rest, e.const(heads)), i64)
        tiles.append((heads, is_rest, e.mul(whole, most)))
    return tiles


@emits(4)
def load_queries(e: Ir, args: Value, source: Value, target: Value, group: Value) -> None:
    """q * factor of `group` heads, each padded with zeros to a multiple of 16."""
    head_dim = e.load(e.at(args, 8 * a.HEAD_DIM), i64)
    factor = broadcast(e, e.at(args, 8 * a.QUERY_FACTOR), 8)
    row = padded(e, head_dim, 16)
    with e.loop(group) as head:
        q = e.at(source, e.mul(e.mul(head.index, head_dim), 4))
        to = e.at(target, e.mul(e.mul(head.index, row), 4))
        e.store(zeros(e, 8), e.at(to, e.mul(e.b.sub(row, e.const(8)), 4)), align=4)
        with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
            offset = e.mul(d.index, 32)
            value = e.load(e.at(q, offset), vec(f32, 8), align=4)
            e.store(e.b.fmul(value, factor), e.at(to, offset), align=4)


@emits(7, table=KV_TYPES)
def score_positions(
    e: Ir,
    kv: KVType,
    part: Value,
    begin: Value,
    q: Value,
    scores: Value,
    head_dim: Value,
    group: Value,
    ahead: Value,
) -> None:
    """Scores of as many positions of a part of K from `begin` on as there are lanes, for all heads.

    scores  of the part's first position
    ahead   bytes from what is read to what is prefetched
    """
    n = lanes()
    q_row = e.mul(padded(e, head_dim, 16), 4)
    kv.prefetch_scales(e, kv.row(e, part, begin, head_dim), n, head_dim, ahead)
    for heads, count, first in head_tiles(e, group):
        width = positions_together(heads)
        with e.loop(count) as tile, e.loop(e.const(n // width)) as step:
            head = e.b.add(first, e.mul(tile.index, heads))
            position = e.b.add(begin, e.mul(step.index, width))
            rows = [kv.row(e, part, e.at(position, p), head_dim) for p in range(width)]
            far = only_first(e, head, ahead)
            queries = [e.at(q, e.b.mul(e.at(head, h), q_row)) for h in range(heads)]
            sums = dot_products(e, kv, rows, queries, head_dim, far)
            for h in range(heads):
                to = e.at(scores, e.mul(e.b.add(head, e.const(h)), SCORES_BYTES))
                e.store(e.slice(sums, h * width, width), e.at(to, e.mul(position, 4)), align=4)


def positions_together(heads: int) -> int:
    """Positions whose dot products with `heads` queries are summed up in the lanes of a vector."""
    return lanes() // (4 if heads == 3 else heads)


def only_first(e: Ir, head: Value, ahead: Value) -> Value:
    """The first tile of heads prefetches; the others would ask for the same lines again."""
    return e.b.select(e.b.icmp_unsigned("==", head, e.const(0)), ahead, e.const(0))


def dot_products(
    e: Ir, kv: KVType, rows: list[Row], queries: list[Value], head_dim: Value, ahead: Value
) -> Value:
    """Dot products of queries at some addresses with some positions; lane = (head, position)."""
    n = lanes()
    sums = [[e.variable(zeros(e, n)) for _ in rows] for _ in queries]

    def add(offset: Value, size: int) -> None:
        parts = [(first, min(n, size)) for first in range(0, size, n)]
        q = [
            [e.load(e.at(row, 4 * first, e.mul(offset, 4)), vec(f32, n), 4) for first, _ in parts]
            for row in queries
        ]
        # As many lines as are read in this step, in the order of memory.
        for line in range(0, kv.value_bytes * size * len(rows), 64):
            there = e.mul(offset, kv.value_bytes * len(rows))
            e.prefetch(e.at(rows[0].values, line, there, ahead))
        for p, row in enumerate(rows):
            values = kv.load(e, row, offset, size)
            for i, (first, count) in enumerate(parts):
                x = e.slice(values, first, count)
                if count < n:
                    x = e.concat(x, zeros(e, n - count))
                for h, heads in enumerate(sums):
                    e.set(heads[p], e.fma(x, q[h][i], e.get(heads[p])))

    for_sizes(e, head_dim, (32, 16, 8), add)
    totals = [e.get(s) for head in sums for s in head]
    return sums_of_lanes(e, totals + [zeros(e, n)] * (n - len(totals)))


def for_sizes(
    e: Ir, count: Value, sizes: Sequence[int], body: Callable[[Value, int], None]
) -> None:
    """body(offset, size) over `count` values: the largest size, then one at most of each other."""
    done = e.const(0)
    for i, size in enumerate(sizes):
        left = count if i == 0 else e.b.and_(count, e.const(sizes[i - 1] - 1))
        repeats = e.b.lshr(left, e.const(size.bit_length() - 1))
        with e.loop(repeats) as step:
            body(e.b.add(done, e.mul(step.index, size)), size)
        done = e.b.add(done, e.mul(repeats, size))


@emits(2)
def cap_scores(e: Ir, scores: Value, args: Value) -> None:
    """The soft cap, over a whole split of one head."""
    n = lanes()
    cap = broadcast(e, e.at(args, 8 * a.CAP), n)
    with e.loop(e.const(SPLIT // n)) as i:
        address = e.at(scores, e.mul(i.index, 4 * n))
        e.store(cap_score(e, e.load(address, vec(f32, n), 4), cap), address, align=4)


@emits(4)
def weigh_scores(e: Ir, scores: Value, first: Value, end: Value, state: Value) -> None:
    """Scores [first, end) of one head's split become 2^(s - m); m and their sum go to the state."""
    n = lanes()
    floats = vec(f32, n)
    shift = e.const(n.bit_length() - 1)
    start = e.b.lshr(first, shift)
    count = e.b.sub(e.b.lshr(e.b.add(end, e.const(n - 1)), shift), start)
    lane = ir.Constant(vec(i32, n), list(range(n)))
    low, high = (e.splat(e.b.trunc(x, i32), n) for x in (first, end))
    largest = e.variable(e.const(LOWEST, floats))
    total = e.variable(zeros(e, n))
    with e.loop(count) as i:
        vector = e.b.add(start, i.index)
        address = e.at(scores, e.mul(vector, 4 * n))
        index = e.b.add(e.splat(e.b.trunc(e.mul(vector, n), i32), n), lane)
        seen = e.b.and_(e.b.icmp_signed(">=", index, low), e.b.icmp_signed("<", index, high))
        s = e.b.select(seen, e.load(address, floats, 4), e.const(float("-inf"), floats))
        e.store(s, address, align=4)
        e.set(largest, larger(e, e.get(largest), s))
    m = largest_lane(e, e.get(largest))
    with e.loop(count) as i:
        address = e.at(scores, e.mul(e.b.add(start, i.index), 4 * n))
        p = exp2(e, e.b.fsub(e.load(address, floats, 4), e.splat(m, n)))
        e.store(p, address, align=4)
        e.set(total, e.b.fadd(e.get(total), p))
    e.store(m, state, align=4)
    e.store(e.tree_sum(e.get(total)), e.at(state, 4), align=4)


def largest_lane(e: Ir, v: Value) -> Value:
    while v.type.count > 1:
        half = v.type.count // 2
        v = larger(e, e.slice(v, 0, half), e.slice(v, half, half))
    return e.b.extract_element(v, e.const(0, i32))


@emits(8, table=KV_TYPES)
def weigh_values(
    e: Ir,
    kv: KVType,
    part: Value,
    begin: Value,
    weights: Value,
    states: Value,
    count: Value,
    head_dim: Value,
    group: Value,
    ahead: Value,
) -> None:
    """state += weight * V over `count` positions of a part of V from `begin` on, for all heads.

    weights  of position `begin` and the first head
    ahead    bytes from what is read to what is prefetched
    """
    state_bytes = e.mul(e.b.add(head_dim, e.const(16)), 4)
    kv.prefetch_scales(e, kv.row(e, part, begin, head_dim), BLOCK, head_dim, ahead)
    for heads, tiles, first in head_tiles(e, group):
        with e.loop(tiles) as tile:
            head = e.b.add(first, e.mul(tile.index, heads))
            far = only_first(e, head, ahead)
            w = e.at(weights, e.mul(head, SCORES_BYTES))
            state = e.at(states, e.mul(head, state_bytes), 64)
            to = [e.at(state, e.mul(state_bytes, h)) for h in range(heads)]

            def row(position: Value) -> Row:
                return kv.row(e, part, e.b.add(begin, position), head_dim)

            weigh_heads(e, kv, row, w, to, count, head_dim, far)


def weigh_heads(
    e: Ir,
    kv: KVType,
    row: Callable[[Value], Row],
    w: Value,
    to: list[Value],
    count: Value,
    head_dim: Value,
    ahead: Value,
) -> None:
    """to[head] += sum over positions of w[head][position] * V at row(position)."""

    def add(d: Value, size: int) -> None:
        def load(position: Value) -> list[Value]:
            place = row(position)
            for line in range(0, kv.value_bytes * size, 64):
                e.prefetch(e.at(place.values, line, e.mul(d, kv.value_bytes), ahead))
            return [kv.load(e, place, e.at(d, x), min(size, 32)) for x in range(0, size, 32)]

        weigh_slice(e, load, w, [e.at(t, e.mul(d, 4)) for t in to], count, size)

    # Values of a position that are summed up in registers, for four heads.
    for_sizes(e, head_dim, (64, 32, 16, 8) if lanes() == 16 else (16, 8), add)


def weigh_slice(
    e: Ir,
    load: Callable[[Value], list[Value]],
    w: Value,
    to: list[Value],
    count: Value,
    size: int,
) -> None:
    """to[head][i] += sum over positions of w[head][position] * v[position][i], `size` values i.

    load  gives the values of a position
    """
    n = min(lanes(), size)
    floats = vec(f32, n)
    places = [[e.at(t, 4 * first) for first in range(0, size, n)] for t in to]
    sums = [[e.variable(e.load(p, floats, 4)) for p in head] for head in places]
    with e.loop(count) as position:
        values = [
            e.slice(v, first, n)
            for v in load(position.index)
            for first in range(0, v.type.count, n)
        ]
        for h, head in enumerate(sums):
            weight = broadcast(e, e.at(w, h * SCORES_BYTES, e.mul(position.index, 4)), n)
            for value, total in zip(values, head, strict=True):
                e.set(total, e.fma(value, weight, e.get(total)))
    for head, totals in zip(places, sums, strict=True):
        for place, total in zip(head, totals, strict=True):
            e.store(e.get(total), place, align=4)


# Inlined, since Numba optimises a function of its own twice: a quarter of the compile time.
@njit(inline="always")
def attend_split(
    kv: int,
    args: int,
    q: int,
    scores: int,
    states: int,
    table: int,
    kv_head: int,
    heads: int,
    position: int,
    split: int,
) -> None:
    """States of one split for the query heads of `heads` KV heads from `kv_head` on.

    q, scores, states  of the first of these query heads
    table              the sequence's blocks
    """
    head_dim, window = slot(args, a.HEAD_DIM), slot(args, a.WINDOW)
    base = split * SPLIT
    end = min(position + 1, base + SPLIT)
    low = max(base, position - window + 1) if window > 0 else base
    ahead = max(1, quotient(AHEAD_BYTES, part_bytes(kv, head_dim)))
    score_split(kv, args, q, scores, table, kv_head, heads, low, end, ahead)
    for h in range(heads * slot(args, a.GROUP)):
        if slot(args, a.CAP) != 0:
            cap_scores(scores + h * SCORES_BYTES, args)
        state = states + h * 4 * (16 + head_dim)
        weigh_scores(scores + h * SCORES_BYTES, low - base, end - base, state)
        clear_values(state, head_dim)
    weigh_split(kv, args, scores, states, table, kv_head, heads, low, end, ahead)


@njit(inline="always")
def score_split(
    kv: int,
    args: int,
    q: int,
    scores: int,
    table: int,
    kv_head: int,
    heads: int,
    low: int,
    end: int,
    ahead: int,
) -> None:
    """Scores of the blocks with positions [low, end) of a split; `ahead`: parts to prefetch."""
    group, head_dim = slot(args, a.GROUP), slot(args, a.HEAD_DIM)
    q_bytes = 4 * group * ((head_dim + 15) & -16)
    first_block, end_block = quotient(low, BLOCK), quotient(end + BLOCK - 1, BLOCK)
    n, step = ahead, num_lanes()
    for block in range(first_block, end_block):
        for h in range(heads):
            keys = slot(args, a.K) + block_offset(kv, args, table, kv_head + h, block)
            far = upcoming(kv, args, table, kv_head, heads, first_block, end_block, n) - keys
            n += 1
            to = scores + h * group * SCORES_BYTES + 4 * (block * BLOCK & (SPLIT - 1))
            for i in range(0, BLOCK, step):
                score_positions(kv, keys, i, q + h * q_bytes, to, head_dim, group, far)


@njit(inline="always")
def weigh_split(
    kv: int,
    args: int,
    scores: int,
    states: int,
    table: int,
    kv_head: int,
    heads: int,
    low: int,
    end: int,
    ahead: int,
) -> None:
    """Weighted values of positions [low, end) of a split, added to the states."""
    group, head_dim = slot(args, a.GROUP), slot(args, a.HEAD_DIM)
    first_block, end_block = quotient(low, BLOCK), quotient(end + BLOCK - 1, BLOCK)
    n = ahead + heads * (end_block - first_block)
    for block in range(first_block, end_block):
        first, last = max(low, block * BLOCK), min(end, block * BLOCK + BLOCK)
        for h in range(heads):
            values = slot(args, a.V) + block_offset(kv, args, table, kv_head + h, block)
            far = upcoming(kv, args, table, kv_head, heads, first_block, end_block, n) - values
            n += 1
            w = scores + h * group * SCORES_BYTES + 4 * (first & (SPLIT - 1))
            to = states + h * group * 4 * (16 + head_dim)
            begin, count = first - block * BLOCK, last - first
            weigh_values(kv, values, begin, w, to, count, head_dim, group, far)


@njit(inline="always")
def attend_items(kv: int, args: int, first: int, last: int, scratch: int) -> None:
    """The whole kernel; `kv` is a constant.

    The items of an entry go together, block by block, so that KV is read in the order of memory.
    """
    num_kv_heads, group = slot(args, a.NUM_KV_HEADS), slot(args, a.GROUP)
    head_dim = slot(args, a.HEAD_DIM)
    state_bytes = 4 * (16 + head_dim)
    q = scratch
    scores = q + 4 * num_kv_heads * group * (head_dim + 16)
    splits = scores + num_kv_heads * group * SCORES_BYTES
    states = splits + num_kv_heads * group * state_bytes
    item = first
    while item < last:
        entry = quotient(item, num_kv_heads)
        kv_head = item - entry * num_kv_heads
        heads = min(num_kv_heads - kv_head, last - item)
        item += heads
        head, num_heads = kv_head * group, heads * group
        work = slot(args, a.GENERATED) + 16 * entry
        token, split, partial = load_int(work), load_int(work + 8), load_int(work + 12)
        position = load_int(slot(args, a.POSITIONS) + 4 * token)
        table = slot(args, a.TABLES) + 4 * load_int(work + 4) * slot(args, a.TABLE_WIDTH)
        row = slot(args, a.Q) + 4 * (token * slot(args, a.Q_STRIDE) + head * head_dim)
        load_queries(args, row, q, num_heads)
        is_whole = partial < 0
        to, last_split = splits, quotient(position, SPLIT)
        if not is_whole:
            to = slot(args, a.PARTIALS) + (partial * num_kv_heads * group + head) * state_bytes
            last_split = split
        for h in range(num_heads):
            start_state(states + h * state_bytes, head_dim, sink_of(args, head + h))
        for s in range(split, last_split + 1):
            attend_split(kv, args, q, scores, to, table, kv_head, heads, position, s)
            if is_whole:
                for h in range(num_heads):
                    fold(states + h * state_bytes, splits + h * state_bytes, head_dim)
        if is_whole:
            out = slot(args, a.OUT) + 4 * (token * slot(args, a.OUT_STRIDE) + head * head_dim)
            for h in range(num_heads):
                finish(states + h * state_bytes, out + 4 * h * head_dim, head_dim)


@kernel
def attend_generated(args: int, first: int, last: int, scratch: int) -> None:
    """Item = (generated work entry, KV head); arguments and entries as in attention.py."""
    attend_items(F16, args, first, last, scratch)


@kernel
def attend_generated_q8_0(args: int, first: int, last: int, scratch: int) -> None:
    """As `attend_generated`, of K and V in q8_0."""
    attend_items(Q8_0, args, first, last, scratch)


GENERATED_KERNELS = {"f16": attend_generated, "q8_0": attend_generated_q8_0}


@kernel
def merge_generated(args: int, first: int, last: int, scratch: int) -> None:
    """Item = (merge entry, query head); arguments and entries as in attention.py."""
    num_heads = slot(args, a.NUM_KV_HEADS) * slot(args, a.GROUP)
    head_dim = slot(args, a.HEAD_DIM)
    state_bytes = 4 * (16 + head_dim)
    for item in range(first, last):
        entry = quotient(item, num_heads)
        head = item - entry * num_heads
        work = slot(args, a.MERGES) + 16 * entry
        token, partial, count = load_int(work), load_int(work + 4), load_int(work + 8)
        start_state(scratch, head_dim, sink_of(args, head))
        for p in range(partial, partial + count):
            fold(scratch, slot(args, a.PARTIALS) + (p * num_heads + head) * state_bytes, head_dim)
        out = slot(args, a.OUT) + 4 * (token * slot(args, a.OUT_STRIDE) + head * head_dim)
        finish(scratch, out, head_dim)
