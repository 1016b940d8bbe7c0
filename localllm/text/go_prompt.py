"""Chat templates in Go's syntax: what a Modelfile's TEMPLATE says, over messages as Ollama gives them.

A template that reads `.Messages` is run once. An older one reads `.System`, `.Prompt` and
`.Response`, is run once for each exchange, and for the last one ends where the response begins. One
that reads neither gets the response at its end.

Not here: Go's language (go_template.py), how forged control tokens are told apart (template.py).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from localllm.errors import BadRequest
from localllm.text.go_parser import Branch, Dot, Emit, Field, Node, Pipe
from localllm.text.go_template import GoTemplate, JsonList, Record, operands
from localllm.text.provenance import Context
from localllm.text.template import ChatTemplate, Source
from localllm.text.tokenizer import Tokenizer

RESPONSE = "Response"
RESPONSE_NODE = Emit(Pipe(0, ((Field(Dot(), (RESPONSE,)),),)))
DEFAULT_LEVEL = "medium"
THOUGHTS = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)


class GoChatTemplate(ChatTemplate):
    """A TEMPLATE in the place of the file's own. Raises BadRequest, with the line, if it is wrong."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self._plain = self._with_tools = GoSource(source, tokenizer)

    @property
    def has_suffix(self) -> bool:
        """Whether it has a place for what comes after the answer."""
        return "suffix" in self.variables


class GoSource(Source):
    """One compiled Go template."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        super().__init__(text, tokenizer)
        self.template = GoTemplate(text)
        self.fields = self.template.fields
        self.nodes = self.template.nodes
        if not self.fields & {"Messages", RESPONSE}:
            self.nodes = (*self.nodes, RESPONSE_NODE)

    @cached_property
    def variables(self) -> frozenset[str]:
        names = {name.lower() for name in self.fields}
        if names & {"think", "thinklevel", "isthinkset"}:
            names.add("enable_thinking")
        return frozenset(names)

    def adapt(self, messages: list[dict[str, Any]]) -> None:
        """Leave out what was thought before the last question, where clients send it back.

        Arguments need nothing: they print as JSON whatever they are.
        """
        asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
        for message in messages[: max(asked, default=0)]:
            if message["role"] == "assistant" and isinstance(message["content"], str):
                message["content"] = THOUGHTS.sub("", message["content"])

    def render(self, context: Context) -> str:
        """The prompt's text. Raises BadRequest where the template fails."""
        thinking = _thinking(context.variables)
        messages, system = collated(context.messages)
        suffix = context.variables.get("suffix")
        if suffix:
            prompt = messages[-1]["content"] if messages else ""
            fields = {"System": system, "Prompt": prompt, "Suffix": suffix, RESPONSE: ""}
            return self.template.run({**thinking, **fields}, self.nodes)
        if "Messages" not in self.fields:
            return "".join(self._exchanges(context.messages, thinking))
        fields = {
            "System": system,
            "Messages": [_message(message) for message in messages],
            "Tools": JsonList(_tool(tool) for tool in context.tools or ()),
            RESPONSE: "",
        }
        return self.template.run({**thinking, **fields}, self.nodes)

    def _exchanges(
        self, messages: Sequence[Mapping[str, Any]], thinking: Mapping[str, Any]
    ) -> Iterator[str]:
        """The texts of the exchanges, the last one up to its response."""
        empty = {"System": "", "Prompt": "", RESPONSE: ""}
        fields = dict(empty)
        for message in messages:
            role, content = message["role"], message["content"]
            is_next = bool(fields[RESPONSE]) and role in ("system", "user")
            if is_next or (role == "system" and fields["Prompt"]):
                yield self.template.run({**thinking, **fields}, self.nodes)
                fields = dict(empty)
            name = {"system": "System", "assistant": RESPONSE}.get(role, "Prompt")
            fields[name] = f"{fields[name]}\n\n{content}" if fields[name] else content
        yield self.template.run({**thinking, **fields}, cut_at_response(self.nodes)[0])


def collated(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """(messages of which neighbours of one role are joined, all system texts)."""
    found: list[dict[str, Any]] = []
    for message in messages:
        last = found[-1] if found else None
        can_join = last is not None and last["role"] == message["role"] != "tool"
        if (
            last is not None
            and can_join
            and not (last.get("tool_calls") or message.get("tool_calls"))
        ):
            texts = (last["content"], message["content"])
            last["content"] = "\n\n".join(text for text in texts if text)
        else:
            found.append({**message, "content": message.get("content") or ""})
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    return found, system


def _thinking(variables: Mapping[str, Any]) -> dict[str, Any]:
    wanted = variables.get("enable_thinking")
    level = variables.get("reasoning_effort")
    if level is None and wanted:
        level = DEFAULT_LEVEL
    return {
        "Think": bool(wanted),
        "ThinkLevel": level if wanted else "",
        "IsThinkSet": wanted is not None,
    }


def _message(message: Mapping[str, Any]) -> Record:
    fields = {
        "Role": message["role"],
        "Content": message["content"],
        "Thinking": message.get("thinking") or message.get("reasoning_content") or "",
        "Images": [],
        "ToolCalls": JsonList(_call(i, c) for i, c in enumerate(message.get("tool_calls") or ())),
        "ToolName": message.get("tool_name") or message.get("name") or "",
        "ToolCallID": message.get("tool_call_id") or "",
    }
    return Record(fields, dict(message))


def _call(index: int, call: Mapping[str, Any]) -> Record:
    function = call["function"]
    arguments = function.get("arguments") or {}
    fields = {"Index": index, "Name": function["name"], "Arguments": arguments}
    source = {"name": function["name"], "arguments": arguments}
    identity = call.get("id") or ""
    whole: dict[str, Any] = {"function": source}
    if identity:
        whole = {"id": identity, **whole}
    return Record({"ID": identity, "Function": Record(fields, source)}, whole)


def _tool(tool: Any) -> Record:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest("tools: one of them has no function name")
    parameters = function.get("parameters")
    schema = parameters if isinstance(parameters, Mapping) else {}
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    fields = {
        "Name": function["name"],
        "Description": function.get("description") or "",
        "Parameters": Record(
            {
                "Type": schema.get("type") or "",
                "Required": list(schema.get("required") or ()),
                "Properties": {name: _property(value) for name, value in known.items()},
                "Defs": schema.get("$defs"),
                "Items": schema.get("items"),
            },
            schema,
        ),
    }
    return Record(
        {"Type": tool.get("type") or "function", "Function": Record(fields, function)}, tool
    )


def _property(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    kind = schema.get("type") or ""
    fields = {
        "Type": JsonList(kind) if isinstance(kind, list) else kind,
        "Description": schema.get("description") or "",
        "Enum": list(schema.get("enum") or ()),
        "Items": schema.get("items"),
        "AnyOf": [_property(option) for option in schema.get("anyOf") or ()],
        "Required": list(schema.get("required") or ()),
        "Properties": schema.get("properties") or {},
    }
    return Record(fields, schema)


def cut_at_response(nodes: Sequence[Node]) -> tuple[tuple[Node, ...], bool]:
    """The nodes up to the first that reads `.Response`, and whether there is one."""
    kept: list[Node] = []
    for node in nodes:
        if isinstance(node, Emit):
            kept.append(node)
            if _reads_response(node.pipe):
                return tuple(kept), True
        elif isinstance(node, Branch):
            # A condition may ask for the response; a response in one arm leaves the other whole.
            body, is_cut = cut_at_response(node.body)
            otherwise, is_cut_too = cut_at_response(node.otherwise)
            kept.append(Branch(node.kind, node.pipe, body, otherwise))
            if is_cut or is_cut_too:
                return tuple(kept), True
        else:
            kept.append(node)
    return tuple(kept), False


def _reads_response(pipe: Pipe) -> bool:
    found = operands((Emit(pipe),))
    return any(isinstance(o, Field) and RESPONSE in o.names for o, _ in found)
