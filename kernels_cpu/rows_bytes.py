"""Weight types whose codes are bytes, times int8 activations: the general case.

Types with one scale for 32 values have a shorter way, see rows_pairs.py and rows_scaled.py.

A unit is 256 values: sixteen groups of 16, each with its own scale of weights and of activations.
Every group owns one of the 16 lanes. Its 16 codes are four dwords, one in each of four vectors,
and the activations are packed alike; so four byte products chained leave each group's integer sum
in the group's lane, and one conversion and two multiplications by scales serve 256 values.

A record of packed activations (one token, one unit): 256 bytes of x, 16 float32 scales, then 16
sums, which are float32 if the type has a bias, else the int32s at which the integer sums start.

What whole units leave of a row of 32-value blocks is taken in units of two blocks: one vector of 64
codes in their natural order, four lanes a group.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kernels_cpu.rows_emitter import LANES, Activations, Layout, codes, floats, ints, rows_together
from kernels_cpu.simd import Ir, Value, f32, i8, i32, vec

Order = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Unpacked weights: w = scale * (code - the type's offset), or scale * code + bias.

    codes   <64 x i8>, unsigned: four vectors, of which vector j has dword j of each lane's group;
            or one in natural order
    scale   float32 [16] of each lane's group
    bias    float32 [16] or None
    """

    codes: list[Value]
    scale: Value
    bias: Value | None = None


@dataclass(frozen=True, slots=True)
class ByteStep:
    """256 values in lane order, or 64 in natural order.

    order    group `order[p][i]` has lane 4 * i + p of all vectors
    offset   the integer sums start at -offset * sum(x); None: the type has a bias
    largest  bounds the codes
    weights  what `unpack` does
    """

    values: int
    bytes: int
    order: Order | None
    offset: int | None
    largest: int
    weights: Callable[[Ir, Value, Value], Unit]

    @property
    def record_bytes(self) -> int:
        return self.values + 128

    @property
    def together(self) -> int:
        return rows_together(4)

    def unpack(self, e: Ir, unit: Value, last_block: Value) -> Unit:
        return self.weights(e, unit, last_block)

    def pack(self, e: Ir, x: Activations, record: Value) -> None:
        if self.order is None:
            vectors, scale = [e.load(x.x, codes)], e.load(x.scale, floats)
            # Only the first of a group's four lanes has the sum.
            quarter = e.concat(e.load(x.sum, vec(f32, 4)), e.const(0.0, vec(f32, 4)))
            sums = e.shuffle(quarter, [l // 4 if l % 4 == 0 else 4 for l in range(LANES)])
        else:
            lanes = lane_groups(self.order)
            vectors = in_lane_order(e, x.x, self.order)
            expanded = [e.load(e.at(x.scale, 64 * g), floats) for g in range(4)]
            compact = e.concat(*(e.shuffle(v, range(0, LANES, 4)) for v in expanded))
            scale = e.shuffle(compact, lanes)
            sums = e.shuffle(e.load(x.sum, floats), lanes)
        if self.offset is not None:
            ones = [e.const(1, codes)] * len(vectors)
            sums = e.dot4s(e.const(0, ints), ones, vectors, largest=1)
            sums = e.b.mul(sums, e.const(-self.offset, ints))
        for k, vector in enumerate((*vectors, scale, sums)):
            e.store(vector, e.at(record, 64 * k), 64)

    def multiply(self, e: Ir, weights: Unit, record: Value, total: Value) -> Value:
        scale, sums = e.at(record, self.values), e.at(record, self.values + 64)
        start = e.const(0, ints) if self.offset is None else e.load(sums, ints, 64)
        x = [e.load(e.at(record, k), codes, 64) for k in range(0, self.values, 64)]
        dots = e.dot4s(start, weights.codes, x, largest=self.largest)
        product = e.b.fmul(e.b.sitofp(dots, floats), e.load(scale, floats, 64))
        total = e.fma(product, weights.scale, total)
        if weights.bias is not None:
            total = e.fma(weights.bias, e.load(sums, floats, 64), total)
        return total


def byte_layout(
    block: tuple[int, int],
    order: Order,
    largest: int,
    whole: Callable[[Ir, Value], Unit],
    *,
    offset: int | None = None,
) -> Layout:
    """A type with blocks of 256 values in `block[1]` bytes and codes up to `largest`.

    whole   unpacks the block at an address
    """

    def unpack(e: Ir, unit: Value, last_block: Value) -> Unit:
        return whole(e, unit)

    return Layout(lambda: (ByteStep(256, block[1], order, offset, largest, unpack),), block, 1)


def in_lane_order(e: Ir, x: Value, order: Order) -> list[Value]:
    """256 bytes at an address, as Unit.codes has them."""
    natural = [e.load(e.at(x, 64 * g), codes) for g in range(4)]
    parts = []
    for groups in order:
        slices = [e.slice(natural[group // 4], 16 * (group % 4), 16) for group in groups]
        parts.append(e.concat(*slices))
    return transposed(e, parts)


def lane_groups(order: Order) -> list[int]:
    """The group of each of the 16 lanes."""
    return [order[p][i] for i in range(4) for p in range(4)]


def pick(e: Ir, v: Value, index: Callable[[int], int], order: Order) -> Value:
    """For each lane the entry index(group) of a vector."""
    return e.shuffle(v, [index(group) for group in lane_groups(order)])


def interleave(e: Ir, v: Value, w: Value, size: int, *, high: bool = False) -> Value:
    """Of each 128-bit lane the low (high) half of v and w, in turns of `size` dwords."""
    n = bytes_of(v) // 4
    v, w = (e.b.bitcast(x, vec(i32, n)) for x in (v, w))
    first = [0, n, 1, n + 1] if size == 1 else [0, 1, n, n + 1]
    return e.shuffle(v, [i + l + 2 * high for i in range(0, n, 4) for l in first], w)


def bytes_of(v: Value) -> int:
    return v.type.count * v.type.element.width // 8


def as_bytes(e: Ir, v: Value) -> Value:
    return e.b.bitcast(v, vec(i8, bytes_of(v)))


def transposed(e: Ir, v: list[Value]) -> list[Value]:
    """Dword p of each 128-bit lane of result j is dword j of that lane of v[p]."""
    low, high = interleave(e, v[0], v[1], 1), interleave(e, v[0], v[1], 1, high=True)
    low2, high2 = interleave(e, v[2], v[3], 1), interleave(e, v[2], v[3], 1, high=True)
    result = []
    for a, c in ((low, low2), (high, high2)):
        result += [interleave(e, a, c, 2), interleave(e, a, c, 2, high=True)]
    return [as_bytes(e, r) for r in result]


def low_nibbles(e: Ir, v: Value) -> Value:
    return e.b.and_(v, e.const(15, v.type))


def high_nibbles(e: Ir, v: Value) -> Value:
    return e.b.lshr(v, e.const(4, v.type))


def transposed_nibbles(e: Ir, v: Value, w: Value) -> list[Value]:
    """`transposed` of the low nibbles of v and w, then the high nibbles of v and w."""
    result = []
    for high in (False, True):
        pair = as_bytes(e, interleave(e, v, w, 1, high=high))
        a, c = low_nibbles(e, pair), high_nibbles(e, pair)
        result += [interleave(e, a, c, 2), interleave(e, a, c, 2, high=True)]
    return [as_bytes(e, r) for r in result]
