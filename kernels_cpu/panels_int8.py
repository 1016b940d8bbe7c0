"""The int8 micro-kernel: panels of unsigned bytes (unpack.py) times int8 activations.

For each group of 16 values: four 4-way dot products, the sum of the integers as a float times the
activations' scale. What a bias or the codes' offset needs of the activations is prepared once for
a tile and DEPTH values: the sums of as many activations as a weight scale counts for.
"""

from dataclasses import dataclass

from kernels_cpu.kernel import isa
from kernels_cpu.panels_tile import (
    SUMS_BYTES,
    NextTile,
    Product,
    RegisterTile,
    divide,
    first_lanes,
    for_parts,
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
PREPARED_BYTES = largest_part(DEPTH) // 16 * 4
# For each group of a register tile: enough for all of the next tile if there are some 16 tokens.
LINES_AHEAD = 4
MAGIC = 1.5 * 2.0**23
Sums = dict[tuple[int, int], Value]


def panel_product(e: Ir, args: Value, first: Value, last: Value, scratch: Value, f: Format) -> None:
    """All of the kernel of one weight type, with int8 activations."""

    def body(p: Product) -> None:
        def part(value: Value, values: Value) -> None:
            groups = divide(e, values, GROUP)
            unpack_tile(p, f, value, groups, lambda group, half: byte_panel(p, f, group, half))
            if not f.is_signed:
                prepare(p, f, value, values)
            ahead = next_tile(p, row_bytes(e, f, value), row_bytes(e, f, values))
            multiply(p, f, value, groups, ahead)

        for_parts(p, DEPTH, part)

    for_tiles(e, args, first, last, scratch, body)


def byte_panel(p: Product, f: Format, group: Value, half: Value) -> BytePanel:
    e = p.e
    at = e.at(p.panel, e.mul(group, f.group_bytes), e.mul(half, 4 * LANES))
    return BytePanel(e, at, f)


def prepare(p: Product, f: Format, value: Value, values: Value) -> None:
    """For each token: sums of activations per weight scale, times -offset where there is one."""
    e = p.e
    factor = e.const(1.0 if f.offset is None else -float(f.offset), vec(f32, LANES))
    firsts = range(0, PREPARED_BYTES // 4, LANES)
    masks = [first_lanes(e, e.at(divide(e, values, 16), -k)) for k in firsts]
    with e.loop(p.tokens) as t:
        source = activations(p, e.at(p.begin, t.index), value).sums
        target = e.at(p.prepared, e.mul(t.index, PREPARED_BYTES))
        sums = [masked_load(e, e.at(source, 4 * k), m) for k, m in zip(firsts, masks)]
        if f.scales == 1:
            sums.append(e.const(0.0, vec(f32, LANES)))
            sums = [neighbour_sums(e, a, b) for a, b in zip(sums[::2], sums[1::2])]
        for k, s in enumerate(sums):
            e.store(e.b.fmul(s, factor), e.at(target, 64 * k), 64)


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
    """Addresses of one token's int8 values, their scales and their (prepared) sums."""

    values: Value
    scales: Value
    sums: Value


def activations(p: Product, token: Value, value: Value) -> Activations:
    """Of a token, from `value` on."""
    e, args = p.e, p.args
    at_scale = e.mul(e.at(e.b.mul(token, args[8]), divide(e, value, 16)), 4)
    values = e.at(args[4], e.b.mul(token, args[5]), value)
    return Activations(values, e.at(args[6], at_scale), e.at(args[7], at_scale))


def multiply(p: Product, f: Format, value: Value, groups: Value, ahead: NextTile) -> None:
    """Add panel times activations to the sums of all tokens."""
    e, tile = p.e, register_tile()

    def body(tokens: list[Value], shift: Value) -> None:
        inputs = []
        for t in tokens:
            x = activations(p, e.at(p.begin, t), value)
            prepared = e.at(p.prepared, e.mul(t, PREPARED_BYTES))
            inputs.append(Activations(x.values, x.scales, prepared))
        outputs = [e.at(p.sums, e.mul(t, SUMS_BYTES), shift) for t in tokens]
        MicroKernel(e, f, tile, ahead).run(e.at(p.panel, shift), inputs, groups, outputs)

    for_register_tiles(p, tile, body)


@dataclass(frozen=True, slots=True)
class MicroKernel:
    """Emits the loop over groups for one register tile."""

    e: Ir
    f: Format
    tile: RegisterTile
    ahead: NextTile

    def run(
        self, panel: Value, inputs: list[Activations], groups: Value, outputs: list[Value]
    ) -> None:
        """outputs[m][row] += sum over groups of scale * (xd * (codes . xq) + ...), in float32."""
        e, tile = self.e, self.tile
        floats = vec(f32, tile.lanes)
        places = {(m, n): e.at(outputs[m], tile.column_bytes * n) for m, n in tile.pairs}
        totals: Sums = {}
        for pair, address in places.items():
            totals[pair] = e.variable(e.const(0.0, floats))
            e.set(totals[pair], e.load(address, floats, tile.column_bytes))
        with e.loop(groups) as g:
            self.ahead.fetch(LINES_AHEAD)
            group = e.at(panel, e.mul(g.index, self.f.group_bytes))
            shift = e.mul(g.index, 8)
            xs = [
                Activations(
                    e.at(x.values, e.mul(g.index, GROUP)),
                    e.at(x.scales, shift),
                    e.at(x.sums, e.mul(g.index, 4 * self.f.scales)),
                )
                for x in inputs
            ]
            emit = self.one_scale if self.f.scales == 1 else self.two_scales
            emit(group, xs, totals)
        for pair, address in places.items():
            e.store(e.get(totals[pair]), address, tile.column_bytes)

    def dot16(self, group: Value, xs: list[Activations], half: int) -> Sums:
        """float32 of codes . xq over 16 values of the group, for each token and column."""
        if isa() == "avx2":
            return self.dot16_of_pairs(group, xs, half)
        e, tile = self.e, self.tile
        ints, floats = vec(i32, tile.lanes), vec(f32, tile.lanes)
        # Small integers added to the bits of this number are added to the number: converting back
        # is a float subtraction.
        start = e.b.bitcast(e.const(MAGIC, floats), ints)
        dots: Sums = dict.fromkeys(tile.pairs, start)
        for step in range(4 * half, 4 * half + 4):
            codes = self.line(group, step, vec(i8, 4 * tile.lanes))
            for m, x in enumerate(xs):
                four = self.four(x, step)
                for n, code in enumerate(codes):
                    wide = self.f.largest_code > 127
                    dots[m, n] = e.dot4(dots[m, n], code, four, wide=wide)
        magic = e.const(MAGIC, floats)
        return {pair: e.b.fsub(e.b.bitcast(dot, floats), magic) for pair, dot in dots.items()}

    def four(self, x: Activations, step: int) -> Value:
        """Four activations, repeated for each row of a column."""
        e, n = self.e, self.tile.lanes
        return e.b.bitcast(e.splat(e.load(e.at(x.values, 4 * step), i32), n), vec(i8, 4 * n))

    def dot16_of_pairs(self, group: Value, xs: list[Activations], half: int) -> Sums:
        """dot16 at level avx2: sums of two products are added in 16 bits as long as they fit."""
        e, tile = self.e, self.tile
        f = self.f
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
        scaled: Sums = {}
        sums = [] if self.f.is_signed else [self.spread(x.sums) for x in xs]
        for half in range(2):
            dots = self.dot16(group, xs, half)
            for m, x in enumerate(xs):
                d = self.spread(e.at(x.scales, 4 * half))
                for n in range(self.tile.columns):
                    if half:
                        scaled[m, n] = e.fma(dots[m, n], d, scaled[m, n])
                    elif self.f.has_offset:
                        scaled[m, n] = e.fma(dots[m, n], d, sums[m])
                    else:
                        scaled[m, n] = e.b.fmul(dots[m, n], d)
        self.add(group, 8, scaled, sums, totals)

    def two_scales(self, group: Value, xs: list[Activations], totals: Sums) -> None:
        """A weight scale for each 16 values."""
        e = self.e
        for half in range(2):
            dots = self.dot16(group, xs, half)
            sums = [self.spread(e.at(x.sums, 4 * half)) for x in xs]
            scaled: Sums = {}
            for (m, n), dot in dots.items():
                d = self.spread(e.at(xs[m].scales, 4 * half))
                scaled[m, n] = e.fma(dot, d, sums[m]) if self.f.has_offset else e.b.fmul(dot, d)
            self.add(group, 8 + half, scaled, sums, totals)

    def add(
        self, group: Value, scale_line: int, scaled: Sums, sums: list[Value], totals: Sums
    ) -> None:
        """totals += scale * scaled, and bias * sums if the format has biases."""
        e, floats = self.e, vec(f32, self.tile.lanes)
        scales = self.line(group, scale_line, floats)
        for (m, n), value in scaled.items():
            e.set(totals[m, n], e.fma(value, scales[n], e.get(totals[m, n])))
        if self.f.has_bias:
            biases = self.line(group, scale_line + self.f.scales, floats)
            for m, n in scaled:
                e.set(totals[m, n], e.fma(biases[n], sums[m], e.get(totals[m, n])))

    def line(self, group: Value, line: int, type_: Value) -> list[Value]:
        """Line `line` of a group (8 steps of codes, scales, biases), a vector a column."""
        e, width = self.e, self.tile.column_bytes
        at = [line * STEP_BYTES + width * n for n in range(self.tile.columns)]
        return [e.load(e.at(group, offset), type_, width) for offset in at]

    def spread(self, address: Value) -> Value:
        return self.e.splat(self.e.load(address, f32), self.tile.lanes)
