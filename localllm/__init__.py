"""localllm: run GGUF models fast on the machine you have.

`LLM` and `SamplingParams` are loaded when first used: `import localllm` itself pulls in nothing heavy.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localllm.llm import LLM
    from localllm.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from localllm.llm import LLM

        return LLM
    if name == "SamplingParams":
        from localllm.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'localllm' has no attribute {name!r}")
