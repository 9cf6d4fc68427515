"""Run the broken UMMA kernels and say what they are reported for."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from oproj_lib import vgpu
from oproj_lib.lessons.broken_umma import BROKEN_UMMA
from oproj_lib.traced import trace_engine

TARGET = "sm_100a"


@dataclass(frozen=True)
class MistakeReport:
    """A broken kernel: what it does, the finding that names its mistake, and all findings of the launch."""

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
    report = trace_engine(engine, target=TARGET, batch=broken.batch, checks=True).report
    named = [finding for finding in report.findings if finding.kind == broken.kind]
    if not named:
        raise RuntimeError(f"{name}: expected {broken.kind}, found {[f.kind for f in report.findings]}")
    first = named[0]
    return MistakeReport(name, story, first.kind, first.message, str(first.source), report.findings)
