"""The operations of the forward pass, recorded: each one appends records to the program.

A handle keeps its float32 values and, when a quantised weight asks for them, its int8 forms: the row form
for generated tokens, the panel form for prompt tokens. An operation that makes activations is recorded with
its argument block still open; the form that a later operation needs is then written into it, so that a norm
and the quantisation of its result are one pass.
"""

from dataclasses import dataclass, replace

from localllm.backends import Floats
from localllm.backends.cpu import making
from localllm.backends.cpu.attending import Attending
from localllm.backends.cpu.buffers import Forms
from localllm.backends.cpu.context import Context
from localllm.backends.cpu.heads import Heads
from localllm.backends.cpu.making import Maker
from localllm.backends.cpu.products import Target, product
from localllm.models.spec import Activation, AttentionSpec, Linear, Norm, Weight


@dataclass(slots=True)
class Act:
    """Activations of the step's tokens (or, if `narrow`, of its wanted rows): float32 [., width]."""

    width: int
    narrow: bool
    forms: Forms
    maker: Maker | None = None


class CpuOps:
    """`models.decoder.Ops` over handles of type `Act`."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.attending = Attending(context)
        self.heads = Heads(context)
        self._kept: Act | None = None

    def embed(self, table: Weight, scale: float) -> Act:
        out = self._new(table.cols)
        making.embed(self.context, table, scale, self._real(out))
        return out

    def norm(self, x: Act, norm: Norm) -> Act:
        maker = making.norm(self.context, self._real(x), x.width, norm, narrow=x.narrow)
        return self._made(x.width, x.narrow, maker)

    def linear(self, x: Act, *linears: Linear) -> tuple[Act, ...]:
        outs = [self._new(linear.weight.rows, narrow=x.narrow) for linear in linears]
        targets = [self._target(self._real(out), out.width, narrow=x.narrow) for out in outs]
        self._products(x, list(zip(linears, targets)))
        return tuple(outs)

    def attend(self, q: Act, k: Act, v: Act, layer: int, attention: AttentionSpec) -> Act:
        out = self._new(attention.q_width)
        real = [self._real(a) for a in (q, k, v)]
        self.heads.place(real[0], real[1], real[2], layer, attention)
        self.attending.attend(real[0], self._real(out), layer, attention)
        return out

    def activate(self, gate: Act | None, up: Act, activation: Activation) -> Act:
        real = None if gate is None else self._real(gate)
        maker = making.activate(
            self.context, real, self._real(up), up.width, activation, narrow=up.narrow
        )
        return self._made(up.width, up.narrow, maker)

    def add(self, x: Act, y: Act, scale: float) -> Act:
        """Into x's own memory: nothing reads the old values afterwards."""
        real, stride = self._real(x), self.context.stride(x.width)
        maker = y.maker
        if maker is not None and maker.is_plain_norm:
            maker.add_to(real, stride, scale)
        else:
            maker = making.add(self.context, real, self._real(y), x.width, scale, narrow=x.narrow)
            maker.write_real(real, stride)
        return Act(x.width, x.narrow, Forms(real=x.forms.real))

    def add_linear(self, x: Act, y: Act, linear: Linear, scale: float) -> Act:
        """Into x's own memory, in the product's epilogue."""
        target = self._target(self._real(x), x.width, narrow=x.narrow)
        self._products(y, [(linear, replace(target, residual=True, scale=scale))])
        return Act(x.width, x.narrow, Forms(real=x.forms.real))

    def rows(self, x: Act) -> Act:
        out = self._new(x.width, narrow=True)
        making.gather(self.context, self._real(x), self._real(out), x.width)
        return out

    def keep(self, x: Act) -> None:
        """The handle stays, and with it its memory."""
        self._real(x)
        self._kept = x

    def hidden(self, first: int, end: int) -> Floats:
        """Rows [first, end) of what was kept: float32 [end - first, n]."""
        assert self._kept is not None
        assert self._kept.forms.real is not None
        width = self._kept.width
        return self._kept.forms.real.floats(self.context.stride(width))[first:end, :width]

    def logits(self, x: Act, output: Linear, scale: float, softcap: float | None) -> Act:
        """Into the step's result; the buffer is not of the pool."""
        assert x.narrow
        stride = self.context.step.logits.shape[1]
        out = self.context.logits_address
        self._products(x, [(output, Target(out, stride, scale=scale, narrow=True, final=True))])
        if softcap is not None:
            making.soften(self.context, softcap)
        return Act(output.weight.rows, True, Forms())

    def _new(self, width: int, *, narrow: bool = False) -> Act:
        return Act(width, narrow, Forms(real=self.context.take_real(width)))

    def _made(self, width: int, narrow: bool, maker: Maker) -> Act:
        """A handle whose forms are written by an earlier record, once they are asked for.

        All their memory is taken now: what is free later may still be in use where the record stands.
        """
        forms = Forms(self.context.take_real(width), *self.context.take_quantised(width))
        return Act(width, narrow, forms, maker)

    def _real(self, x: Act) -> int:
        """Address of the float32 form, made if it is not there yet."""
        assert x.forms.real is not None
        if x.maker is not None:
            x.maker.write_real(x.forms.real.address, self.context.stride(x.width))
        return x.forms.real.address

    def _quantise(self, x: Act) -> None:
        """See that both int8 forms are there."""
        forms = x.forms
        if forms.row is None or forms.panel is None:
            forms.row, forms.panel = self.context.take_quantised(x.width)
            maker = making.quantise(self.context, self._real(x), x.width, narrow=x.narrow)
            maker.write_quantised(forms.row, forms.panel)
        elif x.maker is not None:
            x.maker.write_quantised(forms.row, forms.panel)
        if self.context.has_tiles and forms.tiles is None:
            forms.tiles = self.context.take_tiles(x.width)
            real = self._real(x)
            making.pack(self.context, real, forms.tiles.address, x.width, narrow=x.narrow)

    def _target(self, address: int, width: int, *, narrow: bool) -> Target:
        return Target(address, self.context.stride(width), narrow=narrow)

    def _products(self, x: Act, pairs: list[tuple[Linear, Target]]) -> None:
        """Products of one input; then, for those with an adapter, what that adds to each.

        Both steps of an adapter are products like the others, so that a token's role decides about
        their arithmetic, too.
        """
        first, second = list(pairs), []
        for linear, target in pairs:
            low = linear.low_rank
            if low is not None:
                inner = self._new(low.down.rows, narrow=x.narrow)
                to = self._target(self._real(inner), inner.width, narrow=x.narrow)
                first.append((Linear(low.down), replace(to, final=target.final)))
                scale = target.scale * low.scale
                more = replace(target, residual=True, scale=scale)
                second.append((inner, Linear(low.up), more))
        for n, (linear, target) in enumerate(first, 1):
            self._product(x, linear, target, more=n < len(first))
        for n, (inner, linear, target) in enumerate(second, 1):
            self._product(inner, linear, target, more=n < len(second))

    def _product(self, x: Act, linear: Linear, target: Target, *, more: bool) -> None:
        if self.context.is_exact(linear.weight):
            self._real(x)
        else:
            self._quantise(x)
        product(self.context, x.forms, linear, target, more=more)
