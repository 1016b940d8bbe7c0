"""Endpoints about models as such: tags, ps, show, create, copy, delete, blobs."""

import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.catalog import GivenAdapter, Resolved, details_of
from localllm.daemon import Daemon
from localllm.errors import BadRequest, LocalLLMError, ModelNotFound
from localllm.loaded import LoadedModel, Target
from localllm.modelfile import parameter_lines, write_modelfile
from localllm.names import ModelName
from localllm.options import check_options
from localllm.origin import config_changes
from localllm.server.body import ANY, ARRAY, BOOL, OBJECT, STRING, Shape, read_body
from localllm.server.pull import pull_chunks
from localllm.server.respond import Answer, Chunk, json_response
from localllm.server.state import state_of
from localllm.server.times import expiry_text, local_text
from localllm.store import Recipe, StoredModel, parse_digest
from localllm.text.dialects import is_go
from localllm.text.go_parser import parse

SHOW = Shape(
    "ShowRequest",
    {
        **{"model": STRING, "name": STRING, "verbose": BOOL, "options": OBJECT},
        **{"system": STRING, "template": STRING},
    },
)
COPY = Shape("CopyRequest", {"source": STRING, "destination": STRING})
DELETE = Shape("DeleteRequest", {"model": STRING, "name": STRING})
CREATE = Shape(
    "CreateRequest",
    {
        **{"model": STRING, "name": STRING, "from": STRING, "files": OBJECT, "stream": BOOL},
        **{"system": STRING, "template": STRING, "license": ANY, "parameters": OBJECT},
        **{"messages": ARRAY, "adapters": OBJECT, "quantize": STRING, "quantization": STRING},
        **{"renderer": STRING, "parser": STRING, "requires": STRING, "info": OBJECT},
        **{"remote_host": STRING, "draft_files": OBJECT, "draft_quantize": STRING},
    },
)
NOT_SUPPORTED = (
    *("quantize", "quantization", "remote_host", "draft_files"),
    "draft_quantize",
)

log = logging.getLogger("localllm.server")


async def tags(request: Request) -> Response:
    """GET /api/tags."""
    models = state_of(request).catalog.store.models()
    return json_response({"models": [_tag(model) for model in models]})


def _tag(model: StoredModel) -> Chunk:
    config = model.config
    lengths = {
        key: config[key] for key in ("context_length", "embedding_length") if config.get(key)
    }
    return {
        "name": str(model.name),
        "model": str(model.name),
        "modified_at": local_text(model.modified_at),
        "size": model.size,
        "digest": model.digest,
        "details": {**details_of(config), **lengths},
        "capabilities": config.get("capabilities", ["completion"]),
    }


async def ps(request: Request) -> Response:
    """GET /api/ps."""
    daemon = state_of(request).daemon
    return json_response({"models": [_running(model, daemon) for model in daemon.loaded()]})


def _running(model: LoadedModel, daemon: Daemon) -> Chunk:
    """Ollama's object, and what else an operator asks: queue and use of the KV pool."""
    target = model.target
    return {
        "name": target.name,
        "model": target.name,
        "size": model.memory_bytes,
        "digest": target.digest,
        "details": target.details,
        "expires_at": expiry_text(model.seconds_left()),
        "size_vram": 0,
        "context_length": model.context_length,
        "is_loading": not model.is_ready,
        "num_running": model.num_running,
        "queue_length": daemon.num_waiting(target.key),
        "kv_usage": round(model.kv_usage, 4),
    }


async def show(request: Request) -> Response:
    """POST /api/show."""
    fields = await read_body(request, SHOW)
    model = fields.get("model") or fields.get("name") or ""
    if not model:
        raise BadRequest("model is required")
    state = state_of(request)
    try:
        resolved = state.resolve(request, model)
    except ModelNotFound:
        raise ModelNotFound(f"model '{ModelName.parse(model)}' not found") from None
    found = await state.catalog.describe(resolved.target.path, verbose=fields.get("verbose", False))
    recipe = _shown_recipe(resolved.recipe, fields)
    config = resolved.stored.config if resolved.stored else {}
    optional = {
        "license": "\n".join(recipe.licenses),
        "parameters": "\n".join(parameter_lines(recipe.parameters)),
        "template": recipe.template or found.template,
        "system": recipe.system,
        "messages": recipe.messages,
        **{key: config.get(key) for key in ("renderer", "parser", "requires")},
    }
    known = {**found.config, **{key: value for key, value in config.items() if value}}
    target = resolved.target
    adapter = None if target.adapter is None else str(target.adapter)
    return json_response(
        {
            **{key: value for key, value in optional.items() if value},
            "modelfile": write_modelfile(target.name, str(target.path), recipe, config, adapter),
            "details": details_of(known),
            "model_info": _model_info(request, found.model_info, model),
            "tensors": found.tensors,
            **await _adapter_info(request, target),
            "capabilities": await state.catalog.capabilities(resolved),
            "modified_at": local_text(_modified_at(resolved)),
        }
    )


async def _adapter_info(request: Request, target: Target) -> Chunk:
    """What is known of the model's adapter, where it has one."""
    if target.adapter is None:
        return {}
    found = await state_of(request).catalog.describe(target.adapter)
    info = {key: _finite(value) for key, value in found.model_info.items()}
    return {"adapter_info": {**info, "digest": f"sha256:{target.adapter_digest}"}}


def _shown_recipe(recipe: Recipe, fields: dict[str, Any]) -> Recipe:
    """The recipe as it would be with what the request says."""
    return replace(
        recipe,
        system=fields.get("system") or recipe.system,
        template=fields.get("template") or recipe.template,
        parameters={**recipe.parameters, **check_options(fields.get("options", {}))},
    )


def _modified_at(resolved: Resolved) -> float:
    if resolved.stored is not None:
        return resolved.stored.modified_at
    return resolved.target.path.stat().st_mtime


def _model_info(request: Request, info: dict[str, Any], model: str) -> dict[str, Any]:
    """Metadata as JSON can hold it; one client takes the base name for the model's name."""
    info = {key: _finite(value) for key, value in info.items()}
    if request.headers.get("user-agent", "").startswith("GitHubCopilotChat/"):
        return {**info, "general.basename": model}
    return info


def _finite(value: Any) -> Any:
    """NaN and infinities as None."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not -1e308 < value < 1e308 else value


async def copy(request: Request) -> Response:
    """POST /api/copy."""
    fields = await read_body(request, COPY)
    names = []
    for key in ("source", "destination"):
        text = fields.get(key, "")
        try:
            names.append(ModelName.parse(text))
        except BadRequest:
            raise BadRequest(f'{key} "{text}" is invalid') from None
    try:
        await state_of(request).catalog.copy(*names)
    except ModelNotFound:
        raise ModelNotFound(f'model "{fields["source"]}" not found') from None
    return Response()


async def delete(request: Request) -> Response:
    """DELETE /api/delete."""
    fields = await read_body(request, DELETE)
    text = fields.get("model") or fields.get("name") or ""
    if not text:
        raise BadRequest("model is required")
    try:
        name = ModelName.parse(text)
    except BadRequest:
        raise BadRequest(f'name "{text}" is invalid') from None
    try:
        await state_of(request).catalog.remove(name)
    except ModelNotFound:
        raise ModelNotFound(f"model '{text}' not found") from None
    state_of(request).daemon.unload_removed()
    return Response()


async def create(request: Request) -> Response:
    """POST /api/create."""
    fields = await read_body(request, CREATE)
    name = ModelName.parse(fields.get("model") or fields.get("name") or "")
    for key in NOT_SUPPORTED:
        if fields.get(key):
            raise BadRequest(f"create: {key!r} is not supported by this version")
    if not fields.get("from") and not fields.get("files"):
        raise BadRequest("neither 'from' or 'files' was specified")
    chunks = _create(request, name, fields, _recipe(fields))
    return Answer(chunks, merge=None if fields.get("stream", True) else _last)


def _last(chunks: Iterable[Chunk]) -> Chunk:
    return list(chunks)[-1]


def _recipe(fields: dict[str, Any]) -> Recipe:
    licenses = fields.get("license", [])
    if not isinstance(licenses, str | list):
        raise BadRequest("license must be a text or a list of texts")
    messages = fields.get("messages")
    if messages is not None and not all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
    ):
        raise BadRequest("messages must have a role and a content")
    template = fields.get("template")
    if template and is_go(template):
        parse(template)
    return Recipe(
        system=fields.get("system"),
        template=template,
        parameters=check_options(fields.get("parameters", {})),
        messages=messages,
        licenses=[licenses] if isinstance(licenses, str) else [str(text) for text in licenses],
        config=config_changes(fields),
    )


async def _create(
    request: Request, name: ModelName, fields: dict[str, Any], recipe: Recipe
) -> AsyncIterator[Chunk]:
    state = state_of(request)
    base = fields.get("from", "")
    adapter = await _adapter(request, fields.get("adapters") or {})
    if fields.get("files"):
        digest = _only_file(fields["files"])
        yield {"status": "parsing GGUF"}
        model = await state.catalog.create_from_blob(name, digest, recipe, adapter)
    elif base.startswith("/"):
        if not state.is_trusted(request):
            raise BadRequest(f"invalid model name: {base!r} is a path on the server's machine")
        yield {"status": "parsing GGUF"}
        model = await state.catalog.create_from_file(name, Path(base), recipe, adapter)
    else:
        try:
            model = await state.catalog.create_from_model(name, base, recipe, adapter)
        except ModelNotFound:
            async for chunk in pull_chunks(state, base):
                if chunk["status"] != "success":
                    yield chunk
            model = await state.catalog.create_from_model(name, base, recipe, adapter)
    for key in ("renderer", "parser"):
        if fields.get(key):
            yield {"status": f"the chat template of the model file serves as {key} {fields[key]}"}
    for layer in model.layers:
        yield {"status": f"using existing layer sha256:{layer.digest}"}
    yield {"status": "writing manifest"}
    yield {"status": "success"}


async def _adapter(request: Request, adapters: dict[str, Any]) -> GivenAdapter | None:
    """The one adapter: a blob, or for callers who know the secret a file of theirs by its path."""
    if not adapters:
        return None
    if len(adapters) > 1:
        raise BadRequest("only one adapter is currently supported")
    state = state_of(request)
    ((path, digest),) = adapters.items()
    if path.endswith(".safetensors"):
        raise BadRequest("create: safetensors are not supported by this version; send a GGUF file")
    if path.startswith("/") and state.is_trusted(request):
        return await state.catalog.adapter_from_file(Path(path))
    if path.startswith("/") or ".." in Path(path).parts:
        raise BadRequest("file path must be relative")
    return await state.catalog.adapter_from_blob(parse_digest(str(digest)))


def _only_file(files: dict[str, Any]) -> str:
    """The digest of the one model file."""
    for path in files:
        if path.startswith("/") or ".." in Path(path).parts:
            raise BadRequest("file path must be relative")
    if any(path.endswith(".safetensors") for path in files):
        raise BadRequest("create: safetensors are not supported by this version; send a GGUF file")
    if len(files) != 1:
        raise BadRequest("create: only a single GGUF file is supported by this version")
    return parse_digest(str(next(iter(files.values()))))


async def head_blob(request: Request) -> Response:
    """HEAD /api/blobs/:digest."""
    digest = parse_digest(request.path_params["digest"])
    found = state_of(request).catalog.store.blob_size(digest)
    return Response(status_code=404 if found is None else 200)


async def post_blob(request: Request) -> Response:
    """POST /api/blobs/:digest: the body becomes a blob."""
    store = state_of(request).catalog.store
    digest = parse_digest(request.path_params["digest"])
    if store.blob_size(digest) is not None:
        return Response(status_code=200)
    try:
        with store.receive(digest) as writer:
            async for data in request.stream():
                writer.write(data)
            writer.finish()
    except OSError as error:
        raise LocalLLMError(f"cannot store the blob: {error.strerror}") from error
    return Response(status_code=201)
