"""Selection against NumPy: log-sum-exp, the sorted top, edits."""

import ctypes

import numpy as np
import pytest
from levels import LEVELS, run_at

RUN = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)


class Rows:
    """Logits with the memory that the kernels need; `run` calls one of them."""

    def __init__(self, logits: np.ndarray) -> None:
        from kernels_cpu import select

        rows, vocab = logits.shape
        self.stride = -(-vocab // select.GROUP) * select.GROUP
        self.logits = np.full((rows, self.stride), -np.inf, np.float32)
        self.logits[:, :vocab] = logits
        self.chunks = select.num_chunks(self.stride)
        self.maxima = np.zeros((rows, self.stride // select.GROUP), np.float32)
        self.parts = np.zeros((rows, self.chunks, 2), np.float32)
        self.ids = np.zeros((rows, select.TOP), np.int32)
        self.values = np.zeros((rows, select.TOP), np.float32)
        self.lse = np.zeros(rows, np.float32)
        self.scratch = np.zeros(1 << 16, np.int64)

    def run(self, kernel: object, args: list[int], items: int, chunk: int) -> None:
        block = np.array(args, np.int64)
        code = RUN(kernel.address)  # type: ignore[attr-defined]
        for first in range(0, items, chunk):
            last = min(first + chunk, items)
            code(block.ctypes.data, first, last, self.scratch.ctypes.data)

    def select(self, rows: np.ndarray | None = None, chunk: int = 1 << 30) -> None:
        from kernels_cpu.select import pick_top, scan_logits

        count = len(self.logits) if rows is None else len(rows)
        arrays = (self.maxima, self.parts, self.ids, self.values, self.lse)
        args = [self.logits.ctypes.data, self.stride, 0 if rows is None else rows.ctypes.data]
        args += [*(a.ctypes.data for a in arrays), 0]
        self.run(scan_logits, args, count * self.chunks, chunk)
        self.run(pick_top, args, count, chunk)


def sample(rng: np.random.Generator, vocab: int) -> np.ndarray:
    logits = rng.standard_normal((4, vocab)).astype(np.float32) * 5
    logits[1] = np.round(logits[1])  # many ties, zeros of both signs
    logits[2] = 1.5
    logits[3, ::3] = -np.inf
    return logits


def compare(rows: Rows, logits: np.ndarray) -> None:
    for r, row in enumerate(logits):
        order = np.argsort(-row, kind="stable")[:256]
        order = order[row[order] > -np.inf]
        np.testing.assert_array_equal(rows.ids[r, : len(order)], order)
        np.testing.assert_array_equal(rows.values[r, : len(order)], row[order])
        assert (rows.ids[r, len(order) :] == -1).all()
        exact = np.log(np.exp(row.astype(np.float64)).sum())
        # Float32 sums of a few thousand terms in fixed lanes.
        assert abs(rows.lse[r] - exact) < 3e-6 * max(1.0, abs(exact))


def check_top_and_lse_equal_a_full_sort() -> None:
    rng = np.random.default_rng(0)
    for vocab in (50, 1000, 5000, 49152):
        logits = sample(rng, vocab)
        rows = Rows(logits)
        rows.select()
        compare(rows, logits)


def check_results_do_not_depend_on_how_items_are_dealt() -> None:
    logits = sample(np.random.default_rng(1), 9000)
    whole, pieces = Rows(logits), Rows(logits)
    whole.select()
    pieces.select(chunk=1)
    for name in ("ids", "values", "lse"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(pieces, name))


def check_edits_change_the_selection_and_are_taken_back() -> None:
    from kernels_cpu.select import edit_logits, restore_logits

    logits = sample(np.random.default_rng(2), 700)
    rows = Rows(logits)
    which = np.array([3, 0], np.int32)
    first = np.array([0, 2, 5], np.int32)
    ids = np.array([1, 2, 10, 699, 0], np.int32)
    repeat = np.array([2, 1, 1.3, 1, 1.5], np.float32)
    add = np.array([0, 50, -1, 30, 0.25], np.float32)
    old = np.zeros(5, np.float32)
    edited = logits.copy()
    for item, row in enumerate(which):
        for i in range(first[item], first[item + 1]):
            x = edited[row, ids[i]]
            edited[row, ids[i]] = (x / repeat[i] if x > 0 else x * repeat[i]) + add[i]
    arrays = (which, first, ids, repeat, add, old)
    args = [rows.logits.ctypes.data, rows.stride, *(a.ctypes.data for a in arrays)]
    rows.select()
    rows.run(edit_logits, args, 2, 1)
    rows.select(which)
    compare(rows, edited)
    rows.run(restore_logits, args, 2, 1)
    np.testing.assert_array_equal(rows.logits[:, :700], logits)


@pytest.mark.parametrize("level", LEVELS)
def test_selection_equals_numpy(level: str) -> None:
    run_at(level, __file__)
