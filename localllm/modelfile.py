"""Modelfiles: the recipe of a model as text, read and written as Ollama does.

Not here: what becomes of a recipe (store.py, server/models.py).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from localllm.errors import BadRequest
from localllm.options import BOOLEANS, FLOATS, INTEGERS, MEANINGLESS
from localllm.store import Recipe

COMMANDS = (
    *("from", "license", "template", "system", "adapter", "draft", "renderer", "parser"),
    *("parameter", "message", "requires"),
)
CONFIG_COMMANDS = ("renderer", "parser", "requires")
ROLES = ("system", "user", "assistant")
DEPRECATED = frozenset({"penalize_newline", "low_vram", "f16_kv", "logits_all", "vocab_only"})
_WORD = re.compile(r"\s*([^\s\"]+)\s*")


@dataclass(frozen=True, slots=True)
class Modelfile:
    """What a Modelfile says. `parameters` have the types of `options`."""

    base: str
    system: str | None = None
    template: str | None = None
    adapter: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    licenses: list[str] = field(default_factory=list)
    config: dict[str, str] = field(default_factory=dict)
    unsupported: list[str] = field(default_factory=list)


def decode(data: bytes) -> str:
    """A Modelfile's text: UTF-8, or UTF-16 with a byte order mark."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8-sig", errors="replace")


def parse_modelfile(text: str) -> Modelfile:
    """Read a Modelfile. Raises BadRequest with the number of the offending line."""
    base = None
    texts: dict[str, str] = {}
    parameters: dict[str, Any] = {}
    messages: list[dict[str, str]] = []
    licenses: list[str] = []
    config: dict[str, str] = {}
    unsupported: list[str] = []
    for number, command, value in _instructions(text):
        if command == "from":
            if base is not None:
                raise BadRequest(f"(line {number}): only one FROM is supported")
            base = value
        elif command == "parameter":
            _add_parameter(parameters, *_pair(number, value))
        elif command == "message":
            messages.append(_message(number, value))
        elif command == "license":
            licenses.append(value)
        elif command in ("system", "template", "adapter"):
            texts[command] = value
        elif command in CONFIG_COMMANDS:
            config[command] = value
        else:
            unsupported.append(command.upper())
    if not base:
        raise BadRequest("no FROM line")
    return Modelfile(
        base,
        texts.get("system"),
        texts.get("template"),
        texts.get("adapter"),
        parameters,
        messages,
        licenses,
        config,
        unsupported,
    )


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """(line number, command, unquoted value) of every instruction."""
    found = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        start, line = number + 1, lines[number].strip()
        number += 1
        if not line or line.startswith("#"):
            continue
        command, _, value = line.partition(" ")
        command, tab, rest = command.partition("\t")
        value = rest + " " + value if tab else value
        if command.lower() not in COMMANDS:
            known = ", ".join(f'"{name}"' for name in COMMANDS[:-1])
            raise BadRequest(f'(line {start}): command must be one of {known}, or "{COMMANDS[-1]}"')
        value = value.strip()
        while _is_open(value):
            if number == len(lines):
                raise BadRequest(f"(line {start}): unexpected EOF: the quotes are not closed")
            value += "\n" + lines[number]
            number += 1
        found.append((start, command.lower(), _with_quotes_removed(command.lower(), value)))
    return found


def _is_open(value: str) -> bool:
    """Whether a value goes on in the next line because a quote at its beginning is not closed."""
    if value.startswith('"""'):
        return value.find('"""', 3) < 0
    head, _, rest = value.partition(" ")
    if rest.lstrip().startswith('"""') and head.isidentifier():
        return _is_open(rest.lstrip())
    return False


def _with_quotes_removed(command: str, value: str) -> str:
    return value if command in ("parameter", "message") else _unquoted(value.strip())


def _unquoted(value: str) -> str:
    if value.startswith('"""'):
        return value[3:].rstrip().removesuffix('"""')
    if len(value) > 1 and value[0] == value[-1] == '"':
        return value[1:-1]
    return value


def _pair(number: int, value: str) -> tuple[str, str]:
    """Name and value of a PARAMETER or MESSAGE."""
    word = _WORD.match(value)
    if word is None or not value[word.end() :]:
        raise BadRequest(f"(line {number}): unexpected EOF: {value}")
    return word[1], _unquoted(value[word.end() :].strip())


def _message(number: int, value: str) -> dict[str, str]:
    role, content = _pair(number, value)
    if role not in ROLES:
        raise BadRequest(
            f'(line {number}): message role must be one of "system", "user", or "assistant"'
        )
    return {"role": role, "content": content}


def _add_parameter(parameters: dict[str, Any], name: str, text: str) -> None:
    value = parse_parameter(name, text)
    if name == "stop":
        parameters.setdefault("stop", []).extend(value)
    elif name not in DEPRECATED:
        parameters[name] = value


def parse_parameter(name: str, text: str) -> Any:
    """The typed value of a parameter given as text; `stop` is a list of one."""
    kinds = (("int", INTEGERS, int), ("float", FLOATS, float))
    for kind, names, convert in kinds:
        if name in names:
            try:
                return convert(text)
            except ValueError:
                raise BadRequest(f"invalid {kind} value [{text}]") from None
    if name in BOOLEANS:
        if text.lower() not in ("1", "t", "true", "0", "f", "false"):
            raise BadRequest(f"invalid bool value [{text}]")
        return text.lower() in ("1", "t", "true")
    if name == "stop":
        return [text]
    if name in MEANINGLESS or name in DEPRECATED:
        return text
    raise BadRequest(f"unknown parameter '{name}'")


def parameter_lines(parameters: Mapping[str, Any]) -> list[str]:
    """`name value` for every value, aligned as `ollama show` does."""
    lines = []
    for name, value in parameters.items():
        for item in value if isinstance(value, list) else [value]:
            shown = json.dumps(item, ensure_ascii=False) if isinstance(item, str) else _plain(item)
            lines.append(f"{name:<30} {shown}")
    return lines


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def write_modelfile(
    name: str,
    path: str,
    recipe: Recipe,
    config: Mapping[str, Any] | None = None,
    adapter: str | None = None,
) -> str:
    """The Modelfile that makes a model: of `name`, with its file at `path` and its recipe.

    adapter  path of the adapter that is applied to it
    """
    lines = [
        '# Modelfile generated by "localllm show"',
        "# To build a new Modelfile based on this, replace FROM with:",
        f"# FROM {name}",
        "",
        f"FROM {path}",
    ]
    if adapter:
        lines.append(f"ADAPTER {adapter}")
    if recipe.template:
        lines.append(f'TEMPLATE """{recipe.template}"""')
    if recipe.system:
        lines.append(f'SYSTEM """{recipe.system}"""')
    known = config or {}
    lines += [f"{key.upper()} {known[key]}" for key in CONFIG_COMMANDS if known.get(key)]
    lines += [f"PARAMETER {' '.join(x.split(None, 1))}" for x in parameter_lines(recipe.parameters)]
    lines += [f'LICENSE """{text}"""' for text in recipe.licenses]
    lines += [f'MESSAGE {m["role"]} """{m["content"]}"""' for m in recipe.messages or ()]
    return "\n".join(lines) + "\n"
