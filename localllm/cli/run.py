"""`localllm run`: one question and its answer, or the start of a conversation."""

import json
import os
import sys
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from localllm.cli import THINK_VALUES, TRUTHS
from localllm.cli.models import model_argument
from localllm.cli.output import Status, Thoughts, Wrapper, print_statistics
from localllm.cli.vectors import is_for_vectors, print_vector
from localllm.client import Client, RequestFailed
from localllm.errors import BadRequest, ModelNotFound


@dataclass(slots=True)
class Session:
    """How requests of one `run` are made and shown; `/set` changes it."""

    model: str
    keep_alive: str | None = None
    format: str | None = None
    think: bool | str | None = None
    verbose: bool = False
    wordwrap: bool = True
    hides_thinking: bool = False
    is_insecure: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    dimensions: int | None = None
    truncate: bool | None = None

    @property
    def vector_body(self) -> dict[str, Any]:
        """A request for a vector, but for its text."""
        values = {
            "model": self.model,
            "keep_alive": self.keep_alive,
            "dimensions": self.dimensions,
            "truncate": self.truncate,
        }
        return {key: value for key, value in values.items() if value is not None}

    def body(self, **content: Any) -> dict[str, Any]:
        """A request's body with what was set."""
        values = {
            "keep_alive": self.keep_alive,
            "format": parse_format(self.format),
            "think": self.think,
            "options": self.options or None,
        }
        given = {key: value for key, value in values.items() if value is not None}
        return {"model": self.model, **given, **content}


@dataclass(slots=True)
class Reply:
    """What an answer has become so far; `final` is its last chunk."""

    text: str = ""
    thinking: str = ""
    final: dict[str, Any] = field(default_factory=dict)


def run(client: Client, session: Session, words: list[str]) -> None:
    """Answer the prompt that the arguments and standard input make, or converse."""
    session.model = model_argument(session.model)
    prompt = read_prompt(words)
    try:
        if session.dimensions is not None or session.truncate is not None:
            client.ensure_daemon(prepares=True, note=_note)
            print_vector(client, prompt or "", session.vector_body)
        else:
            _answer_or_converse(client, session, prompt)
    except BadRequest:
        if not is_for_vectors(client, session.model):
            raise
        print_vector(client, prompt or "", session.vector_body)


def _answer_or_converse(client: Client, session: Session, prompt: str | None) -> None:
    if prompt is None:
        from localllm.cli.repl import converse

        converse(client, session)
        return
    client.ensure_daemon(prepares=True, note=_note)
    reply = Reply()
    show_answer(client, "/api/generate", session.body(prompt=prompt), session, reply)
    if reply.final.get("done_reason") == "load":
        return
    print("\n" if sys.stdout.isatty() else "")
    if session.verbose:
        print_statistics(reply.final)


def read_prompt(words: list[str]) -> str | None:
    """Piped standard input, then the arguments; None to converse on a terminal."""
    typed = " ".join(os.fsencode(word).decode(errors="replace") for word in words)
    piped = ""
    if not sys.stdin.isatty():
        piped = sys.stdin.buffer.read().decode(errors="replace")
    if piped.strip():
        return f"{piped} {typed}" if typed else piped
    if words or not sys.stdin.isatty() or not sys.stdout.isatty():
        return typed
    return None


def show_answer(
    client: Client, path: str, body: dict[str, Any], session: Session, reply: Reply
) -> None:
    """Print an answer as it comes, and keep it in `reply`, also when it is interrupted."""
    status = Status()
    out = Wrapper(wraps=session.wordwrap)
    thoughts = Thoughts(out, is_hidden=session.hides_thinking)
    status.show("connecting")
    try:
        with closing(_chunks(client, path, body, session)) as chunks:
            for chunk in chunks:
                if "progress" in chunk:
                    status.progress(chunk["progress"])
                    continue
                said = chunk.get("message", chunk)
                thinking = said.get("thinking", "")
                if thinking:
                    status.clear()
                    reply.thinking += thinking
                    thoughts.write(thinking)
                text = said["content"] if "message" in chunk else said["response"]
                if text:
                    status.clear()
                    thoughts.close()
                    reply.text += text
                    out.write(text)
                if chunk["done"]:
                    reply.final = chunk
    finally:
        status.clear()
        thoughts.close()
    dropped = reply.final.get("dropped_messages", 0)
    if dropped:
        _note(f"{dropped} of the oldest messages did not fit into the context and were left out")


def _chunks(
    client: Client, path: str, body: dict[str, Any], session: Session
) -> Generator[dict[str, Any], None, None]:
    """What the daemon answers; a model that is not there is pulled first."""
    try:
        yield from client.stream(path, body)
    except ModelNotFound as missing:
        pull_missing(client, session, missing)
        yield from client.stream(path, body)


def pull_missing(client: Client, session: Session, missing: ModelNotFound) -> None:
    """Pull the model that was found missing. Raises ModelNotFound if that fails."""
    from localllm.cli.pulling import pull_model

    try:
        pull_model(client, session.model, is_insecure=session.is_insecure)
    except RequestFailed as error:
        raise ModelNotFound(f"{missing}, and it could not be pulled: {error}") from None


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def parse_format(text: str | None) -> Any:
    """`json`, or a JSON schema as it was typed; what is neither is the daemon's to refuse."""
    if text is not None and text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise BadRequest(f"--format is no JSON schema: {error}") from None
    return text


def parse_truncate(text: str | None) -> bool | None:
    """The value of `--truncate`."""
    if text is not None and text not in TRUTHS:
        raise BadRequest(f'invalid value for --truncate: "{text}" (must be true or false)')
    return None if text is None else text == "true"


def parse_think(text: str | None) -> bool | str | None:
    """The value of `--think`."""
    if text is None:
        return None
    if text not in THINK_VALUES:
        raise BadRequest(
            f'invalid value for --think: "{text}" (must be true, false, high, medium, low, or max)'
        )
    return text == "true" if text in ("true", "false") else text
