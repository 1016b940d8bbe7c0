"""`/api/generate` and `/api/chat` over a real connection."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server_process import Server

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?Z")


def lines_of(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    with server.http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.iter_lines()]


def test_generate_streams_by_default_and_ends_with_statistics(server: Server) -> None:
    *deltas, last = lines_of(server, "/api/generate", model="tiny", prompt="hi")
    assert "".join(delta["response"] for delta in deltas) == "0 1 2 "
    for delta in deltas:
        assert set(delta) == {"model", "created_at", "response", "done"}
        assert delta["done"] is False
        assert TIME.fullmatch(delta["created_at"])
    assert last["model"] == "tiny"
    assert last["response"] == ""
    assert last["done"] is True
    assert last["done_reason"] == "stop"
    assert last["context"] == [1, 2, 3]
    assert (last["prompt_eval_count"], last["eval_count"]) == (5, 3)
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (2_000_000, 3_000_000)
    assert last["total_duration"] >= last["load_duration"] > 0


def test_chat_streams_by_default_and_ends_with_statistics(server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}]
    *deltas, last = lines_of(server, "/api/chat", model="tiny", messages=messages)
    assert "".join(delta["message"]["content"] for delta in deltas) == "0 1 2 "
    assert {delta["message"]["role"] for delta in deltas} == {"assistant"}
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", 3)
    assert "context" not in last


def test_unstreamed_answers_are_one_object(server: Server) -> None:
    answer = server.post("/api/generate", model="tiny", prompt="hi", stream=False)
    assert answer.headers["content-type"] == "application/json; charset=utf-8"
    assert answer.json()["response"] == "0 1 2 "
    assert answer.json()["context"] == [1, 2, 3]
    messages = [{"role": "user", "content": "hi"}]
    answer = server.post("/api/chat", model="tiny", messages=messages, stream=False)
    assert answer.json()["message"] == {"role": "assistant", "content": "0 1 2 "}
    assert answer.json()["done"] is True


def test_generate_renders_system_and_prompt_and_raw_does_not(server: Server) -> None:
    ask = {"model": "tiny", "prompt": "echo", "stream": False}
    answer = server.post("/api/generate", **ask, system="Be brief.")
    assert answer.json()["response"] == repr(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "echo"}]
    )
    answer = server.post("/api/generate", **ask, raw=True)
    assert answer.json()["response"] == repr("echo")
    assert "context" not in answer.json()


def test_recipe_of_a_model_comes_before_the_request(server: Server) -> None:
    example = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    server.create(
        "made",
        system="Be brief.",
        messages=example,
        parameters={"temperature": 0.5, "stop": ["x"], "seed": 1},
    )
    user = {"role": "user", "content": "echo"}
    system = {"role": "system", "content": "Be brief."}
    answer = server.post("/api/chat", model="made", messages=[user], stream=False)
    assert answer.json()["message"]["content"] == repr([system, *example, user])
    other = {"role": "system", "content": "Shout."}
    answer = server.post("/api/chat", model="made", messages=[other, user], stream=False)
    assert answer.json()["message"]["content"] == repr([*example, other, user])
    options = {"temperature": 0, "top_k": 3.0, "num_ctx": 1, "num_gpu": 3, "typo": 1, "seed": None}
    answer = server.post(
        "/api/generate", model="made", prompt="options", stream=False, options=options
    )
    merged = {"temperature": 0.0, "seed": 1, "top_k": 3, "num_ctx": 4}
    assert answer.json()["response"] == repr((merged, ["x"]))


def test_num_predict_ends_with_length_and_logprobs_are_one_a_token(server: Server) -> None:
    *deltas, last = lines_of(
        server,
        "/api/generate",
        model="tiny",
        prompt="hi",
        options={"num_predict": 10},
        logprobs=True,
    )
    entries = [entry for delta in deltas for entry in delta["logprobs"]]
    assert len(entries) == 10
    assert entries[0] == {"token": "0 ", "logprob": -0.5, "bytes": [48, 32]}
    assert last["done_reason"] == "length"
    unlimited = {"model": "tiny", "prompt": "hi", "options": {"num_predict": 0}, "stream": False}
    assert server.post("/api/generate", **unlimited).json()["done_reason"] == "stop"
    answer = server.post(
        "/api/generate", model="tiny", prompt="hi", stream=False, logprobs=True
    ).json()
    assert [entry["token"] for entry in answer["logprobs"]] == ["0 ", "1 ", "2 "]


@pytest.mark.parametrize("stream", [True, False])
def test_load_and_unload_are_one_plain_object(server: Server, stream: bool) -> None:
    answer = server.post("/api/generate", model="tiny", stream=stream)
    assert answer.headers["content-type"] == "application/json; charset=utf-8"
    body = answer.json()
    assert TIME.fullmatch(body.pop("created_at"))
    assert body == {"model": "tiny", "response": "", "done": True, "done_reason": "load"}
    answer = server.post("/api/chat", model="tiny", stream=stream, keep_alive="0s")
    body = answer.json()
    del body["created_at"]
    assert body == {
        "model": "tiny",
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": "unload",
    }


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("generate", {"model": "/etc/passwd", "prompt": "x"}, 400, "invalid model name"),
        ("generate", {"model": "tiny", "prompt": "refuse"}, 400, "the fake model refuses this"),
        ("generate", {"model": "tiny", "prompt": "bug"}, 500, "ZeroDivisionError: a bug"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_errors_before_the_first_chunk_have_a_status(
    server: Server, path: str, body: dict[str, Any], status: int, error: str, stream: bool
) -> None:
    answer = server.post(f"/api/{path}", **{**body, "stream": stream})
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert error in answer.json()["error"]


def test_think_false_is_accepted_by_every_model(server: Server) -> None:
    assert server.post("/api/generate", model="tiny", prompt="x", think=False).status_code == 200


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "missing request body"),
        (b"  \n", "missing request body"),
        (b"hello", "invalid character 'h' looking for beginning of value"),
        (b'{"model": "ti', "unexpected EOF"),
        (b'{"model": "tiny"', "unexpected EOF"),
        (b"{model: 1}", "invalid character 'm' looking for beginning of object key string"),
        (b"[1]", "json: cannot unmarshal array into Go value of type api.ChatRequest"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"format": NaN}', "invalid character 'N' looking for beginning of value"),
        (b'{"format": -Infinity}', "invalid character 'I' looking for beginning of value"),
        (b'{"format": 1e999}', "cannot unmarshal number 1e999 into"),
        (b'{"keep_alive": ' + b"9" * 400 + b"}", "cannot unmarshal number 9999"),
        (b'{"unknown": -' + b"9" * 5000 + b"}", "cannot unmarshal number -9999"),
    ],
)
def test_malformed_bodies_are_refused_in_go_words(server: Server, data: bytes, error: str) -> None:
    answer = server.http.post("/api/chat", content=data)
    assert answer.status_code == 400
    assert error in answer.json()["error"]


def test_a_body_without_end_is_refused(server: Server) -> None:
    """And not kept: the daemon would run out of memory."""
    piece = b" " * (1 << 20)
    answer = server.http.post("/api/chat", content=(piece for _ in range(130)))
    assert answer.status_code == 400
    assert answer.json()["error"] == "the request is longer than 128 MiB"


def test_bodies_are_read_as_go_reads_them(server: Server) -> None:
    data = b'{"MODEL": "tiny", "Prompt": "echo \\ud83d", "raw": true, "x": 1, "stream": false,'
    data += b'"system": null} trailing'
    answer = server.http.post("/api/generate", content=data, headers={"content-type": "text/plain"})
    assert answer.status_code == 200
    answer = server.post("/api/generate", model="tiny", prompt="\N{GRINNING FACE} smile")
    text = "".join(json.loads(line)["response"] for line in answer.text.splitlines())
    assert text == 3 * "\N{SLIGHTLY SMILING FACE}"


def test_debug_render_returns_the_prompt_alone(server: Server) -> None:
    answer = server.post(
        "/api/generate", model="tiny", prompt="hi", stream=False, _debug_render_only=True
    )
    assert answer.json()["_debug_info"] == {"rendered_template": "<hi>"}


def test_killed_runner_ends_the_stream_with_an_error_and_the_next_request_works(
    server: Server,
) -> None:
    *deltas, last = lines_of(server, "/api/generate", model="tiny", prompt="die")
    assert deltas[0]["response"].startswith("0 ")
    assert set(last) == {"error"}
    assert "the model runner has unexpectedly stopped (signal SIGKILL" in last["error"]
    answer = server.post("/api/generate", model="tiny", prompt="die", stream=False)
    assert answer.status_code == 500
    answer = server.post("/api/generate", model="tiny", prompt="hi", stream=False)
    assert answer.json()["response"] == "0 1 2 "


def test_client_that_leaves_ends_its_request(server: Server) -> None:
    with server.http.stream(
        "POST", "/api/generate", json={"model": "tiny", "prompt": "forever"}
    ) as answer:
        next(answer.iter_lines())
    while "499 |" not in (server.folder / "log").read_text():
        server.http.get("/health")
    assert server.post("/api/generate", model="tiny", prompt="hi").status_code == 200


def test_many_streams_at_once_each_get_their_own_answer(server: Server) -> None:
    def ask(number: int) -> str:
        options = {"num_predict": number}
        lines = lines_of(server, "/api/generate", model="tiny", prompt="hi", options=options)
        return "".join(line["response"] for line in lines)

    with ThreadPoolExecutor(16) as pool:
        for number, text in enumerate(pool.map(ask, range(1, 33)), 1):
            assert text == "".join(f"{n} " for n in range(number))


def test_progress_is_sent_to_clients_that_ask_for_it(server: Server) -> None:
    server.post("/api/generate", model="tiny", keep_alive=0)
    body = {"model": "tiny", "prompt": "hi", "stream": True}
    headers = {"x-localllm-progress": "1"}
    lines: list[dict[str, Any]] = []
    for _ in range(2):
        answer = server.http.post("/api/generate", json=body, headers=headers)
        lines += [json.loads(line) for line in answer.text.splitlines()]
    assert {"progress": {"stage": "copying weights", "done": 1, "total": 2}} in lines
    answer = server.http.post("/api/generate", json={**body, "prompt": "refuse"}, headers=headers)
    assert answer.status_code == 200
    assert json.loads(answer.text) == {"error": "the fake model refuses this"}
