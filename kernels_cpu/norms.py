"""Norms over a token's whole width, with the residual sum and the int8 forms in the same pass."""

from kernels_cpu.forms import FIRST_OWN, WIDTH, arg, arg_float, put_forms, zero_after
from kernels_cpu.kernel import kernel
from kernels_cpu.simd import Ir, Value, emits, f32, slot
from kernels_cpu.vector_math import LANES, map_blocks, sum_blocks

X, X_STRIDE, KIND, WEIGHT, BIAS, EPS = range(FIRST_OWN, FIRST_OWN + 6)
BASE, BASE_STRIDE, SCALE = range(FIRST_OWN + 6, FIRST_OWN + 9)

RMS, LAYER = 0, 1


@emits(3)
def normalise(e: Ir, args: Value, x: Value, out: Value) -> None:
    """out = norm(x) for the argument block of `norm`; zeros up to a multiple of 16."""
    width, weight, bias = (arg(e, args, k) for k in (WIDTH, WEIGHT, BIAS))
    eps = arg_float(e, args, EPS)
    is_layer = e.b.icmp_signed("==", arg(e, args, KIND), e.const(LAYER))
    mean = e.variable(e.const(0.0, f32))
    n = e.b.sitofp(width, f32)
    with e.b.if_then(is_layer):
        e.set(mean, e.b.fdiv(sum_blocks(e, width, lambda load: load(x)), n))
    shift = e.splat(e.get(mean), LANES)
    factor = e.splat(inverse_deviation(e, x, width, shift, eps), LANES)
    has_weight, has_bias = (e.b.icmp_signed("!=", p, e.const(0)) for p in (weight, bias))
    with e.b.if_else(has_weight) as (then, otherwise):
        with then, e.b.if_else(has_bias) as (biased, unbiased):
            with biased:
                map_blocks(
                    e,
                    width,
                    out,
                    lambda load: e.b.fadd(
                        e.b.fmul(e.b.fmul(e.b.fsub(load(x), shift), factor), load(weight)),
                        load(bias),
                    ),
                )
            with unbiased:
                map_blocks(
                    e,
                    width,
                    out,
                    lambda load: e.b.fmul(e.b.fmul(e.b.fsub(load(x), shift), factor), load(weight)),
                )
        with otherwise:
            map_blocks(e, width, out, lambda load: e.b.fmul(e.b.fsub(load(x), shift), factor))


def inverse_deviation(e: Ir, x: Value, width: Value, shift: Value, eps: Value) -> Value:
    """1 / sqrt(mean((x - shift)^2) + eps)."""

    def square(load):  # type: ignore[no-untyped-def]
        d = e.b.fsub(load(x), shift)
        return e.b.fmul(d, d)

    mean = e.b.fdiv(sum_blocks(e, width, square), e.b.sitofp(width, f32))
    return e.b.fdiv(e.const(1.0, f32), e.unary("sqrt", e.b.fadd(mean, eps)))


@emits(4)
def add_scaled(e: Ir, args: Value, base: Value, y: Value, out: Value) -> None:
    """out = base + scale * y over the width, for the argument block of `add_norm`."""
    width, scale = arg(e, args, WIDTH), e.splat(arg_float(e, args, SCALE), LANES)
    map_blocks(e, width, out, lambda load: e.b.fadd(load(base), e.b.fmul(scale, load(y))))


@kernel
def norm(args: int, first: int, last: int, scratch: int) -> None:
    """forms = norm(x); an item is a token.

     0..15      the forms (see forms.py); slot 15 is the width
    16 x        float32 [T][stride]
    17 x stride in floats
    18 kind     0: x / sqrt(mean(x^2) + eps) * w; 1: (x - mean) / sqrt(variance + eps) * w, then + b
    19 weight   float32 [width], or 0 for none
    20 bias     float32 [width], or 0 for none; only where there is a weight
    21 eps      float32 bits
    """
    width = slot(args, WIDTH)
    for token in range(first, last):
        normalise(args, slot(args, X) + 4 * token * slot(args, X_STRIDE), scratch)
        zero_after(scratch, width)
        put_forms(args, token, 0, width, scratch)


@kernel
def add_norm(args: int, first: int, last: int, scratch: int) -> None:
    """forms = base + scale * norm(x); an item is a token.

     0..23      as in `norm`
    22 base     float32 [T][stride]; may be the same memory as the float32 form
    23 base stride in floats
    24 scale    float32 bits
    """
    width = slot(args, WIDTH)
    for token in range(first, last):
        normalise(args, slot(args, X) + 4 * token * slot(args, X_STRIDE), scratch)
        base = slot(args, BASE) + 4 * token * slot(args, BASE_STRIDE)
        add_scaled(args, base, scratch, scratch)
        zero_after(scratch, width)
        put_forms(args, token, 0, width, scratch)
