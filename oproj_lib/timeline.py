"""What happened when: a trace of the virtual GPU as one table, in logical steps or in modelled cycles.

A trace has order, but no time. `logical` shows that order as it is: one step per event, asynchronous work
finishing as late as it may. `modelled` replays what each warp did with the costs of a `CostModel`: a warp goes
on when the phase it waits for completes, copies share bandwidth, tensor-core operations run one after another.
Both give the same table of intervals, so every picture and export takes either.

Modelled times are for seeing who waits for whom. They are not measurements.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from oproj_lib.layouts import ring
from oproj_lib.vgpu.trace import Trace

ASYNCHRONOUS = -1
"""The warp of what runs beside the warps."""
STEPS, CYCLES = "logical steps", "modelled cycles"
MODELLED_NS, RECORDED_NS = "modelled ns", "ns, recorded on hardware"
"""Clocks: what one unit of a timeline's start and end is, and where it comes from."""
RUN, WAIT, STALL, FLIGHT = "run", "wait", "stall", "in flight"
"""Kinds: a warp issues instructions, waits for a barrier or a group, waits for data; work beside the warps."""
PREVIOUS = "previous kernel"
"""What a warp waits for at griddepcontrol.wait."""


@dataclass(frozen=True)
class BarrierName:
    """What a barrier is for: "full" of stage 2. stage -1: it belongs to no stage."""

    label: str
    stage: int = -1

    def __str__(self) -> str:
        return self.label if self.stage < 0 else f"{self.label}[{self.stage}]"


@dataclass(frozen=True)
class Legend:
    """Names for a trace: roles of warps, and barriers by the name that the virtual GPU gives them."""

    roles: Mapping[int, str] = field(default_factory=dict)
    barriers: Mapping[str, BarrierName] = field(default_factory=dict)

    def role(self, warp: int) -> str:
        return self.roles.get(warp, "")

    def name(self, barrier: str) -> BarrierName:
        return self.barriers.get(barrier, BarrierName(barrier))


@dataclass(frozen=True)
class Interval:
    """One row of the table.

    lane: "warp 3", or what runs beside the warps ("copies", "tensor core", ...). what: the family of
    instructions, or what is waited for. stage and phase: of the barrier concerned, -1 for none (phase: how
    often that barrier had completed before). file, line, function: the Python source. finished: False for what
    had not ended when the trace did. start and end in the timeline's clock.
    """

    lane: str
    warp: int
    role: str
    kind: str
    what: str
    barrier: str
    stage: int
    phase: int
    start: float
    end: float
    file: str = ""
    line: int = 0
    function: str = ""
    bytes: int = 0
    finished: bool = True

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Arrival:
    """`lanes` arrivals at a phase. warp: ASYNCHRONOUS if a copy or a commit arrived."""

    barrier: str
    phase: int
    time: float
    warp: int
    lanes: int


@dataclass(frozen=True)
class Phase:
    """A phase of a barrier: from `start` (the end of the one before) to its completion, or for ever."""

    barrier: str
    stage: int
    number: int
    start: float
    end: float
    completed: bool

    @property
    def parity(self) -> int:
        return self.number % 2


@dataclass(frozen=True)
class Timeline:
    """The table, and what it was made of. `makespan` is the end of the last interval."""

    cta: int
    clock: str
    intervals: tuple[Interval, ...]
    phases: tuple[Phase, ...]
    arrivals: tuple[Arrival, ...]
    makespan: float
    notes: tuple[str, ...] = ()

    @property
    def lanes(self) -> tuple[str, ...]:
        """Warps in order, then what runs beside them in order of appearance."""
        found = dict.fromkeys(
            item.lane for item in sorted(self.intervals, key=lambda i: (i.warp < 0, i.warp))
        )
        return tuple(found)

    @property
    def stuck(self) -> tuple[Interval, ...]:
        """Waits that never ended."""
        return tuple(item for item in self.intervals if item.kind == WAIT and not item.finished)

    @property
    def released(self) -> float:
        """When griddepcontrol.wait let the last warp go on; 0 if nobody had to wait."""
        return max((i.end for i in self.intervals if i.what == PREVIOUS), default=0.0)

    def of(self, lane: str, kind: str | None = None) -> tuple[Interval, ...]:
        """The intervals of a lane, by start."""
        chosen = [i for i in self.intervals if i.lane == lane and kind in (None, i.kind)]
        return tuple(sorted(chosen, key=lambda i: (i.start, i.end)))

    def only(self, *lanes: str) -> Timeline:
        """The same timeline with some lanes: enough where many do the same.

        Raises ValueError for a lane that it does not have.
        """
        unknown = [lane for lane in lanes if lane not in self.lanes]
        if unknown:
            raise ValueError(f"lane {unknown[0]!r}: choose from {', '.join(self.lanes)}")
        return replace(self, intervals=tuple(i for i in self.intervals if i.lane in lanes))

    def to_rows(self) -> list[dict[str, Any]]:
        """One dict per interval: ``pandas.DataFrame(timeline.to_rows())``."""
        names = [item.name for item in fields(Interval)]
        return [{name: getattr(item, name) for name in names} for item in self.intervals]

    def as_columns(self) -> dict[str, list[Any]]:
        """One list per column: ``pandas.DataFrame(timeline.as_columns())``, or anything else with columns."""
        return {item.name: [getattr(i, item.name) for i in self.intervals] for item in fields(Interval)}

    def busy(self) -> dict[str, float]:
        """Time in which each lane did something other than wait, overlaps counted once."""
        return {lane: covered([i for i in self.of(lane) if i.kind in (RUN, FLIGHT)]) for lane in self.lanes}

    def waited(self) -> dict[tuple[str, str], float]:
        """(lane, what it waited for) -> time, for every wait and stall."""
        total: dict[tuple[str, str], float] = {}
        for item in self.intervals:
            if item.kind in (WAIT, STALL):
                key = (item.lane, item.what)
                total[key] = total.get(key, 0.0) + item.duration
        return total


def covered(intervals: Sequence[Interval]) -> float:
    """Length of the union of intervals."""
    total, reach = 0.0, float("-inf")
    for item in sorted(intervals, key=lambda i: i.start):
        total += max(0.0, item.end - max(item.start, reach))
        reach = max(reach, item.end)
    return total


def pack(intervals: Sequence[Interval]) -> list[tuple[int, Interval]]:
    """(row, interval): as few rows as keep intervals of one row from overlapping."""
    reach: list[float] = []
    packed = []
    for item in intervals:
        row = next((i for i, end in enumerate(reach) if end <= item.start), len(reach))
        reach[row : row + 1] = [item.end]
        packed.append((row, item))
    return packed


# Names for this project's engines


def producer_legend(warps: int = 16) -> Legend:
    """OprojProducer: all warps do the same; barrier 0 is ``sync_threads``."""
    return Legend(
        dict.fromkeys(range(warps), "loads, multiplies, publishes"),
        {"barrier 0": BarrierName("CTA barrier")},
    )


def umma_legend(trace: Trace, stages: int) -> Legend:
    """OprojUmma with this number of stages. Raises ValueError as ``ring_barriers``."""
    accumulator = {ring.accumulator_barrier(stages): BarrierName("accumulator")}
    barriers = ring_barriers(trace, stages, accumulator)
    barriers["barrier 2"] = BarrierName("tensor memory read")
    return Legend({**dict.fromkeys(range(4), "loader"), 4: "MMA"}, barriers)


def wgmma_legend(trace: Trace, stages: int) -> Legend:
    """OprojWgmma with this number of stages. Raises ValueError as ``ring_barriers``."""
    roles = {**dict.fromkeys(range(4), "loader"), **dict.fromkeys(range(4, 8), "multiplier")}
    return Legend(roles, ring_barriers(trace, stages, {}))


def ring_barriers(trace: Trace, stages: int, others: Mapping[int, BarrierName]) -> dict[str, BarrierName]:
    """Names of the barriers of an engine with a ring; the barrier area follows ``layouts.ring``.

    others: mbarriers that do not belong to a slot, by offset in the barrier area. Raises ValueError when the
    trace's mbarriers cannot be those of a ring of `stages` stages.
    """
    base = mbarrier_base(trace)
    names = {"barrier 0": BarrierName("CTA barrier"), "barrier 1": BarrierName("epilogue barrier")}
    known = {f"mbarrier@{base + offset}": name for offset, name in others.items()}
    for slot in range(stages):
        known[f"mbarrier@{base + ring.full_barrier(slot)}"] = BarrierName("full", slot)
        known[f"mbarrier@{base + ring.empty_barrier(slot, stages)}"] = BarrierName("empty", slot)
    used = {event.barrier for event in trace.events if event.barrier.startswith("mbarrier@")}
    if used - set(known):
        raise ValueError(
            f"a ring of {stages} stages from byte {base} on has {len(known)} mbarriers; the trace also has "
            f"{', '.join(sorted(used - set(known)))}: choose the stages that the kernel was built with"
        )
    return {**names, **known}


def mbarrier_base(trace: Trace) -> int:
    """Shared byte of the first mbarrier that the trace mentions; full[0] comes first and is always used.

    Raises ValueError for a trace without mbarriers.
    """
    found = {
        int(match[1]) for event in trace.events if (match := re.fullmatch(r"mbarrier@(\d+)", event.barrier))
    }
    if not found:
        raise ValueError("this trace has no mbarriers: it is not one of an engine with a ring")
    return min(found)


# What a ring does


@dataclass(frozen=True)
class SlotState:
    """A slot of a ring holds block `block` and is in a state: "loading", "full" or "being read"."""

    slot: int
    block: int
    state: str
    start: float
    end: float


LOADING, FULL, READ = "loading", "full", "being read"


def ring_slots(timeline: Timeline, stages: int) -> tuple[SlotState, ...]:
    """Slot by slot: from the first copy to the full barrier, to the first MMA, to the end of the last one."""
    cores = [lane for lane in timeline.lanes if lane.startswith("tensor core")]
    complete = {
        (p.stage, p.number): p.end for p in timeline.phases if p.barrier.startswith("full") and p.completed
    }
    states: list[SlotState] = []
    for (slot, number), ready in sorted(complete.items()):
        copies = _matching(timeline, "copies", slot, number)
        mmas = [mma for core in cores for mma in _matching(timeline, core, slot, number)]
        marks = [min((i.start for i in copies), default=ready), ready]
        if mmas:
            marks += [min(i.start for i in mmas), max(i.end for i in mmas)]
        states += _between(slot, number * stages + slot, marks)
    return tuple(states)


def producer_ring(timeline: Timeline, first_group: int) -> tuple[SlotState, ...]:
    """The two x buffers of the producer's ring. first_group: commit groups before the first one of x.

    A group is being read from the barrier behind its wait to the barrier behind its MMAs: phases 2 g and
    2 g + 1 of the CTA barrier.
    """
    phases = {p.number: p for p in timeline.phases if p.barrier == "CTA barrier" and p.completed}
    states: list[SlotState] = []
    for copy in timeline.of("copies"):
        group = copy.phase - first_group
        if group >= 0 and 2 * group + 1 in phases:
            ready, done = phases[2 * group].end, phases[2 * group + 1].end
            states += _between(group % 2, group, [copy.start, min(copy.end, ready), ready, done])
    return tuple(states)


def _matching(timeline: Timeline, lane: str, stage: int, phase: int) -> list[Interval]:
    return [i for i in timeline.of(lane) if (i.stage, i.phase) == (stage, phase)]


def _between(slot: int, block: int, marks: list[float]) -> list[SlotState]:
    states = zip((LOADING, FULL, READ), marks, marks[1:], strict=False)
    return [SlotState(slot, block, state, a, b) for state, a, b in states if b > a]
