"""Attention of generated tokens: all query heads of a KV head at once, so K and V are read once.

The context of a token is cut at multiples of SPLIT positions. A split gives a *state* per head,
    float32 [16 + head_dim]: largest score m (log2 units), sum of the weights 2^(s - m), 14 unused,
                             sum of weight * v
and `fold` adds the states of a token's splits in ascending order, in one item or in the merge
record alike. Within a split each lane of the sums takes every 8th or 16th position, and the lanes
are added by halving.

Arguments and work lists: attention.py.
"""

from llvmlite import ir
from numba import njit, types

from kernels_cpu import attention as a
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
    num_lanes,
    sums_of_lanes,
    zeros,
)
from kernels_cpu.kernel import kernel
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
    row = padded(e, head_dim)
    with e.loop(group) as head:
        q = e.at(source, e.mul(e.mul(head.index, head_dim), 4))
        to = e.at(target, e.mul(e.mul(head.index, row), 4))
        e.store(zeros(e, 8), e.at(to, e.mul(e.b.sub(row, e.const(8)), 4)), align=4)
        with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
            offset = e.mul(d.index, 32)
            value = e.load(e.at(q, offset), vec(f32, 8), align=4)
            e.store(e.b.fmul(value, factor), e.at(to, offset), align=4)


def padded(e: Ir, head_dim: Value) -> Value:
    """head_dim rounded up to a multiple of 16."""
    return e.b.and_(e.b.add(head_dim, e.const(15)), e.const(-16))


@emits(6)
def score_positions(
    e: Ir, k: Value, q: Value, scores: Value, head_dim: Value, group: Value, ahead: Value
) -> None:
    """Scores of as many positions from `k` on as there are lanes, for all heads.

    ahead  bytes from what is read to what is prefetched
    """
    n = lanes()
    row = e.mul(padded(e, head_dim), 4)
    for heads, count, first in head_tiles(e, group):
        width = positions_together(heads)
        with e.loop(count) as tile, e.loop(e.const(n // width)) as part:
            head = e.b.add(first, e.mul(tile.index, heads))
            position = e.mul(part.index, width)
            keys = e.at(k, e.mul(e.mul(position, head_dim), 2))
            far = only_first(e, head, ahead)
            sums = dot_products(e, keys, e.at(q, e.mul(head, row)), row, head_dim, heads, far)
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
    e: Ir, k: Value, q: Value, q_row: Value, head_dim: Value, heads: int, ahead: Value
) -> Value:
    """Dot products of `heads` queries with positions; lane = (head, position)."""
    n, width = lanes(), positions_together(heads)
    sums = [[e.variable(zeros(e, n)) for _ in range(width)] for _ in range(heads)]

    def add(offset: Value, size: int) -> None:
        queries = [
            e.load(e.at(q, e.mul(q_row, h), e.mul(offset, 4)), vec(f32, n), 4) for h in range(heads)
        ]
        # As many lines as are read in this step, in the order of memory.
        for line in range(0, 2 * size * width, 64):
            e.prefetch(e.at(k, line, e.mul(offset, 2 * width), ahead))
        for p in range(width):
            key = e.at(k, e.mul(e.b.add(e.mul(head_dim, p), offset), 2))
            x = load_kv(e, key, size)
            if size < n:
                x = e.concat(x, zeros(e, n - size))
            for h in range(heads):
                e.set(sums[h][p], e.fma(x, queries[h], e.get(sums[h][p])))

    whole = e.b.lshr(head_dim, e.const(n.bit_length() - 1))
    with e.loop(whole) as d:
        add(e.mul(d.index, n), n)
    if n == 16:
        has_rest = e.b.icmp_unsigned("!=", e.b.and_(head_dim, e.const(8)), e.const(0))
        with e.b.if_then(has_rest):
            add(e.mul(whole, n), 8)
    totals = [e.get(s) for head in sums for s in head]
    return sums_of_lanes(e, totals + [zeros(e, n)] * (n - len(totals)))


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


@emits(7)
def weigh_values(
    e: Ir,
    v: Value,
    weights: Value,
    states: Value,
    count: Value,
    head_dim: Value,
    group: Value,
    ahead: Value,
) -> None:
    """state += weight * V over `count` positions from `v` on, for all heads.

    weights  of the first position and head
    ahead    bytes from what is read to what is prefetched
    """
    n = lanes()
    wide = 4 if n == 16 else 2
    whole = e.b.lshr(head_dim, e.const(n.bit_length() - 1))
    num_wide = e.b.lshr(whole, e.const(wide.bit_length() - 1))
    slices = [(wide, n, num_wide), (1, n, e.b.and_(whole, e.const(wide - 1)))]
    if n == 16:
        slices.append((1, 8, e.b.lshr(e.b.and_(head_dim, e.const(8)), e.const(3))))
    state_bytes = e.mul(e.b.add(head_dim, e.const(16)), 4)
    for heads, tiles, first in head_tiles(e, group):
        with e.loop(tiles) as tile:
            head = e.b.add(first, e.mul(tile.index, heads))
            far = only_first(e, head, ahead)
            w = e.at(weights, e.mul(head, SCORES_BYTES))
            state = e.at(states, e.mul(head, state_bytes), 64)
            done = e.const(0)
            for vectors, size, repeats in slices:
                with e.loop(repeats) as part:
                    d = e.b.add(done, e.mul(part.index, vectors * size))
                    to = [e.at(state, e.mul(state_bytes, h), e.mul(d, 4)) for h in range(heads)]
                    rows = e.at(v, e.mul(d, 2))
                    weigh_slice(e, rows, w, to, count, e.mul(head_dim, 2), vectors, size, far)
                done = e.b.add(done, e.mul(repeats, vectors * size))


def weigh_slice(
    e: Ir,
    v: Value,
    w: Value,
    to: list[Value],
    count: Value,
    row_bytes: Value,
    vectors: int,
    size: int,
    ahead: Value,
) -> None:
    """to[head][i] += sum over positions of w[head][position] * v[position][i]."""
    floats = vec(f32, size)
    places = [[e.at(t, 4 * size * j) for j in range(vectors)] for t in to]
    sums = [[e.variable(e.load(p, floats, 4)) for p in head] for head in places]
    with e.loop(count) as position:
        row = e.at(v, e.b.mul(position.index, row_bytes))
        for offset in range(0, 2 * size * vectors, 64):
            e.prefetch(e.at(row, offset, ahead))
        values = [load_kv(e, e.at(row, 2 * size * j), size) for j in range(vectors)]
        for h, head in enumerate(sums):
            weight = broadcast(e, e.at(w, h * SCORES_BYTES, e.mul(position.index, 4)), size)
            for value, total in zip(values, head, strict=True):
                e.set(total, e.fma(value, weight, e.get(total)))
    for head, totals in zip(places, sums, strict=True):
        for place, total in zip(head, totals, strict=True):
            e.store(e.get(total), place, align=4)


@emits(2)
def clear_values(e: Ir, state: Value, head_dim: Value) -> None:
    with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
        e.store(zeros(e, 8), e.at(state, 64, e.mul(d.index, 32)), align=4)


@emits(3)
def start_state(e: Ir, state: Value, head_dim: Value, sink: Value) -> None:
    """The state of no positions; `sink` is the address of a logit that joins the sum, or 0."""
    floats = vec(f32, 2)
    e.store(ir.Constant(floats, [LOWEST, 0.0]), state, align=4)
    with e.b.if_then(e.b.icmp_unsigned("!=", sink, e.const(0))):
        logit = e.b.fmul(e.load(sink, f32, align=4), e.const(LOG2E, f32))
        pair = e.b.insert_element(ir.Constant(floats, [0.0, 1.0]), logit, e.const(0, i32))
        e.store(pair, state, align=4)
    with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
        e.store(zeros(e, 8), e.at(state, 64, e.mul(d.index, 32)), align=4)


@emits(3)
def fold(e: Ir, state: Value, split: Value, head_dim: Value) -> None:
    """state += split: both brought to the larger of their maxima."""
    m, other = broadcast(e, state, 8), broadcast(e, split, 8)
    largest = larger(e, m, other)
    keep, take = exp2(e, e.b.fsub(m, largest)), exp2(e, e.b.fsub(other, largest))
    l, more = broadcast(e, e.at(state, 4), 8), broadcast(e, e.at(split, 4), 8)
    total = e.fma(more, take, e.b.fmul(l, keep))
    e.store(e.b.extract_element(largest, e.const(0, i32)), state, align=4)
    e.store(e.b.extract_element(total, e.const(0, i32)), e.at(state, 4), align=4)
    with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
        offset = e.mul(d.index, 32)
        to, source = e.at(state, 64, offset), e.at(split, 64, offset)
        kept = e.b.fmul(e.load(to, vec(f32, 8), 4), keep)
        e.store(e.fma(e.load(source, vec(f32, 8), 4), take, kept), to, align=4)


@emits(3)
def finish(e: Ir, state: Value, out: Value, head_dim: Value) -> None:
    """out = weighted sum / sum of weights."""
    l = broadcast(e, e.at(state, 4), 8)
    with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
        offset = e.mul(d.index, 32)
        value = e.load(e.at(state, 64, offset), vec(f32, 8), 4)
        e.store(e.b.fdiv(value, l), e.at(out, offset), align=4)


@emits(4, types.int64)
def block_offset(e: Ir, args: Value, table: Value, kv_head: Value, block: Value) -> Value:
    """Offset of one head's part of a sequence's block in K and in V."""
    return offset_of(e, args, table, kv_head, block)


def offset_of(e: Ir, args: Value, table: Value, kv_head: Value, block: Value) -> Value:
    index = e.b.sext(e.load(e.at(table, e.mul(block, 4)), i32, align=4), i64)
    part = e.b.add(e.b.mul(index, argument(e, args, a.NUM_KV_HEADS)), kv_head)
    return e.mul(e.b.mul(part, argument(e, args, a.HEAD_DIM)), 2 * BLOCK)


@emits(7, types.int64)
def upcoming(
    e: Ir,
    args: Value,
    table: Value,
    kv_head: Value,
    heads: Value,
    first: Value,
    end: Value,
    n: Value,
) -> Value:
    """Address of what a split reads as the n-th part of a block.

    It reads the parts of `heads` KV heads of each of the blocks [first, end) of K, then of V.
    """
    count = e.b.sub(end, first)
    number = e.b.udiv(n, heads)
    head = e.b.add(kv_head, e.b.urem(n, heads))
    is_key = e.b.icmp_unsigned("<", number, count)
    # At the end of V it stays at the last block.
    later = e.b.sub(number, count)
    last = e.b.sub(count, e.const(1))
    later = e.b.select(e.b.icmp_unsigned("<", later, last), later, last)
    block = e.b.add(first, e.b.select(is_key, number, later))
    kv = e.b.select(is_key, argument(e, args, a.K), argument(e, args, a.V))
    return e.b.add(kv, offset_of(e, args, table, head, block))


def argument(e: Ir, args: Value, index: int) -> Value:
    return e.load(e.at(args, 8 * index), i64, align=8)


# Inlined, since Numba optimises a function of its own twice: a quarter of the compile time.
@njit(inline="always")
def attend_split(
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
    group, head_dim, window = slot(args, a.GROUP), slot(args, a.HEAD_DIM), slot(args, a.WINDOW)
    q_bytes = 4 * group * ((head_dim + 15) & -16)
    scores_bytes = group * SCORES_BYTES
    state_bytes = 4 * (16 + head_dim)
    base = split * SPLIT
    end = min(position + 1, base + SPLIT)
    low = max(base, position - window + 1) if window > 0 else base
    first_block, end_block = quotient(low, BLOCK), quotient(end + BLOCK - 1, BLOCK)
    n = max(1, quotient(AHEAD_BYTES, 2 * BLOCK * head_dim))
    step = num_lanes()
    for block in range(first_block, end_block):
        for h in range(heads):
            keys = slot(args, a.K) + block_offset(args, table, kv_head + h, block)
            ahead = upcoming(args, table, kv_head, heads, first_block, end_block, n) - keys
            n += 1
            to = scores + h * scores_bytes + 4 * (block * BLOCK - base)
            for i in range(0, BLOCK, step):
                k = keys + 2 * i * head_dim
                score_positions(k, q + h * q_bytes, to + 4 * i, head_dim, group, ahead)
    for h in range(heads * group):
        if slot(args, a.CAP) != 0:
            cap_scores(scores + h * SCORES_BYTES, args)
        state = states + h * state_bytes
        weigh_scores(scores + h * SCORES_BYTES, low - base, end - base, state)
        clear_values(state, head_dim)
    for block in range(first_block, end_block):
        first, last = max(low, block * BLOCK), min(end, block * BLOCK + BLOCK)
        for h in range(heads):
            values = slot(args, a.V) + block_offset(args, table, kv_head + h, block)
            ahead = upcoming(args, table, kv_head, heads, first_block, end_block, n) - values
            n += 1
            v = values + 2 * (first - block * BLOCK) * head_dim
            w = scores + h * scores_bytes + 4 * (first - base)
            to = states + h * group * state_bytes
            weigh_values(v, w, to, last - first, head_dim, group, ahead)


@emits(2, types.int64)
def sink_of(e: Ir, args: Value, head: Value) -> Value:
    """Address of a query head's sink logit, or 0."""
    sinks = argument(e, args, a.SINKS)
    has_sinks = e.b.icmp_unsigned("!=", sinks, e.const(0))
    return e.b.select(has_sinks, e.at(sinks, e.mul(head, 4)), e.const(0))


@kernel
def attend_generated(args: int, first: int, last: int, scratch: int) -> None:
    """Item = (generated work entry, KV head); arguments and entries as in attention.py.

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
            attend_split(args, q, scores, to, table, kv_head, heads, position, s)
            if is_whole:
                for h in range(num_heads):
                    fold(states + h * state_bytes, splits + h * state_bytes, head_dim)
        if is_whole:
            out = slot(args, a.OUT) + 4 * (token * slot(args, a.OUT_STRIDE) + head * head_dim)
            for h in range(num_heads):
                finish(states + h * state_bytes, out + 4 * h * head_dim, head_dim)


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
