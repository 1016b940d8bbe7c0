"""Hostile, damaged and foreign files: always one clear error, no large allocation, no crash."""

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from localllm.errors import BadFile, UnsupportedModel
from localllm.gguf import GgufFile

HEADER = struct.Struct("<4sIqq")


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def key_value(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def header(num_tensors: int, num_keys: int, body: bytes = b"", version: int = 3) -> bytes:
    return HEADER.pack(b"GGUF", version, num_tensors, num_keys) + body


def tensor(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}q", len(dims), *dims)
    return string(name) + shape + struct.pack("<IQ", kind, offset)


def refusal(path: Path, content: bytes) -> str:
    """The error message of opening `content`, which must be one of the two and one line."""
    path.write_bytes(content)
    with pytest.raises((BadFile, UnsupportedModel)) as caught:
        GgufFile.open(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 600
    return message


@pytest.fixture
def sample(tmp_path: Path) -> bytes:
    """A small valid model with every kind of value and several tensor types."""
    path = tmp_path / "sample.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("tokenizer.ggml.tokens", ["<unk>", "a", "b", "ab" * 20])
    writer.add_array("tokenizer.ggml.scores", [0.0, -1.0, -2.0, -3.0])
    writer.add_array("flags", [True, False])
    writer.add_int8("tiny", -3)
    writer.add_uint64("large", 1 << 40)
    writer.add_string("tokenizer.chat_template", "{{ messages }}" * 10)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


CRAFTED = {
    "only the magic": (b"GGUF", "too few"),
    "empty": (b"", "too few"),
    "36 bytes that claim everything": (header(1 << 62, 1 << 62, b"\0" * 12), "claims"),
    "2^40 keys": (header(0, 1 << 40), "metadata keys"),
    "keys beyond the file": (header(0, 60000), "60000 metadata keys"),
    "negative keys": (header(0, -1), "metadata keys"),
    "2^32 tensors": (header(1 << 32, 0), "tensors"),
    "tensors beyond the file": (header(100000, 0), "100000 tensors"),
    "negative tensors": (header(-5, 0), "tensors"),
    "string of 2^63 bytes": (
        header(0, 1, key_value(b"k", 8, struct.pack("<Q", 1 << 63)) + b"\0" * 64),
        "claims 9223372036854775808 bytes",
    ),
    "key of 2^40 bytes": (header(0, 1, struct.pack("<Q", 1 << 40) + b"\0" * 64), "metadata key 0"),
    "many strings that are large only together": (
        header(
            0, 40, b"".join(key_value(b"%d" % i, 8, string(b"x" * (1 << 20))) for i in range(40))
        ),
        "the value of '31' claims",
    ),
    "array of 2^61 bytes": (
        header(0, 1, key_value(b"k", 9, struct.pack("<IQ", 0, 1 << 61))),
        "'k' claims",
    ),
    "array of 2^20 strings": (
        header(0, 1, key_value(b"k", 9, struct.pack("<IQ", 8, 1 << 20))),
        "'k' needs",
    ),
    "array of numbers beyond the file": (
        header(0, 1, key_value(b"k", 9, struct.pack("<IQ", 10, 1 << 20))),
        "'k' needs",
    ),
    "array whose last string leaves the file": (
        header(0, 1, key_value(b"k", 9, struct.pack("<IQQQ", 8, 2, 0, 1 << 62))),
        "goes past its end",
    ),
    "array whose first string leaves the file": (
        header(0, 1, key_value(b"k", 9, struct.pack("<IQQQ", 8, 2, (1 << 64) - 1, 0))),
        "goes past its end",
    ),
    "arrays of arrays, 1000 deep": (
        header(0, 1, key_value(b"k", 9, struct.pack("<IQ", 9, 1) * 1000)),
        "array of arrays",
    ),
    "unknown value type": (header(0, 1, key_value(b"k", 13, b"\0" * 16)), "value type 13"),
    "unknown element type": (
        header(0, 1, key_value(b"k", 9, struct.pack("<IQ", 77, 1))),
        "element type 77",
    ),
    "empty key": (header(0, 1, key_value(b"", 4, b"\0" * 16)), "key 0 is empty"),
    "key twice": (header(0, 2, key_value(b"k", 0, b"\1") * 2), "'k' occurs twice"),
    "alignment 0": (
        header(0, 1, key_value(b"general.alignment", 4, struct.pack("<I", 0))),
        "general.alignment is 0",
    ),
    "alignment 48": (
        header(0, 1, key_value(b"general.alignment", 4, struct.pack("<I", 48))),
        "general.alignment is 48",
    ),
    "alignment 2^31": (
        header(0, 1, key_value(b"general.alignment", 4, struct.pack("<I", 1 << 31))),
        "general.alignment is 2147483648",
    ),
    "negative alignment": (
        header(0, 1, key_value(b"general.alignment", 5, struct.pack("<i", -32))),
        "general.alignment is -32",
    ),
    "alignment as text": (
        header(0, 1, key_value(b"general.alignment", 8, string(b"32"))),
        "general.alignment is string",
    ),
    "version 0": (header(0, 0, version=0), "version 0"),
    "version 1": (header(0, 0, version=1), "version 1"),
    "version 4": (header(0, 0, version=4), "version 4"),
    "dimension 0": (header(1, 0, tensor(b"t", [0, 4])), "impossible shape"),
    "dimension -1": (header(1, 0, tensor(b"t", [-1, 4])), "impossible shape"),
    "2^64 values": (header(1, 0, tensor(b"t", [1 << 32, 1 << 32])), "impossible shape"),
    "larger than the file": (header(1, 0, tensor(b"t", [1 << 40])), "truncated"),
    "5 dimensions": (header(1, 0, tensor(b"t", [1] * 5)), "5 dimensions"),
    "2^31 dimensions": (
        header(1, 0, string(b"t") + struct.pack("<I", 1 << 31) + b"\0" * 64),
        "2147483648 dimensions",
    ),
    "half a block": (header(1, 0, tensor(b"t", [33, 4], kind=2)), "whole blocks of Q4_0"),
    "removed type": (header(1, 0, tensor(b"t", [32], kind=4)), "unsupported type 4"),
    "unknown type": (header(1, 0, tensor(b"t", [32], kind=99)), "unsupported type 99"),
    "offset off the grid": (header(1, 0, tensor(b"t", [1], offset=8) + b"\0" * 64), "not aligned"),
    "offset 2^64 - 32": (
        header(1, 0, tensor(b"t", [1], offset=(1 << 64) - 32) + b"\0" * 64),
        "truncated",
    ),
    "tensor without a name": (header(1, 0, tensor(b"", [1])), "no name"),
    "tensor name of 64 bytes": (header(1, 0, tensor(b"n" * 64, [1])), "name of tensor 0"),
    "tensor twice": (header(2, 0, tensor(b"t", [1]) * 2 + b"\0" * 64), "'t' occurs twice"),
    "tensors overlap": (
        header(2, 0, tensor(b"t", [16]) + tensor(b"u", [1], offset=32) + b"\0" * 128),
        "'t' and 'u' overlap",
    ),
    "zip": (b"PK\x03\x04" + b"\0" * 60, "zip archive"),
    "Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "web page": (b"<!DOCTYPE html><html>not found</html>", "web page"),
    "other": (b"\x7fELF" + b"\0" * 60, "not a GGUF file"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_file_is_refused_with_its_reason_and_without_allocating(
    name: str, tmp_path: Path
) -> None:
    content, reason = CRAFTED[name]
    tracemalloc.start()
    try:
        message = refusal(tmp_path / "x.gguf", content)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reason in message
    assert peak_bytes < 50 << 20


@pytest.mark.parametrize("swap", ["integers", "magic too"])
def test_big_endian_file_is_named_as_such(swap: str, tmp_path: Path) -> None:
    magic = b"FUGG" if swap == "magic too" else b"GGUF"
    message = refusal(tmp_path / "x.gguf", magic + struct.pack(">Iqq", 3, 2, 5) + b"\0" * 64)
    assert "big-endian" in message


def test_absent_file_and_folder_are_refused(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "absent.gguf", "no such file"), (tmp_path, "folder")):
        with pytest.raises(BadFile, match=reason):
            GgufFile.open(path)


def test_text_from_the_file_is_harmless_in_messages(tmp_path: Path) -> None:
    key = b"\x1b[31m\n" + b"\xff" * 300
    message = refusal(tmp_path / "x.gguf", header(0, 1, key_value(key, 99, b"\0" * 16)))
    assert message.isprintable()


def test_every_cut_of_a_file_is_refused(sample: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    num_data = 4 * 32 * 4 + 32 * 2
    ends = [*range(0, len(sample) - num_data), *range(len(sample) - num_data, len(sample), 37)]
    for end in ends:
        refusal(path, sample[:end])


def test_cut_in_tensor_data_names_the_tensor_and_both_sizes(sample: bytes, tmp_path: Path) -> None:
    message = refusal(tmp_path / "cut.gguf", sample[:-1])
    assert "'output_norm.weight'" in message
    assert str(len(sample)) in message
    assert str(len(sample) - 1) in message
    assert "pull it again" in message


INTERESTING = (0, 1, 0x7F, 0x80, 0xFF)
WORDS = (0, 1, 9, 31, 1 << 16, 1 << 31, 1 << 32, 1 << 40, 1 << 61, 1 << 63, (1 << 64) - 1)


def set_bytes(rng: random.Random, content: bytearray) -> None:
    for _ in range(rng.randint(1, 8)):
        content[rng.randrange(len(content))] = rng.choice([*INTERESTING, rng.randrange(256)])


def set_word(rng: random.Random, content: bytearray) -> None:
    at = rng.randrange(4, len(content) - 8)
    content[at : at + 8] = struct.pack("<Q", rng.choice(WORDS))


def cut(rng: random.Random, content: bytearray) -> None:
    del content[rng.randrange(len(content)) :]


def remove(rng: random.Random, content: bytearray) -> None:
    at = rng.randrange(len(content))
    del content[at : at + rng.randint(1, 16)]


def repeat(rng: random.Random, content: bytearray) -> None:
    at = rng.randrange(len(content))
    content[at:at] = content[at : at + rng.randint(1, 64)]


MUTATIONS: tuple[Callable[[random.Random, bytearray], None], ...] = (
    set_bytes,
    set_word,
    cut,
    remove,
    repeat,
)


def read_everything(path: Path) -> None:
    """Open a file and look at all of it, as a loader would."""
    with GgufFile.open(path) as file:
        for key in file.metadata:
            _ = file.metadata[key]
        for found in file.tensors.values():
            assert found.data.size == found.nbytes
            int(found.data[-1])


def run_mutations(sample: bytes, path: Path, seed: int, count: int) -> int:
    """Number of mutated files refused; any other exception than the two escapes."""
    rng = random.Random(seed)
    num_refused, num_lines = 0, 1
    num_header = len(sample) - 4 * 32 * 4
    for _ in range(count):
        content = bytearray(sample[:num_header])
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if len(content) > 16:
                rng.choice(MUTATIONS)(rng, content)
        path.write_bytes(bytes(content) + sample[num_header:])
        try:
            read_everything(path)
        except (BadFile, UnsupportedModel) as error:
            num_refused += 1
            num_lines = max(num_lines, str(error).count("\n") + 1)
    assert num_lines == 1
    return num_refused


def test_mutated_headers_never_crash(sample: bytes, tmp_path: Path) -> None:
    assert run_mutations(sample, tmp_path / "x.gguf", seed=1, count=3000) > 1000


@pytest.mark.slow
def test_20000_mutated_headers_never_crash_nor_allocate(sample: bytes, tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        run_mutations(sample, tmp_path / "x.gguf", seed=2, count=20_000)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100 << 20
