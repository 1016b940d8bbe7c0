"""Durations as Go writes them (`1h30m`, `45.3ms`): what Ollama's clients send and print."""

import math
import re

from localllm.errors import BadRequest

FOREVER = math.inf
_UNITS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_TERM = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")


def parse_duration(text: str) -> float:
    """Seconds of a Go duration; may be negative. Raises BadRequest with Go's own words."""
    sign, rest = (-1.0, text[1:]) if text[:1] == "-" else (1.0, text.removeprefix("+"))
    if rest == "0":
        return 0.0
    total, at = 0.0, 0
    for term in _TERM.finditer(rest):
        if term.start() != at:
            break
        total += float(term[1]) * _UNITS[term[2]]
        at = term.end()
    if at == len(rest) and rest:
        return sign * total
    if re.fullmatch(r"\d+\.?\d*|\.\d+", rest[at:]):
        raise BadRequest(f'time: missing unit in duration "{text}"')
    raise BadRequest(f'time: invalid duration "{text}"')


def parse_keep_alive(value: object) -> float:
    """Seconds to keep a model after its last request, FOREVER for negative values.

    Numbers are seconds, strings Go durations; a bare number in a string counts as seconds too.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadRequest(f"Unsupported type: '{_go_type(value)}' for keep_alive")
    try:
        seconds = float(int(value) if isinstance(value, str) else value)
    except ValueError:
        try:
            seconds = parse_duration(str(value))
        except BadRequest as error:
            raise BadRequest(f"{error} for keep_alive") from None
    except OverflowError:
        seconds = FOREVER
    if math.isnan(seconds):
        raise BadRequest("keep_alive is not a number")
    return FOREVER if seconds < 0 else seconds


def _go_type(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    return "map[string]interface {}" if isinstance(value, dict) else "[]interface {}"


def format_duration(seconds: float) -> str:
    """A duration as Go prints it: `4.2s`, `45.3ms`, `1m2.5s`, `1h0m3s`."""
    nanoseconds = round(seconds * 1e9)
    if nanoseconds == 0:
        return "0s"
    for unit, size in (("ns", 1), ("µs", 10**3), ("ms", 10**6), ("s", 10**9)):
        if nanoseconds < (size * 1000 if unit != "s" else 60 * size):
            return _decimal(nanoseconds, size) + unit
    minutes, rest = divmod(nanoseconds, 60 * 10**9)
    hours, minutes = divmod(minutes, 60)
    text = f"{minutes}m{_decimal(rest, 10**9)}s"
    return f"{hours}h{text}" if hours else text


def _decimal(value: int, unit: int) -> str:
    """`value / unit` without trailing zeros; units are powers of ten."""
    whole, rest = divmod(value, unit)
    digits = str(rest).rjust(len(str(unit)) - 1, "0").rstrip("0") if rest else ""
    return f"{whole}.{digits}" if digits else str(whole)
