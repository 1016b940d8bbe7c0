"""Models that are on this machine already: the folder of an Ollama installation.

Model files become hard links where the file system allows one, else references, so nothing is
copied and nothing in the folder is changed; each is read once to compare its hash with its name.
"""

from pathlib import Path

from localllm.errors import LocalLLMError, ModelNotFound, PullFailed, StoreError
from localllm.names import ModelName
from localllm.pull.events import OnProgress, Status
from localllm.pull.manifest import CONFIG_KIND, LARGE_KINDS, check_config, layers_of
from localllm.store import MAX_MANIFEST_BYTES, Layer, Store, StoredModel


def import_folder(folder: Path, store: Store, on_progress: OnProgress) -> list[StoredModel]:
    """Take over all models of an Ollama folder; returns those that are new.

    What cannot be taken over is told and left out, and so are names that mean another model here.
    Raises PullFailed if the folder is none of Ollama's.
    """
    root = next((f for f in (folder, folder / "models") if (f / "manifests").is_dir()), None)
    if root is None:
        raise PullFailed(f"{folder} is not a model folder of Ollama: it has no 'manifests'")
    found = []
    for path in sorted((root / "manifests").glob("*/*/*/*")):
        host, namespace, model, tag = path.parts[-4:]
        text = f"{host}/{namespace}/{model}:{tag}"
        try:
            name = ModelName.parse(text)
            imported = _import(path, name, root / "blobs", store, on_progress)
        except (LocalLLMError, OSError) as error:
            on_progress(Status(f"left out {text}: {error}"))
            continue
        if imported is not None:
            found.append(imported)
            on_progress(Status(f"imported {name}"))
    return found


def _import(
    path: Path, name: ModelName, blobs: Path, store: Store, on_progress: OnProgress
) -> StoredModel | None:
    """One model; None if it is there already."""
    with path.open("rb") as file:
        manifest = file.read(MAX_MANIFEST_BYTES + 1)
    if len(manifest) > MAX_MANIFEST_BYTES:
        raise PullFailed(f"its manifest is longer than {MAX_MANIFEST_BYTES} bytes")
    layers = layers_of(manifest)
    try:
        existing = store.find(name)
    except ModelNotFound:
        existing = None
    if existing is not None:
        if {layer.digest for layer in existing.model_layers} == _models(layers):
            on_progress(Status(f"{name} is here already"))
            return None
        raise StoreError("another model of that name is here; remove it first")
    on_progress(Status(f"reading {name}"))
    for layer in layers:
        _add(layer, _blob(blobs, layer.digest), store, name)
    return store.add_manifest(name, manifest)


def _models(layers: list[Layer]) -> set[str]:
    return {layer.digest for layer in layers if layer.kind == "model"}


def _add(layer: Layer, blob: Path, store: Store, name: ModelName) -> None:
    """One layer, compared with the manifest."""
    if store.has(layer.digest):
        return
    if layer.kind in LARGE_KINDS:
        added = store.add_file([blob])
    else:
        if blob.stat().st_size != layer.size:
            raise PullFailed(f"{blob} has {blob.stat().st_size} bytes instead of {layer.size}")
        data = blob.read_bytes()
        if layer.kind == CONFIG_KIND:
            check_config(data, str(name))
        added = store.add_bytes(layer.kind, data)
    if added.digest != layer.digest:
        store.forget([added.digest])
        raise PullFailed(f"{blob} is damaged: its content has another hash than its name")


def _blob(blobs: Path, digest: str) -> Path:
    """A blob's file; old versions wrote a colon."""
    path = blobs / f"sha256-{digest}"
    return path if path.exists() else blobs / f"sha256:{digest}"
