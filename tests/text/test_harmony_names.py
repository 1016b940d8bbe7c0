"""Names of tools as gpt-oss is told them, and back."""

from localllm.text.calls import ToolCall
from localllm.text.dialects import HARMONY_SIGNS, dialect_of
from localllm.text.harmony import identifiers

NAMES = ["get-weather", "get weather", "get.weather", "2nd", "büro", "f", "browser.open", "python"]


def tool(name: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


def test_names_become_identifiers_that_differ() -> None:
    assert identifiers(NAMES) == {
        "get_weather": "get-weather",
        "get_weather_2": "get weather",
        "get_weather_3": "get.weather",
        "_2nd": "2nd",
        "bro": "büro",
        "f": "f",
        "browser.open": "browser.open",
        "python": "python",
    }


def test_the_model_is_told_identifiers_and_its_calls_have_the_tools_own_names() -> None:
    dialect = dialect_of("".join(HARMONY_SIGNS))
    tools = list(map(tool, NAMES))
    call = {"id": "c", "function": {"name": "get weather", "arguments": {}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get weather", "content": "21"},
    ]
    told, told_tools = dialect.told(messages, tools)
    assert told[1]["tool_calls"][0]["function"]["name"] == "get_weather_2"
    assert told[2]["tool_name"] == "get_weather_2"
    assert [t["function"]["name"] for t in told_tools or ()] == list(identifiers(NAMES))
    assert call["function"]["name"] == "get weather"
    parser = dialect.parser(tools=tools, prompt_end="<|start|>assistant")
    parser.push("<|channel|>commentary to=functions.get_weather_2<|message|>{}")
    assert parser.finish().tool_calls == [ToolCall("get weather", {})]


def test_other_models_are_told_what_was_said() -> None:
    messages, tools = [{"role": "user", "content": "hi"}], [tool("get-weather")]
    assert dialect_of("<tool_call>").told(messages, tools) == (messages, tools)
