"""Run the broken UMMA kernels and say what they are reported for."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from oproj_lib import vgpu
from oproj_lib.lessons.broken_umma import BROKEN_UMMA
from oproj_lib.problem import HIDDEN_K, Problem
from oproj_lib.run import judge, launch_on_vgpu
from oproj_lib.traced import build, trace_engine

TARGET = "sm_100a"
WRONG_RESULT = "wrong result"


@dataclass(frozen=True)
class MistakeReport:
    """A broken kernel: what it does, the finding that names its mistake, and all findings of the launch.

    For a kernel that only computes something wrong, kind is "wrong result", and message comes from the
    comparison with float64.
    """

    name: str
    story: str
    kind: str
    message: str
    where: str
    findings: tuple[vgpu.Finding, ...]


def umma_mistake(name: str) -> MistakeReport:
    """Builds and runs one of ``BROKEN_UMMA``.

    Raises ValueError for an unknown name, and RuntimeError if its mistake was not found.
    """
    if name not in BROKEN_UMMA:
        raise ValueError(f"mistake = {name!r}: choose from {', '.join(BROKEN_UMMA)}")
    broken = BROKEN_UMMA[name]
    engine, story = broken.build(), inspect.getdoc(broken.engine) or ""
    if broken.kind == WRONG_RESULT:
        return _wrong_result(name, story)
    report = trace_engine(engine, target=TARGET, batch=broken.batch, checks=True).report
    named = [finding for finding in report.findings if finding.kind == broken.kind]
    if not named:
        raise RuntimeError(f"{name}: expected {broken.kind}, found {[f.kind for f in report.findings]}")
    first = named[0]
    return MistakeReport(name, story, first.kind, first.message, str(first.source), report.findings)


def _wrong_result(name: str, story: str) -> MistakeReport:
    """What only the numbers show: the whole grid, compared with float64."""
    broken = BROKEN_UMMA[name]
    engine = broken.build()
    program = build(engine, target=TARGET, batch=broken.batch)
    ranks = HIDDEN_K // broken.k
    x, weight = Problem(ranks, broken.batch).inputs(0)
    mailboxes, report, _ = launch_on_vgpu(program, x, weight, ranks=ranks)
    error, reasons = judge(mailboxes, x, weight, engine.policy)
    if not reasons:
        raise RuntimeError(f"{name}: expected a wrong result, but the error is {error:.1e}")
    kind, _, message = reasons[0].partition(": ")
    return MistakeReport(name, story, kind, message, "the numbers", report.findings)
