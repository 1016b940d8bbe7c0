"""A loaded model: its runner, who uses it, until when it stays. And a lease, the right to use it.

Not here: which models are loaded (daemon.py), processes (runner_process.py).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.cost import Account
from localllm.durations import FOREVER
from localllm.messages import Ask, Delta
from localllm.runner_process import RunnerProcess

WEIGHT = 0.1  # of the newest in a running mean

Key = tuple[Path, Path | None]


@dataclass(frozen=True, slots=True)
class Target:
    """A model file to run, with the adapter that is applied to it, and what to call it.

    Two names of one `key` are one loaded model.
    """

    path: Path
    name: str
    digest: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    size: int = 0
    adapter: Path | None = None
    adapter_digest: str = ""

    @property
    def key(self) -> Key:
        return self.path, self.adapter


class LoadedModel:
    """A runner with a model, or one that is loading it.

    num_users       requests that hold it, waiting ones included
    used_at         when the last of them came or went, by the loop's clock
    planned_bytes   what it is going to hold, once the runner has said so
    is_leaving      it takes no new work, because it is to be unloaded; `decided` is set once it is
                    gone, or stays after all
    place_seconds   running mean of the time from one place in the full queue to the next; 0: unknown
    """

    def __init__(self, target: Target, runner: RunnerProcess, keep_alive: float) -> None:
        self.target = target
        self.runner = runner
        self.keep_alive = keep_alive
        self.num_users = 0
        self.used_at = asyncio.get_running_loop().time()
        self.planned_bytes = 0
        self.is_ready = False
        self.is_leaving = False
        self.decided = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None
        self.place_seconds = 0.0
        self._freed_at: float | None = None

    @property
    def is_usable(self) -> bool:
        """Whether new requests may use it."""
        return self.is_ready and not self.is_leaving and not self.runner.is_dead

    @property
    def is_pinned(self) -> bool:
        """Whether it was asked to stay for ever."""
        return self.keep_alive == FOREVER

    @property
    def context_length(self) -> int:
        return self.runner.ready.context_length if self.runner.ready else 0

    @property
    def memory_bytes(self) -> int:
        """Weights, KV as far as it may grow, and scratch."""
        known = self.runner.ready.memory_bytes if self.runner.ready else 0
        return known or self.planned_bytes or self.target.size

    @property
    def num_waiting(self) -> int:
        """Requests in its runner's queue, as of the last pulse."""
        return min(len(self.runner.pulse.waiting), self.runner.num_requests)

    @property
    def num_running(self) -> int:
        """Requests that its runner works on."""
        return self.runner.num_requests - self.num_waiting

    @property
    def kv_usage(self) -> float:
        """Share of the KV pool in use, as of the last pulse."""
        return self.runner.pulse.kv_usage

    def seconds_left(self) -> float:
        """Until it is unloaded if nobody comes; negative once it is being unloaded."""
        if self.is_leaving or (self.keep_alive == 0 and self.is_ready):
            return -1.0
        if self.num_users or not self.is_ready:
            return self.keep_alive
        return self.used_at + self.keep_alive - asyncio.get_running_loop().time()

    def note_freed(self, *, was_queueing: bool) -> None:
        """Learn from a request that ended how soon places come free while others wait for them."""
        now = asyncio.get_running_loop().time()
        if was_queueing and self._freed_at is not None:
            passed = now - self._freed_at
            known = self.place_seconds
            self.place_seconds = known + WEIGHT * (passed - known) if known else passed
        self._freed_at = now if was_queueing else None

    def leave(self) -> None:
        """Take no new work."""
        self.is_leaving = True
        self.decided.clear()

    def stay(self) -> None:
        """Go on after all."""
        self.is_leaving = False
        self.decided.set()

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Lease:
    """The right to run requests on a loaded model."""

    def __init__(self, model: LoadedModel, account: Account) -> None:
        self.model = model
        self.account = account

    async def generate(self, request: Ask, *, wants_position: bool = False) -> AsyncIterator[Delta]:
        """Deltas of one request; closing the iterator cancels it."""
        account, runner = self.account, self.model.runner
        if wants_position and account.queue_position:
            yield Delta(0, queue_position=account.queue_position)
        running = runner.generate(request, wants_position=wants_position)
        async with aclosing(running) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                account.take(delta)
                yield delta
