"""Whether threads that poll can ever stop.

When nobody writes memory any more, what a thread does next depends only on its own registers and program
counter. A thread that comes back to the same instruction with the same registers therefore comes back for
ever. `Watch` lets everybody run a little longer while nothing is written, and sees whether all of them do. A
loop that counts its attempts, or looks at the clock, does not repeat its state, and goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .memory import Buffer, Region
from .registers import Row

if TYPE_CHECKING:
    from .decode import Op
    from .launch import Launch

ROUNDS = 256
"""Turns that every grid gets while it is watched."""
_EFFECTS = ("cp", "mbarrier", "stmatrix", "tcgen05", "wgmma")
"""Instructions that change more than registers. Stores and atomics are looked at one by one: a loop that
stores what is there already changes nothing."""
_HARMLESS = ("test_wait", "try_wait", "wait_group", "wait_all", "commit_group")
NAMED_PLACES = 4


@dataclass
class Reads:
    """What one instruction read from one region while its launch was watched."""

    op: Op
    region: Region
    size: int
    threads: list[np.ndarray] = field(default_factory=list)
    offsets: list[np.ndarray] = field(default_factory=list)


class GridWatch:
    """One launch while it is watched."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.changed = False
        self.last = -1
        self.live = launch.live
        self.pc = np.full(
            launch.threads, -1, np.int32
        )  # where a thread was seen; -1: it has not been able to run
        self.state = np.zeros(launch.threads, np.uint64)
        self.visits = np.zeros(launch.threads, np.int32)
        self.repeats = np.zeros(launch.threads, bool)
        self.moved = np.zeros(launch.threads, bool)
        self.reads: dict[tuple[int, int], Reads] = {}
        self.before = launch.executed.copy()
        self.executed = np.zeros(launch.executed.size, bool)  # since then
        self.rows: list[Row] = []  # what these instructions write; nothing else can change

    # -- what the instructions say ------------------------------------------------------------------------------

    def note_read(self, op: Op, threads: np.ndarray, region: Region, offsets: np.ndarray, size: int) -> None:
        reads = self.reads.setdefault((op.index, id(region)), Reads(op, region, size))
        reads.threads.append(threads)
        reads.offsets.append(offsets)

    # -- the scheduler ------------------------------------------------------------------------------------------

    def choose(self, groups: dict[int, np.ndarray]) -> int:
        """All groups in turn."""
        self.last = min((pc for pc in groups if pc > self.last), default=min(groups))
        return self.last

    def ran(self, ids: np.ndarray) -> None:
        """These threads have run."""
        launch = self.launch
        self.moved[ids] = True
        self.changed |= launch.live != self.live
        executed = launch.executed != self.before
        if (executed != self.executed).any():
            self.executed = executed
            self._start_over()
        self._look()

    def _start_over(self) -> None:
        """Instructions were executed that nobody had executed before."""
        ops = [self.launch.code.ops[index] for index in np.flatnonzero(self.executed)]
        self.changed |= any(_has_effect(op) for op in ops)
        self.rows = sorted({row for op in ops for row in op.writes}, key=lambda row: (row.kind, row.index))
        self.pc[:], self.visits[:], self.moved[:], self.repeats[:] = -1, 0, False, False
        self.reads.clear()

    def _look(self) -> None:
        """Compares every thread that can run with what was seen of it before."""
        for pc, ids in self.launch.groups.items():
            new = ids[self.pc[ids] < 0]
            if new.size:
                self.pc[new], self.state[new] = pc, self._fingerprint(new)
            back = ids[(self.pc[ids] == pc) & self.moved[ids] & ~self.repeats[ids]]
            if back.size:
                self._compare(back)

    def _compare(self, ids: np.ndarray) -> None:
        """Brent's cycle detection: remember the state anew at visits 1, 2, 4, ..., so that the way into a cycle
        does not matter."""
        state = self._fingerprint(ids)
        self.moved[ids] = False
        self.repeats[ids] = state == self.state[ids]
        self.visits[ids] += 1
        count = self.visits[ids]
        renew = (count & (count - 1)) == 0
        self.state[ids[renew]] = state[renew]

    def _fingerprint(self, ids: np.ndarray) -> np.ndarray:
        """A 64-bit number per thread that tells register contents apart: each row times its own odd factor."""
        total = np.zeros(ids.size, np.uint64)
        factors = np.random.default_rng(2020).integers(0, 1 << 63, len(self.rows), np.uint64)
        for row, factor in zip(self.rows, factors, strict=True):
            total += self.launch.regs[row][ids].astype(np.uint64) * (np.uint64(2) * factor + np.uint64(1))
        return total

    @property
    def has_no_end(self) -> bool:
        return not self.changed and bool(self.executed.any() and (self.repeats | (self.pc < 0)).all())

    # -- the finding --------------------------------------------------------------------------------------------

    def report(self) -> None:
        """One finding per place where threads poll memory, or per loop that reads none."""
        launch = self.launch
        looping = self.repeats & launch.alive
        reads = [r for r in self.reads.values() if r.region.space != "local"]
        strong = [read for read in reads if read.op.strong]
        for read in strong or reads:
            threads, offsets = np.concatenate(read.threads), np.concatenate(read.offsets)
            keep = looping[threads]
            if keep.any():
                describe_poll(launch, read, threads[keep], offsets[keep])
        reading = np.zeros(launch.threads, bool)
        for read in reads:
            reading[np.concatenate(read.threads)] = True
        for pc, ids in launch.groups.items():
            rest = ids[~reading[ids]]
            if rest.size:
                message = "a loop that never ends: its threads come back with the same registers, and read no memory"
                launch.found("endless", message, launch.code.ops[pc], rest)


class Watch:
    """All launches that can run, watched together."""

    def __init__(self, launches: list[Launch]) -> None:
        self.grids = [GridWatch(launch) for launch in launches]

    def sees_no_end(self, turn: Callable[[Launch], np.ndarray | None]) -> bool:
        """Whether all of them poll for ever. turn: runs one group of a launch; None if anything else changed."""
        for grid in self.grids:
            grid.launch.watch = grid
        try:
            return self._run(turn)
        finally:
            for grid in self.grids:
                grid.launch.watch = None

    def _run(self, turn: Callable[[Launch], np.ndarray | None]) -> bool:
        groups = max(len(grid.launch.groups) for grid in self.grids)
        for _ in range(ROUNDS + 2 * groups):
            for grid in self.grids:
                if not grid.launch.groups:
                    continue
                ids = turn(grid.launch)
                if ids is None:
                    return False
                grid.ran(ids)
                if grid.changed:
                    return False
            if all(grid.has_no_end for grid in self.grids):
                return True
        return False

    def report(self) -> None:
        for grid in self.grids:
            grid.report()


def _has_effect(op: Op) -> bool:
    return op.instruction.op in _EFFECTS and not set(op.instruction.mods) & set(_HARMLESS)


def describe_poll(launch: Launch, read: Reads, threads: np.ndarray, offsets: np.ndarray) -> None:
    """`polls for ever`: which element, what it holds, who should have written it."""
    region, size = read.region, read.size
    if isinstance(region, Buffer) and region.sentinel is not None:
        armed = region.sentinel.armed(region, offsets, size)
        if armed.any():  # the rest has arrived: nobody waits for it
            threads, offsets = threads[armed], offsets[armed]
    places = np.unique(offsets)
    first = int(places[0])
    words = region.bytes[first : first + size]
    held = " ".join(f"{word:08x}" for word in words.view(np.uint32)) if size % 4 == 0 else bytes(words).hex()
    if not isinstance(region, Buffer):
        where = f"{region.name} byte {first % launch.memory.shared_stride}"
        message = f"rank {launch.rank} polls {where}, which holds {held}, and nobody is left to write it"
    else:
        message = f"rank {launch.rank} polls {region.element(first)}, which holds {held}"
        if region.sentinel is not None:
            message += region.sentinel.describe(words)
        writers = list(dict.fromkeys(name for place in places if (name := region.writer(int(place)))))
        if writers:
            more = ", ..." if len(writers) > NAMED_PLACES else ""
            message += f"; to be written by {', '.join(writers[:NAMED_PLACES])}{more}"
        message += "; nobody is left to write it"
    unique = np.unique(threads)
    message += f" ({unique.size} threads wait for {places.size} such places)"
    launch.found("polls for ever", message, read.op, unique)
