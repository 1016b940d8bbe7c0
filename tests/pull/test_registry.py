"""Registries: the protocol, tokens, and what a hostile one may try."""

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pulling import IMPATIENT, Puller, make_model
from registry_standin import (
    CONFIG,
    Handler,
    RegistryStandIn,
    digest_of,
    layer_of,
    manifest_of,
    running_registry,
)

from localllm.errors import LocalLLMError, PullFailed
from localllm.pull.events import Transfer

DATA = make_model()
PARTS = [
    ("model", DATA),
    ("template", b"{{ .Prompt }}"),
    ("system", b"Be nice."),
    ("params", b'{"temperature":0.5,"stop":["x"]}'),
    ("license", b"MIT"),
    ("license", b"and more"),
]


@pytest.fixture
def registry() -> Iterator[RegistryStandIn]:
    with running_registry() as standin:
        yield standin


@pytest.fixture
def name(registry: RegistryStandIn) -> str:
    return f"{registry.host}/me/m:t"


def pull(puller: Puller, name: str):  # type: ignore[no-untyped-def]
    return puller.pull(name, is_insecure=True)


def files_below(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


def test_manifest_is_stored_as_it_came(
    puller: Puller, registry: RegistryStandIn, name: str
) -> None:
    manifest = registry.add("me/m/t", PARTS)
    model = pull(puller, name)
    assert model.digest == digest_of(manifest).removeprefix("sha256:")
    assert puller.store.model_file(model).read_bytes() == DATA
    recipe = puller.store.recipe(model)
    assert (recipe.system, recipe.template) == ("Be nice.", "{{ .Prompt }}")
    assert recipe.parameters == {"temperature": 0.5, "stop": ["x"]}
    assert recipe.licenses == ["MIT", "and more"]
    assert puller.partial_files() == []
    last = {event.digest: event for event in puller.transfers}
    for data in (CONFIG, *(data for _, data in PARTS)):
        digest = digest_of(data).removeprefix("sha256:")
        assert last[digest] == Transfer(digest, len(data), len(data))


def test_parts_that_are_there_are_not_fetched_again(
    puller: Puller, registry: RegistryStandIn, name: str
) -> None:
    registry.add("me/m/t", PARTS)
    pull(puller, name)
    registry.add("me/m/u", [*PARTS[:2], ("system", b"Be brief.")])
    registry.requests.clear()
    pull(puller, f"{registry.host}/me/m:u")
    assert len(registry.blob_requests()) == 1


def test_unknown_model(puller: Puller, registry: RegistryStandIn, name: str) -> None:
    with pytest.raises(PullFailed, match=r"^pull model manifest: file does not exist$"):
        pull(puller, name)


def test_plain_http_needs_to_be_asked_for(puller: Puller, name: str) -> None:
    with pytest.raises(PullFailed, match=r"^insecure protocol http$"):
        puller.pull(f"http://{name}")


def test_token_is_got_where_the_registry_says(
    puller: Puller, registry: RegistryStandIn, name: str
) -> None:
    registry.add("me/m/t", PARTS)
    registry.needs_token = True
    pull(puller, name)
    (asked,) = [path for path, _ in registry.requests if path.startswith("/token")]
    assert asked == "/token?service=reg&scope=repository%3Ame%2Fm%3Apull"
    assert registry.requests[0][1]["user-agent"].startswith("ollama/")


def test_token_that_expires_is_renewed(
    puller: Puller, registry: RegistryStandIn, name: str
) -> None:
    registry.add("me/m/t", PARTS)
    registry.needs_token = True
    registry.on_blob = lambda *_: registry.tokens.append(f"t{len(registry.tokens)}") or False  # type: ignore[func-returns-value]
    pull(puller, name)
    assert sum(path.startswith("/token") for path, _ in registry.requests) > 1


@pytest.mark.parametrize(
    "realm", ["http://other.test/token", "ftp://127.0.0.1/token", "http://[bad", "", "x"]
)
def test_token_is_not_asked_for_elsewhere(
    puller: Puller, registry: RegistryStandIn, name: str, realm: str
) -> None:
    registry.add("me/m/t", PARTS)
    registry.needs_token, registry.realm = True, realm or " "
    with pytest.raises(PullFailed, match=r"access denied|to another host"):
        pull(puller, name)


def test_second_refusal_is_final(puller: Puller, registry: RegistryStandIn, name: str) -> None:
    registry.add("me/m/t", PARTS)
    registry.needs_token, registry.realm = True, f"http://{registry.host}/nothing"
    with pytest.raises(PullFailed, match=r"^unauthorized: access denied$"):
        pull(puller, name)


MODEL = layer_of("model", DATA)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (b"", "damaged"),
        (b"{", "damaged"),
        (b"[]", "damaged"),
        (b"null", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b"{}", "damaged"),
        (b" " * (1 << 20) + b"{}", "longer than"),
        (json.dumps({"layers": [MODEL]}).encode(), "damaged"),
        (manifest_of([]), "no model file"),
        (manifest_of([layer_of("system", b"x")]), "no model file"),
        (manifest_of([MODEL] * 1001), "at most 1000"),
        (manifest_of([{**MODEL, "digest": "sha256:../../../etc/passwd"}]), "invalid digest"),
        (manifest_of([{**MODEL, "digest": "sha256:" + "g" * 64}]), "invalid digest"),
        (manifest_of([{**MODEL, "digest": "sha256:" + "0" * 63 + "/"}]), "invalid digest"),
        (manifest_of([{**MODEL, "digest": "sha256:" + "0" * 65}]), "invalid digest"),
        (manifest_of([{**MODEL, "digest": 3}]), "damaged"),
        (manifest_of([{**MODEL, "size": -1}]), "a layer of -1 bytes"),
        (manifest_of([{**MODEL, "size": True}]), "a layer of True bytes"),
        (manifest_of([{**MODEL, "size": "9"}]), "a layer of '9' bytes"),
        (manifest_of([{**MODEL, "size": 1.5}]), "a layer of 1.5 bytes"),
        (manifest_of([{**MODEL, "size": 1 << 62}]), "a layer of"),
        (manifest_of([{**MODEL, "size": 1 << 61}]), "no space"),
        (manifest_of([MODEL, layer_of("system", b"x", size=17 << 20)]), "a system layer of"),
        (manifest_of([MODEL, layer_of("tensor", b"x")]), "requires MLX"),
        (manifest_of([{**MODEL, "mediaType": "application/x-tar"}]), "not of a model"),
        (manifest_of([MODEL, 3]), "damaged"),  # type: ignore[list-item]
    ],
)
def test_hostile_manifest_is_refused(
    puller: Puller, registry: RegistryStandIn, name: str, manifest: bytes, message: str
) -> None:
    registry.manifests["me/m/t"] = manifest
    with pytest.raises(LocalLLMError, match=message) as caught:
        pull(puller, name)
    assert len(str(caught.value)) < 500
    assert files_below(puller.store.root) == []


@pytest.mark.parametrize("change", [-1, 1, 10**9])
def test_wrong_size_is_refused(
    puller: Puller, registry: RegistryStandIn, name: str, change: int
) -> None:
    registry.add("me/m/t", PARTS)
    registry.manifests["me/m/t"] = manifest_of([{**MODEL, "size": len(DATA) + change}])
    with pytest.raises(PullFailed, match="not what was announced"):
        pull(puller, name)
    assert puller.store.models() == []


def test_blob_of_other_content_is_refused(
    puller: Puller, registry: RegistryStandIn, name: str
) -> None:
    registry.add("me/m/t", PARTS)
    registry.blobs[digest_of(b"MIT")] = b"GPL"
    with pytest.raises(PullFailed, match="digest mismatch, file must be downloaded again"):
        pull(puller, name)
    assert puller.store.models() == []


def test_missing_blob_is_told(puller: Puller, registry: RegistryStandIn, name: str) -> None:
    registry.add("me/m/t", PARTS)
    del registry.blobs[digest_of(b"MIT")]
    with pytest.raises(PullFailed, match=r"is not in the registry 127.0.0.1"):
        pull(puller, name)


@pytest.mark.parametrize("config", [b"", b"{", b"[1]", b"\xff"])
def test_damaged_config_never_becomes_a_model(
    puller: Puller, registry: RegistryStandIn, name: str, config: bytes
) -> None:
    registry.add("me/m/t", PARTS, config)
    with pytest.raises(PullFailed, match="config"):
        pull(puller, name)
    assert puller.store.models() == []
    assert list(puller.store.root.glob("manifests/*/*/*/*")) == []


def test_blob_may_be_elsewhere(puller: Puller, registry: RegistryStandIn, name: str) -> None:
    """The real one redirects to a storage host, which must not see the token."""
    registry.add("me/m/t", PARTS)
    registry.needs_token = True
    with running_registry() as storage:
        storage.blobs = registry.blobs

        def redirect(handler: Handler, _: bytes) -> bool:
            handler.send(307, {"location": f"http://{storage.host}{handler.path}"})
            return True

        registry.on_blob = redirect
        pull(puller, name)
        assert storage.requests
        assert all("authorization" not in headers for _, headers in storage.requests)


def test_error_of_the_registry_is_passed_on(
    puller: Puller, registry: RegistryStandIn, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.manifests["me/m/t"] = b""

    def teapot(handler: Handler) -> None:
        handler.send(412, {}, b"needs a \x1b[31mnewer version" + b"x" * 10_000)

    monkeypatch.setattr(Handler, "do_GET", teapot)
    with pytest.raises(PullFailed, match=r"^pull model manifest: 412: needs a \[31mnewer"):
        pull(puller, name)


def test_answer_that_drips_for_ever_ends(
    puller: Puller, registry: RegistryStandIn, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drip(handler: Handler) -> None:
        handler.send(200, {"content-length": "100000"})
        with contextlib.suppress(OSError):
            while True:
                handler.wfile.write(b" ")
                threading.Event().wait(0.02)

    monkeypatch.setattr(Handler, "do_GET", drip)
    patience = dataclasses.replace(IMPATIENT, body_seconds=0.5)
    with pytest.raises(PullFailed, match="the answer takes too long"):
        puller.pull(name, is_insecure=True, patience=patience)


def test_library_name_that_nobody_has_tells_what_there_is(
    puller: Puller, registry: RegistryStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localllm.pull import puller as module
    from localllm.pull import registry as source

    real = source.resolve

    async def here(name, scheme, http, *, is_insecure):  # type: ignore[no-untyped-def]
        moved = type(name)(registry.host, name.namespace, name.model, name.tag)
        return await real(moved, scheme, http, is_insecure=True)

    monkeypatch.setattr(module.registry, "resolve", here)
    with pytest.raises(PullFailed, match=r"file does not exist: .*llama3\.1 is there as 8b, 70b"):
        puller.pull("llama3.1:9b")
    with pytest.raises(PullFailed, match=r"file does not exist: .*hf\.co/USER/REPO:QUANT"):
        puller.pull("nonesuch")


def test_file_that_another_model_took_away_is_fetched_again(
    puller: Puller, registry: RegistryStandIn, name: str
) -> None:
    """It was there when the pull began, and went with the other model before the pull ended."""
    registry.add("me/m/t", PARTS[:1])
    other = pull(puller, name)
    registry.add("me/m/u", [PARTS[0], ("system", b"Be brief.")])

    def remove(_: Handler, data: bytes) -> bool:
        if data == b"Be brief." and puller.store.models():
            puller.store.remove(other.name)
        return False

    registry.on_blob = remove
    model = pull(puller, f"{registry.host}/me/m:u")
    assert puller.store.model_file(model).read_bytes() == DATA
