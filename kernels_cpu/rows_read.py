"""Reading the bytes that a row product reads, and nothing else: the mark for its speed."""

from kernels_cpu.kernel import kernel
from kernels_cpu.rows_emitter import LANES, PREFETCH_BYTES, ROWS_PER_ITEM, Slot
from kernels_cpu.simd import Ir, Value, emits, i32, i64, vec

STEP = 512
words = vec(i32, LANES)


@emits(4)
def read_rows(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    """Eight loads of 64 bytes a turn, each with its own sum so that none waits for another."""
    b = e.b
    row_bytes = e.load(e.at(args, 8 * Slot.ROW_BYTES), i64, align=8)
    rows = e.load(e.at(args, 8 * Slot.ROWS), i64, align=8)
    start = e.mul(e.mul(first, ROWS_PER_ITEM), row_bytes)
    end = e.mul(last, ROWS_PER_ITEM)
    end = e.mul(b.select(b.icmp_signed("<", end, rows), end, rows), row_bytes)
    weights = e.at(e.load(e.at(args, 8 * Slot.WEIGHTS), i64, align=8), start)
    sums = [e.variable(e.const(0, words)) for _ in range(STEP // 64)]
    with e.loop(b.lshr(b.sub(end, start), e.const(STEP.bit_length() - 1))) as l:
        at = e.at(weights, e.mul(l.index, STEP))
        for k, total in enumerate(sums):
            e.prefetch(e.at(at, PREFETCH_BYTES + 64 * k))
            e.set(total, b.xor(e.get(total), e.load(e.at(at, 64 * k), words)))
    for k, total in enumerate(sums):
        e.store(e.get(total), e.at(scratch, 64 * k), 64)


@kernel
def read_bandwidth(args: int, first: int, last: int, scratch: int) -> None:
    """Arguments and items as of a row product; uses the first three of rows_emitter.Slot."""
    read_rows(args, first, last, scratch)
