"""Tiny models of the shared data folder as files."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def tiny_model(shared_data: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Writes the tiny model of that name and gives its path."""
    tool = shared_data.parent / "tools" / "archfix.py"
    spec = importlib.util.spec_from_file_location("archfix", tool)
    assert spec is not None
    assert spec.loader is not None
    archfix = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(archfix)

    def write(name: str) -> Path:
        path = tmp_path / f"{name}.gguf"
        archfix.write(json.loads((shared_data / "archs" / f"{name}.json").read_text()), path)
        return path

    return write


@pytest.fixture
def token_ids(shared_data: Path) -> np.ndarray:
    """The ids that the tiny models' expected logits are for."""
    return np.load(shared_data / "archs" / "tokens.npy").astype(np.int32)
