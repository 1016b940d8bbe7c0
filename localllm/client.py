"""The one HTTP client of our own daemon, and how the daemon is started when none answers.

Synchronous, over `http.client` alone: what `localllm run` imports is time that its user waits.

Not here: what is printed (cli/).
"""

import fcntl
import http.client
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.address import Address
from localllm.config import Settings, process_environment
from localllm.errors import BadRequest, DaemonUnavailable, LocalLLMError, ModelNotFound
from localllm.identity import Build, read_secret
from localllm.interpreter import command_of

START_SECONDS = 30.0
STOP_SECONDS = 10.0
PROBE_SECONDS = 5.0

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """What answers at an address: our daemon, of some build, or another program."""

    is_ours: bool
    build: Build | None = None
    is_background: bool = False
    other: str | None = None


class RequestFailed(LocalLLMError):
    """The daemon answered with an error; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Requests to the daemon at the settings' address."""

    def __init__(self, settings: Settings) -> None:
        self.address = Address.parse(settings.host)
        self.settings = settings
        self._connection: http.client.HTTPConnection | None = None

    def get(self, path: str) -> Body:
        """The JSON object at `path`."""
        return self._whole("GET", path, None)

    def post(self, path: str, body: Body) -> Body:
        """The JSON object that a POST answers with; empty for an empty body."""
        return self._whole("POST", path, body)

    def delete(self, path: str, body: Body) -> None:
        self._whole("DELETE", path, body)

    def stream(self, path: str, body: Body) -> Generator[Body, None, None]:
        """The objects of a streamed answer. Closing the iterator makes the daemon stop the work.

        Raises RequestFailed for an error status and for an error line.
        """
        response = self._send("POST", path, body)
        try:
            if response.status >= 400:
                raise _failure(response)
            for line in _lines(response):
                chunk: Body = json.loads(line)
                if "error" in chunk:
                    raise RequestFailed(str(chunk["error"]), 500)
                yield chunk
        except (http.client.HTTPException, ConnectionError, json.JSONDecodeError) as error:
            raise DaemonUnavailable(f"the daemon at {self.address} went away") from error
        finally:
            self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _whole(self, method: str, path: str, body: Body | None) -> Body:
        response = self._send(method, path, body)
        if response.status >= 400:
            raise _failure(response)
        data = response.read()
        found: Body = json.loads(data) if data else {}
        return found

    def _send(self, method: str, path: str, body: Body | None) -> http.client.HTTPResponse:
        """Send a request, on a kept connection if it still works."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "X-LocalLLM-Progress": "1"}
        if self.settings.api_keys:
            key = self.settings.api_keys[0].encode(errors="surrogateescape")
            headers["Authorization"] = f"Bearer {key.decode('latin-1')}"
        if self.address.is_local:
            headers["X-LocalLLM-Secret"] = read_secret(self.settings.data_dir)
        for is_last_try in (False, True):
            fresh = self._connection is None
            try:
                connection = self._connect()
                connection.request(method, self.address.path + path, data, headers)
                return connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if fresh or is_last_try:
                    raise DaemonUnavailable(
                        f"no daemon answers at {self.address} ({_reason(error)}); "
                        "start one with 'localllm serve'"
                    ) from error
        raise AssertionError("not reached")

    def _connect(self, timeout: float | None = None) -> http.client.HTTPConnection:
        if self._connection is None:
            secure = self.address.scheme == "https"
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            self._connection = kind(self.address.dial_host, self.address.port, timeout=timeout)
        return self._connection

    def probe(self) -> Found | None:
        """What answers at the address; None if nothing does."""
        self.close()
        if self.address.port == 0:
            raise LocalLLMError("LOCALLLM_HOST: port 0 names no daemon; give it a port")
        try:
            connection = self._connect(PROBE_SECONDS)
            connection.request("GET", self.address.path + "/api/version")
            response = connection.getresponse()
            data = response.read(1 << 16)
        except ConnectionRefusedError:
            self.close()
            return None
        except (socket.gaierror, http.client.InvalidURL) as error:
            self.close()
            raise LocalLLMError(f"{self.address}: {_reason(error)}; check LOCALLLM_HOST") from None
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return Found(False, other=f"a program that does not speak HTTP ({_reason(error)})")
        if connection.sock is not None:
            connection.sock.settimeout(None)
        return _identify(data, response.headers.get("Server", ""))

    def ensure_daemon(
        self, *, prepares: bool = False, note: Callable[[str], None] | None = None
    ) -> None:
        """Make sure that our daemon answers: start one, or restart an idle one of an older build.

        `prepares` has a new daemon start a runner at once. `note` gets what the user should know.
        Raises DaemonUnavailable if another program answers or the daemon does not start.
        """
        found = self.probe()
        if found is None:
            if not self.address.is_local:
                raise DaemonUnavailable(f"no daemon answers at {self.address}")
            self._start(prepares=prepares)
            return
        if not found.is_ours:
            raise DaemonUnavailable(other_program(found.other or "another program", self.address))
        if not self.address.is_local or found.build is None:
            return
        current = Build.current()
        if found.build < current and found.is_background:
            self._restart(prepares=prepares, note=note)
        elif found.build.version < current.version and note is not None:
            note("the running daemon is an older version; restart it to use this one")

    def _restart(self, *, prepares: bool, note: Callable[[str], None] | None) -> None:
        try:
            self.post("/api/shutdown", {})
        except RequestFailed:
            if note is not None:
                note("the running daemon is an older build and busy; stop it to use this one")
            return
        self._wait(lambda: self.probe() is None, STOP_SECONDS, "the older daemon does not stop")
        self._start(prepares=prepares)

    def _start(self, *, prepares: bool) -> None:
        """Start a daemon in the background unless somebody else just does, and wait for it."""
        folder = self.settings.data_dir
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "start.lock"):
            if self.probe() is not None:
                return
            log = folder / "logs" / "daemon.log"
            process = _spawn(log, prepares=prepares)

            def is_up() -> bool:
                if os.waitpid(process, os.WNOHANG)[0]:
                    raise DaemonUnavailable(f"the daemon did not start: {_last_line(log)}")
                return self.probe() is not None

            self._wait(is_up, START_SECONDS, f"the daemon does not answer; see {log}")

    def _wait(self, condition: Callable[[], bool], seconds: float, problem: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise DaemonUnavailable(problem)
            time.sleep(0.01)


def _spawn(log: Path, *, prepares: bool) -> int:
    """Start the daemon in a session of its own, its output in the log; gives its process id."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [*command_of("localllm.server"), "--background"] + ["--prepare"] * prepares
    # Nobody waits for this child, so it is no `Popen`.
    return os.posix_spawn(
        sys.executable,
        command,
        process_environment(),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def _identify(data: bytes, server: str) -> Found:
    """Who gave this answer to `/api/version`."""
    try:
        body = json.loads(data)
    except ValueError:
        body = {}
    if isinstance(body, dict) and isinstance(body.get("localllm"), dict):
        own = body["localllm"]
        return Found(True, Build.parse(str(own.get("build"))), own.get("background") is True)
    if isinstance(body, dict) and isinstance(body.get("version"), str):
        return Found(False, other=f"Ollama {body['version']}")
    return Found(False, other=f"another program ({server})" if server else None)


def other_program(name: str, address: Address) -> str:
    port = address.port + 1
    return (
        f"{name} answers at {address}; stop it, or choose another port: "
        f"LOCALLLM_HOST=127.0.0.1:{port}"
    )


def _failure(response: http.client.HTTPResponse) -> LocalLLMError:
    """The error that a response tells."""
    data = response.read()
    try:
        text = str(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError):
        text = data.decode(errors="replace").strip() or f"HTTP status {response.status}"
    if response.status == 404:
        return ModelNotFound(text)
    return BadRequest(text) if response.status == 400 else RequestFailed(text, response.status)


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """The lines of a response as they come. Raises IncompleteRead if its end is missing, which
    the response's own iterator takes for the end.
    """
    rest = b""
    while data := response.read1(1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock among processes; it goes with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        return "no log"
    return lines[-1].removeprefix("Error: ") if lines else "no log"
