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
PREFETCH_BYTES = 2048
LANE_BYTES = 64

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
    tail_unit, tail_x, sums, packed   places in scratch
    """

    e: Ir
    layout: Layout
    args: Value
    units: Value
    tail: Value
    tail_unit: Value
    tail_x: Value
    sums: Value
    packed: Value

    def slot(self, slot: Slot) -> Value:
        return self.e.load(self.e.at(self.args, 8 * slot), i64, align=8)


def emit_row_product(
    e: Ir, layout: Layout, args: Value, first: Value, last: Value, scratch: Value
) -> None:
    """The whole kernel: items [first, last) of ROWS_PER_ITEM rows."""
    b = e.b
    cols = e.load(e.at(args, 8 * Slot.COLS), i64, align=8)
    units = b.lshr(cols, e.const(layout.unit_values.bit_length() - 1))
    tail = b.and_(cols, e.const(layout.unit_values - 1))
    tail_x = e.at(scratch, 1024)
    sums = e.at(tail_x, 1024)
    packed = e.at(sums, ROWS_PER_ITEM * BUNDLE * LANE_BYTES)
    call = Call(e, layout, args, units, tail, scratch, tail_x, sums, packed)
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
        with e.loop(rows) as r:
            weights = e.at(base, e.mul(r.index, row_bytes), e.mul(start, layout.unit_bytes))
            ahead = e.at(weights, prefetch_distance(e, chunks, n, row_bytes))
            with b.if_then(is_tail):
                copy_blocks(call, weights)
            weights = b.select(is_tail, call.tail_unit, weights)
            sums = e.at(call.sums, e.mul(e.mul(r.index, n), LANE_BYTES))
            emit_units(call, weights, ahead, count, records, sums, n)


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
    rows = e.mul(row_bytes, e.b.select(few, e.const(2), e.const(4)))
    whole = e.b.icmp_signed("<=", chunks, e.const(1))
    return e.b.select(whole, e.const(PREFETCH_BYTES), rows)


def copy_blocks(call: Call, weights: Value) -> None:
    """Copy the blocks after the last whole unit to the zeroed tail unit."""
    e, layout = call.e, call.layout
    blocks = e.b.lshr(call.tail, e.const(layout.block_values.bit_length() - 1))
    with e.loop(blocks) as l:
        at = e.mul(l.index, layout.block_bytes)
        source, target = e.at(weights, at), e.at(call.tail_unit, at)
        done = 0
        for size in (16, 8, 4, 2, 1):
            while layout.block_bytes - done >= size:
                e.store(e.load(e.at(source, done), vec(i8, size)), e.at(target, done))
                done += size


def emit_units(
    call: Call, weights: Value, ahead: Value, count: Value, records: Value, sums: Value, n: Value
) -> None:
    """Add the products of `count` units of a row to the sums of n tokens."""
    e, layout = call.e, call.layout
    one = e.b.icmp_signed("==", n, e.const(1))
    with e.b.if_else(one) as (then, otherwise):
        with then:
            total = e.variable(e.load(sums, floats, 64))
            with e.loop(count) as l:
                unit = unpack(call, weights, ahead, l.index)
                record = e.at(records, e.mul(l.index, layout.record_bytes))
                e.set(total, layout.multiply(e, unit, record, e.get(total)))
            e.store(e.get(total), sums, 64)
        with otherwise, e.loop(count) as l:
            unit = unpack(call, weights, ahead, l.index)
            first = e.at(records, e.mul(e.mul(l.index, n), layout.record_bytes))
            with e.loop(n) as t:
                record = e.at(first, e.mul(t.index, layout.record_bytes))
                place = e.at(sums, e.mul(t.index, LANE_BYTES))
                e.store(layout.multiply(e, unit, record, e.load(place, floats, 64)), place, 64)


def unpack(call: Call, weights: Value, ahead: Value, unit: Value) -> Any:
    e, layout = call.e, call.layout
    at = e.mul(unit, layout.unit_bytes)
    for line in range(0, layout.unit_bytes, 64):
        e.prefetch(e.at(ahead, at, line))
    return layout.unpack(e, e.at(weights, at))


def emit_results(call: Call, row: Value, rows: Value, token: Value, n: Value) -> None:
    """Sum the lanes, apply bias, scale and residual, and store."""
    e = call.e
    b = e.b
    scale = e.load(e.at(call.args, 8 * Slot.SCALE), f32, 4)
    bias, residual = call.slot(Slot.BIAS), call.slot(Slot.RESIDUAL)
    no_bias = b.icmp_signed("==", bias, e.const(0))
    no_residual = b.icmp_signed("==", residual, e.const(0))
    zero = e.at(call.tail_unit, 896)
    with e.loop(rows) as r:
        column = e.mul(e.at(row, r.index), 4)
        shift = e.load(b.select(no_bias, zero, e.at(bias, column)), f32, 4)
        with e.loop(n) as l:
            t = e.at(token, l.index)
            place = e.at(e.mul(r.index, n), l.index)
            total = e.tree_sum(e.load(e.at(call.sums, e.mul(place, LANE_BYTES)), floats, 64))
            out_row = e.at(call.slot(Slot.OUT), e.mul(e.mul(t, call.slot(Slot.OUT_STRIDE)), 4))
            old_row = e.at(residual, e.mul(e.mul(t, call.slot(Slot.RESIDUAL_STRIDE)), 4))
            old = e.load(b.select(no_residual, zero, e.at(old_row, column)), f32, 4)
            e.store(e.fma(scale, b.fadd(total, shift), old), e.at(out_row, column), 4)


def smaller(e: Ir, x: Value, y: Value) -> Value:
    return e.b.select(e.b.icmp_signed("<", x, y), x, y)


def zero_bytes(e: Ir, address: Value, size: int) -> None:
    zero_loop(e, address, e.const(size // LANE_BYTES))


def zero_loop(e: Ir, address: Value, num_vectors: Value) -> None:
    with e.loop(num_vectors) as l:
        e.store(e.const(0.0, floats), e.at(address, e.mul(l.index, LANE_BYTES)), 64)
