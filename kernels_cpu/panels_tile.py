"""What every panel product does around its micro-kernel: tiles, rows, sums and the epilogue.

The argument block is described in panels.py. Scratch: 64 KiB for a panel (first the addresses of the
rows of the tiles that go together), then for each token, tokens rounded up to 32, 128 bytes a tile:
float32 sums of the tile's rows; after all of these what a micro-kernel prepares of each token.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from kernels_cpu.simd import Ir, Value, f32, i32, i64, vec, void
from kernels_cpu.unpack_blocks import GROUP, LANES, Blocks, Format, Panel

ROWS_PER_TILE = 32
TILES_TOGETHER = 8  # at most: they share what is prepared, and the activations in the second cache
ROWS_BYTES = 8 * ROWS_PER_TILE
PANEL_AT, SUMS_AT = 4096, 65536
PANEL_BYTES = SUMS_AT - PANEL_AT
SUMS_BYTES = 4 * ROWS_PER_TILE
MOST_TOKENS = 32  # of a register tile; the size of any other divides it


@dataclass(frozen=True, slots=True)
class Args:
    """The argument block, read."""

    e: Ir
    address: Value

    def __getitem__(self, index: int) -> Value:
        return self.e.load(self.e.at(self.address, 8 * index), i64, align=8)

    def float(self, index: int) -> Value:
        return self.e.load(self.e.at(self.address, 8 * index), f32, align=8)


@dataclass(frozen=True, slots=True)
class Product:
    """One of `tiles` tiles that go together, times `tokens` tokens from `begin` on."""

    e: Ir
    args: Args
    begin: Value
    tokens: Value
    scratch: Value
    tile: Value
    tiles: Value

    @property
    def rows(self) -> Value:
        """Address of the addresses of the tile's rows."""
        return self.e.at(self.scratch, self.e.mul(self.tile, ROWS_BYTES))

    @property
    def panel(self) -> Value:
        return self.e.at(self.scratch, PANEL_AT)

    @property
    def sums(self) -> Value:
        return self.sums_of(self.tile)

    @property
    def prepared(self) -> Value:
        return self.sums_of(self.e.const(TILES_TOGETHER))

    def sums_of(self, tile: Value) -> Value:
        size = self.e.mul(self.rounded, SUMS_BYTES)
        return self.e.at(self.scratch, SUMS_AT, self.e.b.mul(tile, size))

    @property
    def rounded(self) -> Value:
        """As many tokens as there is room for: register tiles may reach beyond the last."""
        return self.e.mul(divide_up(self.e, self.tokens, MOST_TOKENS), MOST_TOKENS)


def smaller(e: Ir, a: Value, b: Value) -> Value:
    return e.b.select(e.b.icmp_signed("<", a, b), a, b)


def larger(e: Ir, a: Value, b: Value) -> Value:
    return e.b.select(e.b.icmp_signed(">", a, b), a, b)


def divide(e: Ir, a: Value, n: int) -> Value:
    return e.b.udiv(a, e.const(n))


def divide_up(e: Ir, a: Value, n: int) -> Value:
    return divide(e, e.at(a, n - 1), n)


Part = Callable[[Product, Value, Value], None]


def for_tiles(
    e: Ir,
    args: Value,
    first: Value,
    last: Value,
    scratch: Value,
    depth: int,
    part: Part,
    prepare: Part = lambda p, value, values: None,
) -> None:
    """All of a kernel but its arithmetic.

    part(p, value, values) adds a tile's rows times all tokens to the sums, over `values` columns from
    `value` on; before the tiles that go together, prepare(p, value, values) is done once for them.
    """
    slots = Args(e, args)
    begin = e.load(slots[14], i64, align=8)
    tokens = e.b.sub(e.load(slots[15], i64, align=8), begin)
    some = e.b.icmp_signed(">", tokens, e.const(0))
    tiles = e.b.select(some, e.b.sub(last, first), e.const(0))
    groups = divide_up(e, tiles, TILES_TOGETHER)
    with e.loop(groups) as group:
        # Groups of nearly one size: tiles that are alone pay for their preparation alone.
        done, end = (e.b.udiv(e.b.mul(tiles, e.at(group.index, k)), groups) for k in range(2))
        together = e.b.sub(end, done)
        start = e.at(first, done)
        product = Product(e, slots, begin, tokens, scratch, e.const(0), together)

        def each(body: Callable[[Product, Value], None]) -> None:
            with e.loop(together) as l:
                body(replace(product, tile=l.index), e.mul(e.at(start, l.index), ROWS_PER_TILE))

        def one_part(value: Value, values: Value) -> None:
            prepare(product, value, values)
            each(lambda p, row: part(p, value, values))

        each(begin_tile)
        for_parts(product, depth, one_part)
        each(finish)


def begin_tile(p: Product, row: Value) -> None:
    list_rows(p, row)
    clear_sums(p)


@dataclass(frozen=True, slots=True)
class RegisterTile:
    """What a micro-kernel computes at once: `tokens` tokens, `columns` vectors of `lanes` rows."""

    tokens: int
    columns: int
    lanes: int

    @property
    def column_bytes(self) -> int:
        """Four bytes of each row of a column: an int32, a float32 or four codes."""
        return 4 * self.lanes

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Token and column of every vector of sums."""
        return [(m, n) for m in range(self.tokens) for n in range(self.columns)]


def for_register_tiles(
    p: Product, tile: RegisterTile, body: Callable[[Value, Value], None]
) -> None:
    """body(first, shift) for the first of every `tile.tokens` tokens, and for all rows of a tile.

    `first` counts from p.begin; `shift` is the first column's byte in a line of 32 rows.
    """
    e = p.e
    width = tile.column_bytes * tile.columns
    with (
        e.loop(divide_up(e, p.tokens, tile.tokens)) as block,
        e.loop(e.const(SUMS_BYTES // width)) as part,
    ):
        body(e.mul(block.index, tile.tokens), e.mul(part.index, width))


def existing(p: Product, token: Value) -> Value:
    """The token, counted from 0, that stands for `token` of p: the last one for any beyond."""
    return p.e.at(p.begin, smaller(p.e, token, p.e.at(p.tokens, -1)))


def for_parts(p: Product, depth: int, body: Callable[[Value, Value], None]) -> None:
    """body(value, values) for parts of the columns, which depend on their number alone.

    A part has `depth` values; the last one has more instead of another that is short, and never
    more than `largest_part(depth)`.
    """
    e, columns = p.e, p.args[3]
    extra = largest_part(depth) - depth
    count = divide_up(e, larger(e, e.at(columns, -extra), e.const(1)), depth)
    end = e.at(count, -1)
    with e.loop(count) as part:
        value = e.mul(part.index, depth)
        is_last = e.b.icmp_unsigned("==", part.index, end)
        body(value, e.b.select(is_last, e.b.sub(columns, value), e.const(depth)))


def largest_part(depth: int) -> int:
    return depth + depth // 2


@dataclass(frozen=True, slots=True)
class NextTile:
    """Fetches what the next tile will unpack into the caches, a little at each step of this one.

    `place` is the variable that holds the next address; `last` is where it stays.
    """

    e: Ir
    place: Value
    last: Value

    def fetch(self, lines: int) -> None:
        """The next `lines` cache lines. Past the end of the weights this does nothing."""
        e = self.e
        address = e.get(self.place)
        for line in range(lines):
            e.prefetch(e.at(address, 64 * line))
        e.set(self.place, smaller(e, e.at(address, 64 * lines), self.last))


def next_tile(p: Product, first: Value, size: Value) -> NextTile:
    """For a part of the columns: `size` bytes of each row, from byte `first` on.

    Tiles lie one after the other, so that an equal share of the next ones is 32 times that.
    """
    e = p.e
    rows = e.mul(p.tiles, ROWS_PER_TILE)
    next_ones = e.at(e.load(p.scratch, i64, align=8), e.b.mul(p.args[1], rows))
    share = e.at(e.b.mul(first, p.tiles), e.b.mul(size, p.tile))
    start = e.at(next_ones, e.mul(share, ROWS_PER_TILE))
    place = e.variable(e.const(0))
    e.set(place, start)
    return NextTile(e, place, e.at(start, e.mul(size, ROWS_PER_TILE)))


def list_rows(p: Product, row: Value) -> None:
    """Write the addresses of the tile's rows; those after the last repeat the last."""
    e = p.e
    weights, row_bytes, end = p.args[0], p.args[1], e.at(p.args[2], -1)
    with e.loop(e.const(ROWS_PER_TILE)) as r:
        address = e.at(weights, e.b.mul(smaller(e, e.at(row, r.index), end), row_bytes))
        e.store(address, e.at(p.rows, e.mul(r.index, 8)), 8)


def row_bytes(e: Ir, f: Format, values: Value) -> Value:
    """What `values` values of a row take; they are whole blocks."""
    return e.mul(divide(e, values, f.block_length), f.block_bytes)


def unpack_tile(
    p: Product,
    f: Format,
    value: Value,
    groups: Value,
    place: Callable[[Value, Value], Panel],
) -> None:
    """Unpack `groups` groups that begin at `value` of each row.

    place(group, half) says where a block whose first group it is goes, of 16 of the rows.
    """
    e = p.e
    first = row_bytes(e, f, value)
    per_block = f.block_length // GROUP
    with e.loop(e.const(ROWS_PER_TILE // LANES)) as half:
        table = e.at(p.rows, e.mul(half.index, 8 * LANES))
        with e.loop(divide(e, groups, per_block)) as block:
            blocks = Blocks(e, table, e.at(first, e.mul(block.index, f.block_bytes)))
            f.unpack(blocks, place(e.mul(block.index, per_block), half.index))


def clear_sums(p: Product) -> None:
    e, zero = p.e, p.e.const(0.0, vec(f32, LANES))
    with e.loop(e.mul(p.rounded, SUMS_BYTES // 64)) as l:
        e.store(zero, e.at(p.sums, e.mul(l.index, 64)), 64)


def finish(p: Product, row: Value) -> None:
    """Write the tile's sums of all tokens, with bias, scale and residual."""
    e, args = p.e, p.args
    scale = e.splat(args.float(13), LANES)
    has_bias = e.splat(e.b.icmp_unsigned("!=", args[11], e.const(0)), LANES)
    has_residual = e.splat(e.b.icmp_unsigned("!=", args[12], e.const(0)), LANES)
    halves = [64 * half for half in range(ROWS_PER_TILE // LANES)]
    left = e.b.sub(args[2], row)
    masks = [first_lanes(e, e.at(left, -half // 4)) for half in halves]
    biases = [
        masked_load(e, e.at(args[11], e.mul(row, 4), half), e.b.and_(has_bias, mask))
        for half, mask in zip(halves, masks)
    ]
    out, stride = e.at(args[9], e.mul(row, 4)), e.mul(args[10], 4)
    with e.loop(p.tokens) as t:
        place = e.at(out, e.b.mul(e.at(p.begin, t.index), stride))
        sums = e.at(p.sums, e.mul(t.index, SUMS_BYTES))
        for half, mask, bias in zip(halves, masks, biases):
            total = e.b.fadd(e.load(e.at(sums, half), bias.type, 64), bias)
            old = masked_load(e, e.at(place, half), e.b.and_(has_residual, mask))
            masked_store(e, e.fma(total, scale, old), e.at(place, half), mask)


def first_lanes(e: Ir, n: Value) -> Value:
    """<16 x i1>: lanes below n."""
    lanes = vec(i32, LANES)([*range(LANES)])
    n = e.b.trunc(smaller(e, n, e.const(LANES)), i32)
    return e.b.icmp_signed("<", lanes, e.splat(n, LANES))


def masked_load(e: Ir, address: Value, mask: Value) -> Value:
    """float32 of the masked lanes, 0 in the others, which are not touched."""
    floats = vec(f32, LANES)
    operands = e.pointer(address, floats), e.const(4, i32), mask, e.const(0.0, floats)
    return e.call("llvm.masked.load.v16f32.p0", floats, *operands)


def masked_store(e: Ir, value: Value, address: Value, mask: Value) -> None:
    operands = value, e.pointer(address, value.type), e.const(4, i32), mask
    e.call("llvm.masked.store.v16f32.p0", void, *operands)
