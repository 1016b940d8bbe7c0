"""The serving scenarios run, on a tiny model, and print what they promise."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from benchmarks.serving import arrivals
from localllm.config import load_settings

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", context=2048)


def scenario(*args: str) -> str:
    env = {**os.environ, "LOCALLLM_CACHE": str(load_settings().cache_dir)}
    command = [sys.executable, "-m", "benchmarks.serving", *args]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_chats_over_http_and_through_the_engine(tiny_path: Path) -> None:
    few = ("--requests", "5", "--at-once", "3", "--prompt", "40", "--new", "8", "--rounds", "1")
    rows = scenario("chats", str(tiny_path), *few).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| http", "| engine"]
    paced = scenario("chats", str(tiny_path), *few, "--rate", "50", "--sides", "engine")
    assert "| engine |" in paced


@pytest.mark.slow
def test_pool_tells_how_full_it_was(tiny_path: Path) -> None:
    out = scenario("pool", str(tiny_path))
    (share,) = (line.split(": ")[1].split("%")[0] for line in out.splitlines() if "held" in line)
    assert 96 <= float(share) <= 100
    assert out.splitlines()[-1].startswith("ratio: ")


def test_arrivals_are_the_same_for_every_side() -> None:
    assert arrivals(Namespace(rate=None, requests=3)) == [0.0] * 3
    paced = Namespace(rate=2.0, requests=500)
    times = arrivals(paced)
    assert times == arrivals(paced) == sorted(times)
    assert 200 < times[-1] < 300  # 500 arrivals at 2 a second
