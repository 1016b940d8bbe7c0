"""From raw GGUF blocks to panels of unsigned bytes: what panel products know of each weight type.

Every type is affine: a weight is scale * code + bias with a code in 0..255, or, where codes are
signed numbers plus an offset, scale * (code - offset). A scale (and bias) counts for 16 or 32
neighbours in a row. An unpacker takes one block of each of 16 rows apart, in vectors whose lane is
the row: `Blocks.words` brings 16 bytes of each row into four vectors, a `Panel` takes results.

A panel of bytes has 32 rows. It is a list of groups of 32 values, each one
    codes   uint8   [8][32][4]      four neighbours of each row side by side (see is_signed)
    scale   float32 [scales][32]    scales = 2 if a scale counts for 16 values, else 1
    bias    float32 [scales][32]    only without an offset
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kernels_cpu.kernel import isa
from kernels_cpu.simd import Ir, Value, f32, i8, i16, i32, vec

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

    def lookup(self, table: tuple[int, ...], word: Value) -> Value:
        """Bytes table[i] of four indices in 0..15 in each lane."""
        indices = self.e.b.bitcast(word, vec(i8, 4 * LANES))
        return self.e.b.bitcast(self.e.lookup(table, indices), ints)

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
    unpack: "Callable[[Blocks, Panel], None]"

    @property
    def scales(self) -> int:
        return GROUP // self.scale_length

    @property
    def is_signed(self) -> bool:
        """Whether panels hold code - offset, as signed bytes, instead of the code.

        Without 4-way byte products, sums of two products must fit into 16 bits.
        """
        return isa() == "avx2" and self.largest_code > 127

    @property
    def has_bias(self) -> bool:
        return self.offset is None

    @property
    def has_offset(self) -> bool:
        """Whether the sum of activations times the offset is to be taken off."""
        return self.offset is not None and not self.is_signed

    @property
    def group_bytes(self) -> int:
        lines = 2 * self.scales if self.has_bias else self.scales
        return (8 + lines) * STEP_BYTES


class Panel(Protocol):
    """Takes what an unpacker finds in a block of 16 rows, scales before the codes they count for."""

    def put_scale(self, index: int, scale: Value, bias: Value | None = None) -> None:
        """Scale and bias (where the format has any) of the scale group `index` of the block."""

    def put_codes(self, value: int, codes: Value) -> None:
        """Codes of the four neighbours that begin at `value`, a byte each."""


@dataclass(frozen=True, slots=True)
class BytePanel:
    """A block's place in a panel of bytes: `address` is the first row in its first group."""

    e: Ir
    address: Value
    format: Format

    def put_codes(self, value: int, codes: Value) -> None:
        group, inside = divmod(value, GROUP)
        at = group * self.format.group_bytes + inside // 4 * STEP_BYTES
        if self.format.is_signed:
            codes = self.e.b.bitcast(codes, vec(i8, 4 * LANES))
            codes = self.e.b.sub(codes, self.e.const(self.format.offset or 0, codes.type))
        self.e.store(codes, self.e.at(self.address, at), 64)

    def put_scale(self, index: int, scale: Value, bias: Value | None = None) -> None:
        scales = self.format.scales
        group, part = divmod(index, scales)
        at = group * self.format.group_bytes + (8 + part) * STEP_BYTES
        self.e.store(scale, self.e.at(self.address, at), 64)
        if bias is not None:
            self.e.store(bias, self.e.at(self.address, at + scales * STEP_BYTES), 64)
