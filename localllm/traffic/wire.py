"""The dialects of servers: one row each, from a conversation to a body and from a line to an event.

Not here: connections (stream.py).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localllm.errors import BadRequest

Body = dict[str, Any]
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `ignore_eos`: the answer goes on to `max_tokens` whatever the model says."""

    model: str
    messages: tuple[Message, ...]
    max_tokens: int
    ignore_eos: bool = False

    @property
    def text(self) -> str:
        """The conversation as one text, for APIs that only continue one."""
        return "\n".join(message["content"] for message in self.messages)


@dataclass(slots=True)
class Event:
    """What one line of a stream says. Counts are None where the server does not tell."""

    text: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    is_last: bool = False
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a kind of server is spoken to."""

    name: str
    path: str
    body: Callable[[Ask], Body]
    read: Callable[[bytes], Event | None]


def _ollama_chat(ask: Ask) -> Body:
    return {"model": ask.model, "messages": ask.messages, "stream": True, "options": _options(ask)}


def _ollama_generate(ask: Ask) -> Body:
    head = {"model": ask.model, "prompt": ask.text, "raw": True, "stream": True}
    return {**head, "options": _options(ask)}


def _options(ask: Ask) -> Body:
    options: Body = {"num_predict": ask.max_tokens, "temperature": 0}
    return {**options, "ignore_eog": True} if ask.ignore_eos else options


def _openai_chat(ask: Ask) -> Body:
    return {"model": ask.model, "messages": ask.messages, **_openai_options(ask)}


def _openai_completions(ask: Ask) -> Body:
    return {"model": ask.model, "prompt": ask.text, **_openai_options(ask)}


def _openai_options(ask: Ask) -> Body:
    options: Body = {
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return {**options, "ignore_eos": True} if ask.ignore_eos else options


def read_ollama(line: bytes) -> Event | None:
    """The event of a line of JSON; None for an empty line."""
    if not line.strip():
        return None
    chunk = json.loads(line)
    if "error" in chunk:
        return Event(error=_error_text(chunk["error"]))
    said = chunk.get("message") or chunk
    text = said.get("content") or said.get("response") or said.get("thinking") or ""
    if not text and said.get("tool_calls"):
        text = json.dumps(said["tool_calls"])
    event = Event(text)
    if chunk.get("done"):
        event.is_last = True
        event.prompt_tokens = chunk.get("prompt_eval_count")
        event.cached_tokens = chunk.get("prompt_cached_count")
        event.output_tokens = chunk.get("eval_count")
    return event


def read_openai(line: bytes) -> Event | None:
    """The event of a line of server-sent events; None for lines that say nothing."""
    name, _, data = line.partition(b":")
    data = data.strip()
    if name != b"data":
        # A server that answers with plain JSON in place of a stream tells an error.
        return Event(error=_plain_error(line)) if line.startswith(b"{") else None
    if data == b"[DONE]":
        return Event(is_last=True)
    chunk = json.loads(data)
    if "error" in chunk:
        return Event(error=_error_text(chunk["error"]))
    event = Event(_openai_text(chunk))
    usage = chunk.get("usage")
    if usage:
        event.prompt_tokens = usage.get("prompt_tokens")
        event.output_tokens = usage.get("completion_tokens")
        event.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return event


def _openai_text(chunk: Body) -> str:
    for choice in chunk.get("choices") or ():
        said = choice.get("delta") or choice
        for name in ("content", "text", "reasoning_content", "reasoning"):
            if said.get(name):
                return str(said[name])
        if said.get("tool_calls"):
            return json.dumps(said["tool_calls"])
    return ""


def _plain_error(line: bytes) -> str:
    try:
        return _error_text(json.loads(line)["error"])
    except (ValueError, KeyError, TypeError):
        return line.decode(errors="replace")


def _error_text(error: object) -> str:
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(error)


def error_text(data: bytes) -> str:
    """What the body of a failed response says, in one line."""
    line = _plain_error(data.strip())
    return " ".join(line.split())[:200]


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect("ollama", "/api/chat", _ollama_chat, read_ollama),
        Dialect("ollama-generate", "/api/generate", _ollama_generate, read_ollama),
        Dialect("openai", "/v1/chat/completions", _openai_chat, read_openai),
        Dialect("openai-completions", "/v1/completions", _openai_completions, read_openai),
    )
}


def dialect_of(name: str) -> Dialect:
    """Raises BadRequest for a name that is none."""
    if name not in DIALECTS:
        raise BadRequest(f"--api is one of {', '.join(DIALECTS)}, not {name!r}")
    return DIALECTS[name]
