"""Models of an Ollama installation are taken over without copying."""

import hashlib
import os
from pathlib import Path

import pytest
from pulling import make_model
from registry_standin import CONFIG, layer_of, manifest_of

from localllm.errors import PullFailed
from localllm.names import ModelName
from localllm.pull.events import Status
from localllm.pull.folders import import_folder
from localllm.store import Store

DATA = make_model()
PARTS = [("model", DATA), ("system", b"Be nice.")]


@pytest.fixture
def ollama(tmp_path: Path) -> Path:
    """A folder as Ollama leaves it, with two models that share a file."""
    folder = tmp_path / "ollama" / "models"
    add(folder, "registry.ollama.ai/library/tiny/latest", PARTS)
    add(folder, "hf.co/me/other/Q4_0", [PARTS[0]], separator=":")
    return folder


def add(folder: Path, name: str, parts: list[tuple[str, bytes]], *, separator: str = "-") -> None:
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    for data in (CONFIG, *(data for _, data in parts)):
        digest = hashlib.sha256(data).hexdigest()
        if not (folder / "blobs" / f"sha256-{digest}").exists():
            (folder / "blobs" / f"sha256{separator}{digest}").write_bytes(data)
    path = folder / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(manifest_of([layer_of(kind, data) for kind, data in parts]))


def take_over(folder: Path, store: Store) -> tuple[list[str], list[str]]:
    """Names of the new models, and what was told."""
    told: list[str] = []
    models = import_folder(
        folder, store, lambda event: told.append(event.text) if isinstance(event, Status) else None
    )
    return [str(model.name) for model in models], told


def test_models_are_linked(ollama: Path, store: Store) -> None:
    names, _ = take_over(ollama, store)
    assert names == ["hf.co/me/other:Q4_0", "tiny:latest"]
    model = store.find(ModelName.parse("tiny"))
    blob = ollama / "blobs" / f"sha256-{hashlib.sha256(DATA).hexdigest()}"
    assert store.model_file(model).samefile(blob)
    assert store.recipe(model).system == "Be nice."
    manifest = (ollama / "manifests/registry.ollama.ai/library/tiny/latest").read_bytes()
    assert model.digest == hashlib.sha256(manifest).hexdigest()


def test_file_stays_when_ollama_removes_it(ollama: Path, store: Store) -> None:
    take_over(ollama.parent, store)
    for blob in (ollama / "blobs").iterdir():
        blob.unlink()
    assert store.model_file(store.find(ModelName.parse("tiny"))).read_bytes() == DATA


def test_other_file_system_is_referred_to(
    ollama: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object) -> None:
        raise OSError("another file system")

    monkeypatch.setattr(os, "link", no_link)
    take_over(ollama, store)
    path = store.model_file(store.find(ModelName.parse("tiny")))
    assert path.is_relative_to(ollama)


def test_second_time_changes_nothing(ollama: Path, store: Store) -> None:
    take_over(ollama, store)
    names, told = take_over(ollama, store)
    assert names == []
    assert told == ["hf.co/me/other:Q4_0 is here already", "tiny:latest is here already"]


def test_other_model_of_that_name_is_kept(ollama: Path, store: Store) -> None:
    take_over(ollama, store)
    add(ollama, "registry.ollama.ai/library/tiny/latest", [("model", make_model(seed=1))])
    names, told = take_over(ollama, store)
    assert names == []
    assert told[-1].endswith("tiny:latest: another model of that name is here; remove it first")
    assert store.model_file(store.find(ModelName.parse("tiny"))).read_bytes() == DATA


def test_damaged_models_are_left_out(ollama: Path, store: Store) -> None:
    blob = ollama / "blobs" / f"sha256-{hashlib.sha256(b'Be nice.').hexdigest()}"
    blob.write_bytes(b"Be evil.")
    (ollama / "manifests/hf.co/me/other/gone").write_bytes(
        manifest_of([layer_of("model", b"nowhere")])
    )
    (ollama / "manifests/hf.co/me/other/bad").write_text("{")
    (ollama / "manifests/hf.co/me/other/-x").write_text("{}")
    names, told = take_over(ollama, store)
    assert names == ["hf.co/me/other:Q4_0"]
    left_out = [text for text in told if text.startswith("left out")]
    assert len(left_out) == 4
    assert any("another hash than its name" in text for text in left_out)
    assert any("invalid model name" in text for text in left_out)
    assert len(store.models()) == 1


def test_any_other_folder_is_refused(tmp_path: Path, store: Store) -> None:
    with pytest.raises(PullFailed, match="is not a model folder of Ollama"):
        take_over(tmp_path, store)
