"""What the daemon counts, as plain numbers: cheap to add to, and nothing to import.

Names follow vLLM's, https://docs.vllm.ai/en/latest/usage/metrics.html; how they are written for
Prometheus is server/metrics.py's business.
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
# vLLM's begin at 10 ms; small models on a CPU decode faster.
TOKEN_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """Counts of values up to each bound; the last count is of those beyond all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(slots=True)
class ModelMetrics:
    """Of one model name, over all its loads.

    finished         ended requests by reason: stop, length, abort (client or unload), error
    num_preemptions  of runners that are gone; the others tell theirs in their pulse
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    num_preemptions: int = 0
    num_rejected: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    load_seconds: Histogram = field(default_factory=partial(Histogram, REQUEST_BOUNDS))
    first_token_seconds: Histogram = field(default_factory=partial(Histogram, FIRST_TOKEN_BOUNDS))
    token_seconds: Histogram = field(default_factory=partial(Histogram, TOKEN_BOUNDS))
    queue_seconds: Histogram = field(default_factory=partial(Histogram, REQUEST_BOUNDS))
    prefill_seconds: Histogram = field(default_factory=partial(Histogram, REQUEST_BOUNDS))
    decode_seconds: Histogram = field(default_factory=partial(Histogram, REQUEST_BOUNDS))
    total_seconds: Histogram = field(default_factory=partial(Histogram, REQUEST_BOUNDS))


class Metrics:
    """All models that were ever asked for since the daemon started."""

    def __init__(self) -> None:
        self.models: dict[str, ModelMetrics] = {}

    def of(self, name: str) -> ModelMetrics:
        """The metrics of a model, made when it is first asked for."""
        found = self.models.get(name)
        if found is None:
            found = self.models[name] = ModelMetrics()
        return found
