"""A model's adapter in the store: found again, checked, removed with its last model."""

from dataclasses import replace
from pathlib import Path

import pytest

from localllm.errors import StoreError
from localllm.names import ModelName
from localllm.store import Layer, Recipe, Store, StoredModel


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


def add(store: Store, path: Path, content: bytes) -> Layer:
    path.write_bytes(content)
    return store.add_file([path])


def create(store: Store, folder: Path, name: str, adapter: Layer | None) -> StoredModel:
    model = add(store, folder / "x.gguf", b"GGUF model")
    return store.create(ModelName.parse(name), model, {}, Recipe(), adapter=adapter)


def test_an_adapter_is_found_and_goes_with_its_last_model(store: Store, tmp_path: Path) -> None:
    adapter = replace(add(store, tmp_path / "a.gguf", b"GGUF adapter"), kind="adapter")
    made = create(store, tmp_path, "made", adapter)
    create(store, tmp_path, "plain", None)
    file = store.adapter_file(made)
    assert file is not None
    assert file.read_bytes() == b"GGUF adapter"
    assert store.adapter_file(store.find(ModelName.parse("plain"))) is None
    # It is no part of the model file.
    assert [layer.kind for layer in made.model_layers] == ["model"]
    store.remove(ModelName.parse("made"))
    assert not store.has(adapter.digest)
    assert store.has(made.model_layers[0].digest)


def test_an_adapter_that_changed_is_refused(store: Store, tmp_path: Path) -> None:
    adapter = replace(add(store, tmp_path / "a.gguf", b"GGUF adapter"), kind="adapter")
    made = create(store, tmp_path, "made", adapter)
    (tmp_path / "a.gguf").write_bytes(b"GGUF adapter, trained longer")
    with pytest.raises(StoreError, match="changed"):
        store.adapter_file(made)


def test_several_adapters_are_refused_and_not_left_out(store: Store, tmp_path: Path) -> None:
    layers = [add(store, tmp_path / f"{c}.gguf", f"GGUF {c}".encode()) for c in "ab"]
    first, second = (replace(layer, kind="adapter") for layer in layers)
    made = create(store, tmp_path, "made", first)
    with pytest.raises(StoreError, match="has 2 adapters, one is supported"):
        store.adapter_file(replace(made, layers=(*made.layers, second)))
