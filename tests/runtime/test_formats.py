"""Structured answers end to end: formats, thinking and tool calls, on models with weights."""

import itertools
import json
import queue
import re

import jsonschema
import numpy as np
import pytest
from schemas import Schemas

from localllm.answers import TextDelta
from localllm.config import load_settings
from localllm.engine.sequence import Request
from localllm.errors import BadRequest
from localllm.prompts import TextRequest
from localllm.runtime import LoadedModel
from localllm.sampling import SamplingParams
from localllm.text.calls import ToolCall
from localllm.text.dialects import dialect_of

names = (f"format {i}" for i in itertools.count())
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ANSWER = (
    '<think>\nHm.\n</think>\n\nSo:\n<tool_call>{"name": "f", "arguments": {"a": "ü"}}</tool_call>'
)
THINKER = (
    "{% for m in messages %}{{ '<|im_start|>' + m.content }}{% endfor %}{{ tools }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{# <tool_call> #}"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "old": {"type": ["boolean", "null"]},
    },
    "required": ["kind", "legs", "tags", "old"],
    "additionalProperties": False,
}


class Forced:
    """A constraint that lets one text be said and nothing else."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    @property
    def is_finished(self) -> bool:
        return not self.tokens

    def allowed(self) -> np.ndarray:
        mask = np.zeros(100, np.uint32)
        mask[self.tokens[0] // 32] = 1 << (self.tokens[0] % 32)
        return mask

    def accept(self, token: int) -> None:
        self.tokens = self.tokens[1:]


def request(prompt: str = "hello", **fields) -> TextRequest:
    params = SamplingParams(**{"temperature": 1.0, "num_predict": 200, **fields.pop("params", {})})
    return TextRequest(next(names), prompt, params=params, **fields)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("stop", [(), ["never"]])
def test_an_answer_is_taken_apart_on_its_way(model, stop) -> None:
    deltas: queue.SimpleQueue[list[TextDelta]] = queue.SimpleQueue()
    tokens = model.tokenizer.encode(ANSWER, parse_special=False)
    parser = dialect_of(THINKER).parser(tools=[TOOL])
    name = next(names)
    forced = Request(name, [1, 2], SamplingParams(num_predict=500), constraint=Forced(tokens))
    model.answers.submit(forced, stop, deltas.put, parser)
    whole = TextDelta(name)
    while not whole.is_last:
        for delta in deltas.get(timeout=60):
            whole.text += delta.text
            whole.thinking += delta.thinking
            whole.tool_calls += delta.tool_calls
            whole.done_reason = delta.done_reason
    assert (whole.text, whole.thinking) == ("So:", "Hm.")
    assert whole.tool_calls == [ToolCall("f", {"a": "ü"})]
    assert whole.done_reason == "stop"


def test_a_schema_holds_at_any_temperature(model) -> None:
    for seed in range(5):
        whole = model.generate_text(request(format=SCHEMA, params={"seed": seed}))
        jsonschema.validate(json.loads(whole.text), SCHEMA)
        assert whole.done_reason == "stop"


def test_a_schema_holds_in_a_chat_and_beside_others(model) -> None:
    first = request(messages=user("hi"), format=SCHEMA, params={"seed": 5})
    alone = model.generate_text(first).text
    stream = model.stream(request(params={"num_predict": 100}))
    next(stream)
    again = request(messages=user("hi"), format=SCHEMA, params={"seed": 5})
    assert model.generate_text(again).text == alone
    stream.close()
    jsonschema.validate(json.loads(alone), SCHEMA)


def test_a_length_limit_cuts_a_json_answer_and_says_so(model) -> None:
    whole = model.generate_text(request(format=SCHEMA, params={"num_predict": 3, "seed": 1}))
    assert whole.done_reason == "length"
    assert whole.text.startswith("{")


@pytest.mark.parametrize(
    ("wanted", "reason"), [("yaml", "invalid format"), ({"not": {}}, "keyword not is not")]
)
def test_a_format_that_cannot_be_kept_is_refused(model, wanted, reason) -> None:
    with pytest.raises(BadRequest, match=reason):
        model.generate_text(request(format=wanted))


def test_a_modelfiles_template_replaces_the_files_own(model) -> None:
    asked = request(messages=user("hi"), template="<<{{ .Prompt }}>>")
    assert model.prompts.render(asked) == "<<hi>>"
    assert model.tokenizer.decode(model.prepare(asked).tokens).decode() == "<<hi>>"


def test_a_template_that_can_do_less_than_the_files_own_yields(make_model) -> None:
    with make_model(THINKER) as model:
        asked = {"messages": user("hi"), "template": "<<{{ .Prompt }}>>"}
        assert "<<" not in model.prompts.render(request(**asked))
        assert model.prompts.render(request(**asked, is_final_template=True)) == "<<hi>>"


def test_templates_are_told_whether_to_think(make_model) -> None:
    with make_model(THINKER) as model:
        render = model.prompts.render
        assert render(request(messages=user("hi"))).endswith("hiNone")
        assert render(request(messages=user("hi"), think=True)).endswith("hiNone")
        assert render(request(messages=user("hi"), think=False)).endswith("</think>\n\n")


def test_a_suffix_needs_a_place(model) -> None:
    source = "{{ if .Suffix }}<P>{{ .Prompt }}<S>{{ .Suffix }}<M>{{ else }}{{ .Prompt }}{{ end }}"
    asked = request(messages=user("a"), suffix="b", template=source)
    assert model.prompts.render(asked) == "<P>a<S>b<M>"
    with pytest.raises(BadRequest, match="suffix"):
        model.prepare(request(messages=user("a"), suffix="b"))


REAL_SCHEMAS = [
    SCHEMA,
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "born": {"type": "string", "format": "date"},
            "email": {"anyOf": [{"type": "string", "pattern": "^[a-z]{1,9}@x\\.org$"}, {"type": "null"}]},
        },
        "required": ["name", "born", "email"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"$ref": "#/$defs/P"}, "minItems": 1, "maxItems": 3,
     "$defs": {"P": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "number"}],
                     "items": False, "minItems": 2}}},
    {"enum": ["yes", "no", "mañana ☀"]},
]  # fmt: skip


@pytest.mark.real
@pytest.mark.parametrize("schema", REAL_SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_a_real_model_keeps_to_schemas(real_model, schema) -> None:
    for seed in range(4):
        asked = request(
            messages=user("Tell me about a pet, as JSON."),
            format=schema,
            params={"seed": seed, "top_k": (0, 40)[seed % 2], "top_p": (1.0, 0.9)[seed % 2]},
        )
        whole = real_model.generate_text(asked)
        jsonschema.validate(json.loads(whole.text), schema)
        assert whole.done_reason == "stop"
        assert "  " not in whole.text.replace("\n" + " " * 32, "") or "\n" in whole.text


@pytest.mark.real
@pytest.mark.slow
def test_a_real_model_keeps_to_300_schemas(real_model) -> None:
    """Every answer that ends is valid; nearly all end, though the model knows no JSON."""
    made = Schemas(seed=11)
    wanted = {next(names): made.whole() for _ in range(300)}
    deltas: queue.SimpleQueue[list[TextDelta]] = queue.SimpleQueue()
    # One sink for all, so that the engine takes as many as it can in a step.
    sink = deltas.put
    for seed, (name, schema) in enumerate(wanted.items()):
        params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=seed, num_predict=400)
        asked = TextRequest(name, messages=user("JSON, please."), params=params, format=schema)
        real_model.start(asked, sink)
    texts = dict.fromkeys(wanted, "")
    reasons: dict[str, str | None] = {}
    while len(reasons) < len(wanted):
        for delta in deltas.get(timeout=600):
            texts[delta.request_id] += delta.text
            assert delta.error is None
            if delta.is_last:
                reasons[delta.request_id] = delta.done_reason
    ended = [name for name, reason in reasons.items() if reason == "stop"]
    for name in ended:
        jsonschema.validate(json.loads(texts[name]), wanted[name])
    assert len(ended) == 300
    assert not [text for text in texts.values() if re.search(r"[ \t\n]{40}", text)]


@pytest.mark.real
def test_a_real_models_json_mode_gives_objects(real_model) -> None:
    valid = 0
    for seed in range(10):
        asked = request(
            messages=user("Hi!"), format="json", params={"seed": seed, "num_predict": 400}
        )
        whole = real_model.generate_text(asked)
        if whole.done_reason == "stop":
            assert isinstance(json.loads(whole.text), dict)
            valid += 1
        else:
            assert whole.done_reason == "length"
    assert valid >= 8


@pytest.fixture(scope="module")
def real_model(smollm2_path):
    with LoadedModel.open(smollm2_path, load_settings()) as loaded:
        yield loaded
