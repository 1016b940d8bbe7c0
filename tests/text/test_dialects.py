"""Thinking and tool calls of every dialect, whole, at every split point, and a character a time."""

import json
import random

import pytest

from localllm.text.calls import ToolCall
from localllm.text.dialects import CALLS, Dialect, capabilities, dialect_of
from localllm.text.parsing import Parsed

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
    for name in ("get_weather", "other")
]
WEATHER = ToolCall("get_weather", {"city": "Paris", "days": 2})
OTHER = ToolCall("other", {})
ARGS = '{"city": "Paris", "days": 2}'
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGS}}}\n</tool_call>'
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
PYTHON = "get_weather(city='Paris', days=2)"
CALL_LIST = f'[{{"name": "get_weather", "arguments": {ARGS}}}]'
COHERE = (
    "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>\n"
    f'[{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {ARGS}}}]<|END_ACTION|>'
)
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.get_weather <|constrain|>json<|message|>{ARGS}"
)
HARMONY_START = "<|end|><|start|>assistant"

# name, texts of its template, end of the prompt, answer, content, thinking, calls
CASES = [
    ("hermes", "<tool_call>", "", f"Let me see.\n\n{HERMES}", "Let me see.", "", [WEATHER]),
    ("hermes twice", "<tool_call>", "", f"{HERMES}\n{HERMES}\n", "", "", [WEATHER, WEATHER]),
    ("hermes and text", "<tool_call>", "", f"{HERMES}\nDone.", "Done.", "", [WEATHER]),
    ("hermes unclosed", "<tool_call>", "", HERMES[:-13], "", "", [WEATHER]),
    (
        "hermes one mark for two",
        "<tool_call>",
        "",
        f'<tool_call>{{"name": "get_weather", "arguments": {ARGS}}}\n{{"name": "other"}}</tool_call>',
        "",
        "",
        [WEATHER, OTHER],
    ),
    (
        "a closing mark in a text",
        "<tool_call>",
        "",
        '<tool_call>{"name": "other", "arguments": {"a": "</tool_call> \\" }"}}</tool_call>',
        "",
        "",
        [ToolCall("other", {"a": '</tool_call> " }'})],
    ),
    (
        "qwen3",
        "<tool_call><think>",
        "",
        f"<think>\nWell,  well.\n</think>\n\nSee:\n{HERMES}",
        "See:",
        "Well,  well.",
        [WEATHER],
    ),
    (
        "a call ends the thinking",
        "<tool_call><think>",
        "",
        f"<think>\nHm.\n{HERMES}",
        "",
        "Hm.",
        [WEATHER],
    ),
    ("opened by the prompt", "<think>", "<think>\n", "Hm.\n</think>\n\nYes.", "Yes.", "Hm.", []),
    ("opened twice", "<think>", "<think>\n", "<think>\nHm.</think>Yes.", "Yes.", "Hm.", []),
    (
        "closed by the prompt",
        "<think>",
        "<think>\n\n</think>\n\n",
        "Yes </think>",
        "Yes </think>",
        "",
        [],
    ),
    ("never closed", "<think>", "", "<think>\nHm. And so on", "", "Hm. And so on", []),
    ("tags in the middle", "<think>", "", "Say <think>x</think>!", "Say <think>x</think>!", "", []),
    ("almost a tag", "<think>", "", " <thin king", " <thin king", "", []),
    ("only blanks", "<think>", "", " \n ", " \n ", "", []),
    ("blanks inside", "<tool_call>", "", "a  b\n\n\nc \n", "a  b\n\n\nc \n", "", []),
    (
        "broken call",
        "<tool_call>",
        "",
        "<tool_call>{x}</tool_call>y",
        "<tool_call>{x}</tool_call>y",
        "",
        [],
    ),
    ("cut call", "<tool_call>", "", HERMES[:40], HERMES[:40], "", []),
    (
        "string arguments",
        "<tool_call>",
        "",
        f"<tool_call>{json.dumps({'name': 'get_weather', 'arguments': ARGS})}</tool_call>",
        "",
        "",
        [WEATHER],
    ),
    (
        "qwen3-coder",
        "<tool_call><function=",
        "",
        f"Ok.\n{CODER}\n{CODER}",
        "Ok.",
        "",
        [WEATHER, WEATHER],
    ),
    ("glm", "<tool_call><arg_key><think>", "", f"<think>Hm.</think>\n{GLM}", "", "Hm.", [WEATHER]),
    ("mistral", "[TOOL_CALLS]", "", f"[TOOL_CALLS] {CALL_LIST}", "", "", [WEATHER]),
    (
        "magistral",
        "[TOOL_CALLS][ARGS][THINK]",
        "",
        f"[THINK]Hm.[/THINK]Ok.[TOOL_CALLS]get_weather[ARGS]{ARGS}[TOOL_CALLS]other[CALL_ID]x1[ARGS]{{}}",
        "Ok.",
        "Hm.",
        [WEATHER, OTHER],
    ),
    (
        "command-r",
        "<|START_OF_TURN_TOKEN|> Action:",
        "",
        f'Action: ```json\n[{{"tool_name": "get_weather", "parameters": {ARGS}}}]\n```',
        "",
        "",
        [WEATHER],
    ),
    ("cohere call", "<|START_THINKING|><|START_ACTION|>", "", COHERE, "", "Hm.", [WEATHER]),
    (
        "cohere answer",
        "<|START_THINKING|><|START_ACTION|>",
        "",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "Yes.",
        "Hm.",
        [],
    ),
    (
        "deepseek-r1",
        "<｜tool▁call▁begin｜><think>",
        "<think>\n",
        "Hm.</think>" + DEEPSEEK.format(f"function<｜tool▁sep｜>get_weather\n```json\n{ARGS}\n```"),
        "",
        "Hm.",
        [WEATHER],
    ),
    (
        "deepseek-v3.1",
        "<｜tool▁call▁begin｜>",
        "",
        "Ok." + DEEPSEEK.format(f"get_weather<｜tool▁sep｜>{ARGS}"),
        "Ok.",
        "",
        [WEATHER],
    ),
    (
        "lfm2",
        "<|tool_call_start|>",
        "",
        f"<|tool_call_start|>[{PYTHON}, other()]<|tool_call_end|>Ok",
        "Ok",
        "",
        [WEATHER, OTHER],
    ),
    (
        "olmo3",
        "<function_calls>",
        "",
        f"<function_calls>\n{PYTHON}\nother()\n</function_calls>",
        "",
        "",
        [WEATHER, OTHER],
    ),
    ("granite", "<|tool_call|>", "", f"<|tool_call|>{CALL_LIST}", "", "", [WEATHER]),
    (
        "phi-4-mini",
        "<|tool_call|>",
        "",
        f"<|tool_call|>{CALL_LIST}<|/tool_call|>",
        "",
        "",
        [WEATHER],
    ),
    (
        "llama3",
        '<|start_header_id|> "parameters":',
        "",
        f'\n{{"name": "get_weather", "parameters": {ARGS}}}',
        "",
        "",
        [WEATHER],
    ),
    (
        "llama3 tag",
        '<|start_header_id|> "parameters":',
        "",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGS}}}',
        "",
        "",
        [WEATHER],
    ),
    (
        "llama3 json",
        '<|start_header_id|> "parameters":',
        "",
        '{"name": "nobody", "parameters": {}} x',
        '{"name": "nobody", "parameters": {}} x',
        "",
        [],
    ),
    (
        "llama3 text",
        '<|start_header_id|> "parameters":',
        "",
        'So {"name": "other"}',
        'So {"name": "other"}',
        "",
        [],
    ),
    ("llama4", "<|header_start|>", "", f"[{PYTHON}]", "", "", [WEATHER]),
    ("llama4 list", "<|header_start|>", "", "[1, 2]", "[1, 2]", "", []),
    (
        "kimi",
        "<|tool_call_begin|>",
        "",
        "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{ARGS}<|tool_call_end|><|tool_calls_section_end|>",
        "Ok.",
        "",
        [WEATHER],
    ),
    ("nemotron", "<TOOLCALL>", "", f"<TOOLCALL>{CALL_LIST}</TOOLCALL>", "", "", [WEATHER]),
    ("apriel", "<tool_calls>", "", f"<tool_calls>{CALL_LIST}</tool_calls>", "", "", [WEATHER]),
    (
        "minimax",
        "<minimax:tool_call>",
        "",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
        "",
        "",
        [WEATHER],
    ),
    (
        "glimmer",
        "<atem:function_calls>",
        "",
        '<atem:function_calls><atem:invoke name="other"></atem:invoke></atem:function_calls>',
        "",
        "",
        [OTHER],
    ),
    (
        "seed",
        "<seed:think><seed:tool_call>",
        "",
        "<seed:think>Hm.</seed:think><seed:tool_call><function=get_weather><parameter=city>Paris"
        "</parameter><parameter=days>2</parameter></function></seed:tool_call>",
        "",
        "Hm.",
        [WEATHER],
    ),
    (
        "lfm2 in JSON",
        "<|tool_call_start|>",
        "",
        f"<|tool_call_start|>{CALL_LIST}<|tool_call_end|>",
        "",
        "",
        [WEATHER],
    ),
    (
        "functiongemma",
        "<start_function_call>",
        "",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}<end_function_call>",
        "",
        "",
        [WEATHER],
    ),
    (
        "gemma4",
        "<|channel><|tool_call>",
        "",
        '<|channel>thought\nHm.<channel|><|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>',
        "",
        "Hm.",
        [WEATHER],
    ),
    (
        "harmony call",
        "<|start|><|channel|><|message|>",
        HARMONY_START,
        HARMONY,
        "",
        "Hm.",
        [WEATHER],
    ),
    (
        "harmony recipient first",
        "<|start|><|channel|><|message|>",
        HARMONY_START,
        HARMONY.replace("assistant<", "assistant to=functions.other<")
        .replace(" to=functions.get_weather", "")
        .replace(ARGS, "{}")
        + "<|call|>",
        "",
        "Hm.",
        [OTHER],
    ),
    (
        "harmony answer",
        "<|start|><|channel|><|message|>",
        HARMONY_START,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes <|x|>.",
        "Yes <|x|>.",
        "Hm.",
        [],
    ),
    (
        "harmony prefilled",
        "<|start|><|channel|><|message|>",
        HARMONY_START + "<|channel|>final<|message|>Once",
        " more.<|return|>",
        " more.",
        "",
        [],
    ),
    (
        "harmony without header",
        "<|start|><|channel|><|message|>",
        HARMONY_START,
        "Hello <there>",
        "Hello <there>",
        "",
        [],
    ),
    (
        "harmony cut in a header",
        "<|start|><|channel|><|message|>",
        HARMONY_START,
        "<|channel|>anal",
        "",
        "",
        [],
    ),
    ("plain", "", "", "<think>x</think><tool_call>{}", "<think>x</think><tool_call>{}", "", []),
]


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
