"""From logits to one token: the parameters, the ordered chain, the random numbers.

The order is llama.cpp's: penalties and logit bias (as edits to single logits, which the backend
applies before it selects), top-k, typical, top-p, min-p, temperature, draw. Mirostat takes the
place of everything after the penalties. Temperature 0 is greedy: the largest edited logit, the
lowest id on ties, and nothing else of the chain.

The chain works on the sorted head of the distribution that the backend returns; the whole row is
touched only when the head does not decide (top-k off and top-p not reached, typical or mirostat
over everything).

Random numbers are counter-based: one uniform for each emitted token, a function of (seed, index).

Not here: which texts stop an answer (text/), who asks (engine).
"""

import math
import os
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate
from operator import neg
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.backends import TOP, Edits, StepResult
from localllm.errors import BadRequest

MAX_LOGPROBS = 256
MIROSTAT_HEAD = 100  # candidates from which mirostat 1 estimates the slope, as in llama.cpp
MASK = (1 << 64) - 1

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an answer is drawn: Ollama's names and defaults. BadRequest names a value out of range.

    top_k             keep the k likeliest; 0 or less: off
    top_p, typical_p  1: off
    min_p             keep what has at least this share of the likeliest one's probability; 0: off
    repeat_penalty    divides positive and multiplies negative logits of window tokens; 1: off
    presence_penalty  subtracted from the logits of tokens in the window
    frequency_penalty subtracted once for each occurrence in the window
    repeat_last_n     the window: the last n tokens, those of the prompt included (as in llama.cpp);
                      0: off, -1: all
    seed              negative: a different one each time
    logit_bias        token id -> added to its logit
    mirostat          0 off, 1, 2; with mirostat_tau and mirostat_eta
    logprobs          None: none wanted, else how many alternatives go with each token's own
    num_predict       most new tokens; negative: until the context is full
    ignore_eog        go on when the model ends its turn
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.9
    min_p: float = 0.0
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = -1
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logprobs: int | None = None
    num_predict: int = -1
    ignore_eog: bool = False

    def __post_init__(self) -> None:
        for name in INTEGERS:
            check_integer(name, getattr(self, name))
        for name, (low, high) in RANGES.items():
            check_number(name, getattr(self, name), low, high)
        if self.repeat_penalty == 0:
            raise BadRequest("repeat_penalty must be greater than 0, got 0")
        if self.mirostat not in (0, 1, 2):
            raise BadRequest(f"mirostat must be 0, 1 or 2, got {self.mirostat}")
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs)
            check_number("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.logit_bias, Mapping):
            raise BadRequest(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            check_integer("logit_bias key", token)
            check_number(f"logit_bias[{token}]", bias, -math.inf, 1e6)

    @property
    def has_penalties(self) -> bool:
        return self.repeat_last_n != 0 and (
            self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        )

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "SamplingParams":
        """Parameters from those entries of `options` that are ours and not None."""
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in options.items() if k in known and v is not None})


INTEGERS = ("top_k", "repeat_last_n", "seed", "mirostat", "num_predict")
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e4),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repeat_penalty": (0.0, 1e4),
    "repeat_last_n": (-1, 2**31 - 1),
    "presence_penalty": (-1e4, 1e4),
    "frequency_penalty": (-1e4, 1e4),
    "mirostat_tau": (0.0, 1e4),
    "mirostat_eta": (0.0, 1e4),
}


def check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{name} must be an integer, got {value!r}")


def check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise BadRequest(f"{name} must be a number, got {value!r}")
    if not low <= value <= high:
        raise BadRequest(f"{name} must be between {low:g} and {high:g}, got {value!r}")


def mix(x: int) -> int:
    """The SplitMix64 finaliser: a bijection of 64-bit integers.

    Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014), with the
    constants of Stafford's Mix13.
    """
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(seed: int, index: int) -> float:
    """The `index`-th uniform number in [0, 1) of `seed`: 53 bits, no state."""
    stream = mix((seed + 0x9E3779B97F4A7C15) & MASK)
    return (mix((stream + (index + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11) * 2.0**-53


class Row:
    """One row of a step's result; nothing is copied before it is asked for."""

    __slots__ = ("edits", "index", "result")

    def __init__(self, result: StepResult, index: int, edits: Edits | None = None) -> None:
        self.result = result
        self.index = index
        self.edits = edits

    @property
    def raw(self) -> Floats:
        """float32 [vocab]: the logits as the model gave them."""
        row: Floats = self.result.logits[self.index]
        return row

    @property
    def raw_lse(self) -> float:
        return self.result.raw_lse.item(self.index)

    @property
    def lse(self) -> float:
        """Log of the sum of exp(edited logits); not finite if any of them is not a number."""
        return self.result.lse.item(self.index)

    @property
    def best(self) -> int:
        """The id of the largest edited logit."""
        return self.result.top_ids.item(self.index, 0)

    @property
    def vocab_size(self) -> int:
        size: int = self.result.logits.shape[1]
        return size

    def whole(self) -> Floats:
        """float32 [vocab]: the edited logits; a copy where there are edits."""
        return self.raw if self.edits is None else apply_edits(self.raw, self.edits)

    def head(self, size: int) -> tuple[list[int], list[float]]:
        """(ids, edited logits) of the `size` largest, or more: descending, lower id first on ties.

        Tokens at -inf are left out.
        """
        if size <= TOP:
            logits: list[float] = self.result.top_logits[self.index, :size].tolist()
            ids: list[int] = self.result.top_ids[self.index, :size].tolist()
        else:
            ids, logits = largest(self.whole(), size)
        while logits[-1] == -math.inf and len(logits) > 1:
            logits.pop()
        return ids[: len(logits)], logits


def largest(row: Floats, size: int) -> tuple[list[int], list[float]]:
    """(ids, values) of the `size` largest, or more on ties: descending, lower id first on ties."""
    size = min(size, len(row))
    bound = np.partition(row, len(row) - size)[len(row) - size]
    kept = np.flatnonzero(row >= bound)
    kept = kept[np.argsort(-row[kept], kind="stable")]
    return kept.tolist(), row[kept].tolist()


def apply_edits(raw: Floats, edits: Edits) -> Floats:
    """A copy of `raw` with the edits."""
    row = raw.copy()
    x = row[edits.ids]
    row[edits.ids] = np.where(x > 0, x / edits.repeat, x * edits.repeat) + edits.add
    return row


class Sampler:
    """Draws the tokens of one sequence; holds its penalty window and place in the random stream.

    Whatever else is served, the same prompt, parameters, seed and logits give the same tokens.
    """

    def __init__(self, params: SamplingParams, prompt: Iterable[int], vocab_size: int) -> None:
        self.params = params
        self.seed = params.seed if params.seed >= 0 else int.from_bytes(os.urandom(8), "little")
        self.num_drawn = 0
        self.mu = 2 * params.mirostat_tau
        self.window: deque[int] = deque()
        self.counts: dict[int, int] = {}
        self.bias = {int(t): float(b) for t, b in params.logit_bias.items()}
        for token in self.bias:
            if not 0 <= token < vocab_size:
                raise BadRequest(f"logit_bias: token {token} is not in the vocabulary")
        if params.has_penalties:
            for token in prompt:
                self.observe(token)

    def observe(self, token: int) -> None:
        """Take `token` into the penalty window."""
        self.window.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1
        last_n = self.params.repeat_last_n
        if 0 <= last_n < len(self.window):
            old = self.window.popleft()
            self.counts[old] -= 1
            if not self.counts[old]:
                del self.counts[old]

    def edits(self) -> Edits | None:
        """The changes to logits under which the next token is drawn."""
        if not self.counts and not self.bias:
            return None
        p = self.params
        ids = [*self.counts, *(t for t in self.bias if t not in self.counts)]
        repeat = [p.repeat_penalty] * len(self.counts) + [1.0] * (len(ids) - len(self.counts))
        bias, presence, frequency = self.bias, p.presence_penalty, p.frequency_penalty
        add = [bias.get(t, 0.0) - presence - n * frequency for t, n in self.counts.items()]
        add += [bias[t] for t in ids[len(self.counts) :]]
        return Edits(
            np.array(ids, np.int32), np.array(repeat, np.float32), np.array(add, np.float32)
        )

    @property
    def num_edits(self) -> int:
        """Most logits that the next draw's edits change."""
        return len(self.counts) + len(self.bias)

    def edits_ahead(self, tokens: Iterable[int]) -> list[Edits | None]:
        """The edits of the next draw, and of each one after `tokens` if those are drawn."""
        if not self.params.has_penalties:
            edits = self.edits()
            return [edits, *(edits for _ in tokens)]
        window, counts = self.window, self.counts
        self.window, self.counts = window.copy(), counts.copy()
        ahead = [self.edits()]
        for token in tokens:
            self.observe(token)
            ahead.append(self.edits())
        self.window, self.counts = window, counts
        return ahead

    def draw(self, row: Row) -> int:
        """The next token; advances the random stream and the window."""
        token = self._choose(row)
        self.num_drawn += 1
        if self.params.has_penalties:
            self.observe(token)
        return token

    def _choose(self, row: Row) -> int:
        p = self.params
        if p.temperature == 0:
            return row.best
        if p.mirostat:
            return self._mirostat(row)
        if p.typical_p < 1:
            ids, logits = typical(
                *row.head(p.top_k if p.top_k > 0 else row.vocab_size), p.typical_p
            )
            return self._nucleus(ids, logits)
        if 0 < p.top_k <= TOP:
            return self._nucleus(*row.head(p.top_k))
        return self._open(row)

    def _nucleus(self, ids: list[int], logits: list[float]) -> int:
        """Top-p, min-p, temperature and draw over candidates that are all there is."""
        kept = self._cut(logits, None)
        assert kept is not None
        return ids[self._pick([x / self.params.temperature for x in logits[:kept]])]

    def _open(self, row: Row) -> int:
        """The same where top-k is off or beyond the head: the head grows until it decides."""
        p, vocab = self.params, row.vocab_size
        limit = min(p.top_k, vocab) if p.top_k > 0 else vocab
        if limit == vocab and p.top_p == 1 and p.min_p == 0:
            return self._pick_from_all(row)
        if limit < vocab:
            ids, logits = row.head(limit)
            return self._nucleus(ids[:limit], logits[:limit])
        size = TOP
        while True:
            ids, logits = row.head(size)
            whole = size >= vocab
            kept = self._cut(logits, None if whole else math.exp(row.lse - logits[0]))
            if kept is not None:
                return ids[self._pick([x / p.temperature for x in logits[:kept]])]
            size = min(16 * size, vocab)

    def _cut(self, logits: list[float], total: float | None) -> int | None:
        """How many of the sorted candidates top-p and min-p leave; None: that lies beyond them.

        total   sum of exp(logit - largest) over all candidates; None: those given are all
        """
        p = self.params
        top, kept, decided = logits[0], len(logits), total is None
        if p.top_p < 1:
            sums = list(accumulate([math.exp(x - top) for x in logits]))
            reach = bisect_left(sums, p.top_p * (sums[-1] if total is None else total))
            if reach < len(logits):
                kept, decided = reach + 1, True
        if p.min_p > 0:
            strong = bisect_right(logits, -top - math.log(p.min_p), key=neg)
            if strong < len(logits):
                kept, decided = min(kept, strong), True
        return max(kept, 1) if decided else None

    def _pick(self, logits: list[float]) -> int:
        """Index drawn with the probabilities softmax(logits); the first is the largest."""
        top = max(logits)
        sums = list(accumulate([math.exp(x - top) for x in logits]))
        u = uniform(self.seed, self.num_drawn)
        return min(bisect_right(sums, u * sums[-1]), len(sums) - 1)

    def _pick_from_all(self, row: Row) -> int:
        """Draw from the whole distribution at the temperature; most draws end in the head."""
        t = self.params.temperature
        ids, logits = row.head(TOP)
        top = logits[0]
        if t == 1:
            total = math.exp(row.lse - top)
        else:
            total = float(
                np.exp((row.whole() - np.float32(top)) / np.float32(t)).sum(dtype=np.float64)
            )
        target = uniform(self.seed, self.num_drawn) * total
        sums = list(accumulate([math.exp((x - top) / t) for x in logits]))
        if target < sums[-1] or len(ids) >= row.vocab_size:
            return ids[min(bisect_right(sums, target), len(ids) - 1)]
        rest = np.exp((row.whole().astype(np.float64) - top) / t)
        rest[ids] = 0
        tail = np.cumsum(rest) + sums[-1]
        if tail[-1] == sums[-1]:
            return ids[-1]
        last = int(np.flatnonzero(rest)[-1])
        return min(int(np.searchsorted(tail, target, side="right")), last)

    def _mirostat(self, row: Row) -> int:
        """Temperature, then keep the surprise of the tokens near tau.

        Source: Basu et al., Mirostat (2020), algorithms 1 and 2, as llama.cpp runs them.
        """
        p = self.params
        scaled = row.whole().astype(np.float64) / p.temperature
        top = scaled.max()
        lse = float(top + math.log(np.exp(scaled - top).sum()))
        ids, logits = row.head(TOP)
        keep = self._mirostat_keep(logits, lse, row.vocab_size)
        if keep > len(logits) or keep == len(logits) < row.vocab_size:
            ids, logits = row.head(row.vocab_size)
            keep = self._mirostat_keep(logits, lse, row.vocab_size)
        kept = [x / p.temperature for x in logits[:keep]]
        chosen = self._pick(kept)
        surprise = (
            math.log(sum(math.exp(x - kept[0]) for x in kept)) + kept[0] - kept[chosen]
        ) / math.log(2)
        self.mu -= p.mirostat_eta * (surprise - p.mirostat_tau)
        return ids[chosen]

    def _mirostat_keep(self, logits: list[float], lse: float, vocab_size: int) -> int:
        """How many of the sorted candidates stay; len(logits) may mean: more than these."""
        t = self.params.temperature
        if self.params.mirostat == 2:
            surprises = [(lse - x / t) / math.log(2) for x in logits]
            return max(1, bisect_right(surprises, self.mu))
        pairs = range(min(MIROSTAT_HEAD, len(logits)) - 1)
        steps = [math.log((i + 2) / (i + 1)) for i in pairs]
        gaps = [(logits[i] - logits[i + 1]) / t for i in pairs]
        slope = sum(a * b for a, b in zip(steps, gaps)) / (sum(a * a for a in steps) or 1.0)
        epsilon = slope - 1
        spread = 1 - vocab_size**-epsilon
        if slope <= 0 or epsilon * spread <= 0:
            return len(logits)
        power = (math.log(epsilon / spread) + self.mu * math.log(2)) / slope
        return max(1, int(math.exp(min(power, 60.0))))


def typical(ids: list[int], logits: list[float], p: float) -> tuple[list[int], list[float]]:
    """The tokens whose surprise is nearest to the entropy, up to probability `p`, by logit again.

    Source: Meister et al., Locally typical sampling (2022).
    """
    x = np.array(logits)
    prob = np.exp(x - x[0])
    prob /= prob.sum()
    surprise = -np.log(np.maximum(prob, 1e-300))
    entropy = float((prob * surprise).sum())
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    count = int(np.searchsorted(np.cumsum(prob[order]), p, side="right")) + 1
    kept = np.sort(order[:count]).tolist()
    return [ids[i] for i in kept], [logits[i] for i in kept]


def top_logprobs(row: Row, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest (id, log-probability) before penalties and bias, descending."""
    if count == 0:
        return []
    if row.edits is not None:
        ids, logits = largest(row.raw, count)
    else:
        ids, logits = row.head(count)
    lse = row.raw_lse
    return [(i, x - lse) for i, x in zip(ids[:count], logits[:count])]
