"""Families with mean-subtracting norms.

command-r    attention and feed-forward in parallel; the largest norms each head by its own vector
cohere2      windows on three layers of four, and positions only there
stablelm     partly rotated heads; parallel where a layer has no ffn_norm
starcoder2   biases everywhere, no gate
"""

from localllm.models.checkpoint import Checkpoint
from localllm.models.dense import (
    Block,
    attention,
    blocks,
    decoder,
    parallel_layer,
    prenorm_layer,
)
from localllm.models.rope import read_rope
from localllm.models.spec import AttentionSpec, ModelSpec, Rope


def read_command_r(c: Checkpoint) -> ModelSpec:
    rope = read_rope(c, "norm")
    layers = [parallel_layer(b, own_head_norms(b, rope)) for b in blocks(c)]
    return decoder(c, layers, norm="layer", logit_scale=c.number("logit_scale"))


def read_cohere2(c: Checkpoint) -> ModelSpec:
    rope = read_rope(c, "norm")
    layers = [
        parallel_layer(b, attention(b, None if window is None else rope, window=window))
        for b, window in zip(
            blocks(c), c.windows(c.integer("attention.sliding_window", minimum=1), 4)
        )
    ]
    return decoder(c, layers, norm="layer", logit_scale=c.number("logit_scale"))


def read_stablelm(c: Checkpoint) -> ModelSpec:
    rope = read_rope(c, "neox")
    layers = []
    for b in blocks(c):
        spec = own_head_norms(b, rope)
        is_serial = b.has("ffn_norm")
        layers.append(
            prenorm_layer(b, spec, norm="layer") if is_serial else parallel_layer(b, spec)
        )
    return decoder(c, layers, norm="layer")


def read_starcoder2(c: Checkpoint) -> ModelSpec:
    rope = read_rope(c, "neox")
    layers = [
        prenorm_layer(b, attention(b, rope), "gelu", norm="layer", gated=False) for b in blocks(c)
    ]
    return decoder(c, layers, norm="layer")


def own_head_norms(b: Block, rope: Rope) -> AttentionSpec:
    q_norm = b.own_head_norm("attn_q_norm", b.num_heads)
    k_norm = b.own_head_norm("attn_k_norm", b.num_kv_heads)
    return attention(b, rope, q_norm=q_norm, k_norm=k_norm)
