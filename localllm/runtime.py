"""`LoadedModel`: the composition root. It opens a file and wires everything that answers with it.

Not here: HTTP, processes, what any of the parts does.
"""

import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self

from localllm.answers import Answers, TextDelta, TextSink
from localllm.config import Settings
from localllm.embedding import Embeddings
from localllm.engine.engine import Engine
from localllm.engine.sequence import Request
from localllm.errors import BadRequest
from localllm.gguf import GgufFile
from localllm.models.adapter import Adapter
from localllm.opening import (
    SMALLEST_CONTEXT,
    EngineOptions,
    MakeRoom,
    Progress,
    open_engine,
    scratch_bytes,
    weight_bytes,
)
from localllm.prompts import Prompt, PromptBuilder, TextRequest, bounded
from localllm.text.grammar import Constraint, Grammars, format_schema
from localllm.text.template import ChatTemplate
from localllm.text.tokenizer import Tokenizer, load_tokenizer
from localllm.voice import Voice, Voices


class LoadedModel:
    """A model that is ready to answer. Close it, or use it as a context manager."""

    def __init__(
        self,
        file: GgufFile,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        engine: Engine,
    ) -> None:
        self.file = file
        self.spec = engine.backend.spec
        self.tokenizer = tokenizer
        self.template = template
        self.engine = engine
        self.voices = Voices(tokenizer, template)
        self.prompts = PromptBuilder(tokenizer, self.voices)
        self.grammars = Grammars(tokenizer)
        self.answers = Answers(engine, tokenizer)
        self.embeddings = Embeddings(engine, self.prompts, self.spec.pooling)

    @classmethod
    def open(
        cls,
        path: str | Path,
        settings: Settings,
        *,
        backend: str = "cpu",
        digest: str = "",
        adapter: str | Path | None = None,
        adapter_digest: str = "",
        progress: Progress | None = None,
        free_bytes: int | None = None,
        make_room: MakeRoom | None = None,
    ) -> Self:
        """Open a model file; kernels are compiled and weights settled when this returns.

        digest     of the file, where it is known; it goes into the prefix cache's hashes
        adapter    a LoRA file that is applied to the model; adapter_digest: likewise
        progress   called with (what, done, total)
        free_bytes, make_room  see `opening.EngineOptions`
        """
        file = GgufFile.open(path)
        applied = None if adapter is None else Adapter(GgufFile.open(adapter))
        options = EngineOptions(
            backend,
            digest,
            adapter=applied,
            adapter_digest=adapter_digest,
            free_bytes=free_bytes,
            make_room=make_room,
        )
        tokenizer = load_tokenizer(file.metadata)
        template = ChatTemplate.from_metadata(file.metadata, tokenizer)
        engine = open_engine(file, settings, options, tokenizer.eog_ids, progress)
        whole = file if applied is None else applied.joined(file)
        model = cls(whole, tokenizer, template, engine)
        engine.start()
        return model

    @property
    def context_length(self) -> int:
        """Most positions of a sequence."""
        return self.engine.max_length

    @property
    def memory_bytes(self) -> int:
        """Weights, scratch, and the KV pool as far as it may grow."""
        backend = self.engine.backend
        pool = sum(n * size for n, size in zip(backend.num_blocks, backend.kv_bytes_per_block))
        return weight_bytes(self.file) + scratch_bytes(self.spec, backend.max_rows) + pool

    def start(self, request: TextRequest, sink: TextSink) -> None:
        """Build the prompt and submit. Raises BadRequest, Busy or Cancelled."""
        self.submit(request, self.prepare(request), sink)

    def prepare(self, request: TextRequest) -> Prompt:
        """The request's prompt within its context. Raises BadRequest if it cannot be."""
        return self.prompts.build(request, self._limit(request))

    def submit(self, request: TextRequest, prompt: Prompt, sink: TextSink) -> None:
        """Queue it; `sink` gets deltas once per step for all its requests, on the engine's thread."""
        limit = self._limit(request)
        num_predict, shift = bounded(request.params, limit, shift=request.shift)
        keep = len(prompt.tokens) if request.num_keep < 0 else request.num_keep
        end = self.voices.end_of(prompt.tokens)
        voice = prompt.voice
        self.answers.submit(
            Request(
                request.request_id,
                prompt.tokens,
                replace(request.params, num_predict=num_predict),
                cache_prompt=request.cache_prompt,
                exact=request.exact,
                speculate=request.speculate,
                salt=request.salt,
                priority=request.priority,
                deadline=request.deadline,
                num_ctx=limit,
                shift=shift,
                num_keep=keep,
                constraint=self._constraint(request, voice, end),
            ),
            request.stop,
            sink,
            None if voice is None else voice.parser(end, request.tools, request.think),
        )

    def _constraint(
        self, request: TextRequest, voice: Voice | None, prompt_end: str
    ) -> Constraint | None:
        """What the request's format or grammar allows. Raises BadRequest for one that is not supported."""
        schema = format_schema(request.format)
        if request.grammar:
            if schema is not None:
                raise BadRequest("a request has either a format or a grammar")
            constraint: Constraint = self.grammars.of_grammar(request.grammar)
        elif schema is not None:
            constraint = self.grammars.constraint(schema)
        else:
            return None
        if voice is None:
            return constraint
        think = request.think is not False
        return self.grammars.after_thinking(constraint, voice.dialect, prompt_end, think=think)

    def _limit(self, request: TextRequest) -> int:
        if request.num_ctx is None:
            return self.context_length
        return min(self.context_length, max(request.num_ctx, SMALLEST_CONTEXT))

    def stream(self, request: TextRequest) -> Iterator[TextDelta]:
        """The deltas of one request, on the caller's thread; leaving the loop cancels it.

        Raises LocalLLMError if the model fails.
        """
        deltas: queue.SimpleQueue[list[TextDelta]] = queue.SimpleQueue()
        self.start(request, deltas.put)
        is_over = False
        try:
            while not is_over:
                for delta in deltas.get():
                    is_over = delta.is_last
                    if delta.error is not None:
                        raise delta.error_kind(delta.error)
                    yield delta
        finally:
            if not is_over:
                self.cancel(request.request_id)

    def generate_text(
        self, request: TextRequest, on_delta: Callable[[TextDelta], None] | None = None
    ) -> TextDelta:
        """Wait for the whole answer, as one delta; `on_delta` sees the pieces as they come."""
        whole = TextDelta(request.request_id)
        for delta in self.stream(request):
            if on_delta is not None:
                on_delta(delta)
            whole.text += delta.text
            whole.thinking += delta.thinking
            whole.tool_calls += delta.tool_calls
            whole.tokens += delta.tokens
            whole.logprobs += delta.logprobs
            whole.prompt_total = delta.prompt_total
            whole.done_reason, whole.stats = delta.done_reason, delta.stats
        return whole

    def cancel(self, request_id: str) -> None:
        """End a request within one step; nothing happens if it has ended."""
        if not self.embeddings.cancel(request_id):
            self.engine.cancel(request_id)

    def work_done(self) -> int:
        """A number that moves as long as work is done, within a step, too."""
        step, record = self.engine.backend.position
        return (step << 20) + record

    def close(self) -> None:
        """Cancel what is running and give back threads and memory."""
        self.engine.close()
        self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
