"""Residual attention kernels that break one rule each, and what notices it.

`BROKEN_ATTNRES` maps a name to the class, inputs on which the mistake matters, and a text of the finding: of the
comparison with float64, or of the virtual GPU. The comment `# the mistake` marks the wrong line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int64

from oproj_lib.kernels import float_primitives as fp32
from oproj_lib.kernels import primitives
from oproj_lib.kernels.attnres import AttnRes
from oproj_lib.kernels.attnres_lane import Arrays, Row, Thread
from oproj_lib.kernels.mailbox import Turn
from oproj_lib.kernels.mailbox_primitives import widen
from oproj_lib.kernels.primitives import Words4, add_float
from oproj_lib.kernels.transport import Mailbox
from oproj_lib.problem import N


class ScoresUnroundedPrefix(AttnRes):
    """Scores prefix + delta before it is rounded to BF16, and mixes what was rounded."""

    def receive(self, me: Thread, base: Int64, box: Mailbox, turn: Turn) -> tuple[list[Words4], list[Words4]]:
        self.unrounded: Row = []
        return super().receive(me, base, box, turn)

    def add_prefix(self, before: Words4, delta: Words4) -> Words4:
        sums = [add_float(a, b) for a, b in zip(widen(before), widen(delta), strict=True)]
        self.unrounded.append(sums)
        return primitives.pack8(sums, "plain")

    def token_sums(self, rows: Sequence[Words4], weights: Row) -> list[Float32]:
        values = self.unrounded  # the mistake: the values of ``rows`` are the ones that have been stored
        return [self.thread_sum(values, values), self.thread_sum(values, weights)]


class NoMaximum(AttnRes):
    """exp(score) instead of exp(score - maximum)."""

    def exponential(self, score: Float32, maximum: Float32) -> Float32:
        # Made for scores up to 0: above 88 the exponent of its 2**n is that of Inf, or runs over into the sign; below
        # -87 the result is 0.
        return fp32.exponential(score)  # the mistake


class EpsOutsideTheRoot(AttnRes):
    """1 / (sqrt(mean) + eps) instead of 1 / sqrt(mean + eps)."""

    def inverse_norm(self, square: Float32, eps: float) -> Float32:
        root = fp32.square_root(fp32.multiply(square, Float32(1 / N)))
        return fp32.reciprocal(add_float(root, Float32(eps)))  # the mistake


class MeanOverPaddedRow(AttnRes):
    """Divides the sum of squares by 8192, the next power of two, instead of 7168."""

    def inverse_norm(self, square: Float32, eps: float) -> Float32:
        count = 1 << (N - 1).bit_length()  # the mistake
        return fp32.reciprocal_root(fp32.multiply_add(square, Float32(1 / count), Float32(eps)))


class RoundsOnce(AttnRes):
    """Adds prefix to the FP32 sum of the ranks: delta is never rounded to BF16."""

    def receive(self, me: Thread, base: Int64, box: Mailbox, turn: Turn) -> tuple[list[Words4], list[Words4]]:
        before, out_weights = self.load_written_row(me.prefix), self.load_row(me.out_weight)
        rows = []
        for chunk, sums in self.receive_sums(me.crew, base, box, turn):
            values = [add_float(a, b) for a, b in zip(widen(before[chunk]), sums, strict=True)]  # the mistake
            rows.append(primitives.pack8(values, "plain"))
            self.store_prefix(me, chunk, rows[-1])
        return rows, out_weights


class ForgetsPrefix(AttnRes):
    """Does not store P, so the next layer adds to an old prefix."""

    def store_prefix(self, me: Thread, chunk: int, row: Words4) -> None:
        pass  # the mistake


class NoBarrierBeforeSums(AttnRes):
    """Adds up the warps' sums while some warps have not stored theirs."""

    def meet(self, me: Thread) -> None:
        pass  # the mistake


class NeverWaits(AttnRes):
    """Completes while the producer may still run. A launch on its own does not show it: two calls do."""

    @cute.kernel
    def kernel(
        self,
        mailbox: cute.Tensor,
        prefix: cute.Tensor,
        blocks: cute.Tensor,
        norm_weight: cute.Tensor,
        qk_weight: cute.Tensor,
        out_weight: cute.Tensor,
        out: cute.Tensor,
        state: Int64,
    ) -> None:
        cute.arch.griddepcontrol_launch_dependents()
        arrays = Arrays(prefix, blocks, norm_weight, qk_weight, out_weight, out)
        self.consume(arrays, self.allocate(), mailbox, state)
        # the mistake: griddepcontrol_wait() should follow


@dataclass(frozen=True)
class BrokenAttnRes:
    """kernel: the class; kind: of the inputs; finding: part of what is reported."""

    kernel: type[AttnRes]
    kind: str
    finding: str

    def build(self) -> AttnRes:
        """With the settings that show the mistake."""
        return self.kernel(1, ranks=2, tokens=2)


BROKEN_ATTNRES = {
    "score of the unrounded prefix": BrokenAttnRes(
        ScoresUnroundedPrefix, "random", "off by more than rounding explains"
    ),
    "no maximum, large scores": BrokenAttnRes(NoMaximum, "dominant", "relative Frobenius error"),
    "no maximum, scores far below 0": BrokenAttnRes(
        NoMaximum, "large_negative", "outputs are finite, Inf or NaN"
    ),
    "eps outside the root": BrokenAttnRes(EpsOutsideTheRoot, "tiny", "relative Frobenius error"),
    "mean over 8192": BrokenAttnRes(MeanOverPaddedRow, "random", "relative Frobenius error"),
    "delta not rounded": BrokenAttnRes(RoundsOnce, "random", "elements of the new prefix differ"),
    "prefix not stored": BrokenAttnRes(ForgetsPrefix, "random", "elements of the new prefix differ"),
    "no barrier before the sums": BrokenAttnRes(NoBarrierBeforeSums, "random", "race"),
}
