"""The row product's one emitter: raw GGUF rows times the activations of generated tokens.

    out[t][row] = residual[t][row] + scale * (sum over k of w[row][k] * x[t][k] + bias[row])

for t in [0, count). A call packs the activations of up to 16 tokens into its scratch, in the order
in which the weight type likes to be read, then walks its rows: a *unit* (256 values; 64 of float
types) is unpacked into registers once and meets every token, whose 16 float lanes of sum lie in
scratch. So there is one piece of code for any number of tokens, and a token's sums are the same
sequence of operations whatever else is in the bundle. With several tokens, a row is cut into
chunks so that the activations of a chunk stay in the first-level cache for all rows of an item.

Where a row is not a multiple of the unit, its last blocks are copied into a zeroed unit first:
nothing past a row's end is ever read.

Not here: what a weight type looks like (rows_bytes.py and rows_float.py, and the files of types).
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from kernels_cpu.simd import Ir, Value, f32, i8, i32, i64, vec

LANES = 16
ROWS_PER_ITEM = 16
BUNDLE = 16  # tokens that share a pass over the rows
PREFETCH_BYTES = 8192
LANE_BYTES = 64
TAIL_UNIT_BYTES = 384  # at least a unit of any type

ints, floats, codes = vec(i32, LANES), vec(f32, LANES), vec(i8, 4 * LANES)


class Slot(IntEnum):
    """The argument block: int64 slots. Strides are in elements, K is cols padded to 64 by zeros.

    WEIGHTS   address of row 0; rows are ROW_BYTES apart
    COUNT     address of an int64, the number of tokens
    X         int8 [tokens][K]; for float weights float32 [tokens][cols], and no X_SCALE, X_SUM
    X_SCALE   float32 [tokens][K/64][16], lane l has the scale of the 16 values from 16 * (l // 4)
    X_SUM     float32 [tokens][K/16], scale times the sum of 16 x
    OUT       float32 [tokens][rows], overwritten
    BIAS      float32 [rows], or 0
    RESIDUAL  float32 [tokens][rows], which may be OUT itself, or 0
    SCALE     a float32 in the low half
    """

    WEIGHTS = 0
    ROW_BYTES = 1
    ROWS = 2
    COLS = 3
    COUNT = 4
    X = 5
    X_STRIDE = 6
    X_SCALE = 7
    X_SCALE_STRIDE = 8
    X_SUM = 9
    X_SUM_STRIDE = 10
    OUT = 11
    OUT_STRIDE = 12
    BIAS = 13
    RESIDUAL = 14
    RESIDUAL_STRIDE = 15
    SCALE = 16


NUM_SLOTS = 24


class Layout(Protocol):
    """How one weight type is multiplied.

    unit_values, unit_bytes     what `unpack` takes at once: a whole number of blocks
    block_values, block_bytes   as in the format
    record_bytes                packed activations of one token for one unit
    """

    @property
    def unit_values(self) -> int: ...

    @property
    def unit_bytes(self) -> int: ...

    @property
    def block_values(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def record_bytes(self) -> int: ...

    def pack(self, e: Ir, x: "Activations", record: Value) -> None:
        """Write the record of one token and unit."""

    def unpack(self, e: Ir, unit: Value) -> Any:
        """Bring the unit at an address into registers."""

    def multiply(self, e: Ir, weights: Any, record: Value, total: Value) -> Value:
        """total [16 lanes] + the products of one unpacked unit and one token's record."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Addresses of one token's activations at the first value of a unit."""

    x: Value
    scale: Value
    sum: Value


@dataclass(frozen=True, slots=True)
class Call:
    """What one call of the kernel works with; every field is an int64 value.

    units       whole units of a row; tail: values after them
    tail_unit, zeros, tail_x, sums, packed   places in scratch
    """

    e: Ir
    layout: Layout
    args: Value
    units: Value
    tail: Value
    tail_unit: Value
    zeros: Value
    tail_x: Value
    sums: Value
    packed: Value

    def slot(self, slot: Slot) -> Value:
        return self.e.load(self.e.at(self.args, 8 * slot), i64, align=8)


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` units from unit `start` on, of the rows that begin at `base`; their `records`.

    is_tail  whether this is what follows the last whole unit
    """

    base: Value
    row_bytes: Value
    start: Value
    count: Value
    records: Value
    is_tail: Value


def emit_row_product(
    e: Ir, layout: Layout, args: Value, first: Value, last: Value, scratch: Value
) -> None:
    """The whole kernel: items [first, last) of ROWS_PER_ITEM rows."""
    b = e.b
    cols = e.load(e.at(args, 8 * Slot.COLS), i64, align=8)
    units = b.lshr(cols, e.const(layout.unit_values.bit_length() - 1))
    tail = b.and_(cols, e.const(layout.unit_values - 1))
    zeros = e.at(scratch, 2 * TAIL_UNIT_BYTES)
    tail_x = e.at(scratch, 1024)
    sums = e.at(tail_x, 1024)
    packed = e.at(sums, ROWS_PER_ITEM * BUNDLE * LANE_BYTES)
    call = Call(e, layout, args, units, tail, scratch, zeros, tail_x, sums, packed)
    rows = call.slot(Slot.ROWS)
    first_row = e.mul(first, ROWS_PER_ITEM)
    end_row = smaller(e, e.mul(last, ROWS_PER_ITEM), rows)
    num_tokens = e.load(call.slot(Slot.COUNT), i64, align=8)
    zero_bytes(e, scratch, 2048)
    bundles = b.lshr(e.at(num_tokens, BUNDLE - 1), e.const(BUNDLE.bit_length() - 1))
    with e.loop(bundles) as bundle:
        token = e.mul(bundle.index, BUNDLE)
        n = smaller(e, b.sub(num_tokens, token), e.const(BUNDLE))
        emit_pack(call, token, n)
        items = b.sub(last, first)
        with e.loop(items) as item:
            row = e.at(first_row, e.mul(item.index, ROWS_PER_ITEM))
            here = smaller(e, b.sub(end_row, row), e.const(ROWS_PER_ITEM))
            emit_item(call, row, here, n)
            emit_results(call, row, here, token, n)


def emit_pack(call: Call, token: Value, n: Value) -> None:
    """Pack the activations of tokens [token, token + n): [unit][token][record]."""
    e, layout = call.e, call.layout
    b = e.b
    total = e.at(call.units, has_tail(call))
    with e.loop(n) as l:
        t = e.at(token, l.index)
        row = token_activations(call, t)
        copy_tail(call, row)
        with e.loop(total) as u:
            is_tail = b.icmp_signed("==", u.index, call.units)
            here = activations_at(call, row, u.index)
            tail = tail_activations(call)
            chosen = Activations(
                b.select(is_tail, tail.x, here.x),
                b.select(is_tail, tail.scale, here.scale),
                b.select(is_tail, tail.sum, here.sum),
            )
            place = e.at(e.mul(u.index, n), l.index)
            layout.pack(e, chosen, e.at(call.packed, e.mul(place, layout.record_bytes)))


def token_activations(call: Call, token: Value) -> Activations:
    e = call.e

    def place(start: Slot, stride: Slot, size: int) -> Value:
        return e.at(call.slot(start), e.mul(e.mul(token, call.slot(stride)), size))

    size = 4 if is_float(call.layout) else 1
    return Activations(
        place(Slot.X, Slot.X_STRIDE, size),
        place(Slot.X_SCALE, Slot.X_SCALE_STRIDE, 4),
        place(Slot.X_SUM, Slot.X_SUM_STRIDE, 4),
    )


def is_float(layout: Layout) -> bool:
    """Whether the type is multiplied with the float activations."""
    return layout.block_values == 1


def activations_at(call: Call, row: Activations, unit: Value) -> Activations:
    """256 int8 values have 64 expanded scales and 16 sums; 64 float values have nothing else."""
    e = call.e
    return Activations(
        e.at(row.x, e.mul(unit, 256)),
        e.at(row.scale, e.mul(unit, 256)),
        e.at(row.sum, e.mul(unit, 64)),
    )


def tail_activations(call: Call) -> Activations:
    e = call.e
    return Activations(call.tail_x, e.at(call.tail_x, 256), e.at(call.tail_x, 512))


def has_tail(call: Call) -> Value:
    return call.e.b.zext(call.e.b.icmp_signed("!=", call.tail, call.e.const(0)), i64)


def copy_tail(call: Call, row: Activations) -> None:
    """Copy the activations after the last whole unit into the zeroed tail."""
    e = call.e
    here, tail = activations_at(call, row, call.units), tail_activations(call)
    if is_float(call.layout):
        with e.loop(call.tail) as l:
            at = e.mul(l.index, 4)
            e.store(e.load(e.at(here.x, at), i32), e.at(tail.x, at))
        return
    groups = e.b.lshr(e.at(call.tail, 63), e.const(6))
    with e.loop(groups) as l:
        at = e.mul(l.index, 64)
        e.store(e.load(e.at(here.x, at), codes), e.at(tail.x, at))
        e.store(e.load(e.at(here.scale, at), codes), e.at(tail.scale, at))
        at = e.mul(l.index, 16)
        e.store(e.load(e.at(here.sum, at), vec(i8, 16)), e.at(tail.sum, at))


def emit_item(call: Call, row: Value, rows: Value, n: Value) -> None:
    """Leave the sums of `rows` rows in scratch: [row][token][16 lanes]."""
    e, layout = call.e, call.layout
    b = e.b
    zero_loop(e, call.sums, e.mul(rows, n))
    row_bytes = call.slot(Slot.ROW_BYTES)
    base = e.at(call.slot(Slot.WEIGHTS), e.mul(row, row_bytes))
    shift = chunk_shift(e, n)
    chunk_units = b.shl(e.const(1), shift)
    chunks = b.lshr(b.sub(e.at(call.units, chunk_units), e.const(1)), shift)
    with e.loop(e.at(chunks, has_tail(call))) as c:
        start = b.shl(c.index, shift)
        is_tail = b.icmp_signed("==", c.index, chunks)
        start = b.select(is_tail, call.units, start)
        count = smaller(e, b.sub(e.at(call.units, has_tail(call)), start), chunk_units)
        count = b.select(is_tail, e.const(1), smaller(e, count, b.sub(call.units, start)))
        records = e.at(call.packed, e.mul(e.mul(start, n), layout.record_bytes))
        chunk = Chunk(base, row_bytes, start, count, records, is_tail)
        ahead = prefetch_distance(e, chunks, n, row_bytes)
        one = b.icmp_signed("==", n, e.const(1))
        with b.if_else(one) as (then, otherwise):
            with then, e.loop(rows) as r:
                emit_row(call, chunk, r.index, ahead)
            with otherwise, e.loop(b.lshr(e.at(rows, 1), e.const(1))) as r:
                emit_row_pair(call, chunk, e.mul(r.index, 2), e.at(rows, -1), ahead, n)


def chunk_shift(e: Ir, n: Value) -> Value:
    """log2 of the units of a chunk: 24 KB of activations; the whole row for one token."""
    shift = e.const(2)
    for most, value in ((8, 3), (4, 4), (1, 30)):
        fits = e.b.icmp_signed("<=", n, e.const(most))
        shift = e.b.select(fits, e.const(value), shift)
    return shift


def prefetch_distance(e: Ir, chunks: Value, n: Value, row_bytes: Value) -> Value:
    """Bytes ahead: what follows, or if rows are cut, the same chunk of a later row."""
    few = e.b.icmp_signed("<=", n, e.const(8))
    rows = e.mul(row_bytes, e.b.select(few, e.const(4), e.const(4)))
    whole = e.b.icmp_signed("<=", chunks, e.const(1))
    return e.b.select(whole, e.const(PREFETCH_BYTES), rows)


def row_at(call: Call, chunk: Chunk, row: Value, which: int) -> Value:
    """Where the units of a row begin; a rest is copied, its blocks after zeros, to tail unit `which`."""
    e, layout = call.e, call.layout
    weights = e.at(chunk.base, e.mul(row, chunk.row_bytes), e.mul(chunk.start, layout.unit_bytes))
    tail_unit = e.at(call.tail_unit, which * TAIL_UNIT_BYTES)
    with e.b.if_then(chunk.is_tail):
        copy_blocks(call, weights, tail_unit)
    return e.b.select(chunk.is_tail, tail_unit, weights)


def copy_blocks(call: Call, weights: Value, tail_unit: Value) -> None:
    """Copy the blocks after the last whole unit to a zeroed unit."""
    e, layout = call.e, call.layout
    blocks = e.b.lshr(call.tail, e.const(shift_of(layout.block_values)))
    with e.loop(blocks) as l:
        at = e.mul(l.index, layout.block_bytes)
        source, target = e.at(weights, at), e.at(tail_unit, at)
        done = 0
        for size in (16, 8, 4, 2, 1):
            while layout.block_bytes - done >= size:
                e.store(e.load(e.at(source, done), vec(i8, size)), e.at(target, done))
                done += size


def emit_row(call: Call, chunk: Chunk, row: Value, ahead: Value) -> None:
    """Add a chunk of one row to the sum of the only token."""
    e, layout = call.e, call.layout
    weights = row_at(call, chunk, row, 0)
    sums = e.at(call.sums, e.mul(row, LANE_BYTES))
    total = e.variable(e.load(sums, floats, 64))
    with e.loop(chunk.count) as l:
        unit = unpack(call, weights, ahead, l.index)
        record = e.at(chunk.records, e.mul(l.index, layout.record_bytes))
        e.set(total, layout.multiply(e, unit, record, e.get(total)))
    e.store(e.get(total), sums, 64)


def emit_row_pair(
    call: Call, chunk: Chunk, row: Value, last: Value, ahead: Value, n: Value
) -> None:
    """Add a chunk of rows `row` and `row + 1` to the sums of n tokens.

    If `row` is the last one, it is computed twice: the sums of a row more are spare.
    """
    e, layout = call.e, call.layout
    rows = [row, smaller(e, e.at(row, 1), last)]
    weights = [row_at(call, chunk, r, k) for k, r in enumerate(rows)]
    sums_of_row = e.mul(n, LANE_BYTES)
    sums = e.at(call.sums, e.mul(row, sums_of_row))
    with e.loop(chunk.count) as l:
        units = [unpack(call, w, ahead, l.index) for w in weights]
        first = e.at(chunk.records, e.mul(e.mul(l.index, n), layout.record_bytes))
        with e.loop(n) as t:
            record = e.at(first, e.mul(t.index, layout.record_bytes))
            place = e.at(sums, e.mul(t.index, LANE_BYTES))
            places = [place, e.at(place, sums_of_row)]
            totals = [e.load(p, floats, 64) for p in places]
            totals = [
                layout.multiply(e, u, record, total) for u, total in zip(units, totals, strict=True)
            ]
            for total, p in zip(totals, places, strict=True):
                e.store(total, p, 64)


def unpack(call: Call, weights: Value, ahead: Value, unit: Value) -> Any:
    e, layout = call.e, call.layout
    at = e.at(weights, e.mul(unit, layout.unit_bytes))
    for line in range(0, layout.unit_bytes, 64):
        e.prefetch(e.at(at, ahead, line))
    return layout.unpack(e, at)


def emit_results(call: Call, row: Value, rows: Value, token: Value, n: Value) -> None:
    """Sum the lanes, apply bias, scale and residual, and store."""
    e = call.e
    whole = e.b.icmp_signed("==", rows, e.const(ROWS_PER_ITEM))
    column = e.mul(row, 4)
    totals = e.at(call.zeros, LANE_BYTES)
    with e.loop(n) as l:
        t = e.at(token, l.index)
        sums = e.at(call.sums, e.mul(l.index, LANE_BYTES))
        step = e.mul(n, LANE_BYTES)
        total = row_sums(e, [e.load(e.at(sums, e.mul(step, k)), floats, 64) for k in range(LANES)])
        e.store(total, totals, 64)
        with e.b.if_else(whole) as (then, otherwise):
            with then:
                emit_outputs(call, total, t, column)
            with otherwise, e.loop(rows) as r:
                at = e.mul(r.index, 4)
                emit_outputs(call, e.load(e.at(totals, at), f32, 4), t, e.at(column, at))


def row_sums(e: Ir, vectors: list[Value]) -> Value:
    """Lane k is the sum of the lanes of vectors[k], in the order of `Ir.tree_sum`, for sixteen."""
    half = LANES // 2
    while half:
        low = [start + l for start in range(0, 2 * LANES, 2 * half) for l in range(half)]
        high = [l + half for l in low]
        vectors = [
            e.b.fadd(e.shuffle(v, low, w), e.shuffle(v, high, w))
            for v, w in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        half //= 2
    return vectors[0]


def emit_outputs(call: Call, total: Value, token: Value, column: Value) -> None:
    """Finish and store a vector (or one) of sums; `column` is where it belongs in a row of out."""
    e, b, type_ = call.e, call.e.b, total.type
    scale = e.load(e.at(call.args, 8 * Slot.SCALE), f32, 4)
    if type_ != f32:
        scale = e.splat(scale, type_.count)

    def optional(start: Slot, stride: Slot | None) -> Value:
        """What is at `column` of a buffer, or zeros if there is none."""
        address = call.slot(start)
        none = b.icmp_signed("==", address, e.const(0))
        if stride is not None:
            address = e.at(address, e.mul(e.mul(token, call.slot(stride)), 4))
        return e.load(b.select(none, call.zeros, e.at(address, column)), type_, 4)

    shifted = b.fadd(total, optional(Slot.BIAS, None))
    result = e.fma(scale, shifted, optional(Slot.RESIDUAL, Slot.RESIDUAL_STRIDE))
    out = e.at(call.slot(Slot.OUT), e.mul(e.mul(token, call.slot(Slot.OUT_STRIDE)), 4))
    e.store(result, e.at(out, column), 4)


def shift_of(power_of_two: int) -> int:
    return power_of_two.bit_length() - 1


def smaller(e: Ir, x: Value, y: Value) -> Value:
    return e.b.select(e.b.icmp_signed("<", x, y), x, y)


def zero_bytes(e: Ir, address: Value, size: int) -> None:
    zero_loop(e, address, e.const(size // LANE_BYTES))


def zero_loop(e: Ir, address: Value, num_vectors: Value) -> None:
    with e.loop(num_vectors) as l:
        e.store(e.const(0.0, floats), e.at(address, e.mul(l.index, LANE_BYTES)), 64)
