"""What Ollama's own integration tests ask of a server, as plain HTTP, on SmolLM2.

Each test says in its name which check of theirs it is. Checks that are shown elsewhere:
  scheduler-multimodel      tests/daemon/test_daemon.py, with runners that need no memory
  scheduler-max-queue       tests/server/test_lifecycle.py, likewise
  api-embed..., embed-...   test_embeddings.py, with vectors of a decoder
Those that this version cannot show, and why:
  create-safetensors, quantization      refused in one line (tests/cli/test_refusals.py)
  tools-routes through /v1              there is no such route yet; /api/chat is shown here
  embed.json, embedding-api's values    are vectors of encoder models, which are not supported
  embed-correlation, embed smoke        likewise: a decoder's vectors do not order words by meaning
  vision, audio, image generation       no such models; debug renders count images all the same
"""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest
from recipes import PUZZLE, QUESTION
from server_process import Server

pytestmark = pytest.mark.real

MODEL = "smollm2"
FIXED = {"temperature": 0, "seed": 123}
SKY = "why is the sky blue?"
SKY_WORDS = ("rayleigh", "scatter", "atmosphere", "sunlight", "nitrogen", "oxygen", "light")
FACTS = [
    ("What is 2+2?", "4"),
    ("Name a primary color.", "red"),
    ("What gas do plants breathe in?", "carbon dioxide"),
]
STATS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration", "eval_count")
AUSTRIA = (
    "Oh, don't speak to me of Austria. Perhaps I don't understand things, but Austria never has "
    "wished, and does not wish, for war. She is betraying us! "
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "its name"}},
            "required": ["city"],
        },
    },
}


def ask(server: Server, path: str = "generate", **body: Any) -> dict[str, Any]:
    """The whole answer in one object."""
    answer = server.post(
        f"/api/{path}", **{"model": MODEL, "options": FIXED, **body, "stream": False}
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def stream(server: Server, path: str = "generate", **body: Any) -> list[dict[str, Any]]:
    answer = server.post(f"/api/{path}", **{"model": MODEL, "options": FIXED, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def has_any(text: str, words: tuple[str, ...]) -> bool:
    return any(word in text.lower() for word in words)


def test_api_generate(server: Server) -> None:
    options = {**FIXED, "num_predict": 80}
    whole = ask(server, prompt=SKY, options=options)
    *pieces, last = stream(server, prompt=SKY, options=options)
    for piece in pieces:
        assert (piece["model"], piece["done"]) == (MODEL, False)
        assert piece["response"]
    assert "".join(piece["response"] for piece in pieces) == whole["response"]
    for end in (whole, last):
        assert end["model"] == MODEL
        assert end["done_reason"]
        assert all(end[name] > 0 for name in STATS)
        assert end["context"]
    assert has_any(whole["response"], SKY_WORDS)
    # Names of one file are one loaded model, which is shown as the one that loaded it.
    names = ("smollm2:latest", "caller:latest", "thinker:latest")
    (model,) = [m for m in server.http.get("/api/ps").json()["models"] if m["name"] in names]
    assert model["model"] == model["name"]
    assert model["size"] > 0
    assert len(model["digest"]) == 64
    assert model["details"]["family"] == "llama"
    assert datetime.fromisoformat(model["expires_at"]) > datetime.now().astimezone()


def test_api_chat(server: Server) -> None:
    options = {**FIXED, "num_predict": 80}
    whole = ask(server, "chat", messages=user(SKY), options=options)
    *pieces, last = stream(server, "chat", messages=user(SKY), options=options)
    assert {piece["message"]["role"] for piece in pieces} == {"assistant"}
    said = "".join(piece["message"]["content"] for piece in pieces)
    assert said == whole["message"]["content"]
    assert has_any(said, SKY_WORDS)
    assert last["prompt_eval_count"] == whole["prompt_eval_count"] > 0
    assert last["done_reason"] == whole["done_reason"]


def test_api_list_models(server: Server) -> None:
    models = {model["name"]: model for model in server.http.get("/api/tags").json()["models"]}
    model = models["smollm2:latest"]
    assert model["model"] == model["name"]
    assert (model["size"] > 0, len(model["digest"])) == (True, 64)
    assert datetime.fromisoformat(model["modified_at"]).tzinfo is not None
    for key in ("format", "family", "parameter_size", "quantization_level"):
        assert model["details"][key]


def test_api_show_model(server: Server) -> None:
    server.create("licensed", **{"from": "caller"}, license="MIT")
    shown = server.post("/api/show", name="licensed").json()
    for key in ("license", "modelfile", "parameters", "template", "details", "model_info"):
        assert shown[key]
    assert datetime.fromisoformat(shown["modified_at"])
    server.http.request("DELETE", "/api/delete", json={"model": "licensed"})


@pytest.mark.parametrize("path", ["generate", "chat"])
def test_logprobs(server: Server, path: str) -> None:
    asked = {"messages": user(SKY)} if path == "chat" else {"prompt": SKY}
    asked["options"] = {**FIXED, "num_predict": 10}
    assert "logprobs" not in ask(server, path, **asked)
    entries = ask(server, path, **asked, logprobs=True)["logprobs"]
    assert len(entries) == 10
    for entry in entries:
        assert entry["token"]
        assert entry["logprob"] <= 0
        assert bytes(entry["bytes"]) == entry["token"].encode()
        assert "top_logprobs" not in entry
    pieces = stream(server, path, **asked, logprobs=True, top_logprobs=5)
    for entry in (entry for piece in pieces for entry in piece.get("logprobs", ())):
        likely = [other["logprob"] for other in entry["top_logprobs"]]
        assert 0 < len(likely) <= 5
        assert likely == sorted(likely, reverse=True)


@pytest.mark.parametrize(("question", "answer"), FACTS)
def test_chat_per_model(server: Server, question: str, answer: str) -> None:
    options = {**FIXED, "num_predict": 30}
    said = ask(server, "chat", messages=user(question), options=options)["message"]["content"]
    assert answer in said.lower()


def test_unicode_input(server: Server) -> None:
    options = {**FIXED, "num_predict": 60}
    answer = ask(
        server, "chat", messages=user("天空为什么是蓝色的? Why is it blue?"), options=options
    )
    assert has_any(answer["message"]["content"], ("sky", "blue", "color", "light"))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 40])
def test_unicode_output(server: Server, length: int) -> None:
    """Characters of several tokens come whole or not at all, also where the length cuts one."""
    asked = {"prompt": "Write ten emoji: 😀😎🎉", "options": {**FIXED, "num_predict": length}}
    whole = ask(server, **asked, logprobs=True)
    pieces = stream(server, **asked)
    assert "".join(piece["response"] for piece in pieces) == whole["response"]
    assert "\ufffd" not in whole["response"]
    data = b"".join(bytes(entry["bytes"]) for entry in whole["logprobs"])
    assert data.startswith(whole["response"].encode())
    assert length < 40 or max(map(ord, whole["response"])) > 0xFFFF


def test_num_predict(server: Server) -> None:
    pieces = stream(server, prompt=SKY, options={**FIXED, "num_predict": 10}, logprobs=True)
    assert sum(len(piece.get("logprobs", ())) for piece in pieces) == 10
    assert pieces[-1]["done_reason"] == "length"


def test_context_long_input(server: Server) -> None:
    """One message that is too long is refused, and the text says what is too long and why."""
    body = {"model": MODEL, "prompt": 9 * AUSTRIA + SKY, "options": {**FIXED, "num_ctx": 128}}
    for more in ({}, {"truncate": False}, {"shift": False}):
        answer = server.post("/api/generate", **body, **more)
        assert answer.status_code == 400
        assert "context" in answer.json()["error"]
        assert "longer" in answer.json()["error"]


def test_context_exhaustion(server: Server) -> None:
    options = {**FIXED, "num_ctx": 128, "num_predict": 200}
    story = "Write me a long story about a dog, with many details."
    answer = ask(server, prompt=story, think=False, options={**options, "ignore_eog": True})
    assert answer["eval_count"] == 200
    assert answer["prompt_eval_count"] + 200 > 128
    options["num_predict"] = -1
    answer = ask(server, prompt=story, shift=False, options={**options, "ignore_eog": True})
    assert answer["done_reason"] == "length"
    assert answer["prompt_eval_count"] + answer["eval_count"] <= 129


def generate_history(server: Server) -> str:
    options = {**FIXED, "num_predict": 40}
    first = ask(server, prompt="Remember this: the capital of France is Paris.", options=options)
    asked = {"prompt": "What is the capital of France?", "context": first["context"]}
    return str(ask(server, **asked, options=options)["response"])


def chat_history(server: Server) -> str:
    messages = [
        *user("Hello, my name is Bob."),
        {"role": "assistant", "content": "Hello Bob!"},
        *user("What is my name?"),
    ]
    options = {**FIXED, "num_predict": 40}
    return str(ask(server, "chat", messages=messages, options=options)["message"]["content"])


def test_generate_and_chat_history_alone_and_in_parallel(server: Server) -> None:
    alone = (generate_history(server), chat_history(server))
    assert "Paris" in alone[0]
    assert "Bob" in alone[1]
    with ThreadPoolExecutor(8) as pool:
        generated = [pool.submit(generate_history, server) for _ in range(4)]
        talked = [pool.submit(chat_history, server) for _ in range(4)]
        assert {future.result() for future in generated} == {alone[0]}
        assert {future.result() for future in talked} == {alone[1]}


def test_concurrent_chat(server: Server) -> None:
    """More at once than run at once, and they begin at one moment."""
    number = 17
    begin = threading.Barrier(number)

    def talk(index: int) -> str:
        question, _ = FACTS[index % len(FACTS)]
        begin.wait()
        options = {**FIXED, "num_predict": 30}
        answer = ask(server, "chat", messages=user(question), options=options)
        return str(answer["message"]["content"])

    with ThreadPoolExecutor(number) as pool:
        for index, said in enumerate(pool.map(talk, range(number))):
            assert FACTS[index % len(FACTS)][1] in said.lower()


def test_create_gguf(server: Server) -> None:
    import hashlib

    data = server.model_file.read_bytes()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert server.http.post(f"/api/blobs/{digest}", content=data).status_code in (200, 201)
    body = {"model": "made", "files": {"m.gguf": digest}}
    statuses = [
        json.loads(line)["status"] for line in server.post("/api/create", **body).text.splitlines()
    ]
    assert statuses[-1] == "success"
    assert server.post("/api/show", model="made").json()["details"]["family"] == "llama"
    answer = ask(server, model="made", prompt="What is 2+2?", options={**FIXED, "num_predict": 20})
    assert "4" in answer["response"]
    assert server.http.request("DELETE", "/api/delete", json={"name": "made"}).status_code == 200
    assert server.post("/api/show", model="made").status_code == 404


def rendered(server: Server, path: str = "generate", **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = ask(server, path, **body, _debug_render_only=True)["_debug_info"]
    return found


def test_jinja_debug_render(server: Server) -> None:
    text = "compare [img] and [img]"
    plain = rendered(server, prompt="hi")["rendered_template"]
    assert rendered(server, "chat", messages=user("hi"))["rendered_template"] == plain
    assert "<|im_start|>user\nhi<|im_end|>" in plain
    context = ask(server, prompt="Remember Paris.", options={**FIXED, "num_predict": 3})["context"]
    with_context = rendered(server, prompt="hi", context=context)["rendered_template"]
    assert with_context.endswith(plain)
    assert "Remember Paris." in with_context
    images = ["aGVsbG8=", "d29ybGQ="]
    for found in (
        rendered(server, prompt=text, images=images),
        rendered(server, "chat", messages=[{"role": "user", "content": text, "images": images}]),
    ):
        assert "compare [img-0] and [img-1]" in found["rendered_template"]
        assert found["image_count"] == 2
    found = rendered(server, prompt="hi", images=images)
    assert "[img-0][img-1]hi" in found["rendered_template"]


def test_thinking_enabled_and_suppressed(server: Server) -> None:
    for path, asked in (("chat", {"messages": PUZZLE}), ("generate", {"prompt": "What is 4 + 4?"})):
        answer = ask(server, path, model="thinker", **asked, think=True, options={})
        said = answer.get("message", answer)
        assert said["thinking"]
        text = said["content"] if path == "chat" else said["response"]
        assert "think>" not in said["thinking"] + text
        answer = ask(server, path, model="thinker", **asked, think=False, options={})
        said = answer.get("message", answer)
        assert "thinking" not in said
        assert "think>" not in (said["content"] if path == "chat" else said["response"])


def test_tools(server: Server) -> None:
    asked = {"model": "caller", "messages": QUESTION, "tools": [TOOL]}
    answer = ask(server, "chat", **asked)
    pieces = stream(server, "chat", **asked)
    streamed = [call for piece in pieces for call in piece["message"].get("tool_calls", ())]
    for calls in (answer["message"]["tool_calls"], streamed):
        (call,) = calls
        assert call["function"] == {
            "index": 0,
            "name": "get_weather",
            "arguments": {"city": "Paris"},
        }
    assert answer["done_reason"] == "stop"


def test_tools_routes_of_the_native_api(server: Server) -> None:
    """Null content beside calls, foreign roles, system messages in between, results by id."""
    call = {"id": "call_1", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    messages = [
        {"role": "developer", "content": "Call tools."},
        *QUESTION,
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
    ]
    asked = {"model": "caller", "messages": messages, "tools": [TOOL]}
    assert "21 degrees" in ask(server, "chat", **asked)["message"]["content"]
    text = rendered(server, "chat", **asked)["rendered_template"]
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Paris"}}' in text
    assert "\nCall tools.<|im_end|>" in text


def test_tools_stress(server: Server) -> None:
    """Many tools and a long system prompt, turn after turn: calls are whole and of known tools."""
    tools = [TOOL]
    for number in range(20):
        function = {**TOOL["function"], "name": f"tool_{number}"}  # type: ignore[dict-item]
        tools.append({"type": "function", "function": function})
    messages = [{"role": "system", "content": "You are an agent. " + "Use tools wisely. " * 40}]
    for city in ("London", "Rome", "Tokyo", "Paris"):
        messages += user(f"How is the weather in {city}?")
        message = ask(server, "chat", model="caller", messages=messages, tools=tools)["message"]
        assert "<tool_call>" not in message["content"]
        for call in message["tool_calls"]:
            assert call["function"]["name"] in {tool["function"]["name"] for tool in tools}  # type: ignore[index]
            assert isinstance(call["function"]["arguments"], dict)
        result = {"role": "tool", "tool_name": "get_weather", "content": "21 degrees"}
        messages += [message, result, {"role": "assistant", "content": "It has 21 degrees."}]
