"""Small vocabularies, written as GGUF files and read back like any model's."""

from pathlib import Path
from typing import Any

import pytest
from chats import TOKENS, Make
from gguf import GGUFWriter
from vocabularies import MakeMetadata, byte_level

from localllm.gguf import GgufFile
from localllm.metadata import Metadata
from localllm.text.template import ChatTemplate
from localllm.text.tokenizer import load_tokenizer


@pytest.fixture
def make_metadata(tmp_path: Path) -> MakeMetadata:
    """Metadata with the given `tokenizer.` keys."""

    def make(values: dict[str, Any]) -> Metadata:
        path = tmp_path / "vocabulary.gguf"
        writer = GGUFWriter(path, "llama")
        for key, value in values.items():
            if isinstance(value, bool):
                writer.add_bool(f"tokenizer.{key}", value)
            elif isinstance(value, int):
                writer.add_uint32(f"tokenizer.{key}", value)
            elif isinstance(value, str):
                writer.add_string(f"tokenizer.{key}" if key != "name" else "general.name", value)
            else:
                writer.add_array(f"tokenizer.{key}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return GgufFile.open(path).metadata

    return make


@pytest.fixture
def make(make_metadata: MakeMetadata) -> Make:
    """A template over a byte-level vocabulary that has the markers of chats.py."""

    def make(source: str | None, **keys: Any) -> ChatTemplate:
        values = byte_level(TOKENS, **{"ggml.bos_token_id": 257, **keys})
        if source is not None:
            values["chat_template"] = source
        metadata = make_metadata(values)
        return ChatTemplate.from_metadata(metadata, load_tokenizer(metadata))

    return make
