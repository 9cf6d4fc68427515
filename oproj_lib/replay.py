"""Trace -> timeline, in logical steps or in modelled cycles (see ``timeline``, ``cost_model``)."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from oproj_lib.cost_model import CostModel
from oproj_lib.layouts.descriptors import InstructionDescriptor
from oproj_lib.timeline import (
    ASYNCHRONOUS,
    CYCLES,
    FLIGHT,
    PREVIOUS,
    RUN,
    STALL,
    STEPS,
    WAIT,
    Arrival,
    Interval,
    Legend,
    Phase,
    Timeline,
)
from oproj_lib.trace_steps import Sorted, Step, access_bytes, family, function, sort_out
from oproj_lib.vgpu.decode import Op
from oproj_lib.vgpu.syntax import Imm
from oproj_lib.vgpu.trace import Trace

HBM, L2 = "HBM", "L2"
NEVER = float("inf")
TENSOR_CORE = "tensor core"
DEFAULT_MMA = (64, 64, 16)
"""(m, n, k) of a tcgen05.mma whose instruction descriptor is in a register: the trace has no register values."""
_SLOW = ("global memory", "shared memory", "tensor memory")
"""What a warp visibly waits for when it needs the data; shorter waits count as running."""
SourceOf = Callable[[Op, bool], str]


def memory_of(op: Op, after_wait: bool) -> str:
    """Where a copy's data comes from. Weights and everything before griddepcontrol.wait is cold, in HBM; what
    else is read behind it, the previous kernel has just written: it is in the L2."""
    return L2 if after_wait and "weight" not in function(op) else HBM


def logical(trace: Trace, legend: Legend | None = None) -> Timeline:
    """One step per event, in the order in which the virtual GPU executed them."""
    found, legend = sort_out(trace), legend or Legend()
    book = _Book(legend)
    flights: dict[object, tuple[Step, list[int]]] = {}  # the MMAs of one K block fly as one
    for warp, steps in found.steps.items():
        following = [*steps[1:], None]
        for step, after in zip(steps, following, strict=True):
            if step.kind == "wait":
                end = len(found.events) if step.end_order < 0 else step.end_order
                finished = step.end_order >= 0
                book.wait(warp, step, step.order, max(end, step.order + 1), finished=finished)
            elif not (after and after.order == step.order):  # "arrive and wait" shows as the wait
                book.run(warp, step, step.order, step.order + 1)
            if step.work >= 0:
                key = (step.about, _lane(step)) if step.about and _lane(step) == TENSOR_CORE else step.work
                flights.setdefault(key, (step, []))[1].append(step.work)
    for step, works in flights.values():
        finished = all(work in found.finish for work in works)
        end = max(found.finish.get(work, len(found.events)) for work in works)
        book.flight(_lane(step), step, step.order, end, step.about, 0, finished)
    times = {place: float(facts.order) for place, facts in found.phases.items() if facts.completed}
    arrivals = [
        Arrival(
            str(legend.name(e.barrier)), e.phase, e.order, ASYNCHRONOUS if e.work >= 0 else e.warp, e.lanes
        )
        for e in found.events
        if e.kind in ("arrive", "arrive and wait")
    ]
    return book.close(trace.cta, STEPS, times, found, arrivals, float(len(found.events)))


def modelled(
    trace: Trace,
    legend: Legend | None = None,
    model: CostModel | None = None,
    source: SourceOf = memory_of,
) -> Timeline:
    """The same events with modelled times.

    Each warp executes its PTX in order, one instruction per cycle and sub-partition, and waits for operands
    that are not there yet (ptxas would move independent loads further up; this does not). source says, for an
    instruction and whether its warp has passed griddepcontrol.wait, where its data comes from: HBM or L2.
    A trace that ends in a deadlock gives a timeline whose last waits never end. The steps of one warp keep the
    order that they have in the trace: where lanes of a warp went apart, as a random schedule lets them, the
    timeline shows that too, so compare timelines of schedule "program" only.
    """
    return _Replay(sort_out(trace), legend or Legend(), model or CostModel(), source).run(trace.cta)


def _lane(step: Step) -> str:
    opcode = step.op.instruction.opcode
    return "copies" if opcode.startswith("cp") else (TENSOR_CORE if ".mma" in opcode else "commits")


def warpgroup_n(op: Op) -> int:
    """N of a wgmma m64nNk16, from its name. Raises ValueError for another instruction."""
    match = re.search(r"\.m64n(\d+)k16\.", op.instruction.opcode)
    if match is None:
        raise ValueError(f"{op.instruction.opcode} is no wgmma of shape m64nNk16")
    return int(match[1])


def tensor_shape(op: Op) -> tuple[int, int, int]:
    """(m, n, k) of a tcgen05.mma from its instruction descriptor; DEFAULT_MMA if that is not a literal."""
    operands = op.instruction.operands
    if len(operands) > 3 and isinstance(operands[3], Imm):
        descriptor = InstructionDescriptor.decode(int(operands[3].value))
        return descriptor.m, descriptor.n, 16
    return DEFAULT_MMA


class _Book:
    """Collects intervals; neighbours that say the same become one."""

    def __init__(self, legend: Legend) -> None:
        self.legend = legend
        self.last: dict[int, tuple[tuple[object, ...], list[float], Step, str]] = {}
        self.intervals: list[Interval] = []

    def run(self, warp: int, step: Step, start: float, end: float) -> None:
        self._extend(warp, step, RUN, family(step.op), start, end)

    def stall(self, warp: int, step: Step, cause: str, start: float, end: float) -> None:
        self._extend(warp, step, STALL, cause, start, end)

    def _extend(self, warp: int, step: Step, kind: str, what: str, start: float, end: float) -> None:
        key = (kind, what, function(step.op), step.about)
        if warp in self.last and self.last[warp][0] == key:
            self.last[warp][1][1] = end
            return
        self.flush(warp)
        self.last[warp] = (key, [start, end], step, what)

    def flush(self, warp: int) -> None:
        if warp in self.last:
            key, (start, end), step, what = self.last.pop(warp)
            self._add(f"warp {warp}", warp, str(key[0]), what, step, step.about, start, end)

    def wait(
        self, warp: int, step: Step, start: float, end: float, *, finished: bool = True, what: str = ""
    ) -> None:
        self.flush(warp)
        about = (step.barrier, step.phase) if step.barrier else None
        name = what or str(self.legend.name(step.barrier))
        self._add(f"warp {warp}", warp, WAIT, name, step, about, start, end, finished=finished)

    def flight(
        self, lane: str, step: Step, start: float, end: float, about: tuple[str, int] | None,
        size: int, finished: bool = True,
    ) -> None:  # fmt: skip
        what = function(step.op) or step.op.instruction.opcode
        self._add(lane, ASYNCHRONOUS, FLIGHT, what, step, about, start, end, size=size, finished=finished)

    def _add(
        self, lane: str, warp: int, kind: str, what: str, step: Step, about: tuple[str, int] | None,
        start: float, end: float, *, size: int = 0, finished: bool = True,
    ) -> None:  # fmt: skip
        barrier, phase = about if about else ("", -1)
        name, source = self.legend.name(barrier), step.op.instruction.source
        self.intervals.append(
            Interval(
                lane, warp, self.legend.role(warp), kind, what, str(name) if barrier else "", name.stage, phase,
                start, end, source.file if source else "", source.line if source else 0, function(step.op),
                size, finished,
            )
        )  # fmt: skip

    def close(
        self, cta: int, clock: str, times: dict[tuple[str, int], float], found: Sorted,
        arrivals: list[Arrival], end: float,
    ) -> Timeline:  # fmt: skip
        for warp in list(self.last):
            self.flush(warp)
        phases = []
        for barrier, number in sorted(found.phases):
            name = self.legend.name(barrier)
            done = times.get((barrier, number), NEVER)
            start = times.get((barrier, number - 1), 0.0)
            phases.append(Phase(str(name), name.stage, number, start, min(done, end), done < NEVER))
        intervals = tuple(sorted(self.intervals, key=lambda i: (i.warp < 0, i.warp, i.lane, i.start)))
        return Timeline(
            cta, clock, intervals, tuple(phases), tuple(sorted(arrivals, key=lambda a: a.time)), end
        )


@dataclass
class _Group:
    """Copies that are waited for together: of one arrival, or one commit group, over all warps."""

    step: Step
    start: float
    end: float
    size: int
    about: tuple[str, int] | None


@dataclass
class _Warp:
    """What the model knows of a warp."""

    steps: list[Step]
    at: int = 0
    ready: dict[object, tuple[float, str]] = field(default_factory=dict)  # register row -> when, from what
    copies_done: float = 0.0
    groups: list[float] = field(default_factory=list)  # committed cp.async groups: when they are done
    open_group: float = 0.0
    tensor_loads: float = 0.0
    mmas_done: float = 0.0
    multiplies: list[float] = field(default_factory=list)  # committed groups of wgmmas: when they are done
    open_multiplies: float = 0.0
    after_wait: bool = False
    waiting_since: float = -1.0


@dataclass
class _PhaseState:
    """A phase of a barrier in the replay: contributions missing, and the latest so far."""

    missing: int
    completed: bool
    latest: float = 0.0
    time: float = NEVER
    waiters: list[int] = field(default_factory=list)


class _Replay:
    """A discrete-event simulation: the warp that can go on first does its next step."""

    def __init__(self, found: Sorted, legend: Legend, model: CostModel, source: SourceOf) -> None:
        self.found, self.model, self.source, self.legend = found, model, source, legend
        self.book = _Book(legend)
        self.warps = {warp: _Warp(steps) for warp, steps in found.steps.items()}
        self.phases = {
            place: _PhaseState(facts.arrivals + len(facts.work), facts.completed)
            for place, facts in found.phases.items()
        }
        self.scheduler: dict[int, float] = {}
        self.sync_mma: dict[int, float] = {}
        self.free = {HBM: 0.0, L2: 0.0}
        self.prefetch: tuple[float, float] | None = None  # when its first byte is there, bytes asked for
        self.prefetched_used = 0.0
        self.tensor_free = 0.0
        self.groups: dict[tuple[str, int], _Group] = {}
        self.arrivals: list[Arrival] = []
        self.queue: list[tuple[float, int]] = []
        self.end = 0.0

    def run(self, cta: int) -> Timeline:
        for place in sorted(self.phases):
            self.resolve(place)
        self.queue = [(0.0, warp) for warp in sorted(self.warps)]
        heapq.heapify(self.queue)
        while self.queue:
            time, warp = heapq.heappop(self.queue)
            self.end = max(self.end, time)
            state = self.warps[warp]
            if state.at < len(state.steps):
                self.step(time, warp, state)
        for group in self.groups.values():
            self.book.flight("copies", group.step, group.start, group.end, group.about, group.size)
        self.end = max([self.end, *(item.end for item in self.book.intervals)])
        self.close_stuck()
        times = {place: state.time for place, state in self.phases.items() if state.time < NEVER}
        return self.book.close(cta, CYCLES, times, self.found, self.arrivals, self.end)

    def close_stuck(self) -> None:
        """Waits that never end are drawn a little beyond everything else."""
        stuck = [(w, s) for w, s in self.warps.items() if s.waiting_since >= 0]
        self.end = self.end * 1.05 + 1 if stuck else self.end
        for warp, state in stuck:
            self.book.wait(warp, state.steps[state.at], state.waiting_since, self.end, finished=False)

    # One step

    def step(self, now: float, warp: int, state: _Warp) -> None:
        step = state.steps[state.at]
        if step.kind == "wait":
            return self.wait(now, warp, state, step)
        if step.kind == "arrive":
            state.at += 1
            cost = (
                self.model.issue if step.barrier.startswith("barrier") else 0.0
            )  # others were counted as "run"
            if cost:
                self.book.run(warp, step, now, now + cost)
            self.arrive((step.barrier, step.phase), now + cost, warp, step.lanes)
            return self.push(now + cost, warp)
        begin, cause, held = self.ready_at(now, state, step)
        if begin > now:
            if held:
                self.book.wait(warp, step, now, begin, what=cause)
            elif cause in _SLOW:
                self.book.stall(warp, step, cause, now, begin)
            else:
                self.book.run(warp, step, now, begin)
            return self.push(begin, warp)
        free = self.scheduler.get(self.partition(warp), 0.0)
        if free > now:  # another warp of the sub-partition issues first
            return self.push(free, warp)
        state.at += 1
        end = now + self.execute(now, warp, state, step)
        self.scheduler[self.partition(warp)] = (
            end if family(step.op) != "synchronisation" else now + self.model.issue
        )
        self.book.run(warp, step, now, end)
        self.push(end, warp)

    def push(self, time: float, warp: int) -> None:
        heapq.heappush(self.queue, (time, warp))

    def partition(self, warp: int) -> int:
        return warp % int(self.model.schedulers)

    def wait(self, now: float, warp: int, state: _Warp, step: Step) -> None:
        before = _PhaseState(0, True, time=0.0)  # "phase -1" is over before anything happens: a wrong parity
        phase = before if step.phase < 0 else self.phases.get((step.barrier, step.phase))
        since = state.waiting_since if state.waiting_since >= 0 else now
        if phase is None or phase.time > now:
            state.waiting_since = since
            if phase is not None and phase.time < NEVER:
                self.push(phase.time, warp)
            elif phase is not None:
                phase.waiters.append(warp)
            return
        state.waiting_since = -1.0
        state.at += 1
        if now > since:
            self.book.wait(warp, step, since, now)
        self.push(now, warp)

    def ready_at(self, now: float, state: _Warp, step: Step) -> tuple[float, str, bool]:
        """(when the step can be issued, what it waits for, whether that is a wait of the program)."""
        opcode = step.op.instruction.opcode
        if opcode.startswith("griddepcontrol.wait") and self.model.predecessor_end > now:
            return self.model.predecessor_end, PREVIOUS, True
        if opcode.startswith(("cp.async.wait_group", "cp.async.wait_all")):
            done = self.group_done(state, step)
            if done > now:
                return done, "copies", True
        if opcode.startswith("wgmma.wait_group"):
            done = self.newest_left_out(state.multiplies, step)
            if done > now:
                return done, "multiplications", True
        if opcode.startswith("tcgen05.wait::ld") and state.tensor_loads > now:
            return state.tensor_loads, "tensor memory", True
        late = max((state.ready.get(row, (0.0, "")) for row in step.op.reads), default=(0.0, ""))
        guard = state.ready.get(step.op.guard, (0.0, "")) if step.op.guard else (0.0, "")
        return *max(late, guard), False

    def group_done(self, state: _Warp, step: Step) -> float:
        if "wait_all" in step.op.instruction.opcode:
            return state.copies_done
        return self.newest_left_out(state.groups, step)

    @staticmethod
    def newest_left_out(groups: list[float], step: Step) -> float:
        """When all groups but the newest N are done, N being the operand of a wait for groups."""
        operands = step.op.instruction.operands
        left = int(operands[0].value) if isinstance(operands[0], Imm) else 0
        return max(groups[: max(0, len(groups) - left)], default=0.0)

    # What instructions cost, and what they start

    def execute(self, now: float, warp: int, state: _Warp, step: Step) -> float:
        """Starts what the instruction starts; returns how long the warp is busy with it."""
        model, op, kind = self.model, step.op, family(step.op)
        opcode, latency, cost = op.instruction.opcode, model.arithmetic, model.issue
        if kind in ("copy", "global memory", "shared memory", "prefetch"):
            cost = model.memory_issue
        if kind == "copy":
            self.copy(now, state, step)
        elif kind == "prefetch":
            self.start_prefetch(now, access_bytes(op) * step.lanes)
        elif kind == "global memory":
            done = self.fetch(
                now, access_bytes(op) * step.lanes, self.source(op, state.after_wait), function(op)
            )
            latency = done - now
        elif kind == "shared memory":
            latency = model.shared_load
        elif kind == "tensor memory":
            latency = model.tensor_load
            state.tensor_loads = (
                max(state.tensor_loads, now + latency) if ".ld." in opcode else state.tensor_loads
            )
        elif kind == "matrix" and opcode.startswith("mma"):
            latency = self.multiply_sync(now, warp)
        elif kind == "matrix" and opcode.startswith("tcgen05.mma"):
            self.multiply_async(now, state, step)
        elif kind == "matrix" and opcode.startswith("wgmma.mma_async"):
            self.multiply_warpgroup(now, warp, state, step)
        elif opcode.startswith("wgmma.commit_group"):
            state.multiplies.append(state.open_multiplies)
            state.open_multiplies = 0.0
        elif opcode.startswith(("cp.async.commit_group", "cp.async.wait_all")):
            state.groups.append(state.open_group)
            state.open_group = 0.0
        elif opcode.startswith("griddepcontrol.wait"):
            state.after_wait = True
        elif opcode.startswith("fence.proxy"):
            cost = model.fence
        for row in op.writes:
            state.ready[row] = (now + latency, kind)
        if step.work >= 0:
            self.start(now, warp, state, step)
        return cost

    def fetch(self, now: float, size: int, memory: str, name: str) -> float:
        """When the last of `size` bytes is there: bandwidth is shared, latency comes on top."""
        model = self.model
        if memory == HBM and self.prefetch and "weight" in name and self.prefetched_used < self.prefetch[1]:
            self.prefetched_used += size
            there = self.prefetch[0] + self.prefetched_used / model.hbm_rate
            return max(there, self.fetch(now, size, L2, ""))
        rate, latency = (model.hbm_rate, model.hbm_load) if memory == HBM else (model.l2_rate, model.l2_load)
        self.free[memory] = max(self.free[memory], now) + size / rate
        return self.free[memory] + latency

    def start_prefetch(self, now: float, size: int) -> None:
        """A prefetch takes its turn at the HBM; later weight copies find its bytes in the L2, in order."""
        begin = max(self.free[HBM], now)
        self.free[HBM] = begin + size / self.model.hbm_rate
        first, asked = self.prefetch or (begin + self.model.hbm_load, 0.0)
        self.prefetch = (first, asked + size)

    def copy(self, now: float, state: _Warp, step: Step) -> None:
        size = access_bytes(step.op) * step.lanes
        done = self.fetch(now, size, self.source(step.op, state.after_wait), function(step.op))
        state.copies_done = max(state.copies_done, done)
        state.open_group = max(state.open_group, done)
        about = step.about or ("", step.group)
        key = (f"{about[0]} {function(step.op)}", about[1])
        group = self.groups.setdefault(key, _Group(step, now, done, 0, about))
        group.start, group.end, group.size = min(group.start, now), max(group.end, done), group.size + size

    def multiply_sync(self, now: float, warp: int) -> float:
        """mma.sync: the sub-partition's tensor core takes one after another."""
        begin = max(now, self.sync_mma.get(self.partition(warp), 0.0))
        self.sync_mma[self.partition(warp)] = begin + self.model.mma_sync_occupancy()
        return begin - now + self.model.mma_sync

    def multiply_async(self, now: float, state: _Warp, step: Step) -> None:
        begin = max(now + self.model.tensor_issue, self.tensor_free)
        self.tensor_free = begin + self.model.tensor_mma(*tensor_shape(step.op))
        state.mmas_done = self.tensor_free
        self.book.flight(TENSOR_CORE, step, begin, self.tensor_free, step.about, 0)

    def multiply_warpgroup(self, now: float, warp: int, state: _Warp, step: Step) -> None:
        """wgmma: a warp's 16 rows, on the tensor core of its sub-partition, one after another."""
        partition = self.partition(warp)
        begin = max(now, self.sync_mma.get(partition, 0.0))
        end = begin + self.model.wgmma_occupancy(warpgroup_n(step.op))
        self.sync_mma[partition] = end
        state.open_multiplies = max(state.open_multiplies, end, begin + self.model.mma_sync)
        self.book.flight(f"{TENSOR_CORE} {partition}", step, begin, end, step.about, 0)

    def start(self, now: float, warp: int, state: _Warp, step: Step) -> None:
        """Work that arrives at barriers: after the warp's copies, or after its MMAs."""
        commit = step.op.instruction.opcode.startswith("tcgen05.commit")
        done = max(now, state.mmas_done + self.model.tensor_result) if commit else max(now, state.copies_done)
        places = dict.fromkeys(place[:2] for place in self.found.work_arrivals.get(step.work, []))
        for place in places:
            self.arrive(place, done, ASYNCHRONOUS, 1 if commit else step.lanes)

    # Barriers

    def arrive(self, place: tuple[str, int], time: float, warp: int, lanes: int) -> None:
        state = self.phases[place]
        state.missing -= 1
        state.latest = max(state.latest, time)
        self.arrivals.append(Arrival(str(self.legend.name(place[0])), place[1], time, warp, lanes))
        self.resolve(place)

    def resolve(self, place: tuple[str, int]) -> None:
        """Completes a phase once everything has arrived that the trace saw arriving, and its predecessor has."""
        state, before = self.phases[place], self.phases.get((place[0], place[1] - 1))
        if state.missing or not state.completed or state.time < NEVER or (before and before.time == NEVER):
            return
        state.time = max(state.latest + self.model.barrier, before.time if before else 0.0)
        for warp in state.waiters:
            self.push(state.time, warp)
        state.waiters.clear()
        after = (place[0], place[1] + 1)
        if after in self.phases:
            self.resolve(after)
