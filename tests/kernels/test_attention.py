"""Attention kernels against a softmax in float64, at every ISA level.

Defends: a token's result is bitwise the same however its step is cut, dealt out, or accompanied;
what the mask hides is never read.
"""

from itertools import product

import numpy as np
import pytest
from attention_case import SHAPES, Case, Shape
from levels import LEVELS, run_at
from numba import cfunc
from numpy.typing import NDArray

from kernels_cpu.attention_generated import GENERATED_KERNELS, merge_generated
from kernels_cpu.attention_math import lanes
from kernels_cpu.attention_prompt import PROMPT_KERNELS
from kernels_cpu.kernel import SIGNATURE, isa

KERNELS = (*GENERATED_KERNELS.values(), merge_generated, *PROMPT_KERNELS.values())
KV_TYPES = tuple(GENERATED_KERNELS)
GENERATED = [(0, 1), (5, 1), (31, 2), (600, 1), (1022, 4), (1600, 1)]
PROMPTS = [(0, 70), (170, 90), (5, 1), (31, 2)]


@pytest.mark.parametrize("level", LEVELS)
def test_kernels_at_level(level: str) -> None:
    run_at(level, __file__, "check_compile")
    run_at(level, __file__)


def assert_close(result: NDArray[np.float32], expected: NDArray[np.float64]) -> None:
    # A score below 16 in size has an error of 1e-6 from its float32 sum, a weight 2e-7 more; the
    # result is a mean of values below 5 with such weights.
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-5)


def check_compile() -> None:
    for kernel in KERNELS:
        assert kernel.address


def check_kernels_are_found_on_disk() -> None:
    for kernel in KERNELS:
        assert kernel.compile().cache_hits == 1, kernel.name


def check_kernels_cannot_raise_and_keep_to_their_registers() -> None:
    if isa() != "avx2":
        return
    for kernel in KERNELS:
        # Numba shows the text of what it compiled itself, not of what it found on disk.
        compiled = cfunc(SIGNATURE, nopython=True)(kernel.function)
        assert "picklebuf" not in compiled.inspect_llvm(), kernel.name
        assembly = compiled._library.get_asm_str()
        assert "%ymm" in assembly, kernel.name
        assert "%zmm" not in assembly, kernel.name


def check_generated_tokens_equal_the_twin() -> None:
    for seed, (shape, kv) in enumerate(product(SHAPES, KV_TYPES)):
        case = Case(shape, GENERATED, seed, kv)
        assert_close(case.generated(), case.expected())


def check_prompt_tokens_equal_the_twin() -> None:
    for seed, (shape, kv) in enumerate(product(SHAPES, KV_TYPES)):
        case = Case(shape, PROMPTS, seed, kv)
        assert_close(case.prompt(), case.expected())


def check_generated_tokens_do_not_depend_on_dealing() -> None:
    for shape, kv in product(SHAPES, KV_TYPES):
        case = Case(shape, GENERATED, kv=kv)
        whole = case.generated(max_partials=0)
        assert np.array_equal(case.generated(max_partials=5), whole)
        assert np.array_equal(case.generated(reverse=True), whole)
        for segment, (_, count) in enumerate(GENERATED):
            start = case.starts[segment]
            alone = [case.part(segment, i, i + 1).generated() for i in range(count)]
            assert np.array_equal(np.concatenate(alone), whole[start : start + count])


def check_prompt_tokens_do_not_depend_on_chunks() -> None:
    for shape, kv in product(SHAPES, KV_TYPES):
        assert_same_in_chunks(shape, kv, on_tiles=False)


def check_tiles_do_not_depend_on_chunks() -> None:
    if lanes() == 16:
        for shape, kv in product(SHAPES, KV_TYPES):
            assert_same_in_chunks(shape, kv, on_tiles=True)


def assert_same_in_chunks(shape: Shape, kv: str, *, on_tiles: bool) -> None:
    case = Case(shape, PROMPTS, kv=kv)
    whole = case.prompt(on_tiles=on_tiles)
    assert np.array_equal(case.prompt(on_tiles=on_tiles, reverse=True), whole)
    for segment, (_, count) in enumerate(PROMPTS):
        start = case.starts[segment]
        for size in (1, 7, 33, 64):
            cuts = [(c, min(c + size, count)) for c in range(0, count, size)]
            parts = [case.part(segment, *cut).prompt(on_tiles=on_tiles) for cut in cuts]
            assert np.array_equal(np.concatenate(parts), whole[start : start + count])


def check_tiles_equal_the_twin() -> None:
    if lanes() < 16:
        return
    for seed, (shape, kv) in enumerate(product(SHAPES, KV_TYPES)):
        case = Case(shape, PROMPTS, seed, kv)
        error = case.prompt(on_tiles=True) - case.expected()
        # bfloat16 keeps 8 bits: scores of size 8 err by 0.02, weights and values by 0.002.
        assert np.abs(error).max() < 0.04
        assert np.sqrt((error**2).mean()) < 0.003


def check_long_prompts() -> None:
    for shape in (Shape(4, 1, 64), Shape(3, 1, 32, window=200)):
        case = Case(shape, [(1000, 130), (0, 300)])
        assert_close(case.prompt(), case.expected())
