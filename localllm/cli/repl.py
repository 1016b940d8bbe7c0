"""The conversation on a terminal: a prompt with history, commands that begin with `/`, answers.

Ctrl-C during an answer stops the answer alone; at the prompt it clears the line.
"""

import shlex
import signal
import sys
from collections.abc import Callable
from typing import Any

from localllm.cli import models
from localllm.cli.output import Status, print_statistics
from localllm.cli.prompt import Prompt, terminal_kept
from localllm.cli.repl_texts import HELP, MISSING, PARAMETER_HELP, SET_HELP, SHOW_HELP, TOPICS
from localllm.cli.run import Reply, Session, pull_missing, show_answer
from localllm.client import Client
from localllm.errors import DaemonUnavailable, LocalLLMError, ModelNotFound
from localllm.modelfile import parameter_lines, parse_parameter


class Conversation:
    """The messages so far and the commands that change them."""

    def __init__(self, client: Client, session: Session) -> None:
        self._client = client
        self._session = session
        self._messages: list[dict[str, Any]] = []
        self._system: str | None = None
        self._prompt = Prompt()
        self._commands: dict[str, Callable[[str], None]] = {
            "/set": self._set,
            "/show": self._show,
            "/load": self._load,
            "/save": self._save,
            "/clear": self._clear,
            "/list": lambda prefix: models.list_models(self._client, prefix),
            "/help": _help,
            "/?": _help,
        }

    def open(self) -> None:
        """Load the model, so that the first answer comes at once."""
        status = Status()
        status.show("loading")
        try:
            for chunk in self._client.stream("/api/generate", self._session.body(prompt="")):
                if "progress" in chunk:
                    status.progress(chunk["progress"])
        finally:
            status.clear()

    def replay(self) -> None:
        """Show the messages that the model itself begins a conversation with."""
        found = self._client.post("/api/show", {"model": self._session.model})
        for message in found.get("messages") or ():
            if message["role"] in ("user", "assistant"):
                mark = ">>> " if message["role"] == "user" else ""
                print(f"{mark}{message['content']}\n")

    def run(self) -> None:
        """Read and answer until the user leaves."""
        while True:
            try:
                text = self._prompt.read()
            except KeyboardInterrupt:
                print("\nUse Ctrl + d or /bye to exit.", file=sys.stderr)
                continue
            except EOFError:
                return
            word = text.split(None, 1)[0] if text.strip() else ""
            if word in ("/bye", "/exit"):
                return
            if word.startswith("/"):
                self._command(word, text.strip()[len(word) :].strip())
            elif word:
                self._ask(text)

    def _command(self, word: str, rest: str) -> None:
        command = self._commands.get(word)
        if command is None:
            _say(f"Unknown command '{word}'. Type /? for help")
            return
        try:
            command(rest)
        except DaemonUnavailable:
            raise
        except LocalLLMError as error:
            _say(f"error: {error}")
        except KeyboardInterrupt:
            print()

    def _ask(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        reply = Reply()
        body = self._session.body(messages=self._messages)
        try:
            show_answer(self._client, "/api/chat", body, self._session, reply)
        except KeyboardInterrupt:
            pass
        except DaemonUnavailable:
            raise
        except LocalLLMError as error:
            print(f"\nError: {error}" if reply.text else f"Error: {error}", file=sys.stderr)
        print("\n")
        if reply.text:
            answer = {"role": "assistant", "content": reply.text}
            if reply.thinking:
                answer["thinking"] = reply.thinking
            self._messages.append(answer)
        else:
            # Many templates refuse two messages of one role in a row.
            self._messages.pop()
        if self._session.verbose and reply.final:
            print_statistics(reply.final)

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        value = value.strip()
        session = self._session
        if name == "parameter":
            self._set_parameter(value)
        elif name == "system" and value:
            self._system = value
            self._messages.append({"role": "system", "content": value})
            _say("Set system message.")
        elif name in ("history", "nohistory"):
            self._prompt.set_history(is_on=name == "history")
        elif name in ("wordwrap", "nowordwrap"):
            session.wordwrap = name == "wordwrap"
            _say(f"Set '{name}' mode.")
        elif name in ("verbose", "quiet"):
            session.verbose = name == "verbose"
            _say(f"Set '{name}' mode.")
        elif name in ("think", "nothink"):
            session.think = False if name == "nothink" else (value or True)
            _say(f"Set '{name}' mode" + (f" to '{value}'." if value else "."))
            if session.think and not self._can_think():
                _say(f'warning: model "{session.model}" does not support thinking output')
        elif name in ("format", "noformat"):
            self._set_format(name, value)
        else:
            _say(f"Unknown command '/set {rest}'. Type /? for help" if rest else SET_HELP)

    def _can_think(self) -> bool:
        found = self._client.post("/api/show", {"model": self._session.model})
        return "thinking" in found.get("capabilities", ())

    def _set_format(self, name: str, value: str) -> None:
        if name == "noformat":
            self._session.format = None
            _say("Disabled format.")
        elif value == "json":
            self._session.format = "json"
            _say("Set format to 'json' mode.")
        else:
            _say("Invalid or missing format. For 'json' mode use '/set format json'")

    def _set_parameter(self, text: str) -> None:
        name, *values = _words(text)
        if not name or not values:
            _say(PARAMETER_HELP)
            return
        try:
            value = values if name == "stop" else parse_parameter(name, values[0])
        except LocalLLMError as error:
            _say(f'Couldn\'t set parameter: "{error}"')
            return
        self._session.options[name] = value
        _say(f"Set parameter '{name}' to '{', '.join(values)}'")

    def _show(self, what: str) -> None:
        found = self._client.post("/api/show", {"model": self._session.model})
        if what == "info":
            print(models.describe(found))
        elif what == "parameters":
            print("Model defined parameters:")
            print(found.get("parameters") or "  none")
            if self._session.options:
                print("\nUser defined parameters:")
                print("\n".join(parameter_lines(self._session.options)))
        elif what == "system" and self._system:
            print(self._system)
        elif what in MISSING:
            print(found.get(what) or MISSING[what])
        else:
            _say(SHOW_HELP)
        print()

    def _load(self, name: str) -> None:
        if not name:
            _say("Usage:\n  /load <modelname>")
            return
        before = self._session.model
        self._session.model = models.model_argument(name)
        _say(f"Loading model '{name}'")
        try:
            self.open()
        except LocalLLMError as error:
            self._session.model = before
            is_missing = isinstance(error, ModelNotFound)
            _say(f"Couldn't find model '{name}'" if is_missing else f"error: {error}")
            return
        self._messages.clear()

    def _save(self, name: str) -> None:
        if not name:
            _say("Usage:\n  /save <modelname>")
            return
        body: dict[str, Any] = {"model": name, "from": self._session.model}
        if self._session.options:
            body["parameters"] = self._session.options
        if self._system:
            body["system"] = self._system
        talk = [message for message in self._messages if message["role"] != "system"]
        if talk:
            body["messages"] = talk
        for _ in self._client.stream("/api/create", body):
            pass
        _say(f"Created new model '{name}'")

    def _clear(self, _: str) -> None:
        self._messages.clear()
        if self._system:
            self._messages.append({"role": "system", "content": self._system})
        _say("Cleared session context")


def _words(text: str) -> list[str]:
    """Words of a line, quotes removed where they match."""
    try:
        return shlex.split(text) or [""]
    except ValueError:
        return text.split() or [""]


def _help(topic: str) -> None:
    _say(TOPICS.get(topic.lstrip("/"), HELP) + "\n")


def _say(text: str) -> None:
    """Tell the user something that is no answer."""
    print(text, file=sys.stderr)


def converse(client: Client, session: Session) -> None:
    """Start a conversation and hold it until the user leaves."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Leaving by an exception lets the terminal be restored.
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with terminal_kept():
        hold(client, session)


def hold(client: Client, session: Session) -> None:
    """Open the conversation, pulling the model where it is missing, and run it."""
    client.ensure_daemon(prepares=True, note=_say)
    conversation = Conversation(client, session)
    try:
        conversation.open()
    except ModelNotFound as missing:
        pull_missing(client, session, missing)
        conversation.open()
    conversation.replay()
    conversation.run()
