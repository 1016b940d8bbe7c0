"""A pull in a process of its own ends with whoever started it."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from pulling import Puller, make_model
from standin import FileRequest, HubStandIn, Repo

from localllm.errors import PullFailed
from localllm.pull.apart import Pulls
from localllm.store import Store

NAME = "hf.co/org/M-GGUF"
DATA = make_model(1500)


@pytest.fixture
def process(puller: Puller, hub: HubStandIn) -> Iterator["subprocess.Popen[str]"]:
    """A pull whose second half hangs."""
    hub.repos["org/M-GGUF"] = Repo({"M-Q4_K_M.gguf": DATA})

    def hang(request: FileRequest) -> bool:
        if request.start >= 3 << 20:
            hub.stopping.wait(60)
        return False

    hub.on_file = hang
    command = [sys.executable, "-m", "localllm.pull.apart", str(puller.store.root), NAME]
    environ = {**os.environ, "HF_ENDPOINT": hub.url}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


def test_process_ends_with_its_standard_input_and_keeps_what_is_there(
    process: "subprocess.Popen[str]", puller: Puller, hub: HubStandIn
) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line).get("completed", 0) >= 3 << 20:
            break
    process.stdin.close()
    last = json.loads(process.stdout.read().splitlines()[-1])
    assert (last["kind"], process.wait(30)) == ("Cancelled", 0)
    hub.on_file = lambda _: False
    before = len(hub.file_requests())
    model = puller.pull(NAME)
    assert puller.store.model_file(model).read_bytes() == DATA
    assert len(hub.file_requests()) - before == 3


def test_process_that_is_killed_is_an_error_of_one_line(store: Store) -> None:
    """Its reader sees the end of its output."""

    async def pull() -> None:
        async for _ in Pulls(store).events(NAME):
            for child in psutil.Process().children():
                # A child that is dying already has no command line any more.
                with contextlib.suppress(psutil.Error):
                    if "localllm.pull.apart" in child.cmdline():
                        child.kill()

    with pytest.raises(PullFailed, match="ended unexpectedly; pull again"):
        asyncio.run(pull())
