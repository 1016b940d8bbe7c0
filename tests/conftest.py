"""Fixtures that several areas share: the folder of outside data, and the two real models."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.models import ModelUnavailable, fetch

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """llama.cpp's logits and real vocabularies; tests that need them skip where they are absent."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("the shared data folder is not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def archfix(shared_data: Path) -> ModuleType:
    """The tool that writes a tiny GGUF from its description."""
    spec = importlib.util.spec_from_file_location(
        "archfix", shared_data.parent / "tools" / "archfix.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def real_model(name: str) -> Path:
    try:
        return fetch(name)
    except ModelUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1."""
    return real_model("smollm2")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M base Q4_K_M (tensors of five types)."""
    return real_model("gemma3")
