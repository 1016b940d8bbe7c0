"""Activation memory of the recorded program.

A buffer lives as long as a handle refers to it. Recording follows the order in which the program runs, so
memory whose handle is gone may serve the next operation.
"""

from dataclasses import dataclass

import numpy as np

from localllm.backends import Floats
from localllm.backends.cpu.memory import ALIGNMENT, Bytes, address_of, allocate


class Pool:
    """Hands out cache-line aligned memory and takes it back, by size."""

    def __init__(self) -> None:
        self._free: dict[int, list[Bytes]] = {}
        self.num_bytes = 0

    def take(self, num_bytes: int) -> "Buffer":
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        free = self._free.setdefault(size, [])
        if free:
            return Buffer(self, free.pop())
        self.num_bytes += size
        return Buffer(self, allocate(size))

    def give_back(self, memory: Bytes) -> None:
        self._free[len(memory)].append(memory)


class Buffer:
    """Memory of one handle; back in the pool when the last reference to it goes."""

    def __init__(self, pool: Pool, memory: Bytes) -> None:
        self._pool = pool
        self._memory = memory
        self.address = address_of(memory)

    def floats(self, stride: int) -> Floats:
        """The memory as float32 [., stride]."""
        values: Floats = self._memory.view(np.float32)
        return values[: len(values) // stride * stride].reshape(-1, stride)

    def __del__(self) -> None:
        self._pool.give_back(self._memory)


@dataclass(slots=True)
class Quantised:
    """int8 activations of one role: values, scales and scaled sums (layouts in kernels_cpu)."""

    values: Buffer
    scales: Buffer
    sums: Buffer
    values_stride: int  # bytes
    scales_stride: int  # floats
    sums_stride: int  # floats


@dataclass(slots=True)
class Forms:
    """The forms in which an activation was asked for so far; absent ones cost nothing."""

    real: Buffer | None = None
    row: Quantised | None = None
    panel: Quantised | None = None
    tiles: Buffer | None = None
