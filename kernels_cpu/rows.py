"""Row products: weights times the step's generated tokens, one kernel per weight type.

Items are ROWS_PER_ITEM rows each, the last one maybe fewer: `num_items(rows)` whatever the number
of tokens. A call packs the activations before it starts on its rows, and goes over them again for
every 16 tokens; so few calls with many items are best, one a thread. `read_bandwidth` takes the
same arguments and only reads the weights.
"""

import numpy as np

from kernels_cpu.kernel import Kernel
from kernels_cpu.rows_codebook import (
    row_product_iq4_nl,
    row_product_iq4_xs,
    row_product_mxfp4,
)
from kernels_cpu.rows_emitter import NUM_SLOTS, ROWS_PER_ITEM, Slot
from kernels_cpu.rows_float import row_product_bf16, row_product_f16, row_product_f32
from kernels_cpu.rows_k import (
    row_product_q2_k,
    row_product_q3_k,
    row_product_q4_k,
    row_product_q5_k,
    row_product_q6_k,
)
from kernels_cpu.rows_legacy import (
    row_product_q4_0,
    row_product_q4_1,
    row_product_q5_0,
    row_product_q5_1,
    row_product_q8_0,
)
from kernels_cpu.rows_read import read_bandwidth

__all__ = [
    "ROWS_PER_ITEM",
    "ROW_PRODUCTS",
    "Slot",
    "num_items",
    "read_bandwidth",
    "row_arguments",
]

ROW_PRODUCTS: dict[str, Kernel] = {
    "F32": row_product_f32,
    "F16": row_product_f16,
    "BF16": row_product_bf16,
    "Q4_0": row_product_q4_0,
    "Q4_1": row_product_q4_1,
    "Q5_0": row_product_q5_0,
    "Q5_1": row_product_q5_1,
    "Q8_0": row_product_q8_0,
    "Q2_K": row_product_q2_k,
    "Q3_K": row_product_q3_k,
    "Q4_K": row_product_q4_k,
    "Q5_K": row_product_q5_k,
    "Q6_K": row_product_q6_k,
    "IQ4_NL": row_product_iq4_nl,
    "IQ4_XS": row_product_iq4_xs,
    "MXFP4": row_product_mxfp4,
}


def num_items(rows: int) -> int:
    return int(-(-rows // ROWS_PER_ITEM))


def row_arguments(
    *,
    weights: int,
    row_bytes: int,
    rows: int,
    cols: int,
    count: int,
    x: tuple[int, int],
    x_scale: tuple[int, int] = (0, 0),
    x_sum: tuple[int, int] = (0, 0),
    out: tuple[int, int],
    bias: int = 0,
    residual: tuple[int, int] = (0, 0),
    scale: float = 1.0,
) -> np.ndarray:
    """int64 [NUM_SLOTS]: an argument block, see `Slot`. Pairs are (address, stride in elements)."""
    values = {
        Slot.WEIGHTS: weights,
        Slot.ROW_BYTES: row_bytes,
        Slot.ROWS: rows,
        Slot.COLS: cols,
        Slot.COUNT: count,
        Slot.X: x[0],
        Slot.X_STRIDE: x[1],
        Slot.X_SCALE: x_scale[0],
        Slot.X_SCALE_STRIDE: x_scale[1],
        Slot.X_SUM: x_sum[0],
        Slot.X_SUM_STRIDE: x_sum[1],
        Slot.OUT: out[0],
        Slot.OUT_STRIDE: out[1],
        Slot.BIAS: bias,
        Slot.RESIDUAL: residual[0],
        Slot.RESIDUAL_STRIDE: residual[1],
        Slot.SCALE: int(np.float32(scale).view(np.uint32)),
    }
    block = np.zeros(NUM_SLOTS, np.int64)
    for slot, value in values.items():
        block[slot] = value
    return block
