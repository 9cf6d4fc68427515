"""The UMMA engine's PTX on the virtual GPU: right against float64, the same bits whatever M, stages and
schedule, and a finding for every way to break it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from mmasim_oracle import blackwell_bf16
from ring_engines import (
    FEW,
    assert_close,
    bits,
    check_found,
    check_independence,
    check_marked,
    check_silent,
    engine,
    inputs,
    launch,
)

from oproj_lib.kernels.umma import OprojUmma
from oproj_lib.lessons.broken_umma import BROKEN_UMMA
from oproj_lib.problem import TOLERANCE, Problem
from oproj_lib.run import judge, run_umma

BATCHES = (1, 7, 8, 9, 16, 33, 64)
STAGES = (1, 2, 3, 12)
FULL_GRID = {(1, 1), (7, 12), (8, 2), (9, 3), (16, 1), (33, 2), (64, 3), (64, 12)}
"""Every M; every number of stages with both K and both transports. `make test-all` runs all pairs."""


def often(always: bool, *values: object) -> object:
    """A parameter set of every run, or of the exhaustive one alone."""
    return pytest.param(*values, marks=() if always else pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("batch", "stages"),
    [often((batch, stages) in FULL_GRID, batch, stages) for batch in BATCHES for stages in STAGES],
)
def test_full_grid_is_right(batch: int, stages: int) -> None:
    """Every element written, nothing else touched, both ranks alike, error below the tolerance."""
    k = 1536 if (batch + stages) % 2 else 768
    transport = "unicast:2" if batch % 2 else "multicast"
    mailboxes, report = launch(engine(OprojUmma, k, batch, stages, transport), batch)
    report.raise_for_findings()
    x, weight, _ = inputs(k)
    error, findings = judge(mailboxes, x[:batch], weight, "latent")
    assert not findings and error < TOLERANCE


SILENT = [(768, 1, 1), (768, 8, 12), (768, 9, 2), (768, 33, 3), (768, 64, 1), (1536, 16, 5), (1536, 64, 11)]


@pytest.mark.parametrize(
    ("k", "batch", "stages", "transport"),
    [
        often((number % 2 == 0) == (transport == "multicast"), *sizes, transport)
        for number, sizes in enumerate(SILENT)
        for transport in ("multicast", "unicast:2")
    ],
)
def test_all_checks_are_silent(k: int, batch: int, stages: int, transport: str) -> None:
    check_silent(engine(OprojUmma, k, batch, stages, transport), batch, seed=batch + stages)


def test_a_token_does_not_depend_on_the_others() -> None:
    check_independence(OprojUmma, stages=12)


def test_more_than_64_tokens() -> None:
    """M = 72 reads tensor memory in two rounds; n = 72 is loaded as 64 and 8 columns."""
    rng = np.random.default_rng(5)
    _, weight, _ = inputs(768)
    x = rng.standard_normal((72, 768)).astype(weight.dtype)
    mailboxes, report = launch(OprojUmma(768), 72, FEW, x=x, checks=True)
    report.raise_for_findings()
    assert_close(bits(mailboxes, 72, FEW), x.astype(np.float64) @ weight[: 64 * FEW].astype(np.float64).T)


@pytest.mark.parametrize("kind", ["inf", "nan", "negative_zero", "rounds_to_negative_zero", "subnormal"])
def test_nasty_inputs(kind: str) -> None:
    x, weight = Problem(16, 9).inputs(3, kind)
    mailboxes, report = launch(engine(OprojUmma, 768, 9, 3), 9, x=x, weight=weight, exact=True)
    report.raise_for_findings()
    assert judge(mailboxes, x, weight, "latent")[1] == []


@pytest.mark.parametrize("name", BROKEN_UMMA)
def test_every_mistake_is_found(name: str) -> None:
    broken = BROKEN_UMMA[name]
    check_found(broken.build(), broken.batch, broken.kind, getattr(broken.engine, broken.method))


@pytest.mark.parametrize("name", BROKEN_UMMA)
def test_every_mistake_is_marked(name: str) -> None:
    check_marked(BROKEN_UMMA[name].engine)


def test_exact_arithmetic_is_mmasim_end_to_end() -> None:
    """64 columns of the output (the last CTA): K in steps of 16, in order, with mmasim's tcgen05 instruction."""
    result = run_umma(ranks=16, batch=8, exact=True, device="vgpu", seed=3)
    x, weight = (array.astype(np.float32) for array in Problem(16, 8).inputs(3))
    total = np.zeros((8, 64), np.float32)
    for k in range(0, x.shape[1], 16):
        total = blackwell_bf16(total, x[:, k : k + 16], weight[-64:, k : k + 16])
    expected = total.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(
        result.out[:, -64:].view(np.uint16), np.where(expected == 0x8000, 0, expected)
    )
