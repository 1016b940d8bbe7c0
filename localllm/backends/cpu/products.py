"""Records of the products: raw weights times activations, on both paths."""

from dataclasses import dataclass

from kernels_cpu.panels import PANEL_PRODUCTS, ROWS_PER_TILE
from kernels_cpu.rows import ROW_PRODUCTS, num_items, row_arguments
from localllm.backends.cpu.buffers import Forms, Quantised
from localllm.backends.cpu.context import EXACT_TYPES, Context
from localllm.backends.cpu.program import JOINED, float_bits
from localllm.backends.cpu.step import Slot
from localllm.models.spec import Linear


@dataclass(frozen=True, slots=True)
class Target:
    """Where a product goes: float32 at `address`, `stride` floats from token to token.

    residual  add to what is there
    narrow    over the wanted rows instead of all tokens
    final     of these only over those whose logits are wanted
    """

    address: int
    stride: int
    residual: bool = False
    scale: float = 1.0
    narrow: bool = False
    final: bool = False

    @property
    def prompts(self) -> tuple[Slot, Slot, Slot]:
        """Of the prompts' part: its first token or row, its end, and whether there is any."""
        if self.final:
            return Slot.GENERATED_ROWS, Slot.LOGITS, Slot.HAS_PROMPT_LOGITS
        if self.narrow:
            return Slot.GENERATED_ROWS, Slot.ROWS, Slot.HAS_PROMPT_ROWS
        return Slot.GENERATED, Slot.TOKENS, Slot.HAS_PROMPT


def product(
    context: Context, x: Forms, linear: Linear, target: Target, *, more: bool = False
) -> None:
    """target = (target +) scale * (W x + b) for generated and prompt tokens.

    more  another product of the same activations follows: no barrier is needed between them
    """
    row_product(context, x, linear, target)
    panel_product(context, x, linear, target, flags=JOINED if more else 0)


def row_product(context: Context, x: Forms, linear: Linear, target: Target) -> None:
    weight = linear.weight
    tensor = context.placed(weight)
    out = target.address, target.stride
    args = row_arguments(
        weights=tensor.address,
        row_bytes=tensor.row_bytes,
        rows=weight.rows,
        cols=weight.cols,
        count=context.slot(Slot.GENERATED_ROWS if target.narrow else Slot.GENERATED),
        **row_inputs(context, x, tensor.type_name, weight.cols),
        out=out,
        bias=context.vector_address(linear.bias),
        residual=out if target.residual else (0, 0),
        scale=target.scale,
    )
    context.program.record(
        ROW_PRODUCTS[tensor.type_name],
        args.tolist(),
        count=context.slot(Slot.HAS_GENERATED_ROWS if target.narrow else Slot.HAS_GENERATED),
        multiplier=num_items(weight.rows),
        # The panel product that follows is of other tokens.
        flags=JOINED,
    )


def row_inputs(context: Context, x: Forms, type_name: str, cols: int) -> dict[str, tuple[int, int]]:
    if type_name in EXACT_TYPES:
        assert x.real is not None
        return {"x": (x.real.address, context.stride(cols))}
    assert x.row is not None
    q = x.row
    return {
        "x": (q.values.address, q.values_stride),
        "x_scale": (q.scales.address, q.scales_stride),
        "x_sum": (q.sums.address, q.sums_stride),
    }


def panel_product(
    context: Context, x: Forms, linear: Linear, target: Target, *, flags: int
) -> None:
    weight = linear.weight
    tensor = context.placed(weight)
    first, end, has_any = target.prompts
    args = [
        tensor.address,
        tensor.row_bytes,
        weight.rows,
        weight.cols,
        *panel_inputs(context, x, tensor.type_name, weight.cols),
        target.address,
        target.stride,
        context.vector_address(linear.bias),
        int(target.residual),
        float_bits(target.scale),
        context.slot(first),
        context.slot(end),
    ]
    context.program.record(
        PANEL_PRODUCTS[tensor.type_name],
        args,
        count=context.slot(has_any),
        multiplier=-(-weight.rows // ROWS_PER_TILE),
        chunk=1,
        flags=flags,
    )


def panel_inputs(context: Context, x: Forms, type_name: str, cols: int) -> list[int]:
    """Slots 4 to 8: values, their stride in bytes, scales, sums, the stride of both in floats."""
    if type_name in EXACT_TYPES:
        assert x.real is not None
        return [x.real.address, 4 * context.stride(cols), 0, 0, 0]
    if x.tiles is not None:
        return [x.tiles.address, context.tiles_stride(cols), 0, 0, 0]
    assert x.panel is not None
    q: Quantised = x.panel
    assert q.scales_stride == q.sums_stride
    return [
        q.values.address,
        q.values_stride,
        q.scales.address,
        q.sums.address,
        q.sums_stride,
    ]
