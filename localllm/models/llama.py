"""Llama and the families that are Llama with other numbers.

llama      Llama 1 to 3, Mistral, SmolLM2, Yi and whatever else was converted to its layout
mistral3   YaRN, and queries scaled by position
smollm3    every fourth layer knows no positions
qwen2      rotates halves; biases on q, k and v
qwen3      and a norm on each head of q and k
granite    multipliers on embeddings, residuals, scores and logits
minicpm    the same with defaults for old files
glm4       norms after attention and feed-forward too
phi3       fused q, k, v and fused gate, up; longrope
"""

import math

from localllm.errors import UnsupportedModel
from localllm.models.checkpoint import Checkpoint
from localllm.models.dense import attention, blocks, decoder, prenorm_layer
from localllm.models.rope import RopeKind, original_context, read_rope
from localllm.models.spec import ModelSpec

SMOLLM3_NO_ROPE_PERIOD = 4


def read_llama(c: Checkpoint, kind: RopeKind = "norm") -> ModelSpec:
    # Mistral 7B v0.1 names a window; like llama.cpp, none is applied.
    rope = read_rope(c, kind)
    scale = c.number("attention.scale", 0.0)
    temperature = read_temperature(c)
    return decoder(
        c,
        [
            prenorm_layer(b, attention(b, rope, scale=scale, temperature=temperature))
            for b in blocks(c)
        ],
    )


def read_temperature(c: Checkpoint) -> tuple[float, int] | None:
    beta = c.number("attention.temperature_scale", 0.0)
    return (beta, original_context(c)) if beta else None


def read_neox(c: Checkpoint) -> ModelSpec:
    return read_llama(c, "neox")


def read_smollm3(c: Checkpoint) -> ModelSpec:
    rope = read_rope(c, "norm")
    period = SMOLLM3_NO_ROPE_PERIOD
    return decoder(
        c,
        [
            prenorm_layer(b, attention(b, None if (b.index + 1) % period == 0 else rope))
            for b in blocks(c)
        ],
    )


def read_qwen3(c: Checkpoint) -> ModelSpec:
    rope = read_rope(c, "neox")
    layers = []
    for b in blocks(c):
        q_norm, k_norm = b.shared_head_norm("attn_q_norm"), b.shared_head_norm("attn_k_norm")
        layers.append(prenorm_layer(b, attention(b, rope, q_norm=q_norm, k_norm=k_norm)))
    return decoder(c, layers)


def read_granite(c: Checkpoint) -> ModelSpec:
    return scaled_llama(
        c,
        embedding_scale=c.number("embedding_scale", 1.0),
        residual_scale=c.number("residual_scale", 1.0),
        logit_divisor=c.number("logit_scale"),
    )


def read_minicpm(c: Checkpoint) -> ModelSpec:
    # Old files have no multipliers: those of MiniCPM-2B hold.
    return scaled_llama(
        c,
        embedding_scale=c.number("embedding_scale", 12.0),
        residual_scale=c.number("residual_scale", 1.4 / math.sqrt(c.num_layers)),
        logit_divisor=c.number("logit_scale", c.embedding_length / 256),
    )


def scaled_llama(
    c: Checkpoint, *, embedding_scale: float, residual_scale: float, logit_divisor: float
) -> ModelSpec:
    """A multiplier of 0 means none; `rope.scaling.finetuned` says whether positions are shown."""
    if logit_divisor == 0:
        raise c.bad(f"{c.architecture}.logit_scale is 0, and logits are divided by it")
    rope = read_rope(c, "norm")
    shown_rope = rope if c.flag("rope.scaling.finetuned", default=True) else None
    scale = c.number("attention.scale", 0.0)
    layers = [
        prenorm_layer(
            b, attention(b, shown_rope, scale=scale), residual_scale=residual_scale or 1.0
        )
        for b in blocks(c)
    ]
    return decoder(
        c, layers, embedding_scale=embedding_scale or 1.0, logit_scale=1.0 / logit_divisor
    )


def read_glm4(c: Checkpoint) -> ModelSpec:
    if not c.has_key("rope.dimension_sections"):
        return read_llama(c, "norm")
    # The layout of the vision models, which rotate halves. For text the first three streams of
    # positions are the same, the fourth is zero.
    sections = c.metadata.ints(f"{c.architecture}.rope.dimension_sections")
    spec = read_llama(c, "neox")
    rope = spec.layers[0].attention.rope
    if any(sections[3:]) and rope is not None and sum(sections[:3]) < rope.dims // 2:
        raise UnsupportedModel(f"{c.architecture}: rotary sections {sections[:4]}")
    return spec
