"""Logits after every token of a sequence: the window that tests and checks look through.

The tokens go through scheduler and block pool like any request, as prompt or as generated tokens,
in chunks of any size, beside other sequences; all of which must change no bit of the result.
"""

import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from localllm.config import Settings
from localllm.engine.engine import Engine
from localllm.engine.sequence import LogitsObserver, Output, Request
from localllm.errors import BadFile, BadRequest, LocalLLMError
from localllm.gguf import GgufFile
from localllm.opening import EngineOptions, Progress, open_engine
from localllm.sampling import SamplingParams

Role = Literal["prefill", "decode"]
ROLES = ("prefill", "decode")
DEFAULT_CHUNK = {"prefill": 128, "decode": 1}
BESIDE_POSITIONS = 128  # that neighbours may have beyond the length of the sequence


@dataclass(frozen=True, slots=True)
class LogitsOptions:
    """How the tokens are computed.

    role    "prefill": as prompt, "decode": as if each had been generated
    chunk   known tokens a step; None: 128 as prompt, 1 as generated
    beside  other pseudo-random sequences that share the steps
    """

    backend: str = "cpu"
    role: Role = "prefill"
    chunk: int | None = None
    beside: int = 0

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise BadRequest(f"--path must be prefill or decode, got {self.role!r}")
        if self.chunk is not None and self.chunk < 1:
            raise BadRequest(f"--chunk must be at least 1, got {self.chunk}")
        if self.beside < 0:
            raise BadRequest(f"--beside must not be negative, got {self.beside}")

    @property
    def tokens_per_step(self) -> int:
        return self.chunk or DEFAULT_CHUNK[self.role]


def write_logits(
    model: Path,
    ids: Path,
    out: Path,
    options: LogitsOptions,
    settings: Settings,
    progress: Progress | None = None,
) -> None:
    """Write float32 [T, vocab] to the .npy file `out`, as rows come, for the T ids in `ids`."""
    tokens = load_ids(ids)
    with GgufFile.open(model) as file:
        engine = open_for_rows(file, len(tokens), options, settings, progress)
        try:
            shape = (len(tokens), engine.backend.spec.vocab_size)
            rows = np.lib.format.open_memmap(out, mode="w+", dtype=np.float32, shape=shape)

            def write(position: int, logits: NDArray[np.float32]) -> None:
                rows[position : position + len(logits)] = logits

            observe(engine, tokens, write, options)
            rows.flush()
        finally:
            engine.close()


def load_ids(path: Path) -> list[int]:
    """Token ids of a .npy file: one dimension of integers."""
    try:
        ids = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise BadFile(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise BadFile(f"{path}: is no .npy file of token ids: {error}") from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise BadFile(f"{path}: token ids must be a one-dimensional array of integers")
    if not len(ids):
        raise BadFile(f"{path}: holds no token ids")
    return [int(i) for i in ids]


def open_for_rows(
    file: GgufFile,
    length: int,
    options: LogitsOptions,
    settings: Settings,
    progress: Progress | None = None,
) -> Engine:
    """A running engine that gives the logits of all tokens of a step."""
    spare = BESIDE_POSITIONS if options.beside else 0
    settings = replace(settings, num_parallel=1 + options.beside)
    chunk = options.tokens_per_step
    engine_options = EngineOptions(
        options.backend,
        chunk=chunk,
        max_rows=min(chunk, 512) + options.beside + 1,
        room=length + spare,
    )
    return open_engine(file, settings, engine_options, progress=progress).start()


def observe(
    engine: Engine, tokens: list[int], observer: LogitsObserver, options: LogitsOptions
) -> None:
    """Run the tokens through the engine; `observer` sees the logits after every one, in order.

    Raises LocalLLMError if the engine reports one.
    """
    is_over = threading.Event()
    ends: list[Output] = []

    def watch(outputs: list[Output]) -> None:
        ends.extend(o for o in outputs if o.finish_reason is not None)
        if ends:
            is_over.set()

    for request in neighbours(engine, options.beside):
        engine.submit(request, ignore)
    request = Request(
        "observed",
        tokens,
        SamplingParams(temperature=0, num_predict=0),
        cache_prompt=False,
        num_prompt=None if options.role == "prefill" else 0,
        observer=observer,
    )
    engine.submit(request, watch)
    is_over.wait()
    if ends[0].error is not None:
        raise LocalLLMError(ends[0].error)


def neighbours(engine: Engine, count: int) -> list[Request]:
    """Sequences of random prompts that generate as long as the context lets them."""
    rng = np.random.default_rng(count)
    params = SamplingParams(num_predict=-1, ignore_eog=True, seed=7)
    longest = max(1, min(96, engine.max_length // 2))
    return [
        Request(
            f"beside {i}",
            rng.integers(
                engine.backend.spec.vocab_size, size=rng.integers(1, longest + 1)
            ).tolist(),
            params,
            cache_prompt=False,
        )
        for i in range(count)
    ]


def ignore(outputs: list[Output]) -> None:
    """The sink of requests that nobody waits for."""
