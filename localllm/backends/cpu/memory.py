"""Memory of the CPU backend: anonymous maps that are committed when touched, and where weights lie.

Weights are read raw, either in the file's map (page cache: instant, shared between processes, larger
than memory if need be) or in private huge pages, where they are copied once.
"""

import mmap
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
from numpy.typing import NDArray

from localllm.errors import OutOfMemory
from localllm.gguf import Tensor

Bytes = NDArray[np.uint8]
Progress = Callable[[str, int, int], None]

ALIGNMENT = 64
HUGE_PAGE = 2 << 20
COPY_BYTES = 16 << 20
# What must stay free after weights are made resident: other programs, KV, activations.
ROOM_BYTES = 2 << 30


def allocate(num_bytes: int, *, huge: bool = False) -> Bytes:
    """Zeroed bytes on a page of their own, committed as they are touched.

    Raises OutOfMemory if the system refuses the address range.
    """
    size = max(num_bytes, 1)
    if huge:
        size += HUGE_PAGE
    try:
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise OutOfMemory(f"cannot reserve {num_bytes / 1e9:.1f} GB of memory: {error}") from error
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    view = np.frombuffer(area, np.uint8)
    start = -address_of(view) % HUGE_PAGE if huge else 0
    return view[start : start + num_bytes]


def address_of(array: NDArray[np.generic]) -> int:
    """Address of an array's first byte, read-only ones included."""
    address: int = array.__array_interface__["data"][0]
    return address


class Weights:
    """Where each tensor's raw blocks lie: `address` of its first row, whatever the mode.

    mode  "mapped": in the file's map; "resident": copied into private memory; "auto": resident if
          that leaves room
    """

    def __init__(self, tensors: Sequence[Tensor], mode: str) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}
        total = sum(padded(tensor.nbytes) for tensor in tensors)
        if mode == "auto":
            mode = (
                "resident" if total + ROOM_BYTES < psutil.virtual_memory().available else "mapped"
            )
        self.mode = mode
        self.num_bytes = total
        self._area: Bytes | None = allocate(total, huge=True) if mode == "resident" else None
        self._addresses = {tensor.name: tensor.address for tensor in tensors}

    def address(self, name: str) -> int:
        return self._addresses[name]

    def settle(self, num_threads: int, progress: Progress | None = None) -> None:
        """Copy the tensors where they are to lie; afterwards `address` answers for the copies."""
        if self._area is None:
            return
        base, offset = address_of(self._area), 0
        pieces: list[tuple[Bytes, Bytes]] = []
        for name, tensor in self.tensors.items():
            target = self._area[offset : offset + tensor.nbytes]
            pieces += cut(tensor.data, target)
            self._addresses[name] = base + offset
            offset += padded(tensor.nbytes)
        with ThreadPoolExecutor(num_threads) as pool:
            copies: Iterable[None] = pool.map(copy_piece, pieces)
            for done, _ in enumerate(copies, 1):
                if progress is not None:
                    progress("copying weights", done, len(pieces))

    def close(self) -> None:
        self._area = None


def padded(num_bytes: int) -> int:
    """Rounded up so that each tensor starts on a cache line and may be read a little past its end."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT


def cut(source: Bytes, target: Bytes) -> list[tuple[Bytes, Bytes]]:
    starts = range(0, len(source), COPY_BYTES)
    return [(source[s : s + COPY_BYTES], target[s : s + COPY_BYTES]) for s in starts]


def copy_piece(piece: tuple[Bytes, Bytes]) -> None:
    source, target = piece
    np.copyto(target, source)
