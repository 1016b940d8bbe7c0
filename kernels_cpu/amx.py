"""The bfloat16 tile product of AMX, and the same product in vectors for other processors.

A tile is 16 rows of 64 bytes, 1 KB on a 64-byte boundary (a row that crosses a cache line costs
three times the time):

    left    bfloat16 [16 tokens][32 values]
    right   bfloat16 [16 pairs][16 rows][2]     values 2p and 2p + 1 of each weight row
    sums    float32  [16 tokens][16 rows], rows of SUMS_BYTES

The product of two tiles adds the even values and the odd values up apart, in order, each from
nothing, then their sum to what is there. `Portable` does the same with multiply-adds that round once
and keep subnormal numbers; the hardware takes those for zero. `Vectors` adds pair after pair to what
is there, in order.

The process has to ask the system for the registers (`isa.request_tiles`); `configure` does.
Source: Intel's Software Developer's Manual, TDPBF16PS; the tile configuration, LDTILECFG.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from llvmlite import ir

from kernels_cpu.simd import Ir, Value, f32, i8, i16, i32, vec, void

TILE_ROWS, ROW_BYTES, TILE_BYTES = 16, 64, 1024
TOKENS = ROWS = 2 * TILE_ROWS
SUMS_BYTES = 4 * ROWS
WEIGHTS_BYTES = 2 * TILE_BYTES
VECTOR_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Operands:
    """Addresses of two tiles of tokens, tiles of weights, and sums of 32 tokens and 32 rows.

    A step is 32 values: `left` (and the tile `next_left` bytes further) moves by TILE_BYTES a step,
    `right`, two tiles side by side, by WEIGHTS_BYTES.
    """

    left: Value
    next_left: Value
    right: Value
    sums: Value
    steps: Value


class TileUnit(Protocol):
    """What computes tile products."""

    def begin(self, e: Ir, scratch: Value) -> None:
        """Before the first product of a call; `scratch` has 64 free bytes."""

    def product(self, e: Ir, o: Operands, beside: Callable[[], None]) -> None:
        """sums[t][r] += sum over the steps of left[t] . right[r]; `beside` emits more for a step."""

    def end(self, e: Ir) -> None:
        """After the last product of a call."""


class Hardware:
    """Tile registers: 0 to 3 sums, 4 and 5 tokens, 6 and 7 weights."""

    def begin(self, e: Ir, scratch: Value) -> None:
        """Eight tiles of 16 rows of 64 bytes. Palette at byte 0, row bytes at 16, rows at 48."""
        e.store(e.const(0, vec(i8, 64)), scratch)
        e.store(e.const(1, i8), scratch)
        e.store(e.const(ROW_BYTES, vec(i16, 8)), e.at(scratch, 16))
        e.store(e.const(TILE_ROWS, vec(i8, 8)), e.at(scratch, 48))
        e.call("llvm.x86.ldtilecfg", void, e.pointer(scratch, i8))

    def product(self, e: Ir, o: Operands, beside: Callable[[], None]) -> None:
        low = e.at(o.sums, TILE_ROWS * SUMS_BYTES)
        places = (o.sums, e.at(o.sums, ROW_BYTES), low, e.at(low, ROW_BYTES))
        for tile, place in enumerate(places):
            self._move(e, "tileloadd64", tile, place, SUMS_BYTES)
        with e.loop(o.steps) as step:
            beside()
            left = e.at(o.left, e.mul(step.index, TILE_BYTES))
            right = e.at(o.right, e.mul(step.index, WEIGHTS_BYTES))
            self._move(e, "tileloadd64", 4, left, ROW_BYTES)
            self._move(e, "tileloadd64", 6, right, ROW_BYTES)
            self._move(e, "tileloadd64", 5, e.at(left, o.next_left), ROW_BYTES)
            self._move(e, "tileloadd64", 7, e.at(right, TILE_BYTES), ROW_BYTES)
            for sums, tokens, weights in ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)):
                registers = (e.const(r, i8) for r in (sums, tokens, weights))
                e.call("llvm.x86.tdpbf16ps", void, *registers)
        for tile, place in enumerate(places):
            self._move(e, "tilestored64", tile, place, SUMS_BYTES)

    def end(self, e: Ir) -> None:
        e.call("llvm.x86.tilerelease", void)

    def _move(self, e: Ir, name: str, tile: int, address: Value, stride: int) -> None:
        operands = e.const(tile, i8), e.pointer(address, i8), e.const(stride)
        e.call(f"llvm.x86.{name}", void, *operands)


class Vectors:
    """Products of vectors of bfloat16 pairs (`Ir.dot_pairs`): eight tokens at a time."""

    def begin(self, e: Ir, scratch: Value) -> None:
        pass

    def product(self, e: Ir, o: Operands, beside: Callable[[], None]) -> None:
        floats, ints = vec(f32, TILE_ROWS), vec(i32, TILE_ROWS)
        with e.loop(e.const(TOKENS // VECTOR_TOKENS)) as part:
            tile, half = e.b.lshr(part.index, e.const(1)), e.b.and_(part.index, e.const(1))
            left = e.at(o.left, e.b.mul(tile, o.next_left), e.mul(half, VECTOR_TOKENS * ROW_BYTES))
            sums = e.at(o.sums, e.mul(part.index, VECTOR_TOKENS * SUMS_BYTES))
            places = [
                [e.at(sums, t * SUMS_BYTES + j * ROW_BYTES) for j in range(2)]
                for t in range(VECTOR_TOKENS)
            ]
            totals = [[e.variable(e.load(p, floats, ROW_BYTES)) for p in row] for row in places]
            # Pointers that the loop carries: LLVM would keep the sums of addresses and offsets.
            at_left, at_right = (e.variable(e.pointer(x, i8)) for x in (left, o.right))
            with e.loop(o.steps):
                tokens, weights = e.get(at_left), e.get(at_right)
                e.set(at_left, e.b.gep(tokens, [e.const(TILE_BYTES)]))
                e.set(at_right, e.b.gep(weights, [e.const(WEIGHTS_BYTES)]))
                for pair in range(TILE_ROWS):
                    w = [
                        near(e, weights, pair * ROW_BYTES + j * TILE_BYTES, ints) for j in range(2)
                    ]
                    for t, row in enumerate(totals):
                        x = e.splat(near(e, tokens, t * ROW_BYTES + 4 * pair, i32), TILE_ROWS)
                        for j, total in enumerate(row):
                            e.set(total, e.dot_pairs(e.get(total), x, w[j]))
            for row, totals_of_row in zip(places, totals, strict=True):
                for place, total in zip(row, totals_of_row, strict=True):
                    e.store(e.get(total), place, ROW_BYTES)

    def end(self, e: Ir) -> None:
        pass


class Portable:
    """The same in vector code for any processor, to test all that is around it."""

    def begin(self, e: Ir, scratch: Value) -> None:
        pass

    def product(self, e: Ir, o: Operands, beside: Callable[[], None]) -> None:
        with e.loop(e.const(TOKENS)) as t:
            tile = e.b.and_(e.b.lshr(t.index, e.const(4)), e.const(1))
            row = e.mul(e.b.and_(t.index, e.const(TILE_ROWS - 1)), ROW_BYTES)
            left = e.at(o.left, e.b.mul(tile, o.next_left), row)
            sums = e.at(o.sums, e.mul(t.index, SUMS_BYTES))
            for half in range(2):
                right, place = e.at(o.right, half * TILE_BYTES), e.at(sums, half * ROW_BYTES)
                self._row(e, left, right, place, o.steps)

    def _row(self, e: Ir, left: Value, right: Value, place: Value, steps: Value) -> None:
        """One token and 16 rows."""
        floats = vec(f32, TILE_ROWS)
        total = e.variable(e.const(0.0, floats))
        e.set(total, e.load(place, floats, ROW_BYTES))
        with e.loop(steps) as step:
            tokens = e.at(left, e.mul(step.index, TILE_BYTES))
            weights = e.at(right, e.mul(step.index, WEIGHTS_BYTES))
            even = odd = e.const(0.0, floats)
            for pair in range(TILE_ROWS):
                x = e.splat(e.load(e.at(tokens, 4 * pair), i32), TILE_ROWS)
                w = e.load(e.at(weights, pair * ROW_BYTES), vec(i32, TILE_ROWS), ROW_BYTES)
                even = e.fma(lower(e, x), lower(e, w), even)
                odd = e.fma(upper(e, x), upper(e, w), odd)
            e.set(total, e.b.fadd(e.get(total), e.b.fadd(even, odd)))
        e.store(e.get(total), place, ROW_BYTES)

    def end(self, e: Ir) -> None:
        pass


def near(e: Ir, pointer: Value, offset: int, type_: ir.Type) -> Value:
    """What lies `offset` bytes from a pointer to bytes."""
    place = e.b.bitcast(e.b.gep(pointer, [e.const(offset)]), type_.as_pointer())
    return e.b.load(place, align=4)


def lower(e: Ir, pairs: Value) -> Value:
    """float32 of the bfloat16 in the low 16 bits of each lane."""
    return e.b.bitcast(e.b.shl(pairs, e.const(16, pairs.type)), vec(f32, pairs.type.count))


def upper(e: Ir, pairs: Value) -> Value:
    high = ir.Constant(pairs.type, [0xFFFF0000] * pairs.type.count)
    return e.b.bitcast(e.b.and_(pairs, high), vec(f32, pairs.type.count))


def nearest_pair(e: Ir, even: Value, odd: Value) -> Value:
    """<n x i32> of the nearest bfloat16 of two float32 vectors, `even` below; ties away from 0."""
    ints = vec(i32, even.type.count)
    half = e.const(0x8000, ints)
    low, high = (e.b.add(e.b.bitcast(v, ints), half) for v in (even, odd))
    mask = ir.Constant(ints, [0xFFFF0000] * ints.count)
    return e.b.or_(e.b.lshr(low, e.const(16, ints)), e.b.and_(high, mask))
