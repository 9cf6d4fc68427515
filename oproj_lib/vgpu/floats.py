"""Floating-point details in which a GPU differs from numpy: fused multiply-add, rounding modes, canonical
NaNs, flush to zero, signed zeros (PTX ISA, "Floating-Point Instructions"; IEEE 754)."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

BF16 = np.dtype(ml_dtypes.bfloat16)

# What NVIDIA GPUs write when an FP32 or 16-bit result is NaN (PTX ISA, "Floating-Point Instructions"). FP64
# keeps payloads.
CANONICAL_NAN: dict[np.dtype, np.generic] = {
    np.dtype(np.float16): np.uint16(0x7FFF),
    BF16: np.uint16(0x7FFF),
    np.dtype(np.float32): np.uint32(0x7FFFFFFF),
}
QUIET_BIT = np.uint64(1 << 51)
DEFAULT_NAN_64 = np.uint64(0xFFF8000000000000)  # of an FP64 operation without a NaN operand (seen on an H200)
SMALLEST_NORMAL = {
    np.dtype(np.float16): np.float16(2.0**-14),
    BF16: ml_dtypes.bfloat16(2.0**-126),
    np.dtype(np.float32): np.float32(2.0**-126),
    np.dtype(np.float64): np.float64(2.0**-1022),
}


@intrinsic
def _llvm_fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    if a != b or b != c or a not in (types.float32, types.float64):
        raise numba.TypingError("fma takes three floats of one type")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return a(a, b, c), codegen


def _fma(a: Any, b: Any, c: Any) -> Any:
    return _llvm_fma(a, b, c)


@cache
def _fma_loop(kind: str) -> Any:
    """`_fma` over arrays of a NumPy type. Made when it is first needed: loading it takes half a second, and most
    kernels have no fma of their own."""
    return numba.vectorize([f"{kind}({kind},{kind},{kind})"], cache=True)(_fma)


def fma32(a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding, FP32."""
    return _fma_loop("float32")(a, b, c)


def fma64(a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding, FP64."""
    return _fma_loop("float64")(a, b, c)


def fma_narrow(a: Any, b: Any, c: Any, dtype: np.dtype) -> np.ndarray:
    """a * b + c with one rounding, F16 or BF16. FP64 holds the product; the sum is rounded to odd, so that
    narrowing it gives what rounding the exact sum once would."""
    x, y, z = (np.asarray(v).astype(np.float64) for v in (a, b, c))
    total, error = two_sum(x * y, z)
    even = (np.ascontiguousarray(total).view(np.uint64).reshape(total.shape) & np.uint64(1)) == 0
    other = np.nextafter(total, np.copysign(np.inf, error))
    return narrow(np.where((error != 0) & even, other, total), dtype)


# -- rounding --------------------------------------------------------------------------------------


def two_sum(x: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """(fl(x + y), its exact error) in FP64: Knuth's TwoSum. The error of an overflow or NaN is 0."""
    x, y = np.asarray(x), np.asarray(y)
    with np.errstate(invalid="ignore", over="ignore"):
        total = x + y
        part = total - x
        error = (x - (total - part)) + (y - part)
    return total, np.where(np.isfinite(total), error, 0.0)


def narrow(value: Any, dtype: np.dtype) -> np.ndarray:
    """FP64 -> F16 or BF16, to nearest even, one rounding (ml_dtypes goes through FP32 and rounds twice)."""
    with np.errstate(over="ignore"):
        return (round_to_odd(value) if dtype == BF16 else np.asarray(value)).astype(dtype)


def round_to_odd(value: Any) -> np.ndarray:
    """FP64 -> FP32; inexact results get an odd last bit, so that a second rounding is as good as one."""
    value = np.asarray(value)
    nearest = value.astype(np.float32)
    too_big = np.abs(nearest.astype(np.float64)) > np.abs(value)
    toward_zero = np.where(too_big, np.nextafter(nearest, np.float32(0)), nearest)
    inexact = np.isfinite(value) & (toward_zero.astype(np.float64) != value)
    bits = np.ascontiguousarray(toward_zero).view(np.uint32).reshape(value.shape)
    return np.where(inexact, bits | np.uint32(1), bits).view(np.float32)


def adjust(nearest: Any, above: Any, below: Any, mode: str) -> np.ndarray:
    """From the nearest representable value to the one that `mode` asks for. `above` (`below`): the exact
    value lies above (below) the nearest. Modes: rz toward zero, rm down, rp up."""
    nearest = np.asarray(nearest)
    inf = nearest.dtype.type(np.inf)
    lower, higher = np.nextafter(nearest, -inf), np.nextafter(nearest, inf)
    if mode == "rm":
        return np.where(below, lower, nearest)
    if mode == "rp":
        return np.where(above, higher, nearest)
    return np.where(below & (nearest > 0), lower, np.where(above & (nearest < 0), higher, nearest))


def directed_sum(x: Any, y: Any, mode: str) -> np.ndarray:
    """x + y exactly (two FP64 numbers), then to FP32."""
    total, error = two_sum(x, y)
    nearest = total.astype(np.float32)
    above = (total > nearest) | ((total == nearest) & (error > 0))
    below = (total < nearest) | ((total == nearest) & (error < 0))
    result = adjust(nearest, above, below, mode)
    if mode == "rm":  # x - x is -0 when rounding down
        result = np.where((total == 0) & (np.signbit(x) != np.signbit(y)), np.float32(-0.0), result)
    return result


def directed_product(x: Any, y: Any, mode: str) -> np.ndarray:
    """x * y exactly (FP32 factors given as FP64), then to FP32."""
    exact = np.multiply(x, y)
    nearest = exact.astype(np.float32)
    return adjust(nearest, exact > nearest, exact < nearest, mode)


def directed_quotient(x: Any, y: Any, mode: str) -> np.ndarray:
    """x / y (FP32 operands given as FP64), then to FP32. The remainder x - q y is exact in FP64 and its
    sign decides."""
    x, y = np.asarray(x), np.asarray(y)
    nearest = (x / y).astype(np.float32)
    remainder = (x - nearest * y) * np.sign(y)
    return adjust(nearest, remainder > 0, remainder < 0, mode)


def directed_root(x: Any, mode: str) -> np.ndarray:
    """sqrt(x) (an FP32 operand given as FP64), then to FP32."""
    x = np.asarray(x)
    nearest = np.sqrt(x).astype(np.float32)
    remainder = x - nearest.astype(np.float64) ** 2
    return adjust(nearest, remainder > 0, remainder < 0, mode)


def sum_underflows(product: Any, addend: Any, dtype: np.dtype, *, nearest: bool) -> np.ndarray:
    """Whether product + addend, two FP64 numbers summed exactly, stays below `dtype`'s smallest normal number
    when rounded to its digits with an unbounded exponent (IEEE 754, "underflow": tininess after rounding).

    Asked only where the result is the smallest normal number: to nearest, or rounded away from zero.
    """
    total, error = two_sum(product, addend)
    size, rest = np.abs(total), np.where(np.signbit(total), -error, error)
    step = float(np.finfo(dtype).eps) / 2  # below a power of two, numbers lie this close
    limit = float(SMALLEST_NORMAL[dtype]) * (1.0 - (step / 2 if nearest else step))
    at_limit = rest < 0 if nearest else rest <= 0  # a tie goes up, to even
    return (size < limit) | ((size == limit) & at_limit)


# -- NaNs, subnormals, zeros -----------------------------------------------------------------------


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


def quiet(value: Any) -> np.ndarray:
    """FP64 with every signalling NaN made quiet; sign and payload stay."""
    array = np.ascontiguousarray(value, np.float64)
    bits = array.view(np.uint64)
    return np.where(np.isnan(array), bits | QUIET_BIT, bits).view(np.float64).reshape(np.shape(value))


def carry_payload(result: Any, *operands: Any) -> np.ndarray:
    """The NaNs of an FP64 result: the first operand that is a NaN, made quiet; `DEFAULT_NAN_64` where none is.

    PTX keeps payloads in FP64 (PTX ISA, "Floating Point Instructions") and leaves open whose. An H200 takes b
    before a in add, sub, mul, min and max, and b before c before a in fma.
    """
    array = np.asarray(result)
    nan = np.isnan(array)
    if not nan.any():
        return array
    payload = np.full(array.shape, DEFAULT_NAN_64).view(np.float64)
    for operand in reversed(operands):
        payload = np.where(np.isnan(operand), quiet(operand), payload)
    return np.where(nan, payload, array)


def narrow_payload(value: Any, result: Any) -> np.ndarray:
    """The NaNs of an FP64 number's conversion to a narrower float: sign and leading payload, made quiet (seen on
    an H200)."""
    array = np.asarray(result)
    nan = np.isnan(value)
    if not nan.any():
        return array
    info = ml_dtypes.finfo(array.dtype)
    bits = quiet(value).view(np.uint64)
    sign = bits >> np.uint64(63) << np.uint64(info.bits - 1)
    exponent = np.uint64((1 << (info.bits - 1)) - (1 << info.nmant))
    payload = bits >> np.uint64(52 - info.nmant) & np.uint64((1 << info.nmant) - 1)
    pattern = (sign | exponent | payload).astype(f"u{array.dtype.itemsize}").view(array.dtype)
    return np.where(nan, pattern, array)


def flush_subnormals(value: Any) -> np.ndarray:
    """`.ftz`: subnormals become zeros of the same sign."""
    array = np.asarray(value)
    small = (np.abs(array) < SMALLEST_NORMAL[array.dtype]) & (array != 0)
    if not small.any():
        return array
    return np.where(small, np.copysign(array.dtype.type(0), array), array)


def clamp_negative(value: Any) -> np.ndarray:
    """`.relu`: negative values, -0.0 included, become +0.0; NaN stays."""
    array = np.asarray(value)
    return np.where(array <= 0, array.dtype.type(0), array)


def clamp_to_one(value: Any) -> np.ndarray:
    """`.sat`: to [+0.0, 1.0]; NaN becomes +0.0."""
    array = np.asarray(value)
    return fmin(fmax(array, array.dtype.type(0)), array.dtype.type(1))


def fmin(a: Any, b: Any) -> np.ndarray:
    """PTX min: the number if one operand is NaN; -0.0 is less than +0.0."""
    return _pick(np.fmin(a, b), a, b, np.bitwise_or)


def fmax(a: Any, b: Any) -> np.ndarray:
    """PTX max: the number if one operand is NaN; +0.0 is greater than -0.0."""
    return _pick(np.fmax(a, b), a, b, np.bitwise_and)


def _pick(result: Any, a: Any, b: Any, combine_signs: Any) -> np.ndarray:
    picked = np.asarray(result)
    zeros = (np.asarray(a) == 0) & (np.asarray(b) == 0)
    if not zeros.any():
        return picked
    bits = np.dtype(f"u{picked.dtype.itemsize}")

    def raw(value: Any) -> np.ndarray:
        return np.ascontiguousarray(np.broadcast_to(value, picked.shape)).reshape(-1).view(bits)

    signed = combine_signs(raw(a), raw(b)).view(picked.dtype).reshape(picked.shape)
    return np.where(zeros, signed, picked)
