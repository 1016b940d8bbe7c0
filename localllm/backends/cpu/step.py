"""What changes from step to step: the header of counts, the batch's arrays, the results, all at fixed addresses.

The program reads everything here, so one recorded program serves every step.
"""

import math
from enum import IntEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kernels_cpu.select import GROUP
from localllm.backends import TOP, BackendOptions, Batch
from localllm.backends.cpu.memory import address_of, allocate


class Slot(IntEnum):
    """int64 slots of the step header."""

    TOKENS = 0
    GENERATED = 1  # tokens [0, GENERATED) take the row path
    PROMPT = 2  # the rest takes the panel path
    ROWS = 3  # tokens whose results are wanted, in the same order
    GENERATED_ROWS = 4
    PROMPT_ROWS = 5
    GENERATED_SEGMENTS = 6
    PROMPT_SEGMENTS = 7
    HAS_GENERATED = 8  # 0 or 1: multiplies a fixed number of items
    HAS_PROMPT = 9
    HAS_GENERATED_ROWS = 10
    HAS_PROMPT_ROWS = 11
    LOGITS = 12  # the first rows, whose logits are wanted
    HAS_PROMPT_LOGITS = 13
    ONE = 14
    PROMPT_TILES = 15  # of attention
    EDITS = 16


# What `StepMemory.load` counts: the first slots, in their order.
COUNTED = tuple(Slot)[: Slot.HAS_PROMPT_LOGITS + 1]

T = TypeVar("T", bound=np.generic)


def zeros(shape: tuple[int, ...], dtype: type[T]) -> NDArray[T]:
    """A zeroed array that is committed as it is touched."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return allocate(size).view(dtype).reshape(shape)


class StepMemory:
    """The step header and the batch's arrays; `load` fills them from a batch."""

    def __init__(self, num_groups: int, options: BackendOptions, vocab_size: int) -> None:
        t, s, r = options.max_tokens, options.max_segments, options.max_rows
        self.header = np.zeros(64, np.int64)
        self.header[Slot.ONE] = 1
        self.counting = np.arange(s, dtype=np.int32)
        self.tokens = np.zeros(t, np.int32)
        self.positions = np.zeros(t, np.int32)
        self.token_segment = np.zeros(t, np.int32)
        self.segment_starts = np.zeros(s + 1, np.int32)
        self.context_lengths = np.zeros(s, np.int32)
        self.tables = [np.zeros((s, options.table_width), np.int32) for _ in range(num_groups)]
        self.rows = np.zeros(t, np.int32)
        # Rows end in -inf: selection reads whole groups.
        self.logits = zeros((r, -(-vocab_size // GROUP) * GROUP), np.float32)
        self.logits[:, vocab_size:] = -np.inf
        self.top_ids = np.zeros((r, TOP), np.int32)
        self.top_logits = np.zeros((r, TOP), np.float32)
        self.raw_lse = np.zeros(r, np.float32)
        self.lse = np.zeros(r, np.float32)

    def slot(self, slot: Slot) -> int:
        """Address of a header slot."""
        return address_of(self.header) + 8 * slot

    def load(self, batch: Batch) -> None:
        # Plain decoding passes here every two milliseconds, with cold caches: few NumPy calls.
        num_tokens, num_segments = len(batch.tokens), len(batch.context_lengths)
        num_rows, generated = len(batch.rows), batch.num_generated
        prompt = num_tokens - generated
        generated_rows = num_rows if not prompt else int(np.searchsorted(batch.rows, generated))
        prompt_rows = num_rows - generated_rows
        num_logits = num_rows - batch.num_hidden
        self.tokens[:num_tokens] = batch.tokens
        self.positions[:num_tokens] = batch.positions
        self.segment_starts[: num_segments + 1] = batch.segment_starts
        self.context_lengths[:num_segments] = batch.context_lengths
        segments = self.counting[:num_segments]
        if num_segments < num_tokens:
            segments = np.repeat(segments, np.diff(batch.segment_starts))
        self.token_segment[:num_tokens] = segments
        for mine, table in zip(self.tables, batch.block_tables, strict=True):
            mine[:num_segments, : table.shape[1]] = table
        self.rows[:num_rows] = batch.rows
        self.header[: len(COUNTED)] = (
            *(num_tokens, generated, prompt, num_rows, generated_rows, prompt_rows),
            *(batch.num_generated_segments, num_segments - batch.num_generated_segments),
            *(generated > 0, prompt > 0, generated_rows > 0, prompt_rows > 0),
            *(num_logits, num_logits > generated_rows),
        )
