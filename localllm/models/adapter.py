"""LoRA adapters: a file of small matrices that change some of a model's linears.

A linear W x + b with an adapter is W x + b + scale * B (A x). A is the tensor `<weight>.lora_a`,
[rank, columns of W], B is `<weight>.lora_b`, [rows of W, rank], and scale is alpha / rank.

Promises: everything in the file is applied, or it is refused with the name of what is not; shapes
are those of the model, ranks are bounded, and nothing is expanded but what has no float type.

Not here: arithmetic (backends/).
Source: the file's layout is that of llama.cpp's convert_lora_to_gguf.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np

from localllm.errors import BadFile, UnsupportedModel
from localllm.gguf import GgufFile, Tensor, shown
from localllm.models.checkpoint import MAX_NAMED, NEVER_WEIGHTS
from localllm.models.spec import Layer, Linear, LowRank, ModelSpec, Weight
from localllm.quants import BY_NAME, Floats

A, B = ".lora_a", ".lora_b"
MAX_RANK = 1 << 12
MAX_ALPHA = 1 << 20
FLOATS = ("F32", "F16", "BF16")
# Rows that are shorter than a vector of the kernels are filled up with zeros.
SHORTEST_ROW_BYTES, SHORTEST_RANK = 16, 4
ROOM = 64  # values behind a tensor that is made here


class Adapter:
    """An open adapter file, checked by itself; `apply` checks it against a model.

    pairs  A and B by the name of their weight
    """

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self.metadata = file.metadata
        self._check_kind()
        self.architecture = file.architecture
        self.alpha = self._read_alpha()
        self.pairs = self._read_pairs(file)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The matrices as they are multiplied, by their names in the file."""
        downs = {down.name: runnable(down, is_up=False) for down, _ in self.pairs.values()}
        return downs | {up.name: runnable(up, is_up=True) for _, up in self.pairs.values()}

    def joined(self, file: GgufFile) -> GgufFile:
        """The model's file with the adapter's tensors beside its own."""
        return GgufFile(file.path, file.metadata, {**file.tensors, **self.tensors})

    def apply(self, spec: ModelSpec) -> ModelSpec:
        """`spec` with this adapter in its linears. Raises BadFile, UnsupportedModel."""
        if self.architecture != spec.architecture:
            raise self.bad(
                f"is an adapter for {shown(self.architecture)}, the model is {spec.architecture}"
            )
        used: set[str] = set()

        def adapt(linear: Linear) -> Linear:
            name = linear.weight.name
            # A shared embedding table is no linear that an adapter could mean.
            if name not in self.pairs or name == spec.token_embd.name:
                return linear
            used.add(name)
            return replace(linear, low_rank=self._low_rank(linear.weight))

        layers = tuple(adapt_layer(layer, adapt) for layer in spec.layers)
        adapted = replace(spec, layers=layers, output=adapt(spec.output))
        self._check_all_used(used)
        self._check_rows(adapted)
        return adapted

    def bad(self, what: str) -> BadFile:
        return BadFile(f"{self.path}: {what}")

    def _check_kind(self) -> None:
        kind = self.metadata.str("general.type", "model")
        if kind != "adapter":
            raise self.bad(f"is of type {shown(kind)}, not an adapter")
        kind = self.metadata.str("adapter.type", "lora")
        if kind != "lora" or "adapter.alora.invocation_tokens" in self.metadata:
            name = kind if kind != "lora" else "alora"
            raise UnsupportedModel(f"{self.path}: adapters of type {shown(name)} are not supported")

    def _read_alpha(self) -> float:
        alpha = self.metadata.float("adapter.lora.alpha")
        if not abs(alpha) <= MAX_ALPHA:
            raise self.bad(f"adapter.lora.alpha is {alpha}")
        return alpha

    def _read_pairs(self, file: GgufFile) -> dict[str, tuple[Tensor, Tensor]]:
        """Both matrices of each weight. Raises for a tensor that is neither."""
        if not file.tensors:
            raise self.bad("holds no tensors")
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, tensor in file.tensors.items():
            if not name.endswith((A, B)):
                raise UnsupportedModel(
                    f"{self.path}: the tensor {shown(name)} is no part of a LoRA adapter"
                )
            base, kind = name[: -len(A)], name[-len(A) :]
            other = base + (B if kind == A else A)
            if other not in file.tensors:
                raise self.bad(f"has {shown(name)}, but not {shown(other)}")
            if len(tensor.shape) != 2 or tensor.type.name in NEVER_WEIGHTS:
                raise self.bad(
                    f"the tensor {shown(name)} is no matrix of numbers "
                    f"({tensor.type.name}, shape {list(tensor.shape)})"
                )
            if kind == A:
                pairs[base] = tensor, file.tensors[other]
        for name, (down, up) in pairs.items():
            if down.rows != up.cols or not 1 <= down.rows <= MAX_RANK:
                raise self.bad(
                    f"{shown(name)} has ranks {down.rows} and {up.cols}, expected one of 1 to "
                    f"{MAX_RANK}"
                )
        return pairs

    def _low_rank(self, weight: Weight) -> LowRank:
        """The matrices of a weight, or of the part of a fused one that it is."""
        down, up = self.pairs[weight.name]
        if down.cols != weight.cols:
            raise self._misfit(weight.name, weight.cols, "columns", down.cols)
        rank = max(down.rows, SHORTEST_RANK)
        return LowRank(
            down=Weight(down.name, rank, weight.cols),
            up=Weight(up.name, weight.rows, rank, weight.first_row),
            # An alpha of 0 is how converters say that there is none.
            scale=self.alpha / down.rows if self.alpha else 1.0,
        )

    def _check_all_used(self, used: set[str]) -> None:
        unused = sorted(self.pairs.keys() - used)
        if unused:
            more = f" and {len(unused) - MAX_NAMED} more" if len(unused) > MAX_NAMED else ""
            raise UnsupportedModel(
                f"{self.path}: the model has no linears "
                f"{', '.join(map(shown, unused[:MAX_NAMED]))}{more}; is it the adapter's base?"
            )

    def _check_rows(self, spec: ModelSpec) -> None:
        """All rows of a weight belong to the linears that it is cut into."""
        rows: dict[str, int] = {}
        for linear in linears_of(spec):
            weight = linear.weight
            rows[weight.name] = max(rows.get(weight.name, 0), weight.first_row + weight.rows)
        for name, (_, up) in self.pairs.items():
            if up.rows != rows[name]:
                raise self._misfit(name, rows[name], "rows", up.rows)

    def _misfit(self, name: str, wanted: int, what: str, found: int) -> BadFile:
        return self.bad(f"{shown(name)} has {found} {what}, the model's has {wanted}")


def linears_of(spec: ModelSpec) -> list[Linear]:
    """All linears of a model."""
    found: list[Linear] = []

    def look(linear: Linear) -> Linear:
        found.append(linear)
        return linear

    for layer in spec.layers:
        adapt_layer(layer, look)
    return [*found, spec.output]


def adapt_layer(layer: Layer, adapt: Callable[[Linear], Linear]) -> Layer:
    """`layer` with every linear replaced."""
    ffn = layer.ffn
    return replace(
        layer,
        q=adapt(layer.q),
        k=adapt(layer.k),
        v=adapt(layer.v),
        attn_output=adapt(layer.attn_output),
        ffn=replace(
            ffn,
            up=adapt(ffn.up),
            down=adapt(ffn.down),
            gate=None if ffn.gate is None else adapt(ffn.gate),
        ),
    )


def runnable(tensor: Tensor, *, is_up: bool) -> Tensor:
    """The tensor if the kernels take it as it is, else a copy: float32, the rank filled up."""
    rank = tensor.cols if is_up else tensor.rows
    is_long = tensor.row_bytes >= SHORTEST_ROW_BYTES and rank >= SHORTEST_RANK
    if tensor.type.name in FLOATS and is_long:
        return tensor
    values = tensor.dequantize()
    missing = max(0, SHORTEST_RANK - rank)
    filled = np.pad(values, ((0, 0), (0, missing)) if is_up else ((0, missing), (0, 0)))
    return in_memory(tensor.name, filled)


def in_memory(name: str, values: Floats) -> Tensor:
    """A float32 tensor that is in no file."""
    # Kernels may read a little past a tensor's end.
    data = np.zeros(values.size + ROOM, np.float32)
    data[: values.size] = values.reshape(-1)
    data.flags.writeable = False
    return Tensor(name, BY_NAME["F32"], values.shape, data.view(np.uint8), 0)
