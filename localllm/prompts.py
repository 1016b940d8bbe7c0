"""From a request's text or messages to the token ids of its prompt, within the context.

Nothing is cut in silence: old messages are dropped only where the request allows it, the answer
says how many, and what is too long all the same is refused with both numbers.

Not here: how templates and tokenizers work (text/), answers (answers.py).
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.errors import BadRequest, PromptTooLong
from localllm.sampling import SamplingParams
from localllm.text.infill import infill
from localllm.text.tokenizer import Tokenizer
from localllm.voice import Voice, Voices

Message = Mapping[str, Any]
KEPT_ROLES = ("system", "developer")
OBVIOUSLY_LONG = 16  # characters a token, from which on all messages together hardly ever fit
MAX_CONTEXTS = 10  # times the context, after which an endless answer ends


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request for text: `messages` for the chat template, or `prompt` as it is.

    tokens        ids that stand before the prompt or messages (an earlier exchange), or are all
    template      source of one in place of the model's own, in Go's syntax or Jinja's, unless the
                  own one can do more; is_final_template: whatever that can do
    tools, variables   for the template; tools also to recognise calls in the answer
    suffix        text that comes after the answer, for templates that have a place for it
    think         False: the model is asked not to, and what it thinks is left out; a level ("low",
                  "medium", "high", "max") or True: it is; None: if it can
    format        "json" or a JSON schema, of what is said and not of what is thought
    grammar       in place of a format: GBNF, or Lark as llguidance reads it
    stop          texts that end the answer and are not part of it
    num_ctx       most positions; None: the model's limit
    truncate      drop the oldest messages when they do not fit, instead of refusing
    shift, num_keep   as in `engine.Request`; a negative num_keep keeps the whole prompt
    exact, cache_prompt, speculate, salt, priority, deadline   as in `engine.Request`
    """

    request_id: str
    prompt: str = ""
    messages: Sequence[Message] | None = None
    tokens: Sequence[int] = ()
    template: str = ""
    is_final_template: bool = False
    tools: Sequence[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    suffix: str = ""
    think: bool | str | None = None
    format: Any = None
    grammar: str = ""
    params: SamplingParams = field(default_factory=SamplingParams)
    stop: Sequence[str] = ()
    num_ctx: int | None = None
    truncate: bool = True
    shift: bool = False
    num_keep: int = 0
    exact: bool = False
    cache_prompt: bool = True
    speculate: bool = True
    salt: bytes = b""
    priority: int = 0
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and how many old messages had to go for them to fit.

    voice  how the model speaks in a chat; None for a text that is continued as it is
    """

    tokens: list[int]
    dropped_messages: int = 0
    voice: Voice | None = None


class PromptBuilder:
    """Renders and tokenises; one at a time, from any thread."""

    def __init__(self, tokenizer: Tokenizer, voices: Voices) -> None:
        self.tokenizer = tokenizer
        self.voices = voices
        self._lock = threading.Lock()

    def build(self, request: TextRequest, limit: int) -> Prompt:
        """The prompt of at most `limit` - 1 tokens, so that an answer has room.

        Raises PromptTooLong, with both numbers, when it cannot be made to fit.
        """
        self._check_ids(request.tokens)
        self._check_length(request, limit)
        with self._lock:
            if request.messages is None:
                prompt = Prompt(self._raw(request))
            else:
                prompt = self._chat(request, request.messages, limit)
        if len(prompt.tokens) >= limit:
            raise PromptTooLong.of(len(prompt.tokens), limit)
        return prompt

    def render(self, request: TextRequest) -> str:
        """The text of the prompt: what the template makes of the messages, after the tokens'."""
        self._check_ids(request.tokens)
        earlier = self.tokenizer.decode(request.tokens, special=True).decode(errors="replace")
        if request.messages is None:
            return earlier + request.prompt
        with self._lock:
            voice = self._voice(request)
            head, start = split_start(request.messages)
            variables = self._variables(request, voice)
            told, tools = voice.dialect.told(head, request.tools)
            text = voice.template.render(told, tools=tools, **variables)
            return earlier + text + start

    def _check_length(self, request: TextRequest, limit: int) -> None:
        """Refuse what cannot fit before it is tokenised: that takes seconds a megabyte, and other
        requests wait meanwhile.
        """
        text = request.prompt
        if request.messages:
            text = str(request.messages[-1].get("content") or "")
        fewest = self.tokenizer.fewest_tokens(text)
        if fewest >= limit:
            raise PromptTooLong.of(fewest, limit, at_least=True)

    def _check_ids(self, tokens: Sequence[int]) -> None:
        size = self.tokenizer.vocab_size
        if tokens and not 0 <= min(tokens) <= max(tokens) < size:
            raise BadRequest(f"the prompt has token ids outside 0 to {size - 1}")

    def tokens(self, request: TextRequest) -> list[int]:
        """The ids of the whole prompt, however many those are."""
        self._check_ids(request.tokens)
        with self._lock:
            if request.messages is None:
                return self._raw(request)
            return self._encode(request, list(request.messages))

    def encode(self, text: str | bytes, *, parse_special: bool = False) -> list[int]:
        with self._lock:
            return self.tokenizer.encode(text, parse_special=parse_special)

    def _voice(self, request: TextRequest) -> Voice:
        return self.voices.of(request.template, is_final=request.is_final_template)

    def _variables(self, request: TextRequest, voice: Voice) -> dict[str, Any]:
        """The template's variables; those that the request names itself win."""
        variables = voice.think_variables(request.think)
        if request.suffix:
            variables["suffix"] = request.suffix
        return {**variables, **request.variables}

    def _infill(self, request: TextRequest, messages: Sequence[Message]) -> list[int]:
        """Ids of the last message's text and the suffix, with the model's own marks."""
        text = str(messages[-1].get("content") or "")
        ids = infill(self.tokenizer, text, request.suffix)
        if ids is None:
            raise BadRequest("suffix: this model has no marks and no template for one")
        return self._with_bos([*request.tokens, *ids])

    def _raw(self, request: TextRequest) -> list[int]:
        """Exactly one BOS where the model wants one, then `tokens`, then the prompt's ids."""
        tokenizer = self.tokenizer
        ids = list(request.tokens)
        if request.prompt:
            ids += tokenizer.encode(request.prompt, parse_special=True)
        return self._with_bos(ids)

    def _with_bos(self, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_id
        if self.tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            return [bos, *ids]
        return ids

    def _chat(self, request: TextRequest, messages: Sequence[Message], limit: int) -> Prompt:
        """All messages if they fit, else the newest that do, system messages always with them."""
        if not messages:
            raise BadRequest("messages: there is none to answer")
        voice = self._voice(request)
        if request.suffix and not voice.has_suffix:
            return Prompt(self._infill(request, messages))
        size = sum(len(str(message.get("content") or "")) for message in messages)
        if size < OBVIOUSLY_LONG * limit or not request.truncate:
            tokens = self._encode(request, list(messages))
            if len(tokens) < limit or not request.truncate:
                return Prompt(tokens, voice=voice)
        return self._newest(request, messages, limit, voice)

    def _newest(
        self, request: TextRequest, messages: Sequence[Message], limit: int, voice: Voice
    ) -> Prompt:
        """The newest messages that fit; at least the last one, whether it fits or not.

        It tries ever more messages from the last one on and then halves, so that it never renders
        much more than fits: there may be a hundred thousand.
        """
        fitting, too_many = 1, len(messages) + 1
        best = self._encode(request, without_oldest(messages, len(messages) - 1))
        if len(best) >= limit:
            too_many = 2
        while too_many - fitting > 1:
            number = min(2 * fitting, (fitting + too_many) // 2)
            tokens = self._encode(request, without_oldest(messages, len(messages) - number))
            if len(tokens) < limit:
                best, fitting = tokens, number
            else:
                too_many = number
        kept = len(without_oldest(messages, len(messages) - fitting))
        return Prompt(best, len(messages) - kept, voice)

    def _encode(self, request: TextRequest, messages: list[Message]) -> list[int]:
        voice = self._voice(request)
        head, start = split_start(messages)
        variables = self._variables(request, voice)
        told, tools = voice.dialect.told(head, request.tools)
        ids = voice.template.encode(told, tools=tools, **variables)
        if start:
            ids += self.tokenizer.encode(start, parse_special=False)
        return self._after(list(request.tokens), ids) if request.tokens else ids

    def _after(self, earlier: list[int], ids: list[int]) -> list[int]:
        """`ids` after an earlier exchange; where the model wants one, the one BOS comes first."""
        if not self.tokenizer.add_bos or ids[:1] != [self.tokenizer.bos_id]:
            return earlier + ids
        start = 1 if earlier[0] == ids[0] else 0
        return ids[:1] + earlier[start:] + ids[1:]


def split_start(messages: Sequence[Message]) -> tuple[list[Message], str]:
    """The messages, and the text of a last one of the assistant, which the answer goes on from."""
    last = messages[-1]
    is_start = last.get("role") == "assistant" and not last.get("tool_calls")
    if not is_start or len(messages) == 1:
        return list(messages), ""
    return list(messages[:-1]), str(last.get("content") or "")


def without_oldest(messages: Sequence[Message], count: int) -> list[Message]:
    """The messages without the first `count`, of which system messages stay.

    A tool's result whose call is gone goes with it; the last message always stays.
    """
    kept = [m for m in messages[:count] if m.get("role") in KEPT_ROLES]
    rest = list(messages[count:])
    while len(rest) > 1 and rest[0].get("role") == "tool":
        del rest[0]
    return kept + rest


def bounded(params: SamplingParams, num_ctx: int, *, shift: bool) -> tuple[int, bool]:
    """(num_predict, shift) such that every answer ends.

    -1 ends at a full context, or with shift after ten contexts; -2 fills the context.
    """
    if params.num_predict == -2:
        return -1, False
    if not shift:
        return params.num_predict, False
    most = MAX_CONTEXTS * num_ctx
    return (most if params.num_predict < 0 else min(params.num_predict, most)), True
