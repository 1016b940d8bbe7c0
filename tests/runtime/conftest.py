"""A tiny model that is a whole file: random llama weights, a byte-level vocabulary, ChatML."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType

from localllm.config import Settings
from localllm.runtime import LoadedModel
from localllm.text.bpe import BYTE_TO_CHAR

MARKS = ("<|im_start|>", "<|im_end|>")
CONTEXT = 256
WIDTH, HEADS, FFN, LAYERS = 32, 2, 48, 2


def write_tiny_model(path: Path, template: str = "") -> None:
    rng = np.random.default_rng(1)
    texts = [*BYTE_TO_CHAR, *MARKS]
    kinds = [TokenType.NORMAL] * len(BYTE_TO_CHAR) + [TokenType.CONTROL] * len(MARKS)
    w = GGUFWriter(path, "llama")
    w.add_context_length(CONTEXT)
    w.add_embedding_length(WIDTH)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(FFN)
    w.add_head_count(HEADS)
    w.add_rope_dimension_count(WIDTH // HEADS)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(texts)
    w.add_token_types(kinds)
    w.add_token_merges(["Ġ a"])
    w.add_eos_token_id(texts.index("<|im_end|>"))
    w.add_bos_token_id(texts.index("<|im_start|>"))
    w.add_add_bos_token(False)
    if template:
        w.add_chat_template(template)

    def add(name: str, *shape: int) -> None:
        scale = 1.0 if len(shape) == 1 else 1.5 / np.sqrt(shape[-1])
        base = 1.0 if len(shape) == 1 else 0.0
        noise = rng.standard_normal(shape) * (0.1 if len(shape) == 1 else scale)
        w.add_tensor(name, (base + noise).astype(np.float32))

    add("token_embd.weight", len(texts), WIDTH)
    add("output.weight", len(texts), WIDTH)
    add("output_norm.weight", WIDTH)
    for i in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{i}.{name}.weight", WIDTH, WIDTH)
        add(f"blk.{i}.ffn_gate.weight", FFN, WIDTH)
        add(f"blk.{i}.ffn_up.weight", FFN, WIDTH)
        add(f"blk.{i}.ffn_down.weight", WIDTH, FFN)
        add(f"blk.{i}.attn_norm.weight", WIDTH)
        add(f"blk.{i}.ffn_norm.weight", WIDTH)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_model(path)
    return path


@pytest.fixture
def make_model(tmp_path: Path):
    """Opens the tiny model with a chat template of its own."""

    def make(template: str) -> LoadedModel:
        path = tmp_path / "own.gguf"
        write_tiny_model(path, template)
        return LoadedModel.open(path, Settings(cache_dir=tmp_path / "cache"), backend="reference")

    return make


@pytest.fixture(scope="module")
def model(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory):
    settings = Settings(cache_dir=tmp_path_factory.mktemp("cache"))
    with LoadedModel.open(tiny_path, settings, backend="reference") as loaded:
        yield loaded
