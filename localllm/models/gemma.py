"""Gemma 1 to 3: embeddings times the root of their length, GeGLU, norms with the 1 already added.

gemma2   windows on every other layer, soft caps, norms after attention and feed-forward
gemma3   a norm on each head instead of the cap; layers with a window have their own rotary base
"""

import math

from localllm.models.checkpoint import Checkpoint
from localllm.models.dense import attention, blocks, decoder, prenorm_layer
from localllm.models.rope import read_rope
from localllm.models.spec import ModelSpec

# The 27B models divide by the root of n/heads, not of the head dimension.
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def read_gemma(c: Checkpoint) -> ModelSpec:
    rope = read_rope(c, "neox")
    layers = [prenorm_layer(b, attention(b, rope), "gelu") for b in blocks(c)]
    return decoder(c, layers, embedding_scale=math.sqrt(c.embedding_length))


def read_gemma2(c: Checkpoint) -> ModelSpec:
    softcap = c.number("attn_logit_softcapping", 50.0) or None
    global_rope = read_rope(c, "neox")
    local_rope = read_rope(c, "neox", base=c.number("rope.freq_base_swa", 0.0) or None)
    layers = []
    for b, window in zip(blocks(c), c.windows(4096, 2)):
        rope = global_rope if window is None else local_rope
        spec = attention(b, rope, scale=score_scale(c), window=window, softcap=softcap)
        layers.append(prenorm_layer(b, spec, "gelu"))
    return decoder(
        c,
        layers,
        embedding_scale=math.sqrt(c.embedding_length),
        logit_softcap=c.number("final_logit_softcapping", 30.0) or None,
    )


def read_gemma3(c: Checkpoint) -> ModelSpec:
    global_rope = read_rope(c, "neox")
    local_base = c.number("rope.freq_base_swa", 10_000.0)
    local_rope = read_rope(c, "neox", base=local_base, scaled=False)
    layers = []
    for b, window in zip(blocks(c), c.windows(0, 6)):
        spec = attention(
            b,
            global_rope if window is None else local_rope,
            scale=score_scale(c),
            window=window,
            q_norm=b.shared_head_norm("attn_q_norm"),
            k_norm=b.shared_head_norm("attn_k_norm"),
        )
        layers.append(prenorm_layer(b, spec, "gelu"))
    return decoder(
        c,
        layers,
        embedding_scale=math.sqrt(c.embedding_length),
        logit_softcap=c.number("final_logit_softcapping", 0.0) or None,
    )


def score_scale(c: Checkpoint) -> float | None:
    if c.num_layers != LAYERS_OF_27B[c.architecture]:
        return None
    return 1.0 / math.sqrt(c.embedding_length / c.num_heads[0])
