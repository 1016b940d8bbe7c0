"""GGUF files: a memory-mapped, bounded reader.

Promises:
  1. a file is refused with one clear error (BadFile, UnsupportedModel) before anything is
     allocated for a size it only claims to have; reading a header costs less than 100 MB and two
     seconds whatever its bytes;
  2. every tensor handed out lies wholly inside the file and overlaps no other;
  3. nothing is copied: a tensor's bytes are a read-only view of the map, and metadata arrays are
     decoded when asked for.

The map lives as long as any view of it. A file that is cut short while it is mapped ends the
process with SIGBUS at the next read of a lost page: that is why models run in processes of their
own and the daemon never maps weights.

Not here: what the metadata means (models/, text/), block formats (quants.py).
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import os
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from localllm.errors import BadFile, UnsupportedModel
from localllm.metadata import ARRAY, STRING, Metadata, StringArray, Value
from localllm.quants import BY_ID, Bytes, Floats, TensorType, dequantize

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
# Of all names, keys and single strings together; arrays of strings stay in the map.
MAX_TEXT_BYTES = 1 << 25
MAX_ARRAY_LENGTH = 1 << 21
MAX_STRINGS = 1 << 22
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 64
MAX_ALIGNMENT = 1 << 16
SMALLEST_KEY_BYTES = 8 + 1 + 4 + 1
SMALLEST_TENSOR_BYTES = 8 + 1 + 4 + 4 + 8
NEWEST_VERSION = 3
SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
OTHER_FORMATS = (
    (b"lmgg", "an old GGML file; convert the model to GGUF"),
    (b"tjgg", "an old GGML file; convert the model to GGUF"),
    (b"FUGG", "a big-endian GGUF file; use a little-endian one"),
    (b"PK\x03\x04", "a zip archive (a PyTorch checkpoint?); convert the model to GGUF"),
    (b"vers", "a Git LFS pointer, not the model itself; pull it again"),
    (b"<!DO", "a web page, not a model; pull it again"),
    (b"<htm", "a web page, not a model; pull it again"),
)


def shown(text: str | bytes) -> str:
    """`text` from a file, safe inside a one-line message."""
    if isinstance(text, bytes):
        text = text[:100].decode(errors="replace")
    short = text if len(text) <= 80 else text[:77] + "..."
    return ascii(short) if not short.isprintable() else f"'{short}'"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file. `shape` is in NumPy's order: the contiguous dimension last."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    file: Bytes
    offset: int

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """All dimensions but the last, multiplied."""
        count = 1
        for n in self.shape[:-1]:
            count *= n
        return count

    @property
    def row_bytes(self) -> int:
        return self.type.row_bytes(self.cols)

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def is_mapped(self) -> bool:
        """False for one that was made in memory; in a file a header comes first."""
        return self.offset > 0

    @property
    def data(self) -> Bytes:
        """uint8 [nbytes], a read-only view of the map."""
        return self.file[self.offset : self.offset + self.nbytes]

    @property
    def address(self) -> int:
        """Where `data` begins in memory; valid while the file or a view of it is alive."""
        base: int = self.file.__array_interface__["data"][0]
        return base + self.offset

    def dequantize(self) -> Floats:
        """float32 array of `shape`, newly allocated."""
        return dequantize(self.type, self.data.reshape(self.rows, -1)).reshape(self.shape)


class GgufFile:
    """An open model file, or a whole set of split files, as one.

    `metadata` is that of the first part. Use it as a context manager or `close` it; views that
    are still in use keep their part of the map alive.
    """

    def __init__(self, path: Path, metadata: Metadata, tensors: dict[str, Tensor]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors

    @classmethod
    def open(cls, path: str | Path, parts: Sequence[Path] = ()) -> Self:
        """Open `path`, and the other parts of its set when it is split.

        The parts are found by name (`-00001-of-0000N.gguf`) unless `parts` lists them all, in
        order. Raises BadFile if anything about the files is wrong.
        """
        path = Path(path)
        first = _read_part(path)
        metadata = first.metadata
        count = metadata.int("split.count", default=1)
        if count <= 1:
            return cls(path, metadata, first.tensors)
        paths = list(parts) or _part_paths(path, metadata, count)
        if len(paths) != count:
            raise BadFile(f"{path}: is split in {count} parts, but {len(paths)} were given")
        others = (_read_part(other) for other in paths[1:])
        return cls(path, metadata, _join(path, first, others))

    @property
    def architecture(self) -> str:
        return self.metadata.str("general.architecture")

    def close(self) -> None:
        """Let go of the map; it disappears when the last view of it does."""
        self.tensors = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Part:
    """One file on disk: the whole model, or one part of a split one."""

    path: Path
    metadata: Metadata
    tensors: dict[str, Tensor]


def _part_paths(path: Path, metadata: Metadata, count: int) -> list[Path]:
    match = SPLIT_NAME.search(path.name)
    if match is None or int(match[2]) != count:
        raise BadFile(
            f"{path}: is one of {count} parts and must be named like NAME-00001-of-{count:05d}.gguf"
        )
    prefix = path.name[: match.start()]
    paths = [path.with_name(f"{prefix}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    if metadata.int("split.no", default=0) != 0 or int(match[1]) != 1:
        raise BadFile(f"{path}: is not the first of {count} parts; open {paths[0].name} instead")
    for other in paths:
        if not other.exists():
            raise BadFile(f"{other}: this part of the split model is missing; pull the model again")
    return paths


def _join(path: Path, first: _Part, others: Iterable[_Part]) -> dict[str, Tensor]:
    """All tensors of a split set, after checking that the parts belong together."""
    count = first.metadata.int("split.count")
    total = first.metadata.int("split.tensors.count")
    architecture = first.metadata.str("general.architecture")
    tensors = dict(first.tensors)
    for number, part in enumerate(others, start=1):
        wants = {"split.no": number, "split.count": count, "split.tensors.count": total}
        for key, want in wants.items():
            found = part.metadata.int(key)
            if found != want:
                raise BadFile(f"{part.path}: {key} is {found}, not {want}: a part of another set?")
        if part.metadata.str("general.architecture", default=architecture) != architecture:
            raise BadFile(f"{part.path}: is a part of a model of another architecture")
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise BadFile(f"{part.path}: tensor {shown(name)} is also in an earlier part")
            tensors[name] = tensor
    if len(tensors) != total:
        raise BadFile(f"{path}: its {count} parts hold {len(tensors)} tensors, not {total}")
    return tensors


def _read_part(path: Path) -> _Part:
    """Map one file and read its header."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise BadFile(f"{path}: has {size} bytes, too few for a GGUF file; pull it again")
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise BadFile(f"{path}: no such file") from None
    except IsADirectoryError:
        raise BadFile(f"{path}: is a folder, not a GGUF file") from None
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: cannot be read: {error}") from None
    reader = _HeaderReader(path, mapped, size)
    metadata, num_tensors = reader.read_metadata()
    tensors = reader.read_tensors(num_tensors, _alignment(path, metadata))
    return _Part(path, metadata, tensors)


def _alignment(path: Path, metadata: Metadata) -> int:
    alignment = metadata.int("general.alignment", default=32)
    if alignment < 1 or alignment > MAX_ALIGNMENT or alignment & (alignment - 1):
        raise BadFile(
            f"{path}: general.alignment is {alignment}, not a power of two up to {MAX_ALIGNMENT}"
        )
    return alignment


class _HeaderReader:
    """A position in a mapped header; every read is checked against the file's size first."""

    def __init__(self, path: Path, mapped: mmap.mmap, size: int) -> None:
        self.path = path
        self.mapped = mapped
        self.size = size
        self.position = 0
        self.num_strings = 0
        self.text_bytes = 0

    def bad(self, what: str) -> BadFile:
        return BadFile(f"{self.path}: {what}")

    def need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.size - self.position:
            raise self.bad(
                f"is truncated or damaged: {what} needs {num_bytes} bytes at {self.position}, "
                f"the file has {self.size} in all; pull it again"
            )

    def number(self, layout: struct.Struct, what: str) -> int:
        self.need(layout.size, what)
        value: int = layout.unpack_from(self.mapped, self.position)[0]
        self.position += layout.size
        return value

    def string(self, what: str, limit: int = MAX_TEXT_BYTES) -> bytes:
        length = self.number(_U64, f"the length of {what}")
        limit = min(limit, MAX_TEXT_BYTES - self.text_bytes)
        if length > limit:
            raise self.bad(f"is damaged: {what} claims {length} bytes, the limit is {limit}")
        self.text_bytes += length
        self.need(length, what)
        start = self.position
        self.position += length
        return self.mapped[start : self.position]

    def read_metadata(self) -> tuple[Metadata, int]:
        """The key-value pairs, and the tensor count that comes before them."""
        self.check_start()
        num_tensors = self.number(_I64, "the tensor count")
        num_keys = self.number(_I64, "the key count")
        self.check_count(num_tensors, MAX_TENSORS, SMALLEST_TENSOR_BYTES, "tensors")
        self.check_count(num_keys, MAX_KEYS, SMALLEST_KEY_BYTES, "metadata keys")
        values: dict[str, Value] = {}
        for index in range(num_keys):
            key = self.string(f"metadata key {index}", limit=0xFFFF).decode(errors="replace")
            if not key:
                raise self.bad(f"metadata key {index} is empty")
            if key in values:
                raise self.bad(f"metadata key {shown(key)} occurs twice")
            values[key] = self.value(key)
        return Metadata(self.path, values), num_tensors

    def check_start(self) -> None:
        magic = self.mapped[:4]
        if magic != b"GGUF":
            for start, meaning in OTHER_FORMATS:
                if magic == start:
                    raise self.bad(f"is {meaning}")
            raise self.bad("is not a GGUF file")
        self.position = 4
        version = self.number(_U32, "the version")
        if version & 0xFFFF == 0 and version:
            raise self.bad("this file is big-endian; use a little-endian file of the model")
        if version == 1:
            raise self.bad("GGUF version 1 is no longer in use; convert the model again")
        if version == 0 or version > NEWEST_VERSION:
            raise self.bad(f"GGUF version {version} is not supported (2 and {NEWEST_VERSION} are)")

    def check_count(self, count: int, limit: int, smallest_bytes: int, what: str) -> None:
        if count < 0 or count > limit:
            raise self.bad(f"is damaged: it claims {count} {what}, the limit is {limit}")
        self.need(count * smallest_bytes, f"the list of {count} {what}")

    def value(self, key: str) -> Value:
        what = f"the value of {shown(key)}"
        kind = self.number(_U32, f"the type of {shown(key)}")
        if kind == STRING:
            return Value(kind, self.string(what))
        if kind == ARRAY:
            return self.array(key)
        layout = _NUMBERS.get(kind)
        if layout is None:
            raise self.bad(f"metadata key {shown(key)} has the unknown value type {kind}")
        return Value(kind, self.number(layout, what))

    def array(self, key: str) -> Value:
        what = f"the array {shown(key)}"
        kind = self.number(_U32, f"the element type of {shown(key)}")
        length = self.number(_U64, f"the length of {shown(key)}")
        if kind == ARRAY:
            raise self.bad(f"metadata key {shown(key)} is an array of arrays")
        layout = _NUMBERS.get(kind)
        if layout is None and kind != STRING:
            raise self.bad(f"array {shown(key)} has the unknown element type {kind}")
        if length > MAX_ARRAY_LENGTH:
            raise self.bad(
                f"is damaged: {what} claims {length} elements, the limit is {MAX_ARRAY_LENGTH}"
            )
        if layout is None:
            return Value(kind, self.strings(what, length), is_array=True)
        num_bytes = length * layout.size
        self.need(num_bytes, what)
        dtype = np.dtype(f"<{layout.format[1:]}" if layout.size > 1 else layout.format[1:])
        numbers = np.frombuffer(self.mapped, dtype, length, self.position)
        self.position += num_bytes
        return Value(kind, numbers, is_array=True)

    def strings(self, what: str, length: int) -> StringArray:
        """Step over `length` strings; only where they begin is kept."""
        self.need(length * 8, what)
        self.num_strings += length
        if self.num_strings > MAX_STRINGS:
            raise self.bad(f"is damaged: more than {MAX_STRINGS} strings in its metadata")
        start = position = self.position
        read, mapped = _U64.unpack_from, self.mapped
        # A position past the end stays past it, so the next read fails.
        try:
            for _ in range(length):
                position += 8 + read(mapped, position)[0]
        except (struct.error, OverflowError):
            position = self.size + 1
        if position > self.size:
            raise self.bad(f"is truncated or damaged: {what} goes past its end; pull it again")
        self.position = position
        return StringArray(mapped, start, length)

    def read_tensors(self, count: int, alignment: int) -> dict[str, Tensor]:
        """The tensor list: known types, whole blocks, aligned, inside the file, no overlap."""
        heads = [self.tensor_head(index) for index in range(count)]
        if not heads:
            return {}
        data_start = -(-self.position // alignment) * alignment
        file: Bytes = np.frombuffer(self.mapped, np.uint8)
        tensors: dict[str, Tensor] = {}
        for name, shape, kind, offset in heads:
            if name in tensors:
                raise self.bad(f"tensor {shown(name)} occurs twice")
            if offset % alignment:
                raise self.bad(f"tensor {shown(name)} is not aligned to {alignment} bytes")
            tensor = Tensor(name, kind, shape, file, data_start + offset)
            end = tensor.offset + tensor.nbytes
            if end > self.size:
                raise self.bad(
                    f"is truncated: tensor {shown(name)} ends at byte {end}, "
                    f"the file has {self.size}; pull it again"
                )
            tensors[name] = tensor
        self.check_overlap(tensors)
        return tensors

    def tensor_head(self, index: int) -> tuple[str, tuple[int, ...], TensorType, int]:
        raw = self.string(f"the name of tensor {index}", limit=MAX_NAME_BYTES - 1)
        name = raw.decode(errors="replace")
        if not name:
            raise self.bad(f"tensor {index} has no name")
        num_dims = self.number(_U32, f"tensor {shown(name)}")
        if num_dims > MAX_DIMENSIONS:
            raise self.bad(f"tensor {shown(name)} has {num_dims} dimensions, the limit is 4")
        dims = [self.number(_I64, f"tensor {shown(name)}") for _ in range(num_dims)]
        shape = tuple(reversed(dims)) or (1,)
        type_id = self.number(_U32, f"tensor {shown(name)}")
        offset = self.number(_U64, f"tensor {shown(name)}")
        kind = BY_ID.get(type_id)
        if kind is None:
            raise UnsupportedModel(
                f"{self.path}: tensor {shown(name)} has the unsupported type {type_id}"
            )
        num_values = 1
        for n in shape:
            num_values *= n
        if min(shape) < 1 or num_values >= 1 << 63:
            raise self.bad(f"tensor {shown(name)} has the impossible shape {shape}")
        if shape[-1] % kind.block_length:
            raise self.bad(
                f"tensor {shown(name)}: rows of {shape[-1]} are not whole blocks of {kind.name}"
            )
        return name, shape, kind, offset

    def check_overlap(self, tensors: dict[str, Tensor]) -> None:
        end, before = 0, ""
        for tensor in sorted(tensors.values(), key=lambda t: t.offset):
            if tensor.offset < end:
                raise self.bad(f"tensors {shown(before)} and {shown(tensor.name)} overlap")
            end, before = tensor.offset + tensor.nbytes, tensor.name


_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_U64 = struct.Struct("<Q")
# Value type id -> layout; 8 (string) and 9 (array) have no fixed one.
_NUMBERS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: _U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: _U64,
    11: _I64,
    12: struct.Struct("<d"),
}
