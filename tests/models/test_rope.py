"""Rotary frequencies against hand arithmetic; test_variants.py compares scalings with llama.cpp."""

import math

import pytest
from variants import Variant

from localllm.models import read_spec
from localllm.models.rope import Yarn
from localllm.models.spec import Rope


def rope_of(variant: Variant, describe, write_model, num_ctx: int | None = None) -> Rope:
    spec = read_spec(write_model(variant.describe(describe)), num_ctx)
    rope = spec.layers[0].attention.rope
    assert rope is not None
    return rope


def test_plain_frequencies_fall_by_powers_of_the_base(describe, write_model) -> None:
    variant = Variant("llama", {"rope.dimension_count": 4}, drop=("rope_freqs",))
    rope = rope_of(variant, describe, write_model)
    assert rope.frequencies == pytest.approx((1.0, 0.01))  # 10000 ** (-2i / 4)
    assert rope.magnitude == 1.0
    assert rope.dims == 4


def test_linear_scaling_divides_every_frequency(describe, write_model) -> None:
    keys = {"rope.dimension_count": 4, "rope.scaling.factor": 8.0}
    rope = rope_of(Variant("llama", keys, drop=("rope_freqs",)), describe, write_model)
    assert rope.frequencies == pytest.approx((0.125, 0.00125))


def test_scaling_type_none_ignores_the_factor(describe, write_model) -> None:
    keys = {
        "rope.dimension_count": 4,
        "rope.scaling.factor": 8.0,
        "rope.scaling.type": "none",
    }
    rope = rope_of(Variant("llama", keys, drop=("rope_freqs",)), describe, write_model)
    assert rope.frequencies == pytest.approx((1.0, 0.01))


def test_factors_divide(describe, write_model) -> None:
    file = write_model(describe("llama-dense"))
    factors = file.tensors["rope_freqs.weight"].dequantize()
    rope = read_spec(file).layers[0].attention.rope
    assert rope is not None
    assert rope.frequencies == pytest.approx(
        [10_000 ** (-2 * i / 128) / f for i, f in enumerate(factors)]
    )


@pytest.mark.parametrize(
    ("num_ctx", "name"), [(None, "long"), (256, "short"), (257, "long"), (64, "short")]
)
def test_longrope_follows_the_context_in_use(
    num_ctx: int | None, name: str, describe, write_model
) -> None:
    file = write_model(describe("phi3-dense"))
    factors = file.tensors[f"rope_factors_{name}.weight"].dequantize()
    rope = read_spec(file, num_ctx).layers[0].attention.rope
    assert rope is not None
    assert rope.frequencies == pytest.approx(
        [10_000 ** (-2 * i / 128) / f for i, f in enumerate(factors)]
    )


def test_yarn_keeps_short_waves_and_stretches_long_ones() -> None:
    base = 10_000.0
    theta = [base ** (-2 * i / 128) for i in range(64)]
    blended = Yarn(factor=4.0, original_context=4096).blend(theta, base)
    # Pair 20 turns 4096 * theta / 2 pi = 36.7 times, more than 32; pair 47 turns 0.75 times.
    assert blended[20] == pytest.approx(theta[20])
    assert blended[47] == pytest.approx(theta[47] / 4)
    assert all(t / 4 <= b <= t for t, b in zip(theta, blended))
    assert blended == sorted(blended, reverse=True)


def test_yarn_magnitude_is_that_of_the_paper() -> None:
    # Factor 32: 0.1 ln 32 + 1.
    assert Yarn(32.0, 4096).magnitude(0.0) == pytest.approx(1.34657, abs=1e-5)
    assert Yarn(32.0, 4096).magnitude(1.0) == 1.0
    assert Yarn(1.0, 4096).magnitude(0.0) == 1.0
    grown = 1 + 0.1 * math.log(16)
    assert Yarn(16.0, 4096).magnitude(0.5) == pytest.approx(grown / (1 + 0.05 * math.log(16)))
