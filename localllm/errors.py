"""Every error a user can meet, as one tree.

`str(error)` is one line that names the bad thing and, where it helps, says what to do about it. The servers map the
classes to their protocol's status codes; the command line prints the line and exits with 1. Errors that are not of
this tree are bugs of ours.
"""

from typing import Self


class LocalLLMError(Exception):
    """Root of the tree: one clear line for the person at the other end."""


class BadFile(LocalLLMError):
    """A file is damaged, truncated, hostile, or not what its name says."""


class UnsupportedModel(LocalLLMError):
    """The model needs something this build does not have; the message names it."""


class BadRequest(LocalLLMError):
    """The request itself is wrong: its shape, a value, or an option that does not exist."""


class PromptTooLong(BadRequest):
    """The prompt and at least one token of an answer do not fit into the context."""

    @classmethod
    def of(cls, num_tokens: int, context_length: int, *, at_least: bool = False) -> Self:
        number = f"at least {num_tokens}" if at_least else num_tokens
        return cls(
            "the prompt is longer than the context length currently available to the model: "
            f"it has {number} tokens and the context holds {context_length}, the answer "
            "included; shorten the prompt or raise num_ctx"
        )


class BadSettings(LocalLLMError):
    """A setting or the config file cannot be used; the message names it."""


class ModelNotFound(LocalLLMError):
    """No model of that name is in the store."""


class CloudModel(LocalLLMError):
    """The name is of a model that runs on Ollama's machines, never on this one."""


class Busy(LocalLLMError):
    """The queue is full; try again later, in about `retry_seconds`."""

    def __init__(self, message: str, retry_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class OutOfBlocks(LocalLLMError):
    """The KV pool cannot hold what was asked for."""


class OutOfMemory(LocalLLMError):
    """The model does not fit into the memory that is free."""


class Cancelled(LocalLLMError):
    """The request was cancelled by its client, by `stop`, or by an unload."""


class TimedOut(LocalLLMError):
    """The request's own `timeout` was over before its answer was."""


class RunnerDied(LocalLLMError):
    """The process that ran the model died or hung; the next request starts a new one."""


class DaemonUnavailable(LocalLLMError):
    """No daemon answers, or another program answers at its address."""


class StoreError(LocalLLMError):
    """The model store cannot be read or written."""


class PullFailed(LocalLLMError):
    """A model could not be fetched; what is there already is kept for the next try."""
