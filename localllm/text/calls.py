"""Tool calls as models write them: the text of one call, or list of calls, to name and arguments.

A reader gets the text between a dialect's marks and returns None for what is no call. Models write
anything, so nothing here raises.

Not here: the marks and streams (dialects.py, parsing.py).
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_PYTHON_LENGTH = 1 << 16
NAME_KEYS = ("name", "tool_name", "function")
ARGUMENT_KEYS = ("arguments", "parameters", "args")
INVOKE = re.compile(r"<(?:\w+:)?invoke name=\"")
PARAMETER_NAME = re.compile(r"<(?:\w+:)?parameter name=\"")
PARAMETER_END = re.compile(r"</(?:\w+:)?parameter>")
CALL_BEGIN = re.compile(r"\s*call:([^{\s]+)\s*")
PRINTED = re.compile(r"print\((.*)\)", re.DOTALL)
BARE_END = re.compile(r"[,}\]]")
KEY = re.compile(r"\s*([^:{}\[\],]+?)\s*:")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


# The tools of a request: name -> schema of each argument.
Known = Mapping[str, Mapping[str, Any]]
# (name that stood before the body or None, body, tools) -> calls, or None if it is no call.
Reader = Callable[[str | None, str, Known], list[ToolCall] | None]


def known_tools(tools: Sequence[Any] | None) -> dict[str, Mapping[str, Any]]:
    """The argument schemas of a request's tools by name."""
    known = {}
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        known[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return known


def read_json(name: str | None, body: str, known: Known) -> list[ToolCall] | None:
    """A JSON object or list: calls, or with a name before it the arguments of one call."""
    value = parsed_json(body)
    if name is not None:
        return [ToolCall(name, value)] if isinstance(value, dict) else None
    items = value if isinstance(value, list) else [value]
    calls = [_call(item, known) for item in items]
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def read_known_json(name: str | None, body: str, known: Known) -> list[ToolCall] | None:
    """Calls that no mark sets apart from an answer in JSON: only those of tools that exist."""
    if body.startswith("["):
        return _only_known(read_python(None, body, known), known)
    return _only_known(read_json(None, body, known), known)


def read_fenced(name: str | None, body: str, known: Known) -> list[ToolCall] | None:
    """A call in a code block, in JSON or in Python, where it may be printed: of a known tool."""
    printed = PRINTED.fullmatch(body.strip())
    return _only_known(read_python(None, printed[1] if printed else body, known), known)


def _only_known(calls: list[ToolCall] | None, known: Known) -> list[ToolCall] | None:
    return calls if calls and all(call.name in known for call in calls) else None


def parsed_json(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _call(item: Any, known: Known) -> ToolCall | None:
    """One call as a JSON object in any of the forms that models use."""
    if not isinstance(item, dict):
        return None
    inner = item.get("function")
    if isinstance(inner, dict):
        return _call(inner, known)
    name = next((item[k] for k in NAME_KEYS if isinstance(item.get(k), str)), None)
    if name is None:
        only = next(iter(item.items())) if len(item) == 1 else ("", None)
        return ToolCall(*only) if only[0] in known and isinstance(only[1], dict) else None
    arguments: Any = next((item[k] for k in ARGUMENT_KEYS if k in item), {})
    if isinstance(arguments, str):
        arguments = parsed_json(arguments)
    return ToolCall(name, arguments or {}) if isinstance(arguments or {}, dict) else None


def read_python(name: str | None, body: str, known: Known) -> list[ToolCall] | None:
    """Python calls with keyword arguments: `[f(a="v"), g()]`, or one a line."""
    if len(body) > MAX_PYTHON_LENGTH:
        return None
    text = body.strip()
    try:
        parsed = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return read_json(None, text, known)
    nodes: list[ast.expr] = []
    for statement in parsed.body:
        if not isinstance(statement, ast.Expr):
            return None
        value = statement.value
        nodes += value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    if not nodes or not all(isinstance(node, ast.Call) for node in nodes):
        return read_json(None, text, known)
    calls = [_python_call(node) for node in nodes if isinstance(node, ast.Call)]
    found = [call for call in calls if call is not None]
    return found if len(found) == len(nodes) else None


def _python_call(node: ast.Call) -> ToolCall | None:
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return None
    try:
        name = ast.unparse(node.func)
        values = {str(k.arg): _python_value(k.value) for k in node.keywords}
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None
    return ToolCall(name, values)


def _python_value(node: ast.expr) -> Any:
    """A literal; JSON's spelling of constants is understood too."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    value = ast.literal_eval(node)
    json.dumps(value)
    return value


def read_function_tags(name: str | None, body: str, known: Known) -> list[ToolCall] | None:
    """Qwen3-Coder's `<function=f><parameter=k>v</parameter></function>`."""
    calls = []
    for part in body.split("<function=")[1:]:
        function, _, rest = part.partition(">")
        schemas = known.get(function, {})
        values = {}
        for pair in rest.partition("</function>")[0].split("<parameter=")[1:]:
            key, _, value = pair.partition(">")
            value = value.partition("</parameter>")[0].removeprefix("\n").removesuffix("\n")
            values[key] = typed(value, schemas.get(key))
        calls.append(ToolCall(function, values))
    return calls or None


def read_invoke_tags(name: str | None, body: str, known: Known) -> list[ToolCall] | None:
    """MiniMax's `<invoke name="f"><parameter name="k">v</parameter></invoke>`."""
    calls = []
    for part in INVOKE.split(body)[1:]:
        function, _, rest = part.partition('"')
        schemas = known.get(function, {})
        values = {}
        for pair in PARAMETER_NAME.split(rest)[1:]:
            key, _, value = pair.partition('"')
            value = PARAMETER_END.split(value.partition(">")[2], maxsplit=1)[0]
            values[key] = typed(value, schemas.get(key))
        calls.append(ToolCall(function, values))
    return calls or None


def read_argument_tags(name: str | None, body: str, known: Known) -> list[ToolCall] | None:
    """GLM's `f<arg_key>k</arg_key><arg_value>v</arg_value>`."""
    function, *parts = body.split("<arg_key>")
    function = function.strip()
    if not function or (not parts and not function.isidentifier()):
        return None
    schemas = known.get(function, {})
    values = {}
    for part in parts:
        key, _, rest = part.partition("</arg_key>")
        key = key.strip()
        value = rest.partition("<arg_value>")[2].partition("</arg_value>")[0]
        values[key] = typed(value, schemas.get(key))
    return [ToolCall(function, values)]


def typed(text: str, schema: Any) -> Any:
    """An argument's text as the type that the tool's schema gives it; a text where none fits."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    stripped = text.strip()
    value = parsed_json({"True": "true", "False": "false", "None": "null"}.get(stripped, stripped))
    if value is None:
        return None if stripped in ("null", "None") and kinds - {"string"} else text
    if not kinds:
        return value
    return value if kinds & _kinds_of(value) else text


def _kinds(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    found = set(kind) if isinstance(kind, list) else {kind} if isinstance(kind, str) else set()
    for option in schema.get("anyOf") or ():
        found |= _kinds(option)
    return found


def _kinds_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}


def read_gemma(quote: str) -> Reader:
    """Gemma's `call:f{k:<escape>v<escape>,n:1}` with texts between `quote`s."""

    def read(name: str | None, body: str, known: Known) -> list[ToolCall] | None:
        begin = CALL_BEGIN.match(body)
        if begin is None:
            return None
        try:
            value, _ = _gemma_value(body, begin.end(), quote)
        except (ValueError, RecursionError):
            return None
        return [ToolCall(begin[1], value)] if isinstance(value, dict) else None

    return read


def _gemma_value(text: str, at: int, quote: str) -> tuple[Any, int]:
    """(the value that begins at `at`, where it ends). Raises ValueError."""
    at += len(text[at:]) - len(text[at:].lstrip())
    if text.startswith(quote, at):
        end = text.index(quote, at + len(quote))
        return text[at + len(quote) : end], end + len(quote)
    if text[at : at + 1] in ("{", "["):
        return _gemma_items(text, at + 1, quote, is_object=text[at] == "{")
    end_mark = BARE_END.search(text, at)
    if end_mark is None:
        raise ValueError("a value without an end")
    word = text[at : end_mark.start()].strip()
    try:
        return json.loads(word), end_mark.start()
    except ValueError:
        return word, end_mark.start()


def _gemma_items(text: str, at: int, quote: str, *, is_object: bool) -> tuple[Any, int]:
    keys: list[str] = []
    values: list[Any] = []
    while True:
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n,"))
        if text[at : at + 1] == ("}" if is_object else "]"):
            return (dict(zip(keys, values)) if is_object else values), at + 1
        if is_object:
            key = KEY.match(text, at)
            if key is None:
                raise ValueError("a key is missing")
            keys.append(key[1].removeprefix(quote).removesuffix(quote))
            at = key.end()
        value, at = _gemma_value(text, at, quote)
        values.append(value)
