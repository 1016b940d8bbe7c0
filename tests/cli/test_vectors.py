"""`localllm run` with models that are made for embeddings, and vectors of others."""

import json

import pytest
from server_process import Server, write_model
from test_commands import run


@pytest.fixture(scope="module", autouse=True)
def vectors(server: Server) -> None:
    path = write_model(server.folder / "vectors.gguf", is_for_vectors=True)
    server.create("vectors", **{"from": str(path)})


def vector(server: Server, *args: str, stdin: bytes = b"") -> list[float]:
    code, out, err = run(server, "run", *args, stdin=stdin)
    assert (code, err) == (0, "")
    found: list[float] = json.loads(out)
    return found


def test_a_model_for_vectors_prints_the_one_of_its_prompt(server: Server) -> None:
    body = {"model": "vectors", "input": "a text"}
    expected = server.post("/api/embed", **body).json()["embeddings"][0]
    assert vector(server, "vectors", "a", "text") == expected
    assert vector(server, "vectors", stdin=b"a text") == expected


def test_any_model_does_when_asked_for_a_vector(server: Server) -> None:
    assert vector(server, "tiny", "--dimensions", "2", "hi")
    # The second value of the fake model's vectors is the field `truncate`.
    assert vector(server, "tiny", "--truncate", "hi")[1] == 1
    assert vector(server, "tiny", "--truncate=false", "hi")[1] == 0


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("vectors",), 'embedding models require input text. Usage: localllm run vectors "your'),
        (("vectors", "--truncate=maybe", "x"), 'invalid value for --truncate: "maybe"'),
        (("tiny", "--think", "hi"), '"tiny" does not support thinking'),
    ],
)
def test_mistakes_are_one_line(server: Server, args: tuple[str, ...], error: str) -> None:
    code, out, err = run(server, "run", *args)
    assert (code, out) == (1, "")
    assert error in err
    assert len(err.splitlines()) == 1
