"""Debian's docker-registry on loopback, filled through its own protocol, as the source of a pull."""

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from pulling import Puller, make_model
from registry_standin import CONFIG, digest_of, layer_of, manifest_of

from localllm.errors import PullFailed

MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
BINARY = shutil.which("docker-registry")
pytestmark = pytest.mark.skipif(BINARY is None, reason="docker-registry is not installed")

DATA = make_model(3000)  # 12 MB: 12 ranges
PARTS = [("model", DATA), ("template", b"{{ .Prompt }}"), ("params", b'{"stop":["x"]}')]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Host and port of a running registry that holds `me/m:t`."""
    folder = tmp_path_factory.mktemp("registry")
    port = free_port()
    config = {
        "version": "0.1",
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    (folder / "config.yml").write_text(json.dumps(config))
    assert BINARY is not None
    with (folder / "log").open("wb") as log:
        command = [BINARY, "serve", str(folder / "config.yml")]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            _wait(http, process, folder / "log")
            push(http, "me/m", "t", PARTS)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def _wait(http: httpx2.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(200):
        assert process.poll() is None, log.read_text()
        try:
            assert http.get("/v2/").status_code == 200
            return
        except httpx2.ConnectError:
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
    raise AssertionError(f"docker-registry does not answer: {log.read_text()}")


def push(http: httpx2.Client, name: str, tag: str, parts: list[tuple[str, bytes]]) -> None:
    for data in (CONFIG, *(data for _, data in parts)):
        upload = http.post(f"/v2/{name}/blobs/uploads/")
        assert upload.status_code == 202, upload.text
        url = httpx2.URL(upload.headers["location"]).copy_merge_params({"digest": digest_of(data)})
        assert http.put(url, content=data).status_code == 201
    manifest = manifest_of([layer_of(kind, data) for kind, data in parts])
    answer = http.put(
        f"/v2/{name}/manifests/{tag}", content=manifest, headers={"content-type": MANIFEST_TYPE}
    )
    assert answer.status_code == 201, answer.text


def test_pull_from_a_real_registry(puller: Puller, registry: str) -> None:
    model = puller.pull(f"{registry}/me/m:t", is_insecure=True)
    assert puller.store.model_file(model).read_bytes() == DATA
    assert puller.store.recipe(model).parameters == {"stop": ["x"]}
    manifest = manifest_of([layer_of(kind, data) for kind, data in PARTS])
    assert model.digest == digest_of(manifest).removeprefix("sha256:")
    assert puller.partial_files() == []


def test_name_with_a_scheme(puller: Puller, registry: str) -> None:
    model = puller.pull(f"http://{registry}/me/m:t", is_insecure=True)
    assert str(model.name) == f"{registry}/me/m:t"


@pytest.mark.parametrize("name", ["me/m:nope", "me/nope:t"])
def test_unknown_name_at_a_real_registry(puller: Puller, registry: str, name: str) -> None:
    with pytest.raises(PullFailed, match=r"^pull model manifest: file does not exist$"):
        puller.pull(f"{registry}/{name}", is_insecure=True)
