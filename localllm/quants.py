"""Tensor types: one table row per type of the GGUF format, and the plain way back to float32.

Promises: `BY_ID` holds every type that llama.cpp b11434 writes into files or accepts from them;
ids that were removed from the format or are still unknown are absent, so a lookup is also the
check. `dequantize` is exact: the same bits as the C reference for every type it takes.

Not here: fast products on raw blocks (kernels_cpu), files (gguf.py).
Source: ggml.h `enum ggml_type`, ggml-common.h for the block layouts, and the `gguf` package's
`gguf.quants`, which is imported when first needed because that costs a tenth of a second.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localllm.errors import UnsupportedModel

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TensorType:
    """`block_length` neighbouring values of a row are stored in `block_bytes` bytes."""

    id: int
    name: str
    block_length: int
    block_bytes: int

    def row_bytes(self, cols: int) -> int:
        """Size of a row of `cols` values, which must be a multiple of the block length."""
        assert cols % self.block_length == 0
        return cols // self.block_length * self.block_bytes

    def __str__(self) -> str:
        return self.name


TYPES = (
    TensorType(0, "F32", 1, 4),
    TensorType(1, "F16", 1, 2),
    TensorType(2, "Q4_0", 32, 18),
    TensorType(3, "Q4_1", 32, 20),
    TensorType(6, "Q5_0", 32, 22),
    TensorType(7, "Q5_1", 32, 24),
    TensorType(8, "Q8_0", 32, 34),
    # The gguf package says 40 bytes, which was true when d and s were float32.
    TensorType(9, "Q8_1", 32, 36),
    TensorType(10, "Q2_K", 256, 84),
    TensorType(11, "Q3_K", 256, 110),
    TensorType(12, "Q4_K", 256, 144),
    TensorType(13, "Q5_K", 256, 176),
    TensorType(14, "Q6_K", 256, 210),
    TensorType(15, "Q8_K", 256, 292),
    TensorType(16, "IQ2_XXS", 256, 66),
    TensorType(17, "IQ2_XS", 256, 74),
    TensorType(18, "IQ3_XXS", 256, 98),
    TensorType(19, "IQ1_S", 256, 50),
    TensorType(20, "IQ4_NL", 32, 18),
    TensorType(21, "IQ3_S", 256, 110),
    TensorType(22, "IQ2_S", 256, 82),
    TensorType(23, "IQ4_XS", 256, 136),
    TensorType(24, "I8", 1, 1),
    TensorType(25, "I16", 1, 2),
    TensorType(26, "I32", 1, 4),
    TensorType(27, "I64", 1, 8),
    TensorType(28, "F64", 1, 8),
    TensorType(29, "IQ1_M", 256, 56),
    TensorType(30, "BF16", 1, 2),
    TensorType(34, "TQ1_0", 256, 54),
    TensorType(35, "TQ2_0", 256, 66),
    TensorType(39, "MXFP4", 32, 17),
    TensorType(40, "NVFP4", 64, 36),
    TensorType(41, "Q1_0", 128, 18),
    TensorType(42, "Q2_0", 64, 18),
)

BY_ID = {t.id: t for t in TYPES}
BY_NAME = {t.name: t for t in TYPES}

_PLAIN = {
    "F32": "<f4",
    "F16": "<f2",
    "F64": "<f8",
    "I8": "<i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
}


def dequantize(type: TensorType, raw: Bytes) -> Floats:
    """float32 [..., cols] of raw rows, uint8 [..., row_bytes].

    Raises UnsupportedModel for the two types that only ever hold activations (Q8_1, Q8_K).
    """
    raw = np.ascontiguousarray(raw)
    if type.name in _PLAIN:
        return raw.view(_PLAIN[type.name]).astype(np.float32)
    if type.name == "BF16":
        wide = raw.view("<u2").astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32)
    if type.name in ("Q8_1", "Q8_K"):
        raise UnsupportedModel(f"{type.name} holds activations, never weights")
    own = _OWN.get(type.name)
    if own is None:
        return _dequantize_with_gguf(type, raw)
    blocks = own(raw.reshape(-1, type.block_bytes))
    return blocks.reshape(*raw.shape[:-1], -1)


def _dequantize_with_gguf(type: TensorType, raw: Bytes) -> Floats:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as gguf_dequantize

    values: Floats = gguf_dequantize(raw, GGMLQuantizationType(type.id))
    return values


def _scales(blocks: Bytes) -> Floats:
    """float32 [blocks, 1] of the float16 that each block begins with."""
    return np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)


def _dequantize_q1_0(blocks: Bytes) -> Floats:
    """A set bit is d, a clear one -d; bit j % 8 of byte j / 8 is element j."""
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    d = _scales(blocks)
    return np.where(bits == 1, d, -d)


def _dequantize_q2_0(blocks: Bytes) -> Floats:
    """d * (q - 1); element j is bits 2 * (j % 4) of byte j / 4."""
    shifts = np.array([0, 2, 4, 6], np.uint8)
    codes = (blocks[:, 2:, None] >> shifts) & np.uint8(3)
    values = codes.reshape(len(blocks), -1).astype(np.float32) - np.float32(1)
    return _scales(blocks) * values


_OWN: dict[str, Callable[[Bytes], Floats]] = {"Q1_0": _dequantize_q1_0, "Q2_0": _dequantize_q2_0}
