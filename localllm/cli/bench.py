"""`localllm bench`: a model file's speed, and with `serve` a server's under load."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from localllm.cli.app import app
from localllm.cli.files import BackendName, File, Threads, settings_with
from localllm.errors import BadRequest

CONCURRENCY, REQUESTS = 4, 32
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


ServedModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="The model's name on the server.")
]
Rate = Annotated[
    float | None, typer.Option("--rate", help="Conversations begun per second (Poisson).")
]
Concurrency = Annotated[
    int | None, typer.Option("--concurrency", help=f"Conversations at once ({CONCURRENCY}).")
]
Requests = Annotated[
    int | None, typer.Option("--requests", help=f"How many requests ({REQUESTS}).")
]
Seconds = Annotated[float | None, typer.Option("--seconds", help="Begin requests for so long.")]
Kind = Annotated[str, typer.Option("--workload", help="random, shared-prefix or multi-turn.")]
PromptTokens = Annotated[
    str, typer.Option("--prompt-tokens", help="Of a turn: 256, or a range: 64-1024.")
]
OutputTokens = Annotated[
    str, typer.Option("--output-tokens", help="Most tokens of an answer: 64, or a range.")
]
PrefixTokens = Annotated[int, typer.Option("--prefix-tokens", help="Of the shared system prompt.")]
Prefixes = Annotated[int, typer.Option("--prefixes", help="Different system prompts.")]
Turns = Annotated[int, typer.Option("--turns", help="Of a conversation.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the words and the arrivals.")]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Answers go on to their most tokens.")
]
Goodput = Annotated[
    list[str] | None,
    typer.Option("--goodput", help="ttft:500 tpot:50 ... in ms: what a request must meet."),
]
Url = Annotated[
    str | None, typer.Option("--url", help="The server (LOCALLLM_HOST, started if need be).")
]
Api = Annotated[
    str, typer.Option("--api", help="ollama, ollama-generate, openai or openai-completions.")
]
ApiKey = Annotated[str | None, typer.Option("--api-key", help="Sent as a bearer token.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write everything to a file.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw an SVG file.")]


@commands.command("serve")
def serve(
    model: ServedModel,
    url: Url = None,
    api: Api = "ollama",
    api_key: ApiKey = None,
    rate: Rate = None,
    concurrency: Concurrency = None,
    requests: Requests = None,
    seconds: Seconds = None,
    workload: Kind = "random",
    prompt_tokens: PromptTokens = "256",
    output_tokens: OutputTokens = "64",
    prefix_tokens: PrefixTokens = 2000,
    prefixes: Prefixes = 1,
    turns: Turns = 4,
    seed: Seed = 0,
    ignore_eos: IgnoreEos = False,
    goodput: Goodput = None,
    json: Json = None,
    plot: Plot = None,
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
    prompt = Span.parse(prompt_tokens, "--prompt-tokens")
    output = Span.parse(output_tokens, "--output-tokens")
    plan_for = partial(
        Plan,
        dialect=dialect_of(api),
        model=model,
        workload=Workload(workload, prompt, output, prefix_tokens, prefixes, turns, seed),
        rate=rate,
        concurrency=CONCURRENCY if concurrency is None else concurrency,
        requests=REQUESTS if requests is None and seconds is None else requests,
        seconds=seconds,
        ignore_eos=ignore_eos,
        api_key=api_key,
        goal=Goal.parse(goodput or ()),
    )
    raise typer.Exit(measure(plan_for, url, json, plot))
