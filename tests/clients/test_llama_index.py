"""`llama-index-llms-ollama`, unchanged: tour_llama_index.py walks, we look at what it saw."""

import pytest
from server_process import Server
from touring import Seen, result, run_python_tour

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def seen(server: Server) -> Seen:
    return run_python_tour("tour_llama_index.py", server.url, needs="llama_index")


def test_chat_whole_streamed_and_asynchronous(seen: Seen) -> None:
    assert result(seen, "context") == 8192
    text = result(seen, "whole")
    assert text
    assert result(seen, "streamed") == text
    assert result(seen, "streamed_asynchronously") == text


def test_completion(seen: Seen) -> None:
    whole, streamed = result(seen, "completion")
    assert whole == streamed != ""


def test_tools_go_around(seen: Seen) -> None:
    name, arguments, answer = result(seen, "tools")
    assert (name, arguments) == ("get_weather", {"city": "Paris"})
    assert "21 degrees" in answer
    assert "21 degrees" in result(seen, "called")


def test_structured_output(seen: Seen) -> None:
    found = result(seen, "json_schema")
    assert (type(found["name"]), type(found["age"])) == (str, int)
    assert result(seen, "json_mode").startswith("{")


def test_thinking(seen: Seen) -> None:
    kinds, answer = result(seen, "thinking")
    assert sorted(kinds) == ["text", "thinking"]
    assert answer.startswith("It is")


def test_vectors_of_texts(seen: Seen) -> None:
    _, batch, alone, asynchronous = result(seen, "vectors")
    assert len(batch) == 576
    assert batch == alone == asynchronous


def test_missing_model_is_an_error(seen: Seen) -> None:
    assert "model 'nope:latest' not found" in seen["missing"]["error"]
