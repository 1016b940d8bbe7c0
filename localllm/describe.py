"""What a model file says about itself, read in a process of its own.

The daemon never opens model files: one that is hostile, or cut short while it is mapped, costs a
child process and gives an error. `describe_apart` is what the daemon calls, `describe` what the
child does.
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from localllm.errors import BadFile, LocalLLMError
from localllm.interpreter import command_of
from localllm.messages import error_of, kind_of
from localllm.text.dialects import capabilities

DESCRIBE_SECONDS = 30
LONGEST_ARRAY = 1024
INFILL_KEYS = ("tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id")
OPTIONAL_CAPABILITIES = ("tools", "insert", "thinking")
HIDDEN_KEYS = ("general.name", "tokenizer.chat_template")
# `general.file_type` as llama.cpp numbers it.
FILE_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K"},
    **{11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S"},
    **{17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS"},
    **{23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S"},
    **{29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4"},
}


@dataclass(frozen=True, slots=True)
class Description:
    """Facts of a model file: `files` are all its parts, `model_info` its metadata as JSON."""

    architecture: str
    parameter_count: int
    quantization: str
    files: list[str]
    context_length: int = 0
    embedding_length: int = 0
    is_embedding: bool = False
    can_insert: bool = False
    template: str | None = None
    model_info: dict[str, Any] = field(default_factory=dict)
    tensors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def parameter_size(self) -> str:
        """The count as people say it: `8.0B`, `134.52M`."""
        for unit, size, digits in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
            if self.parameter_count >= size:
                whole, rest = divmod(self.parameter_count, size)
                count = self.parameter_count / size
                return f"{whole}{unit}" if not rest else f"{count:.{digits}f}{unit}"
        return str(self.parameter_count)

    @property
    def capabilities(self) -> list[str]:
        """What the model can do, in Ollama's words and order."""
        if self.is_embedding:
            return ["embedding"]
        found = capabilities(self.template or "") | ({"insert"} if self.can_insert else set())
        return ["completion", *(name for name in OPTIONAL_CAPABILITIES if name in found)]

    @property
    def config(self) -> dict[str, Any]:
        """The config blob of a model made from the file."""
        return {
            "model_format": "gguf",
            "model_family": self.architecture,
            "model_families": [self.architecture],
            "model_type": self.parameter_size,
            "file_type": self.quantization,
            "context_length": self.context_length,
            "embedding_length": self.embedding_length,
            "capabilities": self.capabilities,
            "architecture": "amd64",
            "os": "linux",
        }


def describe(path: Path, *, verbose: bool = False) -> Description:
    """Read a file's header. Long arrays become None unless `verbose`."""
    from localllm.gguf import GgufFile

    with GgufFile.open(path) as file:
        metadata, tensors = file.metadata, file.tensors.values()
        architecture = file.architecture
        template = metadata.get("tokenizer.chat_template")
        longest = None if verbose else LONGEST_ARRAY
        info = {key: _value(metadata, key, longest) for key in metadata if key not in HIDDEN_KEYS}
        count = sum(tensor.rows * tensor.cols for tensor in tensors)
        info["general.parameter_count"] = count
        info["general.architecture"] = architecture
        return Description(
            architecture=architecture,
            parameter_count=count,
            quantization=_quantization(file),
            files=_parts(path, metadata.int("split.count", default=1)),
            context_length=metadata.int(f"{architecture}.context_length", default=0),
            embedding_length=metadata.int(f"{architecture}.embedding_length", default=0),
            is_embedding=f"{architecture}.pooling_type" in metadata,
            can_insert=any(key in metadata for key in INFILL_KEYS),
            template=template if isinstance(template, str) else None,
            model_info=info,
            tensors=[
                {"name": t.name, "type": t.type.name, "shape": list(reversed(t.shape))}
                for t in tensors
            ],
        )


def _value(metadata: Any, key: str, longest: int | None) -> Any:
    try:
        length = metadata.length(key)
    except BadFile:
        length = 0
    return None if longest is not None and length > longest else metadata[key]


def _quantization(file: Any) -> str:
    """The file type's name, or the commonest tensor type where the file does not say."""
    number = file.metadata.get("general.file_type")
    if isinstance(number, int) and number in FILE_TYPES:
        return FILE_TYPES[number]
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    return max(sizes, key=sizes.__getitem__) if sizes else "unknown"


def _parts(path: Path, count: int) -> list[str]:
    """All files of a split set, by the name of the first."""
    if count <= 1:
        return [str(path)]
    stem = str(path).removesuffix(f"-00001-of-{count:05}.gguf")
    return [f"{stem}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]


def describe_apart(path: Path, *, verbose: bool = False) -> Description:
    """`describe` in a child process. Raises the error that it met there."""
    command = [*command_of("localllm.describe"), str(path), "verbose" * verbose]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=DESCRIBE_SECONDS
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise BadFile(f"{path}: reading the header took too long") from None
    except ValueError:
        raise BadFile(f"{path}: cannot be read ({done.returncode})") from None
    if "error" in answer:
        raise error_of(answer["kind"], answer["error"])
    return Description(**answer)


def main() -> None:
    """Print the description of the file named by the first argument, or its error, as JSON."""
    try:
        found = describe(Path(sys.argv[1]), verbose=sys.argv[2] == "verbose")
        print(json.dumps(asdict(found)))
    except LocalLLMError as error:
        print(json.dumps({"error": str(error), "kind": kind_of(error)}))


if __name__ == "__main__":
    main()
