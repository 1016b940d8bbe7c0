"""The runner process: one loaded model, and a conversation with the daemon over a socket.

The main thread reads messages. Text work (templates, tokenizing) happens on a few worker threads,
so that a cancellation never waits behind 100 kB of prompt; what a step produced is sent by the
engine's own thread, at most about sixty times a second, because every message costs the cores that
compute.

The process ends when the daemon's end of the socket closes, however the daemon ended.

Not here: how the daemon starts and watches runners (runner_process.py), text and tokens
(runtime.py).
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, Protocol

from localllm import request_id
from localllm.config import load_settings
from localllm.errors import Cancelled, LocalLLMError
from localllm.messages import (
    Ask,
    Cancel,
    Channel,
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
    kind_of,
)
from localllm.request_id import FORMAT, RequestFilter

PULSE_SECONDS = 1.0
# Text reaches a reader sixty times a second; more messages only take time from the kernels.
SEND_SECONDS = 1 / 60
REPORT_SECONDS = 1 / 20
NUM_TEXT_THREADS = 2

log = logging.getLogger("localllm.runner")

Sink = Callable[[list[Delta]], None]
Progress = Callable[[str, int, int], None]
MakeRoom = Callable[[int], int]


class Model(Protocol):
    """What a runner needs of a loaded model."""

    context_length: int
    memory_bytes: int

    def start(self, request: Ask, sink: Sink) -> None:
        """Prepare and submit a request; `sink` is called once a step for all that share it.

        Raises LocalLLMError if the request cannot run.
        """

    def cancel(self, request_id: int) -> None:
        """End a submitted request; unknown ids are ignored."""

    def pulse(self) -> Pulse:
        """How the work goes, asked from a thread of its own."""

    def close(self) -> None:
        """Stop all threads, and assert that nothing is held; for debugging, an exit does as well."""


OpenModel = Callable[[Load, Progress, MakeRoom], Model]


class Outbox:
    """Collects deltas of steps and sends them, at once or together with those of the next steps.

    A delta is held back for at most `SEND_SECONDS` beyond the step that follows it; first and last
    deltas of a request are never held back.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._held: list[Delta] = []
        self._begun: set[int] = set()
        self._sent_at = 0.0

    def add(self, deltas: list[Delta]) -> None:
        """Take what a step produced."""
        with self._lock:
            now = time.monotonic()
            urgent = now - self._sent_at >= SEND_SECONDS
            for delta in deltas:
                if delta.done_reason or delta.error or delta.rendered is not None:
                    self._begun.discard(delta.request_id)
                    urgent = True
                elif delta.request_id not in self._begun:
                    self._begun.add(delta.request_id)
                    urgent = True
            self._held += deltas
            if urgent and self._held:
                held, self._held = self._held, []
                self._sent_at = now
                self._send(Deltas(_merged(held)))


def _merged(deltas: list[Delta]) -> list[Delta]:
    """The same deltas with consecutive pieces of one request joined."""
    merged: dict[int, Delta] = {}
    for delta in deltas:
        before = merged.get(delta.request_id)
        merged[delta.request_id] = delta if before is None else _joined(before, delta)
    return list(merged.values())


def _joined(first: Delta, second: Delta) -> Delta:
    return Delta(
        request_id=first.request_id,
        text=first.text + second.text,
        thinking=first.thinking + second.thinking,
        tool_calls=first.tool_calls + second.tool_calls,
        logprobs=first.logprobs + second.logprobs,
        num_tokens=first.num_tokens + second.num_tokens,
        prompt_done=max(first.prompt_done, second.prompt_done),
        prompt_total=max(first.prompt_total, second.prompt_total),
        done_reason=second.done_reason,
        statistics=second.statistics,
        tokens=second.tokens,
        dropped_messages=first.dropped_messages + second.dropped_messages,
        rendered=second.rendered,
        vectors=second.vectors,
        dropped_tokens=second.dropped_tokens,
        error=second.error,
        error_kind=second.error_kind,
    )


class Runner:
    """The conversation with the daemon about one model."""

    def __init__(
        self, channel: Channel, open_model: OpenModel, *, is_debugging: bool = False
    ) -> None:
        self._channel = channel
        self._is_debugging = is_debugging
        self._open_model = open_model
        self._outbox = Outbox(self._send)
        self._workers = ThreadPoolExecutor(NUM_TEXT_THREADS, "text")
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self.log_ids: dict[str, str] = {}
        self._cancelled: set[int] = set()
        self._busy = threading.Event()
        self._reported_at = 0.0

    def serve(self) -> None:
        """Load the model that the daemon names, then answer requests until the daemon goes."""
        load = self._channel.receive()
        if not isinstance(load, Load):
            return
        try:
            model = self._open_model(load, self._report, self._make_room)
        except LocalLLMError as error:
            self._send(Failed(str(error), kind_of(error)))
            return
        except MemoryError:
            self._send(Failed(f"{load.path}: model requires more system memory", "OutOfMemory"))
            return
        self._send(Ready(model.context_length, model.memory_bytes))
        threading.Thread(target=self._beat, args=(model,), name="pulse", daemon=True).start()
        while (message := self._channel.receive()) is not None:
            if isinstance(message, Ask):
                self._begin(model, message)
            elif isinstance(message, Cancel):
                self._cancel(model, message.request_id)
        if self._is_debugging:
            model.close()

    def _begin(self, model: Model, request: Ask) -> None:
        with self._lock:
            self._running.add(request.request_id)
            self.log_ids[str(request.request_id)] = request.log_id
            self._busy.set()
        self._workers.submit(self._start, model, request)

    def _start(self, model: Model, request: Ask) -> None:
        number = request.request_id
        request_id.current.set(request.log_id)
        try:
            if number not in self._cancelled:
                model.start(request, self._take)
            if number in self._cancelled:
                model.cancel(number)
                raise Cancelled("the request was cancelled")
        except LocalLLMError as error:
            self._take([Delta(number, error=str(error), error_kind=kind_of(error))])
        except Exception as error:
            log.exception("a request failed")
            text = f"{type(error).__name__}: {error}"
            self._take([Delta(number, error=text)])

    def _cancel(self, model: Model, request_id: int) -> None:
        with self._lock:
            if request_id not in self._running:
                return
            self._cancelled.add(request_id)
        model.cancel(request_id)

    def _take(self, deltas: list[Delta]) -> None:
        """The sink of every request: pass deltas on and forget the finished."""
        with self._lock:
            live = [delta for delta in deltas if delta.request_id in self._running]
            for delta in live:
                if delta.done_reason or delta.error or delta.rendered is not None:
                    self._running.discard(delta.request_id)
                    self.log_ids.pop(str(delta.request_id), None)
                    self._cancelled.discard(delta.request_id)
            if not self._running:
                self._busy.clear()
        if live:
            self._outbox.add(live)

    def _make_room(self, num_bytes: int) -> int:
        """Have the daemon make room for the model, and tell how much there is."""
        self._send(Estimate(num_bytes))
        answer = self._channel.receive()
        if not isinstance(answer, Proceed):
            _leave()
        return answer.free_bytes

    def _report(self, stage: str, done: int, total: int) -> None:
        """Tell how far the load is, not too often."""
        now = time.monotonic()
        if now - self._reported_at >= REPORT_SECONDS or done == total:
            self._reported_at = now
            self._send(Loading(stage, done, total))

    def _beat(self, model: Model) -> None:
        """Tell the daemon, while work is running, how it goes, and at its end that it is over."""
        while self._busy.wait():
            self._send(model.pulse())
            time.sleep(PULSE_SECONDS)
            if not self._busy.is_set():
                self._send(model.pulse())

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except OSError:
            _leave()


def _leave() -> NoReturn:
    """End the process at once: nobody is left to talk to, and the team's threads never return."""
    sys.stderr.flush()
    os._exit(0)


def _die_with_parent() -> None:
    """Ask Linux to kill this process when the daemon dies, even in the middle of a load."""
    if sys.platform != "linux":
        return
    import ctypes

    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _real_model() -> OpenModel:
    """How a real model is opened; its slow imports happen before the daemon says which one."""
    from localllm.runner_model import open_model, prepare

    prepare()
    return open_model


def main(open_model: OpenModel | None = None) -> None:
    """Serve the daemon behind the inherited socket whose number is the last argument.

    `open_model` is how the model is opened; the default opens a real one.
    """
    sock = socket.socket(fileno=int(sys.argv[-1]))
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    is_debugging = load_settings().debug
    runner = Runner(Channel(sock), open_model or _real_model(), is_debugging=is_debugging)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.addFilter(RequestFilter(runner.log_ids))
    level = logging.INFO if is_debugging else logging.WARNING
    logging.basicConfig(handlers=[handler], level=level, force=True)
    runner.serve()
    _leave()


if __name__ == "__main__":
    main()
