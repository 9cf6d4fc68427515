"""Is a round right? Rank against rank, against the ranks' sum bit for bit, and against float64.

A finding is one line of text. Nothing here knows which device ran the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from oproj_lib import bf16
from oproj_lib.attnres_reference import AttnResInputs, findings, fp32_reference, make_inputs, new_prefix
from oproj_lib.kernels.attnres_configuration import AttnResConfiguration
from oproj_lib.layouts.mailbox import GENERATIONS, SENTINEL
from oproj_lib.problem import (
    BF16_HALF_ULP,
    BF16_SMALLEST,
    FP32_SUM_ERROR,
    TOLERANCE,
    Array,
    N,
    error_measures,
)
from oproj_lib.ranks.plan import PAYLOAD, Plan

UNWRITTEN = 0xFFFF
"""Bits that outputs hold before a round: a NaN that no conversion makes (PTX ISA, "cvt": 0x7FFF)."""


@dataclass(frozen=True)
class Tolerance:
    """Largest relative Frobenius error of a sum of partials, each rounded to BF16 before, and once more after.

    One rounding makes an error of at most TOLERANCE relative to what is rounded (``problem.TOLERANCE``), and the
    errors are independent: squares add up. |partials| is the root of the sum of squares over all ranks, which a sum
    that cancels is much smaller than.
    """

    partials: float
    sum: float

    @property
    def relative(self) -> float:
        return TOLERANCE * float(np.hypot(self.partials, self.sum)) / self.sum if self.sum else float("inf")


def sum_of(published: Array) -> Array:
    """BF16 [M, columns] of partials [R, M, columns] BF16: FP32, in rank order, rounded once, as every consumer adds."""
    return bf16.publish(in_rank_order(published), "plain")


def in_rank_order(partials: Array) -> Array:
    """FP32 sum of [R, ...] partials, one rank after the other."""
    total = partials[0].astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for partial in partials[1:]:
            total = total + partial.astype(np.float32)
    return total


def same_bits(first: Array, second: Array) -> bool:
    return bool((first.view(np.uint16) == second.view(np.uint16)).all())


def difference(first: Array, second: Array) -> str:
    """How many bits differ, and where first: token, column and both values."""
    unequal = first.view(np.uint16) != second.view(np.uint16)
    token, column = (int(i) for i in np.argwhere(unequal)[0])
    a, b = (int(array.view(np.uint16)[token, column]) for array in (first, second))
    count = f"{int(unequal.sum())} of {unequal.size} elements"
    return f"{count}, first token {token}, column {column}: {a:#06x} and {b:#06x}"


def rank_findings(where: str, outs: Sequence[Array]) -> list[str]:
    """outs: what each rank made, BF16 of one shape. All ranks must have the same bits, and all must be written."""
    found = []
    for rank, out in enumerate(outs):
        unwritten = int((out.view(np.uint16) == UNWRITTEN).sum())
        if unwritten:
            found.append(f"{where}: unwritten output: {unwritten} of {out.size} elements of rank {rank}")
        if not same_bits(out, outs[0]):
            found.append(f"{where}: ranks 0 and {rank} differ: {difference(outs[0], out)}")
    return found


def sum_findings(where: str, out: Array, published: Array) -> list[str]:
    """out against the sum of what all ranks published, bit for bit."""
    expected = sum_of(published)
    if same_bits(out, expected):
        return []
    return [f"{where}: not the sum in rank order: {difference(out, expected)}"]


def float64_findings(where: str, out: Array, exact: Array, *, k: int) -> list[str]:
    """out [M, columns] against the float64 sum of partials ``exact`` [R, M, columns], before any rounding of them.

    k: length of the ranks' own sums, 1 for given partials. Inf and NaN must stand where FP32 additions of the BF16
    partials in rank order put them. The bounds of the rest: as a whole ``Tolerance``; per element half a BF16 step of
    every partial and of the sum, and truncated FP32 additions.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = exact.astype(np.float32).astype(out.dtype)
        limited = np.where(np.isfinite(rounded.astype(np.float64)), exact, rounded.astype(np.float64))
        fp32 = in_rank_order(rounded)
        total = np.where(np.isfinite(fp32), limited.sum(axis=0), fp32.astype(np.float64))
    measures = error_measures(out, total)
    found = []
    if measures.special_mismatches:
        found.append(
            f"{where}: {measures.special_mismatches} of {out.size} elements are finite, Inf or NaN where float64 is not"
        )
    finite = np.isfinite(total) & np.isfinite(out.astype(np.float64))
    norms = np.where(finite, np.abs(limited), 0.0)
    norms = np.where(np.isfinite(norms), norms, 0.0)
    tolerance = Tolerance(float(np.linalg.norm(norms)), float(np.linalg.norm(total[finite])))
    if tolerance.sum and measures.relative_frobenius > tolerance.relative:
        found.append(
            f"{where}: relative Frobenius error {measures.relative_frobenius:.2e}, limit {tolerance.relative:.2e}"
        )
    ranks = len(exact)
    scale = norms.sum(axis=0)
    limit = BF16_HALF_ULP * (scale + np.abs(np.where(finite, total, 0.0))) + (ranks + 1) * BF16_SMALLEST / 2
    limit += (k**0.5 + ranks) * FP32_SUM_ERROR * np.maximum(scale, 1.0) * (1 if k > 1 else 0)
    limit += ranks * FP32_SUM_ERROR * scale
    with np.errstate(invalid="ignore"):
        error = np.where(finite, np.abs(out.astype(np.float64) - total), 0.0)
    if (error > limit).any():
        token, column = (int(i) for i in np.unravel_index(np.argmax(error / limit), error.shape))
        found.append(
            f"{where}: {int((error > limit).sum())} elements are off by more than rounding explains, worst at token "
            f"{token}, column {column}: {float(out[token, column])!r}, float64 {total[token, column]:.6g}, allowed "
            f"error {limit[token, column]:.2g}"
        )
    return found


def memory_findings(where: str, words: Array, last: int, batch: int) -> list[str]:
    """What a mailbox must be after a round: armed, but for the tokens of the generation that was consumed last.

    words: uint32 [3 * writers, tokens, columns / 2] of one rank; last: that generation; batch: its tokens.
    """
    found = []
    for generation, slots in enumerate(np.split(words, GENERATIONS)):
        kept = batch if generation == last else 0
        lost = int((slots[:, kept:] != SENTINEL).sum())
        if lost:
            found.append(f"{where}: generation {generation}: {lost} words are not armed again")
        stale = int((slots[:, :kept] == SENTINEL).sum())
        if stale:
            found.append(f"{where}: generation {generation}: {stale} words were never published")
    return found


class AttnResChecker:
    """Follows prefix from round to round in FP32, the kernel's order of operations."""

    def __init__(self, plan: Plan, threads: int) -> None:
        self.plan, self.threads = plan, threads
        self.inputs = make_inputs(self.config(plan.tokens), plan.seed)
        self.prefix = self.inputs.prefix.copy()

    def config(self, batch: int) -> AttnResConfiguration:
        return AttnResConfiguration(self.plan.blocks, self.plan.ranks, batch, threads=self.threads)

    def take(self, batch: int, published: Array) -> tuple[AttnResConfiguration, AttnResInputs]:
        """What a round gets: the partials [R, M, 7168] that were published, and the prefix so far, which moves on."""
        config = self.config(batch)
        inputs = replace(
            self.inputs, slots=published, prefix=self.prefix[:batch].copy(), blocks=self.inputs.blocks[:batch]
        )
        self.prefix[:batch] = new_prefix(config, inputs)
        return config, inputs

    @staticmethod
    def judge(where: str, out: Array, config: AttnResConfiguration, inputs: AttnResInputs) -> list[str]:
        """out of a round bit for bit and against float64. Changes nothing, so that rounds can be judged at once."""
        prefix, expected = fp32_reference(config, inputs)
        found = [f"{where}: {line}" for line in findings(config, inputs, prefix, out)]
        if not same_bits(out, expected):
            found.append(f"{where}: not the FP32 result: {difference(out, expected)}")
        return found

    def findings(self, where: str, out: Array, published: Array) -> list[str]:
        """Take and judge a round."""
        return self.judge(where, out, *self.take(len(out), published))

    def prefix_findings(self, where: str, prefix: Array) -> list[str]:
        """prefix [tokens, 7168] of a rank after the rounds so far."""
        if same_bits(prefix, self.prefix):
            return []
        return [f"{where}: prefix: {difference(prefix, self.prefix)}"]


def probe_findings(probes: Sequence[tuple[str, Array]]) -> list[str]:
    """(round, its last token's out [columns]) of every round: one input, so the same bits whatever M was."""
    first_name, first = probes[0]
    return [
        f"batch invariance: {name} and {first_name}: {difference(out[None], first[None])}"
        for name, out in probes[1:]
        if not same_bits(out, first)
    ]


def sum_length(plan: Plan) -> int:
    """K of the partial sums, 1 where they are given."""
    return 1 if plan.engine == PAYLOAD else plan.k


def columns_of(plan: Plan, out: Array) -> Array:
    """The columns that the plan's CTAs make."""
    return out[:, : plan.columns] if plan.columns < N else out


def reduced_findings(where: str, out: Array, exact: Array, reduced: Array) -> list[str]:
    """out against what ``torch.distributed.all_reduce`` made of the float64 partials; finite elements only, the
    others are ``float64_findings``'s."""
    with np.errstate(invalid="ignore", over="ignore"):
        finite = np.isfinite(out.astype(np.float64)) & np.isfinite(reduced)
        partials = np.where(finite, exact, 0.0)
    if not finite.any():
        return []
    size = float(np.linalg.norm(reduced[finite]))
    error = float(np.linalg.norm(out.astype(np.float64)[finite] - reduced[finite]))
    limit = Tolerance(float(np.linalg.norm(partials)), size).relative * size
    if error <= limit or size == 0.0:
        return []
    return [f"{where}: off from torch.distributed.all_reduce by {error / size:.2e}, limit {limit / size:.2e}"]
