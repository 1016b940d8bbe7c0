"""Vector loops and functions that the elementwise kernels share.

Loops take float32 values 16 at a time. Functions are polynomials over plain operations and
`llvm.fma`: the same bits on every target, and no call into the C library.
"""

import math
from collections.abc import Callable

from llvmlite import ir
from numba import types

from kernels_cpu.simd import Ir, Value, emits, f32, i32, i64, vec

LANES = 16
FLOATS = vec(f32, LANES)

Load = Callable[[Value], Value]

# Loops.


def for_lanes(e: Ir, count: Value, body: Callable[[Value, int], None]) -> None:
    """body(index, lanes) over `count` values: blocks of 16, then single ones."""
    blocks = e.b.lshr(count, e.const(4))
    with e.loop(blocks) as loop:
        body(e.b.shl(loop.index, e.const(4)), LANES)
    done = e.b.shl(blocks, e.const(4))
    with e.loop(e.b.sub(count, done)) as loop:
        body(e.b.add(done, loop.index), 1)


def map_blocks(e: Ir, count: Value, out: Value, function: Callable[[Load], Value]) -> None:
    """Store function(load) for all `count` values at `out`, and zeros up to a multiple of 16.

    load(address) is 16 values of a float32 array there; memory beyond `count` values is not read.
    """
    blocks = e.b.lshr(count, e.const(4))
    with e.loop(blocks) as loop:
        offset = e.b.shl(loop.index, e.const(6))
        e.store(function(plain_load(e, offset)), e.at(out, offset), align=4)
    with if_rest(e, count):
        offset = e.b.shl(blocks, e.const(6))
        mask = rest_mask(e, count)
        value = function(masked_load(e, offset, mask))
        e.store(e.b.select(mask, value, e.const(0.0, FLOATS)), e.at(out, offset), align=4)


def sum_blocks(e: Ir, count: Value, term: Callable[[Load], Value]) -> Value:
    """Sum of the lanes of term(load) over `count` values, in an order that depends on `count`
    alone.

    Four accumulators take blocks of 16 in turn, the first one takes the blocks that are left over.
    """
    sums = [e.variable(e.const(0.0, FLOATS)) for _ in range(4)]
    rounds = e.b.lshr(count, e.const(6))
    with e.loop(rounds) as loop:
        offset = e.b.shl(loop.index, e.const(8))
        for k, total in enumerate(sums):
            e.set(total, e.b.fadd(e.get(total), term(plain_load(e, e.at(offset, 64 * k)))))
    blocks, done = e.b.lshr(count, e.const(4)), e.b.shl(rounds, e.const(2))
    with e.loop(e.b.sub(blocks, done)) as loop:
        offset = e.b.shl(e.b.add(done, loop.index), e.const(6))
        e.set(sums[0], e.b.fadd(e.get(sums[0]), term(plain_load(e, offset))))
    with if_rest(e, count):
        mask = rest_mask(e, count)
        value = term(masked_load(e, e.b.shl(blocks, e.const(6)), mask))
        value = e.b.select(mask, value, e.const(0.0, FLOATS))
        e.set(sums[0], e.b.fadd(e.get(sums[0]), value))
    a, b, c, d = (e.get(total) for total in sums)
    return e.tree_sum(e.b.fadd(e.b.fadd(a, b), e.b.fadd(c, d)))


def if_rest(e: Ir, count: Value):  # type: ignore[no-untyped-def]
    """Run the block if `count` is not a multiple of 16."""
    return e.b.if_then(e.b.icmp_signed("!=", e.b.and_(count, e.const(15)), e.const(0)))


def rest_mask(e: Ir, count: Value) -> Value:
    """<16 x i1>: lanes below count % 16."""
    rest = e.splat(e.b.trunc(e.b.and_(count, e.const(15)), i32), LANES)
    return e.b.icmp_signed("<", ir.Constant(vec(i32, LANES), list(range(LANES))), rest)


def plain_load(e: Ir, offset: Value) -> Load:
    return lambda address: e.load(e.at(address, offset), FLOATS, align=4)


def masked_load(e: Ir, offset: Value, mask: Value) -> Load:
    def load(address: Value) -> Value:
        place = e.pointer(e.at(address, offset), FLOATS)
        zero = e.const(0.0, FLOATS)
        return e.call("llvm.masked.load.v16f32.p0", FLOATS, place, e.const(4, i32), mask, zero)

    return load


def floats(e: Ir, address: Value, index: Value, n: int) -> Value:
    """<n x float> from the index-th float32 on."""
    return e.load(e.at(address, e.mul(index, 4)), vec(f32, n), align=4)


def put_floats(e: Ir, value: Value, address: Value, index: Value) -> None:
    e.store(value, e.at(address, e.mul(index, 4)), align=4)


@emits(2, types.int64)
def int32_at(e: Ir, address: Value, index: Value) -> Value:
    """The index-th int32, as int64."""
    return e.b.sext(e.load(e.at(address, e.mul(index, 4)), i32, 4), i64)


# Functions.

# e^r = 1 + r + r^2 P(r) for |r| <= ln(2) / 2 (Cephes, expf).
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 0.16666665459, 0.5)
# Between these the result is a normal number.
EXP_LEAST, EXP_MOST = -86.6, 88.37
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
# tanh(z) = z + z^3 P(z^2) for |z| < 0.625 (Cephes, tanhf).
TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 0.133314422036, -0.333332819422)
ROUND_F32 = 1.5 * 2.0**23  # adding it leaves the nearest integer in the low bits, ties to even
ROUND_F64 = 1.5 * 2.0**52
# pi / 2 in three parts: each the double nearest to what is left.
HALF_PI = (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591833e-33)


def polynomial(e: Ir, x: Value, coefficients: tuple[float, ...]) -> Value:
    """Highest power first, by Horner's rule."""
    result = e.const(coefficients[0], x.type)
    for c in coefficients[1:]:
        result = e.fma(result, x, e.const(c, x.type))
    return result


def exp(e: Ir, x: Value) -> Value:
    """e^x of float32 vectors within 2 units in the last place; x is taken to [-86.6, 88.37]."""
    like = x.type
    integers = vec(i32, like.count)
    low, high = e.const(EXP_LEAST, like), e.const(EXP_MOST, like)
    x = e.b.select(e.b.fcmp_ordered(">", x, low), x, low)
    x = e.b.select(e.b.fcmp_ordered("<", x, high), x, high)
    magic = e.const(ROUND_F32, like)
    shifted = e.fma(x, e.const(1 / math.log(2), like), magic)
    n = e.b.fsub(shifted, magic)
    r = e.fma(n, e.const(-LN2_HIGH, like), x)
    r = e.fma(n, e.const(-LN2_LOW, like), r)
    p = e.fma(polynomial(e, r, EXP), e.b.fmul(r, r), e.b.fadd(r, e.const(1.0, like)))
    exponent = e.b.shl(e.b.bitcast(shifted, integers), e.const(23, integers))
    return e.b.bitcast(e.b.add(e.b.bitcast(p, integers), exponent), like)


def sigmoid(e: Ir, x: Value) -> Value:
    one = e.const(1.0, x.type)
    return e.b.fdiv(one, e.b.fadd(one, exp(e, e.b.fneg(x))))


def tanh(e: Ir, x: Value) -> Value:
    """Within 2 units in the last place."""
    like = x.type
    one, size = e.const(1.0, like), e.unary("fabs", x)
    far = exp(e, e.b.fadd(size, size))
    far = e.b.fsub(one, e.b.fdiv(e.const(2.0, like), e.b.fadd(far, one)))
    far = e.call(f"llvm.copysign.v{like.count}f32", like, far, x)
    square = e.b.fmul(x, x)
    near = e.fma(e.b.fmul(polynomial(e, square, TANH), square), x, x)
    return e.b.select(e.b.fcmp_ordered("<", size, e.const(0.625, like)), near, far)


def sin_cos(e: Ir, x: Value) -> tuple[Value, Value]:
    """Sine and cosine of float64 vectors, to 1e-14 for |x| below 1e7."""
    like = x.type
    integers = vec(i64, like.count)
    magic = e.const(ROUND_F64, like)
    shifted = e.fma(x, e.const(2 / math.pi, like), magic)
    n = e.b.fneg(e.b.fsub(shifted, magic))
    r = x
    for part in HALF_PI:
        r = e.fma(n, e.const(part, like), r)
    square = e.b.fmul(r, r)
    sines = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(7, 0, -1))
    cosines = tuple((-1) ** k / math.factorial(2 * k) for k in range(8, -1, -1))
    sine = e.fma(e.b.fmul(polynomial(e, square, sines), square), r, r)
    cosine = polynomial(e, square, cosines)
    quadrant = e.b.bitcast(shifted, integers)
    one, two = e.const(1, integers), e.const(2, integers)
    is_odd = e.b.icmp_unsigned("!=", e.b.and_(quadrant, one), e.const(0, integers))

    def signed(value: Value, flips: Value) -> Value:
        sign = e.b.shl(e.b.and_(flips, two), e.const(62, integers))
        return e.b.bitcast(e.b.xor(e.b.bitcast(value, integers), sign), like)

    return (
        signed(e.b.select(is_odd, cosine, sine), quadrant),
        signed(e.b.select(is_odd, sine, cosine), e.b.add(quadrant, one)),
    )
