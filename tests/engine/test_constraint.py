"""Requests with a constraint: every token is allowed by it, and others do not notice."""

import numpy as np
from driver import Client, running
from fake_backend import FakeBackend

from localllm.engine.sequence import Request
from localllm.errors import LocalLLMError
from localllm.sampling import SamplingParams

EOG = 7


class Only:
    """Allows the given tokens one after the other, then the end, or nothing at all."""

    def __init__(self, tokens: list[int], *, ends: bool = True, breaks: bool = False) -> None:
        self.tokens = tokens
        self.ends = ends
        self.breaks = breaks
        self.accepted: list[int] = []

    @property
    def is_finished(self) -> bool:
        return self.ends and len(self.accepted) == len(self.tokens)

    def allowed(self) -> np.ndarray:
        mask = np.zeros(10, np.uint32)
        place = len(self.accepted)
        token = self.tokens[place] if place < len(self.tokens) else EOG
        mask[token // 32] = 1 << (token % 32)
        return mask

    def accept(self, token: int) -> None:
        if self.breaks:
            raise LocalLLMError("too complex")
        self.accepted.append(token)


def request(name: str, constraint=None, **params) -> Request:
    params = SamplingParams(**{"temperature": 1.0, "seed": 3, "num_predict": 20, **params})
    return Request(name, [1, 2, 3], params, constraint=constraint)


def run(*requests: Request) -> Client:
    client = Client()
    with running(FakeBackend(), eog_ids=frozenset({EOG})) as engine:
        for each in requests:
            engine.submit(each, client)
        client.wait_end(*(each.request_id for each in requests))
    return client


def test_an_answer_is_what_its_constraint_allows_and_ends_with_it() -> None:
    wanted = [250, 9, 9, 131]
    client = run(request("a", Only(wanted)), request("b", logprobs=2), request("c", Only([5])))
    assert client.tokens("a") == wanted
    assert client.tokens("c") == [5]
    assert client.reason("a") == client.reason("c") == "stop"
    assert client.end("a").stats.generated_tokens == 4
    assert client.tokens("b") == run(request("b")).tokens("b")


def test_an_end_token_that_is_allowed_ends_the_answer() -> None:
    for ignore in (False, True):
        client = run(request("a", Only([4, 5], ends=False), ignore_eog=ignore))
        assert client.tokens("a") == [4, 5, EOG]
        assert client.reason("a") == "stop"


def test_greedy_and_sampled_answers_are_constrained_alike() -> None:
    for params in ({"temperature": 0}, {"top_k": 0}, {"mirostat": 2}, {"typical_p": 0.5}):
        assert run(request("a", Only([31, 32, 64]), **params)).tokens("a") == [31, 32, 64]


def test_a_length_limit_cuts_a_constrained_answer() -> None:
    client = run(request("a", Only([4, 5, 6]), num_predict=2))
    assert (client.tokens("a"), client.reason("a")) == ([4, 5], "length")


def test_logprobs_are_those_of_the_model_not_of_the_mask() -> None:
    client = run(request("a", Only([250]), logprobs=1))
    (output,) = [o for o in client.outputs["a"] if o.token is not None]
    assert output.logprob < 0
    assert output.top_logprobs[0][1] >= output.logprob


def test_a_constraint_that_breaks_costs_its_own_request_only() -> None:
    client = run(request("a", Only([4], breaks=True)), request("b"))
    assert client.reason("a") == "error"
    assert "too complex" in client.end("a").error
    assert client.reason("b") == "length"
