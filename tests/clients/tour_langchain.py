"""A tour of `langchain-ollama`. Argument: the server's URL."""

import asyncio
import sys
from typing import Any

from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from touring import walk

URL = sys.argv[1]
OPTIONS = {"base_url": URL, "temperature": 0, "num_predict": 12, "num_ctx": 2048}
TALK = [("system", "Be brief."), ("human", "Say hello.")]
ASKED = [("human", "How is the weather in Paris?")]
PERSON = {
    "title": "person",
    "description": "A person.",
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"{city} has 21 degrees"


chat = ChatOllama(model="smollm2", validate_model_on_init=True, **OPTIONS)
caller = ChatOllama(model="caller", base_url=URL, temperature=0).bind_tools([get_weather])


def whole() -> Any:
    answer = chat.invoke(TALK)
    return [answer.content, answer.usage_metadata, answer.response_metadata["done_reason"]]


def streamed_asynchronously() -> str:
    async def collect() -> str:
        return "".join([piece.content async for piece in chat.astream(TALK)])

    return asyncio.run(collect())


def completion() -> list[str]:
    model = OllamaLLM(model="smollm2", **OPTIONS)
    return [model.invoke("Say hello."), "".join(model.stream("Say hello."))]


def tools() -> Any:
    answer = caller.invoke(ASKED)
    (call,) = answer.tool_calls
    result = {"role": "tool", "tool_call_id": call["id"], "content": get_weather(**call["args"])}
    return [call["name"], call["args"], caller.invoke([*ASKED, answer, result]).content]


def tools_streamed() -> list[Any]:
    return [[c["name"], c["args"]] for piece in caller.stream(ASKED) for c in piece.tool_calls]


def structured() -> Any:
    model = ChatOllama(model="smollm2", base_url=URL, temperature=1, seed=1, num_predict=300)
    model = model.with_structured_output(PERSON, method="json_schema")
    return model.invoke("Describe Bob, who is 42, in JSON.")


def json_mode() -> str:
    model = ChatOllama(model="smollm2", base_url=URL, temperature=0, num_predict=50)
    model = model.with_structured_output(PERSON, method="json_mode", include_raw=True)
    return model.invoke("Describe Bob, who is 42, in JSON.")["raw"].content


def thinking(reasoning: bool) -> list[Any]:
    model = ChatOllama(model="thinker", base_url=URL, temperature=0, reasoning=reasoning)
    answer = model.invoke("What is 4 + 4?")
    return [answer.additional_kwargs.get("reasoning_content"), answer.content]


def vectors() -> Any:
    model = OllamaEmbeddings(model="smollm2", base_url=URL)
    documents = model.embed_documents(["why is the sky blue?", "hi"])
    asynchronous = asyncio.run(model.aembed_query("hi"))
    return [*documents, model.embed_query("hi"), asynchronous]


walk(
    {
        "whole": whole,
        "streamed": lambda: "".join(piece.content for piece in chat.stream(TALK)),
        "streamed_asynchronously": streamed_asynchronously,
        "batch": lambda: [answer.content for answer in chat.batch([TALK, TALK])],
        "completion": completion,
        "tools": tools,
        "tools_streamed": tools_streamed,
        "json_schema": structured,
        "json_mode": json_mode,
        "thinking": lambda: thinking(reasoning=True),
        "no_thinking": lambda: thinking(reasoning=False),
        "vectors": vectors,
        "missing": lambda: ChatOllama(model="nope", base_url=URL).invoke("hi"),
        "missing_at_once": lambda: repr(
            ChatOllama(model="nope", base_url=URL, validate_model_on_init=True)
        ),
    }
)
