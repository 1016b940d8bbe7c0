"""Random JSON schemas of the shapes that people send: nested, recursive, bounded."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
NAMES = ("name", "ключ", "a b", 'x"y', "id", "$k")
VALUES = ("a", 'b"c', "ü", 1, 2.5, None, True, [1], {"x": 1}, "日本", "")
PATTERNS = (r"^\d{3}-\d{4}$", "^[A-Z]{2}[0-9]{1,3}$", "^(foo|bar)$", '^[^"]{1,4}$', "^.{3}$")
FORMATS = ("date", "date-time", "uuid", "ipv4")


class Schemas:
    """Draws schemas, all of them bounded, so that a small model comes to an end."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.leaves: list[Callable[[int], Schema]] = [
            self._string,
            self._integer,
            self._number,
            lambda depth: {"type": "boolean"},
            lambda depth: {"enum": self.rng.sample(VALUES, 3)},
            lambda depth: {"type": "string", "pattern": self.rng.choice(PATTERNS)},
            lambda depth: {"type": "string", "format": self.rng.choice(FORMATS)},
        ]
        self.branches: list[Callable[[int], Schema]] = [
            self._array,
            self._object,
            self._object,
            self._tuple,
            self._tagged,
            lambda depth: {"anyOf": [self.schema(depth), {"type": "null"}]},
            lambda depth: {"type": ["string", "null"], "maxLength": 5},
            lambda depth: {"$ref": "#/$defs/R"},
            lambda depth: {"const": self.rng.choice(VALUES)},
        ]

    def whole(self) -> Schema:
        """A schema with a definition that its parts may refer to."""
        return {**self.schema(3), "$defs": {"R": self.schema(0)}}

    def schema(self, depth: int) -> Schema:
        kinds = [*self.leaves, *self.branches] if depth else self.leaves
        return self.rng.choice(kinds)(max(depth - 1, 0))

    def _string(self, depth: int) -> Schema:
        longest = self.rng.randrange(1, 13)
        return {
            "type": "string",
            "maxLength": longest,
            "minLength": self.rng.randrange(longest + 1),
        }

    def _integer(self, depth: int) -> Schema:
        least = self.rng.randrange(-50, 50)
        return {"type": "integer", "minimum": least, "exclusiveMaximum": least + 90}

    def _number(self, depth: int) -> Schema:
        least = self.rng.randrange(-10, 10)
        return {"type": "number", "exclusiveMinimum": least, "maximum": least + 2.5}

    def _array(self, depth: int) -> Schema:
        most = self.rng.randrange(1, 4)
        least = self.rng.randrange(most + 1)
        return {"type": "array", "items": self.schema(depth), "maxItems": most, "minItems": least}

    def _tuple(self, depth: int) -> Schema:
        parts = [self.schema(0), self.schema(0)]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2}

    def _object(self, depth: int) -> Schema:
        count = self.rng.randrange(1, 4)
        properties = {self.rng.choice(NAMES) + str(i): self.schema(depth) for i in range(count)}
        return {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if self.rng.random() < 0.6],
            "additionalProperties": False,
        }

    def _tagged(self, depth: int) -> Schema:
        """Objects of which a constant tells which."""
        options = [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "value": self.schema(depth)},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for kind in ("a", "b")
        ]
        return {self.rng.choice(("oneOf", "anyOf")): options}
