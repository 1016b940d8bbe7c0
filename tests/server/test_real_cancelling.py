"""Clients that leave, and times that are over, with a real model behind two places."""

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import running

from localllm.config import load_settings

pytestmark = pytest.mark.real
MODEL = "smollm2:135m"
ENDLESS = {"ignore_eog": True, "num_predict": -1, "temperature": 0}
LONG = "Once upon a time there was a river. " * 200


class Server:
    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def start(self, prompt: str, **fields: Any) -> socket.socket:
        """A request whose answer nobody reads yet."""
        body = {"model": MODEL, "prompt": prompt, "raw": True, "options": ENDLESS, **fields}
        data = json.dumps(body).encode()
        url = self.http.base_url
        connection = socket.create_connection((url.host, url.port))
        head = f"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
        return connection

    def ask(self, prompt: str, **fields: Any) -> httpx.Response:
        options = {"num_predict": 4, "temperature": 0, **fields.pop("options", {})}
        body = {"model": MODEL, "prompt": prompt, "raw": True, "stream": False}
        return self.http.post("/api/generate", json={**body, "options": options, **fields})

    def state(self) -> dict[str, Any]:
        (model,) = self.http.get("/api/ps").json()["models"]
        return dict(model)

    def wait(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        while not condition(self.state()):
            pass


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("data")
    settings = {"LOCALLLM_NUM_PARALLEL": "2", "LOCALLLM_CACHE": str(load_settings().cache_dir)}
    script = Path(__file__).with_name("real_daemon.py")
    with (
        running(script, folder, **settings) as (url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        secret = {"x-localllm-secret": (folder / "secret").read_text().strip()}
        body = {"model": MODEL, "from": str(smollm2_path), "stream": False}
        assert http.post("/api/create", json=body, headers=secret).status_code == 200
        server = Server(http)
        assert server.ask("Hello").status_code == 200
        yield server


def is_idle(state: dict[str, Any]) -> bool:
    return (state["num_running"], state["queue_length"], state["kv_usage"]) == (0, 0, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_whoever_leaves_leaves_nothing_behind(server: Server, stream: bool) -> None:
    """Defends: a client that goes ends its request while it waits, is read, or is answered."""
    decoding = server.start("Count: 1 2 3", stream=stream)
    if stream:
        assert b"200 OK" in decoding.recv(100)
    prompting = [server.start(f"{n}. {LONG}", stream=stream) for n in range(4)]
    server.wait(lambda state: bool(state["queue_length"] >= 2))
    for connection in (*reversed(prompting), decoding):
        connection.close()
        server.state()
    server.wait(is_idle)
    answer = server.ask("Hello").json()
    assert answer["eval_count"] == 4


def test_a_time_that_is_over_ends_a_request_in_the_queue_and_while_it_is_answered(
    server: Server,
) -> None:
    ahead = [server.start(f"Count: {n}", stream=False) for n in range(2)]
    server.wait(lambda state: bool(state["num_running"] == 2))
    late = server.ask("Hello", timeout=0.2)
    assert late.status_code == 504
    assert late.json() == {"error": "the request timed out in the queue"}
    for connection in ahead:
        connection.close()
    late = server.ask("Hello", timeout=0.5, options=ENDLESS)
    assert late.status_code == 504
    assert late.json()["error"].startswith("the request timed out after ")
    assert late.json()["error"].endswith(" new tokens")
    server.wait(is_idle)


def test_a_better_priority_does_not_wait_for_endless_answers(server: Server) -> None:
    ahead = [server.start(f"Count: {n}", stream=False, priority=5) for n in range(2)]
    server.wait(lambda state: bool(state["num_running"] == 2))
    assert server.ask("Hello").json()["eval_count"] == 4
    for connection in ahead:
        connection.close()
    server.wait(is_idle)


def test_the_second_request_with_a_prefix_reads_only_its_own_part(server: Server) -> None:
    first, second = (server.ask(f"{LONG}{end}", cost_report=True).json() for end in ("A", "B"))
    assert first["cost"]["prefix_miss"].startswith(("first", "differs"))
    assert second["prompt_eval_count"] == first["prompt_eval_count"]
    assert second["prompt_cached_count"] >= second["prompt_eval_count"] - 2
    other = server.ask(f"{LONG}A", cache_salt="other", cost_report=True).json()
    assert other["cost"]["prefix_miss"] == "first request with this salt"
    assert "prompt_cached_count" not in other
    assert other["response"] == first["response"]
