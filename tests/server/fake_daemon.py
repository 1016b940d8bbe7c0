"""The real server and daemon, with runners around a fake model. Prints its port when it listens."""

import os
import sys
from pathlib import Path

from localllm.config import load_settings
from localllm.runner_process import RunnerProcess
from localllm.server.app import serve

FAKE_RUNNER = Path(__file__).parent.parent / "daemon" / "fake_runner.py"


async def start_fake() -> RunnerProcess:
    return await RunnerProcess.start(os.environ, (sys.executable, str(FAKE_RUNNER)))


if __name__ == "__main__":
    serve(
        load_settings(),
        start_fake,
        on_listening=lambda address: print(address.port, flush=True),
    )
