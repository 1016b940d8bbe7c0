"""Vector code for kernels: a small layer over LLVM's IR builder, and the few primitives that depend on the ISA.

An emitter is a function over an `Ir`; `emits` turns it into a Numba intrinsic that a kernel calls. Python loops in an
emitter unroll. All vector IR here is portable (LLVM legalises any width for any target); the exceptions, and the only
places that name an ISA, are `Ir.dot4`, `Ir.dot_pairs`, `Ir.lookup`, `Ir.half_to_float`, `Ir.float_to_half` and the
tile calls of `amx.py`.

Arithmetic is exact about order: no fast-math anywhere, multiply-add is `llvm.fma`, sums are explicit shuffle trees.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels_cpu.kernel import isa

i1, i8, i16, i32, i64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
f16, f32, f64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()


class _Bfloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, for which llvmlite has no name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


bf16 = _Bfloat()
void = ir.VoidType()
Value = Any


def vec(element: ir.Type, n: int) -> ir.VectorType:
    return ir.VectorType(element, n)


class Ir:
    """One IR builder with short names. Addresses are int64 values, offsets are bytes."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    # Constants and scalars.

    def const(self, value: int | float, type_: ir.Type = i64) -> ir.Constant:
        if isinstance(type_, ir.VectorType):
            return ir.Constant(type_, [value] * type_.count)
        return ir.Constant(type_, value)

    def at(self, address: Value, *offsets: Value | int) -> Value:
        """address + the sum of byte offsets."""
        for offset in offsets:
            if isinstance(offset, int):
                if offset:
                    address = self.b.add(address, self.const(offset))
            else:
                address = self.b.add(address, offset)
        return address

    def mul(self, a: Value, n: Value | int) -> Value:
        return self.b.mul(a, self.const(n) if isinstance(n, int) else n)

    # Memory.

    def pointer(self, address: Value, type_: ir.Type) -> Value:
        return self.b.inttoptr(address, type_.as_pointer())

    def load(self, address: Value, type_: ir.Type, align: int = 1) -> Value:
        return self.b.load(self.pointer(address, type_), align=align)

    def store(self, value: Value, address: Value, align: int = 1) -> None:
        self.b.store(value, self.pointer(address, value.type), align=align)

    def prefetch(self, address: Value) -> None:
        """Into all cache levels, for reading."""
        self.call(
            "llvm.prefetch.p0",
            void,
            self.pointer(address, i8),
            *(self.const(v, i32) for v in (0, 3, 1)),
        )

    # Vectors.

    def splat(self, value: Value, n: int) -> Value:
        one = self.b.insert_element(self.undef(vec(value.type, n)), value, self.const(0, i32))
        return self.shuffle(one, [0] * n)

    def undef(self, type_: ir.Type) -> ir.Constant:
        return ir.Constant(type_, ir.Undefined)

    def shuffle(self, v: Value, lanes: Sequence[int], w: Value | None = None) -> Value:
        """Lanes of v (0..n-1) and w (n..2n-1)."""
        mask = ir.Constant(vec(i32, len(lanes)), list(lanes))
        return self.b.shuffle_vector(v, self.undef(v.type) if w is None else w, mask)

    def concat(self, *parts: Value) -> Value:
        """Vectors of equal width side by side; their number is a power of two."""
        while len(parts) > 1:
            parts = tuple(
                self.shuffle(a, range(2 * a.type.count), b)
                for a, b in zip(parts[::2], parts[1::2], strict=True)
            )
        return parts[0]

    def slice(self, v: Value, first: int, n: int) -> Value:
        return self.shuffle(v, range(first, first + n))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        return self.call(f"llvm.fma.{mangle(a.type)}", a.type, a, b, c)

    def unary(self, name: str, v: Value) -> Value:
        """An LLVM float intrinsic of one operand: sqrt, fabs, rint, floor, ..."""
        return self.call(f"llvm.{name}.{mangle(v.type)}", v.type, v)

    def maximum(self, a: Value, b: Value) -> Value:
        """Larger of two floats; the other one where one is not a number."""
        return self.call(f"llvm.maxnum.{mangle(a.type)}", a.type, a, b)

    def tree_sum(self, v: Value) -> Value:
        """Sum of the lanes by halving: always in the same order, on every target."""
        while v.type.count > 1:
            half = v.type.count // 2
            v = self.b.fadd(self.slice(v, 0, half), self.slice(v, half, half))
        return self.b.extract_element(v, self.const(0, i32))

    def tree_max(self, v: Value) -> Value:
        while v.type.count > 1:
            half = v.type.count // 2
            v = self.maximum(self.slice(v, 0, half), self.slice(v, half, half))
        return self.b.extract_element(v, self.const(0, i32))

    # Control.

    def loop(self, count: Value) -> Any:
        """`with loop(n) as l:` runs the body with l.index from 0 to n - 1."""
        return cgutils.for_range(self.b, count)

    def variable(self, initial: Value) -> Value:
        """A stack slot for a value that a loop carries (LLVM turns it into a register)."""
        return cgutils.alloca_once_value(self.b, initial)

    def get(self, variable: Value) -> Value:
        return self.b.load(variable)

    def set(self, variable: Value, value: Value) -> None:
        self.b.store(value, variable)

    def call(self, name: str, result: ir.Type, *args: Value) -> Value:
        function_type = ir.FunctionType(result, [a.type for a in args])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, function_type, name), args)

    # What depends on the ISA.

    def dot4(self, acc: Value, u: Value, s: Value, *, wide: bool) -> Value:
        """acc[l] + sum over j < 4 of u[4l+j] * s[4l+j], in int32.

        acc  <n x i32>; u <4n x i8> unsigned; s <4n x i8> signed in -127..127
        wide says whether u exceeds 127: byte products summed in 16 bits would saturate then.
        """
        n = acc.type.count
        level = isa()
        if level in ("amx", "avx512"):
            return self._by_width(self._vnni, acc, u, s, 16 if n >= 16 else n)
        if level == "avxvnni":
            return self._by_width(self._vnni, acc, u, s, 8 if n >= 8 else n)
        if level == "avx2":
            pairs = self._pairs_wide if wide else self._pairs_narrow
            return self._by_width(pairs, acc, u, s, 8)
        return self._dot4_portable(acc, u, s)

    def dot4s(self, acc: Value, us: Sequence[Value], ss: Sequence[Value], *, largest: int) -> Value:
        """acc plus `dot4` of each u and s; `largest` bounds the values of all u."""
        if isa() != "avx2":
            for u, s in zip(us, ss, strict=True):
                acc = self.dot4(acc, u, s, wide=largest > 127)
            return acc
        if largest > 127:
            low = [self.b.and_(u, self.const(15, u.type)) for u in us]
            high = [self.b.lshr(u, self.const(4, u.type)) for u in us]
            acc = self._chain_pairs(acc, low, ss, 15, 1)
            return self._chain_pairs(acc, high, ss, largest >> 4, 16)
        return self._chain_pairs(acc, us, ss, largest, 1)

    def _chain_pairs(
        self, acc: Value, us: Sequence[Value], ss: Sequence[Value], largest: int, factor: int
    ) -> Value:
        """acc + factor * the products, adding as many pairs of products as 16 bits hold."""
        parts, length = [], 32767 // (2 * 127 * largest)
        for k in range(0, acc.type.count, 8):
            part = self.slice(acc, k, 8)
            pairs = [
                self.dot2(self.slice(u, 4 * k, 32), self.slice(s, 4 * k, 32))
                for u, s in zip(us, ss, strict=True)
            ]
            for start in range(0, len(pairs), length):
                total = pairs[start]
                for more in pairs[start + 1 : start + length]:
                    total = self.b.add(total, more)
                factors = self.const(factor, vec(i16, 16))
                product = self.call("llvm.x86.avx2.pmadd.wd", part.type, total, factors)
                part = self.b.add(part, product)
            parts.append(part)
        return self.concat(*parts)

    def _by_width(self, f: Callable[..., Value], acc: Value, u: Value, s: Value, n: int) -> Value:
        total = acc.type.count
        if total == n:
            return f(acc, u, s)
        parts = [
            f(self.slice(acc, k, n), self.slice(u, 4 * k, 4 * n), self.slice(s, 4 * k, 4 * n))
            for k in range(0, total, n)
        ]
        return self.concat(*parts)

    def _vnni(self, acc: Value, u: Value, s: Value) -> Value:
        name = f"llvm.x86.avx512.vpdpbusd.{32 * acc.type.count}"
        return self.call(name, acc.type, acc, u, s)

    def dot_pairs(self, acc: Value, a: Value, b: Value) -> Value:
        """acc[l] plus the two products of bfloat16 pairs a[l] and b[l]; only where `has_bf16`, n = 16.

        acc  <16 x f32>; a, b <16 x i32>, a pair in each lane. Subnormal numbers count as zero.
        """
        pairs = vec(bf16, 32)
        a, b = self.b.bitcast(a, pairs), self.b.bitcast(b, pairs)
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", acc.type, acc, a, b)

    def dot2(self, u: Value, s: Value) -> Value:
        """<n x i16> of u[2l] * s[2l] + u[2l+1] * s[2l+1], which must fit; level avx2 only, n = 16."""
        return self.call("llvm.x86.avx2.pmadd.ub.sw", vec(i16, 16), u, s)

    def multiply2(self, v: Value, w: Value) -> Value:
        """<n x i32> of v[2l] * w[2l] + v[2l+1] * w[2l+1] of shorts; level avx2 only, n = 8."""
        return self.call("llvm.x86.avx2.pmadd.wd", vec(i32, 8), v, w)

    def add2(self, v: Value) -> Value:
        """<n x i32> of v[2l] + v[2l+1]; level avx2 only, n = 8."""
        return self.multiply2(v, self.const(1, v.type))

    def with_sign(self, v: Value, sign: Value) -> Value:
        """Bytes v, negated where sign is negative, 0 where it is 0; level avx2 only, 32 bytes."""
        return self.call("llvm.x86.avx2.psign.b", v.type, v, sign)

    def _pairs_narrow(self, acc: Value, u: Value, s: Value) -> Value:
        pairs = self.call("llvm.x86.avx2.pmadd.ub.sw", vec(i16, 16), u, s)
        ones = self.const(1, vec(i16, 16))
        return self.b.add(acc, self.call("llvm.x86.avx2.pmadd.wd", acc.type, pairs, ones))

    def _pairs_wide(self, acc: Value, u: Value, s: Value) -> Value:
        """u = (u & 127) + 128 * (u >> 7), since sums of two products must fit 16 bits."""
        parts = (
            (self.b.and_(u, self.const(127, u.type)), 1),
            (self.b.lshr(u, self.const(7, u.type)), 128),
        )
        for part, factor in parts:
            pairs = self.call("llvm.x86.avx2.pmadd.ub.sw", vec(i16, 16), part, s)
            factors = self.const(factor, vec(i16, 16))
            product = self.call("llvm.x86.avx2.pmadd.wd", acc.type, pairs, factors)
            acc = self.b.add(acc, product)
        return acc

    def _dot4_portable(self, acc: Value, u: Value, s: Value) -> Value:
        """By way of 16 bits and pairs of neighbours, which LLVM knows as instructions."""
        n = acc.type.count
        shorts, ints = vec(i16, 4 * n), vec(i32, 4 * n)
        left = self.b.sext(self.b.zext(u, shorts), ints)
        right = self.b.sext(self.b.sext(s, shorts), ints)
        sums = self.b.mul(left, right)
        for m in (4 * n, 2 * n):
            even, odd = (self.shuffle(sums, range(k, m, 2)) for k in range(2))
            sums = self.b.add(even, odd)
        return self.b.add(acc, sums)

    def lookup(self, table: Sequence[int], v: Value) -> Value:
        """Bytes table[i] for <n x i8> indices i in 0..15; n is 32 or a multiple of 64."""
        if isa() == "generic":
            result = self.const(table[0], v.type)
            for i in range(1, 16):
                here = self.b.icmp_unsigned("==", v, self.const(i, v.type))
                result = self.b.select(here, self.const(table[i], v.type), result)
            return result
        n, name = 32, "avx2.pshuf.b"
        if isa() in ("amx", "avx512") and v.type.count > n:
            n, name = 64, "avx512.pshuf.b.512"
        entries = ir.Constant(vec(i8, n), list(table) * (n // 16))
        parts = [
            self.call(f"llvm.x86.{name}", entries.type, entries, self.slice(v, k, n))
            for k in range(0, v.type.count, n)
        ]
        return self.concat(*parts)

    def half_to_float(self, v: Value) -> Value:
        """f32 of half floats given as i16 or <n x i16> bits; exact."""
        n = v.type.count if isinstance(v.type, ir.VectorType) else 0
        like = (lambda t: vec(t, n)) if n else (lambda t: t)
        if isa() != "generic":
            return self.b.fpext(self.b.bitcast(v, like(f16)), like(f32))
        # A library function would be called here; shift the fields and let a product fix the exponent.
        bits = self.b.zext(v, like(i32))
        sign = self.b.shl(
            self.b.and_(bits, self.const(0x8000, like(i32))), self.const(16, like(i32))
        )
        rest = self.b.shl(
            self.b.and_(bits, self.const(0x7FFF, like(i32))), self.const(13, like(i32))
        )
        scaled = self.b.fmul(self.b.bitcast(rest, like(f32)), self.const(2.0**112, like(f32)))
        special = self.b.icmp_unsigned(">=", rest, self.const(0x7C00 << 13, like(i32)))
        infinite = self.b.or_(rest, self.const(0x7F800000, like(i32)))
        value = self.b.select(special, infinite, self.b.bitcast(scaled, like(i32)))
        return self.b.bitcast(self.b.or_(value, sign), like(f32))

    def float_to_half(self, v: Value) -> Value:
        """i16 bits of the nearest half float, ties to even."""
        n = v.type.count if isinstance(v.type, ir.VectorType) else 0
        like = (lambda t: vec(t, n)) if n else (lambda t: t)
        if isa() != "generic":
            return self.b.bitcast(self.b.fptrunc(v, like(f16)), like(i16))
        b, c = self.b, lambda x: self.const(x, like(i32))
        bits = b.bitcast(v, like(i32))
        sign = b.and_(b.lshr(bits, c(16)), c(0x8000))
        size = b.and_(bits, c(0x7FFFFFFF))
        # Below the smallest normal half, adding 0.5 aligns the value so that the addition rounds it.
        small = b.fadd(b.bitcast(size, like(f32)), self.const(0.5, like(f32)))
        subnormal = b.sub(b.bitcast(small, like(i32)), c(0x3F000000))
        odd = b.and_(b.lshr(size, c(13)), c(1))
        normal = b.lshr(b.add(b.add(b.sub(size, c(112 << 23)), c(0xFFF)), odd), c(13))
        result = b.select(b.icmp_unsigned("<", size, c(113 << 23)), subnormal, normal)
        result = b.select(b.icmp_unsigned(">=", size, c(0x47800000)), c(0x7C00), result)
        nan = b.icmp_unsigned(">", size, c(0x7F800000))
        result = b.select(nan, c(0x7E00), result)
        return b.trunc(b.or_(result, sign), like(i16))

    def bf16_to_float(self, v: Value) -> Value:
        """f32 of bfloat16 bits (<n x i16>); exact."""
        n = v.type.count
        wide = self.b.shl(self.b.zext(v, vec(i32, n)), self.const(16, vec(i32, n)))
        return self.b.bitcast(wide, vec(f32, n))


def mangle(type_: ir.Type) -> str:
    """A type as LLVM's overloaded intrinsics spell it."""
    if isinstance(type_, ir.VectorType):
        return f"v{type_.count}{mangle(type_.element)}"
    if isinstance(type_, ir.IntType):
        return f"i{type_.width}"
    return {ir.HalfType: "f16", ir.FloatType: "f32", ir.DoubleType: "f64"}[type(type_)]


def emits(
    num_args: int,
    result: Any = None,
    arguments: Sequence[Any] | None = None,
    *,
    table: Sequence[Any] = (),
) -> Callable[[Callable[..., Value]], Any]:
    """Make an intrinsic over int64 arguments of an emitter `f(ir, *args)`.

    `result` is the Numba type of what the emitter returns (None: nothing), `arguments` those of its
    arguments where they are not all int64. With a `table`, calls begin with one more argument, a
    constant index of it, and the emitter gets the entry there: f(ir, entry, *args).
    """
    argument_types = arguments or [types.int64] * num_args
    names = ", ".join(f"a{i}" for i in range(num_args + bool(table)))

    def wrap(emitter: Callable[..., Value]) -> Any:
        def typed(typing_context: Any, *args: Any) -> Any:
            index = args[: bool(table)]
            entries = [table[i.literal_value] for i in index if isinstance(i, types.IntegerLiteral)]
            assert len(entries) == len(index), f"{emitter.__name__}: the entry is not constant"
            signature = (types.void if result is None else result)(*index, *argument_types)

            def generate(context: Any, builder: Any, sig: Any, values: Any) -> Any:
                value = emitter(Ir(builder), *entries, *values[len(entries) :])
                return context.get_dummy_value() if result is None else value

            return signature, generate

        # Numba reads the parameter list of the function it is given.
        scope: dict[str, Any] = {"typed": typed}
        exec(f"def {emitter.__name__}(tc, {names}): return typed(tc, {names})", scope)
        return intrinsic(prefer_literal=bool(table))(scope[emitter.__name__])

    return wrap


@emits(2, types.int64)
def slot(e: Ir, args: Value, index: Value) -> Value:
    """Slot `index` of an argument block: an int64."""
    return e.load(e.at(args, e.mul(index, 8)), i64, align=8)
