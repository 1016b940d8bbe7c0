"""The forms in which clients send the same thing: durations, nulls, names."""

import math
from datetime import datetime
from typing import Any

import pytest
from server_process import Server
from test_structured import chat

HOUR = 3600
NULLS: dict[str, Any] = {
    **{"options": None, "format": "", "tools": [], "think": None, "keep_alive": None},
    **{"truncate": None, "shift": None, "logprobs": None, "template": None},
}
NAMES = ("Case", "my.model:V1.0", "hf.co/Org/Repo-GGUF:Q8_0", "reg.example:5000/b/c:d", "con")
NO_NAMES = (
    "../x",
    "a/../b",
    "x" * 300,
    "modèle",
    "x:",
    "a b",
    "",
    "a@sha256:" + 64 * "0",
    "/x",
    "-",
)


def seconds_left(server: Server) -> float:
    """Until the model is unloaded, as ps tells."""
    (model,) = server.http.get("/api/ps").json()["models"]
    end = datetime.fromisoformat(model["expires_at"])
    if end.year > 2200:
        return math.inf
    return (end - datetime.now().astimezone()).total_seconds()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *((300, 300), ("300", 300), ("10m", 600), ("1h30m", 1.5 * HOUR), (5e3 + 0.5, 5000)),
        *((-1, math.inf), ("-1", math.inf), ("-1m", math.inf), ("-1s", math.inf)),
    ],
)
def test_keep_alive_is_what_ps_tells_and_stays_so(
    server: Server, value: object, seconds: float
) -> None:
    for more in ({"keep_alive": value}, {"keep_alive": None}, {}):
        body = {"model": "tiny", "prompt": "hi", "stream": False, **more}
        assert server.post("/api/generate", **body).status_code == 200
        left = seconds_left(server)
        assert left == seconds if math.isinf(seconds) else seconds - 120 < left <= seconds + 1


@pytest.mark.parametrize("value", [0, "0", "0s", 0.001])
def test_keep_alive_of_nothing_unloads_after_the_answer(server: Server, value: object) -> None:
    body = {"model": "tiny", "prompt": "hi", "stream": False, "keep_alive": value}
    assert server.post("/api/generate", **body).json()["response"] == "0 1 2 "
    while server.http.get("/api/ps").json()["models"]:
        pass


@pytest.mark.parametrize("path", ["generate", "chat"])
def test_a_duration_that_is_none_is_refused_by_name(server: Server, path: str) -> None:
    answer = server.post(f"/api/{path}", model="tiny", keep_alive="abc")
    assert answer.status_code == 400
    assert answer.json()["error"] == 'time: invalid duration "abc" for keep_alive'


@pytest.mark.parametrize("word", ["fields", "options", "echo"])
def test_nulls_and_empty_values_are_as_good_as_nothing(server: Server, word: str) -> None:
    def said(path: str, **fields: Any) -> Any:
        answer = server.post(f"/api/{path}", model="tiny", stream=False, **fields).json()
        return answer["message"] if path == "chat" else answer["response"]

    message = {
        "role": "user",
        "content": word,
        "images": None,
        "tool_calls": None,
        "thinking": None,
    }
    plain = said("chat", messages=chat(word))
    assert said("chat", messages=[message], **NULLS) == plain
    more = {"system": None, "suffix": "", "context": None, "raw": None, "images": None}
    assert said("generate", prompt=word, **NULLS, **more) == said("generate", prompt=word)


def test_calls_without_content_and_contents_of_another_kind(server: Server) -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    history = [*chat("hi"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    body = {"model": "tiny", "stream": False, "messages": [*history, *chat("echo")]}
    answer = server.post("/api/chat", **body)
    assert repr({"role": "assistant", "content": "", "tool_calls": [call]}) in answer.text.replace(
        '\\"', '"'
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    answer = server.post("/api/chat", **{**body, "messages": parts})
    assert answer.status_code == 400
    assert "messages.content of type string" in answer.json()["error"]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_kept_as_given_and_found_in_any_case(server: Server, name: str) -> None:
    def listed() -> list[str]:
        models = server.http.get("/api/tags").json()["models"]
        return [m["name"] for m in models if m["name"].lower().startswith(name.lower())]

    shown = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    assert server.post("/api/copy", source="tiny", destination=name).status_code == 200
    assert listed() == [shown]
    assert server.post("/api/copy", source="tiny", destination=name.swapcase()).status_code == 200
    assert listed() == [shown]
    for text in (name, name.lower(), name.upper()):
        body = {"model": text, "prompt": "hi", "stream": False}
        assert server.post("/api/generate", **body).json()["model"] == text
    body = {"model": name.lower()}
    assert server.http.request("DELETE", "/api/delete", json=body).status_code == 200
    assert listed() == []


@pytest.mark.parametrize("name", NO_NAMES)
def test_what_is_no_name_is_refused_and_says_what_is(server: Server, name: str) -> None:
    before = sorted(path for path in server.folder.rglob("*"))
    for path, body in (
        ("create", {"model": name, "from": "tiny", "stream": False}),
        ("copy", {"source": "tiny", "destination": name}),
        ("pull", {"model": name, "stream": False}),
    ):
        answer = server.post(f"/api/{path}", **body)
        assert answer.status_code == 400
        assert "invalid" in answer.json()["error"]
    assert sorted(path for path in server.folder.rglob("*")) == before


def test_fields_in_a_wrong_place_are_ignored_and_logged(server: Server) -> None:
    body = {"model": "tiny", "prompt": "options", "stream": False, "seed": 7, "temprature": 1}
    answer = server.post("/api/generate", **body, options={"typo": 1})
    assert answer.json()["response"] == repr(({}, []))
    log = (server.folder / "log").read_text()
    assert "option 'typo' is unknown and was ignored" in log
    assert "field 'seed' belongs into options and was ignored" in log
