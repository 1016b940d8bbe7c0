"""HTTP for pulling: redirects followed by hand, credentials kept at home, answers bounded.

Credentials go to the host they are for and nowhere else: a redirect to another scheme, host or port
is followed without them. Bodies are read as they are; a server that compresses is refused, so that
a small answer stays small.
"""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

import httpx2

from localllm import __version__
from localllm.errors import PullFailed

MAX_REDIRECTS = 10
MAX_CONNECTIONS = 16
MAX_RETRY_AFTER_SECONDS = 60.0
REDIRECTS = frozenset({301, 302, 303, 307, 308})
NUMBER = re.compile(r"^\[Errno -?\d+\] ")
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for servers.

    read_seconds    without a byte, or with less than `slow_bytes` in them: connect again
    body_seconds    for the whole of a small answer
    tries           failures in a row without a new byte before giving up
    first_wait_seconds
                    before the second try; doubles up to `max_wait_seconds`
    """

    connect_seconds: float = 10.0
    read_seconds: float = 30.0
    slow_bytes: int = 4096
    body_seconds: float = 120.0
    tries: int = 6
    first_wait_seconds: float = 1.0
    max_wait_seconds: float = 8.0


class Again(Exception):
    """An attempt failed in a way that may pass: another one, after a while, is worth it."""

    def __init__(self, reason: str, wait_seconds: float | None = None) -> None:
        super().__init__(reason)
        self.wait_seconds = wait_seconds


class Unreachable(Again):
    """There was no connection at all."""


class Attempts:
    """Counts failures in a row and waits after each. `what` is for the message."""

    def __init__(self, patience: Patience, what: str) -> None:
        self._patience = patience
        self._what = what
        self._failures = 0
        self._progress = -1

    async def failed(self, again: Again, progress: int) -> None:
        """Wait, or raise PullFailed if it is not worth it any more.

        `progress` is anything that grows; when it has grown, the count starts anew.
        """
        if progress > self._progress:
            self._failures = 0
        self._progress = progress
        self._failures += 1
        if self._failures >= self._patience.tries:
            raise PullFailed(f"{self._what}: {again} ({self._failures} tries)") from again
        wait = self._patience.first_wait_seconds * 2 ** (self._failures - 1)
        wait = min(wait, self._patience.max_wait_seconds)
        if again.wait_seconds is not None:
            wait = max(wait, again.wait_seconds)
        await asyncio.sleep(wait)


class Access:
    """Credentials for one host, sent as headers, and what its refusals mean."""

    def __init__(self, headers: Mapping[str, str] | None = None) -> None:
        self._headers = dict(headers or {})

    def headers(self) -> Mapping[str, str]:
        """Headers for the next request."""
        return self._headers

    async def renew(self, http: "Http", response: httpx2.Response) -> bool:
        """Get better credentials after a 401; whether there are any."""
        return False

    def refusal(self, response: httpx2.Response, what: str) -> PullFailed:
        """The error that a status means."""
        return PullFailed(f"{what}: the server answers with status {response.status_code}")


@dataclass(frozen=True, slots=True)
class Body:
    """A small answer, whole."""

    response: httpx2.Response
    data: bytes


class Http:
    """A client with its connections, for the time of one pull."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self._client = httpx2.AsyncClient(
            headers={"User-Agent": f"localllm/{__version__}", "Accept-Encoding": "identity"},
            timeout=httpx2.Timeout(patience.read_seconds, connect=patience.connect_seconds),
            limits=httpx2.Limits(max_connections=MAX_CONNECTIONS),
            follow_redirects=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections, also when cancelled in the middle of that."""
        closing = asyncio.ensure_future(self._client.aclose())
        try:
            await asyncio.shield(closing)
        finally:
            await closing

    @asynccontextmanager
    async def open(
        self,
        url: str,
        access: Access,
        headers: Mapping[str, str],
        check: Callable[[httpx2.Response], None] = lambda _: None,
        at: str | None = None,
    ) -> AsyncIterator[httpx2.Response]:
        """The answer to a GET after its redirects, body unread.

        `check` sees every answer on the way and may raise. Starts at `at` if that is given, where
        `url` redirected to before. Transport failures become `Again`.
        """
        try:
            response = await self._follow(url, access, headers, check, at or url)
            try:
                yield response
            finally:
                await response.aclose()
        except httpx2.TransportError as error:
            kind = Unreachable if isinstance(error, httpx2.ConnectError) else Again
            raise kind(_reason(error, url)) from error

    async def _follow(
        self,
        url: str,
        access: Access,
        headers: Mapping[str, str],
        check: Callable[[httpx2.Response], None],
        start: str,
    ) -> httpx2.Response:
        home = _origin(_parsed(url))
        at, may_renew = _parsed(start), True
        for _ in range(MAX_REDIRECTS):
            own = access.headers() if _origin(at) == home else {}
            request = self._client.build_request("GET", at, headers={**headers, **own})
            response = await self._client.send(request, stream=True)
            try:
                check(response)
                if response.status_code == 401 and may_renew and _origin(at) == home:
                    may_renew = False
                    if not await access.renew(self, response):
                        return response
                elif response.status_code in REDIRECTS and "location" in response.headers:
                    at = _redirected(at, response.headers["location"])
                else:
                    return response
            except BaseException:
                await response.aclose()
                raise
            await response.aclose()
        raise PullFailed(f"{url}: more than {MAX_REDIRECTS} redirects")

    async def read(
        self, url: str, access: Access, limit: int, headers: Mapping[str, str] | None = None
    ) -> Body:
        """A small answer of any status; retried while the server is not well.

        Raises PullFailed if its body is longer than `limit` bytes, or there is no server.
        """
        attempts = Attempts(self.patience, url)
        while True:
            try:
                async with (
                    asyncio.timeout(self.patience.body_seconds),
                    self.open(url, access, headers or {}) as response,
                ):
                    if response.status_code in RETRIED:
                        raise unwell(response)
                    return Body(response, await _bounded(response, limit, url))
            except TimeoutError:
                raise PullFailed(f"{url}: the answer takes too long") from None
            except Unreachable as again:
                raise PullFailed(str(again)) from again
            except Again as again:
                await attempts.failed(again, 0)


async def _bounded(response: httpx2.Response, limit: int, url: str) -> bytes:
    """The body as it came. An error's is cut short, any other that is too long is refused."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise PullFailed(f"{url}: the server sends a compressed answer, which was not asked for")
    data = bytearray()
    async for piece in response.aiter_raw():
        data += piece
        if len(data) > limit:
            if response.is_error:
                break
            raise PullFailed(f"{url}: the answer is longer than {limit} bytes")
    return bytes(data[:limit])


def unwell(response: httpx2.Response) -> Again:
    """What a status of `RETRIED` means; the server may say how long to wait."""
    after = response.headers.get("retry-after", "")
    wait = min(float(after), MAX_RETRY_AFTER_SECONDS) if after.isdecimal() else None
    return Again(f"the server answers with status {response.status_code}", wait)


def _parsed(url: str) -> httpx2.URL:
    try:
        return httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise PullFailed(f"{url[:200]!r} is not a URL: {error}") from error


def _redirected(at: httpx2.URL, location: str) -> httpx2.URL:
    """Where a redirect leads: over HTTP only, and never from an encrypted connection to a plain."""
    try:
        url = at.join(location)
    except httpx2.InvalidURL as error:
        raise PullFailed(f"{at} redirects to {location[:200]!r}, which is not a URL") from error
    if url.scheme not in ("https", at.scheme) or not url.host:
        raise PullFailed(f"{at.host} redirects to {url.scheme}://{url.host}, which is not safe")
    return url


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _reason(error: httpx2.TransportError, url: str) -> str:
    host = _parsed(url).host
    if isinstance(error, httpx2.TimeoutException):
        return f"{host} does not answer in time"
    return f"no connection to {host}: {what_failed(error)}"


def what_failed(error: BaseException) -> str:
    """A transport's failure as the system puts it, without its number."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    text = cause.strerror if isinstance(cause, OSError) else None
    text = text or NUMBER.sub("", str(error)) or type(error).__name__
    return f"{text}; is this machine online?" if isinstance(cause, socket.gaierror) else text
