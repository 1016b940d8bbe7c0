"""Drawing under a mask is drawing as if the other tokens did not exist."""

import numpy as np
import pytest
from test_sampling import FILTERS, new_row, random_row

from localllm.masks import NothingAllowed, masked
from localllm.sampling import Sampler, SamplingParams

VOCAB = 1000


def packed(allowed: np.ndarray) -> np.ndarray:
    padded = np.zeros((len(allowed) + 31) // 32 * 32, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


def allowed_tokens(share: float, seed: int) -> np.ndarray:
    allowed = np.random.default_rng(seed).random(VOCAB) < share
    allowed[seed % VOCAB] = True
    return allowed


CHAINS = [*FILTERS, {"top_k": 0}, {"top_k": 0, "temperature": 0.7}, {"temperature": 0}]
# Mirostat 1 counts the vocabulary in its formula, so a mask changes it.
CHAINS += [{"mirostat": 2}]


@pytest.mark.parametrize("share", [0.9, 0.3, 0.02, 0.0])
@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_a_masked_draw_is_that_of_the_small_vocabulary(chain, share) -> None:
    for seed in range(25):
        allowed = allowed_tokens(share, seed)
        logits = random_row(VOCAB, seed)
        params = SamplingParams(
            **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": seed, **chain}
        )
        small = Sampler(params, (), VOCAB).draw(new_row(logits[allowed]))
        row = masked(new_row(logits), packed(allowed), params)
        assert Sampler(params, (), VOCAB).draw(row) == np.flatnonzero(allowed)[small]


def test_a_mask_sees_penalties_and_bias() -> None:
    params = SamplingParams(temperature=0, logit_bias={3: 100.0, 5: 50.0})
    sampler = Sampler(params, (), VOCAB)
    allowed = np.zeros(VOCAB, bool)
    allowed[5:] = True
    row = masked(new_row(random_row(VOCAB), sampler.edits()), packed(allowed), params)
    assert sampler.draw(row) == 5


def test_an_allowed_token_far_behind_all_others_is_found() -> None:
    logits = random_row(VOCAB)
    last = int(np.argsort(-logits, kind="stable")[-1])
    allowed = np.zeros(VOCAB, bool)
    allowed[last] = True
    for params in (SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=0)):
        row = masked(new_row(logits), packed(allowed), params)
        assert Sampler(params, (), VOCAB).draw(row) == last


def test_tokens_beyond_the_mask_are_not_allowed() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[900:] = 9
    params = SamplingParams(temperature=0)
    assert masked(new_row(logits), packed(np.ones(320, bool)), params).best == 0


def test_a_mask_without_a_token_is_an_error() -> None:
    with pytest.raises(NothingAllowed):
        masked(new_row(random_row(VOCAB)), packed(np.zeros(VOCAB, bool)), SamplingParams())
