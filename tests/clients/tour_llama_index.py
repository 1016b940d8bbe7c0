"""A tour of `llama-index-llms-ollama`. Argument: the server's URL."""

import asyncio
import sys
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.ollama import OllamaEmbedding
from llama_index.llms.ollama import Ollama
from pydantic import BaseModel, ConfigDict, Field
from touring import walk

TALK = [ChatMessage(role="system", content="Be brief."), ChatMessage(content="Say hello.")]
ASKED = "How is the weather in Paris?"


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=20)
    age: int


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"{city} has 21 degrees"


def model(name: str, num_predict: int = 12, **fields: Any) -> Ollama:
    return Ollama(
        model=name,
        base_url=sys.argv[1],
        temperature=0,
        request_timeout=120,
        additional_kwargs={"num_predict": num_predict},
        **fields,
    )


plain = model("smollm2")
caller = model("caller", num_predict=60)
tool = FunctionTool.from_defaults(get_weather)


def streamed_asynchronously() -> str:
    async def collect() -> str:
        return "".join([piece.delta async for piece in await plain.astream_chat(TALK)])

    return asyncio.run(collect())


def completion() -> list[str]:
    pieces = plain.stream_complete("Say hello.")
    return [plain.complete("Say hello.").text, "".join(piece.delta for piece in pieces)]


def tools() -> Any:
    answer = caller.chat_with_tools([tool], user_msg=ASKED)
    (call,) = caller.get_tool_calls_from_response(answer)
    result = ChatMessage(
        role="tool",
        content=str(tool(**call.tool_kwargs)),
        additional_kwargs={"tool_call_id": call.tool_id},
    )
    talk = [ChatMessage(content=ASKED), answer.message, result]
    end = caller.chat_with_tools([tool], chat_history=talk)
    return [call.tool_name, call.tool_kwargs, end.message.content]


def structured() -> Any:
    person = model("smollm2", num_predict=200).as_structured_llm(Person)
    return person.complete("Describe Bob, who is 42.").raw.model_dump()


def thinking() -> Any:
    answer = model("thinker", num_predict=60, thinking=True).chat(
        [ChatMessage(content="What is 4 + 4?")]
    )
    return [[block.block_type for block in answer.message.blocks], answer.message.content]


def vectors() -> Any:
    embedding = OllamaEmbedding(model_name="smollm2", base_url=sys.argv[1])
    texts = embedding.get_text_embedding_batch(["why is the sky blue?", "hi"])
    asynchronous = asyncio.run(embedding.aget_text_embedding("hi"))
    return [*texts, embedding.get_text_embedding("hi"), asynchronous]


walk(
    {
        "context": lambda: plain.metadata.context_window,
        "whole": lambda: plain.chat(TALK).message.content,
        "streamed": lambda: "".join(piece.delta for piece in plain.stream_chat(TALK)),
        "streamed_asynchronously": streamed_asynchronously,
        "completion": completion,
        "tools": tools,
        "called": lambda: caller.predict_and_call([tool], user_msg=ASKED).response,
        "json_schema": structured,
        "json_mode": lambda: (
            model("smollm2", num_predict=50, json_mode=True)
            .complete("Describe Bob, who is 42, in JSON.")
            .text
        ),
        "thinking": thinking,
        "vectors": vectors,
        "missing": lambda: model("nope").complete("hi"),
    }
)
