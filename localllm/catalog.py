"""Models by name or by path: what a request's `model` means, and what is known about it.

Joins the store with the descriptions of model files. A path is for callers that know the secret of
the data folder; others could make the daemon open any file.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localllm.describe import OPTIONAL_CAPABILITIES, Description, describe_apart
from localllm.errors import BadFile, BadRequest, CloudModel, ModelNotFound
from localllm.loaded import Target
from localllm.names import ModelName, is_cloud
from localllm.store import Layer, Recipe, Store, StoredModel
from localllm.text.dialects import capabilities

MAX_DESCRIPTIONS = 32


@dataclass(frozen=True, slots=True)
class Resolved:
    """A model that a request named: the file to run and what the store adds to it."""

    target: Target
    recipe: Recipe
    stored: StoredModel | None


@dataclass(frozen=True, slots=True)
class GivenAdapter:
    """An adapter for a model that is being made, and the architecture that it is for."""

    layer: Layer
    architecture: str

    def check(self, config: Mapping[str, Any]) -> None:
        """Raises BadRequest if it is for other models than that of `config`."""
        family = config.get("model_family")
        if family != self.architecture:
            raise BadRequest(f"the adapter is for {self.architecture}, the model is {family}")


class Catalog:
    """All models there are. Changes happen one at a time."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = asyncio.Lock()
        self._described: OrderedDict[tuple[object, ...], Description] = OrderedDict()

    def resolve(self, model: str, *, is_trusted: bool) -> Resolved:
        """The model of a name, or of an absolute path if the caller is trusted.

        Raises BadRequest or ModelNotFound, as what the caller wrote.
        """
        if model.startswith("/"):
            return self._resolve_path(Path(model), is_trusted=is_trusted)
        stored = self._find(model)
        adapter = stored.layer("adapter")
        target = Target(
            self.store.model_file(stored),
            str(stored.name),
            stored.digest,
            details_of(stored.config),
            stored.size,
            adapter=self.store.adapter_file(stored),
            adapter_digest=adapter.digest if adapter else "",
        )
        return Resolved(target, self.store.recipe(stored), stored)

    def _find(self, model: str) -> StoredModel:
        """The model of a name, which may end with `:local` to say that it is no cloud model."""
        name = model.strip().removesuffix(":local")
        if is_cloud(name):
            if name != model.strip():
                raise BadRequest(f'use either :local or :cloud, not both: "{model}"')
            raise CloudModel("ollama cloud is disabled: remote model is unavailable")
        try:
            return self.store.find(ModelName.parse(name))
        except ModelNotFound:
            raise ModelNotFound(f"model '{model}' not found") from None

    def _resolve_path(self, path: Path, *, is_trusted: bool) -> Resolved:
        if not is_trusted:
            raise BadRequest(
                f"invalid model name: {str(path)!r} is a path, which needs the data folder's secret"
            )
        try:
            size = path.stat().st_size
        except OSError as error:
            raise BadFile(f"{path}: {error.strerror}") from error
        return Resolved(Target(path, str(path), details=details_of({}), size=size), Recipe(), None)

    async def describe(self, path: Path, *, verbose: bool = False) -> Description:
        """What the file at `path` says about itself; remembered while the file does not change."""
        try:
            stat = path.stat()
        except OSError as error:
            raise BadFile(f"{path}: {error.strerror}") from error
        key = (path, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, verbose)
        found = self._described.get(key)
        if found is None:
            found = await asyncio.to_thread(describe_apart, path, verbose=verbose)
        self._described[key] = found
        self._described.move_to_end(key)
        if len(self._described) > MAX_DESCRIPTIONS:
            self._described.popitem(last=False)
        return found

    async def capabilities(self, resolved: Resolved) -> list[str]:
        """What a model can do: its file, or the template that it was given."""
        known = resolved.stored.config.get("capabilities") if resolved.stored else None
        if known is None:
            known = (await self.describe(resolved.target.path)).capabilities
        given = capabilities(resolved.recipe.template or "")
        return [*known, *(c for c in OPTIONAL_CAPABILITIES if c in given and c not in known)]

    async def create_from_file(
        self, name: ModelName, path: Path, recipe: Recipe, adapter: GivenAdapter | None = None
    ) -> StoredModel:
        """A model from the user's own file, which is not copied."""
        found = await self.describe(path)
        added = checked(adapter, found.config)
        async with self._lock:
            paths = [Path(file) for file in found.files]
            layer = await asyncio.to_thread(self.store.add_file, paths)
            return self.store.create(name, layer, found.config, recipe, adapter=added)

    async def create_from_blob(
        self, name: ModelName, digest: str, recipe: Recipe, adapter: GivenAdapter | None = None
    ) -> StoredModel:
        """A model from a blob that was uploaded before."""
        layer = self._blob_layer("model", digest)
        found = await self.describe(self.store.file_of(digest, str(name)))
        added = checked(adapter, found.config)
        async with self._lock:
            return self.store.create(name, layer, found.config, recipe, adapter=added)

    async def create_from_model(
        self, name: ModelName, base: str, recipe: Recipe, adapter: GivenAdapter | None = None
    ) -> StoredModel:
        """A model like another one, but for what `recipe` says and for another adapter."""
        async with self._lock:
            stored = self.store.find(ModelName.parse(base))
            layers = stored.model_layers
            if not layers:
                raise BadRequest(f"model '{base}' has no model file")
            merged = merge(self.store.recipe(stored), recipe)
            return self.store.create(
                name,
                layers[0],
                stored.config,
                merged,
                shards=layers[1:],
                adapter=checked(adapter, stored.config) or stored.layer("adapter"),
            )

    async def adapter_from_file(self, path: Path) -> GivenAdapter:
        """The user's own adapter file, which is not copied."""
        architecture = await self._adapted_architecture(path)
        async with self._lock:
            layer = await asyncio.to_thread(self.store.add_file, [path])
        return GivenAdapter(replace(layer, kind="adapter"), architecture)

    async def adapter_from_blob(self, digest: str) -> GivenAdapter:
        """An adapter from a blob that was uploaded before."""
        layer = self._blob_layer("adapter", digest)
        return GivenAdapter(
            layer, await self._adapted_architecture(self.store.file_of(digest, digest))
        )

    def _blob_layer(self, kind: str, digest: str) -> Layer:
        size = self.store.blob_size(digest)
        if size is None:
            raise BadRequest(f"blob sha256:{digest} is not in the store; upload it first")
        return Layer(kind, digest, size)

    async def _adapted_architecture(self, path: Path) -> str:
        found = await self.describe(path)
        if found.model_info.get("general.type") != "adapter":
            raise BadRequest(f"{path.name}: is no adapter, but a model")
        return found.architecture

    async def copy(self, source: ModelName, destination: ModelName) -> None:
        async with self._lock:
            self.store.copy(source, destination)

    async def remove(self, name: ModelName) -> None:
        async with self._lock:
            self.store.remove(name)


def checked(adapter: GivenAdapter | None, config: Mapping[str, Any]) -> Layer | None:
    """The adapter's layer, if there is one. Raises BadRequest if it does not fit the model."""
    if adapter is None:
        return None
    adapter.check(config)
    return adapter.layer


def merge(base: Recipe, change: Recipe) -> Recipe:
    """`base` with everything that `change` says."""
    return replace(
        base,
        system=base.system if change.system is None else change.system,
        template=base.template if change.template is None else change.template,
        parameters={**base.parameters, **change.parameters},
        messages=base.messages if change.messages is None else change.messages,
        licenses=[*base.licenses, *change.licenses],
        config=change.config,
    )


def details_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `details` object of Ollama's API."""
    family = str(config.get("model_family", ""))
    families: Iterable[str] | None = config.get("model_families") or ([family] if family else None)
    return {
        "parent_model": "",
        "format": str(config.get("model_format", "gguf")),
        "family": family,
        "families": families,
        "parameter_size": str(config.get("model_type", "")),
        "quantization_level": str(config.get("file_type", "")),
    }
