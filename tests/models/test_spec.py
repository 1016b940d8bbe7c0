"""What the readers say about a file: fused tensors, tied heads, windows, KV groups."""

import math

import pytest
from variants import Variant

from localllm.models import read_spec
from localllm.models.spec import KVGroup, Vector, Weight


def spec_of(variant: Variant, describe, write_model):
    return read_spec(write_model(variant.describe(describe)), variant.num_ctx)


def test_fused_tensors_become_row_ranges(describe, write_model) -> None:
    shapes = {"blk.0.attn_qkv.weight": [128 + 64, 256], "blk.0.attn_qkv.bias": [192]}
    variant = Variant(
        "phi3",
        {"block_count": 1},
        drop=("attn_q.", "attn_k.", "attn_v.", "blk.1."),
        add=shapes,
        heads=(4, 1, 32),
    )
    layer = spec_of(variant, describe, write_model).layers[0]
    assert layer.q.weight == Weight("blk.0.attn_qkv.weight", 128, 256, 0)
    assert layer.k.weight == Weight("blk.0.attn_qkv.weight", 32, 256, 128)
    assert layer.v.weight == Weight("blk.0.attn_qkv.weight", 32, 256, 160)
    assert layer.v.bias == Vector("blk.0.attn_qkv.bias", 32, 160)
    assert layer.ffn.gate is not None
    assert layer.ffn.gate.weight == Weight("blk.0.ffn_up.weight", 384, 256, 0)
    assert layer.ffn.up.weight == Weight("blk.0.ffn_up.weight", 384, 256, 384)


def test_tied_head_is_the_embedding_table(describe, write_model) -> None:
    spec = spec_of(Variant("llama", drop=("output.weight",)), describe, write_model)
    assert spec.output.weight == spec.token_embd == Weight("token_embd.weight", 128, 256)


@pytest.mark.parametrize(
    ("base", "num_layers", "windowed"),
    [
        ("gemma2", 4, (0, 2)),
        ("gemma3", 7, (0, 1, 2, 3, 4, 6)),
        ("cohere2", 5, (0, 1, 2, 4)),
        ("olmo2", 5, (0, 1, 2, 4)),
        ("phi3", 2, ()),
    ],
)
def test_windows_follow_the_period_of_the_family(
    base: str, num_layers: int, windowed: tuple[int, ...], describe, write_model
) -> None:
    spec = spec_of(Variant(base, num_layers=num_layers), describe, write_model)
    found = tuple(i for i, x in enumerate(spec.layers) if x.attention.window == 32)
    assert found == windowed
    assert all(x.attention.window in (None, 32) for x in spec.layers)


def test_layers_of_one_kind_share_a_kv_group(describe, write_model) -> None:
    spec = spec_of(Variant("gemma3", num_layers=7), describe, write_model)
    assert spec.kv_groups == (
        KVGroup((0, 1, 2, 3, 4, 6), 2, 128, 32),
        KVGroup((5,), 2, 128, None),
    )
    assert spec.group_of(6) == (0, 5)


@pytest.mark.parametrize(("base", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_27b_scale_scores_by_width_over_heads(
    base: str, num_layers: int, describe, write_model
) -> None:
    variant = Variant(base, num_layers=num_layers, heads=(4, 2, 32))
    spec = spec_of(variant, describe, write_model)
    assert spec.layers[0].attention.scale == pytest.approx(1 / math.sqrt(256 / 4))


def test_head_counts_may_differ_by_layer(describe, write_model) -> None:
    d = describe("llama-dense")
    d["metadata"] = [m for m in d["metadata"] if not m[0].endswith("head_count_kv")]
    d["metadata"].append(["llama.attention.head_count_kv", 9, 5, [2, 1]])
    d["tensors"] = [
        [n, [128, 256] if n in ("blk.1.attn_k.weight", "blk.1.attn_v.weight") else s, t]
        for n, s, t in d["tensors"]
    ]
    spec = read_spec(write_model(d))
    assert [layer.attention.num_kv_heads for layer in spec.layers] == [2, 1]
    assert len(spec.kv_groups) == 2
