"""Sameness under load: other requests, preemption, cancellation, the cache, guesses change no bit.

Defends section "Sameness" of docs/architecture.md: each finished answer and its log-probabilities
equal those of the same request alone on a fresh engine with the cache off, which guesses nothing.
"""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from levels import CACHE, LEVELS
from load_driver import Answer, Crowd, Task, alone, compare, eager, opened
from tiny_model import NUM_TOKENS, write_tiny_model

import kernels_cpu
from localllm.engine.sequence import Request
from localllm.gguf import GgufFile
from localllm.sampling import SamplingParams

SAMPLERS = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    {"temperature": 1.3, "top_k": 100, "min_p": 0.05},
    {"temperature": 0.8, "typical_p": 0.7},
    {"temperature": 0.9, "mirostat": 2},
    # Answers that repeat themselves, which is what guesses are made from.
    {"temperature": 0.3, "top_k": 2, "logit_bias": {5: 30.0, 6: 29.0}},
)
PENALTIES = (
    {},
    {"repeat_penalty": 1.3, "repeat_last_n": 32},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repeat_last_n": -1},
)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    kernels_cpu.configure(CACHE, LEVELS[0])


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("model") / f"{request.param}.gguf"
    with GgufFile.open(write_tiny_model(path, request.param)) as file:
        yield file


class Requests:
    """Draws requests: mixed lengths, samplers, penalties, seeds; some share a long prefix."""

    def __init__(self, seed: int, vocab_size: int, longest: int) -> None:
        self.rng = random.Random(seed)
        self.vocab_size = vocab_size
        self.longest = longest
        self.prefixes = [self.tokens(longest // 2) for _ in range(3)]

    def tokens(self, count: int) -> list[int]:
        return self.rng.choices(range(self.vocab_size), k=count)

    def prompt(self) -> list[int]:
        count = self.rng.randint(1, self.longest // 2)
        shared = self.rng.choice((*self.prefixes, [], []))
        return shared[: self.rng.randint(0, len(shared))] + self.tokens(count)

    def request(self, name: str, tokens: list[int], **fields) -> Request:
        num_predict = self.rng.randint(1, 40)
        params = SamplingParams(
            **self.rng.choice(SAMPLERS),
            **self.rng.choice(PENALTIES),
            seed=self.rng.randrange(1 << 30),
            logprobs=self.rng.choice((0, 1, 5)),
            num_predict=num_predict,
            ignore_eog=self.rng.random() < 0.5,
        )
        speculate = self.rng.random() < 0.6
        return Request(name, tokens, params, speculate=speculate, **fields)

    def single(self, name: str) -> Request:
        tokens = self.prompt()
        shifts = self.rng.random() < 0.1
        # A context that is full after a few tokens, so that its older half is dropped.
        fields = {"num_ctx": len(tokens) + 5, "shift": True, "num_keep": 2} if shifts else {}
        return self.request(name, tokens, **fields)

    def task(self, request: Request) -> Task:
        leaves = self.rng.random() < 0.15
        return Task(request, self.rng.randint(0, 12) if leaves else None)


def check_single(file: GgufFile, count: int, blocks: int, *, vocab_size: int, longest: int) -> None:
    """`count` single requests at once in a small pool, each against itself alone."""
    requests = Requests(count, vocab_size, longest)
    tasks = [requests.task(requests.single(f"r{i}")) for i in range(count)]
    # Any model ends some answers early with so many of them.
    eog_ids = frozenset(range(3, vocab_size, 40))
    with opened(file, blocks, eog_ids=eog_ids, speculation=eager()) as engine:
        answers = Crowd(engine).run(tasks)
        num_preemptions = engine.load().num_preemptions
    check_events(answers.values(), num_preemptions)
    assert any(a.cached_tokens for a in answers.values())
    reasons = {a.reason for a in answers.values()}
    assert reasons == {"stop", "length", "cancelled"}
    for task in tasks:
        expected = alone(file, task.request, eog_ids=eog_ids)
        compare(answers[task.request.request_id], expected)


def check_turns(
    file: GgufFile, count: int, turns: int, blocks: int, *, vocab_size: int, longest: int
) -> None:
    """Conversations at once: each turn's prompt is all that was said, `exact` all the way."""
    requests = Requests(count, vocab_size, longest)
    asked: dict[str, Request] = {}
    with opened(file, blocks, speculation=eager()) as engine:
        crowd = Crowd(engine)

        def conversation(number: int) -> Iterator[Task]:
            said: list[int] = []
            for turn in range(turns):
                name = f"c{number} t{turn}"
                said = said + requests.prompt()[: longest // 2]
                asked[name] = requests.request(name, list(said), exact=True)
                yield Task(asked[name])
                said = said + [t for t in crowd.answers[name].tokens if t is not None]

        answers = crowd.run_chains(conversation(i) for i in range(count))
        num_preemptions = engine.load().num_preemptions
    check_events(answers.values(), num_preemptions)
    assert any(a.cached_tokens for name, a in answers.items() if not name.endswith("t0"))
    for name, request in asked.items():
        compare(answers[name], alone(file, request))


def check_events(answers: Iterable[Answer], num_preemptions: int) -> None:
    """What sameness is claimed against did happen."""
    drafted = sum(a.drafted_tokens for a in answers)
    accepted = sum(a.accepted_tokens for a in answers)
    assert num_preemptions > 0
    assert 0 < accepted < drafted


def test_single_requests(tiny: GgufFile) -> None:
    check_single(tiny, 40, 24, vocab_size=NUM_TOKENS, longest=160)


def test_conversations_with_exact(tiny: GgufFile) -> None:
    check_turns(tiny, 18, 3, 30, vocab_size=NUM_TOKENS, longest=100)


@pytest.mark.slow
def test_200_single_requests(tiny: GgufFile) -> None:
    check_single(tiny, 200, 24, vocab_size=NUM_TOKENS, longest=160)


@pytest.mark.slow
def test_200_turns_with_exact(tiny: GgufFile) -> None:
    check_turns(tiny, 50, 4, 30, vocab_size=NUM_TOKENS, longest=100)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path):
    with GgufFile.open(smollm2_path) as file:
        yield file


@pytest.mark.real
@pytest.mark.slow
def test_200_single_requests_of_a_real_model(smollm2: GgufFile) -> None:
    check_single(smollm2, 200, 24, vocab_size=49_000, longest=160)


@pytest.mark.real
@pytest.mark.slow
def test_200_turns_with_exact_of_a_real_model(smollm2: GgufFile) -> None:
    check_turns(smollm2, 50, 4, 30, vocab_size=49_000, longest=100)


def test_answers_are_compared_to_the_last_bit() -> None:
    """The comparison itself: one bit, one token, one more token."""
    answer = Answer([(1, -0.5, ()), (2, -0.25, ())], "length")
    compare(answer, Answer(list(answer.entries), "length"))
    compare(Answer(answer.entries[:1], "cancelled"), answer)
    for other in ([(1, -0.5, ()), (2, -0.25000000000000006, ())], answer.entries[:1]):
        with pytest.raises(AssertionError):
            compare(Answer(other, "length"), answer)
