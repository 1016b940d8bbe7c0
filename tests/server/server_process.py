"""Starting a server with a model `tiny`, whose runners are real processes with a fake model."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np

FAKE_DAEMON = Path(__file__).with_name("fake_daemon.py")
Process = subprocess.Popen[str]


def write_model(path: Path, *, context_length: int = 2048, is_for_vectors: bool = False) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_context_length(context_length)
    writer.add_embedding_length(64)
    writer.add_file_type(7)
    if is_for_vectors:
        writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_chat_template("{{ messages }}")
    writer.add_array("test.long", list(range(2000)))
    writer.add_tensor("token_embd.weight", np.zeros((100, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@dataclass
class Server:
    """A server process; `http` is a client of it."""

    http: httpx.Client
    url: str
    folder: Path
    model_file: Path
    process: Process

    @property
    def trusted(self) -> dict[str, str]:
        """Headers of a caller that can read the data folder."""
        return {"x-localllm-secret": (self.folder / "secret").read_text().strip()}

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def create(self, name: str, **fields: Any) -> None:
        body = {"model": name, "from": str(self.model_file), "stream": False, **fields}
        answer = self.http.post("/api/create", json=body, headers=self.trusted)
        assert answer.status_code == 200, answer.text


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a process that keeps everything below `folder`."""
    rest = {k: v for k, v in os.environ.items() if not k.startswith(("LOCALLLM_", "OLLAMA_"))}
    own = {"LOCALLLM_DATA": str(folder), "LOCALLLM_CACHE": str(folder / "cache")}
    return {**rest, **own, **more}


@contextmanager
def running(script: Path, folder: Path, **environ: str) -> Iterator[tuple[str, Process]]:
    """A server process with its data in `folder` and its log there; gives its URL, ends it."""
    with (folder / "log").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=environment(folder, **{"LOCALLLM_HOST": "127.0.0.1:0", **environ}),
        )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}", process
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def start_server(folder: Path, **environ: str) -> Iterator[Server]:
    with (
        running(FAKE_DAEMON, folder, **environ) as (url, process),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        server = Server(http, url, folder, write_model(folder / "tiny.gguf"), process)
        server.create("tiny")
        yield server
