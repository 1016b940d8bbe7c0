"""Chat templates: messages to the text, and the token ids, of a prompt.

Promises:
  1. the text is what transformers' `apply_chat_template` renders from the same messages;
  2. control tokens come from the template alone: one that is spelled in a message, a tool's
     result or a tool's description stays text, however the template cuts and joins it;
  3. the ids have exactly one BOS if the model wants one, and never two;
  4. a template cannot reach anything, and stops (sandbox.py).

Templates that refuse a system message get its text at the head of the first user's message instead.

Where a template acts on a tag in a message (`'</think>' in content`) the real text decides what
is rendered. If that cannot be told apart from a forged marker, the marker stays text.

Not here: raw prompts, what an answer's tags mean.
"""

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from jinja2 import Template, TemplateSyntaxError, meta

from localllm.errors import BadFile, BadRequest, UnsupportedModel
from localllm.metadata import Metadata
from localllm.text.messages import copied, prepared
from localllm.text.provenance import PRIVATE, Context, Disguise, Provenance
from localllm.text.sandbox import BoundedEnvironment, TemplateRefusal
from localllm.text.tokenizer import Piece, Tokenizer

T = TypeVar("T")
KEY = "tokenizer.chat_template"
MAX_SOURCE_LENGTH = 1 << 18
MAX_PROBES = 4
PROBE_KEY = "localllm_probe"
PROBE = {PROBE_KEY: "x"}
# Harmony tells system and developer apart; to all other templates they are one role.
DEVELOPER_MARK = "<|channel|>"

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
# For models that were never taught a chat: one text is continued as it is.
PLAIN = """\
{%- if messages | length == 1 -%}
{{ messages[0].content }}
{%- else -%}
{%- for message in messages -%}
{{ message.role | capitalize + ': ' + message.content + '\\n\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}Assistant:{% endif -%}
{%- endif -%}
"""


class Refused(BadRequest):
    """The template called raise_exception."""


class ChatTemplate:
    """The template of one model, and its variant for requests with tools if there is one."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, tool_source: str = "") -> None:
        self.tokenizer = tokenizer
        self.source = source
        self._plain: Source = JinjaSource(source, tokenizer)
        self._with_tools: Source = (
            JinjaSource(tool_source, tokenizer) if tool_source else self._plain
        )

    @classmethod
    def from_metadata(cls, metadata: Metadata, tokenizer: Tokenizer) -> "ChatTemplate":
        """The template in the file, or ChatML if the vocabulary has its markers, or none to speak of.

        Raises UnsupportedModel, with the line, for a template that does not compile.
        """
        source = metadata.str(KEY, default="")
        if not source.strip():
            has_chatml = tokenizer.id_of("<|im_start|>") is not None
            source = CHATML if has_chatml else PLAIN
        try:
            return cls(source, tokenizer, tool_source=metadata.str(f"{KEY}.tool_use", default=""))
        except (BadFile, UnsupportedModel) as error:
            raise type(error)(f"{metadata.path}: {error}") from None

    @property
    def variables(self) -> frozenset[str]:
        """Names that the template reads: `tools` or `enable_thinking` tell what it can do."""
        return self._plain.variables | self._with_tools.variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of the prompt, BOS included if the template writes it.

        Raises BadRequest with the template's own words if it refuses the messages.
        """
        source = self._with_tools if tools else self._plain
        context = self._context(source, messages, tools, add_generation_prompt, variables)
        return _folding_system(source.render, context)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """The ids of the prompt. Raises BadRequest like `render`."""
        source = self._with_tools if tools else self._plain
        context = self._context(source, messages, tools, add_generation_prompt, variables)
        pieces = _folding_system(source.pieces, context)
        return self._one_bos(self.tokenizer.encode_pieces(pieces))

    def _context(
        self,
        source: "Source",
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> Context:
        if tools and "tools" not in source.variables:
            raise BadRequest("tools: the chat template of this model has no place for them")
        found = prepared(messages)
        if DEVELOPER_MARK not in source.text:
            for message in found:
                if message["role"] == "developer":
                    message["role"] = "system"
        given = {"add_generation_prompt": add_generation_prompt, **copied(variables)}
        source.adapt(found)
        return Context(found, copied(tools) if tools else None, given)

    def _one_bos(self, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_id
        if bos is None:
            return ids
        num_bos = 0
        while num_bos < len(ids) and ids[num_bos] == bos:
            num_bos += 1
        if num_bos or self.tokenizer.add_bos:
            return [bos, *ids[num_bos:]]
        return ids


class Source(ABC):
    """One compiled template, in whatever language."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        if len(text) > MAX_SOURCE_LENGTH:
            raise BadFile(f"the chat template has {len(text)} characters")
        if PRIVATE.search(text):
            raise UnsupportedModel("the chat template contains private-use characters")
        self.text = text
        self.tokenizer = tokenizer
        self.provenance = Provenance(tokenizer, text)

    @cached_property
    @abstractmethod
    def variables(self) -> frozenset[str]:
        """Names that the template reads and does not set."""

    @abstractmethod
    def render(self, context: Context) -> str:
        """The template's text. Whatever goes wrong in it is a BadRequest."""

    @abstractmethod
    def adapt(self, messages: list[dict[str, Any]]) -> None:
        """Give tool calls the form in which this template can show them."""

    def pieces(self, context: Context) -> list[Piece]:
        """The rendered text, with what may be recognised as a control token."""
        real = self.render(context)
        provenance = self.provenance
        if not provenance.is_needed(context):
            return [Piece(real, parse_special=True)]
        safe = self._disguised(provenance.symbol_disguise(context))
        if safe is not None and spelled(safe) == real:
            return safe
        spared, others = self._acted_on(context, real)
        found = self._disguised(provenance.token_disguise(context, others))
        if found is not None and spelled(found) == real and self._is_sound(found, safe, spared):
            return found
        if safe is None:
            raise BadRequest("the model's chat template fails on control tokens in the messages")
        return safe

    def _disguised(self, disguise: Disguise) -> list[Piece] | None:
        """What the disguised context renders to; None if the template fails on it."""
        try:
            return disguise.pieces(self.render(disguise.context))
        except BadRequest:
            return None

    def _acted_on(self, context: Context, real: str) -> tuple[set[str], list[str]]:
        """The spelled-out tokens without which the template renders something else, and the others."""
        provenance = self.provenance
        tokens = provenance.spelled_out(context)
        spared = set()
        for token in [t for t in tokens if t in self.text][:MAX_PROBES]:
            pieces = self._disguised(provenance.token_disguise(context, [token]))
            if pieces is None or spelled(pieces) != real:
                spared.add(token)
        return spared, [t for t in tokens if t not in spared]

    def _is_sound(self, found: list[Piece], safe: list[Piece] | None, spared: set[str]) -> bool:
        """Whether no control token is there that the template did not write by itself."""
        if spared & self.provenance.control.keys():
            return False
        if safe is None:
            return True
        have, may_have = self._count_control(found), self._count_control(safe)
        return all(count <= may_have[token] for token, count in have.items())

    def _count_control(self, pieces: list[Piece]) -> Counter[int]:
        ids = self.tokenizer.encode_pieces(pieces)
        return Counter(i for i in ids if self.tokenizer.is_special(i))


class JinjaSource(Source):
    """A template in Jinja's syntax."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        super().__init__(text, tokenizer)
        self.environment = BoundedEnvironment()
        self.template = self._compile()
        texts = tokenizer.vocabulary.texts
        self.constants = {
            f"{name}_token": "" if token is None else texts[token]
            for name, token in (
                ("bos", tokenizer.bos_id),
                ("eos", tokenizer.eos_id),
                ("unk", tokenizer.vocabulary.unknown_id),
            )
        }

    @cached_property
    def variables(self) -> frozenset[str]:
        return frozenset(meta.find_undeclared_variables(self.environment.parse(self.text)))

    def _compile(self) -> Template:
        try:
            return self.environment.compile_source(self.text)
        except TemplateSyntaxError as error:
            reason = f"{error.message} (line {error.lineno})"
        except Exception as error:
            # Python's own compiler, or the recursion limit, on what jinja2 made of it.
            reason = str(error)
        raise UnsupportedModel(f"the chat template cannot be used: {reason}")

    def render(self, context: Context) -> str:
        values = {
            **self.constants,
            **context.variables,
            "messages": copied(context.messages),
            "tools": copied(context.tools),
        }
        try:
            return self.environment.render(self.template, values)
        except TemplateRefusal as error:
            raise Refused(f"the model's chat template refuses: {one_line(error)}") from None
        except Exception as error:
            # The template is foreign code: nothing that it raises is a fault of ours.
            raise BadRequest(f"the model's chat template fails: {one_line(error)}") from None

    def adapt(self, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            if "tool_calls" not in message:
                continue
            if not message["content"] and self._takes_null_content:
                message["content"] = None
            for call in message["tool_calls"]:
                arguments = call["function"]["arguments"]
                if isinstance(arguments, dict) and self._wants_text_arguments:
                    call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)

    @cached_property
    def _wants_text_arguments(self) -> bool:
        """Whether the arguments of a call are shown as JSON only if they are given as a text."""
        return not self._shows_arguments(PROBE) and self._shows_arguments(json.dumps(PROBE))

    def _shows_arguments(self, arguments: Any) -> bool:
        text = self._probe("", arguments)
        # A mapping that was joined to a text is spelled as Python does, in single quotes.
        return text is not None and PROBE_KEY in text and f"'{PROBE_KEY}'" not in text

    @cached_property
    def _takes_null_content(self) -> bool:
        """Whether a call without content may have null there, which some templates look at."""
        arguments = json.dumps(PROBE) if self._wants_text_arguments else PROBE
        text = self._probe(None, arguments)
        return text is not None and "None" not in text

    def _probe(self, content: str | None, arguments: Any) -> str | None:
        """What the template makes of a small chat with a tool call; None if it fails."""
        call = {"name": "f", "arguments": arguments}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "q"},
            {
                "role": "assistant",
                "content": content,
                "tool_calls": [{"id": "call00001", "type": "function", "function": call}],
            },
            {"role": "tool", "content": "r", "name": "f", "tool_call_id": "call00001"},
        ]
        try:
            return self.render(Context(messages, None, {"add_generation_prompt": True}))
        except BadRequest:
            return None


def _folding_system(work: Callable[[Context], T], context: Context) -> T:
    """`work` on the context; if the template refuses it, with the system text in the user's."""
    try:
        return work(context)
    except Refused:
        folded = folded_system(context.messages)
        if folded is None:
            raise
        try:
            return work(Context(folded, context.tools, context.variables))
        except BadRequest:
            # The system message was not the reason.
            pass
        raise


def folded_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with a leading system text put before the user's; None if there is no such pair."""
    if [m["role"] for m in messages[:2]] != ["system", "user"]:
        return None
    system, first = messages[:2]
    return [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *messages[2:]]


def spelled(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:500] or type(error).__name__
