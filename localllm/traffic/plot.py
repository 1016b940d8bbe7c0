"""A run as a picture: four panels of lines and dots in one SVG file.

SVG is text, so no drawing library is needed for it.

Not here: numbers (records.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from localllm.errors import BadRequest
from localllm.traffic.records import Record

WIDTH, HEIGHT = 460, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 40
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626")
BINS = 60
MAX_POINTS = 600

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram. `lines` are drawn through their points, `dots` are not."""

    title: str
    x_label: str
    lines: tuple[tuple[str, list[Point]], ...] = ()
    dots: tuple[tuple[str, list[Point]], ...] = ()


def check_path(path: Path) -> None:
    """Raises BadRequest for a file that is not to be an SVG, before anything is measured."""
    if path.suffix.lower() != ".svg":
        raise BadRequest(
            f"--plot draws SVG: give the file a name that ends in .svg, not {path.name}"
        )


def draw(path: Path, title: str, records: Sequence[Record], duration: float) -> None:
    """Write the picture of a run."""
    done = [r for r in records if r.is_success]
    panels = (
        Panel("time to first token, ms", "sent after, s", dots=(("", _first_tokens(done)),)),
        Panel("output tokens per second", "s", lines=(("", throughput(records, duration)),)),
        Panel("requests at once", "s", lines=(("", at_once(records, duration)),)),
        Panel(
            "share of requests (gaps) below",
            "ms, logarithmic",
            lines=tuple((name, cumulative(values)) for name, values in _distributions(done)),
        ),
    )
    path.write_text(svg(title, panels), encoding="utf-8")


def _first_tokens(records: Sequence[Record]) -> list[Point]:
    return [(r.sent_at, r.milliseconds("ttft") or 0.0) for r in records if r.pieces]


def _distributions(records: Sequence[Record]) -> list[tuple[str, list[float]]]:
    gaps = [gap for record in records for gap in record.gaps]
    named = [("ITL", gaps)]
    for metric in ("tpot", "ttft", "e2el"):
        values = [v for r in records if (v := r.milliseconds(metric)) is not None]
        named.append((metric.upper(), values))
    return [(name, values) for name, values in named if values]


def throughput(records: Sequence[Record], duration: float) -> list[Point]:
    """Tokens per second in equal parts of the run; a piece counts its share of the tokens."""
    width = max(duration, 1e-9) / BINS
    counts = [0.0] * BINS
    for record in records:
        share = max(1.0, record.num_output / len(record.pieces)) if record.pieces else 0.0
        for at in record.pieces:
            counts[min(int(at / width), BINS - 1)] += share
    return [((i + 0.5) * width, count / width) for i, count in enumerate(counts)]


def at_once(records: Sequence[Record], duration: float) -> list[Point]:
    """Steps of the number of requests that are running."""
    changes = [(r.sent_at, 1) for r in records]
    changes += [(duration if r.ended_at is None else r.ended_at, -1) for r in records]
    points: list[Point] = [(0.0, 0.0)]
    level = 0
    for at, change in sorted(changes):
        points += [(at, float(level)), (at, float(level + change))]
        level += change
    return points


def cumulative(values: Sequence[float]) -> list[Point]:
    """The share of the values up to each, over the logarithm of the value."""
    ordered = sorted(max(v, 1e-3) for v in values)
    stride = max(1, len(ordered) // MAX_POINTS)
    picked = [*range(0, len(ordered), stride), len(ordered) - 1]
    return [(math.log10(ordered[i]), (i + 1) / len(ordered)) for i in picked]


def svg(title: str, panels: Sequence[Panel]) -> str:
    """The panels, two in a row, under a title."""
    rows = -(-len(panels) // 2)
    width, height = 2 * WIDTH, rows * HEIGHT + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(width / 2, 20, title, "middle", size=14),
    ]
    for i, panel in enumerate(panels):
        parts.append(f'<g transform="translate({i % 2 * WIDTH},{i // 2 * HEIGHT + 30})">')
        parts += _panel(panel)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel) -> list[str]:
    points = [p for _, series in (*panel.lines, *panel.dots) for p in series]
    logarithmic = "logarithmic" in panel.x_label
    xs = [x for x, _ in points] or [0.0]
    low_x = min(xs) if logarithmic else 0.0
    high_x, high_y = max(max(xs), low_x + 1e-9), max((y for _, y in points), default=1.0) or 1.0

    def place(point: Point) -> Point:
        x = LEFT + (point[0] - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - point[1] / high_y * (HEIGHT - TOP - BOTTOM)
        return x, y

    parts = [_text((LEFT + WIDTH - RIGHT) / 2, TOP - 12, panel.title, "middle", size=12)]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, panel.x_label, "middle"))
    for i in range(5):
        x_value, y_value = low_x + (high_x - low_x) * i / 4, high_y * i / 4
        x, y = place((x_value, y_value))
        parts.append(_rule(LEFT, y, WIDTH - RIGHT, y))
        parts.append(_text(LEFT - 5, y + 4, _number(y_value), "end"))
        shown = 10**x_value if logarithmic else x_value
        parts.append(_text(x, HEIGHT - BOTTOM + 15, _number(shown), "middle"))
    for i, (name, series) in enumerate((*panel.lines, *panel.dots)):
        colour = COLOURS[i % len(COLOURS)]
        placed = [place(p) for p in series]
        parts += _series(placed, colour, is_line=i < len(panel.lines))
        if name:
            parts.append(_text(LEFT + 8, TOP + 12 + 14 * i, name, "start", colour=colour))
    return parts


def _series(points: list[Point], colour: str, *, is_line: bool) -> list[str]:
    if is_line:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
    return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points]


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(
    x: float, y: float, text: str, anchor: str, *, size: int = 11, colour: str = "#222222"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{colour}">{escape(text)}</text>'
    )


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.3g}"
