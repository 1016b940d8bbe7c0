"""A tour of every method of the `ollama` package, unchanged, blocking and asynchronous."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pulling import make_model
from recipes import PUZZLE, QUESTION
from registry_standin import running_registry
from server_process import Server

pytestmark = pytest.mark.real
ollama = pytest.importorskip("ollama")

GREEDY = {"temperature": 0, "num_predict": 12}
HELLO = [{"role": "user", "content": "Say hello."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Blocking:
    """Calls methods of `ollama.Client`."""

    def __init__(self, url: str) -> None:
        self._client = ollama.Client(host=url)

    def call(self, method: str, *args: Any, **fields: Any) -> Any:
        return getattr(self._client, method)(*args, **fields)

    def pieces(self, method: str, *args: Any, **fields: Any) -> list[Any]:
        return list(self.call(method, *args, stream=True, **fields))

    def close(self) -> None:
        self._client.close()


class Asynchronous:
    """Calls methods of `ollama.AsyncClient`, on a loop of its own."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        self._client = ollama.AsyncClient(host=url)

    def call(self, method: str, *args: Any, **fields: Any) -> Any:
        async def wait() -> Any:
            return await getattr(self._client, method)(*args, **fields)

        return self._runner.run(wait())

    def pieces(self, method: str, *args: Any, **fields: Any) -> list[Any]:
        async def collect() -> list[Any]:
            pieces: AsyncIterator[Any] = await getattr(self._client, method)(
                *args, stream=True, **fields
            )
            return [piece async for piece in pieces]

        return self._runner.run(collect())

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


Tourist = Blocking | Asynchronous


@pytest.fixture(scope="module", params=[Blocking, Asynchronous], ids=["blocking", "async"])
def client(server: Server, request: pytest.FixtureRequest) -> Iterator[Tourist]:
    kind: Callable[[str], Tourist] = request.param
    client = kind(server.url)
    yield client
    client.close()


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
      city: its name
    """
    return f"{city} has 21 degrees"


def test_generate_says_the_same_whole_and_in_pieces(client: Tourist) -> None:
    asked = {"model": "smollm2", "prompt": "Say hello.", "options": GREEDY}
    whole = client.call("generate", **asked)
    *pieces, last = client.pieces("generate", **asked)
    assert "".join(piece.response for piece in pieces) == whole.response != ""
    assert not any(piece.done for piece in pieces)
    for end in (whole, last):
        assert end.done
        assert (end.model, end.done_reason, end.eval_count) == ("smollm2", "length", 12)
        assert len(end.context) == end.prompt_eval_count + end.eval_count
        assert end.total_duration > end.eval_duration > 0


def test_generate_takes_all_its_fields(client: Tourist) -> None:
    def ask(prompt: str, **fields: Any) -> Any:
        return client.call("generate", model="smollm2", prompt=prompt, options=GREEDY, **fields)

    first = ask("My name is Bob.", system="Be brief.", keep_alive="10m")
    again = ask("What is my name?", context=first.context, keep_alive=600)
    assert again.prompt_eval_count > len(first.context)
    assert ask("One, two, three, four,", raw=True).response.startswith(" five")
    assert ask("ignored", template="One, two, three, four,").response.startswith(" five")
    with pytest.raises(ollama.ResponseError, match="does not support insert") as error:
        ask("def f(", suffix="return")
    assert error.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="does not support images"):
        ask("What is this?", images=[b"\x89PNG\r\n"])


def test_generate_loads_and_unloads(client: Tourist) -> None:
    def loaded() -> dict[str, Any]:
        return {model.model: model for model in client.call("ps").models}

    def unload() -> None:
        """Names of one file are one loaded model, which is shown as the one that loaded it."""
        assert client.call("generate", model="smollm2", keep_alive=0).done_reason == "unload"
        while {"smollm2:latest", "caller:latest", "thinker:latest"} & loaded().keys():
            pass

    unload()
    assert client.call("generate", model="smollm2").done_reason == "load"
    assert client.call("chat", model="smollm2").done_reason == "load"
    model = loaded()["smollm2:latest"]
    assert model.size_vram == 0
    assert model.size > 50e6
    assert model.expires_at.tzinfo is not None
    unload()
    assert client.call("generate", model="smollm2", keep_alive=-1).done_reason == "load"
    assert loaded()["smollm2:latest"].expires_at.year > 2200
    client.call("generate", model="smollm2", keep_alive="5m")


def test_chat_says_the_same_whole_and_in_pieces(client: Tourist) -> None:
    asked = {"model": "smollm2", "messages": HELLO, "options": GREEDY}
    whole = client.call("chat", **asked)
    *pieces, last = client.pieces("chat", **asked)
    assert "".join(piece.message.content for piece in pieces) == whole.message.content != ""
    for end in (whole, last):
        assert end.message.role == "assistant"
        assert (end.done_reason, end.eval_count) == ("length", 12)
        assert end.prompt_eval_count > 0
    start = {"role": "assistant", "content": "One, two, three, four,"}
    answer = client.call("chat", **{**asked, "messages": [*HELLO, start]})
    assert answer.message.content.startswith(" five")


def test_logprobs_cover_every_token(client: Tourist) -> None:
    asked = {"model": "smollm2", "options": GREEDY, "logprobs": True, "top_logprobs": 3}
    whole = client.call("generate", prompt="Say hello.", **asked)
    pieces = client.pieces("chat", messages=HELLO, **asked)
    for entries in (whole.logprobs, [e for p in pieces for e in p.logprobs or ()]):
        assert len(entries) == 12
        for entry in entries:
            assert entry.logprob <= 0
            likely = [other.logprob for other in entry.top_logprobs]
            assert len(likely) == 3
            assert likely == sorted(likely, reverse=True)
            assert likely[0] == entry.logprob
    assert "".join(entry.token for entry in whole.logprobs) == whole.response
    with pytest.raises(ollama.ResponseError, match="top_logprobs must be between 0 and 20"):
        client.call("generate", prompt="x", **{**asked, "top_logprobs": 21})


def test_tools_go_around(client: Tourist) -> None:
    """A function is offered, the model calls it, its result goes back, an answer comes."""
    asked = {"model": "caller", "tools": [get_weather]}
    answer = client.call("chat", messages=QUESTION, **asked)
    pieces = client.pieces("chat", messages=QUESTION, **asked)
    for calls in (
        answer.message.tool_calls,
        [call for piece in pieces for call in piece.message.tool_calls or ()],
    ):
        (call,) = calls
        assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    assert answer.done_reason == "stop"
    result = {
        "role": "tool",
        "tool_name": "get_weather",
        "content": get_weather(**answer.message.tool_calls[0].function.arguments),
    }
    end = client.call("chat", messages=[*QUESTION, answer.message, result], **asked)
    assert "21 degrees" in end.message.content
    with pytest.raises(ollama.ResponseError, match="smollm2:latest does not support tools"):
        client.call("chat", model="smollm2", messages=QUESTION, tools=[get_weather])


def test_structured_output_is_valid(client: Tourist) -> None:
    options = {"temperature": 1, "seed": 3, "num_predict": 100}
    asked = {"model": "smollm2", "messages": HELLO, "options": options}
    for format in (PERSON, "json"):
        content = client.call("chat", format=format, **asked).message.content
        pieces = client.pieces("chat", format=format, **asked)
        assert "".join(piece.message.content for piece in pieces) == content
        if format == PERSON:
            assert set(json.loads(content)) == {"name", "age"}
        else:
            assert content.startswith("{")
    with pytest.raises(ollama.ResponseError, match="keyword not is not supported") as error:
        client.call("generate", model="smollm2", prompt="x", format={"not": {}})
    assert error.value.status_code == 400


def test_thinking_is_apart_from_the_answer(client: Tourist) -> None:
    asked = {"model": "thinker", "messages": PUZZLE}
    for think in (None, True, "high"):
        message = client.call("chat", think=think, **asked).message
        assert message.thinking
        assert message.content.startswith("It is")
    pieces = client.pieces("chat", think=True, **asked)
    assert "".join(piece.message.thinking or "" for piece in pieces) == message.thinking
    assert "".join(piece.message.content for piece in pieces) == message.content
    message = client.call("chat", think=False, **asked).message
    assert message.thinking is None
    assert message.content.startswith("It is")
    text = client.call("generate", model="thinker", prompt=PUZZLE[0]["content"])
    assert text.thinking
    assert "think" not in text.response


def test_thinking_that_cannot_be_is_refused(client: Tourist) -> None:
    asked = {"model": "smollm2", "messages": HELLO, "options": GREEDY}
    assert client.call("chat", think=False, **asked).message.content
    for think, text in (
        (True, '"smollm2" does not support thinking'),
        ("low", '"smollm2" does not support thinking'),
        ("much", 'invalid think value: "much"'),
    ):
        with pytest.raises(ollama.ResponseError, match=text) as error:
            client.call("generate", model="smollm2", prompt="x", think=think)
        assert error.value.status_code == 400
        with pytest.raises(ollama.ResponseError, match=text):
            client.pieces("generate", model="smollm2", prompt="x", think=think)


def test_vectors_of_texts(client: Tourist) -> None:
    one = client.call("embed", model="smollm2", input="why is the sky blue?")
    both = client.call("embed", model="smollm2", input=["why is the sky blue?", "hi"])
    assert list(one.embeddings) == list(both.embeddings)[:1]
    assert [len(vector) for vector in both.embeddings] == [576, 576]
    assert math.hypot(*one.embeddings[0]) == pytest.approx(1, abs=1e-3)
    assert both.prompt_eval_count > one.prompt_eval_count > 0
    short = client.call("embed", model="smollm2", input="hi", dimensions=64, keep_alive="10m")
    assert math.hypot(*short.embeddings[0]) == pytest.approx(1, abs=1e-3)
    assert len(short.embeddings[0]) == 64
    old = client.call("embeddings", model="smollm2", prompt="why is the sky blue?").embedding
    length = math.hypot(*old)
    expected = pytest.approx(list(one.embeddings[0]), abs=1e-4)
    assert [value / length for value in old] == expected
    long = {"model": "smollm2", "input": "long " * 100, "options": {"num_ctx": 16}}
    assert len(client.call("embed", **long).embeddings) == 1
    with pytest.raises(ollama.ResponseError, match="exceeds the context length") as error:
        client.call("embed", truncate=False, **long)
    assert error.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match='model "nope" not found, try pulling it first'):
        client.call("embed", model="nope", input="x")


def test_models_are_listed_and_shown(client: Tourist) -> None:
    models = {model.model: model for model in client.call("list").models}
    assert {"smollm2:latest", "caller:latest", "thinker:latest"} <= models.keys()
    model = models["smollm2:latest"]
    assert len(model.digest) == 64
    assert model.size > 50e6
    assert (model.details.family, model.details.format) == ("llama", "gguf")
    assert model.details.parameter_size == "134.52M"
    assert model.details.quantization_level == "Q4_1"
    shown = client.call("show", "caller")
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == 8192
    assert shown.capabilities == ["completion", "tools"]
    assert "FROM /" in shown.modelfile
    assert "TEMPLATE" in shown.modelfile
    assert "temperature" in shown.parameters
    assert ".Messages" in shown.template
    assert client.call("show", "thinker").capabilities == ["completion", "thinking"]


def test_models_are_made_copied_and_deleted(client: Tourist) -> None:
    made = {
        "from_": "smollm2",
        "system": "You are Mario.",
        "template": "{{ .System }}|{{ .Prompt }}",
        "license": ["MIT", "and more"],
        "parameters": {"temperature": 0.5, "stop": ["x", "y"]},
        "messages": [{"role": "user", "content": "hi"}],
    }
    assert client.call("create", model="mario", **made).status == "success"
    statuses = [piece.status for piece in client.pieces("create", model="luigi", from_="mario")]
    assert statuses[-2:] == ["writing manifest", "success"]
    assert client.call("copy", "luigi", "me/peach:v1").status == "success"
    shown = client.call("show", "me/peach:v1")
    assert shown.license == "MIT\nand more"
    assert 'stop                           "x"' in shown.parameters
    assert "SYSTEM" in shown.modelfile
    for name in ("mario", "luigi", "me/peach:v1"):
        assert client.call("delete", name).status == "success"
    with pytest.raises(ollama.ResponseError, match="model 'mario' not found") as error:
        client.call("delete", "mario")
    assert error.value.status_code == 404


def test_a_file_is_uploaded_and_becomes_a_model(
    client: Tourist, smollm2_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(make_model(10, seed=int(isinstance(client, Blocking))))
    digest = client.call("create_blob", path)
    assert client.call("create_blob", path) == digest
    files = {"tiny.gguf": digest}
    assert client.call("create", model="tiny", files=files).status == "success"
    assert client.call("show", "tiny").modelinfo["llama.context_length"] == 2048
    client.call("delete", "tiny")
    digest = client.call("create_blob", smollm2_path)
    client.call("create", model="uploaded", files={"model.gguf": digest}, template="{{ .Prompt }}")
    asked = {"model": "uploaded", "prompt": "One, two, three, four,", "options": GREEDY}
    assert client.call("generate", **asked).response.startswith(" five")
    client.call("delete", "uploaded")


def test_pull_reports_its_progress(client: Tourist) -> None:
    data = make_model(10, seed=2 + int(isinstance(client, Blocking)))
    with running_registry() as registry:
        registry.add("me/m/t", [("model", data), ("system", b"Be nice.")])
        name = f"{registry.host}/me/m:t"
        pieces = client.pieces("pull", name, insecure=True)
        statuses = [piece.status for piece in pieces]
        assert statuses[0] == "pulling manifest"
        assert statuses[-3:] == ["verifying sha256 digest", "writing manifest", "success"]
        assert any(p.completed == p.total == len(data) for p in pieces if p.digest)
        assert client.call("pull", name, insecure=True).status == "success"
        assert "Be nice." in client.call("show", name).modelfile
        client.call("delete", name)
        with pytest.raises(ollama.ResponseError, match="file does not exist"):
            client.pieces("pull", f"{registry.host}/me/other", insecure=True)
        with pytest.raises(ollama.ResponseError, match="file does not exist") as error:
            client.call("pull", f"{registry.host}/me/other", insecure=True)
        assert error.value.status_code == 500


def test_push_says_that_it_cannot(client: Tourist) -> None:
    with pytest.raises(ollama.ResponseError, match="push is not supported by this version"):
        client.call("push", "smollm2")
    with pytest.raises(ollama.ResponseError, match="push is not supported by this version"):
        client.pieces("push", "smollm2")


@pytest.mark.parametrize(
    ("method", "fields", "text"),
    [
        ("generate", {"model": "nope", "prompt": "x"}, "model 'nope' not found"),
        ("chat", {"model": "nope", "messages": HELLO}, "model 'nope' not found"),
        ("show", {"model": "nope"}, "model 'nope:latest' not found"),
        ("copy", {"source": "nope", "destination": "x"}, 'model "nope" not found'),
    ],
)
def test_what_is_not_there_is_a_404(
    client: Tourist, method: str, fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(ollama.ResponseError, match=text) as error:
        client.call(method, **fields)
    assert error.value.status_code == 404
