"""`localllm bench`: a model file's speed, and with `serve` a server's under load."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from localllm.cli.app import Model, app
from localllm.cli.files import BackendName, File, Threads, settings_with
from localllm.errors import BadRequest

_GOAL = re.compile(r"(ttft|tpot|itl|e2el):[0-9.]+")


class BenchCommands(TyperGroup):
    """Measures a file unless the first word is the name of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands:
            args = ["model", *args]
        elif args[0] == "serve":
            args = with_goals(args)
        return super().parse_args(ctx, args)


def with_goals(args: list[str]) -> list[str]:
    """Repeat `--goodput` before each of several goals that follow it, as other benches take them."""
    spread: list[str] = []
    for arg in args:
        follows = len(spread) > 1 and spread[-2] == "--goodput" and _GOAL.fullmatch(spread[-1])
        if follows and _GOAL.fullmatch(arg):
            spread.append("--goodput")
        spread.append(arg)
    return spread


def _numbers(text: str, name: str) -> list[int]:
    """A comma-separated list."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise BadRequest(f"{name}: {text!r} is no list of numbers such as 1,8") from None


commands = typer.Typer(cls=BenchCommands, rich_markup_mode=None)
app.add_typer(commands, name="bench", help="Measure how fast a model is, or a server under load.")


@commands.command("model", hidden=True)
def bench(
    file: File,
    prompt: Annotated[int, typer.Option("-p", "--prompt", help="Prompt tokens.")] = 512,
    generate: Annotated[int, typer.Option("-n", "--generate", help="New tokens.")] = 128,
    depth: Annotated[str, typer.Option("-d", "--depth", help="Tokens in the context.")] = "0",
    threads: Threads = None,
    batch: Annotated[str, typer.Option("-b", "--batch", help="Sequences at once.")] = "1",
    output: Annotated[str, typer.Option("-o", "--output", help="md or json.")] = "md",
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1)] = 5,
    backend: BackendName = "cpu",
    weights: Annotated[
        str | None, typer.Option("--weights", help="auto, mapped or resident.")
    ] = None,
    read_bandwidth: Annotated[
        bool, typer.Option("--read-bandwidth", help="Compare with the memory's read speed.")
    ] = False,
) -> None:
    """Measure how fast a model reads prompts and generates; `serve`: a server under load.

    \b
    Examples:
      localllm bench model.gguf -p 512 -n 128 -t 2
      localllm bench model.gguf -p 0 -n 64 -d 4096 -b 1,8 -o json
      localllm bench serve --help                      many requests to a server
    """
    from localllm.cli.output import Status
    from localllm.offline.bench import BenchOptions
    from localllm.offline.bench import bench as measure

    if output not in ("md", "json"):
        raise BadRequest(f"--output is md or json, not {output!r}")
    options = BenchOptions(
        prompt=prompt,
        generate=generate,
        depths=_numbers(depth, "--depth"),
        batch_sizes=_numbers(batch, "--batch"),
        repetitions=repetitions,
        backend=backend,
        read_bandwidth=read_bandwidth,
    )
    status = Status()
    try:
        report = measure(file, options, settings_with(threads, weights), status.report)
    finally:
        status.clear()
    print(report.to_json() if output == "json" else report.to_markdown())


@commands.command("serve")
def serve(
    model: Model,
    url: Annotated[
        str | None, typer.Option("--url", help="The server (LOCALLLM_HOST, started if need be).")
    ] = None,
    api: Annotated[
        str, typer.Option("--api", help="ollama, ollama-generate, openai or openai-completions.")
    ] = "ollama",
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Sent as a bearer token.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Conversations begun per second (Poisson).")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", help="Conversations at once (4).")
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", help="How many requests (32).")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Begin requests for so long.")
    ] = None,
    workload: Annotated[
        str, typer.Option("--workload", help="random, shared-prefix or multi-turn.")
    ] = "random",
    prompt_tokens: Annotated[
        str, typer.Option("--prompt-tokens", help="Of a turn: 256, or a range: 64-1024.")
    ] = "256",
    output_tokens: Annotated[
        str, typer.Option("--output-tokens", help="Most tokens of an answer: 64, or a range.")
    ] = "64",
    prefix_tokens: Annotated[
        int, typer.Option("--prefix-tokens", help="Of the shared system prompt.")
    ] = 2000,
    prefixes: Annotated[int, typer.Option("--prefixes", help="Different system prompts.")] = 1,
    turns: Annotated[int, typer.Option("--turns", help="Of a conversation.")] = 4,
    seed: Annotated[int, typer.Option("--seed", help="Of the words and the arrivals.")] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers go on to their most tokens.")
    ] = False,
    goodput: Annotated[
        list[str] | None,
        typer.Option("--goodput", help="ttft:500 tpot:50 ... in ms: what a request must meet."),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write everything to a file.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw an SVG file.")] = None,
) -> None:
    """Put a server under load and measure what its clients see.

    Ctrl-C ends the run and shows what was measured until then.

    \b
    Examples:
      localllm bench serve smollm2:135m --concurrency 16 --requests 64
      localllm bench serve smollm2:135m --rate 2 --seconds 60 --goodput ttft:500 tpot:50
      localllm bench serve llama3.2 --workload shared-prefix --prefix-tokens 2000 --json run.json
      localllm bench serve qwen3 --url http://gpu:8000 --api openai --workload multi-turn
    """
    from localllm.cli.traffic import measure
    from localllm.traffic.records import Goal
    from localllm.traffic.run import Plan
    from localllm.traffic.wire import dialect_of
    from localllm.traffic.workload import Span, Workload

    if rate is not None and concurrency is not None:
        raise BadRequest("give --rate or --concurrency, not both")
    asked = Workload(
        workload,
        Span.parse(prompt_tokens, "--prompt-tokens"),
        Span.parse(output_tokens, "--output-tokens"),
        prefix_tokens,
        prefixes,
        turns,
        seed,
    )
    dialect, goal = dialect_of(api), Goal.parse(goodput or ())

    def plan_for(server: Any) -> Plan:
        return Plan(
            server,
            dialect,
            model,
            asked,
            rate=rate,
            concurrency=4 if concurrency is None else concurrency,
            requests=32 if requests is None and seconds is None else requests,
            seconds=seconds,
            ignore_eos=ignore_eos,
            api_key=api_key,
            goal=goal,
        )

    raise typer.Exit(measure(plan_for, url, json, plot))
