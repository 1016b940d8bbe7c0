"""Streaming parsers: a model's text to what is said, what is thought, and which tools are called.

Promises, wherever the text is cut:
  1. the result is that of the whole text at once;
  2. text that may be the beginning of a mark, and whitespace that may stand before one, is held
     back until that is decided;
  3. a call is handed out once, whole; what looked like a call and is none comes out as content.

Thinking is recognised at the beginning of an answer only, so an answer may speak about the tags.

Not here: which marks a model uses (dialects.py), the text of a call (calls.py).
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from localllm.text.calls import Known, Reader, ToolCall

MAX_HEAD = 256  # characters between the mark of a call and its JSON


@dataclass(slots=True)
class Parsed:
    """What became known; to be appended to what was known before."""

    content: str = ""
    thinking: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Tags:
    """The marks around a model's thinking."""

    name: str
    open: str
    close: str
    signs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Calls:
    """How a family of models writes tool calls.

    signs    texts that its chat templates have, all of them
    opens    marks before a call; close: the mark after it, which may be missing before JSON's end
    head     what stands between mark and JSON, with a group `name` if that is there; None: the body
             is no JSON and ends at `close`
    dropped  marks that are no part of an answer; after: those that may follow a call's body
    inner    further texts in the body that may be control tokens
    is_bare  a call may be the whole answer, without a mark
    """

    name: str
    signs: tuple[str, ...]
    opens: tuple[str, ...]
    read: Reader
    close: str = ""
    head: re.Pattern[str] | None = None
    dropped: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    is_bare: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.opens, *((self.close,) if self.close else ()), *self.inner)


class Parser(Protocol):
    """One answer's parser. `marks` are texts that it must see even as control tokens."""

    marks: tuple[str, ...]

    def push(self, text: str) -> Parsed: ...

    def finish(self) -> Parsed: ...


class PlainParser:
    """For models that say nothing but content."""

    marks: tuple[str, ...] = ()

    def push(self, text: str) -> Parsed:
        return Parsed(text)

    def finish(self) -> Parsed:
        return Parsed()


class TagParser:
    """Thinking between tags, then content with tool calls in it.

    is_thinking  the prompt has opened the thinking already
    """

    def __init__(
        self, tags: Tags | None, calls: Calls | None, known: Known, *, is_thinking: bool
    ) -> None:
        self._tags = tags
        self._calls = calls if known else None
        self._known = known
        self._dropped = calls.dropped if calls else ()
        self._opens = calls.opens if calls and known else ()
        self._buffer = ""
        self._opened = ""
        self._blanks = ""
        self._scan: JsonScan | None = None
        self._searched = 0
        self._head_name: str | None = None
        self._reader: Callable[[bool], bool] = self._read_json_block
        self._out = Parsed()
        self._state = self._begin_thinking if is_thinking else self._begin
        self.marks = (
            *((tags.open, tags.close) if tags else ()),
            *self._dropped,
            *(self._calls.marks if self._calls else ()),
        )

    def push(self, text: str) -> Parsed:
        """What `text` makes certain."""
        self._buffer += text
        return self._run(is_end=False)

    def finish(self) -> Parsed:
        """The end of the answer: what was held turned out to be no mark."""
        return self._run(is_end=True)

    def _run(self, *, is_end: bool) -> Parsed:
        self._out = Parsed()
        # A state returns whether another one may go on.
        while self._state(is_end):
            pass
        return self._out

    def _begin(self, is_end: bool) -> bool:
        """Before the first character that is no blank."""
        text = self._buffer.lstrip()
        tags = self._tags
        if tags is not None and text.startswith(tags.open):
            self._buffer = text[len(tags.open) :]
            self._state = self._begin_thinking
            return True
        may_begin = tags is not None and tags.open.startswith(text)
        is_bare = self._calls is not None and self._calls.is_bare
        if not is_end and (may_begin or (is_bare and not text)):
            return False
        if is_bare and text[:1] in ("{", "["):
            self._buffer = text
            return self._open("", is_json=text[0] == "{")
        self._state = self._content
        return True

    def _begin_thinking(self, is_end: bool) -> bool:
        """Blanks after the opening tag, and a second one where the prompt had it already."""
        assert self._tags is not None
        text = self._buffer.lstrip()
        if not is_end and self._tags.open.startswith(text):
            return False
        self._buffer = text.removeprefix(self._tags.open).lstrip()
        self._state = self._thinking
        return True

    def _thinking(self, is_end: bool) -> bool:
        assert self._tags is not None
        text, mark = self._take((self._tags.close, *self._opens), is_end, holds_blanks=True)
        self._out.thinking += text.rstrip() if mark or is_end else text
        if mark is None:
            return False
        if mark != self._tags.close:
            return self._open(mark)
        self._state = self._after_thinking
        return True

    def _after_thinking(self, is_end: bool) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        is_bare = self._calls is not None and self._calls.is_bare
        if is_bare and self._buffer[0] in "{[":
            return self._open("", is_json=self._buffer[0] == "{")
        self._state = self._content
        return True

    def _content(self, is_end: bool) -> bool:
        marks = (*self._opens, *self._dropped)
        text, mark = self._take(marks, is_end, holds_blanks=bool(self._opens))
        if mark is None:
            self._out.content += text
            return False
        if mark in self._dropped:
            self._out.content += text
            return True
        said = text.rstrip()
        self._out.content += said
        return self._open(mark, blanks=text[len(said) :])

    def _open(self, mark: str, *, is_json: bool = True, blanks: str = "") -> bool:
        """Begin a call whose mark was read, after blanks that count only if it is none."""
        assert self._calls is not None
        self._opened, self._scan, self._searched = mark, None, 0
        self._blanks = blanks
        has_json = self._calls.head is not None and is_json
        self._reader = self._read_json_block if has_json else self._read_text_block
        self._state = self._block
        return True

    def _block(self, is_end: bool) -> bool:
        return self._reader(is_end)

    def _read_json_block(self, is_end: bool) -> bool:
        assert self._calls is not None
        assert self._calls.head is not None
        if self._scan is None:
            head = self._calls.head.match(self._buffer)
            at = len(self._buffer) if head is None else head.end()
            if head is None or self._buffer[at : at + 1] not in ("{", "["):
                if is_end or len(self._buffer) > MAX_HEAD:
                    return self._give_up(0)
                return False
            self._head_name = head.groupdict().get("name")
            self._scan = JsonScan(at)
        end = self._scan.find_end(self._buffer)
        if end is None:
            return self._give_up(len(self._buffer)) if is_end else False
        body = self._buffer[self._scan.start : end]
        return self._close(self._head_name, body, end, end)

    def _read_text_block(self, is_end: bool) -> bool:
        assert self._calls is not None
        close = "" if self._opened == "" else self._calls.close
        at = self._buffer.find(close, self._searched) if close else -1
        if at >= 0:
            return self._close(None, self._buffer[:at], at, at + len(close))
        self._searched = max(0, len(self._buffer) - len(close))
        if not is_end:
            return False
        return self._close(None, self._buffer, len(self._buffer), len(self._buffer))

    def _close(self, name: str | None, body: str, end: int, after: int) -> bool:
        """Read a call; the buffer goes on at `after`, or at `end` if it is none."""
        assert self._calls is not None
        calls = self._calls.read(name, body, self._known)
        if not calls:
            return self._give_up(end)
        self._out.tool_calls += calls
        self._buffer = self._buffer[after:]
        self._state = self._after_block
        return True

    def _give_up(self, end: int) -> bool:
        """What was opened is no call: it is content, up to `end`."""
        self._out.content += self._blanks + self._opened + self._buffer[:end]
        self._buffer = self._buffer[end:]
        self._state = self._content
        return True

    def _after_block(self, is_end: bool) -> bool:
        """Blanks, closing marks, and the next call."""
        assert self._calls is not None
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        calls = self._calls
        skipped = (*calls.dropped, *calls.after, *((calls.close,) if calls.close else ()))
        for mark in sorted((*skipped, *self._opens), key=len, reverse=True):
            if self._buffer.startswith(mark):
                self._buffer = self._buffer[len(mark) :]
                return True if mark in skipped else self._open(mark)
            if not is_end and mark.startswith(self._buffer):
                return False
        if self._calls.head is not None and self._buffer[0] == "{":
            return self._open("")
        self._state = self._content
        return True

    def _take(
        self, marks: Iterable[str], is_end: bool, *, holds_blanks: bool
    ) -> tuple[str, str | None]:
        """(text that is certain, the mark after it if there is one), taken from the buffer."""
        found = [(at, -len(m), m) for m in marks if (at := self._buffer.find(m)) >= 0]
        if found:
            at, _, mark = min(found)
            text, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
            return text, mark
        if is_end:
            text, self._buffer = self._buffer, ""
            return text, None
        safe = len(self._buffer) - held_length(self._buffer, marks)
        if holds_blanks:
            safe = len(self._buffer[:safe].rstrip())
        text, self._buffer = self._buffer[:safe], self._buffer[safe:]
        return text, None


def held_length(text: str, marks: Iterable[str]) -> int:
    """Length of the longest end of `text` that a mark begins with."""
    longest = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), longest, -1):
            if mark.startswith(text[-size:]):
                longest = size
                break
    return longest


class JsonScan:
    """Finds the end of the JSON value that begins at `start`, however its text arrives."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._at = start
        self._depth = 0
        self._in_string = False

    def find_end(self, text: str) -> int | None:
        """Where the value ends in `text`, which is what it was before and more."""
        while self._at < len(text):
            char = text[self._at]
            if self._in_string and char == "\\":
                if self._at + 1 == len(text):
                    return None
                self._at += 1
            elif char == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += (char in "{[") - (char in "}]")
            self._at += 1
            if self._depth == 0:
                return self._at
        return None
