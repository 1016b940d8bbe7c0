"""What is written while an answer comes: its text, progress, statistics."""

import shutil
import sys
import time
import unicodedata
from typing import Any, TextIO

from localllm.config import takes_colors, takes_escapes
from localllm.durations import format_duration

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SPINNER_SECONDS = 0.1
# Ollama's distance from the edge; a word that is longer than a line is left to the terminal.
WRAP_MARGIN = 5
DEFAULT_COLUMNS = 80
CLEAR_LINE = "\r\x1b[K"
GREY, PLAIN = "\x1b[90m", "\x1b[0m"


class Status:
    """One line on standard error that tells what is going on; nothing unless that is a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_shown = False
        self._works = self._stream.isatty() and takes_escapes()
        self._drawn_at = 0.0
        self._frame = 0

    def show(self, text: str) -> None:
        """Replace the line, not too often."""
        now = time.monotonic()
        if not self._works or (self._is_shown and now - self._drawn_at < SPINNER_SECONDS):
            return
        self._drawn_at = now
        self._frame += 1
        columns = shutil.get_terminal_size().columns
        line = f"{SPINNER[self._frame % len(SPINNER)]} {text}"[: columns - 1]
        self._stream.write(CLEAR_LINE + line)
        self._stream.flush()
        self._is_shown = True

    def progress(self, progress: dict[str, Any]) -> None:
        """Show a `progress` chunk of the daemon."""
        self.report(progress["stage"], progress["done"], progress["total"])

    def report(self, stage: str, done: int, total: int) -> None:
        """Show how far a stage is."""
        amount = f" {100 * done // total}% ({done}/{total})" if total else ""
        self.show(f"{stage}{amount}")

    def clear(self) -> None:
        """Leave no trace."""
        if self._is_shown:
            self._stream.write(CLEAR_LINE)
            self._stream.flush()
            self._is_shown = False


class Thoughts:
    """Shows what a model thinks before its answer, in grey on a terminal."""

    def __init__(self, out: "Wrapper", *, is_hidden: bool) -> None:
        self._out = out
        self._is_hidden = is_hidden
        self._is_open = False

    def write(self, text: str) -> None:
        """Add to the thoughts, which a line announces."""
        if self._is_hidden:
            return
        if not self._is_open:
            self._out.mark(GREY)
            self._out.write("Thinking...\n")
            self._is_open = True
        self._out.write(text)

    def close(self) -> None:
        """The answer begins, or ends without one."""
        if self._is_open:
            self._out.write("\n...done thinking.\n\n")
            self._out.mark(PLAIN)
            self._is_open = False


class Wrapper:
    """Writes text as it comes; on a terminal, lines break between words."""

    def __init__(self, stream: TextIO | None = None, *, wraps: bool = True) -> None:
        self._stream = stream or sys.stdout
        self._wraps = wraps and self._stream.isatty() and takes_escapes()
        self._column = 0
        self._word = ""

    def mark(self, escape: str) -> None:
        """Change the colour, on a terminal."""
        if self._stream.isatty() and takes_colors():
            self._stream.write(escape)

    def write(self, text: str) -> None:
        if not self._wraps:
            self._stream.write(text)
            self._stream.flush()
            return
        limit = shutil.get_terminal_size((DEFAULT_COLUMNS, 24)).columns - WRAP_MARGIN
        out = []
        for character in text:
            if character == "\n":
                self._column, self._word = 0, ""
                out.append(character)
                continue
            width = _width(character)
            if character == " ":
                self._word = ""
            else:
                self._word += character
            self._column += width
            out.append(character)
            if self._column > limit and character != " ":
                out.append(self._break())
        self._stream.write("".join(out))
        self._stream.flush()

    def _break(self) -> str:
        """Move the word that was begun to the next line."""
        width = sum(map(_width, self._word))
        if width >= self._column:
            return ""
        self._column = width
        back = f"\x1b[{width}D\x1b[K"
        return f"{back}\n{self._word}"


def _width(character: str) -> int:
    """Columns of a character on a terminal."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def print_statistics(final: dict[str, Any]) -> None:
    """The block of `--verbose`, on standard error."""
    lines = []
    for name in ("total", "load"):
        lines.append((f"{name} duration", _duration(final, f"{name}_duration")))
    for name, label in (("prompt_eval", "prompt eval"), ("eval", "eval")):
        count, span = final.get(f"{name}_count", 0), final.get(f"{name}_duration", 0)
        lines.append((f"{label} count", f"{count} token(s)" if count else ""))
        lines.append((f"{label} duration", _duration(final, f"{name}_duration")))
        rate = f"{count / span * 1e9:.2f} tokens/s" if count and span else ""
        lines.append((f"{label} rate", rate))
    for label, value in lines:
        if value:
            print(f"{label + ':':<22}{value}", file=sys.stderr)


def _duration(final: dict[str, Any], key: str) -> str:
    value = final.get(key, 0)
    return format_duration(value / 1e9) if value else ""
