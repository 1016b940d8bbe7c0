"""CPU kernels: SIMD code emitted from Python through Numba, and the thread team that runs it.

Knows arrays and addresses only; nothing of models, files or `localllm`.
"""

from kernels_cpu.kernel import Kernel, configure, isa, kernel

__all__ = ["Kernel", "configure", "isa", "kernel"]
