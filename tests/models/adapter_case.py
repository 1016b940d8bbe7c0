"""LoRA adapters for tests: random ones, and models with an adapter worked into their weights."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

from localllm.gguf import GgufFile

Pair = tuple[np.ndarray, np.ndarray]


def random_pairs(
    file: GgufFile, names: list[str], ranks: list[int], seed: int = 9, size: float = 0.3
) -> dict[str, Pair]:
    """Matrices (A, B) for weights of a model; together they change a weight by about `size`."""
    rng = np.random.default_rng(seed)
    pairs = {}
    for i, name in enumerate(names):
        tensor, rank = file.tensors[name], ranks[i % len(ranks)]
        a = rng.standard_normal((rank, tensor.cols), dtype=np.float32) * tensor.cols**-0.5
        b = rng.standard_normal((tensor.rows, rank), dtype=np.float32) * size
        pairs[name] = a, b
    return pairs


def write_adapter(
    path: Path,
    pairs: Mapping[str, Pair],
    *,
    alpha: float | None = 8.0,
    arch: str = "llama",
    kind: str = "adapter",
    type_name: str = "F32",
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_type(kind)
    writer.add_string("adapter.type", "lora")
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    type_ = gguf.GGMLQuantizationType[type_name]
    for name, (a, b) in pairs.items():
        for suffix, values in (("lora_a", a), ("lora_b", b)):
            fits = values.shape[-1] % gguf.GGML_QUANT_SIZES[type_][0] == 0
            own = type_ if fits else gguf.GGMLQuantizationType.F32
            raw = gguf.quants.quantize(values, own)
            writer.add_tensor(f"{name}.{suffix}", raw, raw_dtype=own)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    finish(writer)
    return path


def write_merged(
    file: GgufFile, path: Path, pairs: Mapping[str, Pair], *, alpha: float
) -> GgufFile:
    """The model with W + alpha / rank * B A in place of each W, all in float32."""
    reader = gguf.GGUFReader(file.path)
    writer = gguf.GGUFWriter(path, file.architecture)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub_type=sub)
    for name, tensor in file.tensors.items():
        values = tensor.dequantize()
        if name in pairs:
            a, b = (m.astype(np.float64) for m in pairs[name])
            values = (values + alpha / len(a) * (b @ a)).astype(np.float32)
        writer.add_tensor(name, values)
    finish(writer)
    return GgufFile.open(path)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
