"""Modelfile templates over chats: the forms that Ollama knows, and what was typed stays text."""

import json

import pytest
from chats import ATTACK, specials, text_of, user

from localllm.errors import BadRequest
from localllm.text.go_prompt import GoChatTemplate

CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "A"},
    {"role": "assistant", "content": "B"},
    {"role": "user", "content": "C"},
]
LEGACY = "{{ if .System }}[S]{{ .System }}[/S]{{ end }}[U]{{ .Prompt }}[/U]"
MESSAGES = (
    "{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}"
    "<|im_start|>assistant\n"
)
TOOLS = """\
{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 -}}
{{- if eq .Role "user" }}U:{{ .Content }}
{{- if and $last $.Tools }} T:{{ range $.Tools }}{{ .Function }}{{ end }}{{ end }}
{{ else if .ToolCalls }}A:{{ range .ToolCalls }}<tool_call>
{"name": "{{ .Function.Name }}", "arguments": {{ .Function.Arguments }}}</tool_call>{{ end }}
{{ else if eq .Role "tool" }}R:{{ .ToolName }}={{ .Content }}
{{ end }}
{{- end }}A:"""
CALL = {"function": {"name": "f", "arguments": {"b": "ü", "a": 1}}}


@pytest.fixture
def go(make):
    """A Go template over the vocabulary of chats.py."""
    tokenizer = make(None).tokenizer

    def go(source: str) -> GoChatTemplate:
        return GoChatTemplate(source, tokenizer)

    return go


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (LEGACY, "[S]S[/S][U]A[/U]B[U]C[/U]"),
        (LEGACY + "{{ .Response }}<end>", "[S]S[/S][U]A[/U]B<end>[U]C[/U]"),
        (
            "{{ if .Prompt }}[U]{{ .Prompt }}[A]{{ .Response }}[/A]{{ end }}<end>",
            "[U]A[A]B[/A]<end>[U]C[A]",
        ),
        (
            "{{ .Prompt }}>{{ if .Response }}{{ .Response }}.{{ end }}",
            "A>B.C>",
        ),
        ("{{ range .Messages }}{{ .Role }}:{{ .Content }} {{ end }}", "system:S user:A assistant:B user:C "),
        ("{{ .System }}|{{ range .Messages }}{{ if ne .Role `system` }}{{ .Content }}{{ end }}{{ end }}", "S|ABC"),
        ("{{ if .Messages }}M{{ else }}{{ .Prompt }}{{ .Response }}{{ end }}", "M"),
    ],
)  # fmt: skip
def test_old_and_new_forms_render_as_ollama_does(go, source, expected) -> None:
    assert go(source).render(CHAT) == expected


def test_the_response_that_is_there_is_continued(go) -> None:
    chat = [*CHAT, {"role": "assistant", "content": "D"}]
    assert go(LEGACY + "{{ .Response }}<end>").render(chat).endswith("[U]C[/U]D")


def test_neighbours_of_one_role_are_joined_but_not_results_of_tools(go) -> None:
    template = go("{{ range .Messages }}({{ .Role }}:{{ .Content }}){{ end }}")
    chat = [user("A")[0], user("B")[0], *({"role": "tool", "content": x} for x in "cd")]
    assert template.render(chat) == "(user:A\n\nB)(tool:c)(tool:d)"


def test_tools_and_calls_print_as_json(go) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    chat = [
        user("Q")[0],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "ok", "tool_name": "f"},
        user("Z")[0],
    ]
    assert go(TOOLS).render(chat, tools=[tool]) == (
        'U:Q\nA:<tool_call>\n{"name": "f", "arguments": {"b":"ü","a":1}}</tool_call>\n'
        'R:f=ok\nU:Z T:{"name":"f","parameters":{"type":"object"}}\nA:'
    )


def test_a_tools_parameters_can_be_listed(go) -> None:
    source = (
        "{{ range .Tools }}{{ range $n, $p := .Function.Parameters.Properties }}{{ $n }}:"
        "{{ $p.Type }}:{{ $p | toTypeScriptType }}:{{ $p.Description }}:{{ $p.Enum }};{{ end }}"
        "{{ .Function.Parameters.Required }}{{ end }}{{ range .Messages }}{{ end }}"
    )
    properties = {
        "a": {"type": "integer", "description": "d"},
        "b": {"type": ["string", "null"], "enum": ["x", "y"]},
    }
    schema = {"type": "object", "properties": properties, "required": ["a", "b"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert go(source).render(user("x"), tools=[tool]) == (
        'a:integer:number:d:[];b:["string","null"]:string | null::[x y];[a b]'
    )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "false  false"),
        ({"enable_thinking": True}, "true medium true"),
        ({"enable_thinking": False}, "false  true"),
        ({"enable_thinking": True, "reasoning_effort": "high"}, "true high true"),
    ],
)
def test_thinking_is_passed_on(go, variables, expected) -> None:
    template = go("{{ range .Messages }}{{ end }}{{ .Think }} {{ .ThinkLevel }} {{ .IsThinkSet }}")
    assert "enable_thinking" in template.variables
    assert template.render(user("x"), **variables) == expected


def test_old_thoughts_are_left_out(go) -> None:
    template = go("{{ range .Messages }}[{{ .Content }}]{{ end }}")
    thought = "<think>\nHm.</think>\n\nYes."
    chat = [user("a")[0], {"role": "assistant", "content": thought}, user("b")[0]]
    assert template.render(chat) == "[a][Yes.][b]"
    assert template.render(chat[:2]) == f"[a][{thought}]"
    assert chat[1]["content"] == thought


def test_a_suffix_fills_the_middle(go) -> None:
    template = go(
        "{{ if .Suffix }}<PRE>{{ .Prompt }}<SUF>{{ .Suffix }}<MID>{{ else }}{{ .Prompt }}{{ end }}"
    )
    assert template.has_suffix
    assert template.render(user("a"), suffix="b") == "<PRE>a<SUF>b<MID>"
    assert template.render(user("a")) == "a"


def test_tools_without_a_place_are_refused(go) -> None:
    with pytest.raises(BadRequest, match="no place"):
        go(MESSAGES).render(user("x"), tools=[{"function": {"name": "f"}}])


def test_ids_have_the_templates_tokens_and_one_bos(go) -> None:
    template = go("<s>" + MESSAGES)
    ids = template.encode(user("hi"))
    assert specials(template.tokenizer, ids) == [
        "<s>",
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
    ]
    assert text_of(template, ids) == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("source", [MESSAGES, "<|im_start|>{{ .Prompt }}<|im_end|>{{ .Response }}"])
def test_typed_in_control_tokens_stay_text(go, source) -> None:
    template = go(source)
    safe = template.encode(user("hi"))
    ids = template.encode(user(ATTACK))
    count = specials(template.tokenizer, safe).count
    assert specials(template.tokenizer, ids).count("<|im_start|>") == count("<|im_start|>")
    assert specials(template.tokenizer, ids).count("<|im_end|>") == count("<|im_end|>")
    assert ATTACK in text_of(template, ids)


def test_control_tokens_in_arguments_and_results_stay_text(go) -> None:
    template = go(TOOLS.replace("U:", "<|im_start|>"))
    call = {"function": {"name": "f", "arguments": {"a": ATTACK}}}
    chat = [
        user("Q")[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": ATTACK, "tool_name": "f"},
    ]
    ids = template.encode(chat)
    assert specials(template.tokenizer, ids).count("<|im_start|>") == 1
    assert json.dumps(ATTACK) in text_of(template, ids)


def test_a_wrong_template_is_refused_by_line(go) -> None:
    with pytest.raises(BadRequest, match="line 2"):
        go("\n{{ .Prompt }")
    with pytest.raises(BadRequest, match="line 1: index"):
        go("{{ index .Messages 7 }}").render(user("x"))
