"""The type table and the plain way back to float32."""

import gguf
import numpy as np
import pytest

from localllm.errors import UnsupportedModel
from localllm.quants import BY_ID, BY_NAME, TYPES, dequantize

# gguf 0.19 has the old size of Q8_1 and does not know Q2_0.
GGUF_SIZES = {
    kind: size for kind, size in gguf.GGML_QUANT_SIZES.items() if kind.name not in ("Q8_1", "Q2_0")
}


def test_table_agrees_with_the_gguf_package() -> None:
    for kind, (block_length, block_bytes) in GGUF_SIZES.items():
        ours = BY_ID[kind.value]
        assert (ours.name, ours.block_length, ours.block_bytes) == (
            kind.name,
            block_length,
            block_bytes,
        )
    assert len(BY_ID) == len(BY_NAME) == len(TYPES)


@pytest.mark.parametrize("removed", [4, 5, 31, 32, 33, 36, 37, 38, 43])
def test_removed_and_future_types_are_absent(removed: int) -> None:
    assert removed not in BY_ID


def test_q1_0_block_by_hand() -> None:
    d = np.array([0.5], "<f2").view(np.uint8)
    codes = np.zeros(16, np.uint8)
    codes[0] = 0b0000_0101
    codes[15] = 0b1000_0000
    values = dequantize(BY_NAME["Q1_0"], np.concatenate([d, codes])[None])[0]
    wanted = np.full(128, -0.5, np.float32)
    wanted[[0, 2, 127]] = 0.5
    assert np.array_equal(values, wanted)


def test_q2_0_block_by_hand() -> None:
    d = np.array([2.0], "<f2").view(np.uint8)
    codes = np.full(16, 0b01_01_01_01, np.uint8)
    codes[0] = 0b11_10_01_00
    values = dequantize(BY_NAME["Q2_0"], np.concatenate([d, codes])[None])[0]
    assert values.shape == (64,)
    assert values[:4].tolist() == [-2.0, 0.0, 2.0, 4.0]
    assert not values[4:].any()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "BF16", "F16"])
def test_dequantise_gives_back_the_rows_of_the_gguf_package(name: str) -> None:
    values = np.random.default_rng(3).standard_normal((5, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[name]
    raw = gguf.quants.quantize(values, kind).view(np.uint8)
    found = dequantize(BY_NAME[name], raw)
    assert found.dtype == np.float32
    assert np.array_equal(found, gguf.quants.dequantize(raw, kind).reshape(5, 64))


def test_every_weight_type_has_a_way_back() -> None:
    rng = np.random.default_rng(4)
    for kind in TYPES:
        if kind.name in ("Q8_1", "Q8_K"):
            with pytest.raises(UnsupportedModel, match=kind.name):
                dequantize(kind, np.zeros((1, kind.block_bytes), np.uint8))
            continue
        # Small bytes: a random float16 scale may be infinite.
        raw = rng.integers(0, 60, (3, 2 * kind.block_bytes), dtype=np.uint8)
        assert dequantize(kind, raw).shape == (3, 2 * kind.block_length)
