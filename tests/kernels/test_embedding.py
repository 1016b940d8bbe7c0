"""Rows of every weight type come out as the format's reference has them."""

import gguf
import numpy as np
import pytest
from forms_case import float_bits, run_kernel
from levels import LEVELS, run_at

from kernels_cpu.embedding import EMBEDDINGS, gather_rows

COLS = 512


def check_rows_equal_the_reference() -> None:
    rng = np.random.default_rng(5)
    ids = np.array([3, 0, 3, 6, 1], np.int32)
    for name, kernel in EMBEDDINGS.items():
        kind = gguf.GGMLQuantizationType[name]
        length, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        # Any bytes are a block; infinite scales included.
        raw = rng.integers(0, 256, (7, COLS // length * num_bytes), np.uint8)
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(raw, kind).astype(np.float32)
            values = values.reshape(7, COLS) * np.float32(0.7)
        for chosen in (ids, None):
            rows = np.arange(5) if chosen is None else chosen
            out = np.full((5, COLS + 16), 77, np.float32)
            address = 0 if chosen is None else chosen.ctypes.data
            table = [raw.ctypes.data, raw.shape[1], COLS, out.ctypes.data, COLS + 16]
            run_kernel(kernel, [address, *table, float_bits(0.7)], 0, 2)
            run_kernel(kernel, [address, *table, float_bits(0.7)], 2, 5)
            np.testing.assert_array_equal(out[:, :COLS], values[rows], name)
            assert (out[:, COLS:] == 77).all()


def check_rows_are_gathered() -> None:
    x = np.arange(4 * 48, dtype=np.float32).reshape(4, 48)
    rows = np.array([3, 0, 2], np.int32)
    out = np.zeros((3, 64), np.float32)
    args = [rows.ctypes.data, x.ctypes.data, 48, 41, out.ctypes.data, 64]
    run_kernel(gather_rows, args, 0, 3)
    np.testing.assert_array_equal(out[:, :41], x[rows, :41])
    assert (out[:, 41:] == 0).all()


# The kernels are plain loops; what differs between levels is seen at both ends.
MIDDLE = [pytest.param(level, marks=pytest.mark.slow) for level in LEVELS[1:-1]]


@pytest.mark.parametrize("level", [LEVELS[0], *MIDDLE, LEVELS[-1]])
def test_rows_equal_the_reference(level: str) -> None:
    run_at(level, __file__)
