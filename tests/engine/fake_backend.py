"""A toy backend whose logits are a hash of everything that its block tables let it see.

It keeps (token, position, role) of each position in the blocks themselves, and refuses to read a
position that is not what the tables promise. So a wrong table, a block freed too early, a token
computed in the wrong role or a copy of too few positions changes the text or raises.
"""

from dataclasses import dataclass, field

import numpy as np

from localllm.backends import BLOCK_SIZE, TOP, Batch, StepResult
from localllm.models.spec import KVGroup

HIDDEN = 5  # width of the hidden states
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class FakeSpec:
    vocab_size: int = 300
    context_length: int = 4096


@dataclass
class FakeBackend:
    """`windows` has one entry per KV group; `num_blocks` is the size of each group's pool."""

    windows: tuple[int | None, ...] = (None,)
    blocks: int = 64
    max_tokens: int = 512
    max_segments: int = 32
    max_rows: int = 64
    spec: FakeSpec = field(default_factory=FakeSpec)
    fail_at: int | None = None
    num_steps: int = 0
    num_copies: int = 0
    sizes: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kv_groups = tuple(KVGroup((g,), 1, 1, w) for g, w in enumerate(self.windows))
        self.num_blocks = (self.blocks,) * len(self.windows)
        self.kv_bytes_per_block = (1,) * len(self.windows)
        self.kv = np.full((len(self.windows), self.blocks, BLOCK_SIZE, 3), -1, np.int64)
        self.is_closed = False

    def step(self, batch: Batch) -> StepResult:
        self.num_steps += 1
        if self.num_steps == self.fail_at:
            raise RuntimeError("the toy broke")
        self.sizes.append((batch.num_generated, len(batch.tokens) - batch.num_generated))
        assert len(batch.tokens) <= self.max_tokens
        num_logits = len(batch.rows) - batch.num_hidden
        assert 0 <= num_logits <= self.max_rows
        assert list(batch.rows) == sorted(set(batch.rows.tolist()))
        states = np.zeros(len(batch.tokens), np.uint64)
        for s in range(len(batch.context_lengths)):
            self._run_segment(batch, s, states)
        logits = (
            np.stack([self._logits(states[r]) for r in batch.rows[:num_logits]])
            if num_logits
            else (np.zeros((0, self.spec.vocab_size), np.float32))
        )
        result = select(logits, batch)
        if batch.num_hidden:
            wanted = batch.rows[num_logits:]
            assert min(wanted) >= batch.num_generated
            result.hidden = np.stack([self._logits(states[r])[:HIDDEN] for r in wanted])
        return result

    def _run_segment(self, batch: Batch, s: int, states: np.ndarray) -> None:
        start, end = batch.segment_starts[s], batch.segment_starts[s + 1]
        assert (start < batch.num_generated) == (s < batch.num_generated_segments)
        assert batch.positions[end - 1] + 1 == batch.context_lengths[s]
        role = int(s < batch.num_generated_segments)
        for g, window in enumerate(self.windows):
            table = batch.block_tables[g][s]
            for t in range(start, end):
                p = int(batch.positions[t])
                block = table[p // BLOCK_SIZE]
                self.kv[g, block, p % BLOCK_SIZE] = (batch.tokens[t], p, role)
            for t in range(start, end):
                p = int(batch.positions[t])
                first = 0 if window is None else max(0, p - window + 1)
                seen = np.arange(first, p + 1)
                content = self.kv[g, table[seen // BLOCK_SIZE], seen % BLOCK_SIZE]
                assert (content[:, 1] == seen).all(), "a table points at another's positions"
                states[t : t + 1] += digest(content) + np.full(1, g, np.uint64)

    def _logits(self, state: np.uint64) -> np.ndarray:
        values = scramble(state + GOLDEN * np.arange(1, self.spec.vocab_size + 1, dtype=np.uint64))
        return ((values >> np.uint64(40)).astype(np.float32) / 2**20 - 8).astype(np.float32)

    def copy_block(self, group: int, source: int, target: int, num_positions: int) -> None:
        self.num_copies += 1
        self.kv[group, target] = -1
        self.kv[group, target, :num_positions] = self.kv[group, source, :num_positions]

    def close(self) -> None:
        self.is_closed = True


def scramble(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def digest(content: np.ndarray) -> np.uint64:
    """A number that depends on every token, position and role."""
    parts = content.astype(np.uint64)
    return scramble(scramble(parts[:, 0] * GOLDEN + parts[:, 1]) + parts[:, 2] * np.uint64(7)).sum(
        dtype=np.uint64
    )


def select(logits: np.ndarray, batch: Batch) -> StepResult:
    """What a backend's last operation does, the slow way."""
    edited = logits.copy()
    for row, edits in batch.edits.items():
        x = edited[row, edits.ids]
        edited[row, edits.ids] = np.where(x > 0, x / edits.repeat, x * edits.repeat) + edits.add
    order = np.argsort(-edited, axis=1, kind="stable")[:, :TOP].astype(np.int32)
    top = np.take_along_axis(edited, order, axis=1)
    return StepResult(
        logits=logits,
        raw_lse=log_sum_exp(logits),
        top_ids=order,
        top_logits=top,
        lse=log_sum_exp(edited),
    )


def log_sum_exp(x: np.ndarray) -> np.ndarray:
    top = x.max(axis=1, initial=-np.inf)
    return (top + np.log(np.exp((x - top[:, None]).astype(np.float64)).sum(axis=1))).astype(
        np.float32
    )
