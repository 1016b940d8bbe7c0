"""Panel products on bfloat16 tiles: with the portable twin of the tile product everywhere, and the
instructions that the hardware's kernels compile to, which need not be able to run.

The twin's sums are repeated by NumPy bit for bit: a product of two bfloat16 is exact in float32.
"""

import ctypes
import platform

import numpy as np
import pytest
from levels import LEVELS, run_at
from numpy.typing import NDArray
from test_panels import aligned, assembly, raw_weights

from kernels_cpu.amx import Portable
from kernels_cpu.kernel import kernel
from kernels_cpu.panels_bf16 import tile_panel_product
from kernels_cpu.simd import Ir, Value, emits
from kernels_cpu.unpack import FORMATS

Floats = NDArray[np.float32]
# A scale for 32 and for 16 values, with an offset and with biases, and a table.
NAMES = ("Q8_0", "Q4_K", "Q6_K", "Q2_K", "IQ4_NL")


@pytest.mark.parametrize("level", LEVELS)
def test_tile_products_are_right_and_the_same_in_any_company(level: str) -> None:
    run_at(level, __file__)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AMX is x86")
def test_hardware_kernels_are_tile_instructions() -> None:
    run_at("amx", __file__, "hardware_kernels_are_tile_instructions")


@emits(4)
def _q8_0(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    tile_panel_product(e, args, first, last, scratch, FORMATS["Q8_0"], Portable())


@emits(4)
def _q4_k(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    tile_panel_product(e, args, first, last, scratch, FORMATS["Q4_K"], Portable())


@emits(4)
def _q6_k(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    tile_panel_product(e, args, first, last, scratch, FORMATS["Q6_K"], Portable())


@emits(4)
def _q2_k(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    tile_panel_product(e, args, first, last, scratch, FORMATS["Q2_K"], Portable())


@emits(4)
def _iq4_nl(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    tile_panel_product(e, args, first, last, scratch, FORMATS["IQ4_NL"], Portable())


@kernel
def twin_q8_0(args: int, first: int, last: int, scratch: int) -> None:
    _q8_0(args, first, last, scratch)


@kernel
def twin_q4_k(args: int, first: int, last: int, scratch: int) -> None:
    _q4_k(args, first, last, scratch)


@kernel
def twin_q6_k(args: int, first: int, last: int, scratch: int) -> None:
    _q6_k(args, first, last, scratch)


@kernel
def twin_q2_k(args: int, first: int, last: int, scratch: int) -> None:
    _q2_k(args, first, last, scratch)


@kernel
def twin_iq4_nl(args: int, first: int, last: int, scratch: int) -> None:
    _iq4_nl(args, first, last, scratch)


TWINS = {
    "Q8_0": twin_q8_0,
    "Q4_K": twin_q4_k,
    "Q6_K": twin_q6_k,
    "Q2_K": twin_q2_k,
    "IQ4_NL": twin_iq4_nl,
}


def call(address: int, args: list[int], first: int, last: int, scratch: int) -> None:
    block = np.array(args, np.int64)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(address)
    function(block.ctypes.data, first, last, scratch)


def nearest_bf16(x: Floats) -> Floats:
    bits = x.view(np.uint32) + np.uint32(0x8000)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


class Case:
    def __init__(self, name: str, rows: int, cols: int, tokens: int) -> None:
        rng = np.random.default_rng(cols)
        self.name, self.rows, self.cols, self.tokens = name, rows, cols, tokens
        self.weights = raw_weights(name, rows, cols, rng)
        self.x = aligned((tokens, cols + 16), np.float32)
        self.x[:] = rng.standard_normal(self.x.shape)
        self.tiles = aligned((-(-tokens // 32) * 2, cols // 32, 16, 32), np.uint16)
        self.bias = rng.standard_normal(rows).astype(np.float32)
        self.residual = rng.standard_normal((tokens, rows + 3)).astype(np.float32)
        self.scratch = aligned((4 << 20,), np.uint8)
        self.scratch[:] = 0xFF

    def run(self, begin: int, end: int, out: Floats, *, plain: bool = False) -> None:
        """Pack tokens [begin, end) and multiply them."""
        from kernels_cpu.panels_bf16 import pack_tiles

        limits = np.array([begin, end], np.int64)
        scale = np.array([1.0 if plain else 0.5], np.float32)
        scratch, tile_bytes = self.scratch.ctypes.data, 32 * self.cols
        self.tiles[:] = 0xFFFF
        tiles = self.tiles.ctypes.data
        pack = [self.x.ctypes.data, self.x.shape[1], self.cols, tiles, tile_bytes]
        pack.append(limits.ctypes.data)
        for item in reversed(range(end - begin)):
            call(pack_tiles.address, pack, item, item + 1, scratch)
        args = [
            *(self.weights.ctypes.data, self.weights.shape[1], self.rows, self.cols),
            *(tiles, tile_bytes, 0, 0, 0, out.ctypes.data, out.shape[1]),
            *(0 if plain else self.bias.ctypes.data, 0 if plain else 1),
            *(int(scale.view(np.int32)[0]), limits.ctypes.data, limits.ctypes.data + 8),
        ]
        for tile in range(-(-self.rows // 32)):
            call(TWINS[self.name].address, args, tile, tile + 1, scratch)


def twin(x: Floats, w: Floats) -> Floats:
    """float32 [tokens, rows] of bfloat16 values: what a tile product adds, in its order."""
    total = np.zeros((len(x), len(w)), np.float32)
    for step in range(0, x.shape[1], 32):
        parts = []
        for first in range(2):
            part = np.zeros_like(total)
            for k in range(step + first, step + 32, 2):
                part += x[:, k, None] * w[None, :, k]
            parts.append(part)
        total += parts[0] + parts[1]
    return total


def check_sums() -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    for name in NAMES:
        length = FORMATS[name].block_length
        case = Case(name, rows=45, cols=512 + length, tokens=37)
        weights = dequantize(case.weights, GGMLQuantizationType[name]).astype(np.float32)
        x = nearest_bf16(case.x[:, : case.cols])
        out = np.full((case.tokens, case.rows + 3), np.nan, np.float32)
        case.run(0, case.tokens, out, plain=True)
        assert np.isnan(out[:, case.rows :]).all()
        expected = twin(x, nearest_bf16(weights))
        if FORMATS[name].offset is not None:
            assert np.array_equal(out[:, : case.rows], expected), name
        else:
            # Biases are added with one rounding here and with two by the oracle; near a tie the
            # nearest bfloat16 differs, by one part in 256 of few weights.
            sizes = np.abs(x) @ np.abs(weights).T
            assert (np.abs(out[:, : case.rows] - expected) / sizes).max() < 1e-4, name


def check_chunks() -> None:
    for name in NAMES:
        length = FORMATS[name].block_length
        case = Case(name, rows=40, cols=2 * length, tokens=41)
        whole = case.residual.copy()
        case.run(2, case.tokens, whole)
        plain = np.zeros_like(whole)
        case.run(0, case.tokens, plain, plain=True)
        expected = case.residual.copy()
        expected[2:, : case.rows] += (plain[2:, : case.rows] + case.bias) * np.float32(0.5)
        assert np.allclose(whole, expected, rtol=1e-6, atol=1e-6)
        for size in (1, 7, 16, 33):
            parts = case.residual.copy()
            for first in range(2, case.tokens, size):
                case.run(first, min(first + size, case.tokens), parts)
            assert np.array_equal(parts, whole), f"{name}: chunks of {size} tokens differ"


def hardware_kernels_are_tile_instructions() -> None:
    from kernels_cpu.panels import takes_tiles

    assert takes_tiles("Q4_K")
    assert not takes_tiles("F16")
    code = assembly("Q4_K")
    for instruction in ("ldtilecfg", "tileloadd", "tilestored", "tilerelease"):
        assert f"\t{instruction}" in code, instruction
    # Four to a step, however often LLVM repeats the loop's body; sums stay in registers 0 to 3.
    products = [line.split() for line in code.splitlines() if "tdpbf16ps" in line]
    assert len(products) % 4 == 0
    sums = [f"%tmm{n}" for n in range(4)]
    assert [p[-1] for p in products] == sums * (len(products) // 4)
