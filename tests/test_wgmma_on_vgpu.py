"""The wgmma engine's PTX on the virtual GPU: right against float64, the same bits whatever M, stages and
schedule, and a finding for every way to break it."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from mmasim_oracle import hopper_wgmma_bf16

from oproj_lib import vgpu
from oproj_lib.kernels.wgmma import OprojWgmma
from oproj_lib.layouts import ring
from oproj_lib.lessons.broken_wgmma import BROKEN_WGMMA, BrokenWgmma
from oproj_lib.problem import TOLERANCE, Problem, reference
from oproj_lib.program import build_wgmma
from oproj_lib.run import SLOT, SLOTS, judge, launch_on_vgpu, run_producer, run_wgmma

RANKS = {1536: 8, 768: 16}
FEW = 2
"""CTAs of the launches with all checks: each does the same on its own rows."""


@cache
def inputs(k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x of 64 tokens, W, and the float64 result."""
    x, weight = Problem(RANKS[k], 64).inputs(11)
    return x, weight, reference(x, weight)


def engine(k: int, batch: int, stages: int, transport: str = "multicast") -> OprojWgmma:
    budget = stages * ring.stage_bytes(ring.padded_tokens(batch))
    return OprojWgmma(k, budget=budget, transport=transport)


def launch(
    kernel: OprojWgmma,
    batch: int,
    ctas: int | None = None,
    *,
    x: np.ndarray | None = None,
    weight: np.ndarray | None = None,
    checks: bool = False,
    schedule: str | int = "program",
    exact: bool = False,
    cached: bool = True,
) -> tuple[list[vgpu.Buffer], vgpu.Report]:
    """Run on 2 virtual ranks, by default with as many tokens of ``inputs`` as the batch has."""
    program = build_wgmma(
        kernel, target="sm_90a", batch=batch, mailbox_slots=SLOTS, mailbox_tokens=batch,
        cache="default" if cached else None,
    )  # fmt: skip
    own_x, own_weight, _ = inputs(kernel.config.k)
    mailboxes, report, _ = launch_on_vgpu(
        program, own_x[:batch] if x is None else x, own_weight if weight is None else weight, ranks=2,
        ctas=ctas, checks=checks, schedule=schedule, exact=exact,
    )  # fmt: skip
    return mailboxes, report


def bits(mailboxes: list[vgpu.Buffer], batch: int, ctas: int) -> np.ndarray:
    """What rank 0 received in the columns of the first CTAs."""
    return np.array(mailboxes[0].array[SLOT, :batch, : 64 * ctas]).view(np.uint16)


def as_floats(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32) << 16).view(np.float32)


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
    kernel = engine(k, batch, stages, transport) if stages else OprojWgmma(k, transport=transport)
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
    kernel = engine(k, batch, stages, transport)
    mailboxes, report = launch(kernel, batch, FEW, checks=True)
    report.raise_for_findings()
    again, report = launch(kernel, batch, FEW, checks=True, schedule=batch + stages)
    report.raise_for_findings()
    np.testing.assert_array_equal(bits(mailboxes, batch, FEW), bits(again, batch, FEW))
    expected = inputs(k)[2][:batch, : 64 * FEW]
    got = as_floats(bits(mailboxes, batch, FEW))
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < TOLERANCE


def test_a_token_does_not_depend_on_the_others() -> None:
    """Exact arithmetic: the same bits for M = 1, 9, 33 and 64, for 1, 2 and 11 stages, for both transports."""
    whole = bits(launch(engine(768, 64, 11), 64, FEW, exact=True)[0], 64, FEW)
    for batch, stages, transport in ((1, 1, "multicast"), (9, 12, "unicast:2"), (33, 2, "unicast:2")):
        kernel = engine(768, batch, stages, transport)
        some = bits(launch(kernel, batch, FEW, exact=True)[0], batch, FEW)
        np.testing.assert_array_equal(some, whole[:batch])


def test_neighbours_of_nan_and_rows_beyond_the_batch_do_not_matter() -> None:
    """Tokens 9 to 15 share the x tile with the first nine. As NaN, and as rows that were never written (M = 9),
    they leave the others' bits alone."""
    x, _, _ = inputs(768)
    poisoned = np.concatenate([x[:9], np.full((7, 768), np.nan, x.dtype)])
    with_nan = bits(launch(engine(768, 16, 3), 16, FEW, x=poisoned)[0], 16, FEW)
    assert np.isnan(as_floats(with_nan[9:])).all()
    np.testing.assert_array_equal(with_nan[:9], bits(launch(engine(768, 9, 3), 9, FEW)[0], 9, FEW))


def test_more_than_64_tokens() -> None:
    """M = 200: 100 accumulators per thread."""
    rng = np.random.default_rng(5)
    _, weight, _ = inputs(768)
    x = rng.standard_normal((200, 768)).astype(weight.dtype)
    mailboxes, report = launch(OprojWgmma(768), 200, 1, x=x, checks=True)
    report.raise_for_findings()
    got = as_floats(bits(mailboxes, 200, 1))
    expected = x.astype(np.float64) @ weight[:64].astype(np.float64).T
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < TOLERANCE


@pytest.mark.parametrize(
    "kind",
    [
        "nan", "rounds_to_negative_zero", "subnormal",
        *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("inf", "negative_zero")),
    ],
)  # fmt: skip
def test_nasty_inputs(kind: str) -> None:
    x, weight = Problem(16, 9).inputs(3, kind)
    mailboxes, report = launch(engine(768, 9, 3), 9, x=x, weight=weight, exact=True)
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


def lines_of(broken: BrokenWgmma) -> tuple[str, range]:
    """File name and lines of the method to which the finding must point."""
    method = inspect.unwrap(getattr(OprojWgmma, broken.method))
    source, first = inspect.getsourcelines(method)
    return inspect.getsourcefile(method) or "", range(first, first + len(source))


@pytest.mark.parametrize("name", BROKEN_WGMMA)
def test_every_mistake_is_found(name: str) -> None:
    broken = BROKEN_WGMMA[name]
    _, report = launch(broken.build(), broken.batch, FEW, checks=True, cached=False)
    file, lines = lines_of(broken)
    places = [
        (finding.source.file, finding.source.line)
        for finding in report.findings
        if finding.kind == broken.kind and finding.source
    ]
    assert any(file.endswith(name) and line in lines for name, line in places), report.findings


@pytest.mark.parametrize("name", BROKEN_WGMMA)
def test_every_mistake_is_marked(name: str) -> None:
    text = textwrap.dedent(inspect.getsource(BROKEN_WGMMA[name].engine))
    assert text.count("# the mistake") == 1


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
