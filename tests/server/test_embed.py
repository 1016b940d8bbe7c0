"""`/api/embed`, `/api/embeddings` and `/v1/embeddings` over a real connection.

The fake model's vector of a text is its length, then what was asked for: truncate, num_ctx,
dimensions, normalise.
"""

from array import array
from base64 import b64decode
from typing import Any

import pytest
from server_process import Server

Body = dict[str, Any]

EMBED = {"model": "tiny", "input": ["abc", "de"]}
OLD = {"model": "tiny", "prompt": "abcd"}
NOT_FOUND = 'model "nope" not found, try pulling it first'


def vectors(server: Server, **body: Any) -> list[list[float]]:
    answer = server.post("/api/embed", **{**EMBED, **body})
    assert answer.status_code == 200, answer.text
    found: list[list[float]] = answer.json()["embeddings"]
    return found


def test_embed_answers_in_order_with_statistics(server: Server) -> None:
    answer = server.post("/api/embed", **EMBED)
    assert answer.headers["content-type"] == "application/json; charset=utf-8"
    body = answer.json()
    assert set(body) == {
        *("model", "embeddings", "total_duration", "load_duration", "prompt_eval_count")
    }
    assert body["model"] == "tiny"
    assert body["embeddings"] == [[3, 1, 0, 0, 1], [2, 1, 0, 0, 1]]
    assert body["prompt_eval_count"] == 5
    assert body["total_duration"] >= body["load_duration"] > 0


def test_embed_passes_on_what_it_was_given(server: Server) -> None:
    assert vectors(server, input="four") == [[4, 1, 0, 0, 1]]
    assert vectors(server, input=[""]) == [[0, 1, 0, 0, 1]]
    assert vectors(server, truncate=False, dimensions=7)[0] == [3, 0, 0, 7, 1]
    assert vectors(server, options={"num_ctx": 3})[0] == [3, 1, 3, 0, 1]
    server.create("small", parameters={"num_ctx": 17})
    assert vectors(server, model="small")[0] == [3, 1, 17, 0, 1]
    assert vectors(server, model="small", options={"num_ctx": 5})[0] == [3, 1, 5, 0, 1]


def test_embed_says_what_was_cut(server: Server) -> None:
    assert server.post("/api/embed", model="tiny", input="long").json()["dropped_tokens"] == [1]


@pytest.mark.parametrize("given", [{}, {"input": ""}, {"input": []}, {"input": None}])
def test_embed_of_nothing_loads_the_model(server: Server, given: Body) -> None:
    server.post("/api/generate", model="tiny", keep_alive=0)
    answer = server.post("/api/embed", model="tiny", **given)
    assert answer.json() == {"model": "tiny", "embeddings": []}
    assert [model["name"] for model in server.http.get("/api/ps").json()["models"]] == [
        "tiny:latest"
    ]


def test_embeddings_takes_one_text_and_keeps_its_values(server: Server) -> None:
    answer = server.post("/api/embeddings", **OLD, options={"num_ctx": 8})
    assert answer.json() == {"embedding": [4, 0, 8, 0, 0]}
    assert server.post("/api/embeddings", model="tiny").json() == {"embedding": []}
    assert server.post("/api/embeddings", model="tiny", prompt="").json() == {"embedding": []}


@pytest.mark.parametrize("path", ["embed", "embeddings"])
def test_keep_alive_of_nothing_unloads(server: Server, path: str) -> None:
    server.post("/api/embed", **EMBED)
    assert server.post(f"/api/{path}", model="tiny", keep_alive="0s").status_code == 200
    while server.http.get("/api/ps").json()["models"]:
        pass


def test_v1_answers_in_numbers_and_in_base64(server: Server) -> None:
    body = server.post("/v1/embeddings", **EMBED).json()
    assert body["object"] == "list"
    assert body["model"] == "tiny"
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert [entry["index"] for entry in body["data"]] == [0, 1]
    assert {entry["object"] for entry in body["data"]} == {"embedding"}
    numbers = [entry["embedding"] for entry in body["data"]]
    assert numbers == vectors(server)
    packed = server.post("/v1/embeddings", **EMBED, encoding_format="BASE64").json()["data"]
    assert [array("f", b64decode(entry["embedding"])).tolist() for entry in packed] == numbers


def test_v1_has_a_vector_for_an_empty_text(server: Server) -> None:
    data = server.post("/v1/embeddings", model="tiny", input="", dimensions=2).json()["data"]
    assert [entry["embedding"] for entry in data] == [[0, 1, 0, 2, 1]]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("embed", {}, 404, "model '' not found"),
        ("embed", {"model": "nope", "input": "x"}, 404, NOT_FOUND),
        ("embed", {"model": "nope", "input": 3}, 400, "invalid input type"),
        ("embed", {**EMBED, "input": ["x", 1]}, 400, "invalid input type"),
        ("embed", {**EMBED, "input": [[1, 2]]}, 400, "invalid input type"),
        ("embed", {**EMBED, "input": {"a": 1}}, 400, "invalid input type"),
        ("embed", {**EMBED, "model": "a//b"}, 400, "invalid model name"),
        ("embed", {**EMBED, "keep_alive": "5x"}, 400, 'time: invalid duration "5x"'),
        ("embed", {**EMBED, "options": {"num_ctx": "x"}}, 400, 'option "num_ctx" must be'),
        ("embed", {**EMBED, "dimensions": "x"}, 400, "json: cannot unmarshal string into Go"),
        ("embed", {**EMBED, "input": ["refuse"]}, 400, "the fake model refuses this"),
        ("embeddings", {}, 400, "model is required"),
        ("embeddings", {"model": "nope", "prompt": "x"}, 404, NOT_FOUND),
        ("embeddings", {"model": "a//b", "prompt": "x"}, 400, "invalid model name"),
        ("embeddings", {**OLD, "prompt": ["x"]}, 400, "json: cannot unmarshal array into Go"),
    ],
)
def test_refusals(server: Server, path: str, body: Body, status: int, text: str) -> None:
    answer = server.http.post(f"/api/{path}", json=body)
    assert answer.status_code == status
    assert answer.json()["error"].startswith(text)


@pytest.mark.parametrize(
    ("body", "status", "kind", "text"),
    [
        ({**EMBED, "input": None}, 400, "invalid_request_error", "invalid input"),
        ({**EMBED, "input": []}, 400, "invalid_request_error", "invalid input"),
        ({**EMBED, "input": [1, 2]}, 400, "invalid_request_error", "invalid input"),
        ({"input": "x"}, 400, "invalid_request_error", "model is required"),
        ({**EMBED, "model": "nope"}, 404, "not_found_error", "model 'nope' not found"),
        ({**EMBED, "input": "refuse"}, 400, "invalid_request_error", "the fake model refuses"),
        (
            {**EMBED, "encoding_format": "hex"},
            *(400, "invalid_request_error"),
            "Invalid value for 'encoding_format' = hex. Supported values: ['float', 'base64'].",
        ),
    ],
)
def test_v1_refusals(server: Server, body: Body, status: int, kind: str, text: str) -> None:
    answer = server.http.post("/v1/embeddings", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error.pop("message").startswith(text)
    assert error == {"type": kind, "param": None, "code": None}
