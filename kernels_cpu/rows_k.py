"""Row products of the K-quants: blocks of 256 values with integer scales of 16 or 32 of them.

Source: ggml-common.h for the layouts.
"""

from llvmlite import ir

from kernels_cpu.kernel import kernel
from kernels_cpu.rows_bytes import (
    Unit,
    byte_layout,
    high_nibbles,
    low_nibbles,
    pick,
    transposed,
    transposed_nibbles,
)
from kernels_cpu.rows_emitter import codes, emit_row_product, floats, ints
from kernels_cpu.simd import Ir, Value, emits, i8, i16, i32, i64, vec

# Q4_K, Q5_K: 64 bytes have sub-blocks 4h, 4h + 2 in low and 4h + 1, 4h + 3 in high nibbles.
PAIR_ORDER = tuple(
    tuple(8 * h + 4 * (i // 2) + 2 * high + i % 2 for i in range(4))
    for high in (0, 1)
    for h in (0, 1)
)
# Q6_K: 64 bytes hold groups 8h to 8h + 3 in low and 8h + 4 to 8h + 7 in high nibbles.
SIX_ORDER = tuple(tuple(8 * h + 4 * high + i for i in range(4)) for h in (0, 1) for high in (0, 1))

# Q2_K, Q3_K: 64 bytes hold groups 2p, 2p + 1, 8 + 2p, 9 + 2p in bits 2p and 2p + 1.
TWO_ORDER = tuple(tuple(8 * (i // 2) + 2 * p + i % 2 for i in range(4)) for p in range(4))


def half_at(e: Ir, address: Value) -> Value:
    """float32 [16] of the half float at an address."""
    return e.splat(e.half_to_float(e.load(address, i16)), 16)


def scale_and_bias(e: Ir, unit: Value) -> tuple[Value, Value]:
    """Of Q4_K and Q5_K in lane order: d * scale and -dmin * minimum, from the first 16 bytes."""
    b, four = e.b, vec(i32, 4)
    head = e.load(unit, four)
    # Dwords: d and dmin, scales 0..3, minima 0..3 with six bits a byte, then the low bits of the rest.
    first = b.lshr(e.shuffle(head, [1, 1, 2, 2]), ir.Constant(four, [0, 2, 0, 2]))
    first = b.and_(first, ir.Constant(four, [0x3F3F3F3F, 0x30303030] * 2))
    rest = b.lshr(e.shuffle(head, [3, 3, 3, 3]), ir.Constant(four, [0, 0, 0, 4]))
    rest = b.and_(rest, ir.Constant(four, [0, 0x0F0F0F0F] * 2))
    numbers = b.zext(b.bitcast(b.or_(first, rest), vec(i8, 16)), ints)
    halves = e.half_to_float(b.bitcast(head, vec(i16, 8)))
    factors = e.shuffle(halves, [0] * 8 + [1] * 8)
    products = b.fmul(b.uitofp(numbers, floats), factors)
    scale = pick(e, products, lambda g: g // 2, PAIR_ORDER)
    return scale, b.fneg(pick(e, products, lambda g: 8 + g // 2, PAIR_ORDER))


def unpack_q4_k(e: Ir, unit: Value) -> Unit:
    v, w = (e.load(e.at(unit, 16 + 64 * h), codes) for h in (0, 1))
    return Unit(transposed_nibbles(e, v, w), *scale_and_bias(e, unit))


def shifted(e: Ir, v: Value, left: list[int]) -> Value:
    """Each quarter of the bytes moved left (negative: right) inside its 64-bit words."""
    words = vec(i64, 8)
    v = e.b.bitcast(v, words)
    amounts = [n for n in left for _ in range(2)]
    if max(amounts) > 0:
        v = e.b.shl(v, ir.Constant(words, [max(n, 0) for n in amounts]))
    if min(amounts) < 0:
        v = e.b.lshr(v, ir.Constant(words, [max(-n, 0) for n in amounts]))
    return e.b.bitcast(v, codes)


def bits_of(e: Ir, v: Value, left: list[int], mask: int) -> Value:
    return e.b.and_(shifted(e, v, left), e.const(mask, codes))


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


def unpack_q5_k(e: Ir, unit: Value) -> Unit:
    v, w = (e.load(e.at(unit, 48 + 64 * h), codes) for h in (0, 1))
    fifth = twice(e, e.at(unit, 16))
    # Bit j of these bytes belongs to sub-block j.
    nibbles = (low_nibbles(e, v), low_nibbles(e, w), high_nibbles(e, v), high_nibbles(e, w))
    left = ([4, 4, 2, 2], [0, 0, -2, -2], [3, 3, 1, 1], [-1, -1, -3, -3])
    vectors = [
        e.b.or_(n, bits_of(e, fifth, moves, 0x10)) for n, moves in zip(nibbles, left, strict=True)
    ]
    return Unit(transposed(e, vectors), *scale_and_bias(e, unit))


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


Q2_K = byte_layout((256, 84), TWO_ORDER, 3, unpack_q2_k)
Q3_K = byte_layout((256, 110), TWO_ORDER, 7, unpack_q3_k, offset=4)
Q5_K = byte_layout((256, 176), PAIR_ORDER, 31, unpack_q5_k)
Q4_K = byte_layout((256, 144), PAIR_ORDER, 15, unpack_q4_k)
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
