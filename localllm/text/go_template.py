"""Go's text/template: running a parsed template over Python values.

A struct is a `Record`, a map a dict, a slice a list. Every node and value costs a step and all text
is counted (sandbox.py's budget), so any template ends. Differences from Go, none of which a chat
template wants: a missing value prints nothing, maps print as JSON and keep their order, `len` of a
text counts characters.

Not here: syntax (go_parser.py), which values a chat gives (go_prompt.py).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from typing import Any

from localllm.text.go_parser import (
    Branch,
    Constant,
    Dot,
    Emit,
    Field,
    Function,
    Jump,
    Node,
    Operand,
    Pipe,
    TemplateError,
    Text,
    Variable,
    fail,
    parse,
)
from localllm.text.sandbox import Budget, TooCostly

VERB = re.compile(r"%([a-zA-Z%])")
TYPESCRIPT = {"integer": "number", "array": "any[]", "object": "Record<string, any>"}


class Record:
    """A Go struct: fields by name, and what it is in JSON, which is also how it prints."""

    __slots__ = ("fields", "source")

    def __init__(self, fields: Mapping[str, Any], source: Any) -> None:
        self.fields = fields
        self.source = source


class JsonList(list[Any]):
    """A slice that prints as JSON."""


class Wrong(Exception):
    """A value does not fit; the line is known further out."""


def to_json(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return _plain(value.source)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def printed(value: Any) -> str:
    """A value as text."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if value.is_integer() else repr(value)
    if isinstance(value, (Record, JsonList, dict)):
        return to_json(value)
    if isinstance(value, list):
        return "[" + " ".join(printed(item) for item in value) + "]"
    return str(value)


def is_true(value: Any) -> bool:
    return isinstance(value, Record) or bool(value)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "other"


def _equal(first: Any, *others: Any) -> bool:
    if not others:
        raise Wrong("eq: a value is missing")
    for other in others:
        if first is None or other is None:
            if first is other:
                return True
            continue
        if _kind(first) != _kind(other) or _kind(first) == "other":
            raise Wrong("eq: these values cannot be compared")
        if first == other:
            return True
    return False


def _unequal(first: Any, second: Any) -> bool:
    return not _equal(first, second)


def _compare(name: str, test: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def compare(first: Any, second: Any) -> bool:
        if _kind(first) != _kind(second) or _kind(first) in ("bool", "other"):
            raise Wrong(f"{name}: these values cannot be compared")
        return test(first, second)

    return compare


def _length(value: Any) -> int:
    if not isinstance(value, (str, list, dict)):
        raise Wrong("len: this value has no length")
    return len(value)


def _index(value: Any, *keys: Any) -> Any:
    for key in keys:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, (list, str)):
            if _kind(key) != "number" or not 0 <= key < len(value):
                raise Wrong(f"index: {printed(key)} is out of range")
            value = value[int(key)]
        else:
            raise Wrong("index: this value has no items")
    return value


def _slice(value: Any, *bounds: Any) -> Any:
    if not isinstance(value, (list, str)) or len(bounds) > 2:
        raise Wrong("slice: a list or text and up to two bounds are wanted")
    start, end = [*bounds, 0, len(value)][:2] if not bounds else (bounds[0], len(value))
    if len(bounds) == 2:
        end = bounds[1]
    if _kind(start) != "number" or _kind(end) != "number" or not 0 <= start <= end <= len(value):
        raise Wrong("slice: the bounds are out of range")
    part = value[int(start) : int(end)]
    return JsonList(part) if isinstance(value, JsonList) else part


def _print(*values: Any) -> str:
    text = ""
    for i, value in enumerate(values):
        is_spaced = i > 0 and not isinstance(value, str) and not isinstance(values[i - 1], str)
        text += (" " if is_spaced else "") + printed(value)
    return text


def _print_line(*values: Any) -> str:
    return " ".join(printed(value) for value in values) + "\n"


def _printf(form: Any, *values: Any) -> str:
    """Plain verbs only: widths and flags are no chat template's business."""
    rest = list(values)

    def verb(match: re.Match[str]) -> str:
        if match[1] == "%":
            return "%"
        if match[1] not in "svdqtf" or not rest:
            raise Wrong(f"printf: {match[0]} is not supported or has no value")
        value = rest.pop(0)
        if match[1] == "f":
            return f"{value:f}" if _kind(value) == "number" else printed(value)
        return json.dumps(value, ensure_ascii=False) if match[1] == "q" else printed(value)

    return VERB.sub(verb, printed(form))


def _typescript(value: Any) -> str:
    """A property's type in TypeScript's words."""
    schema = _plain(value)
    if not isinstance(schema, dict):
        return "any"
    if isinstance(schema.get("anyOf"), list):
        return " | ".join(_typescript(option) for option in schema["anyOf"])
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    return " | ".join(TYPESCRIPT.get(k, k) if isinstance(k, str) and k else "any" for k in kinds)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "not": lambda value: not is_true(value),
    "eq": _equal,
    "ne": _unequal,
    "lt": _compare("lt", lambda a, b: bool(a < b)),
    "le": _compare("le", lambda a, b: bool(a <= b)),
    "gt": _compare("gt", lambda a, b: bool(a > b)),
    "ge": _compare("ge", lambda a, b: bool(a >= b)),
    "len": _length,
    "index": _index,
    "slice": _slice,
    "print": _print,
    "println": _print_line,
    "printf": _printf,
    "json": to_json,
    "currentDate": lambda: date.today().isoformat(),
    "yesterdayDate": lambda: (date.today() - timedelta(days=1)).isoformat(),
    "toTypeScriptType": _typescript,
}
SHORT_CIRCUITS = ("and", "or")


class GoTemplate:
    """A compiled template. Raises TemplateError, with the line, here and when it runs."""

    def __init__(self, source: str) -> None:
        self.nodes = parse(source)
        for operand, line in operands(self.nodes):
            if isinstance(operand, Function) and operand.name not in (*FUNCTIONS, *SHORT_CIRCUITS):
                raise fail(line, f'function "{operand.name}" not defined')

    def run(self, data: Mapping[str, Any], nodes: Sequence[Node] | None = None) -> str:
        """The text for `data`."""
        running = _Run(data)
        try:
            running.run(self.nodes if nodes is None else nodes, data)
        except (TooCostly, RecursionError) as error:
            raise TemplateError(f"template error: {error}") from None
        return "".join(running.out)

    @property
    def fields(self) -> frozenset[str]:
        """All names of fields that it reads anywhere."""
        found = (o.names for o, _ in operands(self.nodes) if isinstance(o, Field))
        return frozenset(name for names in found for name in names)


def operands(nodes: Sequence[Node]) -> Iterator[tuple[Operand, int]]:
    """Every operand in the order of the source, with its line."""
    for node in nodes:
        if isinstance(node, (Emit, Branch)):
            yield from _operands(node.pipe)
        if isinstance(node, Branch):
            yield from operands(node.body)
            yield from operands(node.otherwise)


def _operands(pipe: Pipe) -> Iterator[tuple[Operand, int]]:
    for command in pipe.commands:
        for operand in command:
            yield operand, pipe.line
            inner = operand.base if isinstance(operand, Field) else operand
            if inner is not operand:
                yield inner, pipe.line
            if isinstance(inner, Pipe):
                yield from _operands(inner)


class _Run:
    """One execution: variables, output, what may still be spent."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.out: list[str] = []
        self.budget = Budget()
        self.variables: list[tuple[str, Any]] = [("$", data)]

    def run(self, nodes: Sequence[Node], dot: Any) -> str:
        """Run nodes in a scope of their own; the jump that ended them, or nothing."""
        mark = len(self.variables)
        jump = ""
        for node in nodes:
            self.budget.step()
            if isinstance(node, Text):
                self._emit(node.text)
            elif isinstance(node, Emit):
                value = self._pipe(node.pipe, dot)
                if not node.pipe.names:
                    self._emit(printed(value))
            elif isinstance(node, Jump):
                jump = node.kind
            else:
                jump = self._branch(node, dot)
            if jump:
                break
        del self.variables[mark:]
        return jump

    def _emit(self, text: str) -> None:
        self.budget.pay(len(text))
        self.out.append(text)

    def _branch(self, node: Branch, dot: Any) -> str:
        mark = len(self.variables)
        if node.kind == "range":
            jump = self._range(node, dot)
        else:
            value = self._pipe(node.pipe, dot)
            inner = value if node.kind == "with" and is_true(value) else dot
            jump = self.run(node.body if is_true(value) else node.otherwise, inner)
        del self.variables[mark:]
        return jump

    def _range(self, node: Branch, dot: Any) -> str:
        pipe = node.pipe
        value = self._evaluate(pipe, dot)
        pairs = self._pairs(value, pipe.line)
        if not pairs:
            return self.run(node.otherwise, dot)
        mark = len(self.variables)
        for key, item in pairs:
            self.budget.step()
            # One name gets the item, two get index and item.
            for name, given in zip(pipe.names, [key, item][-len(pipe.names) :]):
                self._set(name, given, pipe)
            jump = self.run(node.body, item)
            del self.variables[mark:]
            if jump == "break":
                break
        return ""

    def _pairs(self, value: Any, line: int) -> list[tuple[Any, Any]]:
        if value is None:
            return []
        if isinstance(value, bool) or not isinstance(value, (list, dict, int)):
            raise fail(line, "range: this value has no items")
        if isinstance(value, int):
            self.budget.pay(max(value, 0))
            return [(i, i) for i in range(value)]
        self.budget.pay(len(value))
        return list(value.items()) if isinstance(value, dict) else list(enumerate(value))

    def _set(self, name: str, value: Any, pipe: Pipe) -> None:
        if not pipe.is_assignment:
            self.variables.append((name, value))
            return
        for i in range(len(self.variables) - 1, -1, -1):
            if self.variables[i][0] == name:
                self.variables[i] = (name, value)
                return
        raise fail(pipe.line, f"undefined variable {name}")

    def _pipe(self, pipe: Pipe, dot: Any) -> Any:
        value = self._evaluate(pipe, dot)
        for name in pipe.names:
            self._set(name, value, pipe)
        return value

    def _evaluate(self, pipe: Pipe, dot: Any) -> Any:
        """The value of a pipeline: each command's goes to the next as its last argument."""
        try:
            value = self._command(pipe.commands[0], dot, ())
            for command in pipe.commands[1:]:
                value = self._command(command, dot, (value,))
        except Wrong as error:
            raise fail(pipe.line, str(error)) from None
        return value

    def _command(self, command: tuple[Operand, ...], dot: Any, last: tuple[Any, ...]) -> Any:
        first = command[0]
        if not isinstance(first, Function):
            return self._operand(first, dot)
        if first.name in SHORT_CIRCUITS:
            return self._short_circuit(first.name, command[1:], dot, last)
        arguments = [*(self._operand(operand, dot) for operand in command[1:]), *last]
        self.budget.pay(sum(len(a) for a in arguments if isinstance(a, (str, list, dict))))
        try:
            value = FUNCTIONS[first.name](*arguments)
        except TypeError:
            raise Wrong(f"{first.name}: wrong number or kind of arguments") from None
        return self.budget.keep(value)

    def _short_circuit(
        self, name: str, rest: tuple[Operand, ...], dot: Any, last: tuple[Any, ...]
    ) -> Any:
        if not rest and not last:
            raise Wrong(f"{name}: a value is missing")
        value: Any = None
        for operand in rest:
            value = self._operand(operand, dot)
            if is_true(value) == (name == "or"):
                return value
        return last[0] if last else value

    def _operand(self, operand: Operand, dot: Any) -> Any:
        self.budget.step()
        if isinstance(operand, Constant):
            return operand.value
        if isinstance(operand, Dot):
            return dot
        if isinstance(operand, Variable):
            return self._variable(operand.name)
        if isinstance(operand, Function):
            return self._command((operand,), dot, ())
        if isinstance(operand, Pipe):
            return self._evaluate(operand, dot)
        value = self._operand(operand.base, dot)
        for name in operand.names:
            value = _field(value, name)
        return value

    def _variable(self, name: str) -> Any:
        for known, value in reversed(self.variables):
            if known == name:
                return value
        raise Wrong(f"undefined variable {name}")


def _field(value: Any, name: str) -> Any:
    if value is None:
        return None
    if isinstance(value, Record):
        if name not in value.fields:
            raise Wrong(f"there is no field {name} here")
        return value.fields[name]
    if isinstance(value, Mapping):
        return value.get(name)
    raise Wrong(f"a {type(value).__name__} has no field {name}")
