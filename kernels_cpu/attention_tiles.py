"""The products of prompt attention on bfloat16 tiles (amx.py): queries, K, weights and V as operands.

The float32 forms of the same steps are in attention_prompt.py, and the softmax between the products
is the same. Scores, weights, queries, K and V are rounded to bfloat16; sums and the softmax stay
float32. `dims` is head_dim rounded up to a multiple of 32: what is added is zero.

    K        left operand   [KEYS / 16][dims / 32] tiles of 16 keys and 32 dimensions
    queries  right operand  [dims / 32][2] tiles of 32 dimensions, in pairs, and 16 rows
    V        left operand   [dims / 16][KEYS / 32] tiles of 16 dimensions and 32 keys
    weights  right operand  [KEYS / 32][2] tiles of 32 keys, in pairs, and 16 rows

Keys are left out 32 at a time, at absolute multiples; a step whose weights are zero adds nothing.
Only for levels with vectors of 16 lanes.
"""

from kernels_cpu import attention as a
from kernels_cpu.amx import (
    ROW_BYTES,
    TILE_BYTES,
    TILE_ROWS,
    WEIGHTS_BYTES,
    Hardware,
    Operands,
    Portable,
    TileUnit,
    Vectors,
    nearest_pair,
)
from kernels_cpu.attention_math import broadcast, padded, transpose, zeros
from kernels_cpu.kernel import has_bf16, isa
from kernels_cpu.kv import KV_TYPES, KVType, Row
from kernels_cpu.simd import Ir, Value, emits, f32, i64, vec

STEP = 32  # values that a product adds up at a time
ROWS = 32  # rows of attention together: two tiles
SCORES_ROW = 4 * ROWS


def unit() -> TileUnit:
    """The fastest that there is; the portable one is for tests alone."""
    if isa() == "amx":
        return Hardware()
    return Vectors() if has_bf16() else Portable()


@emits(1)
def begin_tiles(e: Ir, scratch: Value) -> None:
    unit().begin(e, scratch)


@emits(0)
def end_tiles(e: Ir) -> None:
    unit().end(e)


def steps(e: Ir, count: Value) -> Value:
    return e.b.lshr(count, e.const(5))


@emits(4)
def pack_query_tiles(e: Ir, rows: Value, target: Value, args: Value, head_dim: Value) -> None:
    """Queries at the addresses `rows`, times the factor; `target` is zero where they do not reach."""
    factor = broadcast(e, e.at(args, 8 * a.QUERY_FACTOR), 8)
    with e.loop(e.const(ROWS // 8)) as part:
        places = e.at(rows, e.mul(part.index, 64))
        sources = [e.load(e.at(places, 8 * i), i64, align=8) for i in range(8)]
        tile = e.mul(e.b.lshr(part.index, e.const(1)), TILE_BYTES)
        to = e.at(target, tile, e.mul(e.b.and_(part.index, e.const(1)), 32))
        with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
            values = [e.load(e.at(s, e.mul(d.index, 32)), vec(f32, 8), 4) for s in sources]
            columns = [e.b.fmul(c, factor) for c in transpose(e, values)]
            step = e.mul(e.b.lshr(d.index, e.const(2)), WEIGHTS_BYTES)
            pair = e.mul(e.b.and_(d.index, e.const(3)), 4 * ROW_BYTES)
            for i in range(4):
                place = e.at(to, step, pair, i * ROW_BYTES)
                e.store(nearest_pair(e, columns[2 * i], columns[2 * i + 1]), place, align=4)


@emits(3, table=KV_TYPES)
def unpack_key_tiles(e: Ir, kv: KVType, source: Value, target: Value, head_dim: Value) -> None:
    """A part of K to two rows of tiles; `target` is zero beyond."""
    whole = steps(e, head_dim)
    done = e.mul(whole, STEP)
    tiles_bytes = e.mul(steps(e, padded(e, head_dim, STEP)), TILE_BYTES)
    with e.loop(e.const(a.BLOCK)) as key:
        row = kv.row(e, source, key.index, head_dim)
        tiles = e.b.mul(e.b.lshr(key.index, e.const(4)), tiles_bytes)
        place = e.mul(e.b.and_(key.index, e.const(TILE_ROWS - 1)), ROW_BYTES)
        to = e.at(target, tiles, place)
        with e.loop(whole) as step:
            pairs = neighbours(e, kv.load(e, row, e.mul(step.index, STEP), STEP))
            e.store(pairs, e.at(to, e.mul(step.index, TILE_BYTES)), align=4)
        rest = e.b.lshr(e.b.and_(head_dim, e.const(STEP - 1)), e.const(3))
        with e.loop(rest) as d:
            pairs = neighbours(e, kv.load(e, row, e.at(done, e.mul(d.index, 8)), 8))
            e.store(pairs, e.at(to, e.mul(whole, TILE_BYTES), e.mul(d.index, 16)), align=4)


def neighbours(e: Ir, values: Value) -> Value:
    """float32 values as bfloat16 pairs."""
    n = values.type.count
    return nearest_pair(e, e.shuffle(values, range(0, n, 2)), e.shuffle(values, range(1, n, 2)))


@emits(3, table=KV_TYPES)
def unpack_value_tiles(e: Ir, kv: KVType, source: Value, target: Value, head_dim: Value) -> None:
    """A part of V to a column of tiles."""
    rows = [kv.row(e, source, e.const(key), head_dim) for key in range(a.BLOCK)]
    whole = e.b.lshr(head_dim, e.const(4))
    column = a.KEYS // STEP * TILE_BYTES
    with e.loop(whole) as part:
        to = e.at(target, e.mul(part.index, column))
        unpack_value_tile(e, kv, rows, to, e.mul(part.index, TILE_ROWS), TILE_ROWS)
    has_rest = e.b.icmp_unsigned("!=", e.b.and_(head_dim, e.const(8)), e.const(0))
    with e.b.if_then(has_rest):
        to = e.at(target, e.mul(whole, column))
        unpack_value_tile(e, kv, rows, to, e.mul(whole, TILE_ROWS), 8)


def unpack_value_tile(e: Ir, kv: KVType, rows: list[Row], target: Value, d: Value, n: int) -> None:
    """n dimensions of 32 keys from d on: pairs of keys along the lanes."""
    pairs = []
    for pair in range(TILE_ROWS):
        two = [kv.load(e, rows[key], d, n) for key in (2 * pair, 2 * pair + 1)]
        if n < TILE_ROWS:
            two = [e.concat(x, zeros(e, TILE_ROWS - n)) for x in two]
        pairs.append(nearest_pair(e, *two))
    for d, keys in enumerate(transpose(e, pairs)):
        e.store(keys, e.at(target, d * ROW_BYTES), align=4)


@emits(6)
def score_key_tiles(
    e: Ir, k: Value, q: Value, scores: Value, first: Value, end: Value, head_dim: Value
) -> None:
    """scores[key] of 32 rows for keys [first, end), multiples of 32."""
    num_steps = steps(e, padded(e, head_dim, STEP))
    tiles_bytes = e.mul(num_steps, TILE_BYTES)
    with e.loop(steps(e, e.b.sub(end, first))) as part:
        block = e.b.add(steps(e, first), part.index)
        to = e.at(scores, e.mul(block, STEP * SCORES_ROW))
        with e.loop(e.const(2 * STEP)) as i:
            e.store(zeros(e, 16), e.at(to, e.mul(i.index, 64)), align=64)
        left = e.at(k, e.b.mul(block, e.mul(tiles_bytes, 2)))
        unit().product(e, Operands(left, tiles_bytes, q, to, num_steps), lambda: None)


def weight_place(e: Ir, weights: Value, key: Value, column: int) -> Value:
    """Where the weights of keys `key` and the next lie, of rows [16 column, 16 column + 16)."""
    step = e.mul(steps(e, key), WEIGHTS_BYTES)
    pair = e.mul(e.b.lshr(e.b.and_(key, e.const(STEP - 1)), e.const(1)), ROW_BYTES)
    return e.at(weights, step, pair, column * TILE_BYTES)


@emits(7)
def add_value_tiles(
    e: Ir,
    v: Value,
    weights: Value,
    result: Value,
    keep: Value,
    first: Value,
    end: Value,
    head_dim: Value,
) -> None:
    """result = result * keep + weights * V over keys [first, end), multiples of 32, of 32 rows."""
    column = e.const(a.KEYS // STEP * TILE_BYTES)
    kept = [e.load(e.at(keep, 64 * j), vec(f32, 16), 4) for j in range(2)]
    start = steps(e, first)
    num_steps = steps(e, e.b.sub(end, first))
    right = e.at(weights, e.mul(start, WEIGHTS_BYTES))
    with e.loop(steps(e, padded(e, head_dim, STEP))) as part:
        to = e.at(result, e.mul(part.index, STEP * SCORES_ROW))
        with e.loop(e.const(STEP)) as d:
            for j in range(2):
                place = e.at(to, e.mul(d.index, SCORES_ROW), 64 * j)
                e.store(e.b.fmul(e.load(place, vec(f32, 16), 64), kept[j]), place, align=64)
        left = e.at(v, e.mul(e.b.mul(part.index, column), 2), e.mul(start, TILE_BYTES))
        unit().product(e, Operands(left, column, right, to, num_steps), lambda: None)
