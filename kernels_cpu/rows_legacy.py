"""Row products of the types with blocks of 32 values: Q4_0 Q4_1 Q5_0 Q5_1 Q8_0.

Source: ggml-common.h for the layouts. The low nibbles of a block are its first 16 values.
"""

from kernels_cpu.kernel import kernel
from kernels_cpu.rows_bytes import (
    ByteLayout,
    Unit,
    high_nibbles,
    low_nibbles,
    pick,
    transposed,
    transposed_nibbles,
)
from kernels_cpu.rows_emitter import codes, emit_row_product
from kernels_cpu.simd import Ir, Value, emits, i1, i8, i16, i32, i64, vec

# Nibbles: vector v has the 16 bytes of blocks 0 to 3 side by side, w those of blocks 4 to 7.
NIBBLE_ORDER = tuple(
    tuple(2 * (i + 4 * which) + half for i in range(4)) for half in (0, 1) for which in (0, 1)
)
BYTE_ORDER = tuple(tuple(4 * g + i for i in range(4)) for g in range(4))


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


def unpack_q4_0(e: Ir, unit: Value) -> Unit:
    v, w = quarters(e, unit, 18, 2)
    scale = pick(e, heads(e, unit, 18), lambda group: group // 2 * 2, NIBBLE_ORDER)
    return Unit(transposed_nibbles(e, v, w), scale)


def unpack_q4_1(e: Ir, unit: Value) -> Unit:
    v, w = quarters(e, unit, 20, 4)
    halves = heads(e, unit, 20)
    scale = pick(e, halves, lambda group: group // 2 * 2, NIBBLE_ORDER)
    bias = pick(e, halves, lambda group: group // 2 * 2 + 1, NIBBLE_ORDER)
    return Unit(transposed_nibbles(e, v, w), scale, bias)


def with_fifth_bits(e: Ir, unit: Value, block_bytes: int, bits: int, first: int) -> list[Value]:
    """Five-bit codes: nibbles at `first`, the dword of fifth bits at `bits` of each block."""
    parts = []
    for which, v in enumerate(quarters(e, unit, block_bytes, first)):
        for half, nibbles in enumerate((low_nibbles(e, v), high_nibbles(e, v))):
            mask = e.const(0)
            for k in range(4):
                at = block_bytes * (4 * which + k) + bits + 2 * half
                word = e.b.zext(e.load(e.at(unit, at), i16), i64)
                mask = e.b.or_(mask, e.b.shl(word, e.const(16 * k)))
            is_set = e.b.bitcast(mask, vec(i1, 64))
            with_bit = e.b.or_(nibbles, e.const(16, codes))
            parts.append(e.b.select(is_set, with_bit, nibbles))
    v_low, v_high, w_low, w_high = parts
    return transposed(e, [v_low, w_low, v_high, w_high])


def unpack_q5_0(e: Ir, unit: Value) -> Unit:
    scale = pick(e, heads(e, unit, 22), lambda group: group // 2 * 2, NIBBLE_ORDER)
    return Unit(with_fifth_bits(e, unit, 22, 2, 6), scale)


def unpack_q5_1(e: Ir, unit: Value) -> Unit:
    halves = heads(e, unit, 24)
    scale = pick(e, halves, lambda group: group // 2 * 2, NIBBLE_ORDER)
    bias = pick(e, halves, lambda group: group // 2 * 2 + 1, NIBBLE_ORDER)
    return Unit(with_fifth_bits(e, unit, 24, 4, 8), scale, bias)


def unpack_q8_0(e: Ir, unit: Value) -> Unit:
    parts = [e.load(e.at(unit, 34 * k + 2), vec(i8, 32)) for k in range(8)]
    natural = [e.concat(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    unsigned = [e.b.xor(v, e.const(-128, codes)) for v in natural]
    scale = pick(e, heads(e, unit, 34), lambda group: group // 2 * 2, BYTE_ORDER)
    return Unit(transposed(e, unsigned), scale)


Q4_0 = ByteLayout(32, 18, NIBBLE_ORDER, 8, False, unpack_q4_0)
Q4_1 = ByteLayout(32, 20, NIBBLE_ORDER, None, False, unpack_q4_1)
Q5_0 = ByteLayout(32, 22, NIBBLE_ORDER, 16, False, unpack_q5_0)
Q5_1 = ByteLayout(32, 24, NIBBLE_ORDER, None, False, unpack_q5_1)
Q8_0 = ByteLayout(32, 34, BYTE_ORDER, 128, True, unpack_q8_0)


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
