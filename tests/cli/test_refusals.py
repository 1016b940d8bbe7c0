"""What this version cannot do is said in one line; `--think` with and without a value."""

from pathlib import Path

import pytest
from server_process import Server
from test_commands import run


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("push", "tiny"), "push is not supported by this version: models can be pulled"),
        (("create", "x", "-q", "q4_K_M"), "create: --quantize is not supported by this version"),
        (("create", "x", "./safe"), "import of safetensors is not supported by this version"),
        (("create", "x", "model.safetensors"), "import of safetensors is not supported"),
        (("create", "x", "./several"), "several: 2 GGUF files"),
        (("create", "x", "./empty"), "empty: no GGUF files"),
        (("create", "x", "./nowhere"), "nowhere: no such file"),
        (("run", "tiny", "--think", "hi"), '"tiny" does not support thinking'),
        (("run", "--think", "tiny", "hi"), '"tiny" does not support thinking'),
        (("run", "tiny", "--think", "max", "hi"), '"tiny" does not support thinking'),
        (("run", "tiny", "hi", "--think"), '"tiny" does not support thinking'),
        (("run", "tiny", "--think=much", "hi"), 'invalid value for --think: "much"'),
    ],
)
def test_one_line_and_exit_code_1(server: Server, args: tuple[str, ...], error: str) -> None:
    files = ("safe/model.safetensors", "several/a.gguf", "several/b.gguf", "empty/x")
    for path in (server.folder / file for file in files):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    code, out, err = run(server, *args)
    assert (code, out) == (1, "")
    assert err.startswith("Error: ")
    assert error in err
    assert len(err.splitlines()) == 1


def test_thinking_can_be_turned_off_and_the_word_can_be_said(server: Server) -> None:
    assert run(server, "run", "tiny", "--think", "false", "hi")[:2] == (0, "0 1 2 \n")
    assert run(server, "run", "tiny", "--think=false", "hi")[:2] == (0, "0 1 2 \n")
    assert run(server, "run", "tiny", "--", "--think", "hi")[:2] == (0, "0 1 2 \n")


def test_a_folder_with_one_file_is_that_file(server: Server) -> None:
    folder = server.folder / "one"
    folder.mkdir()
    Path(folder / "m.gguf").symlink_to(server.model_file)
    assert run(server, "create", "fromfolder", "./one")[0] == 0
    assert run(server, "run", "fromfolder", "hi")[:2] == (0, "0 1 2 \n")
