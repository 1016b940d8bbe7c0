"""Norms, activations, sums and the forms they leave activations in equal their plain twins."""

import numpy as np
import pytest
from forms_case import FormsCase, float_bits, padded, run_kernel
from levels import LEVELS, run_at
from numpy.typing import NDArray

from kernels_cpu import activations, norms, select
from kernels_cpu.activations import KIND_OF, PART

Floats = NDArray[np.float32]

WIDTHS = (1, 15, 64, 80, 576, 1000, 2048, 2080)


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def rows_of(values: Floats) -> Floats:
    """The same rows, apart by a multiple of 16 floats and with rubbish between them."""
    out = np.full((values.shape[0], padded(values.shape[1], 16) + 16), np.nan, np.float32)
    out[:, : values.shape[1]] = values
    return out


def normal(*shape: int) -> Floats:
    return rng().standard_normal(shape).astype(np.float32)


def sum_plain(x: Floats) -> np.float32:
    """The kernels' order of addition: four times 16 lanes, then by halving."""
    blocks = np.zeros(padded(x.size, 16), np.float32)
    blocks[: x.size] = x
    blocks = blocks.reshape(-1, 16)
    sums = np.zeros((4, 16), np.float32)
    rounds = x.size // 64
    for i, block in enumerate(blocks):
        sums[i % 4 if i < 4 * rounds else 0] += block
    total = (sums[0] + sums[1]) + (sums[2] + sums[3])
    while total.size > 1:
        total = total[: total.size // 2] + total[total.size // 2 :]
    return np.float32(total[0])


def norm_plain(
    x: Floats, kind: int, weight: Floats | None, bias: Floats | None, eps: float
) -> Floats:
    out = np.empty_like(x)
    n = np.float32(x.shape[1])
    for i, row in enumerate(x):
        mean = sum_plain(row) / n if kind == norms.LAYER else np.float32(0)
        d = row - mean
        factor = np.float32(1) / np.sqrt(sum_plain(d * d) / n + np.float32(eps))
        out[i] = d * factor
        if weight is not None:
            out[i] *= weight
        if bias is not None:
            out[i] += bias
    return out


def check_norms() -> None:
    for width in WIDTHS:
        x, base = normal(5, width) * 3 + 1, normal(5, width)[::-1].copy()
        weight, bias = normal(1, width)[0], normal(1, width)[0] * 2
        for kind, w, b in (
            (norms.RMS, weight, None),
            (norms.RMS, None, None),
            (norms.LAYER, weight, bias),
            (norms.LAYER, weight, None),
            (norms.LAYER, None, None),
        ):
            expected = norm_plain(x, kind, w, b, 1e-5)
            addresses = [0 if v is None else v.ctypes.data for v in (w, b)]
            source = rows_of(x)
            own = [source.ctypes.data, source.shape[1], kind, *addresses, float_bits(1e-5)]
            case = FormsCase(5, 2, width)
            run_kernel(norms.norm, case.slots() + own, 0, 3)
            run_kernel(norms.norm, case.slots() + own, 3, 5)
            case.check(expected)
            case = FormsCase(5, 3, width)
            residual = rows_of(base)
            own += [residual.ctypes.data, residual.shape[1], float_bits(0.3)]
            run_kernel(norms.add_norm, case.slots() + own, 0, 5)
            case.check(base + np.float32(0.3) * expected)


def check_norm_of_zeros_is_zero() -> None:
    source = np.zeros((1, 64), np.float32)
    case = FormsCase(1, 1, 64)
    own = [source.ctypes.data, 64, norms.RMS, 0, 0, float_bits(1e-6)]
    run_kernel(norms.norm, case.slots() + own, 0, 1)
    case.check(source)


def check_residual_may_be_written_in_place() -> None:
    x, y = normal(2, 96), normal(2, 96) + 2
    case = FormsCase(2, 2, 96)
    case.real = rows_of(x)
    case.real[:, 96:] = 77
    args = case.slots()
    own = [case.real.ctypes.data, case.real.shape[1], y.ctypes.data, 96, float_bits(-1.5)]
    run_kernel(activations.add, args + own, 0, 2)
    case.check(x + np.float32(-1.5) * y)


def items(tokens: int, width: int) -> int:
    return tokens * -(-width // PART)


def check_forms_of_existing_values() -> None:
    for width in (*WIDTHS, 3 * PART, 3 * PART + 40):
        x = normal(4, width) * np.float32(1e3)
        x[0, : min(16, width)] = 0
        x[1, : min(32, width)] *= np.float32(1e-36)
        source = rows_of(x)
        case = FormsCase(4, 1, width)
        args = [*case.slots(), source.ctypes.data, source.shape[1]]
        middle = items(4, width) // 2
        run_kernel(activations.quantise, args, 0, middle)
        run_kernel(activations.quantise, args, middle, items(4, width))
        case.check(x)


def act_plain(name: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
    if name == "relu2":
        return np.maximum(x, 0) ** 2
    if name == "silu":
        u = x
    elif name == "gelu":
        u = 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    else:
        u = 1.702 * x
    return x / (1 + np.exp(-np.clip(u, -700, 700)))


def check_activations() -> None:
    width = PART + 40
    gate = normal(3, width) * 5
    gate[0, :7] = (0.0, 80.0, 200.0, -80.0, -200.0, 3e4, -3e4)
    up = normal(3, width)[::-1].copy()
    for name, kind in KIND_OF.items():
        for is_gated in (True, False):
            case = FormsCase(3, 1, width)
            a, b = rows_of(gate), rows_of(up)
            pair = (b, a) if is_gated else (a, None)
            own = [n for r in pair for n in ((0, 0) if r is None else (r.ctypes.data, r.shape[1]))]
            run_kernel(activations.activate, [*case.slots(), *own, kind], 0, items(3, width))
            expected = act_plain(name, gate.astype(np.float64)) * (up if is_gated else 1)
            # The sigmoid is within 3 ulp; its argument's own rounding counts |u| fold, and 1e-36
            # is where the exponential stops.
            size = np.abs(gate) + 0.045 * np.abs(gate) ** 3
            bound = np.abs(expected) * (6e-7 + 2.5e-7 * size) + 1e-30
            got = case.real[:, :width]
            assert (np.abs(got - expected) <= bound).all(), (name, is_gated)
            case.check(np.ascontiguousarray(got))


def check_logits_are_capped() -> None:
    """tanh is within 2 units in the last place, small arguments included."""
    width = 2 * select.CHUNK + 21
    x = np.linspace(-200, 200, 3 * width).reshape(3, width).astype(np.float32)
    x[0, :40] = 10.0 ** np.linspace(-12, 3, 40)
    memory = rows_of(x)
    args = [memory.ctypes.data, memory.shape[1], width, float_bits(30)]
    run_kernel(select.cap_logits, args, 0, 4)
    run_kernel(select.cap_logits, args, 4, 9)
    expected = 30 * np.tanh(x.astype(np.float64) / 30)
    # Dividing and multiplying round once each.
    unit = np.spacing(np.abs(expected).astype(np.float32))
    assert (np.abs(memory[:, :width] - expected) <= 3.5 * unit).all()
    assert np.isnan(memory[:, width:]).all()


@pytest.mark.parametrize("level", LEVELS)
def test_elementwise_kernels_equal_their_twins(level: str) -> None:
    run_at(level, __file__)
