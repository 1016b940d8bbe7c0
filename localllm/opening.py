"""From an open file to an engine: how much KV it gets, which backend, which kernels.

Not here: text (runtime.py), what the parts do.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from localllm.backends import BLOCK_SIZE, Backend, BackendOptions
from localllm.backends.kv import KV_TYPES, KVType, kv_type
from localllm.config import WEIGHT_MODES, Settings
from localllm.engine.engine import Engine
from localllm.engine.speculation import Speculation
from localllm.errors import BadRequest, BadSettings, LocalLLMError, OutOfMemory
from localllm.gguf import GgufFile
from localllm.memory import available_memory
from localllm.models import read_spec
from localllm.models.adapter import Adapter
from localllm.models.spec import KVGroup, ModelSpec

Progress = Callable[[str, int, int], None]
MakeRoom = Callable[[int], int]

BACKENDS = ("cpu", "reference")
MAX_TOKENS = 512  # of a step
MAX_ROWS = 64
# Positions that a pool holds where memory allows it; a longer context takes what it needs.
POOL_POSITIONS = 32 * 1024
# Shares of the memory that is free beside the weights.
POOL_SHARE, ASKED_SHARE = 0.25, 0.8
# What must stay free beside weights that are copied: other programs, and files that are being read.
SPARE_BYTES = 2 << 30
# A runner without a model: the interpreter, the libraries, machine code.
PROCESS_BYTES = 160 << 20
# Values of each token of a step that are alive at once, as multiples of the model's widths.
ACTIVATIONS = 5
SMALLEST_CONTEXT = 4


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a command may choose beyond the settings.

    digest    of the file, where it is known; it goes into the prefix cache's hashes
    chunk     a fixed number of known tokens that a sequence computes in a step
    max_rows  most tokens of a step whose logits are wanted
    room      positions of the longest sequence, where that says nothing about the context that the
              model is run for (which chooses between longrope's factors)
    adapter   is applied to the model; adapter_digest: of its file, where it is known
    free_bytes  memory that the model could have at most; None: all that is free
    make_room   called with what it is going to hold; gives the memory that it may take then
    """

    backend: str = "cpu"
    digest: str = ""
    chunk: int | None = None
    max_rows: int = MAX_ROWS
    room: int | None = None
    adapter: Adapter | None = None
    adapter_digest: str = ""
    free_bytes: int | None = None
    make_room: MakeRoom | None = None


@dataclass(frozen=True, slots=True)
class KVPlan:
    """Most positions of a sequence, and blocks of each group's pool."""

    num_ctx: int
    num_blocks: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a model is going to hold, in bytes; `weights` says how: "mapped" or "resident"."""

    weights: str
    weight_bytes: int
    scratch_bytes: int
    kv: KVPlan

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.scratch_bytes + self.kv.num_bytes


def block_bytes(group: KVGroup, kv: KVType) -> int:
    """One block of a group: keys and values of all its layers."""
    return 2 * len(group.layers) * kv.block_bytes(group)


def plan_kv(
    groups: tuple[KVGroup, ...],
    trained: int,
    asked: int | None,
    free: int,
    num_parallel: int,
    kv: KVType = KV_TYPES["f16"],
) -> KVPlan:
    """How much KV a model gets.

    trained  positions the model was trained for; asked: what the user wants, None for automatic
    free     bytes of memory beside the weights
    A pool is committed as it is used, so its size is a bound and costs nothing by itself.
    Raises OutOfMemory if the context that was asked for does not fit.
    """
    num_ctx = min(max(asked, SMALLEST_CONTEXT), trained) if asked else min(trained, POOL_POSITIONS)

    def sizes(positions: int) -> tuple[int, ...]:
        full = -(-positions // BLOCK_SIZE) + 1
        return tuple(min(full, window_blocks(g, num_parallel)) for g in groups)

    def cost(positions: int) -> int:
        return sum(n * block_bytes(g, kv) for n, g in zip(sizes(positions), groups))

    positions = max(num_ctx, min(POOL_POSITIONS, num_parallel * num_ctx))
    while positions > num_ctx and cost(positions) > POOL_SHARE * free:
        positions = max(num_ctx, positions // 2)
    while asked is None and num_ctx > 2048 and cost(positions) > POOL_SHARE * free:
        num_ctx = positions = num_ctx // 2
    if cost(positions) > ASKED_SHARE * free:
        raise OutOfMemory(
            f"a context of {num_ctx} needs {amount(cost(positions))}, of which {amount(free)} are "
            "free beside the weights; ask for a smaller num_ctx, or take a smaller model"
        )
    return KVPlan(num_ctx, sizes(positions), cost(positions))


def window_blocks(group: KVGroup, num_parallel: int) -> int:
    """Most blocks that make sense for a group: its running sequences, and as much again cached."""
    if group.window is None:
        return 1 << 30
    return 2 * num_parallel * ((group.window + MAX_TOKENS) // BLOCK_SIZE + 2)


def open_engine(
    file: GgufFile,
    settings: Settings,
    options: EngineOptions,
    eog_ids: frozenset[int] = frozenset(),
    progress: Progress | None = None,
) -> Engine:
    """The engine of an open file, with its backend, not yet started. Raises BadRequest."""
    if settings.weights not in WEIGHT_MODES:
        modes = ", ".join(WEIGHT_MODES)
        raise BadRequest(f"weights (LOCALLLM_WEIGHTS): {settings.weights!r} is none of {modes}")
    spec = read_spec(file, settings.context_length)
    identity = identity_of(file.path, options.digest, options.backend, settings.kv_cache_type)
    if options.adapter is not None:
        spec, file = options.adapter.apply(spec), options.adapter.joined(file)
        identity += b"+" + stamp(options.adapter.path, options.adapter_digest).encode()
    free = available_memory() if options.free_bytes is None else options.free_bytes
    plan = plan_memory(file, spec, settings, options, free)
    if options.make_room is not None:
        spare = SPARE_BYTES if plan.weights == "resident" else 0
        free = options.make_room(plan.num_bytes + spare)
        if free < plan.num_bytes + spare:
            plan = plan_memory(file, spec, settings, options, free)
    sizes = BackendOptions(
        num_blocks=plan.kv.num_blocks,
        table_width=-(-plan.kv.num_ctx // BLOCK_SIZE) + 1,
        max_tokens=MAX_TOKENS,
        max_rows=num_rows(settings, options),
        max_segments=max(MAX_ROWS, settings.num_parallel),
        threads=settings.threads,
        weights=plan.weights,
        kv_type=settings.kv_cache_type,
        progress=progress,
    )
    return Engine(
        open_backend(options.backend, file, spec, sizes, settings),
        eog_ids=eog_ids,
        identity=identity,
        num_ctx=plan.kv.num_ctx,
        max_running=settings.num_parallel,
        max_waiting=settings.max_queue,
        chunk=options.chunk,
        speculation=Speculation() if settings.speculate else None,
    )


def plan_memory(
    file: GgufFile, spec: ModelSpec, settings: Settings, options: EngineOptions, free: int
) -> MemoryPlan:
    """How a model is going to use `free` bytes.

    Weights are copied where that leaves room, else they stay in the file's map, from which pages
    can be dropped and read again. Raises OutOfMemory if the model cannot run in so little.
    """
    weights, held = settings.weights, weight_bytes(file)
    scratch = scratch_bytes(spec, num_rows(settings, options))
    if weights == "auto":
        weights = "resident" if held + scratch + SPARE_BYTES < free else "mapped"
    beside = free - scratch - held
    if weights == "mapped":
        # A model whose weights are read again all the time is slow, but it runs.
        beside = max(beside, (free - scratch) // 2, 0)
    lacking = f"the model requires more system memory than is available ({amount(free)}): weights "
    lacking += f"{amount(held)}, working memory {amount(scratch)}"
    if beside < 0:
        raise OutOfMemory(f"{lacking}; unset LOCALLLM_WEIGHTS, or take a smaller quantisation")
    asked, element_type = options.room or settings.context_length, kv_type(settings.kv_cache_type)
    try:
        kv = plan_kv(
            spec.kv_groups,
            spec.context_length,
            asked,
            beside,
            settings.num_parallel,
            element_type,
        )
    except OutOfMemory as error:
        raise OutOfMemory(f"{lacking}; {error}") from error
    return MemoryPlan(weights, held, scratch, kv)


def amount(num_bytes: int) -> str:
    """Bytes as people say it."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def num_rows(settings: Settings, options: EngineOptions) -> int:
    """Most tokens of a step whose logits are wanted."""
    return max(options.max_rows, settings.num_parallel)


def weight_bytes(file: GgufFile) -> int:
    return sum(tensor.nbytes for tensor in file.tensors.values())


def scratch_bytes(spec: ModelSpec, max_rows: int) -> int:
    """What a runner holds beside weights and KV: activations, logits, itself."""
    width = max(
        spec.embedding_length + layer.attention.q_width + layer.ffn.up.weight.rows
        for layer in spec.layers
    )
    floats = MAX_TOKENS * ACTIVATIONS * width + max_rows * spec.vocab_size
    return PROCESS_BYTES + 4 * floats


def identity_of(path: Path, digest: str, backend: str, kv: str = "f16") -> bytes:
    """What tells this model's KV from any other's, an adapter apart."""
    return f"{stamp(path, digest)}:{backend}:{kv}".encode()


def stamp(path: Path, digest: str) -> str:
    """The digest of a file, or what tells it from others where that is not known."""
    if digest:
        return digest
    stat = os.stat(path)
    return f"{path}:{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"


def open_backend(
    name: str, file: GgufFile, spec: ModelSpec, options: BackendOptions, settings: Settings
) -> Backend:
    """The backend of that name. Raises BadRequest for an unknown one."""
    if name == "reference":
        from localllm.backends.reference import ReferenceBackend

        return ReferenceBackend(file, spec, options)
    if name == "cpu":
        configure_kernels(settings)
        from localllm.backends.cpu.backend import CpuBackend

        return CpuBackend(file, spec, options)
    raise BadRequest(f"unknown backend {name!r}; one of {', '.join(BACKENDS)}")


def configure_kernels(settings: Settings) -> None:
    """Choose the instruction set and the kernel cache of this process.

    A runner's parent has set Numba's variables already; in the caller's own process Numba is told
    here, before it compiles anything. If the caller has imported it, it stays as it is: then raises
    LocalLLMError if a level is asked for that Numba was not imported for.
    """
    from kernels_cpu import isa

    level = settings.isa or isa.detect(settings.cache_dir)
    levels = isa.available(settings.cache_dir)
    if level not in levels:
        raise BadSettings(
            f"LOCALLLM_ISA is {level!r}, which this machine cannot run; it can {', '.join(levels)}"
        )
    wanted = isa.environment_for(level, os.environ)
    processor = wanted.get("NUMBA_CPU_NAME"), wanted.get("NUMBA_CPU_FEATURES")
    was_imported = "numba" in sys.modules
    from numba import config

    if None not in processor and processor != (config.CPU_NAME, config.CPU_FEATURES):
        if not was_imported:
            config.CPU_NAME, config.CPU_FEATURES = processor
        elif settings.isa is not None:
            raise LocalLLMError(
                f"Numba was imported before localllm, so the level {level!r} cannot be chosen; "
                "unset LOCALLLM_ISA, or open the model before anything else uses Numba"
            )
    import kernels_cpu

    kernels_cpu.configure(settings.cache_dir, level)
