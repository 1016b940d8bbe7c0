"""How well a model predicts a text, and how far it is from another model of the same text.

Perplexity is exp of the mean of -log p(token | the tokens before it), in windows of the context
length; a window's first token is not scored. The KL divergence to a saved base is taken over the
base's likeliest tokens at each position, all others being one class.

A base file (.npz) holds `tokens` int32 [T], and for each of them `top_ids` int32 [T, K] and
`top_logprobs` float32 [T, K], natural logarithms, descending. `save` writes one.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localllm.config import Settings
from localllm.errors import BadFile, BadRequest
from localllm.gguf import GgufFile
from localllm.offline.logits import LogitsOptions, Role, observe, open_for_rows
from localllm.opening import Progress
from localllm.text.tokenizer import load_tokenizer

DEFAULT_WINDOW = 2048
NUM_SAVED = 16

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Base:
    """Log-probabilities of another model on the same tokens; see the module's docstring."""

    tokens: list[int]
    top_ids: NDArray[np.int32]
    top_logprobs: Doubles

    @classmethod
    def load(cls, path: Path) -> "Base":
        try:
            with np.load(path, allow_pickle=False) as file:
                tokens, ids = file["tokens"], file["top_ids"]
                logprobs = file["top_logprobs"].astype(np.float64)
        except FileNotFoundError:
            raise BadFile(f"{path}: there is no such file") from None
        except (OSError, ValueError, KeyError) as error:
            raise BadFile(f"{path}: is no file of saved log-probabilities: {error}") from error
        if tokens.ndim != 1 or ids.shape != logprobs.shape or ids.shape[:1] != tokens.shape:
            raise BadFile(f"{path}: tokens, top_ids and top_logprobs do not belong together")
        return cls([int(t) for t in tokens], ids, logprobs)


@dataclass(frozen=True, slots=True)
class PerplexityReport:
    """`mean_kl` is in nats, of the base's distribution to ours; None without a base."""

    num_tokens: int
    perplexity: float
    mean_kl: float | None = None

    def to_text(self) -> str:
        text = f"perplexity {self.perplexity:.4f} over {self.num_tokens} tokens"
        return text if self.mean_kl is None else f"{text}, mean KL divergence {self.mean_kl:.3e}"


class Scores:
    """What is kept of the logits of one window as they come."""

    def __init__(self, tokens: list[int], base: Base | None, start: int, num_saved: int) -> None:
        self.tokens = np.array(tokens)
        self.base = base
        self.start = start
        self.num_saved = num_saved
        self.losses: list[float] = []
        self.divergences: list[float] = []
        self.top_ids: list[NDArray[np.int32]] = []
        self.top_logprobs: list[NDArray[np.float32]] = []

    def take(self, position: int, logits: NDArray[np.float32]) -> None:
        logprobs = log_softmax(logits)
        following = self.tokens[position + 1 : position + 1 + len(logits)]
        self.losses += (-logprobs[np.arange(len(following)), following]).tolist()
        if self.base is not None:
            first = self.start + position
            span = slice(first, first + len(logits))
            ids, base = self.base.top_ids[span], self.base.top_logprobs[span]
            self.divergences += divergence(base, logprobs, ids).tolist()
        if self.num_saved:
            top = np.argpartition(-logprobs, self.num_saved, axis=1)[:, : self.num_saved]
            order = np.argsort(-np.take_along_axis(logprobs, top, axis=1), axis=1, kind="stable")
            top = np.take_along_axis(top, order, axis=1)
            self.top_ids.append(top.astype(np.int32))
            self.top_logprobs.append(np.take_along_axis(logprobs, top, axis=1).astype(np.float32))


def log_softmax(logits: NDArray[np.float32]) -> Doubles:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    shifted: Doubles = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return shifted


def divergence(base: Doubles, logprobs: Doubles, ids: NDArray[np.int32]) -> Doubles:
    """KL of each row: sum of p (log p - log q) over `ids`, and over the rest as one class."""
    ours = np.take_along_axis(logprobs, ids, axis=1)
    rest_p, rest_q = (np.clip(1 - np.exp(v).sum(axis=1), 1e-9, 1) for v in (base, ours))
    kl: Doubles = (np.exp(base) * (base - ours)).sum(axis=1) + rest_p * np.log(rest_p / rest_q)
    return kl


def perplexity(
    model: Path,
    settings: Settings,
    *,
    text: Path | None = None,
    kl: Path | None = None,
    save: Path | None = None,
    role: Role = "prefill",
    backend: str = "cpu",
    progress: Progress | None = None,
) -> PerplexityReport:
    """Score the tokens of `text` (a file), or those of the base `kl` when there is no text.

    save  where this model's log-probabilities go, as a base for others
    """
    base = None if kl is None else Base.load(kl)
    with GgufFile.open(model) as file:
        tokens = tokens_of(file, text, base)
        options = LogitsOptions(backend, role)
        window = min(settings.context_length or DEFAULT_WINDOW, len(tokens))
        engine = open_for_rows(file, window, options, settings, progress)
        try:
            scores = []
            for start in range(0, len(tokens) - 1, window):
                part = tokens[start : start + window]
                scores.append(Scores(part, base, start, NUM_SAVED if save is not None else 0))
                observe(engine, part, scores[-1].take, options)
        finally:
            engine.close()
    if save is not None:
        save_base(save, tokens, scores)
    return report_of(scores)


def tokens_of(file: GgufFile, text: Path | None, base: Base | None) -> list[int]:
    """The ids to score. Raises BadRequest if text and base are not the same tokens."""
    if text is None:
        if base is None:
            raise BadRequest("perplexity needs a text or a base of saved log-probabilities")
        return base.tokens
    tokenizer = load_tokenizer(file.metadata)
    try:
        tokens = tokenizer.encode(text.read_bytes(), parse_special=False)
    except OSError as error:
        raise BadFile(f"{text}: cannot be read: {error.strerror}") from None
    if tokenizer.add_bos and tokenizer.bos_id is not None:
        tokens.insert(0, tokenizer.bos_id)
    if base is not None:
        if tokens[: len(base.tokens)] != base.tokens:
            raise BadRequest(f"{text} has other tokens than the base it is compared with")
        tokens = base.tokens
    if len(tokens) < 2:
        raise BadRequest(f"{text} is too short: a perplexity needs at least two tokens")
    return tokens


def save_base(path: Path, tokens: list[int], scores: list[Scores]) -> None:
    np.savez_compressed(
        path,
        tokens=np.array(tokens, np.int32),
        top_ids=np.concatenate([x for s in scores for x in s.top_ids]),
        top_logprobs=np.concatenate([x for s in scores for x in s.top_logprobs]),
    )


def report_of(scores: list[Scores]) -> PerplexityReport:
    losses = [x for s in scores for x in s.losses]
    divergences = [x for s in scores for x in s.divergences]
    return PerplexityReport(
        num_tokens=len(losses),
        perplexity=math.exp(math.fsum(losses) / len(losses)),
        mean_kl=math.fsum(divergences) / len(divergences) if divergences else None,
    )
