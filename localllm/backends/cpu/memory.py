"""Memory of the CPU backend: anonymous maps that are committed when touched, and where weights lie.

Weights are read raw, either in the file's map (page cache: instant, shared between processes, larger
than memory if need be) or in private huge pages, where they are copied once. Only tensors of types that
no kernel reads are expanded.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import psutil
from numpy.typing import NDArray

from localllm.errors import OutOfMemory, UnsupportedModel
from localllm.gguf import Tensor
from localllm.quants import dequantize

Bytes = NDArray[np.uint8]
Progress = Callable[[str, int, int], None]

ALIGNMENT = 64
HUGE_PAGE = 2 << 20
COPY_BYTES = 16 << 20
# What must stay free after weights are made resident: other programs, KV, activations.
ROOM_BYTES = 2 << 30
DONT_NEED: int = getattr(mmap, "MADV_DONTNEED", -1)
POPULATE_READ = 22 if sys.platform == "linux" else -1  # MADV_POPULATE_READ


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


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor in memory: where row 0 is, and as what type."""

    address: int
    row_bytes: int
    type_name: str


class Weights:
    """Where each tensor's rows lie.

    mode   "mapped": in the file's map; "resident": copied into private memory; "auto": resident if
           that leaves room
    known  types that the kernels read raw; 2-D tensors of other types become float16 when settled,
           in private memory whatever the mode
    """

    def __init__(self, tensors: Sequence[Tensor], mode: str, known: Container[str]) -> None:
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self._foreign = [t for t in tensors if len(t.shape) > 1 and t.type.name not in known]
        self._raw = [t for t in tensors if len(t.shape) == 1 or t.type.name in known]
        self.num_bytes = sum(padded(t.nbytes) for t in self._raw)
        if mode == "auto":
            room = psutil.virtual_memory().available - ROOM_BYTES
            mode = "resident" if self.num_bytes < room else "mapped"
        self.mode = mode
        self._areas: list[Bytes] = []
        self._rows = {t.name: Rows(t.address, t.row_bytes, t.type.name) for t in self._raw}
        for tensor in self._foreign:
            area = allocate(2 * tensor.rows * tensor.cols, huge=True)
            self._areas.append(area)
            self._rows[tensor.name] = Rows(address_of(area), 2 * tensor.cols, "F16")

    def rows(self, name: str) -> Rows:
        return self._rows[name]

    def settle(self, num_threads: int, progress: Progress | None = None) -> None:
        """Bring the tensors to where they are to lie; afterwards `rows` answers for the copies."""
        for done, tensor in enumerate(self._foreign, 1):
            expand(tensor, self._areas[done - 1])
            if progress is not None:
                progress("converting weights", done, len(self._foreign))
        if self.mode != "resident":
            self._map_pages(num_threads)
            return
        area = allocate(self.num_bytes, huge=True)
        self._areas.append(area)
        pieces: list[tuple[Bytes, Bytes]] = []
        offset = 0
        for t in self._raw:
            target = area[offset : offset + t.nbytes]
            pieces += cut(t.data, target)
            self._rows[t.name] = Rows(address_of(area) + offset, t.row_bytes, t.type.name)
            offset += padded(t.nbytes)
        with ThreadPoolExecutor(num_threads) as pool:
            copies: Iterable[None] = pool.map(copy_piece, pieces)
            for done, _ in enumerate(copies, 1):
                if progress is not None:
                    progress("copying weights", done, len(pieces))
        for tensor in self._raw:
            # The page cache keeps them; they only leave this process.
            if tensor.is_mapped:
                advise(DONT_NEED, tensor.data)

    def _map_pages(self, num_threads: int) -> None:
        """Enter the pages of the file into this process at once: the first step is not slowed by faults."""
        if self.num_bytes > psutil.virtual_memory().available:
            return
        pieces = [source for t in self._raw for source, _ in cut(t.data, t.data)]
        with ThreadPoolExecutor(num_threads) as pool:
            for _ in pool.map(partial(advise, POPULATE_READ), pieces):
                pass

    def close(self) -> None:
        self._areas.clear()


def expand(tensor: Tensor, area: Bytes) -> None:
    """Write a tensor's values as float16. Raises UnsupportedModel if they do not fit."""
    out = area.view(np.float16).reshape(tensor.rows, tensor.cols)
    raw = tensor.data.reshape(tensor.rows, -1)
    step = max(1, COPY_BYTES // (4 * tensor.cols))
    for first in range(0, tensor.rows, step):
        values = dequantize(tensor.type, raw[first : first + step])
        if not np.abs(values).max(initial=0) < np.finfo(np.float16).max:
            raise UnsupportedModel(f"{tensor.name}: {tensor.type.name} values beyond float16")
        out[first : first + step] = values


def advise(advice: int, data: Bytes) -> None:
    """Tell the kernel about the whole pages of a file's map; what it does not know, it ignores."""
    if advice < 0:
        return
    first = padded_up(address_of(data), mmap.PAGESIZE)
    size = (address_of(data) + len(data) - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)


def padded_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def padded(num_bytes: int) -> int:
    """Rounded up so that each tensor starts on a cache line and may be read a little past its end."""
    return padded_up(num_bytes, ALIGNMENT) + ALIGNMENT


def cut(source: Bytes, target: Bytes) -> list[tuple[Bytes, Bytes]]:
    starts = range(0, len(source), COPY_BYTES)
    return [(source[s : s + COPY_BYTES], target[s : s + COPY_BYTES]) for s in starts]


def copy_piece(piece: tuple[Bytes, Bytes]) -> None:
    source, target = piece
    advise(POPULATE_READ, source)
    np.copyto(target, source)
