"""Thousands of requests, half of them rude, and runners that are killed: nothing is lost or left.

Defends: every well-formed request that no kill hits succeeds, with the same answer each time; bad
bodies are told; at the end the daemon and its runner hold what they held after warm-up, the block
pools are clean, and no process is left.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from server_process import environment
from soak import Held, Soak
from tiny_model import write_tiny_model

from localllm.config import load_settings
from localllm.runner import NUM_TEXT_THREADS

MEMORY_SHARE = 0.05
PATIENCE = 60
CLEAN = "the block pool is clean"


class Daemon:
    """A real daemon of two models, of which one is loaded at a time."""

    def __init__(self, folder: Path, models: dict[str, Path], **environ: str) -> None:
        self.log = folder / "log"
        settings = {
            "LOCALLLM_HOST": "127.0.0.1:0",
            "LOCALLLM_MAX_LOADED_MODELS": "1",
            "LOCALLLM_CONTEXT_LENGTH": "512",
            "LOCALLLM_DEBUG": "1",
            # Kernels come from the user's own cache: compiling them is another test's matter.
            "LOCALLLM_CACHE": str(load_settings().cache_dir),
        }
        with self.log.open("w") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "localllm.server"],
                stdout=output,
                stderr=output,
                env=environment(folder, **settings, **environ),
            )
        self.process = psutil.Process(self.popen.pid)
        self.url = self._url()
        secret = {"x-localllm-secret": (folder / "secret").read_text().strip()}
        for name, path in models.items():
            body = {"model": name, "from": str(path), "stream": False}
            answer = httpx.post(f"{self.url}/api/create", json=body, headers=secret, timeout=300)
            answer.raise_for_status()

    def _url(self) -> str:
        while self.popen.poll() is None:
            for line in self.log.read_text().splitlines():
                if "listening on " in line:
                    return line.split("listening on ")[1].split(",")[0]
        raise AssertionError(self.log.read_text())

    def close(self) -> None:
        self.popen.terminate()
        self.popen.wait(30)


def settle(soak: Soak, model: str) -> list[Held]:
    """What daemon and runner hold once `model` alone is loaded and nobody is connected."""
    asyncio.run(soak.touch(model))
    deadline = time.monotonic() + PATIENCE
    while len(runners := soak.runners()) != 1 or connections(soak.process):
        assert time.monotonic() < deadline, (runners, connections(soak.process))
    return [Held.of(soak.process), Held.of(runners[0])]


def connections(process: psutil.Process) -> list[str]:
    return [c.status for c in process.net_connections("tcp") if c.status != psutil.CONN_LISTEN]


def check_soak(daemon: Daemon, *, warm_up: int, count: int, switch_every: int, kills: int) -> None:
    models = ("first", "second")
    soak = Soak(daemon.url, daemon.process, models, seed=count)
    asyncio.run(soak.run(warm_up, switch_every=warm_up // 4))
    before = settle(soak, models[0])
    asyncio.run(soak.run(count, switch_every=switch_every, kills=kills))
    after = settle(soak, models[0])
    print(soak.tally.counts, before, after, sep="\n")
    assert soak.tally.wrong == []
    assert soak.num_kills == kills
    assert soak.tally.counts["good"] > (count + warm_up) / 2
    for old, new in zip(before, after):
        # A new runner starts its text threads as it needs them.
        assert new.num_threads <= old.num_threads + NUM_TEXT_THREADS
        assert new.num_descriptors <= old.num_descriptors
    assert total(after) <= total(before) * (1 + MEMORY_SHARE)
    daemon.close()
    assert [pid for pid in soak.pids if psutil.pid_exists(pid)] == []
    check_log(daemon.log.read_text())


def check_log(log: str) -> None:
    """Runners that were unloaded found their pools clean, and nothing failed anywhere."""
    assert CLEAN in log
    assert "AssertionError" not in log
    assert "Traceback" not in log


def total(held: list[Held]) -> int:
    return sum(h.resident_bytes for h in held)


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "first": write_tiny_model(folder / "first.gguf"),
        "second": write_tiny_model(folder / "second.gguf", "gemma3", seed=2),
    }


@pytest.fixture
def daemon(tmp_path: Path, tiny_models: dict[str, Path]) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path, tiny_models)
    yield daemon
    daemon.close()


def test_soak(daemon: Daemon) -> None:
    check_soak(daemon, warm_up=80, count=120, switch_every=50, kills=1)


@pytest.mark.slow
def test_2000_requests(daemon: Daemon) -> None:
    check_soak(daemon, warm_up=300, count=1700, switch_every=250, kills=3)
