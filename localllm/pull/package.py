"""What a source says a model consists of, before anything large is fetched."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.names import ModelName
from localllm.pull.transport import Access
from localllm.store import Recipe


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file to fetch, and the kind of layer it becomes.

    digest  SHA-256 of its content, bare hex
    access  credentials for the URL's own host
    label   what to call it in messages
    """

    kind: str
    digest: str
    size: int
    url: str
    access: Access
    label: str


@dataclass(frozen=True, slots=True)
class Package:
    """A model as a source offers it.

    files     in the order of the manifest; several of kind `model` are the parts of a split one
    manifest  to be stored as it is; None if the model is to be described by its own header
    recipe, source
              for the manifest that is made then: what to add to the file, and where it came from
    notes     what the user should know
    """

    name: ModelName
    files: Sequence[RemoteFile]
    manifest: bytes | None = None
    recipe: Recipe = field(default_factory=Recipe)
    source: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
