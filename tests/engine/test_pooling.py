"""Texts that become vectors, through the scheduler beside requests that generate.

Defends: a vector depends on its text alone, whatever shares the steps, however the text is cut and
whether it was preempted; and what is pooled over every token never starts from the prefix cache.
"""

import numpy as np
import pytest
from driver import Client, generate, request, running
from fake_backend import FakeBackend

from localllm.engine.engine import Engine
from localllm.engine.pooling import Pooler
from localllm.engine.sequence import Request

POOLINGS = ("last", "first", "mean")


def text(name: str, tokens, pooling: str, **fields) -> Request:
    fields = {"params": {}, "exact": True, "cache_prompt": pooling == "last", **fields}
    return request(name, list(tokens), 0, pooling=pooling, **fields)


def vector_of(client: Client, name: str) -> np.ndarray:
    end = client.end(name)
    assert end.finish_reason == "stop"
    assert end.token is None
    assert client.tokens(name) == []
    assert end.vector is not None
    return end.vector


def alone(tokens, pooling: str) -> np.ndarray:
    return vector_of(generate(FakeBackend(), text("a", tokens, pooling)), "a")


def test_pooler_takes_the_states_that_its_kind_names() -> None:
    states = np.random.default_rng(1).standard_normal((7, 3)).astype(np.float32)
    wanted = {"first": states[0], "last": states[-1], "mean": states.mean(axis=0)}
    for pooling, vector in wanted.items():
        pooler = Pooler(pooling)
        pooler.add(0, states[:4])
        pooler.add(0, states[:2])  # computed again after a preemption
        pooler.add(4, states[4:])
        np.testing.assert_allclose(pooler.vector(), vector, rtol=1e-6)
        assert pooler.vector().dtype == np.float32


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_vector_is_the_same_bits_in_company_and_in_chunks(pooling: str) -> None:
    tokens = [3 + i % 90 for i in range(150)]
    wanted = alone(tokens, pooling)
    company = [
        request("talk", [5] * 40, 30),
        text("a", tokens, pooling),
        text("b", tokens[:-1], "mean"),
        text("c", tokens[:33], "last"),
        request("chat", [9] * 70, 30),
    ]
    for options in ({"max_running": 3}, {"chunk": 7}, {"max_running": 16}):
        backend = FakeBackend(max_tokens=64, max_rows=16)
        client = generate(backend, *company, **options)
        assert np.array_equal(vector_of(client, "a"), wanted)
        assert np.array_equal(vector_of(client, "b"), alone(tokens[:-1], "mean"))
        plain = generate(FakeBackend(), company[0])
        assert client.tokens("talk") == plain.tokens("talk")


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_preempted_text_ends_in_the_same_vector(pooling: str) -> None:
    tokens = [3 + i % 90 for i in range(200)]
    client = Client()
    engine = Engine(FakeBackend(blocks=9, max_tokens=40, max_rows=20), chunk=2)
    engine.submit(request("talk", list(range(60)), 150), client)
    engine.submit(text("a", tokens, pooling), client)
    engine.start()
    client.wait_end("talk", "a")
    engine.close()
    assert engine.scheduler.num_preemptions > 0
    assert np.array_equal(vector_of(client, "a"), alone(tokens, pooling))


def test_a_last_token_starts_from_the_prefix_cache_with_the_same_bits() -> None:
    tokens = [3 + i % 90 for i in range(150)]
    client = Client()
    with running(FakeBackend()) as engine:
        for name in ("first", "second"):
            engine.submit(text(name, tokens, "last"), client)
            client.wait_end(name)
    assert client.end("second").stats.cached_tokens > 100
    assert np.array_equal(vector_of(client, "first"), vector_of(client, "second"))


def test_a_text_may_fill_the_whole_context() -> None:
    client = generate(FakeBackend(), text("a", range(1, 65), "last", num_ctx=64))
    assert vector_of(client, "a").shape == (5,)


def test_a_cancelled_text_gives_its_blocks_back() -> None:
    backend = FakeBackend(max_tokens=40, max_rows=20)
    client = Client()
    with running(backend, chunk=1) as engine:
        engine.submit(text("a", range(1, 250), "mean"), client)
        client.wait(lambda c: "a" in c.outputs)
        engine.cancel("a")
        client.wait_end("a")
        assert engine.pool.usage() == 0
    assert client.end("a").vector is None
