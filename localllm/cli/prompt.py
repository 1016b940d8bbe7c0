"""Reading messages on a terminal: history, several lines, an editor.

Not here: what a message means (repl.py).
"""

import shlex
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import in_terminal
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from localllm.config import load_settings
from localllm.errors import BadRequest

QUOTES = '"""'


class Prompt:
    """Reads messages; one paste is one message, and three quotes span lines."""

    def __init__(self) -> None:
        settings = load_settings()
        history: History = InMemoryHistory()
        if not settings.no_history:
            settings.data_dir.mkdir(parents=True, exist_ok=True)
            history = FileHistory(str(settings.data_dir / "history"))
        self._session: PromptSession[str] = PromptSession(
            history=history, key_bindings=_key_bindings(settings.editor), enable_suspend=True
        )
        self._file_history = history

    def set_history(self, *, is_on: bool) -> None:
        self._session.history = self._file_history if is_on else InMemoryHistory()
        self._session.default_buffer.history = self._session.history

    def read(self) -> str:
        """The next message without its quotes. Raises EOFError at the end."""
        hint = HTML("<ansibrightblack>Send a message (/? for help)</ansibrightblack>")
        text = self._session.prompt(">>> ", placeholder=hint)
        head, quotes, rest = text.partition(QUOTES)
        if not quotes or (head.strip() and not head.lstrip().startswith("/set system")):
            return text
        more = HTML("<ansibrightblack>Press Enter to send</ansibrightblack>")
        while QUOTES not in rest:
            try:
                rest += "\n" + self._session.prompt("... ", placeholder=more)
            except EOFError:
                return ""
        return head + rest.partition(QUOTES)[0]


def _key_bindings(editor: str) -> KeyBindings:
    keys = KeyBindings()

    @keys.add("c-j")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    @keys.add("c-g")
    async def _edit(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        text, problem = "", None
        async with in_terminal():
            try:
                text = edited(editor, buffer.text)
            except BadRequest as error:
                problem = str(error)
                print(problem, file=sys.stderr)
        if problem is None:
            buffer.text = text
            buffer.cursor_position = len(text)

    return keys


def edited(editor: str, text: str) -> str:
    """The text as the user leaves it in an editor. Raises BadRequest if that cannot be run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "message.txt")
        path.write_text(text)
        try:
            subprocess.run([*shlex.split(editor), str(path)], check=True)
        except (FileNotFoundError, ValueError):
            raise BadRequest(
                f'editor "{editor}" not found, set LOCALLLM_EDITOR to the path of your '
                "preferred editor"
            ) from None
        except (OSError, subprocess.CalledProcessError) as error:
            raise BadRequest(f'editor "{editor}" failed: {error}') from None
        return path.read_text(errors="replace").removesuffix("\n")


@contextmanager
def terminal_kept() -> Iterator[None]:
    """Leave the terminal as it was, even if the prompt is interrupted while it changes it.

    Meanwhile what is typed ahead of the prompt stays as it was typed: Enter is not turned into the
    character that makes a new line inside a message, and nothing is mixed into the answer.
    """
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = termios.tcgetattr(sys.stdin)
    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~termios.ECHO
    try:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
