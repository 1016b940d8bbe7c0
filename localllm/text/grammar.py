"""Answers in JSON: which tokens may come next, from a JSON schema or for any object.

Promises:
  1. an answer that comes to its own end is valid JSON, and valid against its schema;
  2. it ends with the value, blanks between tokens of JSON are few, and so are a number's digits;
  3. what the schema asks for and is not enforced is refused by name, never ignored.

Not here: how a token is drawn under a mask (masks.py), which part of an answer is thinking
(dialects.py).
Source of the masks: llguidance, https://github.com/guidance-ai/llguidance
"""

import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.errors import BadRequest, LocalLLMError
from localllm.text.dialects import Dialect
from localllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = NDArray[np.uint32]

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
MAX_DEPTH = 64
MAX_SCHEMA_LENGTH = 1 << 20
MAX_GRAMMAR_LENGTH = 1 << 17
# One space, or a line break and an indentation: models would fill an answer with blanks.
BLANKS = r"( |\n[ \t]{0,32})"
# Of an integer and of any other number: models would never stop. Beyond the latter, and the three
# digits of a token, a double cannot tell a number from its bound.
MAX_DIGITS, MAX_DECIMAL_DIGITS = 20, 13
QUOTE, BACKSLASH, POINT, ZERO, NINE = b'"\\.09'
# What llguidance takes for a mark of its own, not for text.
MARK = b"\xff"
MAX_MARK_LENGTH = 256
BITS = 32
HARMONY_ANSWER = re.compile(
    rb"<\|channel\|>\s*final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>", re.DOTALL
)
UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])")


class BadSchema(BadRequest):
    """A schema that cannot be enforced."""


class BadGrammar(BadRequest):
    """A grammar that cannot be used; the message has the place."""


class Constraint(Protocol):
    """What the engine asks before and after each token."""

    @property
    def is_finished(self) -> bool: ...

    def allowed(self) -> Mask | None: ...

    def accept(self, token: int) -> None: ...


def format_schema(value: Any) -> Mapping[str, Any] | bool | None:
    """The schema of a request's `format`; None: no constraint.

    Raises BadRequest for what is neither "json" nor a schema.
    """
    if value is None or value == "":
        return None
    if value == "json":
        return ANY_OBJECT
    if isinstance(value, Mapping):
        return value
    shown = json.dumps(value, ensure_ascii=False)[:200]
    raise BadSchema(f'invalid format: {shown}; expected "json" or a valid JSON Schema object')


class Grammars:
    """Constraints for one model. Its table of tokens is made when it is first needed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()
        self._table: tuple[LLTokenizer, TokenTable] | None = None

    def constraint(self, schema: Mapping[str, Any] | bool) -> "JsonConstraint":
        """A fresh constraint. Raises BadSchema, naming what is not supported."""
        from llguidance import LLMatcher

        text = _schema_text(schema)
        options = {"whitespace_pattern": BLANKS}
        try:
            grammar = LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
        except ValueError as error:
            raise BadSchema(f"format: {_one_line(str(error))}") from None
        tokens, table = self._tokens()
        matcher = LLMatcher(tokens, grammar, log_level=0)
        if matcher.is_error():
            raise BadSchema(_reason(matcher.get_error()))
        constraint = JsonConstraint(matcher, table)
        if not _is_possible(constraint):
            raise BadSchema("format: nothing is valid against the schema")
        return constraint

    def of_grammar(self, text: str) -> "TextConstraint":
        """A fresh constraint of a grammar: GBNF, or Lark as llguidance reads it.

        Raises BadGrammar.
        """
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import any_to_lark

        if len(text) > MAX_GRAMMAR_LENGTH:
            raise BadGrammar(f"grammar: it has {len(text)} characters; {MAX_GRAMMAR_LENGTH} go")
        try:
            grammar = LLMatcher.grammar_from_lark(any_to_lark(text))
        except Exception as error:  # the translator raises no class of its own
            reason = _one_line(str(error))
            raise BadGrammar(f"grammar: {reason[0].lower()}{reason[1:]}") from None
        tokens, _ = self._tokens()
        matcher = LLMatcher(tokens, grammar, log_level=0)
        if matcher.is_error():
            raise BadGrammar(f"grammar: {_one_line(matcher.get_error())}")
        constraint = TextConstraint(matcher)
        if not _is_possible(constraint):
            raise BadGrammar("grammar: nothing is valid")
        return constraint

    def after_thinking(
        self, constraint: Constraint, dialect: Dialect, prompt_end: str, *, think: bool
    ) -> Constraint:
        """A constraint that waits until the answer has thought, if it does."""
        tags = dialect.tags
        if dialect.is_harmony:
            return Later(constraint, self.tokenizer, HARMONY_ANSWER)
        if tags is None:
            return constraint
        close = re.compile(re.escape(tags.close.encode()))
        if dialect.is_thinking_open(prompt_end):
            return Later(constraint, self.tokenizer, close)
        opening = self.tokenizer.id_of(tags.open.strip())
        if opening is None or not think or prompt_end.rstrip().endswith(tags.close):
            return constraint
        return Later(constraint, self.tokenizer, close, opening)

    def _tokens(self) -> "tuple[LLTokenizer, TokenTable]":
        with self._lock:
            if self._table is None:
                from llguidance import LLTokenizer

                ends = sorted(self.tokenizer.eog_ids) or [self.tokenizer.vocab_size - 1]
                table = TokenTable(self.tokenizer, ends[0])
                self._table = LLTokenizer(table, eos_token=ends), table  # type: ignore[arg-type]
            return self._table


class TokenTable:
    """The vocabulary in the form that llguidance reads.

    Asked on the engine's thread for the tokens of texts that a grammar forces, while another thread
    may encode a prompt: the algorithms keep nothing but caches, which the interpreter's lock guards.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, eos_id: int) -> None:
        self._encode = tokenizer.encode
        self._byte_id = tokenizer.algorithm.byte_id
        marks = tokenizer.special_ids | tokenizer.eog_ids
        self.eos_token_id = eos_id
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(marks)
        self.tokens: Sequence[bytes] = [
            MARK * (i in marks) + tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)
        ]
        # The tokens that do not go on with a number, and those that do not with a zero.
        self.no_digits = self._without(b"0123456789")
        self.no_zeros = self._without(b"0")

    def _without(self, begins: bytes) -> Mask:
        """The tokens that begin otherwise, as a mask."""
        found = np.array([token[:1] != b"" and token[0] in begins for token in self.tokens], bool)
        # llguidance's masks may have a word more than the vocabulary needs.
        padded = np.pad(found, (0, -len(found) % BITS + 2 * BITS))
        return ~np.packbits(padded, bitorder="little").view(np.uint32)

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of a text that goes on in the middle of an answer: no space is put before it."""
        data = text.encode() if isinstance(text, str) else bytes(text)
        ids = self._encode(data, parse_special=False)
        if self._spelled(ids) == data:
            return ids
        ids = self._encode(b"\n" + data, parse_special=False)
        for start in (1, 2):
            if self._spelled(ids[start:]) == data:
                return ids[start:]
        found = (self._byte_id(byte) for byte in data)
        return [token for token in found if token is not None]

    def _spelled(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.tokens[token] for token in ids)


class TextConstraint:
    """The state of one answer that keeps to a grammar. Not thread-safe."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    @property
    def is_finished(self) -> bool:
        return bool(self._matcher.is_stopped())

    def allowed(self) -> Mask:
        """A bit for each token that may be next; the tokens that end an answer among them."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        self._check()
        return mask

    def accept(self, token: int) -> None:
        """Go on by a token that was allowed."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _one_line(self._matcher.get_error())
            raise LocalLLMError(f"the format cannot be followed further: {reason}")


class JsonConstraint(TextConstraint):
    """The state of one answer in JSON, whose numbers are bounded."""

    def __init__(self, matcher: "LLMatcher", table: TokenTable) -> None:
        super().__init__(matcher)
        self._table = table
        self._num_digits = 0
        self._max_digits = MAX_DIGITS
        self._is_text = False
        self._is_escaped = False

    def allowed(self) -> Mask:
        mask = super().allowed()
        if self._num_digits < self._max_digits:
            return mask
        # A constant may ask for more digits, and a bound for one that is no zero.
        for bound in (self._table.no_digits, self._table.no_zeros):
            others: Mask = mask & bound[: len(mask)]
            if others.any():
                return others
        return mask

    def accept(self, token: int) -> None:
        super().accept(token)
        for byte in self._table.tokens[token]:
            self._watch(byte)

    def _watch(self, byte: int) -> None:
        """Count the digits of a number; those in texts do not matter."""
        if self._is_text or not (ZERO <= byte <= NINE or byte == POINT):
            self._num_digits, self._max_digits = 0, MAX_DIGITS
        elif byte == POINT:
            self._max_digits = MAX_DECIMAL_DIGITS
        else:
            self._num_digits += 1
        if self._is_text and not self._is_escaped and byte == BACKSLASH:
            self._is_escaped = True
            return
        if byte == QUOTE and not self._is_escaped:
            self._is_text = not self._is_text
        self._is_escaped = False


def _is_possible(constraint: TextConstraint) -> bool:
    """Whether an answer can begin."""
    try:
        return bool(constraint.allowed().any())
    except LocalLLMError:
        return False


class Later:
    """A constraint that begins when the answer has said `mark`, such as the end of its thinking.

    opening  the one token that an answer may begin with instead of with the constrained text: only
             then is the mark waited for. None: it is waited for in any case.
    """

    def __init__(
        self,
        constraint: Constraint,
        tokenizer: Tokenizer,
        mark: re.Pattern[bytes],
        opening: int | None = None,
    ) -> None:
        self._constraint = constraint
        self._spell = tokenizer.token_bytes
        self._mark = mark
        self._said = b""
        self._opening = opening
        self._has_begun = False

    @property
    def is_finished(self) -> bool:
        return self._has_begun and self._constraint.is_finished

    def allowed(self) -> Mask | None:
        if self._has_begun:
            return self._constraint.allowed()
        if self._opening is None:
            return None
        found = self._constraint.allowed()
        if found is not None:
            found = found.copy()
            found[self._opening // BITS] |= np.uint32(1 << (self._opening % BITS))
        return found

    def accept(self, token: int) -> None:
        if not self._has_begun and self._opening is not None:
            self._has_begun = token != self._opening
            self._opening = None
            if not self._has_begun:
                return
        if self._has_begun:
            self._constraint.accept(token)
            return
        self._said = self._said[-MAX_MARK_LENGTH:] + self._spell(token)
        self._has_begun = self._mark.search(self._said) is not None


def _schema_text(schema: Mapping[str, Any] | bool) -> str:
    _check_depth(schema)
    if isinstance(schema, Mapping):
        # Which draft it follows is no matter: the keywords are the same.
        schema = {key: value for key, value in schema.items() if key != "$schema"}
    text = json.dumps(schema)
    if len(text) > MAX_SCHEMA_LENGTH:
        raise BadSchema(f"format: the schema has {len(text)} characters; {MAX_SCHEMA_LENGTH} go")
    return text


def _check_depth(value: Any) -> None:
    """Refuse what is nested deeper than any schema has to be."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [
            item
            for outer in level
            if isinstance(outer, (Mapping, list))
            for item in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        if not inner:
            return
        level = inner
    raise BadSchema(f"format: the schema is nested deeper than {MAX_DEPTH} levels")


def _reason(error: str) -> str:
    """llguidance's error in our words."""
    unknown = UNIMPLEMENTED.search(error)
    if unknown is not None:
        names = ", ".join(json.loads(unknown[1]))
        return f"format: the schema keyword {names} is not supported"
    if "oneOf" in error:
        return (
            "format: the schema keyword oneOf is supported only where its options exclude each "
            "other; use anyOf"
        )
    if error.startswith("Unknown format"):
        return f"format: the schema keyword format has a value that is not supported: {error[16:]}"
    if "look-around" in error or "regex" in error:
        return f"format: the schema keyword pattern is not supported here: {_one_line(error)}"
    return f"format: the schema cannot be used: {_one_line(error)}"


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text.split("<state>")[0]).strip()[:300]
