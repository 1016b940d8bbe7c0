"""Panel products against float64 over dequantised weights and the same quantised activations.

Defends sameness: a token's bits depend neither on the tokens beside it nor on its place.
"""

import ctypes
import mmap

import numpy as np
import pytest
from levels import LEVELS, run_at
from numpy.typing import NDArray

# Where a block has half floats, which must be sensible numbers: (offset, lowest, highest).
HALVES = {
    "Q4_0": [(0, -0.01, 0.01)],
    "Q4_1": [(0, 0.001, 0.01), (2, -0.05, 0.0)],
    "Q5_0": [(0, -0.01, 0.01)],
    "Q5_1": [(0, 0.001, 0.01), (2, -0.05, 0.0)],
    "Q8_0": [(0, -0.01, 0.01)],
    "Q2_K": [(80, 0.001, 0.01), (82, 0.001, 0.01)],
    "Q3_K": [(108, -0.01, 0.01)],
    "Q4_K": [(0, 0.001, 0.01), (2, 0.001, 0.01)],
    "Q5_K": [(0, 0.001, 0.01), (2, 0.001, 0.01)],
    "Q6_K": [(208, -0.01, 0.01)],
    "IQ4_NL": [(0, -0.01, 0.01)],
    "IQ4_XS": [(0, -0.01, 0.01)],
}
Array = NDArray[np.generic]


@pytest.mark.parametrize("level", LEVELS)
def test_products_are_right_and_the_same_in_any_company(level: str) -> None:
    run_at(level, __file__)


def aligned(shape: tuple[int, ...], dtype: type) -> Array:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = np.zeros(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)


def before_forbidden_page(data: Array) -> Array:
    """A copy whose last byte is the last one before a page that may not be read."""
    page = mmap.PAGESIZE
    size = -(-data.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    whole = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(whole.ctypes.data + size), page, 0) == 0
    copy = whole[size - data.nbytes : size].reshape(data.shape)
    copy[...] = data
    return copy


def block_length(name: str) -> int:
    """Columns are a multiple of it (F32, F16, BF16: of anything, here not of a cache line)."""
    from kernels_cpu.unpack import FORMATS

    return FORMATS[name].block_length if name in FORMATS else 19


def raw_weights(name: str, rows: int, cols: int, rng: np.random.Generator) -> Array:
    from kernels_cpu.unpack import FORMATS

    if name not in FORMATS:
        return before_forbidden_page(float_weights(name, rows, cols, rng))
    f = FORMATS[name]
    blocks = rng.integers(0, 256, (rows, cols // f.block_length, f.block_bytes), dtype=np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = rng.integers(118, 126, blocks.shape[:2])
        blocks[0, 0, 0], blocks[1, 0, 0] = 0, 1
    for offset, low, high in HALVES.get(name, []):
        values = rng.uniform(low, high, blocks.shape[:2]).astype("<f2")
        blocks[:, :, offset : offset + 2] = values[..., None].view(np.uint8)
    return before_forbidden_page(blocks.reshape(rows, -1))


def float_weights(name: str, rows: int, cols: int, rng: np.random.Generator) -> Array:
    values = (rng.standard_normal((rows, cols)) * 0.1).astype(np.float32)
    if name == "F16":
        return values.astype("<f2").view(np.uint8)
    if name == "BF16":
        return np.ascontiguousarray(values.view("<u2")[:, 1::2]).view(np.uint8)
    return values.view(np.uint8)


class FloatInputs:
    """float32 activations; what only quantised ones have is empty."""

    def __init__(self, tokens: int, cols: int, rng: np.random.Generator) -> None:
        self.values = aligned((tokens, -(-cols // 16) * 16), np.float32)
        self.values[:, :cols] = rng.standard_normal((tokens, cols))
        self.scales = self.sums = aligned((tokens, 1), np.float32)
        self.exact = self.values[:, :cols].astype(np.float64)


class Inputs:
    """Quantised activations of `tokens` tokens, and the same as float64."""

    def __init__(self, tokens: int, cols: int, rng: np.random.Generator) -> None:
        padded = -(-cols // 64) * 64
        x = np.zeros((tokens, padded), np.float32)
        x[:, :cols] = rng.standard_normal((tokens, cols)) * rng.uniform(0.1, 9.0, (tokens, 1))
        x[0, :16] = 0
        groups = x.reshape(tokens, -1, 16)
        largest = np.abs(groups).max(2)
        self.scales = aligned(largest.shape, np.float32)
        self.scales[...] = largest / np.float32(127)
        inverse = np.where(largest > 0, np.float32(127) / np.where(largest > 0, largest, 1), 0)
        self.values = aligned(x.shape, np.int8)
        self.values[...] = np.rint(groups * inverse[..., None]).reshape(x.shape)
        integers = self.values.reshape(groups.shape)
        self.sums = aligned(largest.shape, np.float32)
        self.sums[...] = self.scales * integers.sum(2, dtype=np.int32)
        exact = integers * self.scales[..., None].astype(np.float64)
        self.exact = exact.reshape(tokens, padded)[:, :cols]


class Product:
    """One call's operands; `run` computes tokens [begin, end) in tiles [first, last)."""

    def __init__(self, name: str, rows: int, cols: int, tokens: int, seed: int) -> None:
        from kernels_cpu.panels import PANEL_PRODUCTS, ROWS_PER_TILE
        from kernels_cpu.panels_float import FLOAT_FORMATS

        inputs = FloatInputs if name in FLOAT_FORMATS else Inputs
        rng = np.random.default_rng(seed)
        self.rows, self.cols, self.tokens = rows, cols, tokens
        self.tiles = -(-rows // ROWS_PER_TILE)
        self.weights = raw_weights(name, rows, cols, rng)
        self.inputs = inputs(tokens, cols, rng)
        self.bias = rng.standard_normal(rows).astype(np.float32)
        self.residual = rng.standard_normal((tokens, rows + 3)).astype(np.float32)
        self.scratch = aligned((4 << 20,), np.uint8)
        self.kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(PANEL_PRODUCTS[name].address)

    def run(self, begin: int, end: int, out: Array, *, plain: bool = False) -> None:
        x = self.inputs
        limits = np.array([begin, end], np.int64)
        scale = np.array([1.0 if plain else 0.5], np.float32)
        args = np.array(
            [
                *(self.weights.ctypes.data, self.weights.shape[1], self.rows, self.cols),
                *(x.values.ctypes.data, x.values.strides[0], x.scales.ctypes.data),
                *(x.sums.ctypes.data, x.scales.shape[1], out.ctypes.data, out.shape[1]),
                *(0 if plain else self.bias.ctypes.data, 0 if plain else 1),
                *(int(scale.view(np.int32)[0]), limits.ctypes.data, limits.ctypes.data + 8),
            ],
            np.int64,
        )
        for tile in reversed(range(self.tiles)):
            self.kernel(args.ctypes.data, tile, tile + 1, self.scratch.ctypes.data)


def check(name: str, rows: int, cols: int, tokens: int) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    product = Product(name, rows, cols, tokens, seed=cols)
    weights = dequantize(product.weights, GGMLQuantizationType[name]).astype(np.float64)
    exact = product.inputs.exact @ weights.T
    sizes = np.abs(product.inputs.exact) @ np.abs(weights).T
    out = np.full((tokens, rows + 3), np.nan, np.float32)
    product.run(0, tokens, out, plain=True)
    # float32 sums; codes with an offset cancel against the sum of the activations.
    error = np.abs(out[:, :rows] - exact) / sizes
    assert error.max() < 2e-6, (name, cols, error.max())
    assert np.isnan(out[:, rows:]).all(), "wrote beyond the rows"

    begin = 2
    whole = product.residual.copy()
    product.run(begin, tokens, whole)
    expected = product.residual.astype(np.float64)
    expected[begin:, :rows] += 0.5 * (exact + product.bias)[begin:]
    assert np.allclose(whole, expected, rtol=0, atol=2e-6 * sizes.max()), name
    assert (whole[:begin] == product.residual[:begin]).all(), "wrote before the first token"
    assert (whole[:, rows:] == product.residual[:, rows:]).all()
    for size in (1, 2, 3, 5):
        parts = product.residual.copy()
        for first in range(begin, tokens, size):
            product.run(first, min(first + size, tokens), parts)
        assert np.array_equal(parts, whole), f"{name}: chunks of {size} tokens differ"
    product.run(tokens, tokens, whole)


def check_products() -> None:
    from kernels_cpu.panels import PANEL_PRODUCTS

    for name in PANEL_PRODUCTS:
        length = block_length(name)
        for cols in (length, 1024 + length, 3 * length):
            check(name, rows=77, cols=cols, tokens=11)
        check(name, rows=5, cols=2 * length, tokens=3)


def assembly(name: str) -> str:
    """Of a fresh compilation: Numba keeps none with what it finds on disk."""
    from numba import cfunc

    from kernels_cpu.kernel import SIGNATURE
    from kernels_cpu.panels import PANEL_PRODUCTS

    code: str = cfunc(SIGNATURE)(PANEL_PRODUCTS[name].function)._library.get_asm_str()
    return code


def check_no_wide_registers_below_avx512() -> None:
    from kernels_cpu.kernel import isa

    if isa() in ("avxvnni", "avx2"):
        for name in ("Q4_K", "Q8_0", "F16"):
            code = assembly(name)
            assert "ymm" in code, name
            assert "zmm" not in code, name
