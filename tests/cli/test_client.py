"""Finding, starting and restarting the daemon."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from server_process import environment

from localllm.client import Client
from localllm.config import Settings
from localllm.errors import DaemonUnavailable, LocalLLMError
from localllm.identity import Build, read_secret

COMMAND = (sys.executable, "-m", "localllm.cli")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def settings(folder: Path, port: int) -> Settings:
    return replace(
        Settings(), host=f"127.0.0.1:{port}", data_dir=folder, cache_dir=folder / "cache"
    )


@contextmanager
def other_server(body: Any, **headers: str) -> Iterator[tuple[int, list[str]]]:
    """Another program's server, and the paths that it was asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response_only(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield http.server_port, paths
        http.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("body", "headers", "who"),
    [
        ({"version": "0.9.1"}, {}, "Ollama 0.9.1"),
        (b"<html>", {"Server": "nginx/1"}, r"another program \(nginx/1\)"),
        (b"[1]", {}, "another program"),
    ],
)
def test_another_program_on_the_port_is_named_with_the_way_out(
    tmp_path: Path, body: Any, headers: dict[str, str], who: str
) -> None:
    with (
        other_server(body, **headers) as (port, _),
        pytest.raises(DaemonUnavailable) as error,
    ):
        Client(settings(tmp_path, port)).ensure_daemon()
    assert error.match(f"^{who} answers at http://127.0.0.1:{port}; ")
    assert f"choose another port: LOCALLLM_HOST=127.0.0.1:{port + 1}" in str(error.value)


def test_program_that_does_not_speak_http_is_told(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-x\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        client = Client(settings(tmp_path, listener.getsockname()[1]))
        with pytest.raises(DaemonUnavailable, match="does not speak HTTP"):
            client.ensure_daemon()
        thread.join()


@pytest.mark.parametrize("tail", [b"", b"5", b"20\r\n", b'20\r\n{"a', b"0\r\n\r\n"])
def test_a_stream_that_breaks_off_is_an_error(tmp_path: Path, tail: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(head + b'9\r\n{"a": 1}\n\r\n' + tail)

        thread = threading.Thread(target=answer)
        thread.start()
        stream = Client(settings(tmp_path, listener.getsockname()[1])).stream("/api/chat", {})
        assert next(stream) == {"a": 1}
        if tail.startswith(b"0"):
            assert list(stream) == []
        else:
            with pytest.raises(DaemonUnavailable, match="went away"):
                next(stream)
        thread.join()


@pytest.mark.parametrize(
    ("host", "error"),
    [("no such host", "check LOCALLLM_HOST"), ("127.0.0.1:0", "port 0 names no daemon")],
)
def test_an_address_that_cannot_be_is_told(tmp_path: Path, host: str, error: str) -> None:
    with pytest.raises(LocalLLMError, match=error):
        Client(replace(settings(tmp_path, 0), host=host)).ensure_daemon()


def test_no_daemon_is_started_on_another_machine(tmp_path: Path) -> None:
    client = Client(replace(settings(tmp_path, 1), host="192.0.2.1:1"))
    assert not client.address.is_local


def test_foreground_daemon_of_an_older_build_is_left_alone(tmp_path: Path) -> None:
    body = {"version": "0.32.1", "localllm": {"build": "0.0.1+1", "background": False}}
    notes: list[str] = []
    with other_server(body) as (port, paths):
        Client(settings(tmp_path, port)).ensure_daemon(note=notes.append)
    assert paths == ["/api/version"]
    assert notes == ["the running daemon is an older version; restart it to use this one"]


def test_commands_at_once_start_one_daemon_and_an_idle_one_is_replaced(
    tmp_path: Path, monkeypatch: Any
) -> None:
    port = free_port()
    env = environment(tmp_path, LOCALLLM_HOST=f"127.0.0.1:{port}")
    commands = [
        subprocess.Popen([*COMMAND, "list"], env=env, stdout=subprocess.PIPE) for _ in range(3)
    ]
    for command in commands:
        out, _ = command.communicate()
        assert command.returncode == 0
        assert out.startswith(b"NAME")
    log = (tmp_path / "logs" / "daemon.log").read_text()
    assert log.count("listening on") == 1
    client = Client(settings(tmp_path, port))
    try:
        first = client.get("/api/version")["localllm"]["pid"]
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        client._restart(prepares=False, note=None)
        assert client.get("/api/version")["localllm"]["pid"] != first
    finally:
        client.post("/api/shutdown", {})
    while client.probe() is not None:
        pass


def test_daemon_that_cannot_start_says_why(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("localllm.client.sys.executable", "/bin/false")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "daemon.log").write_text("old\nthe reason\n")
    with pytest.raises(DaemonUnavailable, match="the daemon did not start: the reason"):
        Client(settings(tmp_path, free_port())).ensure_daemon()


def test_builds_are_ordered_by_version_and_then_time() -> None:
    builds = [Build.parse(text) for text in ("0.1.0+5", "0.1.0+6", "0.2.0+1", "0.10.0+1")]
    known = [build for build in builds if build is not None]
    assert known == sorted(known)
    assert str(known[0]) == "0.1.0+5"
    assert Build.parse("x") is None
    assert Build.parse(str(Build.current())) == Build.current()


def test_secret_is_made_once_and_only_for_the_user(tmp_path: Path) -> None:
    secret = read_secret(tmp_path / "data")
    assert len(secret) == 64
    assert read_secret(tmp_path / "data") == secret
    assert (tmp_path / "data" / "secret").stat().st_mode & 0o777 == 0o600
