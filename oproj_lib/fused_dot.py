"""One step of a tensor core, term by term: what is aligned, what is cut off, what is rounded.

The rules are those of the virtual GPU's exact arithmetic (`oproj_lib.vgpu.tensorcore`, which follows the PyPI
package mmasim), written once more with Python integers, so that every bit can be shown. The tests compare both.

1. A product of two BF16 is sig * 2**e with e the sum of both exponents: an integer of at most 16 bits, 14 of them
   after the point. It is not normalised, so sig is below 4.
2. All products and the addend are aligned to the largest e among them, and cut off, toward zero, below 2**(e - 25)
   (Hopper and Blackwell).
3. The integers are summed exactly, and the sum is rounded to FP32 toward zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import ml_dtypes
import numpy as np

from oproj_lib.layouts.fragments import BF16_BYTES, MMA_K
from oproj_lib.problem import Array
from oproj_lib.vgpu.tensorcore import datapath

FP32_BITS = 24  # significant ones
FP32_LEAST = -149  # exponent of the smallest subnormal
FP32_END = 2**128
_PRODUCT_POINT = 14  # fraction bits of a product of two BF16
_ADDEND_POINT = 23


@dataclass(frozen=True)
class Term:
    """A product or the addend: magnitude * 2**weight, the weight being that of its last bit.

    exponent: what it is aligned by; None for zero, which has no say.
    """

    name: str
    negative: bool
    magnitude: int
    weight: int
    exponent: int | None

    @property
    def value(self) -> Fraction:
        """Exactly."""
        size = self.magnitude * Fraction(2) ** self.weight
        return -size if self.negative else size

    def kept(self, last: int) -> int:
        """Magnitude in units of 2**last, the rest cut off."""
        shift = self.weight - last
        return self.magnitude << shift if shift >= 0 else self.magnitude >> -shift


@dataclass(frozen=True)
class FusedDot:
    """One step, taken apart. `last` is the exponent of the last bit that alignment keeps; `total` the sum of what is
    kept, in units of 2**last; `result` the FP32 that comes out."""

    terms: tuple[Term, ...]
    top: int
    last: int
    total: int
    result: np.float32

    @property
    def exact(self) -> Fraction:
        """The sum without any loss."""
        return sum((term.value for term in self.terms), Fraction(0))

    @property
    def shortened(self) -> tuple[str, ...]:
        """Names of the terms that lose bits that are not 0."""
        unit = Fraction(2) ** self.last
        return tuple(term.name for term in self.terms if term.kept(self.last) * unit != abs(term.value))

    @property
    def cut_off(self) -> Fraction:
        """What alignment took from the sum: exact sum less sum of the kept bits."""
        return self.exact - self.total * Fraction(2) ** self.last

    @property
    def rounded_off(self) -> Fraction:
        """What the last rounding, toward zero, took."""
        return self.total * Fraction(2) ** self.last - Fraction(float(self.result))


def fused_dot(a: Array, b: Array, addend: float, *, arch: int = 90) -> FusedDot:
    """addend + sum a * b for a and b of 16 BF16, as one step of that architecture's tensor core.

    Args:
        a, b: [16] bfloat16, finite.
        addend: a finite FP32 value.
        arch: compute capability, 90 for sm_90a, 100 for sm_100a.

    Raises:
        ValueError: for other shapes, types or values, or an architecture that does not take 16 products at once.
    """
    for name, array in (("a", a), ("b", b)):
        if array.dtype != ml_dtypes.bfloat16 or array.shape != (MMA_K,):
            raise ValueError(f"{name} is {array.dtype} {array.shape}; it must be bfloat16 ({MMA_K},)")
    c = np.float32(addend)
    if not (
        np.isfinite(a.astype(np.float32)).all() and np.isfinite(b.astype(np.float32)).all() and np.isfinite(c)
    ):
        raise ValueError("a factor or the addend is not finite: nothing is aligned then")
    path = datapath(arch)
    if path.step_bytes != BF16_BYTES * MMA_K:
        raise ValueError(
            f"arch = {arch}: it takes {path.step_bytes} / {BF16_BYTES} = {path.step_bytes // BF16_BYTES} products per "
            f"step, not {MMA_K}; choose 90 (Hopper) or 100 (Blackwell)"
        )
    terms = [_product(f"product {k}", float(a[k]), float(b[k])) for k in range(MMA_K)]
    terms.append(_addend(float(c)))
    exponents = [term.exponent for term in terms if term.exponent is not None]
    top = max([path.zero_exponent("f32"), *exponents])
    last = top - path.fraction_bits
    total = sum(-term.kept(last) if term.negative else term.kept(last) for term in terms)
    return FusedDot(tuple(terms), top, last, total, _to_fp32(total, last))


def _product(name: str, left: float, right: float) -> Term:
    (sig_a, exp_a), (sig_b, exp_b) = _bf16_parts(left), _bf16_parts(right)
    exponent = exp_a + exp_b
    magnitude = abs(sig_a * sig_b)
    # Python's 0.0 * -1.0 keeps the sign, but a zero adds nothing either way.
    return Term(
        name, sig_a * sig_b < 0, magnitude, exponent - _PRODUCT_POINT, exponent if magnitude else None
    )


def _bf16_parts(value: float) -> tuple[int, int]:
    """(signed integer with 7 bits after the point, exponent) of a BF16."""
    exponent = max(int(np.frexp(value)[1]) - 1, -126)
    return int(value * Fraction(2) ** (7 - exponent)) if value else 0, exponent


def _addend(value: float) -> Term:
    exponent = max(int(np.frexp(value)[1]) - 1, -126)
    magnitude = abs(int(Fraction(value) * Fraction(2) ** (_ADDEND_POINT - exponent)))
    return Term("addend", value < 0, magnitude, exponent - _ADDEND_POINT, exponent if magnitude else None)


def _to_fp32(total: int, last: int) -> np.float32:
    """total * 2**last, rounded toward zero; too large gives infinity, zero +0."""
    size = abs(total)
    drop = max(size.bit_length() - FP32_BITS, FP32_LEAST - last, 0)
    size = size >> drop
    value = size * Fraction(2) ** (last + drop)
    result = np.float32(np.inf) if value >= FP32_END else np.float32(float(value))
    return np.float32(-result) if total < 0 and size else result


def plain_fp32(a: Array, b: Array, addend: float) -> np.float32:
    """The same sum with one FP32 addition per product, to nearest, in order."""
    total = np.float32(addend)
    for left, right in zip(a.astype(np.float32), b.astype(np.float32), strict=True):
        total = np.float32(total + left * right)
    return total


# ---- inputs that show the difference: each makes (a, b, addend) ----


def _factors(*pairs: tuple[float, float]) -> tuple[Array, Array]:
    padded = [*pairs, *((0.0, 0.0),) * (MMA_K - len(pairs))]
    a, b = np.array(padded).T
    return a.astype(ml_dtypes.bfloat16), b.astype(ml_dtypes.bfloat16)


def _cancelling() -> tuple[Array, Array, float]:
    """Two large products cancel; what is left was aligned to them, and partly cut off."""
    return *_factors((512.0, 512.0), (-512.0, 512.0), (1.0, 2.0**-7), (1.0, 2.0**-8)), 0.0


def _small_ones() -> tuple[Array, Array, float]:
    """Fifteen products that are each too small for the large one, and not together: FP32 loses them one by one."""
    return *_factors((1.0, 1.0), *((2.0**-12, 2.0**-13),) * 15), 0.0


def _toward_zero() -> tuple[Array, Array, float]:
    """Three quarters of an FP32 step: to nearest is the step up, toward zero is not."""
    return *_factors((1.5, 2.0**-24)), 1.0


EXAMPLES: dict[str, Callable[[], tuple[Array, Array, float]]] = {
    "large ones cancel": _cancelling,
    "many small ones": _small_ones,
    "rounding toward zero": _toward_zero,
}


def example(name: str) -> tuple[Array, Array, float]:
    """(a [16], b [16], addend) of one of EXAMPLES.

    Raises:
        ValueError: for an unknown name, with the known ones.
    """
    if name not in EXAMPLES:
        raise ValueError(f"example = {name!r} is unknown; choose from {', '.join(map(repr, EXAMPLES))}")
    return EXAMPLES[name]()
