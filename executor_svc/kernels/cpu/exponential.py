"""The exponential and what follows from it, of a vector of float32. Knows numba and LLVM, not who asks."""

from typing import Any

import numba
from llvmlite import ir
from numba import njit
from numba.extending import intrinsic

from executor_svc.kernels.cpu.vector import LANES, VF32, VI32, call_llvm, constant, int_constant, vector, vsplat

# exp(x) = 2^n * e^r with n = round(x / ln 2), |r| <= ln(2) / 2; e^r by its Taylor series to r^7, error below 1e-8.
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # ln 2 in two parts, so that n * high is exact
_LN2_LOW = -2.12194440e-4
_EXP_COEFFICIENTS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
_EXP_LOWEST = -87.0
_EXP_HIGHEST = 88.0


@intrinsic
def vexp(typing: Any, value: Any) -> Any:
    """The exponential, relative error about 1e-7; 0 below -87 (so of -inf), finite above 88."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        fma = f"llvm.fma.v{LANES}f32"
        x = args[0]
        underflows = builder.fcmp_ordered("<", x, constant(_EXP_LOWEST))
        clipped = builder.select(underflows, constant(_EXP_LOWEST), x)
        clipped = builder.select(builder.fcmp_ordered(">", clipped, constant(_EXP_HIGHEST)), constant(_EXP_HIGHEST), clipped)
        scaled = builder.fmul(clipped, constant(_LOG2_E))
        n = call_llvm(builder, f"llvm.rint.v{LANES}f32", VF32, [scaled])
        r = call_llvm(builder, fma, VF32, [n, constant(-_LN2_HIGH), clipped])
        r = call_llvm(builder, fma, VF32, [n, constant(-_LN2_LOW), r])
        result = constant(_EXP_COEFFICIENTS[0])
        for coefficient in _EXP_COEFFICIENTS[1:]:
            result = call_llvm(builder, fma, VF32, [result, r, constant(coefficient)])
        power = builder.shl(builder.add(builder.fptosi(n, VI32), int_constant(127)), int_constant(23))
        result = builder.fmul(result, builder.bitcast(power, VF32))
        return builder.select(underflows, constant(0.0), result)

    return vector(vector), codegen


@njit
def vtanh(value):  # type: ignore[no-untyped-def]
    """The hyperbolic tangent, absolute error about 1e-7."""
    one = vsplat(numba.float32(1.0))
    two = vsplat(numba.float32(2.0))
    return one - two / (vexp(value + value) + one)
