"""mbarrier objects (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").

An mbarrier lives in 8 bytes of shared memory. Its contents are opaque, so the virtual GPU keeps the state
beside the memory: one `Mbarrier` per shared-memory offset holds it for all CTAs at once. A phase completes
when no arrivals and no transaction bytes are pending; waiting for parity P succeeds once the current phase's
parity is no longer P.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .access import ORDER, SCOPE, check_address
from .decode import Execute, Form, Op, opcode
from .memory import SHARED_BASE
from .syntax import Reg, Sym

if TYPE_CHECKING:
    from .launch import Lanes, Launch

MAX_COUNT = (1 << 20) - 1  # of arrivals (PTX ISA, "Contents of the mbarrier object")
MAX_TX = (1 << 20) - 1
OBJECT_BYTES = 8


@dataclass
class Parked:
    """Threads that wait for a phase."""

    op: Op
    threads: np.ndarray
    parity: np.ndarray


@dataclass
class Mbarrier:
    """The barrier at one offset, in every CTA."""

    offset: int
    valid: np.ndarray
    expected: np.ndarray  # arrivals per phase
    pending: np.ndarray  # arrivals missing in the current phase
    tx: np.ndarray  # bytes missing in the current phase
    phase: np.ndarray  # phases completed
    waiting: list[Parked] = field(default_factory=list)


class Mbarriers:
    """All mbarriers of a launch."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.at: dict[int, Mbarrier] = {}
        # With checks, per offset: which warp of each CTA made the object, and when; when each warp last used it.
        self.made: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.makers_op: dict[int, int] = {}
        self.used: dict[int, np.ndarray] = {}

    def get(self, offset: int) -> Mbarrier:
        if offset not in self.at:
            n = self.launch.ctas
            expected, pending, tx, phase = (np.zeros(n, np.int64) for _ in range(4))
            self.at[offset] = Mbarrier(offset, np.zeros(n, bool), expected, pending, tx, phase)
        return self.at[offset]

    def init(self, op: Op, offset: int, threads: np.ndarray, count: np.ndarray) -> None:
        bad = (count < 1) | (count > MAX_COUNT)
        if bad.any():
            message = f"mbarrier.init with count {int(count[bad][0])}: 1 to {MAX_COUNT}"
            self.launch.found("bad operand", message, op, threads[bad])
        barrier, cta = self.get(offset), threads // self.launch.threads_per_cta
        again = barrier.valid[cta]
        if again.any():
            message = f"mbarrier.init of the mbarrier at shared byte {offset} without mbarrier.inval before"
            self.launch.found("mbarrier reuse", message, op, threads[again])
        if self.launch.shadow is not None:
            self.check_alone(op, offset, threads)
            self.note_init(op, offset, threads >> 5)
        barrier.valid[cta] = True
        barrier.expected[cta] = barrier.pending[cta] = count
        barrier.tx[cta] = barrier.phase[cta] = 0
        if self.launch.shadow is not None:
            self.launch.shadow.order.forget(offset, cta)

    def invalidate(self, op: Op, offset: int, threads: np.ndarray) -> None:
        cta = self.usable(op, offset, threads)
        if self.launch.shadow is not None:
            self.check_alone(op, offset, threads)
        self.get(offset).valid[cta] = False

    def note_init(self, op: Op, offset: int, warps: np.ndarray) -> None:
        """Who made the object in each CTA, and when."""
        shadow = self.launch.shadow
        assert shadow is not None
        if offset not in self.made:
            n = self.launch.ctas
            self.made[offset] = (np.zeros(n, np.int64), np.zeros(n, np.uint16))
        makers, clocks = self.made[offset]
        own, cta = shadow.order.own[warps], warps // self.launch.warps_per_cta
        makers[cta], clocks[cta] = own, shadow.order.known[warps, own]
        self.makers_op[offset] = op.index

    def check_alone(self, op: Op, offset: int, threads: np.ndarray) -> None:
        """mbarrier.init and .inval come after everything that other warps did with the object."""
        shadow = self.launch.shadow
        assert shadow is not None
        if offset not in self.used:
            return
        warps = threads >> 5
        late = self.used[offset][threads // self.launch.threads_per_cta] > shadow.order.known[warps]
        late[np.arange(warps.size), shadow.order.own[warps]] = False
        if late.any():
            i, warp = np.argwhere(late)[0]
            what = ".".join(op.instruction.opcode.split(".")[:2])
            message = f"{what} at shared byte {offset} while warp {warp} may still use the mbarrier"
            self.launch.found("race", message, op, threads[i : i + 1])

    def note_use(self, op: Op, offset: int, threads: np.ndarray) -> None:
        """Warps use the object: after its mbarrier.init."""
        shadow, warps = self.launch.shadow, np.unique(threads >> 5)
        assert shadow is not None
        order, cta = shadow.order, warps // self.launch.warps_per_cta
        if offset not in self.used:
            self.used[offset] = np.zeros((self.launch.ctas, self.launch.warps_per_cta), np.uint16)
        self.used[offset][cta, order.own[warps]] = order.known[warps, order.own[warps]]
        if offset not in self.made:
            return
        makers, clocks = self.made[offset]
        late = (order.known[warps, makers[cta]] < clocks[cta]) & (makers[cta] != order.own[warps])
        if late.any():
            where = shadow.place(self.makers_op[offset])
            message = f"use of the mbarrier at shared byte {offset} is not ordered after its mbarrier.init at {where}"
            self.launch.found("race", message, op, warps[late] * 32)

    def usable(self, op: Op, offset: int, threads: np.ndarray, *, by_thread: bool = True) -> np.ndarray:
        """The CTAs of `threads`; those whose barrier does not exist are reported. `by_thread`: the threads execute
        this now, rather than something asynchronous that they started."""
        if by_thread and self.launch.shadow is not None:
            self.note_use(op, offset, threads)
        cta = threads // self.launch.threads_per_cta
        bad = ~self.get(offset).valid[cta]
        if bad.any():
            message = f"no mbarrier has been initialised at shared byte {offset}"
            self.launch.found("uninitialised mbarrier", message, op, threads[bad])
        return cta[~bad]

    def add_pending(self, offset: int, threads: np.ndarray) -> None:
        """cp.async.mbarrier.arrive without .noinc: one more arrival is expected in this phase."""
        np.add.at(self.get(offset).pending, threads // self.launch.threads_per_cta, 1)

    def expect_tx(self, op: Op, offset: int, threads: np.ndarray, count: np.ndarray) -> None:
        cta = threads // self.launch.threads_per_cta
        self.usable(op, offset, threads)
        barrier = self.get(offset)
        np.add.at(barrier.tx, cta, count)
        over = barrier.tx[cta] > MAX_TX
        if over.any():
            message = (
                f"mbarrier at shared byte {offset}: {barrier.tx[cta][over][0]} bytes "
                f"are expected, at most {MAX_TX}"
            )
            self.launch.found("mbarrier overflow", message, op, threads[over])

    def complete_tx(self, op: Op, offset: int, cta: np.ndarray, count: np.ndarray) -> None:
        barrier = self.get(offset)
        np.subtract.at(barrier.tx, cta, count)
        self._finish_phases(op, barrier, cta)

    def arrive(
        self,
        op: Op,
        offset: int,
        threads: np.ndarray,
        count: np.ndarray | int,
        *,
        releases: bool = True,
        work: int = -1,
    ) -> None:
        """Arrivals of `threads` (each of `count`), which release what their warps know."""
        cta = threads // self.launch.threads_per_cta
        good = self.get(offset).valid[cta]
        self.usable(op, offset, threads, by_thread=work < 0)
        threads, cta = threads[good], cta[good]
        counts = np.broadcast_to(np.asarray(count, np.int64), good.shape)[good]
        if threads.size == 0:
            return
        if self.launch.trace is not None:
            barrier = self.get(offset)
            for c in np.unique(cta):
                here = threads[cta == c]
                self.launch.trace.at_barrier("arrive", op, here, name_of(offset), int(barrier.phase[c]), work)
        if releases and self.launch.shadow is not None:
            self.launch.shadow.order.release(offset, threads >> 5)
        self._count_arrivals(op, self.get(offset), cta, threads, counts)

    def _count_arrivals(
        self, op: Op, barrier: Mbarrier, cta: np.ndarray, threads: np.ndarray, counts: np.ndarray
    ) -> None:
        """A phase that completes part-way through a batch of arrivals hands the rest to the next phase."""
        self.launch.writes += 1
        arrivals = np.bincount(cta, counts, self.launch.ctas).astype(np.int64)
        self._check_split(op, barrier, threads, counts, arrivals)
        while arrivals.any():
            now = np.minimum(arrivals, barrier.pending)
            stuck = (arrivals > 0) & (barrier.pending == 0)
            if stuck.any():  # only transaction bytes are missing: one arrival too many
                first = int(np.flatnonzero(stuck)[0])
                message = (
                    f"mbarrier at shared byte {barrier.offset}: more "
                    f"arrivals than the {barrier.expected[first]} it expects"
                )
                self.launch.found("mbarrier overflow", message, op, threads[cta == first])
                arrivals[stuck] = 0
                continue
            barrier.pending -= now
            arrivals -= now
            self._finish_phases(op, barrier, np.flatnonzero(now > 0))

    def _check_split(
        self, op: Op, barrier: Mbarrier, threads: np.ndarray, counts: np.ndarray, arrivals: np.ndarray
    ) -> None:
        """A phase that completes between the lanes of one warp: the others arrive for the next phase, which nobody
        meant. It is the sign of an expected count that is not the number of arrivals."""
        per_warp = np.unique(np.unique(threads >> 5, return_counts=True)[1])
        if per_warp.size != 1 or per_warp[0] == 1 or (counts != 1).any():
            return  # no common number of lanes to compare with
        split = (arrivals > barrier.pending) & (barrier.pending % per_warp[0] != 0) & (barrier.pending > 0)
        if split.any():
            first = int(np.flatnonzero(split)[0])
            message = (
                f"mbarrier at shared byte {barrier.offset} expects "
                f"{barrier.expected[first]} arrivals: its phase completes "
                f"between the {per_warp[0]} lanes of one warp, and the rest arrive for the next phase"
            )
            here = np.isin(threads // self.launch.threads_per_cta, np.flatnonzero(split))
            self.launch.found("arrival count", message, op, threads[here])

    def _finish_phases(self, op: Op, barrier: Mbarrier, cta: np.ndarray) -> None:
        done = np.unique(cta[(barrier.pending[cta] == 0) & (barrier.tx[cta] == 0) & barrier.valid[cta]])
        under = cta[barrier.tx[cta] < 0]
        if under.size and (barrier.pending[under] == 0).any():
            message = f"mbarrier at shared byte {barrier.offset}: more bytes have arrived than were expected"
            self.launch.found("mbarrier overflow", message, op, under[:1] * self.launch.threads_per_cta)
        if done.size == 0:
            return
        if self.launch.trace is not None:
            for c in done:
                self.launch.trace.completed(op, np.array([c]), name_of(barrier.offset), int(barrier.phase[c]))
        barrier.phase[done] += 1
        barrier.pending[done] = barrier.expected[done]
        self.launch.counters.barriers += done.size
        if self.launch.shadow is not None:
            self.launch.shadow.order.complete(barrier.offset, done)
        remaining = []
        for parked in barrier.waiting:
            free = self.passed(barrier, parked.threads, parked.parity)
            self.launch.resume(parked.op.index, parked.threads[free])  # they execute the wait again, and pass
            if not free.all():
                remaining.append(Parked(parked.op, parked.threads[~free], parked.parity[~free]))
        barrier.waiting = remaining

    def passed(self, barrier: Mbarrier, threads: np.ndarray, parity: np.ndarray) -> np.ndarray:
        """Whether the phase of that parity has completed."""
        return (barrier.phase[threads // self.launch.threads_per_cta] & 1) != (parity & 1)

    def report_deadlock(self) -> None:
        launch = self.launch
        for barrier in self.at.values():
            for parked in barrier.waiting:
                cta = int(parked.threads[0] // launch.threads_per_cta)
                tx = f", and {barrier.tx[cta]} bytes" if barrier.tx[cta] else ""
                message = (
                    "waits for ever at the mbarrier at shared byte "
                    f"{barrier.offset} for parity {int(parked.parity[0])}: "
                    f"{barrier.expected[cta] - barrier.pending[cta]} of {barrier.expected[cta]} arrivals of phase "
                    f"{barrier.phase[cta]} have come in CTA {cta}{tx}"
                )
                launch.found("deadlock", message, parked.op, parked.threads)


def name_of(offset: int) -> str:
    return f"mbarrier@{offset}"


def by_offset(launch: Launch, lanes: Lanes, addresses: Any) -> list[tuple[int, np.ndarray]]:
    """Groups lanes by mbarrier: [(shared offset, positions)]. Generic addresses of the shared window are
    accepted."""
    values = np.broadcast_to(np.asarray(addresses, np.int64), (lanes.count,))
    values = np.where(values >= SHARED_BASE, values - SHARED_BASE, values)
    bad = (values < 0) | (values + OBJECT_BYTES > launch.memory.shared_bytes) | (values % OBJECT_BYTES != 0)
    if bad.any():
        message = (
            f"mbarrier at shared byte {int(values[bad][0])} "
            f"({launch.memory.shared_bytes} bytes there), 8-byte aligned"
        )
        launch.found("out of bounds", message, launch.op, lanes.threads()[bad])
    return [(int(v), np.flatnonzero(values == v)) for v in np.unique(values[~bad])]


def take_shared(form: Form) -> None:
    """The state space of an mbarrier: .shared, .shared::cta, or a .shared::cluster address of this CTA."""
    form.take("shared", "shared::cta", "shared::cluster")


@opcode("mbarrier")
def build_mbarrier(form: Form) -> Execute:
    form.take("b64")
    action = form.take(
        "init",
        "inval",
        "arrive",
        "arrive_drop",
        "expect_tx",
        "complete_tx",
        "test_wait",
        "try_wait",
        "pending_count",
    )
    builders = {
        "init": build_init, "inval": build_init, "arrive": build_arrive, "expect_tx": build_expect,
        "complete_tx": build_expect,
        "test_wait": build_wait, "try_wait": build_wait,
    }  # fmt: skip
    if action not in builders:
        raise form.unsupported(f"mbarrier.{action or '?'} is not modelled")
    return builders[action](form, action)


def build_init(form: Form, action: str) -> Execute:
    take_shared(form)
    address = form.address(form.operands[0])
    count = form.read(form.operands[1], "u32") if action == "init" else None
    form.finish(operands=2 if action == "init" else 1)

    def execute(launch: Launch, lanes: Lanes) -> None:
        threads = lanes.threads()
        for offset, which in by_offset(launch, lanes, address(launch, lanes.sel)):
            if count is None:
                launch.mbarriers.invalidate(launch.op, offset, threads[which])
            else:
                counts = np.broadcast_to(count(launch, lanes.sel), (lanes.count,)).astype(np.int64)
                launch.mbarriers.init(launch.op, offset, threads[which], counts[which])

    return execute


def build_arrive(form: Form, action: str) -> Execute:
    expects = form.take("expect_tx") is not None
    if form.take("noComplete"):
        raise form.unsupported("mbarrier.arrive.noComplete is not modelled")
    take_shared(form)
    while form.take(*ORDER, *SCOPE):
        pass
    operands = form.operands
    returns = isinstance(operands[0], Sym | Reg)
    if returns and isinstance(operands[0], Reg):
        write = form.write(operands[0], "b64")
    else:
        write = None
    rest = operands[1:] if returns else operands
    address = form.address(rest[0])
    amount = form.read(rest[1], "u32") if len(rest) > 1 else None
    form.finish(operands=(1, 2, 3))
    if expects and amount is None:
        raise form.malformed("mbarrier.arrive.expect_tx needs a number of bytes")

    def execute(launch: Launch, lanes: Lanes) -> None:
        threads = lanes.threads()
        amounts = np.broadcast_to(1 if amount is None else amount(launch, lanes.sel), (lanes.count,)).astype(
            np.int64
        )
        for offset, which in by_offset(launch, lanes, address(launch, lanes.sel)):
            if write is not None:  # the state: which phase this arrival belongs to
                phase = launch.mbarriers.get(offset).phase[threads[which] // launch.threads_per_cta]
                write(launch, lanes.pick(which).sel, phase.astype(np.uint64))
            if expects:
                launch.mbarriers.expect_tx(launch.op, offset, threads[which], amounts[which])
            launch.mbarriers.arrive(launch.op, offset, threads[which], 1 if expects else amounts[which])

    return execute


def build_expect(form: Form, action: str) -> Execute:
    take_shared(form)
    while form.take(*ORDER, *SCOPE):
        pass
    address, amount = form.address(form.operands[0]), form.read(form.operands[1], "u32")
    form.finish(operands=2)

    def execute(launch: Launch, lanes: Lanes) -> None:
        threads = lanes.threads()
        amounts = np.broadcast_to(amount(launch, lanes.sel), (lanes.count,)).astype(np.int64)
        for offset, which in by_offset(launch, lanes, address(launch, lanes.sel)):
            if action == "expect_tx":
                launch.mbarriers.expect_tx(launch.op, offset, threads[which], amounts[which])
            else:
                cta = threads[which] // launch.threads_per_cta
                launch.mbarriers.complete_tx(launch.op, offset, cta, amounts[which])

    return execute


def build_wait(form: Form, action: str) -> Execute:
    """try_wait suspends the thread until the phase completes (it may, PTX ISA "mbarrier.try_wait"); test_wait
    never does."""
    by_parity = form.take("parity") is not None
    take_shared(form)
    while form.take(*ORDER, *SCOPE):
        pass
    write = form.write(form.operands[0], "pred")
    address = form.address(form.operands[1])
    state = form.read(form.operands[2], "u32" if by_parity else "b64")
    if len(form.operands) > 3:
        form.read(form.operands[3], "u32")  # a time limit: the virtual GPU has no clock to measure it by
    form.finish(operands=(3, 4))
    form.control = "wait"

    def execute(launch: Launch, lanes: Lanes) -> np.ndarray:
        """Returns which lanes go on; the others are parked."""
        if launch.shadow is not None:
            check_address(launch, launch.op, lanes)
        threads = lanes.threads()
        parity = np.broadcast_to(state(launch, lanes.sel), (lanes.count,)).astype(np.int64)
        going = np.ones(lanes.count, bool)
        for offset, which in by_offset(launch, lanes, address(launch, lanes.sel)):
            barriers = launch.mbarriers
            barriers.usable(launch.op, offset, threads[which])
            barrier = barriers.get(offset)
            done = barriers.passed(barrier, threads[which], parity[which])
            if launch.shadow is not None and done.any():
                launch.shadow.order.acquire(offset, threads[which][done] >> 5)
            passing = which if action == "test_wait" else which[done]
            write(
                launch,
                lanes.pick(passing).sel,
                done if action == "test_wait" else np.ones(passing.size, bool),
            )
            trace_wait(launch, barrier, threads[which], done, parity[which])
            if action == "try_wait" and not done.all():
                parked = which[~done]
                barrier.waiting.append(Parked(launch.op, threads[parked], parity[parked]))
                going[parked] = False
        return going

    return execute


def trace_wait(
    launch: Launch, barrier: Mbarrier, threads: np.ndarray, done: np.ndarray, parity: np.ndarray
) -> None:
    """Records who waits for, and who passes, which phase: the latest with that parity that has begun or
    completed."""
    if launch.trace is None:
        return
    phase = barrier.phase[threads // launch.threads_per_cta]
    wanted = np.where((phase & 1) == (parity & 1), phase, phase - 1)
    for kind, mask in (("pass", done), ("wait", ~done)):
        for value in np.unique(wanted[mask]):
            here = threads[mask & (wanted == value)]
            launch.trace.at_barrier(kind, launch.op, here, name_of(barrier.offset), int(value))


@opcode("mapa")
def build_mapa(form: Form) -> Execute:
    """Maps an address into a CTA of the cluster; with clusters of one CTA that is the address itself."""
    type_name = form.take_type("u32", "u64")
    form.take("shared::cluster")
    read, write = form.read(form.operands[1], type_name), form.write(form.operands[0], type_name)
    rank = form.read(form.operands[2], "u32")
    form.finish(operands=3)

    def execute(launch: Launch, lanes: Lanes) -> None:
        other = np.broadcast_to(rank(launch, lanes.sel), (lanes.count,)) != 0
        if other.any():
            launch.found(
                "bad operand",
                "mapa to another CTA: clusters of one CTA are modelled",
                launch.op,
                lanes.threads()[other],
            )
        write(launch, lanes.sel, np.asarray(read(launch, lanes.sel)))

    return execute
