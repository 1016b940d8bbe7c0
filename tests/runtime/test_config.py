"""Where a setting's value comes from, and what is said of one that cannot be used."""

from pathlib import Path

import pytest

from localllm.config import ROWS, Settings, explain_settings, load_settings
from localllm.errors import BadSettings


def settings_of(folder: Path, **variables: str) -> Settings:
    return load_settings({"LOCALLLM_DATA": str(folder), **variables})


def test_defaults(tmp_path):
    settings = settings_of(tmp_path)
    assert settings.host == "127.0.0.1:11434"
    assert settings.max_queue == 512
    assert settings.problems == ()
    assert settings.cache_dir == Path("~/.cache/localllm").expanduser()


def test_own_variable_before_that_of_ollama_before_the_file(tmp_path):
    (tmp_path / "config.toml").write_text('host = "c:1"\nkeep_alive = "1h"\nnum_parallel = 3\n')
    settings = settings_of(
        tmp_path, LOCALLLM_HOST=" 'a:1' ", OLLAMA_HOST="b:1", OLLAMA_KEEP_ALIVE="2h"
    )
    assert (settings.host, settings.keep_alive, settings.num_parallel) == ("a:1", "2h", 3)


def test_types_of_the_file(tmp_path):
    path = tmp_path / "other.toml"
    path.write_text('debug = true\napi_keys = ["a", "b"]\ndata_dir = "~/d"\nmax_queue = 0\n')
    settings = load_settings({"LOCALLLM_CONFIG": str(path)})
    assert settings.debug is True
    assert settings.api_keys == ("a", "b")
    assert settings.data_dir == Path("~/d").expanduser()
    assert settings.max_queue == 512


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host = ", "config.toml: "),
        ("hots = 'a'", "there is no setting 'hots'; do you mean host?"),
        ("max_queue = 1.5", "max_queue = 1.5: it must be"),
        ("max_queue = -1", "max_queue = -1: it must not be negative"),
        ("keep_alive = 'soon'", "keep_alive = 'soon': time: invalid duration"),
        ("host = {a = 1}", "host = {'a': 1}: it must be"),
        ('api_keys = [""]', "api_keys = ['']: a text in it is empty or has a comma"),
        ('api_keys = ["a,b"]', "a text in it is empty or has a comma"),
        (f"host = {'[' * 9999}", "config.toml: "),
    ],
)
def test_bad_files_name_the_key(tmp_path, text, message):
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(BadSettings) as error:
        settings_of(tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "config.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadSettings):
        settings_of(tmp_path)


@pytest.mark.parametrize("named", ["/nowhere/config.toml", "~no.such.user/config.toml"])
def test_a_file_that_is_named_must_be_there(named):
    with pytest.raises(BadSettings, match="there is no such"):
        load_settings({"LOCALLLM_CONFIG": named})


def test_variables_that_cannot_be_read_are_told_and_not_used(tmp_path):
    settings = settings_of(tmp_path, LOCALLLM_MAX_QUEUE="many", OLLAMA_MAX_QUEUE="7")
    assert settings.max_queue == 7
    assert "LOCALLLM_MAX_QUEUE='many' is not used" in settings.problems[0]
    settings = settings_of(tmp_path, OLLAMA_KEEP_ALIVE="soon")
    assert settings.keep_alive == "5m"
    assert len(settings.problems) == 1


def test_names_that_look_like_ours_are_told(tmp_path):
    settings = settings_of(tmp_path, LOCALLLM_HOTS="a")
    assert settings.problems == ("LOCALLLM_HOTS is no setting; do you mean LOCALLLM_HOST?",)


def test_every_row_says_what_it_is_and_where_it_is_from(tmp_path):
    found = explain_settings({"LOCALLLM_DATA": str(tmp_path), "OLLAMA_DEBUG": "1"})
    assert [f.row for f in found] == list(ROWS)
    sources = {f.row.name: f.source for f in found}
    assert sources["debug"] == "OLLAMA_DEBUG"
    assert sources["host"] == ""
    assert all(f.row.metadata["help"] for f in found)


@pytest.mark.parametrize(("text", "value"), [("0", False), ("f", False), ("1", True), ("x", True)])
def test_flags_as_ollama_reads_them(tmp_path, text, value):
    assert settings_of(tmp_path, OLLAMA_DEBUG=text).debug is value
