"""The seam between the engine and the arithmetic: `Backend`, and the arrays that cross it.

A *segment* is one sequence's share of a step: consecutive tokens of one role. Generated tokens (computed before or
now by sampling, also when they are computed again) go through the row path; prompt tokens through the panel path.
Generated segments come first in a batch, so tokens [0, num_generated) take the row path.

Not here: which sequence runs (engine), what a token means (text).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm.models.spec import KVGroup, ModelSpec

BLOCK_SIZE = 32  # positions of one KV block
TOP = 256  # sorted candidates that a step returns for each wanted row

Int32s = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(slots=True)
class Batch:
    """The work of one step.

    tokens           int32 [T]  token ids
    positions        int32 [T]  position of each token in its sequence
    segment_starts   int32 [S+1] segment s is tokens [starts[s], starts[s+1]); generated segments first
    context_lengths  int32 [S]  positions in the KV once this step has written: last position + 1
    block_tables     one per KV group: int32 [S, width]; entry p // BLOCK_SIZE is the block of position p;
                     entries of blocks that fell out of a window are any valid id and are never read
    num_generated    tokens of generated segments (the first ones)
    num_generated_segments
    rows             int32 [R] indices of the tokens whose logits are wanted, ascending (so generated ones first)
    edits            per wanted row that has any: changes to single logits before the selection
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


@dataclass(slots=True)
class Edits:
    """Changes to single logits of one row: x becomes (x / repeat if x > 0 else x * repeat) + add.

    ids int32 [E] distinct; repeat float32 [E] (1: none); add float32 [E] (bias minus presence and frequency)
    """

    ids: Int32s
    repeat: Floats
    add: Floats


@dataclass(slots=True)
class StepResult:
    """Logits of the wanted rows and what sampling needs of them. Views of the backend's memory, valid until the next step.

    logits      float32 [R, vocab]  as the model gave them, before edits
    raw_lse     float32 [R]         log of the sum of exp(logits)
    top_ids     int32   [R, TOP]    ids of the largest edited logits, descending, lower id first on ties;
    top_logits  float32 [R, TOP]    their edited values; entries past the vocabulary: id -1, value -inf
    lse         float32 [R]         log of the sum of exp(edited logits)
    """

    logits: Floats
    raw_lse: Floats
    top_ids: Int32s
    top_logits: Floats
    lse: Floats


class Backend(Protocol):
    """Runs steps of one model. Not thread-safe: the engine thread alone calls it once it is open.

    num_blocks    blocks in the pool of each KV group
    max_tokens    tokens a step may have (T); max_segments (S); max_rows (R)
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

    def close(self) -> None:
        """Give back threads and memory."""
