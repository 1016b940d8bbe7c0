import hashlib
import json
import os
from pathlib import Path

import pytest

from localllm.errors import BadFile, BadRequest, ModelNotFound, StoreError
from localllm.names import ModelName
from localllm.store import Recipe, Store, StoredModel, parse_digest

CONFIG = {"model_format": "gguf", "model_family": "llama"}
NO_RECIPE = Recipe()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + bytes(1000))
    return path


def create(store: Store, name: str, path: Path, recipe: Recipe = NO_RECIPE) -> StoredModel:
    return store.create(ModelName.parse(name), store.add_file([path]), CONFIG, recipe)


def files_below(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_created_model_is_found_in_any_case_with_all_its_parts(
    store: Store, model_file: Path
) -> None:
    recipe = Recipe(
        system="Be brief.",
        parameters={"temperature": 0.5, "stop": ["a", "b"]},
        messages=[{"role": "user", "content": "hi"}],
        licenses=["MIT", "Apache"],
    )
    create(store, "Tiny:V1", model_file, recipe)
    model = store.find(ModelName.parse("tiny:v1"))
    assert str(model.name) == "Tiny:V1"
    assert model.config == CONFIG
    assert store.recipe(model) == recipe
    assert store.model_file(model).read_bytes() == model_file.read_bytes()
    path = store.root / "manifests/registry.ollama.ai/library/Tiny/V1"
    assert model.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    layers = json.loads(path.read_bytes())["layers"]
    assert layers[0] == {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": "sha256:" + hashlib.sha256(model_file.read_bytes()).hexdigest(),
        "size": 1004,
    }
    assert model.size == sum(layer["size"] for layer in layers) + model.config_layer.size


def test_local_file_is_linked_not_copied(store: Store, model_file: Path) -> None:
    model = create(store, "tiny", model_file)
    assert store.model_file(model).samefile(model_file)
    model_file.unlink()
    assert store.model_file(model).read_bytes().startswith(b"GGUF")


def test_local_file_that_cannot_be_linked_is_referenced(
    store: Store, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object) -> None:
        raise OSError("another file system")

    monkeypatch.setattr(os, "link", no_link)
    model = create(store, "tiny", model_file)
    assert store.model_file(model) == model_file
    model_file.unlink()
    with pytest.raises(StoreError, match=r"x\.gguf, the file of model 'tiny:latest', is gone"):
        store.model_file(model)


def test_file_that_changed_is_refused_until_created_again(store: Store, model_file: Path) -> None:
    model = create(store, "tiny", model_file)
    os.utime(model_file, ns=(1, 1))
    with pytest.raises(StoreError, match=r"x\.gguf changed since model 'tiny:latest'"):
        store.model_file(model)
    assert store.model_file(create(store, "tiny", model_file)).samefile(model_file)
    with model_file.open("r+b") as file:
        file.write(b"other")
    os.utime(model_file, ns=(2, 2))
    with pytest.raises(StoreError, match="changed since"):
        store.model_file(model)
    model = create(store, "tiny", model_file)
    assert store.model_file(model).read_bytes() == model_file.read_bytes()


def test_another_file_of_the_same_content_changes_nothing(
    store: Store, model_file: Path, tmp_path: Path
) -> None:
    model = create(store, "tiny", model_file)
    other = tmp_path / "other.gguf"
    other.write_bytes(model_file.read_bytes())
    create(store, "other", other)
    os.utime(other, ns=(1, 1))
    assert store.model_file(model).samefile(model_file)


def test_parts_of_a_split_file_are_one_layer(store: Store, tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    for part in parts:
        part.write_bytes(part.name.encode())
    model = store.create(ModelName.parse("m"), store.add_file(parts), CONFIG, Recipe())
    assert store.model_file(model) == parts[0]
    parts[1].unlink()
    with pytest.raises(StoreError, match="is gone"):
        store.model_file(model)


def test_missing_file_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"no\.gguf: No such file"):
        store.add_file([tmp_path / "no.gguf"])


def test_blobs_go_with_the_last_model_that_uses_them(store: Store, model_file: Path) -> None:
    create(store, "a", model_file, Recipe(system="one"))
    store.copy(ModelName.parse("a"), ModelName.parse("b"))
    create(store, "a", model_file, Recipe(system="two"))
    assert store.recipe(store.find(ModelName.parse("b"))).system == "one"
    before = files_below(store.root / "blobs")
    store.remove(ModelName.parse("b"))
    assert len(files_below(store.root / "blobs")) == len(before) - 1
    store.remove(ModelName.parse("A"))
    assert files_below(store.root) == set()
    assert model_file.exists()
    with pytest.raises(ModelNotFound, match="model 'a:latest' not found"):
        store.remove(ModelName.parse("a"))


def test_names_that_differ_in_case_never_become_two_models(store: Store, model_file: Path) -> None:
    create(store, "Me/Tiny:V1", model_file)
    create(store, "me/tiny:v1", model_file)
    create(store, "ME/other", model_file)
    assert {str(model.name) for model in store.models()} == {"Me/Tiny:V1", "Me/other:latest"}


def test_models_are_listed_newest_first_without_damaged_ones(
    store: Store, model_file: Path
) -> None:
    for n, name in enumerate(("a", "b", "c")):
        create(store, name, model_file)
        path = store.root / "manifests/registry.ollama.ai/library" / name / "latest"
        os.utime(path, (n, n))
    (store.root / "manifests/registry.ollama.ai/library/b/latest").write_bytes(b"{]")
    assert [str(model.name) for model in store.models()] == ["c:latest", "a:latest"]


def test_nothing_is_pruned_while_a_manifest_is_damaged(store: Store, model_file: Path) -> None:
    create(store, "a", model_file)
    create(store, "b", model_file, Recipe(system="b"))
    (store.root / "manifests/registry.ollama.ai/library/a/latest").write_bytes(b"{]")
    before = files_below(store.root / "blobs")
    store.remove(ModelName.parse("b"))
    assert files_below(store.root / "blobs") == before


def test_prune_removes_what_nobody_names_or_touched_lately(store: Store, model_file: Path) -> None:
    create(store, "a", model_file)
    kept = files_below(store.root)
    new, old = store.add_bytes("system", b"new"), store.add_bytes("system", b"old")
    os.utime(store.root / "blobs" / f"sha256-{old.digest}", (1, 1))
    store.prune()
    assert files_below(store.root) == kept | {f"sha256-{new.digest}"}


def test_received_blob_appears_whole_and_with_the_right_digest_or_not_at_all(store: Store) -> None:
    digest = hashlib.sha256(b"hello").hexdigest()
    with store.receive(digest) as writer:
        writer.write(b"hel")
        writer.write(b"lo")
        assert store.blob_size(digest) is None
        writer.finish()
    assert store.blob_size(digest) == 5
    wrong = "0" * 64
    with store.receive(wrong) as writer:
        writer.write(b"hello")
        with pytest.raises(BadRequest, match="digest mismatch"):
            writer.finish()
    assert files_below(store.root) == {f"sha256-{digest}"}


@pytest.mark.parametrize("text", ["", "sha256:", "sha256:xyz", "md5:" + "0" * 64, "0" * 64])
def test_other_digests_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="invalid digest format"):
        parse_digest(text)


def test_both_forms_of_a_digest_are_read() -> None:
    assert parse_digest("sha256:" + "A" * 64) == parse_digest("sha256-" + "a" * 64) == "a" * 64
