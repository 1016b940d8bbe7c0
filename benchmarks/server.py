"""A daemon of our own with one model, for measurements over HTTP; it goes with its process."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from localllm.config import load_settings

MODEL = "measured"
COMMAND = (sys.executable, "-m", "localllm.cli")


class ServerOfOne:
    """`localllm serve` in a temporary folder, with a model called `measured`."""

    def __init__(self, model: Path, threads: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            host = f"127.0.0.1:{sock.getsockname()[1]}"
        rest = {k: v for k, v in os.environ.items() if not k.startswith(("LOCALLLM_", "OLLAMA_"))}
        self._environ = {
            **rest,
            "LOCALLLM_HOST": host,
            "LOCALLLM_DATA": self._folder.name,
            "LOCALLLM_CACHE": str(load_settings().cache_dir),
            "LOCALLLM_THREADS": str(threads),
        }
        self._model = model.resolve()

    def __enter__(self) -> Self:
        log = Path(self._folder.name) / "serve.log"
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*COMMAND, "serve"], env=self._environ, stdout=output, stderr=output
            )
        while "listening on" not in log.read_text():
            if self._process.poll() is not None:
                sys.exit(log.read_text())
        self._command("create", MODEL, str(self._model))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()

    def bench(self, *options: str) -> dict[str, Any]:
        """What `localllm bench serve` with these options writes as JSON."""
        path = Path(self._folder.name) / "run.json"
        self._command("bench", "serve", MODEL, *options, "--json", str(path))
        run: dict[str, Any] = json.loads(path.read_text())
        return run

    def _command(self, *args: str) -> None:
        done = subprocess.run([*COMMAND, *args], env=self._environ, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(args)}: {done.stderr.strip()}")
