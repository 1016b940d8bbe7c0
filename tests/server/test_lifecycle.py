"""Start and end of the daemon."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from server_process import Server, environment, start_server


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_daemon_and_its_runners_with_exit_code_0(
    tmp_path: Path, number: signal.Signals
) -> None:
    for server in start_server(tmp_path):
        body = {"model": "tiny", "prompt": "forever"}
        with server.http.stream("POST", "/api/generate", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            (runner,) = psutil.Process(server.process.pid).children()
            server.process.send_signal(number)
            assert server.process.wait(30) == 0
        assert not psutil.pid_exists(runner.pid)


def test_requests_that_run_at_the_end_hear_of_it(tmp_path: Path) -> None:
    """Both shapes of answer; a second signal ends the wait for them."""
    for server in start_server(tmp_path):
        whole = socket_request(server, "forever", stream=False)
        body = {"model": "tiny", "prompt": "forever"}
        with server.http.stream("POST", "/api/generate", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            for _ in range(2):
                server.process.send_signal(signal.SIGTERM)
            *_, last = lines
        assert json.loads(last) == {"error": "the daemon is shutting down"}
        text = read_all(whole)
        assert text.startswith(b"HTTP/1.1 500")
        assert text.endswith(b'{"error":"the daemon is shutting down"}')
        assert server.process.wait(30) == 0


def test_client_that_goes_while_it_sends_is_no_error_of_ours(tmp_path: Path) -> None:
    for server in start_server(tmp_path):
        address = server.http.base_url.host, server.http.base_url.port
        with socket.create_connection(address) as sock:
            sock.sendall(b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\n")
            sock.sendall(b'Content-Length: 100\r\n\r\n{"model":')
        assert server.http.get("/api/version").status_code == 200
    log = (tmp_path / "log").read_text()
    assert "499" in log
    assert "Traceback" not in log


def test_runners_of_a_killed_daemon_end_too(tmp_path: Path) -> None:
    for server in start_server(tmp_path):
        server.post("/api/generate", model="tiny")
        (runner,) = psutil.Process(server.process.pid).children()
        server.process.kill()
        gone, alive = psutil.wait_procs([runner], timeout=30)
        assert (len(gone), len(alive)) == (1, 0)


def test_interrupt_of_the_terminal_does_not_reach_the_runners(tmp_path: Path) -> None:
    for server in start_server(tmp_path):
        server.post("/api/generate", model="tiny")
        (runner,) = psutil.Process(server.process.pid).children()
        assert os.getpgid(runner.pid) == runner.pid != os.getpgid(server.process.pid)


def test_address_in_use_is_one_clear_error(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        host = f"127.0.0.1:{sock.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "localllm.server"],
            env=environment(tmp_path, LOCALLLM_HOST=host),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert done.stderr == f"Error: cannot listen on {host}: Address already in use\n"


def test_full_queue_refuses_at_once_and_serves_the_others(tmp_path: Path) -> None:
    limits = {"LOCALLLM_NUM_PARALLEL": "1", "LOCALLLM_MAX_QUEUE": "2"}
    for server in start_server(tmp_path, **limits):
        server.post("/api/generate", model="tiny")
        first = socket_request(server, "forever")
        assert b"200 OK" in first.recv(100)
        others = [socket_request(server, "forever") for _ in range(3)]
        heads = {connection: connection.recv(1000) for connection in others}
        (refused,) = [c for c, head in heads.items() if b"200 OK" not in head]
        answer = heads[refused]
        while b"}" not in answer:
            answer += refused.recv(1000)
        assert b"503 Service Unavailable" in answer
        assert b"retry-after: 2\r" in answer
        assert b"server busy, please try again.  maximum pending requests exceeded" in answer
        assert server.http.get("/api/ps").status_code == 200
        first.close()
        for connection in others:
            connection.close()


def read_all(connection: socket.socket) -> bytes:
    with connection, connection.makefile("rb") as file:
        return file.read()


def socket_request(server: Server, prompt: str, *, stream: bool = True) -> socket.socket:
    """A request whose answer is read, or not, later."""
    body = json.dumps({"model": "tiny", "prompt": prompt, "stream": stream}).encode()
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    head = f"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection
