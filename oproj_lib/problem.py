"""The job: shapes, inputs, the float64 reference, and what counts as a right answer.

On rank r of R tensor-parallel ranks, for t < M tokens and n < N = 7168 output columns (Kimi K3):

    partial[t, n] = bf16(sum_k x[t, k] * weight[n, k])        k < K = 12288 / R

x is [M, K] and weight is [N, K], both bfloat16 and row-major. Nothing here knows about kernels or GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

N = 7168  # output columns: the hidden size of the model
HIDDEN_K = 12288  # attention heads x head size: the length of the sum before ranks share it
ROWS_PER_CTA = 64  # weight rows, that is output columns, of one thread block
CTAS = N // ROWS_PER_CTA  # 112, fewer than the 132 SMs of an H200 and the 148 of a B200: all run at once
MAX_BATCH = 64  # tokens of one decode step
RANKS = (8, 16)
KINDS = (
    "random",
    "negative_zero",
    "subnormal",
    "inf",
    "nan",
    "rounds_to_negative_zero",
    "cancellation",
)

TOLERANCE = 2.5e-3
"""Largest relative Frobenius error, |out - reference| / |reference|, of a right bfloat16 output.

It is the error of one rounding to bfloat16, plus a little. A bfloat16 has 8 significant bits, so the values
in [1, 2) are 2**-7 apart, and rounding to the nearest makes an error spread evenly over +-2**-8: 2**-7 /
sqrt(12) = 2.26e-3 root-mean-square. That is divided by values of 1 to 2, so 2.26e-3 is the worst there is
(all outputs just above a power of two), and normally distributed outputs show 1.66e-3, which is near 2**-9.
FP32 sums of 1536 products add less than 1e-5. Truncating instead of rounding doubles the error (3.3e-3), and
so fails.
"""

BF16_HALF_ULP = 2.0**-8  # half the distance of neighbours, relative to the power of two below the value
BF16_SMALLEST = 2.0**-133  # smallest subnormal
FP32_SUM_ERROR = 2.0**-23  # per addition, relative to sum |x w|: a tensor core may truncate

Array = NDArray[Any]


@dataclass(frozen=True)
class Problem:
    """One rank's share of the projection.

    Args:
        ranks: tensor-parallel ranks, 8 (K = 1536) or 16 (K = 768).
        batch: tokens M, 1 to 64.

    Raises:
        ValueError: for any other number, with the valid ones.
    """

    ranks: int
    batch: int = 8

    def __post_init__(self) -> None:
        for name, value in (("ranks", self.ranks), ("batch", self.batch)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ValueError(f"{name} = {value!r} is a {type(value).__name__}; it must be an int")
        if self.ranks not in RANKS:
            choices = " or ".join(f"{ranks} (K = {HIDDEN_K // ranks})" for ranks in RANKS)
            raise ValueError(f"ranks = {self.ranks} would give K = {_share(self.ranks)}; choose {choices}")
        if not 1 <= self.batch <= MAX_BATCH:
            raise ValueError(
                f"batch = {self.batch} is outside 1..{MAX_BATCH}: a thread block publishes with 8 * batch = "
                f"{8 * self.batch} of its 512 threads"
            )

    @property
    def k(self) -> int:
        """Length of this rank's sums."""
        return HIDDEN_K // self.ranks

    @property
    def name(self) -> str:
        """The preset's name, "TP8" or "TP16"."""
        return f"TP{self.ranks}"

    def with_batch(self, batch: int) -> Problem:
        """The same ranks with another number of tokens."""
        return replace(self, batch=batch)

    def inputs(self, seed: int, kind: str = "random") -> tuple[Array, Array]:
        """Make (x, weight), the same arrays for the same seed and kind.

        x ~ N(0, 1), as after a normalisation, and weight ~ N(0, 1 / sqrt(K)), as in a trained layer (the
        second number is the standard deviation), so the outputs are ~ N(0, 1) whatever K is. The other kinds
        change that in the way that their makers below describe.

        Args:
            seed: a non-negative integer.
            kind: one of KINDS.

        Returns:
            x [batch, K] and weight [7168, K], bfloat16, C-contiguous.

        Raises:
            ValueError: for an unknown kind or a negative seed.
        """
        return draw_inputs(self.batch, self.k, seed, kind)


TP8 = Problem(ranks=8)
TP16 = Problem(ranks=16)
PRESETS = {problem.name: problem for problem in (TP8, TP16)}


def draw_inputs(batch: int, k: int, seed: int, kind: str = "random") -> tuple[Array, Array]:
    """``Problem.inputs`` for any K: x [batch, k] and weight [7168, k].

    Raises:
        ValueError: for an unknown kind or a negative seed.
    """
    if kind not in _MAKERS:
        raise ValueError(f"kind = {kind!r} is unknown; choose one of {', '.join(KINDS)}")
    if seed < 0:
        raise ValueError(f"seed = {seed} is negative; choose 0 or more")
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, k), dtype=np.float32)
    weight = rng.standard_normal((N, k), dtype=np.float32)
    weight *= np.float32(k**-0.5)
    _MAKERS[kind](x, weight, rng)
    return x.astype(ml_dtypes.bfloat16), weight.astype(ml_dtypes.bfloat16)


def _share(ranks: int) -> str:
    return f"{HIDDEN_K} / {ranks}" + (f" = {HIDDEN_K / ranks:g}" if ranks else "")


# ---- kinds of input: each maker changes normally distributed float32 arrays in place ----


def _random(x: Array, weight: Array, rng: np.random.Generator) -> None:
    """Nothing special."""


def _negative_zero(x: Array, weight: Array, rng: np.random.Generator) -> None:
    """A quarter of all values is -0.0, and so are whole tokens (every 3rd) and whole rows (every 16th)."""
    for array, step in ((x, 3), (weight, 16)):
        array[rng.random(array.shape) < 0.25] = -0.0
        array[step - 1 :: step] = -0.0


def _subnormal(x: Array, weight: Array, rng: np.random.Generator) -> None:
    """All of x is subnormal and weights are near 2**115, so flushing inputs to zero loses the whole output.

    Every 16th row has ordinary weights: its outputs are subnormal too. A 16th of the weights is subnormal.
    """
    x[:] = rng.integers(-127, 128, x.shape) * BF16_SMALLEST
    large = np.arange(len(weight)) % 16 != 15
    weight[large] *= np.float32(2.0**120)
    tiny = rng.random(weight.shape) < 1 / 16
    weight[tiny] = rng.integers(-127, 128, int(tiny.sum())) * BF16_SMALLEST


def _special(value: float) -> Callable[[Array, Array, np.random.Generator], None]:
    def make(x: Array, weight: Array, rng: np.random.Generator) -> None:
        """Odd tokens and every 32nd row hold the value once, with either sign; every 64th row has 0 there."""
        columns = rng.integers(0, x.shape[1], len(x))
        for token in range(1, len(x), 2):
            x[token, columns[token]] = value * rng.choice((-1.0, 1.0))
            weight[::64, columns[token]] = 0.0
        rows = np.arange(31, len(weight), 32)
        weight[rows, rng.integers(0, x.shape[1], len(rows))] = value * rng.choice((-1.0, 1.0), len(rows))

    return make


def _rounds_to_negative_zero(x: Array, weight: Array, rng: np.random.Generator) -> None:
    """Every 8th row sums to -2**-140 for every token: an FP32 subnormal that rounds to -0.0 in bfloat16."""
    column = int(rng.integers(0, x.shape[1]))
    x[:, column] = 2.0**-70
    weight[3::8] = 0.0
    weight[3::8, column] = -(2.0**-70)


def _cancellation(x: Array, weight: Array, rng: np.random.Generator) -> None:
    """The second half of each sum undoes 15/16 of the first, which shows partial sums that lose bits.

    FP32 partial sums lose nothing that matters; partial sums rounded to bfloat16 are off by several percent.
    """
    half = x.shape[1] // 2
    x[:, half:] = x[:, :half] * np.float32(1 - 2.0**-4)
    weight[:, half:] = -weight[:, :half]


_MAKERS: dict[str, Callable[[Array, Array, np.random.Generator], None]] = {
    "random": _random,
    "negative_zero": _negative_zero,
    "subnormal": _subnormal,
    "inf": _special(np.inf),
    "nan": _special(np.nan),
    "rounds_to_negative_zero": _rounds_to_negative_zero,
    "cancellation": _cancellation,
}


# ---- the reference and the verdict ----


def reference(x: Array, weight: Array) -> NDArray[np.float64]:
    """x @ weight.T in float64, which is exact for one product and off by about 1e-16 for a sum.

    Inf and NaN give what IEEE 754 says: Inf - Inf and 0 * Inf are NaN.

    Args:
        x: [M, K] bfloat16.
        weight: [N, K] bfloat16.

    Returns:
        [M, N] float64.

    Raises:
        ValueError: for another dtype, or shapes whose K differ.
    """
    _check_operands(x, weight)
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64) @ weight.astype(np.float64).T


def _check_operands(x: Array, weight: Array) -> None:
    for name, array in (("x", x), ("weight", weight)):
        if array.dtype != ml_dtypes.bfloat16:
            raise ValueError(f"{name} is {array.dtype}; it must be bfloat16 (ml_dtypes.bfloat16)")
        if array.ndim != 2:
            raise ValueError(f"{name} has shape {array.shape}; it must have two axes, the second of length K")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x [M, K] has K = {x.shape[1]} and weight [N, K] has K = {weight.shape[1]}; they must be equal"
        )


@dataclass(frozen=True)
class ErrorMeasures:
    """How far a bfloat16 output is from the float64 reference.

    The first two are over elements that are finite in both.

    Attributes:
        relative_frobenius: |out - reference| / |reference|, each the root of the sum of squares.
        max_abs: largest |out - reference|.
        nan_count: NaN where the reference is not NaN.
        special_mismatches: elements where only one is finite, or Inf and NaN or the sign of Inf differ (the
        NaNs
            of nan_count included). A reference beyond the bfloat16 range counts as Inf.
        negative_zeros: -0.0 in the output. A mailbox is armed with them, so there they mean "never written".
        elements: size of the output.
    """

    relative_frobenius: float
    max_abs: float
    nan_count: int
    special_mismatches: int
    negative_zeros: int
    elements: int


def error_measures(out: Array, ref: NDArray[np.float64]) -> ErrorMeasures:
    """Compare a bfloat16 output with the float64 reference, both [M, N].

    Raises:
        ValueError: if out is not bfloat16 or the shapes differ.
    """
    if out.dtype != ml_dtypes.bfloat16:
        raise ValueError(f"out is {out.dtype}; it must be bfloat16 (ml_dtypes.bfloat16)")
    if out.shape != ref.shape:
        raise ValueError(f"out has shape {out.shape} and the reference {ref.shape}; they must be equal")
    got = out.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = ref.astype(ml_dtypes.bfloat16).astype(np.float64)
    both = np.isfinite(got) & np.isfinite(expected)
    same_special = (np.isnan(got) & np.isnan(expected)) | (got == expected)
    error = got[both] - ref[both]
    norm, size = float(np.linalg.norm(error)), float(np.linalg.norm(ref[both]))
    return ErrorMeasures(
        relative_frobenius=0.0 if norm == 0 else norm / size if size else float("inf"),
        max_abs=float(np.abs(error).max(initial=0.0)),
        nan_count=int((np.isnan(got) & ~np.isnan(expected)).sum()),
        special_mismatches=int((~both & ~same_special).sum()),
        negative_zeros=int(((got == 0) & np.signbit(got)).sum()),
        elements=out.size,
    )


@dataclass(frozen=True)
class Verdict:
    """Whether an output is right, and each reason why not, with the numbers that were compared."""

    measures: ErrorMeasures
    reasons: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.reasons

    def raise_if_wrong(self) -> None:
        """Raise AssertionError with all reasons unless the output is right."""
        if self.reasons:
            raise AssertionError("the output is wrong: " + "; ".join(self.reasons))


def check(out: Array, x: Array, weight: Array, *, latent: bool = False) -> Verdict:
    """Judge out [M, N] bfloat16 for the inputs x [M, K] and weight [N, K].

    Three rules. The whole is within TOLERANCE. Inf and NaN stand exactly where IEEE 754 puts them. And each
    element is within half a bfloat16 step of what FP32 can sum, so that one wrong element among 458,752 does
    not hide.

    Args:
        latent: the output comes from a mailbox, where -0.0 means "never written" and must not occur.

    Raises:
        ValueError: for wrong dtypes or shapes.
    """
    ref = reference(x, weight)
    measures = error_measures(out, ref)
    reasons = []
    if measures.special_mismatches:
        reasons.append(
            f"{measures.special_mismatches} of {measures.elements} elements are finite, Inf or NaN where the "
            f"reference is not ({measures.nan_count} unexpected NaN)"
        )
    if not measures.relative_frobenius < TOLERANCE:
        reasons.append(f"relative Frobenius error {measures.relative_frobenius:.2e}, limit {TOLERANCE:.2e}")
    worst = _worst_element(out, ref, x, weight)
    if worst:
        reasons.append(worst)
    if latent and measures.negative_zeros:
        reasons.append(f"{measures.negative_zeros} elements are -0.0, that is never written")
    return Verdict(measures, tuple(reasons))


def _worst_element(out: Array, ref: NDArray[np.float64], x: Array, weight: Array) -> str | None:
    """Say which element breaks its own bound by most, or None.

    The bound is half a bfloat16 step (relative, or of the smallest subnormal) and K truncated FP32 additions
    to a running sum, which is as large as the result or as a random walk with these products, sqrt(sum (x
    w)**2).
    """
    with np.errstate(invalid="ignore", over="ignore"):
        squares = np.square(x.astype(np.float64)) @ np.square(weight.astype(np.float64)).T
        running = np.maximum(np.abs(ref), np.sqrt(squares))
        limit = BF16_HALF_ULP * np.abs(ref) + BF16_SMALLEST / 2 + x.shape[1] * FP32_SUM_ERROR * running
        excess = np.abs(out.astype(np.float64) - ref) / limit
    excess[~np.isfinite(ref)] = 0.0  # special values are counted elsewhere
    excess = np.nan_to_num(excess, nan=0.0, posinf=0.0)
    token, column = (int(i) for i in np.unravel_index(np.argmax(excess), excess.shape))
    if excess[token, column] <= 1:
        return None
    return (
        f"{int((excess > 1).sum())} elements are off by more than rounding explains, worst at token {token}, "
        f"column {column}: {float(out[token, column])!r}, reference {ref[token, column]:.6g}, allowed error "
        f"{limit[token, column]:.2g}"
    )
