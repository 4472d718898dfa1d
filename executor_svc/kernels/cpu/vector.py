"""A numba type for one vector register of float32, and what can be done with it.

Knows numba and LLVM. Does not know what is computed. Addresses are int64 in bytes; LANES is 16 with AVX-512, else 8.
numba's own types cannot keep a vector in a register across a loop; this one can.
"""

import operator
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, register_model


def _host_has_avx512() -> bool:
    if numba.config.CPU_FEATURES is not None:
        return "+avx512f" in numba.config.CPU_FEATURES
    return bool(binding.get_host_cpu_features().get("avx512f", False))


LANES = 16 if _host_has_avx512() else 8
VECTOR_BYTES = 4 * LANES

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32, F64 = ir.FloatType(), ir.DoubleType()
I8_POINTER = I8.as_pointer()
VF32, VI32 = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
VMASK = ir.VectorType(ir.IntType(1), LANES)


class Vector(types.Type):  # type: ignore[misc]
    """Numba's type of a register of LANES float32."""

    def __init__(self) -> None:
        super().__init__(name=f"Vector{LANES}")


vector = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, VF32)


def call_llvm(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[Any], fastmath: tuple[str, ...] = ()) -> Any:
    """Calls LLVM's intrinsic function of that name."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args, fastmath=fastmath)


def load_at(builder: ir.IRBuilder, address: Any, type_: ir.Type, align: int) -> Any:
    """Loads a value from an int64 address."""
    return builder.load(builder.inttoptr(address, type_.as_pointer()), align=align)


def splat(builder: ir.IRBuilder, scalar: Any) -> Any:
    """A vector whose lanes all are the scalar."""
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    zero = ir.Constant(VI32, [0] * LANES)
    return builder.shuffle_vector(builder.insert_element(undefined, scalar, I32(0)), undefined, zero)


def constant(value: float) -> Any:
    """A vector constant of float32."""
    return ir.Constant(VF32, [value] * LANES)


def int_constant(value: int) -> Any:
    """A vector constant of int32."""
    return ir.Constant(VI32, [value] * LANES)


def widen(builder: ir.IRBuilder, address: Any, dtype: str) -> Any:
    """Loads LANES values of dtype "f32", "bf16" or "i8" from an int64 address as float32."""
    if dtype == "f32":
        return load_at(builder, address, VF32, 4)
    if dtype == "bf16":
        half = load_at(builder, address, ir.VectorType(I16, LANES), 2)
        return builder.bitcast(builder.shl(builder.zext(half, VI32), int_constant(16)), VF32)
    byte = load_at(builder, address, ir.VectorType(I8, LANES), 1)
    return builder.sitofp(builder.sext(byte, VI32), VF32)


def round_to_bf16(builder: ir.IRBuilder, value: Any) -> Any:
    """<LANES x i16>: float32 rounded to nearest even bf16; NaN stays NaN because its quiet bit is above the rounding."""
    bits = builder.bitcast(value, VI32)
    odd = builder.and_(builder.lshr(bits, int_constant(16)), int_constant(1))
    rounded = builder.add(bits, builder.add(odd, int_constant(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    kept = builder.select(is_nan, bits, rounded)
    return builder.trunc(builder.lshr(kept, int_constant(16)), ir.VectorType(I16, LANES))


def lanes_below(builder: ir.IRBuilder, count: Any) -> Any:
    """<LANES x i1>: lane index < count (an i64)."""
    index = ir.Constant(VI32, list(range(LANES)))
    return builder.icmp_signed("<", index, splat(builder, builder.trunc(count, I32)))


# ---------------------------------------------------------------- memory


@intrinsic
def load_i64(typing: Any, base: Any, index: Any) -> Any:
    """The int64 at base + 8 * index."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return load_at(builder, builder.add(args[0], builder.mul(args[1], I64(8))), I64, 8)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def load_i32(typing: Any, base: Any, index: Any) -> Any:
    """The int32 at base + 4 * index, as int64."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.sext(load_at(builder, builder.add(args[0], builder.mul(args[1], I64(4))), I32, 4), I64)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def load_f64(typing: Any, base: Any, index: Any) -> Any:
    """The float64 at base + 8 * index, as float32."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.fptrunc(load_at(builder, builder.add(args[0], builder.mul(args[1], I64(8))), F64, 8), F32)

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def load_f32(typing: Any, address: Any) -> Any:
    """The float32 at an address."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return load_at(builder, args[0], F32, 4)

    return types.float32(types.int64), codegen


@intrinsic
def store_f32(typing: Any, address: Any, value: Any) -> Any:
    """Stores a float32."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], F32.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@intrinsic(prefer_literal=True)
def load_scalar(typing: Any, address: Any, dtype: Any) -> Any:
    """The float32 value of one element of the literal dtype at an address."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        if dtype.literal_value == "f32":
            return load_at(builder, args[0], F32, 4)
        bits = builder.shl(builder.zext(load_at(builder, args[0], I16, 2), I32), I32(16))
        return builder.bitcast(bits, F32)

    return types.float32(types.int64, dtype), codegen


@intrinsic(prefer_literal=True)
def store_scalar(typing: Any, address: Any, value: Any, dtype: Any) -> Any:
    """Stores a float32 as one element of the literal dtype."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        if dtype.literal_value == "f32":
            builder.store(args[1], builder.inttoptr(args[0], F32.as_pointer()), align=4)
        else:
            half = builder.extract_element(round_to_bf16(builder, splat(builder, args[1])), I32(0))
            builder.store(half, builder.inttoptr(args[0], I16.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, dtype), codegen


@intrinsic(prefer_literal=True)
def vload(typing: Any, address: Any, dtype: Any) -> Any:
    """LANES elements of the literal dtype "f32", "bf16" or "i8"."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return widen(builder, args[0], dtype.literal_value)

    return vector(types.int64, dtype), codegen


@intrinsic(prefer_literal=True)
def vstore(typing: Any, address: Any, value: Any, dtype: Any) -> Any:
    """Stores LANES elements of the literal dtype "f32" or "bf16"."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        stored = args[1] if dtype.literal_value == "f32" else round_to_bf16(builder, args[1])
        align = 4 if dtype.literal_value == "f32" else 2
        builder.store(stored, builder.inttoptr(args[0], stored.type.as_pointer()), align=align)
        return context.get_dummy_value()

    return types.void(types.int64, vector, dtype), codegen


@intrinsic(prefer_literal=True)
def vload_first(typing: Any, address: Any, count: Any, dtype: Any) -> Any:
    """The first count <= LANES elements of the literal dtype; the other lanes are 0 and their memory is not touched."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        mask = lanes_below(builder, args[1])
        if dtype.literal_value == "f32":
            pointer = builder.inttoptr(args[0], VF32.as_pointer())
            return call_llvm(builder, f"llvm.masked.load.v{LANES}f32.p0", VF32, [pointer, I32(4), mask, constant(0.0)])
        half = ir.VectorType(I16, LANES)
        pointer = builder.inttoptr(args[0], half.as_pointer())
        zero = ir.Constant(half, [0] * LANES)
        loaded = call_llvm(builder, f"llvm.masked.load.v{LANES}i16.p0", half, [pointer, I32(2), mask, zero])
        return builder.bitcast(builder.shl(builder.zext(loaded, VI32), int_constant(16)), VF32)

    return vector(types.int64, types.int64, dtype), codegen


@intrinsic(prefer_literal=True)
def vstore_first(typing: Any, address: Any, value: Any, count: Any, dtype: Any) -> Any:
    """Stores the first count <= LANES elements as the literal dtype."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        mask = lanes_below(builder, args[2])
        is_f32 = dtype.literal_value == "f32"
        stored = args[1] if is_f32 else round_to_bf16(builder, args[1])
        pointer = builder.inttoptr(args[0], stored.type.as_pointer())
        name = f"llvm.masked.store.v{LANES}{'f32' if is_f32 else 'i16'}.p0"
        call_llvm(builder, name, ir.VoidType(), [stored, pointer, I32(4 if is_f32 else 2), mask])
        return context.get_dummy_value()

    return types.void(types.int64, vector, types.int64, dtype), codegen


@intrinsic
def keep_out_of_line(typing: Any) -> Any:
    """Asks LLVM not to inline the function that calls this: large ones would be compiled again at every call."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_address(typing: Any, address: Any) -> Any:
    """Calls the C function `int f(void)` at an address."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        function = builder.inttoptr(args[0], ir.FunctionType(I32, []).as_pointer())
        return builder.sext(builder.call(function, []), I64)

    return types.int64(types.int64), codegen


@intrinsic
def call_kernel(typing: Any, address: Any, args: Any) -> Any:
    """Calls the kernel `void f(int64)` at an address with the address of its arguments."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        function = builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [I64]).as_pointer())
        builder.call(function, [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def atomic_add(typing: Any, address: Any, value: Any) -> Any:
    """Adds to the int64 at an address; returns what was there before. Orders nothing else."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "monotonic")

    return types.int64(types.int64, types.int64), codegen


# ---------------------------------------------------------------- arithmetic


@intrinsic
def vsplat(typing: Any, scalar: Any) -> Any:
    """A vector whose lanes all are the float32 scalar."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return splat(builder, args[0])

    return vector(types.float32), codegen


def _register_operator(function: Any, emit: Callable[[ir.IRBuilder, Any, Any], Any]) -> None:
    """Lets a Python operator work on vectors.

    Emitted in place, unlike an overload, which would be a function of its own whose symbol can clash with that of another
    operator from another process's cached code (see named in compile.py).
    """

    @infer_global(function)
    class _Template(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            return vector(vector, vector) if tuple(args) == (vector, vector) else None

    @lower_builtin(function, Vector, Vector)
    def _lower(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return emit(builder, args[0], args[1])


_register_operator(operator.add, lambda builder, a, b: builder.fadd(a, b))
_register_operator(operator.sub, lambda builder, a, b: builder.fsub(a, b))
_register_operator(operator.mul, lambda builder, a, b: builder.fmul(a, b))
_register_operator(operator.truediv, lambda builder, a, b: builder.fdiv(a, b))


@intrinsic
def vmax(typing: Any, a: Any, b: Any) -> Any:
    """The larger of each pair of lanes; that of b where a is NaN."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[0], args[1])

    return vector(vector, vector), codegen


@intrinsic
def vfma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """A * b + c, rounded once."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return call_llvm(builder, f"llvm.fma.v{LANES}f32", VF32, list(args))

    return vector(vector, vector, vector), codegen


@intrinsic
def vsum(typing: Any, value: Any) -> Any:
    """Sum of the lanes."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        zero = ir.Constant(F32, 0.0)
        return call_llvm(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", F32, [zero, args[0]], fastmath=("reassoc",))

    return types.float32(vector), codegen


@intrinsic
def vmax_lanes(typing: Any, value: Any) -> Any:
    """The largest lane."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return call_llvm(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, [args[0]], fastmath=("nnan",))

    return types.float32(vector), codegen


@intrinsic
def vkeep_between(typing: Any, value: Any, low: Any, high: Any, other: Any) -> Any:
    """Lanes low <= i < high of value, the float32 other elsewhere."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        # A bound far outside would not fit int32.
        bounds = []
        for bound in args[1:3]:
            small = builder.select(builder.icmp_signed("<", bound, I64(0)), I64(0), bound)
            bounds.append(builder.select(builder.icmp_signed(">", small, I64(LANES)), I64(LANES), small))
        keep = builder.and_(lanes_below(builder, bounds[1]), builder.not_(lanes_below(builder, bounds[0])))
        return builder.select(keep, args[0], splat(builder, args[3]))

    return vector(vector, types.int64, types.int64, types.float32), codegen
