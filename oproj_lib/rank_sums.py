"""Adding up over the ranks: one shot, two shots, a running sum in BF16; where each rounds, and what that costs.

Every rank has a partial sum of each output, in FP32. *One shot*: it is rounded to BF16 and published to all ranks;
each of them adds the R values in rank order in FP32 and rounds. *Two-shot*: it is rounded to BF16 and sent to the
rank that owns the column; the owner adds in rank order in FP32, rounds once and publishes the sum. The same BF16
values are added in the same order and rounded once, so both give the same bits.

Plain numpy: no mailbox, no kernel. Partials are [R, M, N] FP32, sums [M, N] BF16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from oproj_lib import bf16
from oproj_lib.problem import HIDDEN_K, Array
from oproj_lib.summation import add_in_turn


@dataclass(frozen=True)
class RankPartials:
    """What every rank has summed: [R, M, N] FP32, and the sum over the ranks in float64, [M, N]."""

    partials: Array
    exact: Array


def full_inputs(tokens: int, columns: int, seed: int) -> tuple[Array, Array]:
    """x [tokens, 12288] and weight [columns, 12288] before ranks share them: BF16 values in float64.

    Normally distributed; the sums over all of K are ~ N(0, 1).

    Raises:
        ValueError: if a size is not positive.
    """
    if min(tokens, columns) < 1:
        raise ValueError(f"tokens = {tokens}, columns = {columns}: both must be at least 1")
    rng = np.random.default_rng(seed)
    x, weight = (rng.standard_normal((rows, HIDDEN_K), dtype=np.float32) for rows in (tokens, columns))
    weight *= np.float32(HIDDEN_K**-0.5)
    return x.astype(ml_dtypes.bfloat16).astype(np.float64), weight.astype(ml_dtypes.bfloat16).astype(
        np.float64
    )


def rank_partials(ranks: int, x: Array, weight: Array) -> RankPartials:
    """Partials of all ranks, each of which has 12288 / ranks columns of `full_inputs`.

    Each is its exact sum rounded to FP32 once, so what is seen downstream comes from the exchange alone.

    Raises:
        ValueError: if the ranks do not share K evenly.
    """
    if ranks < 1 or HIDDEN_K % ranks:
        raise ValueError(f"ranks = {ranks}: must be at least 1 and divide K = {HIDDEN_K}")
    k = HIDDEN_K // ranks
    shares = [x[:, r * k : (r + 1) * k] @ weight[:, r * k : (r + 1) * k].T for r in range(ranks)]
    return RankPartials(np.stack(shares).astype(np.float32), np.sum(shares, axis=0))


def _widened(published: Array) -> Array:
    return published.astype(np.float32)


def one_shot(partials: Array, policy: str = "latent") -> Array:
    """What each rank ends up with, BF16 [R, M, N]: R published partials, added in rank order by every rank itself."""
    mailboxes = np.broadcast_to(bf16.publish(partials, policy), (len(partials), *partials.shape))
    return np.stack([bf16.publish(add_in_turn(_widened(slots)), "plain") for slots in mailboxes])


def two_shot(partials: Array, policy: str = "latent") -> Array:
    """What all ranks end up with, BF16 [M, N]: every owner adds its columns in rank order and publishes the sums.

    Raises:
        ValueError: if the ranks do not share the columns evenly.
    """
    ranks, _, columns = partials.shape
    if columns % ranks:
        raise ValueError(
            f"{columns} columns / {ranks} ranks = {columns / ranks:g}: every rank owns equally many"
        )
    sent = bf16.publish(partials, policy)
    owners = np.split(sent, ranks, axis=2)
    return np.concatenate([bf16.publish(add_in_turn(_widened(slots)), policy) for slots in owners], axis=1)


def rounded_once(partials: Array) -> Array:
    """FP32 partials added in rank order and rounded once: twice the bytes on the wire, and the least error."""
    return bf16.publish(add_in_turn(partials), "plain")


def running_sum(partials: Array) -> Array:
    """A sum that travels from rank to rank as BF16 and is rounded at every stop."""
    total = bf16.publish(partials[0], "plain")
    for mine in partials[1:]:
        total = bf16.publish(_widened(total) + mine, "plain")
    return total


SCHEMES: dict[str, Callable[[Array], Array]] = {
    "FP32 partials": rounded_once,
    "BF16 partials, FP32 sum": two_shot,
    "BF16 running sum": running_sum,
}


def relative_error(out: Array, exact: Array) -> float:
    """|out - exact| / |exact|, Frobenius norms."""
    return float(np.linalg.norm(out.astype(np.float64) - exact) / np.linalg.norm(exact))


def expected_errors(ranks: int, sigma: float) -> dict[str, float]:
    """Relative errors of SCHEMES for independent partials, normally distributed with standard deviation sigma.

    Rounding values of standard deviation s adds an error of c(s) s, c = `bf16.normal_error`, independent of the
    others, so squares add up. The exact sum has sigma sqrt(R).

    * Rounded once: c(sigma sqrt(R)).
    * R rounded partials: R c(sigma)**2 sigma**2, over R sigma**2: c again, whatever R is. With the last rounding,
      close to sqrt(2) c. (A little more for 2 ranks: the sum of two BF16 is a tie more often than chance says.)
    * A running sum of r partials has sigma sqrt(r) and is rounded for r = 1 to R: close to c sqrt((R + 1) / 2).

    Raises:
        ValueError: if ranks or sigma is not positive.
    """
    if ranks < 1:
        raise ValueError(f"ranks = {ranks}; it must be at least 1")
    last = bf16.normal_error(sigma * math.sqrt(ranks))
    running = sum(r * bf16.normal_error(sigma * math.sqrt(r)) ** 2 for r in range(1, ranks + 1)) / ranks
    return {
        "FP32 partials": last,
        "BF16 partials, FP32 sum": math.hypot(bf16.normal_error(sigma), last),
        "BF16 running sum": math.sqrt(running),
    }


@dataclass(frozen=True)
class SchemeError:
    """Measured in numpy, and what arithmetic says."""

    scheme: str
    ranks: int
    measured: float
    expected: float


def scheme_errors(rank_counts: tuple[int, ...], x: Array, weight: Array) -> list[SchemeError]:
    """Every scheme's error for every number of ranks: one projection (`full_inputs`), cut differently.

    Raises:
        ValueError: as `rank_partials` and `two_shot`.
    """
    rows = []
    for ranks in rank_counts:
        made = rank_partials(ranks, x, weight)
        sigma = float(made.partials.std())
        expected = expected_errors(ranks, sigma)
        for name, scheme in SCHEMES.items():
            measured = relative_error(scheme(made.partials), made.exact)
            rows.append(SchemeError(name, ranks, measured, expected[name]))
    return rows
