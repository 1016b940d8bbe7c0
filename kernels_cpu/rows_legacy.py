"""Row products of the types with blocks of 32 values: Q4_0 Q4_1 Q5_0 Q5_1 Q8_0.

Source: ggml-common.h for the layouts. The low nibbles of a block are its first 16 values.
"""

from llvmlite import ir

from kernels_cpu.kernel import kernel
from kernels_cpu.rows_blocks import pairs_q4_0, pairs_q4_1, pairs_q5_0, pairs_q5_1, pairs_q8_0
from kernels_cpu.rows_bytes import (
    Order,
    Unit,
    low_nibbles,
    pick,
    transposed,
    transposed_nibbles,
)
from kernels_cpu.rows_emitter import codes, emit_row_product
from kernels_cpu.rows_pairs import block_layout
from kernels_cpu.simd import Ir, Value, emits, i1, i8, i16, i32, i64, vec

# Nibbles: vector v has the 16 bytes of blocks 0 to 3 side by side, w those of blocks 4 to 7.
NIBBLE_ORDER: Order = tuple(
    tuple(2 * (i + 4 * which) + half for i in range(4)) for half in (0, 1) for which in (0, 1)
)
BYTE_ORDER: Order = tuple(tuple(4 * g + i for i in range(4)) for g in range(4))


def heads(e: Ir, unit: Value, block_bytes: int) -> Value:
    """float32 [16]: the first two halves of each of eight blocks."""
    v = e.undef(vec(i32, 8))
    for block in range(8):
        head = e.load(e.at(unit, block_bytes * block), i32)
        v = e.b.insert_element(v, head, e.const(block, i32))
    return e.half_to_float(e.b.bitcast(v, vec(i16, 16)))


def quarters(e: Ir, unit: Value, block_bytes: int, first: int) -> list[Value]:
    """16 bytes at `first` of blocks 0 to 3 side by side, and of blocks 4 to 7."""
    parts = [e.load(e.at(unit, block_bytes * k + first), vec(i8, 16)) for k in range(8)]
    return [e.concat(*parts[:4]), e.concat(*parts[4:])]


def rest_heads(e: Ir, first: Value, second: Value) -> Value:
    """float32 [4]: the first two halves of two blocks."""
    parts = [e.load(block, vec(i16, 2)) for block in (first, second)]
    return e.half_to_float(e.concat(*parts))


def rest_pick(e: Ir, heads: Value, index: int) -> Value:
    """Entry `index` of each of two blocks, in natural order."""
    return e.shuffle(heads, [index] * 8 + [index + 2] * 8)


def rest_nibbles(e: Ir, first: Value, second: Value, at: int) -> Value:
    """The nibbles of two blocks in natural order."""
    parts = [e.load(e.at(block, at), vec(i8, 16)) for block in (first, first, second, second)]
    words = e.b.bitcast(e.concat(*parts), vec(i64, 8))
    moved = e.b.lshr(words, ir.Constant(vec(i64, 8), [0, 0, 4, 4] * 2))
    return low_nibbles(e, e.b.bitcast(moved, codes))


def block_scale(e: Ir, unit: Value, block_bytes: int, order: Order = NIBBLE_ORDER) -> Value:
    """The half float at the start of each block, in lane order."""
    return pick(e, heads(e, unit, block_bytes), lambda group: group // 2 * 2, order)


def block_scale_and_bias(
    e: Ir, unit: Value, block_bytes: int, order: Order = NIBBLE_ORDER
) -> tuple[Value, Value]:
    halves = heads(e, unit, block_bytes)
    scale = pick(e, halves, lambda group: group // 2 * 2, order)
    return scale, pick(e, halves, lambda group: group // 2 * 2 + 1, order)


def unpack_q4_0(e: Ir, unit: Value) -> Unit:
    return Unit(transposed_nibbles(e, *quarters(e, unit, 18, 2)), block_scale(e, unit, 18))


def rest_q4_0(e: Ir, first: Value, second: Value) -> Unit:
    scale = rest_pick(e, rest_heads(e, first, second), 0)
    return Unit([rest_nibbles(e, first, second, 2)], scale)


def unpack_q4_1(e: Ir, unit: Value) -> Unit:
    vectors = transposed_nibbles(e, *quarters(e, unit, 20, 4))
    return Unit(vectors, *block_scale_and_bias(e, unit, 20))


def rest_q4_1(e: Ir, first: Value, second: Value) -> Unit:
    halves = rest_heads(e, first, second)
    vectors = [rest_nibbles(e, first, second, 4)]
    return Unit(vectors, rest_pick(e, halves, 0), rest_pick(e, halves, 1))


def with_bit(e: Ir, nibbles: Value, bits: Value) -> Value:
    """Nibbles plus 16 where a bit of the int64 is set."""
    return e.b.select(e.b.bitcast(bits, vec(i1, 64)), e.b.or_(nibbles, e.const(16, codes)), nibbles)


def two_blocks_five_bits(e: Ir, first: Value, second: Value, bits: int, nibbles: int) -> Value:
    """Codes of two blocks, whose dword of fifth bits and nibbles are at these bytes."""
    low, high = (e.b.zext(e.load(e.at(block, bits), i32), i64) for block in (first, second))
    mask = e.b.or_(low, e.b.shl(high, e.const(32)))
    return with_bit(e, rest_nibbles(e, first, second, nibbles), mask)


def five_bits(e: Ir, unit: Value, block_bytes: int, bits: int, nibbles: int) -> list[Value]:
    """Codes of eight blocks, in `BYTE_ORDER`."""
    pairs = [(e.at(unit, block_bytes * k), e.at(unit, block_bytes * (k + 1))) for k in (0, 2, 4, 6)]
    return transposed(e, [two_blocks_five_bits(e, *pair, bits, nibbles) for pair in pairs])


def unpack_q5_0(e: Ir, unit: Value) -> Unit:
    return Unit(five_bits(e, unit, 22, 2, 6), block_scale(e, unit, 22, BYTE_ORDER))


def rest_q5_0(e: Ir, first: Value, second: Value) -> Unit:
    scale = rest_pick(e, rest_heads(e, first, second), 0)
    return Unit([two_blocks_five_bits(e, first, second, 2, 6)], scale)


def unpack_q5_1(e: Ir, unit: Value) -> Unit:
    return Unit(five_bits(e, unit, 24, 4, 8), *block_scale_and_bias(e, unit, 24, BYTE_ORDER))


def rest_q5_1(e: Ir, first: Value, second: Value) -> Unit:
    halves = rest_heads(e, first, second)
    vectors = [two_blocks_five_bits(e, first, second, 4, 8)]
    return Unit(vectors, rest_pick(e, halves, 0), rest_pick(e, halves, 1))


def unpack_q8_0(e: Ir, unit: Value) -> Unit:
    parts = [e.load(e.at(unit, 34 * k + 2), vec(i8, 32)) for k in range(8)]
    natural = [e.concat(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    unsigned = [e.b.xor(v, e.const(-128, codes)) for v in natural]
    return Unit(transposed(e, unsigned), block_scale(e, unit, 34, BYTE_ORDER))


def rest_q8_0(e: Ir, first: Value, second: Value) -> Unit:
    parts = [e.load(e.at(block, 2), vec(i8, 32)) for block in (first, second)]
    unsigned = e.b.xor(e.concat(*parts), e.const(-128, codes))
    return Unit([unsigned], rest_pick(e, rest_heads(e, first, second), 0))


Q4_0 = block_layout((32, 18), NIBBLE_ORDER, 15, unpack_q4_0, pairs_q4_0, rest_q4_0, offset=8)
Q4_1 = block_layout((32, 20), NIBBLE_ORDER, 15, unpack_q4_1, pairs_q4_1, rest_q4_1)
Q5_0 = block_layout((32, 22), BYTE_ORDER, 31, unpack_q5_0, pairs_q5_0, rest_q5_0, offset=16)
Q5_1 = block_layout((32, 24), BYTE_ORDER, 31, unpack_q5_1, pairs_q5_1, rest_q5_1)
Q8_0 = block_layout((32, 34), BYTE_ORDER, 255, unpack_q8_0, pairs_q8_0, rest_q8_0, offset=128)


@emits(4)
def q4_0(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, Q4_0, args, first, last, scratch)


@emits(4)
def q4_1(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, Q4_1, args, first, last, scratch)


@emits(4)
def q5_0(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, Q5_0, args, first, last, scratch)


@emits(4)
def q5_1(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, Q5_1, args, first, last, scratch)


@emits(4)
def q8_0(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, Q8_0, args, first, last, scratch)


@kernel
def row_product_q4_0(args: int, first: int, last: int, scratch: int) -> None:
    """Arguments: rows_emitter.Slot. Block: d f16, 16 bytes of nibbles n; d * (n - 8)."""
    q4_0(args, first, last, scratch)


@kernel
def row_product_q4_1(args: int, first: int, last: int, scratch: int) -> None:
    """Arguments: rows_emitter.Slot. Block: d f16, m f16, 16 bytes of nibbles n; d * n + m."""
    q4_1(args, first, last, scratch)


@kernel
def row_product_q5_0(args: int, first: int, last: int, scratch: int) -> None:
    """Arguments: rows_emitter.Slot. Block: d f16, dword of fifth bits, nibbles; d * (q - 16)."""
    q5_0(args, first, last, scratch)


@kernel
def row_product_q5_1(args: int, first: int, last: int, scratch: int) -> None:
    """Arguments: rows_emitter.Slot. Block: d f16, m f16, fifth bits, nibbles; d * q + m."""
    q5_1(args, first, last, scratch)


@kernel
def row_product_q8_0(args: int, first: int, last: int, scratch: int) -> None:
    """Arguments: rows_emitter.Slot. Block: d f16, 32 signed bytes q; d * q."""
    q8_0(args, first, last, scratch)
