"""Small whole models of random weights: quantised, with a vocabulary of bytes and a chat template.

`llama` has one kind of attention, `gemma3` has windows, which are a KV group of their own.
"""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, TokenType

from benchmarks.synthetic import random_blocks
from localllm.text.bpe import BYTE_TO_CHAR

MARKS = ("<|im_start|>", "<|im_end|>")
NUM_FILLERS = 766
NUM_TOKENS = len(BYTE_TO_CHAR) + NUM_FILLERS + len(MARKS)
WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS, WINDOW = 256, 4, 2, 64, 256, 2, 48
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NORMS = {
    "llama": ("attn_norm", "ffn_norm"),
    "gemma3": (
        *("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
        *("attn_q_norm", "attn_k_norm"),
    ),
}


def write_tiny_model(path: Path, arch: str = "llama", *, context: int = 512, seed: int = 1) -> Path:
    out = GGUFWriter(path, arch)
    out.add_context_length(context)
    out.add_embedding_length(WIDTH)
    out.add_block_count(LAYERS)
    out.add_feed_forward_length(FFN)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    if arch == "gemma3":
        out.add_key_length(HEAD_DIM)
        out.add_value_length(HEAD_DIM)
        out.add_sliding_window(WINDOW)
        out.add_array("gemma3.attention.sliding_window_pattern", [True, False])
    _add_vocabulary(out)
    _add_weights(out, arch, np.random.default_rng(seed))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def _add_vocabulary(out: GGUFWriter) -> None:
    fillers = [f"f{i}" for i in range(NUM_FILLERS)]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list([*BYTE_TO_CHAR, *fillers, *MARKS])
    kinds = [TokenType.NORMAL] * (NUM_TOKENS - len(MARKS)) + [TokenType.CONTROL] * len(MARKS)
    out.add_token_types(kinds)
    out.add_token_merges(["Ġ a"])
    out.add_eos_token_id(NUM_TOKENS - 1)
    out.add_bos_token_id(NUM_TOKENS - 2)
    out.add_add_bos_token(False)
    out.add_chat_template(TEMPLATE)


def _add_weights(out: GGUFWriter, arch: str, rng: np.random.Generator) -> None:
    def add(name: str, rows: int, cols: int, type_: Type = Type.Q4_K, scale: float = 1.5) -> None:
        deviation = scale * cols**-0.5
        blocks = random_blocks(rng, rows, cols, type_, deviation)
        out.add_tensor(f"{name}.weight", blocks, raw_dtype=type_)

    def add_norm(name: str, width: int) -> None:
        values = 1 + 0.1 * rng.standard_normal(width, dtype=np.float32)
        out.add_tensor(f"{name}.weight", values)

    # Embeddings of about one, so that the first layer sees what the later ones do.
    add("token_embd", NUM_TOKENS, WIDTH, Type.Q6_K, WIDTH**0.5)
    add("output", NUM_TOKENS, WIDTH, Type.Q6_K)
    add_norm("output_norm", WIDTH)
    for i in range(LAYERS):
        for norm in NORMS[arch]:
            add_norm(
                f"blk.{i}.{norm}", HEAD_DIM if norm in ("attn_q_norm", "attn_k_norm") else WIDTH
            )
        add(f"blk.{i}.attn_q", HEADS * HEAD_DIM, WIDTH)
        add(f"blk.{i}.attn_k", KV_HEADS * HEAD_DIM, WIDTH)
        add(f"blk.{i}.attn_v", KV_HEADS * HEAD_DIM, WIDTH, Type.Q6_K)
        add(f"blk.{i}.attn_output", WIDTH, HEADS * HEAD_DIM)
        add(f"blk.{i}.ffn_gate", FFN, WIDTH)
        add(f"blk.{i}.ffn_up", FFN, WIDTH)
        add(f"blk.{i}.ffn_down", WIDTH, FFN, Type.Q8_0)
