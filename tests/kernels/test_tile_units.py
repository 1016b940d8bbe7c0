"""Tile products in vectors, whichever unit makes them, against float64."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from levels import LEVELS, run_at
from numpy.typing import NDArray

from kernels_cpu import Kernel
from kernels_cpu.amx import Operands, Portable, TileUnit, Vectors
from kernels_cpu.kernel import has_bf16, kernel
from kernels_cpu.simd import Ir, Value, emits, i64

STEPS = 3
Floats = NDArray[np.float32]


@pytest.mark.parametrize("level", LEVELS)
def test_units_at_level(level: str) -> None:
    run_at(level, __file__)


def product_by(unit: Callable[[], TileUnit]) -> Callable[..., None]:
    def emit(e: Ir, args: Value) -> None:
        left, next_left, right, sums, steps = (e.load(e.at(args, 8 * i), i64, 8) for i in range(5))
        unit().product(e, Operands(left, next_left, right, sums, steps), lambda: None)

    return emit


portable, vectors = (emits(1)(product_by(unit)) for unit in (Portable, Vectors))


@kernel
def multiply_portable(args: int, _first: int, _last: int, _scratch: int) -> None:
    portable(args)


@kernel
def multiply_vectors(args: int, _first: int, _last: int, _scratch: int) -> None:
    vectors(args)


def bfloat16(rng: np.random.Generator, *shape: int) -> Floats:
    bits = rng.standard_normal(shape).astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def aligned(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """A copy on a cache line of its own."""
    memory = np.zeros(values.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[:] = values
    return copy


def halves(values: Floats) -> NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def check_units() -> None:
    rng = np.random.default_rng(3)
    x, w = bfloat16(rng, 32, 32 * STEPS), bfloat16(rng, 32, 32 * STEPS)
    start = rng.standard_normal((32, 32)).astype(np.float32)
    # [tile of tokens][step][token][value] and [step][tile of rows][pair][row][2]
    left = aligned(halves(x.reshape(2, 16, STEPS, 32).swapaxes(1, 2)))
    right = aligned(halves(w.reshape(2, 16, STEPS, 16, 2).transpose(2, 0, 3, 1, 4)))
    expected = start + x.astype(float) @ w.T.astype(float)
    units: list[Kernel] = [multiply_portable]
    if has_bf16():
        units.append(multiply_vectors)
    for unit in units:
        sums = aligned(start)
        pointers = (left.ctypes.data, left[0].nbytes, right.ctypes.data, sums.ctypes.data, STEPS)
        args = np.array(pointers, np.int64)
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(unit.address)(args.ctypes.data, 0, 0, 0)
        # float32 sums of 96 products of size 1.
        np.testing.assert_allclose(sums, expected, rtol=0, atol=2e-5)
