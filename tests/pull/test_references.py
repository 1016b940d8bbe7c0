"""What names mean, and the shipped catalogue."""

import json
import re

import pytest

from localllm.errors import BadRequest
from localllm.names import ModelName
from localllm.pull import catalogue
from localllm.pull.reference import Reference


@pytest.mark.parametrize(
    ("text", "name", "revision", "file"),
    [
        ("llama3.1:8b", "llama3.1:8b", None, None),
        ("hf.co/Org/Repo-GGUF", "hf.co/Org/Repo-GGUF:latest", None, None),
        ("hf.co/Org/Repo-GGUF:Q8_0", "hf.co/Org/Repo-GGUF:Q8_0", None, None),
        ("https://huggingface.co/o/r:q4_0", "huggingface.co/o/r:q4_0", None, None),
        ("hf.co/o/r:Q8_0@v1.0", "hf.co/o/r:Q8_0", "v1.0", None),
        ("hf.co/o/r@v1.0:Q8_0", "hf.co/o/r:Q8_0", "v1.0", None),
        ("hf.co/o/r@refs/pr/1", "hf.co/o/r:latest", "refs/pr/1", None),
        (
            "https://huggingface.co/o/r/blob/main/q/M-Q8_0.gguf",
            "hf.co/o/r:M-Q8_0.gguf",
            "main",
            "q/M-Q8_0.gguf",
        ),
        (
            "https://huggingface.co/o/r/resolve/v1/M.gguf?download=true",
            "hf.co/o/r:M.gguf",
            "v1",
            "M.gguf",
        ),
        ("127.0.0.1:5000/me/m:t", "127.0.0.1:5000/me/m:t", None, None),
    ],
)
def test_name_is_read(text: str, name: str, revision: str | None, file: str | None) -> None:
    found = Reference.parse(f" {text} ")
    assert (str(found.name), found.revision, found.file) == (name, revision, file)
    assert found.scheme == "https"


@pytest.mark.parametrize(
    "text",
    [
        *("", "../x", "hf.co/o/../x", "a/b/c/d:e", "m@", "hf.co/o/r@../x", "hf.co/o/r@-x"),
        *("model@sha256:" + "0" * 64, "me/m@v1", "ftp://h/o/r", "https://m", "m:", "a//b"),
        *("https://huggingface.co/o/r/blob/main/README.md", "hf.co/o/r@v1@v2", "ü", "x" * 300),
    ],
)
def test_bad_name_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="invalid model name"):
        Reference.parse(text)


@pytest.mark.parametrize(
    ("name", "tag", "file", "quant"),
    [
        ("llama3.1", "8b", "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", None),
        ("LLAMA3.1", "latest", "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", None),
        ("llama3.1", "8b-instruct-q4_K_M", "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", None),
        ("llama3.1", "8b-q8_0", "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", "q8_0"),
        ("smollm2", "135m-instruct-fp16", "SmolLM2-135M-Instruct-f16.gguf", None),
    ],
)
def test_short_name_is_found(name: str, tag: str, file: str, quant: str | None) -> None:
    found = catalogue.find(name, tag)
    assert found is not None
    assert found.quant == quant
    if name != "smollm2":
        assert found.entry.file == file


@pytest.mark.parametrize(
    ("name", "tag"),
    [("llama3.1", "9b"), ("llama3.1", "8b-text"), ("nope", "latest"), ("llama3.1", "9b-q8_0")],
)
def test_another_size_or_variant_is_never_taken_instead(name: str, tag: str) -> None:
    assert catalogue.find(name, tag) is None


def test_tags_of_a_name_are_listed() -> None:
    assert catalogue.tags_of("Llama3.1") == ["8b", "70b"]


def test_catalogue_is_sound() -> None:
    """Every row is usable, and no two rows answer to one tag."""
    seen = set()
    for entry in catalogue.entries():
        name = ModelName.parse(f"{entry.name}:{entry.tags[0]}")
        assert Reference(name).is_library
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.repo), entry
        assert entry.file.lower().endswith(".gguf"), entry
        json.dumps(dict(entry.parameters))
        for tag in entry.tags:
            assert (entry.name.lower(), tag.lower()) not in seen, (entry.name, tag)
            seen.add((entry.name.lower(), tag.lower()))
    assert len(catalogue.entries()) > 200
