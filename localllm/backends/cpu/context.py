"""What recording needs to know: the program, the step's memory, where weights and KV lie."""

from dataclasses import dataclass, field

import numpy as np

from kernels_cpu.kernel import isa
from localllm.backends import BLOCK_SIZE, BackendOptions
from localllm.backends.cpu.buffers import Buffer, Pool, Quantised
from localllm.backends.cpu.memory import Bytes, Rows, Weights, address_of, allocate
from localllm.backends.cpu.program import Program
from localllm.backends.cpu.step import Slot, StepMemory, zeros
from localllm.backends.kv import KVType
from localllm.models.spec import KVGroup, ModelSpec, Vector, Weight

FLOAT_LANES = 16
TILE_TOKENS = 16
VALUES_PER_SCALE = 16
EXACT_TYPES = frozenset({"F32", "F16", "BF16"})
GROUP = 64  # int8 activations are padded to a multiple of it


__all__ = ["Context", "KVMemory", "padded", "zeros"]


def padded(width: int, unit: int) -> int:
    return -(-width // unit) * unit


class KVMemory:
    """K and V of one group, [layers][2][blocks][heads] parts (kernels_cpu/kv.py), committed lazily.

    pieces  the arrays that the parts consist of, uint8 [..., BLOCK_SIZE, bytes of a position]
    """

    def __init__(self, group: KVGroup, num_blocks: int, kv_type: KVType) -> None:
        self.block_bytes = kv_type.block_bytes(group)
        self._plane = self.block_bytes * num_blocks
        self._memory = allocate(2 * len(group.layers) * self._plane)
        shape = (len(group.layers), 2, num_blocks, group.num_kv_heads)
        parts = self._memory.reshape(*shape, -1)
        ends = np.cumsum(kv_type.pieces(group.head_dim)) * BLOCK_SIZE
        pieces = np.split(parts, ends[:-1], axis=-1)
        self.pieces = [piece.reshape(*shape, BLOCK_SIZE, -1) for piece in pieces]

    def key_address(self, layer: int) -> int:
        """Of block 0 of the group's `layer`-th layer."""
        return address_of(self._memory) + 2 * layer * self._plane

    def value_address(self, layer: int) -> int:
        return self.key_address(layer) + self._plane

    def copy_block(self, source: int, target: int, num_positions: int) -> None:
        for piece in self.pieces:
            piece[:, :, target, :, :num_positions] = piece[:, :, source, :, :num_positions]


@dataclass(slots=True)
class Context:
    """Passed to every call that records; see the modules that own its parts."""

    spec: ModelSpec
    options: BackendOptions
    program: Program
    step: StepMemory
    weights: Weights
    kv: list[KVMemory]
    pool: Pool = field(default_factory=Pool)
    vectors: dict[Vector, Bytes] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.spec.output.weight.rows

    @property
    def logits_address(self) -> int:
        return address_of(self.step.logits)

    def slot(self, slot: Slot) -> int:
        return self.step.slot(slot)

    def stride(self, width: int) -> int:
        """Floats from token to token of a float32 buffer."""
        return padded(width, FLOAT_LANES)

    @property
    def has_tiles(self) -> bool:
        """True where prompts are multiplied on AMX tiles: prompt activations are bfloat16 then."""
        level: str = isa()
        return level == "amx"

    def tiles_stride(self, width: int) -> int:
        """Bytes of 16 tokens."""
        return 2 * TILE_TOKENS * padded(width, GROUP)

    def take_tiles(self, width: int) -> Buffer:
        tokens = padded(self.options.max_tokens, 2 * TILE_TOKENS)
        return self.pool.take(tokens // TILE_TOKENS * self.tiles_stride(width))

    def take_real(self, width: int) -> Buffer:
        return self.pool.take(4 * self.stride(width) * self.options.max_tokens)

    def take_quantised(self, width: int) -> tuple[Quantised, Quantised]:
        """Row form (scales spread over lanes) and panel form."""
        values = padded(width, GROUP)
        sums = padded(values // VALUES_PER_SCALE, FLOAT_LANES)
        spread = values // GROUP * FLOAT_LANES
        return self._quantised(values, spread, sums), self._quantised(values, sums, sums)

    def _quantised(self, values: int, scales: int, sums: int) -> Quantised:
        n = self.options.max_tokens
        take = self.pool.take
        return Quantised(
            take(n * values), take(4 * n * scales), take(4 * n * sums), values, scales, sums
        )

    def placed(self, weight: Weight) -> Rows:
        """The rows of a weight in memory."""
        rows = self.weights.rows(weight.name)
        first = rows.address + weight.first_row * rows.row_bytes
        return Rows(first, rows.row_bytes, rows.type_name)

    def is_exact(self, weight: Weight) -> bool:
        """True where the product takes float32 activations."""
        return self.placed(weight).type_name in EXACT_TYPES

    def vector_address(self, vector: Vector | None) -> int:
        """Address of float32 values, 0 where there is no vector."""
        if vector is None:
            return 0
        if vector not in self.vectors:
            values = self.weights.tensors[vector.name].dequantize().reshape(-1)
            values = values[vector.first : vector.first + vector.size]
            copy = allocate(4 * padded(vector.size, FLOAT_LANES))
            copy.view(np.float32)[: vector.size] = values
            self.vectors[vector] = copy
        return address_of(self.vectors[vector])
