"""The row product's one emitter: raw GGUF rows times the activations of generated tokens.

    out[t][row] = residual[t][row] + scale * (sum over k of w[row][k] * x[t][k] + bias[row])

for t in [0, count). A call packs the activations of up to 16 tokens into its scratch, in the order
in which the weight type likes to be read, then walks its rows: a *unit* (256 values; 64 of float
types) is unpacked into registers once and meets every token, whose 16 float lanes of sum lie in
scratch. So there is one piece of code for any number of tokens, and a token's sums are the same
sequence of operations whatever else is in the bundle. With several tokens, rows may go together
and share the loads of activations, and are cut into chunks so that the activations of a chunk stay
in the first-level cache for all rows of an item.

What whole units leave of a row is taken in smaller units. Nothing past a row's end is ever read.

Not here: what a weight type looks like (rows_bytes.py, rows_pairs.py, rows_scaled.py, rows_float.py
and the files of types).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from kernels_cpu.kernel import isa
from kernels_cpu.simd import Ir, Value, f32, i8, i32, i64, vec

LANES = 16
ROWS_PER_ITEM = 16
BUNDLE = 16  # tokens that share a pass over the rows
PREFETCH_BYTES = 8192  # ahead, where rows are walked one after the other
ROWS_AHEAD = 4  # where several are walked together; not fewer than a step's `together`
LANE_BYTES = 64

ints, floats, codes = vec(i32, LANES), vec(f32, LANES), vec(i8, 4 * LANES)


class Slot(IntEnum):
    """The argument block: int64 slots. Strides are in elements, K is cols padded to 64 by zeros.

    WEIGHTS   address of row 0; rows are ROW_BYTES apart
    COLS      at most 57,344: the activations of 16 tokens are packed into scratch
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


class Step(Protocol):
    """How a unit, some neighbouring values of a row, is multiplied.

    values, bytes   size of a unit; values is a power of two
    record_bytes    packed activations of one token for a unit
    together        rows that share a pass over the tokens, see `rows_together`
    """

    @property
    def values(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def record_bytes(self) -> int: ...

    @property
    def together(self) -> int: ...

    def pack(self, e: Ir, x: "Activations", record: Value) -> None:
        """Write the record of one token and unit."""

    def unpack(self, e: Ir, unit: Value, last_block: Value) -> Any:
        """Bring the unit at an address into registers; blocks past the last one are not read."""

    def multiply(self, e: Ir, weights: Any, record: Value, total: Value) -> Value:
        """total [16 lanes] + the products of one unpacked unit and one token's record."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A weight type: how to multiply a row, in units of decreasing size.

    steps    asked for when a kernel is compiled. Each takes as many whole units as there are of
             what those before it left, the last one may meet a unit that is not whole
    block    (values, bytes)
    x_bytes  of one activation
    """

    steps: Callable[[], tuple[Step, ...]]
    block: tuple[int, int]
    x_bytes: int


@dataclass(frozen=True, slots=True)
class Activations:
    """Addresses of one token's activations at the first value of a unit.

    groups  how many groups of 64 values there are from here to the row's end
    zeros   64 bytes
    """

    x: Value
    scale: Value
    sum: Value
    groups: Value
    zeros: Value

    def group(self, e: Ir, number: int) -> "Activations":
        """A group of 64 int8 of the unit; zeros if it is after the row's end."""
        exists = e.b.icmp_signed("<", e.const(number), self.groups)
        places = (self.x, 64 * number), (self.scale, 64 * number), (self.sum, 16 * number)
        x, scale, sum_ = (e.b.select(exists, e.at(p, n), self.zeros) for p, n in places)
        return Activations(x, scale, sum_, self.groups, self.zeros)


@dataclass(frozen=True, slots=True)
class Part:
    """`count` units of a row from value `start` on, `offset` bytes into it, and their records."""

    step: Step
    count: Value
    start: Value
    offset: Value
    records: Value


@dataclass(frozen=True, slots=True)
class Call:
    """What one call of the kernel works with; values are int64.

    zeros, totals   64 bytes each in scratch
    sums            [row][token][16 lanes]
    packed          records: [unit][token]
    """

    e: Ir
    layout: Layout
    args: Value
    zeros: Value
    totals: Value
    sums: Value
    packed: Value

    def slot(self, slot: Slot) -> Value:
        return self.e.load(self.e.at(self.args, 8 * slot), i64, align=8)

    def parts(self, n: Value) -> list[Part]:
        """The units of each step, with the records of n tokens."""
        e, b, result, steps = self.e, self.e.b, [], self.layout.steps()
        left, start, offset, records = self.slot(Slot.COLS), e.const(0), e.const(0), self.packed
        for step in steps:
            if step is steps[-1]:
                left = e.at(left, step.values - 1)
            count = b.lshr(left, e.const(shift_of(step.values)))
            result.append(Part(step, count, start, offset, records))
            values = e.mul(count, step.values)
            left, start = b.sub(left, values), b.add(start, values)
            offset = b.add(offset, e.mul(count, step.bytes))
            records = b.add(records, e.mul(e.mul(count, n), step.record_bytes))
        return result


def emit_row_product(
    e: Ir, layout: Layout, args: Value, first: Value, last: Value, scratch: Value
) -> None:
    """The whole kernel: items [first, last) of ROWS_PER_ITEM rows."""
    b = e.b
    sums = e.at(scratch, 2 * LANE_BYTES)
    packed = e.at(sums, ROWS_PER_ITEM * BUNDLE * LANE_BYTES)
    call = Call(e, layout, args, scratch, e.at(scratch, LANE_BYTES), sums, packed)
    e.store(e.const(0.0, floats), call.zeros, 64)
    rows = call.slot(Slot.ROWS)
    num_tokens = e.load(call.slot(Slot.COUNT), i64, align=8)
    bundles = b.lshr(e.at(num_tokens, BUNDLE - 1), e.const(shift_of(BUNDLE)))
    with e.loop(bundles) as bundle:
        token = e.mul(bundle.index, BUNDLE)
        n = smaller(e, b.sub(num_tokens, token), e.const(BUNDLE))
        parts = call.parts(n)
        emit_pack(call, parts, token, n)
        one = b.icmp_signed("==", n, e.const(1))
        with e.loop(b.sub(last, first)) as item:
            row = e.mul(e.at(first, item.index), ROWS_PER_ITEM)
            here = smaller(e, b.sub(rows, row), e.const(ROWS_PER_ITEM))
            base = e.at(call.slot(Slot.WEIGHTS), e.mul(row, call.slot(Slot.ROW_BYTES)))
            with b.if_else(one) as (then, otherwise):
                with then:
                    emit_item_of_one(call, parts, base, here)
                with otherwise:
                    emit_item_of_many(call, parts, base, here, n)
            emit_results(call, row, here, token, n)


def emit_pack(call: Call, parts: list[Part], token: Value, n: Value) -> None:
    """Pack the activations of tokens [token, token + n)."""
    e = call.e
    with e.loop(n) as l:
        t = e.at(token, l.index)
        for part in parts:
            with e.loop(part.count) as u:
                value = e.at(part.start, e.mul(u.index, part.step.values))
                place = e.at(e.mul(u.index, n), l.index)
                record = e.at(part.records, e.mul(place, part.step.record_bytes))
                part.step.pack(e, activations_at(call, t, value), record)


def activations_at(call: Call, token: Value, value: Value) -> Activations:
    e = call.e

    def place(start: Slot, stride: Slot, size: int) -> Value:
        return e.at(call.slot(start), e.mul(e.mul(token, call.slot(stride)), size))

    # In bytes, a value has one of expanded scales and a quarter of sums.
    return Activations(
        e.at(place(Slot.X, Slot.X_STRIDE, call.layout.x_bytes), e.mul(value, call.layout.x_bytes)),
        e.at(place(Slot.X_SCALE, Slot.X_SCALE_STRIDE, 4), value),
        e.at(place(Slot.X_SUM, Slot.X_SUM_STRIDE, 4), e.b.lshr(value, e.const(2))),
        e.b.lshr(e.at(e.b.sub(call.slot(Slot.COLS), value), 63), e.const(6)),
        call.zeros,
    )


def emit_item_of_one(call: Call, parts: list[Part], base: Value, rows: Value) -> None:
    """Leave the sums of `rows` rows and the only token in scratch."""
    e, row_bytes = call.e, call.slot(Slot.ROW_BYTES)
    total = e.variable(e.const(0.0, floats))
    with e.loop(rows) as r:
        row = e.at(base, e.mul(r.index, row_bytes))
        e.set(total, e.const(0.0, floats))
        for part in parts:
            start = e.at(row, part.offset)
            with e.loop(part.count) as l:
                unit = unpack(call, part.step, row, start, l.index, e.const(PREFETCH_BYTES))
                record = e.at(part.records, e.mul(l.index, part.step.record_bytes))
                e.set(total, part.step.multiply(e, unit, record, e.get(total)))
        e.store(e.get(total), e.at(call.sums, e.mul(r.index, LANE_BYTES)), 64)


def emit_item_of_many(call: Call, parts: list[Part], base: Value, rows: Value, n: Value) -> None:
    """Leave the sums of `rows` rows and n tokens in scratch."""
    e, b = call.e, call.e.b
    shift = chunk_shift(e, n, parts[0].step)
    chunk_units = b.shl(e.const(1), shift)
    whole, rests = parts[0], parts[1:]
    chunks = b.lshr(b.sub(e.at(whole.count, chunk_units), e.const(1)), shift)
    ahead = e.mul(call.slot(Slot.ROW_BYTES), ROWS_AHEAD)
    is_far = b.icmp_signed(">", ahead, e.const(PREFETCH_BYTES))
    is_cut = b.icmp_signed(">", chunks, e.const(1))
    ahead = b.select(b.or_(is_far, is_cut), ahead, e.const(PREFETCH_BYTES))
    with e.loop(chunks) as c:
        start = b.shl(c.index, shift)
        count = smaller(e, b.sub(whole.count, start), chunk_units)
        records = e.at(whole.records, e.mul(e.mul(start, n), whole.step.record_bytes))
        offset = e.mul(start, whole.step.bytes)
        emit_rows(call, Part(whole.step, count, start, offset, records), base, rows, n, ahead)
    for rest in rests:
        emit_rows(call, rest, base, rows, n, ahead)


def chunk_shift(e: Ir, n: Value, step: Step) -> Value:
    """log2 of the units of a chunk: about 24 KB of activations."""
    large = int(step.record_bytes > 512)
    shift = e.const(2 - large)
    for most, value in ((8, 3), (4, 4)):
        fits = e.b.icmp_signed("<=", n, e.const(most))
        shift = e.b.select(fits, e.const(value - large), shift)
    return shift


def emit_rows(call: Call, part: Part, base: Value, rows: Value, n: Value, ahead: Value) -> None:
    """Add a part of all rows of an item to the sums of n tokens.

    A last row without partners is computed more than once: sums of rows beyond an item's are spare.
    """
    e, b, step, together = call.e, call.e.b, part.step, part.step.together
    row_bytes = call.slot(Slot.ROW_BYTES)
    sums_of_row = e.mul(n, LANE_BYTES)
    with e.loop(b.lshr(e.at(rows, together - 1), e.const(shift_of(together)))) as l:
        first = e.mul(l.index, together)
        numbers = [smaller(e, e.at(first, k), e.at(rows, -1)) for k in range(together)]
        row_bases = [e.at(base, e.mul(number, row_bytes)) for number in numbers]
        sums = [e.at(call.sums, e.mul(e.at(first, k), sums_of_row)) for k in range(together)]
        with e.loop(part.count) as l:
            units = [
                unpack(call, step, row, e.at(row, part.offset), l.index, ahead) for row in row_bases
            ]
            records = e.at(part.records, e.mul(e.mul(l.index, n), step.record_bytes))
            # The first unit of a row begins its sums.
            is_first = b.icmp_signed("==", e.at(part.offset, l.index), e.const(0))
            sources = [b.select(is_first, call.zeros, s) for s in sums]
            stride = b.select(is_first, e.const(0), e.const(LANE_BYTES))
            with e.loop(n) as t:
                record = e.at(records, e.mul(t.index, step.record_bytes))
                places = [e.at(s, e.mul(t.index, LANE_BYTES)) for s in sums]
                # All loads before any store, so that the rows share those of the record.
                totals = [e.load(e.at(s, e.mul(t.index, stride)), floats, 64) for s in sources]
                totals = [
                    step.multiply(e, u, record, v) for u, v in zip(units, totals, strict=True)
                ]
                for total, place in zip(totals, places, strict=True):
                    e.store(total, place, 64)


def rows_together(most: int) -> int:
    """Rows that share a pass over the tokens: as many as fit 32 registers, or 16."""
    return most if isa() in ("amx", "avx512") else 1


def unpack(call: Call, step: Step, row: Value, start: Value, unit: Value, ahead: Value) -> Any:
    """Unpack the unit of that number after `start`, and prefetch what is `ahead` bytes later."""
    e = call.e
    at = e.at(start, e.mul(unit, step.bytes))
    for line in range(0, step.bytes, 64):
        e.prefetch(e.at(at, ahead, line))
    values, size = call.layout.block
    blocks = e.b.lshr(call.slot(Slot.COLS), e.const(shift_of(values)))
    return step.unpack(e, at, e.at(row, e.mul(blocks, size), -size))


def emit_results(call: Call, row: Value, rows: Value, token: Value, n: Value) -> None:
    """Sum the lanes, apply bias, scale and residual, and store."""
    e = call.e
    whole = e.b.icmp_signed("==", rows, e.const(ROWS_PER_ITEM))
    column = e.mul(row, 4)
    with e.loop(n) as l:
        t = e.at(token, l.index)
        sums = e.at(call.sums, e.mul(l.index, LANE_BYTES))
        step = e.mul(n, LANE_BYTES)
        total = row_sums(e, [e.load(e.at(sums, e.mul(step, k)), floats, 64) for k in range(LANES)])
        e.store(total, call.totals, 64)
        with e.b.if_else(whole) as (then, otherwise):
            with then:
                emit_outputs(call, total, t, column)
            with otherwise, e.loop(rows) as r:
                at = e.mul(r.index, 4)
                emit_outputs(call, e.load(e.at(call.totals, at), f32, 4), t, e.at(column, at))


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
