"""Families that norm what a part gives, not what it reads.

olmo2     OLMo 2 and 3: a norm over all of q and all of k; OLMo 3 has windows, and scales the rotary
          frequencies of its full layers only
exaone4   a norm on each head; the 32B has windows, and positions only on the layers with one
"""

from localllm.models.checkpoint import Checkpoint
from localllm.models.dense import attention, blocks, decoder, postnorm_layer
from localllm.models.rope import read_rope
from localllm.models.spec import ModelSpec

# llama.cpp tells the 32B, the only one with windows, by its depth; the others may name a window.
EXAONE4_LAYERS_OF_32B = 64


def read_olmo2(c: Checkpoint) -> ModelSpec:
    full_rope, window_rope = read_rope(c, "neox"), read_rope(c, "neox", scaled=False)
    layers = []
    for b, window in zip(blocks(c), c.windows(0, 4)):
        layers.append(
            postnorm_layer(
                b,
                attention(b, full_rope if window is None else window_rope, window=window),
                full_q_norm=b.full_norm("attn_q_norm", b.num_heads),
                full_k_norm=b.full_norm("attn_k_norm", b.num_kv_heads),
            )
        )
    return decoder(c, layers)


def read_exaone4(c: Checkpoint) -> ModelSpec:
    rope = read_rope(c, "neox")
    has_windows = c.num_layers == EXAONE4_LAYERS_OF_32B
    windows = c.windows(4096, 4) if has_windows else [None] * c.num_layers
    layers = []
    for b, window in zip(blocks(c), windows):
        q_norm, k_norm = b.shared_head_norm("attn_q_norm"), b.shared_head_norm("attn_k_norm")
        shown_rope = None if has_windows and window is None else rope
        spec = attention(b, shown_rope, window=window, q_norm=q_norm, k_norm=k_norm)
        layers.append(postnorm_layer(b, spec))
    return decoder(c, layers)
