"""Row products of the K-quants: blocks of 256 values with integer scales of 16 or 32 of them.

Source: ggml-common.h for the layouts.
"""

from llvmlite import ir

from kernels_cpu.kernel import kernel
from kernels_cpu.rows_bytes import (
    ByteLayout,
    Unit,
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


def half_at(e: Ir, address: Value) -> Value:
    """float32 [16] of the half float at an address."""
    return e.splat(e.half_to_float(e.load(address, i16)), 16)


def six_bit_scales(e: Ir, address: Value) -> Value:
    """float32 [16]: eight scales, then eight minima, from 12 bytes of Q4_K or Q5_K."""
    b = e.b
    s, m, rest = (e.load(e.at(address, 4 * k), i32) for k in range(3))

    def part(v: Value, shift: int, mask: int) -> Value:
        return b.and_(b.lshr(v, e.const(shift, i32)), e.const(mask * 0x01010101, i32))

    words = [
        part(s, 0, 0x3F),
        b.or_(part(rest, 0, 0x0F), part(s, 2, 0x30)),
        part(m, 0, 0x3F),
        b.or_(part(rest, 4, 0x0F), part(m, 2, 0x30)),
    ]
    v = e.undef(vec(i32, 4))
    for k, word in enumerate(words):
        v = b.insert_element(v, word, e.const(k, i32))
    return b.uitofp(b.zext(b.bitcast(v, vec(i8, 16)), ints), floats)


def scale_and_bias(e: Ir, unit: Value) -> tuple[Value, Value]:
    """Of Q4_K and Q5_K in lane order: d * scale and -dmin * minimum."""
    numbers = six_bit_scales(e, e.at(unit, 4))
    scale = e.b.fmul(pick(e, numbers, lambda g: g // 2, PAIR_ORDER), half_at(e, unit))
    minus = e.b.fneg(half_at(e, e.at(unit, 2)))
    return scale, e.b.fmul(pick(e, numbers, lambda g: 8 + g // 2, PAIR_ORDER), minus)


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


Q4_K = ByteLayout(256, 144, PAIR_ORDER, None, False, unpack_q4_k)
Q6_K = ByteLayout(256, 210, SIX_ORDER, 32, False, unpack_q6_k)


@emits(4)
def q4_k(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, Q4_K, args, first, last, scratch)


@emits(4)
def q6_k(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, Q6_K, args, first, last, scratch)


@kernel
def row_product_q4_k(args, first, last, scratch):
    """Arguments: rows_emitter.Slot. Block: d, dmin f16, 8 x (scale, minimum) of 6 bits, nibbles."""
    q4_k(args, first, last, scratch)


@kernel
def row_product_q6_k(args, first, last, scratch):
    """Arguments: rows_emitter.Slot. Block: nibbles, upper two bits, 16 signed scales, d f16."""
    q6_k(args, first, last, scratch)
