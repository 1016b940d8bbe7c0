"""From raw GGUF blocks to panels of unsigned bytes: what panel products know of each weight type.

Every type is affine: a weight is scale * code + bias with a code in 0..255, or, where codes are
signed numbers plus an offset, scale * (code - offset). A scale (and bias) counts for 16 or 32
neighbours in a row. An unpacker takes one block of each of 16 rows apart, in vectors whose lane is
the row: `Blocks.words` brings 16 bytes of each row into four vectors, `PanelBlock` takes results.

A panel has 32 rows. It is a list of groups of 32 values, each one
    codes   uint8   [8][32][4]      four neighbours of each row side by side
    scale   float32 [scales][32]    scales = 2 if a scale counts for 16 values, else 1
    bias    float32 [scales][32]    only without an offset

Source: ggml-common.h for the layouts.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kernels_cpu.simd import Ir, Value, f32, i16, i32, vec

GROUP = 32
STEP_BYTES = 4 * 32
LANES = 16
ints, floats, shorts = vec(i32, LANES), vec(f32, LANES), vec(i16, LANES)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of 16 rows at `offset`; `rows` is the address of the rows' 16 addresses."""

    e: Ir
    rows: Value
    offset: Value

    def words(self, first: int) -> list[Value]:
        """Four <16 x i32>: the dwords at bytes first, first + 4, ... of the block, a lane a row."""
        e, quads = self.e, []
        for row in range(LANES):
            address = e.load(e.at(self.rows, 8 * row), self.offset.type, align=8)
            quads.append(e.load(e.at(address, self.offset, first), vec(i32, 4)))
        # Rows j, 4 + j, 8 + j, 12 + j together: transposing within 128 bits sorts the rows.
        a, b, c, d = (e.concat(*quads[j::4]) for j in range(4))
        low = [l for k in range(0, 16, 4) for l in (k, 16 + k, k + 1, 17 + k)]
        high = [l + 2 for l in low]
        ab, cd = e.shuffle(a, low, b), e.shuffle(c, low, d)
        ab2, cd2 = e.shuffle(a, high, b), e.shuffle(c, high, d)
        first_pair = [l for k in range(0, 16, 4) for l in (k, k + 1, 16 + k, 17 + k)]
        second_pair = [l + 2 for l in first_pair]
        return [
            e.shuffle(ab, first_pair, cd),
            e.shuffle(ab, second_pair, cd),
            e.shuffle(ab2, first_pair, cd2),
            e.shuffle(ab2, second_pair, cd2),
        ]

    def half(self, word: Value, *, high: bool = False) -> Value:
        """float32 of the half float in the low (or high) 16 bits of each lane."""
        bits = self.bits(word, 16, 0xFFFF) if high else word
        return self.e.half_to_float(self.e.b.trunc(bits, shorts))

    def bits(self, word: Value, shift: int, mask: int) -> Value:
        """(word >> shift) & mask in each lane."""
        if shift:
            word = self.e.b.lshr(word, self.e.const(shift, ints))
        return self.e.b.and_(word, self.e.const(mask, ints))

    def nibbles(self, word: Value, *, high: bool = False) -> Value:
        return self.bits(word, 4 if high else 0, 0x0F0F0F0F)

    def real(self, word: Value) -> Value:
        return self.e.b.sitofp(word, floats)


@dataclass(frozen=True, slots=True)
class Format:
    """A weight type: `block_length` values in `block_bytes`, one scale per `scale_length` values.

    largest_code bounds the codes; see `Ir.dot4` for what is possible up to 127 only.
    offset: a weight is scale * (code - offset); None: the panel has biases.
    """

    block_length: int
    block_bytes: int
    scale_length: int
    largest_code: int
    offset: int | None
    unpack: "Callable[[Blocks, PanelBlock], None]"

    @property
    def scales(self) -> int:
        return GROUP // self.scale_length

    @property
    def group_bytes(self) -> int:
        lines = self.scales if self.offset is not None else 2 * self.scales
        return (8 + lines) * STEP_BYTES


@dataclass(frozen=True, slots=True)
class PanelBlock:
    """Where a block of 16 rows goes: `address` is the first row in the block's first group."""

    e: Ir
    address: Value
    format: Format

    def put_codes(self, value: int, codes: Value) -> None:
        """Codes of the four neighbours that begin at `value`."""
        group, inside = divmod(value, GROUP)
        at = group * self.format.group_bytes + inside // 4 * STEP_BYTES
        self.e.store(codes, self.e.at(self.address, at), 64)

    def put_scale(self, index: int, scale: Value, bias: Value | None = None) -> None:
        """Scale and bias of the scale group `index` of the block."""
        scales = self.format.scales
        group, part = divmod(index, scales)
        at = group * self.format.group_bytes + (8 + part) * STEP_BYTES
        self.e.store(scale, self.e.at(self.address, at), 64)
        if bias is not None:
            self.e.store(bias, self.e.at(self.address, at + scales * STEP_BYTES), 64)


def unpack_q4_1(blocks: Blocks, panel: PanelBlock) -> None:
    """d f16, m f16, 16 bytes: low nibbles are the first 16 values; d * n + m."""
    scale = blocks.words(0)[0]
    panel.put_scale(0, blocks.half(scale), blocks.half(scale, high=True))
    for i, word in enumerate(blocks.words(4)):
        panel.put_codes(4 * i, blocks.nibbles(word))
        panel.put_codes(16 + 4 * i, blocks.nibbles(word, high=True))


def fifth_bits(blocks: Blocks, bits: Value, first: int) -> Value:
    """Bits first..first + 3 of each lane as bit 4 of its four bytes."""
    e = blocks.e
    four = blocks.bits(bits, first, 15)
    # Copies of the four bits 7 apart put bit i at 8 * i; all of it shifted by 4.
    spread = e.b.mul(four, e.const(0x00204081 << 4, ints))
    return e.b.and_(spread, e.const(0x10101010, ints))


def unpack_q5_0(blocks: Blocks, panel: PanelBlock) -> None:
    """d f16, a dword of fifth bits, 16 bytes of nibbles as Q4_1; d * (q - 16)."""
    e = blocks.e
    head = blocks.words(0)
    panel.put_scale(0, blocks.half(head[0]))
    fifth = e.b.or_(blocks.bits(head[0], 16, 0xFFFF), e.b.shl(head[1], e.const(16, ints)))
    for i, word in enumerate(blocks.words(6)):
        for value, high in ((4 * i, False), (16 + 4 * i, True)):
            nibbles = blocks.nibbles(word, high=high)
            panel.put_codes(value, e.b.or_(nibbles, fifth_bits(blocks, fifth, value)))


def unpack_q8_0(blocks: Blocks, panel: PanelBlock) -> None:
    """d f16, 32 signed bytes; the codes are 128 more."""
    e = blocks.e
    panel.put_scale(0, blocks.half(blocks.words(0)[0]))
    for first in (0, 16):
        for i, word in enumerate(blocks.words(2 + first)):
            panel.put_codes(first + 4 * i, e.b.xor(word, e.const(-0x7F7F7F80, ints)))


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


def put_scales_of_k(blocks: Blocks, panel: PanelBlock) -> None:
    """Scales d * sc and biases -dmin * m of the 8 sub-blocks of Q4_K and Q5_K."""
    e = blocks.e
    head = blocks.words(0)
    d, minimum = blocks.half(head[0]), blocks.half(head[0], high=True)
    minimum = e.b.fneg(minimum)
    for j in range(8):
        scale, bias = scales_of_k(blocks, head, j)
        panel.put_scale(j, e.b.fmul(d, blocks.real(scale)), e.b.fmul(minimum, blocks.real(bias)))


def unpack_q4_k(blocks: Blocks, panel: PanelBlock) -> None:
    """d f16, dmin f16, 12 bytes of scales, 128 of nibbles: 32 hold two sub-blocks, low first."""
    put_scales_of_k(blocks, panel)
    for first in range(0, 128, 16):
        value = first // 32 * 64 + first % 32
        for i, word in enumerate(blocks.words(16 + first)):
            panel.put_codes(value + 4 * i, blocks.nibbles(word))
            panel.put_codes(value + 32 + 4 * i, blocks.nibbles(word, high=True))


def unpack_q6_k(blocks: Blocks, panel: PanelBlock) -> None:
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


FORMATS = {
    "Q4_1": Format(32, 20, 32, 15, None, unpack_q4_1),
    "Q5_0": Format(32, 22, 32, 31, 16, unpack_q5_0),
    "Q8_0": Format(32, 34, 32, 255, 128, unpack_q8_0),
    "Q4_K": Format(256, 144, 32, 15, None, unpack_q4_k),
    "Q6_K": Format(256, 210, 16, 63, 32, unpack_q6_k),
}
