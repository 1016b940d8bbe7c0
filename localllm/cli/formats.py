"""Sizes, times and tables as Ollama prints them."""

from collections.abc import Sequence
from datetime import datetime

COLUMN_GAP = "    "
FOREVER_SECONDS = 20 * 365 * 86_400


def size_text(num_bytes: int) -> str:
    """Decimal units: `999 B`, `815 MB`, `4.7 GB`, `12 GB`."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if num_bytes >= size:
            value = num_bytes / size
            if value >= 10:
                return f"{int(value)} {unit}"
            return f"{value:.1f}".removesuffix(".0") + f" {unit}"
    return f"{num_bytes} B"


def span_text(seconds: float) -> str:
    """A span of time in words: `Less than a second`, `About a minute`, `3 days`."""
    whole = int(seconds)
    minutes, hours, days = whole // 60, round(seconds / 3600), round(seconds / 86_400)
    if whole < 1:
        return "Less than a second"
    if whole < 60:
        return f"{whole} second" + "s" * (whole != 1)
    if minutes < 60:
        return "About a minute" if minutes == 1 else f"{minutes} minutes"
    if hours < 48:
        return "About an hour" if hours <= 1 else f"{hours} hours"
    if days < 14:
        return f"{days} days"
    if days < 60:
        return f"{days // 7} weeks"
    return f"{days // 30} months" if days < 730 else f"{days // 365} years"


def ago_text(time: str, now: datetime | None = None) -> str:
    """How long ago an RFC 3339 time was."""
    seconds = _seconds_from(time, now)
    return f"{span_text(-seconds)} ago" if seconds <= 0 else f"{span_text(seconds)} from now"


def until_text(time: str, now: datetime | None = None) -> str:
    """How long it is until an RFC 3339 time, when a model is unloaded."""
    seconds = _seconds_from(time, now)
    if seconds < 0:
        return "Stopping..."
    return "Forever" if seconds > FOREVER_SECONDS else f"{span_text(seconds)} from now"


def _seconds_from(time: str, now: datetime | None) -> float:
    moment = datetime.fromisoformat(time)
    return (moment - (now or datetime.now().astimezone())).total_seconds()


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns without borders."""
    widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]
    lines = (
        "".join(cell.ljust(width) + COLUMN_GAP for cell, width in zip(row, widths))
        for row in (headers, *rows)
    )
    return "\n".join(lines)


def section(title: str, rows: Sequence[Sequence[str]]) -> str:
    """One part of `show`: a title and indented rows, with a blank line after."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = [f"  {title}"]
    for row in rows:
        cells = "".join(cell.ljust(width) + COLUMN_GAP for cell, width in zip(row, widths))
        lines.append(f"    {cells}".rstrip())
    return "\n".join(lines) + "\n"
