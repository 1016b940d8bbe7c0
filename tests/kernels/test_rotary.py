"""Head norms, rotary embedding and the KV write equal their plain twins."""

import numpy as np
import pytest
from forms_case import float_bits, padded, run_kernel
from levels import LEVELS, run_at
from numpy.typing import NDArray
from test_elementwise import norm_plain

from kernels_cpu import rotary
from localllm.backends.kv import as_q8_0

Floats = NDArray[np.float32]


def angles(
    positions: NDArray[np.int32], frequencies: NDArray[np.float64], magnitude: float
) -> tuple[Floats, Floats]:
    """Cosines and sines by the kernel: float32 [T, pairs padded to 8]."""
    pairs = len(frequencies)
    padded_frequencies = np.zeros(padded(pairs, 8))
    padded_frequencies[:pairs] = frequencies
    out = np.full((2, len(positions), padded(pairs, 8)), np.nan, np.float32)
    args = [
        positions.ctypes.data,
        pairs,
        padded_frequencies.ctypes.data,
        int(np.float64(magnitude).view(np.int64)),
        out[0].ctypes.data,
        out[1].ctypes.data,
        out.shape[2],
    ]
    run_kernel(rotary.rope_angles, args, 0, len(positions))
    return out[0], out[1]


def check_angles_are_exact_to_a_float32() -> None:
    positions = np.array([0, 1, 2, 777, 4095, 131071, 1 << 20], np.int32)
    for pairs in (3, 8, 32, 64):
        frequencies = 10000.0 ** (-np.arange(pairs) / pairs)
        cosines, sines = angles(positions, frequencies, 1.25)
        exact = positions[:, None].astype(np.float64) * frequencies
        # Half a unit of the last place, and what the 1e-14 of the polynomial may add near zero.
        for got, expected in ((cosines, np.cos(exact)), (sines, np.sin(exact))):
            expected = 1.25 * expected
            bound = 0.5 * np.spacing(np.abs(expected).astype(np.float32)) * 1.001 + 3e-14
            assert (np.abs(got[:, :pairs] - expected) <= bound).all()


def rotate_plain(x: Floats, cosines: Floats, sines: Floats, kind: int) -> Floats:
    """x [T, heads, hd]; angles [T, pairs]."""
    pairs = cosines.shape[1]
    c, s = cosines[:, None], sines[:, None]
    out = x.copy()
    if kind == rotary.NEOX:
        a, b = slice(0, pairs), slice(pairs, 2 * pairs)
    else:
        a, b = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    out[..., a] = x[..., a] * c - x[..., b] * s
    out[..., b] = x[..., b] * c + x[..., a] * s
    return out


class Heads:
    """A step of 5 tokens in 2 segments, and what the kernel should make of it."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, pairs: int) -> None:
        rng = np.random.default_rng(head_dim)
        self.shape = num_heads, num_kv_heads, head_dim
        t = 5
        self.q, self.k, self.v = (
            rng.standard_normal((t, padded(n * head_dim, 16))).astype(np.float32)
            for n in (num_heads, num_kv_heads, num_kv_heads)
        )
        self.positions = np.array([40, 41, 31, 32, 95], np.int32)
        self.segments = np.array([0, 0, 1, 1, 1], np.int32)
        self.table = np.array([[4, 1, 9, 9], [2, 0, 3, 9]], np.int32)
        blocks = (5, num_kv_heads, 32, head_dim)
        self.kv = np.full((2, *blocks), 77, np.float16)
        self.cosines, self.sines = angles(self.positions, 100.0 ** -np.linspace(0, 1, pairs), 1.0)
        self.pairs = pairs
        self.factors = np.linspace(0.5, 2, t).astype(np.float32)
        self.weights = rng.standard_normal((4, num_heads * head_dim)).astype(np.float32)

    def heads(self, x: Floats, n: int) -> Floats:
        return np.ascontiguousarray(x[:, : n * self.shape[2]]).reshape(5, n, self.shape[2])

    def args(
        self, *, kind: int, rope: bool, norm: int, each: bool, bias: bool, last: bool, factors: bool
    ) -> list[int]:
        nh, nkv, hd = self.shape
        apart = hd if each else 0
        w = [row.ctypes.data for row in self.weights]
        norms_ = [
            n
            for weight, b in ((w[0], w[1]), (w[2], w[3]))
            for n in (norm, weight, b if bias else 0, float_bits(1e-6), apart)
        ]
        pairs = [n for x in (self.q, self.k, self.v) for n in (x.ctypes.data, x.shape[1])]
        cosines = self.cosines.ctypes.data if rope else 0
        turn = [cosines, self.sines.ctypes.data, self.cosines.shape[1], kind, self.pairs]
        places = [a.ctypes.data for a in (self.positions, self.segments, self.table)]
        kv = [self.kv[0].ctypes.data, self.kv[1].ctypes.data]
        scale = self.factors.ctypes.data if factors else 0
        head = [*pairs, nh, nkv, hd, *turn, scale, int(last)]
        return [*head, *norms_, *places, self.table.shape[1], *kv]

    def turned(
        self, x: Floats, n: int, which: int, *, kind: int, rope: bool, norm: int, each: bool,
        bias: bool, last: bool, factors: bool,
    ) -> Floats:  # fmt: skip
        """The plain twin: heads [T, n, hd] after norm and rope, in their order."""
        hd = self.shape[2]
        x = self.heads(x, n)

        def normed(x: Floats) -> Floats:
            if norm == rotary.NO_NORM:
                return x
            out = np.empty_like(x)
            for h in range(n):
                part = slice(h * hd, (h + 1) * hd) if each else slice(0, hd)
                w, b = self.weights[2 * which, part], self.weights[2 * which + 1, part]
                row = np.ascontiguousarray(x[:, h])
                out[:, h] = norm_plain(row, norm, w, b if bias else None, 1e-6)
            return out

        def rotated(x: Floats) -> Floats:
            p = self.pairs
            return rotate_plain(x, self.cosines[:, :p], self.sines[:, :p], kind) if rope else x

        x = normed(rotated(x)) if last else rotated(normed(x))
        return x * self.factors[:, None, None] if factors and which == 0 else x


CASES = [
    {
        "kind": 0,
        "rope": True,
        "norm": 2,
        "each": False,
        "bias": False,
        "last": False,
        "factors": False,
    },
    {
        "kind": 1,
        "rope": True,
        "norm": 0,
        "each": False,
        "bias": False,
        "last": False,
        "factors": False,
    },
    {
        "kind": 1,
        "rope": True,
        "norm": 0,
        "each": True,
        "bias": False,
        "last": True,
        "factors": True,
    },
    {
        "kind": 0,
        "rope": True,
        "norm": 1,
        "each": True,
        "bias": True,
        "last": False,
        "factors": True,
    },
    {
        "kind": 0,
        "rope": False,
        "norm": 0,
        "each": False,
        "bias": False,
        "last": False,
        "factors": False,
    },
    {
        "kind": 0,
        "rope": False,
        "norm": 2,
        "each": False,
        "bias": False,
        "last": False,
        "factors": False,
    },
]


def check_heads_are_placed() -> None:
    # Rotated wholly and in part; head dimensions that fill no vector.
    for shape in ((4, 2, 64, 32), (3, 1, 80, 40), (2, 2, 128, 32), (2, 1, 20, 5), (1, 1, 256, 128)):
        for options in CASES:
            case = Heads(*shape)
            nh, nkv, _hd = case.shape
            q = case.turned(case.q, nh, 0, **options)
            k = case.turned(case.k, nkv, 1, **options)
            v = case.heads(case.v, nkv)
            args = case.args(**options)
            num_items = 5 * (nh + 2 * nkv)
            run_kernel(rotary.place_heads, args, 0, 7)
            run_kernel(rotary.place_heads, args, 7, num_items)
            np.testing.assert_array_equal(case.heads(case.q, nh), q)
            expected = np.full_like(case.kv, 77)
            for t in range(5):
                p = case.positions[t]
                block = case.table[case.segments[t], p // 32]
                expected[0, block, :, p % 32] = k[t].astype(np.float16)
                expected[1, block, :, p % 32] = v[t].astype(np.float16)
            np.testing.assert_array_equal(case.kv.view(np.uint16), expected.view(np.uint16))


def check_heads_are_placed_as_q8_0() -> None:
    for shape in ((4, 2, 64, 32), (3, 1, 80, 40), (2, 2, 8, 4), (1, 1, 256, 128)):
        case = Heads(*shape)
        nh, nkv, hd = case.shape
        options = CASES[1]
        k = case.turned(case.k, nkv, 1, **options)
        case.v[3] *= 1e-7  # scales below float16's smallest normal number
        case.v[4] = 0
        v = case.heads(case.v, nkv)
        num_scales = padded(hd, 32) // 32
        blocks = np.full((2, 5, nkv, 32 * (hd + 2 * num_scales)), 77, np.uint8)
        args = [*case.args(**options)[:-2], *(part.ctypes.data for part in blocks)]
        run_kernel(rotary.place_heads_q8_0, args, 0, 5 * (nh + 2 * nkv))
        codes = blocks[..., : 32 * hd].view(np.int8).reshape(2, 5, nkv, 32, hd)
        scales = blocks[..., 32 * hd :].view(np.float16).reshape(2, 5, nkv, 32, num_scales)
        untouched = np.ones((5, 32), bool)
        for t in range(5):
            p = case.positions[t]
            block = case.table[case.segments[t], p // 32]
            untouched[block, p % 32] = False
            for stored, values in enumerate((k[t], v[t])):
                each = scales[stored, block, :, p % 32].astype(np.float32).repeat(32, axis=-1)
                got = codes[stored, block, :, p % 32] * each[:, :hd]
                np.testing.assert_array_equal(got, as_q8_0(values))
        for pieces in (codes, scales.view(np.int16)):
            kept = pieces.swapaxes(2, 3)[:, untouched]
            assert (kept.astype(np.int64) == (77 if kept.itemsize == 1 else 77 * 257)).all()


def check_half_floats_are_rounded_as_numpy_does() -> None:
    values = np.concatenate(
        [
            np.array([0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e9, -1e9, 6e-8, 2.9e-8, 3e-8, np.inf]),
            np.random.default_rng(3).standard_normal(1000) * 10.0 ** np.linspace(-9, 6, 1000),
        ]
    ).astype(np.float32)
    width = len(values)
    case = Heads(1, 1, width, 1)
    case.v[:, :width] = values
    options = dict(CASES[5])
    run_kernel(rotary.place_heads, case.args(**options), 2, 3)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    np.testing.assert_array_equal(case.kv[1, 1, 0, 8].view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("level", LEVELS)
def test_rotary_kernels_equal_their_twins(level: str) -> None:
    run_at(level, __file__)
