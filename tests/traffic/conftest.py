"""A server of known answers: it speaks both dialects, in pieces as small as one wants."""

import asyncio
import json
from collections.abc import Iterable

import pytest

from localllm.address import Address

JSON = {"Content-Type": "application/json"}


class StandIn:
    """Answers each request with `pieces`; remembers the bodies.

    tokens_per_word, overhead   how it counts a prompt's tokens
    cut                         bytes that go out at once; None: each line by itself
    """

    def __init__(self) -> None:
        self.pieces: Iterable[str] = ("one", " two", " three")
        self.tokens_per_word, self.overhead = 2, 10
        self.cut: int | None = None
        self.status = 200
        self.failure: bytes | None = None
        self.stops_after: int | None = None
        self.is_chunked = True
        self.bodies: list[dict] = []
        self.heads: list[str] = []
        self.num_open = self.most_open = 0

    async def __aenter__(self) -> Address:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return Address("http", "127.0.0.1", port)

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            size = int(head.lower().split("content-length:")[1].split()[0])
            body = json.loads(await reader.readexactly(size))
            self.heads.append(head)
            self.bodies.append(body)
            await self._answer(writer, self._lines(head.split()[1], body))
        except ConnectionError:
            pass
        finally:
            self.num_open -= 1
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, lines: list[bytes]) -> None:
        if self.failure is not None:
            lines = [self.failure]
        head = f"HTTP/1.1 {self.status} Told\r\nConnection: close\r\n"
        if self.is_chunked:
            head += "Transfer-Encoding: chunked\r\n"
        out = [head.encode() + b"\r\n"]
        for line in lines[: self.stops_after]:
            out.append(b"%x\r\n%s\r\n" % (len(line), line) if self.is_chunked else line)
        if self.is_chunked and self.stops_after is None:
            out.append(b"0\r\n\r\n")
        data = b"".join(out)
        cuts = [data] if self.cut is None else _cut(data, self.cut)
        for piece in out if self.cut is None else cuts:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    def _lines(self, path: str, body: dict) -> list[bytes]:
        text = body.get("prompt") or "\n".join(m["content"] for m in body["messages"])
        counts = len(text.split()) * self.tokens_per_word + self.overhead, len(list(self.pieces))
        if path.startswith("/v1"):
            return self._events(is_chat=path.endswith("chat/completions"), counts=counts)
        return self._objects(is_chat=path.endswith("chat"), counts=counts)

    def _objects(self, *, is_chat: bool, counts: tuple[int, int]) -> list[bytes]:
        def piece(text: str) -> dict:
            return {"message": {"content": text}} if is_chat else {"response": text}

        chunks = [{**piece(text), "done": False} for text in self.pieces]
        end = {"prompt_eval_count": counts[0], "prompt_cached_count": 3, "eval_count": counts[1]}
        chunks.append({**piece(""), "done": True, "done_reason": "stop", **end})
        return [json.dumps(chunk).encode() + b"\n" for chunk in chunks]

    def _events(self, *, is_chat: bool, counts: tuple[int, int]) -> list[bytes]:
        def choice(text: str) -> dict:
            return {"delta": {"content": text}} if is_chat else {"text": text}

        chunks = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}] * is_chat
        chunks += [{"choices": [choice(text)]} for text in self.pieces]
        usage = {
            "prompt_tokens": counts[0],
            "completion_tokens": counts[1],
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        chunks.append({"choices": [], "usage": usage})
        lines = [b"data: " + json.dumps(chunk).encode() for chunk in chunks]
        return [b": a comment\r\n\r\n", *(x + b"\r\n\r\n" for x in [*lines, b"data: [DONE]"])]


def _cut(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()
