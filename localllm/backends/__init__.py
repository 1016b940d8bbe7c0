"""The seam between the engine and the arithmetic: `Backend`, and the arrays that cross it.

A *segment* is one sequence's share of a step: consecutive tokens of one role. Generated tokens
(those that sampling gave, also when they are computed again) go through the row path, prompt
tokens through the panel path. Generated segments come first in a batch, so tokens
[0, num_generated) take the row path.

Not here: which sequence runs (engine), what a token means (text).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.models.spec import KVGroup, ModelSpec

BLOCK_SIZE = 32  # positions of one KV block
TOP = 256  # sorted candidates that a step returns for each wanted row
MAX_DRAFT_EDITS = 4096  # logits that Edits change in all rows of a sequence with guessed tokens

Int32s = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(slots=True)
class Batch:
    """The work of one step.

    tokens           int32 [T]  token ids
    positions        int32 [T]  position of each token in its sequence
    segment_starts   int32 [S+1] segment s is tokens [starts[s], starts[s+1])
    context_lengths  int32 [S]  positions in the KV once this step has written: last position + 1
    block_tables     one per KV group: int32 [S, width]; entry p // BLOCK_SIZE is the block of
                     position p; blocks that fell out of a window may have any id: never read
    num_generated    tokens of generated segments (the first ones)
    num_generated_segments
    rows             int32 [R] indices of the tokens whose results are wanted, ascending
    edits            per wanted row that has any: changes to single logits before the selection
    num_hidden       of the last rows, all of prompts, the hidden state is wanted and not the logits
    """

    tokens: Int32s
    positions: Int32s
    segment_starts: Int32s
    context_lengths: Int32s
    block_tables: Sequence[Int32s]
    num_generated: int
    num_generated_segments: int
    rows: Int32s
    edits: dict[int, "Edits"] = field(default_factory=dict)
    num_hidden: int = 0


@dataclass(slots=True)
class Edits:
    """Changes to single logits of one row: x becomes (x / repeat if x > 0 else x * repeat) + add.

    ids int32 [E] distinct; repeat float32 [E] (1: none); add float32 [E]: bias less penalties
    """

    ids: Int32s
    repeat: Floats
    add: Floats


@dataclass(slots=True)
class StepResult:
    """Logits of the wanted rows and what sampling needs of them; views, valid until the next step.

    R counts the rows whose logits are wanted, H those whose hidden state is.

    logits      float32 [R, vocab]  as the model gave them, before edits
    raw_lse     float32 [R]         log of the sum of exp(logits)
    top_ids     int32   [R, TOP]    ids of the largest edited logits, descending, lower id first
                                    on ties; past the vocabulary: -1
    top_logits  float32 [R, TOP]    their edited values; past the vocabulary: -inf
    lse         float32 [R]         log of the sum of exp(edited logits)
    hidden      float32 [H, n]      what the output norm gave
    """

    logits: Floats
    raw_lse: Floats
    top_ids: Int32s
    top_logits: Floats
    lse: Floats
    hidden: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Sizes and choices of a backend, made once per model.

    num_blocks     blocks in the pool of each KV group
    table_width    blocks of the longest sequence: the width of a block table
    max_tokens     T of a step; max_segments: S; max_rows: rows whose logits are wanted
    threads        None: the physical cores this process may use
    weights        "mapped", "resident" or "auto"
    kv_type        element type of K and V, a name in `kv.KV_TYPES`
    progress       called with (what, done, total) while kernels compile and weights are copied
    """

    num_blocks: tuple[int, ...]
    table_width: int
    max_tokens: int = 512
    max_segments: int = 64
    max_rows: int = 64
    threads: int | None = None
    weights: str = "auto"
    kv_type: str = "f16"
    progress: Callable[[str, int, int], None] | None = None


class Backend(Protocol):
    """Runs steps of one model. Not thread-safe: the engine thread alone calls it once it is open.

    num_blocks    blocks in the pool of each KV group
    max_tokens    tokens a step may have (T); max_segments (S); max_rows (with logits)
    kv_bytes_per_block  of each group, for reports
    """

    spec: ModelSpec
    kv_groups: tuple[KVGroup, ...]
    num_blocks: tuple[int, ...]
    kv_bytes_per_block: tuple[int, ...]
    max_tokens: int
    max_segments: int
    max_rows: int

    def step(self, batch: Batch) -> StepResult:
        """Run the forward pass and the selection; the GIL is free while it runs."""

    def copy_block(self, group: int, source: int, target: int, num_positions: int) -> None:
        """Copy the first positions of a block, in all layers of the group."""

    @property
    def position(self) -> tuple[int, int]:
        """(steps started, place within the running one): moves as long as work is done."""

    def close(self) -> None:
        """Give back threads and memory."""
