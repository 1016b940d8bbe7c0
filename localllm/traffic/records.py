"""What was measured: a record of each request, and what all of them add up to.

    TTFT   from sending the request to its first text       ITL   between two pieces of text
    E2EL   from sending the request to its end              TPOT  (E2EL - TTFT) / (tokens - 1)

Milliseconds, with the names that vLLM's bench gives them. A piece may be several tokens where a
server sends them together: ITL is what a reader sees, TPOT the rate behind it.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from localllm.errors import BadRequest

METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(slots=True)
class Record:
    """One request. Times in seconds since the run began.

    conversation, turn   which of the workload's
    pieces               when each piece of text came
    error                its kind; None: finished, or still running while `ended_at` is None
    """

    conversation: int
    turn: int
    sent_at: float
    pieces: list[float] = field(default_factory=list)
    ended_at: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    message: str = ""

    @property
    def is_success(self) -> bool:
        return self.ended_at is not None and self.error is None

    @property
    def num_output(self) -> int:
        """Tokens of the answer; its pieces where the server does not count."""
        return len(self.pieces) if self.output_tokens is None else self.output_tokens

    @property
    def gaps(self) -> list[float]:
        return [1000 * (b - a) for a, b in zip(self.pieces, self.pieces[1:])]

    def milliseconds(self, metric: str) -> float | None:
        """The request's own figure; its mean gap for `itl`; None where it has none."""
        if not self.pieces or self.ended_at is None:
            return None
        first, end = 1000 * (self.pieces[0] - self.sent_at), 1000 * (self.ended_at - self.sent_at)
        if metric == "ttft":
            return first
        if metric == "e2el":
            return end
        if metric == "itl":
            return statistics.fmean(self.gaps) if len(self.pieces) > 1 else None
        return (end - first) / (self.num_output - 1) if self.num_output > 1 else None

    def to_json(self) -> dict[str, Any]:
        return {
            "conversation": self.conversation,
            "turn": self.turn,
            "sent_at": self.sent_at,
            "ended_at": self.ended_at,
            "ttft_ms": self.milliseconds("ttft"),
            "tpot_ms": self.milliseconds("tpot"),
            "e2el_ms": self.milliseconds("e2el"),
            "itl_ms": [round(gap, 3) for gap in self.gaps],
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.num_output,
            "error": self.error,
            "message": self.message,
        }


@dataclass(frozen=True, slots=True)
class Goal:
    """What a request must meet to count as good: metrics and their most milliseconds."""

    limits: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Self:
        """Read `ttft:500`, `tpot:50`, ... Raises BadRequest."""
        limits = []
        for text in (part for whole in texts for part in whole.replace(",", " ").split()):
            metric, _, value = text.partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = 0.0
            if metric not in METRICS or not limit > 0:
                names = ", ".join(METRICS)
                raise BadRequest(
                    f"--goodput: {text!r} is none of {names} and milliseconds: ttft:500"
                )
            limits.append((metric, limit))
        return cls(tuple(limits))

    def is_met(self, record: Record) -> bool:
        values = ((record.milliseconds(metric), limit) for metric, limit in self.limits)
        return record.is_success and all(v is None or v <= limit for v, limit in values)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one metric, in milliseconds."""

    mean: float
    median: float
    p99: float

    @classmethod
    def of(cls, values: list[float]) -> Self | None:
        if not values:
            return None
        values = sorted(values)
        return cls(statistics.fmean(values), percentile(values, 0.5), percentile(values, 0.99))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which that share of the ordered values lies, interpolated."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True, slots=True)
class Summary:
    """All requests of a run. Rates are per second of `duration`, of finished requests alone."""

    duration: float
    completed: int
    running: int
    errors: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    good: int | None
    spreads: dict[str, Spread | None]

    @classmethod
    def of(cls, records: Sequence[Record], duration: float, goal: Goal = Goal()) -> Self:
        done = [r for r in records if r.is_success]
        spreads = {m: Spread.of(_values(done, m)) for m in METRICS}
        return cls(
            duration=duration,
            completed=len(done),
            running=sum(r.ended_at is None for r in records),
            errors=dict(Counter(r.error for r in records if r.error is not None).most_common()),
            prompt_tokens=sum(r.prompt_tokens or 0 for r in done),
            cached_tokens=sum(r.cached_tokens or 0 for r in done),
            output_tokens=sum(r.num_output for r in done),
            good=sum(map(goal.is_met, done)) if goal.limits else None,
            spreads=spreads,
        )

    def rate(self, count: int) -> float:
        return count / self.duration if self.duration > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Flat, with the names of vLLM's bench."""
        flat: dict[str, Any] = {
            "duration": self.duration,
            "completed": self.completed,
            "running": self.running,
            "failed": sum(self.errors.values()),
            "errors": self.errors,
            "total_input_tokens": self.prompt_tokens,
            "total_cached_tokens": self.cached_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.rate(self.completed),
            "request_goodput": None if self.good is None else self.rate(self.good),
            "output_throughput": self.rate(self.output_tokens),
            "total_token_throughput": self.rate(self.prompt_tokens + self.output_tokens),
        }
        for metric, spread in self.spreads.items():
            for name in ("mean", "median", "p99"):
                value = None if spread is None else getattr(spread, name)
                flat[f"{name}_{metric}_ms"] = value
        return flat


def _values(records: Sequence[Record], metric: str) -> list[float]:
    if metric == "itl":
        return [gap for record in records for gap in record.gaps]
    return [v for record in records if (v := record.milliseconds(metric)) is not None]
