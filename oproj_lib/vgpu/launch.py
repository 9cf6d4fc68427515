"""One launch: the state of all its threads, and who of them runs next. `streams` decides which launch runs.

There is one program counter per thread. Threads that stand at the same instruction form a *group* and execute
it together, as numpy arrays over the threads of the whole grid. `schedule="program"` always runs the group
with the lowest program counter, so unrolled straight-line code is one array operation per PTX instruction. A
seed picks groups at random, splits them at warp boundaries, and lets asynchronous copies complete early.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .asynchrony import AsyncWork
from .control import Barriers
from .copies import AsyncCopies
from .decode import Code, Op
from .dependence import Dependency
from .mbarrier import Mbarriers
from .memory import LOCAL_BASE, SHARED_BASE, WINDOW_SPAN, AddressSpace, Buffer, LaunchMemory
from .registers import RegisterFile
from .report import Counters, Finding, Report
from .shadow import Shadow
from .special import CLOCKS, read_clock, special_register
from .syntax import SourceLine
from .tmem import TensorMemory
from .tmem_access import LoadInFlight, deliver
from .trace import traces
from .wgmma import WarpgroupMultiplies

if TYPE_CHECKING:
    from .footprints import Footprints
    from .polling import GridWatch

STEP_BUDGET = 50_000_000
POLL_PATIENCE = 64  # how often a group may jump back before the others get a turn
LOOP_PATIENCE = 4 * POLL_PATIENCE  # the same for loops that write
MAX_RANDOM_GROUPS = 12


class Lanes:
    """The threads that execute an instruction: `sel` selects their columns of the register file."""

    __slots__ = ("count", "ids", "sel")

    def __init__(self, ids: np.ndarray | None, total: int) -> None:
        self.ids = ids  # None: every thread of the launch
        self.count = total if ids is None else ids.size
        self.sel: Any = slice(None) if ids is None else ids

    def threads(self) -> np.ndarray:
        """Thread numbers, ascending."""
        return np.arange(self.count) if self.ids is None else self.ids

    def pick(self, which: np.ndarray) -> Lanes:
        return Lanes(which if self.ids is None else self.ids[which], self.count)


class Launch:
    """State and scheduler of one launch."""

    def __init__(
        self,
        code: Code,
        space: AddressSpace,
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        parameters: bytes,
        variables: dict[str, int],
        shared_bytes: int,
        rank: int,
        exact: bool,
        checks: bool,
        counting: bool,
        arch: int,
        predecessor_writes: tuple[Buffer, ...],
        trace: int | None = None,
        name: str = "",
        rearms: bool = False,
    ) -> None:
        self.code, self.space, self.parameters, self.variables = code, space, parameters, variables
        self.grid, self.block, self.rank = grid, block, rank
        self.exact, self.counting, self.arch = exact, counting, arch
        self.name, self.rearms = name or code.entry.name, rearms
        self.schedule: str | int = "program"
        self.rng: np.random.Generator | None = None
        self.step_limit = STEP_BUDGET
        self.ctas = grid[0] * grid[1] * grid[2]
        self.block_threads = block[0] * block[1] * block[2]
        self.warps_per_cta = -(-self.block_threads // 32)
        self.threads_per_cta = (
            32 * self.warps_per_cta
        )  # columns; a ragged last warp has columns without a thread
        self.threads = self.ctas * self.threads_per_cta
        self.alive = np.tile(np.arange(self.threads_per_cta) < self.block_threads, self.ctas)
        self.live = int(self.alive.sum())
        self.shared_bytes, self.checks = shared_bytes, checks
        self.memory: LaunchMemory  # `prepare` makes these
        self.regs: RegisterFile
        self.shadow: Shadow | None = None
        self.predecessor_writes = predecessor_writes
        self.dependency = Dependency(self)
        self.footprints: Footprints | None = None  # where several grids may touch the same memory
        self.watch: GridWatch | None = None  # while the scheduler looks whether everybody polls for ever
        self.counters = Counters()
        self.executed = np.zeros(len(code.ops), np.int64)  # thread-instructions per operation
        self.findings: dict[tuple[str, SourceLine | int], Finding] = {}
        self.copies = AsyncCopies(self)
        self.barriers = Barriers(self)
        self.mbarriers = Mbarriers(self)
        self.asynchronous = AsyncWork(self)
        self.multiplies = WarpgroupMultiplies(self)
        self.loads_in_flight: list[LoadInFlight] = []
        self._tmem: TensorMemory | None = None
        self.trace = traces(self, trace)
        self.groups: dict[int, np.ndarray] = {}
        self.gathering: dict[int, np.ndarray] = {}  # lanes waiting for the rest of their warp
        self.patience: dict[int, int] = {}
        self.op: Op = code.ops[0]
        self.steps = 0
        self.clock_before = 0  # steps of the other grids
        self.admitted = 0  # CTAs
        self.writes = self.writes_at_jump = 0  # changes that somebody may be polling for
        self.jumps = self.quiet_jumps = 0  # back, in this turn; since the last write
        self._special: dict[str, Any] = {}
        self._live_warps: np.ndarray | None = None

    def prepare(self) -> None:
        """Makes registers and memory, which are large: when the grid starts, not when it is enqueued."""
        self.memory = LaunchMemory(self.ctas, self.shared_bytes, self.threads, self.code.local_bytes)
        self.regs = RegisterFile(self.code.row_counts, self.threads)
        self.shadow = Shadow(self) if self.checks else None

    def dispose(self) -> None:
        """Lets go of registers and memory."""
        for name in ("memory", "regs"):
            self.__dict__.pop(name, None)
        self.shadow = self._tmem = None
        self.groups, self.copies.pending, self.loads_in_flight = {}, [], []

    @property
    def has_tensor_memory(self) -> bool:
        return self._tmem is not None

    @property
    def tmem(self) -> TensorMemory:
        """Tensor memory, made when a kernel first asks for it (256 KiB per CTA)."""
        if self._tmem is None:
            self._tmem = TensorMemory(self)
        return self._tmem

    def deliver_loads(self, lanes: Lanes) -> None:
        """tcgen05.wait::ld: these threads' loads reach their registers."""
        waiting = np.zeros(self.threads, bool)
        waiting[lanes.sel] = True
        remaining = []
        for load in self.loads_in_flight:
            ready = waiting[load.threads]
            if ready.any():
                deliver(self, load, ready)
            if not ready.all():
                rest = ~ready
                origin = None if load.origin is None else load.origin.reshape(load.threads.size, -1)[rest]
                values = load.values.reshape(load.threads.size, -1)[rest]
                remaining.append(LoadInFlight(load.op, load.threads[rest], load.rows, values, origin))
        self.loads_in_flight = remaining

    # -- what instructions ask for ------------------------------------------------------------------------------

    def lanes(self, ids: np.ndarray) -> Lanes:
        return Lanes(None if ids.size == self.threads else ids, self.threads)

    def found(self, kind: str, message: str, op: Op, threads: np.ndarray, count: int | None = None) -> None:
        """Records a finding. Later ones of the same kind in the same source line (or at the same instruction,
        without line information) only add to its count: one mistake in unrolled code is one finding."""
        count = int(threads.size) if count is None else count
        instruction = op.instruction
        key = (kind, instruction.source or op.index)
        known = self.findings.get(key)
        if known is not None:
            known.count += count
            return
        cta, within = divmod(int(threads[0]), self.threads_per_cta)
        self.findings[key] = Finding(
            kind,
            message,
            instruction.source,
            instruction.line,
            instruction.text,
            cta,
            within // 32,
            within % 32,
            count,
        )

    def live_warps(self) -> np.ndarray:
        """Warps per CTA with a thread that has not exited."""
        if self._live_warps is None:
            self._live_warps = self.alive.reshape(self.ctas, self.warps_per_cta, 32).any(axis=2).sum(axis=1)
        return self._live_warps

    def address_of_variable(self, name: str) -> int:
        if name in self.code.shared_offsets:
            return self.code.shared_offsets[name]
        if name in self.code.local_offsets:
            return self.code.local_offsets[name]
        if name in self.code.parameter_offsets:
            return self.code.parameter_offsets[name]
        return self.variables[name]

    @staticmethod
    def generic_base(window: str) -> int:
        return {"shared": SHARED_BASE, "local": LOCAL_BASE}.get(window, 0)

    @staticmethod
    def in_window(window: str, address: np.ndarray) -> np.ndarray:
        base = Launch.generic_base(window)
        if base:
            return (address >= base) & (address < base + WINDOW_SPAN)
        return address < SHARED_BASE

    def special(self, name: str) -> Any:
        """The value of a special register: an array over threads, or a scalar."""
        if name in CLOCKS:
            return read_clock(self, name)
        if name not in self._special:
            self._special[name] = special_register(self, name)
        return self._special[name]

    # -- the scheduler ------------------------------------------------------------------------------------------

    @property
    def now(self) -> int:
        """The clock that all grids share."""
        return self.clock_before + self.steps

    @property
    def only_polls(self) -> bool:
        """Whether this turn has only jumped back for some time."""
        return self.quiet_jumps >= POLL_PATIENCE or self.jumps >= LOOP_PATIENCE

    def new_turn(self) -> None:
        self.jumps = self.quiet_jumps = 0

    def admit(self, ctas: int) -> None:
        """Makes the next CTAs resident: their threads can run."""
        first, last = (n * self.threads_per_cta for n in (self.admitted, self.admitted + ctas))
        self.admitted += ctas
        self.resume(0, first + np.flatnonzero(self.alive[first:last]))

    def resident(self) -> int:
        """CTAs that have been admitted and not exited."""
        alive = self.alive[: self.admitted * self.threads_per_cta]
        return int(alive.reshape(-1, self.threads_per_cta).any(axis=1).sum())

    def advance(self) -> np.ndarray:
        """Runs one group of threads for a while; returns which."""
        pc = self._choose()
        ids = self.groups.pop(pc)
        if self.rng is not None and self.watch is None:
            ids = self._split(pc, ids)
        self._advance(pc, ids)
        return ids

    def report(self, seconds: float) -> Report:
        self.counters.thread_instructions = int(self.executed.sum())
        by_line = self.counters.thread_instructions_by_line
        for op, count in zip(self.code.ops, self.executed.tolist(), strict=True):
            by_line[op.instruction.line] = by_line.get(op.instruction.line, 0) + count
        return Report(
            self.code.entry.name,
            tuple(self.findings.values()),
            self.counters,
            seconds,
            "exact" if self.exact else "fp32",
            str(self.schedule),
            self.checks,
            self.trace,
        )

    def resume(self, pc: int, ids: np.ndarray) -> None:
        """Makes threads runnable at an instruction."""
        if ids.size == 0:
            return
        other = self.groups.get(pc)
        self.groups[pc] = ids if other is None else np.sort(np.concatenate([other, ids]))

    def _choose(self) -> int:
        if self.watch is not None:
            return self.watch.choose(self.groups)
        if self.rng is not None:
            keys = list(self.groups)
            return keys[int(self.rng.integers(len(keys)))]
        if len(self.groups) == 1:
            return next(iter(self.groups))
        # A group that keeps jumping back (it polls) waits for its next turn until the others have run.
        return min(self.groups, key=lambda pc: (self.patience.get(pc, 0) // POLL_PATIENCE, pc))

    def _split(self, pc: int, ids: np.ndarray) -> np.ndarray:
        """Takes some warps of a group at random; the others stay."""
        assert self.rng is not None
        if self.rng.random() < 0.2:
            self.copies.complete_random(self.rng)
        if self.rng.random() < 0.1:
            self.asynchronous.advance()
        if len(self.groups) >= MAX_RANDOM_GROUPS or self.rng.random() < 0.3:
            return ids
        warps, where = np.unique(ids >> 5, return_inverse=True)
        chosen = self.rng.random(warps.size) < self.rng.random()
        if not chosen.any() or chosen.all():
            return ids
        self.resume(pc, ids[~chosen[where]])
        return ids[chosen[where]]

    def _advance(self, pc: int, ids: np.ndarray) -> None:
        """Runs one group until it branches apart, blocks, exits, or meets another group."""
        lanes = self.lanes(ids)
        ops = self.code.ops
        left = 1 << 60
        if self.rng is not None and self.watch is None:
            left = int(self.rng.geometric(0.02))
        while True:
            op = ops[pc]
            self.op = op
            if op.control == "next":
                self._count(lanes)
                self._execute(op, lanes)
                pc += 1
            elif op.control == "warp":
                complete = self._gather_warps(op, lanes)
                if complete is None:
                    return
                lanes = complete
                self._count(lanes)
                self._execute(op, lanes)
                pc += 1
            else:
                next_pc = self._transfer(op, lanes)
                if next_pc is None:
                    return
                if next_pc <= pc:
                    self._jumped_back(next_pc)
                    if self.watch is not None or self.only_polls:
                        left = 0
                pc = next_pc
                if self.groups:
                    left = 0
            left -= 1
            if pc in self.groups or left <= 0 or self.steps > self.step_limit:
                self.resume(pc, lanes.threads())
                return

    def _count(self, lanes: Lanes) -> None:
        self.steps += 1
        self.executed[self.op.index] += lanes.count
        self.counters.warp_instructions += -(-lanes.count // 32)

    def _guarded(self, op: Op, lanes: Lanes) -> Lanes | None:
        """The lanes whose guard predicate holds (None: nobody)."""
        if op.guard is None:
            return lanes
        if self.shadow is not None and op.guard in self.regs.poison:
            origin = self.shadow.get((op.guard,), lanes)
            if origin is not None:
                self.shadow.report_use(op, lanes, origin, "this predicate")
        mask = self.regs.files["p"][op.guard.index, lanes.sel]
        if op.guard_negated:
            mask = ~mask
        if mask.all():
            return lanes
        return lanes.pick(np.flatnonzero(mask)) if mask.any() else None

    def _execute(self, op: Op, lanes: Lanes) -> None:
        active = self._guarded(op, lanes)
        if active is None:
            return
        if self.trace is not None:
            self.trace.executed(op, active)
        op.execute(self, active)
        if self.shadow is not None and not op.tracks_poison:
            self.shadow.propagate(op, active)

    def _gather_warps(self, op: Op, lanes: Lanes) -> Lanes | None:
        """For .sync instructions: keeps lanes back until all lanes that the instruction names have come."""
        parked = self.gathering.pop(op.index, None)
        if lanes.count == self.threads and parked is None:
            return lanes
        ids = lanes.threads() if parked is None else np.sort(np.concatenate([parked, lanes.threads()]))
        lanes = self.lanes(ids)
        warp = ids >> 5
        present = np.zeros(self.threads // 32, np.uint32)
        np.bitwise_or.at(present, warp, np.uint32(1) << (ids & 31).astype(np.uint32))
        needed = self._alive_masks()[warp]
        if op.member_mask is not None:
            needed = needed & np.broadcast_to(op.member_mask(self, lanes.sel), (ids.size,))
        ready = (present[warp] & needed) == needed
        if ready.all():
            return lanes
        self.gathering[op.index] = ids[~ready]
        return self.lanes(ids[ready]) if ready.any() else None

    def _alive_masks(self) -> np.ndarray:
        bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
        return (self.alive.reshape(-1, 32) * bits).sum(axis=1).astype(np.uint32)

    def _transfer(self, op: Op, lanes: Lanes) -> int | None:
        """Branches, barriers and exits: the next instruction, or None if this group ends here."""
        if op.control == "barrier":
            gathered = self._gather_warps(op, lanes)
            if gathered is None:
                return None
            self._count(gathered)
            active = self._guarded(op, gathered)
            if active is None:
                return op.index + 1
            if active.count != gathered.count:
                self.resume(op.index + 1, np.setdiff1d(gathered.threads(), active.threads()))
            op.execute(self, active)
            return None
        self._count(lanes)
        if op.control in ("wait", "grid wait"):
            return self._wait(op, lanes)
        taken = self._guarded(op, lanes)
        if taken is None:
            return op.index + 1
        if taken.count != lanes.count:
            self.resume(op.index + 1, np.setdiff1d(lanes.threads(), taken.threads(), assume_unique=True))
        if self.trace is not None:
            self.trace.executed(op, taken)
        if op.control == "branch":
            if taken.count == lanes.count:
                return op.targets[0]
            self._jump(op, op.targets[0], taken.threads())
        elif op.control == "indexed":
            self._indexed(op, taken)
        elif op.control == "exit":
            op.execute(self, taken)
            self._exit(taken)
        return None

    def _wait(self, op: Op, lanes: Lanes) -> int | None:
        """A wait parks some lanes; the others go on."""
        active = self._guarded(op, lanes)
        if active is None:
            return op.index + 1
        if self.trace is not None and op.control == "wait":
            self.trace.executed(op, active)
        going = op.execute(self, active)
        if self.trace is not None and op.control == "grid wait":  # those who are parked execute it again
            self.trace.executed(op, active.pick(np.flatnonzero(going)))
        if self.shadow is not None:
            for row in op.writes:
                self.shadow.set(row, active, None)
        if active.count == lanes.count and going.all():
            return op.index + 1
        if active.count != lanes.count:
            self.resume(op.index + 1, np.setdiff1d(lanes.threads(), active.threads(), assume_unique=True))
        self.resume(op.index + 1, active.threads()[going])
        return None

    def _jump(self, op: Op, target: int, ids: np.ndarray) -> None:
        if target <= op.index:
            self._jumped_back(target)
        self.resume(target, ids)

    def _jumped_back(self, target: int) -> None:
        self.patience[target] = self.patience.get(target, 0) + 1
        if self.writes != self.writes_at_jump:
            self.writes_at_jump, self.quiet_jumps = self.writes, 0
        self.quiet_jumps += 1
        self.jumps += 1

    def _indexed(self, op: Op, lanes: Lanes) -> None:
        index = op.execute(self, lanes)
        threads = lanes.threads()
        bad = index >= len(op.targets)
        if bad.any():
            self.found(
                "bad operand",
                f"brx.idx index {int(index[bad][0])} of {len(op.targets)} targets",
                op,
                threads[bad],
            )
            self._exit(self.lanes(threads[bad]))
        for i, target in enumerate(op.targets):
            self._jump(op, target, threads[index == i])

    def _exit(self, lanes: Lanes) -> None:
        self.alive[lanes.sel] = False
        self.live -= lanes.count
        self._live_warps = None
        if self.gathering:  # whoever waited for these lanes looks again
            for pc, ids in list(self.gathering.items()):
                del self.gathering[pc]
                self.resume(pc, ids)
        self.barriers.after_exit()
