"""Blocks of 32 values for registers of 8 lanes: how types unpack eight of them as `PairStep` has it.

A lane owns a block, `blocks` are their addresses. Layouts: see rows_legacy.py and rows_codebook.py.
"""

from kernels_cpu.rows_bytes import Unit, transposed
from kernels_cpu.rows_pairs import gathered, nibble_codes, spread_bits, two_halves
from kernels_cpu.simd import Ir, Value, i8, i16, i32, i64, vec


def pieces(e: Ir, blocks: list[Value], first: int) -> list[Value]:
    return [e.at(block, first) for block in blocks]


def halves(e: Ir, blocks: list[Value]) -> tuple[Value, Value]:
    """float32 of the first and of the second half float of each block."""
    return two_halves(e, gathered(e, blocks, i32))


def pairs_q4_0(e: Ir, blocks: list[Value]) -> Unit:
    return Unit(nibble_codes(e, pieces(e, blocks, 2)), halves(e, blocks)[0])


def pairs_q4_1(e: Ir, blocks: list[Value]) -> Unit:
    return Unit(nibble_codes(e, pieces(e, blocks, 4)), *halves(e, blocks))


def five_bits(e: Ir, blocks: list[Value], fifth: Value, nibbles: int) -> list[Value]:
    """Codes of blocks from their dwords of fifth bits and the nibbles at this byte."""
    four = nibble_codes(e, pieces(e, blocks, nibbles))
    return [
        e.b.select(spread_bits(e, fifth, 4 * k), e.b.add(v, e.const(16, v.type)), v)
        for k, v in enumerate(four)
    ]


def pairs_q5_0(e: Ir, blocks: list[Value]) -> Unit:
    head = gathered(e, blocks, i64)
    fifth = e.b.trunc(e.b.lshr(head, e.const(16, head.type)), vec(i32, len(blocks)))
    scale = e.half_to_float(e.b.trunc(head, vec(i16, len(blocks))))
    return Unit(five_bits(e, blocks, fifth, 6), scale)


def pairs_q5_1(e: Ir, blocks: list[Value]) -> Unit:
    head, dwords = gathered(e, blocks, i64), vec(i32, len(blocks))
    fifth = e.b.trunc(e.b.lshr(head, e.const(32, head.type)), dwords)
    return Unit(five_bits(e, blocks, fifth, 8), *two_halves(e, e.b.trunc(head, dwords)))


def pairs_q8_0(e: Ir, blocks: list[Value]) -> Unit:
    loaded = [e.load(piece, vec(i8, 32)) for piece in pieces(e, blocks, 2)]
    # A vector of each four has the blocks p and 4 + p: quarters 0 and 2 first, then 1 and 3.
    both = [e.concat(x, y) for x, y in zip(loaded[:4], loaded[4:], strict=True)]
    codes = []
    for half in (0, 16):
        lanes = [k + half for start in (0, 32) for k in range(start, start + 16)]
        codes += transposed(e, [e.shuffle(v, lanes) for v in both])
    unsigned = [e.b.xor(v, e.const(-128, v.type)) for v in codes]
    return Unit(unsigned, halves(e, blocks)[0])
