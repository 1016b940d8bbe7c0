"""Fetching one file: several ranges at once, each retried, the whole hashed while it arrives.

A server that does not know ranges gets one request for the whole file. A file that changes while it
is fetched, or whose hash is wrong in the end, is fetched again from the beginning, and not for ever.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from localllm.errors import PullFailed
from localllm.pull.events import Header, Meter, OnProgress, Transfer
from localllm.pull.package import RemoteFile
from localllm.pull.ranges import Span
from localllm.pull.staging import Part, Staging
from localllm.pull.transport import RETRIED, Again, Attempts, Http, unwell
from localllm.store import Store

NUM_CONNECTIONS = 8
# What one request asks for: a 32nd of the file within these bounds.
SMALLEST_SPAN, LARGEST_SPAN = 1 << 20, 32 << 20
HEADER_BYTES = 16 << 20
TICK_SECONDS = 0.1
SAVE_SECONDS = 1.0
MAX_RESTARTS = 3
MAGIC = b"GGUF"

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_EXPIRED = (401, 403, 404, 410)


class _Changed(Exception):
    """The server has another file than it had."""


class _RangesUnknown(Exception):
    """The server sends the whole file whatever is asked for."""


async def fetch(
    file: RemoteFile, store: Store, staging: Staging, http: Http, report: OnProgress
) -> None:
    """Bring a file into staging, its hash compared, unless the store has it.

    Raises PullFailed, or StoreError if there is no room for it.
    """
    meter = Meter(file.digest, file.size)

    def wait() -> None:
        report(meter.read(staging.bytes_there(file.digest, file.size)))

    part = await staging.hold(file.digest, file.size, lambda: store.has(file.digest), wait)
    if part is not None:
        with part:
            await _fill(file, part, http, report)
    report(Transfer(file.digest, file.size, file.size))


async def _fill(file: RemoteFile, part: Part, http: Http, report: OnProgress) -> None:
    got = ""
    for _ in range(2):
        if part.is_verified:
            return
        try:
            await _Download(file, part, http, report).run()
        finally:
            await asyncio.to_thread(part.save)
        got = await asyncio.to_thread(part.digest)
        if got == file.digest:
            await asyncio.to_thread(part.mark_verified)
            return
        part.restart()
    raise PullFailed(
        f"digest mismatch, file must be downloaded again: want sha256:{file.digest}, "
        f"got sha256:{got} ({file.label})"
    )


class _Source:
    """Where a file's bytes come from: its own URL, or where that redirected to."""

    def __init__(self, file: RemoteFile, http: Http) -> None:
        self._file = file
        self._http = http
        self._redirected: str | None = None
        self._etag: str | None = None

    @asynccontextmanager
    async def open(self, start: int, stop: int) -> AsyncIterator[httpx2.Response]:
        """An answer that announces exactly these bytes.

        Raises Again for what may pass, _Changed or _RangesUnknown for what the caller must decide.
        """
        file, used = self._file, self._redirected
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        opening = self._http.open(file.url, file.access, headers, self._check_links, used)
        async with opening as response:
            is_elsewhere = str(response.url) != file.url
            status = response.status_code
            if status in RETRIED:
                raise unwell(response)
            if is_elsewhere and status in _EXPIRED:
                if self._redirected == used:
                    self._redirected = None
                raise Again(f"{response.url.host} answers with status {status}")
            if status == 416:
                raise _Changed(f"status {status}")
            if status not in (200, 206):
                raise file.access.refusal(response, file.label)
            self._check_body(response, start, stop)
            self._redirected = str(response.url) if is_elsewhere else None
            yield response

    def forget(self) -> None:
        self._redirected = self._etag = None

    def _check_links(self, response: httpx2.Response) -> None:
        """Compare what a redirect of the Hub says about its target. Raises _Changed."""
        etag = response.headers.get("x-linked-etag", "").strip('W/"').lower()
        size = response.headers.get("x-linked-size", "")
        if _SHA256.fullmatch(etag) and etag != self._file.digest:
            raise _Changed(f"its hash is now {etag}")
        if size.isdecimal() and int(size) != self._file.size:
            raise _Changed(f"its size is now {size}")

    def _check_body(self, response: httpx2.Response, start: int, stop: int) -> None:
        """Compare what an answer says about its body with what was asked for."""
        headers, size = response.headers, self._file.size
        if headers.get("content-encoding", "identity") != "identity":
            raise PullFailed(
                f"{self._file.label}: the server compresses files, in spite of being asked not to"
            )
        if response.status_code == 200:
            length = headers.get("content-length", "")
            if length.isdecimal() and int(length) != size:
                raise _Changed(f"{length} bytes where {size} were announced")
            if (start, stop) != (0, size):
                raise _RangesUnknown
        else:
            match = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
            if match is None:
                raise Again("the server sends a part without saying which")
            first, last, total = map(int, match.groups())
            if total != size:
                raise _Changed(f"{total} bytes where {size} were announced")
            if (first, last) != (start, stop - 1):
                raise Again("the server sends another part than was asked for")
        etag = headers.get("etag")
        if self._etag is not None and etag is not None and etag != self._etag:
            raise _Changed("its version is another one")
        self._etag = etag or self._etag


class _Download:
    """The transfer of one file into its part."""

    def __init__(self, file: RemoteFile, part: Part, http: Http, report: OnProgress) -> None:
        self._file = file
        self._part = part
        self._patience = http.patience
        self._report = report
        self._source = _Source(file, http)
        self._meter = Meter(file.digest, file.size)
        self._has_grown = asyncio.Event()
        self._most = part.ranges.num_bytes
        self._is_checked = file.kind != "model"

    async def run(self) -> None:
        """Fetch what is missing, and hash it all."""
        knows_ranges, reason = True, ""
        for _ in range(MAX_RESTARTS):
            work = [self._work() for _ in range(NUM_CONNECTIONS if knows_ranges else 0)]
            try:
                await self._beside_ticks(work or [self._stream()])
                return
            except _RangesUnknown:
                knows_ranges = False
            except _Changed as change:
                reason = str(change)
            self._part.restart()
            self._source.forget()
        raise PullFailed(f"{self._file.label} is not what was announced: {reason}; pull it again")

    async def _beside_ticks(self, work: list[Coroutine[Any, Any, None]]) -> None:
        """Do the work while bytes are hashed, state is saved and progress told."""
        ticking = asyncio.create_task(self._tick())
        try:
            await _all([self._hash(), *work])
        finally:
            ticking.cancel()

    async def _work(self) -> None:
        """Fetch one missing span after the other."""
        ranges = self._part.ranges
        most = min(max(ranges.size // 32, SMALLEST_SPAN), LARGEST_SPAN)
        while (span := ranges.take(most)) is not None:
            try:
                await self._fetch_span(span)
            finally:
                ranges.release(span)

    async def _fetch_span(self, span: Span) -> None:
        at, stop = span
        attempts = Attempts(self._patience, self._file.label)
        while at < stop:
            try:
                async with self._source.open(at, stop) as response:
                    async for data in self._body(response, stop - at):
                        self._put(at, data)
                        at += len(data)
            except Again as again:
                await attempts.failed(again, self._most)

    async def _stream(self) -> None:
        """Fetch the whole file in one go, from the beginning whenever that fails."""
        attempts = Attempts(self._patience, self._file.label)
        while not self._part.ranges.is_complete:
            self._part.restart()
            at = 0
            try:
                async with self._source.open(0, self._file.size) as response:
                    async for data in self._body(response, self._file.size):
                        self._put(at, data)
                        at += len(data)
            except Again as again:
                await attempts.failed(again, self._most)

    async def _body(self, response: httpx2.Response, num_bytes: int) -> AsyncIterator[bytes]:
        """The bytes of an answer, which must be so many and come at a bearable rate."""
        since, received = time.monotonic(), 0
        async for data in response.aiter_raw():
            if len(data) > num_bytes:
                raise Again("the server sends more than was asked for")
            num_bytes -= len(data)
            yield data
            received += len(data)
            if time.monotonic() - since > self._patience.read_seconds:
                if received < self._patience.slow_bytes:
                    raise Again("the connection is too slow")
                since, received = time.monotonic(), 0
        if num_bytes:
            raise Again("the answer is cut short")

    def _put(self, at: int, data: bytes) -> None:
        self._part.write(at, data)
        self._most = max(self._most, self._part.ranges.num_bytes)
        self._has_grown.set()
        if not self._is_checked and self._part.ranges.prefix >= len(MAGIC):
            self._is_checked = True
            if self._part.read(0, len(MAGIC)) != MAGIC:
                raise PullFailed(f"{self._file.label} is not a GGUF file")

    async def _hash(self) -> None:
        """Follow the growing beginning of the file."""
        part = self._part
        while part.num_hashed < part.size:
            if part.ranges.prefix > part.num_hashed:
                await asyncio.to_thread(part.hash_more)
                continue
            self._has_grown.clear()
            await self._has_grown.wait()

    async def _tick(self) -> None:
        """Tell the progress often, save the state now and then."""
        saved_at = time.monotonic()
        has_header = self._file.kind != "model"
        ranges = self._part.ranges
        while True:
            self._report(self._meter.read(ranges.num_bytes))
            if not has_header and ranges.prefix >= min(HEADER_BYTES, ranges.size):
                has_header = True
                self._report(Header(self._part.path))
            await asyncio.sleep(TICK_SECONDS)
            if time.monotonic() - saved_at > SAVE_SECONDS:
                await asyncio.to_thread(self._part.save_some, list(ranges.done))
                saved_at = time.monotonic()


async def _all(work: list[Coroutine[Any, Any, None]]) -> None:
    """Do all of it at once; the first failure ends the rest and is raised."""
    tasks = [asyncio.create_task(job) for job in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        # A second cancellation would interrupt the closing of connections.
        for task in tasks:
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
