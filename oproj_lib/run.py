"""Run an engine and say whether it is right. Command line, notebooks, tests and benchmarks all come through
here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from oproj_lib import problem, vgpu
from oproj_lib.devices import choose_device
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.umma import OprojUmma
from oproj_lib.problem import N, Problem
from oproj_lib.program import Program, build_producer, build_umma, check_target

SENTINEL = np.uint32(0x80008000)
"""The armed mailbox word, two BF16 -0.0 (KERNELS: "Lamport protocol"): no published word may contain a -0.0
half."""
SLOTS = 2
"""Slots of the mailbox in a run: the kernel publishes into slot 1, and slot 0 must stay armed."""
SLOT = 1
ENGINES = ("producer", "umma")


@dataclass(frozen=True)
class RunResult:
    """One launch, checked.

    out is BF16 [batch, 7168] as published to rank 0's copy. seconds is the launch alone, without building,
    decoding and checking. findings are one line each; the objects of the virtual GPU are in `report`.
    """

    engine: str
    target: str
    device: str
    device_reason: str
    ranks: int
    batch: int
    k: int
    configuration: dict[str, int | str]
    arithmetic: str
    schedule: str
    checks: bool
    error: float
    tolerance: float
    seconds: float
    build_seconds: float
    decode_seconds: float
    findings: tuple[str, ...]
    out: np.ndarray = field(repr=False)
    program: Program = field(repr=False)
    report: vgpu.Report = field(repr=False)

    @property
    def ok(self) -> bool:
        """No findings; an error above the tolerance is one."""
        return not self.findings

    @property
    def thread_instructions(self) -> int:
        return self.report.counters.thread_instructions

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything but arrays and programs."""
        plain = (
            "engine", "target", "device", "ranks", "batch", "k", "configuration", "arithmetic",
            "schedule", "checks", "error",
            "tolerance", "seconds", "build_seconds", "decode_seconds",
        )  # fmt: skip
        finite = self.error if np.isfinite(self.error) else None
        return {
            **{name: getattr(self, name) for name in plain},
            "error": finite,
            "ok": self.ok,
            "thread_instructions": self.thread_instructions,
            "counters": self.report.counters.totals(),
            "findings": list(self.findings),
        }


def producer_for(
    k: int,
    batch: int,
    *,
    staged_blocks: int | None = None,
    rows: int | None = None,
    group_tiles: int | None = None,
    transport: str = "multicast",
    policy: str = "latent",
) -> OprojProducer:
    """The producer with these settings; what is None comes from the recommended configuration for (k, batch).

    Raises ValueError for a configuration that does not exist or does not fit the batch.
    """
    settings = OprojProducer.recommended(k, batch).settings()
    given = {"staged_blocks": staged_blocks, "rows": rows, "group_tiles": group_tiles}
    settings.update({name: value for name, value in given.items() if value is not None})
    producer = OprojProducer(
        k,
        staged_blocks=settings["staged_blocks"],
        rows=settings["rows"],
        group_tiles=settings["group_tiles"],
        transport=transport,
        policy=policy,
    )
    producer.plan(batch)
    return producer


def run_producer(
    *,
    ranks: int = 8,
    batch: int = 8,
    target: str = "sm_90a",
    device: str = "auto",
    staged_blocks: int | None = None,
    rows: int | None = None,
    group_tiles: int | None = None,
    transport: str = "multicast",
    policy: str = "latent",
    seed: int = 0,
    inputs: str = "random",
    exact: bool = False,
    checks: bool = False,
    schedule: str | int = "program",
) -> RunResult:
    """Builds the producer, runs one rank's launch over the full grid, and checks what it published.

    transport "multicast" publishes through a multicast window over `ranks` mailboxes; "unicast" through a
    table of their addresses. Raises ValueError for settings that do not exist (with the valid ones), before
    anything is built.
    """
    shape = Problem(ranks, batch)
    check_target(target)
    producer = producer_for(
        shape.k,
        batch,
        staged_blocks=staged_blocks,
        rows=rows,
        group_tiles=group_tiles,
        transport=transport_name(transport, ranks),
        policy=policy,
    )
    how = Conditions(device, target, seed, inputs, exact, checks, schedule)
    return run_engine("producer", producer, partial(build_producer, producer), shape, how)


def run_umma(
    *,
    ranks: int = 8,
    batch: int = 16,
    target: str = "sm_100a",
    device: str = "auto",
    budget: int | None = None,
    transport: str = "multicast",
    policy: str = "latent",
    seed: int = 0,
    inputs: str = "random",
    exact: bool = False,
    checks: bool = False,
    schedule: str | int = "program",
) -> RunResult:
    """`run_producer` for the tcgen05 engine; budget: bytes of the ring (None: the engine's own default).

    Raises ValueError for settings that do not exist, and for a target without tcgen05.
    """
    shape = Problem(ranks, batch)
    check_target(target)
    options: dict[str, Any] = {} if budget is None else {"budget": budget}
    engine = OprojUmma(shape.k, **options, transport=transport_name(transport, ranks), policy=policy)
    engine.plan(batch)
    how = Conditions(device, target, seed, inputs, exact, checks, schedule)
    return run_engine("umma", engine, partial(build_umma, engine), shape, how)


@dataclass(frozen=True)
class Conditions:
    """Everything about a run that is not the engine's configuration."""

    device: str
    target: str
    seed: int
    inputs: str
    exact: bool
    checks: bool
    schedule: str | int


def transport_name(transport: str, ranks: int) -> str:
    """ "unicast" means one store per rank of the run."""
    return f"unicast:{ranks}" if transport == "unicast" else transport


def run_engine(
    name: str, engine: OprojProducer, build: Callable[..., Program], shape: Problem, how: Conditions
) -> RunResult:
    """Builds, launches and judges one engine."""
    chosen, reason = choose_device(how.device, name, how.target)
    start = time.perf_counter()
    program = build(target=how.target, batch=shape.batch, mailbox_slots=SLOTS, mailbox_tokens=shape.batch)
    build_seconds = time.perf_counter() - start
    x, weight = shape.inputs(how.seed, how.inputs)
    mailboxes, report, decode_seconds = launch_on_vgpu(
        program, x, weight, ranks=shape.ranks, exact=how.exact, checks=how.checks, schedule=how.schedule
    )
    error, findings = judge(mailboxes, x, weight, engine.policy)
    return RunResult(
        engine=name,
        target=how.target,
        device=chosen,
        device_reason=reason,
        ranks=shape.ranks,
        batch=shape.batch,
        k=shape.k,
        configuration={**engine.settings(), "transport": engine.transport.name, "policy": engine.policy},
        arithmetic=report.arithmetic,
        schedule=report.schedule,
        checks=how.checks,
        error=error,
        tolerance=problem.TOLERANCE,
        seconds=report.seconds,
        build_seconds=build_seconds,
        decode_seconds=decode_seconds,
        findings=(*(one_line(finding) for finding in report.findings), *findings),
        out=np.array(mailboxes[0].array[SLOT, : shape.batch]),
        program=program,
        report=report,
    )


def one_line(finding: vgpu.Finding) -> str:
    """`race: read of ... (producer.py:310, PTX line 512, CTA 0, warp 3, lane 0)`."""
    source = finding.source.chain() if finding.source else "no source line"
    return (
        f"{finding.kind}: {finding.message} ({source}, PTX line {finding.ptx_line}, "
        f"CTA {finding.cta}, warp {finding.warp}, lane {finding.lane})"
    )


_MODULES: dict[str, vgpu.Module] = {}


def decoded(program: Program) -> vgpu.Module:
    """The decoded PTX of a program, kept for the process."""
    if program.ptx not in _MODULES:
        _MODULES[program.ptx] = vgpu.load(program.ptx)
    return _MODULES[program.ptx]


def launch_on_vgpu(
    program: Program,
    x: np.ndarray,
    weight: np.ndarray,
    *,
    ranks: int,
    exact: bool = False,
    checks: bool = False,
    schedule: str | int = "program",
    trace: int | None = None,
    ctas: int | None = None,
) -> tuple[list[vgpu.Buffer], vgpu.Report, float]:
    """Runs a producer's program as one of `ranks` virtual ranks: (every rank's mailbox, the report, seconds
    of decoding).

    x counts as written by the previous kernel: reading it before griddepcontrol.wait is a finding. trace: the
    CTA whose events the report keeps. ctas: run only that many, the first ones; the rest stays unpublished.
    """
    grid = program.grid if ctas is None else (ctas, 1, 1)
    if not 1 <= grid[0] <= program.grid[0]:
        raise ValueError(
            f"ctas = {ctas}: {program.name} has {program.grid[0]}, choose 1 to {program.grid[0]}"
        )
    vgpu.warm_up()
    start = time.perf_counter()
    module = decoded(program)
    decode_seconds = time.perf_counter() - start
    gpu = vgpu.VirtualGPU(ranks)
    x_buffer, weight_buffer = gpu.upload(x, "x"), gpu.upload(weight, "weight")
    shape = (SLOTS, int(program.config["mailbox_tokens"]), N)
    mailboxes = [
        gpu.empty(shape, ml_dtypes.bfloat16, f"mailbox of rank {rank}", rank) for rank in range(ranks)
    ]
    for mailbox in mailboxes:
        mailbox.array.view(np.uint32)[:] = SENTINEL
    if str(program.config["transport"]).startswith("unicast"):
        mc: Any = gpu.upload(
            np.array([mailbox.address for mailbox in mailboxes], np.int64), "table of mailboxes"
        )
    else:
        mc = gpu.multicast(mailboxes)
    report = gpu.launch(
        module, program.entry, grid=grid, block=program.block, args=[x_buffer, weight_buffer,
        mailboxes[0], mc, SLOT],
        dynamic_shared_bytes=program.dynamic_shared_bytes, exact=exact, checks=checks, schedule=schedule,
        predecessor_writes=(x_buffer,), trace=trace,
    )  # fmt: skip
    return mailboxes, report, decode_seconds


def judge(
    mailboxes: list[vgpu.Buffer], x: np.ndarray, weight: np.ndarray, policy: str
) -> tuple[float, list[str]]:
    """(relative Frobenius error, findings): `delivery_findings`, and the result within tolerance of
    float64."""
    batch = x.shape[0]
    findings = delivery_findings(mailboxes, batch)
    verdict = problem.check(mailboxes[0].array[SLOT, :batch], x, weight, latent=policy == "latent")
    findings += [f"wrong result: {reason}" for reason in verdict.reasons]
    return verdict.measures.relative_frobenius, findings


def delivery_findings(mailboxes: list[vgpu.Buffer], batch: int) -> list[str]:
    """Whether every element of the slot was published, nothing else was touched, and all ranks hold the
    same."""
    findings = []
    first = mailboxes[0].array.view(np.uint16)
    for mailbox in mailboxes:
        if mailbox.written is None:
            raise ValueError(
                f"{mailbox.name} was not made with VirtualGPU.empty: what was written is unknown"
            )
        written = np.asarray(mailbox.written.reshape(*mailbox.array.shape, 2).all(axis=3))
        missing = ~written[SLOT, :batch]
        if missing.any():
            token, column = np.argwhere(missing)[0]
            findings.append(
                f"unwritten output: {mailbox.name}: {int(missing.sum())} "
                f"elements never published, first token {token} column {column}"
            )
        if written[:SLOT].any() or written[SLOT, batch:].any():
            findings.append(
                f"stray write: {mailbox.name}: the kernel wrote outside slot {SLOT}, tokens 0..{batch - 1}"
            )
        if not np.array_equal(mailbox.array.view(np.uint16), first):
            findings.append(f"ranks differ: {mailbox.name} does not hold what rank 0's holds")
    return findings
