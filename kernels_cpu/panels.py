"""Panel products: quantised weights times the prompt tokens of a step.

    out[t] = residual + scale * (W x[t] + b)

An item is a tile of ROWS_PER_TILE weight rows. The raw blocks of a tile are unpacked into a panel,
some hundred values of the rows at a time so that it stays in the first-level cache, and a
micro-kernel multiplies it by all tokens. Several tiles do so in turn before the next some hundred
values, since all tokens' activations of that width stay in the second-level cache. Micro-kernels:
panels_int8.py for quantised weights, with activations as int8 with one float32 scale and one scaled
sum per 16 values, or panels_bf16.py where there are AMX tiles; panels_float.py for F32, F16 and
BF16.

A token's sum has one shape, whatever the number of tokens: there is one register tile of several
tokens; where fewer are left, the last one is repeated, and nothing is written of the copies.

Argument block (int64 slots):
     0  address of the raw weights            1  bytes per weight row
     2  number of rows                        3  number of columns K, a multiple of the block length
     4  address of xq, int8 [tokens][Kp]      5  bytes from token to token of xq
        (F32, F16, BF16: of x, float32 [tokens][K]; AMX: of bfloat16 tiles, see panels_bf16.py;
        6, 7 and 8 are not used then)
     6  address of xd, float32 [tokens][Kp/16], scales
     7  address of xs, float32 [tokens][Kp/16], scale * sum of the 16 int8
     8  elements from token to token of xd and xs
     9  address of out, float32              10  elements from token to token of out
    11  address of b, float32 [rows], or 0   12  1: the residual is what out holds, 0: there is none
    13  float32 bits of scale
    14  address of the first token, int64    15  address of the token after the last, int64
Scratch: 64 KiB and 1,408 bytes a token, tokens rounded up to 32.
"""

from kernels_cpu.amx import Hardware
from kernels_cpu.kernel import Kernel, isa, kernel
from kernels_cpu.panels_bf16 import tile_panel_product
from kernels_cpu.panels_float import FLOAT_FORMATS, float_panel_product
from kernels_cpu.panels_int8 import panel_product
from kernels_cpu.panels_tile import ROWS_PER_TILE
from kernels_cpu.simd import Ir, Value, emits
from kernels_cpu.unpack import FORMATS
from kernels_cpu.unpack_blocks import Format

__all__ = ["PANEL_PRODUCTS", "ROWS_PER_TILE", "takes_tiles"]


def takes_tiles(type_name: str) -> bool:
    """Whether activations for weights of this type are bfloat16 tiles (pack_tiles) here."""
    return isa() == "amx" and type_name in FORMATS


def quantised(e: Ir, args: Value, first: Value, last: Value, scratch: Value, f: Format) -> None:
    if isa() == "amx":
        tile_panel_product(e, args, first, last, scratch, f, Hardware())
    else:
        panel_product(e, args, first, last, scratch, f)


@emits(4)
def _f32(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    float_panel_product(e, args, first, last, scratch, FLOAT_FORMATS["F32"])


@emits(4)
def _f16(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    float_panel_product(e, args, first, last, scratch, FLOAT_FORMATS["F16"])


@emits(4)
def _bf16(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    float_panel_product(e, args, first, last, scratch, FLOAT_FORMATS["BF16"])


@emits(4)
def _q4_0(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    quantised(e, args, first, last, scratch, FORMATS["Q4_0"])


@emits(4)
def _q4_1(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    quantised(e, args, first, last, scratch, FORMATS["Q4_1"])


@emits(4)
def _q5_0(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    quantised(e, args, first, last, scratch, FORMATS["Q5_0"])


@emits(4)
def _q5_1(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    quantised(e, args, first, last, scratch, FORMATS["Q5_1"])


@emits(4)
def _q8_0(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    quantised(e, args, first, last, scratch, FORMATS["Q8_0"])


@emits(4)
def _q2_k(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    quantised(e, args, first, last, scratch, FORMATS["Q2_K"])


@emits(4)
def _q3_k(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    quantised(e, args, first, last, scratch, FORMATS["Q3_K"])


@emits(4)
def _q4_k(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    quantised(e, args, first, last, scratch, FORMATS["Q4_K"])


@emits(4)
def _q5_k(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    quantised(e, args, first, last, scratch, FORMATS["Q5_K"])


@emits(4)
def _q6_k(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    quantised(e, args, first, last, scratch, FORMATS["Q6_K"])


@emits(4)
def _iq4_nl(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    quantised(e, args, first, last, scratch, FORMATS["IQ4_NL"])


@emits(4)
def _iq4_xs(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    quantised(e, args, first, last, scratch, FORMATS["IQ4_XS"])


@emits(4)
def _mxfp4(e: Ir, args: Value, first: Value, last: Value, scratch: Value) -> None:
    quantised(e, args, first, last, scratch, FORMATS["MXFP4"])


@kernel
def panel_product_f32(args: int, first: int, last: int, scratch: int) -> None:
    _f32(args, first, last, scratch)


@kernel
def panel_product_f16(args: int, first: int, last: int, scratch: int) -> None:
    _f16(args, first, last, scratch)


@kernel
def panel_product_bf16(args: int, first: int, last: int, scratch: int) -> None:
    _bf16(args, first, last, scratch)


@kernel
def panel_product_q4_0(args: int, first: int, last: int, scratch: int) -> None:
    _q4_0(args, first, last, scratch)


@kernel
def panel_product_q4_1(args: int, first: int, last: int, scratch: int) -> None:
    _q4_1(args, first, last, scratch)


@kernel
def panel_product_q5_0(args: int, first: int, last: int, scratch: int) -> None:
    _q5_0(args, first, last, scratch)


@kernel
def panel_product_q5_1(args: int, first: int, last: int, scratch: int) -> None:
    _q5_1(args, first, last, scratch)


@kernel
def panel_product_q8_0(args: int, first: int, last: int, scratch: int) -> None:
    _q8_0(args, first, last, scratch)


@kernel
def panel_product_q2_k(args: int, first: int, last: int, scratch: int) -> None:
    _q2_k(args, first, last, scratch)


@kernel
def panel_product_q3_k(args: int, first: int, last: int, scratch: int) -> None:
    _q3_k(args, first, last, scratch)


@kernel
def panel_product_q4_k(args: int, first: int, last: int, scratch: int) -> None:
    _q4_k(args, first, last, scratch)


@kernel
def panel_product_q5_k(args: int, first: int, last: int, scratch: int) -> None:
    _q5_k(args, first, last, scratch)


@kernel
def panel_product_q6_k(args: int, first: int, last: int, scratch: int) -> None:
    _q6_k(args, first, last, scratch)


@kernel
def panel_product_iq4_nl(args: int, first: int, last: int, scratch: int) -> None:
    _iq4_nl(args, first, last, scratch)


@kernel
def panel_product_iq4_xs(args: int, first: int, last: int, scratch: int) -> None:
    _iq4_xs(args, first, last, scratch)


@kernel
def panel_product_mxfp4(args: int, first: int, last: int, scratch: int) -> None:
    _mxfp4(args, first, last, scratch)


PANEL_PRODUCTS: dict[str, Kernel] = {
    "F32": panel_product_f32,
    "F16": panel_product_f16,
    "BF16": panel_product_bf16,
    "Q4_0": panel_product_q4_0,
    "Q4_1": panel_product_q4_1,
    "Q5_0": panel_product_q5_0,
    "Q5_1": panel_product_q5_1,
    "Q8_0": panel_product_q8_0,
    "Q2_K": panel_product_q2_k,
    "Q3_K": panel_product_q3_k,
    "Q4_K": panel_product_q4_k,
    "Q5_K": panel_product_q5_k,
    "Q6_K": panel_product_q6_k,
    "IQ4_NL": panel_product_iq4_nl,
    "IQ4_XS": panel_product_iq4_xs,
    "MXFP4": panel_product_mxfp4,
}
