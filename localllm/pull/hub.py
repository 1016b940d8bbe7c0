"""The Hugging Face Hub as a source: metadata through its own client, files through ours.

The client knows endpoints, tokens and errors; it never resumes and compares sizes only, so files
are ours to fetch. One answer about a repository gives its commit, every size and every SHA-256; all
that follows is pinned to that commit.

`template` (Go), `system` and `params` (JSON) at the top of a repository go with the model.
"""

import asyncio
import hashlib
import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
from huggingface_hub import HfApi, errors, hf_hub_url
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from localllm import __version__
from localllm.config import Settings
from localllm.errors import LocalLLMError, PullFailed
from localllm.names import ModelName
from localllm.pull.choosing import Variant, choose, projectors, variants
from localllm.pull.package import Package, RemoteFile
from localllm.pull.transport import Access, Http, what_failed
from localllm.store import Recipe

API_SECONDS = 30.0
MAX_SIDE_BYTES = 1 << 20
# Files that the Hub keeps without a SHA-256; larger ones always have one.
MAX_PLAIN_BYTES = 16 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GATED = "GatedRepo"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to look for in a repository.

    tags  quantisations or file names: the first that is there; None is the default choice
    """

    name: ModelName
    repo: str
    tags: Sequence[str | None]
    revision: str | None = None
    parameters: dict[str, Any] | None = None
    license: str | None = None


class HubAccess(Access):
    """The user's token, and what the Hub means when that is not enough."""

    def __init__(self, settings: Settings, repo: str) -> None:
        super().__init__(
            build_hf_headers(
                token=settings.hub_token, library_name="localllm", library_version=__version__
            )
        )
        self._settings = settings
        self._repo = repo

    @property
    def has_token(self) -> bool:
        return "authorization" in self.headers()

    def refusal(self, response: httpx2.Response, what: str) -> PullFailed:
        status, code = response.status_code, response.headers.get("x-error-code", "")
        if code == _GATED:
            return self.gated()
        if status == 401:
            return self.missing()
        message = response.headers.get("x-error-message", "")
        return PullFailed(f"{what}: the Hub answers with status {status} {message}".rstrip())

    def gated(self) -> PullFailed:
        page = f"{self._settings.hub_endpoint}/{self._repo}"
        if self.has_token:
            return PullFailed(
                f"{self._repo} is gated and your token has no access: ask for it at {page}"
            )
        return PullFailed(
            f"{self._repo} is gated: accept its terms at {page}, then set HF_TOKEN or run "
            "'hf auth login'"
        )

    def missing(self) -> PullFailed:
        hint = "your token has no access" if self.has_token else "it needs HF_TOKEN"
        return PullFailed(
            f"pull model manifest: file does not exist: {self._settings.hub_endpoint} has no "
            f"repository {self._repo}, or it is private and {hint}"
        )


async def resolve(wanted: Wanted, settings: Settings, http: Http) -> Package:
    """What a repository offers for a name. Raises PullFailed."""
    if settings.hub_is_offline:
        raise PullFailed(f"{wanted.repo}: the Hub's offline mode is on (HF_HUB_OFFLINE)")
    access = HubAccess(settings, wanted.repo)
    info = await _in_thread(lambda: _model_info(wanted, settings, access))
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    variant = _choose(variants(siblings), wanted)
    revision = str(info.sha or wanted.revision or "main")

    def url(path: str) -> str:
        return hf_hub_url(wanted.repo, path, revision=revision, endpoint=settings.hub_endpoint)

    files = []
    for path in variant.files:
        sibling = siblings[path]
        if sibling.lfs is None:
            files.append(await _plain_file(http, url(path), access, sibling))
        else:
            files.append(_remote_file(sibling, url(path), access))
    return Package(
        wanted.name,
        files,
        recipe=await _recipe(http, access, url, siblings, wanted, info),
        source={"repo": wanted.repo, "revision": revision, "files": list(variant.files)},
        notes=_notes(wanted, info, variant, siblings),
    )


def _choose(found: Sequence[Variant], wanted: Wanted) -> Variant:
    """The first of the wanted tags that fits."""
    for tag in wanted.tags[:-1]:
        try:
            return choose(found, tag, wanted.repo)
        except PullFailed:
            continue
    return choose(found, wanted.tags[-1], wanted.repo)


def _model_info(wanted: Wanted, settings: Settings, access: HubAccess) -> ModelInfo:
    """What the Hub says about a repository."""
    api = HfApi(
        endpoint=settings.hub_endpoint,
        token=settings.hub_token,
        library_name="localllm",
        library_version=__version__,
    )
    repo = wanted.repo
    try:
        return api.model_info(
            repo, revision=wanted.revision, files_metadata=True, timeout=API_SECONDS
        )
    except errors.GatedRepoError:
        raise access.gated() from None
    except errors.RevisionNotFoundError:
        raise PullFailed(f"{repo} has no revision {wanted.revision!r}") from None
    except errors.DisabledRepoError:
        raise PullFailed(f"{repo} is disabled on the Hub") from None
    except errors.RepositoryNotFoundError:
        raise access.missing() from None
    except errors.OfflineModeIsEnabled:
        raise PullFailed(f"{repo}: the Hub's offline mode is on (HF_HUB_OFFLINE)") from None
    except errors.HFValidationError as error:
        raise PullFailed(f"{repo!r} is not the name of a Hub repository: {error}") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 404):
            raise access.missing() from None
        message = f"{error.server_message or ''}"[:200]
        raise PullFailed(
            f"{repo}: the Hub answers with status {status} {message}".rstrip()
        ) from error
    except httpx2.HTTPError as error:
        raise PullFailed(
            f"no connection to {settings.hub_endpoint}: {what_failed(error)}"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise PullFailed(f"{repo}: the Hub's answer is damaged: {error!r}") from error


def _remote_file(sibling: RepoSibling, url: str, access: Access) -> RemoteFile:
    lfs = sibling.lfs
    assert lfs is not None
    digest, size = str(lfs.sha256).lower(), lfs.size
    if not _SHA256.fullmatch(digest) or not isinstance(size, int) or size < 0:
        raise PullFailed(f"{sibling.rfilename}: the Hub's answer has no usable hash and size")
    return RemoteFile("model", digest, size, url, access, sibling.rfilename)


async def _plain_file(http: Http, url: str, access: Access, sibling: RepoSibling) -> RemoteFile:
    """A file that the Hub knows by its Git hash only: read once to find its SHA-256."""
    if (sibling.size or 0) > MAX_PLAIN_BYTES:
        raise PullFailed(
            f"{sibling.rfilename}: the Hub does not tell the SHA-256 of so large a file"
        )
    body = await http.read(url, access, MAX_PLAIN_BYTES)
    if body.response.status_code != 200:
        raise access.refusal(body.response, sibling.rfilename)
    found = hashlib.sha1(b"blob %d\0" % len(body.data) + body.data).hexdigest()
    if found != sibling.blob_id:
        raise PullFailed(
            f"{sibling.rfilename}: digest mismatch: want {sibling.blob_id}, got {found}"
        )
    digest = hashlib.sha256(body.data).hexdigest()
    return RemoteFile("model", digest, len(body.data), url, access, sibling.rfilename)


async def _recipe(
    http: Http,
    access: Access,
    url: Callable[[str], str],
    siblings: dict[str, RepoSibling],
    wanted: Wanted,
    info: ModelInfo,
) -> Recipe:
    """What the repository and the catalogue add to the model file."""
    texts = {}
    for path in ("template", "system", "params"):
        sibling = siblings.get(path)
        if sibling is not None and sibling.lfs is None:
            body = await http.read(url(path), access, MAX_SIDE_BYTES)
            if body.response.status_code == 200:
                texts[path] = body.data.decode("utf-8", errors="replace")
    parameters = dict(wanted.parameters or {})
    if "params" in texts:
        try:
            parameters.update(json.loads(texts["params"]))
        except (ValueError, TypeError) as error:
            raise PullFailed(f"{wanted.repo}: its file 'params' is damaged: {error}") from error
    tags = (tag[8:] for tag in info.tags or () if tag.startswith("license:"))
    license = wanted.license or next(tags, None)
    return Recipe(
        system=texts.get("system"),
        template=texts.get("template"),
        parameters=parameters,
        licenses=[license] if license else [],
    )


def _notes(
    wanted: Wanted, info: ModelInfo, variant: Variant, siblings: dict[str, RepoSibling]
) -> list[str]:
    """What was chosen, and what was left out."""
    parts = f" and {len(variant.files) - 1} more" if len(variant.files) > 1 else ""
    notes = [f"using {variant.files[0]}{parts} of {wanted.repo}"]
    if info.id.lower() != wanted.repo.lower():
        notes.append(f"{wanted.repo} is called {info.id} by now")
    if projectors(siblings):
        notes.append("the repository's image projector is left out: images are not supported")
    return notes


async def _in_thread(function: Callable[[], ModelInfo]) -> ModelInfo:
    """Call something that blocks, in a thread that nobody waits for when we are cancelled."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ModelInfo] = loop.create_future()

    def settle(result: ModelInfo | None, error: LocalLLMError | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        elif result is not None:
            future.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except LocalLLMError as failure:
            error = failure
        except Exception as failure:
            error = PullFailed(f"the Hub's client failed: {type(failure).__name__}: {failure}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="hub", daemon=True).start()
    return await future
