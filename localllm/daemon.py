"""Which models are loaded, who may use them, and for how long they stay.

A model is loaded when it is first asked for, in a runner process of its own, and unloaded when
nobody has used it for its keep-alive time. Requests hold a `Lease`. Beyond the `num_parallel` that
run on a model at once, `max_queue` may wait, for a load or in its runner's queue, which is where
the order is decided (engine/scheduler.py); the next is refused with Busy.

Invariants:
  1. a runner is ended only when no lease holds it, or because it died;
  2. loads happen one at a time; a load that must wait for room keeps its victim from taking new
  work; 3. a cancelled waiter leaves no trace.

Not here: processes (runner_process.py), HTTP and JSON (server/), names and files (store.py).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localllm.config import Settings
from localllm.durations import FOREVER, parse_keep_alive
from localllm.errors import Busy
from localllm.launch import Launched, launch_runner
from localllm.messages import Delta, Generate, Load, Loading
from localllm.runner_process import RunnerProcess

# Part of the free memory that a further model's file may need while others stay loaded.
MEMORY_SHARE = 0.8
# How long a runner that was started in advance waits for a model.
SPARE_SECONDS = 60.0

log = logging.getLogger("localllm.daemon")

StartRunner = Callable[[], Awaitable[RunnerProcess]]
OnLoading = Callable[[Loading], None]


@dataclass(frozen=True, slots=True)
class Target:
    """A model file to run, and what to call it. Two names of one file are one loaded model."""

    path: Path
    name: str
    digest: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    size: int = 0


class LoadedModel:
    """A runner with a model, or one that is loading it."""

    def __init__(self, target: Target, runner: RunnerProcess) -> None:
        self.target = target
        self.runner = runner
        self.num_users = 0
        self.keep_alive = 0.0
        self.idle_since: float | None = None
        self.is_ready = False
        self.is_leaving = False
        self.timer: asyncio.TimerHandle | None = None

    @property
    def is_usable(self) -> bool:
        """Whether new requests may use it."""
        return self.is_ready and not self.is_leaving and not self.runner.is_dead

    @property
    def context_length(self) -> int:
        return self.runner.ready.context_length if self.runner.ready else 0

    @property
    def memory_bytes(self) -> int:
        known = self.runner.ready.memory_bytes if self.runner.ready else 0
        return known or self.target.size

    def seconds_left(self) -> float:
        """Until it is unloaded if nobody comes; negative once it is being unloaded."""
        if self.is_leaving or (self.keep_alive == 0 and self.is_ready):
            return -1.0
        if self.idle_since is None:
            return self.keep_alive
        return self.idle_since + self.keep_alive - asyncio.get_running_loop().time()


class Lease:
    """The right to run requests on a loaded model."""

    def __init__(self, model: LoadedModel, load_seconds: float) -> None:
        self.model = model
        self.load_seconds = load_seconds

    def generate(self, request: Generate) -> AsyncIterator[Delta]:
        """Deltas of one request; closing the iterator cancels it."""
        return self.model.runner.generate(request)


class Daemon:
    """All loaded models. Lives on one event loop; `start_runner` makes the processes."""

    def __init__(self, settings: Settings, start_runner: StartRunner) -> None:
        self._settings = settings
        self._start_runner = start_runner
        self._models: dict[Path, LoadedModel] = {}
        self._load_lock = asyncio.Lock()
        self._num_waiting = 0
        self._spare: asyncio.Task[RunnerProcess] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._keep_alive = parse_keep_alive(settings.keep_alive)

    def loaded(self) -> list[LoadedModel]:
        """Loaded and loading models, the one that stays longest first."""
        return sorted(self._models.values(), key=LoadedModel.seconds_left, reverse=True)

    @property
    def is_busy(self) -> bool:
        """Whether any request is running, waiting or loading a model."""
        return self._num_waiting > 0 or any(m.num_users for m in self._models.values())

    def prepare(self, launched: Launched) -> None:
        """Keep a runner that was started before it was known what for."""
        if self._spare is None:
            self._spare = asyncio.ensure_future(RunnerProcess.adopt(launched))
            asyncio.get_running_loop().call_later(SPARE_SECONDS, self._drop_spare, self._spare)

    @asynccontextmanager
    async def lease(
        self, target: Target, keep_alive: float | None = None, on_loading: OnLoading | None = None
    ) -> AsyncIterator[Lease]:
        """Load the model if it is not, and hold it. `keep_alive` sticks to the loaded model.

        Raises Busy, or the error of the load.
        """
        clock = asyncio.get_running_loop().time
        asked_at = clock()
        model = await self._take(target, on_loading)
        try:
            if keep_alive is not None:
                model.keep_alive = keep_alive
            yield Lease(model, clock() - asked_at)
        finally:
            self._leave(model)

    def unload(self, path: Path) -> None:
        """Unload a model as soon as nobody uses it; nothing happens if it is not loaded."""
        model = self._models.get(path)
        if model is not None:
            model.keep_alive = 0.0
            self._settle(model)

    async def close(self) -> None:
        """End all runners."""
        if self._spare is not None:
            self._drop_spare(self._spare)
        for model in list(self._models.values()):
            self._close(model)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _take(self, target: Target, on_loading: OnLoading | None) -> LoadedModel:
        """A loaded model, which the caller must leave."""
        while True:
            model = self._models.get(target.path)
            if model is not None and model.is_usable:
                if model.num_users >= self._settings.num_parallel:
                    self._check_queue()
                self._enter(model)
                return model
            with self._wait():
                if model is not None and model.is_ready:
                    await model.runner.closed.wait()
                    self._forget(model)
                await self._load(target, on_loading)

    @contextmanager
    def _wait(self) -> Iterator[None]:
        self._check_queue()
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    def _check_queue(self) -> None:
        """Raise Busy if no more may wait."""
        parallel = self._settings.num_parallel
        queued = sum(max(0, model.num_users - parallel) for model in self._models.values())
        if self._num_waiting + queued >= self._settings.max_queue:
            raise Busy("server busy, please try again.  maximum pending requests exceeded")

    def _enter(self, model: LoadedModel) -> None:
        model.num_users += 1
        model.idle_since = None
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None

    def _leave(self, model: LoadedModel) -> None:
        model.num_users -= 1
        if model.num_users == 0:
            model.idle_since = asyncio.get_running_loop().time()
            self._settle(model)

    def _settle(self, model: LoadedModel) -> None:
        """Decide what becomes of a model that may be idle."""
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None
        if model.num_users or not model.is_ready or model.runner.is_dead:
            return
        left = model.seconds_left()
        if left <= 0:
            self._close(model)
        elif left != FOREVER:
            loop = asyncio.get_running_loop()
            model.timer = loop.call_later(left, self._settle, model)

    async def _load(self, target: Target, on_loading: OnLoading | None) -> None:
        """Load the model unless another waiter has done so meanwhile."""
        async with self._load_lock:
            if target.path in self._models:
                return
            await self._make_room(target)
            runner = await self._new_runner()
            model = LoadedModel(target, runner)
            model.keep_alive = self._keep_alive
            model.num_users = 1
            self._models[target.path] = model
            try:
                await self._load_into(model, on_loading)
            finally:
                model.num_users = 0
                if not model.is_ready:
                    self._forget(model)

    async def _new_runner(self) -> RunnerProcess:
        """The runner that was prepared, if it lives, or one that is started now."""
        spare, self._spare = self._spare, None
        if spare is not None:
            with suppress(OSError):
                runner = await spare
                if not runner.is_dead:
                    return runner
        return await self._start_runner()

    def _drop_spare(self, spare: asyncio.Task[RunnerProcess]) -> None:
        """End a runner that nobody has needed."""
        if self._spare is spare:
            self._spare = None
            self._spawn(_close_started(spare))

    async def _load_into(self, model: LoadedModel, on_loading: OnLoading | None) -> None:
        target, settings = model.target, self._settings
        load = Load(str(target.path), target.digest, settings.context_length, settings.threads)
        await model.runner.load(load, on_loading)
        model.is_ready = True
        self._spawn(self._forget_when_closed(model))
        log.info("loaded %s in runner %d", target.name, model.runner.pid)

    async def _make_room(self, target: Target) -> None:
        """Unload models, those that would go first, until one more fits; wait for busy ones."""
        while self._models and not self._has_room(target):
            order = sorted(
                self._models.values(), key=lambda m: (m.num_users > 0, m.keep_alive, m.target.path)
            )
            victim = order[0]
            victim.is_leaving = True
            self._settle(victim)
            try:
                await victim.runner.closed.wait()
            except asyncio.CancelledError:
                victim.is_leaving = victim.runner.is_dead
                raise
            self._forget(victim)

    def _has_room(self, target: Target) -> bool:
        if len(self._models) >= self._settings.max_loaded_models:
            return False
        import psutil

        return target.size <= MEMORY_SHARE * psutil.virtual_memory().available

    def _close(self, model: LoadedModel) -> None:
        model.is_leaving = True
        log.info("unloading %s", model.target.name)
        model.runner.retire()
        self._spawn(model.runner.close())

    async def _forget_when_closed(self, model: LoadedModel) -> None:
        await model.runner.closed.wait()
        self._forget(model)

    def _forget(self, model: LoadedModel) -> None:
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None
        if self._models.get(model.target.path) is model:
            del self._models[model.target.path]

    def _spawn(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _close_started(starting: asyncio.Task[RunnerProcess]) -> None:
    with suppress(OSError):
        await (await starting).close()


def runner_starter(settings: Settings) -> StartRunner:
    """How the daemon starts real runners."""

    async def start() -> RunnerProcess:
        return await RunnerProcess.adopt(launch_runner(settings))

    return start
