"""The conversation on a pseudo-terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import Server, environment

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b\][^\x07]*\x07|\x1b[=>]|\r")
ENTER, CTRL_C, CTRL_D, CTRL_G, CTRL_J = "\r", "\x03", "\x04", "\x07", "\n"
PASTE = "\x1b[200~{}\x1b[201~"
PLACEHOLDER = "Send a message (/? for help)"
LONGEST_WAIT_SECONDS = 30


class Terminal:
    """A `localllm run` on a terminal: what is typed, and what comes out."""

    def __init__(self, server: Server, *args: str, **environ: str) -> None:
        self._terminal, theirs = pty.openpty()
        env = environment(
            server.folder,
            LOCALLLM_HOST=server.url,
            TERM="xterm",
            PROMPT_TOOLKIT_NO_CPR="1",
            **environ,
        )
        command = [sys.executable, "-m", "localllm.cli", "run", *args]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )
        os.close(theirs)
        self._seen = ""

    def type(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(self._terminal, data[:4096]) :]

    def expect(self, text: str) -> str:
        """Wait for `text`; what came before it, without escape codes."""
        deadline = time.monotonic() + LONGEST_WAIT_SECONDS
        while text not in self._seen:
            assert time.monotonic() < deadline, f"{text!r} did not come"
            ready, _, _ = select.select([self._terminal], [], [], LONGEST_WAIT_SECONDS)
            assert ready, f"{text!r} did not come after {self._seen!r}"
            try:
                data = os.read(self._terminal, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"it ended after {self._seen!r}") from None
            self._seen = ESCAPES.sub("", self._seen + data)
        before, _, self._seen = self._seen.partition(text)
        return before

    def say(self, text: str) -> None:
        """Type a line at an empty prompt; wait for what it does before the next one."""
        self.expect(PLACEHOLDER)
        self.type(text + ENTER)

    def is_cooked(self) -> bool:
        """Whether the terminal echoes and waits for whole lines, as shells leave it."""
        flags = termios.tcgetattr(self._terminal)[3]
        return bool(flags & termios.ECHO) and bool(flags & termios.ICANON)

    def close(self) -> int:
        self.process.kill()
        os.close(self._terminal)
        return self.process.wait()


@pytest.fixture
def terminal(server: Server) -> Iterator[Terminal]:
    terminal = Terminal(server, "tiny")
    yield terminal
    terminal.close()


def test_answers_and_history_of_the_conversation(terminal: Terminal) -> None:
    terminal.say("hi")
    terminal.expect("0 1 2 ")
    terminal.say("echo")
    terminal.expect("{'role': 'user', 'content': 'hi'}, {'role':")
    terminal.say("/clear")
    terminal.expect("Cleared session context")
    terminal.say("echo")
    terminal.expect("[{'role': 'user', 'content': 'echo'}]")
    terminal.say("/bye")
    assert terminal.process.wait() == 0


def test_interrupt_stops_the_answer_and_not_the_conversation(terminal: Terminal) -> None:
    terminal.say("forever")
    terminal.expect("3 4 5 ")
    # What Ctrl-C is while the terminal is not read.
    terminal.process.send_signal(signal.SIGINT)
    terminal.say("hi")
    terminal.expect("0 1 2 ")
    terminal.expect(PLACEHOLDER)
    terminal.type("half typed" + CTRL_C)
    terminal.type(CTRL_C)
    terminal.expect("Use Ctrl + d or /bye to exit.")
    terminal.expect(PLACEHOLDER)
    terminal.type(CTRL_D)
    assert terminal.process.wait() == 0


def test_several_lines_are_one_message(terminal: Terminal) -> None:
    terminal.say('"""one')
    terminal.expect("... ")
    terminal.type('two echo"""' + ENTER)
    terminal.expect(r"'content': 'one\ntwo echo'")
    terminal.say(PASTE.format("three\nfour echo"))
    terminal.expect(r"'content': 'three\nfour echo'")
    terminal.say("five" + CTRL_J + "six echo")
    terminal.expect(r"'content': 'five\nsix echo'")


def test_a_long_paste_is_one_message(terminal: Terminal) -> None:
    terminal.expect(PLACEHOLDER)
    lines = "\n".join(f"line {number} of some text 漢字" for number in range(6000))
    terminal.type(PASTE.format(lines + "\nsmile") + ENTER)
    terminal.expect(3 * "\N{SLIGHTLY SMILING FACE}")
    terminal.expect(PLACEHOLDER)


def test_set_changes_the_requests(terminal: Terminal) -> None:
    terminal.say("/set parameter temperature 0.5")
    terminal.expect("Set parameter 'temperature' to '0.5'")
    terminal.say("/set parameter nope 1")
    terminal.expect("Couldn't set parameter: \"unknown parameter 'nope'\"")
    terminal.say("options")
    terminal.expect("{'temperature': 0.5}")
    terminal.say("/set system Be brief.")
    terminal.expect("Set system message.")
    terminal.say("/set verbose")
    terminal.expect("Set 'verbose' mode.")
    terminal.say("echo")
    terminal.expect("{'role': 'system', 'content': 'Be brief.'}")
    terminal.expect("eval rate:")
    terminal.say("/show info")
    terminal.expect("architecture        llama")
    terminal.say("/nope")
    terminal.expect("Unknown command '/nope'. Type /? for help")


def test_errors_leave_the_conversation_usable(terminal: Terminal) -> None:
    terminal.say("refuse")
    terminal.expect("Error: the fake model refuses this")
    terminal.say("die")
    terminal.expect("the model runner has unexpectedly stopped")
    terminal.say("echo")
    assert "'content': 'refuse'" not in terminal.expect("'content': 'echo'}]")
    terminal.say("/save kept")
    terminal.expect("Created new model 'kept'")
    terminal.say("/load nope")
    terminal.expect("Couldn't find model 'nope'")


def test_terminal_is_as_before_after_a_kill_at_the_prompt(terminal: Terminal) -> None:
    terminal.expect(PLACEHOLDER)
    assert not terminal.is_cooked()
    terminal.process.terminate()
    assert terminal.process.wait() == 128 + signal.SIGTERM
    assert terminal.is_cooked()


def test_lines_typed_ahead_are_messages_of_their_own(terminal: Terminal) -> None:
    terminal.say("forever")
    terminal.expect("3 4 5 ")
    terminal.type("one echo" + ENTER + "two echo" + ENTER)
    terminal.process.send_signal(signal.SIGINT)
    terminal.expect("'content': 'one echo'}]")
    terminal.expect("'content': 'two echo'}]")


@pytest.fixture
def editor(tmp_path: Path) -> Path:
    """An editor that adds to what it is given."""
    path = tmp_path / "editor"
    path.write_text("#!/bin/sh\nprintf ' echo\\n' >> \"$1\"\n")
    path.chmod(0o755)
    return path


def test_a_message_can_be_edited(server: Server, editor: Path) -> None:
    terminal = Terminal(server, "tiny", LOCALLLM_EDITOR=str(editor))
    try:
        terminal.expect(PLACEHOLDER)
        terminal.type("edited" + CTRL_G)
        terminal.expect("echo")
        terminal.type(ENTER)
        terminal.expect("'content': 'edited echo'}]")
    finally:
        terminal.close()


def test_a_missing_editor_is_told_and_the_message_kept(server: Server) -> None:
    terminal = Terminal(server, "tiny", VISUAL="no-such-editor")
    try:
        terminal.expect(PLACEHOLDER)
        terminal.type("kept echo" + CTRL_G)
        terminal.expect('editor "no-such-editor" not found, set LOCALLLM_EDITOR')
        terminal.expect(">>> kept echo")
        terminal.type(ENTER)
        terminal.expect("'content': 'kept echo'}]")
    finally:
        terminal.close()


def test_a_models_own_messages_are_shown_first(server: Server) -> None:
    messages = [{"role": "user", "content": "Ping?"}, {"role": "assistant", "content": "Pong."}]
    server.create("primed", messages=messages)
    terminal = Terminal(server, "primed")
    try:
        assert ">>> Ping?\n\nPong.\n\n" in terminal.expect(PLACEHOLDER)
    finally:
        terminal.close()


def test_thinking_of_a_model_that_cannot_is_warned_of(terminal: Terminal) -> None:
    terminal.say("/set think high")
    terminal.expect("Set 'think' mode to 'high'.")
    terminal.expect('warning: model "tiny" does not support thinking output')
