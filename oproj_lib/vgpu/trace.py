"""What happened in one CTA, in order: who executed what, which barrier phases were waited for, reached and
completed, and what ran beside the threads. The raw material of timelines; it carries no time, only order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .decode import Op

if TYPE_CHECKING:
    from .launch import Lanes, Launch

ASYNC = -1  # the "warp" of what happens beside the threads


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    kind: "execute" (a warp executed an instruction), "arrive" and "arrive and wait" (at a barrier phase),
    "wait" (a warp has to wait for a barrier phase), "pass" (it goes on), "complete" (a barrier phase),
    "start" and "finish" (of asynchronous work). `barrier` is "mbarrier@OFFSET" or "barrier N"; `work` numbers
    the asynchronous work of start, finish, and of arrivals that it makes.
    """

    order: int
    kind: str
    warp: int
    op: Op
    barrier: str = ""
    phase: int = -1
    work: int = -1
    lanes: int = 0
    time: int = 0  # on the clock that all grids share: puts the events of several traces in order


@dataclass(frozen=True)
class GridEvent:
    """What a warp of the traced CTA did with griddepcontrol. kind: "trigger", "wait begin" (it has to wait), "wait
    end"; or "start" and "end" of the grid (warp ASYNC, no op). time as in Event."""

    kind: str
    warp: int
    op: Op | None
    time: int


@dataclass
class Trace:
    """Events of one CTA of a launch, and of its grid."""

    cta: int
    warps_per_cta: int
    events: list[Event] = field(default_factory=list)
    grid_events: list[GridEvent] = field(default_factory=list)
    rank: int = 0
    grid: str = ""
    clock: Callable[[], int] = field(default=lambda: 0, repr=False, compare=False)

    def _add(self, kind: str, warp: int, op: Op, **details: int | str) -> None:
        event = Event(len(self.events), kind, warp, op, time=self.clock(), **details)  # type: ignore[arg-type]
        self.events.append(event)

    def grid_event(self, kind: str, op: Op, threads: np.ndarray) -> None:
        now = self.clock()
        self.grid_events += [GridEvent(kind, warp, op, now) for warp, _ in self.warps_of(threads)]

    def whole_grid(self, kind: str, now: int) -> None:
        self.grid_events.append(GridEvent(kind, ASYNC, None, now))

    def warps_of(self, threads: np.ndarray) -> list[tuple[int, int]]:
        """(warp within the CTA, lanes) of the threads that belong to the traced CTA."""
        first = self.cta * self.warps_per_cta * 32
        mine = threads[(threads >= first) & (threads < first + self.warps_per_cta * 32)] - first
        warps, lanes = np.unique(mine >> 5, return_counts=True)
        return list(zip(warps.tolist(), lanes.tolist(), strict=True))

    def executed(self, op: Op, lanes: Lanes) -> None:
        for warp, count in self.warps_of(lanes.threads()):
            self._add("execute", warp, op, lanes=count)

    def at_barrier(
        self, kind: str, op: Op, threads: np.ndarray, barrier: str, phase: int, work: int = -1
    ) -> None:
        for warp, count in self.warps_of(threads):
            self._add(
                kind, ASYNC if work >= 0 else warp, op, barrier=barrier, phase=phase, work=work, lanes=count
            )

    def completed(self, op: Op, ctas: np.ndarray, barrier: str, phase: int) -> None:
        if self.cta in ctas:
            self._add("complete", ASYNC, op, barrier=barrier, phase=phase)

    def work(self, kind: str, op: Op, threads: np.ndarray, number: int) -> None:
        for warp, count in self.warps_of(threads):
            self._add(kind, warp, op, work=number, lanes=count)


def traces(launch: Launch, cta: int | None) -> Trace | None:
    """The trace of a launch that asked for one."""
    if cta is None:
        return None
    if not 0 <= cta < launch.ctas:
        raise ValueError(f"trace = {cta}: this launch has CTAs 0..{launch.ctas - 1}")
    return Trace(cta, launch.warps_per_cta, rank=launch.rank, grid=launch.name, clock=lambda: launch.now)
