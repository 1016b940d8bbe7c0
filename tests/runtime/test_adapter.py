"""An adapter on a loaded model: in process, in the store, and in the prefix cache's identity."""

from pathlib import Path

import pytest
from adapter_case import random_pairs, write_adapter, write_merged

from localllm import LLM, SamplingParams
from localllm.errors import BadFile, UnsupportedModel
from localllm.gguf import GgufFile
from localllm.opening import identity_of
from localllm.runtime import LoadedModel

NAMES = ["output.weight", "blk.0.attn_q.weight", "blk.0.attn_v.weight", "blk.1.ffn_down.weight"]
GREEDY = SamplingParams(temperature=0, num_predict=12, ignore_eog=True, logprobs=0)


@pytest.fixture(scope="module")
def adapter(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    base = GgufFile.open(tiny_path)
    pairs = random_pairs(base, NAMES, [4, 2])
    write_merged(base, folder / "merged.gguf", pairs, alpha=8.0)
    return write_adapter(folder / "lora.gguf", pairs, alpha=8.0)


def open_llm(path: Path, **options) -> LLM:
    return LLM(path, backend="reference", **options)


def test_prompt_and_answer_are_those_of_the_merged_model(tiny_path: Path, adapter: Path) -> None:
    with (
        open_llm(tiny_path, adapter=adapter) as llm,
        open_llm(adapter.with_name("merged.gguf")) as merged,
        open_llm(tiny_path) as plain,
    ):
        got, want = llm.generate("hello", GREEDY), merged.generate("hello", GREEDY)
        assert got.tokens == want.tokens
        for mine, other in zip(got.logprobs, want.logprobs, strict=True):
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert plain.generate("hello", GREEDY).tokens != got.tokens
        mine, other = llm.embed(["hello"])[0], merged.embed(["hello"])[0]
        assert mine == pytest.approx(other, abs=1e-4)


def test_an_adapter_that_does_not_fit_says_so(tiny_path: Path, tmp_path: Path) -> None:
    pairs = random_pairs(GgufFile.open(tiny_path), NAMES[1:2], [4])
    other = write_adapter(tmp_path / "other.gguf", pairs, arch="gemma")
    with pytest.raises(BadFile, match=r"other\.gguf: is an adapter for 'gemma'"):
        open_llm(tiny_path, adapter=other)
    renamed = {"blk.9.attn_q.weight": next(iter(pairs.values()))}
    unknown = write_adapter(tmp_path / "unknown.gguf", renamed)
    with pytest.raises(UnsupportedModel, match=r"'blk\.9\.attn_q\.weight'"):
        open_llm(tiny_path, adapter=unknown)
    with pytest.raises(BadFile, match="not an adapter"):
        open_llm(tiny_path, adapter=tiny_path)
    with pytest.raises(BadFile, match="no such file"):
        open_llm(tiny_path, adapter=tmp_path / "gone.gguf")


def test_a_cached_prefix_belongs_to_its_adapter(tiny_path: Path, adapter: Path, tmp_path) -> None:
    second = tmp_path / "second.gguf"
    second.write_bytes(adapter.read_bytes())
    identities = set()
    for options in ({}, {"adapter": adapter}, {"adapter": second}):
        with open_llm(tiny_path, **options) as llm:
            model: LoadedModel = llm._model
            identities.add(model.engine.pool.identity)
    assert len(identities) == 3
    assert identity_of(tiny_path, "a", "cpu") != identity_of(tiny_path, "b", "cpu")
    # What counts is the content where that is known.
    assert identity_of(tiny_path, "a", "cpu") == identity_of(second, "a", "cpu")


def test_memory_counts_the_adapter(tiny_path: Path, adapter: Path) -> None:
    with open_llm(tiny_path) as plain, open_llm(tiny_path, adapter=adapter) as llm:
        assert llm._model.memory_bytes > plain._model.memory_bytes
