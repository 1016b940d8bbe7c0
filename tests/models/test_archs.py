"""Every family against llama.cpp's logits of a tiny random model, on the reference backend."""

from pathlib import Path

import numpy as np
import pytest

from localllm.models import READERS, read_spec

# llama.cpp rounds gelu to float16 and sums in another order.
BOUND = 1e-5


def squared_error(got: np.ndarray, want: np.ndarray) -> float:
    """Normalised: 0 is equal, 1 is unrelated."""
    assert got.shape == want.shape
    return float(((got - want) ** 2).mean() / (want**2).mean())


@pytest.mark.parametrize("name", sorted(READERS))
def test_logits_are_those_of_llama_cpp(
    name: str, shared_data: Path, describe, write_model, logits_of, open_reference
) -> None:
    ids = np.load(shared_data / "archs" / "tokens.npy")
    want = np.load(shared_data / "archs" / f"{name}-dense.npy")
    file = write_model(describe(f"{name}-dense"))
    spec = read_spec(file)
    backend = open_reference(file, spec)
    whole = logits_of(backend, ids, chunk=len(ids))
    assert squared_error(whole, want) <= BOUND
    # However the prompt is cut, and whatever a token's role; a BLAS may order a sum by shape.
    assert squared_error(logits_of(backend, ids, chunk=7), whole) <= 1e-10
    assert squared_error(logits_of(backend, ids, chunk=1, path="decode"), whole) <= 1e-10
