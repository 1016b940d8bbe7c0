"""Names of models: `[host/][namespace/]model[:tag]`.

A `ModelName` is valid by construction and safe as a path below the store: no part is empty, begins
with a dot or holds a separator. Names are stored as given and compared without regard to case.

Not here: which names exist (store.py).
"""

import re
from dataclasses import dataclass
from typing import Self

from localllm.errors import BadRequest

DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}")
_NAMESPACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")
_RULE = "expected [host/][namespace/]model[:tag] of letters, digits, '_', '.' and '-'"


@dataclass(frozen=True, slots=True)
class ModelName:
    """One full name; `str()` is the shortest form, which always shows the tag."""

    host: str
    namespace: str
    model: str
    tag: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a name, filling in the default host, namespace and tag.

        Raises BadRequest, beginning `invalid model name`, for anything outside the grammar.
        """
        path = text.strip().partition("://")[2] or text.strip()
        head, colon, tag = path.rpartition(":")
        if not colon or "/" in tag:
            head, tag = path, DEFAULT_TAG
        parts = head.split("/")
        if len(parts) > 3:
            raise BadRequest(f"invalid model name: {_shown(text)} has too many parts; {_RULE}")
        defaults = (DEFAULT_HOST, DEFAULT_NAMESPACE)
        host, namespace, model = *defaults[: 3 - len(parts)], *parts
        rules = ((_HOST, host), (_NAMESPACE, namespace), (_PART, model), (_PART, tag))
        if not all(rule.fullmatch(part) for rule, part in rules):
            raise BadRequest(f"invalid model name: {_shown(text)}; {_RULE}")
        return cls(host, namespace, model, tag)

    def __str__(self) -> str:
        name = f"{self.model}:{self.tag}"
        if self.host != DEFAULT_HOST:
            return f"{self.host}/{self.namespace}/{name}"
        return name if self.namespace == DEFAULT_NAMESPACE else f"{self.namespace}/{name}"

    @property
    def parts(self) -> tuple[str, str, str, str]:
        """Host, namespace, model and tag: the manifest's path below `manifests`."""
        return self.host, self.namespace, self.model, self.tag

    @property
    def key(self) -> tuple[str, ...]:
        """What two names that mean the same model have in common."""
        return tuple(part.lower() for part in self.parts)


def is_cloud(text: str) -> bool:
    """Whether a name as given means a model of Ollama's cloud."""
    tag = text.strip().rpartition(":")[2].lower()
    return ":" in text and "/" not in tag and (tag == "cloud" or tag.endswith("-cloud"))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
