"""Ollama's registry, and any other that speaks its protocol, as a source.

A manifest names the parts of a model by hash and size; it is stored as it came. A registry may ask
for a token, which it gives to anybody for what is public; tokens are for the registry's host alone.

Not here: what a manifest may say (manifest.py).
"""

import asyncio
import json
import platform
import re

import httpx2

from localllm import __version__
from localllm.errors import PullFailed
from localllm.identity import OLLAMA_VERSION
from localllm.names import ModelName
from localllm.pull.manifest import layers_of
from localllm.pull.package import Package, RemoteFile
from localllm.pull.transport import Access, Http
from localllm.store import MANIFEST_TYPE, MAX_MANIFEST_BYTES

MAX_TOKEN_BYTES = 64 << 10
MISSING = "pull model manifest: file does not exist"
_FIELD = re.compile(r'(\w+)="([^"]*)"')


class RegistryAccess(Access):
    """A registry's token, asked for when the registry wants one."""

    def __init__(self, base: str) -> None:
        # Registries look at the name: they hold back what older clients cannot read.
        system = f"{platform.machine()} {platform.system().lower()}"
        agent = f"ollama/{OLLAMA_VERSION} ({system}) localllm/{__version__}"
        super().__init__({"User-Agent": agent})
        self._base = httpx2.URL(base)
        self._token: str | None = None
        self._asking = asyncio.Lock()

    def headers(self) -> dict[str, str]:
        token = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        return {**self._headers, **token}

    async def renew(self, http: Http, response: httpx2.Response) -> bool:
        """Ask for a token where the answer says so."""
        async with self._asking:
            used = response.request.headers.get("authorization")
            if used != self.headers().get("Authorization"):
                return True
            url = self._token_url(response.headers.get("www-authenticate", ""))
            if url is None:
                return False
            body = await http.read(url, Access(self._headers), MAX_TOKEN_BYTES)
            self._token = _token_of(body.data) if body.response.status_code == 200 else None
            return self._token is not None

    def _token_url(self, challenge: str) -> str | None:
        """Where to ask; only the registry's own host may be asked."""
        kind, _, rest = challenge.partition(" ")
        fields = dict(_FIELD.findall(rest))
        if kind.lower() != "bearer" or not fields.get("realm"):
            return None
        try:
            realm = httpx2.URL(fields["realm"])
        except httpx2.InvalidURL:
            return None
        if realm.host != self._base.host or realm.scheme not in ("https", self._base.scheme):
            raise PullFailed(f"{self._base.host} sends for a token to another host, {realm.host}")
        asked = [(key, fields[key]) for key in ("service", "scope") if fields.get(key)]
        return str(realm.copy_merge_params(asked)) if asked else str(realm)

    def refusal(self, response: httpx2.Response, what: str) -> PullFailed:
        if response.status_code == 401:
            return PullFailed("unauthorized: access denied")
        if response.status_code == 404:
            return PullFailed(f"{what} is not in the registry {self._base.host}")
        return PullFailed(f"{what}: the registry answers with status {response.status_code}")


def _token_of(data: bytes) -> str | None:
    try:
        answer = json.loads(data)
        token = answer.get("token") or answer.get("access_token")
    except (ValueError, AttributeError):
        return None
    return token if isinstance(token, str) and token.isascii() and token.isprintable() else None


async def resolve(name: ModelName, scheme: str, http: Http, *, is_insecure: bool) -> Package:
    """What a registry offers for a name. Raises PullFailed.

    `is_insecure` speaks plain HTTP, which a name with the scheme `http` needs.
    """
    if scheme == "http" and not is_insecure:
        raise PullFailed("insecure protocol http")
    base = f"{'http' if is_insecure else 'https'}://{name.host}"
    access = RegistryAccess(base)
    home = f"{base}/v2/{name.namespace}/{name.model}"
    body = await http.read(
        f"{home}/manifests/{name.tag}", access, MAX_MANIFEST_BYTES, {"Accept": MANIFEST_TYPE}
    )
    _check_status(body.response, body.data)
    files = [
        RemoteFile(
            layer.kind,
            layer.digest,
            layer.size,
            f"{home}/blobs/sha256:{layer.digest}",
            access,
            layer.digest[:12],
        )
        for layer in layers_of(body.data)
    ]
    return Package(name, files, manifest=body.data)


def _check_status(response: httpx2.Response, data: bytes) -> None:
    status = response.status_code
    if status == 404:
        raise PullFailed(MISSING)
    if status in (401, 403):
        raise PullFailed("unauthorized: access denied")
    if status != 200:
        text = "".join(c for c in data[:200].decode(errors="replace") if c.isprintable())
        raise PullFailed(f"pull model manifest: {status}: {text}")
