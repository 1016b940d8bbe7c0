"""POST /api/pull: what a pull tells, as Ollama's status lines; and /api/push, which is refused."""

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import BadRequest, CloudModel
from localllm.names import ModelName, is_cloud
from localllm.pull.events import Header, Status, Transfer
from localllm.pull.reference import Reference
from localllm.server.body import BOOL, STRING, Shape, read_body
from localllm.server.respond import Answer, Chunk
from localllm.server.state import State, state_of

_FIELDS = {"model": STRING, "name": STRING, "insecure": BOOL, "stream": BOOL}
PULL = Shape("PullRequest", _FIELDS)
PUSH = Shape("PushRequest", _FIELDS)


async def pull(request: Request) -> Response:
    """POST /api/pull."""
    fields = await read_body(request, PULL)
    name = fields.get("model") or fields.get("name") or ""
    if not name:
        raise BadRequest("invalid model name: a name is required")
    if is_cloud(name):
        raise CloudModel("ollama cloud is disabled: remote model is unavailable")
    Reference.parse(name)
    chunks = pull_chunks(state_of(request), name, is_insecure=fields.get("insecure", False))
    return Answer(chunks, merge=None if fields.get("stream", True) else _last)


async def push(request: Request) -> Response:
    """POST /api/push."""
    fields = await read_body(request, PUSH)
    name = fields.get("model") or fields.get("name") or ""
    if not name:
        raise BadRequest("model is required")
    ModelName.parse(name)
    raise BadRequest("push is not supported by this version: models can be pulled, not uploaded")


async def pull_chunks(
    state: State, name: str, *, is_insecure: bool = False
) -> AsyncIterator[Chunk]:
    """The lines of a pull. Closing the iterator cancels it."""
    async with aclosing(state.pulls.events(name, is_insecure=is_insecure)) as events:
        async for event in events:
            if isinstance(event, Header):
                state.compiler.start(event.path)
            else:
                yield _chunk(event)


def _chunk(event: Status | Transfer) -> Chunk:
    """One line; fields that are zero are left out. The rate is ours, and clients ignore it."""
    if isinstance(event, Status):
        return {"status": event.text}
    amounts: dict[str, Any] = {
        "total": event.total,
        "completed": event.completed,
        "bytes_per_second": round(event.bytes_per_second),
    }
    return {
        "status": f"pulling {event.digest[:12]}",
        "digest": f"sha256:{event.digest}",
        **{key: value for key, value in amounts.items() if value},
    }


def _last(chunks: Iterable[Chunk]) -> Chunk:
    return list(chunks)[-1]
