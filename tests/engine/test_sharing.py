"""Requests that share prefixes, places and blocks, each of which must not notice the others.

The toy backend notices every wrong table, position and role, so equal texts mean right tables.
"""

import random

import pytest
from driver import Client, generate, request, running
from fake_backend import FakeBackend

WINDOWS = pytest.mark.parametrize("windows", [(None,), (None, 40)], ids=["full", "window"])


def alone(windows, r) -> list[int]:
    """The text of the request's tokens on an engine of its own."""
    cold = request(r.request_id, r.tokens, r.params.num_predict, cache_prompt=False)
    return generate(FakeBackend(windows), cold).tokens(r.request_id)


@WINDOWS
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64, 100])
def test_the_same_again_a_prefix_of_it_and_one_token_more(windows, length) -> None:
    """Defends: whatever part of a prompt is cached, its last token is computed."""
    tokens = [i * 11 % 300 for i in range(length)]
    prompts = [tokens, tokens, tokens[: max(1, length // 2)], [*tokens, 7], tokens[:-1] or [5]]
    client = Client()
    with running(FakeBackend(windows)) as engine:
        for i, prompt in enumerate(prompts):
            engine.submit(request(f"{i}", prompt, 10), client)
            client.wait_end(f"{i}")
    for i, prompt in enumerate(prompts):
        assert client.tokens(f"{i}") == alone(windows, request(f"{i}", prompt, 10))
        stats = client.end(f"{i}").stats
        assert (stats.prompt_tokens, stats.cached_tokens < len(prompt)) == (len(prompt), True)
    assert client.end("1").stats.cached_tokens == length - 1


@WINDOWS
@pytest.mark.parametrize("backwards", [False, True])
def test_hits_and_misses_give_the_same_text(windows, backwards) -> None:
    """30 prompts with a common prefix of 300 tokens, some edited in the middle, in two orders."""
    rng = random.Random(2)
    base = [rng.randrange(300) for _ in range(300)]
    requests = []
    for i in range(30):
        tokens = [*base, *(rng.randrange(300) for _ in range(rng.randint(1, 60)))]
        if i % 3 == 0:
            tokens[rng.randrange(300)] = 299
        requests.append(request(f"r{i}", tokens, 8, exact=i % 4 == 1))
    client = Client()
    with running(FakeBackend(windows, blocks=60), max_running=3) as engine:
        for r in reversed(requests) if backwards else requests:
            engine.submit(r, client)
        client.wait_end(*(r.request_id for r in requests))
    for r in requests:
        assert client.tokens(r.request_id) == alone(windows, r)
    cached = [client.end(r.request_id).stats.cached_tokens for r in requests]
    assert sum(count > 250 for count in cached) >= 18


@WINDOWS
@pytest.mark.parametrize("seed", range(3))
def test_everything_ends_whatever_its_priority_salt_and_time(windows, seed) -> None:
    """Defends: no starvation, sameness, and the pool's invariants, with preemptions, cancelled
    requests and times that are over among them.
    """
    rng = random.Random(seed)
    base = [rng.randrange(300) for _ in range(200)]
    requests = []
    for i in range(70):
        tokens = base[: rng.randint(1, 150)] if i % 2 else base[i : i + rng.randint(1, 120)]
        fields = {
            "priority": rng.choice([-1, 0, 0, 5]),
            "salt": rng.choice([b"", b"a", b"b"]),
            "deadline": rng.choice([None, None, None, 300.0]),
        }
        requests.append(request(f"r{i}", tokens, rng.randint(20, 60), **fields))

    class Clocked(FakeBackend):
        def step(self, batch):
            engine.pool.check(engine.scheduler.running)
            return super().step(batch)

    backend = Clocked(windows, blocks=9)
    client = Client()
    left = set(rng.sample([r.request_id for r in requests], 15))
    with running(backend, max_running=6, clock=lambda: float(backend.num_steps)) as engine:
        for r in requests:
            engine.submit(r, client)
            if r.request_id in left:
                engine.cancel(r.request_id)
        client.wait_end(*(r.request_id for r in requests))
        assert engine.load().num_preemptions > 0
        assert engine.load().kv_usage == 0
    reasons = {r.request_id: client.reason(r.request_id) for r in requests}
    assert set(reasons.values()) == {"length", "cancelled", "timeout"}
    for r in requests:
        tokens, whole = client.tokens(r.request_id), alone(windows, r)
        assert tokens == whole[: len(tokens)]
        assert reasons[r.request_id] != "length" or tokens == whole
