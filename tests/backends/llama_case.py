"""A small llama with weights of one type, and both backends over it."""

from pathlib import Path

import gguf
import numpy as np

from localllm.backends import BackendOptions
from localllm.backends.cpu.backend import CpuBackend
from localllm.backends.reference import ReferenceBackend
from localllm.gguf import GgufFile
from localllm.models import read_spec

WIDTH, VOCAB = 256, 300


def open_cpu(
    file: GgufFile, num_threads: int = 2, weights: str = "auto", kv_type: str = "f16"
) -> CpuBackend:
    spec = read_spec(file)
    options = BackendOptions(
        num_blocks=(24,) * len(spec.kv_groups),
        table_width=8,
        max_rows=512,
        threads=num_threads,
        weights=weights,
        kv_type=kv_type,
    )
    return CpuBackend(file, spec, options)


def open_reference(file: GgufFile, kv_type: str = "f16") -> ReferenceBackend:
    spec = read_spec(file)
    blocks = (24,) * len(spec.kv_groups)
    options = BackendOptions(blocks, table_width=8, max_rows=512, kv_type=kv_type)
    return ReferenceBackend(file, spec, options)


def write_llama(path: Path, type_name: str) -> GgufFile:
    """Two layers with weights of one type (embeddings and head, too)."""
    rng = np.random.default_rng(5)
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(512)
    out.add_embedding_length(WIDTH)
    out.add_block_count(2)
    out.add_feed_forward_length(2 * WIDTH)
    out.add_head_count(4)
    out.add_head_count_kv(2)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_vocab_size(VOCAB)
    type_ = gguf.GGMLQuantizationType[type_name]

    def add(name: str, rows: int, cols: int) -> None:
        values = rng.standard_normal((rows, cols), dtype=np.float32) * cols**-0.5
        raw = gguf.quants.quantize(values, type_)
        out.add_tensor(f"{name}.weight", raw, raw_dtype=type_)

    add("token_embd", VOCAB, WIDTH)
    add("output", VOCAB, WIDTH)
    out.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for i in range(2):
        for norm in ("attn_norm", "ffn_norm"):
            out.add_tensor(f"blk.{i}.{norm}.weight", np.ones(WIDTH, np.float32))
        for name, rows in (("q", WIDTH), ("k", WIDTH // 2), ("v", WIDTH // 2), ("output", WIDTH)):
            add(f"blk.{i}.attn_{name}", rows, WIDTH)
        add(f"blk.{i}.ffn_gate", 2 * WIDTH, WIDTH)
        add(f"blk.{i}.ffn_up", 2 * WIDTH, WIDTH)
        add(f"blk.{i}.ffn_down", WIDTH, 2 * WIDTH)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return GgufFile.open(path)


def error_of(got: np.ndarray, want: np.ndarray) -> float:
    return float(((got - want) ** 2).mean() / (want**2).mean())
