"""`langchain-ollama`, unchanged: tour_langchain.py walks, we look at what it saw."""

import pytest
from server_process import Server
from touring import Seen, result, run_python_tour

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def seen(server: Server) -> Seen:
    return run_python_tour("tour_langchain.py", server.url, needs="langchain_ollama")


def test_chat_whole_streamed_and_asynchronous(seen: Seen) -> None:
    text, usage, reason = result(seen, "whole")
    assert text
    assert (usage["output_tokens"], reason) == (12, "length")
    assert result(seen, "streamed") == text
    assert result(seen, "streamed_asynchronously") == text
    assert result(seen, "batch") == [text, text]


def test_completion(seen: Seen) -> None:
    whole, streamed = result(seen, "completion")
    assert whole == streamed != ""


def test_tools_go_around(seen: Seen) -> None:
    name, arguments, answer = result(seen, "tools")
    assert (name, arguments) == ("get_weather", {"city": "Paris"})
    assert "21 degrees" in answer
    assert result(seen, "tools_streamed") == [[name, arguments]]


def test_structured_output(seen: Seen) -> None:
    found = result(seen, "json_schema")
    assert (type(found["name"]), type(found["age"])) == (str, int)
    assert result(seen, "json_mode").startswith("{")


def test_thinking(seen: Seen) -> None:
    thought, answer = result(seen, "thinking")
    assert thought
    assert answer.startswith("It is")
    assert result(seen, "no_thinking") == [None, answer]


def test_vectors_of_texts(seen: Seen) -> None:
    _, document, query, asynchronous = result(seen, "vectors")
    assert len(document) == 576
    assert document == query == asynchronous


def test_missing_model_is_an_error(seen: Seen) -> None:
    assert "model 'nope' not found" in seen["missing"]["error"]
    assert "nope" in seen["missing_at_once"]["error"]
