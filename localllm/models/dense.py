"""Building blocks of dense decoders: what the families share, so that each is only its differences.

A family's reader makes one `Layer` for each `Block` and hands them to `decoder`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from localllm.models.checkpoint import Checkpoint
from localllm.models.spec import (
    Activation,
    AttentionSpec,
    Ffn,
    Layer,
    Linear,
    ModelSpec,
    Norm,
    NormKind,
    Rope,
    group_layers,
)


@dataclass(frozen=True, slots=True)
class Block:
    """Layer `index` of a file: tensors by their short names, with this layer's sizes."""

    c: Checkpoint
    index: int

    @property
    def num_heads(self) -> int:
        return self.c.num_heads[self.index]

    @property
    def num_kv_heads(self) -> int:
        return self.c.num_kv_heads[self.index]

    def name(self, short: str) -> str:
        return f"blk.{self.index}.{short}"

    def has(self, short: str) -> bool:
        return self.c.has(self.name(f"{short}.weight"))

    def norm(self, short: str, kind: NormKind = "rms") -> Norm:
        return self.c.norm(self.name(short), kind, self.c.embedding_length)

    def optional_norm(self, short: str, kind: NormKind = "rms") -> Norm | None:
        return self.norm(short, kind) if self.has(short) else None

    def shared_head_norm(self, short: str) -> Norm:
        """RMS norm of each head, one weight vector for all."""
        return self.c.norm(self.name(short), "rms", self.c.head_dim)

    def full_norm(self, short: str, num_heads: int) -> Norm:
        """RMS norm over all heads at once."""
        return self.c.norm(self.name(short), "rms", num_heads * self.c.head_dim)

    def own_head_norm(self, short: str, num_heads: int) -> Norm | None:
        """Layer norm of each head, a weight vector for each, where the file has it."""
        if not self.has(short):
            return None
        dim = self.c.head_dim
        return self.c.norm(self.name(short), "layer", num_heads * dim, (num_heads, dim))

    def qkv(self) -> tuple[Linear, Linear, Linear]:
        rows, kv_rows = self.num_heads * self.c.head_dim, self.num_kv_heads * self.c.head_dim
        parts = {
            self.name("attn_q"): rows,
            self.name("attn_k"): kv_rows,
            self.name("attn_v"): kv_rows,
        }
        q, k, v = self.c.cut(self.name("attn_qkv"), parts, self.c.embedding_length)
        return q, k, v

    def attn_output(self) -> Linear:
        cols = self.num_heads * self.c.head_dim
        return self.c.linear(self.name("attn_output"), self.c.embedding_length, cols)

    def ffn(self, activation: Activation, *, gated: bool = True) -> Ffn:
        """The feed-forward part; gate and up may lie in one tensor, `ffn_up`."""
        n, width = self.c.embedding_length, self.c.ffn_lengths[self.index]
        down = self.c.linear(self.name("ffn_down"), n, width)
        if not gated:
            return Ffn(self.c.linear(self.name("ffn_up"), width, n), down, activation)
        gate_name, up_name = self.name("ffn_gate"), self.name("ffn_up")
        gate, up = self.c.cut(up_name, {gate_name: width, up_name: width}, n)
        return Ffn(up, down, activation, gate)


def blocks(c: Checkpoint) -> list[Block]:
    return [Block(c, i) for i in range(c.num_layers)]


def attention(
    b: Block,
    rope: Rope | None,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    temperature: tuple[float, int] | None = None,
) -> AttentionSpec:
    """`scale` defaults to one over the root of the head dimension."""
    return AttentionSpec(
        num_heads=b.num_heads,
        num_kv_heads=b.num_kv_heads,
        head_dim=b.c.head_dim,
        scale=scale or 1.0 / math.sqrt(b.c.head_dim),
        rope=rope,
        window=window,
        softcap=softcap,
        q_norm=q_norm,
        k_norm=k_norm,
        temperature=temperature,
    )


def prenorm_layer(
    b: Block,
    attention: AttentionSpec,
    activation: Activation = "silu",
    *,
    norm: NormKind = "rms",
    gated: bool = True,
    residual_scale: float = 1.0,
) -> Layer:
    """Norm, attention, add; norm, feed-forward, add. Norms after them where the file has those."""
    q, k, v = b.qkv()
    return Layer(
        q=q,
        k=k,
        v=v,
        attention=attention,
        attn_output=b.attn_output(),
        ffn=b.ffn(activation, gated=gated),
        attn_norm=b.norm("attn_norm", norm),
        post_attention_norm=b.optional_norm("post_attention_norm", norm),
        ffn_norm=b.norm("ffn_norm", norm),
        post_ffw_norm=b.optional_norm("post_ffw_norm", norm),
        residual_scale=residual_scale,
    )


def postnorm_layer(
    b: Block,
    attention: AttentionSpec,
    full_q_norm: Norm | None = None,
    full_k_norm: Norm | None = None,
) -> Layer:
    """Attention, norm, add; feed-forward, norm, add."""
    q, k, v = b.qkv()
    return Layer(
        q=q,
        k=k,
        v=v,
        attention=attention,
        attn_output=b.attn_output(),
        ffn=b.ffn("silu"),
        full_q_norm=full_q_norm,
        full_k_norm=full_k_norm,
        post_attention_norm=b.norm("post_attention_norm"),
        post_ffw_norm=b.norm("post_ffw_norm"),
    )


def parallel_layer(b: Block, attention: AttentionSpec, *, norm: NormKind = "layer") -> Layer:
    """One norm; attention and feed-forward both read it and are both added."""
    q, k, v = b.qkv()
    return Layer(
        q=q,
        k=k,
        v=v,
        attention=attention,
        attn_output=b.attn_output(),
        ffn=b.ffn("silu"),
        attn_norm=b.norm("attn_norm", norm),
        parallel=True,
    )


def decoder(
    c: Checkpoint,
    layers: Sequence[Layer],
    *,
    norm: NormKind = "rms",
    embedding_scale: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> ModelSpec:
    """The model around its layers. Without `output.weight` the embeddings are the output head."""
    n = c.embedding_length
    token_embd = c.weight("token_embd.weight", c.vocab_size, n)
    bias = c.vector("output.bias", c.vocab_size) if c.has("output.bias") else None
    head = token_embd
    if c.has("output.weight"):
        head = c.weight("output.weight", c.vocab_size, n)
    return ModelSpec(
        architecture=c.architecture,
        vocab_size=c.vocab_size,
        embedding_length=n,
        context_length=c.context_length,
        token_embd=token_embd,
        layers=tuple(layers),
        output_norm=c.norm("output_norm", norm, n),
        output=Linear(head, bias),
        embedding_scale=embedding_scale,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        kv_groups=group_layers(tuple(layers)),
        pooling=c.pooling(),
    )
