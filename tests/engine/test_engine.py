"""The engine over a toy backend that notices every wrong table, position and role."""

import itertools
import random
import threading

import numpy as np
import pytest
from driver import Client, generate, request, running
from fake_backend import FakeBackend, FakeSpec

from localllm.engine.engine import Engine
from localllm.errors import BadRequest, Busy, Cancelled

PROMPT = list(range(40))
LONG = [i * 7 % 300 for i in range(100)]
ENDLESS = 1000  # blocks that no request fills while a test waits
# Options under which a text must come out the same: pool size (small ones force preemption), chunk.
SCHEDULES = [
    {},
    {"blocks": 7},
    {"chunk": 1},
    {"chunk": 33, "blocks": 8},
    {"max_running": 2},
    {"max_tokens": 40, "max_rows": 20, "blocks": 9},
]
SAMPLED = {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "repeat_penalty": 1.2, "logprobs": 2}


def engine_options(schedule: dict) -> tuple[FakeBackend, dict]:
    options = dict(schedule)
    mine = {k: options.pop(k) for k in ("blocks", "max_tokens", "max_rows") if k in options}
    return mine, options


def many(count: int = 8):
    """Different prompts, lengths, seeds and samplers; some prompts share a prefix."""
    rng = random.Random(5)
    base = [rng.randrange(300) for _ in range(200)]
    requests = []
    for i in range(count):
        tokens = base[: rng.randint(1, 120)] if i % 2 else base[i : i + rng.randint(1, 150)]
        params = {} if i % 3 == 0 else {**SAMPLED, "seed": i}
        requests.append(request(f"r{i}", tokens, rng.randint(1, 50), params=params))
    return requests


@pytest.mark.parametrize("windows", [(None,), (None, 40)], ids=["full", "window"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_text_is_the_same_alone_and_among_others(windows, schedule) -> None:
    """Defends sameness: chunking, batching, preemption and prefix hits change nothing."""
    backend_options, options = engine_options(schedule)
    alone = {r.request_id: generate(FakeBackend(windows), r) for r in many()}
    backend = FakeBackend(windows, **backend_options)
    together = generate(backend, *many(), **options)
    for name, client in alone.items():
        assert client.reason(name) == together.reason(name) == "length"
        assert together.tokens(name) == client.tokens(name)
        assert together.logprobs(name) == client.logprobs(name)


def test_a_small_pool_does_force_preemption() -> None:
    with running(FakeBackend(blocks=7)) as engine:
        client = Client()
        for r in many():
            engine.submit(r, client)
        client.wait_end(*(r.request_id for r in many()))
        assert engine.load().num_preemptions > 0
        assert engine.load().kv_usage == 0


@pytest.mark.parametrize("windows", [(None,), (None, 40)], ids=["full", "window"])
def test_a_warm_cache_changes_no_text(windows) -> None:
    cold = {r.request_id: generate(FakeBackend(windows), r) for r in many()}
    client = Client()
    with running(FakeBackend(windows, blocks=200)) as engine:
        for turn in range(3):
            for r in many():
                again = request(f"{turn}-{r.request_id}", r.tokens, r.params.num_predict)
                engine.submit(type(r)(again.request_id, r.tokens, r.params), client)
            client.wait_end(*(f"{turn}-{r.request_id}" for r in many()))
    for turn, (name, alone) in itertools.product(range(3), cold.items()):
        assert client.tokens(f"{turn}-{name}") == alone.tokens(name)
    cached = client.end("2-r3").stats.cached_tokens
    assert cached == len(many()[3].tokens) - 1


def test_an_exact_second_turn_equals_the_same_prompt_with_a_cold_cache() -> None:
    client = Client()
    with running(FakeBackend()) as engine:
        engine.submit(request("first", PROMPT, 50), client)
        client.wait_end("first")
        turn = [*PROMPT, *client.tokens("first"), 5, 6, 7]
        engine.submit(request("loose", turn), client)
        client.wait_end("loose")
        engine.submit(request("exact", turn, exact=True), client)
        client.wait_end("exact")
    cold = generate(FakeBackend(), request("cold", turn))
    assert client.tokens("exact") == cold.tokens("cold")
    assert client.end("loose").stats.cached_tokens > 80
    assert 0 < client.end("exact").stats.cached_tokens <= 40


def test_cache_off_computes_everything() -> None:
    client = Client()
    with running(FakeBackend()) as engine:
        for name in ("a", "b"):
            engine.submit(request(name, PROMPT, cache_prompt=False), client)
            client.wait_end(name)
    assert client.end("b").stats.cached_tokens == 0
    assert client.tokens("a") == client.tokens("b")


def test_an_end_token_stops_and_is_the_last_output() -> None:
    free = generate(FakeBackend(), request("r", PROMPT)).tokens("r")
    stopped = generate(FakeBackend(), request("r", PROMPT), eog_ids=frozenset({free[4]}))
    assert stopped.tokens("r") == free[:5]
    assert stopped.end("r").finish_reason == "stop"
    assert stopped.end("r").token == free[4]
    ignoring = request("r", PROMPT, params={"ignore_eog": True})
    going_on = generate(FakeBackend(), ignoring, eog_ids=frozenset({free[4]}))
    assert going_on.tokens("r") == free
    own = generate(FakeBackend(), request("r", PROMPT, stop_ids=frozenset({free[2]})))
    assert own.tokens("r") == free[:3]


def test_num_predict_ends_with_length() -> None:
    client = generate(FakeBackend(), request("r", PROMPT, 3), request("none", PROMPT, 0))
    assert len(client.tokens("r")) == 3
    assert client.end("r").finish_reason == "length"
    assert client.tokens("none") == []
    assert client.end("none").finish_reason == "length"


def test_a_full_context_ends_with_length() -> None:
    client = generate(FakeBackend(), request("r", PROMPT, -1), num_ctx=64)
    assert len(client.tokens("r")) == 64 - 40
    assert client.end("r").finish_reason == "length"
    own = generate(FakeBackend(), request("r", PROMPT, -1, num_ctx=50))
    assert len(own.tokens("r")) == 10


def test_a_shift_goes_on_from_the_kept_tokens_computed_as_prompt() -> None:
    r = request("r", PROMPT, 60, num_ctx=64, shift=True, num_keep=4)
    client = generate(FakeBackend(), r)
    tokens = client.tokens("r")
    assert len(tokens) == 60
    assert client.end("r").stats.num_shifts == 2
    full = [*PROMPT, *tokens[:24]]
    kept = [*full[:4], *full[34:]]
    fresh = generate(FakeBackend(), request("r", kept, 30))
    assert fresh.tokens("r") == tokens[24:54]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([], "empty"), ([0, 300], "outside 0 to 299"), ([-1], "outside"), (LONG, "100 tokens")],
)
def test_bad_prompts_are_refused_with_the_reason(tokens, message) -> None:
    with running(FakeBackend(), num_ctx=64) as engine, pytest.raises(BadRequest, match=message):
        engine.submit(request("r", tokens), Client())


def test_a_request_that_fits_alone_never_errors() -> None:
    client = generate(FakeBackend(blocks=4), *(request(f"r{i}", LONG, 28) for i in range(4)))
    assert {client.reason(f"r{i}") for i in range(4)} == {"length"}
    assert client.tokens("r0") == client.tokens("r3")


def test_cancel_in_the_queue_in_the_prompt_and_while_generating() -> None:
    client = Client()
    with running(FakeBackend(blocks=ENDLESS), max_running=2, chunk=1) as engine:
        engine.submit(request("decoding", [1], -1), client)
        client.wait(lambda c: len(c.tokens("decoding")) > 3)
        engine.submit(request("prompt", LONG * 10, -1), client)
        client.wait(lambda c: "prompt" in c.outputs)
        engine.submit(request("queued", [1], -1), client)
        for name in ("queued", "prompt", "decoding"):
            engine.cancel(name)
            client.wait_end(name)
            assert client.reason(name) == "cancelled"
        assert engine.load().kv_usage == 0
        engine.cancel("never existed")
        engine.submit(request("after", [1], 2), client)
        client.wait_end("after")
    assert client.tokens("queued") == []


def test_a_failing_step_ends_the_running_requests_and_the_engine_goes_on() -> None:
    client = Client()
    with running(FakeBackend(fail_at=5)) as engine:
        engine.submit(request("a", PROMPT, 50), client)
        client.wait_end("a")
        assert client.reason("a") == "error"
        assert "the toy broke" in client.end("a").error
        engine.submit(request("b", PROMPT, 50), client)
        client.wait_end("b")
        assert client.end("b").stats.cached_tokens == 0
    assert client.reason("b") == "length"


def test_logits_that_are_not_finite_end_that_request_only() -> None:
    class Broken(FakeBackend):
        def _logits(self, state):
            logits = super()._logits(state)
            if logits[0] > 7.5:
                logits[3] = np.nan
            return logits

    requests = [request(f"r{i}", [i, i + 1], 60) for i in range(6)]
    client = generate(Broken(), *requests)
    reasons = [client.reason(r.request_id) for r in requests]
    assert "error" in reasons
    assert "length" in reasons


def test_a_full_queue_is_busy_and_frees_places() -> None:
    client = Client()
    with running(FakeBackend(blocks=ENDLESS), max_running=1, max_waiting=2) as engine:
        engine.submit(request("r", [1], -1), client)
        client.wait(lambda c: c.tokens("r"))
        engine.submit(request("q1", [1], 2), client)
        engine.submit(request("q2", [1], 2), client)
        with pytest.raises(Busy):
            engine.submit(request("q3", [1], 2), client)
        engine.cancel("q1")
        client.wait_end("q1")
        engine.submit(request("q3", [1], 2), client)
        engine.cancel("r")
        client.wait_end("q2", "q3")


def test_a_sink_is_called_once_per_step_for_all_its_sequences() -> None:
    client = generate(FakeBackend(), *(request(f"r{i}", [i], 30) for i in range(4)))
    sizes = [len(outputs) for outputs in client.calls]
    assert max(sizes) == 4
    assert len(client.calls) < 4 * 30
    for outputs in client.calls:
        assert len({o.request_id for o in outputs}) == len(outputs)


def test_a_failing_sink_costs_only_its_own_requests() -> None:
    def broken(outputs) -> None:
        raise RuntimeError("gone")

    client = Client()
    with running(FakeBackend()) as engine:
        engine.submit(request("bad", PROMPT, -1), broken)
        engine.submit(request("good", PROMPT, 20), client)
        client.wait_end("good")
        engine.submit(request("probe", [1], 1), client)
        client.wait_end("probe")
        assert not engine.scheduler.has_work


def test_a_request_id_in_use_is_refused() -> None:
    client, other = Client(), Client()
    with running(FakeBackend()) as engine:
        engine.submit(request("r", PROMPT, 30), client)
        engine.submit(request("r", PROMPT, 30), other)
        other.wait_end("r")
        client.wait_end("r")
    assert other.reason("r") == "error"
    assert client.reason("r") == "length"


def test_closing_ends_everything_and_refuses_more() -> None:
    client = Client()
    backend = FakeBackend(blocks=ENDLESS)
    engine = Engine(backend, max_running=1).start()
    engine.submit(request("r", [1], -1), client)
    engine.submit(request("q", [1], -1), client)
    client.wait(lambda c: c.tokens("r"))
    engine.close()
    assert (client.reason("r"), client.reason("q")) == ("cancelled", "cancelled")
    assert backend.is_closed
    with pytest.raises(Cancelled):
        engine.submit(request("late", [1]), client)


def test_steps_never_run_on_the_callers_thread() -> None:
    threads = set()

    class Watching(FakeBackend):
        def step(self, batch):
            threads.add(threading.current_thread())
            return super().step(batch)

    generate(Watching(), request("r", PROMPT))
    assert len(threads) == 1
    assert threading.main_thread() not in threads


def test_logprobs_are_those_of_the_raw_logits() -> None:
    bias = {"logit_bias": {7: 100.0}, "logprobs": 3}
    client = generate(FakeBackend(), request("r", PROMPT, 1, params=bias))
    (output,) = [o for o in client.outputs["r"] if o.token is not None]
    assert output.token == 7
    free = generate(FakeBackend(), request("r", PROMPT, 1, params={"logprobs": 3}))
    (best,) = [o for o in free.outputs["r"] if o.token is not None]
    assert output.top_logprobs == best.top_logprobs
    assert best.top_logprobs[0] == (best.token, best.logprob)
    assert output.logprob < best.logprob


@pytest.mark.parametrize("chunk", [None, 1, 7, 64])
@pytest.mark.parametrize("num_prompt", [None, 0, 50])
def test_an_observer_sees_the_logits_of_every_token_in_order(chunk, num_prompt) -> None:
    seen: list[tuple[int, np.ndarray]] = []
    r = request(
        "r",
        LONG,
        0,
        num_prompt=num_prompt,
        cache_prompt=False,
        observer=lambda position, logits: seen.append((position, logits.copy())),
    )
    backend = FakeBackend(max_rows=40)
    generate(backend, r, request("beside", PROMPT, 60), chunk=chunk)
    assert [p for p, _ in seen] == list(np.cumsum([0, *(len(x) for _, x in seen)])[:-1])
    rows = np.concatenate([x for _, x in seen])
    assert rows.shape == (100, 300)
    if num_prompt is None:
        for length in (1, 33, 100):
            (token,) = generate(FakeBackend(), request("p", LONG[:length], 1)).tokens("p")
            assert token == rows[length - 1].argmax()


def test_a_tiny_vocabulary_is_padded_and_still_drawn_from() -> None:
    params = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "seed": 3}
    backend = FakeBackend(spec=FakeSpec(vocab_size=5))
    client = generate(backend, request("r", [1, 2], 50, params=params))
    assert set(client.tokens("r")) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("windows", [(None,), (48, None)], ids=["full", "window"])
def test_texts_survive_random_cancellations_and_preemptions(windows) -> None:
    """Defends sameness and the pool's invariants: 60 requests, a third of them cancelled."""
    requests = many(60)
    rng = random.Random(9)
    doomed = {r.request_id: rng.randint(0, 12) for r in requests if rng.random() < 0.33}
    client = Client()
    with running(FakeBackend(windows, blocks=16), max_running=8) as engine:
        for r in requests:
            engine.submit(r, client)
        for name, count in doomed.items():
            client.wait(lambda c, n=name, k=count: len(c.tokens(n)) >= k or c.reason(n))
            engine.cancel(name)
        client.wait_end(*(r.request_id for r in requests))
        assert engine.load().num_preemptions > 0
        assert engine.load().kv_usage == 0
    for r in requests:
        name = r.request_id
        alone = generate(FakeBackend(windows), r)
        tokens = client.tokens(name)
        if client.reason(name) == "cancelled":
            assert name in doomed
            assert tokens == alone.tokens(name)[: len(tokens)]
        else:
            assert tokens == alone.tokens(name)
            assert client.logprobs(name) == alone.logprobs(name)


def test_requests_from_many_threads_get_their_own_texts() -> None:
    requests = many(12)
    alone = {r.request_id: generate(FakeBackend(), r).tokens(r.request_id) for r in requests}
    clients = {r.request_id: Client() for r in requests}
    with running(FakeBackend(blocks=30), max_running=6) as engine:

        def serve(r) -> None:
            engine.submit(r, clients[r.request_id])
            clients[r.request_id].wait_end(r.request_id)

        threads = [threading.Thread(target=serve, args=(r,)) for r in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {name: c.tokens(name) for name, c in clients.items()} == alone


class Clocked(FakeBackend):
    """Every step takes a second of a clock of its own."""

    now = 0.0

    def step(self, batch):
        self.now += 1
        return super().step(batch)


@pytest.mark.parametrize(
    ("deadline", "place"),
    [
        (-1.0, "in the queue"),
        (2.0, "after 2 of 5 prompt tokens"),
        (7.0, "after 3 new tokens"),
    ],
)
def test_a_request_ends_when_its_time_is_over_wherever_it_is(deadline, place) -> None:
    backend = Clocked()
    client = Client()
    with running(backend, chunk=1, clock=lambda: backend.now) as engine:
        engine.submit(request("r", [1, 2, 3, 4, 5], -1, deadline=deadline), client)
        client.wait_end("r")
        assert engine.load().kv_usage == 0
        assert not engine.scheduler.has_work
    end = client.end("r")
    assert (end.finish_reason, end.error) == ("timeout", f"the request timed out {place}")
    assert end.stats.prompt_tokens == 5


def test_a_request_behind_a_long_one_times_out_in_the_queue() -> None:
    backend = Clocked(blocks=ENDLESS)
    client = Client()
    with running(backend, max_running=1, clock=lambda: backend.now) as engine:
        engine.submit(request("long", PROMPT, 60), client)
        engine.submit(request("short", PROMPT, 5, deadline=20.0), client)
        engine.submit(request("other", PROMPT, 5, deadline=1e9), client)
        client.wait_end("long", "short", "other")
    assert client.reason("short") == "timeout"
    assert (client.reason("long"), client.reason("other")) == ("length", "length")
    assert len(client.tokens("long")) == 60


def test_load_tells_how_full_the_pool_was_when_blocks_ran_out() -> None:
    with running(FakeBackend(blocks=7)) as engine:
        client = Client()
        assert engine.load().fill_at_preemption is None
        for r in many():
            engine.submit(r, client)
        client.wait_end(*(r.request_id for r in many()))
        fill = engine.load().fill_at_preemption
        assert fill is not None
        assert 0.5 < fill <= 1


def test_statistics_say_why_the_prefix_was_missed() -> None:
    client = Client()
    with running(FakeBackend()) as engine:
        for name, tokens in (("a", PROMPT), ("b", PROMPT), ("c", [*PROMPT[:35], 299, 1])):
            engine.submit(request(name, tokens, 1), client)
            client.wait_end(name)
    misses = [client.end(name).stats.prefix_miss for name in "abc"]
    assert misses == ["first request", "", "differs at token 35 of 37"]
