"""BF16 bit by bit: fields, neighbours, rounding with integers, -0.0, and how large a rounding error is.

A BF16 is the upper half of an FP32: 1 sign bit, 8 exponent bits, 7 fraction bits. With the hidden bit that is
8 significant bits, so neighbours in [2**e, 2**(e + 1)) are 2**(e - 7) apart. Everything here works on bits,
with no rounding of numpy's or ml_dtypes' own; those are what the tests compare with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from oproj_lib.problem import Array

FRACTION_BITS = 7
SIGNIFICANT_BITS = FRACTION_BITS + 1
BIAS = 127
LEAST_EXPONENT = 1 - BIAS  # of normal numbers; subnormals share it
DROPPED_BITS = 16  # an FP32 has that many more
NEGATIVE_ZERO = 0x8000
CANONICAL_NAN = 0x7FFF  # what `cvt.rn.bf16.f32` makes of every NaN (PTX ISA, "cvt")
_FP32_INFINITY = np.uint32(0x7F800000)

WORST_ROUNDING = 2.0**-SIGNIFICANT_BITS / math.sqrt(3)
"""Relative RMS error of rounding values that all lie just above a power of two: 2.26e-3.

The error is spread evenly over +-half a step, step = 2**-7 there: root-mean-square step / sqrt(12) =
2**-8 / sqrt(3).
"""


@dataclass(frozen=True)
class Fields:
    """A BF16 taken apart: value = (-1)**sign * 1.fraction * 2**(exponent - 127), or 0.fraction * 2**-126."""

    sign: int
    exponent: int
    fraction: int

    @property
    def kind(self) -> str:
        """ "zero", "subnormal", "normal", "infinity" or "NaN"."""
        if self.exponent == 0xFF:
            return "NaN" if self.fraction else "infinity"
        if self.exponent == 0:
            return "subnormal" if self.fraction else "zero"
        return "normal"


def fields(bits: int) -> Fields:
    """The three fields of 16 bits.

    Raises:
        ValueError: for a number that has not 16 bits.
    """
    if not 0 <= bits <= 0xFFFF:
        raise ValueError(f"bits = {bits:#x}: a BF16 has 16 bits, 0x0000 to 0xffff")
    return Fields(bits >> 15, bits >> FRACTION_BITS & 0xFF, bits & 0x7F)


def value_of(bits: int) -> float:
    """The number that 16 bits stand for."""
    parts = fields(bits)
    if parts.exponent == 0xFF:
        size = math.nan if parts.fraction else math.inf
    else:
        hidden = int(parts.exponent > 0)
        exponent = max(parts.exponent, 1) - BIAS
        size = math.ldexp(parts.fraction + (hidden << FRACTION_BITS), exponent - FRACTION_BITS)
    return -size if parts.sign else size


def round_to_bits(values: Array) -> Array:
    """BF16 bits (uint16) of FP32 values, rounded to nearest even: `cvt.rn.bf16.f32` in integer arithmetic.

    Adding 0x7fff to the word carries into the upper half if the lower half is above the middle, 0x8000; the
    last kept bit is added too, so that the middle itself carries only away from an odd number. A carry out of
    the fraction goes into the exponent, which is right: the next binade begins there, and infinity follows the
    largest number. Only NaN must not be touched by this: 0x7fffffff would become 0x8000, which is -0.0.

    Raises:
        ValueError: for anything but float32.
    """
    if values.dtype != np.float32:
        raise ValueError(f"values are {values.dtype}; they must be float32, as in the kernel's registers")
    words = np.ascontiguousarray(values).view(np.uint32)
    last = words >> np.uint32(DROPPED_BITS) & np.uint32(1)
    rounded = (words + np.uint32(0x7FFF) + last) >> np.uint32(DROPPED_BITS)
    nan = (words & np.uint32(0x7FFFFFFF)) > _FP32_INFINITY
    return np.where(nan, np.uint32(CANONICAL_NAN), rounded).astype(np.uint16)


def round_word(word: int) -> int:
    """`round_to_bits` for one FP32 value given as its 32 bits."""
    return int(round_to_bits(np.array([word], np.uint32).view(np.float32))[0])


def truncate_to_bits(values: Array) -> Array:
    """BF16 bits of FP32 values by cutting off the lower half: what must not be done."""
    return (values.view(np.uint32) >> np.uint32(DROPPED_BITS)).astype(np.uint16)


def without_negative_zero(bits: Array) -> Array:
    """The same bits with -0.0 as +0.0: policy "latent", to be applied after rounding."""
    return np.where(bits == NEGATIVE_ZERO, np.uint16(0), bits)


def publish(values: Array, policy: str = "latent") -> Array:
    """BF16 of FP32 sums as the kernels publish them: rounded once, and then "latent" rewrites -0.0.

    Raises:
        ValueError: for a policy other than "latent" and "plain".
    """
    if policy not in ("latent", "plain"):
        raise ValueError(f"policy = {policy!r}; choose latent or plain")
    bits = round_to_bits(values)
    return (without_negative_zero(bits) if policy == "latent" else bits).view(ml_dtypes.bfloat16)


def publish_too_early(values: Array) -> Array:
    """The mistake: -0.0 is rewritten *before* rounding, so sums that round to -0.0 get through."""
    return round_to_bits(np.where(values == 0, np.float32(0), values)).view(ml_dtypes.bfloat16)


def rounding_to_negative_zero() -> tuple[float, float, int]:
    """(smallest, largest, how many) FP32 values that round to -0.0.

    Found by trying: from -0.0 downwards, to the first one that does not.
    """
    words = np.uint32(0x80000000) + np.arange(1 << 17, dtype=np.uint32)
    rounds = round_to_bits(words.view(np.float32)) == NEGATIVE_ZERO
    count = int(np.argmin(rounds))
    if rounds[count:].any():
        raise ArithmeticError("rounding is not monotonic")
    return float(words[count - 1].view(np.float32)), float(words[0].view(np.float32)), count


def spacing(values: Array) -> Array:
    """Distance of BF16 neighbours around each value (float64): 2**(e - 7), and 2**-133 among subnormals.

    Raises:
        ValueError: if a value is not finite.
    """
    sizes = np.abs(np.asarray(values, np.float64))
    if not np.isfinite(sizes).all():
        raise ValueError("a value is not finite: it has no neighbours")
    exponent = np.frexp(sizes)[1] - 1
    return np.ldexp(
        1.0, np.maximum(np.where(sizes > 0, exponent, LEAST_EXPONENT), LEAST_EXPONENT) - FRACTION_BITS
    )


def expected_error(reference: Array) -> tuple[float, float]:
    """(relative Frobenius error of rounding these values once, its standard deviation), if each error is
    spread evenly over its step.

    Squared errors have mean step**2 / 12 and variance step**4 / 180; the sum over many outputs is close to
    normal, and the root halves its relative deviation.

    Raises:
        ValueError: if a value is not finite, or all are 0.
    """
    steps = spacing(reference)
    size = float(np.linalg.norm(reference))
    if size == 0:
        raise ValueError("all values are 0: there is no relative error")
    mean = float((steps**2).sum()) / 12
    deviation = math.sqrt(float((steps**4).sum()) / 180)
    error = math.sqrt(mean) / size
    return error, error * deviation / mean / 2


def normal_error(sigma: float = 1.0, *, truncate: bool = False) -> float:
    """Relative Frobenius error of rounding normally distributed values of standard deviation sigma.

    Each binade [2**e, 2**(e + 1)) has probability p and step 2**(e - 7): sum p step**2 / 12 over sigma**2,
    and four times that for truncation, whose error is spread over a whole step on one side.

    Raises:
        ValueError: for a sigma that is not positive.
    """
    if not sigma > 0:
        raise ValueError(f"sigma = {sigma}; it must be positive")
    around = math.floor(math.log2(sigma))
    total = 0.0
    for e in range(around - 60, around + 6):  # beyond 64 sigma there is nothing
        below, above = (math.erf(2.0**i / sigma / math.sqrt(2)) for i in (e, e + 1))
        total += (above - below) * 4.0 ** (e - FRACTION_BITS) / 12
    return math.sqrt(total) / sigma * (2 if truncate else 1)
