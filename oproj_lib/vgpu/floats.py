"""Floating-point details in which a GPU differs from numpy: fused multiply-add, canonical NaNs, flush to zero, signed zeros."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

# What NVIDIA GPUs write when an FP32 or 16-bit result is NaN (PTX ISA, "Floating-Point Instructions"). FP64 keeps payloads.
CANONICAL_NAN = {
    np.dtype(np.float16): np.uint16(0x7FFF),
    np.dtype(ml_dtypes.bfloat16): np.uint16(0x7FFF),
    np.dtype(np.float32): np.uint32(0x7FFFFFFF),
}
SMALLEST_NORMAL = {
    np.dtype(np.float16): np.float16(2.0**-14),
    np.dtype(ml_dtypes.bfloat16): ml_dtypes.bfloat16(2.0**-126),
    np.dtype(np.float32): np.float32(2.0**-126),
    np.dtype(np.float64): np.float64(2.0**-1022),
}


@intrinsic
def _llvm_fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:  # noqa: ARG001
    if a != b or b != c or a not in (types.float32, types.float64):
        raise numba.TypingError("fma takes three floats of one type")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.fma(*args)

    return a(a, b, c), codegen


@numba.vectorize(["float32(float32,float32,float32)"], cache=True)
def fma32(a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding, FP32."""
    return _llvm_fma(a, b, c)


@numba.vectorize(["float64(float64,float64,float64)"], cache=True)
def fma64(a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding, FP64."""
    return _llvm_fma(a, b, c)


def canonical_nan(value: Any) -> np.ndarray:
    """Replaces every NaN by the GPU's canonical one."""
    array = np.asarray(value)
    nan = np.isnan(array)
    if array.dtype == np.float64 or not nan.any():
        return array
    result = np.array(array)
    pattern = CANONICAL_NAN[result.dtype]
    bits = result.reshape(-1).view(pattern.dtype)
    bits[nan.reshape(-1)] = pattern
    return result


def flush_subnormals(value: Any) -> np.ndarray:
    """`.ftz`: subnormals become zeros of the same sign."""
    array = np.asarray(value)
    small = (np.abs(array) < SMALLEST_NORMAL[array.dtype]) & (array != 0)
    if not small.any():
        return array
    return np.where(small, np.copysign(array.dtype.type(0), array), array)


def fmin(a: Any, b: Any) -> Any:
    """PTX min: the number if one operand is NaN; -0.0 is less than +0.0."""
    return _pick(np.fmin(a, b), a, b, np.bitwise_or)


def fmax(a: Any, b: Any) -> Any:
    """PTX max: the number if one operand is NaN; +0.0 is greater than -0.0."""
    return _pick(np.fmax(a, b), a, b, np.bitwise_and)


def _pick(result: Any, a: Any, b: Any, combine_signs: Any) -> Any:
    result = np.asarray(result)
    zeros = (np.asarray(a) == 0) & (np.asarray(b) == 0)
    if not zeros.any():
        return result
    bits = np.dtype(f"u{result.dtype.itemsize}")
    a, b = (np.ascontiguousarray(np.broadcast_to(v, result.shape)).reshape(-1).view(bits) for v in (a, b))
    signed = combine_signs(a, b).view(result.dtype).reshape(result.shape)
    return np.where(zeros, signed, result)
