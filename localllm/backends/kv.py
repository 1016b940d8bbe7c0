"""Element types of K and V: how much memory they take, and what they make of a value.

The kernels' side of the same table is `kernels_cpu/kv.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.backends import BLOCK_SIZE
from localllm.errors import BadSettings
from localllm.models.spec import KVGroup

Floats = NDArray[np.float32]
SCALED = 32  # values of a q8_0 scale


@dataclass(frozen=True, slots=True)
class KVType:
    """An element type.

    pieces   bytes of a position of one head, by head_dim, in each of the arrays that make a block
    rounded  float32 [..., head_dim] as the reference backend keeps them: it has no float16
    """

    pieces: Callable[[int], tuple[int, ...]]
    rounded: Callable[[Floats], Floats]

    def block_bytes(self, group: KVGroup) -> int:
        """K of one layer's block, or V."""
        return BLOCK_SIZE * group.num_kv_heads * sum(self.pieces(group.head_dim))


def as_they_are(values: Floats) -> Floats:
    return values


def as_q8_0(values: Floats) -> Floats:
    """Codes of -127 to 127 times a float16 scale: the largest of 32 values over 127."""
    dim = values.shape[-1]
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -dim % SCALED)]
    parts = np.pad(values, padding).reshape(*values.shape[:-1], -1, SCALED)
    largest = np.abs(parts).max(axis=-1, keepdims=True)
    scales = (largest * np.float32(1 / 127)).astype(np.float16).astype(np.float32)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    codes = np.rint(parts * inverse).clip(-127, 127)
    stored: Floats = (codes * scales).reshape(*values.shape[:-1], -1)[..., :dim]
    return stored


KV_TYPES = {
    "f16": KVType(lambda dim: (2 * dim,), as_they_are),
    "q8_0": KVType(lambda dim: (dim, 2 * -(-dim // SCALED)), as_q8_0),
}


def kv_type(name: str) -> KVType:
    """The element type of that name. Raises BadSettings."""
    if name not in KV_TYPES:
        names = " or ".join(KV_TYPES)
        raise BadSettings(f"the KV cache type (LOCALLLM_KV_CACHE_TYPE) is {name!r}, not {names}")
    return KV_TYPES[name]
