"""The self-test of the kernels: a tiny random model with tensors of every type, computed twice.

Its logits through the CPU backend, as a prompt and token by token, must be near those of the
reference backend, which is slow and obvious. A kernel that is wrong on this machine is off by as
much as the logits themselves; rounding of activations is a hundred times smaller.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localllm.config import Settings
from localllm.offline.logits import LogitsOptions, Role, write_logits
from localllm.opening import Progress
from localllm.quants import BY_NAME, TensorType, dequantize

WIDTH, HIDDEN, VOCAB, HEAD_DIM, NUM_TOKENS = 256, 512, 192, 64, 40
# Activations are rounded to int8, which moves logits by about 2e-4 of their square.
LARGEST_ERROR = 3e-3
# Where a block keeps its scales: bytes [start, end) of float16.
SCALES = {
    **{"Q4_0": (0, 2), "Q4_1": (0, 4), "Q5_0": (0, 2), "Q5_1": (0, 4), "Q8_0": (0, 2)},
    **{"Q2_K": (80, 84), "Q3_K": (108, 110), "Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210)},
    **{"IQ4_NL": (0, 2), "IQ4_XS": (0, 2)},
}
FLOAT_TYPES = ("F32", "F16", "BF16")
POWER_TYPE = "MXFP4"
TYPES = (*FLOAT_TYPES, *SCALES, POWER_TYPE)
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far the CPU backend is from the reference: squared error over squared logits."""

    role: Role
    error: float

    @property
    def is_good(self) -> bool:
        return self.error <= LARGEST_ERROR


def selftest(settings: Settings, progress: Progress | None = None) -> list[Comparison]:
    """Compare on both paths. Raises what a backend raises."""
    with tempfile.TemporaryDirectory() as folder:
        model, ids = Path(folder) / "selftest.gguf", Path(folder) / "ids.npy"
        write_model(model)
        rng = np.random.default_rng(1)
        np.save(ids, rng.integers(0, VOCAB, NUM_TOKENS).astype(np.int32))

        def logits(backend: str, role: Role) -> NDArray[np.float32]:
            out = Path(folder) / f"{backend}-{role}.npy"
            write_logits(model, ids, out, LogitsOptions(backend, role), settings, progress)
            found: NDArray[np.float32] = np.load(out)
            return found

        right = logits("reference", "prefill")
        roles: tuple[Role, ...] = ("prefill", "decode")
        return [Comparison(role, _error(logits("cpu", role), right)) for role in roles]


def _error(found: NDArray[np.float32], right: NDArray[np.float32]) -> float:
    difference = found.astype(np.float64) - right
    error = float(np.square(difference).sum() / np.square(right.astype(np.float64)).sum())
    return error if np.isfinite(error) else float("inf")


def write_model(path: Path) -> None:
    """A llama of random weights whose matrices take turns through all types."""
    import gguf

    rng = np.random.default_rng(0)
    shapes = {
        **{"attn_q": (WIDTH, WIDTH), "attn_k": (HEAD_DIM, WIDTH), "attn_v": (HEAD_DIM, WIDTH)},
        **{"attn_output": (WIDTH, WIDTH), "ffn_gate": (HIDDEN, WIDTH), "ffn_up": (HIDDEN, WIDTH)},
        "ffn_down": (WIDTH, HIDDEN),
    }
    num_layers = -(-len(TYPES) // len(shapes))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(num_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(WIDTH // HEAD_DIM)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(VOCAB)

    def add(name: str, kind: str, shape: tuple[int, int]) -> None:
        type_ = BY_NAME[kind]
        raw = random_rows(rng, type_, *shape)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType(type_.id))

    add("token_embd", "F16", (VOCAB, WIDTH))
    add("output", "Q6_K", (VOCAB, WIDTH))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    names = [(layer, name) for layer in range(num_layers) for name in shapes]
    for number, (layer, name) in enumerate(names):
        add(f"blk.{layer}.{name}", TYPES[number % len(TYPES)], shapes[name])
    for layer in range(num_layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_rows(rng: np.random.Generator, type_: TensorType, rows: int, cols: int) -> Bytes:
    """uint8 [rows, row bytes] of random blocks; the weights' deviation is 1 / sqrt(cols)."""
    deviation = cols**-0.5
    if type_.name in FLOAT_TYPES:
        values = (rng.standard_normal((rows, cols)) * deviation).astype(np.float32)
        high_halves: Bytes = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        halves: Bytes = values.astype(np.float16).view(np.uint8)
        whole: Bytes = values.view(np.uint8)
        return {"F32": whole, "F16": halves, "BF16": high_halves}[type_.name]
    blocks = rng.integers(0, 256, (rows, cols // type_.block_length, type_.block_bytes), np.uint8)
    if type_.name == POWER_TYPE:
        blocks[..., 0] = 127
        blocks[..., 0] = 127 + round(np.log2(deviation / _deviation(type_, blocks)))
        return blocks.reshape(rows, -1)
    start, end = SCALES[type_.name]
    # Blocks of either sign, so that the weights have no mean that hides everything else.
    signs = rng.choice(np.array([-1, 1], np.float16), (*blocks.shape[:2], (end - start) // 2))
    blocks[..., start:end] = signs.view(np.uint8)
    scales = (signs * (deviation / _deviation(type_, blocks))).astype(np.float16)
    blocks[..., start:end] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def _deviation(type_: TensorType, blocks: Bytes) -> float:
    return float(np.std(dequantize(type_, blocks.reshape(len(blocks), -1))))
