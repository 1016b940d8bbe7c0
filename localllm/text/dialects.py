"""Which marks a model puts around its thinking and its tool calls: one row for each dialect.

A model's chat template tells its dialect: it has the marks in it. A template that matches no row
belongs to a model whose text is taken as it is.

Not here: how marks are found in a stream (parsing.py), the text between them (calls.py).
Source: the model cards, chat templates and vendors' documentation of the families named.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.text.calls import (
    known_tools,
    read_argument_tags,
    read_fenced,
    read_function_tags,
    read_gemma,
    read_invoke_tags,
    read_json,
    read_known_json,
    read_python,
)
from localllm.text.harmony import HarmonyParser, identifiers, with_identifiers
from localllm.text.parsing import Calls, Parsed, Parser, PlainParser, TagParser, Tags

HARMONY_SIGNS = ("<|start|>", "<|channel|>", "<|message|>")
BLANKS = re.compile(r"\s*")
DEEPSEEK_HEAD = re.compile(
    r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[^\s<]+)(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?\s*)?"
)
MISTRAL_HEAD = re.compile(r"\s*(?:(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?\[ARGS\])?\s*")
KIMI_HEAD = re.compile(
    r"\s*(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*"
)
FENCE = re.compile(r"\s*```(?:json)?\s*")

# The first row that has a sign in the template holds.
THINKING = (
    Tags("cohere", "<|START_THINKING|>", "<|END_THINKING|>", ("<|START_THINKING|>",)),
    Tags("mistral", "[THINK]", "[/THINK]", ("[THINK]",)),
    Tags("gemma4", "<|channel>thought\n", "<channel|>", ("<|channel>",)),
    Tags("seed", "<seed:think>", "</seed:think>", ("<seed:think>",)),
    Tags("think", "<think>", "</think>", ("<think>", "</think>")),
)

# The first row that has all of its signs in the template holds.
CALLS = (
    Calls(
        "gemma4",
        ("<|tool_call>",),
        ("<|tool_call>",),
        read_gemma('<|"|>'),
        close="<tool_call|>",
        inner=('<|"|>',),
    ),
    Calls(
        "functiongemma",
        ("<start_function_call>",),
        ("<start_function_call>",),
        read_gemma("<escape>"),
        close="<end_function_call>",
        inner=("<escape>",),
    ),
    Calls(
        "cohere",
        ("<|START_ACTION|>",),
        ("<|START_ACTION|>",),
        read_json,
        close="<|END_ACTION|>",
        head=BLANKS,
        dropped=(
            *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
            "<|END_OF_TURN_TOKEN|>",
        ),
    ),
    Calls(
        "command-r",
        ("<|START_OF_TURN_TOKEN|>", "Action:"),
        ("Action:",),
        read_json,
        close="```",
        head=FENCE,
    ),
    Calls(
        "deepseek",
        ("<｜tool▁call▁begin｜>",),
        ("<｜tool▁call▁begin｜>",),
        read_json,
        close="<｜tool▁call▁end｜>",
        head=DEEPSEEK_HEAD,
        dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        after=("```",),
        inner=("<｜tool▁sep｜>",),
    ),
    Calls(
        "mistral",
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]",),
        read_json,
        head=MISTRAL_HEAD,
        inner=("[ARGS]", "[CALL_ID]"),
    ),
    Calls(
        "lfm2",
        ("<|tool_call_start|>",),
        ("<|tool_call_start|>",),
        read_python,
        close="<|tool_call_end|>",
    ),
    Calls(
        "olmo3",
        ("<function_calls>",),
        ("<function_calls>",),
        read_python,
        close="</function_calls>",
    ),
    Calls(
        "kimi",
        ("<|tool_call_begin|>",),
        ("<|tool_call_begin|>",),
        read_json,
        close="<|tool_call_end|>",
        head=KIMI_HEAD,
        dropped=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        inner=("<|tool_call_argument_begin|>",),
    ),
    Calls("nemotron", ("<TOOLCALL>",), ("<TOOLCALL>",), read_json, "</TOOLCALL>", BLANKS),
    Calls("apriel", ("<tool_calls>",), ("<tool_calls>",), read_json, "</tool_calls>", BLANKS),
    Calls(
        "minimax",
        ("<minimax:tool_call>",),
        ("<minimax:tool_call>",),
        read_invoke_tags,
        close="</minimax:tool_call>",
    ),
    Calls(
        "glimmer",
        ("<atem:function_calls>",),
        ("<atem:function_calls>",),
        read_invoke_tags,
        close="</atem:function_calls>",
    ),
    Calls(
        "seed",
        ("<seed:tool_call>",),
        ("<seed:tool_call>",),
        read_function_tags,
        close="</seed:tool_call>",
    ),
    Calls(
        "glm",
        ("<tool_call>", "<arg_key>"),
        ("<tool_call>",),
        read_argument_tags,
        close="</tool_call>",
        inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    Calls(
        "qwen3-coder",
        ("<tool_call>", "<function="),
        ("<tool_call>",),
        read_function_tags,
        close="</tool_call>",
    ),
    Calls(
        "hermes",
        ("<tool_call>",),
        ("<tool_call>",),
        read_json,
        close="</tool_call>",
        head=BLANKS,
    ),
    # Granite 3 has no closing mark, Phi-4-mini has.
    Calls(
        "granite",
        ("<|tool_call|>",),
        ("<|tool_call|>",),
        read_json,
        close="<|/tool_call|>",
        head=BLANKS,
    ),
    # Only templates of Gemma 3 that somebody gave it have tools.
    Calls(
        "gemma3",
        ("<start_of_turn>", "ools"),
        ("```tool_code", "```tool_call", "```json"),
        read_fenced,
        close="```",
        is_bare=True,
    ),
    Calls(
        "llama4",
        ("<|header_start|>",),
        ("<|python_start|>",),
        read_known_json,
        close="<|python_end|>",
        head=BLANKS,
        is_bare=True,
    ),
    Calls(
        "llama3",
        ("<|start_header_id|>", '"parameters":'),
        ("<|python_tag|>",),
        read_known_json,
        head=BLANKS,
        is_bare=True,
    ),
)

# For templates that show tools in a way not known here: a call that is the whole answer.
GENERIC = Calls("generic", (), (), read_known_json, head=BLANKS, is_bare=True)
TOOLS_IN_JINJA = re.compile(r"\btools\b")


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a model's text consists of beside content."""

    tags: Tags | None = None
    calls: Calls | None = None
    is_harmony: bool = False

    @property
    def has_thinking(self) -> bool:
        return self.tags is not None or self.is_harmony

    @property
    def has_tools(self) -> bool:
        return self.calls is not None or self.is_harmony

    def is_thinking_open(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so has begun the thinking for the model."""
        return self.tags is not None and prompt_end.rstrip().endswith(self.tags.open.rstrip())

    def told(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Any] | None]:
        """The messages and tools as the model is to be told of them."""
        return with_identifiers(messages, tools) if self.is_harmony and tools else (messages, tools)

    def parser(
        self, *, tools: Sequence[Any] | None = None, prompt_end: str = "", think: bool = True
    ) -> Parser:
        """A parser for one answer. Calls are recognised only if there are tools.

        prompt_end  the end of the prompt's text, its control tokens included
        think       False: thinking that comes all the same is left out
        """
        parser: Parser
        if self.is_harmony:
            parser = HarmonyParser(prompt_end, identifiers(known_tools(tools)))
        elif self.tags is None and (self.calls is None or (not tools and not self.calls.dropped)):
            return PlainParser()
        else:
            parser = TagParser(
                self.tags,
                self.calls,
                known_tools(tools),
                is_thinking=self.is_thinking_open(prompt_end),
            )
        return parser if think else Unthinking(parser)


class Unthinking:
    """A parser whose thinking nobody wants to see."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self.marks = parser.marks

    def push(self, text: str) -> Parsed:
        return _without_thinking(self._parser.push(text))

    def finish(self) -> Parsed:
        return _without_thinking(self._parser.finish())


def _without_thinking(parsed: Parsed) -> Parsed:
    parsed.thinking = ""
    return parsed


def dialect_of(template: str) -> Dialect:
    """The dialect of a model with this chat template, in Jinja's or Go's syntax."""
    if all(sign in template for sign in HARMONY_SIGNS):
        return Dialect(is_harmony=True)
    tags = next((t for t in THINKING if any(sign in template for sign in t.signs)), None)
    calls = next((c for c in CALLS if all(sign in template for sign in c.signs)), None)
    if calls is None and has_tools(template):
        calls = GENERIC
    return Dialect(tags, calls)


def is_go(template: str) -> bool:
    """Whether a template is in Go's syntax: only Jinja's has statements in `{% %}`."""
    return "{%" not in template


def has_tools(template: str) -> bool:
    """Whether a template has a place for tools."""
    if is_go(template):
        return ".Tools" in template
    return TOOLS_IN_JINJA.search(template) is not None


def capabilities(template: str) -> frozenset[str]:
    """What a model with this template can do beside going on with a text, in Ollama's words."""
    found = set()
    if has_tools(template):
        found.add("tools")
    if dialect_of(template).has_thinking:
        found.add("thinking")
    if is_go(template) and ".Suffix" in template:
        found.add("insert")
    return frozenset(found)
