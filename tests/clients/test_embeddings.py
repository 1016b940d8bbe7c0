"""What Ollama's own integration tests ask of embeddings, with vectors of a decoder, over HTTP.

Also what users of other engines reported: a list and its texts one by one, both routes, and texts
about as long as the context.
"""

from array import array
from base64 import b64decode
from typing import Any

import httpx
import numpy as np
import pytest
from server_process import Server

pytestmark = pytest.mark.real

MODEL = "smollm2"
SKY = "why is the sky blue?"
TEXTS = [
    *(SKY, "cat", "The quick brown fox jumps over the lazy dog.", "def f(x):\n    return x"),
    *("空はなぜ青いのですか。", "a " * 300, " ", "Why is the grass green? " * 20),
]


def embed(server: Server, given: Any, **fields: Any) -> dict[str, Any]:
    answer = server.post("/api/embed", model=MODEL, input=given, **fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def vectors(server: Server, given: Any, **fields: Any) -> list[list[float]]:
    found: list[list[float]] = embed(server, given, **fields)["embeddings"]
    return found


def refusal(server: Server, given: Any, **fields: Any) -> str:
    answer = server.post("/api/embed", model=MODEL, input=given, **fields)
    assert 400 <= answer.status_code < 500
    error: str = answer.json()["error"]
    return error


def test_embed_api(server: Server) -> None:
    found = embed(server, SKY)
    (vector,) = found["embeddings"]
    assert len(vector) == 576
    assert abs(np.linalg.norm(vector) - 1) < 1e-6
    assert found["prompt_eval_count"] == 6
    assert found["total_duration"] > found["load_duration"] > 0


def test_embedding_api(server: Server) -> None:
    body = server.post("/api/embeddings", model=MODEL, prompt=SKY).json()
    assert set(body) == {"embedding"}
    raw = np.array(body["embedding"])
    # The model's own values: not of length one, but of the same direction.
    assert np.linalg.norm(raw) > 2
    (vector,) = vectors(server, SKY)
    assert raw @ vector / np.linalg.norm(raw) > 1 - 1e-6


def test_a_list_is_its_texts_one_by_one_in_any_order_on_every_route(server: Server) -> None:
    alone = [vectors(server, text)[0] for text in TEXTS]
    assert vectors(server, TEXTS) == alone
    assert vectors(server, TEXTS[::-1]) == alone[::-1]
    counts = [embed(server, text)["prompt_eval_count"] for text in TEXTS]
    assert embed(server, TEXTS)["prompt_eval_count"] == sum(counts)
    body = server.post("/v1/embeddings", model=MODEL, input=TEXTS).json()
    assert [entry["embedding"] for entry in body["data"]] == alone
    assert [entry["index"] for entry in body["data"]] == list(range(len(TEXTS)))
    assert body["usage"] == {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
    packed = server.post("/v1/embeddings", model=MODEL, input=TEXTS, encoding_format="base64")
    unpacked = [array("f", b64decode(e["embedding"])).tolist() for e in packed.json()["data"]]
    assert unpacked == alone
    for text, vector in zip(TEXTS, alone):
        old = np.array(server.post("/api/embeddings", model=MODEL, prompt=text).json()["embedding"])
        assert old @ vector / np.linalg.norm(old) > 1 - 1e-6


def test_dimensions_are_the_first_ones_of_length_one(server: Server) -> None:
    (whole,) = vectors(server, SKY)
    (part,) = vectors(server, SKY, dimensions=100)
    assert np.allclose(part, np.array(whole[:100]) / np.linalg.norm(whole[:100]), atol=1e-7)
    assert vectors(server, SKY, dimensions=5000) == [whole]
    body = server.post("/v1/embeddings", model=MODEL, input=SKY, dimensions=100).json()
    assert body["data"][0]["embedding"] == part


def test_embed_api_truncate(server: Server) -> None:
    (short,) = vectors(server, "why is the")
    for fields in ({}, {"truncate": True}):
        assert vectors(server, SKY, options={"num_ctx": 3}, **fields) == [short]
    assert embed(server, SKY, options={"num_ctx": 3})["dropped_tokens"] == [3]
    error = refusal(server, SKY, options={"num_ctx": 3}, truncate=False)
    assert "input length exceeds the context length" in error
    assert "6 tokens" in error
    assert "holds 3" in error
    assert "exceeds maximum context length" in refusal(server, SKY, options={"num_ctx": 0})
    assert len(vectors(server, SKY, options={"num_ctx": 16})) == 1


def test_embed_truncation_of_a_list(server: Server) -> None:
    texts = ["the quick brown fox " * n for n in (20, 40, 60)]
    counts = [embed(server, t, options={"num_ctx": 30})["prompt_eval_count"] for t in texts]
    assert counts == [30, 30, 30]
    assert embed(server, texts, options={"num_ctx": 30})["prompt_eval_count"] == 90


@pytest.mark.parametrize("words", [256, 512, 800])
def test_embed_large_input(server: Server, words: int) -> None:
    assert len(vectors(server, "word " * words)) == 1


def test_embed_status_code(server: Server) -> None:
    long = "very long input " * 100
    for given in (long, ["short", long, "short"]):
        error = refusal(server, given, truncate=False, options={"num_ctx": 10})
        assert "context length" in error


@pytest.mark.parametrize("unit", ["a", "空"])
def test_texts_about_as_long_as_the_context(server: Server, unit: str) -> None:
    """The daemon's context is 4096, the model's 8192."""
    window = 4096
    # So many that the text has a token more than the window, whatever a unit takes.
    per_unit = embed(server, unit * 100)["prompt_eval_count"] / 100
    text = unit * int(window / per_unit)
    count = embed(server, text)["prompt_eval_count"]
    assert count <= window
    (fits,) = vectors(server, text, truncate=False)
    for options in ({}, {"num_ctx": 100_000}):
        longer = text + 10 * text
        found = embed(server, longer, options=options)
        assert found["prompt_eval_count"] == window
        assert found["dropped_tokens"][0] > 9 * count
        assert abs(np.linalg.norm(found["embeddings"][0]) - 1) < 1e-6
        error = refusal(server, longer, truncate=False, options=options)
        assert f"holds {window}" in error
    assert vectors(server, text, truncate=True) == [fits]


def test_embed_smoke(server: Server) -> None:
    assert [len(v) for v in vectors(server, ["cat", "kitten", "dog"], keep_alive="10s")] == [
        576
    ] * 3
    embed(server, "x", keep_alive="5m")


def test_a_client_that_leaves_its_list_does_not_disturb_the_next(server: Server) -> None:
    """That the rest of the list is not computed: tests/runtime/test_embedding.py."""
    texts = [f"{i} {'many words ' * 200}" for i in range(400)]
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(
            "/api/embed",
            json={"model": MODEL, "input": texts},
            timeout=httpx.Timeout(10, read=0.5),
        )
    (vector,) = vectors(server, SKY)
    assert vector == vectors(server, [SKY, SKY])[1]
