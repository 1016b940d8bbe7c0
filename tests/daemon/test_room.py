"""Which models go so that another one fits. Fake runners; memory is what the test says it is."""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.config import Settings
from localllm.daemon import Daemon, Gauges
from localllm.durations import FOREVER
from localllm.errors import BadFile, OutOfMemory
from localllm.loaded import Target
from localllm.memory import available_memory, num_oom_kills
from localllm.messages import Generate
from localllm.runner_process import RunnerProcess

FAKE = (sys.executable, str(Path(__file__).with_name("fake_runner.py")))
TOTAL = 1000
Test = Callable[["House"], Coroutine[None, None, None]]


class House:
    """A daemon on a machine of `TOTAL` bytes, whose models hold a part of what they plan to."""

    def __init__(self, settings: Settings, part: float) -> None:
        self.num_started = 0
        self.part = part
        gauges = Gauges(lambda: TOTAL - sum(map(self.private, self.pids())), self.private)
        self.daemon = Daemon(settings, self.start, gauges)

    async def start(self) -> RunnerProcess:
        self.num_started += 1
        return await RunnerProcess.start(os.environ, FAKE)

    def pids(self) -> list[int]:
        return [model.runner.pid for model in self.daemon.loaded()]

    def private(self, pid: int) -> int:
        models = [m for m in self.daemon.loaded() if m.runner.pid == pid and m.is_ready]
        return sum(int(self.part * m.memory_bytes) for m in models)

    async def ask(self, name: str, prompt: str = "hi", keep: float | None = None) -> str:
        async with self.daemon.lease(target(name), keep) as lease:
            return "".join([d.text async for d in lease.generate(Generate(0, prompt))])

    @property
    def names(self) -> set[str]:
        return {model.target.name for model in self.daemon.loaded()}


def target(name: str) -> Target:
    return Target(Path(f"/{name}.gguf"), name)


def run(test: Test, part: float = 1.0, **settings: int) -> None:
    async def body() -> None:
        house = House(replace(Settings(), **settings), part)
        try:
            await asyncio.wait_for(test(house), 60)
        finally:
            await house.daemon.close()

    asyncio.run(body())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_least_recently_used_model_makes_room_and_pinned_ones_go_last() -> None:
    async def test(house: House) -> None:
        await house.ask("a1", keep=FOREVER)
        await house.ask("b1", keep=100)
        await house.ask("c1", keep=50)
        await house.ask("b1")
        await house.ask("d1")
        assert house.names == {"a1", "b1", "d1"}
        await house.ask("e1")
        await house.ask("f1")
        assert house.names == {"a1", "e1", "f1"}

    run(test, max_loaded_models=3)


def test_only_as_many_models_go_as_are_in_the_way() -> None:
    async def test(house: House) -> None:
        for name in ("a300", "b300", "c300"):
            await house.ask(name)
        assert house.names == {"a300", "b300", "c300"}
        assert await house.ask("d400", "free") == "400 "
        assert house.names == {"b300", "c300", "d400"}

    run(test, max_loaded_models=9)


def test_memory_that_a_loaded_model_has_yet_to_touch_counts_as_taken() -> None:
    async def test(house: House) -> None:
        await house.ask("a600")
        await house.ask("b500")
        assert house.names == {"b500"}
        assert await house.ask("c400", "free") == "500 "
        assert house.names == {"b500", "c400"}

    run(test, part=0.1)


def test_model_that_does_not_fit_alone_is_refused_and_nothing_goes_for_it() -> None:
    async def test(house: House) -> None:
        await house.ask("a900")
        with pytest.raises(OutOfMemory, match="needs 1100, 1000 free"):
            await house.ask("b1100")
        assert house.names == {"a900"}

    run(test)


def test_model_that_becomes_idle_first_makes_room_and_the_others_stay() -> None:
    async def test(house: House) -> None:
        async with house.daemon.lease(target("a500")):
            async with house.daemon.lease(target("b400")):
                waiter = asyncio.create_task(house.ask("c300"))
                await until(lambda: any(m.is_leaving for m in house.daemon.loaded()))
                again = asyncio.create_task(house.ask("a500"))
                await asyncio.sleep(0)
                assert not again.done()
            await waiter
            await again
        assert house.names == {"a500", "c300"}

    run(test)


def test_who_waits_for_room_hears_for_whom() -> None:
    async def test(house: House) -> None:
        stages: list[str] = []

        async def load() -> None:
            async with house.daemon.lease(target("b600"), None, lambda l: stages.append(l.stage)):
                pass

        async with house.daemon.lease(target("a500")):
            waiter = asyncio.create_task(load())
            await until(lambda: bool(stages))
            assert stages == ["waiting for a500 to finish"]
        await waiter
        assert house.names == {"b600"}

    run(test)


def test_who_waited_for_a_model_to_go_uses_it_if_it_stays_after_all() -> None:
    async def test(house: House) -> None:
        async with house.daemon.lease(target("a500")):
            waiter = asyncio.create_task(house.ask("b600"))
            await until(lambda: any(m.is_leaving for m in house.daemon.loaded()))
            again = asyncio.create_task(house.ask("a500"))
            await asyncio.sleep(0)
            waiter.cancel()
            await again
        await until(lambda: house.names == {"a500"})

    run(test)


def test_all_who_wait_for_a_load_hear_that_it_failed() -> None:
    async def test(house: House) -> None:
        asked = (house.ask("bad") for _ in range(5))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(answer) for answer in answers} == {BadFile}
        assert house.num_started == 1
        with pytest.raises(BadFile):
            await house.ask("bad")
        assert house.num_started == 2

    run(test)


@pytest.mark.parametrize("version", [1, 2])
def test_control_groups_bound_what_is_available(tmp_path: Path, version: int) -> None:
    membership = tmp_path / "cgroup"
    folder = tmp_path / ("memory/a/b" if version == 1 else "a/b")
    folder.mkdir(parents=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    if version == 2:
        names = ("memory.max", "memory.current", "inactive_file")
    membership.write_text("5:cpu:/x\n4:memory:/a/b\n" if version == 1 else "0::/a/b\n")
    unlimited = available_memory(tmp_path, membership)
    assert unlimited > 5000
    (folder / names[0]).write_text("max\n")
    assert available_memory(tmp_path, membership) > 5000
    # The group above bounds it as well.
    (folder.parent / names[0]).write_text("5000\n")
    (folder.parent / names[1]).write_text("3000\n")
    (folder.parent / "memory.stat").write_text(f"cache 7\n{names[2]} 1000\n")
    assert available_memory(tmp_path, membership) == 3000


def test_kills_for_lack_of_memory_are_counted_where_the_system_tells(tmp_path: Path) -> None:
    membership, vmstat = tmp_path / "cgroup", tmp_path / "vmstat"
    assert num_oom_kills(tmp_path, membership, vmstat) == 0
    vmstat.write_text("oom_kill_x 9\noom_kill 2\n")
    assert num_oom_kills(tmp_path, membership, vmstat) == 2
    membership.write_text("0::/\n")
    (tmp_path / "memory.events").write_text("oom 4\noom_kill 3\n")
    assert num_oom_kills(tmp_path, membership, vmstat) == 3
