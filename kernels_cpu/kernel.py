"""The `@kernel` decorator: functions that compile when their address is first asked for.

A kernel is `def name(args, first, last, scratch)` over four int64s: the address of its argument block, the range of
items it handles, and the address of this thread's scratch memory. It returns nothing, never raises, knows no thread,
and gives the same results however its items are dealt out.

Decorating stores the function. `.address` compiles it (or finds it on disk) and returns the machine code's address.
The cache folder carries a digest of all kernel sources, since Numba does not notice an edit in another module.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
from numba import cfunc, types

from kernels_cpu import isa as levels

SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64)

_state: dict[str, Any] = {"folder": None, "isa": None}


def configure(cache: Path | None, isa: str) -> None:
    """Say where compiled kernels are kept (None: nowhere) and the ISA level of this process.

    Called once, before any kernel's address is asked for.
    """
    if _state["isa"] not in (None, isa):
        raise RuntimeError(f"kernels are already configured for {_state['isa']}")
    if isa == "amx":
        # Granted to a process, not to a machine; `isa.detect` has tried it in another one.
        levels.request_tiles()
    _state["isa"] = isa
    _state["folder"] = None if cache is None else cache / f"kernels-{sources_digest()}-{isa}"


def isa() -> str:
    """The configured ISA level; emitters choose their few special instructions by it."""
    level: str | None = _state["isa"]
    if level is None:
        raise RuntimeError("kernels_cpu.configure was not called")
    return level


def has_bf16() -> bool:
    """Whether kernels of this process may use `Ir.dot_pairs`."""
    return levels.has_bf16(isa())


def cache_dir() -> Path | None:
    """Where compiled kernels of this build and level are kept; None: nowhere."""
    folder: Path | None = _state["folder"]
    return folder


def sources_digest() -> str:
    """Twelve hex digits over every source file of this package and the compiler's version."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


@contextmanager
def cache_folder(folder: Path | None) -> Iterator[bool]:
    """Numba's cache directory set to ours while a kernel is made, and put back afterwards."""
    if folder is None:
        yield False
        return
    before = numba.config.CACHE_DIR
    try:
        folder.mkdir(parents=True, exist_ok=True)
        numba.config.CACHE_DIR = str(folder)
        yield True
    except OSError:
        yield False
    finally:
        numba.config.CACHE_DIR = before


class Kernel:
    """A kernel that is compiled at most once per process, when `.address` is first read."""

    def __init__(self, function: FunctionType, name: str | None = None) -> None:
        self.function = function
        self.name = name or function.__name__
        self.__doc__ = function.__doc__
        self._compiled: Any = None

    def compile(self) -> Any:
        """The compiled function; raises what Numba raises if the kernel itself is wrong."""
        if self._compiled is None:
            self._compiled = self._compile_cached()
        return self._compiled

    @property
    def address(self) -> int:
        return int(self.compile().address)

    def inspect_llvm(self) -> str:
        return str(self.compile().inspect_llvm())

    def _compile_cached(self) -> Any:
        with cache_folder(_state["folder"]) as usable:
            if usable:
                try:
                    return cfunc(SIGNATURE, cache=True, nopython=True)(self.function)
                except Exception:
                    # A damaged or unwritable cache must not stop the program: forget it, compile without.
                    shutil.rmtree(_state["folder"], ignore_errors=True)
        return cfunc(SIGNATURE, cache=False, nopython=True)(self.function)


def kernel(function: Callable[[int, int, int, int], None]) -> Kernel:
    """Make a lazy kernel of a module-level function."""
    assert isinstance(function, FunctionType)
    return Kernel(function)
