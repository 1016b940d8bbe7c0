"""Per-head work before attention: head norms, rotary embedding, and writing K and V into their
blocks.
"""

from numba import njit

from kernels_cpu.forms import arg, arg_float
from kernels_cpu.kernel import kernel
from kernels_cpu.kv import BLOCK, F16, KV_TYPES, Q8_0, KVType
from kernels_cpu.norms import LAYER, inverse_deviation
from kernels_cpu.simd import Ir, Value, emits, f32, f64, i32, slot, vec
from kernels_cpu.threads import quotient
from kernels_cpu.vector_math import (
    LANES,
    floats,
    for_lanes,
    int32_at,
    put_floats,
    sin_cos,
    sum_blocks,
)

ANGLE_LANES = 8
NORM, NEOX = 0, 1


@emits(2)
def put_angles(e: Ir, args: Value, token: Value) -> None:
    position = e.load(e.at(arg(e, args, 0), e.mul(token, 4)), i32, 4)
    position = e.b.sitofp(position, f64)
    pairs, frequencies = arg(e, args, 1), arg(e, args, 2)
    magnitude = e.load(e.at(args, 24), f64, 8)
    out = e.mul(e.b.mul(token, arg(e, args, 6)), 4)
    cosines, sines = e.at(arg(e, args, 4), out), e.at(arg(e, args, 5), out)
    n = ANGLE_LANES
    with e.loop(e.b.udiv(e.at(pairs, n - 1), e.const(n))) as loop:
        angles = e.load(e.at(frequencies, e.mul(loop.index, 8 * n)), vec(f64, n), 8)
        sine, cosine = sin_cos(e, e.b.fmul(angles, e.splat(position, n)))
        for values, address in ((cosine, cosines), (sine, sines)):
            scaled = e.b.fptrunc(e.b.fmul(values, e.splat(magnitude, n)), vec(f32, n))
            e.store(scaled, e.at(address, e.mul(loop.index, 4 * n)), 4)


@kernel
def rope_angles(args: int, first: int, last: int, scratch: int) -> None:
    """Cosines and sines of a step's positions, once for all layers with the same rope; an item is
    a token.

    0 positions    int32 [T]
    1 pairs        rotated pairs of a head: half the rotated dimensions
    2 frequencies  float64 [pairs padded to 8] radians per position
    3 magnitude    float64 bits; multiplies cosine and sine
    4 cosines      float32 [T][stride]
    5 sines        float32 [T][stride]
    6 stride       in floats, at least pairs padded to 8
    """
    for token in range(first, last):
        put_angles(args, token)


@emits(4)
def norm_head(e: Ir, part: Value, head: Value, width: Value, x: Value) -> None:
    """Normalise one head in place; `part` is the address of the five norm slots."""
    weight, bias = arg(e, part, 1), arg(e, part, 2)
    eps, apart = arg_float(e, part, 3), arg(e, part, 4)
    offset = e.mul(e.b.mul(head, apart), 4)
    is_layer = e.b.icmp_signed("==", arg(e, part, 0), e.const(LAYER))
    mean = e.variable(e.const(0.0, f32))
    with e.b.if_then(is_layer):
        total = sum_blocks(e, width, lambda load: load(x))
        e.set(mean, e.b.fdiv(total, e.b.sitofp(width, f32)))
    shift = e.get(mean)
    factor = inverse_deviation(e, x, width, e.splat(shift, LANES), eps)

    def scale(index: Value, n: int) -> None:
        value = e.b.fsub(floats(e, x, index, n), e.splat(shift, n))
        put_floats(e, e.b.fmul(value, e.splat(factor, n)), x, index)

    def weigh(index: Value, n: int) -> None:
        w = floats(e, e.at(weight, offset), index, n)
        put_floats(e, e.b.fmul(floats(e, x, index, n), w), x, index)

    def shift_by_bias(index: Value, n: int) -> None:
        b = floats(e, e.at(bias, offset), index, n)
        put_floats(e, e.b.fadd(floats(e, x, index, n), b), x, index)

    for_lanes(e, width, scale)
    for vector, body in ((weight, weigh), (bias, shift_by_bias)):
        with e.b.if_then(e.b.icmp_signed("!=", vector, e.const(0))):
            for_lanes(e, width, body)


@emits(5)
def rotate(e: Ir, kind: Value, pairs: Value, cosines: Value, sines: Value, x: Value) -> None:
    """(a, b) becomes (a cos - b sin, b cos + a sin) for all pairs of one head, in place."""
    is_neox = e.b.icmp_signed("==", kind, e.const(NEOX))
    with e.b.if_else(is_neox) as (then, otherwise):
        with then:
            half = e.at(x, e.mul(pairs, 4))
            for_lanes(e, pairs, lambda i, n: rotate_halves(e, cosines, sines, x, half, i, n))
        with otherwise:
            for_lanes(e, pairs, lambda i, n: rotate_neighbours(e, cosines, sines, x, i, n))


def turned(e: Ir, a: Value, b: Value, c: Value, s: Value) -> tuple[Value, Value]:
    first = e.b.fsub(e.b.fmul(a, c), e.b.fmul(b, s))
    second = e.b.fadd(e.b.fmul(b, c), e.b.fmul(a, s))
    return first, second


def rotate_halves(
    e: Ir, cosines: Value, sines: Value, x: Value, half: Value, i: Value, n: int
) -> None:
    a, b = floats(e, x, i, n), floats(e, half, i, n)
    first, second = turned(e, a, b, floats(e, cosines, i, n), floats(e, sines, i, n))
    put_floats(e, first, x, i)
    put_floats(e, second, half, i)


def rotate_neighbours(e: Ir, cosines: Value, sines: Value, x: Value, i: Value, n: int) -> None:
    place = e.mul(i, 2)
    both = floats(e, x, place, 2 * n)
    a, b = e.shuffle(both, range(0, 2 * n, 2)), e.shuffle(both, range(1, 2 * n, 2))
    first, second = turned(e, a, b, floats(e, cosines, i, n), floats(e, sines, i, n))
    pairs = [lane for k in range(n) for lane in (k, n + k)]
    put_floats(e, e.shuffle(first, pairs, second), x, place)


@emits(3)
def multiply(e: Ir, x: Value, width: Value, factor: Value) -> None:
    """x *= the float32 at address `factor`."""
    value = e.load(factor, f32, 4)

    def body(i: Value, n: int) -> None:
        put_floats(e, e.b.fmul(floats(e, x, i, n), e.splat(value, n)), x, i)

    for_lanes(e, width, body)


@emits(5, table=KV_TYPES)
def put_position(
    e: Ir, kv: KVType, x: Value, width: Value, blocks: Value, part: Value, position: Value
) -> None:
    """Write a key or value to a position of the `part`-th part of a layer's blocks."""
    start = e.at(blocks, e.b.mul(part, kv.part_bytes(e, width)))
    kv.store(e, x, kv.row(e, start, position, width), width)


(
    Q, Q_STRIDE, K, K_STRIDE, V, V_STRIDE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM,
    COSINES, SINES, ANGLE_STRIDE, ROPE_KIND, PAIRS, FACTORS, NORM_LAST,
) = range(16)  # fmt: skip
Q_NORM, K_NORM = 16, 21
POSITIONS, SEGMENTS, TABLE, TABLE_WIDTH, K_BLOCKS, V_BLOCKS = range(26, 32)
NO_NORM = 2


@njit
def turn_head(args: int, token: int, head: int, x: int, part: int) -> None:
    """Norm and rope of one head in place; `part` is the address of its norm's slots."""
    width = slot(args, HEAD_DIM)
    has_norm = slot(part, 0) != NO_NORM
    if has_norm and slot(args, NORM_LAST) == 0:
        norm_head(part, head, width, x)
    if slot(args, COSINES) != 0:
        row = 4 * token * slot(args, ANGLE_STRIDE)
        cosines, sines = slot(args, COSINES) + row, slot(args, SINES) + row
        rotate(slot(args, ROPE_KIND), slot(args, PAIRS), cosines, sines, x)
    if has_norm and slot(args, NORM_LAST) != 0:
        norm_head(part, head, width, x)


@njit(inline="always")
def put_head(kv: int, args: int, token: int, head: int, x: int, blocks: int) -> None:
    """A token's key or value of one head, to its place in the layer's blocks."""
    position = int32_at(slot(args, POSITIONS), token)
    segment = int32_at(slot(args, SEGMENTS), token)
    entry = segment * slot(args, TABLE_WIDTH) + (position >> 5)
    part = int32_at(slot(args, TABLE), entry) * slot(args, NUM_KV_HEADS) + head
    put_position(kv, x, slot(args, HEAD_DIM), blocks, part, position & (BLOCK - 1))


@njit(inline="always")
def place_items(kv: int, args: int, first: int, last: int) -> None:
    """The kernel for an element type, a constant."""
    num_q, num_kv, width = slot(args, NUM_HEADS), slot(args, NUM_KV_HEADS), slot(args, HEAD_DIM)
    num_heads = num_q + 2 * num_kv
    for item in range(first, last):
        token = quotient(item, num_heads)
        head = item - token * num_heads
        if head < num_q:
            x = slot(args, Q) + 4 * (token * slot(args, Q_STRIDE) + head * width)
            turn_head(args, token, head, x, args + 8 * Q_NORM)
            if slot(args, FACTORS) != 0:
                multiply(x, width, slot(args, FACTORS) + 4 * token)
        elif head < num_q + num_kv:
            head -= num_q
            x = slot(args, K) + 4 * (token * slot(args, K_STRIDE) + head * width)
            turn_head(args, token, head, x, args + 8 * K_NORM)
            put_head(kv, args, token, head, x, slot(args, K_BLOCKS))
        else:
            head -= num_q + num_kv
            x = slot(args, V) + 4 * (token * slot(args, V_STRIDE) + head * width)
            put_head(kv, args, token, head, x, slot(args, V_BLOCKS))


@kernel
def place_heads(args: int, first: int, last: int, scratch: int) -> None:
    """Queries normed, rotated and scaled in place; keys so too, then keys and values into their
    blocks.

    An item is a head of a token: token t has items t * n to (t + 1) * n - 1 with n = nh + 2 nkv,
    queries first, then keys, then values.

     0 q            float32 [T][stride], changed in place
     1 q stride     in floats
     2 k            float32 [T][stride], changed in place
     3 k stride
     4 v            float32 [T][stride]
     5 v stride
     6 nh           query heads
     7 nkv          key/value heads
     8 hd           head dimension
     9 cosines      float32 [T][stride] as of `rope_angles`, or 0: no rope
    10 sines
    11 stride of both, in floats
    12 rope kind    NORM (0): neighbours (2i, 2i+1); NEOX (1): halves (i, i + pairs)
    13 pairs        rotated pairs: the first 2 * pairs dimensions of a head
    14 factors      float32 [T] by which queries are multiplied at the end, or 0
    15 norm last    0: norm, then rope; 1: rope, then norm
    16 q norm kind  RMS (0), LAYER (1), NO_NORM (2)
    17 q weight     float32, or 0 for none
    18 q bias       float32, or 0 for none
    19 q eps        float32 bits
    20 q apart      floats from one head's weights to the next: 0 if all share them, else hd
    21..25          the same for keys
    26 positions    int32 [T]
    27 segments     int32 [T]: segment of each token
    28 table        int32 [S][width]: block of each 32 positions
    29 table width
    30 K blocks     [blocks][nkv] parts (kv.py)
    31 V blocks     [blocks][nkv] parts
    """
    place_items(F16, args, first, last)


@kernel
def place_heads_q8_0(args: int, first: int, last: int, scratch: int) -> None:
    """As `place_heads`, with K and V in q8_0."""
    place_items(Q8_0, args, first, last)


PLACE_KERNELS = {"f16": place_heads, "q8_0": place_heads_q8_0}
