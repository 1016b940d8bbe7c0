"""`CpuBackend`: records the model's program once and runs it at every step."""

from kernels_cpu.compile import compile_kernels
from kernels_cpu.cores import default_threads
from kernels_cpu.rows import ROW_PRODUCTS
from kernels_cpu.team import Team, team_run, team_stop, team_worker
from localllm.backends import BackendOptions, Batch, StepResult
from localllm.backends.cpu import reading
from localllm.backends.cpu.context import Context, KVMemory
from localllm.backends.cpu.memory import Weights
from localllm.backends.cpu.ops import CpuOps
from localllm.backends.cpu.program import Program
from localllm.backends.cpu.selecting import Selection
from localllm.backends.cpu.step import StepMemory
from localllm.backends.kv import kv_type
from localllm.gguf import GgufFile
from localllm.models.decoder import forward
from localllm.models.spec import ModelSpec


class CpuBackend:
    """Runs steps of one model on a thread team; see `backends.Backend`.

    `kernels_cpu.configure` has been called. Opening compiles what is not in the kernel cache and
    copies the weights if they are to be resident; both report to `options.progress`.
    """

    def __init__(self, file: GgufFile, spec: ModelSpec, options: BackendOptions) -> None:
        assert len(options.num_blocks) == len(spec.kv_groups)
        self.spec = spec
        self.kv_groups = spec.kv_groups
        self.num_blocks = options.num_blocks
        self.max_tokens = options.max_tokens
        self.max_segments = options.max_segments
        self.max_rows = options.max_rows
        self.num_threads = options.threads or default_threads()
        self.weights = Weights(list(file.tensors.values()), options.weights, ROW_PRODUCTS)
        self.weights.settle(self.num_threads, options.progress)
        self.step_memory = StepMemory(len(spec.kv_groups), options, spec.output.weight.rows)
        self.kv = [
            KVMemory(group, n, kv_type(options.kv_type))
            for group, n in zip(spec.kv_groups, options.num_blocks, strict=True)
        ]
        self.kv_bytes_per_block = tuple(
            2 * len(g.layers) * kv.block_bytes for g, kv in zip(spec.kv_groups, self.kv)
        )
        self.program = Program()
        self.context = Context(spec, options, self.program, self.step_memory, self.weights, self.kv)
        self.ops = CpuOps(self.context)
        forward(self.ops, spec)
        self.selection = Selection(self.context)
        self._compile(options)
        self.team = Team(self.num_threads)

    def _compile(self, options: BackendOptions) -> None:
        def report(done: int, total: int) -> None:
            if options.progress is not None:
                options.progress("compiling kernels", done, total)

        kernels = [*self.program.kernels(), team_run, team_stop, team_worker]
        compile_kernels(kernels, self.num_threads, report)
        self.program.finish()

    def step(self, batch: Batch) -> StepResult:
        assert 0 < len(batch.tokens) <= self.max_tokens
        num_logits = len(batch.rows) - batch.num_hidden
        assert 0 <= num_logits <= self.max_rows
        assert len(batch.context_lengths) <= self.max_segments
        self.step_memory.load(batch)
        self.ops.attending.fill(batch)
        self.ops.heads.fill(batch)
        self.selection.load(batch)
        self.team.run(self.program.address, len(self.program))
        result = self.selection.result(num_logits)
        if batch.num_hidden:
            result.hidden = self.ops.hidden(num_logits, len(batch.rows))
        return result

    def copy_block(self, group: int, source: int, target: int, num_positions: int) -> None:
        self.kv[group].copy_block(source, target, num_positions)

    def read_bandwidth(self) -> tuple[int, float]:
        """Bytes of weights that a decode step reads, and the bytes per second at which they can be read."""
        return reading.measure(self.context, self.team)

    @property
    def position(self) -> tuple[int, int]:
        """(steps started, index of the running record or -1); a step that hangs keeps both."""
        run, record = self.team.position
        return run, record

    def close(self) -> None:
        self.team.close()
        self.weights.close()
