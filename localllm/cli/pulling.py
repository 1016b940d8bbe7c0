"""Fetching a model: a bar for each file on a terminal, plain lines elsewhere."""

import locale
import shutil
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, TextIO

from localllm.cli.formats import size_text
from localllm.client import Client
from localllm.config import load_settings, takes_escapes
from localllm.pull.events import Event, Status
from localllm.pull.folders import import_folder
from localllm.store import Store

DRAW_SECONDS = 0.1
PLAIN_STEP_PERCENT = 10
LONGEST_SECONDS = 100 * 3600
BARS = ("▕", "█", " ", "▏")
PLAIN_BARS = ("[", "#", " ", "]")
SMALLEST_BAR = 5


def pull_model(client: Client, model: str, *, is_insecure: bool = False) -> None:
    """Have the daemon pull a model, and show how it goes on standard error."""
    is_drawn = sys.stderr.isatty() and takes_escapes()
    board: Board = TerminalBoard(sys.stderr) if is_drawn else PlainBoard(sys.stderr)
    body = {"model": model, "insecure": is_insecure}
    try:
        with closing(client.stream("/api/pull", body)) as chunks:
            for chunk in chunks:
                board.show(chunk)
    finally:
        board.finish()


def import_models(folder: Path | None) -> None:
    """Take over the models of an Ollama folder, and say which."""
    settings = load_settings()
    store = Store(settings.data_dir / "models")

    def tell(event: Event) -> None:
        if isinstance(event, Status):
            print(event.text, file=sys.stderr, flush=True)

    models = import_folder(folder or settings.ollama_models, store, tell)
    for model in models:
        print(model.name)


class Board(Protocol):
    """Where progress is shown."""

    def show(self, chunk: dict[str, Any]) -> None:
        """One line of the daemon's stream."""

    def finish(self) -> None:
        """No more will come."""


class PlainBoard:
    """Lines for a log: each status once, each file at every tenth."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = ""
        self._percents: dict[str, int] = {}

    def show(self, chunk: dict[str, Any]) -> None:
        status = chunk.get("status", "")
        if "digest" not in chunk:
            if status != self._last:
                self._print(status)
            self._last = status
            return
        total, completed = chunk.get("total", 0), chunk.get("completed", 0)
        percent = percent_of(completed, total)
        step = percent // PLAIN_STEP_PERCENT
        if self._percents.get(chunk["digest"]) != step:
            self._percents[chunk["digest"]] = step
            self._print(f"{status}: {percent:3}% of {size_text(total)}")

    def finish(self) -> None:
        pass

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class TerminalBoard:
    """Lines that are drawn again in place: a bar for each file, the statuses between them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines: dict[str, dict[str, Any]] = {}
        self._num_drawn = 0
        self._drawn_at = 0.0
        is_unicode = "utf" in locale.getencoding().lower()
        self._bars = BARS if is_unicode else PLAIN_BARS

    def show(self, chunk: dict[str, Any]) -> None:
        key = str(chunk.get("digest") or chunk.get("status", ""))
        is_new = key not in self._lines
        self._lines[key] = chunk
        is_whole = "total" in chunk and chunk.get("completed") == chunk["total"]
        if is_new or is_whole or time.monotonic() - self._drawn_at >= DRAW_SECONDS:
            self._draw()

    def finish(self) -> None:
        self._draw()

    def _draw(self) -> None:
        """Write the lines over those that were written before."""
        columns, rows = shutil.get_terminal_size()
        lines = [self._line(chunk, columns - 1) for chunk in self._lines.values()]
        lines = lines[-(rows - 1) :]
        up = f"\x1b[{self._num_drawn}A" if self._num_drawn else ""
        text = "".join(f"{line}\x1b[K\n" for line in lines)
        self._stream.write(f"{up}\r{text}\x1b[J")
        self._stream.flush()
        self._num_drawn = len(lines)
        self._drawn_at = time.monotonic()

    def _line(self, chunk: dict[str, Any], columns: int) -> str:
        if "digest" not in chunk:
            return str(chunk.get("status", ""))[:columns]
        return bar_line(chunk, columns, self._bars)


def bar_line(chunk: dict[str, Any], columns: int, bars: tuple[str, str, str, str] = BARS) -> str:
    """One file: `pulling 6a0746a1ec1a: 45% ▕███   ▏ 2.1 GB/4.7 GB  58 MB/s  44s`."""
    total, completed = chunk.get("total", 0), chunk.get("completed", 0)
    rate = chunk.get("bytes_per_second", 0)
    left = f"{chunk['status']}: {percent_of(completed, total):3}% "
    right = f" {size_text(total)}"
    if completed < total:
        right = f" {size_text(completed)}/{size_text(total)}"
        if rate:
            right += f"  {size_text(rate)}/s  {remaining_text((total - completed) / rate)}"
    begin, full, empty, end = bars
    width = columns - len(left) - len(right) - len(begin) - len(end)
    if width < SMALLEST_BAR:
        return f"{left}{right}"[:columns]
    num_full = width * completed // total if total else width
    return f"{left}{begin}{full * num_full}{empty * (width - num_full)}{end}{right}"


def percent_of(completed: int, total: int) -> int:
    return 100 * completed // total if total else 100


def remaining_text(seconds: float) -> str:
    """`59s`, `4m10s`, `1h2m`, `99h+`."""
    whole = int(seconds)
    if whole >= LONGEST_SECONDS:
        return "99h+"
    minutes, rest = divmod(whole, 60)
    if whole < 60:
        return f"{whole}s"
    return f"{minutes}m{rest}s" if whole < 3600 else f"{minutes // 60}h{minutes % 60}m"
