"""The model store: content-addressed blobs and manifests, laid out as Ollama's.

    manifests/<host>/<namespace>/<model>/<tag>   JSON: the layers of a model by digest
    blobs/sha256-<hex>                           model files, system prompts, parameters, ...
    references/sha256-<hex>                      JSON: the user's own file that a blob stands for
    splits/sha256-<hex>/                         links to the blobs of a split model, named as its parts
    partial/                                     downloads that are not complete (pull/)

A model made from a local file is not copied: its blob is a hard link where the file system allows
one, else only a reference, and either way device, inode, size and time are compared with those at
creation whenever the model is opened.

Invariants: a manifest is written after its blobs and names complete ones only; every file appears
whole (written beside and renamed); blobs go with the last manifest that names them.

Not here: what is inside a model file (describe.py), downloads (pull/).
"""

import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.errors import BadRequest, ModelNotFound, StoreError
from localllm.names import ModelName
from localllm.user_files import check_unchanged, fingerprint, try_link

LAYER_PREFIX = "application/vnd.ollama.image."
CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
MAX_MANIFEST_BYTES = 1 << 20
MAX_TEXT_LAYER_BYTES = 16 << 20
DIGEST_LENGTH = 64
PRUNE_SECONDS = 3600
PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class Layer:
    """One part of a model: its kind (`model`, `system`, `params`, ...), content hash and size."""

    kind: str
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model as its manifest describes it. `digest` is that of the manifest, bare hex."""

    name: ModelName
    digest: str
    modified_at: float
    config: dict[str, Any]
    config_layer: Layer
    layers: tuple[Layer, ...]

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return self.config_layer.size + sum(layer.size for layer in self.layers)

    @property
    def model_layers(self) -> tuple[Layer, ...]:
        """The model file, or all parts of a split one in order."""
        return tuple(layer for layer in self.layers if layer.kind == "model")

    def layer(self, kind: str) -> Layer | None:
        """The last layer of a kind."""
        return next((layer for layer in reversed(self.layers) if layer.kind == kind), None)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What distinguishes a new model from the file or the model it is made from.

    config  entries of the config blob that differ
    """

    system: str | None = None
    template: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, str]] | None = None
    licenses: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


def parse_digest(text: str) -> str:
    """Bare hex of `sha256:<hex>` or `sha256-<hex>`."""
    digest = text[7:].lower()
    valid = text[:7] in ("sha256:", "sha256-") and len(digest) == DIGEST_LENGTH
    if not valid or not set(digest) <= set("0123456789abcdef"):
        raise BadRequest("invalid digest format")
    return digest


class Store:
    """The store below one folder, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._manifests = root / "manifests"
        self._blobs = root / "blobs"
        self._references = root / "references"
        self._splits = root / "splits"
        self.partial = root / "partial"

    def models(self) -> list[StoredModel]:
        """All models, the newest first; damaged manifests are left out."""
        models = []
        for path in self._manifest_files():
            try:
                models.append(self._read_manifest(path))
            except (StoreError, BadRequest):
                continue
        return sorted(models, key=lambda model: model.modified_at, reverse=True)

    def find(self, name: ModelName) -> StoredModel:
        """The model of that name, in whatever case. Raises ModelNotFound."""
        path = self._existing(name)
        if path is None:
            raise ModelNotFound(f"model '{name}' not found")
        return self._read_manifest(path)

    def text(self, layer: Layer) -> str:
        """Content of a small layer."""
        if layer.size > MAX_TEXT_LAYER_BYTES:
            raise StoreError(f"layer {layer.kind} of {layer.size} bytes is too large for text")
        path = self._blob(layer.digest)
        try:
            return path.read_text("utf-8", errors="replace")
        except OSError as error:
            raise StoreError(f"the store misses {path.name}: {error.strerror}") from error

    def texts(self, model: StoredModel, kind: str) -> list[str]:
        """Contents of all layers of a kind, in order."""
        return [self.text(layer) for layer in model.layers if layer.kind == kind]

    def recipe(self, model: StoredModel) -> Recipe:
        """What the model's layers say besides the model file."""
        system, template = (self.texts(model, kind) for kind in ("system", "template"))
        parameters, messages = (self.texts(model, kind) for kind in ("params", "messages"))
        try:
            return Recipe(
                system=system[-1] if system else None,
                template=template[-1] if template else None,
                parameters=dict(json.loads(parameters[-1])) if parameters else {},
                messages=list(json.loads(messages[-1])) if messages else None,
                licenses=self.texts(model, "license"),
            )
        except (ValueError, TypeError) as error:
            raise StoreError(f"the store's model '{model.name}' is damaged: {error}") from error

    def model_file(self, model: StoredModel) -> Path:
        """Where the model's GGUF file is, checked to be the one that was added.

        Raises StoreError if it is gone or has changed.
        """
        return self.file_of_layers(model.model_layers, str(model.name))

    def adapter_file(self, model: StoredModel) -> Path | None:
        """Where the model's adapter is, checked like the model file; None if it has none.

        Raises StoreError if it is gone or has changed, or if there are several.
        """
        adapters = [layer for layer in model.layers if layer.kind == "adapter"]
        if len(adapters) > 1:
            raise StoreError(f"model '{model.name}' has {len(adapters)} adapters, one is supported")
        return self.file_of(adapters[0].digest, str(model.name)) if adapters else None

    def file_of_layers(self, layers: Sequence[Layer], name: str) -> Path:
        """The file to open for model layers: the only one, or the first part of a split model.

        Raises StoreError if a file is gone or has changed; `name` is for the message.
        """
        files = [self.file_of(layer.digest, name) for layer in layers]
        if not files:
            raise StoreError(f"model '{name}' has no model file")
        if len(files) == 1:
            return files[0]
        folder = self._splits / f"sha256-{layers[0].digest}"
        parts = [folder / f"model-{n:05}-of-{len(files):05}.gguf" for n, _ in enumerate(files, 1)]
        for part, file in zip(parts, files):
            self._symlink(part, file)
        return parts[0]

    def has(self, digest: str) -> bool:
        """Whether the content of that hash is there, be it a blob or a file of the user's."""
        try:
            self.file_of(digest, digest)
        except StoreError:
            return False
        return True

    def file_of(self, digest: str, name: str) -> Path:
        """Like `model_file`, for the blob of a digest; `name` is for the error."""
        blob = self._blob(digest)
        try:
            files = json.loads((self._references / blob.name).read_text())["files"]
        except FileNotFoundError:
            if not blob.is_file():
                raise StoreError(f"the file of model '{name}' is gone from the store") from None
            return blob
        except (OSError, ValueError, KeyError) as error:
            raise StoreError(f"the reference of model '{name}' is damaged: {error}") from error
        linked = blob.is_file()
        for file in files:
            check_unchanged(blob if linked else Path(file["path"]), file, name)
        return blob if linked else Path(files[0]["path"])

    def add_file(self, paths: Sequence[Path]) -> Layer:
        """Make the user's own file (or all parts of a split one) a model layer without copying it.

        Takes the time to read it once. Raises BadFile if it cannot be read.
        """
        files, digest = fingerprint(paths)
        blob = self._blob(digest)
        reference = self._references / blob.name
        try:
            self.file_of(digest, digest)
        except StoreError:
            blob.parent.mkdir(parents=True, exist_ok=True)
            blob.unlink(missing_ok=True)
            if len(paths) == 1:
                try_link(paths[0], blob)
            self._write(reference, json.dumps({"files": files}, indent=1).encode())
        return Layer("model", digest, sum(int(file["size"]) for file in files))

    def add_bytes(self, kind: str, data: bytes) -> Layer:
        """Store a small layer."""
        digest = hashlib.sha256(data).hexdigest()
        path = self._blob(digest)
        if not path.is_file():
            self._write(path, data)
        return Layer(kind, digest, len(data))

    def blob_size(self, digest: str) -> int | None:
        """Size of a blob that is in the store, else None."""
        try:
            return self._blob(digest).stat().st_size
        except FileNotFoundError:
            return None

    def receive(self, digest: str) -> "BlobWriter":
        """A place to write a blob's bytes to as they arrive."""
        self._blobs.mkdir(parents=True, exist_ok=True)
        return BlobWriter(self._blob(digest))

    def adopt(self, path: Path, digest: str) -> None:
        """Make a complete file below the store's folder, known to have that hash, a blob."""
        blob = self._blob(digest)
        blob.parent.mkdir(parents=True, exist_ok=True)
        os.chmod(path, 0o644)
        os.utime(path)  # not to be taken for old by `prune` before the manifest is there
        os.replace(path, blob)
        (self._references / blob.name).unlink(missing_ok=True)

    def forget(self, digests: Iterable[str]) -> None:
        """Remove those of the blobs that no model uses."""
        self._drop(digests)

    def add_manifest(self, name: ModelName, data: bytes) -> StoredModel:
        """Write a manifest as it was received, replacing one of that name; its blobs are there."""
        path = self._path(name)
        self._replace(path, data)
        return self._read_manifest(path)

    def create(
        self,
        name: ModelName,
        model: Layer,
        config: Mapping[str, Any],
        recipe: Recipe,
        *,
        shards: Sequence[Layer] = (),
        adapter: Layer | None = None,
    ) -> StoredModel:
        """Write the manifest of a model, replacing one of that name.

        `shards` are the further parts of a split model whose first part is `model`.
        """
        layers = [model, *shards, *([] if adapter is None else [adapter])]
        for kind, text in (("template", recipe.template), ("system", recipe.system)):
            if text:
                layers.append(self.add_bytes(kind, text.encode()))
        if recipe.parameters:
            layers.append(self.add_bytes("params", _json(dict(recipe.parameters))))
        if recipe.messages:
            layers.append(self.add_bytes("messages", _json([dict(m) for m in recipe.messages])))
        layers += [self.add_bytes("license", text.encode()) for text in recipe.licenses]
        config_layer = self.add_bytes("config", _json({**config, **recipe.config}))
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": _layer_json(config_layer, CONFIG_TYPE),
            "layers": [_layer_json(layer, LAYER_PREFIX + layer.kind) for layer in layers],
        }
        return self.add_manifest(name, _json(manifest))

    def copy(self, source: ModelName, destination: ModelName) -> None:
        """Give a model another name, replacing one of that name."""
        path = self._existing(source)
        if path is None:
            raise ModelNotFound(f'model "{source}" not found')
        self._replace(self._path(destination), path.read_bytes())

    def remove(self, name: ModelName) -> None:
        """Forget a model, and the blobs that no other one uses."""
        path = self._existing(name)
        if path is None:
            raise ModelNotFound(f"model '{name}' not found")
        digests = self._digests(path)
        path.unlink()
        for folder in path.parents[:3]:
            try:
                folder.rmdir()
            except OSError:
                break
        self._drop(digests)

    def prune(self) -> None:
        """Remove what no manifest names and nobody has touched for an hour."""
        found = {path.name: path for path in (*_entries(self._blobs), *_entries(self._references))}
        oldest_kept = time.time() - PRUNE_SECONDS
        old = [name for name, path in found.items() if path.lstat().st_mtime < oldest_kept]
        self._drop(name.removeprefix("sha256-") for name in old)
        for path in self.root.rglob(f".*{PARTIAL}"):
            if path.lstat().st_mtime < oldest_kept:
                path.unlink(missing_ok=True)

    def _drop(self, digests: Iterable[str]) -> None:
        """Remove blobs that no manifest names; nothing at all if a manifest cannot be read."""
        used: set[str] = set()
        for path in self._manifest_files():
            try:
                used |= self._digests(path)
            except StoreError:
                return
        for digest in set(digests) - used:
            self._blob(digest).unlink(missing_ok=True)
            (self._references / f"sha256-{digest}").unlink(missing_ok=True)
            shutil.rmtree(self._splits / f"sha256-{digest}", ignore_errors=True)

    def _digests(self, manifest: Path) -> set[str]:
        """Hashes of all that a manifest names."""
        model = self._read_manifest(manifest)
        return {layer.digest for layer in (model.config_layer, *model.layers)}

    def _replace(self, manifest: Path, data: bytes) -> None:
        """Write a manifest and remove what only its predecessor named."""
        try:
            before = self._digests(manifest) if manifest.is_file() else set()
        except StoreError:
            before = set()
        self._write(manifest, data)
        self._drop(before)

    def _blob(self, digest: str) -> Path:
        return self._blobs / f"sha256-{digest}"

    def _existing(self, name: ModelName) -> Path | None:
        """The manifest of a name in whatever case, the given case first."""
        exact = self._manifests.joinpath(*name.parts)
        if exact.is_file():
            return exact
        return next((path for found, path in self._names() if found.key == name.key), None)

    def _path(self, name: ModelName) -> Path:
        """Where to write a manifest: each part takes the case of what exists."""
        path = self._existing(name)
        if path is not None:
            return path
        folder = self._manifests
        for part in name.parts:
            folder /= next((n for n in _listdir(folder) if n.lower() == part.lower()), part)
        return folder

    def _names(self) -> Iterator[tuple[ModelName, Path]]:
        for path in sorted(self._manifest_files()):
            yield ModelName(*path.parts[-4:]), path

    def _manifest_files(self) -> list[Path]:
        """All manifests, without those that are being written."""
        return [path for path in self._manifests.glob("*/*/*/*") if path.suffix != PARTIAL]

    def _read_manifest(self, path: Path) -> StoredModel:
        try:
            with path.open("rb") as file:
                data = file.read(MAX_MANIFEST_BYTES)
                modified_at = os.fstat(file.fileno()).st_mtime
            manifest = json.loads(data)
            config_layer = _layer_of(manifest["config"])
            layers = tuple(_layer_of(layer) for layer in manifest["layers"])
            config = dict(json.loads(self._blob(config_layer.digest).read_bytes()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoreError(f"the manifest {path} is damaged: {error}") from error
        digest = hashlib.sha256(data).hexdigest()
        name = ModelName(*path.parts[-4:])
        return StoredModel(name, digest, modified_at, config, config_layer, layers)

    def _symlink(self, link: Path, file: Path) -> None:
        """Make `link` point to `file`, relative to the store so that it can be moved."""
        target = os.path.relpath(file, link.parent)
        if link.is_symlink() and os.readlink(link) == target:
            return
        partial = link.with_name(f".{link.name}-{os.getpid()}-{threading.get_ident()}")
        try:
            link.parent.mkdir(parents=True, exist_ok=True)
            partial.symlink_to(target)
            os.replace(partial, link)
        except OSError as error:
            raise StoreError(f"cannot write {link}: {error.strerror}") from error

    def _write(self, path: Path, data: bytes) -> None:
        """Make `path` appear with all of `data` at once."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with BlobWriter(path) as writer:
                writer.write(data)
                writer.keep()
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror}") from error


class BlobWriter:
    """A file that appears at `path` on `keep` or `finish`, and leaves no trace otherwise."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = tempfile.NamedTemporaryFile(  # noqa: SIM115
            dir=path.parent, prefix=".", suffix=PARTIAL, delete=False
        )
        self._hash = hashlib.sha256()

    def __enter__(self) -> "BlobWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        Path(self._file.name).unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        self._hash.update(data)
        self._file.write(data)

    def keep(self) -> None:
        """Make the file appear."""
        self._file.flush()
        os.fsync(self._file.fileno())
        os.chmod(self._file.name, 0o644)
        os.replace(self._file.name, self._path)

    def finish(self) -> None:
        """Make the blob appear if its content has the digest of its name."""
        want, got = self._path.name.removeprefix("sha256-"), self._hash.hexdigest()
        if want != got:
            raise BadRequest(f'digest mismatch, expected "sha256:{want}", got "sha256:{got}"')
        self.keep()


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _layer_json(layer: Layer, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{layer.digest}", "size": layer.size}


def _layer_of(value: Mapping[str, Any]) -> Layer:
    kind = str(value["mediaType"]).removeprefix(LAYER_PREFIX)
    return Layer(kind, parse_digest(str(value["digest"])), int(value["size"]))


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if path.is_file()]


def _listdir(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []
