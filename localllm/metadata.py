"""Typed reads of GGUF metadata.

Promises: a key that is required and absent, or has another type, sign or range than asked for, is
a BadFile that names the file, the key and what was found. Integers are taken whatever their
width. Arrays stay undecoded bytes of the map until they are asked for.

Not here: how the bytes are found (gguf.py), what keys mean (models/, text/).
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from localllm.errors import BadFile

BOOL, STRING, ARRAY = 7, 8, 9
KIND_NAMES = {
    **{0: "uint8", 1: "int8", 2: "uint16", 3: "int16", 4: "uint32", 5: "int32", 6: "float32"},
    **{7: "bool", 8: "string", 9: "array", 10: "uint64", 11: "int64", 12: "float64"},
}
INTEGERS = frozenset((0, 1, 2, 3, 4, 5, 10, 11))
FLOATS = frozenset((6, 12))
MAX_INT = (1 << 32) - 1
_LENGTH = struct.Struct("<Q")


class Required:
    """The default of a key that has none."""


REQUIRED: Final = Required()

# Inside Metadata the builtin names mean its methods.
Int: TypeAlias = int
Float: TypeAlias = float
Bool: TypeAlias = bool
Str: TypeAlias = str
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StringArray:
    """`length` strings, each after its own length, from `start` on; all bounds are checked."""

    mapped: mmap.mmap
    start: int
    length: int

    def decode(self) -> list[bytes]:
        read, mapped, position = _LENGTH.unpack_from, self.mapped, self.start
        found = []
        for _ in range(self.length):
            end = position + 8 + read(mapped, position)[0]
            found.append(mapped[position + 8 : end])
            position = end
        return found


@dataclass(frozen=True, slots=True)
class Value:
    """A value as it lies in the file: number, bytes, NumPy view of numbers, or StringArray."""

    kind: int
    content: Any
    is_array: bool = False

    @property
    def kind_name(self) -> str:
        name = KIND_NAMES[self.kind]
        return f"array of {name}" if self.is_array else name

    def decode(self) -> Any:
        if isinstance(self.content, StringArray):
            return [s.decode(errors="replace") for s in self.content.decode()]
        if isinstance(self.content, np.ndarray):
            return self.content.tolist()
        return self.content.decode(errors="replace") if self.kind == STRING else self.content


class Metadata(Mapping[str, Any]):
    """The key-value pairs of a file: a mapping to plain Python values, and reads that check."""

    def __init__(self, path: Path, values: dict[str, Value]) -> None:
        self.path = path
        self._values = values

    def __getitem__(self, key: Str) -> Any:
        return self._values[key].decode()

    def __contains__(self, key: object) -> Bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> Int:
        return len(self._values)

    def length(self, key: Str) -> Int:
        """Number of elements of an array, without decoding it; 0 if the key is absent."""
        value = self._values.get(key)
        if value is None:
            return 0
        if not value.is_array:
            raise self._wrong(key, value, "an array")
        content = value.content
        return content.length if isinstance(content, StringArray) else len(content)

    def int(
        self,
        key: Str,
        default: Int | Required = REQUIRED,
        *,
        minimum: Int = 0,
        maximum: Int = MAX_INT,
    ) -> Int:
        value = self._find(key, default)
        if not isinstance(value, Value):
            return value
        if value.is_array or value.kind not in INTEGERS:
            raise self._wrong(key, value, "an integer")
        return self._bounded(key, value.content, minimum, maximum)

    def float(self, key: Str, default: Float | Required = REQUIRED) -> Float:
        value = self._find(key, default)
        if not isinstance(value, Value):
            return value
        if value.is_array or value.kind not in FLOATS | INTEGERS:
            raise self._wrong(key, value, "a number")
        if math.isnan(value.content):
            raise BadFile(f"{self.path}: {key} is not a number (NaN)")
        return float(value.content)

    def bool(self, key: Str, default: Bool | Required = REQUIRED) -> Bool:
        value = self._find(key, default)
        if not isinstance(value, Value):
            return value
        if value.is_array or value.kind != BOOL:
            raise self._wrong(key, value, "a bool")
        return bool(value.content)

    def str(self, key: Str, default: Str | Required = REQUIRED) -> Str:
        """The text; bytes that are not UTF-8 become U+FFFD."""
        value = self._find(key, default)
        if not isinstance(value, Value):
            return value
        if value.is_array or value.kind != STRING:
            raise self._wrong(key, value, "a string")
        text: Str = value.content.decode(errors="replace")
        return text

    def array(self, key: Str, default: npt.NDArray[Any] | Required = REQUIRED) -> npt.NDArray[Any]:
        """The numbers of an array as they lie in the map: read-only, possibly unaligned."""
        value = self._find(key, default)
        if not isinstance(value, Value):
            return value
        if not isinstance(value.content, np.ndarray):
            raise self._wrong(key, value, "an array of numbers")
        return value.content

    def ints(self, key: Str, default: list[Int] | Required = REQUIRED) -> list[Int]:
        value = self._find(key, default)
        if not isinstance(value, Value):
            return value
        if not value.is_array or value.kind not in INTEGERS | {BOOL}:
            raise self._wrong(key, value, "an array of integers")
        return [int(n) for n in value.content.tolist()]

    def floats(self, key: Str, default: list[Float] | Required = REQUIRED) -> list[Float]:
        value = self._find(key, default)
        if not isinstance(value, Value):
            return value
        if not value.is_array or value.kind not in FLOATS | INTEGERS:
            raise self._wrong(key, value, "an array of numbers")
        return [float(n) for n in value.content.tolist()]

    def byte_strings(self, key: Str, default: list[bytes] | Required = REQUIRED) -> list[bytes]:
        """An array of strings, each as its bytes."""
        value = self._find(key, default)
        if not isinstance(value, Value):
            return value
        if not isinstance(value.content, StringArray):
            raise self._wrong(key, value, "an array of strings")
        return value.content.decode()

    def strs(self, key: Str, default: list[Str] | Required = REQUIRED) -> list[Str]:
        """An array of strings; bytes that are not UTF-8 become U+FFFD."""
        value = self._find(key, default)
        if not isinstance(value, Value):
            return value
        return [s.decode(errors="replace") for s in self.byte_strings(key)]

    def ints_per_layer(self, key: Str, n: Int, default: Int | Required = REQUIRED) -> list[Int]:
        """`n` integers: an array of exactly `n`, or one for all layers. Bools count as 0 and 1."""
        value = self._find(key, default)
        if not isinstance(value, Value):
            return [value] * n
        if value.kind not in INTEGERS | {BOOL}:
            raise self._wrong(key, value, "an integer, or an array of them")
        numbers = value.content.tolist() if value.is_array else [value.content] * n
        self._check_layers(key, numbers, n)
        return [self._bounded(key, int(number), 0, MAX_INT) for number in numbers]

    def floats_per_layer(
        self, key: Str, n: Int, default: Float | Required = REQUIRED
    ) -> list[Float]:
        """`n` numbers: an array of exactly `n`, or one number for every layer."""
        value = self._find(key, default)
        if not isinstance(value, Value):
            return [value] * n
        if value.kind not in FLOATS | INTEGERS:
            raise self._wrong(key, value, "a number, or an array of them")
        numbers = value.content.tolist() if value.is_array else [value.content] * n
        self._check_layers(key, numbers, n)
        return [float(number) for number in numbers]

    def _check_layers(self, key: Str, numbers: list[Any], n: Int) -> None:
        if len(numbers) != n:
            raise BadFile(f"{self.path}: {key} has {len(numbers)} values for {n} layers")

    def _find(self, key: Str, default: T | Required) -> Value | T:
        value = self._values.get(key)
        if value is not None:
            return value
        if isinstance(default, Required):
            raise BadFile(f"{self.path}: the metadata key {key} is missing")
        return default

    def _wrong(self, key: Str, value: Value, wanted: Str) -> BadFile:
        return BadFile(f"{self.path}: {key} is {value.kind_name}, not {wanted}")

    def _bounded(self, key: Str, number: Int, minimum: Int, maximum: Int) -> Int:
        if not minimum <= number <= maximum:
            raise BadFile(f"{self.path}: {key} is {number}, not in {minimum} to {maximum}")
        return number
