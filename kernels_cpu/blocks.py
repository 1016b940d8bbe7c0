"""One block of each quantised weight type to float32, plainly.

`block_<type>(b, out)` reads the raw block at address b and writes its values at address out:
exactly those of the format's reference. Layouts: ggml-common.h; arithmetic: `dequantize_row_*` of
ggml-quants.c.
"""

import numpy as np
from numba import njit, types

from kernels_cpu.simd import Ir, Value, emits, f32, i8, i16, i32, i64

f4 = np.float32


@emits(1, types.int64)
def u8(e: Ir, address: Value) -> Value:
    return e.b.zext(e.load(address, i8), i64)


@emits(1, types.int64)
def s8(e: Ir, address: Value) -> Value:
    return e.b.sext(e.load(address, i8), i64)


@emits(1, types.int64)
def u32(e: Ir, address: Value) -> Value:
    return e.b.zext(e.load(address, i32), i64)


@emits(1, types.float32)
def half(e: Ir, address: Value) -> Value:
    return e.half_to_float(e.load(address, i16))


@emits(1, types.float32)
def power(e: Ir, exponent: Value) -> Value:
    """2^(exponent - 128), for the 8-bit exponents of MXFP4: half of the OCP scale, as its table is
    doubled.
    """
    small = e.b.shl(e.const(0x200000), exponent)
    bits = e.b.shl(e.b.sub(exponent, e.const(1)), e.const(23))
    bits = e.b.select(e.b.icmp_signed("<", exponent, e.const(2)), small, bits)
    return e.b.bitcast(e.b.trunc(bits, i32), f32)


@emits(3, arguments=(types.int64, types.int64, types.float32))
def put(e: Ir, out: Value, index: Value, value: Value) -> None:
    e.store(value, e.at(out, e.mul(index, 4)), align=4)


@njit
def block_q4_0(b: int, out: int) -> None:
    """d f16, 16 bytes: value j in the low nibble of byte j, value 16 + j in the high one."""
    d = half(b)
    for j in range(16):
        q = u8(b + 2 + j)
        put(out, j, d * f4((q & 15) - 8))
        put(out, j + 16, d * f4((q >> 4) - 8))


@njit
def block_q4_1(b: int, out: int) -> None:
    """d f16, m f16, 16 bytes as in Q4_0."""
    d, m = half(b), half(b + 2)
    for j in range(16):
        q = u8(b + 4 + j)
        put(out, j, d * f4(q & 15) + m)
        put(out, j + 16, d * f4(q >> 4) + m)


@njit
def block_q5_0(b: int, out: int) -> None:
    """d f16, 32 fifth bits, 16 bytes as in Q4_0."""
    d, high = half(b), u32(b + 2)
    for j in range(16):
        q = u8(b + 6 + j)
        put(out, j, d * f4((q & 15 | (high >> j & 1) << 4) - 16))
        put(out, j + 16, d * f4((q >> 4 | (high >> (j + 16) & 1) << 4) - 16))


@njit
def block_q5_1(b: int, out: int) -> None:
    """d f16, m f16, 32 fifth bits, 16 bytes as in Q4_0."""
    d, m, high = half(b), half(b + 2), u32(b + 4)
    for j in range(16):
        q = u8(b + 8 + j)
        put(out, j, d * f4(q & 15 | (high >> j & 1) << 4) + m)
        put(out, j + 16, d * f4(q >> 4 | (high >> (j + 16) & 1) << 4) + m)


@njit
def block_q8_0(b: int, out: int) -> None:
    """d f16, 32 int8."""
    d = half(b)
    for j in range(32):
        put(out, j, d * f4(s8(b + 2 + j)))


@njit
def block_q2_k(b: int, out: int) -> None:
    """16 bytes (scale, minimum << 4), 64 bytes of 2 bits, d f16, dmin f16."""
    d, dmin = half(b + 80), half(b + 82)
    for g in range(16):
        scale = u8(b + g)
        dl, ml = d * f4(scale & 15), dmin * f4(scale >> 4)
        # Group g: 16 bytes of half g // 8, bit pair (g % 8) // 2.
        q, shift = b + 16 + 32 * (g >> 3) + 16 * (g & 1), g & 6
        for j in range(16):
            put(out, 16 * g + j, dl * f4(u8(q + j) >> shift & 3) - ml)


@njit
def block_q3_k(b: int, out: int) -> None:
    """32 bytes of high bits, 64 bytes of low 2 bits, 12 bytes of 6-bit scales, d f16."""
    d = half(b + 108)
    for g in range(16):
        low = u8(b + 96 + (g & 7)) >> (4 * (g >> 3)) & 15
        high = u8(b + 104 + (g & 3)) >> (2 * (g >> 2)) & 3
        dl = d * f4((low | high << 4) - 32)
        q, shift = b + 32 + 32 * (g >> 3) + 16 * (g & 1), g & 6
        mask = b + 16 * (g & 1)
        for j in range(16):
            bit = u8(mask + j) >> (g >> 1) & 1
            put(out, 16 * g + j, dl * f4((u8(q + j) >> shift & 3) - 4 + (bit << 2)))


@njit
def block_k(b: int, out: int, d: float, dmin: float, high: int, low: int) -> None:
    """Q4_K (high is 0) and Q5_K: 12 bytes of 6-bit scales and minima follow d and dmin."""
    for g in range(8):
        if g < 4:
            scale, least = u8(b + 4 + g) & 63, u8(b + 8 + g) & 63
        else:
            last = u8(b + 8 + g)
            scale = last & 15 | (u8(b + g) >> 6) << 4
            least = last >> 4 | (u8(b + 4 + g) >> 6) << 4
        dl, ml = d * f4(scale), dmin * f4(least)
        q, shift = low + 32 * (g >> 1), 4 * (g & 1)
        for j in range(32):
            code = u8(q + j) >> shift & 15
            if high != 0:
                code |= (u8(high + j) >> g & 1) << 4
            put(out, 32 * g + j, dl * f4(code) - ml)


@njit
def block_q4_k(b: int, out: int) -> None:
    """d f16, dmin f16, 12 bytes of scales, 128 bytes: 32 of them are two groups of 32 values."""
    block_k(b, out, half(b), half(b + 2), 0, b + 16)


@njit
def block_q5_k(b: int, out: int) -> None:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles."""
    block_k(b, out, half(b), half(b + 2), b + 16, b + 48)


@njit
def block_q6_k(b: int, out: int) -> None:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, d f16."""
    d = half(b + 208)
    for g in range(16):
        dl = d * f4(s8(b + 192 + g))
        # Within 128 values: 32 with low nibbles of bytes 0.., 32 of bytes 32.., then the high
        # nibbles.
        n, quarter, first = g >> 3, g >> 1 & 3, 16 * (g & 1)
        low = b + 64 * n + 32 * (quarter & 1) + first
        high = b + 128 + 32 * n + first
        for j in range(16):
            q = u8(low + j) >> (4 * (quarter >> 1)) & 15
            q |= (u8(high + j) >> (2 * quarter) & 3) << 4
            put(out, 16 * g + j, dl * f4(q - 32))


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def packed(values: tuple[int, ...]) -> int:
    """Eight int8 in an int64, the first in the lowest byte."""
    return int.from_bytes(bytes(v & 255 for v in values), "little", signed=True)


IQ4_LOW, IQ4_HIGH = packed(IQ4_VALUES[:8]), packed(IQ4_VALUES[8:])
MXFP4_LOW, MXFP4_HIGH = packed(MXFP4_VALUES[:8]), packed(MXFP4_VALUES[8:])


@njit
def look_up(low: int, high: int, code: int) -> float:
    """Entry `code` of a packed table of 16."""
    half_table = low if code < 8 else high
    # The byte goes to the top, and comes down with its sign.
    return f4(half_table << (56 - 8 * (code & 7)) >> 56)


@njit
def nibbles(b: int, out: int, d: float, low: int, high: int) -> None:
    """32 values whose codes lie as in Q4_0."""
    for j in range(16):
        q = u8(b + j)
        put(out, j, d * look_up(low, high, q & 15))
        put(out, j + 16, d * look_up(low, high, q >> 4))


@njit
def block_iq4_nl(b: int, out: int) -> None:
    """d f16, 16 bytes."""
    nibbles(b + 2, out, half(b), IQ4_LOW, IQ4_HIGH)


@njit
def block_iq4_xs(b: int, out: int) -> None:
    """d f16, 8 high bit pairs of the scales, 4 bytes of low nibbles, 128 bytes."""
    d = half(b)
    pairs = u8(b + 2) | u8(b + 3) << 8
    for g in range(8):
        scale = u8(b + 4 + (g >> 1)) >> (4 * (g & 1)) & 15 | (pairs >> (2 * g) & 3) << 4
        nibbles(b + 8 + 16 * g, out + 128 * g, d * f4(scale - 32), IQ4_LOW, IQ4_HIGH)


@njit
def block_mxfp4(b: int, out: int) -> None:
    """8-bit exponent, 16 bytes."""
    nibbles(b + 1, out, power(u8(b)), MXFP4_LOW, MXFP4_HIGH)
