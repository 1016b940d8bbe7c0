"""Pulls for a program that has an event loop, each in a process of its own.

The daemon must not wait: importing HTTP clients, hashing and copying gigabytes would take its time from
the models that answer, and what a server sends is better read elsewhere. The process ends with
its standard input, so with the daemon too; wherever it ends, the next pull goes on.

    python -m localllm.pull.apart STORE NAME [insecure]     prints events as JSON, one a line
"""

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import AsyncGenerator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from localllm.config import load_settings
from localllm.errors import Busy, LocalLLMError, PullFailed
from localllm.interpreter import command_of
from localllm.messages import error_of
from localllm.pull.events import Event, Header, Status, Transfer
from localllm.store import Store

MAX_PULLS = 16
NICENESS = 5
STOP_SECONDS = 10.0
LINE_BYTES = 1 << 20


class Pulls:
    """Pulls into one store. Those that want the same file share it (staging.py)."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._num_running = 0

    @property
    def is_busy(self) -> bool:
        """Whether a pull is running."""
        return self._num_running > 0

    async def events(self, name: str, *, is_insecure: bool = False) -> AsyncGenerator[Event, None]:
        """Pull a model. Closing the iterator cancels; what was fetched is kept.

        Raises what `pull` raises, and Busy if there are too many at once.
        """
        if self._num_running >= MAX_PULLS:
            raise Busy(f"{MAX_PULLS} pulls are running; try again later")
        self._num_running += 1
        try:
            process = await asyncio.create_subprocess_exec(
                *command_of("localllm.pull.apart"),
                *(str(self._store.root), name, *["insecure"] * is_insecure),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE_BYTES,
                start_new_session=True,
            )
            try:
                async for event in _events_of(process):
                    yield event
            finally:
                await _end(process)
        finally:
            self._num_running -= 1


async def _events_of(process: asyncio.subprocess.Process) -> AsyncGenerator[Event, None]:
    """What the process tells, until it has succeeded or failed."""
    assert process.stdout is not None
    async for line in process.stdout:
        told = json.loads(line)
        kind = told.pop("kind")
        if "error" in told:
            raise error_of(kind, told["error"])
        if kind == "Done":
            return
        yield _event_of(kind, told)
    raise PullFailed("the pull ended unexpectedly; pull again to go on")


def _event_of(kind: str, told: dict[str, Any]) -> Event:
    if kind == "Status":
        return Status(**told)
    return Header(Path(told["path"])) if kind == "Header" else Transfer(**told)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Have the process save what it knows and end."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


def main() -> None:
    """Pull into the store named by the first argument the model named by the second."""
    from localllm.pull.puller import pull

    os.nice(NICENESS)
    root, name = sys.argv[1:3]
    cancel = threading.Event()

    def wait_for_the_end() -> None:
        with contextlib.suppress(OSError, ValueError):
            os.read(sys.stdin.fileno(), 1)
        cancel.set()

    def tell(event: Event) -> None:
        _print({"kind": type(event).__name__, **asdict(event)})

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    try:
        is_insecure = "insecure" in sys.argv[3:]
        pull(name, Store(Path(root)), load_settings(), tell, cancel, is_insecure=is_insecure)
        _print({"kind": "Done"})
    except LocalLLMError as error:
        _print({"kind": type(error).__name__, "error": str(error)})


def _print(value: dict[str, Any]) -> None:
    """One line; when nobody reads any more, the end of standard input cancels."""
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(value, default=str), flush=True)


if __name__ == "__main__":
    main()
