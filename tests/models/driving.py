"""Feed a backend like the scheduler does."""

import numpy as np

from localllm.backends import BLOCK_SIZE, Backend, Batch


def run_tokens(
    backend: Backend, ids: np.ndarray, *, chunk: int, path: str = "prefill"
) -> np.ndarray:
    """float32 [T, vocab]: logits after every token, `chunk` tokens a step.

    The blocks of the sequence are scattered over the pool, so that a table read wrong shows.
    """
    width = -(-len(ids) // BLOCK_SIZE)
    tables = []
    for g, count in enumerate(backend.num_blocks):
        order = np.random.Generator(np.random.PCG64(g)).permutation(count)
        tables.append(order[:width].astype(np.int32)[None])
    out = []
    for first in range(0, len(ids), chunk):
        tokens = np.asarray(ids[first : first + chunk], np.int32)
        n = len(tokens)
        is_generated = path == "decode"
        batch = Batch(
            tokens=tokens,
            positions=np.arange(first, first + n, dtype=np.int32),
            segment_starts=np.array([0, n], np.int32),
            context_lengths=np.array([first + n], np.int32),
            block_tables=tables,
            num_generated=n if is_generated else 0,
            num_generated_segments=int(is_generated),
            rows=np.arange(n, dtype=np.int32),
        )
        out.append(backend.step(batch).logits.copy())
    return np.concatenate(out)
