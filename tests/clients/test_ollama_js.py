"""A tour of every method of the npm package `ollama`, unchanged: tour.mjs walks, we look at it."""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from pulling import make_model
from registry_standin import digest_of, running_registry
from server_process import Server
from touring import Seen, run_tour

from localllm.config import load_settings

pytestmark = pytest.mark.real
PACKAGE = "ollama@^0.6.0"
TOUR = Path(__file__).with_name("tour.mjs")


@pytest.fixture(scope="session")
def node_modules() -> Path:
    """A folder with the package, fetched the first time and kept in the cache folder."""
    if shutil.which("node") is None:
        pytest.skip("there is no node")
    kept = load_settings().cache_dir / "node" / PACKAGE
    if kept.is_dir():
        return kept
    if shutil.which("npm") is None:
        pytest.skip("there is no npm to fetch the package with")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        command = ["npm", "install", "--silent", "--no-audit", "--prefix", folder, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"npm cannot fetch {PACKAGE}: {done.stderr.strip()[:200]}")
        if not kept.is_dir():
            Path(folder).rename(kept)
            Path(folder).mkdir()
    return kept


@pytest.fixture(scope="module")
def seen(server: Server, node_modules: Path) -> Seen:
    """What each step of the tour got."""
    data = make_model(10, seed=7)
    server.http.post(f"/api/blobs/{digest_of(data)}", content=data)
    tour = node_modules / TOUR.name
    shutil.copyfile(TOUR, tour)
    with running_registry() as registry:
        registry.add("me/m/t", [("model", make_model(10, seed=8))])
        command = ["node", str(tour), server.url, digest_of(data), f"{registry.host}/me/m:t"]
        return run_tour(command, node_modules)


def test_generate_and_chat(seen: Seen) -> None:
    whole, (*pieces, last) = seen["generate"], seen["generate_stream"]
    assert "".join(piece["response"] for piece in pieces) == whole["response"] != ""
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 12)
    assert seen["generate_raw"]["response"].startswith(" five")
    entries = seen["generate_logprobs"]["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 12
    whole, (*pieces, last) = seen["chat"], seen["chat_stream"]
    said = "".join(piece["message"]["content"] for piece in pieces)
    assert said == whole["message"]["content"] != ""
    assert (last["done_reason"], last["message"]["role"]) == ("length", "assistant")


def test_an_aborted_stream_raises_in_the_client(seen: Seen) -> None:
    assert seen["aborted"] == [3, "AbortError"]


def test_tools_formats_and_thinking(seen: Seen) -> None:
    call = {"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}}
    assert seen["tools"]["message"]["tool_calls"][0]["function"] == call
    calls = [c for p in seen["tools_stream"] for c in p["message"].get("tool_calls", ())]
    assert [c["function"] for c in calls] == [call]
    assert set(json.loads(seen["structured"]["message"]["content"])) == {"name", "age"}
    assert seen["thinking"]["message"]["thinking"]
    assert seen["thinking"]["message"]["content"].startswith("It is")


def test_vectors_of_texts(seen: Seen) -> None:
    assert [len(vector) for vector in seen["embed"]["embeddings"]] == [8, 8]
    assert len(seen["embeddings"]["embedding"]) == 576


def test_models(seen: Seen) -> None:
    assert seen["version"]["version"].count(".") == 2
    assert "smollm2:latest" in [model["name"] for model in seen["list"]["models"]]
    assert {"name", "size", "digest", "expires_at", "size_vram"} <= seen["ps"]["models"][0].keys()
    assert seen["show"]["model_info"]["general.architecture"] == "llama"
    assert seen["show"]["capabilities"] == ["completion", "tools"]
    assert seen["create"] == {"status": "success"}
    assert seen["create_stream"][-1] == {"status": "success"}
    assert seen["copy"] == {"status": "success"}
    assert not {"js:latest", "js2:latest", "js3:latest"} & set(seen["deleted"])
    assert seen["unload"]["done_reason"] == "unload"


def test_pull(seen: Seen) -> None:
    assert seen["pull"] == {"status": "success"}
    assert seen["pull_stream"][0] == {"status": "pulling manifest"}
    assert seen["pull_stream"][-1] == {"status": "success"}
    assert "file does not exist" in seen["pull_missing"]["error"]


@pytest.mark.parametrize(
    ("step", "status", "text"),
    [
        ("missing", 404, "model 'nope' not found"),
        ("no_thinking", 400, '"smollm2" does not support thinking'),
        ("image", 400, '"smollm2" does not support images'),
        ("push", 400, "push is not supported by this version"),
    ],
)
def test_errors_carry_status_and_text(seen: Seen, step: str, status: int, text: str) -> None:
    assert seen[step]["status"] == status
    assert text in seen[step]["error"]
