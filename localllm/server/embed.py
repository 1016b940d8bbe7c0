"""`/api/embed` and `/api/embeddings`: texts to vectors in Ollama's two ways.

The newer route takes a list, cuts what is too long unless told not to (and says how much in
`dropped_tokens`), and gives vectors of length one. The older one takes a single text, refuses what
is too long, and gives the model's own values.

Not here: how vectors are made (embedding.py).
"""

import sys
import time
from array import array
from base64 import b64decode
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.catalog import Resolved
from localllm.errors import BadRequest, Cancelled, ModelNotFound
from localllm.messages import Delta, Embed, Statistics
from localllm.options import check_options, merged
from localllm.server.body import ANY, BOOL, INT, OBJECT, STRING, Shape, read_body
from localllm.server.respond import Answer, Chunk, ErrorOf, error_body, json_response
from localllm.server.serving import TURN_FIELDS, keep_alive_of, turn
from localllm.server.state import state_of
from localllm.server.times import nanoseconds
from localllm.server.work import Job, Started, run

EMBED = Shape(
    "EmbedRequest",
    {
        **{"model": STRING, "input": ANY, "truncate": BOOL, "dimensions": INT},
        **{"keep_alive": ANY, "options": OBJECT},
        **TURN_FIELDS,
    },
)
EMBEDDINGS = Shape(
    "EmbeddingRequest",
    {"model": STRING, "prompt": STRING, "keep_alive": ANY, "options": OBJECT, **TURN_FIELDS},
)

Fields = dict[str, Any]
Vectors = list[list[float]]


async def embed(request: Request) -> Response:
    """POST /api/embed."""
    arrived = time.perf_counter()
    fields = await read_body(request, EMBED)
    texts = texts_of(fields.get("input", ""))
    model = fields.get("model", "")
    if not model:
        raise ModelNotFound("model '' not found")
    resolved = resolve(request, model)
    keep_alive = keep_alive_of(fields)
    if not texts and keep_alive == 0:
        state_of(request).daemon.unload(resolved.target.key)
        return json_response({"model": model, "embeddings": []})
    ask = Embed(
        0,
        texts,
        truncate=fields.get("truncate", True),
        num_ctx=num_ctx_of(resolved, fields.get("options")),
        dimensions=fields.get("dimensions", 0),
        **turn(request, fields),
    )
    job = Job(resolved.target, keep_alive, ask if texts else None)

    def reply(delta: Delta | None, load_seconds: float) -> Chunk:
        if delta is None:
            return {"model": model, "embeddings": []}
        stats = delta.statistics or Statistics()
        costs = {
            "total_duration": nanoseconds(time.perf_counter() - arrived),
            "load_duration": nanoseconds(load_seconds),
            "prompt_eval_count": stats.prompt_tokens,
            "dropped_tokens": delta.dropped_tokens,
        }
        known = {name: value for name, value in costs.items() if value}
        return {"model": model, "embeddings": vectors_of(delta), **known}

    return answer(request, job, reply)


async def embeddings(request: Request) -> Response:
    """POST /api/embeddings."""
    fields = await read_body(request, EMBEDDINGS)
    model, prompt = fields.get("model", ""), fields.get("prompt", "")
    if not model:
        raise BadRequest("model is required")
    resolved = resolve(request, model)
    keep_alive = keep_alive_of(fields)
    if not prompt and keep_alive == 0:
        state_of(request).daemon.unload(resolved.target.key)
        return json_response({"embedding": []})
    num_ctx = num_ctx_of(resolved, fields.get("options"))
    how = turn(request, fields)
    ask = Embed(0, [prompt], truncate=False, num_ctx=num_ctx, normalise=False, **how)

    def reply(delta: Delta | None, _: float) -> Chunk:
        return {"embedding": [] if delta is None else vectors_of(delta)[0]}

    return answer(request, Job(resolved.target, keep_alive, ask if prompt else None), reply)


def texts_of(value: object) -> list[str]:
    """The texts of an `input`; an empty string is none. Raises BadRequest."""
    if isinstance(value, str):
        return [value] if value else []
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return value
    raise BadRequest("invalid input type")


def resolve(request: Request, model: str) -> Resolved:
    """The model of a request. Raises BadRequest, or ModelNotFound as these routes put it."""
    try:
        return state_of(request).resolve(request, model)
    except ModelNotFound:
        raise ModelNotFound(f'model "{model}" not found, try pulling it first') from None


def num_ctx_of(resolved: Resolved, options: Fields | None = None) -> int | None:
    """The context that a request's options or the model's own parameters ask for."""
    options = check_options(merged(resolved.recipe.parameters, options))
    num_ctx: int | None = options.get("num_ctx")
    return num_ctx


def vectors_of(delta: Delta) -> Vectors:
    """The vectors as numbers."""
    rows = [array("f", b64decode(text)) for text in delta.vectors or ()]
    if sys.byteorder == "big":
        for row in rows:
            row.byteswap()
    return [row.tolist() for row in rows]


Reply = Callable[[Delta | None, float], Chunk]


def answer(request: Request, job: Job, reply: Reply, error_of: ErrorOf = error_body) -> Answer:
    """One object, made of the end of the job (None: the model was only loaded) and the time that
    the load took.
    """
    return Answer(_objects(request, job, reply), merge=_only, error_of=error_of)


async def _objects(request: Request, job: Job, reply: Reply) -> AsyncIterator[Chunk]:
    load_seconds = 0.0
    async with aclosing(run(state_of(request).daemon, job)) as events:  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, Started):
                load_seconds = event.account.load_seconds
                if job.request is None:
                    yield reply(None, load_seconds)
            elif isinstance(event, Delta) and event.done_reason is not None:
                if event.vectors is None:
                    raise Cancelled("the request was cancelled")
                yield reply(event, load_seconds)


def _only(chunks: Iterable[Chunk]) -> Chunk:
    (chunk,) = chunks
    return chunk
