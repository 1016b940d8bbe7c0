"""What a name to pull means: a model of the Hub or of a registry, at a revision.

    [scheme://][host[:port]/][namespace/]model[:tag][@revision]
    https://huggingface.co/user/repo/blob/main/file.gguf        as copied from a browser

A revision (branch, tag or commit of a Hub repository) chooses what is fetched; the model is stored
under the name without it.
"""

import re
from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote, urlsplit

from localllm.errors import BadRequest
from localllm.names import DEFAULT_HOST, DEFAULT_NAMESPACE, ModelName

HUB_HOSTS = ("hf.co", "huggingface.co", "www.huggingface.co")
SCHEMES = ("https", "http")
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._/+-]{0,199}")
_BROWSER_PATH = re.compile(r"([^/]+/[^/]+)/(?:blob|resolve)/([^/]+)/(.+)")


@dataclass(frozen=True, slots=True)
class Reference:
    """A name as the user gave it. `file` is a path in a Hub repository, if a URL gave one."""

    name: ModelName
    scheme: str = "https"
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a name. Raises BadRequest, beginning `invalid model name`."""
        scheme, separator, rest = text.strip().rpartition("://")
        scheme = scheme.lower() if separator else "https"
        if scheme not in SCHEMES:
            raise BadRequest(f"invalid model name: unknown scheme {scheme!r}; use https or http")
        file = _from_browser(rest)
        if file is not None:
            return cls(*file)
        rest, revision = _split_revision(rest)
        name = ModelName.parse(rest)
        if separator and name.host == DEFAULT_HOST and "/" not in rest:
            raise BadRequest(f"invalid model name: {text.strip()!r} has a scheme but no host")
        found = cls(name, scheme, revision)
        if revision is not None and not found.is_hub and not found.is_library:
            raise BadRequest(
                f"invalid model name: {text.strip()!r} names a revision, which only models of the "
                "Hugging Face Hub have"
            )
        return found

    @property
    def is_hub(self) -> bool:
        """Whether the name is of the Hub's own."""
        return self.name.host.lower() in HUB_HOSTS

    @property
    def is_library(self) -> bool:
        """Whether it is a short library name, like `llama3.1:8b`."""
        return self.name.key[:2] == (DEFAULT_HOST, DEFAULT_NAMESPACE)


def _split_revision(text: str) -> tuple[str, str | None]:
    """The name and the revision of `name:tag@revision` or `name@revision:tag`."""
    head, at, revision = text.partition("@")
    if not at:
        return text, None
    revision, colon, tag = revision.partition(":")
    if revision == "sha256":
        raise BadRequest(f"invalid model name: {text!r}: a model is not named by a digest")
    if not _REVISION.fullmatch(revision):
        raise BadRequest(f"invalid model name: {text!r}: {revision!r} is not a revision")
    return head + colon + tag, revision


def _from_browser(text: str) -> tuple[ModelName, str, str, str] | None:
    """What the address of a file's page or download on the Hub means."""
    parts = urlsplit(f"//{text}")
    match = _BROWSER_PATH.fullmatch(unquote(parts.path).strip("/"))
    if (parts.hostname or "") not in HUB_HOSTS or match is None:
        return None
    repo, revision, path = match.groups()
    if not path.lower().endswith(".gguf") or not _REVISION.fullmatch(revision):
        raise BadRequest(f"invalid model name: {text!r} is not the address of a GGUF file")
    name = ModelName.parse(f"hf.co/{repo}:{path.rpartition('/')[2]}")
    return name, "https", revision, path
