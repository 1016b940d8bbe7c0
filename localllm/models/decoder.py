"""The forward pass of a decoder, written once. Start reading here.

`forward` walks a `ModelSpec` and calls a small vocabulary of operations, `Ops`. What an operation
does is the backend's business: the reference backend computes at once over NumPy arrays, the CPU
backend records a program that a thread team runs at every step, so `forward` itself is then called
once per model. A handle (`H`) stands for the activations of the step's tokens; what it is, only the
backend knows.

The step's tokens, positions and block tables never appear here: they are the backend's `Batch`.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from localllm.models.spec import (
    Activation,
    AttentionSpec,
    Ffn,
    Layer,
    Linear,
    ModelSpec,
    Norm,
    Weight,
)

H = TypeVar("H")


class Ops(Protocol[H]):
    """Operations over the activations of one step. Every result is a new handle."""

    def embed(self, table: Weight, scale: float) -> H:
        """[T, n]: the rows of the step's token ids, times `scale`."""

    def norm(self, x: H, norm: Norm) -> H:
        """[T, n]: each token normalised over its whole width."""

    def linear(self, x: H, *linears: Linear) -> tuple[H, ...]:
        """One [T, rows] result per linear; they share the input, so it is quantised once."""

    def attend(self, q: H, k: H, v: H, layer: int, attention: AttentionSpec) -> H:
        """[T, nh*hd]: head norms and rope on q and k, k and v into the KV store, attention."""

    def activate(self, gate: H | None, up: H, activation: Activation) -> H:
        """[T, f]: act(gate) * up, or act(up) where there is no gate."""

    def add(self, x: H, y: H, scale: float) -> H:
        """[T, n]: x + scale * y."""

    def add_linear(self, x: H, y: H, linear: Linear, scale: float) -> H:
        """[T, n]: x + scale * (W y + b)."""

    def rows(self, x: H) -> H:
        """[R, n]: only the tokens whose results are wanted; from here on T is R."""

    def keep(self, x: H) -> None:
        """[R, n] become the step's hidden states; only the rows that are more than that go on."""

    def logits(self, x: H, output: Linear, scale: float, softcap: float | None) -> H:
        """[R, vocab]: scale * (W x + b), then cap * tanh(. / cap) where there is a cap."""


def forward(ops: Ops[H], spec: ModelSpec) -> H:
    """Logits [R, vocab] of the wanted tokens."""
    x = ops.embed(spec.token_embd, spec.embedding_scale)
    last = len(spec.layers) - 1
    for i, layer in enumerate(spec.layers):
        x = decode_layer(ops, x, i, layer, narrow=i == last)
    x = ops.norm(x, spec.output_norm)
    ops.keep(x)
    return ops.logits(x, spec.output, spec.logit_scale, spec.logit_softcap)


def decode_layer(ops: Ops[H], x: H, index: int, layer: Layer, *, narrow: bool) -> H:
    """One layer; `narrow` drops the tokens without a wanted row as soon as the KV is written."""
    h = x if layer.attn_norm is None else ops.norm(x, layer.attn_norm)
    o = attention(ops, h, index, layer)
    if narrow:
        x, h, o = ops.rows(x), ops.rows(h) if layer.parallel else h, ops.rows(o)
    if layer.parallel:
        g = h if layer.ffn_norm is None else ops.norm(x, layer.ffn_norm)
        x = residual(ops, x, o, layer.attn_output, layer.post_attention_norm, layer.residual_scale)
    else:
        x = residual(ops, x, o, layer.attn_output, layer.post_attention_norm, layer.residual_scale)
        g = x if layer.ffn_norm is None else ops.norm(x, layer.ffn_norm)
    hidden = ffn_hidden(ops, g, layer.ffn)
    return residual(ops, x, hidden, layer.ffn.down, layer.post_ffw_norm, layer.residual_scale)


def attention(ops: Ops[H], h: H, index: int, layer: Layer) -> H:
    q, k, v = ops.linear(h, layer.q, layer.k, layer.v)
    if layer.full_q_norm is not None:
        q = ops.norm(q, layer.full_q_norm)
    if layer.full_k_norm is not None:
        k = ops.norm(k, layer.full_k_norm)
    return ops.attend(q, k, v, index, layer.attention)


def ffn_hidden(ops: Ops[H], h: H, ffn: Ffn) -> H:
    if ffn.gate is None:
        (up,) = ops.linear(h, ffn.up)
        return ops.activate(None, up, ffn.activation)
    gate, up = ops.linear(h, ffn.gate, ffn.up)
    return ops.activate(gate, up, ffn.activation)


def residual(ops: Ops[H], x: H, y: H, linear: Linear, norm: Norm | None, scale: float) -> H:
    """x + scale * norm(W y + b)."""
    if norm is None:
        return ops.add_linear(x, y, linear, scale)
    (z,) = ops.linear(y, linear)
    return ops.add(x, ops.norm(z, norm), scale)


__all__: Sequence[str] = ("Ops", "forward")
