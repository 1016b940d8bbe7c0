"""What happens to one model, or to one client, costs nobody else anything.

Defends: every request ends; with an answer or with an error in its protocol's shape; no process,
load or place in a queue is left behind.
"""

import hashlib
import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest
from server_process import Server, start_server, write_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    for server in start_server(
        tmp_path_factory.mktemp("data"),
        LOCALLLM_MAX_LOADED_MODELS="1",
        LOCALLLM_NUM_PARALLEL="2",
        LOCALLLM_MAX_QUEUE="3",
    ):
        add_model(server, "other")
        yield server


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    for server in start_server(tmp_path_factory.mktemp("roomy")):
        add_model(server, "other")
        yield server


def add_model(server: Server, name: str) -> Path:
    """A model with a file of its own."""
    path = write_model(server.folder / f"{name}.gguf", context_length=1000 + len(name))
    server.create(name, **{"from": str(path)})
    return path


class Stream:
    """A streamed answer that was begun."""

    def __init__(self, server: Server, model: str = "tiny", **options: int) -> None:
        body = {"model": model, "prompt": "forever", "options": options}
        request = server.http.build_request("POST", "/api/generate", json=body)
        self.response = server.http.send(request, stream=True)
        self.lines = self.response.iter_lines()
        if self.response.status_code == 200:
            next(self.lines)

    def rest(self) -> list[dict[str, object]]:
        with closing(self.response):
            return [json.loads(line) for line in self.lines]

    def close(self) -> None:
        self.response.close()


def running(server: Server, model: str) -> dict[str, object] | None:
    models = server.http.get("/api/ps").json()["models"]
    return next((m for m in models if m["name"] == f"{model}:latest"), None)


def runner_of(server: Server, model: str) -> int:
    """Process id of a model's runner, the newest."""
    pid = psutil.Process(server.process.pid).children()[-1].pid
    assert running(server, model)
    return pid


def until(condition) -> None:
    while not condition():
        pass


def test_killed_runner_costs_its_own_requests_alone(roomy: Server) -> None:
    other = Stream(roomy, "other", num_predict=400)
    streams = [Stream(roomy) for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        body = {"model": "tiny", "prompt": "forever", "stream": False}
        whole = pool.submit(roomy.http.post, "/api/generate", json=body)
        until(lambda: (running(roomy, "tiny") or {}).get("num_running") == 4)
        os.kill(runner_of(roomy, "tiny"), signal.SIGKILL)
        for stream in streams:
            assert "unexpectedly stopped (signal SIGKILL" in str(stream.rest()[-1]["error"])
        assert whole.result().status_code == 500
        assert "unexpectedly stopped (signal SIGKILL" in whole.result().json()["error"]
    assert other.rest()[-1]["done_reason"] == "length"
    assert roomy.post("/api/generate", model="tiny", prompt="hi", stream=False).status_code == 200


def test_runner_that_dies_while_it_loads_is_one_error(roomy: Server) -> None:
    path = write_model(roomy.folder / "dies.gguf")
    answer = roomy.http.post(
        "/api/generate", json={"model": str(path), "prompt": "hi"}, headers=roomy.trusted
    )
    assert answer.status_code == 500
    assert "unexpectedly stopped" in answer.json()["error"]
    assert roomy.post("/api/generate", model="other", prompt="hi", stream=False).status_code == 200


def test_full_queue_leaves_the_daemon_answering_and_places_come_free(server: Server) -> None:
    """Two run and three wait; the others are refused at once."""
    server.post("/api/generate", model="tiny")
    with ThreadPoolExecutor(12) as pool:
        streams = list(pool.map(lambda _: Stream(server), range(8)))
        accepted = [s for s in streams if s.response.status_code == 200]
        refused = [s for s in streams if s.response.status_code == 503]
        assert (len(accepted), len(refused)) == (5, 3)
        for stream in refused:
            assert int(stream.response.headers["retry-after"]) >= 1
            assert "server busy" in str(stream.rest()[-1]["error"])
        for path in ("/health", "/api/version", "/api/tags", "/metrics"):
            assert server.http.get(path).status_code == 200
        assert (running(server, "tiny") or {})["queue_length"] == 3
        for stream in accepted[:2]:
            stream.close()
        until(lambda: (running(server, "tiny") or {})["queue_length"] == 1)
        again = list(pool.map(lambda _: Stream(server), range(3)))
        assert sorted(s.response.status_code for s in again) == [200, 200, 503]
        for stream in (*accepted, *again):
            stream.close()
    until(lambda: (running(server, "tiny") or {})["num_running"] == 0)


def test_models_take_turns_under_load_and_cancellations(server: Server) -> None:
    """One model at a time: streams end before theirs goes, whoever leaves while waiting."""
    rng = random.Random(3)

    def ask(number: int) -> int:
        model = ("tiny", "other")[number % 2]
        body = {"model": model, "prompt": "forever", "options": {"num_predict": 20}}
        timeout = rng.choice((0.05, 30, 30))
        try:
            answer = httpx.post(f"{server.url}/api/generate", json=body, timeout=timeout)
        except httpx.TimeoutException:
            return 0
        if answer.status_code == 200:
            assert json.loads(answer.text.splitlines()[-1])["done_reason"] == "length"
        return answer.status_code

    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(ask, range(20)))
    assert set(codes) <= {0, 200}
    assert 200 in codes
    for model in ("tiny", "other"):
        answer = server.post("/api/generate", model=model, prompt="hi", stream=False)
        assert answer.status_code == 200
    assert len(server.http.get("/api/ps").json()["models"]) == 1
    until(lambda: len(psutil.Process(server.process.pid).children()) == 1)


def test_stopped_deleted_and_replaced_models_finish_their_streams(server: Server) -> None:
    path = add_model(server, "fleeting")
    stream = Stream(server, "fleeting", num_predict=200)
    assert server.post("/api/generate", model="fleeting", keep_alive=0).status_code == 200
    assert server.http.request("DELETE", "/api/delete", json={"model": "fleeting"}).is_success
    write_model(path, context_length=1500)
    server.create("fleeting", **{"from": str(path)})
    assert stream.rest()[-1]["done_reason"] == "length"
    until(lambda: running(server, "fleeting") is None)
    stream = Stream(server, "fleeting", num_predict=5)
    assert stream.rest()[-1]["done_reason"] == "length"


def test_waiting_client_hears_its_place_in_the_queue(server: Server) -> None:
    server.post("/api/generate", model="tiny")
    streams = [Stream(server) for _ in range(3)]
    body = {"model": "tiny", "prompt": "forever"}
    headers = {"x-localllm-progress": "1"}
    with server.http.stream("POST", "/api/generate", json=body, headers=headers) as answer:
        first = json.loads(next(answer.iter_lines()))
    assert first["progress"]["queue_position"] == 2
    assert first["progress"]["stage"] == "waiting, number 2 in the queue"
    for stream in streams:
        stream.close()


def test_client_that_leaves_while_a_model_loads_stops_the_load(server: Server) -> None:
    add_model(server, "slow")
    body = {"model": "slow", "prompt": "hi"}
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{server.url}/api/generate", json=body, timeout=0.02)
    until(lambda: running(server, "slow") is None)
    assert server.post("/api/generate", model="slow", prompt="hi", stream=False).is_success


def test_deleted_model_gives_its_memory_back_once_its_stream_has_ended(server: Server) -> None:
    data = write_model(server.folder / "up.gguf", context_length=88).read_bytes()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    server.http.post(f"/api/blobs/{digest}", content=data)
    server.post("/api/create", model="up", files={"up.gguf": digest}, stream=False)
    stream = Stream(server, "up", num_predict=200)
    assert server.http.request("DELETE", "/api/delete", json={"model": "up"}).is_success
    assert running(server, "up")
    assert stream.rest()[-1]["done_reason"] == "length"
    until(lambda: running(server, "up") is None)
