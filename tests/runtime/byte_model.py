"""A tiny model that is a whole file: random llama weights, a byte-level vocabulary."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

from localllm.text.bpe import BYTE_TO_CHAR

MARKS = ("<|im_start|>", "<|im_end|>")
CONTEXT = 256
WIDTH, HEADS, FFN, LAYERS = 32, 2, 48, 2


def write_tiny_model(
    path: Path, template: str = "", *, pooling: int | None = None, adds_ends: bool = False
) -> None:
    """`adds_ends`: every text begins with BOS and ends with EOS; `pooling`: `pooling_type`."""
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
    w.add_add_bos_token(adds_ends)
    w.add_add_eos_token(adds_ends)
    if pooling is not None:
        w.add_uint32("llama.pooling_type", pooling)
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
