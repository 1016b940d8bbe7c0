"""Panel products: quantised weights times the prompt tokens of a step.

    out[t] = residual + scale * (W x[t] + b)

An item is a tile of ROWS_PER_TILE weight rows. The raw blocks of a tile are unpacked into a panel
of unsigned bytes (unpack.py), DEPTH values of the rows at a time so that it stays in the
first-level cache, and one micro-kernel multiplies it by all tokens. Activations are int8 with one
float32 scale and one scaled sum per 16 values, in natural order.

A token's sum has one shape: integers within 16 values, float32 across them in the order of the
row, whatever the number of tokens. There is one register tile of several tokens; where fewer are
left, the last one is repeated.

Argument block (int64 slots):
     0  address of the raw weights            1  bytes per weight row
     2  number of rows                        3  number of columns K, a multiple of the block length
     4  address of xq, int8 [tokens][Kp]      5  bytes from token to token of xq
     6  address of xd, float32 [tokens][Kp/16], scales
     7  address of xs, float32 [tokens][Kp/16], scale * sum of the 16 int8
     8  elements from token to token of xd and xs
     9  address of out, float32              10  elements from token to token of out
    11  address of b, float32 [rows], or 0   12  1: the residual is what out holds, 0: there is none
    13  float32 bits of scale
    14  address of the first token, int64    15  address of the token after the last, int64
Scratch: 64 KiB and 128 bytes a token.
"""

from dataclasses import dataclass

from kernels_cpu.kernel import Kernel, isa, kernel
from kernels_cpu.simd import Ir, Value, emits, f32, i8, i32, i64, vec, void
from kernels_cpu.unpack import (
    FORMATS,
    GROUP,
    LANES,
    PANEL_ROWS,
    STEP_BYTES,
    Blocks,
    Format,
    PanelBlock,
    group_bytes,
)

ROWS_PER_TILE = PANEL_ROWS
DEPTH = 512
PANEL_AT, SUMS_AT = 4096, 65536
SUMS_BYTES = 4 * PANEL_ROWS


@dataclass(frozen=True, slots=True)
class RegisterTile:
    """`tokens` tokens times `columns` vectors of `lanes` rows."""

    tokens: int
    columns: int
    lanes: int

    @property
    def bytes(self) -> int:
        """What a step of one group takes of the panel's STEP_BYTES."""
        return 4 * self.columns * self.lanes


def register_tile() -> RegisterTile:
    """The sums, their integers and the operands of a step must fit into 32 or 16 registers."""
    return RegisterTile(4, 2, 16) if isa() in ("amx", "avx512") else RegisterTile(2, 2, 8)


@dataclass(frozen=True, slots=True)
class Args:
    """The argument block, read."""

    e: Ir
    address: Value

    def __getitem__(self, index: int) -> Value:
        return self.e.load(self.e.at(self.address, 8 * index), i64, align=8)

    def float(self, index: int) -> Value:
        return self.e.load(self.e.at(self.address, 8 * index), f32, align=8)


def smaller(e: Ir, a: Value, b: Value) -> Value:
    return e.b.select(e.b.icmp_signed("<", a, b), a, b)


def ceil_div(e: Ir, a: Value, n: int) -> Value:
    return e.b.udiv(e.at(a, n - 1), e.const(n))


def panel_product(e: Ir, args: Value, first: Value, last: Value, scratch: Value, f: Format) -> None:
    """All of a panel product's kernel."""
    slots = Args(e, args)
    begin = e.load(slots[14], i64, align=8)
    tokens = e.b.sub(e.load(slots[15], i64, align=8), begin)
    columns = slots[3]
    panel, sums = e.at(scratch, PANEL_AT), e.at(scratch, SUMS_AT)
    some = e.b.icmp_signed(">", tokens, e.const(0))
    tiles = e.b.select(some, e.b.sub(last, first), e.const(0))
    with e.loop(tiles) as tile:
        row = e.mul(e.at(first, tile.index), ROWS_PER_TILE)
        list_rows(e, slots, row, scratch)
        clear(e, sums, tokens)
        with e.loop(ceil_div(e, columns, DEPTH)) as part:
            value = e.mul(part.index, DEPTH)
            groups = smaller(e, e.b.sub(columns, value), e.const(DEPTH))
            groups = e.b.udiv(groups, e.const(GROUP))
            unpack_panel(e, f, scratch, value, groups, panel)
            multiply(e, f, slots, panel, begin, tokens, value, groups, sums)
        finish(e, slots, row, begin, tokens, sums)


def list_rows(e: Ir, slots: Args, row: Value, table: Value) -> None:
    """Write the addresses of the tile's rows; those after the last repeat the last."""
    weights, row_bytes = slots[0], slots[1]
    end = e.at(slots[2], -1)
    with e.loop(e.const(PANEL_ROWS)) as r:
        address = e.at(weights, e.b.mul(smaller(e, e.at(row, r.index), end), row_bytes))
        e.store(address, e.at(table, e.mul(r.index, 8)), 8)


def clear(e: Ir, sums: Value, tokens: Value) -> None:
    zero = e.const(0.0, vec(f32, LANES))
    with e.loop(e.mul(tokens, SUMS_BYTES // 64)) as l:
        e.store(zero, e.at(sums, e.mul(l.index, 64)), 64)


def unpack_panel(e: Ir, f: Format, rows: Value, value: Value, groups: Value, panel: Value) -> None:
    """Unpack `groups` groups that begin at `value` of each row."""
    first = e.mul(e.b.udiv(value, e.const(f.block_length)), f.block_bytes)
    per_block = f.block_length // GROUP
    with e.loop(e.const(PANEL_ROWS // LANES)) as half:
        table = e.at(rows, e.mul(half.index, 8 * LANES))
        out = e.at(panel, e.mul(half.index, 4 * LANES))
        with e.loop(e.b.udiv(groups, e.const(per_block))) as block:
            offset = e.at(first, e.mul(block.index, f.block_bytes))
            to = e.at(out, e.mul(block.index, per_block * group_bytes(f.scales)))
            f.unpack(Blocks(e, table, offset), PanelBlock(e, to, f.scales))


def multiply(
    e: Ir,
    f: Format,
    slots: Args,
    panel: Value,
    begin: Value,
    tokens: Value,
    value: Value,
    groups: Value,
    sums: Value,
) -> None:
    """Add panel times activations to the sums of all tokens."""
    tile = register_tile()
    end = e.at(tokens, -1)
    with e.loop(ceil_div(e, tokens, tile.tokens)) as block:
        places = []
        for m in range(tile.tokens):
            t = e.at(e.mul(block.index, tile.tokens), m)
            places.append(smaller(e, t, end) if m else t)
        inputs = [activations(e, slots, e.at(begin, t), value) for t in places]
        with e.loop(e.const(STEP_BYTES // tile.bytes)) as part:
            shift = e.mul(part.index, tile.bytes)
            outputs = [e.at(sums, e.mul(t, SUMS_BYTES), shift) for t in places]
            micro_kernel(e, f, tile, e.at(panel, shift), inputs, groups, outputs)


@dataclass(frozen=True, slots=True)
class Activations:
    """Addresses of one token's int8 values, scales and sums."""

    values: Value
    scales: Value
    sums: Value


def activations(e: Ir, slots: Args, token: Value, value: Value) -> Activations:
    """Of a token, from `value` on."""
    at_scale = e.mul(e.at(e.b.mul(token, slots[8]), e.b.udiv(value, e.const(16))), 4)
    values = e.at(slots[4], e.b.mul(token, slots[5]), value)
    return Activations(values, e.at(slots[6], at_scale), e.at(slots[7], at_scale))


def micro_kernel(
    e: Ir,
    f: Format,
    tile: RegisterTile,
    panel: Value,
    inputs: list[Activations],
    groups: Value,
    outputs: list[Value],
) -> None:
    """outputs[m][row] += sum over groups of scale * xd * (codes . xq) + bias * xs, in float32."""
    floats = vec(f32, tile.lanes)
    places = [4 * tile.lanes * n for n in range(tile.columns)]
    pairs = [(m, n) for m in range(tile.tokens) for n in range(tile.columns)]
    totals = {pair: e.variable(e.const(0.0, floats)) for pair in pairs}
    for (m, n), total in totals.items():
        e.set(total, e.load(e.at(outputs[m], places[n]), floats, 4 * tile.lanes))
    with e.loop(groups) as g:
        group = e.at(panel, e.mul(g.index, group_bytes(f.scales)))
        now = [
            Activations(
                e.at(x.values, e.mul(g.index, GROUP)),
                e.at(x.scales, e.mul(g.index, 8)),
                e.at(x.sums, e.mul(g.index, 8)),
            )
            for x in inputs
        ]
        emit = two_scales if f.scales == 2 else one_scale
        emit(e, f, tile, group, now, totals)
    for (m, n), total in totals.items():
        e.store(e.get(total), e.at(outputs[m], places[n]), 4 * tile.lanes)


Sums = dict[tuple[int, int], Value]


def dot16(
    e: Ir, f: Format, tile: RegisterTile, group: Value, xs: list[Activations], half: int
) -> Sums:
    """float32 of codes . xq over 16 values of the group, for each token and column."""
    zero = e.const(0, vec(i32, tile.lanes))
    dots: Sums = {(m, n): zero for m in range(tile.tokens) for n in range(tile.columns)}
    for step in range(4 * half, 4 * half + 4):
        codes = [
            e.load(
                e.at(group, step * STEP_BYTES + 4 * tile.lanes * n),
                vec(i8, 4 * tile.lanes),
                4 * tile.lanes,
            )
            for n in range(tile.columns)
        ]
        for m, x in enumerate(xs):
            word = e.load(e.at(x.values, 4 * step), i32)
            spread = e.b.bitcast(e.splat(word, tile.lanes), codes[0].type)
            for n, code in enumerate(codes):
                dots[m, n] = e.dot4(dots[m, n], code, spread, wide=f.largest_code > 127)
    return {place: e.b.sitofp(dot, vec(f32, tile.lanes)) for place, dot in dots.items()}


def one_scale(
    e: Ir, f: Format, tile: RegisterTile, group: Value, xs: list[Activations], totals: Sums
) -> None:
    """A group whose weight scale counts for 32 values: the two activation scales meet first."""
    scaled: Sums = {}
    for half in range(2):
        dots = dot16(e, f, tile, group, xs, half)
        for m, x in enumerate(xs):
            d = e.splat(e.load(e.at(x.scales, 4 * half), f32), tile.lanes)
            for n in range(tile.columns):
                dot = dots[m, n]
                scaled[m, n] = e.fma(dot, d, scaled[m, n]) if half else e.b.fmul(dot, d)
    scales = parameters(e, tile, group, 8)
    biases = parameters(e, tile, group, 9)
    for m, x in enumerate(xs):
        s = e.b.fadd(e.load(x.sums, f32), e.load(e.at(x.sums, 4), f32))
        s = e.splat(s, tile.lanes)
        for n in range(tile.columns):
            total = e.fma(scaled[m, n], scales[n], e.get(totals[m, n]))
            e.set(totals[m, n], e.fma(biases[n], s, total))


def two_scales(
    e: Ir, f: Format, tile: RegisterTile, group: Value, xs: list[Activations], totals: Sums
) -> None:
    """A group with a weight scale for each 16 values."""
    for half in range(2):
        dots = dot16(e, f, tile, group, xs, half)
        scales = parameters(e, tile, group, 8 + half)
        biases = parameters(e, tile, group, 10 + half)
        for m, x in enumerate(xs):
            d = e.splat(e.load(e.at(x.scales, 4 * half), f32), tile.lanes)
            s = e.splat(e.load(e.at(x.sums, 4 * half), f32), tile.lanes)
            for n in range(tile.columns):
                scaled = e.b.fmul(scales[n], d)
                total = e.fma(dots[m, n], scaled, e.get(totals[m, n]))
                e.set(totals[m, n], e.fma(biases[n], s, total))


def parameters(e: Ir, tile: RegisterTile, group: Value, line: int) -> list[Value]:
    """The scales or biases at one line of a group, a vector a column."""
    width = 4 * tile.lanes
    at = line * STEP_BYTES
    return [
        e.load(e.at(group, at + width * n), vec(f32, tile.lanes), width)
        for n in range(tile.columns)
    ]


def finish(e: Ir, slots: Args, row: Value, begin: Value, tokens: Value, sums: Value) -> None:
    """Write the tile's sums of all tokens, with bias, scale and residual."""
    floats = vec(f32, LANES)
    scale = e.splat(slots.float(13), LANES)
    has_bias = e.b.icmp_unsigned("!=", slots[11], e.const(0))
    has_residual = e.b.icmp_unsigned("!=", slots[12], e.const(0))
    for half in range(PANEL_ROWS // LANES):
        start = e.at(row, half * LANES)
        mask = row_mask(e, e.b.sub(slots[2], start))
        at_row = e.mul(start, 4)
        bias = masked_load(e, e.at(slots[11], at_row), row_mask_if(e, has_bias, mask))
        old_mask = row_mask_if(e, has_residual, mask)
        with e.loop(tokens) as t:
            total = e.load(e.at(sums, e.mul(t.index, SUMS_BYTES), half * 4 * LANES), floats, 64)
            token = e.b.mul(e.at(begin, t.index), slots[10])
            out = e.at(slots[9], e.mul(token, 4), at_row)
            old = masked_load(e, out, old_mask)
            masked_store(e, e.fma(e.b.fadd(total, bias), scale, old), out, mask)


def row_mask(e: Ir, rows: Value) -> Value:
    """<16 x i1>: lanes below `rows`."""
    lanes = e.const(0, vec(i32, LANES)).type
    numbers = lanes([*range(LANES)])
    return e.b.icmp_signed(
        "<", numbers, e.splat(e.b.trunc(smaller(e, rows, e.const(LANES)), i32), LANES)
    )


def row_mask_if(e: Ir, condition: Value, mask: Value) -> Value:
    return e.b.and_(e.splat(condition, LANES), mask)


def masked_load(e: Ir, address: Value, mask: Value) -> Value:
    """float32 of the masked lanes, 0 in the others, which are not touched."""
    floats = vec(f32, LANES)
    pointer = e.pointer(address, floats)
    return e.call(
        "llvm.masked.load.v16f32.p0", floats, pointer, e.const(4, i32), mask, e.const(0.0, floats)
    )


def masked_store(e: Ir, value: Value, address: Value, mask: Value) -> None:
    pointer = e.pointer(address, value.type)
    e.call("llvm.masked.store.v16f32.p0", void, value, pointer, e.const(4, i32), mask)


@emits(4)
def _q4_1(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    panel_product(e, args, first, last, scratch, FORMATS["Q4_1"])


@emits(4)
def _q5_0(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    panel_product(e, args, first, last, scratch, FORMATS["Q5_0"])


@emits(4)
def _q8_0(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    panel_product(e, args, first, last, scratch, FORMATS["Q8_0"])


@emits(4)
def _q4_k(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    panel_product(e, args, first, last, scratch, FORMATS["Q4_K"])


@emits(4)
def _q6_k(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    panel_product(e, args, first, last, scratch, FORMATS["Q6_K"])


@kernel
def panel_product_q4_1(args: int, first: int, last: int, scratch: int) -> None:
    _q4_1(args, first, last, scratch)


@kernel
def panel_product_q5_0(args: int, first: int, last: int, scratch: int) -> None:
    _q5_0(args, first, last, scratch)


@kernel
def panel_product_q8_0(args: int, first: int, last: int, scratch: int) -> None:
    _q8_0(args, first, last, scratch)


@kernel
def panel_product_q4_k(args: int, first: int, last: int, scratch: int) -> None:
    _q4_k(args, first, last, scratch)


@kernel
def panel_product_q6_k(args: int, first: int, last: int, scratch: int) -> None:
    _q6_k(args, first, last, scratch)


PANEL_PRODUCTS: dict[str, Kernel] = {
    "Q4_1": panel_product_q4_1,
    "Q5_0": panel_product_q5_0,
    "Q8_0": panel_product_q8_0,
    "Q4_K": panel_product_q4_k,
    "Q6_K": panel_product_q6_k,
}
