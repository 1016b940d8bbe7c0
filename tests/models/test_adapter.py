"""Which adapter files are refused, and with what words."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from adapter_case import finish, random_pairs, write_adapter

from localllm.errors import BadFile, UnsupportedModel
from localllm.gguf import GgufFile
from localllm.models import read_spec
from localllm.models.adapter import Adapter, linears_of

Q, DOWN = "blk.0.attn_q.weight", "blk.1.ffn_down.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    from byte_model import write_tiny_model

    path = tmp_path_factory.mktemp("base") / "tiny.gguf"
    write_tiny_model(path)
    return GgufFile.open(path)


def apply(base: GgufFile, path: Path):
    return Adapter(GgufFile.open(path)).apply(read_spec(base))


def test_an_adapter_names_its_linears_and_leaves_the_rest(base: GgufFile, tmp_path: Path) -> None:
    pairs = random_pairs(base, [Q, DOWN], [4, 2])
    spec = apply(base, write_adapter(tmp_path / "a.gguf", pairs, alpha=8.0))
    low = {x.weight.name: x.low_rank for x in linears_of(spec) if x.low_rank is not None}
    assert low.keys() == {Q, DOWN}
    assert (low[Q].down.name, low[Q].up.name) == (f"{Q}.lora_a", f"{Q}.lora_b")
    assert (low[Q].scale, low[DOWN].scale) == (2.0, 4.0)
    plain = read_spec(base)
    assert spec.layers[0].k == plain.layers[0].k
    assert spec.output == plain.output


def test_a_fused_weight_is_cut_like_its_adapter(tmp_path: Path) -> None:
    """phi3 keeps q, k and v in one tensor: the three parts share A and have their rows of B."""
    writer = gguf.GGUFWriter(tmp_path / "phi3.gguf", "phi3")
    rng = np.random.default_rng(1)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(24)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {
        **{"token_embd": (40, 16), "output": (40, 16), "output_norm": (16,)},
        **{"blk.0.attn_qkv": (32, 16), "blk.0.attn_output": (16, 16), "blk.0.attn_norm": (16,)},
        **{"blk.0.ffn_norm": (16,), "blk.0.ffn_up": (48, 16), "blk.0.ffn_down": (16, 24)},
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    finish(writer)
    base = GgufFile.open(tmp_path / "phi3.gguf")
    pairs = random_pairs(base, ["blk.0.attn_qkv.weight", "blk.0.ffn_up.weight"], [4])
    layer = apply(base, write_adapter(tmp_path / "a.gguf", pairs, arch="phi3")).layers[0]
    ups = [linear.low_rank.up for linear in (layer.q, layer.k, layer.v)]
    assert [(up.first_row, up.rows) for up in ups] == [(0, 16), (16, 8), (24, 8)]
    assert layer.ffn.gate.low_rank.up.first_row == 0
    assert layer.ffn.up.low_rank.up.first_row == 24
    # Rows that belong to none of the parts are no adapter of this model.
    a, b = pairs["blk.0.attn_qkv.weight"]
    too_long = {"blk.0.attn_qkv.weight": (a, np.concatenate([b, b[:8]]))}
    with pytest.raises(
        BadFile, match=r"'blk\.0\.attn_qkv\.weight' has 40 rows, the model's has 32"
    ):
        apply(base, write_adapter(tmp_path / "b.gguf", too_long, arch="phi3"))


def matrices(rows: int = 32, cols: int = 32, rank: int = 4, rank_b: int | None = None):
    return np.zeros((rank, cols), np.float32), np.zeros((rows, rank_b or rank), np.float32)


@pytest.mark.parametrize(
    ("pairs", "fields", "error", "words"),
    [
        ({Q: matrices()}, {"kind": "model"}, BadFile, "is of type 'model', not an adapter"),
        ({Q: matrices()}, {"arch": "gemma"}, BadFile, "adapter for 'gemma', the model is llama"),
        ({Q: matrices()}, {"alpha": None}, BadFile, "adapter.lora.alpha"),
        ({Q: matrices()}, {"alpha": float("nan")}, BadFile, "adapter.lora.alpha"),
        ({Q: matrices()}, {"alpha": float("inf")}, BadFile, "adapter.lora.alpha is inf"),
        ({}, {}, BadFile, "holds no tensors"),
        ({Q: matrices(cols=31)}, {}, BadFile, f"'{Q}' has 31 columns, the model's has 32"),
        ({Q: matrices(rows=33)}, {}, BadFile, f"'{Q}' has 33 rows, the model's has 32"),
        ({Q: matrices(rank_b=5)}, {}, BadFile, f"'{Q}' has ranks 4 and 5"),
        ({Q: matrices(rank=5000)}, {}, BadFile, f"'{Q}' has ranks 5000 and 5000"),
        (
            {"blk.7.attn_q.weight": matrices()},
            {},
            UnsupportedModel,
            "the model has no linears 'blk.7.attn_q.weight'; is it the adapter's base",
        ),
        (
            {"token_embd.weight": matrices(258)},
            {},
            UnsupportedModel,
            "has no linears 'token_embd.weight'",
        ),
        (
            {"blk.0.attn_norm.weight": matrices()},
            {},
            UnsupportedModel,
            "has no linears 'blk.0.attn_norm.weight'",
        ),
        (
            {Q: matrices()},
            {"extra": {"blk.0.attn_norm.weight": np.ones(32, np.float32)}},
            UnsupportedModel,
            "the tensor 'blk.0.attn_norm.weight' is no part of a LoRA adapter",
        ),
        (
            {},
            {"extra": {f"{Q}.lora_a": np.ones((4, 32), np.float32)}},
            BadFile,
            f"has '{Q}.lora_a', but not '{Q}.lora_b'",
        ),
        (
            {},
            {
                "extra": {
                    f"{Q}.lora_a": np.ones((4, 32), np.int32),
                    f"{Q}.lora_b": np.ones((32, 4), np.float32),
                }
            },
            BadFile,
            f"'{Q}.lora_a' is no matrix of numbers",
        ),
    ],
)
def test_refusals(base, tmp_path: Path, pairs, fields, error, words: str) -> None:
    path = write_adapter(tmp_path / "a.gguf", pairs, **fields)
    with pytest.raises(error, match=words) as raised:
        apply(base, path)
    assert str(path) in str(raised.value)


def test_an_activated_adapter_is_refused(base: GgufFile, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 1.0)
    writer.add_array("adapter.alora.invocation_tokens", [1, 2])
    finish(writer)
    with pytest.raises(UnsupportedModel, match="adapters of type 'alora' are not supported"):
        apply(base, tmp_path / "a.gguf")


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a.gguf", {Q: matrices()})
    with pytest.raises(UnsupportedModel, match="is of type 'adapter', not a model"):
        read_spec(GgufFile.open(path))
