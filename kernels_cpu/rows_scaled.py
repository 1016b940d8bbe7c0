"""Q4_K and Q5_K at level avx2: integer scales multiply the sums of products on their way to 32 bits.

Without byte products that add up in 32 bits, sums of pairs in 16 bits must be widened by a
multiplication anyway; its factor, otherwise 1, is the scale. So the scales never become floats, and
the block's d is the last factor:

    total += d * (x_scale[0] * sum[0] + x_scale[1] * sum[1])

A unit is a block of 256 values. Sum s has the sub-blocks of 32 values with numbers 2 * c + s: lane c
the first half, lane 4 + c the second. A half's codes are four dwords, one in each of four vectors.

A record of packed activations (one token, one unit): x in the order of the codes, the scales of
both sums' halves, and the sums of the activations of each sub-block; the last three are float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kernels_cpu.rows_emitter import LANE_BYTES, Activations
from kernels_cpu.rows_pairs import in_lane_order, picked
from kernels_cpu.simd import Ir, Value, f32, i8, i16, i32, vec

LANES = 8
VALUES = 256
LARGEST = 31  # code: four sums of two products of it fit 16 bits
floats, ints, codes, shorts = vec(f32, 8), vec(i32, 8), vec(i8, 32), vec(i16, 16)
assert 4 * 2 * 127 * LARGEST <= 32767


@dataclass(frozen=True, slots=True)
class ScaledUnit:
    """An unpacked block: w = d * scale * code + minimum.

    codes    <32 x i8>: four vectors of each sum
    scales   <16 x i16>: of each sum, twice in a dword
    d        float32 in all lanes
    minima   float32: -dmin * minimum of the eight sub-blocks
    """

    codes: tuple[list[Value], list[Value]]
    scales: list[Value]
    d: Value
    minima: Value


def sub_block_of(s: int, lane: int) -> int:
    """Which sub-block, half of it, has a lane of sum s."""
    return 2 * (lane % 4) + s


@dataclass(frozen=True, slots=True)
class ScaledStep:
    """A block of `bytes` bytes, and what unpacks it."""

    bytes: int
    weights: Callable[[Ir, Value], ScaledUnit]

    @property
    def values(self) -> int:
        return VALUES

    @property
    def together(self) -> int:
        return 1

    @property
    def record_bytes(self) -> int:
        return VALUES + 2 * LANE_BYTES

    def unpack(self, e: Ir, unit: Value, last_block: Value) -> ScaledUnit:
        return self.weights(e, unit)

    def pack(self, e: Ir, x: Activations, record: Value) -> None:
        values = [e.load(e.at(x.x, 64 * g), vec(i8, 64)) for g in range(4)]
        scales = [e.load(e.at(x.scale, 64 * g), vec(f32, 16)) for g in range(4)]
        scales = [e.shuffle(v, [0, 4, 8, 12]) for v in scales]
        groups = [[2 * sub_block_of(s, lane) + lane // 4 for lane in range(LANES)] for s in (0, 1)]
        sums = e.load(x.sum, vec(f32, 16))
        even, odd = (e.shuffle(sums, range(k, 16, 2)) for k in (0, 1))
        vectors = [v for places in groups for v in in_lane_order(e, values, places)]
        vectors += [picked(e, scales, places) for places in groups]
        for k, vector in enumerate((*vectors, e.b.fadd(even, odd))):
            e.store(vector, e.at(record, 32 * k), 32)

    def multiply(self, e: Ir, weights: ScaledUnit, record: Value, total: Value) -> Value:
        b, products = e.b, []

        def part(k: int, kind: Value) -> Value:
            return e.load(e.at(record, 32 * k), kind, 32)

        for s in (0, 1):
            pairs = [e.dot2(u, part(4 * s + k, codes)) for k, u in enumerate(weights.codes[s])]
            sums = b.add(b.add(pairs[0], pairs[1]), b.add(pairs[2], pairs[3]))
            # At most 4 * 2 * 127 * LARGEST * 63, below 2**24: a float holds it.
            products.append(b.sitofp(e.multiply2(sums, weights.scales[s]), floats))
        sum_ = e.fma(products[1], part(9, floats), b.fmul(products[0], part(8, floats)))
        here = e.fma(weights.minima, part(10, floats), e.slice(total, 0, LANES))
        return e.concat(e.fma(sum_, weights.d, here), e.slice(total, LANES, LANES))


def in_dwords(e: Ir, v: Value, entries: list[int], *places: int) -> Value:
    """<32 x i8>: entry entries[l] of bytes at these places of dword l, zeros elsewhere.

    v  the same 16 bytes twice: so each half of the result comes from one half
    """
    zero, lanes = 32, []
    for lane, entry in enumerate(entries):
        lanes += [entry + 16 * (lane // 4) if k in places else zero for k in range(4)]
    return e.shuffle(v, lanes, e.const(0, v.type))
