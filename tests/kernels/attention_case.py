"""Paged attention as a test sees it: random KV in shuffled blocks, a NumPy twin, kernel calls."""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kernels_cpu import Kernel
from kernels_cpu.attention import (
    BLOCK,
    argument_block,
    generated_work,
    partial_floats,
    prompt_work,
)
from kernels_cpu.attention_generated import GENERATED_KERNELS, merge_generated
from kernels_cpu.attention_prompt import PROMPT_KERNELS, PROMPT_TILE_KERNELS

Array = NDArray[np.generic]
Segment = tuple[int, int]  # first position, number of tokens


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return 2 * self.head_dim**-0.5


# Every feature, and head dimensions with and without a rest after vectors of 16 and of 64.
SHAPES = (
    Shape(9, 3, 64),
    Shape(4, 1, 256, window=512),
    Shape(7, 1, 80, window=100, softcap=5.0),
    Shape(4, 2, 40, softcap=5.0, has_sinks=True),
    Shape(8, 2, 8, has_sinks=True, window=3),
    Shape(2, 2, 16, softcap=30.0),
    Shape(2, 1, 128),
    Shape(1, 1, 96, window=33),
    Shape(5, 1, 112, has_sinks=True),
)


def pack_f16(values: Array) -> tuple[Array, Array]:
    """Parts in memory, uint8 [blocks, heads, bytes], and the values that they stand for."""
    halves = values.astype(np.float16)
    return halves.view(np.uint8).reshape(*values.shape[:2], -1), halves.astype(float)


def pack_q8_0(values: Array) -> tuple[Array, Array]:
    """The same in q8_0. What is not a number has scales that are none, and any codes."""
    dim = values.shape[-1]
    padded = np.pad(values, [(0, 0)] * 3 + [(0, -dim % 32)]).reshape(*values.shape[:3], -1, 32)
    scales = (np.abs(padded).max(-1, keepdims=True) / 127).astype(np.float16)
    codes = np.nan_to_num(np.rint(padded / scales.astype(float)), nan=-77).astype(np.int8)
    stored = (codes * scales.astype(float)).reshape(*values.shape[:3], -1)[..., :dim]
    codes = np.ascontiguousarray(codes.reshape(*values.shape[:3], -1)[..., :dim])
    pieces = [x.view(np.uint8).reshape(*values.shape[:2], -1) for x in (codes, scales)]
    return np.concatenate(pieces, axis=-1), stored


PACK = {"f16": pack_f16, "q8_0": pack_q8_0}


def addresses(*arrays: Array) -> list[int]:
    return [a.ctypes.data for a in arrays]


@cache
def function(kernel: Kernel) -> "ctypes._FuncPointer":
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(kernel.address)


class Case:
    """Segments of sequences with everything before them in the KV.

    What no token may see is not a number: blocks before a window, positions behind the last one,
    blocks of nobody.
    """

    def __init__(
        self, shape: Shape, segments: Sequence[Segment], seed: int = 0, kv: str = "f16"
    ) -> None:
        rng = np.random.default_rng(seed)
        self.shape, self.segments, self.kv = shape, segments, kv
        width = max(p + n for p, n in segments) // BLOCK + 1
        num_blocks = len(segments) * width + 1
        size = (num_blocks, shape.num_kv_heads, BLOCK, shape.head_dim)
        self.k, self.v = (np.full(size, np.nan) for _ in range(2))
        ids = rng.permutation(num_blocks - 1)[: len(segments) * width]
        self.tables = ids.reshape(len(segments), width).astype(np.int32)
        for (first, count), table in zip(segments, self.tables, strict=True):
            self._fill(rng, table, first, first + count)
        self.k_parts, self.k = PACK[kv](self.k)
        self.v_parts, self.v = PACK[kv](self.v)
        self.positions = np.concatenate([np.arange(p, p + n) for p, n in segments]).astype(np.int32)
        self.starts = np.cumsum([0, *(n for _, n in segments)]).astype(np.int32)
        width = shape.num_heads * shape.head_dim
        # Rows are longer than the heads, as in a padded buffer.
        self.q = rng.standard_normal((len(self.positions), width + 16)).astype(np.float32)
        self.sinks = (rng.standard_normal(shape.num_heads) + 2).astype(np.float32)

    def _fill(self, rng: np.random.Generator, table: Array, first: int, end: int) -> None:
        seen = 0 if self.shape.window is None else max(0, first - self.shape.window + 1)
        for i in range(len(table)):
            if (i + 1) * BLOCK <= seen or i * BLOCK >= end:
                table[i] = len(self.k) - 1
                continue
            count = min(BLOCK, end - i * BLOCK)
            for kv in (self.k, self.v):
                block = kv[table[i]]
                block[:, :count] = rng.standard_normal(block[:, :count].shape)

    def expected(self) -> Array:
        """float64 [T, num_heads * head_dim], plainly."""
        s = self.shape
        out = np.zeros((len(self.positions), s.num_heads, s.head_dim))
        for segment, table in enumerate(self.tables):
            keys, values = (
                kv[table].swapaxes(0, 1).reshape(s.num_kv_heads, -1, s.head_dim).astype(float)
                for kv in (self.k, self.v)
            )
            for t in range(self.starts[segment], self.starts[segment + 1]):
                p = self.positions[t]
                first = 0 if s.window is None else max(0, p - s.window + 1)
                for head in range(s.num_heads):
                    q = self.q[t, head * s.head_dim :][: s.head_dim].astype(float)
                    kv_head = head // s.group
                    scores = s.scale * (keys[kv_head, first : p + 1] @ q)
                    if s.softcap:
                        scores = s.softcap * np.tanh(scores / s.softcap)
                    sink = float(self.sinks[head]) if s.has_sinks else -np.inf
                    weights = np.exp(scores - max(scores.max(), sink))
                    total = weights.sum() + np.exp(sink - max(scores.max(), sink))
                    out[t, head] = weights @ values[kv_head, first : p + 1] / total
        return out.reshape(len(out), -1)

    def part(self, segment: int, first: int, end: int) -> "Case":
        """Tokens [first, end) of one segment as a step of their own."""
        other = object.__new__(Case)
        other.__dict__.update(self.__dict__)
        tokens = slice(self.starts[segment] + first, self.starts[segment] + end)
        other.tables = self.tables[segment : segment + 1].copy()
        other.positions = self.positions[tokens].copy()
        other.starts = np.array([0, end - first], np.int32)
        other.q = self.q[tokens].copy()
        return other

    def generated(self, max_partials: int = 1 << 20, *, reverse: bool = False) -> Array:
        """The result when all tokens are generated ones."""
        s = self.shape
        work, merges = generated_work(self.positions, self.starts, s.window, max_partials)
        floats = partial_floats(s.head_dim)
        partials = np.full((int(merges[:, 2].sum()), s.num_heads, floats), np.nan, np.float32)
        out = self._empty()
        block = self._block(out, generated=work, merges=merges, partials=partials)
        self._run(GENERATED_KERNELS[self.kv], block, len(work) * s.num_kv_heads, reverse=reverse)
        self._run(merge_generated, block, len(merges) * s.num_heads, reverse=reverse)
        return self._checked(out)

    def prompt(self, *, reverse: bool = False, on_tiles: bool = False) -> Array:
        """The result when all tokens are prompt tokens."""
        kernel = (PROMPT_TILE_KERNELS if on_tiles else PROMPT_KERNELS)[self.kv]
        work = prompt_work(self.positions, self.starts, 0, self.shape.group)
        out = self._empty()
        block = self._block(out, prompts=work)
        self._run(kernel, block, len(work) * self.shape.num_kv_heads, reverse=reverse)
        return self._checked(out)

    def _empty(self) -> Array:
        return np.full(self.q.shape, 77, np.float32)

    def _checked(self, out: Array) -> Array:
        width = self.shape.num_heads * self.shape.head_dim
        assert (out[:, width:] == 77).all(), "wrote behind the heads"
        return out[:, :width]

    def _block(self, out: Array, **work: Array) -> Array:
        s = self.shape
        lists = ("generated", "merges", "prompts", "partials")
        names = {name: work[name].ctypes.data if name in work else 0 for name in lists}
        q, k, v, positions, tables = addresses(
            self.q, self.k_parts, self.v_parts, self.positions, self.tables
        )
        return argument_block(
            q=q,
            q_stride=self.q.shape[1],
            out=out.ctypes.data,
            out_stride=out.shape[1],
            k=k,
            v=v,
            positions=positions,
            tables=tables,
            table_width=self.tables.shape[1],
            num_heads=s.num_heads,
            num_kv_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            scale=s.scale,
            window=s.window,
            softcap=s.softcap,
            sinks=self.sinks.ctypes.data if s.has_sinks else 0,
            **names,
        )

    @staticmethod
    def _run(kernel: Kernel, block: Array, count: int, *, reverse: bool) -> None:
        """All items in one call, or one by one from the last, each with scratch of its own."""
        ranges: Iterable[tuple[int, int]] = [(0, count)]
        if reverse:
            ranges = [(i, i + 1) for i in reversed(range(count))]
        for first, end in ranges:
            scratch = np.full((4 << 20) + 64, 0xFF, np.uint8)  # float32: not a number
            address = (scratch.ctypes.data + 63) & -64
            function(kernel)(block.ctypes.data, first, end, address)
