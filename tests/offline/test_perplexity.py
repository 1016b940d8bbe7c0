"""Perplexity and divergence against formulas over the logits themselves."""

from pathlib import Path

import numpy as np
import pytest

from localllm.config import Settings
from localllm.errors import BadFile, BadRequest
from localllm.offline.perplexity import divergence, log_softmax, perplexity


@pytest.fixture
def base_file(tmp_path: Path, shared_data: Path, token_ids: np.ndarray) -> Path:
    """The twelve likeliest tokens by llama.cpp's logits of the tiny llama."""
    logprobs = log_softmax(np.load(shared_data / "archs" / "llama-dense.npy"))
    ids = np.argsort(-logprobs, axis=1)[:, :12].astype(np.int32)
    path = tmp_path / "base.npz"
    np.savez(
        path,
        tokens=token_ids,
        top_ids=ids,
        top_logprobs=np.take_along_axis(logprobs, ids, axis=1).astype(np.float32),
    )
    return path


def test_perplexity_is_that_of_llama_cpps_logits(
    tiny_model, tmp_path, shared_data, token_ids, base_file
) -> None:
    logprobs = log_softmax(np.load(shared_data / "archs" / "llama-dense.npy"))
    losses = -logprobs[np.arange(len(token_ids) - 1), token_ids[1:]]
    settings = Settings(cache_dir=tmp_path)
    report = perplexity(tiny_model("llama-dense"), settings, kl=base_file, backend="reference")
    assert report.num_tokens == len(token_ids) - 1
    # Both are float32 implementations of the same weights.
    assert report.perplexity == pytest.approx(np.exp(losses.mean()), rel=1e-3)
    assert report.mean_kl == pytest.approx(0, abs=1e-5)
    assert "perplexity" in report.to_text()


def test_what_is_saved_is_no_distance_away(tiny_model, tmp_path, base_file) -> None:
    model, settings = tiny_model("llama-dense"), Settings(cache_dir=tmp_path)
    saved = tmp_path / "saved.npz"
    perplexity(model, settings, kl=base_file, save=saved, backend="reference")
    report = perplexity(model, settings, kl=saved, role="decode", backend="reference")
    assert report.mean_kl == pytest.approx(0, abs=1e-6)


def test_windows_start_anew(tiny_model, tmp_path, base_file) -> None:
    model = tiny_model("llama-dense")
    settings = Settings(cache_dir=tmp_path, context_length=30)
    report = perplexity(model, settings, kl=base_file, backend="reference")
    # 80 tokens in windows of 30, 30, 20: the first of each is not scored.
    assert report.num_tokens == 77


def test_divergence_by_hand() -> None:
    """Base (1/2, 1/4, rest 1/4), ours (1/4, 1/4, rest 1/2): log 2 / 2 + 0 - log 2 / 4."""
    base = np.log([[0.5, 0.25]])
    ours = np.log([[0.25, 0.25, 0.3, 0.2]])
    kl = divergence(base, ours, np.array([[0, 1]], np.int32))
    assert kl == pytest.approx([np.log(2) / 4])


def test_a_base_that_is_none_is_refused(tiny_model, tmp_path: Path) -> None:
    bad = tmp_path / "bad.npz"
    bad.write_bytes(b"PK not really")
    with pytest.raises(BadFile, match=r"bad\.npz"):
        perplexity(tiny_model("llama-dense"), Settings(cache_dir=tmp_path), kl=bad)


def test_without_text_and_base_there_is_nothing_to_score(tiny_model, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="text"):
        perplexity(tiny_model("llama-dense"), Settings(cache_dir=tmp_path))
