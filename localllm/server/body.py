"""Request bodies: JSON read as Go's decoder reads it, with its error texts.

Content types are not looked at, field names match in any case, null means absent, unknown fields
and what follows the first value are ignored. Lone surrogates become U+FFFD, so that every text
inside is valid Unicode.
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.requests import Request

from localllm.errors import BadRequest
from localllm.options import NAMES

WHITESPACE = " \t\r\n"
MOST_BYTES = 128 << 20
MOST_DIGITS = 308  # of a number that is still a float64
_JSON_TYPES = {bool: "bool", int: "number", float: "number", str: "string", list: "array"}

log = logging.getLogger("localllm.server")


@dataclass(frozen=True, slots=True)
class Kind:
    """A JSON type that a field may have, and what Go calls the field's type."""

    python: tuple[type, ...]
    go: str


STRING = Kind((str,), "string")
BOOL = Kind((bool,), "bool")
INT = Kind((int,), "int")
OBJECT = Kind((dict,), "map[string]interface {}")
ARRAY = Kind((list,), "[]interface {}")
ANY = Kind((object,), "interface {}")


@dataclass(frozen=True, slots=True)
class Shape:
    """The name of a request type and its fields."""

    name: str
    fields: Mapping[str, Kind]

    def check(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """The known fields of `value` under their own names. Raises BadRequest on a wrong type."""
        found = {}
        for key, item in value.items():
            name = key.lower()
            if item is None:
                continue
            if name not in self.fields:
                self._tell_ignored(name)
                continue
            kind = self.fields[name]
            if not _is(item, kind):
                got = _JSON_TYPES.get(type(item), "object")
                raise BadRequest(
                    f"json: cannot unmarshal {got} into Go struct field {self.name}.{name} "
                    f"of type {kind.go}"
                )
            found[name] = item
        return found

    def _tell_ignored(self, name: str) -> None:
        if "options" in self.fields and name in NAMES:
            log.warning("field %r belongs into options and was ignored", name)
        else:
            log.debug("field %r of %s is unknown and was ignored", name, self.name)


def _is(item: object, kind: Kind) -> bool:
    if kind is not ANY and isinstance(item, bool) and bool not in kind.python:
        return False
    return isinstance(item, kind.python)


async def read_body(request: Request, shape: Shape) -> dict[str, Any]:
    """The fields of a request's body. Raises BadRequest."""
    return shape.check(parse_object(await read_bytes(request), shape.name))


async def read_bytes(request: Request) -> bytes:
    """The whole body, which is read no further than it may be long. Raises BadRequest."""
    size, pieces = 0, []
    async for piece in request.stream():
        size += len(piece)
        if size > MOST_BYTES:
            raise BadRequest(f"the request is longer than {MOST_BYTES >> 20} MiB")
        pieces.append(piece)
    return b"".join(pieces)


def parse_object(data: bytes, name: str) -> dict[str, Any]:
    """The JSON object that `data` begins with; `name` is what Go calls its type."""
    text = data.decode(errors="replace").lstrip(WHITESPACE + "\ufeff")
    if not text:
        raise BadRequest("missing request body")
    try:
        value, _ = _DECODER.raw_decode(text)
    except RecursionError:
        raise BadRequest("the request is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise BadRequest(_go_text(text, error)) from None
    if not isinstance(value, dict):
        got = _JSON_TYPES.get(type(value), "null")
        raise BadRequest(f"json: cannot unmarshal {got} into Go value of type api.{name}")
    if "\\ud" in text.lower():
        value = _without_surrogates(value)
    return dict(value)


def _integer(digits: str) -> int:
    return int(digits) if len(digits) < MOST_DIGITS else _not_a_number(digits)


def _float(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _not_a_number(digits)


def _not_a_number(text: str) -> NoReturn:
    if text.lstrip("-")[0].isdigit():
        text = text if len(text) <= 40 else f"{text[:40]}..."
        raise BadRequest(f"json: cannot unmarshal number {text} into Go value of type float64")
    raise BadRequest(f"invalid character {text.lstrip('-')[0]!r} looking for beginning of value")


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_float, parse_constant=_not_a_number)


def _go_text(text: str, error: json.JSONDecodeError) -> str:
    rest = text[error.pos :].lstrip(WHITESPACE)
    if not rest or error.msg.startswith("Unterminated string"):
        return "unexpected EOF"
    where = "looking for beginning of value"
    if error.msg.startswith("Expecting property name"):
        where = "looking for beginning of object key string"
    elif error.msg.startswith("Expecting ':'"):
        where = "after object key"
    elif error.msg.startswith("Expecting ','"):
        where = "after object key:value pair"
    elif error.msg.startswith("Invalid control character"):
        where = "in string literal"
    return f"invalid character {rest[0]!r} {where}"


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value
