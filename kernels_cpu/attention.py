"""Attention over the paged KV: the argument block of its kernels, and the work lists of a step.

Three records make the attention of a layer; all take the same argument block:

    attend_generated  items: generated work entries * num_kv_heads
    merge_generated   items: merge entries * num_heads; follows attend_generated
    attend_prompt     items: prompt work entries * num_kv_heads; float32 products, or as
    attend_prompt_tiles   products of bfloat16 tiles, for levels with vectors of 16 lanes: twice as
                          fast where the processor multiplies bfloat16 (`kernel.has_bf16`)

K and V of a layer are [num_blocks][num_kv_heads] parts of BLOCK positions, whose element type
(kv.py) chooses among a record's kernels; head_dim is a multiple of 8. The positions of this step
are written before the first of these records. No kernel reads a table entry or a block of
positions that the window hides, and what lies behind a sequence's last position does not matter.

Work lists are int32 arrays that the backend makes once per step and KV group, whose layers see
the same positions (`generated_work`, `prompt_work`):

    generated  [n, 4]  token, segment, split, partial: positions [256 split, 256 split + 256) of
                       the token's context into entry `partial` of the partials;
                       partial -1: the whole context from that split on, straight into `out`
    merges     [m, 4]  token, first partial, number of partials, 0: add up consecutive partials
    prompts    [p, 4]  segment, first token, number of tokens (at most `prompt_tile`), 0

The arithmetic of a token is the same however its context is dealt out: a split is always computed
on its own, and the splits are added up in ascending order.
"""

import numpy as np
from numpy.typing import NDArray

from kernels_cpu.attention_math import LOG2E
from kernels_cpu.kv import BLOCK as BLOCK

Int32s = NDArray[np.int32]

SPLIT = 256  # positions of a split
KEYS = 64  # positions of a block of keys of a prompt item
PROMPT_ROWS = 128  # rows (tokens * query heads) of a prompt item, about

# Slots of the argument block (int64 each; float32 values in the low 32 bits).
Q = 0  # float32 [T, q_stride]: the rotated queries of all heads
Q_STRIDE = 1  # in elements
OUT = 2  # float32 [T, out_stride], num_heads * head_dim values of each row are overwritten
OUT_STRIDE = 3
K = 4  # the layer's K
V = 5  # the layer's V
POSITIONS = 6  # int32 [T]
TABLES = 7  # int32 [S, table_width]: block ids of the layer's KV group
TABLE_WIDTH = 8
GENERATED = 9  # generated work, int32 [n, 4]
MERGES = 10  # int32 [m, 4]
PROMPTS = 11  # int32 [p, 4]
PARTIALS = 12  # float32 [partials][num_heads][partial_floats]: from the first record to the second
NUM_KV_HEADS = 13
GROUP = 14  # query heads of a KV head
HEAD_DIM = 15
WINDOW = 16  # a query at p sees p - window + 1 .. p; 0: all
QUERY_FACTOR = 17  # float32: brings q.k to log2 units, or to what the soft cap takes
CAP = 18  # float32: soft cap in log2 units; 0: none
SINKS = 19  # float32 [num_heads], or 0
NUM_SLOTS = 20


def argument_block(
    *,
    q: int,
    q_stride: int,
    out: int,
    out_stride: int,
    k: int,
    v: int,
    positions: int,
    tables: int,
    table_width: int,
    generated: int,
    merges: int,
    prompts: int,
    partials: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: int = 0,
) -> NDArray[np.int64]:
    """The block of the three kernels; all but the numbers are addresses (see the slots)."""
    if head_dim % 8 or num_heads % num_kv_heads:
        raise ValueError(f"attention: head_dim {head_dim}, {num_heads} heads over {num_kv_heads}")
    factor = scale * LOG2E if softcap is None else scale * LOG2E * 2 / softcap
    cap = 0.0 if softcap is None else softcap * LOG2E
    block = np.zeros(NUM_SLOTS, np.int64)
    block[[Q, Q_STRIDE, OUT, OUT_STRIDE]] = q, q_stride, out, out_stride
    block[[K, V, POSITIONS, TABLES, TABLE_WIDTH]] = k, v, positions, tables, table_width
    block[[GENERATED, MERGES, PROMPTS, PARTIALS]] = generated, merges, prompts, partials
    block[[NUM_KV_HEADS, GROUP]] = num_kv_heads, num_heads // num_kv_heads
    block[[HEAD_DIM, WINDOW, SINKS]] = head_dim, window or 0, sinks
    block[[QUERY_FACTOR, CAP]] = np.array([factor, cap], np.float32).view(np.int32)
    return block


def partial_floats(head_dim: int) -> int:
    """float32 values of a head in a partial: maximum, sum, and from the 16th on the weighted V."""
    return 16 + head_dim


def prompt_tile(group: int) -> int:
    """Tokens of a prompt item."""
    return max(1, PROMPT_ROWS // group)


def generated_work(
    positions: Int32s, segment_starts: Int32s, window: int | None, max_partials: int
) -> tuple[Int32s, Int32s]:
    """Generated and merge work of the generated tokens.

    positions       int32 [D]  of the generated tokens alone
    segment_starts  int32 [S+1] of the generated segments alone
    Contexts are split, so that all items take about the same time; the shortest ones stay whole
    where there are not enough partials for all.
    """
    # Plain Python: most steps have few entries, and each call into NumPy takes a microsecond.
    starts, places = segment_starts.tolist(), positions.tolist()
    contexts = []
    for segment in range(len(starts) - 1):
        for token in range(starts[segment], starts[segment + 1]):
            first = max(0, places[token] - window + 1) // SPLIT if window else 0
            contexts.append((places[token] // SPLIT + 1 - first, token, segment, first))
    contexts.sort(key=lambda context: -context[0])
    work: list[tuple[int, int, int, int]] = []
    merges: list[tuple[int, int, int, int]] = []
    num_partials = 0
    for count, token, segment, first in contexts:
        if count == 1 or num_partials + count > max_partials:
            work.append((token, segment, first, -1))
            continue
        for i in range(count):
            work.append((token, segment, first + i, num_partials + i))
        merges.append((token, num_partials, count, 0))
        num_partials += count
    return as_work(work), as_work(merges)


def as_work(entries: list[tuple[int, int, int, int]]) -> Int32s:
    return np.array(entries, np.int32).reshape(-1, 4)


def prompt_work(positions: Int32s, segment_starts: Int32s, first: int, group: int) -> Int32s:
    """Prompt work of segments [first, S), longest contexts first.

    positions  int32 [T] and segment_starts int32 [S+1] of the whole step
    group      query heads of a KV head
    """
    tile = prompt_tile(group)
    starts = segment_starts.tolist()
    entries = [
        (segment, token, min(tile, starts[segment + 1] - token), 0)
        for segment in range(first, len(starts) - 1)
        for token in range(starts[segment], starts[segment + 1], tile)
    ]
    entries.sort(key=lambda entry: -positions[entry[1]])
    return as_work(entries)
