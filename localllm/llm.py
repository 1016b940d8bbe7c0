"""`LLM`: a model inside the caller's own process, without a daemon.

    with LLM("model.gguf") as llm:
        print(llm.generate("Once upon a time", SamplingParams(num_predict=20)).text)

The engine has a thread of its own; calls wait, and Ctrl-C ends them and what they asked for. After
a fork the child has no threads, so its copy of the model is closed.
"""

import itertools
import os
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, overload

from localllm.answers import TextDelta, TokenLogprob
from localllm.config import Settings, load_settings
from localllm.embedding import Embedded, EmbedRequest
from localllm.engine.sequence import Stats
from localllm.errors import BadRequest, LocalLLMError
from localllm.names import ModelName
from localllm.opening import Progress
from localllm.prompts import TextRequest
from localllm.runtime import LoadedModel
from localllm.sampling import SamplingParams
from localllm.store import Store
from localllm.text.calls import ToolCall

Message = Mapping[str, Any]


@dataclass(slots=True)
class Completion:
    """One answer. `finish_reason` is "stop" or "length"; `tokens` include the end token.

    In a chat, what the model thinks and the tools it calls are not part of the `text`.
    """

    text: str = ""
    thinking: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    stats: Stats = field(default_factory=Stats)

    def add(self, delta: TextDelta) -> None:
        """Take the next piece."""
        self.text += delta.text
        self.thinking += delta.thinking
        self.tool_calls += delta.tool_calls
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish_reason = delta.done_reason or self.finish_reason
        self.stats = delta.stats or self.stats


class Collector:
    """A sink that wakes the waiting thread once, when all answers are there or one has failed."""

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.completions = {request_id: Completion() for request_id in request_ids}
        self._running = set(self.completions)
        self._error: LocalLLMError | None = None
        self._is_over = threading.Event()

    def __call__(self, deltas: list[TextDelta]) -> None:
        for delta in deltas:
            self.completions[delta.request_id].add(delta)
            if delta.error is not None and self._error is None:
                self._error = delta.error_kind(delta.error)
            if delta.is_last:
                self._running.discard(delta.request_id)
        if self._error is not None or not self._running:
            self._is_over.set()

    def wait(self) -> None:
        """Raises LocalLLMError if the model failed."""
        if self.completions:
            self._is_over.wait()
        if self._error is not None:
            raise self._error


class LLM:
    """An open model.

    model           path of a GGUF file, or the name of a model in the local store
    adapter         a LoRA file (GGUF) that is applied to the model, in place of a stored model's own
    context_length  most tokens of prompt and answer; None: what the model and the memory allow
    threads         None: the physical cores this process may use
    weights         "auto", "mapped" or "resident"
    backend         "cpu" or "reference"
    max_running     most prompts that are answered at once
    progress        called with (what, done, total) while the model loads
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapter: str | Path | None = None,
        context_length: int | None = None,
        threads: int | None = None,
        weights: str | None = None,
        backend: str = "cpu",
        max_running: int = 16,
        progress: Progress | None = None,
    ) -> None:
        settings = load_settings()
        settings = replace(
            settings,
            context_length=context_length or settings.context_length,
            threads=threads or settings.threads,
            weights=weights or settings.weights,
            num_parallel=max_running,
            # A list of prompts of any length waits in the engine's own queue.
            max_queue=2**31,
        )
        path, own_adapter = find_model(model, settings)
        self._model = LoadedModel.open(
            path,
            settings,
            backend=backend,
            adapter=own_adapter if adapter is None else adapter,
            progress=progress,
        )
        self._ids = itertools.count()
        self._finalizer = weakref.finalize(self, self._model.close)
        # The finaliser must not wait for threads that a child does not have.
        os.register_at_fork(after_in_child=self._finalizer.detach)

    @property
    def context_length(self) -> int:
        return self._model.context_length

    @overload
    def generate(
        self,
        prompts: str,
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        format: Any = None,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: list[str],
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        format: Any = None,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: str | list[str],
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        format: Any = None,
    ) -> Completion | list[Completion]:
        """Continue one prompt or many at once; no chat template is involved.

        format  "json", or a JSON schema that the answers will be valid against
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        requests = [self._request(params, stop, prompt=text, format=format) for text in texts]
        completions = self._complete(requests)
        return completions[0] if isinstance(prompts, str) else completions

    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
        format: Any = None,
        think: bool | str | None = None,
        **variables: Any,
    ) -> Completion:
        """Answer a conversation (a string is one user message); `variables` go to the template.

        format  "json", or a JSON schema that the answer will be valid against
        think   whether a model that can think does so before it answers; None: yes
        """
        request = self._request(
            params,
            stop,
            messages=as_messages(messages),
            tools=tools,
            format=format,
            think=think,
            variables=variables,
        )
        return self._complete([request])[0]

    def stream(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        tools: Sequence[Any] | None = None,
        format: Any = None,
        think: bool | str | None = None,
        **variables: Any,
    ) -> Iterator[str]:
        """Like `chat`, piece by piece as it is generated; leaving the loop ends the answer."""
        request = self._request(
            params,
            stop,
            messages=as_messages(messages),
            tools=tools,
            format=format,
            think=think,
            variables=variables,
        )
        for delta in self._open().stream(request):
            if delta.text:
                yield delta.text

    def embed(
        self, texts: Sequence[str], *, dimensions: int = 0, truncate: bool = False
    ) -> list[list[float]]:
        """A vector of length one for each text, from the model's hidden states.

        dimensions  only so many values from the first (and again of length one); 0: all
        truncate    cut the end of a text that is longer than the context, instead of refusing
        """
        if isinstance(texts, str):
            raise BadRequest("texts must be a list of strings, not one string")
        model, name = self._open(), str(next(self._ids))
        ended: queue.SimpleQueue[Embedded] = queue.SimpleQueue()
        model.embeddings.start(
            EmbedRequest(name, list(texts), truncate, dimensions=dimensions), ended.put
        )
        try:
            embedded = ended.get()
        finally:
            model.cancel(name)
        if embedded.error is not None:
            raise embedded.error
        vectors: list[list[float]] = embedded.vectors.tolist()
        return vectors

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of `text`, without BOS; `special` recognises control tokens in it."""
        return self._open().prompts.encode(text, parse_special=special)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens left out."""
        return self._open().tokenizer.decode(ids).decode("utf-8", "replace")

    def close(self) -> None:
        """End what is running and give back threads and memory."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> LoadedModel:
        if not self._finalizer.alive:
            raise LocalLLMError("this LLM is closed (it does not survive a fork); open a new one")
        return self._model

    def _request(
        self, params: SamplingParams | None, stop: Sequence[str], **fields: Any
    ) -> TextRequest:
        if isinstance(stop, str):
            raise BadRequest("stop must be a list of strings, not one string")
        name = str(next(self._ids))
        # In a program a message that does not fit is a mistake, not something to drop.
        return TextRequest(
            name, params=params or SamplingParams(), stop=stop, truncate=False, **fields
        )

    def _complete(self, requests: list[TextRequest]) -> list[Completion]:
        """All answers, in order. Whatever interrupts the wait ends the requests."""
        model = self._open()
        collected = Collector(request.request_id for request in requests)
        try:
            for request in requests:
                model.start(request, collected)
            collected.wait()
        finally:
            for request in requests:
                model.cancel(request.request_id)
        return list(collected.completions.values())


def as_messages(messages: str | Sequence[Message]) -> Sequence[Message]:
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return messages


def find_model(model: str | Path, settings: Settings) -> tuple[Path, Path | None]:
    """The file of a path or of a name in the store, and the stored model's adapter if it has one.

    Raises ModelNotFound, BadRequest.
    """
    path = Path(model).expanduser()
    if isinstance(model, Path) or path.suffix == ".gguf" or path.is_file():
        return path, None
    store = Store(settings.data_dir / "models")
    stored = store.find(ModelName.parse(str(model)))
    return store.model_file(stored), store.adapter_file(stored)
