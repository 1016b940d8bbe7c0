"""Weight types with one scale for 32 values, times int8 activations with one for 16.

A unit is as many blocks of 32 values as a register has lanes: a lane owns a block. Its codes are
eight dwords, one in each of eight vectors, the first four vectors being the first 16 values. So
four byte products chained leave the sum of 16 products in the lane, and

    total += scale * (x_scale[first 16] * sum[first 16] + x_scale[last 16] * sum[last 16])

is two conversions and three multiplications for all blocks of a unit.

A record of packed activations (one token, one unit): x in the order of the codes, the scales of
first and of last 16s, then what belongs to the sums of activations: with a bias its factors,
float32, else the two vectors of int32 at which the integer sums start.

A row may end in the middle of a unit of two blocks of 256 values: the first one stands in for the
second then, and meets zeros. What is left of blocks of 32 values is taken two at a time
(rows_bytes.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from llvmlite import ir

from kernels_cpu.kernel import isa
from kernels_cpu.rows_bytes import ByteStep, Order, Unit, high_nibbles, low_nibbles, transposed
from kernels_cpu.rows_emitter import LANE_BYTES, Activations, Layout, Step, rows_together, smaller
from kernels_cpu.simd import Ir, Value, f32, i8, i16, i32, vec


@dataclass(frozen=True, slots=True)
class PairStep:
    """A unit of `lanes` blocks of 32 values, 16 or 8.

    block    (values, bytes) of the type's blocks, which may be several of 32
    order    lane l has block order(l)
    offset   the integer sums start at -offset * sum(x); None: the type has a bias
    largest  bounds the codes
    weights  unpacks, given the addresses of the unit's blocks: codes <4 * lanes x i8>
    """

    lanes: int
    block: tuple[int, int]
    order: Callable[[int], int]
    offset: int | None
    largest: int
    weights: Callable[[Ir, list[Value]], Unit]

    @property
    def values(self) -> int:
        return 32 * self.lanes

    @property
    def bytes(self) -> int:
        length, size = self.block
        return self.values // length * size

    @property
    def together(self) -> int:
        """Codes, scale and bias of two rows take 20 registers."""
        return rows_together(2)

    @property
    def record_bytes(self) -> int:
        vectors = 8 + 2 + (1 if self.offset is None else 2)
        return -(-vectors * 4 * self.lanes // LANE_BYTES) * LANE_BYTES

    def unpack(self, e: Ir, unit: Value, last_block: Value) -> Unit:
        length, size = self.block
        blocks = [e.at(unit, size * k) for k in range(self.values // length)]
        if length == 256:
            blocks[1:] = [smaller(e, block, last_block) for block in blocks[1:]]
        return self.weights(e, blocks)

    def pack(self, e: Ir, x: Activations, record: Value) -> None:
        n, b = self.lanes, e.b
        groups = [x.group(e, g) for g in range(self.values // 64)]
        values = [e.load(g.x, vec(i8, 64)) for g in groups]
        scales = [e.shuffle(e.load(g.scale, vec(f32, 16)), [0, 4, 8, 12]) for g in groups]
        sums = [e.load(g.sum, vec(f32, 4)) for g in groups]
        codes, x_scales, x_sums = [], [], []
        for half in (0, 1):
            places = [2 * self.order(lane) + half for lane in range(n)]
            codes += in_lane_order(e, values, places)
            x_scales.append(picked(e, scales, places))
            x_sums.append(picked(e, sums, places))
        if self.offset is None:
            starts = [b.fadd(*x_sums)]
        else:
            ones, zero = [e.const(1, codes[0].type)] * 4, e.const(0, vec(i32, n))
            minus = e.const(-self.offset, zero.type)
            starts = [
                b.mul(e.dot4s(zero, ones, codes[k : k + 4], largest=1), minus) for k in (0, 4)
            ]
        for k, vector in enumerate((*codes, *x_scales, *starts)):
            e.store(vector, e.at(record, 4 * n * k), 4 * n)

    def multiply(self, e: Ir, weights: Unit, record: Value, total: Value) -> Value:
        n, b = self.lanes, e.b
        floats, ints, codes = vec(f32, n), vec(i32, n), vec(i8, 4 * n)

        def part(k: int, kind: Value) -> Value:
            return e.load(e.at(record, 4 * n * k), kind, 4 * n)

        products = []
        for half in (0, 1):
            start = e.const(0, ints) if self.offset is None else part(10 + half, ints)
            x = [part(4 * half + k, codes) for k in range(4)]
            mine = weights.codes[4 * half : 4 * half + 4]
            products.append(b.sitofp(e.dot4s(start, mine, x, largest=self.largest), floats))
        sum_ = e.fma(products[1], part(9, floats), b.fmul(products[0], part(8, floats)))
        here = total if n == total.type.count else e.slice(total, 0, n)
        if weights.bias is not None:
            here = e.fma(weights.bias, part(10, floats), here)
        here = e.fma(sum_, weights.scale, here)
        return here if n == total.type.count else e.concat(here, e.slice(total, n, n))


def lanes() -> int:
    """float32 lanes of a register."""
    return 16 if isa() in ("amx", "avx512") else 8


def pair_layout(
    block_bytes: int,
    largest: int,
    weights: Callable[[Ir, list[Value]], Unit],
    *,
    offset: int | None = None,
    order: Callable[[int], int] | None = None,
) -> Layout:
    """A type with blocks of 256 values and codes up to `largest`; see `PairStep`."""
    block = 256, block_bytes
    step = partial(PairStep, block=block, order=order or natural, offset=offset, largest=largest)
    return Layout(lambda: (step(lanes(), weights=weights),), block, 1)


def block_layout(
    block: tuple[int, int],
    order: Order,
    largest: int,
    whole: Callable[[Ir, Value], Unit],
    pairs: Callable[[Ir, list[Value]], Unit],
    rest: Callable[[Ir, Value, Value], Unit],
    *,
    offset: int | None = None,
) -> Layout:
    """A type with blocks of 32 values in `block[1]` bytes and codes up to `largest`.

    whole, order  unpacks eight blocks from an address, where registers have 16 lanes: a unit of two
                  would be slower for one token, and leave more to the rest
    pairs         unpacks eight blocks at addresses, where registers have 8 lanes
    rest          unpacks two blocks at two addresses
    """
    _, size = block

    def unpack_whole(e: Ir, unit: Value, last_block: Value) -> Unit:
        return whole(e, unit)

    def unpack_rest(e: Ir, unit: Value, last_block: Value) -> Unit:
        # Of an odd number of blocks the last one comes twice, the second time for zeros in x.
        return rest(e, unit, smaller(e, e.at(unit, size), last_block))

    def steps() -> tuple[Step, ...]:
        last = ByteStep(64, 2 * size, None, offset, largest, unpack_rest)
        if lanes() == 16:
            return ByteStep(256, 8 * size, order, offset, largest, unpack_whole), last
        return PairStep(8, block, natural, offset, largest, pairs), last

    return Layout(steps, block, 1)


def natural(lane: int) -> int:
    return lane


def in_lane_order(e: Ir, values: list[Value], places: list[int]) -> list[Value]:
    """Of bytes in their natural order, 64 a vector, the 16 from 16 * places[l] on in lane l."""
    parts = []
    for p in range(4):
        pieces = [e.slice(values[g // 4], 16 * (g % 4), 16) for g in places[p::4]]
        parts.append(e.concat(*pieces))
    return transposed(e, parts)


def picked(e: Ir, fours: list[Value], places: list[int]) -> Value:
    """Lane l has entry places[l] of vectors of four."""
    half = len(fours) // 2
    return e.shuffle(e.concat(*fours[:half]), places, e.concat(*fours[half:]))


def quarters(e: Ir, pieces: list[Value]) -> list[Value]:
    """Four vectors; those 16 bytes at pieces[l] that become lane l when they are `transposed`."""
    loaded = [e.load(piece, vec(i8, 16)) for piece in pieces]
    return [e.concat(*loaded[p::4]) for p in range(4)]


def nibble_codes(e: Ir, pieces: list[Value]) -> list[Value]:
    """Codes of blocks whose low nibbles are their first 16 values, from 16 bytes each."""
    both = transposed(e, quarters(e, pieces))
    return [*(low_nibbles(e, v) for v in both), *(high_nibbles(e, v) for v in both)]


def gathered(e: Ir, addresses: list[Value], type_: ir.Type) -> Value:
    """The integer at each address, a lane each."""
    v = e.undef(vec(type_, len(addresses)))
    for k, address in enumerate(addresses):
        v = e.b.insert_element(v, e.load(address, type_), e.const(k, i32))
    return v


def two_halves(e: Ir, v: Value) -> tuple[Value, Value]:
    """float32 of the lower, and of the upper half float in each dword."""
    n = v.type.count
    parts = [e.slice(v, k, n // 2) for k in (0, n // 2)]
    low, high = (e.half_to_float(e.b.bitcast(part, vec(i16, n))) for part in parts)
    even, odd = (e.shuffle(low, range(k, 2 * n, 2), high) for k in (0, 1))
    return even, odd


def spread_bits(e: Ir, v: Value, first: int) -> Value:
    """<n x i1>: bits first..first + 3 of each dword for its four bytes."""
    size = 4 * v.type.count
    bytes_ = e.b.bitcast(v, vec(i8, size))
    same = e.shuffle(bytes_, [k // 4 * 4 + first // 8 for k in range(size)])
    masks = ir.Constant(same.type, [1 << (first % 8 + k % 4) for k in range(size)])
    return e.b.icmp_unsigned("==", e.b.and_(same, masks), masks)
