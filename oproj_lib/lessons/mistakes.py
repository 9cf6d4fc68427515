"""Run the broken UMMA and wgmma kernels and say what they are reported for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from oproj_lib import vgpu
from oproj_lib.lessons.broken_umma import BROKEN_UMMA
from oproj_lib.lessons.broken_wgmma import BROKEN_WGMMA
from oproj_lib.traced import trace_engine


class Broken(Protocol):
    """An entry of ``BROKEN_UMMA`` or ``BROKEN_WGMMA``."""

    @property
    def engine(self) -> type[Any]: ...
    @property
    def kind(self) -> str: ...
    @property
    def batch(self) -> int: ...
    def build(self) -> Any: ...


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
    """Builds and runs one of ``BROKEN_UMMA``. Raises as ``report_mistake``."""
    return report_mistake(name, BROKEN_UMMA, "sm_100a")


def wgmma_mistake(name: str) -> MistakeReport:
    """Builds and runs one of ``BROKEN_WGMMA``. Raises as ``report_mistake``."""
    return report_mistake(name, BROKEN_WGMMA, "sm_90a")


def report_mistake(name: str, known: Mapping[str, Broken], target: str) -> MistakeReport:
    """Builds and runs a broken kernel, by name.

    Raises ValueError for an unknown name, and RuntimeError if its mistake was not found.
    """
    if name not in known:
        raise ValueError(f"mistake = {name!r}: choose from {', '.join(known)}")
    broken = known[name]
    engine, story = broken.build(), inspect.getdoc(broken.engine) or ""
    report = trace_engine(engine, target=target, batch=broken.batch, checks=True).report
    named = [finding for finding in report.findings if finding.kind == broken.kind]
    if not named:
        raise RuntimeError(f"{name}: expected {broken.kind}, found {[f.kind for f in report.findings]}")
    first = named[0]
    return MistakeReport(name, story, first.kind, first.message, str(first.source), report.findings)
