"""Thinking, tool calls and formats in Ollama's fields."""

import ast
from typing import Any

import pytest
from server_process import Server
from test_generate import lines_of

TEMPLATE = "{{ .Tools }}<think>{{ .Suffix }}{{ range .Messages }}{{ .Content }}{{ end }}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALLS = [
    {"id": f"call_{n}", "function": {"index": n, "name": "f", "arguments": {"n": n}}}
    for n in range(3)
]


@pytest.fixture(scope="module", autouse=True)
def able(server: Server) -> None:
    server.create("able", template=TEMPLATE)


def chat(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_thinking_and_calls_have_their_own_fields_in_a_stream(server: Server) -> None:
    *deltas, last = lines_of(server, "/api/chat", model="able", messages=chat("call"), tools=TOOLS)
    messages = [delta["message"] for delta in deltas]
    assert [call for message in messages for call in message.get("tool_calls", ())] == CALLS
    assert "".join(message["thinking"] for message in messages) == "0? 1? 2? "
    assert all(message["content"] == "" for message in messages)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert last["done_reason"] == "stop"


def test_thinking_and_calls_are_collected_in_one_object(server: Server) -> None:
    body = {"model": "able", "messages": chat("call"), "tools": TOOLS, "stream": False}
    assert server.post("/api/chat", **body).json()["message"] == {
        "role": "assistant",
        "content": "",
        "thinking": "0? 1? 2? ",
        "tool_calls": CALLS,
    }
    answer = server.post("/api/generate", model="able", prompt="call", stream=False).json()
    assert (answer["response"], answer["thinking"]) == ("", "0? 1? 2? ")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, None, None, "", False)),
        ({"think": "max", "format": "json"}, ("json", "max", None, "", False)),
        ({"think": False, "format": {"type": "object"}}, ({"type": "object"}, False, None, "", False)),
        ({"format": None, "think": True}, (None, True, None, "", False)),
        ({"suffix": "end"}, (None, None, None, "end", False)),
        ({"suffix": "end", "template": "{{ .Suffix }}"}, (None, None, None, "end", True)),
    ],
)  # fmt: skip
def test_fields_reach_the_model(server: Server, fields, expected) -> None:
    answer = server.post("/api/generate", model="able", prompt="fields", stream=False, **fields)
    assert ast.literal_eval(answer.json()["response"]) == expected


def test_tools_reach_the_model_and_none_are_none(server: Server) -> None:
    for tools in (TOOLS, []):
        body = {"model": "able", "messages": chat("fields"), "tools": tools, "stream": False}
        found = ast.literal_eval(server.post("/api/chat", **body).json()["message"]["content"])
        assert found[2] == (tools or None)


def test_show_and_tags_tell_what_a_model_can_do(server: Server) -> None:
    able = server.post("/api/show", model="able").json()["capabilities"]
    assert able == ["completion", "tools", "insert", "thinking"]


def test_a_wrong_template_is_refused_when_a_model_is_made(server: Server) -> None:
    body = {"model": "bad", "from": "tiny", "template": "\n{{ if .X }}", "stream": False}
    answer = server.post("/api/create", **body)
    assert answer.status_code in (400, 500)
    assert answer.json()["error"] == "template error: line 2: if has no end"
