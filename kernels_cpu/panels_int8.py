"""The int8 micro-kernel: panels of unsigned bytes (unpack.py) times int8 activations.

For each group of 16 values: four 4-way dot products, the sum of the integers as a float times the
activations' scale. What a bias or the codes' offset needs of the activations is prepared once for
a tile and DEPTH values: the sums of as many activations as a weight scale counts for.
"""

from dataclasses import dataclass

from kernels_cpu.kernel import isa
from kernels_cpu.panels_tile import (
    PANEL_BYTES,
    SUMS_BYTES,
    NextTile,
    Product,
    RegisterTile,
    divide,
    existing,
    first_lanes,
    for_register_tiles,
    for_tiles,
    largest_part,
    masked_load,
    next_tile,
    row_bytes,
    unpack_tile,
)
from kernels_cpu.simd import Ir, Value, f32, i8, i32, vec
from kernels_cpu.unpack_blocks import GROUP, LANES, STEP_BYTES, BytePanel, Format

DEPTH = 512
SCALES_BYTES = largest_part(DEPTH) // 16 * 4
PREPARED_BYTES = 2 * SCALES_BYTES
# For each group of a register tile: enough for all of the next tile if there are some 16 tokens.
LINES_AHEAD = 4
LARGEST_GROUP = (8 + 2 * 2) * STEP_BYTES
assert largest_part(DEPTH) // GROUP * LARGEST_GROUP <= PANEL_BYTES
Sums = dict[tuple[int, int], Value]


def panel_product(e: Ir, args: Value, first: Value, last: Value, scratch: Value, f: Format) -> None:
    """All of the kernel of one weight type, with int8 activations."""

    def part(p: Product, value: Value, values: Value) -> None:
        groups = divide(e, values, GROUP)
        unpack_tile(p, f, value, groups, lambda group, half: byte_panel(p, f, group, half))
        ahead = next_tile(p, row_bytes(e, f, value), row_bytes(e, f, values))
        multiply(p, f, value, groups, ahead)

    def prepare_part(p: Product, value: Value, values: Value) -> None:
        prepare(p, f, value, values)

    for_tiles(e, args, first, last, scratch, DEPTH, part, prepare_part)


def byte_panel(p: Product, f: Format, group: Value, half: Value) -> BytePanel:
    e = p.e
    at = e.at(p.panel, e.mul(group, f.group_bytes), e.mul(half, 4 * LANES))
    return BytePanel(e, at, f)


def prepare(p: Product, f: Format, value: Value, values: Value) -> None:
    """For each token, side by side: the scales of its activations, and their sums.

    Sums of as many as a weight scale counts for, times -offset where there is one.
    """
    e = p.e
    factor = e.const(1.0 if f.offset is None else -float(f.offset), vec(f32, LANES))
    firsts = range(0, SCALES_BYTES, 4 * LANES)
    masks = [first_lanes(e, e.at(divide(e, values, 16), -k // 4)) for k in firsts]
    with e.loop(p.rounded) as t:
        place = e.at(e.b.mul(existing(p, t.index), p.args[8]), divide(e, value, 16))
        scales, sums = (e.at(p.args[slot], e.mul(place, 4)) for slot in (6, 7))
        target = e.at(p.prepared, e.mul(t.index, PREPARED_BYTES))
        for k, mask in zip(firsts, masks):
            e.store(masked_load(e, e.at(scales, k), mask), e.at(target, k), 64)
        vectors = [masked_load(e, e.at(sums, k), mask) for k, mask in zip(firsts, masks)]
        if f.scales == 1:
            vectors.append(e.const(0.0, factor.type))
            vectors = [neighbour_sums(e, a, b) for a, b in zip(vectors[::2], vectors[1::2])]
        for k, v in enumerate(vectors):
            e.store(e.b.fmul(v, factor), e.at(target, SCALES_BYTES + 64 * k), 64)


def register_tile() -> RegisterTile:
    """Sums, integers, scaled integers and the operands of a step fit into 32 or 16 registers."""
    return RegisterTile(4, 2, 16) if isa() in ("amx", "avx512") else RegisterTile(2, 2, 8)


def neighbour_sums(e: Ir, a: Value, b: Value) -> Value:
    """a[0] + a[1], a[2] + a[3], ..., then those of b."""
    n = a.type.count
    even, odd = (e.shuffle(a, range(k, 2 * n, 2), b) for k in range(2))
    return e.b.fadd(even, odd)


@dataclass(frozen=True, slots=True)
class Activations:
    """Addresses of one token's int8 values, their scales and their prepared sums."""

    values: Value
    scales: Value
    sums: Value


def multiply(p: Product, f: Format, value: Value, groups: Value, ahead: NextTile) -> None:
    """Add panel times activations to the sums of all tokens."""
    e, tile = p.e, register_tile()

    def body(first: Value, shift: Value) -> None:
        tokens = [existing(p, e.at(first, m)) for m in range(tile.tokens)]
        values = [e.at(p.args[4], e.b.mul(t, p.args[5]), value) for t in tokens]
        prepared = e.at(p.prepared, e.mul(first, PREPARED_BYTES))
        sums = e.at(p.sums, e.mul(first, SUMS_BYTES), shift)
        kernel = MicroKernel(e, f, tile, ahead)
        kernel.run(e.at(p.panel, shift), values, prepared, groups, sums)

    for_register_tiles(p, tile, body)


@dataclass(frozen=True, slots=True)
class MicroKernel:
    """Emits the loop over groups for one register tile."""

    e: Ir
    f: Format
    tile: RegisterTile
    ahead: NextTile

    def run(
        self, panel: Value, values: list[Value], prepared: Value, groups: Value, sums: Value
    ) -> None:
        """sums[m][row] += sum over groups of scale * (xd * (codes . xq) + ...), in float32."""
        e, f, tile = self.e, self.f, self.tile
        floats, width = vec(f32, tile.lanes), tile.column_bytes
        places = {(m, n): e.at(sums, m * SUMS_BYTES + n * width) for m, n in tile.pairs}
        totals = {pair: e.variable(e.const(0.0, floats)) for pair in places}
        for pair, address in places.items():
            e.set(totals[pair], e.load(address, floats, width))
        with e.loop(groups) as g:
            self.ahead.fetch(LINES_AHEAD)
            group = e.at(panel, e.mul(g.index, f.group_bytes))
            at_scale, at_sum = e.mul(g.index, 8), e.mul(g.index, 4 * f.scales)
            xs = [
                Activations(
                    e.at(x, e.mul(g.index, GROUP)),
                    e.at(prepared, at_scale, m * PREPARED_BYTES),
                    e.at(prepared, at_sum, m * PREPARED_BYTES + SCALES_BYTES),
                )
                for m, x in enumerate(values)
            ]
            emit = self.one_scale if f.scales == 1 else self.two_scales
            emit(group, xs, totals)
        for pair, address in places.items():
            e.store(e.get(totals[pair]), address, width)

    def dot16(self, group: Value, xs: list[Activations], half: int) -> Sums:
        """float32 of codes . xq over 16 values of the group, for each token and column."""
        if isa() == "avx2":
            return self.dot16_of_pairs(group, xs, half)
        e, tile = self.e, self.tile
        dots: Sums = dict.fromkeys(tile.pairs, e.const(0, vec(i32, tile.lanes)))
        for step in range(4 * half, 4 * half + 4):
            codes = self.line(group, step, vec(i8, 4 * tile.lanes))
            for m, x in enumerate(xs):
                four = self.four(x, step)
                for n, code in enumerate(codes):
                    wide = self.f.largest_code > 127
                    dots[m, n] = e.dot4(dots[m, n], code, four, wide=wide)
        return {pair: e.b.sitofp(dot, vec(f32, tile.lanes)) for pair, dot in dots.items()}

    def four(self, x: Activations, step: int) -> Value:
        """Four activations, repeated for each row of a column."""
        e, n = self.e, self.tile.lanes
        return e.b.bitcast(e.splat(e.load(e.at(x.values, 4 * step), i32), n), vec(i8, 4 * n))

    def dot16_of_pairs(self, group: Value, xs: list[Activations], half: int) -> Sums:
        """dot16 at level avx2: sums of two products are added in 16 bits as long as they fit."""
        e, f, tile = self.e, self.f, self.tile
        largest = 128 if f.is_signed else f.largest_code
        fitting = max(1, 32767 // (2 * 127 * largest))
        pairs: Sums = {}
        dots: Sums = {}
        for step in range(4):
            codes = self.line(group, 4 * half + step, vec(i8, 4 * tile.lanes))
            signs = codes
            if f.is_signed:
                codes = [e.with_sign(code, code) for code in codes]
            for m, x in enumerate(xs):
                four = self.four(x, 4 * half + step)
                for n, code in enumerate(codes):
                    signed = e.with_sign(four, signs[n]) if f.is_signed else four
                    two = e.dot2(code, signed)
                    pairs[m, n] = e.b.add(pairs[m, n], two) if step % fitting else two
            if (step + 1) % fitting == 0 or step == 3:
                for pair in tile.pairs:
                    sums = e.add2(pairs[pair])
                    dots[pair] = e.b.add(dots[pair], sums) if pair in dots else sums
        return {pair: e.b.sitofp(dot, vec(f32, tile.lanes)) for pair, dot in dots.items()}

    def one_scale(self, group: Value, xs: list[Activations], totals: Sums) -> None:
        """A weight scale counts for 32 values: the two activation scales meet first."""
        e = self.e
        first = self.scaled(self.dot16(group, xs, 0), xs, 0)
        dots = self.dot16(group, xs, 1)
        scaled: Sums = {}
        for m, x in enumerate(xs):
            d = self.spread(e.at(x.scales, 4))
            for n in range(self.tile.columns):
                scaled[m, n] = e.fma(dots[m, n], d, first[m, n])
        self.add(group, xs, 0, scaled, totals)

    def two_scales(self, group: Value, xs: list[Activations], totals: Sums) -> None:
        """A weight scale for each 16 values."""
        for half in range(2):
            dots = self.dot16(group, xs, half)
            self.add(group, xs, half, self.scaled(dots, xs, half), totals)

    def scaled(self, dots: Sums, xs: list[Activations], part: int) -> Sums:
        """Dot products times the activations' scale, less the codes' offset times their sums."""
        e = self.e
        result: Sums = {}
        # Each operand is loaded where it is used: there is no register to keep it in.
        for m, x in enumerate(xs):
            d = self.spread(e.at(x.scales, 4 * part))
            s = self.spread(e.at(x.sums, 4 * part)) if self.f.has_offset else None
            for n in range(self.tile.columns):
                dot = dots[m, n]
                result[m, n] = e.b.fmul(dot, d) if s is None else e.fma(dot, d, s)
        return result

    def add(
        self, group: Value, xs: list[Activations], part: int, scaled: Sums, totals: Sums
    ) -> None:
        """totals += scale * scaled, and bias * sums if the format has biases."""
        e, floats = self.e, vec(f32, self.tile.lanes)
        scales = self.line(group, 8 + part, floats)
        biases = self.line(group, 8 + self.f.scales + part, floats) if self.f.has_bias else []
        for m, x in enumerate(xs):
            s = self.spread(e.at(x.sums, 4 * part)) if biases else None
            for n, scale in enumerate(scales):
                total = e.fma(scaled[m, n], scale, e.get(totals[m, n]))
                e.set(totals[m, n], total if s is None else e.fma(biases[n], s, total))

    def line(self, group: Value, line: int, type_: Value) -> list[Value]:
        """Line `line` of a group (8 steps of codes, scales, biases), a vector a column."""
        e, width = self.e, self.tile.column_bytes
        at = [line * STEP_BYTES + width * n for n in range(self.tile.columns)]
        return [e.load(e.at(group, offset), type_, width) for offset in at]

    def spread(self, address: Value) -> Value:
        return self.e.splat(self.e.load(address, f32), self.tile.lanes)
