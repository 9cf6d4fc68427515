"""Several grids in flight: streams, programmatic dependent launch, and virtual ranks with schedules of their own.

Work of one stream, (rank, name), runs in order, except that a grid with the launch attribute `pdl` may start
early (see `dependence`); streams and ranks run beside each other. `schedule="program"` lets one grid run until
its threads only poll, wait or have exited, and then the next in the order in which they were enqueued. A seed
picks a grid at random for every turn. It also decides whether an early start is used at all: a GPU need not,
and a grid that only works when its dependent runs beside it then polls for ever.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .dependence import GridTimes
from .footprints import Footprints
from .launch import Launch
from .polling import Watch
from .report import Report
from .stuck import report_deadlock, report_leaks, report_out_of_budget, report_residency

LATE_START = 1000
"""Steps by which a rank of skew 1 starts late."""
EARLY_START_CHANCE = 0.75


@dataclass(eq=False)
class GridHandle:
    """A grid that was enqueued. `times`: when it started, triggered, waited and ended, on the clock that all
    grids of a `synchronize` share."""

    launch: Launch = field(repr=False)
    name: str
    rank: int
    stream: str
    pdl: bool
    _report: Report | None = field(default=None, repr=False)

    @property
    def times(self) -> GridTimes:
        return self.launch.dependency.times

    @property
    def report(self) -> Report:
        """Raises RuntimeError before `VirtualGPU.synchronize` has run the grid."""
        if self._report is None:
            raise RuntimeError(f"grid {self.name!r} has not run: call synchronize() first")
        return self._report


class Streams:
    """Runs enqueued grids to completion."""

    def __init__(
        self,
        grids: list[GridHandle],
        schedule: str | int,
        step_budget: int,
        skew: Mapping[int, float],
        resident_ctas: int | None,
        strict: bool,
    ) -> None:
        self.handles = grids
        self.launches = [grid.launch for grid in grids]
        self.budget, self.resident_ctas = step_budget, resident_ctas
        self.skew = {rank: float(skew.get(rank, 0.0)) for rank in {grid.rank for grid in grids}}
        self.rng: np.random.Generator | None = None
        if schedule != "program":
            self.rng = np.random.default_rng([int(schedule) & 0xFFFFFFFF, len(grids)])
        self.clock = 0
        self.seconds = dict.fromkeys(self.launches, 0.0)
        self.idle: set[Launch] = set()  # they polled in vain since anybody last wrote
        self.early: dict[Launch, bool] = {}  # whether a grid uses its permission to start early
        self.running: Launch | None = None
        self.last = -1
        self.quiet_rounds = self.watches = 0
        self._line_up(schedule, strict)

    def _line_up(self, schedule: str | int, strict: bool) -> None:
        behind: dict[tuple[int, str], list[Launch]] = {}
        for index, grid in enumerate(self.handles):
            launch, stream = grid.launch, behind.setdefault((grid.rank, grid.stream), [])
            launch.dependency.follow(tuple(stream), grid.pdl)
            launch.dependency.on_trigger = self._start_grids
            stream.append(launch)
            launch.schedule = schedule
            if schedule != "program":
                launch.rng = np.random.default_rng(int(schedule) if index == 0 else [int(schedule), index])
            self.early[launch] = self.rng is None or bool(self.rng.random() < EARLY_START_CHANCE)
        if len(self.launches) > 1:
            footprints = Footprints(list(behind.values()), self.launches, strict)
            for launch in self.launches:
                launch.footprints = footprints if footprints.needed(launch) else None

    # -- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> list[Report]:
        with np.errstate(all="ignore"):
            while self._step():
                if self.clock > self.budget:
                    for launch in self.launches:
                        report_out_of_budget(launch, self.budget)
                    break
        reports = []
        for grid in self.handles:
            grid._report = grid.launch.report(self.seconds[grid.launch])
            reports.append(grid._report)
            grid.launch.dispose()
        return reports

    def _step(self) -> bool:
        """One turn of one grid, or whatever lets the grids go on. False when all is over."""
        self._start_grids()
        launch = self._choose()
        if launch is not None:
            self._turn(launch)
            return True
        if self._finish_asynchronous():
            return True
        if any(launch.groups for launch in self.launches):
            return self._everybody_polls()
        if self._start_grids(late=True):
            return True
        if not all(launch.dependency.completed for launch in self.launches):
            self._report_stuck()
        return False

    def _choose(self) -> Launch | None:
        """Whose turn it is. With a seed that may be a grid all of whose threads wait for asynchronous work."""
        ready = [
            i
            for i, launch in enumerate(self.launches)
            if (launch.groups and launch not in self.idle)
            or (self.rng is not None and launch.asynchronous.items)
        ]
        if not ready:
            return None
        if self.rng is None:
            if self.last not in ready:
                self.last = next((i for i in ready if i > self.last), ready[0])
        elif len(ready) == 1:
            self.last = ready[0]
        else:
            weights = np.array([1 / (1 + self.skew[self.launches[i].rank]) for i in ready])
            self.last = int(self.rng.choice(ready, p=weights / weights.sum()))
        return self.launches[self.last]

    def _turn(self, launch: Launch) -> np.ndarray:
        """Lets one group of threads run; returns which."""
        begin, writes, steps = time.perf_counter(), launch.writes, launch.steps
        launch.clock_before = self.clock - steps
        launch.step_limit = steps + self.budget - self.clock
        self.running = launch
        if launch.groups:
            ids = launch.advance()
        else:
            ids = np.empty(0, np.int64)
            launch.asynchronous.advance()
        self.running = None
        self.clock += launch.steps - steps
        if launch.writes != writes:
            self._wake()
        if launch.only_polls:
            self.idle.add(launch)
        if not launch.live:
            self._complete(launch)
        self.seconds[launch] += time.perf_counter() - begin
        return ids

    def _wake(self) -> None:
        """Something was written: whoever polls looks again."""
        for launch in self.idle:
            launch.new_turn()
        self.idle.clear()

    def _now(self) -> int:
        return self.clock if self.running is None else self.running.now

    def _start_grids(self, *, late: bool = False) -> bool:
        """Starts the grids, and makes the CTAs resident, that may. late: also those of ranks that are not due
        yet, because nobody else can go on."""
        started = False
        for launch in self.launches:
            dependency = launch.dependency
            if dependency.times.start is None and dependency.may_start(self.early[launch]):
                due = 0.0 if self.rng is None else self.skew[launch.rank] * LATE_START
                if late or self._now() >= due:
                    launch.prepare()
                    dependency.start(self._now())
                    started = True
                    self.watches = 0
            if dependency.times.start is not None and launch.admitted < launch.ctas:
                started |= self._admit(launch)
        return started

    def _admit(self, launch: Launch) -> bool:
        """Makes as many CTAs of a grid resident as there are places."""
        free = launch.ctas - launch.admitted
        if self.resident_ctas is not None:
            there = [other for other in self.launches if other.rank == launch.rank and other.admitted]
            free = min(free, self.resident_ctas - sum(other.resident() for other in there))
        if free > 0:
            launch.admit(free)
        return free > 0

    def _complete(self, launch: Launch) -> None:
        """All threads that could run have exited. The grid completes once all of its CTAs have."""
        if launch.admitted < launch.ctas or launch.dependency.completed:
            return
        while launch.asynchronous.advance():
            pass
        report_leaks(launch)
        launch.dependency.complete(self._now_of(launch))
        launch.dispose()
        self.watches = 0
        for other in self.launches:
            if other.dependency.prerequisite is launch:
                other.dependency.release()

    def _now_of(self, launch: Launch) -> int:
        return launch.clock_before + launch.steps

    def _finish_asynchronous(self) -> bool:
        """Nobody can go on but by what runs beside the threads: completes one item of it."""
        for launch in self.launches:
            if launch.asynchronous.advance():
                self._wake()
                return True
        return False

    # -- how it ends --------------------------------------------------------------------------------------------

    def _everybody_polls(self) -> bool:
        """Every group of every grid has jumped back for a while, and nothing was written. From time to time (ever
        more rarely, since a long loop looks the same) it is worth finding out whether that can end."""
        self.quiet_rounds += 1
        if self.quiet_rounds >= 1 << self.watches:
            self.quiet_rounds, self.watches = 0, self.watches + 1
            watch = Watch([launch for launch in self.launches if launch.groups])
            if watch.sees_no_end(self._turn_while_watched) and not self._start_grids(late=True):
                watch.report()
                self._report_stuck()
                return False
        self._wake()
        return True

    def _turn_while_watched(self, launch: Launch) -> np.ndarray | None:
        """None when the budget is used up, or other grids can run now."""
        before = [bool(other.groups) for other in self.launches]
        ids = self._turn(launch)
        self._start_grids()
        others = any(other.groups and not had for other, had in zip(self.launches, before, strict=True))
        return None if others or self.clock > self.budget else ids

    def _report_stuck(self) -> None:
        for launch in self.launches:
            if launch.dependency.completed:
                continue
            if not launch.groups:
                report_deadlock(launch)
            if self.resident_ctas is not None:
                report_residency(launch, self.resident_ctas)
