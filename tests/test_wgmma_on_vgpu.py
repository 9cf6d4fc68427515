"""The wgmma engine's PTX on the virtual GPU: right against float64, the same bits whatever M, stages and
schedule, and a finding for every way to break it."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from mmasim_oracle import hopper_wgmma_bf16
from ring_engines import (
    FEW,
    as_floats,
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

from oproj_lib.kernels.wgmma import OprojWgmma
from oproj_lib.lessons.broken_wgmma import BROKEN_WGMMA
from oproj_lib.problem import TOLERANCE, Problem
from oproj_lib.run import judge, run_producer, run_wgmma

# Every pair of (K, M), (K, stages), (M, stages class) and (stages, transport) that matters; 0: the most stages.
FULL_GRID = [
    (768, 1, 1, "unicast:2"),
    (1536, 8, 2, "multicast"),
    pytest.param(768, 9, 0, "multicast", marks=pytest.mark.exhaustive),
    pytest.param(768, 16, 1, "multicast", marks=pytest.mark.exhaustive),
    (768, 33, 2, "unicast:2"),
    (1536, 64, 0, "unicast:2"),
]


@pytest.mark.parametrize(("k", "batch", "stages", "transport"), FULL_GRID)
def test_full_grid_is_right(k: int, batch: int, stages: int, transport: str) -> None:
    """Every element written, nothing else touched, both ranks alike, error below the tolerance."""
    kernel = engine(OprojWgmma, k, batch, stages or None, transport)
    mailboxes, report = launch(kernel, batch)
    report.raise_for_findings()
    x, weight, _ = inputs(k)
    error, findings = judge(mailboxes, x[:batch], weight, "latent")
    assert not findings and error < TOLERANCE
    assert report.counters.tensor_instructions == 112 * k // 16
    assert report.counters.bank_conflicts == 0


@pytest.mark.parametrize(
    ("k", "batch", "stages", "transport"),
    [
        (768, 1, 12, "multicast"),
        (768, 8, 1, "unicast:2"),
        (768, 9, 2, "multicast"),
        (768, 33, 3, "unicast:2"),
        (768, 64, 1, "multicast"),
        pytest.param(1536, 16, 5, "multicast", marks=pytest.mark.exhaustive),
        pytest.param(1536, 64, 11, "unicast:2", marks=pytest.mark.exhaustive),
    ],
)
def test_all_checks_are_silent(k: int, batch: int, stages: int, transport: str) -> None:
    check_silent(engine(OprojWgmma, k, batch, stages, transport), batch, seed=batch + stages)


def test_a_token_does_not_depend_on_the_others() -> None:
    check_independence(OprojWgmma, stages=11)


def test_neighbours_of_nan_and_rows_beyond_the_batch_do_not_matter() -> None:
    """Tokens 9 to 15 share the x tile with the first nine. As NaN, and as rows that were never written (M = 9),
    they leave the others' bits alone."""
    x, _, _ = inputs(768)
    poisoned = np.concatenate([x[:9], np.full((7, 768), np.nan, x.dtype)])
    with_nan = bits(launch(engine(OprojWgmma, 768, 16, 3), 16, FEW, x=poisoned)[0], 16, FEW)
    assert np.isnan(as_floats(with_nan[9:])).all()
    np.testing.assert_array_equal(
        with_nan[:9], bits(launch(engine(OprojWgmma, 768, 9, 3), 9, FEW)[0], 9, FEW)
    )


def test_more_than_64_tokens() -> None:
    """M = 200: 100 accumulators per thread."""
    rng = np.random.default_rng(5)
    _, weight, _ = inputs(768)
    x = rng.standard_normal((200, 768)).astype(weight.dtype)
    mailboxes, report = launch(OprojWgmma(768), 200, 1, x=x, checks=True)
    report.raise_for_findings()
    assert_close(bits(mailboxes, 200, 1), x.astype(np.float64) @ weight[:64].astype(np.float64).T)


@pytest.mark.parametrize(
    "kind",
    [
        "nan", "rounds_to_negative_zero", "subnormal",
        *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("inf", "negative_zero")),
    ],
)  # fmt: skip
def test_nasty_inputs(kind: str) -> None:
    x, weight = Problem(16, 9).inputs(3, kind)
    mailboxes, report = launch(engine(OprojWgmma, 768, 9, 3), 9, x=x, weight=weight, exact=True)
    report.raise_for_findings()
    assert judge(mailboxes, x, weight, "latent")[1] == []


def test_it_agrees_with_the_producer() -> None:
    """Two orders of summation of the same 768 products: both are within half a BF16 step of float64, plus what
    FP32 accumulation adds, so they differ by at most one step, and rarely."""
    options = {"ranks": 16, "batch": 9, "seed": 4, "device": "vgpu"}
    one, other = run_wgmma(**options), run_producer(**options)  # type: ignore[arg-type]
    assert one.ok and other.ok
    first, second = (result.out.view(np.int16).astype(np.int32) for result in (one, other))
    assert np.abs(first - second)[np.sign(first) == np.sign(second)].max() <= 1
    assert (first != second).mean() < 0.01


@pytest.mark.parametrize("name", BROKEN_WGMMA)
def test_every_mistake_is_found(name: str) -> None:
    broken = BROKEN_WGMMA[name]
    check_found(broken.build(), broken.batch, broken.kind, getattr(OprojWgmma, broken.method))


@pytest.mark.parametrize("name", BROKEN_WGMMA)
def test_every_mistake_is_marked(name: str) -> None:
    check_marked(BROKEN_WGMMA[name].engine)


def test_unbroken_they_are_silent() -> None:
    """The same configurations without the mistakes: the findings come from those."""
    sound = {replace(broken, engine=OprojWgmma, kind="", method="") for broken in BROKEN_WGMMA.values()}
    for broken in sound:
        _, report = launch(broken.build(), broken.batch, FEW, checks=True)
        assert report.findings == ()


def test_exact_arithmetic_is_mmasim_end_to_end() -> None:
    """64 columns of the output (the last CTA): K in steps of 16, in order, with mmasim's wgmma."""
    result = run_wgmma(ranks=16, batch=8, exact=True, device="vgpu", seed=3)
    x, weight = (array.astype(np.float32) for array in Problem(16, 8).inputs(3))
    total = np.zeros((8, 64), np.float32)
    for k in range(0, x.shape[1], 16):
        total = hopper_wgmma_bf16(total, x[:, k : k + 16], weight[-64:, k : k + 16])
    expected = total.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(
        result.out[:, -64:].view(np.uint16), np.where(expected == 0x8000, 0, expected)
    )
