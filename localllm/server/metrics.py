"""GET /metrics: what the daemon counted, in Prometheus' text format.

Names are vLLM's under `localllm_`. The client library is imported when somebody first asks; until
then, and between two questions, it costs nothing.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from localllm.daemon import Daemon
from localllm.loaded import LoadedModel
from localllm.memory import resident_memory
from localllm.metrics import Histogram, ModelMetrics
from localllm.server.state import state_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

LABELS = ("model_name",)

Counted = Callable[[ModelMetrics], float]
Measured = Callable[[LoadedModel], float]

COUNTERS: tuple[tuple[str, str, Counted], ...] = (
    ("prompt_tokens", "Prompt tokens of ended requests.", lambda m: m.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda m: m.generated_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up in the cache.", lambda m: m.prompt_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the cache.", lambda m: m.cached_tokens),
    ("spec_decode_num_draft_tokens", "Tokens drafted.", lambda m: m.drafted_tokens),
    ("spec_decode_num_accepted_tokens", "Drafts that were right.", lambda m: m.accepted_tokens),
    (
        "request_rejections",
        "Requests refused because the queue was full.",
        lambda m: m.num_rejected,
    ),
)
HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMetrics], Histogram]], ...] = (
    (
        "time_to_first_token_seconds",
        "From a request's arrival to its first token.",
        lambda m: m.first_token_seconds,
    ),
    ("inter_token_latency_seconds", "Between two tokens of a request.", lambda m: m.token_seconds),
    ("request_queue_time_seconds", "Waiting in the engine's queue.", lambda m: m.queue_seconds),
    ("request_prefill_time_seconds", "Computing the prompt.", lambda m: m.prefill_seconds),
    ("request_decode_time_seconds", "Generating.", lambda m: m.decode_seconds),
    ("e2e_request_latency_seconds", "From arrival to the end.", lambda m: m.total_seconds),
    ("model_load_seconds", "Loading the model.", lambda m: m.load_seconds),
)
GAUGES: tuple[tuple[str, str, Measured], ...] = (
    ("num_requests_running", "Requests in the model's steps.", lambda m: m.num_running),
    ("num_requests_waiting", "Requests in the model's queue.", lambda m: m.num_waiting),
    ("kv_cache_usage_perc", "Share of the KV pool in use; 1 is all of it.", lambda m: m.kv_usage),
    (
        "model_resident_bytes",
        "Memory of the model's process.",
        lambda m: resident_memory(m.runner.pid),
    ),
)


class DaemonCollector:
    """Gives the daemon's numbers to a registry, whenever it is asked."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def collect(self) -> Iterator["Metric"]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        daemon = self._daemon
        loaded, models = daemon.loaded(), daemon.metrics.models
        count = sum(model.is_ready for model in loaded)
        yield GaugeMetricFamily("localllm_models_loaded", "Models in memory.", count)
        for name, text, measured in GAUGES:
            gauge = GaugeMetricFamily(f"localllm_{name}", text, labels=LABELS)
            for model in loaded:
                gauge.add_metric((model.target.name,), measured(model))
            yield gauge
        for name, text, counted in COUNTERS:
            counter = CounterMetricFamily(f"localllm_{name}", text, labels=LABELS)
            for label, metrics in models.items():
                counter.add_metric((label,), counted(metrics))
            yield counter
        preemptions = CounterMetricFamily(
            "localllm_num_preemptions", "Requests that gave up their KV.", labels=LABELS
        )
        for label, metrics in models.items():
            preemptions.add_metric((label,), metrics.num_preemptions + _preemptions(loaded, label))
        yield preemptions
        yield _finished(CounterMetricFamily, models.items())
        for name, text, chosen in HISTOGRAMS:
            family = HistogramMetricFamily(f"localllm_{name}", text, labels=LABELS)
            for label, metrics in models.items():
                histogram = chosen(metrics)
                family.add_metric((label,), _buckets(histogram), histogram.total)
            yield family


def _preemptions(loaded: Iterable[LoadedModel], name: str) -> int:
    return sum(m.runner.pulse.num_preemptions for m in loaded if m.target.name == name)


def _finished(family: Any, models: Iterable[tuple[str, ModelMetrics]]) -> "Metric":
    """vLLM's name, whatever the reason: stop, length, abort, error."""
    text = "Ended requests by reason."
    counter: Metric = family("localllm_request_success", text, labels=(*LABELS, "finished_reason"))
    for label, metrics in models:
        for reason, count in metrics.finished.items():
            counter.add_metric((label, reason), count)  # type: ignore[attr-defined]
    return counter


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Prometheus' cumulative counts."""
    buckets, total = [], 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
    return buckets


def make_registry(daemon: Daemon) -> "CollectorRegistry":
    """A registry of the daemon's numbers and of those of its own process."""
    from prometheus_client import CollectorRegistry, ProcessCollector

    registry = CollectorRegistry()
    registry.register(DaemonCollector(daemon))
    ProcessCollector(registry=registry)
    return registry


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    app, daemon = request.app.state, state_of(request).daemon
    if app.registry is None:
        app.registry = await asyncio.to_thread(make_registry, daemon)
    from prometheus_client.exposition import choose_encoder

    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(app.registry), media_type=content_type)
