"""Run an engine and say whether it is right. Command line, notebooks, tests and benchmarks all come through
here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from oproj_lib import presets, problem, vgpu
from oproj_lib.delivery import SENTINEL, SLOT, SLOTS, Mailbox, judge
from oproj_lib.delivery import delivery_findings as delivery_findings
from oproj_lib.devices import choose_device
from oproj_lib.problem import N, Problem
from oproj_lib.program import Program, build_producer, build_umma, build_wgmma, check_target

if TYPE_CHECKING:  # these need CuTe DSL; launching a saved program does not
    from oproj_lib.devices import publishing as cuda_publishing
    from oproj_lib.devices.cuda import Gpu
    from oproj_lib.kernels.producer import OprojProducer
    from oproj_lib.kernels.ring_engine import RingEngine

ENGINES = ("producer", "umma", "wgmma")


@dataclass(frozen=True)
class RunResult:
    """One launch, checked.

    out is BF16 [batch, 7168] as published to rank 0's copy. seconds is the launch alone, without building,
    decoding and checking; on a GPU by the host's clock, so it says little about the kernel. findings are one
    line each; the objects of the virtual GPU are in `report`. chosen: which preset chose the engine and why,
    empty where the caller did.
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
    vgpu_report: vgpu.Report | None = field(repr=False)
    chosen: str = ""

    @property
    def report(self) -> vgpu.Report:
        """Counters and findings of the virtual GPU. Raises ValueError for a run on hardware, which has none."""
        if self.vgpu_report is None:
            raise ValueError(
                "a run on hardware has no report: counters, traces and findings come from the virtual GPU; run "
                "with device = 'vgpu'"
            )
        return self.vgpu_report

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
            "schedule", "checks", "chosen", "error",
            "tolerance", "seconds", "build_seconds", "decode_seconds",
        )  # fmt: skip
        finite = self.error if np.isfinite(self.error) else None
        counters = self.vgpu_report.counters if self.vgpu_report else None
        return {
            **{name: getattr(self, name) for name in plain},
            "error": finite,
            "ok": self.ok,
            "thread_instructions": counters.thread_instructions if counters else None,
            "counters": counters.totals() if counters else None,
            "findings": list(self.findings),
        }


def producer_for(
    k: int,
    batch: int,
    *,
    staged_blocks: int | None = None,
    rows: int | None = None,
    group_tiles: int | None = None,
    preset: str = "recommended",
    target: str = presets.RECORDED_TARGET,
    transport: str = "multicast",
    policy: str = "latent",
) -> OprojProducer:
    """The producer with these settings; what is None comes from the preset for k, batch and target, see `presets`.

    Raises ValueError for a configuration that does not exist or does not fit the batch, and for a preset that is
    another engine.
    """
    from oproj_lib.kernels.direct import OprojProducerDirect
    from oproj_lib.kernels.producer import OprojProducer

    chosen = presets.preset(preset, k, batch, target)
    if chosen.engine not in presets.PRODUCERS:
        raise ValueError(
            f"preset = {preset!r} at K = {k}, M = {batch} is engine {chosen.engine}, no producer: use run_projection "
            "(on the command line: no --engine), or preset = 'recommended'"
        )
    given = {"staged_blocks": staged_blocks, "rows": rows, "group_tiles": group_tiles}
    settings: dict[str, Any] = {
        **chosen.settings,
        **{name: value for name, value in given.items() if value is not None},
    }
    kind = OprojProducerDirect if chosen.direct else OprojProducer
    producer = kind(k, transport=transport, policy=policy, **settings)
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
    preset: str | None = None,
    transport: str | None = None,
    policy: str = "latent",
    seed: int = 0,
    inputs: str = "random",
    exact: bool = False,
    checks: bool = False,
    schedule: str | int = "program",
) -> RunResult:
    """Builds the producer, runs one rank's launch over the full grid, and checks what it published.

    transport "multicast" publishes through a multicast window over `ranks` mailboxes; "unicast" through a
    table of their addresses; None is the first on the virtual GPU and the second on a GPU, whose mailboxes are
    all its own. preset: see `presets`; None is "recommended" where any setting is given, and the device's own
    otherwise, as far as that is a producer: `run_projection` takes the engine of the preset, too. Raises
    ValueError for settings that do not exist (with the valid ones), before anything is built.
    """
    shape = Problem(ranks, batch)
    check_target(target)
    how = Conditions(device, target, seed, inputs, exact, checks, schedule)
    where = how.place("producer", transport)
    asked = any(setting is not None for setting in (staged_blocks, rows, group_tiles))
    producer = producer_for(
        shape.k,
        batch,
        staged_blocks=staged_blocks,
        rows=rows,
        group_tiles=group_tiles,
        preset=preset or ("recommended" if asked else default_producer(where[0], shape, target)),
        target=target,
        transport=transport_name(transport, ranks, where[0]),
        policy=policy,
    )
    return run_engine("producer", producer, partial(build_producer, producer), shape, how, where)


def default_producer(device: str, shape: Problem, target: str) -> str:
    """The device's preset where it is a producer, otherwise "recommended"."""
    name = presets.default_preset(device)
    engine = presets.preset(name, shape.k, shape.batch, target).engine
    return name if engine in presets.PRODUCERS else "recommended"


def run_projection(
    *,
    ranks: int = 8,
    batch: int = 8,
    target: str = "sm_90a",
    device: str = "auto",
    preset: str | None = None,
    transport: str | None = None,
    policy: str = "latent",
    seed: int = 0,
    inputs: str = "random",
    exact: bool = False,
    checks: bool = False,
    schedule: str | int = "program",
) -> RunResult:
    """Runs the engine and settings of a preset; None is the device's own: on a GPU "tuned", whose engine depends on
    K and M (see `presets`), on the virtual GPU "recommended". `RunResult.chosen` says which and why.

    Raises ValueError for an unknown preset and whatever the engine refuses.
    """
    shape = Problem(ranks, batch)
    check_target(target)
    how = Conditions(device, target, seed, inputs, exact, checks, schedule)
    name = preset or presets.default_preset(how.place("producer", transport)[0])
    chosen = presets.preset(name, shape.k, batch, target)
    run: Callable[..., RunResult] = run_wgmma
    settings: dict[str, Any] = {**chosen.settings}
    if chosen.engine in presets.PRODUCERS:
        run, settings = run_producer, {"preset": name if chosen.direct else "recommended", **chosen.settings}
    result = run(
        **settings, ranks=ranks, batch=batch, target=target, device=device, transport=transport, policy=policy,
        seed=seed, inputs=inputs, exact=exact, checks=checks, schedule=schedule,
    )  # fmt: skip
    return replace(result, chosen=f"preset {name!r}: engine {chosen.engine}, {chosen.why}")


def run_umma(
    *,
    ranks: int = 8,
    batch: int = 16,
    target: str = "sm_100a",
    device: str = "auto",
    budget: int | None = None,
    transport: str | None = None,
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
    from oproj_lib.kernels.umma import OprojUmma

    how = Conditions(device, target, seed, inputs, exact, checks, schedule)
    return run_ring("umma", OprojUmma, build_umma, Problem(ranks, batch), budget, transport, policy, how)


def run_wgmma(
    *,
    ranks: int = 8,
    batch: int = 16,
    target: str = "sm_90a",
    device: str = "auto",
    budget: int | None = None,
    transport: str | None = None,
    policy: str = "latent",
    seed: int = 0,
    inputs: str = "random",
    exact: bool = False,
    checks: bool = False,
    schedule: str | int = "program",
) -> RunResult:
    """`run_umma` for Hopper's wgmma engine.

    Raises ValueError for settings that do not exist, and for a target without wgmma.
    """
    from oproj_lib.kernels.wgmma import OprojWgmma

    how = Conditions(device, target, seed, inputs, exact, checks, schedule)
    return run_ring("wgmma", OprojWgmma, build_wgmma, Problem(ranks, batch), budget, transport, policy, how)


def run_ring(
    name: str,
    kind: type[RingEngine],
    build: Callable[..., Program],
    shape: Problem,
    budget: int | None,
    transport: str | None,
    policy: str,
    how: Conditions,
) -> RunResult:
    """What the engines with a ring have in common: checks the settings, then `run_engine`."""
    check_target(how.target)
    where = how.place(name, transport)
    options: dict[str, Any] = {} if budget is None else {"budget": budget}
    engine = kind(
        shape.k, **options, transport=transport_name(transport, shape.ranks, where[0]), policy=policy
    )
    engine.plan(shape.batch)
    return run_engine(name, engine, partial(build, engine), shape, how, where)


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

    def place(self, engine: str, transport: str | None) -> tuple[str, str]:
        """("vgpu" or "cuda", why), given what only the virtual GPU can do. Raises DeviceError."""
        vgpu_only = {
            "checks = True: undefined data and races are tracked by the virtual GPU only": self.checks,
            "exact = True chooses an arithmetic of the virtual GPU; hardware has its own": self.exact,
            f"schedule = {self.schedule!r}: only the virtual GPU's order of warps can be chosen": self.schedule
            != "program",
            "transport = 'multicast' needs a multicast address over several GPUs": transport == "multicast",
        }
        wanted = tuple(why for why, asked in vgpu_only.items() if asked)
        return choose_device(self.device, engine, self.target, vgpu_only=wanted)


def transport_name(transport: str | None, ranks: int, device: str = "vgpu") -> str:
    """ "unicast" means one store per rank of the run; None is the device's own."""
    chosen = transport or ("unicast" if device == "cuda" else "multicast")
    return f"unicast:{ranks}" if chosen == "unicast" else chosen


def run_engine(
    name: str,
    engine: OprojProducer,
    build: Callable[..., Program],
    shape: Problem,
    how: Conditions,
    where: tuple[str, str],
) -> RunResult:
    """Builds, launches and judges one engine. where: the device and the reason for it."""
    chosen, reason = where
    start = time.perf_counter()
    program = build(target=how.target, batch=shape.batch, mailbox_slots=SLOTS, mailbox_tokens=shape.batch)
    build_seconds = time.perf_counter() - start
    x, weight = shape.inputs(how.seed, how.inputs)
    mailboxes: Sequence[Mailbox]
    report, decode_seconds = None, 0.0
    if chosen == "cuda":
        mailboxes, seconds = launch_on_cuda(program, x, weight)
    else:
        mailboxes, report, decode_seconds = launch_on_vgpu(
            program, x, weight, ranks=shape.ranks, exact=how.exact, checks=how.checks, schedule=how.schedule
        )
        seconds = report.seconds
    error, findings = judge(mailboxes, x, weight, engine.policy)
    return RunResult(
        engine=name,
        target=how.target,
        device=chosen,
        device_reason=reason,
        ranks=shape.ranks,
        batch=shape.batch,
        k=shape.k,
        configuration={
            **engine.settings(),
            **({"direct": 1} if program.config.get("direct") else {}),
            "transport": engine.transport.name,
            "policy": engine.policy,
        },
        arithmetic=report.arithmetic if report else "hardware",
        schedule=report.schedule if report else "hardware",
        checks=how.checks,
        error=error,
        tolerance=problem.TOLERANCE,
        seconds=seconds,
        build_seconds=build_seconds,
        decode_seconds=decode_seconds,
        findings=(*(one_line(finding) for finding in (report.findings if report else ())), *findings),
        out=np.array(mailboxes[0].array[SLOT, : shape.batch]),
        program=program,
        vgpu_report=report,
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


def launch_on_cuda(
    program: Program, x: np.ndarray, weight: np.ndarray, *, gpu: Gpu | None = None
) -> tuple[list[cuda_publishing.Mailbox], float]:
    """Runs a program built for the unicast transport on a GPU, by default the first: (every rank's mailbox,
    seconds by the host's clock).

    Raises ValueError for a program of another target or transport, CudaError when the GPU refuses.
    """
    from oproj_lib.devices import cuda, publishing

    publisher = publishing.Publisher(program, gpu or cuda.Gpu())
    device = publisher.gpu.tensors
    mailboxes, seconds = publisher.run(publishing.upload(x, device), publishing.upload(weight, device), SLOT)
    publisher.close()
    return mailboxes, seconds
