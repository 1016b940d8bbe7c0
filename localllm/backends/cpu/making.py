"""Records of the operations that make activations, and the forms they leave them in."""

from dataclasses import dataclass

from kernels_cpu import Kernel
from kernels_cpu.activations import KIND_OF, PART
from kernels_cpu.activations import activate as activate_kernel
from kernels_cpu.activations import add as add_kernel
from kernels_cpu.activations import quantise as quantise_kernel
from kernels_cpu.embedding import EMBEDDINGS, gather_rows
from kernels_cpu.norms import BASE, LAYER, RMS, SCALE, add_norm
from kernels_cpu.norms import norm as norm_kernel
from kernels_cpu.panels_bf16 import pack_tiles
from kernels_cpu.select import cap_logits, num_chunks
from localllm.backends.cpu.buffers import Quantised
from localllm.backends.cpu.context import Context
from localllm.backends.cpu.memory import address_of
from localllm.backends.cpu.program import Record, float_bits
from localllm.backends.cpu.step import Slot
from localllm.models.spec import Activation, Norm, Weight

REAL, ROW, PANEL, GENERATED = 0, 2, 8, 14  # first slots of the forms, and the first after them

SLOTS_OF_INT8 = 6


@dataclass(frozen=True, slots=True)
class Maker:
    """A record whose result may still be asked for in one more form."""

    record: Record

    def write_real(self, address: int, stride: int) -> None:
        self.record.args[REAL : REAL + 2] = address, stride

    def write_quantised(self, row: Quantised, panel: Quantised) -> None:
        for first, q in ((ROW, row), (PANEL, panel)):
            self.record.args[first : first + SLOTS_OF_INT8] = (
                q.values.address,
                q.values_stride,
                q.scales.address,
                q.scales_stride,
                q.sums.address,
                q.sums_stride,
            )

    @property
    def is_plain_norm(self) -> bool:
        """True for a norm that nobody has asked for a form of yet."""
        return self.record.kernel is norm_kernel and not self.record.args[:GENERATED].any()

    def add_to(self, address: int, stride: int, scale: float) -> None:
        """Turn a norm into address += scale * norm(x)."""
        self.record.kernel = add_norm
        self.record.args[[BASE, BASE + 1, SCALE]] = address, stride, float_bits(scale)
        self.record.label = add_norm.name
        self.write_real(address, stride)


def forms(context: Context, width: int, *, narrow: bool) -> list[int]:
    """The slots that every argument block of this kind begins with; no form is asked for yet."""
    generated = context.slot(Slot.GENERATED_ROWS if narrow else Slot.GENERATED)
    return [*[0] * GENERATED, generated, width]


def norm(context: Context, x: int, width: int, spec: Norm, *, narrow: bool) -> Maker:
    args = [
        *forms(context, width, narrow=narrow),
        x,
        context.stride(width),
        RMS if spec.kind == "rms" else LAYER,
        context.vector_address(spec.weight),
        context.vector_address(spec.bias),
        float_bits(spec.eps),
        *[0] * 3,
    ]
    count = context.slot(Slot.ROWS if narrow else Slot.TOKENS)
    return Maker(context.program.record(norm_kernel, args, count=count))


def activate(
    context: Context,
    gate: int | None,
    up: int,
    width: int,
    activation: Activation,
    *,
    narrow: bool,
) -> Maker:
    stride = context.stride(width)
    own = [up, stride, gate or 0, stride, KIND_OF[activation]]
    return by_parts(context, activate_kernel, own, width, narrow=narrow)


def quantise(context: Context, x: int, width: int, *, narrow: bool) -> Maker:
    """The int8 forms of what is there in float32."""
    own = [x, context.stride(width)]
    return by_parts(context, quantise_kernel, own, width, narrow=narrow)


def pack(context: Context, x: int, tiles: int, width: int, *, narrow: bool) -> None:
    """The bfloat16 tiles of what is there in float32, prompt tokens only."""
    first = context.slot(Slot.GENERATED_ROWS if narrow else Slot.GENERATED)
    args = [x, context.stride(width), width, tiles, context.tiles_stride(width), first]
    count = context.slot(Slot.PROMPT_ROWS if narrow else Slot.PROMPT)
    context.program.record(pack_tiles, args, count=count)


def add(context: Context, x: int, y: int, width: int, scale: float, *, narrow: bool) -> Maker:
    """x + scale * y."""
    stride = context.stride(width)
    own = [x, stride, y, stride, float_bits(scale)]
    return by_parts(context, add_kernel, own, width, narrow=narrow)


def by_parts(
    context: Context, kernel: Kernel, own: list[int], width: int, *, narrow: bool
) -> Maker:
    """A record whose items are parts of tokens."""
    args = [*forms(context, width, narrow=narrow), *own]
    count = context.slot(Slot.ROWS if narrow else Slot.TOKENS)
    return Maker(context.program.record(kernel, args, count=count, multiplier=-(-width // PART)))


def embed(context: Context, table: Weight, scale: float, out: int) -> None:
    """The rows of the step's tokens."""
    placed = context.placed(table)
    args = [
        address_of(context.step.tokens),
        placed.address,
        placed.row_bytes,
        table.cols,
        out,
        context.stride(table.cols),
        float_bits(scale),
    ]
    kernel = EMBEDDINGS[placed.type_name]
    context.program.record(kernel, args, count=context.slot(Slot.TOKENS))


def gather(context: Context, x: int, out: int, width: int) -> None:
    """The wanted rows of all tokens."""
    stride = context.stride(width)
    args = [address_of(context.step.rows), x, stride, width, out, stride]
    context.program.record(gather_rows, args, count=context.slot(Slot.ROWS))


def soften(context: Context, softcap: float) -> None:
    """The soft cap of the logits."""
    stride = context.step.logits.shape[1]
    args = [context.logits_address, stride, context.vocab_size, float_bits(softcap)]
    rows = context.slot(Slot.LOGITS)
    context.program.record(cap_logits, args, count=rows, multiplier=num_chunks(stride))
