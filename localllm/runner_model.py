"""A `LoadedModel` behind the runner's interface: messages to text requests, text deltas to messages.

Not here: processes and sockets (runner.py), prompts and answers (runtime.py).
"""

import gc
import logging
import secrets
import string
from base64 import b64encode
from dataclasses import asdict, dataclass, replace
from typing import Any

from localllm.answers import TextDelta, TokenLogprob
from localllm.config import load_settings
from localllm.embedding import Embedded, EmbedRequest
from localllm.engine.sequence import Stats
from localllm.errors import BadRequest, Cancelled
from localllm.messages import Ask, Delta, Embed, Generate, Load, Pulse, Statistics, kind_of
from localllm.opening import configure_kernels
from localllm.prompts import Prompt, TextRequest
from localllm.runner import MakeRoom, Progress, Sink
from localllm.runtime import LoadedModel
from localllm.sampling import SamplingParams
from localllm.text.calls import ToolCall

DEFAULT_NUM_KEEP = 4
ID_LETTERS, ID_LENGTH = string.ascii_lowercase + string.digits, 8
STATISTICS = frozenset(Statistics.__dataclass_fields__)

log = logging.getLogger("localllm.runner")


@dataclass(slots=True)
class Asked:
    """A running request: who hears of it, its prompt, the answer's tokens so far."""

    request: Generate
    sink: Sink
    prompt: Prompt
    tokens: list[int]


class RunnerModel:
    """Implements `runner.Model`."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._asked: dict[str, Asked] = {}
        self.context_length = model.context_length
        self.memory_bytes = model.memory_bytes

    def start(self, request: Ask, sink: Sink) -> None:
        """Prepare and submit a request, or render it."""
        if isinstance(request, Embed):
            self._embed(request, sink)
            return
        text_request = _text_request(request)
        if request.render_only:
            prompts = self._model.prompts
            rendered = prompts.render(text_request)
            tokens = prompts.tokens(text_request) if request.want_tokens else None
            sink([Delta(request.request_id, rendered=rendered, tokens=tokens)])
            return
        prompt = self._model.prepare(text_request)
        self._asked[text_request.request_id] = Asked(request, sink, prompt, [])
        try:
            # One sink for all requests, so that a step's deltas come in one call.
            self._model.submit(text_request, prompt, self._take)
        except BaseException:
            del self._asked[text_request.request_id]
            raise

    def _embed(self, request: Embed, sink: Sink) -> None:
        number = request.request_id
        wanted = EmbedRequest(
            str(number),
            request.texts,
            truncate=request.truncate,
            num_ctx=request.num_ctx,
            dimensions=request.dimensions,
            normalise=request.normalise,
            salt=request.salt.encode(),
            priority=request.priority,
            deadline=request.deadline,
        )
        self._model.embeddings.start(wanted, lambda ended: sink([_vectors(number, ended)]))

    def cancel(self, request_id: int) -> None:
        self._model.cancel(str(request_id))

    def pulse(self) -> Pulse:
        engine = self._model.engine
        load = engine.load()
        waiting = sorted(engine.scheduler.waiting, key=lambda s: (s.request.priority, s.arrival))
        return Pulse(
            self._model.work_done(),
            load.num_running,
            load.kv_usage,
            load.num_preemptions,
            # Several sequences may be one request's.
            list(dict.fromkeys(_number(sequence.request.request_id) for sequence in waiting)),
        )

    def close(self) -> None:
        self._model.close()
        self._model.engine.check()
        log.info("the block pool is clean")

    def _take(self, deltas: list[TextDelta]) -> None:
        """Pass a step's deltas on; the requests of one runner share one sink."""
        sinks: dict[Sink, list[Delta]] = {}
        for delta in deltas:
            asked = self._asked.get(delta.request_id)
            if asked is not None:
                sinks.setdefault(asked.sink, []).append(self._delta(asked, delta))
        for sink, converted in sinks.items():
            sink(converted)

    def _delta(self, asked: Asked, delta: TextDelta) -> Delta:
        request = asked.request
        if request.want_tokens:
            asked.tokens += delta.tokens
        converted = Delta(
            request.request_id,
            delta.text,
            delta.thinking,
            [_call(call) for call in delta.tool_calls],
            num_tokens=len(delta.tokens),
            logprobs=[_entry(logprob, request.logprobs or 0) for logprob in delta.logprobs],
            prompt_done=delta.prompt_done or 0,
            prompt_total=delta.prompt_total if delta.prompt_done is not None else 0,
        )
        if not delta.is_last:
            return converted
        del self._asked[delta.request_id]
        return replace(
            converted,
            done_reason=delta.done_reason,
            statistics=None if delta.stats is None else _statistics(delta.stats),
            tokens=self._context(asked) if request.want_tokens else None,
            dropped_messages=asked.prompt.dropped_messages,
            error=delta.error,
            error_kind=delta.error_kind.__name__,
        )

    def _context(self, asked: Asked) -> list[int]:
        """Tokens of prompt and answer, without a BOS that the tokenizer adds."""
        tokens, tokenizer = asked.prompt.tokens, self._model.tokenizer
        start = 1 if tokenizer.add_bos and tokens[:1] == [tokenizer.bos_id] else 0
        return tokens[start:] + asked.tokens


def _number(engine_id: str) -> int:
    """The request that one in the engine belongs to; a list of texts has several there."""
    return int(engine_id.partition("/")[0])


def _vectors(number: int, embedded: Embedded) -> Delta:
    """The only delta of a request for vectors."""
    if isinstance(embedded.error, Cancelled):
        return Delta(number, done_reason="cancelled")
    if embedded.error is not None:
        return Delta(number, error=str(embedded.error), error_kind=kind_of(embedded.error))
    dropped = embedded.dropped_tokens
    return Delta(
        number,
        done_reason="stop",
        statistics=_statistics(embedded.stats),
        vectors=[b64encode(row.astype("<f4").tobytes()).decode() for row in embedded.vectors],
        dropped_tokens=dropped if any(dropped) else [],
    )


def _text_request(request: Generate) -> TextRequest:
    options: dict[str, Any] = {**request.options, "logprobs": request.logprobs}
    bias = options.get("logit_bias")
    if bias is not None:
        options["logit_bias"] = {_token_id(token): value for token, value in bias.items()}
    return TextRequest(
        str(request.request_id),
        request.prompt,
        request.messages,
        tokens=request.context,
        template=request.template,
        is_final_template=request.is_final_template,
        tools=request.tools,
        variables=request.variables,
        suffix=request.suffix,
        think=request.think,
        format=request.format,
        grammar=options.get("grammar", ""),
        params=SamplingParams.from_options(options),
        stop=request.stop,
        num_ctx=options.get("num_ctx"),
        truncate=request.truncate,
        shift=request.shift,
        num_keep=options.get("num_keep", DEFAULT_NUM_KEEP),
        exact=request.exact,
        cache_prompt=request.cache_prompt,
        speculate=request.speculate,
        salt=request.salt.encode(),
        priority=request.priority,
        deadline=request.deadline,
    )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 10):
        raise BadRequest(f"logit_bias must map token ids to numbers, got the key {key[:40]!r}")
    return int(key)


def _call(call: ToolCall) -> dict[str, Any]:
    """A tool call in Ollama's shape, but for its place among the others."""
    identity = "call_" + "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))
    return {"id": identity, "function": {"name": call.name, "arguments": call.arguments}}


def _statistics(stats: Stats) -> Statistics:
    values = asdict(stats)
    return Statistics(**{name: values[name] for name in STATISTICS & values.keys()})


def _entry(logprob: TokenLogprob, num_alternatives: int) -> dict[str, Any]:
    """A log-probability in Ollama's shape."""
    entry: dict[str, Any] = {
        "token": logprob.text.decode(errors="replace"),
        "logprob": logprob.logprob,
        "bytes": list(logprob.text),
    }
    if num_alternatives:
        entry["top_logprobs"] = [
            _entry(other, 0) for other in logprob.alternatives[:num_alternatives]
        ]
    return entry


def prepare() -> None:
    """Import what a model will need, before it is known which one."""
    configure_kernels(load_settings())
    import localllm.backends.cpu.backend  # noqa: F401


def open_model(load: Load, progress: Progress, make_room: MakeRoom) -> RunnerModel:
    """Open a model file as the daemon asks for it."""
    settings = load_settings()
    settings = replace(
        settings,
        context_length=load.context_length or settings.context_length,
        threads=load.threads or settings.threads,
    )
    model = LoadedModel.open(
        load.path,
        settings,
        digest=load.digest,
        adapter=load.adapter or None,
        adapter_digest=load.adapter_digest,
        progress=progress,
        free_bytes=load.free_bytes,
        make_room=make_room,
    )
    # What was loaded stays; the collector need not walk it again.
    gc.freeze()
    return RunnerModel(model)
