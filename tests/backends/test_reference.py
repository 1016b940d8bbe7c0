"""The reference backend's parts against formulas written out, where no fixture reaches them."""

import math

import numpy as np
import pytest

from localllm.backends import TOP, Edits
from localllm.backends.reference import activated, attend_one, gather, normalise, rotate, select
from localllm.models.spec import AttentionSpec, Norm, Rope

RNG_SEED = 7


def random(*shape: int) -> np.ndarray:
    rng = np.random.Generator(np.random.PCG64(RNG_SEED + sum(shape)))
    return rng.standard_normal(shape, dtype=np.float32)


def test_sinks_take_a_share_and_give_nothing() -> None:
    q, k, v = random(4, 8), random(2, 5, 8), random(2, 5, 8)
    sinks = np.array([0.0, 3.0, -2.0, 100.0], np.float32)
    out = attend_one(q, k, v, AttentionSpec(4, 2, 8, 0.3), sinks)
    for head in range(4):
        scores = [0.3 * float(q[head] @ k[head // 2, p]) for p in range(5)]
        total = sum(map(math.exp, scores)) + math.exp(sinks[head])
        want = sum(math.exp(s) / total * v[head // 2, p] for p, s in enumerate(scores))
        np.testing.assert_allclose(out[head], want, rtol=1e-4, atol=1e-6)


def test_soft_cap_bends_scores_before_the_softmax() -> None:
    q, k, v = 9 * random(2, 8), random(1, 6, 8), random(1, 6, 8)
    out = attend_one(q, k, v, AttentionSpec(2, 1, 8, 1.0, softcap=2.0), None)
    for head in range(2):
        scores = [2.0 * math.tanh(float(q[head] @ k[0, p]) / 2.0) for p in range(6)]
        total = sum(map(math.exp, scores))
        want = sum(math.exp(s) / total * v[0, p] for p, s in enumerate(scores))
        np.testing.assert_allclose(out[head], want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 70), (31, 33), (33, 64), (40, 96)])
def test_gather_walks_the_block_table(first: int, end: int) -> None:
    store = random(5, 2, 32, 4)
    blocks = np.array([3, 0, 4], np.int32)
    got = gather(store, blocks, first, end)
    want = [store[blocks[p // 32], :, p % 32] for p in range(first, end)]
    np.testing.assert_array_equal(got, np.stack(want, axis=1))


@pytest.mark.parametrize("kind", ["norm", "neox"])
def test_rotation_turns_pairs_and_leaves_the_rest(kind: str) -> None:
    x = random(3, 2, 8)
    rope = Rope(kind, (1.0, 0.1), magnitude=1.5)
    positions = np.array([0, 5, 1000], np.int32)
    got = rotate(x, positions, rope)
    pairs = [(0, 1), (2, 3)] if kind == "norm" else [(0, 2), (1, 3)]
    for t, p in enumerate(positions):
        for (a, b), f in zip(pairs, rope.frequencies):
            turned = (x[t, :, a] + 1j * x[t, :, b]) * np.exp(1j * f * p) * 1.5
            np.testing.assert_allclose(got[t, :, a], turned.real, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(got[t, :, b], turned.imag, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[:, :, 4:], x[:, :, 4:])


def test_norms_are_over_the_last_axis() -> None:
    x, w, b = random(3, 4, 8), random(4, 8), random(8)
    rms = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1) * w
    np.testing.assert_allclose(normalise(x, Norm("rms", 0.1), w, None), rms, rtol=1e-5)
    layer = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.1) * w + b
    np.testing.assert_allclose(normalise(x, Norm("layer", 0.1), w, b), layer, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("activation", "want"),
    [
        ("silu", lambda x: x / (1 + math.exp(-x))),
        ("gelu", lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
        ("gelu_quick", lambda x: x / (1 + math.exp(-1.702 * x))),
        ("relu2", lambda x: max(x, 0) ** 2),
    ],
)
def test_activations(activation, want) -> None:
    x = np.linspace(-6, 6, 49, dtype=np.float32)
    got = activated(x, activation)
    assert got.dtype == np.float32
    # gelu is the tanh formula, which is within 5e-4 of the one with erf.
    np.testing.assert_allclose(got, [want(float(v)) for v in x], rtol=1e-5, atol=5e-4)
    with np.errstate(all="raise", under="ignore"):
        assert np.isfinite(activated(np.array([-1e4, 1e4], np.float32), activation)).all()


def test_selection_is_sorted_with_the_lower_id_first_on_ties() -> None:
    logits = np.round(random(2, 600) * 4) / 4
    result = select(logits, {})
    for row in range(2):
        want = sorted(range(600), key=lambda i: (-logits[row, i], i))[:TOP]
        assert result.top_ids[row].tolist() == want
        assert result.top_logits[row].tolist() == logits[row, want].tolist()
        lse = math.log(sum(math.exp(v) for v in logits[row].astype(float)))
        assert result.raw_lse[row] == pytest.approx(lse, rel=1e-5)
        assert result.lse[row] == result.raw_lse[row]


def test_edits_change_what_is_selected_and_not_the_logits() -> None:
    logits = np.array([[2.0, 1.0, -1.0, 0.5]] * 2, np.float32)
    edits = Edits(
        np.array([0, 2, 3], np.int32),
        np.array([4.0, 2.0, 1.0], np.float32),
        np.array([0.0, 1.5, 3.0], np.float32),
    )
    result = select(logits, {1: edits})
    assert result.logits.tolist() == [[2.0, 1.0, -1.0, 0.5]] * 2
    assert result.top_ids[0, :5].tolist() == [0, 1, 3, 2, -1]
    # 2 / 4, 1, -1 * 2 + 1.5, 0.5 + 3
    assert result.top_ids[1, :5].tolist() == [3, 1, 0, 2, -1]
    assert result.top_logits[1, :5].tolist() == [3.5, 1.0, 0.5, -0.5, -np.inf]
    assert result.lse[1] > result.raw_lse[1]


def test_a_row_of_minus_infinity_has_no_mass() -> None:
    logits = np.zeros((1, 3), np.float32)
    forbid = Edits(
        np.arange(3, dtype=np.int32), np.ones(3, np.float32), np.full(3, -np.inf, np.float32)
    )
    result = select(logits, {0: forbid})
    assert result.lse[0] == -np.inf
    assert result.top_ids[0, :3].tolist() == [0, 1, 2]
