"""A scheduler's step as the arrays that a backend reads, in memory that every step uses again."""

from array import array

import numpy as np

from localllm.backends import BLOCK_SIZE, Backend, Batch, Edits, Int32s
from localllm.engine.scheduler import Step


class BatchBuilder:
    """Fills one set of arrays; a batch is valid until the next one is built.

    max_length  most positions of a sequence, which bounds the block tables
    """

    def __init__(self, backend: Backend, max_length: int) -> None:
        width = -(-max_length // BLOCK_SIZE) + 1
        self.counting = np.arange(max(max_length, backend.max_tokens) + 1, dtype=np.int32)
        self.tokens = np.zeros(backend.max_tokens, np.int32)
        self.positions = np.zeros(backend.max_tokens, np.int32)
        self.starts = np.zeros(backend.max_segments + 1, np.int32)
        self.lengths = np.zeros(backend.max_segments, np.int32)
        self.rows = np.zeros(backend.max_tokens, np.int32)
        self.tables = [np.zeros((backend.max_segments, width), np.int32) for _ in backend.kv_groups]
        # What each row of the tables was last filled with: the table object and how much of it.
        self.filled: list[tuple[object, int]] = [(None, 0)] * backend.max_segments

    def build(self, step: Step, edits: dict[int, Edits]) -> Batch:
        starts, lengths = [0], []
        rows: list[int] = []
        width = 1
        for i, segment in enumerate(step):
            sequence, first, count = segment.sequence, segment.first, segment.count
            start, end = starts[-1], starts[-1] + count
            if count == 1:
                self.tokens[start] = sequence.tokens[first]
                self.positions[start] = first
            else:
                self.tokens[start:end] = sequence.tokens[first : first + count] + segment.drafts
                self.positions[start:end] = self.counting[first : first + count]
            starts.append(end)
            lengths.append(first + count)
            rows.extend(range(end - segment.num_rows, end))
            width = max(width, self._fill_tables(i, sequence.tables))
        num_segments, num_tokens, num_rows = len(lengths), starts[-1], len(rows)
        self.starts[: num_segments + 1] = starts
        self.lengths[:num_segments] = lengths
        self.rows[:num_rows] = rows
        return Batch(
            tokens=self.tokens[:num_tokens],
            positions=self.positions[:num_tokens],
            segment_starts=self.starts[: num_segments + 1],
            context_lengths=self.lengths[:num_segments],
            block_tables=[table[:num_segments, :width] for table in self.tables],
            num_generated=step.num_generated,
            num_generated_segments=len(step.generated),
            rows=self.rows[:num_rows],
            edits=edits,
            num_hidden=sum(segment.num_rows for segment in step.pooled),
        )

    def _fill_tables(self, row: int, tables: "list[array[int]]") -> int:
        """Copy what is new of a sequence's block tables; their length."""
        table, length = self.filled[row]
        known = length if table is tables[0] else 0
        length = len(tables[0])
        if known < length:
            for target, source in zip(self.tables, tables):
                fresh: Int32s = np.frombuffer(source, np.int32)[known:]
                target[row, known:length] = fresh
            self.filled[row] = (tables[0], length)
        return length
