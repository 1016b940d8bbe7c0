"""The float micro-kernel: F32, F16 and BF16 weights, exact as they are, times float32 activations.

A panel is float32 [DEPTH][32 rows]. A token's sum is a chain of fused multiply-adds in the order of
the row for each DEPTH values, and the chains are added in order.
"""

from dataclasses import dataclass

from kernels_cpu.kernel import isa
from kernels_cpu.panels_tile import (
    PANEL_BYTES,
    ROWS_PER_TILE,
    SUMS_BYTES,
    NextTile,
    Product,
    RegisterTile,
    divide_up,
    existing,
    for_register_tiles,
    for_tiles,
    largest_part,
    next_tile,
    smaller,
)
from kernels_cpu.simd import Ir, Value, f32, i16, i32, vec
from kernels_cpu.unpack_blocks import LANES, Blocks

DEPTH = 128
PIECE_BYTES = 16
LINE_BYTES = 4 * ROWS_PER_TILE
assert largest_part(DEPTH) * LINE_BYTES <= PANEL_BYTES


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A weight type by the bytes of a value; brain: its 16 bits are the upper half of a float32."""

    value_bytes: int
    brain: bool = False

    @property
    def piece(self) -> int:
        """Values in PIECE_BYTES, what is unpacked of a row at once."""
        return PIECE_BYTES // self.value_bytes

    def floats(self, e: Ir, word: Value) -> list[Value]:
        """float32 lanes of the one or two values in each lane of <16 x i32>."""
        if self.value_bytes == 4:
            return [e.b.bitcast(word, vec(f32, LANES))]
        sixteen = e.const(16, vec(i32, LANES))
        halves = [e.b.trunc(w, vec(i16, LANES)) for w in (word, e.b.lshr(word, sixteen))]
        widen = e.bf16_to_float if self.brain else e.half_to_float
        return [widen(half) for half in halves]


FLOAT_FORMATS = {
    "F32": FloatFormat(4),
    "F16": FloatFormat(2),
    "BF16": FloatFormat(2, brain=True),
}


def float_panel_product(
    e: Ir, args: Value, first: Value, last: Value, scratch: Value, f: FloatFormat
) -> None:
    """All of the kernel of one weight type. A row has 16 bytes or more."""

    def part(p: Product, value: Value, values: Value) -> None:
        unpack(p, f, value, values)
        first, size = e.mul(value, f.value_bytes), e.mul(values, f.value_bytes)
        multiply(p, value, values, next_tile(p, first, size))

    for_tiles(e, args, first, last, scratch, DEPTH, part)


def unpack(p: Product, f: FloatFormat, value: Value, values: Value) -> None:
    """Bring `values` values of each row, from `value` on, into the panel."""
    e = p.e
    end = e.at(values, -f.piece)
    with e.loop(e.const(ROWS_PER_TILE // LANES)) as half:
        table = e.at(p.rows, e.mul(half.index, 8 * LANES))
        out = e.at(p.panel, e.mul(half.index, 4 * LANES))
        with e.loop(divide_up(e, values, f.piece)) as piece:
            # The last piece ends with the row: it brings some values again, from before the panel's
            # beginning if fewer are left than a piece has; there is room for these in front of it.
            at = smaller(e, e.mul(piece.index, f.piece), end)
            offset = e.mul(e.at(value, at), f.value_bytes)
            to = e.at(out, e.mul(at, LINE_BYTES))
            numbers = [n for word in Blocks(e, table, offset).words(0) for n in f.floats(e, word)]
            for k, number in enumerate(numbers):
                e.store(number, e.at(to, k * LINE_BYTES), 64)


def register_tile() -> RegisterTile:
    """Sums and operands fit into 32 or 16 registers; enough chains to hide their latency."""
    return RegisterTile(8, 2, 16) if isa() in ("amx", "avx512") else RegisterTile(4, 2, 8)


def multiply(p: Product, value: Value, values: Value, ahead: NextTile) -> None:
    """Add panel times activations to the sums of all tokens."""
    e, tile = p.e, register_tile()
    at_value = e.mul(value, 4)

    def body(first: Value, shift: Value) -> None:
        tokens = [existing(p, e.at(first, m)) for m in range(tile.tokens)]
        inputs = [e.at(p.args[4], e.b.mul(t, p.args[5]), at_value) for t in tokens]
        sums = e.at(p.sums, e.mul(first, SUMS_BYTES), shift)
        micro_kernel(e, tile, e.at(p.panel, shift), inputs, values, sums, ahead)

    for_register_tiles(p, tile, body)


def micro_kernel(
    e: Ir,
    tile: RegisterTile,
    panel: Value,
    inputs: list[Value],
    values: Value,
    sums: Value,
    ahead: NextTile,
) -> None:
    """sums[m][row] += sum over k < values of panel[k][row] * inputs[m][k]."""
    floats, width = vec(f32, tile.lanes), tile.column_bytes
    totals = {pair: e.variable(e.const(0.0, floats)) for pair in tile.pairs}
    for total in totals.values():
        e.set(total, e.const(0.0, floats))
    with e.loop(values) as k:
        ahead.fetch(1)
        line = e.at(panel, e.mul(k.index, LINE_BYTES))
        weights = [e.load(e.at(line, width * n), floats, width) for n in range(tile.columns)]
        for m, x in enumerate(inputs):
            number = e.splat(e.load(e.at(x, e.mul(k.index, 4)), f32), tile.lanes)
            for n, weight in enumerate(weights):
                e.set(totals[m, n], e.fma(weight, number, e.get(totals[m, n])))
    for (m, n), total in totals.items():
        place = e.at(sums, m * SUMS_BYTES + n * width)
        e.store(e.b.fadd(e.load(place, floats, width), e.get(total)), place, width)
