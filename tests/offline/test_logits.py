"""Logits of whole sequences through scheduler and block pool, on the reference backend."""

from pathlib import Path

import numpy as np
import pytest

from localllm.config import Settings
from localllm.errors import BadFile, BadRequest
from localllm.offline.logits import LogitsOptions, write_logits

# One model with windowed layers, one without.
MODELS = ("gemma3-dense", "llama-dense")


@pytest.fixture
def logits_of(tmp_path: Path, token_ids: np.ndarray):
    """Runs a model and reads what was written."""

    def run(model: Path, ids: np.ndarray | None = None, **options) -> np.ndarray:
        np.save(tmp_path / "ids.npy", token_ids if ids is None else ids)
        settings = Settings(cache_dir=tmp_path)
        chosen = LogitsOptions("reference", **options)
        write_logits(model, tmp_path / "ids.npy", tmp_path / "out.npy", chosen, settings)
        return np.load(tmp_path / "out.npy")

    return run


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_logits_are_those_of_llama_cpp(shared_data, tiny_model, logits_of, name, role) -> None:
    want = np.load(shared_data / "archs" / f"{name}.npy")
    got = logits_of(tiny_model(name), role=role)
    assert got.dtype == np.float32
    assert got.shape == want.shape
    # The bound of design.md for a right implementation in float32.
    assert ((got - want) ** 2).mean() / (want**2).mean() < 1e-5


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("chunk", "beside"), [(1, 0), (7, 0), (33, 0), (1000, 0), (7, 5)])
def test_chunks_and_neighbours_change_no_bit(
    tiny_model, logits_of, name, role, chunk, beside
) -> None:
    model = tiny_model(name)
    base = logits_of(model, role=role)
    assert np.array_equal(base, logits_of(model, role=role, chunk=chunk, beside=beside))


def test_a_sequence_longer_than_the_model_is_refused(tiny_model, logits_of) -> None:
    with pytest.raises(BadRequest, match="context"):
        logits_of(tiny_model("llama-dense"), np.ones(100_000, np.int32))


@pytest.mark.parametrize(
    "ids", [np.zeros((2, 2), np.int32), np.zeros(0, np.int32), np.zeros(3, np.float32)]
)
def test_files_that_are_no_list_of_ids_are_refused(tiny_model, logits_of, ids) -> None:
    with pytest.raises(BadFile, match="ids"):
        logits_of(tiny_model("llama-dense"), ids)


@pytest.mark.parametrize("options", [{"role": "sideways"}, {"chunk": 0}, {"beside": -1}])
def test_bad_options_are_refused(options) -> None:
    with pytest.raises(BadRequest):
        LogitsOptions(**options)
