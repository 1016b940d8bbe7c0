"""The forms in which a kernel may leave an activation: float32, int8 for row products, int8 for
panel products.

Every kernel that makes activations begins its argument block with these slots (its own begin at
`FIRST_OWN`). A form whose address is 0 is not written. Strides are from token to token.

     0 out           float32 [T][stride]     all tokens; strides are multiples of 16, the rest is zeroed
     1 out stride, in floats
     2 row values    int8 [D][Kp]            generated tokens; Kp is the width padded to 64 with zeros
     3 row values stride, in bytes
     4 row scales    float32 [D][Kp/64][16]  lane l of a group of 64 has the scale of 16-value group l // 4
     5 row scales stride, in floats
     6 row sums      float32 [D][Kp/16]      scale * sum of the 16 int8
     7 row sums stride, in floats
     8 panel values  int8 [T][Kp]            prompt tokens, at their own index
     9 panel values stride, in bytes
    10 panel scales  float32 [T][Kp/16]
    11 panel scales stride, in floats
    12 panel sums    float32 [T][Kp/16]      as the row sums
    13 panel sums stride, in floats
    14 generated     address of the int64 D: tokens below it are generated, the others are prompt tokens
    15 width

int8: for each 16 values scale = absmax / 127 and q = x * (127 / absmax), rounded to even. Where
absmax is at most 1e-30 (its reciprocal would overflow) all are zero.
"""

from kernels_cpu.simd import Ir, Value, emits, f32, i8, i32, i64, vec

FIRST_OWN = 16
GENERATED = 14
WIDTH = 15

LEAST = 1e-30
ROUND = 1.5 * 2.0**23  # adding it rounds to an integer, ties to even


def arg(e: Ir, args: Value, index: int) -> Value:
    """Slot of an argument block, as int64."""
    return e.load(e.at(args, 8 * index), i64, align=8)


def arg_float(e: Ir, args: Value, index: int) -> Value:
    """Slot whose low 32 bits are a float32."""
    return e.load(e.at(args, 8 * index), f32, align=4)


def quads(e: Ir, v: Value, combine) -> Value:  # type: ignore[no-untyped-def]
    """Combine the four lanes of each quarter of <16 x ..>; every lane gets its quarter's result."""
    for step in (1, 2):
        v = combine(v, e.shuffle(v, [lane ^ step for lane in range(16)]))
    return v


def largest(e: Ir, a: Value, b: Value) -> Value:
    return e.b.select(e.b.icmp_signed(">", a, b), a, b)


def quantise_group(e: Ir, source: Value) -> tuple[Value, Value, Value]:
    """(q <64 x i8>, scales <16 x float>, scaled sums <16 x float>) of 64 floats; lane l of both is
    group l // 4's."""
    ints, kind = vec(i32, 16), vec(f32, 16)
    values = [e.load(e.at(source, 64 * g), kind, align=4) for g in range(4)]
    maxima = []
    for v in values:
        # Sizes of floats compare as integers.
        size = e.b.and_(e.b.bitcast(v, ints), e.const(0x7FFFFFFF, ints))
        a, b, c, d = (e.slice(size, k, 4) for k in range(0, 16, 4))
        maxima.append(largest(e, largest(e, a, b), largest(e, c, d)))
    absmax = quads(e, e.concat(*maxima), lambda a, b: largest(e, a, b))
    absmax = e.b.bitcast(absmax, kind)
    is_live = e.b.fcmp_ordered(">", absmax, e.const(LEAST, kind))
    zero, most = e.const(0.0, kind), e.const(127.0, kind)
    scale = e.b.select(is_live, e.b.fdiv(absmax, most), zero)
    inverse = e.b.select(is_live, e.b.fdiv(most, absmax), zero)
    parts = []
    for g, v in enumerate(values):
        scaled = e.b.fmul(v, e.shuffle(inverse, [4 * g] * 16))
        rounded = e.b.bitcast(e.b.fadd(scaled, e.const(ROUND, kind)), ints)
        parts.append(e.b.trunc(rounded, vec(i8, 16)))
    q = e.concat(*parts)
    sums = e.dot4(e.const(0, ints), e.const(1, vec(i8, 64)), q, wide=False)
    sums = quads(e, sums, e.b.add)
    return q, scale, e.b.fmul(scale, e.b.sitofp(sums, kind))


@emits(5)
def put_forms(e: Ir, args: Value, token: Value, first: Value, count: Value, source: Value) -> None:
    """Write values [first, first + count) of a token in all wanted forms.

    first   multiple of 64
    source  address of the float32 values, followed by zeros up to a multiple of 64
    """
    put_real(e, args, token, first, count, source)
    generated = e.load(arg(e, args, GENERATED), i64, align=8)
    with e.b.if_else(e.b.icmp_signed("<", token, generated)) as (then, otherwise):
        with then:
            put_int8(e, args, 2, token, first, count, source)
        with otherwise:
            put_int8(e, args, 8, token, first, count, source)


def blocks_of(e: Ir, count: Value, size: int) -> Value:
    return e.b.udiv(e.at(count, size - 1), e.const(size))


def put_real(e: Ir, args: Value, token: Value, first: Value, count: Value, source: Value) -> None:
    out = arg(e, args, 0)
    with e.b.if_then(e.b.icmp_signed("!=", out, e.const(0))):
        place = e.at(out, e.mul(e.b.add(e.b.mul(token, arg(e, args, 1)), first), 4))
        with e.loop(blocks_of(e, count, 16)) as loop:
            offset = e.mul(loop.index, 64)
            e.store(e.load(e.at(source, offset), vec(f32, 16), 4), e.at(place, offset), 4)


def put_int8(
    e: Ir, args: Value, form: int, token: Value, first: Value, count: Value, source: Value
) -> None:
    """The row form (form 2) or the panel form (form 8)."""
    values = arg(e, args, form)
    with e.b.if_then(e.b.icmp_signed("!=", values, e.const(0))):
        place = e.at(values, e.b.mul(token, arg(e, args, form + 1)), first)
        scales = e.at(arg(e, args, form + 2), e.mul(e.b.mul(token, arg(e, args, form + 3)), 4))
        sums = e.at(arg(e, args, form + 4), e.mul(e.b.mul(token, arg(e, args, form + 5)), 4))
        group = e.b.lshr(first, e.const(6))
        with e.loop(blocks_of(e, count, 64)) as loop:
            q, scale, total = quantise_group(e, e.at(source, e.mul(loop.index, 256)))
            e.store(q, e.at(place, e.mul(loop.index, 64)))
            k = e.b.add(group, loop.index)
            one_each = [0, 4, 8, 12]
            e.store(e.shuffle(total, one_each), e.at(sums, e.mul(k, 16)), 4)
            if form == 2:
                e.store(scale, e.at(scales, e.mul(k, 64)), 4)
            else:
                e.store(e.shuffle(scale, one_each), e.at(scales, e.mul(k, 16)), 4)


@emits(2)
def zero_after(e: Ir, address: Value, count: Value) -> None:
    """Zero the 64 floats that follow the last whole 16 of `count`, so that groups of 64 end in
    zeros."""
    end = e.at(address, e.mul(blocks_of(e, count, 16), 64))
    for k in range(4):
        e.store(e.const(0.0, vec(f32, 16)), e.at(end, 64 * k), 4)
