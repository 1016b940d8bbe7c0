"""`localllm bench serve` against a server process, and the two forms of `localllm bench`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import Server, environment, start_server
from test_terminals import ESCAPE, shown

from localllm.cli.bench import with_goals

COMMAND = (sys.executable, "-m", "localllm.cli", "bench")


def bench(server: Server, *args: str) -> subprocess.CompletedProcess[str]:
    env = environment(server.folder, LOCALLLM_HOST=server.url)
    return subprocess.run([*COMMAND, *args], env=env, capture_output=True, text=True)


def test_report_json_and_picture(server: Server, tmp_path: Path) -> None:
    to_json, to_plot = tmp_path / "run.json", tmp_path / "run.svg"
    done = bench(
        *(server, "serve", "tiny", "--requests", "6", "--concurrency", "2"),
        *("--goodput", "ttft:60000", "tpot:60000", "--json", str(to_json), "--plot", str(to_plot)),
    )
    assert done.returncode == 0, done.stderr
    assert "requests finished                 6\n" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    for name in ("time to first token", "inter-token latency", "good requests per second"):
        assert name in done.stdout
    run = json.loads(to_json.read_text())
    assert (run["completed"], run["failed"], len(run["requests"])) == (6, 0, 6)
    assert run["goodput"] == {"ttft": 60000, "tpot": 60000}
    assert run["request_goodput"] == pytest.approx(run["request_throughput"])
    assert to_plot.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("serve", "tiny", "--rate", "1", "--concurrency", "2"), "give --rate or --concurrency"),
        (("serve", "tiny", "--api", "soap"), "--api is one of ollama,"),
        (("serve", "tiny", "--plot", "run.png"), "a name that ends in .svg"),
        (("serve", "nonsuch"), "model 'nonsuch' not found"),
        (("serve",), "Missing argument 'MODEL'"),
        (("nonsuch.gguf", "-p", "8"), "nonsuch.gguf"),
        ((), "Missing argument 'FILE.gguf'"),
    ],
)
def test_mistakes_are_one_line(server: Server, args: tuple[str, ...], error: str) -> None:
    done = bench(server, *args)
    assert done.returncode == 1
    assert error in done.stderr
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1


def test_a_daemon_that_wants_a_key_gets_ours(tmp_path: Path) -> None:
    for server in start_server(tmp_path, LOCALLLM_API_KEY="secret"):
        command = [*COMMAND, "serve", "tiny", "--requests", "2"]
        env = environment(tmp_path, LOCALLLM_HOST=server.url)
        without = subprocess.run(command, env=env, capture_output=True, text=True)
        assert (without.returncode, without.stderr.count("\n")) == (1, 1)
        for given in ({"LOCALLLM_API_KEY": "secret"}, {}):
            args = [] if given else ["--api-key", "secret", "--url", server.url]
            done = subprocess.run([*command, *args], env={**env, **given}, capture_output=True)
            assert done.returncode == 0, done.stderr


def test_interrupt_shows_what_was_measured(server: Server) -> None:
    server.post("/api/generate", model="tiny", keep_alive=0)
    while server.http.get("/api/ps").json()["models"]:
        pass
    env = environment(server.folder, LOCALLLM_HOST=server.url)
    process = subprocess.Popen(
        [*COMMAND, "serve", "tiny", "--seconds", "600", "--concurrency", "1"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while server.http.get("/api/ps").json()["models"] == []:
        pass
    # The command's own requests have loaded the model: it is at work.
    os.kill(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "requests finished" in out
    assert "interrupted" in error
    assert "Traceback" not in error


def test_a_terminal_shows_a_table_that_lives(server: Server) -> None:
    args = ("bench", "serve", "tiny", "--requests", "6", "--concurrency", "2")
    text = shown(server, *args)
    assert b"waiting for the model" in text
    assert ESCAPE in text
    assert text.count(b"requests finished                 6") == 1
    plain = shown(server, *args, TERM="dumb")
    assert ESCAPE not in plain
    assert b"requests finished                 6" in plain


def test_goals_follow_one_option_or_several() -> None:
    several = ["--goodput", "ttft:5", "--goodput", "tpot:5"]
    assert with_goals(["m", "--goodput", "ttft:5", "tpot:5"]) == ["m", *several]
    assert with_goals([*several, "m"]) == [*several, "m"]
    assert with_goals(["--goodput", "ttft:5", "smollm2:135m"])[2:] == ["smollm2:135m"]
    assert with_goals(["a", "ttft:5"]) == ["a", "ttft:5"]
