from pathlib import Path

import gguf
import numpy as np
import pytest

from localllm.describe import Description, describe_apart
from localllm.errors import BadFile


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_context_length(2048)
    writer.add_embedding_length(64)
    writer.add_file_type(7)
    writer.add_chat_template("{{ messages }}")
    writer.add_array("test.short", [1, 2])
    writer.add_array("test.long", list(range(2000)))
    writer.add_tensor("token_embd.weight", np.zeros((100, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_facts_of_a_file_are_read_in_another_process(model_file: Path) -> None:
    found = describe_apart(model_file)
    assert found.architecture == "llama"
    assert found.parameter_count == 6400
    assert found.parameter_size == "6K"
    assert found.quantization == "Q8_0"
    assert (found.context_length, found.embedding_length) == (2048, 64)
    assert found.template == "{{ messages }}"
    assert found.capabilities == ["completion"]
    assert found.files == [str(model_file)]
    assert found.model_info["test.short"] == [1, 2]
    assert found.model_info["test.long"] is None
    assert "general.name" not in found.model_info
    assert found.tensors == [{"name": "token_embd.weight", "type": "F32", "shape": [64, 100]}]


def test_long_arrays_are_shown_when_asked_for(model_file: Path) -> None:
    assert describe_apart(model_file, verbose=True).model_info["test.long"] == list(range(2000))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"<!DOCTYPE html>" + bytes(100)])
def test_error_of_a_bad_file_names_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(BadFile, match=r"bad\.gguf"):
        describe_apart(path)


@pytest.mark.parametrize(
    ("count", "text"),
    [(8_030_000_000, "8.0B"), (7 * 10**9, "7B"), (134_515_008, "134.52M"), (999, "999")],
)
def test_parameter_counts_are_shown_as_people_say_them(count: int, text: str) -> None:
    assert Description("llama", count, "F16", []).parameter_size == text
