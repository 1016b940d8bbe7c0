"""Responses: JSON, errors, and streams that end when their client goes.

An `Answer` runs its work while it watches the connection: a client that leaves cancels the work at
once, whether it streams, waits in a queue or loads a model. An error before the first chunk is a
real status; after it, it is a line of the stream.
"""

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing, suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localllm.errors import (
    BadRequest,
    Busy,
    Cancelled,
    CloudModel,
    LocalLLMError,
    ModelNotFound,
    TimedOut,
    UnsupportedModel,
)

JSON_TYPE = "application/json; charset=utf-8"
STREAM_TYPE = b"application/x-ndjson"
CLIENT_GONE = 499
_STATUS: tuple[tuple[type[LocalLLMError], int], ...] = (
    (BadRequest, 400),
    (CloudModel, 403),
    (ModelNotFound, 404),
    (Busy, 503),
    (Cancelled, CLIENT_GONE),
    (TimedOut, 504),
    (UnsupportedModel, 400),
)

log = logging.getLogger("localllm.server")

Chunk = dict[str, Any]
ErrorOf = Callable[[Exception], Chunk]
to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def status_of(error: Exception) -> int:
    """The HTTP status of an error."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def json_response(value: object, status: int = 200) -> Response:
    """A value as JSON."""
    return Response(to_json(value).encode(), status, media_type=JSON_TYPE)


def failure(error: Exception, body: Chunk) -> Response:
    """The answer to a request that failed; `body` says in its protocol's words how."""
    response = json_response(body, status_of(error))
    if isinstance(error, Busy):
        response.headers["retry-after"] = str(math.ceil(error.retry_seconds))
    return response


def error_response(request: Request, error: Exception) -> Response:
    """What a handler's exception becomes."""
    return failure(error, error_body(error))


def error_body(error: Exception) -> Chunk:
    """The error's line; anything that is not of our tree is a bug, and logged as one."""
    if isinstance(error, LocalLLMError):
        return {"error": str(error)}
    log.error("internal error", exc_info=error)
    return {"error": f"internal error: {type(error).__name__}: {error}"}


class Answer(Response):
    """Chunks as one JSON object a line, or `merge`d into a single object.

    `eager` sends the status before the first chunk is there, for clients that want to see progress
    and know that errors come as lines. `error_of` is the shape of those.
    """

    def __init__(
        self,
        chunks: AsyncIterator[Chunk],
        *,
        merge: Callable[[Iterable[Chunk]], Chunk] | None = None,
        eager: bool = False,
        error_of: ErrorOf = error_body,
    ) -> None:
        self._chunks = chunks
        self._error_of = error_of
        self._merge = merge
        self._eager = eager
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._run(scope, receive, send))
        gone = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await _end(work)
                with suppress(OSError, RuntimeError):
                    await self._reply({"error": "request canceled"}, CLIENT_GONE, scope, send)
                return
            work.result()
        finally:
            await _end(work)
            await _end(gone)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:  # type: ignore[type-var]
            if self._merge is not None:
                await self._send_merged(self._merge, chunks, scope, send)
            else:
                await self._send_lines(chunks, scope, send)

    async def _send_merged(
        self,
        merge: Callable[[Iterable[Chunk]], Chunk],
        chunks: AsyncIterator[Chunk],
        scope: Scope,
        send: Send,
    ) -> None:
        try:
            value = merge([chunk async for chunk in chunks])
        except Exception as error:
            await failure(error, self._error_of(error))(scope, _never, send)
            return
        await self._reply(value, 200, scope, send)

    async def _send_lines(self, chunks: AsyncIterator[Chunk], scope: Scope, send: Send) -> None:
        first = None
        if not self._eager:
            try:
                first = await anext(chunks)
            except Exception as error:
                await failure(error, self._error_of(error))(scope, _never, send)
                return
            if "done_reason" in first and first["done_reason"] in ("load", "unload"):
                await self._reply(first, 200, scope, send)
                return
        headers = [(b"content-type", STREAM_TYPE)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            if first is not None:
                await _send_line(send, first)
            async for chunk in chunks:
                await _send_line(send, chunk)
        except OSError:
            return
        except Exception as error:
            await _send_line(send, self._error_of(error))
        await send({"type": "http.response.body", "body": b""})

    async def _reply(self, value: Chunk, status: int, scope: Scope, send: Send) -> None:
        await json_response(value, status)(scope, _never, send)


async def _send_line(send: Send, chunk: Chunk) -> None:
    line = (to_json(chunk) + "\n").encode()
    await send({"type": "http.response.body", "body": line, "more_body": True})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Task[None]) -> None:
    if task.done():
        return
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _never() -> dict[str, Any]:
    raise AssertionError("a response does not read")
