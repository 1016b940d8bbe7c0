"""A model file as a family's reader sees it: bounded hyper-parameters, tensors of a checked shape.

Promises:
  1. a number that comes from here is finite and within bounds that no real model reaches;
  2. a tensor that a spec names exists and has exactly the shape the spec says (BadFile otherwise);
  3. `check_all_used` refuses a file with a tensor that no part of the spec names: arithmetic that
     this build does not know would otherwise be left out silently.

Not here: what the tensors are for (the families), how they are stored (gguf.py).
"""

import math
from pathlib import Path

from localllm.errors import BadFile, UnsupportedModel
from localllm.gguf import GgufFile, shown
from localllm.models.spec import Linear, Norm, NormKind, Pooling, Vector, Weight

MAX_LAYERS = 512
MAX_WIDTH = 1 << 20
MAX_HEADS = 1 << 12
MAX_HEAD_DIM = 1 << 12
MAX_CONTEXT = (1 << 31) - 1
MAX_VOCAB = 1 << 23
MAX_NAMED = 4  # unused tensors that an error message lists
# `pooling_type` as llama.cpp numbers it. Who asks a model without one for an embedding means the
# state of the last token, the only one that has seen the whole text.
POOLINGS: dict[int, Pooling] = {0: "last", 1: "mean", 2: "first", 3: "last"}
NEVER_WEIGHTS = ("I8", "I16", "I32", "I64", "Q8_1", "Q8_K")

# Keys that change the arithmetic in ways no family here knows, and the value that means "off".
FOREIGN_KEYS: tuple[tuple[str, float, str], ...] = (
    ("expert_count", 0, "mixture of experts"),
    ("attention.max_alibi_bias", 0, "ALiBi position biases"),
    ("attention.clamp_kqv", 0, "clamped queries, keys and values"),
    ("attention.causal", 1, "attention that is not causal"),
    ("attention.shared_kv_layers", 0, "layers that share keys and values"),
    ("embedding_length_per_layer_input", 0, "per-layer embeddings"),
)


class Checkpoint:
    """A file, the context it is opened for, and which of its tensors were used so far."""

    def __init__(self, file: GgufFile, num_ctx: int | None) -> None:
        self.path: Path = file.path
        self.metadata = file.metadata
        self.tensors = file.tensors
        self.architecture = file.architecture
        self.num_ctx = num_ctx
        self.used: set[str] = set()
        self.refuse_foreign_keys()
        n = self.num_layers = self.integer("block_count", minimum=1, maximum=MAX_LAYERS)
        self.context_length = self.integer("context_length", minimum=1, maximum=MAX_CONTEXT)
        self.embedding_length = self.integer("embedding_length", minimum=1, maximum=MAX_WIDTH)
        self.num_heads = self.per_layer("attention.head_count", n, None, MAX_HEADS)
        self.num_kv_heads = self.per_layer("attention.head_count_kv", n, self.num_heads, MAX_HEADS)
        self.ffn_lengths = self.per_layer("feed_forward_length", n, None, MAX_WIDTH)
        for i, (heads, kv_heads) in enumerate(zip(self.num_heads, self.num_kv_heads)):
            if heads % kv_heads:
                raise self.bad(f"layer {i} has {heads} query heads for {kv_heads} key heads")
        self.head_dim = self.integer(
            "attention.key_length",
            self.embedding_length // self.num_heads[0],
            minimum=1,
            maximum=MAX_HEAD_DIM,
        )
        value_dim = self.integer("attention.value_length", self.head_dim)
        if value_dim != self.head_dim:
            raise UnsupportedModel(
                f"{self.architecture}: value heads of {value_dim}, key heads of {self.head_dim}"
            )
        self.vocab_size = self.read_vocab_size()

    def refuse_foreign_keys(self) -> None:
        for name, off, meaning in FOREIGN_KEYS:
            value = self.metadata.get(f"{self.architecture}.{name}", off)
            if isinstance(value, str | list):
                raise self.bad(f"{self.architecture}.{name} is not a number")
            if value != off:
                raise UnsupportedModel(f"{self.architecture}: {meaning} ({name} is {value})")

    def pooling(self) -> Pooling:
        """Which hidden states make an embedding. Raises UnsupportedModel for a reranker."""
        number = self.integer("pooling_type", 0)
        if number not in POOLINGS:
            raise UnsupportedModel(f"{self.architecture}: pooling_type is {number}")
        return POOLINGS[number]

    def read_vocab_size(self) -> int:
        """Rows of the embedding table, which the tokens must fit into."""
        table = self.tensors.get("token_embd.weight")
        if table is None:
            raise self.bad("the tensor token_embd.weight is missing")
        if not 1 <= table.rows <= MAX_VOCAB:
            raise self.bad(f"token_embd.weight has {table.rows} rows")
        stated = self.integer("vocab_size", table.rows)
        num_tokens = self.metadata.length("tokenizer.ggml.tokens")
        if stated != table.rows or num_tokens > table.rows:
            raise self.bad(
                f"token_embd.weight has {table.rows} rows, expected {max(stated, num_tokens)}"
            )
        return table.rows

    def bad(self, what: str) -> BadFile:
        return BadFile(f"{self.path}: {what}")

    # Hyper-parameters: names without the architecture's prefix.

    def has_key(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.metadata

    def integer(
        self,
        name: str,
        default: int | None = None,
        *,
        minimum: int = 0,
        maximum: int = MAX_CONTEXT,
    ) -> int:
        key = f"{self.architecture}.{name}"
        if default is not None and key not in self.metadata:
            value = default
        else:
            value = self.metadata.int(key)
        if not minimum <= value <= maximum:
            raise self.bad(f"{key} is {value}, expected {minimum} to {maximum}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        key = f"{self.architecture}.{name}"
        if default is not None and key not in self.metadata:
            return default
        value = self.metadata.float(key)
        if not math.isfinite(value):
            raise self.bad(f"{key} is {value}, not finite")
        return value

    def text(self, name: str, default: str) -> str:
        return self.metadata.str(f"{self.architecture}.{name}", default)

    def flag(self, name: str, *, default: bool) -> bool:
        return self.metadata.bool(f"{self.architecture}.{name}", default)

    def per_layer(
        self, name: str, num_layers: int, default: list[int] | None, maximum: int
    ) -> list[int]:
        """One positive number a layer, from a number or a list."""
        key = f"{self.architecture}.{name}"
        if default is not None and key not in self.metadata:
            return default
        values = self.metadata.ints_per_layer(key, num_layers)
        for i, value in enumerate(values):
            if value == 0:
                raise UnsupportedModel(f"{self.architecture}: layer {i} without {name}")
            if value > maximum:
                raise self.bad(f"{key} is {value} in layer {i}, expected at most {maximum}")
        return values

    def windows(self, window: int, period: int) -> list[int | None]:
        """Attention window of each layer: None is all positions.

        `attention.sliding_window_pattern` is a period (its last layer sees everything) or one flag
        a layer; `window` and `period` are the family's defaults.
        """
        n = self.num_layers
        window = self.integer("attention.sliding_window", window)
        key = f"{self.architecture}.attention.sliding_window_pattern"
        if isinstance(self.metadata.get(key), list):
            is_local = [bool(v) for v in self.metadata.ints_per_layer(key, n)]
        else:
            period = self.integer("attention.sliding_window_pattern", period, minimum=1)
            is_local = [i % period < period - 1 for i in range(n)]
        if window and any(is_local):
            self.refuse_other_heads("attention.key_length")
            self.refuse_other_heads("rope.dimension_count")
        return [window if local and window else None for local in is_local]

    def refuse_other_heads(self, name: str) -> None:
        """Layers with a window have heads of their own size in some families, none of these."""
        size = self.integer(f"{name}_swa", self.integer(name, self.head_dim))
        if size != self.integer(name, self.head_dim):
            raise UnsupportedModel(f"{self.architecture}: {name}_swa is {size}, {name} is not")

    # Tensors.

    def has(self, name: str) -> bool:
        return name in self.tensors

    def skip(self, name: str) -> None:
        """Say that a tensor is left out on purpose."""
        self.used.add(name)

    def check_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise self.bad(f"the tensor {name} is missing")
        if tensor.shape not in shapes:
            raise self.bad(
                f"tensor {name} has shape {list(tensor.shape)}, expected {list(shapes[0])}"
            )
        if tensor.type.name in NEVER_WEIGHTS:
            raise UnsupportedModel(f"{self.architecture}: tensor {name} of type {tensor.type}")
        self.used.add(name)

    def weight(self, name: str, rows: int, cols: int) -> Weight:
        self.check_shape(name, (rows, cols))
        return Weight(name, rows, cols)

    def vector(self, name: str, size: int, *flattened: tuple[int, ...]) -> Vector:
        self.check_shape(name, (size,), *flattened)
        return Vector(name, size)

    def values(self, name: str, size: int) -> list[float]:
        """The numbers themselves, for what is worked out at load."""
        self.check_shape(name, (size,))
        return [float(v) for v in self.tensors[name].dequantize()]

    def linear(self, name: str, rows: int, cols: int) -> Linear:
        """`name`.weight, and `name`.bias where the file has one."""
        weight = self.weight(f"{name}.weight", rows, cols)
        bias = f"{name}.bias"
        return Linear(weight, self.vector(bias, rows) if self.has(bias) else None)

    def cut(self, fused: str, parts: dict[str, int], cols: int) -> list[Linear]:
        """Linears that lie in one tensor, in this order, or in a tensor each.

        parts  name and rows of each
        """
        if any(self.has(f"{name}.weight") for name in parts if name != fused) or not self.has(
            f"{fused}.weight"
        ):
            return [self.linear(name, rows, cols) for name, rows in parts.items()]
        whole = self.linear(fused, sum(parts.values()), cols)
        linears, first = [], 0
        for rows in parts.values():
            weight = Weight(whole.weight.name, rows, cols, first)
            bias = whole.bias and Vector(whole.bias.name, rows, first)
            linears.append(Linear(weight, bias))
            first += rows
        return linears

    def norm(self, name: str, kind: NormKind, size: int, *flattened: tuple[int, ...]) -> Norm:
        """`name`.weight, and for a layer norm `name`.bias where the file has one."""
        weight = self.vector(f"{name}.weight", size, *flattened)
        bias = f"{name}.bias"
        has_bias = kind == "layer" and self.has(bias)
        return Norm(
            kind,
            self.epsilon(kind),
            weight,
            self.vector(bias, size, *flattened) if has_bias else None,
        )

    def epsilon(self, kind: NormKind) -> float:
        name = (
            "attention.layer_norm_rms_epsilon" if kind == "rms" else "attention.layer_norm_epsilon"
        )
        eps = self.number(name)
        if not 0 <= eps <= 1:
            raise self.bad(f"{self.architecture}.{name} is {eps}, expected 0 to 1")
        return eps

    def check_all_used(self) -> None:
        unused = sorted(self.tensors.keys() - self.used)
        if unused:
            more = f" and {len(unused) - MAX_NAMED} more" if len(unused) > MAX_NAMED else ""
            raise UnsupportedModel(
                f"{self.architecture}: nothing here uses the tensors "
                f"{', '.join(map(shown, unused[:MAX_NAMED]))}{more}"
            )
