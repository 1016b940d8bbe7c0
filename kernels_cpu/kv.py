"""How K and V lie in memory: a row of `KV_TYPES` for each element type.

A *part* is what one KV head has of a block: BLOCK positions. Kernels find, read and write values
through a row of this table alone.

    f16   float16 [BLOCK][head_dim]
    q8_0  int8 [BLOCK][head_dim], then float16 scales [BLOCK][head_dim / 32, rounded up]: a value is
          scale * code, exactly

head_dim is a multiple of 8. What a q8_0 part holds is what GGUF's type of that name holds, with the
scales apart, so that codes start on cache lines.

Not here: which block a position lies in.
"""

from dataclasses import dataclass
from typing import Protocol

from kernels_cpu.attention_math import lanes
from kernels_cpu.simd import Ir, Value, f32, i8, i16, i32, vec
from kernels_cpu.vector_math import floats, for_lanes

BLOCK = 32  # positions of a block
SCALED = 32  # values of a scale
F16, Q8_0 = 0, 1  # indices of KV_TYPES


@dataclass(frozen=True, slots=True)
class Row:
    """Addresses of the values of one position, and of its scales where it has any."""

    values: Value
    scales: Value


class KVType(Protocol):
    """An element type. `value_bytes`: from one value of a position to the next."""

    name: str
    value_bytes: int

    def part_bytes(self, e: Ir, head_dim: Value) -> Value: ...

    def row(self, e: Ir, part: Value, position: Value, head_dim: Value) -> Row:
        """Where position 0 to BLOCK - 1 of a part lies."""

    def load(self, e: Ir, row: Row, d: Value, n: int) -> Value:
        """<n x f32> from value d on, a multiple of n; n is 8, 16 or 32."""

    def store(self, e: Ir, x: Value, row: Row, head_dim: Value) -> None:
        """Write a position from float32 values at address x."""

    def prefetch_scales(self, e: Ir, row: Row, count: int, head_dim: Value, ahead: Value) -> None:
        """The scales of `count` positions, `ahead` bytes further."""

    def copy_start(
        self, e: Ir, source: Value, target: Value, count: Value, head_dim: Value
    ) -> None:
        """Copy a part, of which only the first `count` positions matter: the others become zeros."""


class Halves:
    """float16."""

    name = "f16"
    value_bytes = 2

    def part_bytes(self, e: Ir, head_dim: Value) -> Value:
        return e.mul(head_dim, 2 * BLOCK)

    def row(self, e: Ir, part: Value, position: Value, head_dim: Value) -> Row:
        values = e.at(part, e.mul(e.b.mul(position, head_dim), 2))
        return Row(values, values)

    def load(self, e: Ir, row: Row, d: Value, n: int) -> Value:
        return e.half_to_float(e.load(e.at(row.values, e.mul(d, 2)), vec(i16, n), align=2))

    def store(self, e: Ir, x: Value, row: Row, head_dim: Value) -> None:
        def body(i: Value, n: int) -> None:
            half = e.float_to_half(floats(e, x, i, n))
            e.store(half, e.at(row.values, e.mul(i, 2)), align=2)

        for_lanes(e, head_dim, body)

    def prefetch_scales(self, e: Ir, row: Row, count: int, head_dim: Value, ahead: Value) -> None:
        pass

    def copy_start(
        self, e: Ir, source: Value, target: Value, count: Value, head_dim: Value
    ) -> None:
        row, eight = e.b.lshr(head_dim, e.const(3)), vec(i16, 8)
        done = e.b.mul(count, row)
        with e.loop(done) as i:
            offset = e.mul(i.index, 16)
            e.store(e.load(e.at(source, offset), eight, 2), e.at(target, offset), align=2)
        with e.loop(e.b.sub(e.mul(row, BLOCK), done)) as i:
            e.store(e.const(0, eight), e.at(target, e.mul(e.b.add(done, i.index), 16)), align=2)


class ScaledBytes:
    """int8 with a float16 scale for 32 values: the largest value over 127, as GGUF's q8_0."""

    name = "q8_0"
    value_bytes = 1

    def part_bytes(self, e: Ir, head_dim: Value) -> Value:
        return e.b.add(e.mul(head_dim, BLOCK), e.mul(num_scales(e, head_dim), 2 * BLOCK))

    def row(self, e: Ir, part: Value, position: Value, head_dim: Value) -> Row:
        scales = e.mul(e.b.mul(position, num_scales(e, head_dim)), 2)
        return Row(
            e.at(part, e.b.mul(position, head_dim)), e.at(part, e.mul(head_dim, BLOCK), scales)
        )

    def load(self, e: Ir, row: Row, d: Value, n: int) -> Value:
        codes = e.b.sitofp(e.load(e.at(row.values, d), vec(i8, n)), vec(f32, n))
        place = e.mul(e.b.lshr(d, e.const(SCALED.bit_length() - 1)), 2)
        half = e.load(e.at(row.scales, place), i16, align=2)
        # Spread out first: an instruction less than the other way round.
        width = min(n, lanes())
        scales = e.half_to_float(e.splat(half, width))
        return e.b.fmul(codes, e.concat(*[scales] * (n // width)))

    def store(self, e: Ir, x: Value, row: Row, head_dim: Value) -> None:
        eights = e.b.lshr(head_dim, e.const(3))
        with e.loop(num_scales(e, head_dim)) as group:
            first = e.mul(group.index, SCALED // 8)
            rest = e.b.sub(eights, first)
            is_whole = e.b.icmp_signed(">", rest, e.const(SCALED // 8))
            count = e.b.select(is_whole, e.const(SCALED // 8), rest)
            start = e.at(x, e.mul(group.index, 4 * SCALED))
            scale = e.float_to_half(e.b.fmul(largest_of(e, start, count), e.const(1 / 127, f32)))
            e.store(scale, e.at(row.scales, e.mul(group.index, 2)), align=2)
            to = e.at(row.values, e.mul(group.index, SCALED))
            put_codes(e, start, to, count, e.half_to_float(scale))

    def prefetch_scales(self, e: Ir, row: Row, count: int, head_dim: Value, ahead: Value) -> None:
        lines = e.b.lshr(e.at(e.mul(num_scales(e, head_dim), 2 * count), 63), e.const(6))
        with e.loop(lines) as line:
            e.prefetch(e.at(row.scales, e.mul(line.index, 64), ahead))

    def copy_start(
        self, e: Ir, source: Value, target: Value, count: Value, head_dim: Value
    ) -> None:
        # Codes are numbers whatever they are; scales need not be.
        with e.loop(e.b.lshr(head_dim, e.const(1))) as i:
            offset = e.mul(i.index, 64)
            e.store(e.load(e.at(source, offset), vec(i8, 64)), e.at(target, offset))
        scales = num_scales(e, head_dim)
        used = e.b.mul(count, scales)
        with e.loop(e.mul(scales, BLOCK)) as i:
            offset = e.at(e.mul(head_dim, BLOCK), e.mul(i.index, 2))
            scale = e.load(e.at(source, offset), i16, align=2)
            is_used = e.b.icmp_unsigned("<", i.index, used)
            scale = e.b.select(is_used, scale, e.const(0, i16))
            e.store(scale, e.at(target, offset), align=2)


def num_scales(e: Ir, head_dim: Value) -> Value:
    """Of one position."""
    return e.b.lshr(e.at(head_dim, SCALED - 1), e.const(SCALED.bit_length() - 1))


def largest_of(e: Ir, x: Value, count: Value) -> Value:
    """Largest absolute value of 8 * count float32 values."""
    largest = e.variable(e.const(0.0, vec(f32, 8)))
    with e.loop(count) as i:
        value = e.unary("fabs", floats(e, x, e.mul(i.index, 8), 8))
        e.set(largest, e.maximum(e.get(largest), value))
    return e.tree_max(e.get(largest))


def put_codes(e: Ir, x: Value, to: Value, count: Value, scale: Value) -> None:
    """The nearest codes of 8 * count values. A scale near the smallest float16 is a poor one."""
    is_some = e.b.fcmp_ordered(">", scale, e.const(0.0, f32))
    inverse = e.b.select(is_some, e.b.fdiv(e.const(1.0, f32), scale), e.const(0.0, f32))
    factor, bound = e.splat(inverse, 8), e.const(127.0, vec(f32, 8))
    with e.loop(count) as i:
        code = e.unary("rint", e.b.fmul(floats(e, x, e.mul(i.index, 8), 8), factor))
        for sign, limit in (("<", bound), (">", e.b.fneg(bound))):
            code = e.b.select(e.b.fcmp_ordered(sign, code, limit), code, limit)
        codes = e.b.trunc(e.b.fptosi(code, vec(i32, 8)), vec(i8, 8))
        e.store(codes, e.at(to, e.mul(i.index, 8)))


KV_TYPES: tuple[KVType, ...] = (Halves(), ScaledBytes())
