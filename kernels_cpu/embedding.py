"""Rows of raw weights as float32: token embeddings, and the slow way to any weight's values.

`EMBEDDINGS` has a kernel for each type; all have the same argument block and items (a row):

    0 ids          int32 [items] row of each item, or 0: item i is row i
    1 table        address of row 0's raw GGUF blocks
    2 row bytes
    3 cols         a multiple of the type's block length
    4 out          float32 [items][stride]
    5 out stride   in floats
    6 scale        float32 bits; multiplies the values

Values are exactly those of the format's reference, rounded once more by the product with the scale.
"""

from numba import njit

from kernels_cpu.blocks import (
    block_iq4_nl,
    block_iq4_xs,
    block_mxfp4,
    block_q2_k,
    block_q3_k,
    block_q4_0,
    block_q4_1,
    block_q4_k,
    block_q5_0,
    block_q5_1,
    block_q5_k,
    block_q6_k,
    block_q8_0,
)
from kernels_cpu.kernel import Kernel, kernel
from kernels_cpu.simd import Ir, Value, emits, f32, i16, slot, vec
from kernels_cpu.vector_math import floats, for_lanes, int32_at, put_floats


@njit
def source_of(args: int, item: int) -> int:
    """Address of an item's raw row."""
    row = item if slot(args, 0) == 0 else int32_at(slot(args, 0), item)
    return slot(args, 1) + row * slot(args, 2)


@njit
def target_of(args: int, item: int) -> int:
    return slot(args, 4) + 4 * item * slot(args, 5)


@emits(3)
def scale_row(e: Ir, args: Value, count: Value, out: Value) -> None:
    """out *= the scale of the argument block."""
    scale = e.load(e.at(args, 48), f32, 4)

    def body(i: Value, n: int) -> None:
        put_floats(e, e.b.fmul(floats(e, out, i, n), e.splat(scale, n)), out, i)

    for_lanes(e, count, body)


@emits(3)
def copy_f32(e: Ir, source: Value, count: Value, out: Value) -> None:
    for_lanes(e, count, lambda i, n: put_floats(e, floats(e, source, i, n), out, i))


@emits(3)
def copy_f16(e: Ir, source: Value, count: Value, out: Value) -> None:
    def body(i: Value, n: int) -> None:
        bits = e.load(e.at(source, e.mul(i, 2)), vec(i16, n), 1)
        put_floats(e, e.half_to_float(bits), out, i)

    for_lanes(e, count, body)


@emits(3)
def copy_bf16(e: Ir, source: Value, count: Value, out: Value) -> None:
    def body(i: Value, n: int) -> None:
        bits = e.load(e.at(source, e.mul(i, 2)), vec(i16, n), 1)
        put_floats(e, e.bf16_to_float(bits), out, i)

    for_lanes(e, count, body)


@kernel
def embed_f32(args: int, first: int, last: int, scratch: int) -> None:
    for item in range(first, last):
        out = target_of(args, item)
        copy_f32(source_of(args, item), slot(args, 3), out)
        scale_row(args, slot(args, 3), out)


@kernel
def embed_f16(args: int, first: int, last: int, scratch: int) -> None:
    for item in range(first, last):
        out = target_of(args, item)
        copy_f16(source_of(args, item), slot(args, 3), out)
        scale_row(args, slot(args, 3), out)


@kernel
def embed_bf16(args: int, first: int, last: int, scratch: int) -> None:
    for item in range(first, last):
        out = target_of(args, item)
        copy_bf16(source_of(args, item), slot(args, 3), out)
        scale_row(args, slot(args, 3), out)


@kernel
def embed_q4_0(args: int, first: int, last: int, scratch: int) -> None:
    for item in range(first, last):
        source, out = source_of(args, item), target_of(args, item)
        for i in range(slot(args, 3) >> 5):
            block_q4_0(source + 18 * i, out + 128 * i)
        scale_row(args, slot(args, 3), out)


@kernel
def embed_q4_1(args: int, first: int, last: int, scratch: int) -> None:
    for item in range(first, last):
        source, out = source_of(args, item), target_of(args, item)
        for i in range(slot(args, 3) >> 5):
            block_q4_1(source + 20 * i, out + 128 * i)
        scale_row(args, slot(args, 3), out)


@kernel
def embed_q5_0(args: int, first: int, last: int, scratch: int) -> None:
    for item in range(first, last):
        source, out = source_of(args, item), target_of(args, item)
        for i in range(slot(args, 3) >> 5):
            block_q5_0(source + 22 * i, out + 128 * i)
        scale_row(args, slot(args, 3), out)


@kernel
def embed_q5_1(args: int, first: int, last: int, scratch: int) -> None:
    for item in range(first, last):
        source, out = source_of(args, item), target_of(args, item)
        for i in range(slot(args, 3) >> 5):
            block_q5_1(source + 24 * i, out + 128 * i)
        scale_row(args, slot(args, 3), out)


@kernel
def embed_q8_0(args: int, first: int, last: int, scratch: int) -> None:
    for item in range(first, last):
        source, out = source_of(args, item), target_of(args, item)
        for i in range(slot(args, 3) >> 5):
            block_q8_0(source + 34 * i, out + 128 * i)
        scale_row(args, slot(args, 3), out)


@kernel
def embed_q2_k(args: int, first: int, last: int, scratch: int) -> None:
    for item in range(first, last):
        source, out = source_of(args, item), target_of(args, item)
        for i in range(slot(args, 3) >> 8):
            block_q2_k(source + 84 * i, out + 1024 * i)
        scale_row(args, slot(args, 3), out)


@kernel
def embed_q3_k(args: int, first: int, last: int, scratch: int) -> None:
    for item in range(first, last):
        source, out = source_of(args, item), target_of(args, item)
        for i in range(slot(args, 3) >> 8):
            block_q3_k(source + 110 * i, out + 1024 * i)
        scale_row(args, slot(args, 3), out)


@kernel
def embed_q4_k(args: int, first: int, last: int, scratch: int) -> None:
    for item in range(first, last):
        source, out = source_of(args, item), target_of(args, item)
        for i in range(slot(args, 3) >> 8):
            block_q4_k(source + 144 * i, out + 1024 * i)
        scale_row(args, slot(args, 3), out)


@kernel
def embed_q5_k(args: int, first: int, last: int, scratch: int) -> None:
    for item in range(first, last):
        source, out = source_of(args, item), target_of(args, item)
        for i in range(slot(args, 3) >> 8):
            block_q5_k(source + 176 * i, out + 1024 * i)
        scale_row(args, slot(args, 3), out)


@kernel
def embed_q6_k(args: int, first: int, last: int, scratch: int) -> None:
    for item in range(first, last):
        source, out = source_of(args, item), target_of(args, item)
        for i in range(slot(args, 3) >> 8):
            block_q6_k(source + 210 * i, out + 1024 * i)
        scale_row(args, slot(args, 3), out)


@kernel
def embed_iq4_nl(args: int, first: int, last: int, scratch: int) -> None:
    for item in range(first, last):
        source, out = source_of(args, item), target_of(args, item)
        for i in range(slot(args, 3) >> 5):
            block_iq4_nl(source + 18 * i, out + 128 * i)
        scale_row(args, slot(args, 3), out)


@kernel
def embed_iq4_xs(args: int, first: int, last: int, scratch: int) -> None:
    for item in range(first, last):
        source, out = source_of(args, item), target_of(args, item)
        for i in range(slot(args, 3) >> 8):
            block_iq4_xs(source + 136 * i, out + 1024 * i)
        scale_row(args, slot(args, 3), out)


@kernel
def embed_mxfp4(args: int, first: int, last: int, scratch: int) -> None:
    for item in range(first, last):
        source, out = source_of(args, item), target_of(args, item)
        for i in range(slot(args, 3) >> 5):
            block_mxfp4(source + 17 * i, out + 128 * i)
        scale_row(args, slot(args, 3), out)


EMBEDDINGS: dict[str, Kernel] = {
    "F32": embed_f32,
    "F16": embed_f16,
    "BF16": embed_bf16,
    "Q4_0": embed_q4_0,
    "Q4_1": embed_q4_1,
    "Q5_0": embed_q5_0,
    "Q5_1": embed_q5_1,
    "Q8_0": embed_q8_0,
    "Q2_K": embed_q2_k,
    "Q3_K": embed_q3_k,
    "Q4_K": embed_q4_k,
    "Q5_K": embed_q5_k,
    "Q6_K": embed_q6_k,
    "IQ4_NL": embed_iq4_nl,
    "IQ4_XS": embed_iq4_xs,
    "MXFP4": embed_mxfp4,
}


@kernel
def gather_rows(args: int, first: int, last: int, scratch: int) -> None:
    """out[i] = x[rows[i]]; an item is a row.

    0 rows         int32 [R]
    1 x            float32 [T][stride]
    2 x stride     in floats
    3 width
    4 out          float32 [R][stride]
    5 out stride   in floats
    """
    for item in range(first, last):
        source = slot(args, 1) + 4 * int32_at(slot(args, 0), item) * slot(args, 2)
        copy_f32(source, slot(args, 3), target_of(args, item))
