"""Tiny models of the shared data folder, and a driver that feeds a backend like the scheduler."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from driving import run_tokens

from localllm.backends import BackendOptions
from localllm.backends.reference import ReferenceBackend
from localllm.gguf import GgufFile
from localllm.models.spec import ModelSpec

Description = dict[str, Any]
WriteModel = Callable[[Description], GgufFile]


@pytest.fixture
def describe(shared_data: Path) -> Callable[[str], Description]:
    """The description of a tiny model by name."""

    def read(name: str) -> Description:
        description: Description = json.loads((shared_data / "archs" / f"{name}.json").read_text())
        return description

    return read


@pytest.fixture
def write_model(archfix: ModuleType, tmp_path: Path) -> Iterator[WriteModel]:
    """Write a description to a file and open it."""
    files: list[GgufFile] = []

    def write(description: Description) -> GgufFile:
        path = tmp_path / f"model-{len(files)}.gguf"
        archfix.write(description, path)
        files.append(GgufFile.open(path))
        return files[-1]

    yield write
    for file in files:
        file.close()


@pytest.fixture
def open_reference() -> Callable[..., ReferenceBackend]:
    """A reference backend for a few short sequences."""

    def open_backend(file: GgufFile, spec: ModelSpec) -> ReferenceBackend:
        num_groups = len(spec.kv_groups)
        options = BackendOptions(num_blocks=(8,) * num_groups, table_width=8, max_rows=512)
        return ReferenceBackend(file, spec, options)

    return open_backend


@pytest.fixture
def logits_of() -> Callable[..., np.ndarray]:
    return run_tokens
