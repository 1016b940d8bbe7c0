"""`/v1`: OpenAI's bodies to our requests, our ends to OpenAI's objects, errors in OpenAI's shape.

Not here: how vectors are made (embedding.py), models (catalog.py).
"""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.errors import BadRequest, LocalLLMError
from localllm.messages import Delta, Embed, Statistics
from localllm.server.body import ANY, INT, STRING, Shape, read_body
from localllm.server.embed import answer, num_ctx_of, texts_of, vectors_of
from localllm.server.respond import Chunk, error_body, failure, status_of
from localllm.server.serving import TURN_FIELDS, turn
from localllm.server.state import state_of
from localllm.server.work import Job

EMBEDDINGS = Shape(
    "EmbedRequest",
    {
        **{"model": STRING, "input": ANY, "dimensions": INT, "encoding_format": STRING},
        **TURN_FIELDS,
    },
)
ENCODINGS = ("float", "base64")
ERROR_TYPES = {400: "invalid_request_error", 404: "not_found_error"}

Handler = Callable[[Request], Awaitable[Response]]


def error_object(error: Exception) -> Chunk:
    """An error as OpenAI's clients expect it."""
    kind = ERROR_TYPES.get(status_of(error), "api_error")
    message = error_body(error)["error"]
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def with_errors(handler: Handler) -> Handler:
    """A handler whose own errors have OpenAI's shape."""

    @wraps(handler)
    async def run(request: Request) -> Response:
        try:
            return await handler(request)
        except LocalLLMError as error:
            return failure(error, error_object(error))

    return run


@with_errors
async def embeddings(request: Request) -> Response:
    """POST /v1/embeddings."""
    fields = await read_body(request, EMBEDDINGS)
    given = fields.get("input")
    # Unlike Ollama's own route this one has a vector for an empty text.
    texts = [given] if isinstance(given, str) else texts_of(given or [])
    if not texts:
        raise BadRequest("invalid input")
    encoding = fields.get("encoding_format", "float").lower()
    if encoding not in ENCODINGS:
        raise BadRequest(
            f"Invalid value for 'encoding_format' = {fields['encoding_format']}. "
            "Supported values: ['float', 'base64']."
        )
    model = fields.get("model", "")
    if not model:
        raise BadRequest("model is required")
    state = state_of(request)
    resolved = state.resolve(request, model)
    ask = Embed(
        0,
        texts,
        num_ctx=num_ctx_of(resolved),
        dimensions=fields.get("dimensions", 0),
        **turn(request, fields),
    )

    def reply(delta: Delta | None, _: float) -> Chunk:
        assert delta is not None
        assert delta.vectors is not None
        values: list[Any] = delta.vectors if encoding == "base64" else vectors_of(delta)
        count = (delta.statistics or Statistics()).prompt_tokens
        data = [{"object": "embedding", "embedding": v, "index": i} for i, v in enumerate(values)]
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": model, "usage": usage}

    return answer(request, Job(resolved.target, None, ask), reply, error_of=error_object)
