import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.config import Settings
from localllm.daemon import Daemon, Target
from localllm.durations import FOREVER
from localllm.errors import BadFile, Busy, RunnerDied
from localllm.launch import launch
from localllm.messages import Generate
from localllm.runner_process import RunnerProcess

FAKE = (sys.executable, str(Path(__file__).with_name("fake_runner.py")))
A, B = (Target(Path(f"/{name}.gguf"), name) for name in "ab")


async def start_fake() -> RunnerProcess:
    return await RunnerProcess.start(os.environ, FAKE)


def run(test: Callable[[Daemon], Coroutine[None, None, None]], **settings: Any) -> None:
    async def body() -> None:
        daemon = Daemon(replace(Settings(), **settings), start_fake)
        try:
            await asyncio.wait_for(test(daemon), 60)
        finally:
            await daemon.close()

    asyncio.run(body())


async def ask(daemon: Daemon, target: Target, prompt: str = "hi", keep: float | None = None) -> str:
    async with daemon.lease(target, keep) as lease:
        return "".join([d.text async for d in lease.generate(Generate(0, prompt))])


def names(daemon: Daemon) -> list[str]:
    return [model.target.name for model in daemon.loaded()]


def pid(daemon: Daemon) -> int:
    return daemon.loaded()[0].runner.pid


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_model_is_loaded_once_for_all_who_ask() -> None:
    async def test(daemon: Daemon) -> None:
        daemon.prepare(launch(os.environ, FAKE))
        answers = await asyncio.gather(*(ask(daemon, A) for _ in range(10)))
        assert set(answers) == {"0 1 2 "}
        assert names(daemon) == ["a"]
        assert not daemon.is_busy

    run(test)


def test_prepared_runner_is_used_if_it_lives_and_ended_if_nobody_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(daemon: Daemon) -> None:
        used = launch(os.environ, FAKE)
        daemon.prepare(used)
        await ask(daemon, A)
        assert pid(daemon) == used.process.pid
        dead = launch(os.environ, FAKE)
        daemon.prepare(dead)
        dead.process.kill()
        dead.process.wait()
        assert await ask(daemon, B) == "0 1 2 "
        monkeypatch.setattr("localllm.daemon.SPARE_SECONDS", 0.05)
        unused = launch(os.environ, FAKE)
        daemon.prepare(unused)
        await until(lambda: unused.process.poll() is not None)

    run(test)


def test_failed_load_is_told_to_its_requests_and_forgotten() -> None:
    async def test(daemon: Daemon) -> None:
        for _ in range(2):
            with pytest.raises(BadFile, match="truncated"):
                await ask(daemon, Target(Path("/bad.gguf"), "bad"))
        assert names(daemon) == []
        assert await ask(daemon, A) == "0 1 2 "

    run(test)


def test_killed_runner_costs_its_requests_an_error_and_the_next_one_works() -> None:
    async def test(daemon: Daemon) -> None:
        task = asyncio.create_task(ask(daemon, A, "forever"))
        await until(lambda: bool(daemon.loaded() and daemon.loaded()[0].runner.num_requests))
        first = pid(daemon)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(RunnerDied):
            await task
        assert await ask(daemon, A) == "0 1 2 "
        assert pid(daemon) != first

    run(test)


def test_idle_model_killed_from_outside_is_replaced() -> None:
    async def test(daemon: Daemon) -> None:
        await ask(daemon, A)
        os.kill(pid(daemon), signal.SIGKILL)
        await until(lambda: not daemon.loaded())
        assert await ask(daemon, A) == "0 1 2 "

    run(test)


def test_explicit_keep_alive_sticks_and_zero_unloads_after_the_request() -> None:
    async def test(daemon: Daemon) -> None:
        await ask(daemon, A, keep=FOREVER)
        assert daemon.loaded()[0].seconds_left() == FOREVER
        await ask(daemon, A)
        assert daemon.loaded()[0].seconds_left() == FOREVER
        await ask(daemon, A, keep=0.0)
        await until(lambda: not daemon.loaded())
        await ask(daemon, A)
        assert 0 < daemon.loaded()[0].seconds_left() <= 120

    run(test, keep_alive="2m")


def test_model_is_unloaded_when_its_time_is_over() -> None:
    async def test(daemon: Daemon) -> None:
        await ask(daemon, A)
        await until(lambda: not daemon.loaded())

    run(test, keep_alive="10ms")


def test_default_keep_alive_of_zero_still_answers() -> None:
    async def test(daemon: Daemon) -> None:
        assert await ask(daemon, A) == "0 1 2 "
        await until(lambda: not daemon.loaded())

    run(test, keep_alive="0")


def test_unload_lets_the_running_request_end() -> None:
    async def test(daemon: Daemon) -> None:
        async with daemon.lease(A) as lease:
            deltas = lease.generate(Generate(0, "hi", options={"num_predict": 50}))
            await anext(deltas)
            daemon.unload(A.key)
            assert daemon.loaded()[0].seconds_left() < 0
            assert [d async for d in deltas][-1].done_reason == "length"
        await until(lambda: not daemon.loaded())

    run(test)


def test_load_waits_for_a_busy_model_which_takes_no_new_work_meanwhile() -> None:
    async def test(daemon: Daemon) -> None:
        order: list[str] = []

        async def noted(target: Target, prompt: str) -> None:
            await ask(daemon, target, prompt)
            order.append(target.name)

        async with daemon.lease(A) as lease:
            deltas = lease.generate(Generate(0, "hi", options={"num_predict": 30}))
            await anext(deltas)
            first = asyncio.create_task(noted(B, "hi"))
            await until(lambda: any(m.is_leaving for m in daemon.loaded()))
            second = asyncio.create_task(noted(A, "hi"))
            assert [d async for d in deltas][-1].done_reason == "length"
        await asyncio.gather(first, second)
        assert order == ["b", "a"]
        assert names(daemon) == ["a"]

    run(test, max_loaded_models=1)


def test_cancelled_wait_for_room_leaves_the_model_in_use() -> None:
    async def test(daemon: Daemon) -> None:
        async with daemon.lease(A):
            waiter = asyncio.create_task(ask(daemon, B))
            await until(lambda: any(m.is_leaving for m in daemon.loaded()))
            waiter.cancel()
            await asyncio.wait({waiter})
            assert await ask(daemon, A) == "0 1 2 "
        assert names(daemon) == ["a"]

    run(test, max_loaded_models=1)


def test_cancelled_load_ends_its_process() -> None:
    async def test(daemon: Daemon) -> None:
        waiter = asyncio.create_task(ask(daemon, A))
        await until(lambda: bool(daemon.loaded()))
        process = pid(daemon)
        waiter.cancel()
        await asyncio.wait({waiter})
        assert names(daemon) == []
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)

    run(test)


def test_load_goes_on_for_others_when_the_one_who_began_it_leaves() -> None:
    async def test(daemon: Daemon) -> None:
        first = asyncio.create_task(ask(daemon, A))
        await until(lambda: bool(daemon.loaded()))
        process = pid(daemon)
        others = [asyncio.create_task(ask(daemon, A)) for _ in range(2)]
        await asyncio.sleep(0)
        for waiter in (first, others[0]):
            waiter.cancel()
        await asyncio.wait({first, others[0]})
        assert await others[1] == "0 1 2 "
        assert pid(daemon) == process

    run(test)


def test_load_that_is_ended_does_not_end_who_comes_meanwhile() -> None:
    async def test(daemon: Daemon) -> None:
        first = asyncio.create_task(ask(daemon, A))
        await until(lambda: bool(daemon.loaded()))
        process = pid(daemon)
        first.cancel()
        await asyncio.sleep(0)
        assert await ask(daemon, A) == "0 1 2 "
        assert first.cancelled()
        assert pid(daemon) != process

    run(test)


def test_model_whose_load_nobody_awaited_to_its_end_does_not_stay_for_ever() -> None:
    async def test(daemon: Daemon) -> None:
        waiter = asyncio.create_task(ask(daemon, A))
        await until(lambda: any(model.is_ready for model in daemon.loaded()))
        waiter.cancel()
        await asyncio.wait({waiter})
        await until(lambda: not daemon.loaded())

    run(test, keep_alive="10ms")


def test_requests_beyond_the_queue_are_refused_at_once_and_the_others_served_in_order() -> None:
    async def test(daemon: Daemon) -> None:
        order: list[int] = []

        async def noted(number: int) -> None:
            await ask(daemon, A)
            order.append(number)

        async with daemon.lease(A):
            waiting = [asyncio.create_task(noted(n)) for n in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(Busy, match=r"server busy, please try again\."):
                await ask(daemon, A)
            waiting[1].cancel()
            await asyncio.wait({waiting[1]})
            waiting.append(asyncio.create_task(noted(3)))
            await asyncio.sleep(0)
            with pytest.raises(Busy):
                await ask(daemon, A)
        await asyncio.gather(*waiting, return_exceptions=True)
        assert order == [0, 2, 3]

    run(test, num_parallel=1, max_queue=3)


def test_retry_is_worth_it_when_half_of_the_queue_has_gone() -> None:
    async def test(daemon: Daemon) -> None:
        await ask(daemon, A)
        model = daemon.loaded()[0]

        async def refused() -> float:
            with pytest.raises(Busy) as info:
                await ask(daemon, A)
            return info.value.retry_seconds

        async with AsyncExitStack() as first:
            await first.enter_async_context(daemon.lease(A))
            async with AsyncExitStack() as others:
                for _ in range(4):
                    await others.enter_async_context(daemon.lease(A))
                # Nothing is known: two seconds for each of four.
                assert await refused() == 4
            assert model.place_seconds > 0
            async with AsyncExitStack() as others:
                for _ in range(4):
                    await others.enter_async_context(daemon.lease(A))
                assert await refused() == pytest.approx(2 * model.place_seconds)

    run(test, num_parallel=1, max_queue=4)
