"""`/api/generate` and `/api/chat`: Ollama's bodies to our request, our deltas to Ollama's chunks.

Not here: models as such (models.py), connections (respond.py).
"""

import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.catalog import Resolved
from localllm.cost import Account
from localllm.errors import BadRequest, ModelNotFound
from localllm.messages import Delta, Generate, Loading, Statistics
from localllm.options import check_options, merged
from localllm.server.body import ANY, ARRAY, BOOL, INT, OBJECT, STRING, Kind, Shape, read_body
from localllm.server.images import settle_images
from localllm.server.respond import Answer, Chunk, json_response, to_json
from localllm.server.serving import SERVING_FIELDS, keep_alive_of, serving
from localllm.server.state import state_of
from localllm.server.times import nanoseconds, now_text
from localllm.server.work import Job, Started, run

PROGRESS_HEADER = "x-localllm-progress"
MAX_TOP_LOGPROBS = 20
SMALLEST_CONTEXT = 4
THINK_LEVELS = ("high", "medium", "low", "max")

_SHARED: Mapping[str, Kind] = {
    **{"model": STRING, "stream": BOOL, "format": ANY, "keep_alive": ANY, "options": OBJECT},
    **{"think": ANY, "truncate": BOOL, "shift": BOOL, "logprobs": BOOL, "top_logprobs": INT},
    **{"_debug_render_only": BOOL, "cost_report": BOOL},
    **SERVING_FIELDS,
}
GENERATE = Shape(
    "GenerateRequest",
    {
        **_SHARED,
        **{"prompt": STRING, "suffix": STRING, "system": STRING, "template": STRING},
        **{"context": Kind((list,), "[]int"), "raw": BOOL, "images": ARRAY},
    },
)
CHAT = Shape("ChatRequest", {**_SHARED, "messages": Kind((list,), "[]api.Message"), "tools": ARRAY})
MESSAGE = Shape(
    "ChatRequest.messages",
    {
        **{"role": STRING, "content": STRING, "thinking": STRING, "images": ARRAY},
        **{"tool_calls": ARRAY, "tool_name": STRING, "tool_call_id": STRING},
    },
)

Fields = dict[str, Any]
Piece = Callable[[Delta], Chunk]
NOTHING = Delta(0)


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed body: the job, and what its reply needs to know."""

    model: str
    job: Job
    stream: bool
    arrived: float
    is_raw: bool = False
    num_images: int = 0
    wants_cost: bool = False


async def generate(request: Request) -> Response:
    """POST /api/generate."""
    arrived = time.perf_counter()
    fields = await read_body(request, GENERATE)
    _check_logprobs(fields)
    model = fields.get("model", "")
    if not model:
        raise ModelNotFound("model '' not found")
    resolved = state_of(request).resolve(request, model)
    keep_alive = keep_alive_of(fields)
    prompt = fields.get("prompt", "")
    if not prompt and keep_alive == 0:
        return _unloaded(request, resolved, model, _text_piece)
    await _check_generate(request, fields, resolved, model)
    given, num_images = _generate_input(fields, resolved)
    ask = _request(request, fields, resolved, given) if prompt else None
    job = Job(resolved.target, keep_alive, ask, _wants_progress(request))
    asked = Asked(
        model,
        job,
        fields.get("stream", True),
        arrived,
        is_raw=fields.get("raw", False),
        num_images=num_images,
        wants_cost=fields.get("cost_report", False),
    )
    return _answer(request, asked, _text_piece)


async def chat(request: Request) -> Response:
    """POST /api/chat."""
    arrived = time.perf_counter()
    fields = await read_body(request, CHAT)
    _check_logprobs(fields)
    model = fields.get("model", "")
    if not model:
        raise BadRequest("model is required")
    resolved = state_of(request).resolve(request, model)
    keep_alive = keep_alive_of(fields)
    messages = [_message(item) for item in fields.get("messages", [])]
    if not messages and keep_alive == 0:
        return _unloaded(request, resolved, model, _message_piece)
    await _check_shared(request, fields, resolved, model, "chat")
    if fields.get("tools"):
        await _check_capability(request, resolved, "tools")
    messages, num_images = settle_images(model, messages, is_render=_is_render(fields))
    given = {"messages": _with_recipe(resolved, messages), "tools": fields.get("tools") or None}
    ask = _request(request, fields, resolved, given) if messages else None
    job = Job(resolved.target, keep_alive, ask, _wants_progress(request))
    asked = Asked(
        model,
        job,
        fields.get("stream", True),
        arrived,
        num_images=num_images,
        wants_cost=fields.get("cost_report", False),
    )
    return _answer(request, asked, _message_piece)


def _is_render(fields: Fields) -> bool:
    return bool(fields.get("_debug_render_only"))


def _wants_progress(request: Request) -> bool:
    return PROGRESS_HEADER in request.headers


def _full_name(resolved: Resolved) -> str:
    if resolved.stored is None:
        return resolved.target.name
    host, namespace, model, tag = resolved.stored.name.parts
    return f"{host}/{namespace}/{model}:{tag}"


def _check_logprobs(fields: Fields) -> None:
    if not 0 <= fields.get("top_logprobs", 0) <= MAX_TOP_LOGPROBS:
        raise BadRequest("top_logprobs must be between 0 and 20")


async def _check_capability(request: Request, resolved: Resolved, name: str) -> None:
    if name not in await state_of(request).catalog.capabilities(resolved):
        raise BadRequest(f"{_full_name(resolved)} does not support {name}")


async def _check_shared(
    request: Request, fields: Fields, resolved: Resolved, model: str, verb: str
) -> None:
    """Refuse what this model or this build cannot do, rather than drop it."""
    think = fields.get("think")
    if isinstance(think, str) and think not in THINK_LEVELS:
        raise BadRequest(
            f'invalid think value: "{think}" '
            '(must be "high", "medium", "low", "max", true, or false)'
        )
    if think is not None and not isinstance(think, bool | str):
        raise BadRequest(
            'think must be a boolean or string ("high", "medium", "low", "max", true, or false)'
        )
    if think and "thinking" not in await state_of(request).catalog.capabilities(resolved):
        raise BadRequest(f'"{model}" does not support thinking')
    capabilities = resolved.stored.config.get("capabilities", []) if resolved.stored else []
    if "embedding" in capabilities:
        raise BadRequest(f'"{model}" does not support {verb}')
    wanted = fields.get("format", "")
    if wanted not in ("", "json") and not isinstance(wanted, dict):
        raise BadRequest(
            f'invalid format: {to_json(wanted)}; expected "json" or a valid JSON Schema object'
        )


async def _check_generate(request: Request, fields: Fields, resolved: Resolved, model: str) -> None:
    conflicts = ("template", "system", "context")
    if fields.get("raw") and any(fields.get(name) for name in conflicts):
        raise BadRequest("raw mode does not support template, system, or context")
    await _check_shared(request, fields, resolved, model, "generate")
    if fields.get("suffix") and not fields.get("template"):
        await _check_capability(request, resolved, "insert")


def _generate_input(fields: Fields, resolved: Resolved) -> tuple[Fields, int]:
    """The fields of `Generate` that say what to continue, and how many images came with it."""
    user = {"role": "user", "content": fields.get("prompt", ""), "images": fields.get("images")}
    (user,), num_images = settle_images(fields["model"], [user], is_render=_is_render(fields))
    if fields.get("raw"):
        return {"prompt": user["content"]}, num_images
    context = fields.get("context")
    if context is not None and not all(type(token) is int and token >= 0 for token in context):
        raise BadRequest("context must be a list of token ids")
    system = fields.get("system") or resolved.recipe.system
    messages = [{"role": "system", "content": system}] if system else []
    if context is None:
        messages += [dict(message) for message in resolved.recipe.messages or ()]
    given = {"messages": [*messages, user], "context": context or [], "want_tokens": True}
    return {**given, "suffix": fields.get("suffix", "")}, num_images


def _message(value: object) -> Fields:
    """One message of a chat, checked; only what was given is passed on to the template."""
    if not isinstance(value, dict):
        raise BadRequest(
            "json: cannot unmarshal a message into Go struct field ChatRequest.messages "
            "of type api.Message"
        )
    message = MESSAGE.check(value)
    role = message.pop("role", "").lower()
    return {"role": role, "content": message.pop("content", ""), **message}


def _with_recipe(resolved: Resolved, messages: list[Fields]) -> list[Fields]:
    """The model's own messages and system text in front of those of the request."""
    recipe = resolved.recipe
    whole = [dict(message) for message in recipe.messages or ()] + messages
    if recipe.system and messages and messages[0]["role"] != "system":
        whole.insert(0, {"role": "system", "content": recipe.system})
    return whole


def _request(request: Request, fields: Fields, resolved: Resolved, given: Fields) -> Generate:
    options = check_options(merged(resolved.recipe.parameters, fields.get("options")))
    stop = options.pop("stop", [])
    if options.get("num_predict") == 0:
        # Ollama takes it for no limit.
        del options["num_predict"]
    if "num_ctx" in options:
        options["num_ctx"] = max(options["num_ctx"], SMALLEST_CONTEXT)
    wants_logprobs = fields.get("logprobs", False)
    return Generate(
        request_id=0,
        template=fields.get("template") or resolved.recipe.template or "",
        is_final_template=bool(fields.get("template")),
        think=fields.get("think"),
        format=None if fields.get("format") == "" else fields.get("format"),
        options=options,
        stop=stop,
        logprobs=fields.get("top_logprobs", 0) if wants_logprobs else None,
        truncate=fields.get("truncate", True),
        shift=fields.get("shift", True),
        render_only=_is_render(fields),
        **serving(request, fields),
        **given,
    )


def _text_piece(delta: Delta) -> Chunk:
    return {"response": delta.text, **_extras(delta)}


def _message_piece(delta: Delta) -> Chunk:
    return {"message": {"role": "assistant", "content": delta.text, **_extras(delta)}}


def _extras(delta: Delta) -> Chunk:
    """What is left out when there is none."""
    extras: Chunk = {"thinking": delta.thinking, "tool_calls": delta.tool_calls}
    return {name: value for name, value in extras.items() if value}


def _unloaded(request: Request, resolved: Resolved, model: str, piece: Piece) -> Response:
    state_of(request).daemon.unload(resolved.target.key)
    return json_response(_end(model, piece, "unload"))


def _end(model: str, piece: Piece, reason: str) -> Chunk:
    head = {"model": model, "created_at": now_text()}
    return {**head, **piece(NOTHING), "done": True, "done_reason": reason}


def _answer(request: Request, asked: Asked, piece: Piece) -> Response:
    chunks = _chunks(request, asked, piece)
    eager = asked.job.wants_progress and asked.stream
    return Answer(chunks, merge=None if asked.stream else _merged, eager=eager)


async def _chunks(request: Request, asked: Asked, piece: Piece) -> AsyncIterator[Chunk]:
    """Ollama's chunks of a job."""
    account: Account | None = None
    dropped = 0
    num_calls = 0
    async with aclosing(run(state_of(request).daemon, asked.job)) as events:  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, Loading):
                yield _progress(event.stage, event.done, event.total)
            elif isinstance(event, Started):
                account = event.account
                if asked.job.request is None:
                    yield _end(asked.model, piece, "load")
            elif event.rendered is not None:
                info: Chunk = {"rendered_template": event.rendered}
                if asked.num_images:
                    info["image_count"] = asked.num_images
                head = {"model": asked.model, "created_at": now_text()}
                yield {**head, **piece(NOTHING), "done": False, "_debug_info": info}
            else:
                dropped += event.dropped_messages
                for call in event.tool_calls:
                    call["function"] = {"index": num_calls, **call["function"]}
                    num_calls += 1
                for chunk in _delta_chunks(event, asked, piece):
                    yield chunk
                if event.done_reason is not None:
                    yield _final(event, asked, piece, account, dropped)


def _progress(stage: str, done: int, total: int) -> Chunk:
    return {"progress": {"stage": stage, "done": done, "total": total}}


def _waiting(position: int) -> Chunk:
    stage = f"waiting, number {position} in the queue"
    return {"progress": {"stage": stage, "done": 0, "total": 0, "queue_position": position}}


def _delta_chunks(delta: Delta, asked: Asked, piece: Piece) -> Iterable[Chunk]:
    if delta.text or delta.thinking or delta.tool_calls or delta.logprobs:
        head = {"model": asked.model, "created_at": now_text()}
        chunk = {**head, **piece(delta), "done": False}
        yield {**chunk, "logprobs": delta.logprobs} if delta.logprobs else chunk
    elif delta.prompt_total and asked.job.wants_progress:
        yield _progress("reading the prompt", delta.prompt_done, delta.prompt_total)
    elif delta.queue_position:
        yield _waiting(delta.queue_position)


def _final(
    delta: Delta, asked: Asked, piece: Piece, account: Account | None, dropped: int
) -> Chunk:
    """The last object: why it ended and what it cost; zero values are left out."""
    assert account is not None
    stats = delta.statistics or Statistics()
    values: Chunk = {
        "total_duration": nanoseconds(time.perf_counter() - asked.arrived),
        "load_duration": nanoseconds(account.load_seconds),
        "prompt_eval_count": stats.prompt_tokens,
        "prompt_eval_duration": nanoseconds(stats.prompt_seconds),
        "eval_count": stats.generated_tokens,
        "eval_duration": nanoseconds(stats.decode_seconds),
        "context": None if asked.is_raw else delta.tokens,
        "prompt_cached_count": stats.cached_tokens,
        "draft_count": stats.drafted_tokens,
        "draft_accepted_count": stats.accepted_tokens,
        "dropped_messages": dropped,
        "cost": account.report() if asked.wants_cost else None,
    }
    reason = delta.done_reason or "stop"
    known = {name: value for name, value in values.items() if value}
    return {**_end(asked.model, piece, reason), **known}


def _merged(chunks: Iterable[Chunk]) -> Chunk:
    """One object in place of a stream: all that was said, the last chunk's statistics."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Any] = []
    logprobs: list[Any] = []
    merged: Chunk = {}
    for chunk in chunks:
        if "progress" in chunk:
            continue
        said = chunk.get("message", chunk)
        texts.append(said["response"] if "response" in said else said["content"])
        thoughts.append(said.get("thinking", ""))
        calls += said.get("tool_calls", [])
        logprobs += chunk.get("logprobs", [])
        merged = chunk
    piece = _text_piece if "response" in merged else _message_piece
    whole = Delta(0, "".join(texts), "".join(thoughts), calls)
    merged = {**merged, **piece(whole)}
    return {**merged, "logprobs": logprobs} if logprobs else merged
