"""What real files do beyond the shared fixtures, against llama.cpp's logits (variants.py)."""

from pathlib import Path

import numpy as np
import pytest
from variants import ROWS, VARIANTS

from localllm.models import read_spec

# llama.cpp rounds gelu to float16, and its float32 sums wander over 64 layers.
BOUND = 1e-5


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_variant_gives_the_logits_of_llama_cpp(
    name: str, shared_data: Path, describe, write_model, logits_of, open_reference
) -> None:
    ids = np.load(shared_data / "archs" / "tokens.npy")
    want = np.load(Path(__file__).with_name("variants.npz"))[name]
    variant = VARIANTS[name]
    file = write_model(variant.describe(describe))
    spec = read_spec(file, variant.num_ctx)
    backend = open_reference(file, spec)
    got = logits_of(backend, ids, chunk=len(ids))[list(ROWS)]
    assert ((got - want) ** 2).mean() / (want**2).mean() <= BOUND
