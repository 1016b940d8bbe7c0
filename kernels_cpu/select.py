"""Selection: of each row of logits, log-sum-exp and the largest TOP values, without sorting the vocabulary.

    cap_logits     items: rows * chunks(stride); x becomes cap * tanh(x / cap)
    scan_logits    items: rows * chunks(stride); the maximum of each GROUP values, maximum and sum of each CHUNK
    pick_top       items: rows; reads what scan_logits wrote
    edit_logits    items: edited rows; changes single logits and remembers the old ones
    restore_logits items: edited rows; puts them back

A program scans and picks all rows, then edits, scans and picks the rows that have edits, and restores them.

At least TOP values are as large as the TOP-th largest group maximum, so only values above that threshold have to be
sorted. Chunks and lanes are fixed, so results do not depend on how items are dealt out.

Rows of logits are `stride` floats apart, a multiple of GROUP; what follows the vocabulary holds -inf.

Argument block of cap_logits:
    0  logits    1  stride    2  vocabulary    3  float32 bits of the cap

Argument block of scan_logits and pick_top (int64 slots):
    0  logits, float32 [rows][stride]            1  stride, in floats
    2  int32 [items] row of each item, or 0: item i is row i
    3  float32 [rows][stride / GROUP], group maxima
    4  float32 [rows][chunks][2], maximum and sum of exp(x - maximum) of each chunk
    5  top ids, int32 [rows][TOP]                6  top values, float32 [rows][TOP]
    7  log-sum-exp, float32 [rows]               8  the same once more, or 0

Argument block of edit_logits and restore_logits:
    0  logits    1  stride    2  int32 [items] row of each item
    3  int32 [items + 1] first edit of each item
    4  int32 [edits] ids     5  float32 [edits] repeat     6  float32 [edits] add     7  float32 [edits] old values
"""

import math

from numba import njit, types

from kernels_cpu.attention_math import LOG2E, exp2
from kernels_cpu.kernel import kernel
from kernels_cpu.simd import Ir, Value, emits, f32, i32, i64, slot, vec
from kernels_cpu.threads import quotient
from kernels_cpu.vector_math import floats, for_lanes, put_floats, tanh

TOP = 256
GROUP = 64
CHUNK = 4096
LANES = 16
LOWEST_KEY = -(1 << 31)


def num_chunks(stride: int) -> int:
    return -(-stride // CHUNK)


@emits(3)
def cap_values(e: Ir, x: Value, count: Value, cap: Value) -> None:
    """x = cap * tanh(x / cap) of `count` floats; `cap` is an address."""
    limit = e.load(cap, f32, 4)

    def body(i: Value, n: int) -> None:
        c = e.splat(limit, n)
        put_floats(e, e.b.fmul(c, tanh(e, e.b.fdiv(floats(e, x, i, n), c))), x, i)

    for_lanes(e, count, body)


@emits(3, types.float32)
def maximum_of(e: Ir, x: Value, groups: Value, maxima: Value) -> Value:
    """Write the maximum of each group of GROUP floats; return that of all."""
    floats = vec(f32, LANES)
    largest = e.variable(e.const(float("-inf"), floats))
    e.set(largest, e.const(float("-inf"), floats))
    with e.loop(groups) as g:
        at = e.at(x, e.mul(g.index, 4 * GROUP))
        parts = [e.load(e.at(at, 4 * k), floats, 4) for k in range(0, GROUP, LANES)]
        while len(parts) > 1:
            parts = [e.maximum(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        e.store(e.tree_max(parts[0]), e.at(maxima, e.mul(g.index, 4)), 4)
        e.set(largest, e.maximum(e.get(largest), parts[0]))
    return e.tree_max(e.get(largest))


@emits(3, types.float32)
def exp_sum(e: Ir, x: Value, groups: Value, maximum: Value) -> Value:
    """Sum of exp(x - maximum) over groups of GROUP floats; `maximum` is an address."""
    floats = vec(f32, LANES)
    base = e.splat(e.load(maximum, f32, 4), LANES)
    sums = [e.variable(e.const(0.0, floats)) for _ in range(GROUP // LANES)]
    for s in sums:
        e.set(s, e.const(0.0, floats))
    with e.loop(groups) as g:
        at = e.at(x, e.mul(g.index, 4 * GROUP))
        for k, s in enumerate(sums):
            distance = e.b.fsub(e.load(e.at(at, 4 * LANES * k), floats, 4), base)
            power = exp2(e, e.b.fmul(distance, e.const(LOG2E, floats)))
            e.set(s, e.b.fadd(e.get(s), power))
    a, b, c, d = (e.get(s) for s in sums)
    return e.tree_sum(e.b.fadd(e.b.fadd(a, b), e.b.fadd(c, d)))


@emits(1, types.float32)
def load_float(e: Ir, address: Value) -> Value:
    return e.load(address, f32, 4)


@emits(1, types.int64)
def load_int(e: Ir, address: Value) -> Value:
    """The int32 at `address`."""
    return e.b.sext(e.load(address, i32, 4), i64)


@emits(2)
def store_int(e: Ir, address: Value, value: Value) -> None:
    e.store(e.b.trunc(value, i32), address, 4)


@emits(2)
def copy_float(e: Ir, source: Value, target: Value) -> None:
    e.store(e.load(source, f32, 4), target, 4)


@emits(3)
def edit_float(e: Ir, address: Value, repeat: Value, add: Value) -> None:
    """x = (x > 0 ? x / r : x * r) + a, of the floats at three addresses."""
    x, r, a = (e.load(p, f32, 4) for p in (address, repeat, add))
    positive = e.b.fcmp_ordered(">", x, e.const(0.0, f32))
    scaled = e.b.select(positive, e.b.fdiv(x, r), e.b.fmul(x, r))
    e.store(e.b.fadd(scaled, a), address, 4)


@emits(2, arguments=(types.int64, types.float32))
def store_float(e: Ir, address: Value, value: Value) -> None:
    e.store(value, address, 4)


@emits(2, arguments=(types.int64, types.int64))
def store_key(e: Ir, address: Value, value: Value) -> None:
    e.store(value, address, 8)


@njit
def row_of(args, item):  # type: ignore[no-untyped-def]
    rows = slot(args, 2)
    return item if rows == 0 else load_int(rows + 4 * item)


@kernel
def cap_logits(args: int, first: int, last: int, scratch: int) -> None:
    """The soft cap, in place. Item: (row, chunk), chunks innermost."""
    stride, vocab = slot(args, 1), slot(args, 2)
    chunks = quotient(stride + CHUNK - 1, CHUNK)
    for item in range(first, last):
        row = quotient(item, chunks)
        start = (item - row * chunks) * CHUNK
        count = max(0, min(vocab - start, CHUNK))
        cap_values(slot(args, 0) + 4 * (row * stride + start), count, args + 24)


@kernel
def scan_logits(args: int, first: int, last: int, scratch: int) -> None:
    """Maxima of groups; maximum and sum of exponentials of chunks. Item: (row, chunk), chunks innermost."""
    stride = slot(args, 1)
    chunks = quotient(stride + CHUNK - 1, CHUNK)
    for item in range(first, last):
        place = quotient(item, chunks)
        chunk = item - place * chunks
        row = row_of(args, place)
        start = chunk * CHUNK
        groups = min(stride - start, CHUNK) >> 6
        x = slot(args, 0) + 4 * (row * stride + start)
        maxima = slot(args, 3) + 4 * ((row * stride + start) >> 6)
        parts = slot(args, 4) + 8 * (row * chunks + chunk)
        store_float(parts, maximum_of(x, groups, maxima))
        store_float(parts + 4, exp_sum(x, groups, parts))


@njit
def log_sum_exp(parts, chunks):  # type: ignore[no-untyped-def]
    """Of the chunks' maxima and sums, added in order."""
    largest = load_float(parts)
    for c in range(1, chunks):
        largest = max(largest, load_float(parts + 8 * c))
    total = 0.0
    for c in range(chunks):
        total += load_float(parts + 8 * c + 4) * math.exp(load_float(parts + 8 * c) - largest)
    return largest + math.log(total)


@njit
def order_of(address):  # type: ignore[no-untyped-def]
    """The float32 at an address as an integer that sorts like it; both zeros are 0."""
    bits = load_int(address)
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


@njit
def sink(heap, place, size):  # type: ignore[no-untyped-def]
    """Restore the heap (smallest key on top) below `place`; keys are int64."""
    key = slot(heap, place)
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and slot(heap, child + 1) < slot(heap, child):
            child += 1
        if slot(heap, child) >= key:
            break
        store_key(heap + 8 * place, slot(heap, child))
        place = child
    store_key(heap + 8 * place, key)


@njit
def keep_largest(heap, size, limit, key):  # type: ignore[no-untyped-def]
    """Put a key into a heap of the `limit` largest; return its size."""
    if size < limit:
        place = size
        while place > 0:
            parent = (place - 1) >> 1
            if slot(heap, parent) <= key:
                break
            store_key(heap + 8 * place, slot(heap, parent))
            place = parent
        store_key(heap + 8 * place, key)
        return size + 1
    if key > slot(heap, 0):
        store_key(heap, key)
        sink(heap, 0, size)
    return size


@kernel
def pick_top(args: int, first: int, last: int, scratch: int) -> None:
    """Log-sum-exp and the TOP largest of a row, descending, lower ids first where values are equal."""
    stride = slot(args, 1)
    chunks = quotient(stride + CHUNK - 1, CHUNK)
    groups = stride >> 6
    for item in range(first, last):
        row = row_of(args, item)
        lse = log_sum_exp(slot(args, 4) + 8 * row * chunks, chunks)
        store_float(slot(args, 7) + 4 * row, lse)
        if slot(args, 8) != 0:
            store_float(slot(args, 8) + 4 * row, lse)
        maxima = slot(args, 3) + 4 * row * groups
        size = 0
        for g in range(groups):
            size = keep_largest(scratch, size, TOP, order_of(maxima + 4 * g))
        least = slot(scratch, 0) if size == TOP else LOWEST_KEY
        size = 0
        for g in range(groups):
            if order_of(maxima + 4 * g) >= least:
                start = slot(args, 0) + 4 * (row * stride + g * GROUP)
                for k in range(GROUP):
                    order = order_of(start + 4 * k)
                    if order >= least:
                        key = (order << 32) | (0xFFFFFFFF - (g * GROUP + k))
                        size = keep_largest(scratch, size, TOP, key)
        write_sorted(args, row, scratch, size)


@njit
def write_sorted(args, row, heap, size):  # type: ignore[no-untyped-def]
    """Empty the heap into the row's results, the smallest last."""
    ids = slot(args, 5) + 4 * TOP * row
    values = slot(args, 6) + 4 * TOP * row
    logits = slot(args, 0) + 4 * row * slot(args, 1)
    for k in range(size, TOP):
        store_int(ids + 4 * k, -1)
        store_float(values + 4 * k, -math.inf)
    for k in range(size - 1, -1, -1):
        id_ = 0xFFFFFFFF - (slot(heap, 0) & 0xFFFFFFFF)
        value = load_float(logits + 4 * id_)
        # The padding behind the vocabulary has -inf, and so may have tokens that must not be drawn.
        store_int(ids + 4 * k, id_ if value > -math.inf else -1)
        store_float(values + 4 * k, value)
        store_key(heap, slot(heap, k))
        sink(heap, 0, k)


@kernel
def edit_logits(args: int, first: int, last: int, scratch: int) -> None:
    """Change single logits of the edited rows; the old values are kept."""
    for item in range(first, last):
        row = slot(args, 0) + 4 * load_int(slot(args, 2) + 4 * item) * slot(args, 1)
        for i in range(load_int(slot(args, 3) + 4 * item), load_int(slot(args, 3) + 4 * item + 4)):
            x = row + 4 * load_int(slot(args, 4) + 4 * i)
            copy_float(x, slot(args, 7) + 4 * i)
            edit_float(x, slot(args, 5) + 4 * i, slot(args, 6) + 4 * i)


@kernel
def restore_logits(args: int, first: int, last: int, scratch: int) -> None:
    """Put back what edit_logits changed."""
    for item in range(first, last):
        row = slot(args, 0) + 4 * load_int(slot(args, 2) + 4 * item) * slot(args, 1)
        for i in range(load_int(slot(args, 3) + 4 * item), load_int(slot(args, 3) + 4 * item + 4)):
            copy_float(slot(args, 7) + 4 * i, row + 4 * load_int(slot(args, 4) + 4 * i))
