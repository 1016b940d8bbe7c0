"""Records of attention, and the work lists that each step fills for them."""

import numpy as np

from kernels_cpu.attention import (
    argument_block,
    generated_work,
    partial_floats,
    prompt_tile,
    prompt_work,
)
from kernels_cpu.attention_generated import GENERATED_KERNELS, merge_generated
from kernels_cpu.attention_prompt import PROMPT_KERNELS, PROMPT_TILE_KERNELS
from kernels_cpu.kernel import has_bf16
from localllm.backends import Batch
from localllm.backends.cpu.context import Context, zeros
from localllm.backends.cpu.memory import address_of
from localllm.backends.cpu.program import CLAIM
from localllm.models.spec import AttentionSpec

MAX_PARTIALS = 512
COLUMNS = 4


class Work:
    """Work lists of the layers that share a KV group and a number of query heads, at fixed addresses.

    counts  int64: generated entries, merges, prompt entries of this step
    """

    def __init__(self, attention: AttentionSpec, max_entries: int) -> None:
        self.window = attention.window
        self.num_heads = attention.num_heads
        self.num_kv_heads = attention.num_kv_heads
        self.counts = np.zeros(3, np.int64)
        self.generated = np.zeros((max_entries + MAX_PARTIALS, COLUMNS), np.int32)
        self.merges = np.zeros((max_entries, COLUMNS), np.int32)
        self.prompts = np.zeros((max_entries, COLUMNS), np.int32)
        floats = partial_floats(attention.head_dim)
        self.partials = zeros((MAX_PARTIALS, self.num_heads, floats), np.float32)

    def fill(self, batch: Batch) -> None:
        segments, tokens = batch.num_generated_segments, batch.num_generated
        self.counts[:] = 0
        if tokens:
            work, merges = generated_work(
                batch.positions[:tokens],
                batch.segment_starts[: segments + 1],
                self.window,
                MAX_PARTIALS,
            )
            self.generated[: len(work)] = work
            self.merges[: len(merges)] = merges
            self.counts[:2] = len(work), len(merges)
        if len(batch.tokens) > tokens:
            tiles = prompt_work(
                batch.positions,
                batch.segment_starts,
                segments,
                self.num_heads // self.num_kv_heads,
            )
            self.prompts[: len(tiles)] = tiles
            self.counts[2] = len(tiles)


class Attending:
    """Records the attention of all layers, and fills their work lists at every step."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._work: dict[tuple[int, int], Work] = {}

    def fill(self, batch: Batch) -> None:
        for work in self._work.values():
            work.fill(batch)

    def work_of(self, layer: int, attention: AttentionSpec) -> Work:
        """The work lists that serve this layer; layers that see the same positions share them."""
        group, _ = self._context.spec.group_of(layer)
        key = group, attention.num_heads
        if key not in self._work:
            options = self._context.options
            tile = prompt_tile(attention.num_heads // attention.num_kv_heads)
            entries = options.max_tokens // tile + options.max_segments + options.max_tokens
            self._work[key] = Work(attention, entries)
        return self._work[key]

    def attend(self, q: int, out: int, layer: int, attention: AttentionSpec) -> None:
        """Three records: generated tokens, the sums of their splits, prompt tokens."""
        work = self.work_of(layer, attention)
        args = self._arguments(q, out, layer, attention, work)
        counts = address_of(work.counts)
        record = self._context.program.record
        heads, kv_heads = attention.num_heads, attention.num_kv_heads
        kv_type = self._context.options.kv_type
        record(GENERATED_KERNELS[kv_type], args, count=counts, multiplier=kv_heads)
        record(merge_generated, args, count=counts + 8, multiplier=heads)
        # What int8 activations have gone through loses nothing to speak of by bfloat16.
        exact = self._context.is_exact(self._context.spec.layers[layer].q.weight)
        kernels = PROMPT_TILE_KERNELS if has_bf16() and not exact else PROMPT_KERNELS
        record(kernels[kv_type], args, count=counts + 16, multiplier=kv_heads, flags=CLAIM)

    def _arguments(
        self, q: int, out: int, layer: int, attention: AttentionSpec, work: Work
    ) -> list[int]:
        context = self._context
        group, index = context.spec.group_of(layer)
        kv, step = context.kv[group], context.step
        stride = context.stride(attention.q_width)
        slots: list[int] = argument_block(
            q=q,
            q_stride=stride,
            out=out,
            out_stride=stride,
            k=kv.key_address(index),
            v=kv.value_address(index),
            positions=address_of(step.positions),
            tables=address_of(step.tables[group]),
            table_width=context.options.table_width,
            generated=address_of(work.generated),
            merges=address_of(work.merges),
            prompts=address_of(work.prompts),
            partials=address_of(work.partials),
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            scale=attention.scale,
            window=attention.window,
            softcap=attention.softcap,
            sinks=context.vector_address(attention.sinks),
        ).tolist()
        return slots
