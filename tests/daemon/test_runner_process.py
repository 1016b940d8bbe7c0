import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from localllm.errors import BadFile, BadRequest, LocalLLMError, RunnerDied
from localllm.messages import Delta, Generate, Load, Loading
from localllm.runner_process import RunnerProcess

FAKE = (sys.executable, str(Path(__file__).with_name("fake_runner.py")))


def run(test: Callable[[RunnerProcess], Coroutine[None, None, None]], stall: float = 30.0) -> None:
    async def body() -> None:
        runner = await RunnerProcess.start(os.environ, FAKE, stall)
        try:
            await asyncio.wait_for(test(runner), 60)
        finally:
            await runner.close()
        with pytest.raises(ProcessLookupError):
            os.kill(runner.pid, 0)

    asyncio.run(body())


async def answer(runner: RunnerProcess, prompt: str) -> list[Delta]:
    return [delta async for delta in runner.generate(Generate(0, prompt))]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_load_reports_progress_and_requests_are_answered_side_by_side() -> None:
    async def test(runner: RunnerProcess) -> None:
        seen: list[Loading] = []
        ready = await runner.load(Load("/x.gguf"), seen.append)
        assert ready.context_length == 4096
        assert seen == [Loading("copying weights", 1, 2)]
        answers = await asyncio.gather(*(answer(runner, "hi") for _ in range(20)))
        assert {text_of(deltas) for deltas in answers} == {"0 1 2 "}
        last = answers[0][-1]
        assert last.done_reason == "stop"
        assert last.statistics is not None
        assert last.statistics.generated_tokens == 3
        assert runner.num_requests == 0

    run(test)


@pytest.mark.parametrize(("name", "error"), [("bad.gguf", BadFile), ("dies.gguf", RunnerDied)])
def test_failed_load_raises_its_own_error(name: str, error: type[LocalLLMError]) -> None:
    async def test(runner: RunnerProcess) -> None:
        with pytest.raises(error):
            await runner.load(Load(f"/{name}"))
        assert runner.closed.is_set()

    run(test)


def test_refused_request_and_a_bug_cost_only_their_request() -> None:
    async def test(runner: RunnerProcess) -> None:
        await runner.load(Load("/x.gguf"))
        with pytest.raises(BadRequest, match="refuses"):
            await answer(runner, "refuse")
        with pytest.raises(LocalLLMError, match="ZeroDivisionError: a bug"):
            await answer(runner, "bug")
        assert text_of(await answer(runner, "hi")) == "0 1 2 "

    run(test)


def test_closing_the_iterator_cancels_the_request() -> None:
    async def test(runner: RunnerProcess) -> None:
        await runner.load(Load("/x.gguf"))
        deltas = runner.generate(Generate(0, "forever"))
        async for _ in deltas:
            break
        await deltas.aclose()  # type: ignore[attr-defined]
        assert runner.num_requests == 0
        assert text_of(await answer(runner, "hi")) == "0 1 2 "

    run(test)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("die", "signal SIGKILL, perhaps for lack of memory"),
        ("exit", "exit code 3: a last word"),
        ("raise", "internal error and was ended: Exception ignored in: kernel"),
    ],
)
def test_dead_runner_ends_all_its_requests_with_the_cause(word: str, message: str) -> None:
    async def test(runner: RunnerProcess) -> None:
        await runner.load(Load("/x.gguf"))
        ends = await asyncio.gather(
            answer(runner, "forever"), answer(runner, word), return_exceptions=True
        )
        for end in ends:
            assert isinstance(end, RunnerDied)
            assert message in str(end)
        with pytest.raises(RunnerDied):
            await answer(runner, "hi")

    run(test)


def test_runner_that_does_not_move_is_killed() -> None:
    async def test(runner: RunnerProcess) -> None:
        await runner.load(Load("/x.gguf"))
        assert text_of(await answer(runner, "hi")) == "0 1 2 "
        with pytest.raises(RunnerDied, match="was stuck for"):
            await answer(runner, "hang")

    run(test, stall=0.3)


def test_stopped_process_is_killed_too() -> None:
    async def test(runner: RunnerProcess) -> None:
        await runner.load(Load("/x.gguf"))
        os.kill(runner.pid, signal.SIGSTOP)
        with pytest.raises(RunnerDied, match="was stuck for"):
            await answer(runner, "hi")

    run(test, stall=0.3)


def test_kill_for_lack_of_memory_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter((4, 5))
    monkeypatch.setattr("localllm.runner_process.num_oom_kills", lambda: next(counts))

    async def test(runner: RunnerProcess) -> None:
        await runner.load(Load("/x.gguf"))
        with pytest.raises(RunnerDied, match="SIGKILL: the system had run out of memory"):
            await answer(runner, "die")

    run(test)
