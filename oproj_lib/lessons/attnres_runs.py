"""Notebook 12's experiments: virtual ranks that project, exchange and mix; and kernels that break a rule.

K is 128 on every rank, so that a run takes seconds: AttnRes does not see K.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from oproj_lib import vgpu
from oproj_lib.attnres_programs import build_attnres, build_fused_attnres
from oproj_lib.attnres_reference import BF16, AttnResInputs, findings, make_inputs
from oproj_lib.attnres_run import AttnResRanks, Call, run_attnres
from oproj_lib.kernels.attnres import AttnRes
from oproj_lib.kernels.attnres_configuration import AttnResConfiguration
from oproj_lib.kernels.attnres_fused import FusedAttnRes
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.layouts import mailbox as layout
from oproj_lib.lessons.attnres import STEPS
from oproj_lib.lessons.broken_attnres import BROKEN_ATTNRES, NeverWaits
from oproj_lib.lessons.broken_pdl import TriggersBeforeWait
from oproj_lib.problem import Array, N
from oproj_lib.program import Program, build_producer
from oproj_lib.run import one_line
from oproj_lib.trace_steps import function
from oproj_lib.vgpu.trace import Trace

FORMS = ("split", "fused")
K = 128
MOST_RANKS = 8
"""Virtual ranks: a run takes about a second each."""

# ---- virtual ranks ----


@dataclass(frozen=True)
class FormRun:
    """One call of all ranks in one form. grids: by rank, in the order of its stream. prefixes and outs: per rank,
    BF16 [M, 7168]. inputs: what AttnRes had, the slots as they arrived. findings: of the virtual GPU, and of the
    comparison with float64 on every rank; traces: of the consuming grids, if asked for."""

    form: str
    config: AttnResConfiguration
    consumer: Program
    grids: tuple[vgpu.GridHandle, ...]
    prefixes: tuple[Array, ...]
    outs: tuple[Array, ...]
    inputs: AttnResInputs
    findings: tuple[str, ...]
    traces: tuple[Trace, ...]


def run_form(
    form: str,
    config: AttnResConfiguration,
    *,
    target: str = "sm_90a",
    seed: int = 0,
    trace: int | None = None,
) -> FormRun:
    """Project, exchange and mix once on ``config.ranks`` virtual ranks. trace: of which CTA of each grid.

    Raises ValueError for an unknown form, too many ranks, and as ``AttnRes`` and ``OprojProducer``.
    """
    ranks, calls, inputs, programs = _enqueue(form, config, target, seed, trace=trace)
    reports = ranks.gpu.synchronize()
    (call,) = calls
    slots = [np.array(ranks.exchange.first.generation(rank, 0)) for rank in range(config.ranks)]
    found = [one_line(finding) for report in reports for finding in report.findings]
    for rank in range(config.ranks):
        here = replace(inputs, slots=slots[rank])
        verdict = findings(config, here, ranks.prefix[rank].array, call.out[rank].array)
        found += [f"rank {rank}: {line}" for line in verdict]
    consumers = [handle for handle in call.handles if handle.name == programs[-1].name]
    return FormRun(
        form,
        config,
        programs[-1],
        tuple(call.handles),
        tuple(buffer.array for buffer in ranks.prefix),
        tuple(buffer.array for buffer in call.out),
        replace(inputs, slots=slots[0]),
        tuple(found),
        tuple(handle.report.trace for handle in consumers if handle.report.trace is not None),
    )


def _enqueue(
    form: str,
    config: AttnResConfiguration,
    target: str,
    seed: int,
    *,
    calls: int = 1,
    engine: type[OprojProducer] = OprojProducer,
    attnres: type[AttnRes] = AttnRes,
    **options: Any,
) -> tuple[AttnResRanks, list[Call], AttnResInputs, list[Program]]:
    """Everything up to ``synchronize``. The ranks' partial sums add up to about N(0, 1)."""
    if form not in FORMS:
        raise ValueError(f"form = {form!r}: choose from {', '.join(FORMS)}")
    if not 1 <= config.ranks <= MOST_RANKS:
        raise ValueError(f"ranks = {config.ranks}: this notebook runs 1 to {MOST_RANKS} virtual ranks")
    inputs = make_inputs(config, seed)
    programs = chain(form, config, target, engine, attnres)
    ranks = AttnResRanks(config.ranks, config.tokens, inputs.prefix)
    rng = np.random.default_rng(seed)

    def normal(count: int, size: float) -> list[Array]:
        return [(rng.standard_normal((count, K)) * size).astype(BF16) for _ in range(config.ranks)]

    weights = normal(N, (K * config.ranks) ** -0.5)
    made = [
        ranks.enqueue(programs, normal(config.tokens, 1.0), weights, inputs, **options) for _ in range(calls)
    ]
    return ranks, made, inputs, programs


def chain(
    form: str,
    config: AttnResConfiguration,
    target: str,
    engine: type[OprojProducer] = OprojProducer,
    attnres: type[AttnRes] = AttnRes,
) -> list[Program]:
    """The kernels of one call on one rank, in the order of the stream."""
    settings = asdict(config)
    producer = engine(K, staged_blocks=1, generations=True)
    consumer = attnres(settings.pop("blocks"), **settings)
    if form == "fused":
        fused = FusedAttnRes(producer, consumer)
        return [build_fused_attnres(fused, target=target, mailbox_tokens=config.tokens)]
    first = build_producer(
        producer,
        target=target,
        batch=config.tokens,
        mailbox_slots=layout.slots_of(config.ranks),
        mailbox_tokens=config.tokens,
    )
    return [first, build_attnres(consumer, target=target, mailbox_tokens=config.tokens)]


def check_token(token: int, config: AttnResConfiguration) -> None:
    """Raises ValueError for a token that the batch does not have."""
    if not 0 <= token < config.tokens:
        raise ValueError(f"token = {token}: the batch has {config.tokens}, choose 0 to {config.tokens - 1}")


def steps_before_the_poll(trace: Trace) -> dict[str, bool]:
    """Whether each step of the exercise that shows in a trace is through before the first poll, in every warp.

    The trace is of a CTA that consumed a token in the split form.
    """
    first: dict[int, int] = {}
    last: dict[str, dict[int, int]] = {}
    for event in trace.events:
        if event.kind != "execute":
            continue
        where, opcode = function(event.op), event.op.instruction.opcode
        if (where, opcode.startswith("ld.relaxed.sys")) == ("poll", True):
            first.setdefault(event.warp, event.order)
        for name, step in STEPS.items():
            if step.seen and step.seen[0] == where and opcode.startswith(step.seen[1]):
                last.setdefault(name, {})[event.warp] = event.order
    return {name: all(order < first[warp] for warp, order in orders.items()) for name, orders in last.items()}


def differing(first: Array, *others: Array) -> int:
    """How many BF16 values of the others have other bits than the first has there."""
    return sum(int((first.view(np.uint16) != other.view(np.uint16)).sum()) for other in others)


# ---- rules that are broken ----

RULES: Mapping[str, tuple[type[OprojProducer], type[AttnRes]]] = {
    "as they are": (OprojProducer, AttnRes),
    "producer triggers before its wait": (TriggersBeforeWait, AttnRes),
    "AttnRes never waits": (OprojProducer, NeverWaits),
}


def order_findings(rule: str) -> tuple[vgpu.Finding, ...]:
    """Two calls of one rank in the split form, built for sm_90a, with the kernels of one of ``RULES``.

    Raises ValueError for an unknown rule.
    """
    if rule not in RULES:
        raise ValueError(f"rule = {rule!r}: choose from {', '.join(RULES)}")
    engine, attnres = RULES[rule]
    config = AttnResConfiguration(0, ranks=1, tokens=1)  # small: these rules concern prefix and mailbox
    ranks, *_ = _enqueue(
        "split", config, "sm_90a", 0, calls=2, engine=engine, attnres=attnres, counting=False
    )
    return tuple(finding for report in ranks.gpu.synchronize() for finding in report.findings)


def rules_table(found: Mapping[str, Sequence[vgpu.Finding]]) -> Table:
    """One row per rule: what is reported when it is broken."""
    table = Table(title="two calls, one after the other", show_lines=True)
    for column in ("kernels", "found", "at"):
        table.add_column(column, style="bold" if column == "kernels" else None)
    for rule, findings_ in found.items():
        first = findings_[0] if findings_ else None
        table.add_row(
            rule, f"{first.kind}: {first.message}" if first else "nothing", str(first.source) if first else ""
        )
    return table


@dataclass(frozen=True)
class BrokenRun:
    """One of ``BROKEN_ATTNRES``: what it does, on what inputs, and what is reported."""

    name: str
    story: str
    kind: str
    findings: tuple[str, ...]


def run_broken(name: str, *, seed: int = 0) -> BrokenRun:
    """Builds one of ``BROKEN_ATTNRES`` for sm_90a and runs it.

    Raises ValueError for an unknown name, RuntimeError if the mistake is not found.
    """
    if name not in BROKEN_ATTNRES:
        raise ValueError(f"mistake = {name!r}: choose from {', '.join(BROKEN_ATTNRES)}")
    broken = BROKEN_ATTNRES[name]
    run = run_attnres(broken.build(), seed=seed, kind=broken.kind, checks=True)
    if not any(broken.finding in finding for finding in run.findings):
        raise RuntimeError(f"{name}: expected a finding with {broken.finding!r}, found {run.findings}")
    return BrokenRun(name, inspect.getdoc(broken.kernel) or "", broken.kind, run.findings)


def broken_table(runs: Sequence[BrokenRun]) -> Table:
    """One row per broken kernel: inputs, and what is reported first."""
    table = Table(title="kernels that break one rule", show_lines=True)
    for column in ("mistake", "inputs", "found"):
        table.add_column(column, style="bold" if column == "mistake" else None)
    for run in runs:
        table.add_row(run.name, run.kind, run.findings[0])
    return table
