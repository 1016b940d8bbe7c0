"""`localllm launch`: how popular programs are pointed at the daemon. One row per program.

The rows hold what their manuals say of Ollama, whose API the daemon speaks. Lines that begin with
`export` go into a shell; the others into the file that the row's note names.
"""

import shlex
from dataclasses import dataclass

from localllm.cli.formats import table
from localllm.config import Settings
from localllm.errors import BadRequest

MODEL = "llama3.1:8b"  # where none is named


@dataclass(frozen=True, slots=True)
class Program:
    """A program, where its lines belong, and the lines, with {url}, {model} and {key} to fill in.

    keyed   lines that it needs besides where the daemon asks for a key
    """

    name: str
    title: str
    note: str
    lines: tuple[str, ...]
    keyed: tuple[str, ...] = ()


SHELL = "in the shell that starts it"

PROGRAMS = (
    Program(
        "ollama",
        "Ollama's command line and client libraries",
        SHELL,
        ("export OLLAMA_HOST={url}",),
        ("export OLLAMA_API_KEY={key}",),
    ),
    Program(
        "aider",
        "Aider, a coding agent",
        "in the shell; then start it with the last line",
        ("export OLLAMA_API_BASE={url}", "aider --model ollama_chat/{model}"),
        ("export OLLAMA_API_KEY={key}",),
    ),
    Program(
        "goose",
        "Goose, an agent",
        SHELL,
        ("export GOOSE_PROVIDER=ollama", "export OLLAMA_HOST={url}", "export GOOSE_MODEL={model}"),
    ),
    Program(
        "open-webui",
        "Open WebUI, chat in a browser",
        SHELL,
        ("export OLLAMA_BASE_URL={url}",),
    ),
    Program(
        "continue",
        "Continue, for VS Code and JetBrains",
        "in ~/.continue/config.yaml",
        (
            "models:",
            "  - name: {model}",
            "    provider: ollama",
            "    model: {model}",
            "    apiBase: {url}",
        ),
        ("    apiKey: {key}",),
    ),
    Program(
        "zed",
        "Zed, an editor",
        "in Zed's settings.json",
        ('"language_models": {{"ollama": {{"api_url": "{url}"}}}}',),
    ),
)


def overview() -> str:
    """The programs as a table."""
    return table(("PROGRAM", "WHAT IT IS"), [(row.name, row.title) for row in PROGRAMS])


def instructions(name: str, model: str | None, settings: Settings, url: str) -> tuple[str, str]:
    """Where the lines belong, and the lines. Raises BadRequest for an unknown program."""
    found = next((row for row in PROGRAMS if row.name == name.lower()), None)
    if found is None:
        known = ", ".join(row.name for row in PROGRAMS)
        raise BadRequest(f"unknown program {name!r}; one of {known}")
    keys = settings.api_keys
    values = {"url": url, "model": model or MODEL, "key": keys[0] if keys else ""}
    is_shell = found.lines[0].startswith("export ")
    if is_shell:
        values = {name: shlex.quote(value) for name, value in values.items()}
    keyed = found.keyed if keys else ()
    lines = (*keyed, *found.lines) if is_shell else (*found.lines, *keyed)
    return found.note, "\n".join(line.format(**values) for line in lines)
