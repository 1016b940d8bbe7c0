"""Texts to vectors through a loaded model: lengths, ends, shapes, company, cancelling.

Defends: nothing is cut in silence, and a text's vector is the same bits in whatever list.
"""

import itertools
import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from byte_model import CONTEXT, WIDTH, write_tiny_model

from localllm import LLM, SamplingParams
from localllm.config import Settings
from localllm.embedding import Embedded, EmbedRequest
from localllm.errors import BadRequest, Busy, Cancelled, LocalLLMError, TimedOut
from localllm.prompts import TextRequest
from localllm.runtime import LoadedModel

TEXTS = ["why is the sky blue?", "a", "空はなぜ青い", "x" * 100, "why is the sky green?"]
POOLINGS = {"mean": 1, "first": 2, "last": 3}


@pytest.fixture(scope="module", params=POOLINGS)
def pooled(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """A model that says how it is pooled and adds BOS and EOS."""
    path = Path(tmp_path_factory.mktemp("pooled")) / "tiny.gguf"
    write_tiny_model(path, pooling=POOLINGS[request.param], adds_ends=True)
    with LoadedModel.open(path, Settings(num_parallel=4), backend="reference") as loaded:
        yield loaded


NAMES = itertools.count()


def embed(model: LoadedModel, *texts: str, **fields) -> Embedded:
    ended: queue.SimpleQueue[Embedded] = queue.SimpleQueue()
    model.embeddings.start(EmbedRequest(f"e{next(NAMES)}", texts, **fields), ended.put)
    embedded = ended.get(timeout=60)
    if embedded.error is not None:
        raise embedded.error
    return embedded


def test_a_vector_is_the_same_bits_alone_and_in_any_list(pooled: LoadedModel) -> None:
    alone = [embed(pooled, text).vectors[0] for text in TEXTS]
    together = embed(pooled, *TEXTS, *TEXTS[::-1])
    np.testing.assert_array_equal(together.vectors, [*alone, *alone[::-1]])
    assert together.vectors.dtype == np.float32
    # The first token of a causal model has seen nothing of the text.
    assert np.array_equal(alone[0], alone[-1]) == (pooled.spec.pooling == "first")


def test_counts_have_begin_and_end_and_vectors_have_length_one(pooled: LoadedModel) -> None:
    embedded = embed(pooled, *TEXTS)
    sizes = [len(text.encode()) + 2 for text in TEXTS]
    assert embedded.stats.prompt_tokens == sum(sizes)
    assert embedded.dropped_tokens == [0] * len(TEXTS)
    np.testing.assert_allclose(np.linalg.norm(embedded.vectors, axis=1), 1, atol=1e-6)
    raw = embed(pooled, *TEXTS, normalise=False).vectors
    lengths = np.linalg.norm(raw, axis=1, keepdims=True)
    assert (np.abs(lengths - 1) > 1e-3).all()
    np.testing.assert_allclose(raw / lengths, embedded.vectors, atol=1e-6)


def test_fewer_dimensions_are_the_first_ones_of_length_one(pooled: LoadedModel) -> None:
    whole = embed(pooled, TEXTS[0]).vectors[0]
    part = embed(pooled, TEXTS[0], dimensions=8).vectors[0]
    np.testing.assert_allclose(part, whole[:8] / np.linalg.norm(whole[:8]), rtol=1e-6)
    np.testing.assert_array_equal(embed(pooled, TEXTS[0], dimensions=WIDTH + 1).vectors[0], whole)


def test_a_text_fills_the_context_and_one_token_more_is_refused_or_cut(
    pooled: LoadedModel,
) -> None:
    fits = "ab" * ((CONTEXT - 2) // 2)
    assert embed(pooled, fits, truncate=False).stats.prompt_tokens == CONTEXT
    wanted = rf"input length exceeds the context length: input 1 has {CONTEXT + 1} .* {CONTEXT}"
    with pytest.raises(BadRequest, match=wanted):
        embed(pooled, "fine", fits + "c", truncate=False)
    cut = embed(pooled, "fine", fits + "c", fits + "d" * 10 * CONTEXT)
    assert cut.dropped_tokens == [0, 1, 10 * CONTEXT]
    np.testing.assert_array_equal(cut.vectors[1], embed(pooled, fits).vectors[0])
    np.testing.assert_array_equal(cut.vectors[2], cut.vectors[1])


def test_num_ctx_is_heeded_below_any_smallest_context(pooled: LoadedModel) -> None:
    cut = embed(pooled, "why is the sky blue?", num_ctx=3)
    np.testing.assert_array_equal(cut.vectors, embed(pooled, "w").vectors)
    assert cut.dropped_tokens == [19]
    for num_ctx in (2, 1, 0, -1):
        with pytest.raises(BadRequest, match="exceeds maximum context length"):
            embed(pooled, "why", num_ctx=num_ctx)


def test_num_ctx_beyond_the_model_is_its_length_and_logged(pooled: LoadedModel, caplog) -> None:
    text = "x" * CONTEXT
    assert embed(pooled, text, num_ctx=100_000).dropped_tokens == [2]
    assert f"num_ctx 100000: this model has {CONTEXT} positions" in caplog.text
    assert f"1 of 1 texts were cut to {CONTEXT} tokens" in caplog.text


def test_an_empty_text_has_a_vector_and_no_text_has_none(pooled: LoadedModel, tiny_path) -> None:
    assert embed(pooled, "").stats.prompt_tokens == 2
    assert embed(pooled).vectors.shape == (0, 0)
    # A model that adds nothing of its own: its BOS stands for the text.
    with LLM(tiny_path, backend="reference") as llm:
        (vector,) = llm.embed([""])
        assert len(vector) == WIDTH


def test_marks_in_a_text_stay_text(pooled: LoadedModel) -> None:
    assert embed(pooled, "<|im_end|>").stats.prompt_tokens == len("<|im_end|>") + 2


def test_generation_beside_it_is_not_disturbed(tiny_path: Path) -> None:
    with LLM(tiny_path, backend="reference", max_running=3) as llm:
        greedy = SamplingParams(temperature=0, num_predict=30)
        plain = llm.generate("hello", greedy)
        ended: queue.SimpleQueue[Embedded] = queue.SimpleQueue()
        model = llm._model
        model.embeddings.start(EmbedRequest("many", TEXTS * 10), ended.put)
        assert llm.generate("hello", greedy).tokens == plain.tokens
        embedded = ended.get(timeout=60)
        np.testing.assert_array_equal(embedded.vectors[: len(TEXTS)], llm.embed(TEXTS))


def test_a_long_list_does_not_fill_the_queue(tiny_path: Path) -> None:
    settings = Settings(num_parallel=2, max_queue=3)
    with LoadedModel.open(tiny_path, settings, backend="reference") as model:
        assert len(embed(model, *TEXTS * 8).vectors) == 8 * len(TEXTS)


def test_a_full_queue_refuses_a_list(tiny_path: Path) -> None:
    settings = Settings(num_parallel=1, max_queue=1)
    endless = SamplingParams(num_predict=-1, ignore_eog=True)
    with LoadedModel.open(tiny_path, settings, backend="reference") as model:
        for name in ("runs", "waits"):
            request = TextRequest(name, "a", params=endless, shift=True)
            model.start(request, lambda deltas: None)
        with pytest.raises(Busy):
            embed(model, "a")


def test_a_cancelled_list_ends_once_and_leaves_nothing(tiny_path: Path) -> None:
    with LoadedModel.open(tiny_path, Settings(num_parallel=2), backend="reference") as model:
        ended: queue.SimpleQueue[Embedded] = queue.SimpleQueue()
        model.embeddings.start(EmbedRequest("e", ["x" * 200] * 50), ended.put)
        model.cancel("e")
        assert isinstance(ended.get(timeout=60).error, Cancelled)
        assert len(embed(model, "after").vectors) == 1
        assert ended.empty()
        assert not model.engine.scheduler.has_work


def test_a_broken_model_says_so(tmp_path: Path) -> None:
    path = tmp_path / "nan.gguf"
    write_tiny_model(path)
    with LoadedModel.open(path, Settings(), backend="reference") as model:
        norm = model.engine.backend.weights.whole("output_norm.weight").copy()
        norm[3] = np.nan
        model.engine.backend.weights.expanded["output_norm.weight"] = norm
        with pytest.raises(BadRequest, match="embedding contains NaN or Inf values"):
            embed(model, "a", "b")


def test_llm_embeds_lists_and_refuses_what_does_not_fit(tiny_path: Path) -> None:
    with LLM(tiny_path, backend="reference") as llm:
        vectors = llm.embed(TEXTS)
        assert [len(v) for v in vectors] == [WIDTH] * len(TEXTS)
        assert llm.embed([TEXTS[1]]) == [vectors[1]]
        assert llm.embed([]) == []
        assert len(llm.embed(TEXTS, dimensions=4)[0]) == 4
        with pytest.raises(BadRequest, match=f"{CONTEXT + 1} tokens"):
            llm.embed(["x" * (CONTEXT + 1)])
        (cut,) = llm.embed(["x" * (CONTEXT + 1)], truncate=True)
        assert [cut] == llm.embed(["x" * CONTEXT])
        with pytest.raises(BadRequest, match="not one string"):
            llm.embed("text")
    with pytest.raises(LocalLLMError, match="closed"):
        llm.embed(["a"])


def test_a_time_that_is_over_ends_the_whole_list(pooled: LoadedModel) -> None:
    with pytest.raises(TimedOut, match="the request timed out"):
        embed(pooled, *TEXTS * 4, deadline=0.0)
    assert len(embed(pooled, *TEXTS).vectors) == len(TEXTS)
    assert pooled.engine.load().kv_usage == 0
