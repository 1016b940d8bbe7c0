"""The reader gives back what gguf's own writer wrote."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.errors import BadFile
from localllm.gguf import GgufFile
from localllm.metadata import Metadata, Value

U32, I32, F32, BOOL, STRING = 4, 5, 6, 7, 8


def write(path: Path, *, alignment: int = 32, pad: str = "", tensors: Any = ()) -> Path:
    writer = GGUFWriter(path, "llama")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    writer.add_string("pad", pad)
    for name, values in tensors:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SCALARS = {
    "uint8": st.integers(0, 2**8 - 1),
    "int8": st.integers(-(2**7), 2**7 - 1),
    "uint16": st.integers(0, 2**16 - 1),
    "int16": st.integers(-(2**15), 2**15 - 1),
    "uint32": st.integers(0, 2**32 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float32": st.floats(width=32, allow_nan=False),
    "float64": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "string": st.text(min_size=1, max_size=30),
}
scalars = st.one_of(*(st.tuples(st.just(kind), values) for kind, values in SCALARS.items()))
arrays = st.one_of(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20),
    st.lists(st.booleans(), min_size=1, max_size=20),
    st.lists(st.text(max_size=20), min_size=1, max_size=20),
)


@settings(max_examples=60, deadline=None)
@given(
    values=st.dictionaries(st.text(max_size=20).map("v.{}".format), scalars, max_size=12),
    lists=st.dictionaries(st.text(max_size=20).map("a.{}".format), arrays, max_size=4),
)
def test_metadata_comes_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, values: Any, lists: Any
) -> None:
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    writer = GGUFWriter(path, "llama")
    for key, (kind, value) in values.items():
        getattr(writer, f"add_{kind}")(key, value)
    for key, array in lists.items():
        writer.add_array(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile.open(path) as file:
        assert file.architecture == "llama"
        for key, (_, value) in values.items():
            assert file.metadata[key] == value
        for key, array in lists.items():
            assert file.metadata[key] == array
            assert file.metadata.length(key) == len(array)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=5),
    alignment=st.sampled_from([8, 16, 32, 64, 128, 4096]),
    pad=st.integers(0, 64),
)
def test_tensors_come_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, shapes: Any, alignment: int, pad: int
) -> None:
    rng = np.random.default_rng(7)
    dtypes = [np.float32, np.float16, np.int8, np.int32]
    tensors = [
        (f"t{i}", (rng.standard_normal(shape) * 100).astype(dtypes[i % 4]))
        for i, shape in enumerate(shapes)
    ]
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    write(path, alignment=alignment, pad="x" * pad, tensors=tensors)
    with GgufFile.open(path) as file:
        assert list(file.tensors) == [name for name, _ in tensors]
        for name, values in tensors:
            tensor = file.tensors[name]
            assert tensor.shape == values.shape
            assert tensor.data.tobytes() == values.tobytes()
            assert tensor.dequantize().tolist() == values.astype(np.float32).tolist()


@pytest.mark.parametrize("alignment", [16, 64, 128])
def test_any_alignment_is_honoured_at_every_metadata_length(alignment: int, tmp_path: Path) -> None:
    tensors = [(f"t{i}", np.arange(i * 10, i * 10 + 5, dtype=np.float32)) for i in range(3)]
    for length in range(32):
        path = tmp_path / f"{length}.gguf"
        write(path, alignment=alignment, pad="x" * length, tensors=tensors)
        with GgufFile.open(path) as file:
            for name, values in tensors:
                assert file.tensors[name].data.tobytes() == values.tobytes()


def test_view_is_read_only_and_not_a_copy(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", tensors=[("t", np.arange(8, dtype=np.float32))])
    tensor = GgufFile.open(path).tensors["t"]
    assert not tensor.data.flags.writeable
    assert tensor.data.ctypes.data == tensor.address
    assert tensor.data.base is not None


def test_view_outlives_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", tensors=[("t", np.arange(8, dtype=np.float32))])
    with GgufFile.open(path) as file:
        data = file.tensors["t"].data
    assert data.view(np.float32).tolist() == list(range(8))


def test_version_2_is_read_like_version_3(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", tensors=[("t", np.arange(8, dtype=np.float32))])
    content = bytearray(path.read_bytes())
    content[4] = 2
    path.write_bytes(content)
    assert GgufFile.open(path).tensors["t"].shape == (8,)


def test_rows_and_columns_of_a_quantised_expert_tensor(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((3, 4, 64)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_0)
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("e", raw, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GgufFile.open(path).tensors["e"]
    assert (tensor.shape, tensor.rows, tensor.cols, tensor.row_bytes) == ((3, 4, 64), 12, 64, 36)
    assert tensor.nbytes == 12 * 36
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q4_0)
    assert np.array_equal(tensor.dequantize(), wanted)


def sample_metadata() -> Metadata:
    values = {
        "count": Value(U32, 7),
        "negative": Value(I32, -7),
        "rate": Value(F32, 0.5),
        "nan": Value(F32, float("nan")),
        "flag": Value(BOOL, True),
        "text": Value(STRING, b"caf\xc3\xa9"),
        "layers": Value(I32, np.array([1, 2, 3], np.int32), is_array=True),
        "pattern": Value(BOOL, np.array([True, False, True]), is_array=True),
        "rates": Value(F32, np.array([0.5, 1.5], np.float32), is_array=True),
    }
    return Metadata(Path("m.gguf"), values)


def test_typed_reads_give_the_value() -> None:
    metadata = sample_metadata()
    assert metadata.int("count") == 7
    assert metadata.int("negative", minimum=-10) == -7
    assert metadata.float("rate") == 0.5
    assert metadata.float("count") == 7.0
    assert metadata.bool("flag") is True
    assert metadata.str("text") == "café"
    assert metadata.ints("layers") == [1, 2, 3]
    assert metadata.floats("rates") == [0.5, 1.5]


def test_absent_key_gives_the_default_or_names_itself() -> None:
    metadata = sample_metadata()
    assert metadata.int("absent", default=3) == 3
    assert metadata.strs("absent", default=[]) == []
    for read in (metadata.int, metadata.float, metadata.bool, metadata.str, metadata.ints):
        with pytest.raises(BadFile, match=r"m\.gguf.*absent"):
            read("absent")


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("int", "rate"),
        ("int", "flag"),
        ("int", "text"),
        ("int", "layers"),
        ("int", "negative"),
        ("float", "text"),
        ("float", "nan"),
        ("bool", "count"),
        ("str", "count"),
        ("ints", "count"),
        ("ints", "rates"),
        ("floats", "pattern"),
        ("strs", "text"),
        ("strs", "layers"),
    ],
)
def test_wrong_type_or_sign_names_the_key(method: str, key: str) -> None:
    with pytest.raises(BadFile, match=rf"m\.gguf: {key} "):
        getattr(sample_metadata(), method)(key)


def test_per_layer_values_are_a_scalar_or_exactly_one_each() -> None:
    metadata = sample_metadata()
    assert metadata.ints_per_layer("count", 3) == [7, 7, 7]
    assert metadata.ints_per_layer("layers", 3) == [1, 2, 3]
    assert metadata.ints_per_layer("pattern", 3) == [1, 0, 1]
    assert metadata.ints_per_layer("absent", 2, default=5) == [5, 5]
    assert metadata.floats_per_layer("rates", 2) == [0.5, 1.5]
    with pytest.raises(BadFile, match="layers has 3 values for 4 layers"):
        metadata.ints_per_layer("layers", 4)
