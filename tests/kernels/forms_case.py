"""Plain twin of kernels_cpu/forms.py, and argument blocks for kernels that write forms."""

import struct

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

GUARD = 77
"""What memory that must not be written holds."""


def float_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def padded(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def quantise_plain(x: Floats) -> tuple[NDArray[np.int8], Floats, Floats]:
    """(q [.., Kp], scale [.., Kp/16], scale * sum [.., Kp/16])."""
    groups = np.zeros((*x.shape[:-1], padded(x.shape[-1], 64)), np.float32)
    groups[..., : x.shape[-1]] = x
    groups = groups.reshape(*x.shape[:-1], -1, 16)
    absmax = np.abs(groups).max(-1)
    live = absmax > 1e-30
    safe = np.where(live, absmax, np.float32(1))
    scale = np.where(live, absmax / np.float32(127), np.float32(0))
    inverse = np.where(live, np.float32(127) / safe, np.float32(0))
    q = np.rint(groups * inverse[..., None]).astype(np.int8)
    sums = q.astype(np.int32).sum(-1).astype(np.float32)
    return q.reshape(*x.shape[:-1], -1), scale, scale * sums


class FormsCase:
    """Memory for all forms of `num_tokens` tokens, of which `num_generated` are generated."""

    def __init__(self, num_tokens: int, num_generated: int, width: int) -> None:
        t, kp = num_tokens, padded(width, 64)
        self.num_generated, self.width = num_generated, width
        self.generated = np.array([num_generated], np.int64)
        self.real = np.full((t, padded(width, 16) + 16), GUARD, np.float32)
        self.row = [
            np.full((t, kp + 64), GUARD, np.int8),
            np.full((t, kp // 4 + 16), GUARD, np.float32),
            np.full((t, kp // 16 + 16), GUARD, np.float32),
        ]
        self.panel = [
            np.full((t, kp + 64), GUARD, np.int8),
            np.full((t, kp // 16 + 16), GUARD, np.float32),
            np.full((t, kp // 16 + 16), GUARD, np.float32),
        ]

    def slots(self) -> list[int]:
        """Slots 0 to 15 of the argument block."""
        arrays = [self.real, *self.row, *self.panel]
        pairs = [(a.ctypes.data, a.shape[1]) for a in arrays]
        return [*(n for pair in pairs for n in pair), self.generated.ctypes.data, self.width]

    def check(self, expected: Floats) -> None:
        """All forms hold exactly what plain code makes of `expected` [T, width], and nothing
        else."""
        d, width = self.num_generated, self.width
        np.testing.assert_array_equal(self.real[:, :width], expected)
        assert (self.real[:, width : padded(width, 16)] == 0).all()
        assert (self.real[:, padded(width, 16) :] == GUARD).all()
        q, scale, sums = quantise_plain(expected)
        self.check_form(self.row, slice(0, d), q, np.repeat(scale, 4, axis=-1), sums)
        self.check_form(self.panel, slice(d, None), q, scale, sums)

    @staticmethod
    def check_form(form: list[NDArray[np.generic]], tokens: slice, *expected: Floats) -> None:
        for array, wanted in zip(form, expected, strict=True):
            n = wanted.shape[1]
            np.testing.assert_array_equal(array[tokens, :n], wanted[tokens])
            written = np.zeros(array.shape, bool)
            written[tokens, :n] = True
            assert (array[~written] == GUARD).all()


def run_kernel(
    kernel: object, args: list[int], first: int, last: int, width: int = 1 << 16
) -> None:
    """Call a kernel on one thread."""
    import ctypes

    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
    block = np.array(args, np.int64)
    scratch = np.full(width + 16, np.nan, np.float32)
    start = scratch.ctypes.data + -scratch.ctypes.data % 64
    prototype(kernel.address)(block.ctypes.data, first, last, start)  # type: ignore[attr-defined]
