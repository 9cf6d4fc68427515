"""Fused dot-product-add of the tensor cores, compiled: D = A x B + C on batch-last matrices of raw bits.

A[m, k, batch], B[k, n, batch], C[m, n, batch] are uint32, one element each, so that the innermost loops run
over the batch (warps) and compile to SIMD.  A format is passed as ``Code``: (exponent bits, fraction bits,
dropped low bits).  The rules, and who uses them, are in `oproj_lib.vgpu.tensorcore`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

Array = npt.NDArray[Any]
Code = tuple[int, int, int]

# Decoded exponents of a zero, and of an Inf or NaN.  A sum of two exponents with a special one in it stays
# above _SPECIAL_LIMIT (18000 for Inf x 0), one of ordinary ones below (2 * 127); a zero's is below all.
_ZERO_EXP = -2000
_SPECIAL_EXP = 20000
_SPECIAL_LIMIT = 2000


@njit(cache=True, nogil=True, inline="always")
def _widen(bits: Any, exponent_bits: int, fraction_bits: int, drop: int) -> Any:
    """The FP32 value of one element (exact; the fast path)."""
    if exponent_bits == 8:
        word = np.uint32(np.uint32(np.uint32(bits) >> np.uint32(drop)) << np.uint32(23 - fraction_bits))
        return word.view(np.float32)
    # FP16: put the fields where FP32 has them, then fix the exponent bias by an exact multiplication (which
    # also normalises subnormals); Inf and NaN get the all-ones exponent instead.
    sign = np.uint32((np.uint32(bits) & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32((np.uint32(bits) & np.uint32(0x7FFF)) << np.uint32(13))
    value = magnitude.view(np.float32) * np.float32(2.0**112)
    finite = np.float32(value).view(np.uint32)
    special = np.uint32(magnitude | np.uint32(0x7F800000))
    word = special if magnitude >= np.uint32(0x0F800000) else finite
    return np.uint32(word | sign).view(np.float32)


@njit(cache=True, nogil=True)
def _widen_all(bits: Any, exponent_bits: int, fraction_bits: int, drop: int, out: Array) -> None:
    """FP32 values of a contiguous [..] bit array, into ``out`` (float32, flat)."""
    for i in range(bits.size):
        out[i] = _widen(bits[i], exponent_bits, fraction_bits, drop)


@njit(cache=True, nogil=True)
def _split_all(bits: Any, exponent_bits: int, fraction_bits: int, drop: int, sig: Array, exp: Array) -> None:
    """Signed significands (integers, ``fraction_bits`` after the point) and exponents of a flat bit array."""
    mask = (1 << exponent_bits) - 1
    bias = mask >> 1
    fraction = (1 << fraction_bits) - 1
    top = exponent_bits + fraction_bits
    for i in range(bits.size):
        word = np.int32(bits[i] >> np.uint32(drop))
        field = np.int32((word >> fraction_bits) & mask)
        magnitude = np.int32(word & fraction) | np.int32((1 if field != 0 else 0) << fraction_bits)
        exponent = np.int32(max(field, np.int32(1)) - bias)
        exponent = np.int32(_ZERO_EXP) if magnitude == 0 else exponent
        exponent = np.int32(_SPECIAL_EXP) if field == mask else exponent
        exp[i] = exponent
        sig[i] = -magnitude if (word >> top) & 1 else magnitude


@njit(cache=True, nogil=True)
def _fast_block(a: Array, b: Array, d: Array) -> None:
    """d[m, n, w] += sum_k a[m, k, w] * b[k, n, w], k in order; all float32."""
    for m in range(a.shape[0]):
        for n in range(b.shape[1]):
            acc = d[m, n]
            for k in range(a.shape[1]):
                left = a[m, k]
                right = b[k, n]
                for w in range(acc.size):
                    acc[w] += left[w] * right[w]


@njit(cache=True, nogil=True)
def _special(a: Array, b: Array, c_value: Any, a_fmt: Code, b_fmt: Code, m: int, n: int, w: int) -> Any:
    """Sum of one output's terms when an Inf or NaN is among them, as float64: NaN, +Inf or -Inf."""
    total = np.float64(0.0) if np.isfinite(c_value) else np.float64(c_value)
    for k in range(a.shape[1]):
        left = _widen(a[m, k, w], a_fmt[0], a_fmt[1], a_fmt[2])
        right = _widen(b[k, n, w], b_fmt[0], b_fmt[1], b_fmt[2])
        product = np.float64(left) * np.float64(right)
        if not np.isfinite(product):
            total += product
    return total


@njit(cache=True, nogil=True, inline="always")
def _power_of_two(exponent: Any) -> Any:
    """2.0**exponent as float64, for exponents of normal float64 numbers."""
    return np.int64((np.int64(exponent) + 1023) << 52).view(np.float64)


@njit(cache=True, nogil=True, inline="always")
def _round_to_f32(value: Any) -> Any:
    """FP32 bits of a float64, rounded toward zero (Inf from 2**128 on); zeros give +0, NaN 0x7fffffff."""
    if value != value:
        return np.uint32(0x7FFFFFFF)
    if abs(value) < 2.0**-126:  # subnormal result: 149 binary places
        value = np.trunc(value * 2.0**149) * 2.0**-149 + 0.0
    else:  # FP32 keeps 23 of the 52 fraction bits
        value = np.int64(np.float64(value).view(np.int64) & ~np.int64((1 << 29) - 1)).view(np.float64)
    return np.float32(value).view(np.uint32)


@njit(cache=True, nogil=True, inline="always")
def _round_to_f16(value: Any) -> Any:
    """FP16 bits of a float64, rounded to nearest even; a zero comes out as +0, a NaN as 0x7fff."""
    if value != value:
        return np.uint32(0x7FFF)
    sign = np.uint32(0x8000) if value < 0.0 else np.uint32(0)
    size = abs(value)
    if size >= 65520.0:  # halfway between the largest FP16, 65504, and 65536
        return np.uint32(sign | np.uint32(0x7C00))
    exponent: Any = max(((np.float64(size).view(np.int64) >> 52) & 0x7FF) - 1023, -14)
    steps = np.int64(np.rint(size * _power_of_two(10 - exponent)))  # in units of the last place
    if steps == 0:
        return np.uint32(0)
    # The significand, hidden bit included, plus the biased exponent less one: a carry moves up by itself.
    return np.uint32(sign | np.uint32(steps + ((exponent + 14) << 10)))


@njit(cache=True, nogil=True)
def _exact_step(
    a: Array,
    b: Array,
    c: Array,
    d: Array,
    a_fmt: Code,
    b_fmt: Code,
    c_fmt: Code,
    fraction_bits: int,
    zero_exp: int,
    parts: tuple[Array, ...],
) -> None:
    """One hardware step over all of a's K, at most 16, in bits; ``d`` may be ``c``.

    ``parts`` are the six decoded arrays, sig and exp of a, b and c (int32).  Eight aligned products, each
    below 2**27, fit an int32, so that is how many are summed before widening.
    """
    a_sig, a_exp, b_sig, b_exp, c_sig, c_exp = parts
    _split_all(a.reshape(-1), a_fmt[0], a_fmt[1], a_fmt[2], a_sig.reshape(-1), a_exp.reshape(-1))
    _split_all(b.reshape(-1), b_fmt[0], b_fmt[1], b_fmt[2], b_sig.reshape(-1), b_exp.reshape(-1))
    _split_all(c.reshape(-1), c_fmt[0], c_fmt[1], c_fmt[2], c_sig.reshape(-1), c_exp.reshape(-1))
    width = a.shape[2]
    depth = a.shape[1]
    up = np.int32(fraction_bits - a_fmt[1] - b_fmt[1])
    c_up = np.int32(fraction_bits - c_fmt[1])
    top = np.empty(width, np.int32)
    low = np.empty(width, np.int32)
    total = np.empty(width, np.int64)
    for m in range(a.shape[0]):
        for n in range(b.shape[1]):
            for w in range(width):
                top[w] = max(np.int32(zero_exp), c_exp[m, n, w])
            for k in range(depth):
                ea = a_exp[m, k]
                eb = b_exp[k, n]
                for w in range(width):
                    top[w] = max(top[w], ea[w] + eb[w])
            for w in range(width):
                total[w] = 0
            for first in range(0, depth, 8):
                low[:] = 0
                for k in range(first, min(first + 8, depth)):
                    ea = a_exp[m, k]
                    eb = b_exp[k, n]
                    sa = a_sig[m, k]
                    sb = b_sig[k, n]
                    for w in range(width):
                        product = np.int32(sa[w] * sb[w])
                        down = np.int32(min(top[w] - (ea[w] + eb[w]), np.int32(31)))
                        aligned = np.int32(np.int32(np.int32(abs(product)) << up) >> down)
                        low[w] += -aligned if product < 0 else aligned
                for w in range(width):
                    total[w] += low[w]
            for w in range(width):
                down = np.int32(min(top[w] - c_exp[m, n, w], np.int32(31)))
                aligned = np.int32(np.int32(np.int32(abs(c_sig[m, n, w])) << c_up) >> down)
                total[w] += -aligned if c_sig[m, n, w] < 0 else aligned
            for w in range(width):
                if top[w] > _SPECIAL_LIMIT:
                    c_value = _widen(c[m, n, w], c_fmt[0], c_fmt[1], c_fmt[2])
                    value = _special(a, b, c_value, a_fmt, b_fmt, m, n, w)
                else:
                    value = np.float64(total[w]) * _power_of_two(top[w] - fraction_bits)
                d[m, n, w] = _round_to_f32(value) if c_fmt[1] == 23 else _round_to_f16(value)


@njit(cache=True, nogil=True)
def exact_dot(
    a: Array,
    b: Array,
    c: Array,
    d: Array,
    a_fmt: Code,
    b_fmt: Code,
    c_fmt: Code,
    step: int,
    fraction_bits: int,
    zero_exp: int,
) -> None:
    """d = a x b + c in bits, as many hardware steps as K needs; ``d`` may be ``c``."""
    rows, depth, width = a.shape
    columns = b.shape[1]
    size = min(step, depth)
    parts = (
        np.empty((rows, size, width), np.int32),
        np.empty((rows, size, width), np.int32),
        np.empty((size, columns, width), np.int32),
        np.empty((size, columns, width), np.int32),
        np.empty((rows, columns, width), np.int32),
        np.empty((rows, columns, width), np.int32),
    )
    addend = c
    for k0 in range(0, depth, size):
        left = a[:, k0 : k0 + size, :].copy()
        right = b[k0 : k0 + size, :, :].copy()
        _exact_step(left, right, addend, d, a_fmt, b_fmt, c_fmt, fraction_bits, zero_exp, parts)
        addend = d


@njit(cache=True, nogil=True)
def fast_dot(a: Array, b: Array, c: Array, d: Array, a_fmt: Code, b_fmt: Code, c_fmt: Code) -> None:
    """d = a x b + c in bits, by FP32 arithmetic in k order."""
    left = np.empty(a.shape, np.float32)
    right = np.empty(b.shape, np.float32)
    acc = np.empty(c.shape, np.float32)
    _widen_all(a.reshape(-1), a_fmt[0], a_fmt[1], a_fmt[2], left.reshape(-1))
    _widen_all(b.reshape(-1), b_fmt[0], b_fmt[1], b_fmt[2], right.reshape(-1))
    _widen_all(c.reshape(-1), c_fmt[0], c_fmt[1], c_fmt[2], acc.reshape(-1))
    _fast_block(left, right, acc)
    source = acc.reshape(-1)
    target = d.reshape(-1)
    for i in range(source.size):
        if c_fmt[1] == 23:
            value = np.float32(source[i] + np.float32(0.0))  # the hardware's zero results are +0
            target[i] = np.uint32(0x7FFFFFFF) if value != value else value.view(np.uint32)
        else:
            target[i] = _round_to_f16(np.float64(source[i]))


@njit(cache=True, nogil=True)
def integer_dot(a: Array, b: Array, c: Array, d: Array, a_signed: bool, b_signed: bool) -> None:
    """d = a x b + c for 8-bit integers in 32-bit words, S32 results modulo 2**32."""
    left = np.empty(a.shape, np.int32)
    right = np.empty(b.shape, np.int32)
    acc = np.empty(c.shape, np.int32)
    for source, target, signed in ((a, left, a_signed), (b, right, b_signed)):
        flat = source.reshape(-1)
        out = target.reshape(-1)
        for i in range(flat.size):
            value = np.int32(flat[i])
            out[i] = value - 256 if signed and value >= 128 else value
    acc.reshape(-1)[:] = c.reshape(-1)
    _fast_block(left, right, acc)
    d.reshape(-1)[:] = acc.reshape(-1)
