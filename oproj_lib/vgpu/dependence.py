"""Programmatic dependent launch: what one grid knows of the grids before it in its stream.

A grid with the launch attribute (`pdl=True`) may start once every CTA of its predecessor has executed
`griddepcontrol.launch_dependents` or exited; its `griddepcontrol.wait` returns when the predecessor has
completed. Sources: PTX ISA, "griddepcontrol" (".wait causes the executing thread to wait until all
prerequisite grids in flight have completed and all the memory operations from the prerequisite grids are
performed and made visible to the current grid"), and CUDA Programming Guide, "Programmatic Dependent Launch
and Synchronization" (a trigger that is never executed occurs implicitly at the end of the grid, and even then
the dependent "must always use cudaGridDependencySynchronize or other means" before it uses results; starting
early is opportunistic, so no kernel may rely on it).

Neither source says that waiting is transitive, so it is not: a grid that never waits completes without
regard to the grids before it, and a wait for that grid says nothing about them. What *is* ordered, whatever
the schedule, follows from who waited:

* at the start of a dependent: what its predecessor knew at its own start, and, if a CTA of the predecessor
  triggered (or exited) only after its own wait, what the predecessor had waited for;
* after the dependent's wait: also the predecessor itself, what that knew at its start, and what it waited
  for if any of its threads did wait;
* a grid without the attribute starts after everything before it in its stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .decode import Op
    from .launch import Lanes, Launch

BEFORE_WAIT, AFTER_WAIT = 0, 1


@dataclass
class GridTimes:
    """When things happened to a grid, in steps of the clock that all grids share (a step: one instruction of
    one group of threads). None: it did not happen. trigger: when the last CTA triggered or exited; wait_begin:
    the first thread at griddepcontrol.wait; wait_end: the last one through it."""

    start: int | None = None
    trigger: int | None = None
    wait_begin: int | None = None
    wait_end: int | None = None
    end: int | None = None


def _nothing() -> None:
    """A trigger that nobody waits for."""


class Dependency:
    """The griddepcontrol state of one launch."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.earlier: tuple[Launch, ...] = ()  # the grids before it in its stream, oldest first
        self.pdl = False
        self.waited = np.zeros(launch.threads, bool)
        self.triggered = np.zeros(launch.ctas, bool)
        self.triggered_after_wait = False
        self.completed = False
        self.parked: list[tuple[Op, np.ndarray]] = []
        self.times = GridTimes()
        self.on_trigger: Callable[[], object] = _nothing
        self.known_at_start: frozenset[Launch] = frozenset()
        self.known_after_wait: frozenset[Launch] = frozenset()

    @property
    def prerequisite(self) -> Launch | None:
        return self.earlier[-1] if self.earlier else None

    # -- what the instructions do -------------------------------------------------------------------------------

    def wait(self, op: Op, lanes: Lanes) -> np.ndarray:
        """griddepcontrol.wait: which lanes go on; the others are parked until the predecessor completes."""
        launch, times = self.launch, self.times
        if times.wait_begin is None:
            times.wait_begin = launch.now
        before = self.prerequisite
        if before is not None and not before.dependency.completed:
            self.parked.append((op, lanes.threads()))
            self._trace("wait begin", op, lanes.threads())
            return np.zeros(lanes.count, bool)
        self.waited[lanes.sel] = True
        times.wait_end = launch.now
        self._trace("wait end", op, lanes.threads())
        return np.ones(lanes.count, bool)

    def release(self) -> None:
        """The predecessor has completed: parked threads execute their wait again, and pass."""
        if self.times.start is not None:
            self._learn_from_wait()
        parked, self.parked = self.parked, []
        for op, threads in parked:
            self.launch.resume(op.index, threads)

    def trigger(self, op: Op, lanes: Lanes) -> None:
        """griddepcontrol.launch_dependents; repeated in a CTA it has no effect."""
        threads = lanes.threads()
        cta = threads // self.launch.threads_per_cta
        first = ~self.triggered[cta]
        if not first.any():
            return
        self.triggered_after_wait |= bool(self.waited[threads[first]].any())
        self.triggered[cta[first]] = True
        self._trace("trigger", op, threads[first])
        if self.triggered.all():
            self.let_dependents_go()
        self.on_trigger()

    def spread(self, ctas: np.ndarray, members: np.ndarray, waiting: np.ndarray) -> None:
        """A barrier completes in these CTAs: whoever waits there comes after what its members waited for.
        members, waiting: [CTA, warp]."""
        if not self.waited.any() or self.waited.all():
            return
        waited = self.waited.reshape(self.launch.ctas, -1, 32)
        knows = (waited[ctas] & members[ctas][:, :, None]).any(axis=(1, 2))
        waited[ctas] |= knows[:, None, None] & waiting[ctas][:, :, None]

    def _trace(self, kind: str, op: Op, threads: np.ndarray) -> None:
        if self.launch.trace is not None:
            self.launch.trace.grid_event(kind, op, threads)

    # -- what the scheduler asks --------------------------------------------------------------------------------

    def follow(self, earlier: tuple[Launch, ...], pdl: bool) -> None:
        """Puts the grid behind others in its stream."""
        self.earlier, self.pdl = earlier, pdl

    def may_start(self, early: bool) -> bool:
        """early: use the permission that the launch attribute gives."""
        before = self.prerequisite
        if before is None:
            return True
        if not self.pdl:
            return all(other.dependency.completed for other in self.earlier)
        ahead = before.dependency
        return ahead.completed or (early and ahead.times.start is not None and ahead.let_dependents_go())

    def let_dependents_go(self) -> bool:
        """Whether every CTA has triggered or exited."""
        exited = ~self.launch.alive.reshape(self.launch.ctas, -1).any(axis=1)
        go = bool((self.triggered | exited).all())
        if go and self.times.trigger is None:
            self.times.trigger = self.launch.now
        return go

    def start(self, now: int) -> None:
        self.times.start = now
        if self.launch.trace is not None:
            self.launch.trace.whole_grid("start", now)
        self._learn_at_start()

    def complete(self, now: int) -> None:
        self.completed = True
        self.times.end = now
        if self.launch.trace is not None:
            self.launch.trace.whole_grid("end", now)
        if self.times.trigger is None:
            self.times.trigger = now

    # -- what is ordered ----------------------------------------------------------------------------------------

    def passes_on_its_wait(self) -> bool:
        """Whether dependents start after this grid's wait, because a CTA triggered or exited only after it."""
        exited = ~self.launch.alive.reshape(self.launch.ctas, -1).any(axis=1)
        by_exit = self.waited.reshape(self.launch.ctas, -1)[exited & ~self.triggered].any()
        return self.triggered_after_wait or bool(by_exit)

    def _learn_at_start(self) -> None:
        """The grids that surely completed before this one started."""
        before = self.prerequisite
        if before is None or not self.pdl:
            self.known_at_start = frozenset(self.earlier)
        else:
            ahead = before.dependency
            passed_on = ahead.known_after_wait if ahead.passes_on_its_wait() else frozenset()
            self.known_at_start = ahead.known_at_start | passed_on
        self.known_after_wait = self.known_at_start
        if before is not None and before.dependency.completed:
            self._learn_from_wait()

    def _learn_from_wait(self) -> None:
        """The predecessor has completed, so the grids that surely completed before the wait returns are known."""
        before = self.prerequisite
        assert before is not None
        ahead = before.dependency
        waited_for = ahead.known_after_wait if ahead.waited.any() else frozenset()
        self.known_after_wait = self.known_at_start | {before} | ahead.known_at_start | waited_for

    def unordered(self, phase: int) -> frozenset[Launch]:
        """Earlier grids of the stream that may still run during this phase (BEFORE_WAIT, AFTER_WAIT)."""
        known = self.known_after_wait if phase == AFTER_WAIT else self.known_at_start
        return frozenset(self.earlier) - known
