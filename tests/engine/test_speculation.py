"""Guesses change no text: the engine with and without them over the toy backend, bit by bit."""

import random
from dataclasses import replace

import numpy as np
import pytest
from driver import Client, generate, request, running
from fake_backend import FakeBackend, FakeSpec
from guessing import Eager, Knowing

from localllm.engine.sequence import Request

EOG = 3
SCHEDULES = [
    {},
    {"blocks": 9},
    {"max_running": 2},
    {"max_tokens": 40, "max_rows": 20, "max_running": 12, "blocks": 10},
    {"num_ctx": 100, "blocks": 8},
]
WINDOWS = [(None,), (None, 40), (33,)]
PARAMS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 0, "top_p": 1.0},
    {"temperature": 1.2, "repeat_penalty": 1.3, "repeat_last_n": 7},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repeat_last_n": -1},
    {"temperature": 0.9, "logit_bias": {1: 2.0, 2: -1.0}, "repeat_penalty": 1.1},
    {"temperature": 1.0, "mirostat": 1},
    {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 1.0},
    {"temperature": 1.0, "typical_p": 0.6, "min_p": 0.05},
]


class Wandering:
    """Allows a different part of the vocabulary after every token; ends after `length` of them."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self.vocab_size = vocab_size
        self.length = length
        self.state = 1
        self.num_accepted = 0

    @property
    def is_finished(self) -> bool:
        return self.num_accepted == self.length

    def allowed(self) -> np.ndarray | None:
        if self.state % 4 == 0:
            return None
        mask = np.zeros(-(-self.vocab_size // 32), np.uint32)
        for token in range(self.vocab_size):
            if (token + self.state) % 3:
                mask[token // 32] |= np.uint32(1 << token % 32)
        return mask

    def accept(self, token: int) -> None:
        self.state = (self.state * 31 + token) % 1009
        self.num_accepted += 1


def many(count: int, vocab_size: int, seed: int) -> list[Request]:
    """Requests of all kinds; constraints have a state, so every run needs its own."""
    rng = random.Random(seed)
    base = [rng.randrange(vocab_size) for _ in range(150)]
    requests = []
    for i in range(count):
        tokens = base[: rng.randint(1, 60)] + [rng.randrange(vocab_size) for _ in range(i % 5)]
        bound = rng.randint(1, 60)
        constraint = Wandering(vocab_size, bound - rng.randint(0, 5)) if i % 7 == 0 else None
        params = {**PARAMS[i % len(PARAMS)], "seed": i, "logprobs": i % 4}
        params["ignore_eog"] = rng.random() < 0.7
        fields = {"constraint": constraint, "shift": rng.random() < 0.5, "num_keep": i % 6}
        # With five tokens prompts begin as others' answers do, and those count as said, not asked.
        fields["exact"] = True
        requests.append(request(f"r{i}", tokens, bound, params=params, **fields))
    return requests


def said(client: Client, name: str) -> list:
    """All that a client is told of the answer."""
    outputs = [o for o in client.outputs[name] if o.token is not None]
    heard = [(o.token, o.logprob, o.top_logprobs) for o in outputs]
    return [*heard, client.reason(name), client.end(name).error]


def serve(requests: list[Request], windows, schedule: dict, speculation=None) -> Client:
    # A model of windows only would have room for sequences of any length.
    options = {"eog_ids": frozenset({EOG}), "num_ctx": 200, "speculation": speculation, **schedule}
    sizes = {k: options.pop(k) for k in ("blocks", "max_tokens", "max_rows") if k in options}
    sizes["spec"] = FakeSpec(vocab_size=5)
    return generate(FakeBackend(windows, **sizes), *requests, **options)


def accepted(client: Client) -> int:
    return sum(client.end(name).stats.accepted_tokens for name in client.outputs)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_answers_are_the_same_bits_with_guesses_by_prompt_lookup(windows, schedule) -> None:
    """Defends sameness with a vocabulary so small that many guesses are right."""
    plain = serve(many(40, 5, 1), windows, schedule)
    guessed = serve(many(40, 5, 1), windows, schedule, Eager())
    for name in plain.outputs:
        assert said(guessed, name) == said(plain, name), name
    assert accepted(guessed) > 20
    assert accepted(plain) == 0


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("blocks", [9, 64])
def test_answers_are_the_same_bits_whether_guesses_are_right_or_wrong(
    windows, right, blocks
) -> None:
    """Defends the machinery beside the lookup: an oracle that is right always, never, at times."""

    def asked() -> list[Request]:
        return [replace(r, shift=False) for r in many(40, 5, 2)]

    schedule = {"blocks": blocks}
    plain = serve(asked(), windows, schedule)
    answers = {name: plain.tokens(name) for name in plain.outputs}
    guessed = serve(asked(), windows, schedule, Knowing(answers, right))
    for name in plain.outputs:
        assert said(guessed, name) == said(plain, name), name
    num_drafted = sum(guessed.end(name).stats.drafted_tokens for name in guessed.outputs)
    assert num_drafted > 100
    if right == 0:
        assert accepted(guessed) == 0
    elif right == 1:
        assert accepted(guessed) > 500


def test_right_guesses_save_steps() -> None:
    alone = request("r", [1, 2, 3], 200)
    plain, quick = FakeBackend(), FakeBackend()
    answer = generate(plain, alone).tokens("r")
    client = generate(quick, alone, speculation=Knowing({"r": answer}, 1.0))
    assert client.tokens("r") == answer
    assert quick.num_steps < plain.num_steps / 4
    stats = client.end("r").stats
    assert stats.generated_tokens == 200
    assert stats.accepted_tokens == stats.drafted_tokens == 200 - quick.num_steps


def test_guesses_cause_no_preemption() -> None:
    """The later one ends within its first block, its guesses do not; the earlier needs the rest."""
    short = request("short", [7] * 20, 200)
    long = request("long", list(range(60)), 30, speculate=False)
    answer = generate(FakeBackend(), short).tokens("short")
    short = replace(short, stop_ids=frozenset({answer[10]}))
    requests = [long, short]
    answers = {r.request_id: generate(FakeBackend(), r).tokens(r.request_id) for r in requests}
    assert 8 < len(answers["short"]) <= 11
    backend, client = FakeBackend(blocks=4), Client()
    speculation = Knowing(answers, 0.0)
    with running(backend, speculation=speculation, num_ctx=128) as engine:
        for r in requests:
            engine.submit(r, client)
        client.wait_end(*answers)
        assert engine.load().num_preemptions == 0
    for name, answer in answers.items():
        assert client.tokens(name) == answer
    assert client.end("short").stats.drafted_tokens > 10


def test_the_cache_holds_nothing_that_was_only_guessed() -> None:
    """The next turn finds what was said, and computes the same as after an answer without guesses."""
    turns = {}
    for right in (None, 0.0, 0.5, 1.0):
        client = Client()
        answer = generate(FakeBackend(), request("a", [1, 2, 3], 70)).tokens("a")
        speculation = None if right is None else Knowing({"a": answer, "b": []}, right)
        with running(FakeBackend(), speculation=speculation) as engine:
            engine.submit(request("a", [1, 2, 3], 70), client)
            client.wait_end("a")
            engine.submit(request("b", [1, 2, 3, *answer, 9, 9], 30, speculate=False), client)
            client.wait_end("b")
        turns[right] = client.end("b").stats.cached_tokens, client.tokens("b")
    assert len({str(turn) for turn in turns.values()}) == 1
    assert turns[None][0] == 72


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_answers_survive_cancellations_and_preemptions(windows) -> None:
    """Defends sameness and the pool's invariants: 60 requests, a third of them cancelled."""
    rng = random.Random(9)
    doomed = {f"r{i}": rng.randint(0, 12) for i in range(60) if rng.random() < 0.33}
    plain = serve(many(60, 5, 3), windows, {"blocks": 64})
    client = Client()
    backend = FakeBackend(windows, blocks=9, spec=FakeSpec(vocab_size=5))
    options = {"eog_ids": frozenset({EOG}), "max_running": 8, "num_ctx": 200}
    with running(backend, speculation=Eager(), **options) as engine:
        for r in many(60, 5, 3):
            engine.submit(r, client)
        for name, count in doomed.items():
            client.wait(lambda c, n=name, k=count: len(c.tokens(n)) >= k or c.reason(n))
            engine.cancel(name)
        client.wait_end(*(f"r{i}" for i in range(60)))
        assert engine.load().num_preemptions > 0
        assert engine.load().kv_usage == 0
    for name in plain.outputs:
        if client.reason(name) == "cancelled":
            assert name in doomed
            count = len(client.tokens(name))
            assert said(client, name)[:count] == said(plain, name)[:count]
        else:
            assert said(client, name) == said(plain, name), name
    assert accepted(client) > 20


def test_a_request_can_refuse_guesses_and_observers_have_none() -> None:
    asked = request("guessed", [1, 2] * 5, 40, params={"ignore_eog": True}, exact=True)
    seen = []
    requests = [
        asked,
        replace(asked, request_id="plain", speculate=False),
        replace(asked, request_id="seen", observer=lambda place, rows: seen.append(place)),
    ]
    client = serve(requests, (None,), {}, Eager())
    drafted = {name: client.end(name).stats.drafted_tokens for name in client.outputs}
    assert drafted["plain"] == drafted["seen"] == 0 < drafted["guessed"]
    assert client.tokens("plain") == client.tokens("guessed") == client.tokens("seen")


def test_guesses_stay_within_the_backends_bounds() -> None:
    """The toy backend asserts them; here many sequences ask for more than there is."""
    for sizes in ({"max_tokens": 20, "max_rows": 17}, {"max_tokens": 16, "max_rows": 64}):
        requests = [request(f"r{i}", [i % 5] * 3, 40) for i in range(16)]
        answers = {r.request_id: serve([r], (None,), {}).tokens(r.request_id) for r in requests}
        client = serve(requests, (None,), sizes, Knowing(answers, 1.0))
        for name, answer in answers.items():
            assert client.tokens(name) == answer
