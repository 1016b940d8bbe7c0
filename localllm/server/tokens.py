"""`/api/tokenize` and `/api/detokenize`: texts to the model's token ids and back. Ours, not Ollama's.

Not here: tokenizers (text/), prompts of chats (a debug render shows those).
"""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import BadRequest
from localllm.messages import Delta, Generate
from localllm.server.body import ANY, STRING, Kind, Shape, read_body
from localllm.server.respond import Answer, Chunk
from localllm.server.serving import keep_alive_of
from localllm.server.state import state_of
from localllm.server.work import Job, run

_SHARED = {"model": STRING, "keep_alive": ANY}
TOKENIZE = Shape("TokenizeRequest", {**_SHARED, "content": STRING})
DETOKENIZE = Shape("DetokenizeRequest", {**_SHARED, "tokens": Kind((list,), "[]int")})

MAX_CONTENT = 1 << 20  # characters; a text keeps the model's other requests waiting

Reply = Callable[[Delta], Chunk]


async def tokenize(request: Request) -> Response:
    """POST /api/tokenize: the ids of a text as those of a raw prompt, a BOS the model wants
    included.
    """
    fields = await read_body(request, TOKENIZE)
    if len(fields.get("content", "")) > MAX_CONTENT:
        raise BadRequest(f"content has more than {MAX_CONTENT} characters; send it in parts")
    ask = Generate(0, prompt=fields.get("content", ""), want_tokens=True, render_only=True)
    return _answer(request, fields, ask, lambda delta: {"tokens": delta.tokens or []})


async def detokenize(request: Request) -> Response:
    """POST /api/detokenize: the text of ids; bytes that are no character become U+FFFD."""
    fields = await read_body(request, DETOKENIZE)
    tokens = fields.get("tokens", [])
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise BadRequest("tokens must be a list of token ids")
    ask = Generate(0, context=tokens, render_only=True)
    return _answer(request, fields, ask, lambda delta: {"content": delta.rendered or ""})


def _answer(request: Request, fields: dict[str, Any], ask: Generate, reply: Reply) -> Response:
    model = fields.get("model", "")
    if not model:
        raise BadRequest("model is required")
    state = state_of(request)
    resolved = state.resolve(request, model)
    keep_alive = keep_alive_of(fields)
    job = Job(resolved.target, keep_alive, ask)

    async def chunks() -> AsyncIterator[Chunk]:
        async with aclosing(run(state.daemon, job)) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, Delta) and event.rendered is not None:
                    yield {"model": model, **reply(event)}

    return Answer(chunks(), merge=_only)


def _only(chunks: Iterable[Chunk]) -> Chunk:
    (chunk,) = chunks
    return chunk
