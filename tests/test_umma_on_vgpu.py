"""The UMMA engine's PTX on the virtual GPU: right against float64, the same bits whatever M, stages and
schedule, and a finding for every way to break it."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from mmasim_oracle import blackwell_bf16

from oproj_lib import vgpu
from oproj_lib.kernels.umma import OprojUmma
from oproj_lib.layouts import ring
from oproj_lib.lessons.broken_umma import BROKEN_UMMA, BrokenUmma
from oproj_lib.problem import TOLERANCE, Problem, reference
from oproj_lib.program import build_umma
from oproj_lib.run import SLOT, SLOTS, judge, launch_on_vgpu, run_umma

RANKS = {1536: 8, 768: 16}
FEW = 2
"""CTAs of the launches with all checks: each does the same on its own rows."""


@cache
def inputs(k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x of 64 tokens, W, and the float64 result."""
    x, weight = Problem(RANKS[k], 64).inputs(11)
    return x, weight, reference(x, weight)


def engine(k: int, batch: int, stages: int, transport: str = "multicast") -> OprojUmma:
    budget = stages * ring.stage_bytes(ring.padded_tokens(batch))
    return OprojUmma(k, budget=budget, transport=transport)


def launch(
    kernel: OprojUmma,
    batch: int,
    ctas: int | None = None,
    *,
    checks: bool = False,
    schedule: str | int = "program",
    exact: bool = False,
    cached: bool = True,
) -> tuple[list[vgpu.Buffer], vgpu.Report]:
    """Run on 2 virtual ranks, with as many tokens of ``inputs`` as the batch has."""
    program = build_umma(
        kernel, target="sm_100a", batch=batch, mailbox_slots=SLOTS, mailbox_tokens=batch,
        cache="default" if cached else None,
    )  # fmt: skip
    if ctas:
        program = replace(program, grid=(ctas, 1, 1))
    x, weight, _ = inputs(kernel.config.k)
    options = {"checks": checks, "schedule": schedule, "exact": exact}
    mailboxes, report, _ = launch_on_vgpu(program, x[:batch], weight, ranks=2, **options)  # type: ignore[arg-type]
    return mailboxes, report


def bits(mailboxes: list[vgpu.Buffer], batch: int, ctas: int) -> np.ndarray:
    """What rank 0 received in the columns of the first CTAs."""
    return np.array(mailboxes[0].array[SLOT, :batch, : 64 * ctas]).view(np.uint16)


@pytest.mark.parametrize("batch", [1, 7, 8, 9, 16, 33, 64])
@pytest.mark.parametrize("stages", [1, 2, 3, 12])
def test_full_grid_is_right(batch: int, stages: int) -> None:
    """Every element written, nothing else touched, both ranks alike, error below the tolerance."""
    k = 1536 if (batch + stages) % 2 else 768
    transport = "unicast:2" if batch % 2 else "multicast"
    mailboxes, report = launch(engine(k, batch, stages, transport), batch)
    report.raise_for_findings()
    x, weight, _ = inputs(k)
    error, findings = judge(mailboxes, x[:batch], weight, "latent")
    assert not findings and error < TOLERANCE


@pytest.mark.parametrize("transport", ["multicast", "unicast:2"])
@pytest.mark.parametrize(
    ("k", "batch", "stages"),
    [(768, 1, 1), (768, 8, 12), (768, 9, 2), (768, 33, 3), (768, 64, 1), (1536, 16, 5), (1536, 64, 11)],
)
def test_all_checks_are_silent(k: int, batch: int, stages: int, transport: str) -> None:
    kernel = engine(k, batch, stages, transport)
    mailboxes, report = launch(kernel, batch, FEW, checks=True)
    report.raise_for_findings()
    again, report = launch(kernel, batch, FEW, checks=True, schedule=batch + stages)
    report.raise_for_findings()
    np.testing.assert_array_equal(bits(mailboxes, batch, FEW), bits(again, batch, FEW))
    expected = inputs(k)[2][:batch, : 64 * FEW]
    got = (bits(mailboxes, batch, FEW).astype(np.uint32) << 16).view(np.float32)
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < TOLERANCE


def test_a_token_does_not_depend_on_the_others() -> None:
    """Exact arithmetic: the same bits for M = 1, 9, 33 and 64, for 1 and 12 stages, for both transports."""
    whole = bits(launch(engine(768, 64, 12), 64, FEW, exact=True)[0], 64, FEW)
    for batch, stages, transport in ((1, 1, "multicast"), (9, 12, "unicast:2"), (33, 2, "unicast:2")):
        kernel = engine(768, batch, stages, transport)
        some = bits(launch(kernel, batch, FEW, exact=True)[0], batch, FEW)
        np.testing.assert_array_equal(some, whole[:batch])


def test_more_than_64_tokens() -> None:
    """M = 72 reads tensor memory in two rounds; n = 72 is loaded as 64 and 8 columns."""
    rng = np.random.default_rng(5)
    _, weight, _ = inputs(768)
    x = rng.standard_normal((72, 768)).astype(weight.dtype)
    program = build_umma(OprojUmma(768), target="sm_100a", batch=72, mailbox_slots=SLOTS, mailbox_tokens=72)
    program = replace(program, grid=(FEW, 1, 1))
    mailboxes, report, _ = launch_on_vgpu(program, x, weight, ranks=2, checks=True)
    report.raise_for_findings()
    got = (bits(mailboxes, 72, FEW).astype(np.uint32) << 16).view(np.float32)
    expected = x.astype(np.float64) @ weight[: 64 * FEW].astype(np.float64).T
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < TOLERANCE


@pytest.mark.parametrize("kind", ["inf", "nan", "negative_zero", "rounds_to_negative_zero", "subnormal"])
def test_nasty_inputs(kind: str) -> None:
    x, weight = Problem(16, 9).inputs(3, kind)
    program = build_umma(engine(768, 9, 3), target="sm_100a", batch=9, mailbox_slots=SLOTS, mailbox_tokens=9)
    mailboxes, report, _ = launch_on_vgpu(program, x, weight, ranks=2, exact=True)
    report.raise_for_findings()
    assert judge(mailboxes, x, weight, "latent")[1] == []


def lines_of(broken: BrokenUmma) -> tuple[str, range]:
    """File name and lines of the method to which the finding must point."""
    method = inspect.unwrap(getattr(broken.engine, broken.method))
    source, first = inspect.getsourcelines(method)
    return inspect.getsourcefile(method) or "", range(first, first + len(source))


@pytest.mark.parametrize("name", BROKEN_UMMA)
def test_every_mistake_is_found(name: str) -> None:
    broken = BROKEN_UMMA[name]
    _, report = launch(broken.build(), broken.batch, FEW, checks=True, cached=False)
    file, lines = lines_of(broken)
    places = [
        (finding.source.file, finding.source.line)
        for finding in report.findings
        if finding.kind == broken.kind and finding.source
    ]
    assert any(file.endswith(name) and line in lines for name, line in places), report.findings


@pytest.mark.parametrize("name", BROKEN_UMMA)
def test_every_mistake_is_marked(name: str) -> None:
    text = textwrap.dedent(inspect.getsource(BROKEN_UMMA[name].engine))
    assert text.count("# the mistake") == 1


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
