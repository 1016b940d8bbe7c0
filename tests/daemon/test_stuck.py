"""A kernel that never ends costs the requests that were running, and nobody else anything."""

import asyncio
import os
import sys
from pathlib import Path

import psutil
from byte_model import write_tiny_model

from localllm.config import Settings
from localllm.daemon import Daemon
from localllm.errors import RunnerDied
from localllm.loaded import Target
from localllm.messages import Generate
from localllm.runner_process import RunnerProcess

SPINNING = (sys.executable, str(Path(__file__).with_name("spinning_runner.py")))
# Longer than the time from pulse to pulse.
STALL_SECONDS = 4.0


async def start() -> RunnerProcess:
    folder = Path(__file__).parent.parent
    path = os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")])
    return await RunnerProcess.start({**os.environ, "PYTHONPATH": path}, SPINNING, STALL_SECONDS)


async def ask(daemon: Daemon, target: Target, prompt: str, num_predict: int = 3) -> int:
    options = {"num_predict": num_predict, "temperature": 0, "ignore_eog": True}
    count = 0
    async with daemon.lease(target) as lease:
        async for delta in lease.generate(Generate(0, prompt, options=options)):
            count += delta.num_tokens
    return count


def test_stuck_kernel_is_noticed_and_its_runner_replaced(tmp_path: Path) -> None:
    """Also those that wait in the queue, which has four places in a step, hear of it."""
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path)
    target = Target(path, "tiny")

    async def test() -> None:
        daemon = Daemon(Settings(), start)
        try:
            assert await ask(daemon, target, "hello") == 3
            first = daemon.loaded()[0].runner.pid
            running = [ask(daemon, target, prompt, 200) for prompt in ("hi", "go ~ on", *"abcd")]
            ends = await asyncio.gather(*running, return_exceptions=True)
            assert isinstance(ends[1], RunnerDied)
            for end in ends:
                assert end == 200 or "was stuck for 4 s and was ended" in str(end)
            assert not psutil.pid_exists(first)
            assert await ask(daemon, target, "hello") == 3
            assert daemon.loaded()[0].runner.pid != first
        finally:
            await daemon.close()

    asyncio.run(asyncio.wait_for(test(), 120))
