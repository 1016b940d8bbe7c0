"""A jinja2 environment for templates that may be hostile.

Promises: a template reaches nothing but its variables and the functions given here, and it stops:
every loop iteration, call, filter and operator costs a step, every text and list it makes is
counted before it is kept, and time is looked at every few steps. One operation works on at most
`MAX_LENGTH` characters, so nothing between two steps is long. No signals, no threads: it works
wherever it is called.

The dialect is that of transformers' `apply_chat_template`: trim_blocks, lstrip_blocks, loop
controls, the `generation` tag, `tojson` without HTML escapes, `raise_exception`, `strftime_now`.
`list.append` and `list.pop` are allowed in addition, because published templates need them and
the variables are copies.

Not here: which variables there are (template.py).
"""

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
MAX_SECONDS = 1.0
MAX_LENGTH = 1 << 22
MAX_TOTAL = 1 << 26
MAX_NODES = 200_000
MAX_DEPTH = 60
MAX_INT_BITS = 4096
MAX_WIDTH = 1000
# Slow on hostile text, or a source of endless text; no chat template has a use for them.
REMOVED_FILTERS = ("striptags", "urlize", "wordwrap", "random", "xmlattr")
REMOVED_GLOBALS = ("lipsum",)
# These neither compare nor spell the values inside their argument.
SHALLOW_FILTERS = frozenset(
    (
        *("attr", "count", "d", "default", "first", "items", "last", "length", "list", "map"),
        *("reject", "rejectattr", "reverse", "safe", "select", "selectattr"),
    )
)
WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4,}|\*)|\{[^{}]*(\d{5,}|\{)")


class TemplateRefusal(TemplateError):
    """The template itself refused the messages, by raise_exception."""


class TooCostly(SecurityError):
    """The template went over a limit."""


class Budget:
    """What one rendering may still spend."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS
        self.total = MAX_TOTAL
        # Of this thread: a template is not to blame for a busy machine.
        self.deadline = time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0 or (self.steps % 16 == 0 and time.thread_time() > self.deadline):
            raise TooCostly("it runs too long")

    def pay(self, length: int) -> None:
        """Take `length` characters or elements, before or after they are made."""
        self.total -= length
        if length > MAX_LENGTH or self.total < 0:
            raise TooCostly("it makes too much text")

    def keep(self, value: Any) -> Any:
        """`value`, paid for."""
        if isinstance(value, (str, bytes, list, tuple, dict, set)):
            self.pay(len(value))
        return value


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one chat template. Several threads may render at once."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            # Folding constants would run filters before there is a budget.
            optimized=False,
            finalize=self.checked,
        )
        self._local = threading.local()
        self.filters["tojson"] = to_json
        self.filters["from_json"] = json.loads
        for name in REMOVED_FILTERS:
            del self.filters[name]
        for name in REMOVED_GLOBALS:
            del self.globals[name]
        for name, function in self.filters.items():
            self.filters[name] = self._bounded(name, function)
        self.filters |= {"-step": self._step, "-check": self.checked, "-join": self._join}
        self.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}

    @property
    def budget(self) -> Budget:
        budget: Budget = self._local.budget
        return budget

    def compile_source(self, source: str) -> Template:
        """Compile a template; constants in it are computed, within a budget of their own."""
        self._local.budget = Budget()
        return self.from_string(source)

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """The text of the template. Raises whatever the template does, TooCostly among it."""
        self._local.budget = Budget()
        return self.concat(template.generate(**variables))

    def concat(self, parts: Iterable[str]) -> str:
        kept = []
        for part in parts:
            self.budget.step()
            self.budget.pay(len(part))
            kept.append(part)
        text = "".join(kept)
        self.budget.pay(len(text))
        return text

    def checked(self, value: Any) -> Any:
        """`value`, which is about to be spelled, compared or hashed: not too big, not too deep."""
        if isinstance(value, (list, tuple, dict, set, Mapping, Namespace)):
            check_size(value)
        return value

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) is list and attr in ("append", "pop"):
            return True
        return super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, slice):
            self.budget.step()
            return self.budget.keep(super().getitem(obj, argument))
        return super().getitem(obj, self.checked(argument))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.step()
        self._check_operands(operator, left, right)
        return self.budget.keep(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.step()
        if not isinstance(obj, Macro):
            for value in (*args, *kwargs.values()):
                self.checked(value)
            self._check_method(obj, args, kwargs)
        return self.budget.keep(super().call(context, obj, *args, **kwargs))

    def _check_operands(self, operator: str, left: Any, right: Any) -> None:
        """Refuse what would be large before it is computed."""
        if operator == "%" and isinstance(left, str):
            self.checked(right)
            check_format(left)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self.budget.pay(len(left) + len(right))
        elif operator == "*":
            for sized, factor in ((left, right), (right, left)):
                if hasattr(sized, "__len__") and isinstance(factor, int):
                    self.budget.pay(len(sized) * max(factor, 0))
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (max(right, 0) if operator == "**" else 1)
            if bits + right.bit_length() > MAX_INT_BITS:
                raise TooCostly("its numbers are too large")

    def _check_method(self, obj: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse calls of text methods whose result would be large."""
        text = getattr(obj, "__self__", None)
        name = getattr(obj, "__name__", "")
        if name in ("format", "format_map"):
            check_format(text if isinstance(text, str) else obj.__wrapped__.__self__)
        if not isinstance(text, (str, bytes)):
            return
        if name in ("translate", "maketrans", "expandtabs"):
            raise SecurityError(f"str.{name} is not available")
        if name == "replace" and len(args) >= 2:
            self.budget.pay(replaced_length(text, args[0], args[1]))
        if name == "join" and len(args) == 1 and hasattr(args[0], "__len__"):
            self.budget.pay(joined_length(args[0], len(text)))
        elif name == "join":
            raise SecurityError("str.join is for lists")
        if name in ("center", "ljust", "rjust", "zfill"):
            check_width(*args, *kwargs.values())

    def _step(self, value: Any = None) -> bool:
        self.budget.step()
        return True

    def _join(self, values: list[Any]) -> str:
        """What `~` makes of its operands."""
        texts = [str(self.checked(value)) for value in values]
        self.budget.step()
        self.budget.pay(sum(map(len, texts)))
        return "".join(texts)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that costs a step and pays for its result."""
        passes_context = hasattr(function, "jinja_pass_arg")

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.budget.step()
            values = list(args[1:] if passes_context else args)
            if values and isinstance(values[0], Iterator):
                values[0] = list(values[0])
            if name not in SHALLOW_FILTERS:
                for value in values:
                    self.checked(value)
            self._check_filter(name, values, kwargs)
            return self.budget.keep(function(*args[: len(args) - len(values)], *values, **kwargs))

        return bounded

    def _check_filter(self, name: str, values: list[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse filters whose result would be large."""
        value = values[0] if values else None
        if name in ("center", "indent", "batch", "slice", "round", "tojson"):
            check_width(*values[1:], *kwargs.values())
        if name == "indent":
            self.budget.pay((str(value).count("\n") + 1) * MAX_WIDTH // 10)
        elif name == "replace" and len(values) >= 3:
            self.budget.pay(replaced_length(str(value), str(values[1]), str(values[2])))
        elif name == "format":
            check_format(str(value))
        elif name == "join" and isinstance(value, (list, tuple)):
            separator = values[1] if len(values) > 1 else kwargs.get("d", "")
            self.budget.pay(joined_length(value, len(str(separator))))
        elif name == "sum" and (len(values) > 2 or "start" in kwargs):
            raise SecurityError("sum is for numbers")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = Bounds().visit(super()._parse(source, name, filename))
        return tree


class Bounds(NodeTransformer):
    """Puts the steps and checks into a syntax tree that no method of the environment sees."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(step(node.lineno), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(step(node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return filtered(nodes.List(node.nodes, lineno=node.lineno), "-join")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = filtered(node.expr, "-check")
        for operand in node.ops:
            operand.expr = filtered(operand.expr, "-check")
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.key = filtered(node.key, "-check")
        return node


class GenerationTag(Extension):
    """`{% generation %}` marks what the assistant said, which only training needs."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def step(line: int) -> nodes.Filter:
    """An expression that is true and costs a step."""
    return filtered(nodes.Const(None, lineno=line), "-step")


def filtered(value: nodes.Expr, name: str) -> nodes.Filter:
    """The value through a filter; a name that begins with - cannot be written in a template."""
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def check_size(value: Any) -> None:
    """Refuse containers of too many values, counted as often as they would be spelled."""
    num_nodes = 0
    waiting = [(value, 0)]
    while waiting:
        found, depth = waiting.pop()
        num_nodes += 1
        if num_nodes > MAX_NODES or depth > MAX_DEPTH:
            raise TooCostly("its lists are too large or too deep")
        if isinstance(found, Namespace):
            raise SecurityError("a namespace is no text")
        if isinstance(found, Mapping):
            waiting += [(key, depth + 1) for key in found]
            waiting += [(item, depth + 1) for item in found.values()]
        elif isinstance(found, (list, tuple, set)):
            waiting += [(item, depth + 1) for item in found]
        if len(waiting) > MAX_NODES:
            raise TooCostly("its lists are too large or too deep")


def check_width(*values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise TooCostly(f"it asks for a width of {value}")


def check_format(text: str) -> None:
    if WIDE_FORMAT.search(text):
        raise TooCostly("it asks for a wide format")


def replaced_length(text: Any, old: Any, new: Any) -> int:
    if not isinstance(old, (str, bytes)) or not isinstance(new, (str, bytes)):
        return 0
    num_found: int = text.count(old)
    return len(text) + num_found * max(len(new) - len(old), 0)


def joined_length(values: Iterable[Any], separator: int) -> int:
    return sum(len(v) + separator if isinstance(v, str) else 20 + separator for v in values)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: no HTML escapes, other scripts as they are.

    Private-use characters are never escaped: template.py marks content with them.
    """
    if isinstance(value, Undefined):
        raise TypeError(f"tojson of the undefined {value._undefined_name}")
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if not ensure_ascii:
        return text
    return "".join(c if c < "\x7f" or c >= "\U000f0000" else json.dumps(c)[1:-1] for c in text)


def raise_exception(message: Any) -> None:
    raise TemplateRefusal(str(message))


def strftime_now(format: str) -> str:
    check_format(format)
    if len(format) > MAX_WIDTH:
        raise TooCostly("it asks for a long date")
    return datetime.now().strftime(format)
