"""Row products of float weights with the float32 activations: F32 F16 BF16."""

from collections.abc import Callable
from dataclasses import dataclass

from kernels_cpu.kernel import kernel
from kernels_cpu.rows_emitter import LANES, Activations, emit_row_product, floats
from kernels_cpu.simd import Ir, Value, emits, i16, vec


@dataclass(frozen=True, slots=True)
class FloatLayout:
    """A unit is 64 values, and so is a record: float32, as they come.

    read  float32 [16] of 16 values at an address
    """

    block_bytes: int
    read: Callable[[Ir, Value], Value]
    block_values: int = 1
    unit_values: int = 64
    record_bytes: int = 256

    @property
    def unit_bytes(self) -> int:
        return self.unit_values * self.block_bytes

    def pack(self, e: Ir, x: Activations, record: Value) -> None:
        for k in range(4):
            e.store(e.load(e.at(x.x, 64 * k), floats), e.at(record, 64 * k), 64)

    def unpack(self, e: Ir, unit: Value) -> list[Value]:
        return [self.read(e, e.at(unit, LANES * self.block_bytes * k)) for k in range(4)]

    def multiply(self, e: Ir, weights: list[Value], record: Value, total: Value) -> Value:
        x = [e.load(e.at(record, 64 * k), floats, 64) for k in range(4)]
        first = e.fma(weights[1], x[1], e.b.fmul(weights[0], x[0]))
        second = e.fma(weights[3], x[3], e.b.fmul(weights[2], x[2]))
        return e.b.fadd(total, e.b.fadd(first, second))


def read_f32(e: Ir, address: Value) -> Value:
    return e.load(address, floats)


def read_f16(e: Ir, address: Value) -> Value:
    return e.half_to_float(e.load(address, vec(i16, LANES)))


def read_bf16(e: Ir, address: Value) -> Value:
    return e.bf16_to_float(e.load(address, vec(i16, LANES)))


F32 = FloatLayout(4, read_f32)
F16 = FloatLayout(2, read_f16)
BF16 = FloatLayout(2, read_bf16)


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
