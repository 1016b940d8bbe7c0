"""Sameness on a real model and the CPU backend: alone, among others, preempted, with a warm cache."""

from dataclasses import replace

import pytest

from localllm.answers import TextDelta
from localllm.config import load_settings
from localllm.prompts import TextRequest
from localllm.runtime import LoadedModel
from localllm.sampling import SamplingParams

pytestmark = pytest.mark.real

TOPICS = ("rivers", "bread", "the moon", "old maps", "glass", "sleep", "bridges", "salt")


def requests(turn: str) -> list[TextRequest]:
    """32 conversations that differ in prompt, length, seed and sampler; some share a prefix."""
    found = []
    for i in range(32):
        topic = TOPICS[i % len(TOPICS)]
        text = f"Tell me something about {topic}. " * (1 + i % 5) + f"Number {i % 16}."
        params = SamplingParams(
            temperature=0.0 if i % 4 == 0 else 1.0,
            seed=i,
            num_predict=16 + i % 7,
            logprobs=1,
            repeat_penalty=1.1 if i % 3 == 0 else 1.0,
        )
        message = {"role": "user", "content": text}
        found.append(TextRequest(f"{turn} {i}", messages=[message], params=params))
    return found


def answer(model: LoadedModel, asked: list[TextRequest]) -> list[TextDelta]:
    """All at once; each answer as one delta."""
    import queue

    deltas: queue.SimpleQueue[list[TextDelta]] = queue.SimpleQueue()
    sink = deltas.put
    for request in asked:
        model.start(request, sink)
    whole = {request.request_id: TextDelta(request.request_id) for request in asked}
    running = set(whole)
    while running:
        for delta in deltas.get():
            mine = whole[delta.request_id]
            mine.text += delta.text
            mine.logprobs += delta.logprobs
            if delta.is_last:
                mine.done_reason, mine.error = delta.done_reason, delta.error
                running.discard(delta.request_id)
    return list(whole.values())


def test_32_answers_are_bitwise_those_given_alone(smollm2_path) -> None:
    settings = replace(load_settings(), num_parallel=32, context_length=512)
    with LoadedModel.open(smollm2_path, settings) as model:
        together = answer(model, requests("together"))
        again = answer(model, requests("warm"))
        alone = [answer(model, [replace(r, cache_prompt=False)])[0] for r in requests("alone")[::3]]
    for i, one in enumerate(alone):
        for other in (together[3 * i], again[3 * i]):
            assert one.error is None
            assert other.text == one.text
            assert [x.logprob for x in other.logprobs] == [x.logprob for x in one.logprobs]


def test_preemption_changes_nothing(smollm2_path, monkeypatch) -> None:
    settings = replace(load_settings(), num_parallel=8, context_length=256)
    with LoadedModel.open(smollm2_path, settings) as model:
        roomy = answer(model, requests("roomy")[:12])
        assert model.engine.load().num_preemptions == 0
    monkeypatch.setattr("localllm.opening.POOL_POSITIONS", 256)
    with LoadedModel.open(smollm2_path, settings) as model:
        tight = answer(model, requests("tight")[:12])
        assert model.engine.load().num_preemptions > 0
    assert [x.text for x in tight] == [x.text for x in roomy]
    for a, b in zip(tight, roomy):
        assert [x.logprob for x in a.logprobs] == [x.logprob for x in b.logprobs]
