"""A streamed answer over HTTP at little cost: a socket, a parser in C, lines.

A load generator shares its machine's cores with the server that it measures, so a line costs a few
microseconds here. Every request has a connection of its own, which closing gives up.

Not here: what lines mean (wire.py).
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any

import httptools

from localllm.address import Address
from localllm.errors import LocalLLMError
from localllm.traffic.wire import error_text

READ_BYTES = 1 << 16
ERROR_BYTES = 1 << 16


class Refused(LocalLLMError):
    """The server answered with an error status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class CutOff(LocalLLMError):
    """The connection ended before the answer did, or spoke no HTTP."""


class _Response:
    """What httptools calls back with."""

    def __init__(self) -> None:
        self.body: list[bytes] = []
        self.has_length = False
        self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self.has_length = True

    def on_body(self, data: bytes) -> None:
        self.body.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = True

    def take(self) -> bytes:
        data = b"".join(self.body)
        self.body.clear()
        return data


async def post_lines(
    server: Address, path: str, body: dict[str, Any], api_key: str | None = None
) -> AsyncIterator[bytes]:
    """The lines of the answer to a POST as they come. Closing the iterator closes the connection.

    Raises Refused, CutOff, or OSError if there is no connection.
    """
    secure = ssl.create_default_context() if server.scheme == "https" else None
    reader, writer = await asyncio.open_connection(server.dial_host, server.port, ssl=secure)
    try:
        writer.write(_request(server, path, body, api_key))
        response = _Response()
        parser = httptools.HttpResponseParser(response)
        rest = b""
        while not response.is_complete:
            await _read(reader, parser, response)
            if parser.get_status_code() >= 400:
                raise await _refused(reader, parser, response)
            *lines, rest = (rest + response.take()).split(b"\n")
            for line in lines:
                yield line
        if rest:
            yield rest
    finally:
        writer.transport.abort()


def _request(server: Address, path: str, body: dict[str, Any], api_key: str | None) -> bytes:
    data = json.dumps(body).encode()
    host = f"[{server.dial_host}]" if ":" in server.dial_host else server.dial_host
    head = [
        f"POST {server.path}{path} HTTP/1.1",
        f"Host: {host}:{server.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        "Connection: close",
    ]
    if api_key:
        head.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*head, "", ""]).encode() + data


async def _read(
    reader: asyncio.StreamReader, parser: httptools.HttpResponseParser, response: _Response
) -> None:
    """Feed the parser what has come. Raises CutOff."""
    data = await reader.read(READ_BYTES)
    if not data:
        if response.has_length or not parser.get_status_code():
            raise CutOff("the server closed the connection before the answer ended")
        response.is_complete = True
        return
    try:
        parser.feed_data(data)
    except httptools.HttpParserError as error:
        raise CutOff(f"the server does not speak HTTP: {error}") from None


async def _refused(
    reader: asyncio.StreamReader, parser: httptools.HttpResponseParser, response: _Response
) -> Refused:
    size = 0
    while not response.is_complete and size < ERROR_BYTES:
        await _read(reader, parser, response)
        size = sum(map(len, response.body))
    return Refused(parser.get_status_code(), error_text(response.take()))
