"""Records of the selection, and its results: the end of the program."""

import numpy as np

from kernels_cpu import select
from kernels_cpu.select import (
    GROUP,
    edit_logits,
    num_chunks,
    pick_top,
    restore_logits,
    scan_logits,
)
from localllm.backends import MAX_DRAFT_EDITS, TOP, Batch, StepResult
from localllm.backends.cpu.context import Context, zeros
from localllm.backends.cpu.memory import address_of
from localllm.backends.cpu.step import Slot

assert select.TOP == TOP


class Selection:
    """Scans and picks all wanted rows; then again those with edits, which it takes back."""

    def __init__(self, context: Context) -> None:
        self._context = context
        step, rows = context.step, context.options.max_rows
        stride = step.logits.shape[1]
        self._maxima = zeros((rows, stride // GROUP), np.float32)
        self._parts = zeros((rows, num_chunks(stride), 2), np.float32)
        self._edited_rows = np.zeros(rows, np.int32)
        self._edit_starts = np.zeros(rows + 1, np.int32)
        # Every sequence may change its whole row; memory is taken where it is written to.
        most = context.options.max_segments * (context.vocab_size + MAX_DRAFT_EDITS)
        self._ids = zeros((most,), np.int32)
        self._repeat, self._add, self._old = (zeros((most,), np.float32) for _ in range(3))
        self._record(num_chunks(stride))

    def _record(self, chunks: int) -> None:
        step, program = self._context.step, self._context.program
        logits = [address_of(step.logits), step.logits.shape[1]]
        results = [
            address_of(a) for a in (self._maxima, self._parts, step.top_ids, step.top_logits)
        ]
        rows, edits = self._context.slot(Slot.LOGITS), self._context.slot(Slot.EDITS)
        all_rows = [*logits, 0, *results, address_of(step.raw_lse), address_of(step.lse)]
        program.record(scan_logits, all_rows, count=rows, multiplier=chunks)
        program.record(pick_top, all_rows, count=rows)
        edited = address_of(self._edited_rows)
        lists = (self._edit_starts, self._ids, self._repeat, self._add, self._old)
        changes = [*logits, edited, *(address_of(a) for a in lists)]
        some_rows = [*logits, edited, *results, address_of(step.lse), 0]
        program.record(edit_logits, changes, count=edits)
        program.record(scan_logits, some_rows, count=edits, multiplier=chunks)
        program.record(pick_top, some_rows, count=edits)
        program.record(restore_logits, changes, count=edits)

    def load(self, batch: Batch) -> None:
        """Take over the batch's edits."""
        end = 0
        for item, (row, edits) in enumerate(batch.edits.items()):
            start, end = end, end + len(edits.ids)
            assert end <= len(self._ids)
            self._edited_rows[item] = row
            self._edit_starts[item + 1] = end
            self._ids[start:end] = edits.ids
            self._repeat[start:end] = edits.repeat
            self._add[start:end] = edits.add
        self._context.step.header[Slot.EDITS] = len(batch.edits)

    def result(self, num_rows: int) -> StepResult:
        step, n = self._context.step, num_rows
        logits = step.logits[:n, : self._context.vocab_size]
        return StepResult(
            logits, step.raw_lse[:n], step.top_ids[:n], step.top_logits[:n], step.lse[:n]
        )
