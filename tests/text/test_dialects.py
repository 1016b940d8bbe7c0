"""Thinking and tool calls of every dialect, whole, at every split point, and a character a time."""

import random

import pytest
from dialect_cases import ARGS, CASES, HERMES, TOOLS, WEATHER

from localllm.text.calls import ToolCall
from localllm.text.dialects import CALLS, Dialect, capabilities, dialect_of
from localllm.text.parsing import Parsed


def parse(dialect: Dialect, pieces: list[str], prompt_end: str = "", **options) -> Parsed:
    parser = dialect.parser(**{"tools": TOOLS, **options}, prompt_end=prompt_end)
    whole = Parsed()
    for parsed in [*map(parser.push, pieces), parser.finish()]:
        whole.content += parsed.content
        whole.thinking += parsed.thinking
        whole.tool_calls += parsed.tool_calls
    return whole


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_an_answer_is_read_the_same_at_every_split_point(case) -> None:
    _, template, prompt_end, answer, content, thinking, calls = case
    dialect = dialect_of(template)
    expected = Parsed(content, thinking, calls)
    assert parse(dialect, [answer], prompt_end) == expected
    assert parse(dialect, list(answer), prompt_end) == expected
    for cut in range(1, len(answer)):
        assert parse(dialect, [answer[:cut], answer[cut:]], prompt_end) == expected, cut


def test_calls_come_as_soon_as_they_are_whole() -> None:
    parser = dialect_of("<tool_call>").parser(tools=TOOLS)
    assert parser.push(HERMES[:-13]).tool_calls == [WEATHER]
    assert parser.push(HERMES[-13:] + " Ok").content == "Ok"


def test_content_is_held_back_no_longer_than_a_mark_may_begin() -> None:
    parser = dialect_of("<tool_call>").parser(tools=TOOLS)
    assert parser.push("a <tool").content == "a"
    assert parser.push("s> b").content == " <tools> b"


def test_without_tools_calls_stay_text() -> None:
    parsed = parse(dialect_of("<tool_call><think>"), [f"<think>Hm.</think>{HERMES}"], tools=None)
    assert parsed == Parsed(HERMES, "Hm.", [])


def test_thinking_that_nobody_wanted_is_left_out() -> None:
    dialect = dialect_of("<think>")
    assert parse(dialect, ["Hm.</think>\nYes."], "<think>", think=False) == Parsed("Yes.")


def test_a_parser_sees_its_marks_only() -> None:
    dialect = dialect_of("<|START_THINKING|><|START_ACTION|>")
    assert "<|START_ACTION|>" in dialect.parser(tools=TOOLS).marks
    assert "<|START_ACTION|>" not in dialect.parser().marks
    assert "<|START_RESPONSE|>" in dialect.parser().marks


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("string", "2", "2"),
        ("integer", " 2 ", 2),
        ("number", "2.5", 2.5),
        ("boolean", "True", True),
        ("array", "[1]", [1]),
        ("object", '{"a": 1}', {"a": 1}),
        ("integer", "two", "two"),
        (["integer", "null"], "null", None),
        (None, "2", 2),
        (None, "Paris", "Paris"),
    ],
)
def test_texts_get_the_type_of_the_tools_schema(kind, text, value) -> None:
    schema = {} if kind is None else {"type": kind}
    function = {"name": "f", "parameters": {"properties": {"a": schema}}}
    answer = f"<tool_call><function=f><parameter=a>\n{text}\n</parameter></function></tool_call>"
    dialect = dialect_of("<tool_call><function=")
    calls = parse(dialect, [answer], tools=[{"type": "function", "function": function}]).tool_calls
    assert calls == [ToolCall("f", {"a": value})]


@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: calls.name)
def test_garbage_does_not_hurt_and_nothing_of_it_is_lost(calls) -> None:
    rng = random.Random(7)
    dialect = Dialect(None, calls)
    parts = [*calls.marks, *'{}[]":,(\\= \n', "call:f", "f", "name", "[" * 5000, "-" * 3000]
    for _ in range(60):
        answer = "".join(rng.choices(parts, k=rng.randrange(1, 30)))
        whole = parse(dialect, [answer])
        cuts = sorted(rng.randrange(len(answer) + 1) for _ in range(8))
        pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)])]
        assert parse(dialect, pieces) == whole
        if not whole.tool_calls:
            kept = answer
            for mark in calls.dropped:
                kept = kept.replace(mark, "")
            assert "".join(whole.content.split()) == "".join(kept.split())


@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: calls.name)
def test_long_garbage_is_read_in_one_pass(calls) -> None:
    """Quadratic readers would take minutes here."""
    parts = ("<arg_key>", "<parameter=", "<function=", '<invoke name="', '<parameter name="', "{[")
    for part in (*parts, calls.opens[0], calls.close or "x", "call:f{", "-", "(", '"\\'):
        answer = calls.opens[0] + part * (100_000 // len(part)) + calls.close
        pieces = [answer[i : i + 50] for i in range(0, len(answer), 50)]
        parse(Dialect(None, calls), pieces)


def test_a_long_call_that_comes_in_pieces_is_read_once() -> None:
    text = "x" * 200_000
    answer = f'<tool_call>{{"name": "other", "arguments": {{"a": "{text}"}}}}</tool_call>'
    pieces = [answer[i : i + 100] for i in range(0, len(answer), 100)]
    assert parse(dialect_of("<tool_call>"), pieces).tool_calls == [ToolCall("other", {"a": text})]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", set()),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", set()),
        ("{% if tools %}<tool_call>{% endif %}{% set enable_thinking = 1 %}<think>", {"tools", "thinking"}),
        ("{% if tools %}{{ tools }}{% endif %}", {"tools"}),
        ("{{ if .Tools }}x{{ end }}{{ range .Messages }}{{ .Content }}{{ end }}", {"tools"}),
        ("{{ .Prompt }} tools", set()),
        ("{{ if .Suffix }}{{ .Suffix }}{{ end }}{{ .Prompt }}", {"insert"}),
        ("{% if tools %}{% endif %}<|start|><|channel|><|message|>", {"tools", "thinking"}),
    ],
)  # fmt: skip
def test_a_template_tells_what_its_model_can_do(template, expected) -> None:
    assert capabilities(template) == expected


def test_calls_of_an_unknown_dialect_are_recognised_as_a_whole_answer_only() -> None:
    dialect = dialect_of("{% if tools %}{{ tools }}{% endif %}")
    call = f'{{"name": "get_weather", "arguments": {ARGS}}}'
    assert parse(dialect, [call]).tool_calls == [WEATHER]
    assert parse(dialect, ["Well: " + call]) == Parsed("Well: " + call)
    assert parse(dialect, [call.replace("get_", "set_")]).tool_calls == []
