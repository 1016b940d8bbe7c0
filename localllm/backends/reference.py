"""The reference backend: the forward pass in NumPy float32, slow and obvious. It is the oracle.

Promises: exact weights (dequantised to float32), float32 activations, and a float32 KV store behind
the same block tables as everywhere. Products are made on panels of one low height and attention
token by token, so that a token's numbers do not depend on what else is in the step (bitwise as far
as the BLAS of NumPy treats the rows of such a panel alike).

Not here: speed.
"""

import math

import numpy as np
from numpy.typing import NDArray

from localllm.backends import BLOCK_SIZE, TOP, BackendOptions, Batch, Edits, StepResult
from localllm.backends.kv import kv_type
from localllm.gguf import GgufFile
from localllm.models.decoder import forward
from localllm.models.spec import (
    Activation,
    AttentionSpec,
    Linear,
    ModelSpec,
    Norm,
    Rope,
    Vector,
    Weight,
)

Floats = NDArray[np.float32]
PANEL = 8  # rows of every matrix product, so that its sums always have the same shape
GELU_SCALE = math.sqrt(2.0 / math.pi)


class ReferenceBackend:
    """Runs steps of one model; see `backends.Backend`. Of the options it heeds sizes and KV type."""

    def __init__(self, file: GgufFile, spec: ModelSpec, options: BackendOptions) -> None:
        assert len(options.num_blocks) == len(spec.kv_groups)
        self.spec = spec
        self.kv_groups = spec.kv_groups
        self.num_blocks = options.num_blocks
        self.max_tokens = options.max_tokens
        self.max_segments = options.max_segments
        self.max_rows = options.max_rows
        self.weights = Weights(file)
        self.rounded = kv_type(options.kv_type).rounded
        self._num_steps = 0
        # [key or value, layer of the group, block, head, position, dimension]
        shapes = [
            (2, len(g.layers), n, g.num_kv_heads, BLOCK_SIZE, g.head_dim)
            for g, n in zip(spec.kv_groups, self.num_blocks)
        ]
        self.kv: list[Floats] = [np.zeros(shape, np.float32) for shape in shapes]
        self.kv_bytes_per_block = tuple(kv.nbytes // n for kv, n in zip(self.kv, self.num_blocks))

    @property
    def position(self) -> tuple[int, int]:
        return self._num_steps, 0

    def step(self, batch: Batch) -> StepResult:
        check(batch, self)
        self._num_steps += 1
        ops = ReferenceOps(self, batch)
        result = select(forward(ops, self.spec), batch.edits)
        result.hidden = ops.hidden
        return result

    def copy_block(self, group: int, source: int, target: int, num_positions: int) -> None:
        kv = self.kv[group]
        kv[:, :, target, :, :num_positions] = kv[:, :, source, :, :num_positions]

    def close(self) -> None:
        self.kv = []
        self.weights.clear()


def check(batch: Batch, backend: ReferenceBackend) -> None:
    """The promises of `Batch`; the reference is where a scheduler's mistakes are found."""
    starts = batch.segment_starts
    num_segments = len(starts) - 1
    assert starts[0] == 0
    assert starts[-1] == len(batch.tokens) == len(batch.positions) <= backend.max_tokens
    assert starts[batch.num_generated_segments] == batch.num_generated
    assert num_segments == len(batch.context_lengths) <= backend.max_segments
    num_logits = len(batch.rows) - batch.num_hidden
    assert 0 <= num_logits <= backend.max_rows
    assert np.all(np.diff(batch.rows) > 0)
    assert np.all(batch.rows[num_logits:] >= batch.num_generated)
    assert all(0 <= row < num_logits for row in batch.edits)
    assert len(batch.tokens) == 0 or 0 <= min(batch.tokens) <= max(batch.tokens)
    assert len(batch.tokens) == 0 or max(batch.tokens) < backend.spec.vocab_size
    assert len(batch.block_tables) == len(backend.kv_groups)
    for s in range(num_segments):
        positions = batch.positions[starts[s] : starts[s + 1]]
        assert len(positions) > 0
        end = batch.context_lengths[s]
        assert np.array_equal(positions, np.arange(end - len(positions), end))


class Weights:
    """Tensors of a file as float32, each expanded when first asked for."""

    def __init__(self, file: GgufFile) -> None:
        self.tensors = file.tensors
        self.expanded: dict[str, Floats] = {}

    def whole(self, name: str) -> Floats:
        if name not in self.expanded:
            self.expanded[name] = self.tensors[name].dequantize()
        return self.expanded[name]

    def matrix(self, weight: Weight) -> Floats:
        rows = self.whole(weight.name).reshape(-1, weight.cols)
        return rows[weight.first_row : weight.first_row + weight.rows]

    def vector(self, vector: Vector) -> Floats:
        return self.whole(vector.name).reshape(-1)[vector.first : vector.first + vector.size]

    def clear(self) -> None:
        self.tensors = {}
        self.expanded.clear()


class ReferenceOps:
    """`decoder.Ops` over arrays, for one step."""

    def __init__(self, backend: ReferenceBackend, batch: Batch) -> None:
        self.spec = backend.spec
        self.kv = backend.kv
        self.rounded = backend.rounded
        self.weights = backend.weights
        self.batch = batch
        self.num_logits = len(batch.rows) - batch.num_hidden
        self.hidden = np.zeros((0, 0), np.float32)

    def embed(self, table: Weight, scale: float) -> Floats:
        return self.weights.matrix(table)[self.batch.tokens] * scale

    def norm(self, x: Floats, norm: Norm) -> Floats:
        weight = None if norm.weight is None else self.weights.vector(norm.weight)
        bias = None if norm.bias is None else self.weights.vector(norm.bias)
        return normalise(x, norm, weight, bias)

    def linear(self, x: Floats, *linears: Linear) -> tuple[Floats, ...]:
        return tuple(self.product(x, linear) for linear in linears)

    def product(self, x: Floats, linear: Linear) -> Floats:
        out = self.multiply(x, linear.weight)
        if linear.bias is not None:
            out = out + self.weights.vector(linear.bias)
        if linear.low_rank is not None:
            low = linear.low_rank
            out = out + low.scale * self.multiply(self.multiply(x, low.down), low.up)
        return out

    def multiply(self, x: Floats, rows: Weight) -> Floats:
        weight = self.weights.matrix(rows)
        out = np.empty((len(x), rows.rows), np.float32)
        panel = np.zeros((PANEL, rows.cols), np.float32)
        for first in range(0, len(x), PANEL):
            part = x[first : first + PANEL]
            panel[: len(part)] = part
            out[first : first + PANEL] = (panel @ weight.T)[: len(part)]
        return out

    def attend(
        self, q: Floats, k: Floats, v: Floats, layer: int, attention: AttentionSpec
    ) -> Floats:
        a = attention
        queries = q.reshape(-1, a.num_heads, a.head_dim)
        keys = k.reshape(-1, a.num_kv_heads, a.head_dim)
        if not a.norm_after_rope:
            queries, keys = self.head_norm(queries, a.q_norm), self.head_norm(keys, a.k_norm)
        if a.rope is not None:
            queries = rotate(queries, self.batch.positions, a.rope)
            keys = rotate(keys, self.batch.positions, a.rope)
        if a.norm_after_rope:
            queries, keys = self.head_norm(queries, a.q_norm), self.head_norm(keys, a.k_norm)
        if a.temperature is not None:
            beta, length = a.temperature
            heat = 1.0 + beta * np.log1p(self.batch.positions // length)
            queries = queries * heat.astype(np.float32)[:, None, None]
        group, index = self.spec.group_of(layer)
        store_k, store_v = self.kv[group][:, index]
        table = self.batch.block_tables[group]
        self.store(store_k, table, self.rounded(keys))
        self.store(store_v, table, self.rounded(v.reshape(-1, a.num_kv_heads, a.head_dim)))
        sinks = None if a.sinks is None else self.weights.vector(a.sinks)
        out = np.empty_like(queries)
        for s, t in self.tokens():
            end = int(self.batch.positions[t]) + 1
            first = 0 if a.window is None else max(0, end - a.window)
            out[t] = attend_one(
                queries[t],
                gather(store_k, table[s], first, end),
                gather(store_v, table[s], first, end),
                a,
                sinks,
            )
        return out.reshape(len(q), -1)

    def tokens(self) -> list[tuple[int, int]]:
        """(segment, token) of every token."""
        starts = self.batch.segment_starts
        return [(s, t) for s in range(len(starts) - 1) for t in range(starts[s], starts[s + 1])]

    def head_norm(self, x: Floats, norm: Norm | None) -> Floats:
        """Norm of each head; a weight may be [head_dim] or [heads, head_dim]."""
        if norm is None:
            return x
        shape = x.shape[-2:] if norm.weight and norm.weight.size != x.shape[-1] else x.shape[-1:]
        weight = None if norm.weight is None else self.weights.vector(norm.weight).reshape(shape)
        bias = None if norm.bias is None else self.weights.vector(norm.bias).reshape(shape)
        return normalise(x, norm, weight, bias)

    def store(self, store: Floats, table: NDArray[np.int32], values: Floats) -> None:
        """Write [T, heads, dim] to the blocks of their positions."""
        for s, t in self.tokens():
            block, offset = divmod(int(self.batch.positions[t]), BLOCK_SIZE)
            store[table[s, block], :, offset] = values[t]

    def activate(self, gate: Floats | None, up: Floats, activation: Activation) -> Floats:
        return activated(up, activation) if gate is None else activated(gate, activation) * up

    def add(self, x: Floats, y: Floats, scale: float) -> Floats:
        return x + scale * y

    def add_linear(self, x: Floats, y: Floats, linear: Linear, scale: float) -> Floats:
        return self.add(x, self.product(y, linear), scale)

    def rows(self, x: Floats) -> Floats:
        return x[self.batch.rows]

    def keep(self, x: Floats) -> None:
        self.hidden = x[self.num_logits :]

    def logits(self, x: Floats, output: Linear, scale: float, softcap: float | None) -> Floats:
        logits = self.product(x[: self.num_logits], output) * scale
        return logits if softcap is None else softcap * np.tanh(logits / softcap)


def normalise(x: Floats, norm: Norm, weight: Floats | None, bias: Floats | None) -> Floats:
    """`norm` over the last axis."""
    if norm.kind == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + norm.eps)
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def rotate(x: Floats, positions: NDArray[np.int32], rope: Rope) -> Floats:
    """[T, heads, dim] with the pairs of each head turned by their angles."""
    angles = positions[:, None].astype(np.float64) * np.array(rope.frequencies)
    cos = (rope.magnitude * np.cos(angles)).astype(np.float32)[:, None]
    sin = (rope.magnitude * np.sin(angles)).astype(np.float32)[:, None]
    half = rope.dims // 2
    if rope.kind == "norm":
        first, second = slice(0, rope.dims, 2), slice(1, rope.dims, 2)
    else:
        first, second = slice(0, half), slice(half, rope.dims)
    a, b = x[..., first], x[..., second]
    turned = x.copy()
    turned[..., first] = a * cos - b * sin
    turned[..., second] = a * sin + b * cos
    return turned


def gather(store: Floats, blocks: NDArray[np.int32], first: int, end: int) -> Floats:
    """[heads, end - first, dim]: positions first to end of the sequence with these blocks."""
    start = first // BLOCK_SIZE
    used = store[blocks[start : (end - 1) // BLOCK_SIZE + 1]]
    heads = used.transpose(1, 0, 2, 3).reshape(store.shape[1], -1, store.shape[3])
    return heads[:, first - start * BLOCK_SIZE : end - start * BLOCK_SIZE]


def attend_one(
    q: Floats, k: Floats, v: Floats, attention: AttentionSpec, sinks: Floats | None
) -> Floats:
    """[heads, dim]: a token's queries over what it sees; k and v [kv heads, positions, dim]."""
    a = attention
    grouped = q.reshape(a.num_kv_heads, -1, a.head_dim)
    scores = a.scale * (grouped @ k.transpose(0, 2, 1))
    if a.softcap is not None:
        scores = a.softcap * np.tanh(scores / a.softcap)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks.reshape(a.num_kv_heads, -1, 1))
    shares = np.exp(scores - top)
    total = shares.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.reshape(a.num_kv_heads, -1, 1) - top)
    out: Floats = ((shares / total) @ v).reshape(a.num_heads, a.head_dim)
    return out


def activated(x: Floats, activation: Activation) -> Floats:
    if activation == "silu":
        return sigmoid_gated(x, x)
    if activation == "gelu":
        bend = np.tanh(GELU_SCALE * (x + 0.044715 * x * x * x))
        gelu: Floats = np.multiply(0.5 * x, 1.0 + bend)
        return gelu
    if activation == "gelu_quick":
        return sigmoid_gated(x, 1.702 * x)
    return np.square(np.maximum(x, 0.0))


def sigmoid_gated(x: Floats, z: Floats) -> Floats:
    """x / (1 + exp(-z)); exp may overflow to infinity, which is right."""
    with np.errstate(over="ignore"):
        gated: Floats = np.divide(x, 1.0 + np.exp(-z))
    return gated


def select(logits: Floats, edits: dict[int, Edits]) -> StepResult:
    """What sampling needs of the logits; `edits` by index of the wanted row."""
    edited = logits.copy()
    for row, e in edits.items():
        old = edited[row, e.ids]
        edited[row, e.ids] = np.where(old > 0, old / e.repeat, old * e.repeat) + e.add
    num_top = min(TOP, logits.shape[1])
    top_ids = np.full((len(logits), TOP), -1, np.int32)
    top_logits = np.full((len(logits), TOP), -np.inf, np.float32)
    # A stable sort of the negated values: the lower id comes first among equals.
    order = np.argsort(-edited, axis=1, kind="stable")[:, :num_top]
    top_ids[:, :num_top] = order
    top_logits[:, :num_top] = np.take_along_axis(edited, order, axis=1)
    return StepResult(logits, log_sum_exp(logits), top_ids, top_logits, log_sum_exp(edited))


def log_sum_exp(x: Floats) -> Floats:
    top = x.max(axis=1)
    # A row may be all minus infinity after edits that forbid everything.
    shift = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        total: Floats = shift + np.log(np.exp(x - shift[:, None]).sum(axis=1))
    return total
