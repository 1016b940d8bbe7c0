"""Write a GGUF of a real llama model's shape with random weights: for speed, not for text.

    python -m benchmarks.synthetic 1b|3b|8b Q4_K|Q8_0 OUT.gguf VOCABULARY.gguf

The vocabulary is copied from any real model. Q4_K files mix in Q6_K about where llama.cpp's Q4_K_M
does.
"""

import sys
from dataclasses import dataclass

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    "1b": Shape(16, 2048, 8192, 32, 8, 64),
    "3b": Shape(28, 3072, 8192, 24, 8, 128),
    "8b": Shape(32, 4096, 14336, 32, 8, 128),
}
# Where a block's float16 scales are, and what to divide the wanted deviation by.
SCALES = {Type.Q4_K: ((0, 240.0), (2, 32.0)), Type.Q6_K: ((208, 1024.0),), Type.Q8_0: ((0, 74.0),)}


def random_blocks(
    rng: np.random.Generator, rows: int, cols: int, type_: Type, deviation: float
) -> NDArray[np.uint8]:
    block_length, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    blocks = rng.integers(0, 256, (rows, cols // block_length, block_bytes), dtype=np.uint8)
    for offset, divisor in SCALES[type_]:
        scale = np.float16(deviation / divisor).tobytes()
        blocks[..., offset : offset + 2] = np.frombuffer(scale, np.uint8)
    return blocks.reshape(rows, -1)


class Writer:
    """Adds the tensors of one model."""

    def __init__(self, path: str, shape: Shape, type_: Type, vocabulary: str) -> None:
        self.shape, self.type = shape, type_
        self.rng = np.random.default_rng(1)
        self.out = gguf.GGUFWriter(path, "llama")
        self.num_tokens = self._copy_vocabulary(gguf.GGUFReader(vocabulary))

    def _copy_vocabulary(self, source: gguf.GGUFReader) -> int:
        for field in source.fields.values():
            if field.name.startswith("tokenizer."):
                kind, *rest = field.types
                self.out.add_key_value(field.name, field.contents(), kind, *rest[-1:])
        return len(source.fields["tokenizer.ggml.tokens"].data)

    def write(self) -> None:
        s, out = self.shape, self.out
        out.add_context_length(131072)
        out.add_embedding_length(s.width)
        out.add_block_count(s.layers)
        out.add_feed_forward_length(s.hidden)
        out.add_head_count(s.heads)
        out.add_head_count_kv(s.kv_heads)
        out.add_layer_norm_rms_eps(1e-5)
        out.add_rope_freq_base(500000.0)
        self.matrix("token_embd", self.num_tokens, s.width, deviation=1.0)
        self.matrix("output", self.num_tokens, s.width, better=True)
        self.ones("output_norm")
        for i in range(s.layers):
            self.layer(f"blk.{i}", better=i % 2 == 1)
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()

    def layer(self, at: str, *, better: bool) -> None:
        s = self.shape
        wide, narrow = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self.ones(f"{at}.attn_norm")
        self.ones(f"{at}.ffn_norm")
        self.matrix(f"{at}.attn_q", wide, s.width)
        self.matrix(f"{at}.attn_k", narrow, s.width)
        self.matrix(f"{at}.attn_v", narrow, s.width, better=better)
        self.matrix(f"{at}.attn_output", s.width, wide)
        self.matrix(f"{at}.ffn_gate", s.hidden, s.width)
        self.matrix(f"{at}.ffn_up", s.hidden, s.width)
        self.matrix(f"{at}.ffn_down", s.width, s.hidden, better=better)

    def matrix(
        self, name: str, rows: int, cols: int, *, better: bool = False, deviation: float = 0.0
    ) -> None:
        type_ = Type.Q6_K if better and self.type is Type.Q4_K else self.type
        blocks = random_blocks(self.rng, rows, cols, type_, deviation or cols**-0.5)
        self.out.add_tensor(f"{name}.weight", blocks, raw_dtype=type_)

    def ones(self, name: str) -> None:
        self.out.add_tensor(f"{name}.weight", np.ones(self.shape.width, np.float32))


if __name__ == "__main__":
    if len(sys.argv) != 5 or sys.argv[1] not in SHAPES or sys.argv[2] not in ("Q4_K", "Q8_0"):
        sys.exit(__doc__)
    Writer(sys.argv[3], SHAPES[sys.argv[1]], Type[sys.argv[2]], sys.argv[4]).write()
