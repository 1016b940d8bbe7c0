"""Row products against float64 over dequantised weights and the same quantised activations.

Defends sameness: a token's bits depend neither on the tokens beside it nor on how the rows are
dealt out. Every tensor here ends where memory ends, so that one byte too far is a crash.
"""

import ctypes
import mmap

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from levels import LEVELS, run_at
from numpy.typing import NDArray

# Where a block has half floats, which must be finite.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
FLOATS = {"F32": "<f4", "F16": "<f2"}
USUAL = ("Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "BF16")
"""One of each way to unpack."""
ROWS, TOKENS = 37, 19
# Of float32 sums, relative to the sum of the sizes of their terms; sums of integers are exact.
TOLERANCE = 3e-7
# Below the normal numbers float32 is coarse.
SMALLEST = 1e-37

Bytes = NDArray[np.uint8]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]


CHECKS = "check_usual_types", "check_epilogue", "check_extreme_codes", "check_reading"


@pytest.mark.parametrize("level", LEVELS)
def test_row_products_are_right_and_the_same_in_any_company(level: str) -> None:
    run_at(level, __file__, *CHECKS)


@pytest.mark.parametrize(
    "level", [LEVELS[0], *(pytest.param(level, marks=pytest.mark.slow) for level in LEVELS[1:])]
)
def test_row_products_of_rarer_types_too(level: str) -> None:
    run_at(level, __file__, "check_rarer_types")


def at_the_end_of_memory(data: Bytes) -> Bytes:
    """A copy whose last byte is the last one before a page that may not be read."""
    size = -(-data.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(whole.ctypes.data + size), mmap.PAGESIZE, 0) == 0
    copy = whole[size - data.nbytes : size].reshape(data.shape)
    copy[...] = data
    return copy


def some_halves(shape: tuple[int, ...], rng: np.random.Generator) -> Bytes:
    """Mostly usual scales; some are zero, subnormal or as large as they get."""
    values = rng.standard_normal(shape) * 0.01
    extreme = rng.choice([0.0, 6e-8, -3e-5, 65504.0, -65504.0], shape)
    values = np.where(rng.random(shape) < 0.02, extreme, values)
    return values.astype("<f2")[..., None].view(np.uint8)


def some_weights(name: str, rows: int, cols: int, rng: np.random.Generator) -> Bytes:
    if name in FLOATS:
        values = rng.standard_normal((rows, cols)).astype(FLOATS[name])
        return at_the_end_of_memory(values.view(np.uint8))
    if name == "BF16":
        wide = rng.standard_normal((rows, cols)).astype("<f4").view("<u4")
        return at_the_end_of_memory((wide >> 16).astype("<u2").view(np.uint8))
    length, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = rng.integers(0, 256, (rows, cols // length, size), dtype=np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = rng.choice([0, 1, 2, 100, 127, 128, 130, 150, 180], blocks.shape[:2])
    for offset in HALVES.get(name, ()):
        blocks[..., offset : offset + 2] = some_halves(blocks.shape[:2], rng)
    return at_the_end_of_memory(blocks.reshape(rows, -1))


class Inputs:
    """Activations of TOKENS tokens, quantised in the ROW layout, and their exact values."""

    def __init__(self, cols: int, rng: np.random.Generator) -> None:
        padded = -(-cols // 64) * 64
        self.cols = cols
        self.x = np.zeros((TOKENS, padded), np.float32)
        sizes = rng.choice([1e-3, 1.0, 30.0], (TOKENS, padded // 16))
        self.x[:, :cols] = rng.standard_normal((TOKENS, cols)) * sizes.repeat(16, 1)[:, :cols]
        self.x[3, : min(16, cols)] = 0
        groups = self.x.reshape(TOKENS, -1, 16)
        scale = np.abs(groups).max(2) / np.float32(127)
        q = np.rint(groups / np.where(scale > 0, scale, 1)[..., None])
        self.q = q.astype(np.int8).reshape(TOKENS, padded)
        self.scale = scale.repeat(4, 1)
        self.sum = (scale * q.sum(2)).astype(np.float32)
        self.values = (q.astype(np.float64) * scale[..., None]).reshape(TOKENS, padded)[:, :cols]


def exact_weights(name: str, raw: Bytes) -> Float64s:
    kind = GGMLQuantizationType[name]
    return dequantize(np.array(raw), kind).astype(np.float64)


class Product:
    """One product whose kernel can be run over any tokens and any dealing of its rows."""

    def __init__(self, name: str, raw: Bytes, inputs: Inputs) -> None:
        from kernels_cpu.rows import ROW_PRODUCTS

        signature = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
        self.kernel = signature(ROW_PRODUCTS[name].address)
        self.name, self.raw, self.inputs = name, raw, inputs
        self.is_float = name in FLOATS or name == "BF16"
        # Scratch is never clean.
        memory = np.full((4 << 20) + 64, 0xFF, np.uint8)
        self.scratch = memory[-memory.ctypes.data % 64 :]

    def run(self, first: int, count: int, *, items: int = 2, **epilogue: object) -> Float32s:
        """float32 [TOKENS, ROWS] with the first `count` rows set, of tokens from `first` on."""
        from kernels_cpu.rows import num_items, row_arguments

        rows, x = len(self.raw), self.inputs
        codes = x.x if self.is_float else x.q
        number = np.array([count])
        out = np.full((TOKENS, rows + 5), np.nan, np.float32)
        block = row_arguments(
            weights=self.raw.ctypes.data,
            row_bytes=self.raw.shape[1],
            rows=rows,
            cols=x.cols,
            count=number.ctypes.data,
            x=(codes[first:].ctypes.data, codes.shape[1]),
            x_scale=(x.scale[first:].ctypes.data, x.scale.shape[1]),
            x_sum=(x.sum[first:].ctypes.data, x.sum.shape[1]),
            out=(out.ctypes.data, rows + 5),
            **epilogue,
        )
        total = num_items(rows)
        for item in range(0, total, items):
            last = min(total, item + items)
            self.kernel(block.ctypes.data, item, last, self.scratch.ctypes.data)
        assert np.isnan(out[:, rows:]).all()
        assert np.isnan(out[count:]).all()
        return out[:, :rows]

    def exact(self) -> tuple[Float64s, Float64s]:
        """The product, and the sum of the sizes of its terms."""
        x = self.inputs.x[:, : self.inputs.cols] if self.is_float else self.inputs.values
        x, w = x.astype(np.float64), exact_weights(self.name, self.raw)
        return x @ w.T, np.abs(x) @ np.abs(w.T)


def column_counts(name: str) -> list[int]:
    """Whole units and every kind of rest."""
    if name in (*FLOATS, "BF16"):
        return [1, 7, 64, 100, 640]
    length, _ = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    return [256, 1024, 2560] if length == 256 else [32, 64, 96, 480, 576, 2560]


def some_product(name: str, cols: int) -> Product:
    rng = np.random.default_rng([cols, *name.encode()])
    return Product(name, some_weights(name, ROWS, cols, rng), Inputs(cols, rng))


def check_usual_types() -> None:
    for name in USUAL:
        check_type(name)


def check_rarer_types() -> None:
    from kernels_cpu.rows import ROW_PRODUCTS

    for name in ROW_PRODUCTS:
        if name not in USUAL:
            check_type(name)


def check_type(name: str) -> None:
    for cols in column_counts(name):
        product = some_product(name, cols)
        expected, size = product.exact()
        error = np.abs(product.run(0, TOKENS) - expected)
        assert (error <= TOLERANCE * size + SMALLEST).all(), (name, cols)
    # Of several chunks of columns for many tokens, of one for one token.
    check_a_token_is_the_same_in_any_bundle(some_product(name, column_counts(name)[-1]))
    check_dealing_out_changes_nothing(some_product(name, column_counts(name)[-2]))


def check_a_token_is_the_same_in_any_bundle(product: Product) -> None:
    together = product.run(0, TOKENS)
    for count in (0, *range(1, 9), 13, 16, 17):
        some = product.run(0, count)[:count]
        assert np.array_equal(some, together[:count]), (product.name, count)
    for token in (5, TOKENS - 1):
        assert np.array_equal(product.run(token, 1)[0], together[token]), (product.name, token)


def check_dealing_out_changes_nothing(product: Product) -> None:
    for count in (1, 7):
        whole = product.run(0, count, items=9)[:count]
        assert np.array_equal(product.run(0, count, items=1)[:count], whole), product.name


def check_epilogue() -> None:
    product = some_product("Q4_1", 576)
    rng = np.random.default_rng(1)
    bias = rng.standard_normal(ROWS).astype(np.float32)
    residual = rng.standard_normal((TOKENS, ROWS + 2)).astype(np.float32)
    plain = product.run(0, TOKENS).astype(np.float64)
    result = product.run(
        0,
        TOKENS,
        bias=bias.ctypes.data,
        residual=(residual.ctypes.data, ROWS + 2),
        scale=-2.5,
    )
    expected = residual[:, :ROWS] - 2.5 * (plain + bias)
    size = np.abs(residual[:, :ROWS]) + 2.5 * (np.abs(plain) + np.abs(bias))
    # Two roundings of float32.
    assert (np.abs(result - expected) <= 2**-23 * size).all()


def check_reading() -> None:
    from kernels_cpu.rows import num_items, read_bandwidth, row_arguments

    raw = some_weights("Q4_1", ROWS, 576, np.random.default_rng(3))
    block = row_arguments(
        weights=raw.ctypes.data,
        row_bytes=raw.shape[1],
        rows=ROWS,
        cols=576,
        count=0,
        x=(0, 0),
        out=(0, 0),
    )
    scratch = np.zeros(1024, np.uint8)
    read = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(read_bandwidth.address)
    read(block.ctypes.data, 0, num_items(ROWS), scratch.ctypes.data + -scratch.ctypes.data % 64)
    # What it read ends up in the sums, so the loads are not optimised away.
    assert scratch.any()


def check_extreme_codes() -> None:
    for name, codes in (("Q8_0", 0x7F), ("Q8_0", 0x80), ("Q6_K", 0xFF), ("Q6_K", 0), ("Q4_K", 255)):
        rng = np.random.default_rng(2)
        raw = some_weights(name, ROWS, 512, rng)
        length, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
        blocks = raw.reshape(ROWS, 512 // length, size)
        blocks[...] = codes
        for offset in HALVES[name]:
            blocks[..., offset : offset + 2] = np.array([0.5], "<f2").view(np.uint8)
        inputs = Inputs(512, rng)
        inputs.q[...] = np.where(np.arange(512) % 3 == 0, 127, -127 * (np.arange(512) % 2 * 2 - 1))
        inputs.sum = (inputs.scale[:, ::4] * inputs.q.reshape(TOKENS, -1, 16).sum(2)).astype("f4")
        inputs.values = inputs.q.astype(np.float64) * inputs.scale.repeat(4, 1)
        product = Product(name, raw, inputs)
        expected, total = product.exact()
        error = np.abs(product.run(0, TOKENS) - expected)
        assert (error <= TOLERANCE * total).all(), (name, codes)
