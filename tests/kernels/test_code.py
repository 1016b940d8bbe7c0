"""What the compiler made of the kernels: registers of the level, no exceptions, code for other
machines.

A kernel of each family is enough for the rules of a level, since LLVM applies them to a whole
process.
"""

import importlib
import pkgutil
import re

import llvmlite.binding as llvm
import pytest
from levels import LEVELS, run_at
from llvmlite import ir

import kernels_cpu
from kernels_cpu.kernel import Kernel

FAMILIES = {
    "activations": "activate",
    "attention_generated": "attend_generated",
    "attention_prompt": "attend_prompt",
    "embedding": "embed_q4_k",
    "norms": "norm",
    "panels": "panel_product_q4_k",
    "rotary": "place_heads",
    "rows_k": "row_product_q4_k",
    "select": "scan_logits",
}
"""Module and kernel: one of each family."""

CALLS = {"memcpy", "memset", "memmove", "fmaf", "fma", "exp", "expf", "log"}
"""Functions of the C library that a kernel may need."""

OWN = ("Py", "numba_", "NRT_", "_ZN")
"""What the wrapper around a kernel calls to report exceptions, and the kernel's own mangled
name.
"""

TARGETS = {
    "aarch64-unknown-linux-gnu": "e-m:e-i8:8:32-i16:16:32-i64:64-i128:128-n32:64-S128-Fn32",
    "arm64-apple-macosx13.0.0": "e-m:o-i64:64-i128:128-n32:64-S128-Fn32",
}


def family_kernels() -> list[Kernel]:
    return [
        getattr(importlib.import_module(f"kernels_cpu.{module}"), name)
        for module, name in FAMILIES.items()
    ]


def all_kernels() -> list[Kernel]:
    found = {}
    for info in pkgutil.iter_modules(kernels_cpu.__path__, "kernels_cpu."):
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(value, Kernel):
                found[value.name] = value
    return list(found.values())


def inspect(kernels: list[Kernel]) -> None:
    from kernels_cpu.kernel import isa

    for kernel in kernels:
        text, code = kernel.inspect_llvm(), kernel.compile()._library.get_asm_str()
        assert f"{kernel.function.__name__}" in text
        # Present exactly when the kernel can raise; it would print and go on with wrong numbers.
        assert ".const.picklebuf" not in text, kernel.name
        if isa() in ("avx2", "avxvnni", "generic"):
            assert "zmm" not in code, kernel.name
        if isa() == "generic":
            assert "ymm" not in code, kernel.name


def check_families() -> None:
    inspect(family_kernels())


def check_all() -> None:
    inspect(all_kernels())


def check_tiles() -> None:
    from kernels_cpu.panels import PANEL_PRODUCTS

    kernel = PANEL_PRODUCTS["Q4_K"]
    inspect([kernel])
    assert "tdpbf16ps" in kernel.compile()._library.get_asm_str()


def check_bfloat16_vectors() -> None:
    from kernels_cpu.attention_prompt import attend_prompt_tiles
    from kernels_cpu.kernel import has_bf16

    inspect([attend_prompt_tiles])
    code = attend_prompt_tiles.compile()._library.get_asm_str()
    assert ("vdpbf16ps" in code) == has_bf16()


def for_target(text: str, triple: str, layout: str) -> str:
    """A module's LLVM text, retargeted."""
    text = re.sub(r"^target triple = .*$", f'target triple = "{triple}"', text, flags=re.M)
    text = re.sub(r"^target datalayout = .*$", f'target datalayout = "{layout}"', text, flags=re.M)
    return re.sub(r'"target-(cpu|features)"="[^"]*"', "", text)


def assembly(text: str, triple: str, layout: str) -> str:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(for_target(text, triple, layout))
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu="apple-m1" if "apple" in triple else "generic", opt=2
    )
    return str(machine.emit_assembly(module))


def check_families_compile_for_arm() -> None:
    for kernel in family_kernels():
        text = kernel.inspect_llvm()
        assert "llvm.x86" not in text, kernel.name
        for triple, layout in TARGETS.items():
            code = assembly(text, triple, layout)
            called = re.findall(r"\bbl\t(\w+)", code)
            if "apple" in triple:
                called = [name.removeprefix("_") for name in called]
            outside = {name for name in called if not name.startswith(OWN)} - CALLS
            assert not outside, (kernel.name, triple, outside)
            assert re.search(r"\bv\d+\.(4s|16b)|\.4s\b", code), kernel.name


def check_waiting_hint_of_the_target() -> None:
    from kernels_cpu.simd import Ir
    from kernels_cpu.threads import emit_pause

    for triple, hint in (
        ("aarch64-unknown-linux-gnu", "yield"),
        ("arm64-apple-macosx13.0.0", "yield"),
        ("x86_64-unknown-linux-gnu", "pause"),
    ):
        module = ir.Module()
        module.triple = triple
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), []), "wait")
        builder = ir.IRBuilder(function.append_basic_block())
        emit_pause(Ir(builder))
        builder.ret_void()
        assert hint in assembly(str(module), triple, TARGETS.get(triple, ""))


@pytest.mark.skipif("avx2" not in LEVELS, reason="this machine cannot run the level")
def test_code_of_avx2_keeps_to_it_and_cannot_raise() -> None:
    run_at("avx2", __file__, "check_families", is_cached=False)


def test_generic_code_compiles_for_arm_and_cannot_raise() -> None:
    names = "check_families", "check_families_compile_for_arm", "check_waiting_hint_of_the_target"
    run_at("generic", __file__, *names, is_cached=False)


def test_tile_code_compiles_anywhere() -> None:
    run_at("amx", __file__, "check_tiles", is_cached=False)


@pytest.mark.skipif("avx512" not in LEVELS, reason="this machine cannot run the level")
def test_prompt_attention_multiplies_bfloat16_where_the_processor_does() -> None:
    run_at("avx512", __file__, "check_bfloat16_vectors", is_cached=False)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_all_code_keeps_to_its_level_and_cannot_raise(level: str) -> None:
    run_at(level, __file__, "check_all", is_cached=False)
