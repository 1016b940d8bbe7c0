"""ADAPTER in a Modelfile, and what `show` says of the model."""

import hashlib
import subprocess
import sys

import numpy as np
from adapter_case import write_adapter
from server_process import Server, environment

PAIRS = {"blk.0.attn_q.weight": (np.ones((4, 64), np.float32), np.ones((64, 4), np.float32))}


def run(server: Server, *args: str) -> "subprocess.CompletedProcess[str]":
    env = environment(server.folder, LOCALLLM_HOST=server.url)
    command = [sys.executable, "-m", "localllm.cli", *args]
    return subprocess.run(
        command,
        env=env,
        cwd=server.folder,
        text=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )


def test_create_takes_a_file_beside_the_modelfile_and_show_names_it(server: Server) -> None:
    folder = server.folder / "recipe"
    folder.mkdir()
    adapter = write_adapter(folder / "lora.gguf", PAIRS, alpha=8.0)
    (folder / "Modelfile").write_text("FROM tiny\nADAPTER ./lora.gguf\nSYSTEM be brief\n")
    assert run(server, "create", "adapted", "-f", "recipe/Modelfile").returncode == 0
    shown = run(server, "show", "adapted").stdout
    digest = hashlib.sha256(adapter.read_bytes()).hexdigest()
    lines = [line.split() for line in shown.splitlines()]
    start = lines.index(["Adapter"])
    assert lines[start + 1 : start + 5] == [
        ["architecture", "llama"],
        ["parameters", "512"],
        ["alpha", "8.0"],
        ["digest", digest[:12]],
    ]
    # The Modelfile that `show` writes makes the same model.
    (folder / "again").write_text(run(server, "show", "adapted", "--modelfile").stdout)
    assert run(server, "create", "again", "-f", "recipe/again").returncode == 0
    assert (
        run(server, "run", "again", "adapter").stdout
        == run(server, "run", "adapted", "adapter").stdout
    )
    assert "Adapter" not in run(server, "show", "tiny").stdout


def test_an_adapter_that_is_not_there_is_one_line(server: Server) -> None:
    path = server.folder / "Gone"
    path.write_text("FROM tiny\nADAPTER gone.gguf\n")
    done = run(server, "create", "x", "-f", "Gone")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [f"Error: {server.folder}/gone.gguf: no such file"]
