"""Messages as chat templates expect them, from the forms that clients send.

Ollama's and OpenAI's fields differ a little and templates were written for transformers' form:
content is a text, arguments of tool calls are mappings, earlier thinking is `reasoning_content`,
a tool message has a `name`.

Not here: bodies of requests (server/), what a template does with the messages (template.py).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.errors import BadRequest

MAX_DEPTH = 50
TEXT_PARTS = ("text", "input_text", "output_text")


def prepared(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Deep copies of the messages in the form that templates read.

    Raises BadRequest for a message without a role, or with content that is no text.
    """
    found = [_prepared(index, message) for index, message in enumerate(messages)]
    names = {
        str(call["id"]): call["function"]["name"]
        for message in found
        for call in message.get("tool_calls", ())
        if call.get("id")
    }
    for message in found:
        name = names.get(str(message.get("tool_call_id")))
        if name is not None and "name" not in message:
            message["name"] = message["tool_name"] = name
    return found


def _prepared(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"messages[{index}] is no object")
    found = {key: copied(value) for key, value in message.items() if value is not None}
    if not isinstance(found.get("role"), str) or not found["role"]:
        raise BadRequest(f"messages[{index}] has no role")
    found["content"] = _text(index, found.get("content"))
    if "thinking" in found:
        found.setdefault("reasoning_content", found["thinking"])
    if "tool_name" in found:
        found.setdefault("name", found["tool_name"])
    calls = found.get("tool_calls")
    if calls:
        found["tool_calls"] = [_call(index, call) for call in calls]
    else:
        found.pop("tool_calls", None)
    return found


def _text(index: int, content: Any) -> str:
    """Content as one text; its parts are joined in order."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"messages[{index}].content is neither a text nor a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise BadRequest(f"messages[{index}].content has a part of type {kind!r}, not text")
        texts.append(part["text"])
    return "".join(texts)


def _call(index: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest(f"messages[{index}].tool_calls has a call without a function name")
    arguments = copied(function.get("arguments") or {})
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        # What is no JSON object is shown to the model as it was sent.
        arguments = parsed if isinstance(parsed, dict) else arguments
    kept = {key: copied(value) for key, value in call.items() if key != "function"}
    return {
        "type": "function",
        **kept,
        "function": {**copied(function), "arguments": arguments},
    }


def copied(value: Any, depth: int = 0) -> Any:
    """A deep copy of JSON values: a template may change what it gets."""
    if depth > MAX_DEPTH:
        raise BadRequest(f"messages or tools are nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        return {key: copied(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied(item, depth + 1) for item in value]
    return value
