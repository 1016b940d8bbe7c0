"""Activation functions of the feed-forward part, sums, and the forms of what is there already.

Items are parts of tokens, so that one token's values are shared out among threads: an item is
`PART` neighbouring values of a token; a token has ceil(width / PART) items.
"""

from collections.abc import Callable

from kernels_cpu.forms import FIRST_OWN, WIDTH, arg, arg_float, put_forms, zero_after
from kernels_cpu.kernel import kernel
from kernels_cpu.simd import Ir, Value, emits, slot
from kernels_cpu.threads import quotient
from kernels_cpu.vector_math import LANES, map_blocks, sigmoid

PART = 1024
"""Values of an item; a multiple of 64."""

UP, UP_STRIDE, GATE, GATE_STRIDE = range(FIRST_OWN, FIRST_OWN + 4)
X, X_STRIDE = UP, UP_STRIDE
KIND = FIRST_OWN + 4
Y, Y_STRIDE, SCALE = GATE, GATE_STRIDE, KIND

Act = Callable[[Ir, Value], Value]


def silu(e: Ir, x: Value) -> Value:
    """x * sigmoid(x)."""
    return e.b.fmul(x, sigmoid(e, x))


def gelu(e: Ir, x: Value) -> Value:
    """x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x * sigmoid(2 u)."""
    root = 2 * 0.7978845608028654
    cubic = e.fma(e.b.fmul(x, x), e.const(root * 0.044715, x.type), e.const(root, x.type))
    return e.b.fmul(x, sigmoid(e, e.b.fmul(cubic, x)))


def gelu_quick(e: Ir, x: Value) -> Value:
    """x * sigmoid(1.702 x)."""
    return e.b.fmul(x, sigmoid(e, e.b.fmul(x, e.const(1.702, x.type))))


def relu2(e: Ir, x: Value) -> Value:
    """max(x, 0)^2."""
    zero = e.const(0.0, x.type)
    x = e.b.select(e.b.fcmp_ordered(">", x, zero), x, zero)
    return e.b.fmul(x, x)


ACTIVATIONS: dict[str, Act] = {"silu": silu, "gelu": gelu, "gelu_quick": gelu_quick, "relu2": relu2}
KIND_OF = {name: kind for kind, name in enumerate(ACTIVATIONS)}
"""What slot 20 of `activate` says."""


@emits(5)
def activate_part(e: Ir, args: Value, gate: Value, up: Value, count: Value, out: Value) -> None:
    """out = act(gate) * up, or act(up) where gate is 0; zeros up to a multiple of 16."""
    kind = arg(e, args, KIND)
    for k, act in enumerate(ACTIVATIONS.values()):
        with e.b.if_then(e.b.icmp_signed("==", kind, e.const(k))):
            is_gated = e.b.icmp_signed("!=", gate, e.const(0))
            with e.b.if_else(is_gated) as (then, otherwise):
                with then:
                    map_gated(e, act, gate, up, count, out)
                with otherwise:
                    map_plain(e, act, up, count, out)


def map_gated(e: Ir, act: Act, gate: Value, up: Value, count: Value, out: Value) -> None:
    map_blocks(e, count, out, lambda load: e.b.fmul(act(e, load(gate)), load(up)))


def map_plain(e: Ir, act: Act, up: Value, count: Value, out: Value) -> None:
    map_blocks(e, count, out, lambda load: act(e, load(up)))


@kernel
def activate(args: int, first: int, last: int, scratch: int) -> None:
    """forms = act(gate) * up, or act(up); an item is a part of a token.

     0..15      the forms (see forms.py); slot 15 is the width
    16 up       float32 [T][stride]
    17 up stride in floats
    18 gate     float32 [T][stride], or 0 for none
    19 gate stride in floats
    20 kind     which function: `KIND_OF`
    """
    width = slot(args, WIDTH)
    parts = quotient(width + PART - 1, PART)
    for item in range(first, last):
        token = quotient(item, parts)
        start = (item - token * parts) * PART
        count = min(PART, width - start)
        up = slot(args, UP) + 4 * (token * slot(args, UP_STRIDE) + start)
        gate = slot(args, GATE)
        if gate != 0:
            gate += 4 * (token * slot(args, GATE_STRIDE) + start)
        activate_part(args, gate, up, count, scratch)
        zero_after(scratch, count)
        put_forms(args, token, start, count, scratch)


@emits(3)
def copy_part(e: Ir, x: Value, count: Value, out: Value) -> None:
    map_blocks(e, count, out, lambda load: load(x))


@kernel
def quantise(args: int, first: int, last: int, scratch: int) -> None:
    """forms = x; an item is a part of a token.

     0..15      the forms (see forms.py); slot 15 is the width
    16 x        float32 [T][stride]
    17 x stride in floats
    """
    width = slot(args, WIDTH)
    parts = quotient(width + PART - 1, PART)
    for item in range(first, last):
        token = quotient(item, parts)
        start = (item - token * parts) * PART
        count = min(PART, width - start)
        copy_part(slot(args, X) + 4 * (token * slot(args, X_STRIDE) + start), count, scratch)
        zero_after(scratch, count)
        put_forms(args, token, start, count, scratch)


@emits(5)
def add_part(e: Ir, args: Value, x: Value, y: Value, count: Value, out: Value) -> None:
    """out = x + scale * y."""
    scale = e.splat(arg_float(e, args, SCALE), LANES)
    map_blocks(e, count, out, lambda load: e.b.fadd(load(x), e.b.fmul(scale, load(y))))


@kernel
def add(args: int, first: int, last: int, scratch: int) -> None:
    """forms = x + scale * y; an item is a part of a token.

     0..15      the forms (see forms.py); slot 15 is the width
    16 x        float32 [T][stride]; may be the same memory as the float32 form
    17 x stride in floats
    18 y        float32 [T][stride]
    19 y stride in floats
    20 scale    float32 bits
    """
    width = slot(args, WIDTH)
    parts = quotient(width + PART - 1, PART)
    for item in range(first, last):
        token = quotient(item, parts)
        start = (item - token * parts) * PART
        count = min(PART, width - start)
        x = slot(args, X) + 4 * (token * slot(args, X_STRIDE) + start)
        y = slot(args, Y) + 4 * (token * slot(args, Y_STRIDE) + start)
        add_part(args, x, y, count, scratch)
        zero_after(scratch, count)
        put_forms(args, token, start, count, scratch)
