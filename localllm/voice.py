"""How a model speaks in a chat: its template, and the dialect of its answers, as one choice.

Not here: templates and dialects as such (text/), which request wants what (prompts.py).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localllm.text.dialects import Dialect, capabilities, dialect_of, is_go
from localllm.text.go_prompt import GoChatTemplate
from localllm.text.parsing import Parser
from localllm.text.template import ChatTemplate
from localllm.text.tokenizer import Tokenizer

MAX_TEMPLATES = 8
END_LENGTH = 48  # tokens of a prompt that tell where the answer begins
MAX_LEVEL, HIGHEST_LEVEL = "max", "high"


@dataclass(frozen=True, slots=True)
class Voice:
    """A chat template and what the answers to its prompts consist of."""

    template: ChatTemplate
    dialect: Dialect

    @property
    def has_suffix(self) -> bool:
        return isinstance(self.template, GoChatTemplate) and self.template.has_suffix

    def think_variables(self, think: bool | str | None) -> dict[str, Any]:
        """What a template is told about thinking; None: that it is wanted, if the model can."""
        known = self.template.variables
        wanted = self.dialect.has_thinking if think is None else bool(think)
        if think is None and not wanted:
            return {}
        variables: dict[str, Any] = {
            name: wanted for name in ("enable_thinking", "thinking") if name in known
        }
        if isinstance(think, str):
            variables["reasoning_effort"] = HIGHEST_LEVEL if think == MAX_LEVEL else think
        return variables

    def parser(
        self, prompt_end: str, tools: Sequence[Any] | None, think: bool | str | None
    ) -> Parser:
        """A parser for the answer to a prompt that ends so."""
        return self.dialect.parser(tools=tools, prompt_end=prompt_end, think=think is not False)


class Voices:
    """The voice of a model's own template, and those that Modelfiles give it."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.own = Voice(template, dialect_of(template.source))
        self._capabilities = capabilities(template.source)
        self._others: OrderedDict[str, Voice] = OrderedDict()

    def of(self, source: str | None, *, is_final: bool = False) -> Voice:
        """The voice of a Modelfile's template, unless it can do less than the model's own.

        is_final  whatever it can do
        Raises BadRequest or UnsupportedModel, with the line, for a template that is wrong.
        """
        if not source or (not is_final and capabilities(source) < self._capabilities):
            return self.own
        voice = self._others.get(source)
        if voice is None:
            kind = GoChatTemplate if is_go(source) else ChatTemplate
            voice = Voice(kind(source, self.tokenizer), dialect_of(source))
            self._others[source] = voice
        self._others.move_to_end(source)
        if len(self._others) > MAX_TEMPLATES:
            self._others.popitem(last=False)
        return voice

    def end_of(self, tokens: Sequence[int]) -> str:
        """The end of a prompt's text, its control tokens included."""
        return self.tokenizer.decode(tokens[-END_LENGTH:], special=True).decode(errors="replace")
