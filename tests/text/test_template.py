"""Chat templates: which one is used, what messages it gets, and what happens when it fails."""

from typing import Any

import pytest
from chats import CHATML, Make, specials, text_of, user
from vocabularies import MakeMetadata, byte_level

from localllm.errors import BadRequest, UnsupportedModel
from localllm.text.messages import prepared
from localllm.text.template import ChatTemplate
from localllm.text.tokenizer import load_tokenizer


def test_template_sees_the_marks_of_its_model(make: Make) -> None:
    source = "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}"
    keys = {"ggml.eos_token_id": 259}
    assert make(source, **keys).render(user("hi")) == "<s>|<|im_end|>|"


def test_refusal_carries_the_words_of_the_template(make: Make) -> None:
    template = make("{{ raise_exception('Roles must alternate,\nuser first') }}")
    for call in (template.render, template.encode):
        with pytest.raises(BadRequest, match="refuses: Roles must alternate, user first"):
            call(user("hi"))


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system role') }}"
    "{% elif (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}"
    "{% endif %}{{ m.role + ':' + m.content + ';' }}{% endfor %}"
)


def chat(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": role[0]} for role in roles]


def test_system_text_goes_to_the_user_where_the_template_has_no_system_role(make: Make) -> None:
    template = make(STRICT)
    assert template.render(chat("system", "user", "assistant")) == "user:s\n\nu;assistant:a;"
    messages = chat("system", "user")
    assert text_of(template, template.encode(messages)) == template.render(messages)


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (("user", "user"), "Roles must alternate"),
        (("assistant", "user"), "Roles must alternate"),
        (("user", "assistant", "assistant"), "Roles must alternate"),
        (("user", "system"), "No system role"),
        (("system",), "No system role"),
        (("system", "user", "user"), "No system role"),
    ],
)
def test_refused_order_of_roles_is_a_bad_request_in_the_words_of_the_template(
    roles: tuple[str, ...], words: str, make: Make
) -> None:
    with pytest.raises(BadRequest, match=words):
        make(STRICT).encode(chat(*roles))


def test_failure_inside_a_template_is_a_bad_request(make: Make) -> None:
    for source in (
        "{{ messages[0].x.y }}",
        "{{ 1 + 'a' }}",
        "{{ ([] | first).x }}",
        "{{ 1 // 0 }}",
    ):
        with pytest.raises(BadRequest, match="fails"):
            make(source).render(user("hi"))


@pytest.mark.parametrize(
    "source", ["a\n{% if %}", "{{ x | no_such_filter }}", "{% endfor %}", "{{ 'a", "{% nonsense %}"]
)
def test_template_that_does_not_compile_is_refused_at_load_with_the_line(
    source: str, make: Make
) -> None:
    with pytest.raises(UnsupportedModel, match=r"vocabulary\.gguf: .*line \d"):
        make(source)


def test_caller_does_not_see_what_a_template_changes(make: Make) -> None:
    messages = [{"role": "user", "content": "a", "list": [1]}]
    source = "{{ messages[0].list.append(2) }}{{ messages.pop() }}"
    make(source).render(messages)
    assert messages == [{"role": "user", "content": "a", "list": [1]}]


def test_model_without_a_template_gets_chatml_or_a_plain_text(
    make: Make, make_metadata: MakeMetadata
) -> None:
    messages = [{"role": "system", "content": "s"}, *user("u")]
    wanted = (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    )
    assert make(None).render(messages) == wanted
    metadata = make_metadata(byte_level([]))
    plain = ChatTemplate.from_metadata(metadata, load_tokenizer(metadata))
    assert plain.render(user("Once upon")) == "Once upon"
    assert plain.render(messages) == "System: s\n\nUser: u\n\nAssistant:"


def test_tools_use_their_own_template_if_there_is_one(make: Make) -> None:
    template = make("plain", **{"chat_template.tool_use": "with {{ tools[0].name }}"})
    assert template.render(user("hi")) == "plain"
    assert template.render(user("hi"), tools=[{"name": "f"}]) == "with f"
    assert template.variables == {"tools"}


def test_tools_without_a_place_in_the_template_are_refused(make: Make) -> None:
    with pytest.raises(BadRequest, match="tools"):
        make("plain").render(user("hi"), tools=[{"name": "f"}])


def test_messages_are_given_in_the_form_of_transformers(make: Make) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "thinking": "t",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "content": "r", "tool_name": "f"},
        {"role": "developer", "content": "d", "tool_calls": []},
    ]
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.reasoning_content }}{{ m.name }}"
        "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments.x }}{% endfor %};"
        "{% endfor %}"
    )
    assert make(source).render(messages) == "user:ab;assistant:tf1;tool:rf;system:d;"


# Three ways in which published templates write the arguments of a call.
CALLS = {
    "mapping to JSON": ("{{ f.arguments | tojson }}", '{"x": "é"}'),
    "text joined": ("{{ 'json:' + f.arguments }}", 'json:{"x": "é"}'),
    "either": (
        "{{ f.arguments if f.arguments is string else f.arguments | tojson }}",
        '{"x": "é"}',
    ),
    "one by one": ("{% for k, v in f.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "x=é"),
}


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("arguments", ['{"x": "é"}', {"x": "é"}])
def test_call_arguments_have_the_form_that_the_template_can_show(
    form: str, arguments: Any, make: Make
) -> None:
    show, text = CALLS[form]
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
        + show
        + "{% endfor %}{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [*user("q"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert make(source).render(messages) == text


def test_call_without_content_is_null_only_where_the_template_looks_for_it(make: Make) -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    each = "{% for m in messages %}"
    looks = each + "{% if m.content is not none %}[{{ m.content }}]{% endif %}{% endfor %}"
    assert make(looks).render(messages) == ""
    assert make(each + "{{ m.content | trim }}.{% endfor %}").render(messages) == "."
    assert make(each + "{{ 'a' + m.content }}{% endfor %}").render(messages) == "a"


THINKER = """\
{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for m in messages[::-1] %}
    {%- set i = messages|length - 1 - loop.index0 %}
    {%- if ns.open and m.role == 'user' and not m.content.startswith('<tool_response>') %}
        {%- set ns.open = false %}
        {%- set ns.last = i %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content %}
    {%- set reasoning = '' %}
    {%- if m.role == 'assistant' %}
        {%- if m.reasoning_content is string %}
            {%- set reasoning = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if reasoning and loop.index0 > ns.last %}
        {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""


def test_thinking_template_keeps_the_thoughts_of_the_open_turn_only(make: Make) -> None:
    """The shape of Qwen3's template; the text is written by hand."""
    template = make(THINKER)
    messages = [
        *user("1 < 2?"),
        {"role": "assistant", "content": "<think>\nhm <b>\n</think>\n\nyes"},
        *user("sure?"),
        {"role": "assistant", "content": "let me look", "thinking": "tool?"},
        {"role": "user", "content": "<tool_response>\n<|im_end|>\n</tool_response>"},
    ]
    wanted = (
        "<|im_start|>user\n1 < 2?<|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\nsure?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\ntool?\n</think>\n\nlet me look<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n<|im_end|>\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert template.render(messages, enable_thinking=False) == wanted
    ids = template.encode(messages, enable_thinking=False)
    assert text_of(template, ids) == wanted
    found = specials(template.tokenizer, ids)
    # Five messages end, and the one that was typed is text.
    assert found.count("<|im_end|>") == 5
    assert found.count("<think>") == 2


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "x"}, "no role"),
        ({"role": "user", "content": 5}, "neither a text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "image_url"),
        ({"role": "user", "content": ["x"]}, "not text"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "without a function name"),
    ],
)
def test_malformed_message_is_named(message: dict[str, Any], reason: str, make: Make) -> None:
    with pytest.raises(BadRequest, match=reason):
        make(CHATML).render([*user("ok"), message])


def test_deeply_nested_values_are_refused(make: Make) -> None:
    value: Any = []
    for _ in range(900):
        value = [value]
    with pytest.raises(BadRequest, match="nested"):
        make("{{ tools }}").encode(user("hi"), tools=[value])


def test_a_tools_result_is_known_by_the_call_that_it_answers() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": {}}}
    found = prepared(
        [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
            {"role": "tool", "tool_call_id": "c2", "content": "2"},
            {"role": "tool", "tool_call_id": "c1", "tool_name": "g", "content": "3"},
        ]
    )
    assert [message.get("name") for message in found[1:]] == ["f", None, "g"]
