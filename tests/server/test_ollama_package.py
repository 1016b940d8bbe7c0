"""The `ollama` package from the package index, unchanged, against our server."""

from collections.abc import Iterator
from typing import Any

import pytest
from server_process import Server

ollama = pytest.importorskip("ollama")


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    client = ollama.Client(host=server.url)
    yield client
    client.close()


def test_generate_and_chat_whole_and_in_pieces(client: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert client.generate(model="tiny", prompt="hi").response == "0 1 2 "
    assert client.chat(model="tiny", messages=messages).message.content == "0 1 2 "
    *pieces, last = client.generate(model="tiny", prompt="hi", stream=True)
    assert "".join(piece.response for piece in pieces) == "0 1 2 "
    assert (last.done_reason, last.eval_count, last.context) == ("stop", 3, [1, 2, 3])
    *pieces, last = client.chat(model="tiny", messages=messages, stream=True)
    assert "".join(piece.message.content for piece in pieces) == "0 1 2 "
    assert last.total_duration > 0


def test_tools_thinking_and_formats(client: Any) -> None:
    def f(n: int) -> int:
        """Count.

        Args:
          n: how far
        """
        return n

    template = "{{ .Tools }}<think>{{ range .Messages }}{{ .Content }}{{ end }}"
    client.create(model="able", from_="tiny", template=template)
    messages = [{"role": "user", "content": "call"}]
    answer = client.chat(model="able", messages=messages, tools=[f], think=True)
    assert answer.message.thinking == "0? 1? 2? "
    calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls]
    assert calls == [("f", {"n": 0}), ("f", {"n": 1}), ("f", {"n": 2})]
    stream = client.chat(model="able", messages=messages, tools=[f], stream=True)
    assert len([call for piece in stream for call in piece.message.tool_calls or ()]) == 3
    messages = [{"role": "user", "content": "fields"}]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    answer = client.chat(model="able", messages=messages, format=schema, think="low")
    assert answer.message.content.startswith(f"({schema!r}, 'low', None")
    client.delete("able")


def test_models_are_listed_shown_copied_and_deleted(client: Any) -> None:
    (model,) = [m for m in client.list().models if m.model == "tiny:latest"]
    assert model.details.family == "llama"
    assert client.show("tiny").modelinfo["llama.context_length"] == 2048
    client.generate(model="tiny", prompt="hi")
    assert [m.name for m in client.ps().models] == ["tiny:latest"]
    assert client.copy("tiny", "again").status == "success"
    assert client.create(model="more", from_="again", system="x").status == "success"
    for name in ("again", "more"):
        assert client.delete(name).status == "success"


def test_errors_carry_text_and_status(client: Any) -> None:
    with pytest.raises(ollama.ResponseError) as error:
        client.generate(model="nope", prompt="hi")
    assert (error.value.status_code, error.value.error) == (404, "model 'nope' not found")
    with pytest.raises(ollama.ResponseError, match="unexpectedly stopped"):
        list(client.generate(model="tiny", prompt="die", stream=True))
