"""What is written to terminals that want it plain, and to pipes."""

import os
import pty
import subprocess

import pytest
from server_process import Server, environment
from test_commands import COMMAND, run

ESCAPE = b"\x1b"


def shown(server: Server, *args: str, **environ: str) -> bytes:
    """All that a command writes to a terminal."""
    ours, theirs = pty.openpty()
    env = environment(server.folder, **{"LOCALLLM_HOST": server.url, "TERM": "xterm", **environ})
    process = subprocess.Popen(
        [*COMMAND, *args], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    data = b""
    try:
        while piece := os.read(ours, 65536):
            data += piece
    except OSError:
        pass  # how the system says that nobody will write any more
    os.close(ours)
    assert process.wait() == 0
    return data


def test_a_terminal_shows_thoughts_in_grey(server: Server) -> None:
    assert b"\x1b[90m" in shown(server, "run", "tiny", "ponder")


def test_a_dumb_terminal_gets_no_escapes(server: Server) -> None:
    assert ESCAPE not in shown(server, "run", "tiny", "ponder", TERM="dumb")


def test_colours_can_be_unwanted(server: Server) -> None:
    text = shown(server, "run", "tiny", "ponder", NO_COLOR="1")
    assert b"\x1b[90m" not in text
    assert b"Thinking...\r\n0? 1?" in text


@pytest.mark.parametrize("args", [("list",), ("ps",), ("show", "tiny"), ("run", "tiny", "ponder")])
def test_pipes_get_no_escapes(server: Server, args: tuple[str, ...]) -> None:
    code, out, err = run(server, *args)
    assert (code, err) == (0, "")
    assert "\x1b" not in out


def test_a_file_and_a_word_are_one_prompt_and_an_empty_one_loads(server: Server) -> None:
    _, out, _ = run(server, "run", "tiny", "Sum up: echo", stdin=b"line 1\nline 2\n")
    assert out.strip() == repr([{"role": "user", "content": "line 1\nline 2\n Sum up: echo"}])
    assert run(server, "run", "tiny", "") == (0, "", "")
