"""What one request costs, from the moment it asks for its model: measured once, told three ways:
as metrics, as a line of the log, and in the answer if its client wants to know.
"""

import logging
import time
from typing import Any

from localllm.errors import Busy, Cancelled
from localllm.messages import Delta, Statistics
from localllm.metrics import ModelMetrics

log = logging.getLogger("localllm.cost")


class Account:
    """The account of one request. `load_seconds` and `queue_position` are filled in by the daemon.

    queue_position  requests in front of those that run when it came, itself included; 0: none
    """

    def __init__(self, model: str, metrics: ModelMetrics) -> None:
        self.model = model
        self.load_seconds = 0.0
        self.queue_position = 0
        self.statistics: Statistics | None = None
        self._metrics = metrics
        self._asked_at = time.perf_counter()
        self._last_at: float | None = None
        self._end: str | None = None

    def take(self, delta: Delta) -> None:
        """Account for what became known. Called once for all tokens of a message."""
        count = delta.num_tokens
        if count:
            now = time.perf_counter()
            if self._last_at is None:
                self._metrics.first_token_seconds.observe(now - self._asked_at)
            else:
                self._metrics.token_seconds.observe((now - self._last_at) / count, count)
            self._last_at = now
            self._metrics.generated_tokens += count
        if delta.statistics is not None:
            self._finish(delta.done_reason or "stop", delta.statistics)

    def fail(self, error: BaseException) -> None:
        """Account for a request that an error ended, or its client."""
        if self._end is not None:
            return
        if isinstance(error, Busy):
            self._metrics.num_rejected += 1
            self._close("rejected")
            return
        is_ours = isinstance(error, Exception) and not isinstance(error, Cancelled)
        reason = "error" if is_ours else "abort"
        self._metrics.finished[reason] += 1
        self._close(reason)

    def report(self) -> dict[str, Any]:
        """The cost of a request that has ended, for its client."""
        stats = self.statistics or Statistics()
        return {
            "load_seconds": round(self.load_seconds, 6),
            "queue_position": self.queue_position,
            "queue_seconds": round(stats.queue_seconds, 6),
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "prefix_miss": stats.prefix_miss,
            "prefill_seconds": round(stats.prompt_seconds, 6),
            "decode_tokens": stats.generated_tokens,
            "decode_seconds": round(stats.decode_seconds, 6),
            "num_preemptions": stats.num_preemptions,
            "drafted_tokens": stats.drafted_tokens,
            "accepted_tokens": stats.accepted_tokens,
            "total_seconds": round(time.perf_counter() - self._asked_at, 6),
        }

    def _finish(self, reason: str, stats: Statistics) -> None:
        metrics, self.statistics = self._metrics, stats
        metrics.prompt_tokens += stats.prompt_tokens
        metrics.cached_tokens += stats.cached_tokens
        metrics.drafted_tokens += stats.drafted_tokens
        metrics.accepted_tokens += stats.accepted_tokens
        metrics.queue_seconds.observe(stats.queue_seconds)
        metrics.prefill_seconds.observe(stats.prompt_seconds)
        metrics.decode_seconds.observe(stats.decode_seconds)
        metrics.total_seconds.observe(time.perf_counter() - self._asked_at)
        reason = "abort" if reason == "cancelled" else reason
        metrics.finished[reason] += 1
        self._close(reason)

    def _close(self, reason: str) -> None:
        self._end = reason
        if log.isEnabledFor(logging.DEBUG):
            facts = " ".join(f"{name}={value}" for name, value in self.report().items())
            log.debug("model=%s end=%s %s", self.model, reason, facts)
