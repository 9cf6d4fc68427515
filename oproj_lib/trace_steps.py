"""A trace, sorted out: what each warp did in order, and what each barrier phase needs to complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from oproj_lib import attribution
from oproj_lib.vgpu.decode import Op
from oproj_lib.vgpu.syntax import TYPE_BYTES, Imm
from oproj_lib.vgpu.trace import ASYNC, Event, Trace

FAMILIES = (
    "arithmetic",
    "copy",
    "prefetch",
    "global memory",
    "shared memory",
    "matrix",
    "tensor memory",
    "synchronisation",
)
_SYNCHRONISATION = ("mbarrier", "bar", "barrier", "fence", "griddepcontrol", "membar")
_STORES = ("st", "red", "atom", "multimem")


@dataclass
class Step:
    """One thing that a warp does. kind: "run", "arrive" or "wait"; order: its place in the trace.

    barrier and phase: where it arrives or waits. end_order: for a wait, when it was over (-1: never).
    work: the asynchronous work that it starts. about: the (barrier, phase) that it belongs to: of a copy, where
    its arrival goes; of an MMA, the last wait. group: of a copy, the number of its commit group.
    """

    kind: str
    op: Op
    order: int
    lanes: int = 32
    barrier: str = ""
    phase: int = -1
    end_order: int = -1
    work: int = -1
    about: tuple[str, int] | None = None
    group: int = -1


@dataclass
class PhaseFacts:
    """What completes a phase: arrivals of warps, and of pieces of asynchronous work (work, warp)."""

    arrivals: int = 0
    work: set[tuple[int, int]] = field(default_factory=set)
    completed: bool = False
    order: int = -1


@dataclass
class Sorted:
    """A trace by warp and by barrier phase. finish: order in which work ended, by its number."""

    steps: dict[int, list[Step]]
    phases: dict[tuple[str, int], PhaseFacts]
    work_arrivals: dict[int, list[tuple[str, int, int, int]]]  # barrier, phase, lanes, order
    finish: dict[int, int]
    events: Sequence[Event]


def family(op: Op) -> str:
    """What kind of instruction it is, one of FAMILIES."""
    parts = op.instruction.opcode.split(".")
    head = parts[0]
    if head == "cp":
        if "prefetch" in parts:
            return "prefetch"
        return (
            "synchronisation"
            if {"mbarrier", "commit_group", "wait_group", "wait_all"} & set(parts)
            else "copy"
        )
    if head == "tcgen05":
        if parts[1].startswith("fence"):
            return "synchronisation"
        return "matrix" if parts[1] in ("mma", "commit") else "tensor memory"
    if head == "wgmma":
        return "matrix" if parts[1] in ("mma_async", "commit_group") else "synchronisation"
    if head == "mma":
        return "matrix"
    if head in _SYNCHRONISATION:
        return "synchronisation"
    if head in ("ld", "ldmatrix", "stmatrix", *_STORES):
        if "param" in parts or "const" in parts:
            return "arithmetic"
        return (
            "shared memory"
            if any(p.startswith("shared") for p in parts) or "matrix" in head
            else "global memory"
        )
    return "arithmetic"


def access_bytes(op: Op) -> int:
    """Bytes that one lane moves."""
    parts = op.instruction.opcode.split(".")
    if parts[0] == "cp":
        operand = op.instruction.operands[1 if "prefetch" in parts else 2]
        if not isinstance(operand, Imm):
            raise ValueError(f"{op.instruction.text}: the number of bytes is not a literal")
        return int(operand.value)
    vector = next((int(p[1:]) for p in parts if p in ("v2", "v4", "v8")), 1)
    return vector * TYPE_BYTES.get(parts[-1], 4)


def function(op: Op) -> str:
    """The Python function that an instruction comes from; "" outside this package."""
    source = op.instruction.source
    return attribution.function_of(source) if source and source.file.startswith("oproj_lib/") else ""


def sort_out(trace: Trace) -> Sorted:
    """Reads a trace once, front to back."""
    found = Sorted({}, {}, {}, {}, trace.events)
    started: dict[int, list[int]] = {}
    open_waits: dict[tuple[int, int, str, int], Step] = {}
    for event in trace.events:
        steps = found.steps.setdefault(event.warp, []) if event.warp != ASYNC else []
        match event.kind:
            case "execute" if event.op.control != "wait":  # a wait shows as "wait" and "pass"
                steps.append(Step("run", event.op, event.order, event.lanes))
            case "start":
                steps[-1].work = event.work
                started.setdefault(event.work, []).append(event.warp)
            case "finish":
                found.finish[event.work] = event.order
            case "wait" | "pass":
                key = (event.warp, event.op.index, event.barrier, event.phase)
                if key not in open_waits:
                    open_waits[key] = _step(steps, "wait", event)
                if event.kind == "pass":
                    open_waits.pop(key).end_order = event.order
            case "arrive" | "arrive and wait":
                _arrival(found, started, steps, event)
                if event.kind == "arrive and wait":
                    key = (event.warp, -1, event.barrier, event.phase)
                    open_waits[key] = _step(steps, "wait", event)
            case "complete":
                facts = found.phases.setdefault((event.barrier, event.phase), PhaseFacts())
                facts.completed, facts.order = True, event.order
                for key in [k for k in open_waits if k[1:] == (-1, event.barrier, event.phase)]:
                    open_waits.pop(key).end_order = event.order
    _relate(found)
    return found


def _step(steps: list[Step], kind: str, event: Event) -> Step:
    steps.append(Step(kind, event.op, event.order, event.lanes, event.barrier, event.phase))
    return steps[-1]


def _arrival(found: Sorted, started: dict[int, list[int]], steps: list[Step], event: Event) -> None:
    facts = found.phases.setdefault((event.barrier, event.phase), PhaseFacts())
    if event.work >= 0:
        facts.work |= {(event.work, warp) for warp in started.get(event.work, [])}
        place = (event.barrier, event.phase, event.lanes, event.order)
        found.work_arrivals.setdefault(event.work, []).append(place)
    else:
        facts.arrivals += 1
        _step(steps, "arrive", event)


def _relate(found: Sorted) -> None:
    """Which phase or group every copy and every MMA belongs to."""
    for steps in found.steps.values():
        target: tuple[str, int] | None = None
        for step in reversed(steps):
            if step.op.instruction.opcode.startswith("cp.async.mbarrier"):
                places = found.work_arrivals.get(step.work)
                target = places[0][:2] if places else None
            if family(step.op) == "copy":
                step.about = target
        last, group = None, 0
        for step in steps:
            if step.kind == "wait" and step.barrier.startswith("mbarrier"):
                last = (step.barrier, step.phase)
            opcode = step.op.instruction.opcode
            if family(step.op) == "matrix" or opcode.startswith(("cp.async.mbarrier", "fence")):
                step.about = step.about or last
            if opcode.startswith("cp.async.mbarrier"):
                places = found.work_arrivals.get(step.work)
                step.about = places[0][:2] if places else None
            step.group = group
            if opcode.startswith(("cp.async.commit_group", "cp.async.wait_all")):
                group += 1
