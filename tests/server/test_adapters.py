"""Models with an adapter: made from blobs, paths and other models, and what is said of them."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_case import write_adapter
from server_process import Server

from localllm.names import ModelName
from localllm.store import Store

PAIRS = {"blk.0.attn_q.weight": (np.ones((4, 64), np.float32), np.ones((64, 4), np.float32))}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "lora.gguf", PAIRS, alpha=8.0)


def upload(server: Server, path: Path) -> str:
    digest = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert server.http.post(f"/api/blobs/{digest}", content=path.read_bytes()).is_success
    return digest


def create(server: Server, name: str, *, trusted: bool = False, **fields: Any) -> tuple[int, Any]:
    body = {"model": name, "from": "tiny", "stream": False, **fields}
    headers = server.trusted if trusted else {}
    answer = server.http.post("/api/create", json=body, headers=headers)
    return answer.status_code, answer.json()


def layers(server: Server, name: str) -> list[tuple[str, str]]:
    model = Store(server.folder / "models").find(ModelName.parse(name))
    return [(layer.kind, f"sha256:{layer.digest}") for layer in model.layers]


def test_an_adapter_from_a_blob_is_a_layer(server: Server, adapter: Path) -> None:
    digest = upload(server, adapter)
    assert create(server, "adapted", adapters={"lora.gguf": digest}) == (200, {"status": "success"})
    assert ("adapter", digest) in layers(server, "adapted")
    # A model made from it has it, too, until it is given another.
    create(server, "heir", **{"from": "adapted", "system": "x"})
    assert ("adapter", digest) in layers(server, "heir")
    other = write_adapter(adapter.with_name("other.gguf"), PAIRS, alpha=9.0)
    create(server, "other", **{"from": "adapted", "adapters": {"o.gguf": upload(server, other)}})
    kinds = [kind for kind, _ in layers(server, "other")]
    assert kinds.count("adapter") == 1
    assert ("adapter", digest) not in layers(server, "other")


def test_show_mentions_it(server: Server, adapter: Path) -> None:
    digest = upload(server, adapter)
    create(server, "adapted", adapters={"lora.gguf": digest})
    found = server.post("/api/show", model="adapted").json()
    blob = server.folder / "models" / "blobs" / digest.replace(":", "-")
    assert f"\nADAPTER {blob}\n" in found["modelfile"]
    info = found["adapter_info"]
    assert info["digest"] == digest
    assert info["adapter.lora.alpha"] == 8.0
    assert info["general.parameter_count"] == 4 * 64 * 2
    assert "adapter_info" not in server.post("/api/show", model="tiny").json()


def test_a_path_is_for_this_user_only(server: Server, adapter: Path) -> None:
    asked = {"adapters": {str(adapter): ""}}
    assert create(server, "mine", trusted=True, **asked)[0] == 200
    digest = hashlib.sha256(adapter.read_bytes()).hexdigest()
    assert ("adapter", f"sha256:{digest}") in layers(server, "mine")
    assert create(server, "mine", **asked) == (400, {"error": "file path must be relative"})
    whole = {"from": str(server.model_file), **asked}
    assert create(server, "whole", trusted=True, **whole)[0] == 200
    assert [kind for kind, _ in layers(server, "whole")] == ["model", "adapter"]


def test_models_of_one_file_and_other_adapters_run_apart(server: Server, adapter: Path) -> None:
    create(server, "adapted", adapters={"lora.gguf": upload(server, adapter)})
    create(server, "twin", **{"from": "adapted", "system": "x"})
    ask = {"prompt": "adapter", "stream": False}
    answers = {
        name: server.post("/api/generate", model=name, **ask).json()["response"]
        for name in ("tiny", "adapted", "twin")
    }
    assert answers["tiny"] == "none "
    assert answers["adapted"] == answers["twin"]
    assert hashlib.sha256(adapter.read_bytes()).hexdigest() in answers["adapted"]
    loaded = [model["name"] for model in server.http.get("/api/ps").json()["models"]]
    assert sorted(loaded) == ["adapted:latest", "tiny:latest"]


@pytest.mark.parametrize(
    ("adapters", "text"),
    [
        ({"a": "x", "b": "y"}, "only one adapter is currently supported"),
        ({"../a.gguf": "x"}, "file path must be relative"),
        ({"a.gguf": "x"}, "invalid digest format"),
        ({"a.gguf": f"sha256:{'0' * 64}"}, "blob sha256:000"),
        ({"a.safetensors": "x"}, "create: safetensors are not supported"),
    ],
)
def test_refusals(server: Server, adapters: dict[str, str], text: str) -> None:
    status, body = create(server, "refused", adapters=adapters)
    assert status == 400
    assert body["error"].startswith(text)


def test_what_is_no_adapter_or_for_another_model_is_refused(server: Server, adapter: Path) -> None:
    digest = upload(server, server.model_file)
    status, body = create(server, "refused", adapters={"m.gguf": digest})
    assert status == 400
    assert "is no adapter, but a model" in body["error"]
    gemma = write_adapter(adapter.with_name("gemma.gguf"), PAIRS, arch="gemma")
    status, body = create(server, "refused", adapters={"g.gguf": upload(server, gemma)})
    assert (status, body["error"]) == (400, "the adapter is for gemma, the model is llama")
