"""Weight types whose codes are bytes, times int8 activations.

A unit is 256 values: sixteen groups of 16, each with its own scale of weights and of activations.
Every group owns one of the 16 lanes. Its 16 codes are four dwords, one in each of four vectors,
and the activations are packed alike; so four byte products chained leave each group's integer sum
in the group's lane, and one conversion and two multiplications by scales serve 256 values.

A record of packed activations (one token, one unit): 256 bytes of x, 16 float32 scales, then 16
sums, which are float32 if the type has a bias, else the int32s at which the integer sums start.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kernels_cpu.rows_emitter import LANES, Activations, codes, floats, ints
from kernels_cpu.simd import Ir, Value


@dataclass(frozen=True, slots=True)
class Unit:
    """An unpacked unit of 256 weights in lane order (see `ByteLayout`).

    codes   four <64 x i8>, unsigned: vector j has dword j of each lane's group
    scale   float32 [16] of each lane's group
    bias    float32 [16] or None
    """

    codes: list[Value]
    scale: Value
    bias: Value | None = None


@dataclass(frozen=True, slots=True)
class ByteLayout:
    """A type that meets int8 activations: w = scale * (code - offset), or scale * code + bias.

    order        group `order[p][i]` has lane 4 * i + p of all vectors
    offset       the integer sums start at -offset * sum(x); None: the type has a bias
    wide         whether codes exceed 127
    unpack_unit  brings a unit at an address into registers
    """

    block_values: int
    block_bytes: int
    order: tuple[tuple[int, ...], ...]
    offset: int | None
    wide: bool
    unpack_unit: Callable[[Ir, Value], Unit]
    unit_values: int = 256
    record_bytes: int = 384

    @property
    def unit_bytes(self) -> int:
        return 256 // self.block_values * self.block_bytes

    def pack(self, e: Ir, x: Activations, record: Value) -> None:
        natural = [e.load(e.at(x.x, 64 * g), codes) for g in range(4)]
        parts = [self.gather_groups(e, natural, p) for p in range(4)]
        sums = e.const(0, ints)
        for j, part in enumerate(transposed(e, parts)):
            e.store(part, e.at(record, 64 * j), 64)
            sums = e.dot4(sums, e.const(1, codes), part, wide=False)
        lanes = lane_groups(self.order)
        scales = [e.load(e.at(x.scale, 64 * g), floats) for g in range(4)]
        compact = e.concat(*(e.shuffle(s, range(0, LANES, 4)) for s in scales))
        e.store(e.shuffle(compact, lanes), e.at(record, 256), 64)
        if self.offset is None:
            e.store(e.shuffle(e.load(x.sum, floats), lanes), e.at(record, 320), 64)
        else:
            start = e.b.mul(sums, e.const(-self.offset, ints))
            e.store(start, e.at(record, 320), 64)

    def gather_groups(self, e: Ir, natural: list[Value], p: int) -> Value:
        """The four groups order[p] side by side."""
        groups = []
        for group in self.order[p]:
            groups.append(e.slice(natural[group // 4], 16 * (group % 4), 16))
        return e.concat(*groups)

    def unpack(self, e: Ir, unit: Value) -> Unit:
        return self.unpack_unit(e, unit)

    def multiply(self, e: Ir, weights: Unit, record: Value, total: Value) -> Value:
        extra = e.at(record, 320)
        dots = e.const(0, ints) if self.offset is None else e.load(extra, ints, 64)
        for j, vector in enumerate(weights.codes):
            dots = e.dot4(dots, vector, e.load(e.at(record, 64 * j), codes, 64), wide=self.wide)
        product = e.b.fmul(e.b.sitofp(dots, floats), e.load(e.at(record, 256), floats, 64))
        total = e.fma(product, weights.scale, total)
        if weights.bias is not None:
            total = e.fma(weights.bias, e.load(extra, floats, 64), total)
        return total


def lane_groups(order: tuple[tuple[int, ...], ...]) -> list[int]:
    """The group of each of the 16 lanes."""
    return [order[p][i] for i in range(4) for p in range(4)]


def pick(e: Ir, v: Value, index: Callable[[int], int], order: tuple[tuple[int, ...], ...]) -> Value:
    """For each lane the entry index(group) of a vector."""
    return e.shuffle(v, [index(group) for group in lane_groups(order)])


def interleave(e: Ir, v: Value, w: Value, size: int, *, high: bool = False) -> Value:
    """Of each 128-bit lane the low (high) half of v and w, in turns of `size` dwords."""
    v, w = (e.b.bitcast(x, ints) for x in (v, w))
    first = [0, 16, 1, 17] if size == 1 else [0, 1, 16, 17]
    return e.shuffle(v, [4 * i + l + 2 * high for i in range(4) for l in first], w)


def transposed(e: Ir, v: list[Value]) -> list[Value]:
    """Dword p of each 128-bit lane of result j is dword j of that lane of v[p]."""
    low, high = interleave(e, v[0], v[1], 1), interleave(e, v[0], v[1], 1, high=True)
    low2, high2 = interleave(e, v[2], v[3], 1), interleave(e, v[2], v[3], 1, high=True)
    result = []
    for a, c in ((low, low2), (high, high2)):
        result += [interleave(e, a, c, 2), interleave(e, a, c, 2, high=True)]
    return [e.b.bitcast(r, codes) for r in result]


def low_nibbles(e: Ir, v: Value) -> Value:
    return e.b.and_(v, e.const(15, codes))


def high_nibbles(e: Ir, v: Value) -> Value:
    return e.b.lshr(v, e.const(4, codes))


def transposed_nibbles(e: Ir, v: Value, w: Value) -> list[Value]:
    """`transposed` of the low nibbles of v and w, then the high nibbles of v and w."""
    result = []
    for high in (False, True):
        pair = e.b.bitcast(interleave(e, v, w, 1, high=high), codes)
        a, c = low_nibbles(e, pair), high_nibbles(e, pair)
        result += [interleave(e, a, c, 2), interleave(e, a, c, 2, high=True)]
    return [e.b.bitcast(r, codes) for r in result]
