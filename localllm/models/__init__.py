"""Model families: `read_spec` turns a file into a `ModelSpec`, or says what is missing.

This table is the list of what runs. How to add a row: docs/adding-a-model.md.
"""

from collections.abc import Callable

from localllm.errors import BadFile, UnsupportedModel
from localllm.gguf import GgufFile, shown
from localllm.models.checkpoint import Checkpoint
from localllm.models.gemma import read_gemma, read_gemma2, read_gemma3
from localllm.models.layernorm import (
    read_cohere2,
    read_command_r,
    read_stablelm,
    read_starcoder2,
)
from localllm.models.llama import (
    read_glm4,
    read_granite,
    read_llama,
    read_minicpm,
    read_neox,
    read_qwen3,
    read_smollm3,
)
from localllm.models.olmo import read_exaone4, read_olmo2
from localllm.models.spec import ModelSpec

READERS: dict[str, Callable[[Checkpoint], ModelSpec]] = {
    "llama": read_llama,
    "mistral3": read_llama,
    "internlm2": read_llama,
    "smollm3": read_smollm3,
    "granite": read_granite,
    "minicpm": read_minicpm,
    "glm4": read_glm4,
    "qwen2": read_neox,
    "phi3": read_neox,
    "qwen3": read_qwen3,
    "gemma": read_gemma,
    "gemma2": read_gemma2,
    "gemma3": read_gemma3,
    "olmo2": read_olmo2,
    "exaone4": read_exaone4,
    "command-r": read_command_r,
    "cohere2": read_cohere2,
    "stablelm": read_stablelm,
    "starcoder2": read_starcoder2,
}


def read_spec(file: GgufFile, num_ctx: int | None = None) -> ModelSpec:
    """What `file` is, as data.

    num_ctx  positions a sequence may have (None: no limit); it chooses between longrope's two sets
             of factors
    Raises UnsupportedModel with the name of what is missing, and BadFile if the file is wrong.
    """
    kind = file.metadata.str("general.type", "model")
    if kind != "model":
        raise UnsupportedModel(f"{file.path}: is of type {shown(kind)}, not a model")
    reader = READERS.get(file.architecture)
    if reader is None:
        raise UnsupportedModel(f"the architecture {shown(file.architecture)} is not supported")
    if not file.tensors:
        raise BadFile(f"{file.path}: holds no tensors: a vocabulary, not a model")
    checkpoint = Checkpoint(file, num_ctx)
    spec = reader(checkpoint)
    checkpoint.check_all_used()
    return spec
