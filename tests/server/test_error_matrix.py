"""Every way in which Ollama's API refuses a request: its status and its words.

Statuses differ from Ollama's in two rows on purpose: a wrong type of an option and a format that is
none are the client's fault, so 400 and not 500. Texts that end in `...` are compared up to there:
the rest is ours, and clients look at the beginning alone.

Shown elsewhere: embeddings (test_embed), a full queue (test_lifecycle), clients that go away
(test_generate), a prompt that does not fit (test_real_server), failed loads and dying runners
(test_generate, test_models), memory (tests/daemon), the stream of a pull (tests/pull).
Not here: image models and MLX models, which no GGUF file is; several missing capabilities at once,
of which a request can only ask for one.
"""

from typing import Any

import pytest
from server_process import Server, write_model

Body = dict[str, Any]

ASK = {"model": "tiny", "prompt": "x"}
TALK = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
FULL = "registry.ollama.ai/library/tiny:latest"
THINK = 'think must be a boolean or string ("high", "medium", "low", "max", true, or false)'
FORMAT = 'expected "json" or a valid JSON Schema object'
CLOUD = "ollama cloud is disabled: remote model is unavailable"
NO_NAME, BAD_NAME = "model is required", "invalid model name..."


def option(name: str, value: Any) -> Body:
    return {**ASK, "options": {name: value}}


def wrong(field: str, kind: str, go: str, request: str = "GenerateRequest") -> str:
    return f"json: cannot unmarshal {kind} into Go struct field {request}.{field} of type {go}"


ROWS: list[tuple[str, Body, int, str]] = [
    # No name.
    ("generate", {}, 404, "model '' not found"),
    ("chat", {}, 400, NO_NAME),
    ("show", {}, 400, NO_NAME),
    ("push", {}, 400, NO_NAME),
    ("delete", {}, 400, NO_NAME),
    ("pull", {}, 400, BAD_NAME),
    ("create", {"from": "tiny"}, 400, BAD_NAME),
    ("copy", {}, 400, 'source "" is invalid'),
    # A name of nothing.
    ("generate", {**ASK, "model": "nope"}, 404, "model 'nope' not found"),
    ("generate", {"model": "no:pe"}, 404, "model 'no:pe' not found"),
    ("generate", {"model": "nope", "keep_alive": 0}, 404, "model 'nope' not found"),
    ("chat", {**TALK, "model": "me/nope"}, 404, "model 'me/nope' not found"),
    ("show", {"model": "nope"}, 404, "model 'nope:latest' not found"),
    ("show", {"name": "nope"}, 404, "model 'nope:latest' not found"),
    ("delete", {"model": "nope"}, 404, "model 'nope' not found"),
    ("delete", {"name": "nope"}, 404, "model 'nope' not found"),
    ("copy", {"source": "nope", "destination": "x"}, 404, 'model "nope" not found'),
    # What is no name.
    *((path, {"model": "a//b"}, 400, BAD_NAME) for path in ("generate", "chat", "show", "pull")),
    ("generate", {**ASK, "model": "tiny:"}, 400, BAD_NAME),
    ("chat", {**TALK, "model": "t i n y"}, 400, BAD_NAME),
    ("show", {"model": "../../etc/passwd"}, 400, BAD_NAME),
    ("show", {"model": "a/b/c/d"}, 400, BAD_NAME),
    ("create", {"model": "!", "from": "tiny"}, 400, BAD_NAME),
    ("push", {"model": "a//b"}, 400, BAD_NAME),
    ("delete", {"model": "!"}, 400, 'name "!" is invalid'),
    ("copy", {"source": "!", "destination": "x"}, 400, 'source "!" is invalid'),
    ("copy", {"source": "tiny", "destination": "a:"}, 400, 'destination "a:" is invalid'),
    # Models of the cloud.
    *((path, {"model": "big:cloud"}, 403, CLOUD) for path in ("generate", "chat", "show", "pull")),
    ("chat", {**TALK, "model": "gpt-oss:120b-cloud"}, 403, CLOUD),
    ("chat", {"model": "a:cloud:local"}, 400, 'use either :local or :cloud, not both: "a:cloud:local"'),
    # What a model cannot do.
    ("chat", {**TALK, "model": "vectors"}, 400, '"vectors" does not support chat'),
    ("generate", {**ASK, "model": "vectors"}, 400, '"vectors" does not support generate'),
    ("chat", {**TALK, "tools": [TOOL]}, 400, f"{FULL} does not support tools"),
    ("generate", {**ASK, "suffix": "y"}, 400, f"{FULL} does not support insert"),
    ("generate", {**ASK, "think": True}, 400, '"tiny" does not support thinking'),
    ("chat", {**TALK, "think": "low"}, 400, '"tiny" does not support thinking'),
    ("generate", {**ASK, "images": ["aGk="]}, 400, '"tiny" does not support images'),
    ("push", {"model": "tiny"}, 400, "push is not supported by this version..."),
    # Fields that contradict each other or are out of range.
    *(
        ("generate", {**ASK, "raw": True, field: value}, 400,
         "raw mode does not support template, system, or context")
        for field, value in (("template", "x"), ("system", "x"), ("context", [1]))
    ),
    *(
        (path, {**ask, "top_logprobs": number}, 400, "top_logprobs must be between 0 and 20")
        for path, ask in (("generate", ASK), ("chat", TALK))
        for number in (-1, 21)
    ),
    ("generate", {"model": "nope", "top_logprobs": 21}, 400, "top_logprobs must be between 0 and 20"),
    ("generate", {**ASK, "think": "x"}, 400,
     'invalid think value: "x" (must be "high", "medium", "low", "max", true, or false)'),
    ("chat", {**TALK, "think": 1}, 400, THINK),
    ("chat", {**TALK, "think": {}}, 400, THINK),
    ("generate", {**ASK, "keep_alive": "5"}, 200, ""),
    ("generate", {**ASK, "keep_alive": "5x"}, 400, 'time: invalid duration "5x"...'),
    ("generate", {**ASK, "keep_alive": "abc"}, 400, 'time: invalid duration "abc"...'),
    ("chat", {**TALK, "keep_alive": True}, 400, "Unsupported type: 'bool'..."),
    ("chat", {**TALK, "keep_alive": [1]}, 400, "Unsupported type: '[]interface {}'..."),
    ("generate", {**ASK, "format": "yaml"}, 400, f'invalid format: "yaml"; {FORMAT}'),
    ("chat", {**TALK, "format": [1]}, 400, f"invalid format: [1]; {FORMAT}"),
    ("chat", {**TALK, "format": 3}, 400, f"invalid format: 3; {FORMAT}"),
    # Options of a wrong type.
    ("generate", option("temperature", "hot"), 400, 'option "temperature" must be of type float32'),
    ("generate", option("num_ctx", "4k"), 400, 'option "num_ctx" must be of type integer'),
    ("generate", option("seed", True), 400, 'option "seed" must be of type integer'),
    ("generate", option("stop", "x"), 400, 'option "stop" must be of type array'),
    ("generate", option("stop", ["x", 1]), 400, 'option "stop" must be of an array of strings'),
    ("generate", option("use_mmap", 1), 400, 'option "use_mmap" must be of type boolean'),
    # JSON of a wrong type.
    ("generate", {"model": 1}, 400, wrong("model", "number", "string")),
    ("generate", {**ASK, "options": []}, 400,
     wrong("options", "array", "map[string]interface {}")),
    ("generate", {**ASK, "stream": "yes"}, 400, wrong("stream", "string", "bool")),
    ("chat", {**TALK, "messages": "hi"}, 400,
     wrong("messages", "string", "[]api.Message", "ChatRequest")),
    ("chat", {**TALK, "messages": [{"role": "user", "content": []}]}, 400,
     wrong("content", "array", "string", "ChatRequest.messages")),
    ("show", {"model": []}, 400, wrong("model", "array", "string", "ShowRequest")),
    ("copy", {"source": 1}, 400, wrong("source", "number", "string", "CopyRequest")),
    ("delete", {"model": {}}, 400, wrong("model", "object", "string", "DeleteRequest")),
    ("pull", {"model": 1}, 400, wrong("model", "number", "string", "PullRequest")),
    ("create", {"model": True}, 400, wrong("model", "bool", "string", "CreateRequest")),
    # Making models.
    ("create", {"model": "x"}, 400, "neither 'from' or 'files' was specified"),
    ("create", {"model": "x", "files": {"/m.gguf": "y"}}, 400, "file path must be relative"),
    ("create", {"model": "x", "files": {"../m.gguf": "y"}}, 400, "file path must be relative"),
    ("create", {"model": "x", "files": {"m.gguf": "y"}}, 400, "invalid digest format"),
    ("create", {"model": "x", "files": {"m.safetensors": "y"}}, 400, "create: safetensors are not..."),
    *(
        ("create", {"model": "x", "from": "tiny", "info": {field: value}}, 400,
         f'info field "{field}" {text}')
        for field, value, text in (
            ("model_family", 1, "must be a string"),
            ("context_length", "1", "must be a number"),
            ("context_length", -1, "must be a non-negative integer"),
            ("colour", "red", "is not known"),
        )
    ),
    ("create", {"model": "x", "from": "tiny", "requires": "new"}, 400,
     "requires must be a valid semver (e.g. 0.14.0)"),
    ("create", {"model": "x", "from": "tiny", "renderer": "y"}, 400, "unknown renderer 'y'"),
    ("create", {"model": "x", "from": "tiny", "draft_quantize": "y"}, 400,
     "create: 'draft_quantize' is not supported by this version"),
    ("create", {"model": "x", "from": "tiny", "template": "{{ if }}"}, 400, "template error: ..."),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def vectors(server: Server) -> None:
    """A model that is made for embeddings."""
    path = write_model(server.folder / "vectors.gguf", is_for_vectors=True)
    server.create("vectors", **{"from": str(path)})


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("path", "body", "status", "text"), ROWS, ids=str)
def test_refusals(
    server: Server, path: str, body: Body, status: int, text: str, stream: bool
) -> None:
    method = "DELETE" if path == "delete" else "POST"
    answer = server.http.request(method, f"/api/{path}", json={"stream": stream, **body})
    assert answer.status_code == status, answer.text
    if status == 200:
        return
    assert answer.headers["content-type"].startswith("application/json")
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert error == text if not text.endswith("...") else error.startswith(text[:-3])


@pytest.mark.parametrize(
    "path", ["generate", "chat", "show", "create", "copy", "pull", "push", "delete"]
)
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "missing request body"),
        (b"x", "invalid character 'x' looking for beginning of value"),
        (b'{"model": "a', "unexpected EOF"),
        (b'"a"', "json: cannot unmarshal string into Go value of type api."),
    ],
)
def test_bodies_that_are_none(server: Server, path: str, data: bytes, text: str) -> None:
    method = "DELETE" if path == "delete" else "POST"
    answer = server.http.request(method, f"/api/{path}", content=data)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(text)


@pytest.mark.parametrize(
    ("method", "status", "text"), [("HEAD", 400, ""), ("POST", 400, "invalid digest format")]
)
def test_a_digest_that_is_none(server: Server, method: str, status: int, text: str) -> None:
    answer = server.http.request(method, "/api/blobs/sha256:x")
    assert answer.status_code == status
    if text:
        assert answer.json()["error"] == text


def test_local_means_what_is_here(server: Server) -> None:
    answer = server.post("/api/generate", model="tiny:local", prompt="hi", stream=False)
    assert answer.json()["response"] == "0 1 2 "
    assert answer.json()["model"] == "tiny:local"
