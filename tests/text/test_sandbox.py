"""Hostile templates: they reach nothing, and they stop, on any thread."""

import threading
import tracemalloc

import pytest

from localllm.text.sandbox import BoundedEnvironment

DOUBLED = (
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
PAIRS = (
    "{% set ns = namespace(x=1) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
)

ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loop that keeps nothing": "{% for a in range(99999) if a < 0 %}{% endfor %}" * 30,
    "filter in a loop": "{% for a in range(99999) %}{{ 'x' | upper | length }}{% endfor %}" * 30,
    "macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "macro without an end": "{% macro f(n) %}{{ f(n+1) }}{% endmacro %}{{ f(0) }}",
    "recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "range": "{{ range(10**9) | list }}",
    "lists of lists, spelled": DOUBLED + "{{ ns.x }}",
    "lists of lists, joined": DOUBLED + "{{ ns.x ~ '' }}",
    "lists of lists, as JSON": DOUBLED + "{{ ns.x | tojson }}",
    "lists of lists, as text": DOUBLED + "{{ ns.x | string }}",
    "lists of lists, formatted": DOUBLED + "{{ '%s' % ns.x }}{{ '{}'.format(ns.x) }}",
    "lists of lists, compared": DOUBLED + "{{ ns.x == ns.y }}",
    "lists of lists, searched": DOUBLED + "{{ ns.x in [ns.y] }}",
    "pairs of pairs, hashed": PAIRS + "{{ {ns.x: 1} }}",
    "pairs of pairs, looked up": PAIRS + "{{ {}.get(ns.x) }}{{ {}[ns.x] }}",
    "pairs of pairs, made unique": PAIRS + "{{ [ns.x, ns.x] | unique | list }}",
    "list in itself": "{% set l = [] %}{% set _ = l.append(l) %}{{ l }}",
    "sum of lists": "{{ ([[1] * 100] * 99999) | sum(start=[]) | length }}",
}
HUGE = {
    "repeated text": "{{ 'a' * 10**10 }}",
    "repeated list": "{{ [1] * 10**10 }}",
    "power": "{{ 9 ** 99999999 }}",
    "product": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}{{ ns.x }}",
    "doubling by ~": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by +": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling of a block": "{% set x = 'a' * 1000000 %}"
    + "{% set x %}{{ x }}{{ x }}{% endset %}" * 20,
    "format": "{{ '%999999999d' % 1 }}",
    "format by argument": "{{ '%*d' % (99999999, 1) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "format method": "{{ '{:999999999}'.format(1) }}",
    "format method by argument": "{{ '{:{}}'.format(1, 999999999) }}",
    "format_map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "center": "{{ 'a'.center(999999999) }}",
    "center filter": "{{ 'a' | center(999999999) }}",
    "rjust": "{{ 'a'.rjust(999999999) }}",
    "zfill": "{{ 'a'.zfill(999999999) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace filter": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "join": "{{ ''.join(['a' * 1000000] * 99999) }}",
    "join filter": "{{ (['a' * 1000000] * 99999) | join }}",
    "join of a mapping": "{{ (['a' * 1000000] * 99999) | map('upper') | list | length }}",
    "many texts": "{% set l = [] %}{% for i in range(99999) %}"
    "{% set _ = l.append('a' * 1000000) %}{% endfor %}",
    "indent": "{{ ('\n' * 4000000) | indent(1000) }}",
    "batch": "{{ 'x' | batch(10**9, 'y') | list }}",
    "slice filter": "{{ 'x' | slice(10**9) | list }}",
    "JSON indent": "{{ [1] | tojson(indent=10**9) }}",
    "output of a loop": "{% for i in range(99999) %}" + "x" * 10000 + "{% endfor %}",
    "macro": "{% macro f() %}{% for i in range(99999) %}"
    + "x" * 10000
    + "{% endfor %}{% endmacro %}{% set x = f() %}",
    "date": "{{ strftime_now('%c' * 100000) }}",
    "lipsum": "{{ lipsum(n=99999) }}",
}
FORBIDDEN = (
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__'].__mro__ }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ raise_exception.__globals__.x }}",
    "{{ strftime_now.__globals__['os'] }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.x }}",
    "{{ namespace.__init__ }}{{ range.__class__.__base__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ {}.update({1: 2}) }}",
    "{{ [].extend([1]) }}",
)


def is_stopped(source: str) -> bool:
    """Whether compiling or rendering fails; which of several errors it is does not matter."""
    environment = BoundedEnvironment()
    try:
        environment.render(environment.compile_source(source), {})
    except Exception:
        return True
    return False


@pytest.mark.parametrize("name", [*ENDLESS, *HUGE])
def test_template_without_bounds_is_stopped_before_it_takes_memory(name: str) -> None:
    tracemalloc.start()
    try:
        assert is_stopped(ENDLESS.get(name) or HUGE[name])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100 << 20


@pytest.mark.parametrize("source", FORBIDDEN)
def test_template_reaches_nothing_outside(source: str) -> None:
    assert is_stopped(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "-" * 5000 + "1 }}",
        "{% if 1 %}" * 500 + "{% endif %}" * 500,
        "{{ [" * 2000,
    ],
)
def test_template_that_is_too_deep_to_compile_is_an_error(source: str) -> None:
    assert is_stopped(source)


def test_limits_hold_on_any_thread_and_for_each_rendering_anew() -> None:
    environment = BoundedEnvironment()
    endless = environment.compile_source(ENDLESS["nested loops"])
    modest = environment.compile_source("{% for i in range(30000) %}{% endfor %}done")
    outcomes: list[str] = []

    def work() -> None:
        for template in (modest, endless, modest):
            try:
                outcomes.append(environment.render(template, {}))
            except Exception as error:
                outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["TooCostly"] * 2 + ["done"] * 4


def test_long_honest_chat_is_within_the_limits() -> None:
    environment = BoundedEnvironment()
    template = environment.compile_source(
        "{% for m in messages %}{{ '<' + m.role + '>' + (m.content | trim) + '\n' }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 200}] * 2000
    assert len(environment.render(template, {"messages": messages})) == 2000 * 1006
