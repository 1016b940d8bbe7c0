"""JSON mode and schemas: what random draws under the masks give is valid, the rest is refused.

The judge is the jsonschema package.
"""

import json
import random
import re

import jsonschema
import numpy as np
import pytest
from vocabularies import byte_level

from localllm.errors import BadRequest, LocalLLMError
from localllm.text.grammar import ANY_OBJECT, Grammars, Later, format_schema
from localllm.text.tokenizer import Tokenizer, load_tokenizer

CONTROL = 3
CLOSE = re.compile(b"</think>")
TOKENS = [("<s>", CONTROL), ("<|im_end|>", CONTROL), ("<think>", CONTROL), ("</think>", CONTROL)]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS = [
    ANY_OBJECT,
    PERSON,
    {"$ref": "#/$defs/Color", "$defs": {"Color": {"enum": ["red", "grün", 3, None]}}},
    {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 2},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    {"type": ["boolean", "null"]},
    {"const": {"a": [1, "x"]}},
    {"type": "string", "pattern": r"^\d{3}-\d{4}$"},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "number", "minimum": 1, "exclusiveMaximum": 3},
    {"prefixItems": [{"type": "integer"}, {"const": "b"}], "items": False, "type": "array"},
    {"type": "object", "properties": {'a "ü"': {"type": "boolean"}}, "required": ['a "ü"']},
    {"type": "object", "additionalProperties": {"type": "boolean"}},
    {
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/Node",
    },
    {"allOf": [{"type": "string"}, {"minLength": 2, "maxLength": 5}]},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    {"title": "T", "description": "d", "default": 1, "examples": [1], "type": "integer"},
    {"$schema": "https://example.com/schema", "type": "integer", "multipleOf": 5},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}},
]  # fmt: skip


@pytest.fixture
def tokenizer(make_metadata) -> Tokenizer:
    keys = {"ggml.eos_token_id": 258, "ggml.bos_token_id": 257}
    extra = [(text, 1) for text in ('{"', '": ', "  ", "\n\n", "ab", "ü")]
    # A whole number of words: masks may have one more.
    extra += [(f"<unused{i}>", CONTROL) for i in range(-(257 + len(TOKENS) + len(extra)) % 32)]
    return load_tokenizer(make_metadata(byte_level([*TOKENS, *extra], **keys)))


@pytest.fixture
def grammars(tokenizer) -> Grammars:
    return Grammars(tokenizer)


def ids_of(mask: np.ndarray, size: int) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]).tolist()


def draw(grammars: Grammars, constraint, rng: random.Random, limit: int = 4000) -> str:
    """An answer of random allowed tokens, those that close something likelier than others."""
    tokenizer = grammars.tokenizer
    closing = {tokenizer.id_of(text) for text in '"}]'} | tokenizer.eog_ids
    tokens: list[int] = []
    while not constraint.is_finished:
        allowed = ids_of(constraint.allowed(), tokenizer.vocab_size)
        weights = [200 if i in closing else 1 for i in allowed]
        (token,) = rng.choices(allowed, weights)
        if token in tokenizer.eog_ids:
            break
        tokens.append(token)
        constraint.accept(token)
        assert len(tokens) < limit
    return tokenizer.decode(tokens, special=True).decode()


def accept(grammars: Grammars, schema, text: str):
    """A constraint that has taken the text."""
    constraint = grammars.constraint(schema)
    for token in grammars.tokenizer.encode(text, parse_special=False):
        constraint.accept(token)
    return constraint


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_random_answers_are_valid(grammars, schema) -> None:
    rng = random.Random(5)
    for _ in range(12):
        text = draw(grammars, grammars.constraint(schema), rng)
        jsonschema.validate(json.loads(text), {k: v for k, v in schema.items() if k != "$schema"})


def test_an_answer_ends_with_its_value(grammars) -> None:
    constraint = accept(grammars, PERSON, '{"name": "x", "age": 7')
    assert not constraint.is_finished
    constraint.accept(grammars.tokenizer.id_of("}"))
    assert constraint.is_finished


def test_properties_come_in_the_order_of_the_schema(grammars) -> None:
    with pytest.raises(LocalLLMError):
        accept(grammars, PERSON, '{"age": 7')


@pytest.mark.parametrize("blanks", ["  ", "\n\n", " \n", "\n" + " " * 40, "\t"])
def test_runs_of_blanks_are_bounded(grammars, blanks) -> None:
    for schema in (ANY_OBJECT, PERSON, {"type": "array"}):
        begin = "[" if schema == {"type": "array"} else "{"
        with pytest.raises(LocalLLMError):
            accept(grammars, schema, begin + blanks)


def test_numbers_do_not_run_on(grammars) -> None:
    """Texts with digits may be long, and so may a constant that is."""
    size = grammars.tokenizer.vocab_size
    digits = {grammars.tokenizer.id_of(text) for text in "0123456789"}
    begins = ("4.00000000000", "-" + "1" * 17, "[1, 2e" + "1" * 18, '["a\\"", 1.5, ' + "5" * 19)
    for begin in begins:
        constraint = accept(grammars, {"type": ["number", "array"]}, begin)
        assert digits <= set(ids_of(constraint.allowed(), size))
        for _ in range(3):
            constraint.accept(grammars.tokenizer.id_of("3"))
        assert not digits & set(ids_of(constraint.allowed(), size))
    above = accept(grammars, {"type": "number", "exclusiveMinimum": 4}, "4." + "0" * 12)
    assert set(ids_of(above.allowed(), size)) == digits - {grammars.tokenizer.id_of("0")}
    text = accept(grammars, {"type": "string"}, '"\\"' + "3" * 40)
    assert digits <= set(ids_of(text.allowed(), size))
    long = accept(grammars, {"const": int("3" * 19)}, "3" * 10)
    assert not long.is_finished


def test_control_tokens_are_no_text_of_an_answer(grammars) -> None:
    tokenizer = grammars.tokenizer
    constraint = grammars.constraint({"type": "string"})
    constraint.accept(tokenizer.id_of('"'))
    allowed = set(ids_of(constraint.allowed(), tokenizer.vocab_size))
    assert not allowed & tokenizer.special_ids


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"contains": {}}, "contains"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"properties": {"a": {"items": {"not": {}}}}}, "not"),
        ({"type": "string", "format": "blah"}, "format .*blah"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"oneOf": [{"type": "string"}, {"minLength": 3}]}, "oneOf"),
        ({"$ref": "#/$defs/B"}, "B"),
        ({"$ref": "http://example.com/x"}, "example.com"),
        ({"type": "nope"}, "nope"),
        ({"enum": []}, "empty"),
        ({"$ref": "#/$defs/R", "$defs": {"R": {"$ref": "#/$defs/R"}}}, "nothing is valid"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "minimum"),
        ({"type": 3}, "type"),
        ({"properties": []}, "properties"),
        ({"type": "string", "pattern": "("}, "pattern"),
        ({"type": "object", "x": "y" * (1 << 20)}, "characters"),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else None,
)
def test_what_is_not_enforced_is_refused_by_name(grammars, schema, named) -> None:
    with pytest.raises(BadRequest, match=named) as caught:
        grammars.constraint(schema)
    assert str(caught.value).startswith("format: ")
    assert "\n" not in str(caught.value)


def test_schemas_without_end_are_refused(grammars) -> None:
    deep: dict = {}
    for _ in range(5000):
        deep = {"properties": {"a": deep}}
    with pytest.raises(BadRequest, match="nested"):
        grammars.constraint(deep)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(a+)+b$"},
        {"type": "string", "pattern": "^(a|ab|b){1,1000}([a-z]{1,1000}x){1,1000}$"},
        {"type": "array", "minItems": 100000, "items": {"type": "integer"}},
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
    ],
    ids=str,
)
def test_costly_schemas_end_in_an_error_or_go_on(grammars, schema) -> None:
    rng = random.Random(1)
    try:
        constraint = grammars.constraint(schema)
        for _ in range(50):
            allowed = ids_of(constraint.allowed(), grammars.tokenizer.vocab_size)
            constraint.accept(rng.choice(allowed))
    except LocalLLMError as error:
        assert str(error)  # noqa: PT017


@pytest.mark.parametrize("value", [None, ""])
def test_no_format_is_no_constraint(value) -> None:
    assert format_schema(value) is None


@pytest.mark.parametrize("value", ["yaml", 3, ["json"], True])
def test_a_format_of_another_kind_is_refused(value) -> None:
    with pytest.raises(BadRequest, match="invalid format: "):
        format_schema(value)


def test_a_constraint_waits_for_the_end_of_thinking(grammars) -> None:
    tokenizer = grammars.tokenizer
    later = Later(grammars.constraint(ANY_OBJECT), tokenizer, CLOSE)
    for token in tokenizer.encode("so {x} </thin", parse_special=False):
        assert later.allowed() is None
        later.accept(token)
    later.accept(tokenizer.id_of("</think>"))
    assert json.loads(draw(grammars, later, random.Random(2))) is not None


def test_an_answer_may_begin_to_think_or_to_answer(grammars) -> None:
    tokenizer = grammars.tokenizer
    opening, brace = tokenizer.id_of("<think>"), tokenizer.id_of("{")
    thinking = Later(grammars.constraint(ANY_OBJECT), tokenizer, CLOSE, opening)
    assert {opening, brace} <= set(ids_of(thinking.allowed(), tokenizer.vocab_size))
    thinking.accept(opening)
    assert thinking.allowed() is None
    answering = Later(grammars.constraint(ANY_OBJECT), tokenizer, CLOSE, opening)
    answering.accept(brace)
    assert opening not in ids_of(answering.allowed(), tokenizer.vocab_size)
    assert not answering.is_finished


GRAMMARS = [
    ('root ::= ("yes" | "no") "."?\n', r"(yes|no)\.?"),
    ('root ::= "[" item ("," item)* "]" # a list\nitem ::= [0-9]{1,3}\n', r"\[\d{1,3}(,\d{1,3})*\]"),
    ('root ::= root "a" | "b"\n', "ba*"),
    ('start: "x" /[0-9]{22}/\n', r"x\d{22}"),
    ('root ::= "é" [^"]{2}', 'é[^"]{2}'),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "pattern"), GRAMMARS)
def test_random_answers_keep_to_a_grammar(grammars, grammar, pattern) -> None:
    for seed in range(5):
        text = draw(grammars, grammars.of_grammar(grammar), random.Random(seed))
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('a ::= "x"', "no 'root' rule found"),
        ("root ::= foo", "rule 'foo' not found"),
        ('root ::= "abc', "unexpected end of input at line 1"),
        ("hello world", "expected ::= at line 1"),
        ("root ::= " + 500 * "(" + '"a"' + 500 * ")", "recursion"),
        ("root ::= " + " | ".join(f'"w{n}"' for n in range(20_000)), "characters; 131072 go"),
        ("start: b\n", "unknown name"),
        ('root ::= ("a"{1,1000}){1,1000}', "Expected value"),
    ],
    ids=lambda text: text[:20],
)
def test_grammars_that_cannot_be_used_are_refused(grammars, grammar, reason) -> None:
    with pytest.raises(BadRequest, match=f"grammar: .*{re.escape(reason)}"):
        grammars.of_grammar(grammar)
