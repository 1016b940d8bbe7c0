"""A model that would be computed wrongly, or a file that contradicts itself, is refused by name."""

import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from variants import KINDS, Variant, set_keys

from localllm.errors import BadFile, LocalLLMError, UnsupportedModel
from localllm.gguf import GgufFile
from localllm.models import READERS, read_spec


def test_every_other_architecture_is_refused(shared_data: Path, describe, write_model) -> None:
    supported = {f"{name}-dense" for name in READERS}
    names = sorted(path.stem for path in (shared_data / "archs").glob("*.json"))
    refused = [name for name in names if name not in supported]
    assert len(refused) > 90
    for name in refused:
        with pytest.raises(UnsupportedModel) as caught:
            read_spec(write_model(describe(name)))
        assert describe(name)["arch"] in str(caught.value)
        assert "\n" not in str(caught.value)


def test_experts_are_named(describe, write_model) -> None:
    with pytest.raises(UnsupportedModel, match="llama: mixture of experts"):
        read_spec(write_model(describe("llama-moe")))


def test_unused_tensors_are_named(describe, write_model) -> None:
    add = {"blk.0.attn_gate.weight": [256, 256], "blk.1.attn_q.scale": [1]}
    with pytest.raises(
        UnsupportedModel, match=r"'blk\.0\.attn_gate\.weight', 'blk\.1\.attn_q\.scale'"
    ):
        read_spec(write_model(Variant("llama", add=add).describe(describe)))


def test_missing_tensor_is_named(describe, write_model) -> None:
    variant = Variant("llama", drop=("blk.1.ffn_down",))
    with pytest.raises(BadFile, match=r"tensor blk\.1\.ffn_down\.weight is missing"):
        read_spec(write_model(variant.describe(describe)))


@pytest.mark.parametrize(
    ("tensor", "shape", "expected"),
    [
        ("blk.0.attn_q.weight", [128, 256], [256, 256]),
        ("blk.1.ffn_down.weight", [384, 256], [256, 384]),
        ("blk.0.attn_norm.weight", [1, 256], [256]),
        ("output.weight", [64, 256], [128, 256]),
        ("rope_freqs.weight", [32], [64]),
    ],
)
def test_wrong_shape_is_told_with_the_right_one(
    tensor: str, shape: list[int], expected: list[int], describe, write_model
) -> None:
    d = describe("llama-dense")
    d["tensors"] = [[n, shape if n == tensor else s, t] for n, s, t in d["tensors"]]
    message = re.escape(f"tensor {tensor} has shape {shape}, expected {expected}")
    with pytest.raises(BadFile, match=message):
        read_spec(write_model(d))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("block_count", 1_000_000_000),
        ("context_length", 0),
        ("embedding_length", 0),
        ("embedding_length", 512),
        ("attention.head_count", 3),
        ("attention.head_count", 1 << 31),
        ("attention.head_count_kv", 3),
        ("attention.key_length", 0),
        ("attention.layer_norm_rms_epsilon", None),
        ("attention.layer_norm_rms_epsilon", -1.0),
        ("rope.dimension_count", 0),
        ("rope.dimension_count", 63),
        ("rope.dimension_count", 256),
        ("rope.freq_base", 0.0),
        ("rope.freq_base", math.inf),
        ("rope.freq_base", "high"),
        ("rope.scaling.factor", -2.0),
        ("vocab_size", 129),
        ("expert_count", "many"),
    ],
)
def test_absurd_hyper_parameters_are_bad_files(key: str, value: Any, describe, write_model) -> None:
    with pytest.raises(BadFile):
        read_spec(write_model(Variant("llama", {key: value}).describe(describe)))


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("rope.scaling.type", "dynamic", "rope scaling 'dynamic'"),
        ("attention.causal", False, "not causal"),
        ("attention.max_alibi_bias", 8.0, "ALiBi"),
        ("attention.clamp_kqv", 8.0, "clamped"),
        ("attention.value_length", 64, "value heads of 64"),
        ("attention.head_count_kv", 0, "attention.head_count_kv"),
        ("feed_forward_length", 0, "feed_forward_length"),
        ("pooling_type", 4, "pooling_type is 4"),
    ],
)
def test_arithmetic_that_is_not_there_is_named(
    key: str, value: Any, named: str, describe, write_model
) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_spec(write_model(Variant("llama", {key: value}).describe(describe)))


def test_heads_of_windowed_layers_have_no_size_of_their_own(describe, write_model) -> None:
    variant = Variant("gemma3", {"attention.key_length_swa": 64})
    with pytest.raises(UnsupportedModel, match="key_length_swa is 64"):
        read_spec(write_model(variant.describe(describe)))


def test_an_adapter_is_not_a_model(describe, write_model) -> None:
    d = describe("llama-dense")
    d["metadata"].append(["general.type", KINDS[str], None, "adapter"])
    with pytest.raises(UnsupportedModel, match="'adapter', not a model"):
        read_spec(write_model(d))


def test_a_vocabulary_is_not_a_model(describe, write_model) -> None:
    d = describe("llama-dense")
    set_keys(d, {})
    d["tensors"] = []
    with pytest.raises(BadFile, match="holds no tensors"):
        read_spec(write_model(d))


def test_longrope_needs_its_factors(describe, write_model) -> None:
    variant = Variant("phi3", {"rope.scaling.type": "longrope"}, drop=("rope_factors",))
    with pytest.raises(BadFile, match="rope_factors_short"):
        read_spec(write_model(variant.describe(describe)))


@pytest.mark.parametrize("name", ["gemma3-dense", "phi3-dense", "stablelm-dense"])
def test_a_damaged_header_gives_a_spec_or_one_clear_line(
    name: str, describe, write_model, tmp_path: Path
) -> None:
    d = describe(name)
    set_keys(d, {})
    whole = write_model(d).path.read_bytes()
    rng = random.Random(f"damage {name}")
    path = tmp_path / "damaged.gguf"
    messages = []
    for _ in range(300):
        damaged = bytearray(whole)
        # The header of these files ends near 4 KB.
        at = rng.randrange(24, 4000)
        damaged[at : at + 4] = rng.choice(
            [bytes(4), b"\xff" * 4, b"\x00\x00\x80\x7f", b"\x00\x00\xc0\x7f", rng.randbytes(4)]
        )
        path.write_bytes(damaged)
        try:
            with GgufFile.open(path) as file:
                read_spec(file)
        except LocalLLMError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert not any("\n" in message or len(message) > 400 for message in messages)
