"""Panel products on bfloat16 tiles (amx.py): the weights of a tile are rounded as they are unpacked.

Activations are packed by `pack_tiles`: bfloat16 tiles [token / 16][value / 32][16][32], counted
from the first prompt token, with room for a multiple of 32 tokens. In the argument block (panels.py)

     4  address of the tiles                  5  bytes from 16 tokens to the next 16, 32 * K or more

A token's result depends neither on its place in a tile nor on its neighbours.
"""

from dataclasses import dataclass, field

from kernels_cpu.amx import (
    TILE_BYTES,
    TOKENS,
    WEIGHTS_BYTES,
    Operands,
    TileUnit,
    nearest_pair,
)
from kernels_cpu.kernel import kernel
from kernels_cpu.panels_tile import (
    PANEL_BYTES,
    ROWS_BYTES,
    SUMS_BYTES,
    TILES_TOGETHER,
    Args,
    NextTile,
    Product,
    divide,
    divide_up,
    for_tiles,
    largest_part,
    next_tile,
    row_bytes,
    unpack_tile,
)
from kernels_cpu.simd import Ir, Value, emits, i64
from kernels_cpu.unpack_blocks import GROUP, LANES, Format, floats, ints

DEPTH = 512
CONFIG_AT = 3072
assert TILES_TOGETHER * ROWS_BYTES <= CONFIG_AT
# For each step of 32 tokens: enough for all of the next tile if there are some 128 tokens.
LINES_AHEAD = 4
assert TOKENS == GROUP == 2 * LANES
assert largest_part(DEPTH) // GROUP * WEIGHTS_BYTES <= PANEL_BYTES


@dataclass(frozen=True, slots=True)
class TilePanel:
    """Where a block of 16 rows goes: `address` is the first of its tiles, as values of weights."""

    e: Ir
    address: Value
    format: Format
    scales: dict[int, tuple[Value, Value | None]] = field(default_factory=dict)

    def put_scale(self, index: int, scale: Value, bias: Value | None = None) -> None:
        self.scales[index] = scale, bias

    def put_codes(self, value: int, codes: Value) -> None:
        e = self.e
        w = [self.weight(value, codes, k) for k in range(4)]
        at = value // GROUP * WEIGHTS_BYTES + value % GROUP // 2 * 64
        for k in range(2):
            pair = nearest_pair(e, w[2 * k], w[2 * k + 1])
            e.store(pair, e.at(self.address, at + 64 * k), 64)

    def weight(self, value: int, codes: Value, k: int) -> Value:
        """float32 of byte k of the codes: scale * (code - offset) or scale * code + bias."""
        b, const = self.e.b, self.e.const
        scale, bias = self.scales[value // self.format.scale_length]
        code = b.lshr(codes, const(8 * k, ints)) if k else codes
        if k < 3:
            code = b.and_(code, const(255, ints))
        if bias is not None:
            return self.e.fma(b.sitofp(code, floats), scale, bias)
        assert self.format.offset is not None
        code = b.sub(code, const(self.format.offset, ints))
        return b.fmul(b.sitofp(code, floats), scale)


def tile_panel_product(
    e: Ir, args: Value, first: Value, last: Value, scratch: Value, f: Format, unit: TileUnit
) -> None:
    """All of the kernel of one weight type, with bfloat16 tiles of activations."""

    def part(p: Product, value: Value, values: Value) -> None:
        groups = divide(e, values, GROUP)
        unpack_tile(p, f, value, groups, lambda group, half: tile_panel(p, f, group, half))
        ahead = next_tile(p, row_bytes(e, f, value), row_bytes(e, f, values))
        multiply(p, unit, divide(e, value, GROUP), groups, ahead)

    unit.begin(e, e.at(scratch, CONFIG_AT))
    for_tiles(e, args, first, last, scratch, DEPTH, part)
    unit.end(e)


def tile_panel(p: Product, f: Format, group: Value, half: Value) -> TilePanel:
    e = p.e
    at = e.at(p.panel, e.mul(group, WEIGHTS_BYTES), e.mul(half, TILE_BYTES))
    return TilePanel(e, at, f)


def multiply(p: Product, unit: TileUnit, group: Value, groups: Value, ahead: NextTile) -> None:
    """Add panel times activations, from `group` on, to the sums of 32 tokens at a time."""
    e, stride = p.e, p.args[5]
    tiles = e.at(p.args[4], e.mul(group, TILE_BYTES))
    with e.loop(divide_up(e, p.tokens, TOKENS)) as block:
        left = e.at(tiles, e.b.mul(e.mul(block.index, 2), stride))
        sums = e.at(p.sums, e.mul(block.index, TOKENS * SUMS_BYTES))
        operands = Operands(left, stride, p.panel, sums, groups)
        unit.product(e, operands, lambda: ahead.fetch(LINES_AHEAD))


@emits(4)
def _pack_tiles(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    slots = Args(e, args)
    begin = e.load(slots[5], i64, align=8)
    with e.loop(e.b.sub(last, first)) as item:
        token = e.at(first, item.index)
        at = e.mul(e.b.mul(e.at(begin, token), slots[1]), 4)
        source = e.at(slots[0], at)
        tile = e.b.mul(divide(e, token, LANES), slots[4])
        target = e.at(slots[3], tile, e.mul(e.b.and_(token, e.const(LANES - 1)), 64))
        with e.loop(divide(e, slots[2], GROUP)) as group:
            value = e.mul(group.index, GROUP)
            x = [e.load(e.at(source, e.mul(value, 4), 64 * k), floats) for k in range(2)]
            even = e.shuffle(x[0], range(0, 2 * LANES, 2), x[1])
            odd = e.shuffle(x[0], range(1, 2 * LANES, 2), x[1])
            e.store(nearest_pair(e, even, odd), e.at(target, e.mul(group.index, TILE_BYTES)), 64)


@kernel
def pack_tiles(args: int, first: int, last: int, scratch: int) -> None:
    """Items are prompt tokens, counted from the first.

    0  address of x, float32              1  elements from token to token of x
    2  K, a multiple of 32
    3  address of the tiles               4  bytes from 16 tokens to the next 16, 32 * K or more
    5  address of the first token, int64
    """
    _pack_tiles(args, first, last, scratch)
