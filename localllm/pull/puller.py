"""`pull`: from a name to a model in the store.

A file is complete and its hash compared before the store sees it, and a manifest is written after
all of its files: whenever this ends, the store holds whole models, and what was fetched is kept
aside for the next try.
"""

import asyncio
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from localllm.config import Settings
from localllm.describe import describe_apart
from localllm.errors import BadFile, Cancelled, LocalLLMError, PullFailed, StoreError
from localllm.names import DEFAULT_TAG
from localllm.pull import catalogue, registry
from localllm.pull.choosing import label_of_path
from localllm.pull.download import fetch
from localllm.pull.events import OnProgress, Status
from localllm.pull.manifest import CONFIG_KIND, check_config
from localllm.pull.package import Package, RemoteFile
from localllm.pull.reference import Reference
from localllm.pull.staging import Staging
from localllm.pull.transport import Http, Patience
from localllm.store import Layer, Store, StoredModel

CANCEL_SECONDS = 0.05
MAX_ROUNDS = 3


def pull(
    name: str,
    store: Store,
    settings: Settings,
    on_progress: OnProgress,
    cancel: threading.Event | None = None,
    *,
    is_insecure: bool = False,
    patience: Patience | None = None,
) -> StoredModel:
    """Fetch a model and return it; blocks, and must be called where no event loop runs.

    Calls `on_progress` from this thread. Raises BadRequest for a name that is none, PullFailed,
    StoreError if there is no room, and Cancelled once `cancel` is set.
    """
    reference = Reference.parse(name)
    work = _Pull(reference, store, settings, on_progress, is_insecure)
    return asyncio.run(_until_cancelled(work, patience or Patience(), cancel))


async def _until_cancelled(
    work: "_Pull", patience: Patience, cancel: threading.Event | None
) -> StoredModel:
    task = asyncio.create_task(work.run(patience))
    while not task.done():
        await asyncio.wait({task}, timeout=None if cancel is None else CANCEL_SECONDS)
        if cancel is not None and cancel.is_set() and not task.done():
            task.cancel()
            await asyncio.wait({task})
            raise Cancelled("the pull was cancelled; what was fetched is kept")
    return task.result()


class _Pull:
    """One pull."""

    def __init__(
        self,
        reference: Reference,
        store: Store,
        settings: Settings,
        on_progress: OnProgress,
        is_insecure: bool,
    ) -> None:
        self._reference = reference
        self._store = store
        self._settings = settings
        self._report = on_progress
        self._is_insecure = is_insecure
        self._staging = Staging(store.partial)

    async def run(self, patience: Patience) -> StoredModel:
        self._report(Status("pulling manifest"))
        async with Http(patience) as http:
            package = await self._resolve(http)
            for note in package.notes:
                self._report(Status(note))
            self._staging.clean()
            self._check_space(package.files)
            for _ in range(MAX_ROUNDS):
                for file in package.files:
                    await fetch(file, self._store, self._staging, http, self._report)
                self._report(Status("verifying sha256 digest"))
                model = await self._publish(package)
                if model is not None:
                    self._report(Status("success"))
                    return model
        raise StoreError(f"{package.name}: something keeps removing its files from the store")

    async def _resolve(self, http: Http) -> Package:
        """Ask the source that the name means."""
        reference, name = self._reference, self._reference.name
        found = catalogue.find(name.model, name.tag) if reference.is_library else None
        if not reference.is_hub and found is None:
            return await self._ask_registry(http)
        from localllm.pull import hub

        if found is None:
            tag = reference.file or (None if name.tag == DEFAULT_TAG else name.tag)
            repo = f"{name.namespace}/{name.model}"
            wanted = hub.Wanted(name, repo, [tag], reference.revision)
        else:
            entry = found.entry
            tags = [found.quant] if found.quant else [entry.file, label_of_path(entry.file)]
            wanted = hub.Wanted(
                name, entry.repo, tags, reference.revision, dict(entry.parameters), entry.license
            )
        return await hub.resolve(wanted, self._settings, http)

    async def _ask_registry(self, http: Http) -> Package:
        reference, name = self._reference, self._reference.name
        if reference.revision is not None:
            raise PullFailed(
                f"{name} is not in the catalogue, and only there have names a revision"
            )
        try:
            return await registry.resolve(
                name, reference.scheme, http, is_insecure=self._is_insecure
            )
        except PullFailed as error:
            if str(error) != registry.MISSING or not reference.is_library:
                raise
            tags = ", ".join(catalogue.tags_of(name.model))
            hint = f"{name.model} is there as {tags}" if tags else "see 'hf.co/USER/REPO:QUANT'"
            raise PullFailed(
                f"{error}: {name} is neither in the catalogue nor in the registry; {hint}"
            ) from None

    def _check_space(self, files: Sequence[RemoteFile]) -> None:
        """Raise StoreError if what is missing does not fit."""
        missing = sum(
            file.size - self._staging.bytes_there(file.digest, file.size)
            for file in {file.digest: file for file in files}.values()
            if not self._store.has(file.digest)
        )
        folder = self._store.root
        free = shutil.disk_usage(_existing(folder)).free
        if missing > free:
            raise StoreError(
                f"no space for {self._reference.name} in {folder}: it needs {missing:,} bytes more "
                f"and {free:,} are free"
            )

    async def _publish(self, package: Package) -> StoredModel | None:
        """Move the files into the store and write the manifest.

        None if a file is gone meanwhile, as when another model that has it was removed.
        """
        for file in package.files:
            if not await self._move(file):
                return None
        self._report(Status("writing manifest"))
        try:
            model = self._write(package)
        except LocalLLMError:
            self._store.forget(file.digest for file in package.files)
            raise
        has_all = all(self._store.has(layer.digest) for layer in model.layers)
        return model if has_all else None

    async def _move(self, file: RemoteFile) -> bool:
        """Move a file that was fetched into the store; whether it is there."""
        part = await self._staging.hold(
            file.digest, file.size, lambda: self._store.has(file.digest), lambda: None
        )
        if part is None:
            return True
        with part:
            if part.is_verified:
                self._store.adopt(part.path, file.digest)
                part.remove_state()
            return part.is_verified

    def _write(self, package: Package) -> StoredModel:
        """Write the manifest that came, or one of what the model file says."""
        store, name = self._store, package.name
        if package.manifest is not None:
            for file in package.files:
                if file.kind == CONFIG_KIND:
                    check_config(store.file_of(file.digest, file.label).read_bytes(), str(name))
            return store.add_manifest(name, package.manifest)
        layers = [Layer(file.kind, file.digest, file.size) for file in package.files]
        found = describe_apart(store.file_of_layers(layers, str(name)))
        if len(found.files) != len(layers):
            raise BadFile(
                f"{name}: its files are named as {len(layers)} parts, but the first one says "
                f"{len(found.files)}"
            )
        config = {**found.config, "source": dict(package.source)}
        return store.create(name, layers[0], config, package.recipe, shards=layers[1:])


def _existing(folder: Path) -> Path:
    """The nearest folder above that exists."""
    return folder if folder.exists() else _existing(folder.parent)
