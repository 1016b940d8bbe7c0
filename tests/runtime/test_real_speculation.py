"""A real model edits a text and fills in a form: with guesses in fewer steps, and the same bits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from guessing import Free

from localllm.answers import TextDelta
from localllm.config import load_settings
from localllm.prompts import TextRequest
from localllm.runtime import LoadedModel
from localllm.sampling import SamplingParams

pytestmark = pytest.mark.real

TEXT = (
    "The old lighthouse stood at the end of the pier, and every evening Martin walked there with "
    "his dog. He had been the keeper for thirty years, and he knew every stone of the path. In "
    "winter the waves came over the wall and froze on the steps."
)
FORM = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string"}, "maxItems": 6}},
    "required": ["names"],
}


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Iterator[LoadedModel]:
    settings = replace(load_settings(), context_length=1024, speculate=True)
    with LoadedModel.open(smollm2_path, settings) as loaded:
        # Guesses wherever there are any: how much is guessed must not hang on this machine's times.
        loaded.engine.speculation.cost = Free()
        yield loaded


def ask(text: str, **fields) -> TextRequest:
    params = {"temperature": 0.0, "num_predict": 80, "logprobs": 2, **fields.pop("params", {})}
    messages = [{"role": "user", "content": text}]
    return TextRequest("r", messages=messages, params=SamplingParams(**params), **fields)


def bits(answer: TextDelta) -> tuple:
    return answer.text, answer.tokens, answer.logprobs, answer.done_reason


@pytest.mark.parametrize(
    "request_",
    [
        ask(f"Repeat the following text word for word.\n\n{TEXT}"),
        ask(f"Repeat this text: {TEXT}", params={"temperature": 0.7, "seed": 4}),
        ask(f"Repeat this text: {TEXT}", params={"repeat_penalty": 1.1, "repeat_last_n": 20}),
        ask(f"Repeat this text: {TEXT}", stop=["every evening"]),
        ask("Write down the names Anna, Anna, Anna, Bob, Bob as JSON.", format=FORM),
        ask("Say yes ten times.", params={"mirostat": 2, "temperature": 1.0, "seed": 2}),
    ],
    ids=["repeat", "sampled", "penalties", "stop", "form", "mirostat"],
)
def test_an_answer_is_the_same_bits_in_fewer_steps(
    model: LoadedModel, request_: TextRequest
) -> None:
    engine, num_steps = model.engine, []
    answers = []
    for speculate in (False, True):
        before = engine.num_steps
        answers.append(model.generate_text(replace(request_, speculate=speculate)))
        num_steps.append(engine.num_steps - before)
    plain, guessed = answers
    assert bits(guessed) == bits(plain)
    assert plain.stats.drafted_tokens == 0
    assert guessed.stats.drafted_tokens >= guessed.stats.accepted_tokens > 0
    assert num_steps[1] < num_steps[0]


def test_copying_takes_less_than_half_the_steps(model: LoadedModel) -> None:
    before = model.engine.num_steps
    answer = model.generate_text(ask(f"Repeat the following text word for word.\n\n{TEXT}"))
    assert len(answer.tokens) > 40
    assert model.engine.num_steps - before < len(answer.tokens) / 2
