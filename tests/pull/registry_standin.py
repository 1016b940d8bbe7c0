"""A registry on loopback: manifests, blobs with ranges, and a token for those who ask."""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PREFIX = "application/vnd.ollama.image."


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def layer_of(kind: str, data: bytes, **changes: Any) -> dict[str, Any]:
    media_type = (
        PREFIX + kind if kind != "config" else "application/vnd.docker.container.image.v1+json"
    )
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data), **changes}


CONFIG = json.dumps({"model_format": "gguf", "model_family": "llama", "file_type": "Q4_0"}).encode()


def manifest_of(layers: list[dict[str, Any]], config: bytes = CONFIG) -> bytes:
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    body = {"schemaVersion": 2, "mediaType": kind, "config": layer_of("config", config)}
    return json.dumps({**body, "layers": layers}).encode()


@dataclass
class RegistryStandIn:
    """What is served, and what was asked for."""

    manifests: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    needs_token: bool = False
    realm: str | None = None
    tokens: list[str] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    on_blob: Callable[["Handler", bytes], bool] = lambda *_: False
    host: str = ""

    def add(self, name: str, parts: list[tuple[str, bytes]], config: bytes = CONFIG) -> bytes:
        """Serve a model as `namespace/model/tag`; returns its manifest."""
        for data in (config, *(data for _, data in parts)):
            self.blobs[digest_of(data)] = data
        manifest = manifest_of([layer_of(kind, data) for kind, data in parts], config)
        self.manifests[name] = manifest
        return manifest

    def blob_requests(self) -> list[str]:
        return [path for path, _ in self.requests if "/blobs/" in path]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    standin: RegistryStandIn

    def log_message(self, *_: object) -> None:
        pass

    def send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        standin = self.standin
        headers = {key.lower(): value for key, value in self.headers.items()}
        standin.requests.append((self.path, headers))
        if self.path.startswith("/token"):
            standin.tokens.append(f"t{len(standin.tokens)}")
            self.send(200, {}, json.dumps({"token": standin.tokens[-1]}).encode())
            return
        good = f"Bearer {standin.tokens[-1]}" if standin.tokens else None
        if standin.needs_token and (good is None or headers.get("authorization") != good):
            realm = standin.realm or f"http://{standin.host}/token"
            challenge = f'Bearer realm="{realm}",service="reg",scope="repository:me/m:pull"'
            self.send(401, {"www-authenticate": challenge})
            return
        manifest = re.fullmatch(r"/v2/(.+)/manifests/(.+)", self.path)
        blob = re.fullmatch(r"/v2/.+/blobs/(.+)", self.path)
        if manifest and f"{manifest[1]}/{manifest[2]}" in standin.manifests:
            self.send(200, {}, standin.manifests[f"{manifest[1]}/{manifest[2]}"])
        elif blob and blob[1] in standin.blobs:
            self._blob(standin.blobs[blob[1]])
        else:
            self.send(404, {}, b'{"errors":[{"code":"MANIFEST_UNKNOWN"}]}')

    def _blob(self, data: bytes) -> None:
        if self.standin.on_blob(self, data):
            return
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if span is None:
            self.send(200, {}, data)
            return
        start, stop = int(span[1]), min(int(span[2]) + 1, len(data))
        headers = {"content-range": f"bytes {start}-{stop - 1}/{len(data)}"}
        self.send(206, headers, data[start:stop])


@contextmanager
def running_registry() -> Iterator[RegistryStandIn]:
    standin = RegistryStandIn()
    handler = type("Handler", (Handler,), {"standin": standin})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    standin.host = f"127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield standin
    finally:
        server.shutdown()
        server.server_close()
