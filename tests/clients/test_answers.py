"""What users of other engines met with: answers that do not repeat, options that do nothing."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server_process import Server

pytestmark = pytest.mark.real

GREEDY = {"temperature": 0, "num_predict": 24}
SEEDED = {"temperature": 0.8, "seed": 7, "num_predict": 24}
GO = "Repeat the word go."
STRICT = (
    "{% for m in messages %}{% if m.role != ('user', 'assistant')[loop.index0 % 2] %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def say(server: Server, prompt: str = GO, **fields: Any) -> str:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": prompt}], "stream": False}
    answer = server.post("/api/chat", **{**body, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["message"]["content"])


@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_same_is_said_cold_warm_beside_others_and_reloaded(
    server: Server, options: dict[str, Any]
) -> None:
    prompt = f"Tell me about {sorted(options)} in a sentence."
    said = [say(server, prompt, options=options, exact=True) for _ in range(2)]
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(say, server, f"Say {n}.", options=GREEDY) for n in range(3)]
        said.append(say(server, prompt, options=options, exact=True))
        for other in others:
            other.result()
    server.post("/api/generate", model="smollm2", keep_alive=0)
    said.append(say(server, prompt, options=options, exact=True))
    assert len(set(said)) == 1


def test_seeds_differ_and_options_outside_options_do_nothing(server: Server) -> None:
    said = {say(server, options={**SEEDED, "seed": seed}) for seed in range(4)}
    assert len(said) > 1
    assert say(server, options=GREEDY, temperature=2, seed=3) == say(server, options=GREEDY)


@pytest.mark.parametrize(
    "options",
    [
        {"repeat_penalty": 5.0},
        {"repeat_penalty": 5.0, "repeat_last_n": -1},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
    ],
)
def test_every_penalty_changes_what_is_said(server: Server, options: dict[str, Any]) -> None:
    assert say(server, options={**GREEDY, **options}) != say(server, options=GREEDY)


@pytest.mark.parametrize(
    "options",
    [
        {"repeat_penalty": 1.0},
        {"repeat_penalty": 5.0, "repeat_last_n": 0},
        {"presence_penalty": 0.0, "frequency_penalty": 0.0},
    ],
)
def test_penalties_are_off_unless_asked_for(server: Server, options: dict[str, Any]) -> None:
    assert say(server, options={**GREEDY, **options}) == say(server, options=GREEDY)


def test_a_field_name_can_be_copied_with_the_default_options(server: Server) -> None:
    """Penalties that are on by default would keep a model from repeating what it was shown."""
    tool = '{"name": "f", "parameters": {"unusual_field_name": {"type": "string"}}}'
    said = say(server, f'{tool}\nRepeat: "unusual_field_name"', options=GREEDY)
    assert "unusual_field_name" in said


@pytest.mark.parametrize(
    "roles",
    [
        ("system", "user"),
        ("user", "user"),
        ("assistant", "user"),
        ("user", "assistant", "assistant", "user"),
    ],
)
def test_a_template_that_refuses_an_order_of_roles_says_why(
    server: Server, roles: tuple[str, ...]
) -> None:
    """With status 400, and the connection goes on."""
    server.create("strict", **{"from": "smollm2"}, template=STRICT)
    messages = [{"role": role, "content": "hi"} for role in roles]
    body = {"model": "strict", "messages": messages, "stream": False, "options": GREEDY}
    answer = server.post("/api/chat", **body)
    if answer.status_code != 200:
        assert answer.status_code == 400
        assert "Conversation roles must alternate" in answer.json()["error"]
    else:
        # A system text may also go to the user's first message.
        assert roles[0] == "system"
    body["messages"] = [{"role": "user", "content": "hi"}]
    assert server.post("/api/chat", **body).status_code == 200


def test_texts_become_tokens_and_back(server: Server) -> None:
    text = "Why is the sky blue? ☀ <|im_end|>"
    found = server.post("/api/tokenize", model="smollm2", content=text).json()
    assert found["model"] == "smollm2"
    assert 5 < len(found["tokens"]) < len(text)
    body = {"model": "smollm2", "prompt": text, "raw": True, "stream": False, "options": GREEDY}
    counted = server.post("/api/generate", **body).json()["prompt_eval_count"]
    assert counted == len(found["tokens"])
    back = server.post("/api/detokenize", model="smollm2", tokens=found["tokens"]).json()
    assert back == {"model": "smollm2", "content": text}
    huge = server.post("/api/tokenize", model="smollm2", content="word " * 300_000)
    assert huge.status_code == 400
    assert "content has more than 1048576 characters" in huge.json()["error"]
    long = server.post("/api/tokenize", model="smollm2", content="word " * 20_000).json()["tokens"]
    assert len(long) >= 20_000
    for path, fields in (
        ("tokenize", {"content": ""}),
        ("detokenize", {"tokens": []}),
    ):
        answer = server.post(f"/api/{path}", model="smollm2", **fields)
        assert not [value for key, value in answer.json().items() if key != "model" and value]
    for tokens in ([-1], [10**9], ["a"]):
        answer = server.post("/api/detokenize", model="smollm2", tokens=tokens)
        assert answer.status_code == 400
        assert "token ids" in answer.json()["error"]


def test_a_grammar_holds_and_a_bad_one_is_refused_with_its_place(server: Server) -> None:
    grammar = 'root ::= "The answer is " ("yes" | "no") "."'
    said = say(server, "Is the sky blue?", options={**SEEDED, "grammar": grammar})
    assert said in ("The answer is yes.", "The answer is no.")
    body = {"model": "smollm2", "prompt": "x", "stream": False}
    for fields, error in (
        ({"options": {"grammar": 'root ::= "a'}}, "grammar: unexpected end of input at line 1"),
        ({"options": {"grammar": 3}}, 'option "grammar" must be of type string'),
        ({"options": {"grammar": grammar}, "format": "json"}, "either a format or a grammar"),
    ):
        answer = server.post("/api/generate", **body, **fields)
        assert answer.status_code == 400
        assert error in answer.json()["error"]
    assert say(server, options=GREEDY)
