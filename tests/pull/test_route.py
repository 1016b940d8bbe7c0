"""POST /api/pull at a running server, and what its clients make of it."""

import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import ollama
import pytest
from pulling import make_model
from standin import FileRequest, HubStandIn, Repo, running

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
from server_process import Server, environment, start_server

NAME = "hf.co/org/M-GGUF"
DATA = make_model(1500)


@pytest.fixture(scope="module")
def module_hub() -> Iterator[HubStandIn]:
    with running() as standin:
        yield standin


@pytest.fixture(scope="module")
def server(module_hub: HubStandIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("data")
    yield from start_server(
        folder,
        HF_ENDPOINT=module_hub.url,
        HF_HOME=str(folder / "hf"),
        HF_HUB_DISABLE_TELEMETRY="1",
        NO_PROXY="127.0.0.1",
    )


@pytest.fixture
def hub(module_hub: HubStandIn) -> HubStandIn:
    module_hub.repos["org/M-GGUF"] = Repo({"M-Q4_K_M.gguf": DATA})
    module_hub.on_file = lambda _: False
    return module_hub


def lines_of(answer: httpx.Response) -> list[dict[str, object]]:
    return [json.loads(line) for line in answer.text.splitlines()]


def forget(server: Server) -> None:
    server.http.request("DELETE", "/api/delete", json={"model": NAME})


def test_stream_is_ollamas(server: Server, hub: HubStandIn) -> None:
    forget(server)
    answer = server.post("/api/pull", model=NAME)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = lines_of(answer)
    digest = next(str(line["digest"]) for line in lines if "digest" in line)
    assert lines[0] == {"status": "pulling manifest"}
    assert "using M-Q4_K_M.gguf of org/M-GGUF" in [line["status"] for line in lines]
    assert lines[-4:] == [
        {
            "status": f"pulling {digest[7:19]}",
            "digest": digest,
            "total": len(DATA),
            "completed": len(DATA),
        },
        {"status": "verifying sha256 digest"},
        {"status": "writing manifest"},
        {"status": "success"},
    ]
    names = [model["name"] for model in server.http.get("/api/tags").json()["models"]]
    assert f"{NAME}:latest" in names
    details = server.post("/api/show", model=NAME).json()["details"]
    assert details["family"] == "llama"


def test_signed_links_are_not_logged(server: Server, hub: HubStandIn) -> None:
    forget(server)
    server.post("/api/pull", model=NAME)
    text = (server.folder / "log").read_text()
    assert "POST /api/pull" in text
    assert "sig=" not in text


def test_answer_as_one_object(server: Server, hub: HubStandIn) -> None:
    answer = server.post("/api/pull", name=NAME, stream=False)
    assert answer.json() == {"status": "success"}


def test_create_pulls_what_it_is_made_from(server: Server, hub: HubStandIn) -> None:
    forget(server)
    body = {"model": "mine", "from": NAME, "system": "Be brief."}
    lines = lines_of(server.http.post("/api/create", json=body))
    statuses = [line["status"] for line in lines]
    assert statuses[0] == "pulling manifest"
    assert statuses.count("success") == 1
    assert server.post("/api/show", model="mine").json()["system"] == "Be brief."


def test_unknown_model_is_a_line_of_the_stream(server: Server, hub: HubStandIn) -> None:
    answer = server.post("/api/pull", model="hf.co/org/none")
    assert answer.status_code == 200
    assert "file does not exist" in str(lines_of(answer)[-1]["error"])
    answer = server.post("/api/pull", model="hf.co/org/none", stream=False)
    assert answer.status_code == 500
    assert "file does not exist" in answer.json()["error"]


@pytest.mark.parametrize("name", ["", "a//b", "../x", "hf.co/o/r@../x"])
def test_bad_name_is_refused_before_the_stream(server: Server, name: str) -> None:
    answer = server.post("/api/pull", model=name)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("invalid model name")


def test_client_that_leaves_cancels_and_the_next_goes_on(server: Server, hub: HubStandIn) -> None:
    forget(server)

    def hang(request: FileRequest) -> bool:
        if request.start >= 3 << 20:
            hub.stopping.wait(20)
        return False

    hub.on_file = hang
    with server.http.stream("POST", "/api/pull", json={"model": NAME}) as answer:
        for line in answer.iter_lines():
            if json.loads(line).get("completed", 0) >= 3 << 20:
                break
    hub.on_file = lambda _: False
    before = len(hub.file_requests())
    assert server.post("/api/pull", model=NAME, stream=False).json() == {"status": "success"}
    assert len(hub.file_requests()) - before <= 3


def test_ollamas_python_client(server: Server, hub: HubStandIn) -> None:
    with ollama.Client(host=server.url) as client:
        statuses = [progress.status for progress in client.pull(NAME, stream=True)]
        assert statuses[-1] == "success"
        assert client.pull(NAME).status == "success"
        with pytest.raises(ollama.ResponseError, match="file does not exist"):
            client.pull("hf.co/org/none")


def command(server: Server, *args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command line."""
    done = subprocess.run(
        [sys.executable, "-m", "localllm.cli", *args],
        env=environment(server.folder, LOCALLLM_HOST=server.url),
        cwd=server.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def test_pull_command_tells_plain_lines_when_piped(server: Server, hub: HubStandIn) -> None:
    forget(server)
    code, out, err = command(server, "pull", NAME)
    assert (code, out) == (0, "")
    lines = err.splitlines()
    assert lines[0] == "pulling manifest"
    assert lines[-3:] == ["verifying sha256 digest", "writing manifest", "success"]
    assert any(line.endswith(": 100% of 6.1 MB") for line in lines)
    assert "\x1b" not in err
    assert len(lines) < 20


def test_pull_command_fails_with_one_line(server: Server, hub: HubStandIn) -> None:
    code, _, err = command(server, "pull", "hf.co/org/none")
    assert code == 1
    last = err.splitlines()[-1]
    assert last.startswith("Error: pull model manifest: file does not exist")


def test_run_pulls_what_is_not_there(server: Server, hub: HubStandIn) -> None:
    forget(server)
    code, out, err = command(server, "run", NAME, "hi")
    assert (code, out) == (0, "0 1 2 \n")
    assert "success" in err
    assert command(server, "run", NAME, "hi") == (0, "0 1 2 \n", "")


def test_conversation_begins_with_a_pull_on_a_terminal(server: Server, hub: HubStandIn) -> None:
    forget(server)
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "localllm.cli", "run", NAME],
        env=environment(server.folder, LOCALLLM_HOST=server.url, TERM="xterm"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""
    while b"Send a message" not in seen:
        ready, _, _ = select.select([terminal], [], [], 30)
        assert ready, seen
        seen += os.read(terminal, 65536)
    process.kill()
    process.wait()
    os.close(terminal)
    assert b"success" in seen
    assert b": 100% " in seen


def test_daemon_imports_no_hub_client_before_a_pull() -> None:
    code = (
        "import sys, localllm.server.app, localllm.cli.app\n"
        "print([m for m in ('huggingface_hub', 'httpx2', 'httpx', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
