"""What templates may use: each feature gives the text that transformers renders."""

import datetime
from typing import Any

import pytest
from chats import Make, user

# source, variables, text: by hand, from jinja2's documentation and transformers' settings
FEATURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "blocks leave no blank lines": ("{% if true %}\n  a\n  {% endif %}\nb", {}, "  a\nb"),
    "trailing newline is dropped": ("a\n", {}, "a"),
    "loop controls": (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
        "{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        {},
        "02",
    ),
    "generation tag": ("a{% generation %}b{% endgeneration %}c", {}, "abc"),
    "generation tag with dashes": ("a {%- generation %} b {%- endgeneration %} c", {}, "a b c"),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for i in [1, 2, 3] %}{% set ns.n = ns.n + i %}{% endfor %}"
        "{{ ns.n }}",
        {},
        "6",
    ),
    "loop variables": (
        "{% for i in 'abc' %}{{ loop.index0 }}{{ loop.previtem | default('-') }}"
        "{{ loop.nextitem | default('-') }}{{ '!' if loop.last }}{% endfor %}",
        {},
        "0-b1ac2b-!",
    ),
    "selectattr and rejectattr": (
        "{{ xs | selectattr('a', 'equalto', 1) | map(attribute='b') | join(',') }}/"
        "{{ xs | rejectattr('a') | list | length }}",
        {"xs": [{"a": 1, "b": "x"}, {"a": 0, "b": "y"}, {"a": 1, "b": "z"}]},
        "x,z/1",
    ),
    "tojson is plain": (
        "{{ x | tojson }}",
        {"x": {"é": "<a href='x'>&</a>", "n": [1, None, True]}},
        '{"é": "<a href=\'x\'>&</a>", "n": [1, null, true]}',
    ),
    "tojson with indent": (
        "{{ x | tojson(indent=2) }}",
        {"x": {"a": [1]}},
        '{\n  "a": [\n    1\n  ]\n}',
    ),
    "tojson escapes when asked": ("{{ x | tojson(ensure_ascii=True) }}", {"x": "é"}, '"\\u00e9"'),
    "tojson sorts when asked": (
        "{{ x | tojson(sort_keys=True) }}",
        {"x": {"b": 1, "a": 2}},
        '{"a": 2, "b": 1}',
    ),
    "from_json": ("{{ (x | from_json).a }}", {"x": '{"a": 5}'}, "5"),
    "is defined": ("{{ x is defined }} {{ y is defined }}", {"y": 0}, "False True"),
    "undefined is empty": ("[{{ x }}]{% if not x %}!{% endif %}", {}, "[]!"),
    "slices": (
        "{{ x[1:] }}{{ x[::-1] }}{{ x[:-1][0] }}",
        {"x": [1, 2, 3]},
        "[2, 3][3, 2, 1]1",
    ),
    "items of mappings": (
        "{% for k, v in x.items() %}{{ k }}={{ v }};{% endfor %}",
        {"x": {"a": 1}},
        "a=1;",
    ),
    "items filter": (
        "{% for k, v in x | items %}{{ k }}={{ v }};{% endfor %}",
        {"x": {"a": 1}},
        "a=1;",
    ),
    "methods of texts": (
        "{{ x.strip() }}|{{ x.split(',')[1] }}|{{ x.startswith(' a') }}|{{ x.replace('a', 'o') }}"
        "|{{ x.lstrip().upper() }}",
        {"x": " a,b "},
        "a,b|b |True| o,b |A,B ",
    ),
    "macros with defaults": (
        "{% macro f(a, b='2') %}{{ a }}{{ b }}{% endmacro %}{{ f('1') }}{{ f('1', b='3') }}",
        {},
        "1213",
    ),
    "set blocks": ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{{ x }}", {}, "a1a1"),
    "concatenation": ("{{ 'a' ~ 1 ~ none ~ [2] }}", {}, "a1None[2]"),
    "formatting": ("{{ '%s-%02d' % ('a', 5) }}{{ '{}:{}'.format(1, 2) }}", {}, "a-051:2"),
    "lists grow": (
        "{% set ns = namespace(l=[]) %}{% for i in range(3) %}{% set ns.l = ns.l + [i] %}"
        "{% endfor %}{% set m = [] %}{% set _ = m.append(7) %}{{ ns.l }}{{ m.pop() }}",
        {},
        "[0, 1, 2]7",
    ),
    "dictsort, unique, trim, default": (
        "{{ {'b': 1, 'a': 2} | dictsort }}{{ [1, 1, 2] | unique | list }}{{ ' x ' | trim }}"
        "{{ y | default('d') }}",
        {},
        "[('a', 2), ('b', 1)][1, 2]xd",
    ),
    "recursive loops": (
        "{% for x in xs recursive %}{{ x.n }}{% if x.xs %}({{ loop(x.xs) }}){% endif %}{% endfor %}",
        {"xs": [{"n": 1, "xs": [{"n": 2}]}]},
        "1(2)",
    ),
    "comparisons and membership": (
        "{{ 1 < 2 <= 2 }}{{ 'a' in x }}{{ 'b' not in x }}",
        {"x": ["a"]},
        "TrueTrueTrue",
    ),
    "loop filter": (
        "{% for i in range(6) if i % 2 %}{{ loop.index }}:{{ i }} {% endfor %}",
        {},
        "1:1 2:3 3:5 ",
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_template_feature_gives_the_text_of_transformers(name: str, make: Make) -> None:
    source, variables, text = FEATURES[name]
    assert make(source).render(user("hi"), **variables) == text


@pytest.mark.parametrize("format", ["%d %b %Y", "%H:%M", "%Y-%m-%d"])
def test_strftime_now_takes_any_format(format: str, make: Make) -> None:
    before = datetime.datetime.now().strftime(format)
    text = make("{{ strftime_now('" + format + "') }}").render(user("hi"))
    assert text in (before, datetime.datetime.now().strftime(format))
