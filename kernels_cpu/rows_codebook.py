"""Row products of the types whose nibbles index a table of 16 values: IQ4_NL IQ4_XS MXFP4.

Source: ggml-common.h for the layouts and tables.
"""

from llvmlite import ir

from kernels_cpu.kernel import kernel
from kernels_cpu.rows_bytes import ByteLayout, Unit, pick, transposed_nibbles
from kernels_cpu.rows_emitter import codes, emit_row_product
from kernels_cpu.rows_k import half_at
from kernels_cpu.rows_legacy import NIBBLE_ORDER, heads, quarters
from kernels_cpu.simd import Ir, Value, emits, f32, i8, i16, i32, vec

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of E2M1.
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
eight_ints = vec(i32, 8)


def looked_up(e: Ir, v: Value, w: Value, values: tuple[int, ...]) -> list[Value]:
    """Table entries of the nibbles, less the lowest entry."""
    table = [x - min(values) for x in values]
    return [e.lookup(table, part) for part in transposed_nibbles(e, v, w)]


def by_block(e: Ir, scales: Value) -> Value:
    """In lane order, from float32 [8] of one scale per 32 values."""
    return pick(e, scales, lambda group: group // 2, NIBBLE_ORDER)


def unpack_iq4_nl(e: Ir, unit: Value) -> Unit:
    v, w = quarters(e, unit, 18, 2)
    scale = pick(e, heads(e, unit, 18), lambda group: group // 2 * 2, NIBBLE_ORDER)
    return Unit(looked_up(e, v, w, IQ4_VALUES), scale)


def unpack_iq4_xs(e: Ir, unit: Value) -> Unit:
    b = e.b
    v, w = (e.load(e.at(unit, 8 + 64 * k), codes) for k in (0, 1))
    low = e.splat(e.load(e.at(unit, 4), i32), 8)
    low = b.lshr(low, ir.Constant(eight_ints, [4 * k for k in range(8)]))
    high = e.splat(b.zext(e.load(e.at(unit, 2), i16), i32), 8)
    high = b.lshr(high, ir.Constant(eight_ints, [2 * k for k in range(8)]))
    high = b.shl(b.and_(high, e.const(3, eight_ints)), e.const(4, eight_ints))
    both = b.or_(b.and_(low, e.const(15, eight_ints)), high)
    signed = b.sitofp(b.sub(both, e.const(32, eight_ints)), vec(f32, 8))
    scale = b.fmul(by_block(e, signed), half_at(e, unit))
    return Unit(looked_up(e, v, w, IQ4_VALUES), scale)


def exponent_scales(e: Ir, exponents: Value) -> Value:
    """float32 [8]: 2 ** (x - 128) of int32 x in 0..255."""
    b = e.b
    usual = b.shl(b.sub(exponents, e.const(1, eight_ints)), e.const(23, eight_ints))
    subnormal = b.shl(e.const(1 << 21, eight_ints), b.and_(exponents, e.const(1, eight_ints)))
    is_small = b.icmp_unsigned("<", exponents, e.const(2, eight_ints))
    return b.bitcast(b.select(is_small, subnormal, usual), vec(f32, 8))


def unpack_mxfp4(e: Ir, unit: Value) -> Unit:
    v, w = quarters(e, unit, 17, 1)
    exponents = e.undef(vec(i8, 8))
    for block in range(8):
        exponent = e.load(e.at(unit, 17 * block), i8)
        exponents = e.b.insert_element(exponents, exponent, e.const(block, i32))
    scale = by_block(e, exponent_scales(e, e.b.zext(exponents, eight_ints)))
    return Unit(looked_up(e, v, w, FP4_VALUES), scale)


IQ4_NL = ByteLayout(32, 18, NIBBLE_ORDER, 127, True, unpack_iq4_nl)
IQ4_XS = ByteLayout(256, 136, NIBBLE_ORDER, 127, True, unpack_iq4_xs)
MXFP4 = ByteLayout(32, 17, NIBBLE_ORDER, 12, False, unpack_mxfp4)


@emits(4)
def iq4_nl(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, IQ4_NL, args, first, last, scratch)


@emits(4)
def iq4_xs(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, IQ4_XS, args, first, last, scratch)


@emits(4)
def mxfp4(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, MXFP4, args, first, last, scratch)


@kernel
def row_product_iq4_nl(args: int, first: int, last: int, scratch: int) -> None:
    """Arguments: rows_emitter.Slot. Block: d f16, 16 bytes of nibbles n; d * values[n]."""
    iq4_nl(args, first, last, scratch)


@kernel
def row_product_iq4_xs(args: int, first: int, last: int, scratch: int) -> None:
    """Arguments: rows_emitter.Slot. Block: d f16, 8 scales of 6 bits, nibbles."""
    iq4_xs(args, first, last, scratch)


@kernel
def row_product_mxfp4(args: int, first: int, last: int, scratch: int) -> None:
    """Arguments: rows_emitter.Slot. Block: exponent x, nibbles n; 2**(x-128) * values[n]."""
    mxfp4(args, first, last, scratch)
