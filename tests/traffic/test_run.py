"""Traffic against a server of known answers, in every dialect."""

import asyncio
from dataclasses import replace

import pytest

from localllm.address import Address
from localllm.errors import BadRequest, LocalLLMError
from localllm.traffic.records import Goal, Summary
from localllm.traffic.run import Plan, Traffic, run_until
from localllm.traffic.wire import DIALECTS
from localllm.traffic.workload import Span, Workload

RANDOM = Workload(prompt=Span(40, 60), output=Span(3, 9))


def drive(stand_in, workload=RANDOM, api="ollama", **fields) -> Traffic:
    """A whole run against the stand-in."""

    async def run() -> Traffic:
        async with stand_in as server:
            plan = Plan(server, DIALECTS[api], "m", workload, **{"requests": 6, **fields})
            traffic = Traffic(plan)
            assert await run_until(traffic, asyncio.Event())
            return traffic

    return asyncio.run(run())


@pytest.mark.parametrize("cut", [None, 1, 7])
@pytest.mark.parametrize("api", DIALECTS)
def test_every_dialect_is_measured_however_its_bytes_are_cut(stand_in, api: str, cut) -> None:
    stand_in.cut = cut
    summary = drive(stand_in, api=api).summary()
    assert (summary.completed, summary.errors) == (6, {})
    assert (summary.output_tokens, summary.cached_tokens) == (18, 18)
    assert all(summary.spreads[m] is not None for m in ("ttft", "tpot", "itl", "e2el"))


@pytest.mark.parametrize("api", ["openai", "openai-completions"])
def test_openai_bodies_stream_and_ask_for_counts(stand_in, api: str) -> None:
    drive(stand_in, api=api, ignore_eos=True, api_key="secret")
    body = stand_in.bodies[-1]
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert 3 <= body["max_tokens"] <= 9
    assert body["ignore_eos"] is True
    assert ("messages" in body) == (api == "openai")
    assert "Authorization: Bearer secret\r\n" in stand_in.heads[-1]


@pytest.mark.parametrize("api", ["ollama", "ollama-generate"])
def test_ollama_bodies_carry_options(stand_in, api: str) -> None:
    drive(stand_in, api=api)
    body = stand_in.bodies[-1]
    assert 3 <= body["options"]["num_predict"] <= 9
    assert "ignore_eog" not in body["options"]
    assert body.get("raw", False) == (api == "ollama-generate")


def test_prompts_have_the_wanted_tokens_as_the_server_counts_them(stand_in) -> None:
    traffic = drive(stand_in, Workload(prompt=Span(100, 300)), requests=20)
    counts = [r.prompt_tokens for r in traffic.records]
    assert 99 <= min(counts) < max(counts) <= 301
    assert len(set(counts)) > 10


def test_a_run_asks_the_same_again(stand_in) -> None:
    drive(stand_in, concurrency=1)
    first, stand_in.bodies = stand_in.bodies, []
    drive(stand_in, concurrency=1)
    assert stand_in.bodies == first


def test_at_most_so_many_requests_run_at_once(stand_in) -> None:
    drive(stand_in, concurrency=3, requests=20)
    assert stand_in.most_open == 3


def test_rate_begins_requests_whatever_the_server_does(stand_in) -> None:
    traffic = drive(stand_in, rate=1000.0, requests=30)
    assert traffic.summary().completed == 30
    sent = [r.sent_at for r in traffic.records]
    assert sent == sorted(sent)
    assert sent[-1] > 0.005  # 30 arrivals at 1000 a second


def test_turns_send_what_was_said_before(stand_in) -> None:
    workload = Workload("multi-turn", Span(40, 40), Span(5, 5), turns=3)
    traffic = drive(stand_in, workload, concurrency=1, requests=6)
    turns = [[m["role"] for m in body["messages"]] for body in stand_in.bodies[2:]]
    assert [len(t) for t in turns] == [1, 3, 5, 1, 3, 5]
    assert turns[2] == ["user", "assistant", "user", "assistant", "user"]
    assert stand_in.bodies[3]["messages"][1]["content"] == "one two three"
    assert [(r.conversation, r.turn) for r in traffic.records][:4] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
    ]


def test_last_conversation_is_cut_to_the_requests_that_are_left(stand_in) -> None:
    workload = Workload("multi-turn", Span(40, 40), Span(5, 5), turns=4)
    assert len(drive(stand_in, workload, concurrency=1, requests=6).records) == 6


def test_shared_prefixes_come_first_and_are_few(stand_in) -> None:
    workload = Workload("shared-prefix", Span(20, 20), prefix=100, num_prefixes=2)
    drive(stand_in, workload, requests=12)
    systems = [body["messages"][0] for body in stand_in.bodies[2:]]
    assert {m["role"] for m in systems} == {"system"}
    assert len({m["content"] for m in systems}) == 2
    assert all(len(m["content"].split()) == 50 for m in systems)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"status": 503, "failure": b'{"error": "server busy"}'}, "HTTP 503", "server busy"),
        ({"status": 400, "failure": b'{"error": {"message": "no"}}'}, "HTTP 400", "no"),
        ({"status": 500, "failure": b"<html>broken"}, "HTTP 500", "<html>broken"),
        ({"failure": b'{"error": "the runner died"}\n'}, "error in the stream", "runner died"),
        ({"failure": b"not json\n"}, "malformed", "another format"),
        ({"stops_after": 2}, "cut off", "closed the connection"),
        ({"stops_after": 2, "is_chunked": False}, "cut off", "without its last line"),
    ],
)
def test_failures_are_told_by_kind(stand_in, change: dict, kind: str, message: str) -> None:
    async def run() -> Traffic:
        async with stand_in as server:
            traffic = Traffic(Plan(server, DIALECTS["ollama"], "m", RANDOM, requests=4))
            await traffic.prepare()
            for name, value in change.items():
                setattr(stand_in, name, value)
            await traffic.run()
            return traffic

    traffic = asyncio.run(run())
    assert traffic.summary().errors == {kind: 4}
    assert message in traffic.records[0].message


def test_a_stream_without_length_ends_with_the_connection(stand_in) -> None:
    stand_in.is_chunked = False
    assert drive(stand_in).summary().completed == 6


@pytest.mark.parametrize(
    "failure", [b'data: {"error": {"message": "no"}}\n\n', b'{"error": {"message": "no"}}']
)
def test_openai_errors_in_place_of_a_stream(stand_in, failure: bytes) -> None:
    stand_in.failure = failure
    with pytest.raises(LocalLLMError, match="no"):
        drive(stand_in, api="openai")


def test_no_server_is_an_error_before_the_run(stand_in) -> None:
    async def run() -> None:
        async with stand_in as server:
            pass
        await Traffic(Plan(server, DIALECTS["ollama"], "m", RANDOM)).prepare()

    with pytest.raises(LocalLLMError, match=r"http://127\.0\.0\.1:\d+: "):
        asyncio.run(run())


def test_stopping_keeps_what_was_measured(stand_in) -> None:
    """Ctrl-C: the finished requests count, the running ones are told as such."""

    async def run() -> Traffic:
        async with stand_in as server:
            stopped = asyncio.Event()
            traffic = Traffic(
                Plan(server, DIALECTS["ollama"], "m", RANDOM, requests=None, seconds=60)
            )
            running = asyncio.create_task(run_until(traffic, stopped))
            while traffic.summary().completed < 5:
                await asyncio.sleep(0)
            stopped.set()
            assert await running is False
            return traffic

    summary = asyncio.run(run()).summary()
    assert summary.completed >= 5
    assert summary.errors == {}
    assert 0 < summary.duration < 60


def test_seconds_end_the_beginning_of_requests(stand_in) -> None:
    summary = drive(stand_in, requests=None, seconds=0.05).summary()
    assert summary.completed > 0
    assert summary.running == 0


@pytest.mark.parametrize(
    "fields", [{"rate": 0.0}, {"seconds": -1.0}, {"concurrency": 0}, {"requests": 0}]
)
def test_plans_that_make_no_sense_are_refused(fields: dict) -> None:
    plan = Plan(Address("http", "h", 1), DIALECTS["ollama"], "m", RANDOM)
    with pytest.raises(BadRequest):
        replace(plan, **fields)


def test_goodput_counts_what_meets_every_goal(stand_in) -> None:
    traffic = drive(stand_in)
    assert Summary.of(traffic.records, 1.0, Goal.parse(["ttft:60000 e2el:60000"])).good == 6
    assert Summary.of(traffic.records, 1.0, Goal.parse(["ttft:60000", "e2el:0.0001"])).good == 0
    assert Summary.of(traffic.records, 1.0).good is None
