"""How each quantised weight type is unpacked; see unpack_blocks.py for the form of a panel."""

from kernels_cpu.unpack_blocks import Format
from kernels_cpu.unpack_codebook import IQ4_NL, IQ4_XS, MXFP4
from kernels_cpu.unpack_k import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from kernels_cpu.unpack_legacy import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0

FORMATS: dict[str, Format] = {
    "Q4_0": Q4_0,
    "Q4_1": Q4_1,
    "Q5_0": Q5_0,
    "Q5_1": Q5_1,
    "Q8_0": Q8_0,
    "Q2_K": Q2_K,
    "Q3_K": Q3_K,
    "Q4_K": Q4_K,
    "Q5_K": Q5_K,
    "Q6_K": Q6_K,
    "IQ4_NL": IQ4_NL,
    "IQ4_XS": IQ4_XS,
    "MXFP4": MXFP4,
}
