"""What a model is, as data: the one description that every backend runs.

A spec names tensors and numbers, nothing else: it holds no arrays, and no backend asks for an
architecture's name.
`models/<family>.py` builds it from a file's metadata, `models/decoder.py` walks it.

Shapes: T tokens, n embedding length, nh query heads, nkv key/value heads, hd head dimension.
"""

from dataclasses import dataclass, field
from typing import Literal

NormKind = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_quick", "relu2"]
Pooling = Literal["mean", "first", "last"]


@dataclass(frozen=True, slots=True)
class Weight:
    """`rows` rows of a 2-D tensor [.., cols] from `first_row` on (a fused tensor is several)."""

    name: str
    rows: int
    cols: int
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class Vector:
    """`size` float32 values of a 1-D (or flattened) tensor from `first` on."""

    name: str
    size: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a linear: scale * up (down x). down: [rank, cols], up: [rows, rank]."""

    down: Weight
    up: Weight
    scale: float


@dataclass(frozen=True, slots=True)
class Linear:
    """y = W x (+ b) (+ what an adapter adds)."""

    weight: Weight
    bias: Vector | None = None
    low_rank: LowRank | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS: x / sqrt(mean(x^2) + eps) * w. Layer: (x - mean) / sqrt(var + eps) * w + b.

    As a head norm the weight has head_dim values (one vector for all heads) or heads * head_dim.
    """

    kind: NormKind
    eps: float
    weight: Vector | None = None
    bias: Vector | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first 2 * len(frequencies) dimensions of each head; the rest pass.

    kind         "norm" rotates neighbours (2i, 2i+1), "neox" rotates halves (i, i + dims/2)
    frequencies  radians per position of each pair, every scaling already applied
    magnitude    multiplies cosine and sine (YaRN, longrope)
    """

    kind: Literal["norm", "neox"]
    frequencies: tuple[float, ...]
    magnitude: float = 1.0

    @property
    def dims(self) -> int:
        return 2 * len(self.frequencies)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal grouped-query attention over the paged KV.

    Order: per-head q/k norm, rope, q scaling by position, KV write, softmax(scale * q k) v.
    window       a query at p sees keys at p - window + 1 .. p; None: all
    softcap      scores become cap * tanh(score / cap) before the mask
    sinks        one logit per head that joins the softmax denominator only
    temperature  (beta, length): q is multiplied by 1 + beta * log(1 + floor(p / length))
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Vector | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    norm_after_rope: bool = False
    temperature: tuple[float, int] | None = None

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Ffn:
    """down(act(gate x) * up x), or down(act(up x)) where there is no gate."""

    up: Linear
    down: Linear
    activation: Activation
    gate: Linear | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer; see `decoder.forward` for the order in which the parts act.

    full_q_norm  norm over the whole projected width, before it is cut into heads (olmo2)
    parallel     the feed-forward part reads the layer's input, not the attention's result
    ffn_norm     None in a parallel layer: it reads the attention's normed input
    """

    q: Linear
    k: Linear
    v: Linear
    attention: AttentionSpec
    attn_output: Linear
    ffn: Ffn
    attn_norm: Norm | None = None
    full_q_norm: Norm | None = None
    full_k_norm: Norm | None = None
    post_attention_norm: Norm | None = None
    ffn_norm: Norm | None = None
    post_ffw_norm: Norm | None = None
    parallel: bool = False
    residual_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV has the same shape and visibility: they share block tables.

    layers  indices of the decoder layers in it
    window  None: every position is kept; else only the last `window`
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A dense decoder-only transformer.

    embedding_scale  multiplies the token embeddings
    logit_scale      multiplies the logits, before the soft cap
    context_length   positions it was trained for
    pooling          which hidden states make the embedding of a text
    """

    architecture: str
    vocab_size: int
    embedding_length: int
    context_length: int
    token_embd: Weight
    layers: tuple[Layer, ...]
    output_norm: Norm
    output: Linear
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    kv_groups: tuple[KVGroup, ...] = field(default=())
    pooling: Pooling = "last"

    def group_of(self, layer: int) -> tuple[int, int]:
        """(index of the KV group, index of `layer` within it)."""
        for g, group in enumerate(self.kv_groups):
            if layer in group.layers:
                return g, group.layers.index(layer)
        raise KeyError(layer)


def group_layers(layers: tuple[Layer, ...]) -> tuple[KVGroup, ...]:
    """Group layers by (window, key/value heads, head dimension), in order of first appearance."""
    groups: dict[tuple[int | None, int, int], list[int]] = {}
    for i, layer in enumerate(layers):
        a = layer.attention
        groups.setdefault((a.window, a.num_kv_heads, a.head_dim), []).append(i)
    return tuple(
        KVGroup(tuple(members), heads, dim, window)
        for (window, heads, dim), members in groups.items()
    )
