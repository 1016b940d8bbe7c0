"""A loaded model as the runner speaks to it: messages in, deltas out. Translation only.

Not here: the conversation (runner.py), the work (runtime.py).
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from localllm.answers import TextDelta, TokenLogprob
from localllm.config import load_settings
from localllm.engine.sequence import Stats
from localllm.errors import BadRequest
from localllm.messages import Delta, Generate, Load, Statistics
from localllm.prompts import TextRequest
from localllm.runtime import LoadedModel
from localllm.sampling import SamplingParams

NUM_KEEP = 4  # Ollama's default

Sink = Callable[[list[Delta]], None]
Progress = Callable[[str, int, int], None]


def open_for_runner(load: Load, progress: Progress) -> "RunnerModel":
    """Open the model that the daemon asked for."""
    settings = load_settings()
    settings = replace(
        settings,
        context_length=load.context_length or settings.context_length,
        threads=load.threads or settings.threads,
    )
    return RunnerModel(LoadedModel.open(load.path, settings, digest=load.digest, progress=progress))


class RunnerModel:
    """See `runner.Model`."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._requests: dict[str, tuple[Generate, Sink]] = {}
        self._given: dict[str, list[int]] = {}
        self._dropped: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def context_length(self) -> int:
        return self._model.context_length

    @property
    def memory_bytes(self) -> int:
        return self._model.memory_bytes

    def start(self, request: Generate, sink: Sink) -> None:
        """Prepare and submit a request. Raises LocalLLMError if it cannot run."""
        text_request = text_request_of(request)
        if request.render_only:
            rendered = self._model.prompts.render(text_request)
            sink([Delta(request.request_id, rendered=rendered)])
            return
        name = text_request.request_id
        with self._lock:
            self._requests[name] = (request, sink)
        try:
            prompt = self._model.prepare(text_request)
            if request.want_tokens:
                self._given[name] = list(prompt.tokens)
            self._dropped[name] = prompt.dropped_messages
            self._model.submit(text_request, prompt, self._take)
        except BaseException:
            self._forget(name)
            raise

    def cancel(self, request_id: int) -> None:
        self._model.cancel(str(request_id))

    def work_done(self) -> int:
        return self._model.work_done()

    def close(self) -> None:
        self._model.close()

    def _take(self, deltas: list[TextDelta]) -> None:
        """The sink of all requests: translate what a step gave, once for each sink beyond."""
        batches: dict[Sink, list[Delta]] = {}
        for delta in deltas:
            request, sink = self._requests[delta.request_id]
            batches.setdefault(sink, []).append(self._delta(request, delta))
            if delta.is_last:
                self._forget(delta.request_id)
        for sink, translated in batches.items():
            sink(translated)

    def _delta(self, request: Generate, delta: TextDelta) -> Delta:
        given = self._given.get(delta.request_id)
        if given is not None:
            given += delta.tokens
        return Delta(
            request_id=request.request_id,
            text=delta.text,
            logprobs=[logprob_entry(x) for x in delta.logprobs],
            prompt_done=delta.prompt_done or 0,
            prompt_total=delta.prompt_total if delta.prompt_done else 0,
            done_reason=delta.done_reason,
            statistics=None if delta.stats is None else statistics_of(delta.stats),
            tokens=given if delta.is_last else None,
            dropped_messages=self._dropped.get(delta.request_id, 0) if delta.is_last else 0,
            error=delta.error,
        )

    def _forget(self, name: str) -> None:
        with self._lock:
            self._requests.pop(name, None)
            self._given.pop(name, None)
            self._dropped.pop(name, None)


def text_request_of(request: Generate) -> TextRequest:
    """The request in the runtime's words. Raises BadRequest for a value out of range."""
    options = dict(request.options)
    if "logit_bias" in options:
        options["logit_bias"] = bias_of(options["logit_bias"])
    options["logprobs"] = request.logprobs
    return TextRequest(
        request_id=str(request.request_id),
        prompt=request.prompt,
        messages=request.messages,
        tokens=request.context,
        tools=request.tools,
        variables=request.variables,
        params=SamplingParams.from_options(options),
        stop=request.stop,
        num_ctx=options.get("num_ctx"),
        truncate=request.truncate,
        shift=request.shift,
        num_keep=options.get("num_keep", NUM_KEEP),
        exact=request.exact,
        cache_prompt=request.cache_prompt,
        salt=request.salt.encode(),
    )


def bias_of(bias: Mapping[str, Any]) -> dict[int, float]:
    """JSON has no integer keys. Raises BadRequest naming the key that is none."""
    try:
        return {int(token): value for token, value in bias.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise BadRequest(f"logit_bias must map token ids to numbers: {error}") from None


def statistics_of(stats: Stats) -> Statistics:
    return Statistics(
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        generated_tokens=stats.generated_tokens,
        queue_seconds=stats.queue_seconds,
        prompt_seconds=stats.prompt_seconds,
        decode_seconds=stats.decode_seconds,
    )


def logprob_entry(entry: TokenLogprob) -> dict[str, Any]:
    """Ollama's shape; `bytes` are the token's own, `token` may show U+FFFD for parts."""
    found: dict[str, Any] = {
        "token": entry.text.decode("utf-8", "replace"),
        "logprob": entry.logprob,
        "bytes": list(entry.text),
    }
    if entry.alternatives:
        found["top_logprobs"] = [logprob_entry(x) for x in entry.alternatives]
    return found
