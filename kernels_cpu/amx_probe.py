"""Try one AMX tile product; run as a child process: `python -m kernels_cpu.amx_probe`.

Prints "amx works" and exits with 0 if the system grants the tile registers and a bfloat16 product
is right. Anything else, a killed process included, means that it does not.
"""

import ctypes
import sys

from kernels_cpu.isa import request_tiles

ROWS = 16
ROW_BYTES = 64

# Multiplies a tile of 16 x 32 ones by another: every sum is 32.
SOURCE = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilezero(i8)
declare void @llvm.x86.tileloadd64(i8, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8, i8, i8)
declare void @llvm.x86.tilestored64(i8, ptr, i64)
declare void @llvm.x86.tilerelease()

define void @product(ptr %config, ptr %ones, ptr %out) {
  call void @llvm.x86.ldtilecfg(ptr %config)
  call void @llvm.x86.tilezero(i8 0)
  call void @llvm.x86.tileloadd64(i8 1, ptr %ones, i64 64)
  call void @llvm.x86.tileloadd64(i8 2, ptr %ones, i64 64)
  call void @llvm.x86.tdpbf16ps(i8 0, i8 1, i8 2)
  call void @llvm.x86.tilestored64(i8 0, ptr %out, i64 64)
  call void @llvm.x86.tilerelease()
  ret void
}
"""


def product_is_right() -> bool:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu="x86-64-v4", features="+amx-tile,+amx-bf16", jit=True
    )
    module = llvm.parse_assembly(SOURCE)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    address = engine.get_function_address("product")
    config = bytearray(64)
    config[0] = 1  # palette
    for tile in range(3):
        config[16 + 2 * tile] = ROW_BYTES
        config[48 + tile] = ROWS
    ones = b"\x80\x3f" * (ROWS * ROW_BYTES // 2)
    out = (ctypes.c_float * (ROWS * ROW_BYTES // 4))()
    product = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)(address)
    product(bytes(config), ones, ctypes.addressof(out))
    return all(value == 32.0 for value in out)


if __name__ == "__main__":
    if not request_tiles():
        sys.exit("the system does not grant tile registers")
    if not product_is_right():
        sys.exit("a tile product is wrong")
    print("amx works")
