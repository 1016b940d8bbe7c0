"""Which characters of a rendered prompt came out of the messages.

A template mixes its own markers with the texts of people and tools, and only its own may become
control tokens. So the messages are disguised before rendering: characters that control tokens are
made of are swapped for private-use characters one to one. Lengths, whitespace, quotes and
everything else a template may look at stay as they are. In the result the private characters are
swapped back, and where they stood no control token is recognised.

There are two disguises. `symbols` swaps every character that a control token could begin with, so
nothing in a message can become part of one, whatever the template cuts or joins. `tokens` swaps
only whole spelled-out control tokens, for templates that look for other tags in a message
(`'</think>' in content`).

Not here: which disguise is right for a template and its messages (template.py).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from localllm.text.tokenizer import Piece, Tokenizer
from localllm.text.vocabulary import CONTROL, UNKNOWN, USER_DEFINED

# Supplementary private use areas A and B; the last two code points of a plane are no characters.
FIRST_OF_OTHERS, FIRST_OF_ASSISTANT = 0xF0000, 0x100000
PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
DISGUISED = re.compile("([\U000f0000-\U000ffffd]+)|([\U00100000-\U0010fffd]+)")
MIN_TAG_LENGTH = 3
ASSISTANT = "assistant"


def may_be_swapped(char: str) -> bool:
    """Whether templates and JSON treat the character like any other."""
    return not char.isspace() and char not in "\"'\\" and char.isprintable()


@dataclass(frozen=True, slots=True)
class Context:
    """All that a rendering gets from a request."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    variables: dict[str, Any]

    def strings(self) -> Iterator[str]:
        yield from strings((self.messages, self.tools, self.variables))


def strings(value: Any) -> Iterator[str]:
    """Every text in nested lists and mappings, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings(item)


class Provenance:
    """Disguises for one model's control tokens and one template.

    In what an assistant said earlier, tags that are no control tokens (`<think>`) keep their
    tokens. In all other texts those that the template itself writes do not: to the model they are
    markers like any control token.
    """

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        vocabulary = tokenizer.vocabulary
        texts = vocabulary.texts
        self.control = {texts[i]: i for i in vocabulary.ids_of_kind(CONTROL, UNKNOWN) if texts[i]}
        self.tags = {
            texts[i]: i
            for i in vocabulary.ids_of_kind(USER_DEFINED)
            if len(texts[i]) >= MIN_TAG_LENGTH and texts[i] in source and symbol_of(texts[i])
        }
        everything = [*self.control, *self.tags]
        self.wordlike = [text for text in everything if symbol_of(text) is None]
        self.symbols = {s for text in everything if (s := symbol_of(text)) is not None}
        self.letters = sorted({c for text in everything for c in text if may_be_swapped(c)})

    def is_needed(self, context: Context) -> bool:
        """Whether any text has a character that a control token could begin with."""
        for text in context.strings():
            if not self.symbols.isdisjoint(text) or PRIVATE.search(text):
                return True
            if any(word in text for word in self.wordlike):
                return True
        return False

    def spelled_out(self, context: Context) -> list[str]:
        """The control tokens and tags that occur in the texts, the longest first."""
        joined = "\0".join(context.strings())
        found = [text for text in (*self.control, *self.tags) if text in joined]
        return sorted(found, key=len, reverse=True)

    def symbol_disguise(self, context: Context) -> "Disguise":
        return Disguise(self, context, self.symbols, self.wordlike)

    def token_disguise(self, context: Context, tokens: list[str]) -> "Disguise":
        return Disguise(self, context, set(), tokens)


class Disguise:
    """Swaps some characters of a context, and swaps them back in what was rendered from it."""

    def __init__(
        self, provenance: Provenance, context: Context, symbols: set[str], tokens: list[str]
    ) -> None:
        # Private characters of the texts themselves are swapped too, so none can be mistaken.
        private = {c for text in context.strings() for c in PRIVATE.findall(text)}
        self.letters = [*provenance.letters, *sorted(private)]
        self.refused = frozenset(provenance.tags.values())
        self.tables: dict[bool, dict[int, str]] = {}
        self.words: dict[bool, list[tuple[str, str]]] = {}
        for is_assistant in (False, True):
            first = FIRST_OF_ASSISTANT if is_assistant else FIRST_OF_OTHERS
            table = {ord(c): chr(first + i) for i, c in enumerate(self.letters)}
            always = {ord(c) for c in symbols | private}
            self.tables[is_assistant] = {c: to for c, to in table.items() if c in always}
            self.words[is_assistant] = [
                (token, token.translate(table))
                for token in tokens
                if not (is_assistant and token in provenance.tags)
            ]
        self.context = Context(
            [self._swap(m, m.get("role") == ASSISTANT) for m in context.messages],
            self._swap(context.tools, False),
            self._swap(context.variables, False),
        )

    def _swap(self, value: Any, is_assistant: bool) -> Any:
        if isinstance(value, str):
            for word, disguised in self.words[is_assistant]:
                value = value.replace(word, disguised)
            return value.translate(self.tables[is_assistant])
        if isinstance(value, Mapping):
            return {
                self._swap(key, is_assistant): self._swap(item, is_assistant)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._swap(item, is_assistant) for item in value]
        return value

    def pieces(self, rendered: str) -> list[Piece]:
        """The rendered text as it really is, with what may be recognised where."""
        pieces: list[Piece] = []
        start = 0
        for match in DISGUISED.finditer(rendered):
            if match.start() > start:
                pieces.append(Piece(rendered[start : match.start()], parse_special=True))
            is_assistant = match[2] is not None
            first = FIRST_OF_ASSISTANT if is_assistant else FIRST_OF_OTHERS
            text = "".join(self.letters[ord(c) - first] for c in match[0])
            refused = frozenset[int]() if is_assistant else self.refused
            pieces.append(Piece(text, parse_special=False, refused=refused))
            start = match.end()
        if start < len(rendered):
            pieces.append(Piece(rendered[start:], parse_special=True))
        return pieces


def symbol_of(text: str) -> str | None:
    """The first character of a token that is neither letter nor digit, if it has one."""
    return next((c for c in text if may_be_swapped(c) and not c.isalnum()), None)
