"""The daemon's end of a runner: starts the process, talks to it, and notices when it dies or hangs.

Invariants:
  1. every request ends exactly once: with a last delta, with RunnerDied, or by `close` of its
  iterator,
     which cancels it in the runner;
  2. a runner whose progress counter rests for `stall_seconds` while requests are running is killed,
     time in which this process did not run itself not counted;
  3. after `closed` is set the process is gone and everything it held is free.

Not here: which runners exist and for how long (daemon.py).
"""

import asyncio
import logging
import signal
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from typing import TypeVar

from localllm.errors import RunnerDied
from localllm.launch import COMMAND, Launched, launch
from localllm.memory import num_oom_kills
from localllm.messages import (
    HEADER,
    MAX_BODY_BYTES,
    Ask,
    Cancel,
    Delta,
    Deltas,
    Estimate,
    Failed,
    Load,
    Loading,
    Message,
    Proceed,
    Pulse,
    Ready,
    decode,
    encode,
    error_of,
)
from localllm.request_id import current

STALL_SECONDS = 30.0
LOAD_STALL_SECONDS = 300.0
# Between two looks at a runner that works, and what a look may be late.
WATCH_SECONDS = 2.0
EXIT_SECONDS = 3.0
# For output that a process left behind; another process may hold the pipe.
LAST_WORDS_SECONDS = 1.0
# Numba prints this when a kernel raised, and goes on with wrong numbers.
FATAL_OUTPUT = "Exception ignored"
LIKELY_CAUSES: dict[int, str] = {
    signal.SIGKILL: ", perhaps for lack of memory",
    signal.SIGBUS: ", perhaps because the model file was cut short while it was in use",
}

log = logging.getLogger("localllm.runner")

MakeRoom = Callable[[int], Awaitable[int]]
T = TypeVar("T")


class RunnerProcess:
    """One runner process; made by `start`, of use after `load`."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stall_seconds: float,
    ) -> None:
        self.closed = asyncio.Event()
        self.ready: Ready | None = None
        self.loading: Loading | None = None
        self.pulse = Pulse(-1)
        self.last_output: deque[str] = deque(maxlen=20)
        self._process = process
        self._reader = reader
        self._writer = writer
        self._stall_seconds = stall_seconds
        self._requests: dict[int, asyncio.Queue[Delta]] = {}
        self._want_position: set[int] = set()
        self._next_id = 0
        self._estimated: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._loaded: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._moved_at = 0.0
        self._num_oom_kills = num_oom_kills()
        self._reason: str | None = None
        self._on_loading: Callable[[Loading], None] | None = None
        self._watching: asyncio.Task[None] | None = None
        # What the process does is not about the request that happened to start it.
        self._reading = asyncio.create_task(self._read(), context=Context())
        self._reading_output = asyncio.create_task(self._read_output(), context=Context())

    @classmethod
    async def start(
        cls,
        environ: Mapping[str, str],
        command: Sequence[str] = COMMAND,
        stall_seconds: float = STALL_SECONDS,
    ) -> "RunnerProcess":
        """Start the process, which imports its libraries while it waits for `load`."""
        return await cls.adopt(launch(environ, command), stall_seconds)

    @classmethod
    async def adopt(
        cls, launched: Launched, stall_seconds: float = STALL_SECONDS
    ) -> "RunnerProcess":
        """Take over a process that was started before there was an event loop."""
        launched.socket.setblocking(False)
        try:
            streams = await asyncio.open_unix_connection(sock=launched.socket, limit=1 << 20)
        except BaseException:
            launched.abandon()
            raise
        return cls(launched.process, *streams, stall_seconds)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    async def load(
        self,
        load: Load,
        progress: Callable[[Loading], None] | None = None,
        make_room: MakeRoom | None = None,
    ) -> Ready:
        """Have it load a model; if that fails, the process is gone and the cause raised.

        make_room  is called with what the model is going to hold, and gives what it may take
        """
        self._send(load)
        self._on_loading = progress
        try:
            num_bytes = await self._while_moving(self._estimated, load.path)
            free_bytes = num_bytes if make_room is None else await make_room(num_bytes)
            self._send(Proceed(free_bytes))
            self.ready = await self._while_moving(self._loaded, load.path)
        except BaseException:
            await self.close()
            raise
        return self.ready

    async def _while_moving(self, future: asyncio.Future[T], path: str) -> T:
        """The future's result, which must come while the load makes progress."""
        loop = asyncio.get_running_loop()
        self._moved_at = loop.time()
        while not future.done():
            left = self._moved_at + LOAD_STALL_SECONDS - loop.time()
            if left <= 0:
                raise RunnerDied(f"{path}: loading made no progress for 5 minutes")
            await asyncio.wait({future}, timeout=left)
        return future.result()

    async def generate(self, request: Ask, *, wants_position: bool = False) -> AsyncIterator[Delta]:
        """Run a request and give its deltas; closing the iterator early cancels it.

        wants_position  also tell its place in the queue, now and then
        Raises the error that ended it.
        """
        if self.is_dead:
            raise RunnerDied(self._reason or "the model was unloaded")
        self._next_id += 1
        number = self._next_id
        queue: asyncio.Queue[Delta] = asyncio.Queue()
        if not self._requests:
            self._moved_at = asyncio.get_running_loop().time()
        self._requests[number] = queue
        if wants_position:
            self._want_position.add(number)
        self._watch()
        try:
            self._send(replace(request, request_id=number, log_id=current.get()))
            while True:
                delta = await queue.get()
                if delta.error is not None:
                    raise error_of(delta.error_kind, delta.error)
                yield delta
                if delta.done_reason is not None or delta.rendered is not None:
                    return
        finally:
            self._want_position.discard(number)
            if self._requests.pop(number, None) is not None:
                self._send(Cancel(number))

    @property
    def is_dead(self) -> bool:
        """Whether it takes no more requests: it died, or is being ended."""
        is_gone = self.closed.is_set() or self._process.poll() is not None
        return is_gone or self._reason is not None

    def retire(self, reason: str | None = None) -> None:
        """Take no more requests, and let the process end."""
        if self._reason is None:
            self._reason = reason or "the model was unloaded"
        self._writer.close()

    async def close(self) -> None:
        """End the process, politely at first, by force if need be; requests end with an error."""
        self.retire()
        await self._wait_for_exit()
        self._end_requests()
        await self._release()

    def kill(self, reason: str) -> None:
        """End the process at once; its requests get `reason`."""
        if self._reason is None:
            self._reason = reason
        if self._process.poll() is None:
            self._process.kill()

    def _send(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def _read(self) -> None:
        """Dispatch what the runner says until it goes."""
        try:
            while True:
                size, kind = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if size > MAX_BODY_BYTES:
                    break
                self._dispatch(decode(kind, await self._reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except (ValueError, TypeError, IndexError, KeyError):
            log.exception("runner %d sent a damaged message", self.pid)
        await self._gone()

    def _dispatch(self, message: Message) -> None:
        if isinstance(message, Deltas):
            self._moved_at = asyncio.get_running_loop().time()
            for delta in message.deltas:
                queue = self._requests.get(delta.request_id)
                if queue is None:
                    continue
                queue.put_nowait(delta)
                if delta.done_reason or delta.error or delta.rendered is not None:
                    del self._requests[delta.request_id]
        elif isinstance(message, Pulse):
            if message.counter != self.pulse.counter:
                self._moved_at = asyncio.get_running_loop().time()
            self.pulse = message
            self._tell_positions()
        elif isinstance(message, Loading):
            self.loading = message
            self._moved_at = asyncio.get_running_loop().time()
            if self._on_loading is not None:
                self._on_loading(message)
        elif isinstance(message, Estimate) and not self._estimated.done():
            self._estimated.set_result(message.num_bytes)
        elif isinstance(message, Ready) and not self._loaded.done():
            self._loaded.set_result(message)
        elif isinstance(message, Failed):
            self._fail_load(error_of(message.kind, message.error))

    def _fail_load(self, error: Exception) -> None:
        for future in (self._estimated, self._loaded):
            if not future.done():
                future.set_exception(error)
                # Whether anybody waits for it or not.
                future.exception()

    def _tell_positions(self) -> None:
        if not self._want_position:
            return
        for position, number in enumerate(self.pulse.waiting, 1):
            queue = self._requests.get(number)
            if queue is not None and number in self._want_position:
                queue.put_nowait(Delta(number, queue_position=position))

    def _watch(self) -> None:
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch_progress(), context=Context())

    async def _watch_progress(self) -> None:
        """Kill the runner if it does not move while it has requests."""
        loop = asyncio.get_running_loop()
        while self._requests and not self.closed.is_set():
            left = self._moved_at + self._stall_seconds - loop.time()
            if left <= 0:
                log.error("runner %d made no progress for %g s", self.pid, self._stall_seconds)
                self.kill(f"the model runner was stuck for {self._stall_seconds:g} s and was ended")
                return
            pause = min(max(left, 0.05), WATCH_SECONDS)
            before = loop.time()
            await asyncio.sleep(pause)
            # While this process was stopped or busy it could not hear of any progress.
            self._moved_at += max(0.0, loop.time() - before - pause - WATCH_SECONDS)

    async def _gone(self) -> None:
        """Give every request its error after the process has died, or has stopped talking."""
        self._writer.close()
        code = await self._wait_for_exit()
        if self._reason is None:
            self._reason = self._cause(code)
            log.error("runner %d: %s", self.pid, self._reason)
        self._fail_load(RunnerDied(self._reason))
        self._end_requests()
        await self._release()

    def _cause(self, code: int) -> str:
        """What to tell a person about a runner that exited with `code`."""
        cause = f"exit code {code}"
        if code < 0:
            cause = f"signal {signal.Signals(-code).name}"
            cause += self._likely_cause(-code)
        tail = f": {self.last_output[-1]}" if self.last_output and code > 0 else ""
        return f"the model runner has unexpectedly stopped ({cause}{tail}); try again"

    def _likely_cause(self, number: int) -> str:
        if number == signal.SIGKILL and num_oom_kills() > self._num_oom_kills:
            return ": the system had run out of memory"
        return LIKELY_CAUSES.get(number, "")

    def _end_requests(self) -> None:
        requests, self._requests = self._requests, {}
        for number, queue in requests.items():
            queue.put_nowait(Delta(number, error=self._reason, error_kind="RunnerDied"))

    async def _wait_for_exit(self) -> int:
        """Wait for the process to be gone, in the end by force, and tell its exit code."""
        deadline = asyncio.get_running_loop().time() + EXIT_SECONDS
        pause = 0.002
        while (code := self._process.poll()) is None:
            if asyncio.get_running_loop().time() >= deadline:
                self._process.kill()
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)
        self.closed.set()
        return code

    async def _release(self) -> None:
        """Close what connected us to a process that is gone, once its last words are read."""
        await asyncio.wait({self._reading_output}, timeout=LAST_WORDS_SECONDS)
        self._reading_output.cancel()
        if self._watching is not None:
            self._watching.cancel()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def _read_output(self) -> None:
        """Log the runner's standard error until it ends."""
        assert self._process.stderr is not None
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stderr
        )
        try:
            await self._log_lines(reader)
        finally:
            transport.close()

    async def _log_lines(self, reader: asyncio.StreamReader) -> None:
        """Some lines mean that the runner's numbers are wrong."""
        while line := await _read_line(reader):
            text = line.decode(errors="replace").rstrip()
            self.last_output.append(text)
            log.warning("runner %d: %s", self.pid, text)
            if text.startswith(FATAL_OUTPUT):
                self.kill(f"the model runner had an internal error and was ended: {text}")


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """A line, or a piece of a very long one; empty at the end."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as end:
        return end.partial
    except asyncio.LimitOverrunError:
        return await reader.read(1 << 16)
