"""Tokens to text: stops, ends, log-probabilities, cancellation, one call a step for each sink."""

import itertools
import threading

import pytest

from localllm.answers import TextDelta
from localllm.errors import BadRequest, LocalLLMError
from localllm.prompts import TextRequest
from localllm.sampling import SamplingParams

PATIENCE = 60
names = (f"test {i}" for i in itertools.count())


def request(prompt: str = "hello", num_predict: int = 24, **fields) -> TextRequest:
    params = SamplingParams(
        **{"temperature": 0, "num_predict": num_predict, **fields.pop("params", {})}
    )
    return TextRequest(next(names), prompt, params=params, **fields)


class Collector:
    """A sink for any number of requests."""

    def __init__(self) -> None:
        self.calls: list[list[TextDelta]] = []
        self.changed = threading.Condition()

    def __call__(self, deltas: list[TextDelta]) -> None:
        with self.changed:
            self.calls.append(deltas)
            self.changed.notify_all()

    def of(self, name: str) -> list[TextDelta]:
        return [d for call in self.calls for d in call if d.request_id == name]

    def wait_end(self, *wanted: str) -> None:
        def ended() -> bool:
            return all(any(d.is_last for d in self.of(n)) for n in wanted)

        with self.changed:
            assert self.changed.wait_for(ended, PATIENCE)

    def text(self, name: str) -> str:
        return "".join(d.text for d in self.of(name))


def test_deltas_join_to_the_whole_answer(model) -> None:
    pieces: list[TextDelta] = []
    whole = model.generate_text(request(), pieces.append)
    assert "".join(d.text for d in pieces) == whole.text
    assert len(whole.tokens) == 24
    assert whole.done_reason == "length"
    assert whole.stats.generated_tokens == 24
    assert whole.stats.prompt_tokens == 5
    expected = model.tokenizer.decode(whole.tokens).decode("utf-8", "ignore")
    # An unfinished character at the end is dropped; unprintable bytes inside become U+FFFD.
    assert whole.text.replace("\ufffd", "") == expected


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_text_from_a_stop_string_on_is_never_handed_out(model, length) -> None:
    free = model.generate_text(request(params={"seed": 3, "temperature": 1.0})).text
    stop = free[6 : 6 + length]
    r = request(params={"seed": 3, "temperature": 1.0}, stop=[stop, "never there"])
    pieces: list[TextDelta] = []
    stopped = model.generate_text(r, pieces.append)
    assert stopped.text == free[: free.index(stop)]
    assert stopped.done_reason == "stop"
    assert stopped.stats.generated_tokens == len(stopped.tokens) < 24
    assert sum(d.is_last for d in pieces) == 1


def test_what_was_held_for_a_stop_string_is_flushed_at_the_end(model) -> None:
    free = model.generate_text(request()).text
    assert model.generate_text(request(stop=[free[-1] + "zzz"])).text == free


def test_an_end_token_gives_no_text(model) -> None:
    end = model.tokenizer.id_of("<|im_end|>")
    r = request(params={"logit_bias": {end: 1000.0}})
    whole = model.generate_text(r)
    assert (whole.text, whole.tokens, whole.done_reason) == ("", [end], "stop")


def test_logprobs_come_with_the_bytes_of_their_tokens(model) -> None:
    whole = model.generate_text(request(params={"logprobs": 2}))
    assert len(whole.logprobs) == len(whole.tokens)
    for entry, token in zip(whole.logprobs, whole.tokens):
        assert entry.token == token
        assert entry.text == model.tokenizer.token_bytes(token)
        assert entry.logprob <= 0
        assert entry.alternatives[0].token == token
        assert entry.alternatives[0].logprob == entry.logprob
        assert entry.alternatives[1].logprob <= entry.logprob


def test_a_sink_is_called_once_a_step_for_all_its_requests(model) -> None:
    sink = Collector()
    requests = [request(f"prompt {i}") for i in range(4)]
    for r in requests:
        model.start(r, sink)
    sink.wait_end(*(r.request_id for r in requests))
    assert max(len(call) for call in sink.calls) > 1
    for call in sink.calls:
        assert len({d.request_id for d in call}) == len(call)
    for r in requests:
        alone = model.generate_text(TextRequest(next(names), r.prompt, params=r.params))
        assert sink.text(r.request_id) == alone.text


def test_cancelling_ends_with_that_reason(model) -> None:
    sink = Collector()
    r = request(num_predict=-1, shift=True)
    model.start(r, sink)
    model.cancel(r.request_id)
    sink.wait_end(r.request_id)
    assert sink.of(r.request_id)[-1].done_reason == "cancelled"


def test_leaving_a_stream_cancels_it(model) -> None:
    stream = model.stream(request(num_predict=-1, shift=True))
    next(stream)
    stream.close()
    probe = request(num_predict=1)
    model.generate_text(probe)
    assert model.engine.load().num_running <= 1


def test_a_request_id_in_use_is_refused(model) -> None:
    sink = Collector()
    r = request(num_predict=-1, shift=True)
    model.start(r, sink)
    with pytest.raises(BadRequest, match="in use"):
        model.start(r, sink)
    model.cancel(r.request_id)
    sink.wait_end(r.request_id)


def test_a_failing_sink_does_not_hurt_others(model) -> None:
    def broken(deltas: list[TextDelta]) -> None:
        raise RuntimeError("gone")

    model.start(request(num_predict=-1, shift=True), broken)
    assert model.generate_text(request()).done_reason == "length"


def test_a_token_without_a_spelling_costs_its_own_request_only(model, monkeypatch) -> None:
    spell = model.tokenizer.token_bytes
    poison = model.generate_text(request("poison")).tokens[5]

    def broken(token: int) -> bytes:
        if token == poison:
            raise IndexError(token)
        return spell(token)

    monkeypatch.setattr(model.tokenizer, "token_bytes", broken)
    with pytest.raises(LocalLLMError, match="no text"):
        model.generate_text(request("poison"))
    monkeypatch.undo()
    assert model.generate_text(request("poison")).done_reason == "length"


def test_endless_answers_end(model) -> None:
    """With a shift after ten contexts, without at a full context, -2 likewise."""
    filling = model.generate_text(request(num_predict=-1, num_ctx=32))
    assert (len(filling.tokens), filling.done_reason) == (32 - 5, "length")
    minus_two = model.generate_text(request(num_predict=-2, num_ctx=32, shift=True))
    assert len(minus_two.tokens) == 32 - 5
    shifting = model.generate_text(request(num_predict=-1, num_ctx=16, shift=True))
    assert len(shifting.tokens) == 160 or shifting.done_reason == "stop"
