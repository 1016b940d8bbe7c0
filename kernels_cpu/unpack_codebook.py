"""Unpackers of the types whose nibbles index a table of 16 values: IQ4_NL IQ4_XS MXFP4.

Low nibbles are the first 16 of 32 values. Source: ggml-common.h for the layouts and tables.
"""

from kernels_cpu.simd import Value
from kernels_cpu.unpack_blocks import Blocks, Format, Panel, floats, ints

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of E2M1.
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
IQ4_CODES = tuple(v + 127 for v in IQ4_VALUES)
FP4_CODES = tuple(v + 12 for v in FP4_VALUES)


def put_looked_up(
    blocks: Blocks, panel: Panel, first: int, value: int, table: tuple[int, ...]
) -> None:
    """32 codes from `value` on, from the 16 bytes at `first`."""
    for i, word in enumerate(blocks.words(first)):
        for high in (False, True):
            codes = blocks.lookup(table, blocks.nibbles(word, high=high))
            panel.put_codes(value + 16 * high + 4 * i, codes)


def unpack_iq4_nl(blocks: Blocks, panel: Panel) -> None:
    """d f16, 16 bytes; d * values[n]."""
    panel.put_scale(0, blocks.half(blocks.words(0)[0]))
    put_looked_up(blocks, panel, 2, 0, IQ4_CODES)


def unpack_iq4_xs(blocks: Blocks, panel: Panel) -> None:
    """d f16, 8 bit pairs and 8 nibbles of scales, 128 bytes; d * (scale - 32) * values[n]."""
    e = blocks.e
    head = blocks.words(0)
    d = blocks.half(head[0])
    for j in range(8):
        top = e.b.shl(blocks.bits(head[0], 16 + 2 * j, 3), e.const(4, ints))
        scale = e.b.or_(blocks.bits(head[1], 4 * j, 15), top)
        panel.put_scale(j, e.b.fmul(d, blocks.real(e.b.sub(scale, e.const(32, ints)))))
        put_looked_up(blocks, panel, 8 + 16 * j, 32 * j, IQ4_CODES)


def power_of_two(blocks: Blocks, exponent: Value) -> Value:
    """float32 2 ** (x - 128) of x in 0..255."""
    e, b = blocks.e, blocks.e.b
    one = e.const(1, ints)
    usual = b.shl(b.sub(exponent, one), e.const(23, ints))
    is_small = b.icmp_unsigned("<", exponent, e.const(2, ints))
    # The mask keeps the shift below the width where its result is not used.
    subnormal = b.shl(e.const(1 << 21, ints), b.and_(exponent, one))
    return b.bitcast(b.select(is_small, subnormal, usual), floats)


def unpack_mxfp4(blocks: Blocks, panel: Panel) -> None:
    """Exponent x, 16 bytes; 2 ** (x - 128) * values[n]."""
    exponent = blocks.bits(blocks.words(0)[0], 0, 255)
    panel.put_scale(0, power_of_two(blocks, exponent))
    put_looked_up(blocks, panel, 1, 0, FP4_CODES)


IQ4_NL = Format(32, 18, 32, 240, 127, unpack_iq4_nl)
IQ4_XS = Format(256, 136, 32, 240, 127, unpack_iq4_xs)
MXFP4 = Format(32, 17, 32, 24, 12, unpack_mxfp4)
