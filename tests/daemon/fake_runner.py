"""A runner with a model that needs no file: it does what the last word of the prompt says.

The real `runner.main` around a fake model, so that processes, messages and their failures are the
real ones. Run as a script with the socket's number, like the real one.
"""

import os
import re
import signal
import sys
import threading
from array import array
from base64 import b64encode
from pathlib import Path

from localllm.errors import BadFile, BadRequest, OutOfMemory
from localllm.messages import Ask, Delta, Embed, Generate, Load, Pulse, Statistics
from localllm.runner import MakeRoom, Progress, Sink, main


class FakeModel:
    """Emits `0 1 2 ...`, a number a step for every running request."""

    context_length = 4096
    memory_bytes = 1
    free_bytes = 0
    adapter = ""

    def __init__(self) -> None:
        self._steps = 0
        self._running: dict[int, tuple[Generate, Sink, int]] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def start(self, request: Ask, sink: Sink) -> None:
        if isinstance(request, Embed):
            self._embed(request, sink)
            return
        word = self._word(request)
        if word == "refuse":
            raise BadRequest("the fake model refuses this")
        if word == "bug":
            raise ZeroDivisionError("a bug")
        if request.render_only:
            sink([Delta(request.request_id, rendered=f"<{word}>", tokens=[1, 2])])
            return
        with self._changed:
            self._running[request.request_id] = (request, sink, 0)
            self._changed.notify()

    def _embed(self, request: Embed, sink: Sink) -> None:
        """Length, truncate, num_ctx, dimensions and normalise of each text."""
        if "refuse" in request.texts:
            raise BadRequest("the fake model refuses this")
        shared = (request.truncate, request.num_ctx or 0, request.dimensions, request.normalise)
        rows = [array("f", (len(text), *map(float, shared))) for text in request.texts]
        if request.texts == ["serving"]:
            rows = [array("f", (request.priority, bool(request.deadline), len(request.salt)))]
        sink(
            [
                Delta(
                    request.request_id,
                    done_reason="stop",
                    statistics=Statistics(sum(map(len, request.texts)), 2),
                    vectors=[b64encode(row.tobytes()).decode() for row in rows],
                    dropped_tokens=[1] if "long" in request.texts else [],
                )
            ]
        )

    def cancel(self, request_id: int) -> None:
        with self._changed:
            found = self._running.pop(request_id, None)
        if found is not None:
            found[1]([Delta(request_id, done_reason="cancelled")])

    def pulse(self) -> Pulse:
        return Pulse(self._steps, num_running=len(self._running), kv_usage=0.5)

    def close(self) -> None:
        pass

    @staticmethod
    def _word(request: Generate) -> str:
        text = request.prompt
        if request.messages is not None:
            text = str(request.messages[-1]["content"])
        return text.split()[-1] if text.split() else ""

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running)
                running = list(self._running.values())
            sinks: dict[Sink, list[Delta]] = {}
            for request, sink, count in running:
                if (delta := self._step(request, count)) is not None:
                    sinks.setdefault(sink, []).append(delta)
                    self._steps += 1
            for sink, deltas in sinks.items():
                sink(deltas)
            self._changed.acquire()
            self._changed.wait(0.001)
            self._changed.release()

    def _step(self, request: Generate, count: int) -> Delta | None:
        number, word = request.request_id, self._word(request)
        if count == 2 and word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if count == 2 and word == "exit":
            print("a last word", file=sys.stderr, flush=True)
            os._exit(3)
        if count == 2 and word == "raise":
            print("Exception ignored in: kernel", file=sys.stderr, flush=True)
        if count == 2 and word == "hang":
            return None
        if count == 2 and word == "late":
            self._running.pop(number)
            return Delta(number, error="the request timed out", error_kind="TimedOut")
        limit = request.options.get("num_predict", -1)
        if limit < 0:
            limit = 10**9 if word in ("forever", "raise", "exit", "die", "hang") else 3
        with self._changed:
            if number not in self._running:
                return None
            self._running[number] = (*self._running[number][:2], count + 1)
            if count >= limit:
                del self._running[number]
        if count >= limit:
            tokens = [1, 2, 3] if request.want_tokens else None
            stats = Statistics(5, 2, count, 0.001, 0.002, 0.003)
            reason = "length" if "num_predict" in request.options else "stop"
            return Delta(number, done_reason=reason, statistics=stats, tokens=tokens)
        if word == "call":
            call = {"id": f"call_{count}", "function": {"name": "f", "arguments": {"n": count}}}
            return Delta(number, thinking=f"{count}? ", tool_calls=[call], num_tokens=1)
        if word == "ponder" and count < 2:
            return Delta(number, thinking=f"{count}? ", num_tokens=1)
        text = self._text(request, word, count)
        entry = {"token": text, "logprob": -0.5, "bytes": list(text.encode())}
        logprobs = [] if request.logprobs is None else [entry]
        return Delta(number, text, logprobs=logprobs, num_tokens=1)

    def _text(self, request: Generate, word: str, count: int) -> str:
        if word == "echo":
            return repr(request.messages or request.prompt) if count == 0 else ""
        if word == "fields":
            fields = (request.format, request.think, request.tools, request.suffix)
            return repr((*fields, request.is_final_template)) if count == 0 else ""
        if word == "free":
            return f"{self.free_bytes} " if count == 0 else ""
        if word == "adapter":
            return f"{self.adapter or 'none'} " if count == 0 else ""
        if word == "options":
            return repr((request.options, request.stop)) if count == 0 else ""
        if word == "serving":
            fields = (request.exact, request.cache_prompt, request.salt, request.priority)
            fields = (*fields, request.deadline is not None, request.speculate)
            return repr(fields) if count == 0 else ""
        return "\N{SLIGHTLY SMILING FACE}" if word == "smile" else f"{count} "


def open_fake(load: Load, progress: Progress, make_room: MakeRoom) -> FakeModel:
    """A file name such as `a500.gguf` says how many bytes the model needs."""
    name = Path(load.path).name
    if name == "bad.gguf":
        raise BadFile(f"{load.path}: truncated")
    size = re.fullmatch(r"[a-z](\d+)\.gguf", name)
    needed = int(size[1]) if size else 1000
    if load.free_bytes is not None and needed > load.free_bytes:
        raise OutOfMemory(f"needs {needed}, {load.free_bytes} free")
    free = make_room(needed)
    progress("copying weights", 1, 2)
    if name == "dies.gguf":
        os.kill(os.getpid(), signal.SIGKILL)
    model = FakeModel()
    model.memory_bytes = needed
    model.free_bytes = free
    model.adapter = load.adapter
    return model


if __name__ == "__main__":
    main(open_fake)
