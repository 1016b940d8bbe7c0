"""Commands as processes, against a real server with a fake model."""

import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from server_process import Server, environment, write_model

from localllm.cli.formats import ago_text, size_text, until_text

COMMAND = (sys.executable, "-m", "localllm.cli")


def start(server: Server, *args: str, **options: object) -> "subprocess.Popen[bytes]":
    env = environment(server.folder, LOCALLLM_HOST=server.url)
    return subprocess.Popen([*COMMAND, *args], env=env, cwd=server.folder, **options)  # type: ignore[call-overload, no-any-return]


def run(server: Server, *args: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start(server, *args, **pipes)
    out, err = process.communicate(stdin)
    return process.returncode, out.decode(), err.decode()


def test_answer_is_all_there_is_on_standard_output(server: Server) -> None:
    assert run(server, "run", "tiny", "hi") == (0, "0 1 2 \n", "")


def test_standard_input_comes_before_the_arguments(server: Server) -> None:
    code, out, _ = run(server, "run", "tiny", "then", "echo", stdin=b"first\n")
    assert (code, out.strip()) == (0, repr([{"role": "user", "content": "first\n then echo"}]))
    code, out, _ = run(server, "run", "tiny", stdin=b"only \xff echo")
    assert (code, out.strip()) == (0, repr([{"role": "user", "content": "only \ufffd echo"}]))


def test_no_prompt_and_no_terminal_loads_the_model(server: Server) -> None:
    assert run(server, "run", "tiny") == (0, "", "")
    assert run(server, "run", "tiny", "") == (0, "", "")
    assert [m["name"] for m in server.http.get("/api/ps").json()["models"]] == ["tiny:latest"]


def test_answers_are_utf8_whatever_the_locale(server: Server, monkeypatch: object) -> None:
    env = environment(server.folder, LOCALLLM_HOST=server.url, LC_ALL="C", PYTHONUTF8="0")
    done = subprocess.run(
        [*COMMAND, "run", "tiny", b"\xff smile"],
        env=env,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0
    assert done.stdout.decode().strip() == 3 * "\N{SLIGHTLY SMILING FACE}"


def test_thinking_is_set_apart_and_can_be_hidden(server: Server) -> None:
    shown = "Thinking...\n0? 1? \n...done thinking.\n\n2 \n"
    assert run(server, "run", "tiny", "ponder") == (0, shown, "")
    assert run(server, "run", "--hidethinking", "tiny", "ponder") == (0, "2 \n", "")


def test_a_format_may_be_a_schema(server: Server) -> None:
    code, out, _ = run(server, "run", "tiny", "fields", "--format", '{"type": "object"}')
    assert (code, out.split(",")[0]) == (0, "({'type': 'object'}")
    code, out, err = run(server, "run", "tiny", "fields", "--format", "{x")
    assert (code, out) == (1, "")
    assert "no JSON schema" in err


def test_verbose_prints_rates_on_standard_error(server: Server) -> None:
    code, out, err = run(server, "run", "--verbose", "tiny", "hi")
    assert (code, out) == (0, "0 1 2 \n")
    lines = dict(line.split(":", 1) for line in err.splitlines())
    assert lines["prompt eval count"].strip() == "5 token(s)"
    assert lines["prompt eval duration"] == " 2ms"
    assert lines["eval rate"].strip() == "1000.00 tokens/s"


def test_closed_pipe_ends_the_command_quietly_and_the_request_too(server: Server) -> None:
    process = start(
        server, "run", "tiny", "forever", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1
    while "499 |" not in (server.folder / "log").read_text():
        server.http.get("/health")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_as_good_as_empty_ones(server: Server, closed: str) -> None:
    env = environment(server.folder, LOCALLLM_HOST=server.url)
    shell = ["sh", "-c", f'"$@" {closed}', "sh", *COMMAND, "run", "tiny", "hi"]
    done = subprocess.run(shell, env=env, cwd=server.folder, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == (b"" if ">&-" in closed else b"0 1 2 \n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_an_answer_that_cannot_be_written_is_told_in_one_line(server: Server) -> None:
    for args in (("list",), ("run", "tiny", "hi")):
        with open("/dev/full", "wb") as full:
            process = start(server, *args, stdin=subprocess.DEVNULL, stdout=full, stderr=-1)
        assert process.communicate()[1] == b"Error: No space left on device\n"
        assert process.returncode == 1


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (
            ("run", "127.0.0.1:9/me/nope", "hi"),
            "not found, and it could not be pulled: no connection",
        ),
        (("run", "./nope.gguf", "hi"), "./nope.gguf: no such file"),
        (("run", "a//b", "hi"), "invalid model name"),
        (("run", "tiny", "refuse"), "the fake model refuses this"),
        (("run", "tiny", "die"), "the model runner has unexpectedly stopped"),
        (("run", "tiny", "hi", "--think=much"), 'invalid value for --think: "much"'),
        (("run", "tiny", "hi", "--keepalive", "soon"), 'time: invalid duration "soon"'),
        (("run",), "Missing argument 'MODEL'"),
        (("run", "tiny", "--nope"), "No such option: --nope"),
        (("nope",), "No such command 'nope'"),
        (("show", "nope"), "model 'nope:latest' not found"),
        (("show", "tiny", "--system", "--license"), "only one of '--license', '--modelfile'"),
        (("stop", "nope"), 'couldn\'t find model "nope" to stop'),
        (("rm", "nope"), "model 'nope' not found"),
        (("cp", "nope", "x"), 'model "nope" not found'),
        (("create", "x"), "Modelfile: No such file or directory; name a Modelfile with -f"),
        (("create", "x", "./nope.gguf"), "nope.gguf: no such file"),
        (("tokenize", "nope.gguf"), "nope.gguf"),
        (("serve",), "localllm is already running at http://127.0.0.1:"),
    ],
)
def test_errors_are_one_line_on_standard_error(
    server: Server, args: tuple[str, ...], error: str
) -> None:
    code, out, err = run(server, *args)
    assert code == 1
    assert not out or args[2:] == ("die",)
    line = err.splitlines()[-1]
    assert line.startswith("Error: ")
    assert error in line
    assert "Traceback" not in err


def test_create_from_files_and_modelfiles(server: Server) -> None:
    path = write_model(server.folder / "with space.gguf", context_length=99)
    assert run(server, "create", "one", "with space.gguf")[::2] == (0, "success\n")
    modelfile = server.folder / "Modelfile"
    modelfile.write_text(f"FROM ./{path.name}\nSYSTEM Be brief.\nPARAMETER stop x\n")
    assert run(server, "create", "two", "-f", str(modelfile))[0] == 0
    assert run(server, "create", "three", "two")[0] == 0
    assert run(server, "create", "four", "-f", "-", stdin=b"FROM two")[0] == 0
    assert run(server, "show", "three", "--system")[1] == "Be brief.\n"
    assert run(server, "show", "three", "--parameters")[1] == f'{"stop":<30} "x"\n'
    assert "FROM /" in run(server, "show", "three", "--modelfile")[1]
    text = run(server, "show", str(path))[1]
    assert "    context length      99\n" in text
    code, out, _ = run(server, "run", "with space.gguf", "hi")
    assert (code, out) == (0, "0 1 2 \n")


def test_tables(server: Server) -> None:
    path = write_model(server.folder / "listed.gguf", context_length=98)
    run(server, "create", "listed", path.name)
    code, out, _ = run(server, "list", "LIST")
    header, row = out.splitlines()
    assert code == 0
    assert header.split() == ["NAME", "ID", "SIZE", "MODIFIED"]
    assert row.split()[0] == "listed:latest"
    assert len(row.split()[1]) == 12
    run(server, "run", "listed", "hi")
    header, row = run(server, "ps", "listed")[1].splitlines()
    assert header.split() == ["NAME", "ID", "SIZE", "PROCESSOR", "CONTEXT", "UNTIL"]
    assert "  100% CPU     4096  " in row
    assert row.rstrip().endswith("4 minutes from now")
    assert run(server, "stop", "listed") == (0, "", "")
    assert run(server, "cp", "listed", "again")[1] == "copied 'listed' to 'again'\n"
    assert run(server, "rm", "listed", "again")[1] == "deleted 'listed'\ndeleted 'again'\n"


def test_shell_completion_knows_commands_and_models(server: Server) -> None:
    env = environment(server.folder, LOCALLLM_HOST=server.url, _LOCALLLM_COMPLETE="complete_bash")

    def complete(words: str) -> str:
        more = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        done = subprocess.run(COMMAND, env={**env, **more}, capture_output=True, text=True)
        return done.stdout

    assert "show" in complete("localllm sho").split()
    assert "tiny:latest" in complete("localllm run ti")


def test_help_has_examples(server: Server) -> None:
    assert "localllm run smollm2:135m" in run(server, "run", "--help")[1]
    assert run(server, "help", "run") == run(server, "run", "--help")
    assert run(server, "help") == run(server, "--help")
    assert run(server, "-v") == run(server, "--version")
    assert "Commands:" in run(server)[1]


@pytest.mark.parametrize("code", ["main(['list'])", "main(['ps'])", "main(['run', 'tiny', 'hi'])"])
def test_commands_of_the_client_import_nothing_heavy(server: Server, code: str) -> None:
    script = (
        f"import sys; from localllm.cli import main; assert {code} == 0; "
        "heavy = ('numba', 'mlx', 'numpy', 'starlette', 'rich', 'prompt_toolkit', 'httpx'); "
        "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
    )
    env = environment(server.folder, LOCALLLM_HOST=server.url)
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, stdin=subprocess.DEVNULL
    )
    assert done.stderr.decode() == "[]\n"


def test_daemon_imports_nothing_that_computes() -> None:
    script = (
        "import sys, localllm.server.app, kernels_cpu.isa; "
        "heavy = ('numba', 'mlx', 'numpy', 'jinja2', 'tokenizers'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout == b"[]\n"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *((999, "999 B"), (815_000_000, "815 MB"), (4_700_000_000, "4.7 GB")),
        *((4_000_000_000, "4 GB"), (12_900_000_000, "12 GB"), (0, "0 B")),
    ],
)
def test_sizes_read_as_ollama_prints_them(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (timedelta(seconds=0.5), "Less than a second"),
        (timedelta(seconds=1), "1 second"),
        (timedelta(seconds=59), "59 seconds"),
        (timedelta(seconds=61), "About a minute"),
        (timedelta(minutes=50), "50 minutes"),
        (timedelta(minutes=70), "About an hour"),
        (timedelta(hours=30), "30 hours"),
        (timedelta(days=3), "3 days"),
        (timedelta(days=20), "2 weeks"),
        (timedelta(days=100), "3 months"),
        (timedelta(days=800), "2 years"),
    ],
)
def test_times_are_told_in_words(span: timedelta, text: str) -> None:
    now = datetime.now().astimezone()
    assert ago_text((now - span).isoformat(), now) == f"{text} ago"
    assert until_text((now + span).isoformat(), now) == f"{text} from now"


def test_ends_of_time() -> None:
    now = datetime.now().astimezone()
    assert until_text((now + timedelta(days=100_000)).isoformat(), now) == "Forever"
    assert until_text((now - timedelta(seconds=1)).isoformat(), now) == "Stopping..."
