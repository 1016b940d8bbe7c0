"""What `pull` tells while it works."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RATE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Status:
    """A new stage, or something the user should know."""

    text: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """How much of one file is there. `seconds_left` is None while the rate is unknown."""

    digest: str
    total: int
    completed: int
    bytes_per_second: float = 0.0
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """The beginning of a model file is there, in a file that has its full size already."""

    path: Path


Event = Status | Transfer | Header
OnProgress = Callable[[Event], None]


class Meter:
    """The rate of the last few seconds, from how much was there at which time."""

    def __init__(self, digest: str, total: int) -> None:
        self._digest = digest
        self._total = total
        self._seen: deque[tuple[float, int]] = deque()

    def read(self, completed: int) -> Transfer:
        """The state of the transfer, `completed` bytes being there now."""
        now = time.monotonic()
        if self._seen and completed < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, completed))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_SECONDS:
            self._seen.popleft()
        started, before = self._seen[0]
        rate = (completed - before) / (now - started) if now > started else 0.0
        left = (self._total - completed) / rate if rate > 0 else None
        return Transfer(self._digest, self._total, completed, rate, left)
