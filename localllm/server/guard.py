"""The outermost layer: who may talk to the daemon, CORS headers, request ids, one log line each.

A web page can make a browser send requests to loopback: by DNS rebinding (the Host header is
foreign then) or across origins (the Origin header is). Both are refused with a body that says
which check failed. Where keys are set, a request must show one, or the data folder's secret, which
only programs of this daemon's user can read.
"""

import hashlib
import hmac
import ipaddress
import json
import logging
import re
import socket
import time
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localllm import request_id
from localllm.server.state import SECRET_HEADER

DEFAULT_ORIGINS = (
    *(f"{s}://{h}" for s in ("http", "https") for h in ("localhost", "127.0.0.1", "0.0.0.0")),
    *(f"{s}://{h}:*" for s in ("http", "https") for h in ("localhost", "127.0.0.1", "0.0.0.0")),
    *("app://*", "file://*", "tauri://*", "vscode-webview://*", "vscode-file://*"),
)
ALLOW_METHODS = "GET,POST,PUT,PATCH,DELETE,HEAD,OPTIONS"
ALLOW_HEADERS = ",".join(
    (
        *("Authorization", "Content-Type", "User-Agent", "Accept", "X-Requested-With"),
        *("OpenAI-Beta", "X-Request-Id"),
        *(
            f"x-stainless-{name}"
            for name in (
                *("arch", "async", "custom-poll-interval", "helper-method", "lang", "os"),
                *("package-version", "poll-helper", "retry-count", "runtime", "runtime-version"),
                "timeout",
            )
        ),
    )
)
MAX_AGE = str(12 * 3600)
# What a stranger may know: that the daemon is alive, and what it is.
OPEN_PATHS = ("/", "/health", "/api/version")
NO_KEY = "unauthorized: send one of this daemon's keys as 'Authorization: Bearer KEY'"
LOCAL_SUFFIXES = (".localhost", ".local", ".internal")

log = logging.getLogger("localllm.access")


def origin_pattern(origins: Iterable[str]) -> re.Pattern[str]:
    """A pattern for the default origins and more, in which `*` stands for anything."""
    entries = (re.escape(entry).replace(r"\*", ".*") for entry in (*DEFAULT_ORIGINS, *origins))
    return re.compile("|".join(entries), re.IGNORECASE)


def is_allowed_host(host: str) -> bool:
    """Whether a Host header names this machine or a private network."""
    name = _host_name(host).rstrip(".").lower()
    if not name or name == "localhost" or name.endswith(LOCAL_SUFFIXES):
        return True
    if name == socket.gethostname().lower():
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_private or address.is_loopback or address.is_unspecified


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0]


class Keys:
    """The keys that let a request in; without any, everybody is let in."""

    def __init__(self, keys: Iterable[str], secret: str) -> None:
        self._keys = [key.encode(errors="surrogateescape") for key in keys]
        self._secret = secret.encode()

    def caller(self, headers: Headers) -> str | None:
        """Who asks, as a name that tells nothing of the key: "" is the daemon's own user, or
        anybody where there are no keys. None: nobody who may.
        """
        if not self._keys or hmac.compare_digest(_header(headers, SECRET_HEADER), self._secret):
            return ""
        scheme, _, key = _header(headers, "authorization").partition(b" ")
        given = key.strip() if scheme.lower() == b"bearer" else _header(headers, "x-api-key")
        if not any(hmac.compare_digest(given, known) for known in self._keys):
            return None
        return hashlib.blake2b(given, digest_size=8, person=b"caller").hexdigest()


def _header(headers: Headers, name: str) -> bytes:
    return headers.get(name, "").encode("latin-1")


def _shown(path: str) -> str:
    """A path for the log: one line that no client can break or colour."""
    return path.encode("unicode_escape").decode()


class Guard:
    """Wraps the application. `check_host` is for daemons that only listen on loopback.

    Handlers find who asks in `request.state.caller`.
    """

    def __init__(
        self, app: ASGIApp, origins: Iterable[str], keys: Keys, *, check_host: bool
    ) -> None:
        self._app = app
        self._origins = origin_pattern(origins)
        self._keys = keys
        self._check_host = check_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        headers = Headers(scope=scope)
        identity = request_id.accept(headers.get(request_id.HEADER, ""))
        request_id.current.set(identity)
        origin = headers.get("origin")
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", [])
                MutableHeaders(scope=message)[request_id.HEADER] = identity
                if origin is not None and status != 403:
                    MutableHeaders(scope=message).update(self._cors_headers(origin))
            await send(message)

        problem = self._problem(headers, origin)
        caller = self._keys.caller(headers)
        if problem is not None:
            await _refuse(answer, 403, f"forbidden: {problem}")
        elif origin is not None and scope["method"] == "OPTIONS":
            await _answer_preflight(answer)
        elif caller is None and scope["path"] not in OPEN_PATHS:
            await _refuse(answer, 401, NO_KEY)
        else:
            scope.setdefault("state", {})["caller"] = caller or ""
            await self._app(scope, receive, answer)
        client = scope["client"][0] if scope.get("client") else "-"
        milliseconds = 1000 * (time.perf_counter() - begun)
        log.info(
            "%d | %.1f ms | %s | %s %s",
            status,
            milliseconds,
            client,
            scope["method"],
            _shown(scope["path"]),
        )

    def _problem(self, headers: Headers, origin: str | None) -> str | None:
        host = headers.get("host", "")
        if self._check_host and not is_allowed_host(host):
            return (
                f"Host header {host!r} is not a name of this machine; "
                "use localhost, or set LOCALLLM_HOST to listen on a network"
            )
        if origin is None or origin.partition("://")[2] == host or self._origins.fullmatch(origin):
            return None
        return f"Origin {origin!r} is not allowed; add it to LOCALLLM_ORIGINS"

    def _cors_headers(self, origin: str) -> dict[str, str]:
        return {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": "X-Request-Id, Retry-After",
            "vary": "Origin",
        }


async def _refuse(send: Send, status: int, problem: str) -> None:
    body = json.dumps({"error": problem}).encode()
    headers = [(b"content-type", b"application/json; charset=utf-8")]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _answer_preflight(send: Send) -> None:
    headers = {
        "access-control-allow-methods": ALLOW_METHODS,
        "access-control-allow-headers": ALLOW_HEADERS,
        "access-control-max-age": MAX_AGE,
    }
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 204, "headers": raw})
    await send({"type": "http.response.body", "body": b""})
