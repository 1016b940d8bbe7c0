"""The commands and their options. Each does its imports when it runs: starting must be quick."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.main import get_command

from localllm import __version__
from localllm.cli.settings import SettingsHelp
from localllm.errors import BadRequest

if TYPE_CHECKING:
    from localllm.client import Client

app = typer.Typer(
    name="localllm",
    help="Run language models on this machine.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _models_like(incomplete: str) -> list[str]:
    """For shell completion: models of the store and files that begin so."""
    from localllm.config import load_settings
    from localllm.store import Store

    folder, _, start = incomplete.rpartition("/")
    files = sorted(str(path) for path in Path(folder or ".").glob(f"{start}*.gguf"))
    names = [str(model.name) for model in Store(load_settings().data_dir / "models").models()]
    return [text for text in (*names, *files) if text.startswith(incomplete)]


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A model's name, or a GGUF file.", autocompletion=_models_like
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show all there is.")]
Prefix = Annotated[str, typer.Argument(metavar="[PREFIX]", help="Only names that begin so.")]


def command() -> Any:
    """The command line as one object with a `main`, the commands of other files included."""
    import localllm.cli.bench
    import localllm.cli.files  # noqa: F401

    return get_command(app)


def _client() -> "Client":
    """A client of a daemon that is running."""
    client = _unconnected_client()
    client.ensure_daemon(note=lambda text: typer.echo(f"note: {text}", err=True))
    return client


def _unconnected_client() -> "Client":
    from localllm.client import Client
    from localllm.config import load_settings

    return Client(load_settings())


def _print_version(value: bool) -> None:
    if value:
        print(f"localllm version is {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-v", callback=_print_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def run(
    model: Model,
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="What to say to it.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show rates after answers.")] = False,
    keepalive: Annotated[
        str | None, typer.Option(help="How long the model stays loaded, such as 5m.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="Format of the answer: json, or a schema.")
    ] = None,
    think: Annotated[
        str | None, typer.Option(help="true (also without a value), false, low, medium or high.")
    ] = None,
    hidethinking: Annotated[
        bool, typer.Option("--hidethinking", help="Do not show what the model thinks.")
    ] = False,
    nowordwrap: Annotated[bool, typer.Option("--nowordwrap", help="Do not wrap lines.")] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Pull over plain HTTP if the model is missing.")
    ] = False,
    dimensions: Annotated[
        int | None, typer.Option(min=1, help="Print the prompt's vector, with so many values.")
    ] = None,
    truncate: Annotated[
        str | None, typer.Option(help="Print the prompt's vector; false: not if it is too long.")
    ] = None,
) -> None:
    """Ask a model once, or converse with it on a terminal.

    \b
    Examples:
      localllm run smollm2:135m                       converse
      localllm run smollm2:135m "Why is the sky blue?"
      localllm run ./model.gguf "Hello"               run a file where it is
      localllm run smollm2:135m "Summarize:" < text.txt
      localllm run nomic-embed-text "a text"          print its vector
    """
    from localllm.cli.run import Session, parse_think, parse_truncate
    from localllm.cli.run import run as run_model

    session = Session(
        model,
        keepalive,
        format,
        parse_think(think),
        verbose,
        not nowordwrap,
        hidethinking,
        insecure,
        dimensions=dimensions,
        truncate=parse_truncate(truncate),
    )
    run_model(_unconnected_client(), session, prompt or [])


@app.command(cls=SettingsHelp)
@app.command("start", cls=SettingsHelp, hidden=True)
def serve() -> None:
    """Run the daemon in the foreground.

    \b
    Examples:
      localllm serve
      LOCALLLM_API_KEY=secret LOCALLLM_HOST=0.0.0.0:11500 localllm serve
    """
    from localllm.address import Address
    from localllm.client import Client, other_program
    from localllm.config import load_settings
    from localllm.errors import DaemonUnavailable
    from localllm.server.app import serve as serve_http

    settings = load_settings()
    try:
        serve_http(settings)
    except DaemonUnavailable as error:
        found = Client(settings).probe()
        address = Address.parse(settings.host)
        if found is not None and found.is_ours:
            raise DaemonUnavailable(f"localllm is already running at {address}") from error
        if found is not None:
            name = found.other or "another program"
            raise DaemonUnavailable(other_program(name, address)) from error
        raise


@app.command("list")
@app.command("ls", hidden=True)
def list_models(prefix: Prefix = "") -> None:
    """List the models that there are.

    \b
    Example:
      localllm list smol
    """
    from localllm.cli import models

    models.list_models(_client(), prefix)


@app.command()
def ps(prefix: Prefix = "") -> None:
    """List the models that are loaded.

    \b
    Example:
      localllm ps
    """
    from localllm.cli import models

    models.list_running(_client(), prefix)


@app.command()
def show(
    model: Model,
    license: Annotated[bool, typer.Option("--license", help="Show the license.")] = False,
    modelfile: Annotated[bool, typer.Option("--modelfile", help="Show the Modelfile.")] = False,
    parameters: Annotated[bool, typer.Option("--parameters", help="Show parameters.")] = False,
    system: Annotated[bool, typer.Option("--system", help="Show the system message.")] = False,
    template: Annotated[bool, typer.Option("--template", help="Show the template.")] = False,
    verbose: Verbose = False,
) -> None:
    """Show what a model is.

    \b
    Examples:
      localllm show smollm2:135m
      localllm show --template ./model.gguf
    """
    from localllm.cli import models

    flags = (license, modelfile, parameters, system, template)
    selected = [name for name, flag in zip(models.SELECTIONS, flags) if flag]
    models.show(_client(), model, selected, verbose=verbose)


@app.command()
def stop(model: Model) -> None:
    """Unload a model.

    \b
    Example:
      localllm stop smollm2:135m
    """
    from localllm.cli import models

    models.stop(_client(), model)


@app.command()
def rm(names: Annotated[list[str], typer.Argument(metavar="MODEL...")]) -> None:
    """Remove models.

    \b
    Example:
      localllm rm old:latest older:latest
    """
    from localllm.cli import models

    models.remove(_client(), names)


@app.command()
def cp(
    source: Annotated[str, typer.Argument(metavar="SOURCE")],
    destination: Annotated[str, typer.Argument(metavar="DESTINATION")],
) -> None:
    """Give a model another name.

    \b
    Example:
      localllm cp smollm2:135m tiny
    """
    from localllm.cli import models

    models.copy(_client(), source, destination)


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call the model.")],
    source: Annotated[
        str | None, typer.Argument(metavar="[FILE.gguf|MODEL]", help="What to make it from.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="The Modelfile (./Modelfile), or -.")
    ] = None,
    quantize: Annotated[str | None, typer.Option("--quantize", "-q", hidden=True)] = None,
    draft_quantize: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Make a model from a GGUF file, which is not copied, or from a Modelfile.

    \b
    Examples:
      localllm create smollm2:135m ./SmolLM2-135M-Instruct.Q4_1.gguf
      localllm create terse -f Modelfile
    """
    from localllm.cli import models

    if quantize or draft_quantize:
        raise BadRequest(models.NO_QUANTIZING)
    models.create(_client(), name, source, file)


@app.command()
def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="What to fetch.")],
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Speak plain HTTP with the registry.")
    ] = False,
) -> None:
    """Fetch a model. What was interrupted goes on where it was.

    \b
    Examples:
      localllm pull llama3.1:8b                     by its short name
      localllm pull hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0
      localllm pull hf.co/org/repo:Q4_K_M@v1.0      at a branch, tag or commit
      localllm pull registry.example.com/me/model   from an Ollama registry
    \b
    Environment of the daemon:
      HF_TOKEN            token for gated and private repositories
      HF_ENDPOINT         another Hub, such as a mirror
      HF_HUB_OFFLINE      ask the Hub nothing
    """
    from localllm.cli.pulling import pull_model

    pull_model(_client(), model, is_insecure=insecure)


@app.command(hidden=True)
def push(
    model: Annotated[str, typer.Argument(metavar="MODEL")],
    insecure: Annotated[bool, typer.Option("--insecure")] = False,
) -> None:
    """Upload a model, which this version cannot."""
    from localllm.cli import models

    models.push(_client(), model)


@app.command()
def launch(
    program: Annotated[
        str | None, typer.Argument(metavar="[PROGRAM]", help="What to point at the daemon.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="The model it shall use.")] = None,
) -> None:
    """Print what points agents and editors at the daemon; alone, for which ones it can.

    \b
    Examples:
      localllm launch
      localllm launch aider --model qwen3:8b
      eval "$(localllm launch ollama)"
    """
    from localllm.cli.integrations import instructions, overview

    if program is None:
        print(overview())
        return
    client = _unconnected_client()
    note, lines = instructions(program, model, client.settings, str(client.address))
    typer.echo(f"# {note}", err=True)
    print(lines)


@app.command("import")
def import_models(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="Ollama's model folder.")
    ] = None,
) -> None:
    """Take over the models of an Ollama installation. Nothing is copied.

    \b
    Examples:
      localllm import                     OLLAMA_MODELS, or ~/.ollama/models
      localllm import /srv/ollama/models
    """
    from localllm.cli.pulling import import_models

    import_models(folder)
