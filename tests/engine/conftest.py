"""A tiny real model, for engines whose arithmetic must be real."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from localllm.gguf import GgufFile


@pytest.fixture
def windowed(archfix: ModuleType, shared_data: Path, tmp_path: Path) -> Iterator[GgufFile]:
    """A gemma3, some of whose layers have windows."""
    path = tmp_path / "model.gguf"
    archfix.write(json.loads((shared_data / "archs" / "gemma3-dense.json").read_text()), path)
    with GgufFile.open(path) as file:
        yield file
