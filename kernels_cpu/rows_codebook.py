"""Row products of the types whose nibbles index a table of 16 values: IQ4_NL IQ4_XS MXFP4.

Source: ggml-common.h for the layouts and tables.
"""

from llvmlite import ir

from kernels_cpu.kernel import kernel
from kernels_cpu.rows_blocks import halves, pieces
from kernels_cpu.rows_bytes import Unit, pick, transposed_nibbles
from kernels_cpu.rows_emitter import emit_row_product
from kernels_cpu.rows_legacy import (
    NIBBLE_ORDER,
    block_scale,
    quarters,
    rest_heads,
    rest_nibbles,
    rest_pick,
)
from kernels_cpu.rows_pairs import block_layout, nibble_codes, pair_layout
from kernels_cpu.simd import Ir, Value, emits, f32, i8, i16, i32, vec

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of E2M1.
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
eight_ints = vec(i32, 8)


def looked_up(e: Ir, nibbles: list[Value], values: tuple[int, ...]) -> list[Value]:
    """Table entries of the nibbles, less the lowest entry."""
    table = [x - min(values) for x in values]
    return [e.lookup(table, v) for v in nibbles]


def by_block(e: Ir, scales: Value) -> Value:
    """In lane order, from float32 [8] of one scale per 32 values."""
    return pick(e, scales, lambda group: group // 2, NIBBLE_ORDER)


def unpack_iq4_nl(e: Ir, unit: Value) -> Unit:
    nibbles = transposed_nibbles(e, *quarters(e, unit, 18, 2))
    return Unit(looked_up(e, nibbles, IQ4_VALUES), block_scale(e, unit, 18))


def pairs_iq4_nl(e: Ir, blocks: list[Value]) -> Unit:
    nibbles = nibble_codes(e, pieces(e, blocks, 2))
    return Unit(looked_up(e, nibbles, IQ4_VALUES), halves(e, blocks)[0])


def rest_iq4_nl(e: Ir, first: Value, second: Value) -> Unit:
    nibbles = [rest_nibbles(e, first, second, 2)]
    scale = rest_pick(e, rest_heads(e, first, second), 0)
    return Unit(looked_up(e, nibbles, IQ4_VALUES), scale)


def unpack_iq4_xs(e: Ir, blocks: list[Value]) -> Unit:
    nibbles = nibble_codes(e, [e.at(block, 8 + 16 * k) for block in blocks for k in range(8)])
    scales = [scales_of_iq4_xs(e, block) for block in blocks]
    return Unit(looked_up(e, nibbles, IQ4_VALUES), e.concat(*scales))


def scales_of_iq4_xs(e: Ir, block: Value) -> Value:
    b = e.b
    low = e.splat(e.load(e.at(block, 4), i32), 8)
    low = b.lshr(low, ir.Constant(eight_ints, [4 * k for k in range(8)]))
    high = e.splat(b.zext(e.load(e.at(block, 2), i16), i32), 8)
    high = b.lshr(high, ir.Constant(eight_ints, [2 * k for k in range(8)]))
    high = b.shl(b.and_(high, e.const(3, eight_ints)), e.const(4, eight_ints))
    both = b.or_(b.and_(low, e.const(15, eight_ints)), high)
    signed = b.sitofp(b.sub(both, e.const(32, eight_ints)), vec(f32, 8))
    return b.fmul(signed, e.splat(e.half_to_float(e.load(block, i16)), 8))


def exponent_scales(e: Ir, blocks: list[Value]) -> Value:
    """float32: 2 ** (x - 128) of the byte x that each block begins with."""
    b, some_ints = e.b, vec(i32, len(blocks))
    exponents = e.undef(vec(i8, len(blocks)))
    for k, block in enumerate(blocks):
        exponents = b.insert_element(exponents, e.load(block, i8), e.const(k, i32))
    exponents = b.zext(exponents, some_ints)
    usual = b.shl(b.sub(exponents, e.const(1, some_ints)), e.const(23, some_ints))
    subnormal = b.shl(e.const(1 << 21, some_ints), b.and_(exponents, e.const(1, some_ints)))
    is_small = b.icmp_unsigned("<", exponents, e.const(2, some_ints))
    return b.bitcast(b.select(is_small, subnormal, usual), vec(f32, len(blocks)))


def unpack_mxfp4(e: Ir, unit: Value) -> Unit:
    nibbles = transposed_nibbles(e, *quarters(e, unit, 17, 1))
    scales = exponent_scales(e, [e.at(unit, 17 * block) for block in range(8)])
    return Unit(looked_up(e, nibbles, FP4_VALUES), by_block(e, scales))


def pairs_mxfp4(e: Ir, blocks: list[Value]) -> Unit:
    nibbles = nibble_codes(e, pieces(e, blocks, 1))
    return Unit(looked_up(e, nibbles, FP4_VALUES), exponent_scales(e, blocks))


def rest_mxfp4(e: Ir, first: Value, second: Value) -> Unit:
    nibbles = [rest_nibbles(e, first, second, 1)]
    scales = exponent_scales(e, [first, second])
    return Unit(looked_up(e, nibbles, FP4_VALUES), e.shuffle(scales, [0] * 8 + [1] * 8))


IQ4_NL = block_layout(
    (32, 18), NIBBLE_ORDER, 240, unpack_iq4_nl, pairs_iq4_nl, rest_iq4_nl, offset=127
)
IQ4_XS = pair_layout(136, 240, unpack_iq4_xs, offset=127)
MXFP4 = block_layout((32, 17), NIBBLE_ORDER, 24, unpack_mxfp4, pairs_mxfp4, rest_mxfp4, offset=12)


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
