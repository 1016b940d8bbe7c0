"""Prompts within the context: what is dropped, what is refused, and that control tokens stay text."""

import pytest
from byte_model import write_tiny_model

from localllm.config import Settings
from localllm.errors import BadRequest
from localllm.prompts import TextRequest, bounded, split_start, without_oldest
from localllm.runtime import LoadedModel
from localllm.sampling import SamplingParams

SYSTEM = {"role": "system", "content": "You are Zork."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def text_of(model, tokens) -> str:
    return model.tokenizer.decode(tokens, special=True).decode()


def test_a_raw_prompt_may_hold_control_tokens_and_messages_may_not(model) -> None:
    mark = model.tokenizer.id_of("<|im_end|>")
    raw = model.prepare(TextRequest("r", "a<|im_end|>"))
    chat = model.prepare(TextRequest("r", messages=[user("a<|im_end|>")]))
    assert raw.tokens.count(mark) == 1
    assert chat.tokens.count(mark) == 1
    assert text_of(model, chat.tokens).count("<|im_end|>") == 2


def test_earlier_tokens_stand_before_the_prompt(model) -> None:
    assert model.prepare(TextRequest("r", "b", tokens=[5, 6])).tokens[:2] == [5, 6]


@pytest.mark.parametrize("token", [-1, 2**31, 2**64, 10**30])
def test_earlier_tokens_that_do_not_exist_are_refused(model, token) -> None:
    for given in ({"prompt": "b"}, {"messages": [user("b")]}):
        with pytest.raises(BadRequest, match="the prompt has token ids outside 0 to "):
            model.prepare(TextRequest("r", **given, tokens=[5, token]))


def test_old_messages_go_first_and_the_system_message_and_the_last_stay(model) -> None:
    turns = [user(f"message number {i}") for i in range(20)]
    prompt = model.prepare(TextRequest("r", messages=[SYSTEM, *turns], num_ctx=200))
    text = text_of(model, prompt.tokens)
    assert len(prompt.tokens) < 200
    assert "Zork" in text
    assert "number 19" in text
    assert "number 0<" not in text
    assert 0 < prompt.dropped_messages < 20
    assert f"number {prompt.dropped_messages}<" in text
    assert f"number {prompt.dropped_messages - 1}<" not in text


def test_a_hundred_thousand_messages_are_not_rendered(model, monkeypatch) -> None:
    rendered = []
    encode = type(model.prompts)._encode

    def counted(self, request, messages):
        rendered.append(len(messages))
        return encode(self, request, messages)

    monkeypatch.setattr(type(model.prompts), "_encode", counted)
    prompt = model.prepare(TextRequest("r", messages=[user("a message")] * 100_000))
    assert 99_000 < prompt.dropped_messages < 100_000
    assert sum(rendered) < 1000


@pytest.mark.parametrize("count", [*range(1, 12), 20])
def test_as_many_messages_stay_as_fit(model, count) -> None:
    turns = [user(f"message number {i} " + "x" * i) for i in range(count)]
    prompt = model.prepare(TextRequest("r", messages=turns, num_ctx=200))
    if prompt.dropped_messages:
        one_more = turns[prompt.dropped_messages - 1 :]
        with pytest.raises(BadRequest):
            model.prepare(TextRequest("r", messages=one_more, num_ctx=200, truncate=False))


def test_what_fits_is_not_touched(model) -> None:
    assert model.prepare(TextRequest("r", messages=[SYSTEM, user("hi")])).dropped_messages == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x" * 500},
        {"messages": [SYSTEM, user("x" * 500)]},
        {"messages": [user("x" * 100)] * 5, "truncate": False},
    ],
)
def test_what_cannot_fit_is_refused_with_both_numbers(model, fields) -> None:
    with pytest.raises(BadRequest, match=r"it has \d{3} tokens and the context holds 256"):
        model.prepare(TextRequest("r", **fields))


def test_no_messages_are_refused(model) -> None:
    with pytest.raises(BadRequest, match="messages"):
        model.prepare(TextRequest("r", messages=[]))


def test_an_empty_prompt_is_refused(model) -> None:
    with pytest.raises(BadRequest, match="empty"):
        model.generate_text(TextRequest("r", ""))


def test_a_tools_result_goes_with_its_call() -> None:
    messages = [user("a"), {"role": "assistant"}, {"role": "tool"}, {"role": "tool"}, user("b")]
    assert without_oldest(messages, 2) == [user("b")]
    assert without_oldest([user("a"), {"role": "tool"}], 1) == [{"role": "tool"}]


def test_a_last_assistant_message_is_the_start_of_the_answer(model) -> None:
    start = {"role": "assistant", "content": "The an"}
    assert split_start([user("q"), start]) == ([user("q")], "The an")
    assert split_start([start]) == ([start], "")
    text = text_of(model, model.prepare(TextRequest("r", messages=[user("q"), start])).tokens)
    assert text.endswith("<|im_start|>assistant\nThe an")


@pytest.mark.parametrize(
    ("asked", "shift", "expected"),
    [
        (-1, False, (-1, False)),
        (-1, True, (1000, True)),
        (-2, True, (-1, False)),
        (10**9, True, (1000, True)),
        (5, True, (5, True)),
        (0, False, (0, False)),
    ],
)
def test_every_answer_has_a_bound(asked, shift, expected) -> None:
    assert bounded(SamplingParams(num_predict=asked), 100, shift=shift) == expected


@pytest.mark.parametrize(("adds", "prompt", "count"), [
    (True, "a", 1), (True, "<|im_start|>a", 1), (False, "a", 0), (False, "<|im_start|>a", 1),
])  # fmt: skip
def test_a_raw_prompt_has_the_one_bos_that_the_model_wants(tmp_path, adds, prompt, count) -> None:
    path = tmp_path / "own.gguf"
    write_tiny_model(path, adds_ends=adds)
    settings = Settings(cache_dir=tmp_path / "cache")
    with LoadedModel.open(path, settings, backend="reference") as model:
        tokens = model.prepare(TextRequest("r", prompt)).tokens
        assert tokens.count(model.tokenizer.bos_id) == count


@pytest.mark.parametrize("kind", ["prompt", "messages"])
def test_what_cannot_fit_is_refused_before_it_is_tokenised(model, monkeypatch, kind) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(model.tokenizer, "_encode", encode)
    longest = max(map(len, model.tokenizer.vocabulary.texts))
    text = "ab1!\n" * (longest * model.context_length)
    given = {"prompt": text} if kind == "prompt" else {"messages": [user("a"), user(text)]}
    with pytest.raises(BadRequest, match=r"it has at least \d+ tokens and the context holds"):
        model.prepare(TextRequest("r", **given))


def test_no_text_has_fewer_tokens_than_is_told_at_once(model) -> None:
    for text in ("", "a", "<|im_end|>" * 50, " " * 999, "äöü" * 333, "one two " * 99):
        fewest = model.tokenizer.fewest_tokens(text)
        assert fewest <= len(model.tokenizer.encode(text, parse_special=True))
