"""Go's text/template syntax: source to a tree of nodes.

The subset that chat templates use: text, pipelines, variables, if, with, range, break, continue,
comments and trim marks. Named templates (define, template, block) are refused by name.

Not here: what a node does (go_template.py).
Source: https://pkg.go.dev/text/template
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from localllm.errors import BadRequest

MAX_SOURCE_LENGTH = 1 << 18
MAX_DEPTH = 60
KEYWORDS = ("if", "with", "range", "else", "end", "break", "continue")
REFUSED_KEYWORDS = ("define", "template", "block")
BRANCHES = ("if", "with", "range")
COMMENT = re.compile(r"\{\{(-\s+)?/\*.*?\*/(\s+-)?\}\}", re.DOTALL)
OPEN = re.compile(r"\{\{(-(?=\s))?")
CLOSE = re.compile(r"(\s-)?\}\}")
TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<string>"(?:[^"\\\n]|\\.)*"|`[^`]*`)
    |(?P<char>'(?:[^'\\\n]|\\.)+')
    |(?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?))
    |(?P<field>\.[^\W\d]\w*)
    |(?P<dot>\.)
    |(?P<variable>\$\w*)
    |(?P<word>[^\W\d]\w*)
    |(?P<mark>:=|[=|(),])""",
    re.VERBOSE,
)
CONSTANTS: dict[str, Any] = {"true": True, "false": False, "nil": None}


@dataclass(frozen=True, slots=True)
class Constant:
    value: Any


@dataclass(frozen=True, slots=True)
class Dot:
    """`.`: what `range` and `with` look at."""


@dataclass(frozen=True, slots=True)
class Variable:
    name: str


@dataclass(frozen=True, slots=True)
class Function:
    """A function's name, alone or with arguments after it."""

    name: str


@dataclass(frozen=True, slots=True)
class Field:
    """`base.A.B`"""

    base: "Operand"
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pipe:
    """`$names := command | command`; `is_assignment` for `=`."""

    line: int
    commands: tuple[tuple["Operand", ...], ...]
    names: tuple[str, ...] = ()
    is_assignment: bool = False


Operand = Constant | Dot | Variable | Function | Field | Pipe


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Emit:
    """A pipeline whose value is printed, unless it sets a variable."""

    pipe: Pipe


@dataclass(frozen=True, slots=True)
class Branch:
    kind: Literal["if", "with", "range"]
    pipe: Pipe
    body: tuple["Node", ...]
    otherwise: tuple["Node", ...] = ()


@dataclass(frozen=True, slots=True)
class Jump:
    """`break` or `continue`."""

    kind: str


Node = Text | Emit | Branch | Jump


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    is_joined: bool  # no space before it


@dataclass(slots=True)
class Action:
    """What stands between braces."""

    line: int
    tokens: list[Token] = field(default_factory=list)

    @property
    def keyword(self) -> str:
        first = self.tokens[0] if self.tokens else None
        known = (*KEYWORDS, *REFUSED_KEYWORDS)
        return first.text if first and first.kind == "word" and first.text in known else ""


class TemplateError(BadRequest):
    """A Go template that cannot be read or run; the message has the line."""


def fail(line: int, reason: str) -> TemplateError:
    return TemplateError(f"template error: line {line}: {reason}")


def parse(source: str) -> tuple[Node, ...]:
    """The nodes of a template. Raises TemplateError."""
    if len(source) > MAX_SOURCE_LENGTH:
        raise TemplateError(f"template error: the template has {len(source)} characters")
    return _Parser(list(_items(source))).parse()


def _items(source: str) -> Iterator[str | Action]:
    """Texts, trimmed as the marks say, and actions."""
    at, trims_left = 0, False
    while True:
        start = source.find("{{", at)
        end = len(source) if start < 0 else start
        opened = None if start < 0 else OPEN.match(source, start)
        text = source[at:end].lstrip() if trims_left else source[at:end]
        if opened is not None and opened[1]:
            text = text.rstrip()
        if text:
            yield text
        if opened is None:
            return
        line = source.count("\n", 0, start) + 1
        comment = COMMENT.match(source, start)
        if comment is not None:
            at, trims_left = comment.end(), bool(comment[2])
            continue
        action = Action(line)
        at, trims_left = _read_action(source, opened.end(), action)
        if not action.tokens:
            raise fail(line, "an empty action")
        yield action


def _read_action(source: str, at: int, action: Action) -> tuple[int, bool]:
    """Fill in the tokens; (where the text goes on, whether it is trimmed there)."""
    is_joined = False
    while True:
        close = CLOSE.match(source, at)
        if close is not None:
            return close.end(), close[1] is not None
        token = TOKEN.match(source, at)
        if token is None:
            found = source[at : at + 10].split("\n")[0]
            raise fail(action.line, f"unexpected {found!r}" if found else "unclosed action")
        at = token.end()
        kind = str(token.lastgroup)
        if kind != "space":
            action.tokens.append(Token(kind, token[0], is_joined))
        # Go's comments end with their action; a `-` before the braces needs its space.
        is_joined = kind != "space"
        if kind == "space" and source.startswith("-}}", at):
            return at + 3, True


class _Parser:
    def __init__(self, items: list[str | Action]) -> None:
        self.items = items
        self.at = 0
        self.loops = 0

    def parse(self) -> tuple[Node, ...]:
        nodes, end = self._nodes(0)
        if end is not None:
            raise fail(end.line, f"unexpected {{{{{end.keyword}}}}}")
        return nodes

    def _nodes(self, depth: int) -> tuple[tuple[Node, ...], Action | None]:
        """Nodes up to an `else` or `end`, and that."""
        nodes: list[Node] = []
        while self.at < len(self.items):
            item = self.items[self.at]
            self.at += 1
            if isinstance(item, str):
                nodes.append(Text(item))
                continue
            keyword = item.keyword
            if keyword in ("else", "end"):
                return tuple(nodes), item
            nodes.append(self._node(item, keyword, depth))
        return tuple(nodes), None

    def _node(self, item: Action, keyword: str, depth: int) -> Node:
        if keyword in REFUSED_KEYWORDS:
            raise fail(item.line, f"{keyword} is not supported")
        if keyword in ("break", "continue"):
            if not self.loops:
                raise fail(item.line, f"{keyword} outside of a range")
            return Jump(keyword)
        if keyword in BRANCHES:
            return self._branch(item, item.tokens[1:], keyword, depth + 1)
        return Emit(_Expression(item.line, item.tokens).pipe())

    def _branch(self, item: Action, tokens: list[Token], keyword: str, depth: int) -> Branch:
        if depth > MAX_DEPTH:
            raise fail(item.line, "nested too deeply")
        pipe = _Expression(item.line, tokens).pipe(is_range=keyword == "range")
        self.loops += keyword == "range"
        body, end = self._nodes(depth)
        self.loops -= keyword == "range"
        otherwise: tuple[Node, ...] = ()
        if end is not None and end.keyword == "else":
            rest = end.tokens[1:]
            if rest and rest[0].text in ("if", "with"):
                # `else if` shares the `end` of the first.
                otherwise = (self._branch(end, rest[1:], rest[0].text, depth + 1),)
                return self._made(keyword, pipe, body, otherwise)
            if rest:
                raise fail(end.line, f"unexpected {rest[0].text!r} after else")
            otherwise, end = self._nodes(depth)
        if end is None or end.keyword != "end":
            raise fail(item.line, f"{keyword} has no end")
        return self._made(keyword, pipe, body, otherwise)

    def _made(
        self, keyword: str, pipe: Pipe, body: tuple[Node, ...], otherwise: tuple[Node, ...]
    ) -> Branch:
        kind: Literal["if", "with", "range"] = (
            "if" if keyword == "if" else "with" if keyword == "with" else "range"
        )
        return Branch(kind, pipe, body, otherwise)


class _Expression:
    """The pipeline in one action."""

    def __init__(self, line: int, tokens: list[Token]) -> None:
        self.line = line
        self.tokens = tokens
        self.at = 0

    def _peek(self, offset: int = 0) -> Token | None:
        at = self.at + offset
        return self.tokens[at] if at < len(self.tokens) else None

    def _is_mark(self, *texts: str, offset: int = 0) -> bool:
        token = self._peek(offset)
        return token is not None and token.kind == "mark" and token.text in texts

    def pipe(self, *, is_range: bool = False) -> Pipe:
        """The whole action."""
        names, is_assignment = self._names(is_range)
        found = self._pipe(0)
        token = self._peek()
        if token is not None:
            raise fail(self.line, f"unexpected {token.text!r}")
        return Pipe(self.line, found.commands, names, is_assignment)

    def _names(self, is_range: bool) -> tuple[tuple[str, ...], bool]:
        first = self._peek()
        if first is None or first.kind != "variable":
            return (), False
        names: tuple[str, ...] = (first.text,)
        width = 1
        second = self._peek(2)
        if is_range and self._is_mark(",", offset=1) and second and second.kind == "variable":
            names, width = (first.text, second.text), 3
        if not self._is_mark(":=", "=", offset=width):
            return (), False
        is_assignment = self._is_mark("=", offset=width)
        self.at += width + 1
        return names, is_assignment

    def _pipe(self, depth: int) -> Pipe:
        if depth > MAX_DEPTH:
            raise fail(self.line, "nested too deeply")
        commands = [self._command(depth)]
        while self._is_mark("|"):
            self.at += 1
            commands.append(self._command(depth))
        for command in commands[1:]:
            if not isinstance(command[0], Function):
                raise fail(self.line, "only a function can take a pipeline's value")
        return Pipe(self.line, tuple(commands))

    def _command(self, depth: int) -> tuple[Operand, ...]:
        operands: list[Operand] = []
        while self._peek() is not None and not self._is_mark("|", ")"):
            operands.append(self._operand(depth))
        if not operands:
            raise fail(self.line, "a value is missing")
        if len(operands) > 1 and not isinstance(operands[0], Function):
            raise fail(self.line, "only functions take arguments")
        return tuple(operands)

    def _operand(self, depth: int) -> Operand:
        token = self._peek()
        assert token is not None
        if token.kind == "field":
            return self._fields(Dot())
        self.at += 1
        if token.kind == "dot":
            return Dot()
        if token.kind == "variable":
            return self._fields(Variable(token.text))
        if token.kind == "word":
            if token.text in CONSTANTS:
                return Constant(CONSTANTS[token.text])
            return Function(token.text)
        if token.kind in ("string", "char", "number"):
            return Constant(self._constant(token))
        if token.text != "(":
            raise fail(self.line, f"unexpected {token.text!r}")
        inner = self._pipe(depth + 1)
        if not self._is_mark(")"):
            raise fail(self.line, "unclosed parenthesis")
        self.at += 1
        return self._fields(inner)

    def _fields(self, base: Operand) -> Operand:
        names: list[str] = []
        while (token := self._peek()) is not None and token.kind == "field":
            if not token.is_joined and (names or not isinstance(base, Dot)):
                break
            names.append(token.text[1:])
            self.at += 1
        return Field(base, tuple(names)) if names else base

    def _constant(self, token: Token) -> Any:
        if token.text[0] == "`":
            return token.text[1:-1]
        try:
            value = ast.literal_eval(token.text)
        except (ValueError, SyntaxError):
            raise fail(self.line, f"{token.text} is no constant") from None
        return ord(value) if token.kind == "char" and len(value) == 1 else value
