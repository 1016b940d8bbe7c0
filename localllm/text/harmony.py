"""The answers of gpt-oss: messages with a header that names channel and recipient.

    <|start|>assistant<|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>

The channel `analysis` is thinking, a recipient makes a tool call, everything else is content.
Tools are shown to the model as TypeScript, so it is told names that are identifiers.

Source: the Harmony response format, https://github.com/openai/harmony
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from localllm.text.calls import ToolCall, known_tools, parsed_json
from localllm.text.parsing import Parsed, held_length

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
ROLE = "assistant"
HEADER_BEGINS = (CHANNEL, MESSAGE, CONSTRAIN, "to=")
MAX_HEADER = 512
# Tools that the model was taught under these names.
OWN_TOOLS = re.compile(r"browser\.\w+|python")

Kind = Literal["content", "thinking", "call"]


def identifiers(names: Iterable[str]) -> dict[str, str]:
    """Names that are TypeScript identifiers, all different, and what each stands for."""
    found: dict[str, str] = {}
    for name in names:
        safe = re.sub(r"[^A-Za-z0-9_$]", "", re.sub(r"[\s.-]", "_", name)) or "_"
        safe = f"_{safe}" if safe[0].isdigit() else safe
        wanted = safe = name if OWN_TOOLS.fullmatch(name) else safe
        number = 1
        while safe in found:
            number += 1
            safe = f"{wanted}_{number}"
        found[safe] = name
    return found


def with_identifiers(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """The messages and tools with those names that the model is told."""
    safe = {name: told for told, name in identifiers(known_tools(tools)).items()}

    def renamed(item: Any) -> Any:
        """A tool or a call."""
        function = item.get("function") if isinstance(item, Mapping) else None
        if not isinstance(function, Mapping) or function.get("name") not in safe:
            return item
        return {**item, "function": {**function, "name": safe[function["name"]]}}

    told: list[Mapping[str, Any]] = []
    for message in messages:
        changes: dict[str, Any] = {}
        if isinstance(message.get("tool_calls"), list):
            changes["tool_calls"] = [renamed(call) for call in message["tool_calls"]]
        if message.get("tool_name") in safe:
            changes["tool_name"] = safe[message["tool_name"]]
        told.append({**message, **changes})
    return told, [renamed(tool) for tool in tools]


class HarmonyParser:
    """Headers and messages by turns. `prompt_end` tells in which of them the answer begins.

    names  what the identifiers that the model was told stand for
    """

    marks: tuple[str, ...] = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

    def __init__(self, prompt_end: str = "", names: Mapping[str, str] | None = None) -> None:
        self._names = names or {}
        self._buffer = ""
        self._body = ""
        self._recipient = ""
        self._kind: Kind = "content"
        self._out = Parsed()
        self._state: Callable[[bool], bool] = self._header
        _, mark, begun = prompt_end.rpartition(START)
        if mark:
            self.push(mark + begun)
            self._body = ""

    def push(self, text: str) -> Parsed:
        """What `text` makes certain."""
        self._buffer += text
        return self._run(is_end=False)

    def finish(self) -> Parsed:
        """The end of the answer; a call's mark of the end is the end of the answer itself."""
        return self._run(is_end=True)

    def _run(self, *, is_end: bool) -> Parsed:
        self._out = Parsed()
        while self._state(is_end):
            pass
        if is_end and self._state == self._message:
            self._end_message()
        return self._out

    def _header(self, is_end: bool) -> bool:
        """Up to the message's mark. What does not begin as headers do is content."""
        begun = self._buffer.lstrip()
        text = begun.removeprefix(START + ROLE).lstrip()
        is_short = any(m.startswith(begun) for m in (START + ROLE, *HEADER_BEGINS))
        if is_short or not text or any(m.startswith(text) for m in HEADER_BEGINS):
            return self._as_content("") if is_end and begun else False
        if not text.startswith(HEADER_BEGINS):
            return self._as_content(text)
        head, mark, rest = self._buffer.partition(MESSAGE)
        if not mark:
            if is_end or len(head) > MAX_HEADER:
                return self._as_content("")
            return False
        recipient, channel = RECIPIENT.search(head), CHANNEL_NAME.search(head)
        self._recipient = recipient[1] if recipient else ""
        is_analysis = channel is not None and channel[1] == "analysis"
        self._kind = "call" if self._recipient else "thinking" if is_analysis else "content"
        self._buffer = rest
        self._state = self._message
        return True

    def _as_content(self, text: str) -> bool:
        """Take what follows for content: a model that was not taught this, or a cut header."""
        self._buffer, self._kind = text, "content"
        self._state = self._message
        return True

    def _message(self, is_end: bool) -> bool:
        marks = (*ENDS, START, CHANNEL)
        found = [(at, m) for m in marks if (at := self._buffer.find(m)) >= 0]
        if not found:
            held = 0 if is_end else held_length(self._buffer, marks)
            safe = len(self._buffer) - held
            self._emit(self._buffer[:safe])
            self._buffer = self._buffer[safe:]
            return False
        at, mark = min(found)
        self._emit(self._buffer[:at])
        self._end_message()
        # These two begin the header that they are part of.
        self._buffer = self._buffer[at if mark in (START, CHANNEL) else at + len(mark) :]
        self._state = self._header
        return True

    def _emit(self, text: str) -> None:
        if self._kind == "call":
            self._body += text
        elif self._kind == "thinking":
            self._out.thinking += text
        else:
            self._out.content += text

    def _end_message(self) -> None:
        if self._kind != "call" or not self._body:
            return
        arguments = parsed_json(self._body)
        if isinstance(arguments, dict):
            name = self._recipient.removeprefix("functions.")
            self._out.tool_calls.append(ToolCall(self._names.get(name, name), arguments))
        else:
            self._out.content += self._body
        self._body = ""
