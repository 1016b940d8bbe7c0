"""Row products of float weights with the float32 activations: F32 F16 BF16."""

from collections.abc import Callable
from dataclasses import dataclass

from kernels_cpu.kernel import kernel
from kernels_cpu.rows_emitter import (
    LANES,
    Activations,
    Layout,
    emit_row_product,
    floats,
    rows_together,
)
from kernels_cpu.simd import Ir, Value, emits, f32, i16, i32, vec


@dataclass(frozen=True, slots=True)
class FloatStep:
    """64 values, and so many activations in a record, as they come.

    read  float32 of values at an address: of 16, or of one
    """

    value_bytes: int
    read: Callable[[Ir, Value, int], Value]
    values: int = 64
    record_bytes: int = 256

    @property
    def together(self) -> int:
        return rows_together(4)

    @property
    def bytes(self) -> int:
        return self.values * self.value_bytes

    def pack(self, e: Ir, x: Activations, record: Value) -> None:
        for k in range(4):
            e.store(e.load(e.at(x.x, 64 * k), floats), e.at(record, 64 * k), 64)

    def unpack(self, e: Ir, unit: Value, last_block: Value) -> list[Value]:
        return [self.read(e, e.at(unit, LANES * self.value_bytes * k), LANES) for k in range(4)]

    def multiply(self, e: Ir, weights: list[Value], record: Value, total: Value) -> Value:
        x = [e.load(e.at(record, 64 * k), floats, 64) for k in range(4)]
        first = e.fma(weights[1], x[1], e.b.fmul(weights[0], x[0]))
        second = e.fma(weights[3], x[3], e.b.fmul(weights[2], x[2]))
        return e.b.fadd(total, e.b.fadd(first, second))


@dataclass(frozen=True, slots=True)
class SingleStep:
    """One value, in the first lane: what a row has after its last 64."""

    bytes: int
    read: Callable[[Ir, Value, int], Value]
    values: int = 1
    record_bytes: int = 64

    @property
    def together(self) -> int:
        return rows_together(4)

    def pack(self, e: Ir, x: Activations, record: Value) -> None:
        e.store(first_lane(e, e.load(x.x, f32)), record, 64)

    def unpack(self, e: Ir, unit: Value, last_block: Value) -> Value:
        value = self.read(e, unit, 1)
        return first_lane(e, e.b.extract_element(value, e.const(0, i32)))

    def multiply(self, e: Ir, weights: Value, record: Value, total: Value) -> Value:
        return e.fma(weights, e.load(record, floats, 64), total)


def first_lane(e: Ir, value: Value) -> Value:
    return e.b.insert_element(e.const(0.0, floats), value, e.const(0, i32))


def float_layout(size: int, read: Callable[[Ir, Value, int], Value]) -> Layout:
    return Layout(lambda: (FloatStep(size, read), SingleStep(size, read)), (1, size), 4)


def read_f32(e: Ir, address: Value, n: int) -> Value:
    return e.load(address, vec(f32, n))


def read_f16(e: Ir, address: Value, n: int) -> Value:
    return e.half_to_float(e.load(address, vec(i16, n)))


def read_bf16(e: Ir, address: Value, n: int) -> Value:
    return e.bf16_to_float(e.load(address, vec(i16, n)))


F32 = float_layout(4, read_f32)
F16 = float_layout(2, read_f16)
BF16 = float_layout(2, read_bf16)


@emits(4)
def f32_rows(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, F32, args, first, last, scratch)


@emits(4)
def f16_rows(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, F16, args, first, last, scratch)


@emits(4)
def bf16_rows(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    emit_row_product(e, BF16, args, first, last, scratch)


@kernel
def row_product_f32(args: int, first: int, last: int, scratch: int) -> None:
    """Arguments: rows_emitter.Slot. Weights: float32."""
    f32_rows(args, first, last, scratch)


@kernel
def row_product_f16(args: int, first: int, last: int, scratch: int) -> None:
    """Arguments: rows_emitter.Slot. Weights: half floats."""
    f16_rows(args, first, last, scratch)


@kernel
def row_product_bf16(args: int, first: int, last: int, scratch: int) -> None:
    """Arguments: rows_emitter.Slot. Weights: bfloat16."""
    bf16_rows(args, first, last, scratch)
