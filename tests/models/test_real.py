"""The real models on the reference backend against exact float32 arithmetic of llama.cpp."""

from pathlib import Path

import numpy as np
import pytest

from localllm.gguf import GgufFile
from localllm.models import read_spec

NUM_TOKENS = 64
# Both sides round 270 million float32 products; llama.cpp's quantised paths are above 4e-3.
BOUND = 1e-5


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def divergence(logits: np.ndarray, exact: dict[str, np.ndarray]) -> np.ndarray:
    """KL [T] over the likeliest tokens and everything else taken as one."""
    got = log_softmax(logits)
    top, p = exact["top_ids"][: len(got)], exact["top_logprobs"][: len(got)].astype(np.float64)
    q = np.take_along_axis(got, top, axis=1)
    rest_p, rest_q = (np.clip(1 - np.exp(v).sum(axis=1), 1e-9, 1) for v in (p, q))
    return (np.exp(p) * (p - q)).sum(axis=1) + rest_p * np.log(rest_p / rest_q)


@pytest.mark.real
@pytest.mark.parametrize("family", ["smollm2", "gemma3"])
def test_reference_is_exact_on_real_weights(
    family: str, shared_data: Path, request: pytest.FixtureRequest, logits_of, open_reference
) -> None:
    exact = dict(np.load(shared_data / "real" / f"{family}-f32.npz"))
    with GgufFile.open(request.getfixturevalue(f"{family}_path")) as file:
        spec = read_spec(file)
        backend = open_reference(file, spec)
        logits = logits_of(backend, exact["tokens"][:NUM_TOKENS], chunk=NUM_TOKENS)
        backend.close()
    assert np.abs(divergence(logits, exact)).mean() <= BOUND
