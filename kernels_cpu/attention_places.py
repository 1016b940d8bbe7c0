"""Where attention finds things: parts of K and V by block and head, what comes next, sinks."""

from numba import types

from kernels_cpu import attention as a
from kernels_cpu.kv import KV_TYPES, KVType
from kernels_cpu.simd import Ir, Value, emits, i32, i64


@emits(1, types.int64, table=KV_TYPES)
def part_bytes(e: Ir, kv: KVType, head_dim: Value) -> Value:
    return kv.part_bytes(e, head_dim)


@emits(4, types.int64, table=KV_TYPES)
def block_offset(
    e: Ir, kv: KVType, args: Value, table: Value, kv_head: Value, block: Value
) -> Value:
    """Offset of one head's part of a sequence's block in K and in V."""
    return offset_of(e, kv, args, table, kv_head, block)


def offset_of(e: Ir, kv: KVType, args: Value, table: Value, kv_head: Value, block: Value) -> Value:
    index = e.b.sext(e.load(e.at(table, e.mul(block, 4)), i32, align=4), i64)
    part = e.b.add(e.b.mul(index, argument(e, args, a.NUM_KV_HEADS)), kv_head)
    return e.b.mul(part, kv.part_bytes(e, argument(e, args, a.HEAD_DIM)))


@emits(7, types.int64, table=KV_TYPES)
def upcoming(
    e: Ir,
    kv: KVType,
    args: Value,
    table: Value,
    kv_head: Value,
    heads: Value,
    first: Value,
    end: Value,
    n: Value,
) -> Value:
    """Address of what a split reads as the n-th part of a block.

    It reads the parts of `heads` KV heads of each of the blocks [first, end) of K, then of V.
    """
    count = e.b.sub(end, first)
    number = e.b.udiv(n, heads)
    head = e.b.add(kv_head, e.b.urem(n, heads))
    is_key = e.b.icmp_unsigned("<", number, count)
    # At the end of V it stays at the last block.
    later = e.b.sub(number, count)
    last = e.b.sub(count, e.const(1))
    later = e.b.select(e.b.icmp_unsigned("<", later, last), later, last)
    block = e.b.add(first, e.b.select(is_key, number, later))
    start = e.b.select(is_key, argument(e, args, a.K), argument(e, args, a.V))
    return e.b.add(start, offset_of(e, kv, args, table, head, block))


def argument(e: Ir, args: Value, index: int) -> Value:
    return e.load(e.at(args, 8 * index), i64, align=8)


@emits(2, types.int64)
def sink_of(e: Ir, args: Value, head: Value) -> Value:
    """Address of a query head's sink logit, or 0."""
    sinks = argument(e, args, a.SINKS)
    has_sinks = e.b.icmp_unsigned("!=", sinks, e.const(0))
    return e.b.select(has_sinks, e.at(sinks, e.mul(head, 4)), e.const(0))
