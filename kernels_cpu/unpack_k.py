"""Unpackers of the types of 256 values with scales of their own scale: Q2_K Q3_K Q4_K Q5_K Q6_K.

Source: ggml-common.h for the layouts.
"""

from kernels_cpu.simd import Value
from kernels_cpu.unpack_blocks import Blocks, Format, Panel, ints


def scales_of_k(blocks: Blocks, head: list[Value], j: int) -> tuple[Value, Value]:
    """Scale and minimum, 6 bits each, of sub-block j of Q4_K and Q5_K (head: first 16 bytes)."""
    _, low, middle, last = head
    if j < 4:
        return blocks.bits(low, 8 * j, 63), blocks.bits(middle, 8 * j, 63)
    e, shift = blocks.e, 8 * (j - 4)
    pair = []
    for four, two in ((shift, low), (shift + 4, middle)):
        top = e.b.shl(blocks.bits(two, shift + 6, 3), e.const(4, ints))
        pair.append(e.b.or_(blocks.bits(last, four, 15), top))
    return pair[0], pair[1]


def put_scales_of_k(blocks: Blocks, panel: Panel) -> None:
    """Scales d * sc and biases -dmin * m of the 8 sub-blocks of Q4_K and Q5_K."""
    e = blocks.e
    head = blocks.words(0)
    d, minimum = blocks.half(head[0]), blocks.half(head[0], high=True)
    minimum = e.b.fneg(minimum)
    for j in range(8):
        scale, bias = scales_of_k(blocks, head, j)
        panel.put_scale(j, e.b.fmul(d, blocks.real(scale)), e.b.fmul(minimum, blocks.real(bias)))


def unpack_q4_k(blocks: Blocks, panel: Panel) -> None:
    """d f16, dmin f16, 12 bytes of scales, 128 of nibbles: 32 hold two sub-blocks, low first."""
    put_scales_of_k(blocks, panel)
    for first in range(0, 128, 16):
        value = first // 32 * 64 + first % 32
        for i, word in enumerate(blocks.words(16 + first)):
            panel.put_codes(value + 4 * i, blocks.nibbles(word))
            panel.put_codes(value + 32 + 4 * i, blocks.nibbles(word, high=True))


def unpack_q6_k(blocks: Blocks, panel: Panel) -> None:
    """128 bytes of nibbles, 64 of bit pairs, 16 signed scales, d f16; d * scale * (q - 32)."""
    e = blocks.e
    # The half float ends the block: read the 16 bytes that end with it.
    d = blocks.half(blocks.words(194)[3], high=True)
    scales = blocks.words(192)
    for g in range(16):
        top = e.b.shl(scales[g // 4], e.const(24 - 8 * (g % 4), ints))
        panel.put_scale(g, e.b.fmul(d, blocks.real(e.b.ashr(top, e.const(24, ints)))))
    for half in range(2):
        for first in (0, 16):
            low = [blocks.words(64 * half + 32 * k + first) for k in range(2)]
            high = blocks.words(128 + 32 * half + first)
            for s in range(4):
                for i in range(4):
                    nibbles = blocks.nibbles(low[s & 1][i], high=s > 1)
                    pairs = e.b.shl(blocks.bits(high[i], 2 * s, 0x03030303), e.const(4, ints))
                    value = 128 * half + 32 * s + first + 4 * i
                    panel.put_codes(value, e.b.or_(nibbles, pairs))


def unpack_q5_k(blocks: Blocks, panel: Panel) -> None:
    """As Q4_K with 32 bytes before the nibbles whose bit j is the fifth bit of sub-block j."""
    put_scales_of_k(blocks, panel)
    e, fifth = blocks.e, [blocks.words(16), blocks.words(32)]
    for first in range(0, 128, 16):
        pair, part = divmod(first // 16, 2)
        for i, word in enumerate(blocks.words(48 + first)):
            for high in (False, True):
                j = 2 * pair + high
                bit = e.b.shl(blocks.bits(fifth[part][i], j, 0x01010101), e.const(4, ints))
                codes = e.b.or_(blocks.nibbles(word, high=high), bit)
                panel.put_codes(32 * j + 16 * part + 4 * i, codes)


def unpack_q2_k(blocks: Blocks, panel: Panel) -> None:
    """16 bytes of scales and minima, 64 bytes of bit pairs, d f16, dmin f16; d * sc * q - dmin * m."""
    e = blocks.e
    # The half floats end the block: read the 16 bytes that end with them.
    ends = blocks.words(68)[3]
    d, least = blocks.half(ends), e.b.fneg(blocks.half(ends, high=True))
    scales = blocks.words(0)
    for g in range(16):
        scale = blocks.real(blocks.bits(scales[g // 4], 8 * (g % 4), 15))
        bias = blocks.real(blocks.bits(scales[g // 4], 8 * (g % 4) + 4, 15))
        panel.put_scale(g, e.b.fmul(d, scale), e.b.fmul(least, bias))
    for half in range(2):
        for first in (0, 16):
            for i, word in enumerate(blocks.words(16 + 32 * half + first)):
                for s in range(4):
                    value = 128 * half + 32 * s + first + 4 * i
                    panel.put_codes(value, blocks.bits(word, 2 * s, 0x03030303))


def scale_of_q3_k(blocks: Blocks, words: list[Value], j: int) -> Value:
    """Scale j in -32..31; `words` are the 12 bytes of scales."""
    e, low, high = blocks.e, 8 * (j % 4), 8 * (j % 4) + 2 * (j // 4)
    four = blocks.bits(words[j // 4 % 2], low + 4 * (j // 8), 15)
    two = e.b.shl(blocks.bits(words[2], high, 3), e.const(4, ints))
    return e.b.sub(e.b.or_(four, two), e.const(32, ints))


def unpack_q3_k(blocks: Blocks, panel: Panel) -> None:
    """32 bytes of third bits, 64 of bit pairs, 12 of scales, d f16; d * (sc - 32) * (q - 4)."""
    e = blocks.e
    d = blocks.half(blocks.words(94)[3], high=True)
    scales = blocks.words(92)[1:]
    for g in range(16):
        scale = blocks.real(scale_of_q3_k(blocks, scales, g))
        panel.put_scale(g, e.b.fmul(d, scale))
    for first in (0, 16):
        third = blocks.words(first)
        for half in range(2):
            for i, word in enumerate(blocks.words(32 + 32 * half + first)):
                for s in range(4):
                    pairs = blocks.bits(word, 2 * s, 0x03030303)
                    bit = blocks.bits(third[i], 4 * half + s, 0x01010101)
                    codes = e.b.or_(pairs, e.b.shl(bit, e.const(2, ints)))
                    panel.put_codes(128 * half + 32 * s + first + 4 * i, codes)


Q2_K = Format(256, 84, 16, 3, None, unpack_q2_k)
Q3_K = Format(256, 110, 16, 7, 4, unpack_q3_k)
Q4_K = Format(256, 144, 32, 15, None, unpack_q4_k)
Q5_K = Format(256, 176, 32, 31, None, unpack_q5_k)
Q6_K = Format(256, 210, 16, 63, 32, unpack_q6_k)
