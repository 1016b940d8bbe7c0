"""What `bench serve` shows: a live table on a terminal, the report, the JSON file, the picture."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.address import Address
from localllm.cli import EXIT_INTERRUPTED
from localllm.client import Client
from localllm.config import load_settings, takes_escapes
from localllm.traffic import plot
from localllm.traffic.records import METRICS, Summary
from localllm.traffic.run import Plan, Traffic, run_until

if TYPE_CHECKING:
    from rich.table import Table

DRAW_SECONDS = 0.5
NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end to end",
}


def measure(
    plan_for: Callable[[Address], Plan], url: str | None, to_json: Path | None, to_plot: Path | None
) -> int:
    """Run the plan and show what came out; the exit code. Without a URL our daemon is meant."""
    if to_plot is not None:
        plot.check_path(to_plot)
    plan = own_plan(plan_for) if url is None else plan_for(server_of(url))
    traffic = Traffic(plan)
    is_whole = asyncio.run(_run(traffic))
    summary = traffic.summary()
    print(report(plan, summary))
    if not is_whole:
        print("interrupted: this is what was measured until then", file=sys.stderr)
    _print_failures(traffic)
    if to_json is not None:
        to_json.write_text(json.dumps(to_dict(traffic, summary)) + "\n", encoding="utf-8")
    if to_plot is not None:
        plot.draw(to_plot, title(plan), traffic.records, summary.duration)
    if not is_whole:
        return EXIT_INTERRUPTED
    return 0 if summary.completed and not summary.errors else 1


def own_plan(plan_for: Callable[[Address], Plan]) -> Plan:
    """The plan for our own daemon, which is started if it does not run, with the key it wants."""
    client = Client(load_settings())
    client.ensure_daemon(note=lambda text: print(f"note: {text}", file=sys.stderr))
    client.close()
    plan = plan_for(client.address)
    keys = client.settings.api_keys
    return replace(plan, api_key=keys[0]) if keys and plan.api_key is None else plan


def server_of(url: str) -> Address:
    """The address of a URL, with or without OpenAI's `/v1` at its end."""
    return Address.parse(url.rstrip("/").removesuffix("/v1"))


async def _run(traffic: Traffic) -> bool:
    """Run it, and keep the table up to date on a terminal; False: interrupted."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stopped.set)
    is_live = sys.stderr.isatty() and takes_escapes()
    drawing = asyncio.create_task(_draw(traffic)) if is_live else None
    try:
        return await run_until(traffic, stopped)
    finally:
        if drawing is not None:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)
        loop.remove_signal_handler(signal.SIGINT)


async def _draw(traffic: Traffic) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(_table(traffic), refresh=True)
            await asyncio.sleep(DRAW_SECONDS)


def _table(traffic: Traffic) -> "Table | str":
    from rich.table import Table

    plan = traffic.plan
    if not traffic.is_running:
        return f"{title(plan)}: waiting for the model"
    summary = traffic.summary()
    table = Table(title=title(plan))
    for name in ("", "mean", "median", "p99"):
        table.add_column(name, justify="right" if name else "left")
    for label, *values in metric_rows(summary):
        table.add_row(f"{label}, ms", *values)
    table.add_section()
    for label, value in count_rows(summary):
        table.add_row(label, value)
    return table


def title(plan: Plan) -> str:
    pace = f"{plan.concurrency} at once" if plan.rate is None else f"{plan.rate:g} per second"
    return f"{plan.model} at {plan.server}: {plan.workload.kind}, {pace}"


def metric_rows(summary: Summary) -> list[tuple[str, str, str, str]]:
    """Mean, median and p99 of every metric."""
    rows = []
    for metric in METRICS:
        spread = summary.spreads[metric]
        values = (None,) * 3 if spread is None else (spread.mean, spread.median, spread.p99)
        mean, median, p99 = ("-" if v is None else f"{v:.1f}" for v in values)
        rows.append((NAMES[metric], mean, median, p99))
    return rows


def count_rows(summary: Summary) -> list[tuple[str, str]]:
    """Counts and rates."""
    rows = [
        ("seconds", f"{summary.duration:.1f}"),
        ("requests finished", str(summary.completed)),
        *((f"requests failed: {kind}", str(count)) for kind, count in summary.errors.items()),
    ]
    if summary.running:
        rows.append(("requests running", str(summary.running)))
    rows += [
        ("prompt tokens", f"{summary.prompt_tokens} ({summary.cached_tokens} cached)"),
        ("output tokens", str(summary.output_tokens)),
        ("requests per second", f"{summary.rate(summary.completed):.2f}"),
        ("output tokens per second", f"{summary.rate(summary.output_tokens):.1f}"),
    ]
    total = summary.prompt_tokens + summary.output_tokens
    rows.append(("all tokens per second", f"{summary.rate(total):.1f}"))
    if summary.good is not None:
        rows.append(("good requests per second", f"{summary.rate(summary.good):.2f}"))
    return rows


def report(plan: Plan, summary: Summary) -> str:
    """The plain text of a run."""
    lines = [title(plan), ""]
    lines += [f"{label:<34}{value}" for label, value in count_rows(summary)]
    lines += ["", f"{'milliseconds':<26}{'mean':>10}{'median':>10}{'p99':>10}"]
    lines += [f"{label:<26}{a:>10}{b:>10}{c:>10}" for label, a, b, c in metric_rows(summary)]
    return "\n".join(lines)


def _print_failures(traffic: Traffic) -> None:
    """One example of each kind of failure."""
    examples = {r.error: r.message for r in reversed(traffic.records) if r.error is not None}
    for kind, message in examples.items():
        print(f"{kind}: {message}", file=sys.stderr)


def to_dict(traffic: Traffic, summary: Summary) -> dict[str, Any]:
    """Everything about a run, for programs: the summary with the names of vLLM's bench."""
    plan = traffic.plan
    options = {
        "url": str(plan.server),
        "api": plan.dialect.name,
        "model": plan.model,
        "request_rate": plan.rate,
        "max_concurrency": plan.concurrency if plan.rate is None else None,
        "workload": asdict(plan.workload),
        "goodput": dict(plan.goal.limits),
    }
    return {
        **options,
        **summary.to_json(),
        "requests": [record.to_json() for record in traffic.records],
    }
