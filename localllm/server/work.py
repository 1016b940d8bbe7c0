"""One piece of work for a model, as a stream of events: loading, started, deltas.

What every dialect's handler runs; it turns the events into its own chunks.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, suppress
from dataclasses import dataclass

from localllm.cost import Account
from localllm.daemon import Daemon
from localllm.errors import TimedOut
from localllm.loaded import Lease, Target
from localllm.messages import Ask, Delta, Loading


@dataclass(frozen=True, slots=True)
class Job:
    """A request for a model; without `request` the model is only loaded."""

    target: Target
    keep_alive: float | None
    request: Ask | None
    wants_progress: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """The model is loaded and the request has begun; what it costs is in its account."""

    account: Account


Event = Loading | Started | Delta


async def run(daemon: Daemon, job: Job) -> AsyncIterator[Event]:
    """Do the job. Closing the iterator cancels whatever it is waiting for."""
    began = time.perf_counter()
    async with AsyncExitStack() as stack:
        if job.wants_progress:
            news: asyncio.Queue[Loading] = asyncio.Queue()
            context = daemon.lease(job.target, job.keep_alive, news.put_nowait)
            entering = asyncio.create_task(_enter(stack, context, job))
            try:
                async for loading in _until_done(entering, news):
                    yield loading
            finally:
                await _abandon(entering)
            lease = entering.result()
        else:
            lease = await _enter(stack, daemon.lease(job.target, job.keep_alive), job)
        # The loop's clock, by which the daemon measures, is too coarse for a model that is there.
        lease.account.load_seconds = max(lease.account.load_seconds, time.perf_counter() - began)
        yield Started(lease.account)
        if job.request is None:
            return
        running = lease.generate(job.request, wants_position=job.wants_progress)
        async with aclosing(running) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                yield delta


async def _enter(
    stack: AsyncExitStack, lease: AbstractAsyncContextManager[Lease], job: Job
) -> Lease:
    """Get the lease within the request's time. Raises TimedOut."""
    request, seconds = job.request, None
    if request is not None and request.deadline is not None:
        seconds = request.deadline - time.monotonic()
    try:
        async with asyncio.timeout(seconds) as limit:
            return await stack.enter_async_context(lease)
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimedOut("the request timed out before the model was loaded") from None


async def _until_done(
    entering: asyncio.Task[Lease], news: asyncio.Queue[Loading]
) -> AsyncIterator[Loading]:
    """What happens until the task is done."""
    while not entering.done():
        getting = asyncio.create_task(news.get())
        try:
            await asyncio.wait({entering, getting}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                yield getting.result()
        finally:
            getting.cancel()


async def _abandon(task: asyncio.Task[Lease]) -> None:
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
