"""Tiny models of what real files do and the shared fixtures do not: each is a fixture, changed.

`variants.npz` holds llama.cpp's logits after the tokens of `ROWS`, float32 [rows, vocab], for each
(llama-cpp-python 0.3.36 on the CPU, float32 KV, no flash attention).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Description = dict[str, Any]

ROWS = (19, 39, 59, 79)
FLOAT, INT, BOOL, STRING, ARRAY, INT32 = 6, 4, 7, 8, 9, 5
KINDS = {float: FLOAT, int: INT, bool: BOOL, str: STRING, list: ARRAY}
WIDTH, FFN_WIDTH = 256, 384
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}


@dataclass(frozen=True)
class Variant:
    """base     name of the fixture
    keys        hyper-parameters to set; None: to remove
    drop        tensors whose name, or a dotted part of it, begins so are left out
    add         tensors to add: name and shape
    num_layers  copies of layer 0
    heads       query heads, key heads, head dimension
    num_ctx     the context the model is opened for
    """

    base: str
    keys: dict[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    add: dict[str, list[int]] = field(default_factory=dict)
    num_layers: int | None = None
    heads: tuple[int, int, int] | None = None
    num_ctx: int = 512

    def describe(self, read: Callable[[str], Description]) -> Description:
        d = read(f"{self.base}-dense")
        tensors = [t for t in d["tensors"] if not any(f".{s}" in f".{t[0]}" for s in self.drop)]
        assert not self.add.keys() & {name for name, _, _ in tensors}
        for name, shape in self.add.items():
            is_matrix = len(shape) == 2 and "norm" not in name
            tensors.append([name, shape, "F16" if is_matrix else "F32"])
        keys = dict(self.keys)
        if self.num_layers is not None:
            first = [t for t in tensors if t[0].startswith("blk.0.")]
            tensors = [t for t in tensors if not t[0].startswith("blk.")]
            for i in range(self.num_layers):
                tensors += [[t[0].replace("blk.0.", f"blk.{i}."), *t[1:]] for t in first]
            keys |= {"block_count": self.num_layers, "attention.sliding_window_pattern": None}
        if self.heads is not None:
            tensors = [[name, self.resized(name, shape), type] for name, shape, type in tensors]
            keys |= self.head_keys()
        d["tensors"] = tensors
        set_keys(d, keys)
        return d

    def head_keys(self) -> dict[str, int]:
        assert self.heads is not None
        nh, nkv, hd = self.heads
        keys = {"attention.head_count": nh, "attention.head_count_kv": nkv}
        for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            keys |= {name: hd, f"{name}_swa": hd}
        return keys

    def resized(self, name: str, shape: list[int]) -> list[int]:
        assert self.heads is not None
        nh, nkv, hd = self.heads
        rows = {"attn_q.": nh * hd, "attn_k.": nkv * hd, "attn_v.": nkv * hd}
        for part, size in rows.items():
            if part in name:
                return [size, *shape[1:]]
        if "attn_output.weight" in name:
            return [shape[0], nh * hd]
        if "_q_norm" in name or "_k_norm" in name:
            return [hd]
        return [hd // 2] if "rope_f" in name else shape


def set_keys(d: Description, keys: dict[str, Any]) -> None:
    """Replace hyper-parameters, and the vocabulary by none at all."""
    named = {f"{d['arch']}.{name}": value for name, value in keys.items()}
    # llama.cpp takes a model without a tokenizer, but not the fixtures' "test" one.
    named["tokenizer.ggml.model"] = "none"
    kept = [m for m in d["metadata"] if m[0] not in named]
    d["metadata"] = [
        m
        for m in kept
        if not m[0].startswith("tokenizer.ggml.") and not m[0].endswith(".deepstack_mapping")
    ]
    for key, value in named.items():
        if value is not None:
            item = INT32 if isinstance(value, list) else None
            d["metadata"].append([key, KINDS[type(value)], item, value])


def per_layer(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    return {f"blk.{i}.{name}": shape for i in range(2) for name, shape in shapes.items()}


VARIANTS = {
    "llama-grouped-heads": Variant("llama", heads=(8, 2, 32)),
    "llama-linear-rope": Variant(
        "llama",
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        drop=("rope_freqs",),
    ),
    "llama-yarn": Variant("llama", YARN, drop=("rope_freqs",)),
    "llama-yarn-with-factors": Variant("llama", YARN | {"rope.scaling.attn_factor": 0.8}),
    "llama-fused-qkv": Variant(
        "llama",
        drop=("attn_q.", "attn_k.", "attn_v."),
        add=per_layer({"attn_qkv.weight": [3 * WIDTH, WIDTH], "attn_qkv.bias": [3 * WIDTH]}),
    ),
    "llama-biases": Variant(
        "llama",
        add=per_layer(
            {f"attn_{part}.bias": [WIDTH] for part in ("q", "k", "v", "output")}
            | {"ffn_gate.bias": [FFN_WIDTH], "ffn_up.bias": [FFN_WIDTH], "ffn_down.bias": [WIDTH]}
        ),
    ),
    "llama-tied": Variant("llama", drop=("output.weight",)),
    "mistral3-temperature": Variant(
        "mistral3",
        YARN
        | {
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.1,
        },
        drop=("rope_freqs",),
    ),
    "mistral3-log-multiplier": Variant(
        "mistral3",
        YARN | {"rope.scaling.factor": 16.0, "rope.scaling.yarn_log_multiplier": 0.7},
        drop=("rope_freqs",),
    ),
    "smollm3-no-rope-layer": Variant("smollm3", num_layers=4),
    "phi3-short-factors": Variant(
        "phi3",
        {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": 512,
            "rope.scaling.attn_factor": 1.19,
        },
        num_ctx=256,
    ),
    "phi3-partial-rope": Variant(
        "phi3",
        {"rope.dimension_count": 96},
        drop=("rope_factors",),
        add={"rope_factors_long.weight": [48], "rope_factors_short.weight": [48]},
    ),
    "granite-multipliers": Variant(
        "granite",
        {
            "embedding_scale": 3.0,
            "residual_scale": 0.22,
            "attention.scale": 0.015625,
            "logit_scale": 8.0,
        },
        heads=(8, 4, 32),
    ),
    "granite-no-rope": Variant("granite", {"rope.scaling.finetuned": False}),
    "minicpm-old": Variant(
        "minicpm", {"embedding_scale": None, "residual_scale": None, "logit_scale": None}
    ),
    "gemma-one-key-head": Variant("gemma", heads=(8, 1, 64)),
    "gemma2-low-caps": Variant(
        "gemma2",
        {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0},
        num_layers=3,
        heads=(4, 2, 64),
    ),
    "gemma3-two-bases": Variant(
        "gemma3",
        {
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": None,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        num_layers=7,
        heads=(4, 1, 64),
    ),
    "gemma3-final-cap": Variant("gemma3", {"final_logit_softcapping": 7.0}),
    "olmo2-windows-yarn": Variant("olmo2", YARN, num_layers=4),
    "olmo2-no-windows": Variant(
        "olmo2", {"attention.sliding_window": None, "attention.sliding_window_pattern": None}
    ),
    "command-r-head-norms": Variant(
        "command-r",
        {"logit_scale": 0.0625},
        add={"blk.0.attn_q_norm.weight": [2, 128], "blk.0.attn_k_norm.weight": [2, 128]},
        num_layers=64,
    ),
    "cohere2-full-layer": Variant("cohere2", {"logit_scale": 0.25}, num_layers=4, heads=(4, 2, 64)),
    "glm4-text": Variant("glm4", {"rope.dimension_sections": None, "rope.dimension_count": 64}),
    "glm4-vision": Variant(
        "glm4", {"rope.dimension_sections": [8, 12, 12, 0], "rope.dimension_count": 64}
    ),
    "stablelm-parallel": Variant("stablelm", {"rope.dimension_count": 32}, drop=("ffn_norm",)),
    "starcoder2-grouped-heads": Variant("starcoder2", heads=(8, 2, 32)),
    "exaone4-windows": Variant("exaone4", num_layers=64),
    "qwen2-grouped-heads-yarn": Variant("qwen2", YARN, heads=(8, 2, 32)),
    "qwen3-yarn": Variant("qwen3", YARN),
    "internlm2-grouped-heads": Variant("internlm2", heads=(8, 2, 32)),
}
