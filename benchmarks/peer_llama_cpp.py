"""llama.cpp's figures for one model, as JSON; compare.py runs it in the peer's environment.

    PYTHON peer_llama_cpp.py MODEL.gguf THREADS DEPTH NEW SEQUENCES

pp: prompt of DEPTH tokens; tg: NEW tokens from an empty context; deep: NEW tokens after the prompt;
batch: NEW tokens of each of SEQUENCES sequences at once, in total, through the low-level batch API.
"""

import json
import sys
import time
from collections.abc import Callable

import llama_cpp
from llama_cpp import Llama


def rate(num_tokens: int, work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return num_tokens / (time.perf_counter() - started)


def single(path: str, threads: int, depth: int, new: int) -> dict[str, float]:
    model = Llama(
        path,
        n_ctx=depth + new + 8,
        n_threads=threads,
        n_threads_batch=threads,
        n_batch=512,
        n_ubatch=512,
        verbose=False,
    )
    ids = [7 + i * 31 % 9000 for i in range(depth)]

    def decode() -> None:
        for i in range(new):
            model.eval([ids[i % depth]])

    model.eval(ids[:32])
    model.reset()
    prompt = rate(depth, lambda: model.eval(ids))
    deep = rate(new, decode)
    model.reset()
    model.eval(ids[:1])
    return {"pp": prompt, "deep": deep, "tg": rate(new, decode)}


def together(path: str, threads: int, new: int, sequences: int) -> float:
    """Total tokens per second of `sequences` sequences that decode in one batch."""
    model_params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = sequences * (new + 8)
    params.n_batch = params.n_ubatch = 512
    params.n_seq_max = sequences
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(sequences, 0, 1)

    def step(position: int) -> None:
        batch.n_tokens = sequences
        for s in range(sequences):
            batch.token[s] = 7 + (position * 31 + s * 17) % 9000
            batch.pos[s] = position
            batch.n_seq_id[s] = 1
            batch.seq_id[s][0] = s
            batch.logits[s] = 1
        if llama_cpp.llama_decode(context, batch):
            sys.exit("llama_decode failed")

    def decode() -> None:
        for position in range(1, new + 1):
            step(position)

    step(0)
    return rate(new * sequences, decode)


if __name__ == "__main__":
    path, threads, depth, new, sequences = sys.argv[1], *map(int, sys.argv[2:6])
    figures = single(path, threads, depth, new)
    if sequences > 1:
        figures["batch"] = together(path, threads, new, sequences)
    print(json.dumps(figures))
