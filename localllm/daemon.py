"""Which models are loaded, who may use them, and for how long they stay.

A model is loaded when it is first asked for, in a runner process of its own, and unloaded when
nobody has used it for its keep-alive time. Requests hold a `Lease`. Beyond the `num_parallel` that
run on a model at once, `max_queue` may wait, for a load or in its runner's queue, which is where
the order is decided (engine/scheduler.py); the next is refused with Busy.

A new model's runner first says what it is going to need. While there is too little memory, or
there are too many models, others make room: idle ones, the least recently used first and those
that were asked to stay for ever last; then busy ones, as soon as their requests have ended.

Invariants:
  1. a runner is ended only when no lease holds it, or because it died, or with the daemon;
  2. loads happen one at a time; a load that must wait for room keeps its victim from taking new
     work;
  3. a cancelled waiter leaves no trace.

Not here: processes (runner_process.py), HTTP and JSON (server/), names and files (store.py).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any

from localllm.config import Settings
from localllm.cost import Account
from localllm.durations import FOREVER, parse_keep_alive
from localllm.errors import Busy
from localllm.launch import Launched, launch_runner
from localllm.loaded import Key, Lease, LoadedModel, Target
from localllm.memory import available_memory, private_memory
from localllm.messages import Load, Loading
from localllm.metrics import Metrics
from localllm.runner_process import RunnerProcess

# What a request takes where nothing is known, and the longest wait to suggest.
GUESSED_SECONDS, LONGEST_RETRY_SECONDS = 2.0, 600.0
# How long a runner that was started in advance waits for a model.
SPARE_SECONDS = 60.0

log = logging.getLogger("localllm.daemon")

StartRunner = Callable[[], Awaitable[RunnerProcess]]
OnLoading = Callable[[Loading], None]


@dataclass(frozen=True, slots=True)
class Gauges:
    """How memory is measured: what is free, and what a process holds."""

    available: Callable[[], int] = available_memory
    private: Callable[[int], int] = private_memory


class SharedLoad:
    """A load under way, and who waits for it."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.listeners: dict[object, OnLoading | None] = {}

    @contextmanager
    def heard_by(self, on_loading: OnLoading | None) -> Iterator[None]:
        """Count one more who waits, and tell it how far the load is."""
        token = object()
        self.listeners[token] = on_loading
        try:
            yield
        finally:
            del self.listeners[token]

    def tell(self, loading: Loading) -> None:
        for on_loading in self.listeners.values():
            if on_loading is not None:
                on_loading(loading)


class Daemon:
    """All loaded models. Lives on one event loop; `start_runner` makes the processes."""

    def __init__(
        self, settings: Settings, start_runner: StartRunner, gauges: Gauges | None = None
    ) -> None:
        self.metrics = Metrics()
        self._settings = settings
        self._start_runner = start_runner
        self._gauges = gauges or Gauges()
        self._models: dict[Key, LoadedModel] = {}
        self._load_lock = asyncio.Lock()
        self._waiters: Counter[Key] = Counter()
        self._loads: dict[Key, SharedLoad] = {}
        self._went_idle = asyncio.Event()
        self._closing: str | None = None
        self._spare: asyncio.Task[RunnerProcess] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._keep_alive = parse_keep_alive(settings.keep_alive)

    def loaded(self) -> list[LoadedModel]:
        """Loaded and loading models, the one that stays longest first."""
        return sorted(self._models.values(), key=LoadedModel.seconds_left, reverse=True)

    @property
    def is_busy(self) -> bool:
        """Whether any request is running, waiting or loading a model."""
        return self._waiters.total() > 0 or any(m.num_users for m in self._models.values())

    def num_waiting(self, key: Key) -> int:
        """Requests for a model beyond those that may run on it at once."""
        model = self._models.get(key)
        num_users = model.num_users if model else 0
        return max(0, self._waiters[key] + num_users - self._settings.num_parallel)

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
        account = Account(target.name, self.metrics.of(target.name))
        model: LoadedModel | None = None
        try:
            model = await self._take(target, on_loading, account)
            if keep_alive is not None:
                model.keep_alive = keep_alive
            yield Lease(model, account)
        except BaseException as error:
            account.fail(error)
            raise
        finally:
            if model is not None:
                self._leave(model)

    def unload(self, key: Key) -> None:
        """Unload a model as soon as nobody uses it; nothing happens if it is not loaded."""
        model = self._models.get(key)
        if model is not None:
            model.keep_alive = 0.0
            self._settle(model)

    def unload_removed(self) -> None:
        """Unload the models whose files are gone, each as soon as nobody uses it."""
        for model in list(self._models.values()):
            if not model.target.path.exists():
                self.unload(model.target.key)

    async def close(self, reason: str = "the daemon is shutting down") -> None:
        """End all runners; who is served or waits hears of `reason`."""
        self._closing = reason
        if self._spare is not None:
            self._drop_spare(self._spare)
        for model in list(self._models.values()):
            self._close(model, reason)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _take(
        self, target: Target, on_loading: OnLoading | None, account: Account
    ) -> LoadedModel:
        """A loaded model, which the caller must leave."""
        clock = asyncio.get_running_loop().time
        asked_at = clock()
        self._check_queue(target.key)
        with self._waiting(target.key):
            account.queue_position = self.num_waiting(target.key)
            while True:
                if self._closing is not None:
                    raise Busy(self._closing)
                model = self._models.get(target.key)
                if model is None or not model.is_ready:
                    await self._load(target, on_loading)
                elif model.is_usable:
                    self._enter(model)
                    return model
                else:
                    await self._until_decided(model)
                account.load_seconds = clock() - asked_at

    async def _until_decided(self, model: LoadedModel) -> None:
        """Wait until a model that takes no new work is gone, or stays after all."""
        if model.runner.is_dead:
            await model.runner.closed.wait()
            self._forget(model)
        else:
            await model.decided.wait()

    @contextmanager
    def _waiting(self, key: Key) -> Iterator[None]:
        self._waiters[key] += 1
        try:
            yield
        finally:
            self._waiters[key] -= 1
            if not self._waiters[key]:
                del self._waiters[key]

    def _check_queue(self, key: Key) -> None:
        """Raise Busy if no more may wait, with a guess when half of the queue will be gone."""
        parallel, model = self._settings.num_parallel, self._models.get(key)
        num_users = self._waiters[key] + (model.num_users if model else 0)
        waiting = sum(map(self.num_waiting, self._models.keys() | self._waiters.keys()))
        if num_users < parallel or waiting < self._settings.max_queue:
            return
        seconds = (model.place_seconds if model else 0) or GUESSED_SECONDS / parallel
        raise Busy(
            "server busy, please try again.  maximum pending requests exceeded",
            retry_seconds=min(seconds * waiting / 2, LONGEST_RETRY_SECONDS),
        )

    def _enter(self, model: LoadedModel) -> None:
        model.num_users += 1
        model.used_at = asyncio.get_running_loop().time()
        model.stop_timer()

    def _leave(self, model: LoadedModel) -> None:
        model.note_freed(was_queueing=model.num_users > self._settings.num_parallel)
        model.num_users -= 1
        model.used_at = asyncio.get_running_loop().time()
        if model.num_users == 0:
            self._went_idle.set()
            self._settle(model)

    def _settle(self, model: LoadedModel) -> None:
        """Decide what becomes of a model that may be idle."""
        model.stop_timer()
        if model.num_users or not model.is_ready or model.runner.is_dead:
            return
        left = model.seconds_left()
        if left <= 0:
            self._close(model)
        elif left != FOREVER:
            loop = asyncio.get_running_loop()
            model.timer = loop.call_later(left, self._settle, model, context=Context())

    async def _load(self, target: Target, on_loading: OnLoading | None) -> None:
        """Wait for the model to be loaded, which the last one who waits ends when it leaves."""
        load = self._loads.get(target.key)
        if load is None:
            load = self._loads[target.key] = SharedLoad()
            load.task = asyncio.create_task(self._run_load(target, load))
            load.task.add_done_callback(partial(self._load_ended, target.key, load))
        try:
            with load.heard_by(on_loading):
                await asyncio.shield(load.task)
        except asyncio.CancelledError:
            if not load.listeners:
                self._load_ended(target.key, load, load.task)
                load.task.cancel()
                await asyncio.wait({load.task})
                self._settle_unused(target.key)
            raise

    def _load_ended(self, key: Key, load: SharedLoad, task: asyncio.Task[None]) -> None:
        """Have those who come from now on begin another load if they need one."""
        if self._loads.get(key) is load:
            del self._loads[key]
        if task.done() and not task.cancelled():
            # Whether anybody waits for it or not.
            task.exception()

    def _settle_unused(self, key: Key) -> None:
        model = self._models.get(key)
        if model is not None:
            self._settle(model)

    async def _run_load(self, target: Target, load: SharedLoad) -> None:
        async with self._load_lock:
            if target.key in self._models or self._closing is not None:
                return
            runner = await self._new_runner()
            model = LoadedModel(target, runner, self._keep_alive)
            self._models[target.key] = model
            try:
                await self._load_into(model, load.tell)
            finally:
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

    async def _load_into(self, model: LoadedModel, on_loading: OnLoading) -> None:
        target, settings, clock = model.target, self._settings, asyncio.get_running_loop().time
        load = Load(
            str(target.path),
            target.digest,
            settings.context_length,
            settings.threads,
            self._free_alone(),
            adapter=str(target.adapter or ""),
            adapter_digest=target.adapter_digest,
        )
        began = clock()
        await model.runner.load(load, on_loading, partial(self._make_room, model, on_loading))
        model.is_ready = True
        model.used_at = clock()
        self.metrics.of(target.name).load_seconds.observe(clock() - began)
        self._spawn(self._forget_when_closed(model))
        log.info("loaded %s in runner %d", target.name, model.runner.pid)

    async def _make_room(self, model: LoadedModel, on_loading: OnLoading, num_bytes: int) -> int:
        """Unload others until there is room for a model; then tell how much there is."""
        model.planned_bytes = num_bytes
        victim: LoadedModel | None = None
        try:
            while (others := self._others(model)) and not self._has_room(others, num_bytes):
                idle = [m for m in others if not m.num_users]
                victim = min(idle, key=_eviction_order) if idle else victim
                if victim is None or victim.runner.is_dead:
                    victim = min(others, key=_eviction_order)
                if victim.num_users:
                    on_loading(Loading(f"waiting for {victim.target.name} to finish"))
                victim.leave()
                self._went_idle.clear()
                self._settle(victim)
                await _first_of(victim.runner.closed.wait(), self._went_idle.wait())
                if victim.runner.closed.is_set():
                    self._forget(victim)
        finally:
            for other in self._others(model):
                if other.is_leaving and not other.runner.is_dead:
                    other.stay()
                    self._settle(other)
        return self._free_beside(self._others(model))

    def _others(self, model: LoadedModel) -> list[LoadedModel]:
        return [m for m in self._models.values() if m is not model]

    def _has_room(self, others: list[LoadedModel], num_bytes: int) -> bool:
        if len(others) >= self._settings.max_loaded_models:
            return False
        return num_bytes <= self._free_beside(others)

    def _free_alone(self) -> int:
        """Bytes that a model could have if no other was loaded."""
        held = sum(self._gauges.private(m.runner.pid) for m in self._models.values())
        return self._gauges.available() + held

    def _free_beside(self, others: list[LoadedModel]) -> int:
        """Bytes that a model can have beside others, which may still grow as far as planned."""
        growth = (max(0, m.memory_bytes - self._gauges.private(m.runner.pid)) for m in others)
        return max(0, self._gauges.available() - sum(growth))

    def _close(self, model: LoadedModel, reason: str | None = None) -> None:
        model.leave()
        log.info("unloading %s", model.target.name)
        model.runner.retire(reason)
        self._spawn(model.runner.close())

    async def _forget_when_closed(self, model: LoadedModel) -> None:
        await model.runner.closed.wait()
        self._forget(model)

    def _forget(self, model: LoadedModel) -> None:
        model.stop_timer()
        model.decided.set()
        if self._models.get(model.target.key) is model:
            del self._models[model.target.key]
            preemptions = model.runner.pulse.num_preemptions
            self.metrics.of(model.target.name).num_preemptions += preemptions

    def _spawn(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _close_started(starting: asyncio.Task[RunnerProcess]) -> None:
    with suppress(OSError):
        await (await starting).close()


def _eviction_order(model: LoadedModel) -> tuple[bool, bool, float]:
    """Idle before busy, pinned ones last among them, the least recently used first."""
    return model.num_users > 0, model.is_pinned, model.used_at


async def _first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of the waits is over, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def runner_starter(settings: Settings) -> StartRunner:
    """How the daemon starts real runners."""

    async def start() -> RunnerProcess:
        return await RunnerProcess.adopt(launch_runner(settings))

    return start
