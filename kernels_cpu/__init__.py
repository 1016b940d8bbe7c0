"""CPU kernels: SIMD code emitted from Python through Numba, and the thread team that runs it.

Knows arrays and addresses only; nothing of models, files or `localllm`. `kernels_cpu.isa` and
`kernels_cpu.cores` may be imported without Numba; the names below bring it in when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels_cpu.kernel import Kernel, configure

__all__ = ["Kernel", "configure"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("kernels_cpu.kernel"), name)
