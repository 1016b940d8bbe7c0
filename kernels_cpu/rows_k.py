"""Row products of the K-quants: blocks of 256 values with integer scales of 16 or 32 of them.

Source: ggml-common.h for the layouts.
"""

from dataclasses import replace

from llvmlite import ir

from kernels_cpu.kernel import isa, kernel
from kernels_cpu.rows_bytes import (
    Unit,
    byte_layout,
    high_nibbles,
    low_nibbles,
    pick,
    transposed,
    transposed_nibbles,
)
from kernels_cpu.rows_emitter import Layout, codes, emit_row_product, floats, ints
from kernels_cpu.rows_pairs import pair_layout
from kernels_cpu.rows_scaled import ScaledStep, ScaledUnit, in_dwords, sub_block_of
from kernels_cpu.simd import Ir, Value, emits, f32, i8, i16, i32, i64, vec

# Q6_K: 64 bytes hold groups 8h to 8h + 3 in low and 8h + 4 to 8h + 7 in high nibbles.
SIX_ORDER = tuple(tuple(8 * h + 4 * high + i for i in range(4)) for h in (0, 1) for high in (0, 1))

# Q2_K, Q3_K: 64 bytes hold groups 2p, 2p + 1, 8 + 2p, 9 + 2p in bits 2p and 2p + 1.
TWO_ORDER = tuple(tuple(8 * (i // 2) + 2 * p + i % 2 for i in range(4)) for p in range(4))


def half_at(e: Ir, address: Value) -> Value:
    """float32 [16] of the half float at an address."""
    return e.splat(e.half_to_float(e.load(address, i16)), 16)


def sub_block(lane: int) -> int:
    """Q4_K, Q5_K: which of the sub-blocks of the unit's one or two blocks has a lane.

    32 bytes, a chunk, have a sub-block in low and the next one in high nibbles. Four lanes are
    the low nibbles of two chunks that are 64 bytes apart, then the high ones (`half_chunks`).
    """
    quarter, p = divmod(lane, 4)
    return 8 * (quarter // 2) + 2 * (quarter % 2) + (0, 4, 1, 5)[p]


def head_of(e: Ir, blocks: list[Value]) -> tuple[Value, Value]:
    """Of Q4_K and Q5_K: for each block 8 scales and 8 minima, a byte each, and eight float32 of
    which the first two are d and dmin.
    """
    b, n = e.b, 8 * len(blocks)
    head, dwords = e.concat(*(e.load(k, vec(i32, 4)) for k in blocks)), vec(i32, n // 2)

    def of_each(lanes: list[int], apart: int = 0) -> list[int]:
        return [l + apart * k for k in range(len(blocks)) for l in lanes]

    def constants(values: list[int]) -> Value:
        return ir.Constant(dwords, of_each(values))

    # Dwords: d and dmin, scales 0..3, minima 0..3 with six bits a byte, then the low bits of the rest.
    first = b.lshr(e.shuffle(head, of_each([1, 1, 2, 2], 4)), constants([0, 2, 0, 2]))
    first = b.and_(first, constants([0x3F3F3F3F, 0x30303030] * 2))
    rest = b.lshr(e.shuffle(head, of_each([3, 3, 3, 3], 4)), constants([0, 0, 0, 4]))
    rest = b.and_(rest, constants([0, 0x0F0F0F0F] * 2))
    halves = e.half_to_float(b.bitcast(head, vec(i16, n)))
    return b.bitcast(b.or_(first, rest), vec(i8, 2 * n)), halves


def scales_and_biases(e: Ir, blocks: list[Value]) -> tuple[Value, Value]:
    """Of Q4_K and Q5_K in lane order: d * scale and -dmin * minimum, from the first 16 bytes."""
    b, n = e.b, 8 * len(blocks)
    numbers, halves = head_of(e, blocks)
    lanes = [sub_block(lane) for lane in range(n)]
    result = []
    for k, factors in enumerate((halves, b.fneg(halves))):
        mine = e.shuffle(numbers, [g // 8 * 16 + 8 * k + g % 8 for g in lanes])
        real = b.uitofp(b.zext(mine, vec(i32, n)), vec(f32, n))
        result.append(b.fmul(real, e.shuffle(factors, [g // 8 * 8 + k for g in lanes])))
    return result[0], result[1]


def half_chunks(e: Ir, blocks: list[Value], at: int) -> list[Value]:
    """Of the chunks from byte `at` on: the first 16 bytes of chunks 0 and 1 of every block, of
    chunks 2 and 3, then the last 16 bytes in the same order.
    """
    if len(blocks) == 1:
        chunks = [e.at(blocks[0], at + 32 * c) for c in range(4)]
        return [
            e.concat(*(e.load(e.at(c, 16 * half), vec(i8, 16)) for c in chunks[k : k + 2]))
            for half in (0, 1)
            for k in (0, 2)
        ]
    pairs = [[e.load(e.at(block, at + k), codes) for block in blocks] for k in (0, 64)]
    lanes = [16 * q + l for q in (0, 2, 4, 6) for l in range(16)]
    return [e.shuffle(v, [l + 16 * half for l in lanes], w) for half in (0, 1) for v, w in pairs]


def unpack_q4_k(e: Ir, blocks: list[Value]) -> Unit:
    v, w, v2, w2 = half_chunks(e, blocks, 16)
    vectors = [*transposed_nibbles(e, v, w), *transposed_nibbles(e, v2, w2)]
    return Unit(vectors, *scales_and_biases(e, blocks))


def scaled_k(e: Ir, unit: Value, vectors: tuple[list[Value], list[Value]]) -> ScaledUnit:
    """Codes of Q4_K or Q5_K with scales and minima: sums are of even and of odd sub-blocks."""
    b = e.b
    numbers, halves = head_of(e, [unit, unit])
    lanes = [[sub_block_of(s, lane) for lane in range(8)] for s in (0, 1)]
    scales = [b.bitcast(in_dwords(e, numbers, entries, 0, 2), vec(i16, 16)) for entries in lanes]
    minima = b.bitcast(in_dwords(e, numbers, list(range(8, 16)), 0), vec(i32, 8))
    minima = b.fmul(b.uitofp(minima, vec(f32, 8)), b.fneg(e.shuffle(halves, [1] * 8)))
    return ScaledUnit(vectors, scales, e.shuffle(halves, [0] * 8), minima)


def chunks_at(e: Ir, address: Value) -> list[Value]:
    """Four times 32 bytes, `transposed`: lanes c and 4 + c are of halves of chunk c."""
    return transposed(e, [e.load(e.at(address, 32 * c), vec(i8, 32)) for c in range(4)])


def scaled_q4_k(e: Ir, unit: Value) -> ScaledUnit:
    both = chunks_at(e, e.at(unit, 16))
    return scaled_k(
        e, unit, ([low_nibbles(e, v) for v in both], [high_nibbles(e, v) for v in both])
    )


def scaled_q5_k(e: Ir, unit: Value) -> ScaledUnit:
    b, vectors = e.b, ([], [])
    fifth = b.bitcast(e.load(e.at(unit, 16), vec(i8, 32)), vec(i32, 8))
    # Bits 0 to 3 of each byte where bits 4 to 7 were: from there they are moved right only.
    upper = b.shl(fifth, e.const(4, fifth.type))
    for j, v in enumerate(chunks_at(e, e.at(unit, 48))):
        copies = e.shuffle(upper, [k + l for k in (j, j + 4) for l in (0, 0, 8, 8)], fifth)
        for high, nibbles in enumerate((low_nibbles(e, v), high_nibbles(e, v))):
            moved = b.lshr(copies, ir.Constant(fifth.type, [high, 2 + high] * 4))
            bit = b.and_(b.bitcast(moved, v.type), e.const(16, v.type))
            vectors[high].append(b.or_(nibbles, bit))
    return scaled_k(e, unit, vectors)


def shifted(e: Ir, v: Value, left: list[int]) -> Value:
    """Each quarter of the bytes moved left (negative: right) inside its 64-bit words."""
    words = vec(i64, 2 * len(left))
    v = e.b.bitcast(v, words)
    amounts = [n for n in left for _ in range(2)]
    if max(amounts) > 0:
        v = e.b.shl(v, ir.Constant(words, [max(n, 0) for n in amounts]))
    if min(amounts) < 0:
        v = e.b.lshr(v, ir.Constant(words, [max(-n, 0) for n in amounts]))
    return e.b.bitcast(v, vec(i8, 16 * len(left)))


def bits_of(e: Ir, v: Value, left: list[int], mask: int) -> Value:
    return e.b.and_(shifted(e, v, left), e.const(mask, v.type))


def twice(e: Ir, address: Value) -> Value:
    """32 bytes, two times."""
    v = e.load(address, vec(i8, 32))
    return e.concat(v, v)


def unpack_q6_k(e: Ir, unit: Value) -> Unit:
    vectors = []
    for h in (0, 1):
        v = e.load(e.at(unit, 64 * h), codes)
        upper = twice(e, e.at(unit, 128 + 32 * h))
        low = bits_of(e, upper, [4, 4, 2, 2], 0x30)
        high = bits_of(e, upper, [0, 0, -2, -2], 0x30)
        vectors += [e.b.or_(low_nibbles(e, v), low), e.b.or_(high_nibbles(e, v), high)]
    scales = e.b.sitofp(e.b.sext(e.load(e.at(unit, 192), vec(i8, 16)), ints), floats)
    scale = e.b.fmul(pick(e, scales, lambda g: g, SIX_ORDER), half_at(e, e.at(unit, 208)))
    return Unit(transposed(e, vectors), scale)


def unpack_q5_k(e: Ir, blocks: list[Value]) -> Unit:
    vectors, chunks = [], half_chunks(e, blocks, 48)
    # Bit j of these bytes belongs to sub-block j.
    fifth = e.concat(*(e.load(e.at(block, 16), vec(i8, 32)) for block in blocks))
    for half in (0, 1):
        v, w = chunks[2 * half : 2 * half + 2]
        lanes = [32 * k + 16 * half + l for k in range(len(blocks)) for l in 2 * [*range(16)]]
        fifth_bits = e.shuffle(fifth, lanes)
        nibbles = (low_nibbles(e, v), low_nibbles(e, w), high_nibbles(e, v), high_nibbles(e, w))
        moves = ([4, 2], [0, -2], [3, 1], [-1, -3])
        codes_ = [
            e.b.or_(n, bits_of(e, fifth_bits, m * len(blocks), 0x10))
            for n, m in zip(nibbles, moves, strict=True)
        ]
        vectors += transposed(e, codes_)
    return Unit(vectors, *scales_and_biases(e, blocks))


def spread_dwords(e: Ir, v: Value, shifts: list[int], mask: int) -> list[Value]:
    """Result j: dword j of each 128-bit lane four times, moved right by `shifts` and masked."""
    words, results = e.b.bitcast(v, ints), []
    for j in range(4):
        copies = e.shuffle(words, [4 * i + j for i in range(4) for _ in range(4)])
        moved = e.b.lshr(copies, ir.Constant(ints, shifts * 4))
        results.append(e.b.and_(e.b.bitcast(moved, codes), e.const(mask, codes)))
    return results


def unpack_q2_k(e: Ir, unit: Value) -> Unit:
    vectors = spread_dwords(e, e.load(e.at(unit, 16), codes), [0, 2, 4, 6], 3)
    both = e.b.zext(e.load(unit, vec(i8, 16)), ints)
    both = pick(e, both, lambda g: g, TWO_ORDER)
    scale = e.b.uitofp(e.b.and_(both, e.const(15, ints)), floats)
    minimum = e.b.uitofp(e.b.lshr(both, e.const(4, ints)), floats)
    minus = e.b.fneg(half_at(e, e.at(unit, 82)))
    scale = e.b.fmul(scale, half_at(e, e.at(unit, 80)))
    return Unit(vectors, scale, e.b.fmul(minimum, minus))


def q3_k_scales(e: Ir, address: Value) -> Value:
    """int32 [16]: six bits each, from 12 bytes."""
    b = e.b
    s, t, upper = (e.load(e.at(address, 4 * k), i32) for k in range(3))
    v = e.undef(vec(i32, 4))
    for k, word in enumerate((s, t, s, t)):
        low = b.and_(b.lshr(word, e.const(k // 2 * 4, i32)), e.const(0x0F0F0F0F, i32))
        high = b.and_(b.lshr(upper, e.const(2 * k, i32)), e.const(0x03030303, i32))
        both = b.or_(low, b.shl(high, e.const(4, i32)))
        v = b.insert_element(v, both, e.const(k, i32))
    return b.zext(b.bitcast(v, vec(i8, 16)), ints)


def unpack_q3_k(e: Ir, unit: Value) -> Unit:
    low = spread_dwords(e, e.load(e.at(unit, 32), codes), [0, 2, 4, 6], 3)
    # Bit s (second half: 4 + s) of the mask belongs to group s of 32: now it is bit 2 + s.
    mask = shifted(e, twice(e, unit), [2, 2, -2, -2])
    high = spread_dwords(e, mask, [0, 1, 2, 3], 4)
    vectors = [e.b.or_(x, y) for x, y in zip(low, high, strict=True)]
    signed = e.b.sub(q3_k_scales(e, e.at(unit, 96)), e.const(32, ints))
    scale = pick(e, e.b.sitofp(signed, floats), lambda g: g, TWO_ORDER)
    return Unit(vectors, e.b.fmul(scale, half_at(e, e.at(unit, 108))))


def or_scaled(layout: Layout, step: ScaledStep) -> Layout:
    """The layout, with another step at level avx2."""
    return replace(layout, steps=lambda: (step,) if isa() == "avx2" else layout.steps())


Q2_K = byte_layout((256, 84), TWO_ORDER, 3, unpack_q2_k)
Q3_K = byte_layout((256, 110), TWO_ORDER, 7, unpack_q3_k, offset=4)
Q4_K = or_scaled(
    pair_layout(144, 15, unpack_q4_k, order=sub_block),
    ScaledStep(144, scaled_q4_k),
)
Q5_K = or_scaled(
    pair_layout(176, 31, unpack_q5_k, order=sub_block),
    ScaledStep(176, scaled_q5_k),
)
Q6_K = byte_layout((256, 210), SIX_ORDER, 63, unpack_q6_k, offset=32)


@emits(4)
def q2_k(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, Q2_K, args, first, last, scratch)


@emits(4)
def q3_k(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, Q3_K, args, first, last, scratch)


@emits(4)
def q4_k(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, Q4_K, args, first, last, scratch)


@emits(4)
def q5_k(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, Q5_K, args, first, last, scratch)


@emits(4)
def q6_k(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, Q6_K, args, first, last, scratch)


@kernel
def row_product_q2_k(args: int, first: int, last: int, scratch: int) -> None:
    """Arguments: rows_emitter.Slot. Block: 16 x (scale, minimum) of 4 bits, bit pairs, d, dmin."""
    q2_k(args, first, last, scratch)


@kernel
def row_product_q3_k(args: int, first: int, last: int, scratch: int) -> None:
    """Arguments: rows_emitter.Slot. Block: third bits, bit pairs, 16 scales of 6 bits, d f16."""
    q3_k(args, first, last, scratch)


@kernel
def row_product_q4_k(args: int, first: int, last: int, scratch: int) -> None:
    """Arguments: rows_emitter.Slot. Block: d, dmin f16, 8 x (scale, minimum) of 6 bits, nibbles."""
    q4_k(args, first, last, scratch)


@kernel
def row_product_q5_k(args: int, first: int, last: int, scratch: int) -> None:
    """Arguments: rows_emitter.Slot. Block: as Q4_K, with 32 bytes of fifth bits."""
    q5_k(args, first, last, scratch)


@kernel
def row_product_q6_k(args: int, first: int, last: int, scratch: int) -> None:
    """Arguments: rows_emitter.Slot. Block: nibbles, upper two bits, 16 signed scales, d f16."""
    q6_k(args, first, last, scratch)
