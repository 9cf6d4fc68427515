"""One CTA of an engine, run and traced: what timelines are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from oproj_lib import vgpu
from oproj_lib.cost_model import CostModel
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.ring_engine import RingEngine
from oproj_lib.kernels.umma import OprojUmma
from oproj_lib.kernels.wgmma import OprojWgmma
from oproj_lib.layouts import ring
from oproj_lib.problem import HIDDEN_K, Problem
from oproj_lib.program import Program, build_producer, build_umma, build_wgmma
from oproj_lib.replay import logical, modelled
from oproj_lib.run import SLOTS, launch_on_vgpu
from oproj_lib.timeline import Legend, Timeline, producer_legend, umma_legend, wgmma_legend
from oproj_lib.vgpu.trace import Trace

Engine = TypeVar("Engine", bound=RingEngine)


@dataclass(frozen=True)
class Traced:
    """A traced launch of the first CTAs of an engine; the trace is that of CTA 0."""

    engine: OprojProducer
    program: Program
    report: vgpu.Report

    @property
    def trace(self) -> Trace:
        trace = self.report.trace
        if trace is None:
            raise RuntimeError("the virtual GPU returned no trace, although one was asked for")
        return trace

    @property
    def legend(self) -> Legend:
        """Names of warps and barriers."""
        if isinstance(self.engine, RingEngine):
            legend = umma_legend if isinstance(self.engine, OprojUmma) else wgmma_legend
            return legend(self.trace, self.engine.plan(int(self.program.config["batch"])).stages)
        return producer_legend(self.trace.warps_per_cta)

    def logical(self) -> Timeline:
        return logical(self.trace, self.legend)

    def modelled(self, model: CostModel | None = None) -> Timeline:
        return modelled(self.trace, self.legend, model)


def build(engine: OprojProducer, *, target: str, batch: int) -> Program:
    """The program of any engine. Raises ValueError for what the engine or the target cannot do."""
    options: dict[str, Any] = {
        "target": target, "batch": batch, "mailbox_slots": SLOTS, "mailbox_tokens": batch
    }  # fmt: skip
    if isinstance(engine, OprojUmma):
        return build_umma(engine, **options)
    if isinstance(engine, OprojWgmma):
        return build_wgmma(engine, **options)
    return build_producer(engine, **options)


def trace_engine(
    engine: OprojProducer,
    *,
    target: str,
    batch: int,
    program: Program | None = None,
    seed: int = 0,
    ctas: int = 1,
    checks: bool = False,
    schedule: str | int = "program",
) -> Traced:
    """Runs the first ``ctas`` CTAs of an engine on the virtual GPU and traces CTA 0; all CTAs do the same.

    program: what to run instead of the engine's own build, a mutant of it for instance. A kernel with
    findings is traced like any other: look at ``report.findings``.
    """
    program = program or build(engine, target=target, batch=batch)
    ranks = HIDDEN_K // engine.config.k
    x, weight = Problem(ranks, batch).inputs(seed)
    _, report, _ = launch_on_vgpu(
        program, x, weight, ranks=ranks, checks=checks, schedule=schedule, trace=0, ctas=ctas
    )
    return Traced(engine, program, report)


def umma_with_stages(k: int, batch: int, stages: int) -> OprojUmma:
    """``engine_with_stages`` for the UMMA engine."""
    return engine_with_stages(OprojUmma, k, batch, stages)


def wgmma_with_stages(k: int, batch: int, stages: int) -> OprojWgmma:
    """``engine_with_stages`` for the wgmma engine."""
    return engine_with_stages(OprojWgmma, k, batch, stages)


def engine_with_stages(kind: type[Engine], k: int, batch: int, stages: int) -> Engine:
    """The engine whose ring has exactly this many stages.

    Raises ValueError when no budget gives that many, with the numbers that exist.
    """
    stage = ring.stage_bytes(ring.padded_tokens(batch))
    most = k // ring.TILE_K
    possible = []
    for count in range(1, most + 1):
        try:
            engine = kind(k, budget=count * stage)
            engine.plan(batch)
        except ValueError:
            break  # more do not fit either
        if count == stages:
            return engine
        possible.append(count)
    raise ValueError(
        f"stages = {stages}: a stage at batch {batch} has {stage} bytes and k = {k} has {most} K blocks; "
        f"choose 1 to {possible[-1] if possible else 0}"
    )
