"""Sampling under a mask: the chain of sampling.py over those tokens alone that a constraint allows.

The backend's sorted head is of all tokens. Where enough of it is allowed, the allowed part of the
head decides; else the whole row is masked and sorted anew. Both give what the chain would give if
the other tokens did not exist.

Not here: what is allowed (text/grammar.py).
"""

import math

import numpy as np
from numpy.typing import NDArray

from localllm.backends import TOP, StepResult
from localllm.errors import LocalLLMError
from localllm.sampling import Floats, Row, SamplingParams, largest

Mask = NDArray[np.uint32]
BITS = 32


class NothingAllowed(LocalLLMError):
    """A mask leaves no token at all."""


def masked(row: Row, mask: Mask, params: SamplingParams) -> Row:
    """The row as if only the tokens of `mask` existed.

    mask  uint32 [vocab / 32]: bit i % 32 of word i // 32 is token i; tokens beyond it are not allowed
    Raises NothingAllowed.
    """
    return _masked_head(row, mask, params) or _masked_whole(row, mask)


def _masked_head(row: Row, mask: Mask, params: SamplingParams) -> Row | None:
    """The allowed part of the head; None where it does not decide what is drawn."""
    wanted = 1 if params.temperature == 0 else params.top_k
    if wanted <= 0 or (params.mirostat and params.temperature != 0):
        return None
    ids, logits = row.result.top_ids[row.index], row.result.top_logits[row.index]
    known = np.clip(ids, 0, BITS * len(mask) - 1)
    bits = (mask[known // BITS] >> (known % BITS).astype(np.uint32)) & 1
    kept = (bits == 1) & (ids == known) & (logits > -math.inf)
    if np.count_nonzero(kept) < wanted:
        return None
    return _new_row(row, row.raw, ids[kept], logits[kept], row.lse)


def _masked_whole(row: Row, mask: Mask) -> Row:
    size = row.vocab_size
    allowed = np.zeros(size, bool)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]
    allowed[: len(bits)] = bits
    logits = np.where(allowed, row.whole(), np.float32(-math.inf))
    top = logits.max()
    if top == -math.inf:
        raise NothingAllowed("no token can continue the answer in the wanted format")
    ids, values = largest(logits, TOP)
    kept = np.exp(logits[allowed].astype(np.float64) - top)
    lse = float(top) + math.log(kept.sum())
    return _new_row(row, logits, np.array(ids[:TOP]), np.array(values[:TOP]), lse)


def _new_row(
    row: Row, logits: Floats, ids: NDArray[np.integer], values: NDArray[np.floating], lse: float
) -> Row:
    top_ids = np.full((1, TOP), -1, np.int32)
    top_logits = np.full((1, TOP), -math.inf, np.float32)
    top_ids[0, : len(ids)], top_logits[0, : len(ids)] = ids, values
    one = np.array([lse], np.float32)
    return Row(StepResult(logits[None], np.array([row.raw_lse]), top_ids, top_logits, one), 0)
