"""What `localllm launch` prints for each program."""

import pytest

from localllm.cli.integrations import PROGRAMS, instructions, overview
from localllm.config import Settings
from localllm.errors import BadRequest

URL = "http://127.0.0.1:11434"


@pytest.mark.parametrize("row", PROGRAMS, ids=lambda row: row.name)
def test_lines_name_the_daemon_and_leave_nothing_to_fill_in(row):
    for settings in (Settings(), Settings(api_keys=("secret", "other"))):
        note, lines = instructions(row.name, "m:1b", settings, URL)
        assert note == row.note
        assert URL in lines
        assert ("secret" in lines) == bool(settings.api_keys and row.keyed)
        assert "{url}" not in lines
    assert row.name in overview()


def test_the_model_is_quoted_for_the_shell():
    _, lines = instructions("Aider", "a b; rm c", Settings(), URL)
    assert lines.endswith("aider --model ollama_chat/'a b; rm c'")


def test_unknown_programs_are_told_the_known_ones():
    with pytest.raises(BadRequest, match="unknown program 'emacs'; one of ollama, aider"):
        instructions("emacs", None, Settings(), URL)
