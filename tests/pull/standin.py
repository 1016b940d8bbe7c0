"""A Hub on loopback: an API port and, as on the real one, files on another origin.

Tests fill `repos`, put faults into `on_file` and look at `requests`. Imitates what
huggingface_hub 2.4 and a downloader need: model info, the resolve redirect with its headers, ranges,
and the error headers of missing, gated and private repositories.
"""

import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

COMMIT = "a" * 40


@dataclass
class Repo:
    """A repository. Files in `plain` are in Git itself; the others have a SHA-256."""

    files: dict[str, bytes]
    plain: frozenset[str] = frozenset()
    commit: str = COMMIT
    revisions: Mapping[str, dict[str, bytes]] = field(default_factory=dict)
    is_gated: bool = False
    is_private: bool = False
    renamed_to: str | None = None
    tags: tuple[str, ...] = ("gguf", "license:mit")

    def at(self, revision: str) -> tuple[dict[str, bytes], str] | None:
        """Files and commit of a branch, a tag or a commit."""
        if revision in ("main", self.commit):
            return self.files, self.commit
        for name, files in self.revisions.items():
            commit = hashlib.sha1(name.encode()).hexdigest()
            if revision in (name, commit):
                return files, commit
        return None


@dataclass(frozen=True)
class Seen:
    """A request as it came."""

    port: str
    method: str
    path: str
    headers: Mapping[str, str]


class FileRequest:
    """A GET for a file at the file port, for a fault to answer in its own way."""

    def __init__(self, handler: "Handler", path: str, data: bytes, number: int) -> None:
        self.handler, self.path, self.data, self.number = handler, path, data, number
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("range", ""))
        self.start = int(span[1]) if span else 0
        self.stop = min(int(span[2]) + 1, len(data)) if span and span[2] else len(data)
        self.has_range = span is not None

    def answer(
        self,
        body: bytes | None = None,
        *,
        total: int | None = None,
        shift: int = 0,
        etag: str = '"cdn"',
        announced: int | None = None,
    ) -> None:
        """206 with the range that was asked for; a `body` may be something else than announced."""
        if self.start >= len(self.data) > 0:
            headers = {"content-range": f"bytes */{len(self.data)}"}
            self.handler.send(416, headers, b"")
            return
        body = self.data[self.start : self.stop] if body is None else body
        total = len(self.data) if total is None else total
        headers = {"etag": etag}
        if self.has_range:
            first, last = self.start + shift, self.stop - 1 + shift
            headers["content-range"] = f"bytes {first}-{last}/{total}"
        length = self.stop - self.start if announced is None else announced
        self.handler.send(206 if self.has_range else 200, headers, body, length=length)

    def cut(self, num_bytes: int) -> None:
        """Send so many bytes of the answer, then close."""
        self.answer(self.data[self.start : min(self.start + num_bytes, self.stop)])
        self.handler.hang_up()

    def reset(self, num_bytes: int = 0) -> None:
        """Like `cut`, but with a TCP reset."""
        self.answer(self.data[self.start : min(self.start + num_bytes, self.stop)])
        linger = struct.pack("ii", 1, 0)
        self.handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.handler.hang_up()


Fault = Callable[[FileRequest], bool]


class HubStandIn:
    """Both servers and what they know."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Seen] = []
        self.on_file: Fault = lambda _: False
        self.on_hub: Callable[[Handler], bool] = lambda _: False
        self.linked: dict[str, str] = {}
        self.stopping = threading.Event()
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self.hub = _server(self, "hub")
        self.cdn = _server(self, "cdn")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.hub.server_port}"

    @property
    def cdn_url(self) -> str:
        return f"http://127.0.0.1:{self.cdn.server_port}"

    def record(self, handler: "Handler") -> None:
        headers = {key.lower(): value for key, value in handler.headers.items()}
        with self._lock:
            self.requests.append(Seen(handler.port_name, handler.command, handler.path, headers))

    def count(self, path: str) -> int:
        """How often a file has been asked for, this time included."""
        with self._lock:
            self._counts[path] = self._counts.get(path, 0) + 1
            return self._counts[path]

    def file_requests(self) -> list[Seen]:
        return [seen for seen in self.requests if seen.port == "cdn"]

    def close(self) -> None:
        self.stopping.set()
        for server in (self.hub, self.cdn):
            server.shutdown()
            server.server_close()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    standin: HubStandIn
    port_name: str

    def log_message(self, *_: object) -> None:
        pass

    def send(
        self, status: int, headers: Mapping[str, str], body: bytes, *, length: int | None = None
    ) -> None:
        """An answer; `length` may lie about the body."""
        length = len(body) if length is None else length
        self.send_response(status)
        for name, value in {"content-length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        if length != len(body):
            self.close_connection = True

    def hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.close()

    def fail(self, status: int, code: str = "", message: str = "") -> None:
        headers = {"x-error-code": code} if code else {}
        if message:
            headers["x-error-message"] = message
        self.send(status, headers, json.dumps({"error": message or "no"}).encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.standin.record(self)
        if self.port_name == "cdn":
            self._file()
        elif not self.standin.on_hub(self):
            self._hub()

    def _hub(self) -> None:
        parts = urlsplit(self.path)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", parts.path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", parts.path)
        match = api or file
        if match is None:
            self.fail(404)
            return
        repo = self.standin.repos.get(unquote(match[1]))
        if repo is not None and repo.renamed_to is not None:
            location = self.path.replace(match[1], repo.renamed_to, 1)
            self.send(307, {"location": location}, b"")
            return
        is_good = self.headers.get("authorization") == "Bearer good"
        if repo is None or (repo.is_private and not is_good):
            self.fail(401 if not is_good else 404, "RepoNotFound", "Repository not found")
            return
        revision = unquote(match[2] or "main")
        found = repo.at(revision)
        if found is None:
            self.fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        files, commit = found
        if api:
            self._info(unquote(match[1]), repo, files, commit)
        elif repo.is_gated and not is_good:
            self.fail(403 if "authorization" in self.headers else 401, "GatedRepo", "gated")
        else:
            self._resolve(match[1], files, commit, unquote(match[3]))

    def _info(self, name: str, repo: Repo, files: dict[str, bytes], commit: str) -> None:
        siblings = [_sibling(path, data, path in repo.plain) for path, data in files.items()]
        asked = parse_qs(urlsplit(self.path).query)
        if asked.get("blobs") != ["true"]:
            siblings = [{"rfilename": sibling["rfilename"]} for sibling in siblings]
        body = {"id": name, "sha": commit, "siblings": siblings, "tags": list(repo.tags)}
        self.send(200, {"content-type": "application/json"}, json.dumps(body).encode())

    def _resolve(self, name: str, files: dict[str, bytes], commit: str, path: str) -> None:
        if path not in files:
            self.fail(404, "EntryNotFound", "Entry not found")
            return
        data = files[path]
        if path in self.standin.repos[name].plain:
            headers = {"x-repo-commit": commit, "etag": f'"{_git_sha1(data)}"'}
            self.send(200, headers, data)
            return
        digest = self.standin.linked.get(path, hashlib.sha256(data).hexdigest())
        self.send(
            302,
            {
                "x-repo-commit": commit,
                "x-linked-etag": f'"{digest}"',
                "x-linked-size": str(len(data)),
                "etag": '"unrelated"',
                "location": f"{self.standin.cdn_url}/{name}/{commit}/{quote(path)}?sig=1",
            },
            b"",
        )

    def _file(self) -> None:
        org, name, commit, path = unquote(urlsplit(self.path).path)[1:].split("/", 3)
        repo = self.standin.repos.get(f"{org}/{name}")
        found = repo.at(commit) if repo is not None else None
        if found is None or path not in found[0]:
            self.fail(404)
            return
        request = FileRequest(self, path, found[0][path], self.standin.count(path))
        if not self.standin.on_file(request):
            request.answer()


def _sibling(path: str, data: bytes, is_plain: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": _git_sha1(data)}
    if not is_plain:
        digest = hashlib.sha256(data).hexdigest()
        found["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
    return found


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _server(standin: HubStandIn, name: str) -> ThreadingHTTPServer:
    handler = type("Handler", (Handler,), {"standin": standin, "port_name": name})
    server = _Quiet(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """Clients that hang up are what these tests are about."""


@contextmanager
def running() -> Iterator[HubStandIn]:
    standin = HubStandIn()
    try:
        yield standin
    finally:
        standin.close()
