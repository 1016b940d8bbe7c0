"""What an operator sees: metrics, request ids, cost reports, the queue in ps."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import Server, start_server, write_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from start_server(tmp_path_factory.mktemp("data"), LOCALLLM_DEBUG="1")


def scrape(server: Server) -> dict[str, float]:
    """All samples, by name and labels as they are written."""
    answer = server.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}"] = sample.value
    return samples


def test_metrics_count_what_requests_cost(server: Server) -> None:
    for name in ("one", "two"):
        server.create(name)
    server.post("/api/generate", model="one", prompt="hi", stream=False)
    before = scrape(server)
    server.post("/api/generate", model="one", prompt="hi", stream=False)
    server.post("/api/chat", model="one", messages=[{"role": "user", "content": "hi"}])
    server.post("/api/generate", model="one", prompt="refuse", stream=False)
    after = scrape(server)

    def more(name: str, labels: str = "") -> float:
        key = f"localllm_{name}{{{labels}model_name=one:latest}}"
        return after[key] - before.get(key, 0)

    assert more("generation_tokens_total") == 6
    assert more("prompt_tokens_total") == more("prefix_cache_queries_total") == 10
    assert more("prefix_cache_hits_total") == 4
    assert more("request_success_total", "finished_reason=stop,") == 2
    assert more("request_success_total", "finished_reason=error,") == 1
    for name, count in (
        ("time_to_first_token_seconds", 2),
        ("inter_token_latency_seconds", 4),
        ("request_queue_time_seconds", 2),
        ("request_prefill_time_seconds", 2),
        ("request_decode_time_seconds", 2),
        ("e2e_request_latency_seconds", 2),
        ("model_load_seconds", 0),
    ):
        assert more(f"{name}_count") == count, name
        assert more(f"{name}_bucket", "le=+Inf,") == count, name
    assert more("request_decode_time_seconds_sum") == pytest.approx(0.006)
    assert after["localllm_model_load_seconds_count{model_name=one:latest}"] == 1
    assert after["localllm_models_loaded{}"] == 1
    assert after["localllm_model_resident_bytes{model_name=one:latest}"] > 1e6
    assert after["localllm_num_requests_running{model_name=one:latest}"] == 0
    assert after["process_resident_memory_bytes{}"] > 1e6


def test_running_and_aborted_requests_are_seen(server: Server) -> None:
    # A file of its own: a loaded model goes by the name that it was first asked for.
    path = write_model(server.folder / "own.gguf", context_length=1024)
    server.create("own", **{"from": str(path)})
    body = {"model": "own", "prompt": "forever"}
    with server.http.stream("POST", "/api/generate", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert scrape(server)["localllm_num_requests_running{model_name=own:latest}"] == 1
        (running,) = (m for m in server.http.get("/api/ps").json()["models"] if m["num_running"])
        assert (running["name"], running["queue_length"]) == ("own:latest", 0)
        assert running["is_loading"] is False
        assert 0 <= running["kv_usage"] <= 1
    key = "localllm_request_success_total{finished_reason=abort,model_name=own:latest}"
    while scrape(server).get(key, 0) < 1:
        pass


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("req-1", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("", False),
        ("two words", False),
        ("-x", False),
        ("caf\xe9", False),
    ],
)
def test_request_id_is_honoured_if_it_can_be_logged(
    server: Server, given: str, is_kept: bool
) -> None:
    headers = {b"x-request-id": given.encode("latin-1")}
    for path, status in (("/api/version", 200), ("/nowhere", 404)):
        answer = server.http.get(path, headers=headers)
        assert answer.status_code == status
        found = answer.headers["x-request-id"]
        assert (found == given) is is_kept
        assert re.fullmatch("[0-9a-f]{16}", found) or is_kept


def test_every_answer_and_log_line_of_a_request_has_its_id(server: Server) -> None:
    log = server.folder / "log"

    def ask(number: int, path: str, **body: object) -> None:
        headers = {"x-request-id": f"trace-{number}"}
        answer = server.http.post(path, json=body, headers=headers)
        assert answer.headers["x-request-id"] == f"trace-{number}"

    ask(1, "/api/generate", model="tiny", prompt="hi")
    ask(2, "/api/generate", model="nowhere")
    ask(3, "/api/generate", model="tiny", prompt="bug", stream=False)
    foreign = {"host": "evil.example", "x-request-id": "trace-4"}
    answer = server.http.get("/api/tags", headers=foreign)
    assert (answer.status_code, answer.headers["x-request-id"]) == (403, "trace-4")
    wanted = [
        "localllm.access [trace-1]: 200",
        "localllm.cost [trace-1]: model=tiny:latest end=stop",
        "localllm.access [trace-2]: 404",
        "localllm.access [trace-4]: 403",
        # A line that the runner wrote, about its own thread's work.
        "ERROR localllm.runner [trace-3]: a request failed",
    ]
    # The line about a request is written when its answer has gone.
    while not all(text in log.read_text() for text in wanted):
        pass


def test_no_path_writes_a_log_line_of_its_own(server: Server) -> None:
    log = server.folder / "log"
    server.http.get("/x%0aERROR%20forged%1b%5b31m%e2%80%a8", headers={"x-request-id": "trace-5"})
    while "localllm.access [trace-5]" not in (text := log.read_text()):
        pass
    assert r"GET /x\nERROR forged\x1b[31m\u2028" in text


def test_cost_report_comes_when_it_is_asked_for(server: Server) -> None:
    body = {"model": "tiny", "prompt": "hi"}
    assert "cost" not in server.post("/api/generate", **body, stream=False).json()
    whole = server.post("/api/generate", **body, stream=False, cost_report=True).json()
    lines = server.post("/api/generate", **body, cost_report=True).text.splitlines()
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": False}
    for answer in (
        whole,
        json.loads(lines[-1]),
        server.post("/api/chat", **chat, cost_report=True).json(),
    ):
        cost = answer["cost"]
        assert cost["prompt_tokens"] == 5
        assert cost["cached_tokens"] == 2
        assert cost["decode_tokens"] == 3
        assert (cost["queue_seconds"], cost["prefill_seconds"]) == (0.001, 0.002)
        assert cost["decode_seconds"] == 0.003
        assert cost["total_seconds"] > 0
        assert {"load_seconds", "queue_position", "num_preemptions", "prefix_miss"} <= cost.keys()


def test_metrics_cost_nothing_until_they_are_asked_for(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import sys, localllm.server.app; print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
