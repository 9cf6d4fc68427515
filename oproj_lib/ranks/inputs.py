"""What every rank gets as input, round after round: a function of the plan, so that any process can draw it."""

from __future__ import annotations

import threading

import numpy as np

from oproj_lib import bf16
from oproj_lib.problem import BF16_SMALLEST, Array, draw_inputs
from oproj_lib.ranks.plan import NASTY, PAYLOAD, Plan

KEPT = 128
"""Payloads that are kept, since every check asks again: those of the rounds in flight and more."""
LARGE = 3.0e38
"""Two of them are beyond FP32, so that a sum overflows on the way."""
SPREAD = 12
"""Payloads are spread over 2**-SPREAD to 2**SPREAD: then the order of an FP32 sum shows."""


class Inputs:
    """Inputs of a plan. Token M - 1 of every round is the same *probe*, whatever M: its sum must not depend on M."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._drawn: dict[tuple[int, str], tuple[Array, Array]] = {}
        self._payloads: dict[tuple[int, int], Array] = {}
        self._lock = threading.Lock()  # rounds are judged in several threads

    def weight(self, rank: int) -> Array:
        """BF16 [7168, K]."""
        return self._of(rank, "random" if self.plan.payload == NASTY else self.plan.payload)[1]

    def x(self, number: int, rank: int) -> Array:
        """BF16 [M, K] of a round: rows of a pool that belongs to the round's kind, in an order and with signs of its
        own, then the probe."""
        plan = self.plan
        pool, _ = self._of(rank, plan.kind(number))
        rng = self._rng(number, rank)
        batch = plan.batch(number)
        rows = pool[rng.permutation(len(pool))[: batch - 1]].copy()
        rows.view(np.uint16)[rng.random(len(rows)) < 0.5] ^= 0x8000
        return np.concatenate([rows, self._of(rank, plan.kinds[0])[0][:1]])

    def payload(self, number: int, rank: int) -> Array:
        """BF16 [M, columns of the plan]: partial sums to be published. The same array when asked again."""
        with self._lock:
            if (number, rank) not in self._payloads:
                shape = (self.plan.batch(number), self.plan.columns)
                if len(self._payloads) >= KEPT:
                    self._payloads.pop(next(iter(self._payloads)))
                self._payloads[number, rank] = payload_values(
                    shape, self._rng(number, rank), self.plan.kind(number)
                )
            return self._payloads[number, rank]

    def published(self, number: int, rank: int) -> Array | None:
        """What the payload engine must publish: the payload without -0.0, NaN as the hardware writes it. None for an
        engine that computes."""
        if self.plan.engine != PAYLOAD:
            return None
        return bf16.publish(self.payload(number, rank).astype(np.float32), "latent")

    def exact(self, number: int, rank: int) -> Array:
        """float64 [M, columns]: the partial sum of a rank before any rounding of it."""
        if self.plan.engine == PAYLOAD:
            return self.payload(number, rank).astype(np.float64)
        x, weight = self.x(number, rank), self.weight(rank)[: self.plan.columns]
        with np.errstate(invalid="ignore", over="ignore"):
            return np.asarray(x.astype(np.float64) @ weight.astype(np.float64).T)

    def _of(self, rank: int, kind: str) -> tuple[Array, Array]:
        """(pool of rows of x, weight). For "nasty" payloads only the pool of a kind is used, with random weights."""
        if (rank, kind) not in self._drawn:
            seed = self.plan.seed + 1009 * (rank + 1)
            pool, weight = draw_inputs(self.plan.tokens, self.plan.k, seed, kind)
            if self.plan.payload == NASTY and kind != "random":
                weight = weight[:0]
            self._drawn[rank, kind] = pool, weight
        return self._drawn[rank, kind]

    def _rng(self, number: int, rank: int) -> np.random.Generator:
        return np.random.default_rng([self.plan.seed, number, 3 + rank])


def payload_values(shape: tuple[int, ...], rng: np.random.Generator, kind: str) -> Array:
    """BF16 values of a kind of ``problem.KINDS``: 24 powers of two, and in every eighth place the kind's speciality."""
    values = rng.standard_normal(shape, np.float32)
    values *= np.exp2(rng.integers(-SPREAD, SPREAD + 1, shape)).astype(np.float32)
    places = rng.random(shape) < 1 / 8
    special = SPECIAL.get(kind)
    if special:
        values[places] = rng.choice(np.array(special, np.float32), int(places.sum()))
    return bf16.publish(values, "plain")


SPECIAL: dict[str, tuple[float, ...]] = {
    "negative_zero": (-0.0,),
    "subnormal": (BF16_SMALLEST, -BF16_SMALLEST, 127 * BF16_SMALLEST),
    "inf": (float("inf"), float("-inf"), LARGE, -LARGE),
    "nan": (float("nan"),),
    "rounds_to_negative_zero": (-(2.0**-140), 2.0**-140),
    "cancellation": (256.0, -256.0),
}
"""Values that are sprinkled over a payload."""
