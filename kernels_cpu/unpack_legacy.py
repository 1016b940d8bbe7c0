"""Unpackers of the types of 32 values with one half float scale: Q4_0 Q4_1 Q5_0 Q5_1 Q8_0.

Low nibbles are the first 16 values. Source: ggml-common.h for the layouts.
"""

from kernels_cpu.simd import Value
from kernels_cpu.unpack_blocks import Blocks, Format, Panel, ints


def put_nibbles(blocks: Blocks, panel: Panel, first: int) -> None:
    """Codes from the 16 bytes at `first`."""
    for i, word in enumerate(blocks.words(first)):
        panel.put_codes(4 * i, blocks.nibbles(word))
        panel.put_codes(16 + 4 * i, blocks.nibbles(word, high=True))


def put_five_bits(blocks: Blocks, panel: Panel, first: int, fifth: Value) -> None:
    """Codes from the 16 bytes at `first` and a dword of fifth bits."""
    for i, word in enumerate(blocks.words(first)):
        for value, high in ((4 * i, False), (16 + 4 * i, True)):
            nibbles = blocks.nibbles(word, high=high)
            panel.put_codes(value, blocks.e.b.or_(nibbles, fifth_bits(blocks, fifth, value)))


def fifth_bits(blocks: Blocks, bits: Value, first: int) -> Value:
    """Bits first..first + 3 of each lane as bit 4 of its four bytes."""
    e = blocks.e
    four = blocks.bits(bits, first, 15)
    # Copies of the four bits 7 apart put bit i at 8 * i; all of it shifted by 4.
    spread = e.b.mul(four, e.const(0x00204081 << 4, ints))
    return e.b.and_(spread, e.const(0x10101010, ints))


def unpack_q4_0(blocks: Blocks, panel: Panel) -> None:
    """d f16, 16 bytes; d * (n - 8)."""
    panel.put_scale(0, blocks.half(blocks.words(0)[0]))
    put_nibbles(blocks, panel, 2)


def unpack_q4_1(blocks: Blocks, panel: Panel) -> None:
    """d f16, m f16, 16 bytes; d * n + m."""
    head = blocks.words(0)[0]
    panel.put_scale(0, blocks.half(head), blocks.half(head, high=True))
    put_nibbles(blocks, panel, 4)


def unpack_q5_0(blocks: Blocks, panel: Panel) -> None:
    """d f16, a dword of fifth bits, 16 bytes; d * (q - 16)."""
    e = blocks.e
    head = blocks.words(0)
    panel.put_scale(0, blocks.half(head[0]))
    fifth = e.b.or_(blocks.bits(head[0], 16, 0xFFFF), e.b.shl(head[1], e.const(16, ints)))
    put_five_bits(blocks, panel, 6, fifth)


def unpack_q5_1(blocks: Blocks, panel: Panel) -> None:
    """d f16, m f16, a dword of fifth bits, 16 bytes; d * q + m."""
    head = blocks.words(0)
    panel.put_scale(0, blocks.half(head[0]), blocks.half(head[0], high=True))
    put_five_bits(blocks, panel, 8, head[1])


def unpack_q8_0(blocks: Blocks, panel: Panel) -> None:
    """d f16, 32 signed bytes; the codes are 128 more."""
    e = blocks.e
    panel.put_scale(0, blocks.half(blocks.words(0)[0]))
    for first in (0, 16):
        for i, word in enumerate(blocks.words(2 + first)):
            panel.put_codes(first + 4 * i, e.b.xor(word, e.const(-0x7F7F7F80, ints)))


Q4_0 = Format(32, 18, 32, 15, 8, unpack_q4_0)
Q4_1 = Format(32, 20, 32, 15, None, unpack_q4_1)
Q5_0 = Format(32, 22, 32, 31, 16, unpack_q5_0)
Q5_1 = Format(32, 24, 32, 31, None, unpack_q5_1)
Q8_0 = Format(32, 34, 32, 255, 128, unpack_q8_0)
