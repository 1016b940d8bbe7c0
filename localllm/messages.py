"""What the daemon and a runner say to each other, and how it is put on the wire.

A message is a frozen dataclass. On the wire it is a header (body length, kind) and a JSON body of
the fields that differ from their defaults. Both ends use `encode` and `decode` of this file, so
they cannot disagree; end of file on either side means that the other one died.

    daemon -> runner   Load, Proceed, then any number of Generate, Embed and Cancel
    runner -> daemon   Estimate, Loading..., Ready or Failed, then Deltas and, while work is running,
                       Pulse

The runner reads the file's header, says what the model is going to need, and waits for `Proceed`
while the daemon makes room.

One `Deltas` carries what a step produced for all requests: never one message per token and request.

Not here: processes (runner.py, runner_process.py), HTTP (server/).
"""

import json
import socket
import struct
import threading
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_args

from localllm import errors
from localllm.errors import LocalLLMError

HEADER = struct.Struct("<IB")
MAX_BODY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Load:
    """Open the model file; the runner was started for this and nothing else.

    `adapter` is a LoRA file to apply, if any. `free_bytes` is the memory that the model could have
    if it were the only one.
    """

    path: str
    digest: str = ""
    context_length: int | None = None
    threads: int | None = None
    free_bytes: int | None = None
    adapter: str = ""
    adapter_digest: str = ""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the model is going to hold: weights, KV and scratch."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Proceed:
    """There is as much room as there will be: `free_bytes`."""

    free_bytes: int


@dataclass(frozen=True, slots=True)
class Generate:
    """One request for text. `priority` and `deadline` are those of `engine.Request`.

    Either `messages` (rendered with the model's chat template) or `prompt` as it is, after the
    tokens of `context`. `options` has Ollama's names and checked types. `logprobs` counts
    alternatives; 0 means the chosen token only, None means off. `template` replaces the model's
    unless that can do more, or `is_final_template`. `think`, `suffix` and `format` are those of
    `prompts.TextRequest`. `log_id` is what log lines call the request.
    """

    request_id: int
    prompt: str = ""
    messages: list[dict[str, Any]] | None = None
    context: list[int] = field(default_factory=list)
    template: str = ""
    is_final_template: bool = False
    suffix: str = ""
    think: bool | str | None = None
    format: Any = None
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    stop: list[str] = field(default_factory=list)
    logprobs: int | None = None
    truncate: bool = True
    shift: bool = True
    want_tokens: bool = False
    render_only: bool = False
    priority: int = 0
    deadline: float | None = None
    exact: bool = False
    cache_prompt: bool = True
    speculate: bool = True
    salt: str = ""
    log_id: str = ""


@dataclass(frozen=True, slots=True)
class Embed:
    """One request for vectors; see `embedding.EmbedRequest`. Its only delta has them all."""

    request_id: int
    texts: list[str]
    truncate: bool = True
    num_ctx: int | None = None
    dimensions: int = 0
    normalise: bool = True
    salt: str = ""
    priority: int = 0
    deadline: float | None = None
    log_id: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop working on a request; its last delta says `cancelled`."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Loading:
    """How far a load is: `done` of `total` units of `stage`, a phrase for people."""

    stage: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded."""

    context_length: int
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The load failed; the runner exits."""

    error: str
    kind: str = "LocalLLMError"


@dataclass(frozen=True, slots=True)
class Pulse:
    """How the work goes; sent regularly while there is any, and once when there is no more.

    counter          steps and other units of work done so far; stuck is when it does not move
    num_running      requests in the engine's steps; num_preemptions: since the model was loaded
    kv_usage         share of the KV blocks in use, 0 to 1
    waiting          ids of the requests in the engine's queue, the next one first
    """

    counter: int
    num_running: int = 0
    kv_usage: float = 0.0
    num_preemptions: int = 0
    waiting: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a request cost. Times in seconds; `prompt_tokens` includes the `cached_tokens`.

    `prefix_miss` says why not all of the prompt was cached; empty when all was. Of the
    `drafted_tokens`, which were guessed, the `accepted_tokens` were right.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    queue_seconds: float = 0.0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_preemptions: int = 0
    prefix_miss: str = ""
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """What became known about one request; the last one has a `done_reason` or an `error`.

    Entries of `logprobs` and `tool_calls` have Ollama's shape, but for a call's index. `tokens`
    (prompt and answer) comes with the last delta if it was wanted, `rendered` and the prompt's
    tokens with the only one of `render_only`. `dropped_messages` counts the old messages that did
    not fit into the context. `num_tokens` are the new ones that it stands for. `queue_position`
    counts from 1 while the request waits. `vectors` are base64 of little-endian float32, one a
    text, of which `dropped_tokens` did not fit into the context.
    """

    request_id: int
    text: str = ""
    thinking: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    num_tokens: int = 0
    queue_position: int = 0
    prompt_done: int = 0
    prompt_total: int = 0
    done_reason: str | None = None
    statistics: Statistics | None = None
    tokens: list[int] | None = None
    dropped_messages: int = 0
    rendered: str | None = None
    vectors: list[str] | None = None
    dropped_tokens: list[int] = field(default_factory=list)
    error: str | None = None
    error_kind: str = "LocalLLMError"


@dataclass(frozen=True, slots=True)
class Deltas:
    """Everything one step produced."""

    deltas: list[Delta]


Ask = Generate | Embed
Message = Load | Estimate | Proceed | Ask | Cancel | Loading | Ready | Failed | Pulse | Deltas
_KINDS: tuple[type, ...] = get_args(Message)
_KIND_OF = {kind: number for number, kind in enumerate(_KINDS)}


def _defaults(kind: type) -> list[tuple[str, Any]]:
    return [
        (f.name, f.default_factory() if f.default_factory is not MISSING else f.default)
        for f in fields(kind)
    ]


_DEFAULTS = {kind: _defaults(kind) for kind in (*_KINDS, Delta, Statistics)}


def _plain(value: Any) -> dict[str, Any]:
    """The fields of a dataclass of this file that differ from their defaults."""
    out = {}
    for name, default in _DEFAULTS[type(value)]:
        item = getattr(value, name)
        if item != default:
            out[name] = item
    return out


_to_json = json.JSONEncoder(separators=(",", ":"), default=_plain).encode


def encode(message: Message) -> bytes:
    """A message as it goes over the wire."""
    body = _to_json(_plain(message)).encode("ascii")
    return HEADER.pack(len(body), _KIND_OF[type(message)]) + body


def decode(kind: int, body: bytes) -> Message:
    """The message of a header's `kind` and the body that followed it."""
    values = json.loads(body)
    if _KINDS[kind] is Deltas:
        return Deltas([_delta(**delta) for delta in values["deltas"]])
    message: Message = _KINDS[kind](**values)
    return message


def _delta(*, statistics: dict[str, Any] | None = None, **values: Any) -> Delta:
    return Delta(statistics=None if statistics is None else Statistics(**statistics), **values)


class Channel:
    """A message socket for threads: `send` from any thread, `receive` from one."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = sock.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send one message. Raises OSError if the other side is gone."""
        data = encode(message)
        with self._lock:
            self._socket.sendall(data)

    def receive(self) -> Message | None:
        """The next message, or None when the other side is gone."""
        try:
            header = self._reader.read(HEADER.size)
            if len(header) < HEADER.size:
                return None
            size, kind = HEADER.unpack(header)
            body = self._reader.read(size)
        except ConnectionError:
            return None
        return decode(kind, body) if len(body) == size else None


def kind_of(error: Exception) -> str:
    """The class of the tree by which the other side knows an error of it or of a subclass."""
    names = (kind.__name__ for kind in type(error).__mro__)
    return next((name for name in names if hasattr(errors, name)), type(error).__name__)


def error_of(kind: str, text: str) -> LocalLLMError:
    """The error that the other side met, of the same class as there."""
    found = getattr(errors, kind, LocalLLMError)
    known = isinstance(found, type) and issubclass(found, LocalLLMError)
    return found(text) if known else LocalLLMError(text)
