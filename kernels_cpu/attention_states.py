"""States of generated attention: what splits of a context give, and how they are added up.

A state is of one query head, float32 [16 + head_dim]: largest score m (log2 units), sum of the
weights 2^(s - m), 14 unused, sum of weight * v.
"""

from llvmlite import ir

from kernels_cpu.attention_math import LOG2E, LOWEST, broadcast, exp2, larger, zeros
from kernels_cpu.simd import Ir, Value, emits, f32, i32, vec


@emits(2)
def clear_values(e: Ir, state: Value, head_dim: Value) -> None:
    with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
        e.store(zeros(e, 8), e.at(state, 64, e.mul(d.index, 32)), align=4)


@emits(3)
def start_state(e: Ir, state: Value, head_dim: Value, sink: Value) -> None:
    """The state of no positions; `sink` is the address of a logit that joins the sum, or 0."""
    floats = vec(f32, 2)
    e.store(ir.Constant(floats, [LOWEST, 0.0]), state, align=4)
    with e.b.if_then(e.b.icmp_unsigned("!=", sink, e.const(0))):
        logit = e.b.fmul(e.load(sink, f32, align=4), e.const(LOG2E, f32))
        pair = e.b.insert_element(ir.Constant(floats, [0.0, 1.0]), logit, e.const(0, i32))
        e.store(pair, state, align=4)
    with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
        e.store(zeros(e, 8), e.at(state, 64, e.mul(d.index, 32)), align=4)


@emits(3)
def fold(e: Ir, state: Value, split: Value, head_dim: Value) -> None:
    """state += split: both brought to the larger of their maxima."""
    m, other = broadcast(e, state, 8), broadcast(e, split, 8)
    largest = larger(e, m, other)
    keep, take = exp2(e, e.b.fsub(m, largest)), exp2(e, e.b.fsub(other, largest))
    l, more = broadcast(e, e.at(state, 4), 8), broadcast(e, e.at(split, 4), 8)
    total = e.fma(more, take, e.b.fmul(l, keep))
    e.store(e.b.extract_element(largest, e.const(0, i32)), state, align=4)
    e.store(e.b.extract_element(total, e.const(0, i32)), e.at(state, 4), align=4)
    with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
        offset = e.mul(d.index, 32)
        to, source = e.at(state, 64, offset), e.at(split, 64, offset)
        kept = e.b.fmul(e.load(to, vec(f32, 8), 4), keep)
        e.store(e.fma(e.load(source, vec(f32, 8), 4), take, kept), to, align=4)


@emits(3)
def finish(e: Ir, state: Value, out: Value, head_dim: Value) -> None:
    """out = weighted sum / sum of weights."""
    l = broadcast(e, e.at(state, 4), 8)
    with e.loop(e.b.lshr(head_dim, e.const(3))) as d:
        offset = e.mul(d.index, 32)
        value = e.load(e.at(state, 64, offset), vec(f32, 8), 4)
        e.store(e.b.fdiv(value, l), e.at(out, offset), align=4)
