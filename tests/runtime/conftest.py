"""The tiny model, open and as a file."""

from pathlib import Path

import pytest
from byte_model import write_tiny_model

from localllm.config import Settings
from localllm.runtime import LoadedModel


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_model(path)
    return path


@pytest.fixture
def make_model(tmp_path: Path):
    """Opens the tiny model with a chat template of its own."""

    def make(template: str) -> LoadedModel:
        path = tmp_path / "own.gguf"
        write_tiny_model(path, template)
        return LoadedModel.open(path, Settings(cache_dir=tmp_path / "cache"), backend="reference")

    return make


@pytest.fixture(scope="module")
def model(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory):
    settings = Settings(cache_dir=tmp_path_factory.mktemp("cache"))
    with LoadedModel.open(tiny_path, settings, backend="reference") as loaded:
        yield loaded
