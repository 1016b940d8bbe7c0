"""Records around attention: rotation angles of a step, and what happens to each head before it attends."""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels_cpu.norms import LAYER, RMS
from kernels_cpu.rotary import NEOX, NO_NORM, NORM, PLACE_KERNELS, rope_angles
from localllm.backends import Batch
from localllm.backends.cpu.context import Context, padded, zeros
from localllm.backends.cpu.memory import address_of
from localllm.backends.cpu.program import float_bits
from localllm.backends.cpu.step import Slot
from localllm.models.spec import AttentionSpec, Norm, Rope

ANGLE_LANES = 8


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines of a step's positions, float32 [max_tokens][stride], and what they are of."""

    frequencies: NDArray[np.float64]
    cosines: NDArray[np.generic]
    sines: NDArray[np.generic]
    stride: int


@dataclass(frozen=True, slots=True)
class Temperature:
    """A factor per token, 1 + beta * log(1 + floor(position / length)); filled at every step."""

    beta: float
    length: int
    factors: NDArray[np.float32]

    def fill(self, batch: Batch) -> None:
        steps = np.log1p(batch.positions // self.length)
        self.factors[: len(batch.positions)] = 1.0 + self.beta * steps


class Heads:
    """Records what happens to heads before they attend; fills the temperatures at every step."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._angles: dict[Rope, Angles] = {}
        self._temperatures: dict[tuple[float, int], Temperature] = {}

    def fill(self, batch: Batch) -> None:
        for temperature in self._temperatures.values():
            temperature.fill(batch)

    def place(self, q: int, k: int, v: int, layer: int, attention: AttentionSpec) -> None:
        """Norms and rope of all heads in place; keys and values into their blocks."""
        context, a = self._context, attention
        group, index = context.spec.group_of(layer)
        kv, step, kv_stride = context.kv[group], context.step, context.stride(a.kv_width)
        args = [
            *(q, context.stride(a.q_width), k, kv_stride, v, kv_stride),
            *(a.num_heads, a.num_kv_heads, a.head_dim),
            *self._rope_slots(a.rope),
            *(self._factors(a.temperature), int(a.norm_after_rope)),
            *norm_slots(context, a.q_norm, a.head_dim),
            *norm_slots(context, a.k_norm, a.head_dim),
            *(address_of(x) for x in (step.positions, step.token_segment, step.tables[group])),
            *(context.options.table_width, kv.key_address(index), kv.value_address(index)),
        ]
        kv_type = context.options.kv_type
        heads = a.num_heads + 2 * a.num_kv_heads
        count = context.slot(Slot.TOKENS)
        context.program.record(PLACE_KERNELS[kv_type], args, count=count, multiplier=heads)

    def _factors(self, temperature: tuple[float, int] | None) -> int:
        if temperature is None:
            return 0
        if temperature not in self._temperatures:
            factors = np.ones(self._context.options.max_tokens, np.float32)
            self._temperatures[temperature] = Temperature(*temperature, factors)
        return address_of(self._temperatures[temperature].factors)

    def _rope_slots(self, rope: Rope | None) -> tuple[int, ...]:
        if rope is None:
            return (0,) * 5
        if rope not in self._angles:
            self._angles[rope] = self._record_angles(rope)
        angles = self._angles[rope]
        kind = NEOX if rope.kind == "neox" else NORM
        cosines, sines = address_of(angles.cosines), address_of(angles.sines)
        return cosines, sines, angles.stride, kind, len(rope.frequencies)

    def _record_angles(self, rope: Rope) -> Angles:
        """The table that a rope's layers share; its record comes with the first of them."""
        context, pairs = self._context, len(rope.frequencies)
        stride = padded(pairs, ANGLE_LANES)
        shape = context.options.max_tokens, stride
        frequencies = np.zeros(stride)
        frequencies[:pairs] = rope.frequencies
        cosines, sines = zeros(shape, np.float32), zeros(shape, np.float32)
        args = [
            address_of(context.step.positions),
            pairs,
            address_of(frequencies),
            struct.unpack("<q", struct.pack("<d", rope.magnitude))[0],
            address_of(cosines),
            address_of(sines),
            stride,
        ]
        context.program.record(rope_angles, args, count=context.slot(Slot.TOKENS))
        return Angles(frequencies, cosines, sines, stride)


def norm_slots(context: Context, norm: Norm | None, head_dim: int) -> tuple[int, ...]:
    if norm is None:
        return (NO_NORM, 0, 0, 0, 0)
    apart = 0 if norm.weight is None or norm.weight.size == head_dim else head_dim
    kind = RMS if norm.kind == "rms" else LAYER
    weight, bias = (context.vector_address(x) for x in (norm.weight, norm.bias))
    return kind, weight, bias, float_bits(norm.eps), apart
