"""Nothing is left of runners that are gone: no process, descriptor, thread or task."""

import asyncio
import gc
import os
import random
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil

from localllm.config import Settings
from localllm.daemon import Daemon
from localllm.errors import LocalLLMError
from localllm.loaded import Target
from localllm.messages import Generate
from localllm.runner_process import RunnerProcess

FAKE = (sys.executable, str(Path(__file__).with_name("fake_runner.py")))
TARGETS = [Target(Path(f"/{name}.gguf"), name) for name in ("a", "b", "bad", "dies")]
WORDS = ("hi", "forever", "die", "exit", "refuse", "bug")


async def start() -> RunnerProcess:
    return await RunnerProcess.start(os.environ, FAKE)


async def ask(daemon: Daemon, target: Target, word: str, keep: float | None) -> None:
    with suppress(LocalLLMError):
        async with daemon.lease(target, keep) as lease:
            async for _ in lease.generate(Generate(0, word)):
                pass


async def torment(daemon: Daemon, rng: random.Random, rounds: int) -> None:
    """Requests of all kinds, of which some leave early, and runners that are killed."""
    for _ in range(rounds):
        keep = rng.choice((None, 0.0, 60.0))
        tasks = [
            asyncio.create_task(ask(daemon, rng.choice(TARGETS), rng.choice(WORDS), keep))
            for _ in range(4)
        ]
        await asyncio.wait(tasks, timeout=rng.choice((0.0, 0.05, 0.3)))
        ready = [model for model in daemon.loaded() if model.is_ready and not model.runner.is_dead]
        if ready and rng.random() < 0.4:
            os.kill(rng.choice(ready).runner.pid, signal.SIGKILL)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def held() -> tuple[int, int, int]:
    """Descriptors, threads and children of this process."""
    gc.collect()
    process = psutil.Process()
    return process.num_fds(), threading.active_count(), len(process.children())


def test_nothing_is_left_of_loads_kills_and_cancellations() -> None:
    async def test() -> None:
        rng = random.Random(5)
        daemon = Daemon(Settings(max_loaded_models=2), start)
        await torment(daemon, rng, 2)
        await daemon.close()
        await asyncio.sleep(0)
        before = held()
        tasks = len(asyncio.all_tasks())
        daemon = Daemon(Settings(max_loaded_models=2), start)
        await torment(daemon, rng, 12)
        await daemon.close()
        assert not daemon.is_busy
        assert not daemon.loaded()
        # Closing a pipe's transport takes the loop a turn or two.
        for _ in range(5):
            await asyncio.sleep(0)
        assert held() == before
        assert len(asyncio.all_tasks()) == tasks

    asyncio.run(asyncio.wait_for(test(), 120))
