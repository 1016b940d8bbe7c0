"""From the engine's tokens to the text that clients get.

What a step gave becomes text deltas on the engine thread itself, between two steps, and each sink
is called once with all of its own: some ten microseconds a token, where waking a thread of their
own takes a core away from the kernels and makes the engine wait for the interpreter. So a sink must
only hand deltas on. A stop string ends the answer before the next step.

Not here: prompts (prompts.py), the wire (runner.py, server/).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from localllm.engine.engine import Engine
from localllm.engine.sequence import Output, Request, Stats
from localllm.errors import BadRequest, LocalLLMError, TimedOut
from localllm.text.calls import ToolCall
from localllm.text.parsing import Parsed, Parser, PlainParser
from localllm.text.stream import Detokenizer, StopMatcher
from localllm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its text (bytes may be part of a character) and its natural log-probability.

    alternatives  the likeliest tokens at that place, descending; theirs are empty
    """

    token: int
    text: bytes
    logprob: float
    alternatives: list["TokenLogprob"] = field(default_factory=list)


@dataclass(slots=True)
class TextDelta:
    """What became known about one request; the last one has a `done_reason` or an `error`.

    text           to be appended; may be empty; thinking likewise
    tool_calls     each comes once, whole
    tokens         new ids, the end token included
    prompt_done    prompt tokens computed so far, while that goes on; of prompt_total
    done_reason    "stop", "length" or "cancelled"
    error_kind     the class of the `error`
    """

    request_id: str
    text: str = ""
    thinking: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_done: int | None = None
    prompt_total: int = 0
    done_reason: str | None = None
    stats: Stats | None = None
    error: str | None = None
    error_kind: type[LocalLLMError] = LocalLLMError

    @property
    def is_last(self) -> bool:
        return self.done_reason is not None or self.error is not None


TextSink = Callable[[list[TextDelta]], None]


class Answer:
    """The text state of one request."""

    def __init__(
        self,
        request: Request,
        sink: TextSink,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        end_ids: frozenset[int],
        parser: Parser,
    ) -> None:
        self.request = request
        self.sink = sink
        self.tokenizer = tokenizer
        self.detokenizer = Detokenizer(tokenizer, shown=marks_of(tokenizer, parser))
        self.matcher = StopMatcher(stops)
        self.parser = parser
        self.end_ids = end_ids
        self.num_tokens = 0

    @property
    def is_stopped(self) -> bool:
        return self.matcher.stopped is not None

    def take(self, output: Output) -> TextDelta | None:
        """The delta of one output; None when there is nothing to tell."""
        delta = TextDelta(output.request_id, prompt_total=len(self.request.tokens))
        delta.prompt_done = output.prompt_done
        if output.token is not None and not self.is_stopped:
            self._take_token(delta, output, output.token)
        if output.finish_reason is not None:
            self._finish(delta, output)
        elif self.is_stopped and not delta.tokens:
            return None
        return delta

    def _take_token(self, delta: TextDelta, output: Output, token: int) -> None:
        self.num_tokens += 1
        delta.tokens.append(token)
        if output.logprob is not None:
            delta.logprobs.append(self._logprob(output, token, output.logprob))
        if token not in self.end_ids:
            text = self.matcher.push(self.detokenizer.push(token))
            add(delta, self.parser.push(text))

    def _finish(self, delta: TextDelta, output: Output) -> None:
        text = self.matcher.push(self.detokenizer.finish())
        if not self.is_stopped:
            text += self.matcher.finish()
        add(delta, self.parser.push(text))
        add(delta, self.parser.finish())
        delta.stats = output.stats
        if delta.stats is not None:
            delta.stats.generated_tokens = self.num_tokens
        if output.error is not None and not self.is_stopped:
            delta.error = output.error
            if output.finish_reason == "timeout":
                delta.error_kind = TimedOut
        else:
            delta.done_reason = "stop" if self.is_stopped else output.finish_reason

    def _logprob(self, output: Output, token: int, logprob: float) -> TokenLogprob:
        spell = self.tokenizer.token_bytes
        alternatives = [TokenLogprob(t, spell(t), x) for t, x in output.top_logprobs or ()]
        return TokenLogprob(token, spell(token), logprob, alternatives)


def add(delta: TextDelta, parsed: Parsed) -> None:
    """Append what the parser found."""
    delta.text += parsed.content
    delta.thinking += parsed.thinking
    delta.tool_calls += parsed.tool_calls


def marks_of(tokenizer: Tokenizer, parser: Parser) -> frozenset[int]:
    """The control tokens whose text the parser must see."""
    if not parser.marks:
        return frozenset()
    texts = tokenizer.vocabulary.texts
    marks = "\0".join(parser.marks)
    return frozenset(i for i in tokenizer.special_ids if texts[i] and texts[i] in marks)


class Answers:
    """All running answers of one engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._answers: dict[str, Answer] = {}
        # One object, so that the engine sees one sink.
        self._sink = self._take

    def submit(
        self,
        request: Request,
        stops: Sequence[str],
        sink: TextSink,
        parser: Parser | None = None,
    ) -> None:
        """Start a request; `sink` is called on the engine thread, once per step for all its own.

        parser  takes the answer apart; None: all of it is content
        Raises what `Engine.submit` raises.
        """
        if request.request_id in self._answers:
            raise BadRequest(f"the request id {request.request_id} is in use")
        end_ids = request.stop_ids
        if not request.params.ignore_eog:
            end_ids = end_ids | self.engine.eog_ids
        answer = Answer(request, sink, self.tokenizer, stops, end_ids, parser or PlainParser())
        self._answers[request.request_id] = answer
        try:
            self.engine.submit(request, self._sink)
        except Exception:
            del self._answers[request.request_id]
            raise

    def _text(self, answer: Answer, output: Output) -> TextDelta | None:
        """The output's delta; a token that cannot be spelled costs its own request only."""
        try:
            return answer.take(output)
        except Exception as error:
            log.exception(
                "a token could not be turned into text", extra={"number": output.request_id}
            )
            self._answers.pop(output.request_id)
            self.engine.cancel(output.request_id)
            return TextDelta(output.request_id, error=f"the answer has no text: {error!r}")

    def _take(self, outputs: list[Output]) -> None:
        """Turn a step's outputs into deltas and call every sink once."""
        batches: dict[TextSink, list[TextDelta]] = {}
        for output in outputs:
            answer = self._answers.get(output.request_id)
            if answer is None:
                continue
            was_stopped = answer.is_stopped
            delta = self._text(answer, output)
            if answer.is_stopped and not was_stopped and output.finish_reason is None:
                self.engine.cancel(output.request_id)
            if output.finish_reason is not None:
                self._answers.pop(output.request_id, None)
            if delta is not None:
                batches.setdefault(answer.sink, []).append(delta)
        for sink, deltas in batches.items():
            try:
                sink(deltas)
            except Exception:
                log.exception("a client failed; its requests are cancelled")
                for delta in deltas:
                    self.engine.cancel(delta.request_id)
