"""The real producer's PTX on the virtual GPU: every output against the contract bit for bit, and against
float64.

Within one configuration a token's bits must not depend on M, the schedule, the seed, the target or the
transport. All of that follows from one comparison: with `contract.expected_bits`, which knows rows and chains
only.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from contract import chains_of, expected_bits
from grid import RANKS, Point, covering_points, every_point
from mmasim_oracle import hopper_bf16

from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.layouts.fragments import MMA_TOKENS
from oproj_lib.problem import CTAS, KINDS, ROWS_PER_CTA, N, Problem
from oproj_lib.program import build_producer
from oproj_lib.run import SLOT, SLOTS, launch_on_vgpu, run_producer
from oproj_lib.sass import check_sass

SEED = 2026
FEW = 4
MANY_TOKENS = (
    Point(768, 0, 1, 0, 64, "sm_90a", "multicast"),
    Point(1536, 4, 1, 0, 33, "sm_100a", "multicast"),
    Point(1536, 4, 1, 2, 63, "sm_90a", "unicast"),
)


@cache
def inputs(k: int) -> tuple[np.ndarray, np.ndarray]:
    return Problem(RANKS[k], 64).inputs(SEED)


@cache
def bits(k: int, rows: int, chains: int) -> np.ndarray:
    """What the contract says about 64 tokens, uint16 [64, 7168]."""
    return expected_bits(*inputs(k), rows, chains)


def is_checked(point: Point) -> bool:
    """Whether undefined data and races are tracked."""
    return (point.batch + point.staged_blocks) % 2 == 0


def check_point(point: Point, schedule: int, ctas: int = CTAS) -> None:
    """The machine code; then a launch: by turns in program order or a random one, with checks or without. The
    first CTAs publish all of their columns, and nothing else."""
    producer = OprojProducer(
        point.k, staged_blocks=point.staged_blocks, rows=point.rows, group_tiles=point.group_tiles,
        transport="unicast:2" if point.transport == "unicast" else point.transport,
    )  # fmt: skip
    program = build_producer(
        producer, target=point.target, batch=point.batch, mailbox_slots=SLOTS, mailbox_tokens=point.batch + 1
    )
    check_sass(program).raise_for_problems()
    x, weight = inputs(point.k)
    x = x[: point.batch]
    expected = bits(point.k, point.rows, chains_of(point.rows, point.group_tiles))
    turn = point.batch + point.staged_blocks
    order: str | int = schedule if turn % 4 < 2 else "program"
    mailboxes, report, _ = launch_on_vgpu(
        program, x, weight, ranks=2, schedule=order, checks=is_checked(point), ctas=ctas
    )
    report.raise_for_findings()
    columns = ctas * ROWS_PER_CTA
    published = np.zeros((SLOTS, point.batch + 1, N), bool)
    published[SLOT, : point.batch, :columns] = True
    for mailbox in mailboxes:
        assert mailbox.written is not None
        np.testing.assert_array_equal(mailbox.written.reshape(*published.shape, 2).all(axis=3), published)
        np.testing.assert_array_equal(
            mailbox.array[SLOT, : point.batch, :columns].view(np.uint16), expected[: point.batch, :columns]
        )


@pytest.mark.parametrize("point", covering_points(), ids=str)
def test_pairwise_grid(point: Point) -> None:
    """All CTAs where that is quick: up to one tile and a token, nothing tracked. Otherwise a few: each does the same
    on its own rows."""
    quick = point.batch <= MMA_TOKENS + 1 and not is_checked(point)
    check_point(point, schedule=point.batch + point.staged_blocks, ctas=CTAS if quick else FEW)


@pytest.mark.parametrize("point", MANY_TOKENS, ids=str)
def test_many_tokens_of_all_ctas(point: Point) -> None:
    """Every x path: registers, shared memory, ring."""
    check_point(point, schedule=point.batch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("point", every_point(), ids=str)
def test_whole_grid(point: Point) -> None:
    check_point(point, schedule=point.batch)


def test_contract_is_close_to_float64() -> None:
    """The oracle itself, against something that shares nothing with it."""
    for k in RANKS:
        x, weight = inputs(k)
        exact = x.astype(np.float64) @ weight.astype(np.float64).T
        got = (bits(k, 1, 4).astype(np.uint32) << 16).view(np.float32)
        assert np.linalg.norm(got - exact) / np.linalg.norm(exact) < 2.5e-3


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "random"])
@pytest.mark.parametrize(
    ("ranks", "exact"),
    [
        (8, False),
        (16, True),
        pytest.param(8, True, marks=pytest.mark.exhaustive),
        pytest.param(16, False, marks=pytest.mark.exhaustive),
    ],
)
def test_nasty_inputs(kind: str, ranks: int, exact: bool) -> None:
    """Both x paths and both arithmetics (in the whole grid, both arithmetics on both paths)."""
    result = run_producer(ranks=ranks, batch=9, inputs=kind, seed=5, exact=exact, checks=True, device="vgpu")
    assert result.ok, result.findings


def test_policy_plain_keeps_negative_zero_and_latent_does_not() -> None:
    """Sums that round to -0.0: "plain" publishes 0x8000, "latent" +0.0, and nothing else differs."""
    results = {
        policy: run_producer(
            batch=3, inputs="rounds_to_negative_zero", policy=policy, device="vgpu"
        ).out.view(np.uint16)
        for policy in ("plain", "latent")
    }
    negative = results["plain"] == 0x8000
    assert negative.any() and not (results["latent"] == 0x8000).any()
    np.testing.assert_array_equal(np.where(negative, 0, results["plain"]), results["latent"])


def test_exact_arithmetic_is_mmasim_end_to_end() -> None:
    """16 columns of the output (one row tile of the last CTA), computed with mmasim's Hopper instruction in
    the contract's order."""
    result = run_producer(ranks=16, batch=8, exact=True, device="vgpu", seed=3)
    x, weight = Problem(16, 8).inputs(3)
    expected = expected_bits(x, weight[-16:], 1, 4, hopper_bf16)
    np.testing.assert_array_equal(result.out[:, -16:].view(np.uint16), expected)
    assert result.arithmetic == "exact"
    fast = run_producer(ranks=16, batch=8, device="vgpu", seed=3)
    assert fast.arithmetic == "fp32"
    assert (
        fast.out.view(np.uint16) != result.out.view(np.uint16)
    ).any()  # the two arithmetics are not the same thing
