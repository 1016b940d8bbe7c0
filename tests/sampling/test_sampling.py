"""The sampling chain, against hand arithmetic and independent NumPy formulas over whole rows."""

import math

import numpy as np
import pytest

from localllm.backends import TOP, Edits, StepResult
from localllm.errors import BadRequest
from localllm.sampling import Row, Sampler, SamplingParams, top_logprobs, uniform


def new_row(logits, edits=None) -> Row:
    raw = np.asarray(logits, np.float32)
    row = raw.copy()
    if edits is not None:
        x = row[edits.ids]
        row[edits.ids] = np.where(x > 0, x / edits.repeat, x * edits.repeat) + edits.add
    order = np.argsort(-row, kind="stable")[:TOP]
    top_ids, top_logits = np.full((1, TOP), -1, np.int32), np.full((1, TOP), -np.inf, np.float32)
    top_ids[0, : len(order)], top_logits[0, : len(order)] = order, row[order]
    lse, raw_lse = (np.log(np.exp(x.astype(np.float64)).sum(keepdims=True)) for x in (row, raw))
    result = StepResult(
        raw[None], raw_lse.astype(np.float32), top_ids, top_logits, lse.astype(np.float32)
    )
    return Row(result, 0, edits)


def random_row(size: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def draws(logits, count: int = 1, prompt=(), **params) -> list[int]:
    sampler = Sampler(SamplingParams(seed=11, **params), prompt, len(logits))
    plain = new_row(logits)
    found = []
    for _ in range(count):
        edits = sampler.edits()
        row = new_row(logits, edits) if edits else plain
        found.append(sampler.draw(row))
    return found


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def kept_by_definition(logits, top_k=0, typical_p=1.0, top_p=1.0, min_p=0.0) -> set[int]:
    """Which tokens the chain leaves, by the definition of each filter over the whole row."""
    ids = np.argsort(-logits, kind="stable")
    if top_k > 0:
        ids = ids[:top_k]
    if typical_p < 1:
        p = softmax(logits[ids])
        surprise = -np.log(p)
        order = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
        count = int((np.cumsum(p[order]) <= typical_p).sum()) + 1
        ids = ids[np.sort(order[:count])]
    if top_p < 1:
        p = softmax(logits[ids])
        ids = ids[: int((np.cumsum(p) < top_p).sum()) + 1]
    if min_p > 0:
        p = softmax(logits[ids])
        ids = ids[p >= min_p * p.max()]
    return set(ids.tolist())


def test_greedy_takes_the_largest_and_the_lowest_id_on_ties() -> None:
    assert draws([1.0, 3.0, 3.0, 2.0], temperature=0) == [1]


def test_greedy_heeds_penalties_and_bias_and_nothing_else() -> None:
    # 3.0 / 2 = 1.5 < 2.0; a top_k of 1 and a min_p change nothing.
    assert draws([3.0, 2.0], prompt=[0], temperature=0, repeat_penalty=2.0) == [1]
    assert draws([3.0, 2.0], temperature=0, logit_bias={1: 1.5}) == [1]
    assert draws([3.0, 2.0], temperature=0, top_k=1, min_p=1.0, top_p=0.0) == [0]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        # Window (5, 6, 5): 5 twice, 6 once.
        ({"repeat_penalty": 2.0}, {5: (2.0, 0.0), 6: (2.0, 0.0)}),
        ({"presence_penalty": 0.5}, {5: (1.0, -0.5), 6: (1.0, -0.5)}),
        ({"frequency_penalty": 0.5}, {5: (1.0, -1.0), 6: (1.0, -0.5)}),
        ({"frequency_penalty": 0.5, "repeat_last_n": 2}, {5: (1.0, -0.5), 6: (1.0, -0.5)}),
        ({"presence_penalty": 0.5, "repeat_last_n": 1}, {5: (1.0, -0.5)}),
        ({"presence_penalty": 0.5, "logit_bias": {5: 2.0}}, {5: (1.0, 1.5), 6: (1.0, -0.5)}),
        ({"logit_bias": {9: -1.0}}, {9: (1.0, -1.0)}),
        ({"repeat_penalty": 2.0, "repeat_last_n": 0}, None),
        ({}, None),
    ],
)
def test_penalties_count_within_the_window(params, expected) -> None:
    edits = Sampler(SamplingParams(**params), [5, 6, 5], 10).edits()
    if expected is None:
        assert edits is None
        return
    ids, repeat, add = (x.tolist() for x in (edits.ids, edits.repeat, edits.add))
    assert {i: (r, a) for i, r, a in zip(ids, repeat, add)} == expected


def test_a_window_without_end_counts_everything() -> None:
    params = SamplingParams(frequency_penalty=1.0, repeat_last_n=-1)
    add = Sampler(params, [3] * 500, 10).edits().add
    assert add.tolist() == [-500.0]


def test_drawn_tokens_enter_the_window() -> None:
    # Presence 1 pushes each drawn token below the next one.
    assert draws([3.0, 2.5, 2.2], 3, temperature=0, presence_penalty=1.0) == [0, 1, 2]


FILTERS = [
    {"top_k": 5},
    {"top_k": 300},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 0.00001},
    {"typical_p": 0.5},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 40, "typical_p": 0.7, "top_p": 0.9},
    {"top_p": 0.99, "min_p": 0.002},
    {"top_p": 0.0},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("size", [30, 600])
def test_filters_leave_what_their_definitions_leave(filters, size) -> None:
    """A high temperature makes every survivor likely, so all of them are drawn and nothing else."""
    logits = random_row(size)
    off = {"top_k": 0, "top_p": 1.0}
    kept = kept_by_definition(logits, **filters)
    seen = set(draws(logits, max(200, 12 * len(kept)), temperature=1000.0, **{**off, **filters}))
    assert seen <= kept
    assert len(seen) > 0.99 * len(kept)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 20])
def test_frequencies_are_the_softmax_at_the_temperature(temperature, top_k) -> None:
    logits = random_row(400, seed=1, scale=2.0)
    expected = softmax(logits / temperature)
    if top_k:
        expected[np.argsort(-logits)[top_k:]] = 0
        expected /= expected.sum()
    count = 4000
    found = draws(logits, count, temperature=temperature, top_k=top_k, top_p=1.0)
    frequency = np.bincount(found, minlength=400) / count
    # Four standard deviations of a binomial share, the largest of 400.
    assert np.abs(frequency - expected).max() < 4 * math.sqrt(0.25 / count)
    assert frequency[expected == 0].sum() == 0


def test_a_banned_token_is_never_drawn() -> None:
    bias = {0: -math.inf}
    found = draws([9.0, 1.0, 1.0], 200, temperature=2.0, top_k=0, top_p=1.0, logit_bias=bias)
    assert set(found) == {1, 2}


def test_uniforms_depend_on_seed_and_index_alone_and_look_uniform() -> None:
    numbers = np.array([[uniform(seed, i) for i in range(1000)] for seed in range(20)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(np.unique(numbers)) == numbers.size
    # Mean and variance of 20,000 uniforms, within four standard deviations.
    assert abs(numbers.mean() - 0.5) < 4 * math.sqrt(1 / 12 / numbers.size)
    assert abs(numbers.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / numbers.size)
    correlation = np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]
    assert abs(correlation) < 0.03
    assert uniform(7, 3) == uniform(7, 3)


def test_equal_seeds_repeat_and_a_negative_seed_does_not() -> None:
    logits = random_row(100, scale=0.5)

    def run(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed, temperature=1.5), [], 100)
        return [sampler.draw(new_row(logits)) for _ in range(40)]

    assert run(5) == run(5)
    assert run(5) != run(6)
    assert run(-1) != run(-1)


def test_mirostat_2_keeps_tokens_below_mu_and_learns() -> None:
    """By hand: p = 1/2, 1/4, 1/8, 1/8 have surprises 1, 2, 3, 3 bits; tau 1.2 starts mu at 2.4."""
    logits = np.log([0.5, 0.25, 0.125, 0.125])
    sampler = Sampler(SamplingParams(temperature=1.0, mirostat=2, mirostat_tau=1.2, seed=3), [], 4)
    token = sampler.draw(new_row(logits))
    assert token in (0, 1)
    # Of the two that are left, renormalised: 2/3 and 1/3.
    surprise = -math.log2(2 / 3) if token == 0 else -math.log2(1 / 3)
    assert sampler.mu == pytest.approx(2.4 - 0.1 * (surprise - 1.2), abs=1e-6)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_brings_the_mean_surprise_to_tau(version) -> None:
    # Zipf's law, which the estimator of version 1 assumes.
    logits = -1.1 * np.log(np.arange(1, 3001))
    p = softmax(logits)
    found = draws(logits, 1500, temperature=1.0, mirostat=version, mirostat_tau=4.0)
    surprise = -np.log2(p[found[200:]])
    # The controller works on renormalised probabilities, which are a bit larger.
    assert 3.5 < surprise.mean() < 5.5


def test_logprobs_are_of_the_raw_row_and_sorted() -> None:
    logits = np.log([0.5, 0.2, 0.3])
    edits = Edits(np.array([0], np.int32), np.ones(1, np.float32), np.array([-50], np.float32))
    for row in (new_row(logits), new_row(logits, edits)):
        found = top_logprobs(row, 2)
        assert [i for i, _ in found] == [0, 2]
        assert [x for _, x in found] == pytest.approx([math.log(0.5), math.log(0.3)], abs=1e-6)
    assert top_logprobs(new_row(logits), 0) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", 1.5),
        ("top_p", 1.1),
        ("min_p", -1),
        ("typical_p", 2),
        ("repeat_penalty", 0),
        ("repeat_last_n", -2),
        ("presence_penalty", math.inf),
        ("frequency_penalty", None),
        ("seed", "1"),
        ("mirostat", 3),
        ("mirostat_tau", -1),
        ("logprobs", 1000),
        ("num_predict", 2.0),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {1: "x"}),
    ],
)
def test_a_wrong_value_is_refused_by_name(field, value) -> None:
    with pytest.raises(BadRequest, match=field):
        SamplingParams(**{field: value})


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(BadRequest, match="logit_bias: token 10"):
        Sampler(SamplingParams(logit_bias={10: 1.0}), [], 10)


def test_options_that_are_not_ours_are_left_out() -> None:
    params = SamplingParams.from_options({"top_k": 3, "num_ctx": 9, "seed": None})
    assert params == SamplingParams(top_k=3)
