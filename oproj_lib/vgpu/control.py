"""Control flow, barriers, fences and programmatic dependent launch (PTX ISA, "Control Flow Instructions",
"Parallel Synchronization and Communication: bar, membar / fence", "griddepcontrol")."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .access import ORDER, SCOPE
from .decode import Execute, Form, Op, opcode
from .syntax import Sym, Vec

if TYPE_CHECKING:
    from .launch import Lanes, Launch


@opcode("bra")
def build_bra(form: Form) -> Execute:
    form.take("uni")
    form.finish(operands=1)
    form.control = "branch"
    form.targets = (form.decoder.label(form.operands[0], form),)
    return lambda launch, lanes: None


@opcode("brx")
def build_brx(form: Form) -> Execute:
    form.take("idx")
    form.take("uni")
    index = form.read(form.operands[0], "u32")
    table = form.operands[1]
    if isinstance(table, Vec):
        names = [item.name for item in table.items if isinstance(item, Sym)]
    elif isinstance(table, Sym) and table.name in form.decoder.entry.branch_targets:
        names = list(form.decoder.entry.branch_targets[table.name])
    else:
        raise form.malformed("brx.idx needs a .branchtargets table")
    form.finish(operands=2)
    form.control = "indexed"
    form.targets = tuple(form.decoder.label(Sym(name), form) for name in names)
    return lambda launch, lanes: np.broadcast_to(index(launch, lanes.sel), (lanes.count,))


@opcode("ret", "exit")
def build_exit(form: Form) -> Execute:
    form.take("uni")
    form.finish(operands=0)
    form.control = "exit"
    return lambda launch, lanes: None


@opcode("trap", "brkpt")
def build_trap(form: Form) -> Execute:
    form.finish(operands=0)
    form.control = "exit"
    return lambda launch, lanes: launch.found("trap", "the kernel executed trap", launch.op, lanes.threads())


@opcode("call")
def build_call(form: Form) -> Execute:
    raise form.unsupported("calls of device functions are not modelled (let the compiler inline them)")


@opcode("membar", "fence")
def build_fence(form: Form) -> Execute:
    """The virtual GPU's memory is sequentially consistent within a launch, so thread fences order nothing
    further."""
    if form.take("proxy"):
        return build_proxy_fence(form)
    if form.take("mbarrier_init"):
        form.take("release")
        form.take("cluster")
        form.finish(operands=0)
        return lambda launch, lanes: None
    form.take("gl", "sc", *ORDER)
    form.take("gl", "sys", *SCOPE)
    form.finish(operands=0)
    return lambda launch, lanes: None


def build_proxy_fence(form: Form) -> Execute:
    """fence.proxy.async: generic accesses before it become visible to the asynchronous proxy (see
    `order`)."""
    if form.take("async") is None:
        raise form.unsupported("only fence.proxy.async is modelled")
    form.take("global", "shared::cta", "shared::cluster", "shared")
    form.finish(operands=0)

    def execute(launch: Launch, lanes: Lanes) -> None:
        if launch.shadow is not None:
            launch.shadow.order.fence_async_proxy(np.unique(lanes.threads() >> 5))

    return execute


@opcode("setmaxnreg")
def build_setmaxnreg(form: Form) -> Execute:
    """Register counts have no effect here: every thread has all its registers."""
    form.take("inc", "dec")
    form.take("sync")
    form.take("aligned")
    form.take("u32")
    form.finish(operands=1)
    return lambda launch, lanes: None


@opcode("griddepcontrol")
def build_griddepcontrol(form: Form) -> Execute:
    action = form.take("wait", "launch_dependents")
    form.finish(operands=0)
    if action == "wait":
        form.control = "grid wait"
        return lambda launch, lanes: launch.dependency.wait(launch.op, lanes)
    if action == "launch_dependents":
        return lambda launch, lanes: launch.dependency.trigger(launch.op, lanes)
    raise form.malformed("griddepcontrol needs .wait or .launch_dependents")


# -- barriers ---------------------------------------------------------------------------------------------------------


@opcode("bar", "barrier")
def build_bar(form: Form) -> Execute:
    form.take("cta")
    form.take("aligned")
    if form.take("warp"):
        form.take("sync")
        form.member_mask = form.read(form.operands[0], "u32")
        form.finish(operands=1)
        form.control = "warp"
        return lambda launch, lanes: None
    if form.take("cluster"):
        raise form.unsupported("cluster barriers are not modelled")
    action = form.take("sync", "arrive", "red")
    if action not in ("sync", "arrive"):
        raise form.unsupported("only bar.sync and bar.arrive are modelled")
    number = form.read(form.operands[0], "u32")
    expected = form.read(form.operands[1], "u32") if len(form.operands) > 1 else None
    form.finish(operands=(1, 2))
    if action == "arrive" and expected is None:
        raise form.malformed("bar.arrive needs a thread count")
    form.control = "barrier"

    def execute(launch: Launch, lanes: Lanes) -> None:
        numbers = np.broadcast_to(number(launch, lanes.sel), (lanes.count,))
        counts = None if expected is None else np.broadcast_to(expected(launch, lanes.sel), (lanes.count,))
        keys = numbers.astype(np.int64) << 32 | (0 if counts is None else counts)
        launch.barriers.check_agreement(launch.op, lanes.threads(), numbers, keys)
        for key in np.unique(keys):
            same = np.flatnonzero(keys == key)
            part = lanes if same.size == lanes.count else lanes.pick(same)
            threads = None if counts is None else int(key & 0xFFFFFFFF)
            launch.barriers.arrive(launch.op, int(key >> 32), part, threads, waits=action == "sync")

    return execute


@dataclass
class Waiting:
    """Threads parked at a barrier."""

    op: Op
    threads: np.ndarray


@dataclass
class NamedBarrier:
    """One of the 16 barriers, in every CTA at once. Arrivals are counted in warps, as the hardware does."""

    arrived: np.ndarray  # warps per CTA
    expected: np.ndarray  # warps per CTA; 0: all warps that have not exited
    members: np.ndarray  # [CTA, warp]: who has arrived
    waits: np.ndarray  # [CTA, warp]: who waits; bar.arrive only signals
    waiting: list[Waiting] = field(default_factory=list)
    phase: int = 0  # completed phases in the traced CTA


class Barriers:
    """The 16 named barriers of each CTA."""

    LIMIT = 16

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.named: dict[int, NamedBarrier] = {}

    def get(self, number: int) -> NamedBarrier:
        if number not in self.named:
            ctas, warps = self.launch.ctas, self.launch.warps_per_cta
            self.named[number] = NamedBarrier(
                np.zeros(ctas, np.int32),
                np.zeros(ctas, np.int32),
                np.zeros((ctas, warps), bool),
                np.zeros((ctas, warps), bool),
            )
        return self.named[number]

    def arrive(self, op: Op, number: int, lanes: Lanes, threads: int | None, *, waits: bool) -> None:
        """Warps arrive; those that wait are parked until `release` lets them go."""
        launch = self.launch
        if number >= self.LIMIT:
            launch.found("bad operand", f"barrier {number}: a CTA has barriers 0..15", op, lanes.threads())
            return
        if threads is not None and (threads % 32 or threads == 0):
            launch.found(
                "bad operand",
                f"barrier {number} expects {threads} threads: not a positive multiple of 32",
                op,
                lanes.threads(),
            )
            return
        barrier = self.get(number)
        warps = np.unique(lanes.threads() >> 5)
        cta, warp = np.divmod(warps, launch.warps_per_cta)
        again = barrier.members[cta, warp]
        if again.any():
            launch.found(
                "barrier reuse",
                f"a warp arrives twice at barrier {number} in one phase",
                op,
                warps[again] * 32,
            )
        if launch.trace is not None:
            kind = "arrive and wait" if waits else "arrive"
            launch.trace.at_barrier(kind, op, lanes.threads(), f"barrier {number}", barrier.phase)
        barrier.members[cta, warp] = True
        barrier.waits[cta, warp] = waits
        np.add.at(barrier.arrived, cta, 1)
        wanted = 0 if threads is None else threads // 32
        started = barrier.expected[cta] != wanted
        if (started & (barrier.arrived[cta] > 1) & (barrier.expected[cta] != 0)).any():
            launch.found(
                "barrier count",
                f"barrier {number}: warps disagree about how many threads it expects",
                op,
                warps[started] * 32,
            )
        barrier.expected[cta] = wanted
        if waits:
            barrier.waiting.append(Waiting(op, lanes.threads()))
        else:
            launch.resume(op.index + 1, lanes.threads())
        self.release(number)

    def check_agreement(self, op: Op, threads: np.ndarray, numbers: np.ndarray, keys: np.ndarray) -> None:
        """Warps of one CTA that meet at one barrier in one instruction must expect the same number of
        threads."""
        place = threads // self.launch.threads_per_cta * self.LIMIT + np.minimum(numbers, self.LIMIT - 1)
        order = np.argsort(place, kind="stable")
        differs = (np.diff(place[order]) == 0) & (np.diff(keys[order]) != 0)
        if differs.any():
            message = f"barrier {int(numbers[order][1:][differs][0])}: warps disagree about how many threads it expects"
            self.launch.found("barrier count", message, op, threads[order][1:][differs])

    def release(self, number: int) -> None:
        """Lets go every CTA whose barrier is complete."""
        launch, barrier = self.launch, self.named[number]
        expected = np.where(barrier.expected == 0, launch.live_warps(), barrier.expected)
        complete = (barrier.arrived > 0) & (barrier.arrived >= expected)
        if not complete.any():
            return
        ctas = np.flatnonzero(complete)
        if launch.trace is not None:
            launch.trace.completed(launch.op, ctas, f"barrier {number}", barrier.phase)
            barrier.phase += int(launch.trace.cta in ctas)
        launch.dependency.spread(ctas, barrier.members, barrier.members & barrier.waits)
        launch.counters.barriers += ctas.size
        if launch.shadow is not None:
            whole = (barrier.members & barrier.waits)[ctas].all(axis=1)
            if whole.any():
                launch.shadow.order.join_whole_ctas(ctas[whole])
            for cta in ctas[~whole]:
                came = barrier.members[cta]
                launch.shadow.order.join(
                    int(cta), np.flatnonzero(came), np.flatnonzero(came & barrier.waits[cta])
                )
        barrier.arrived[ctas] = 0
        barrier.expected[ctas] = 0  # the next use may expect another number
        barrier.members[ctas] = False
        remaining = []
        for waiting in barrier.waiting:
            freed = complete[waiting.threads // launch.threads_per_cta]
            launch.resume(waiting.op.index + 1, waiting.threads[freed])
            if not freed.all():
                remaining.append(Waiting(waiting.op, waiting.threads[~freed]))
        barrier.waiting = remaining

    def after_exit(self) -> None:
        """Threads that exit no longer count."""
        for number, barrier in self.named.items():
            if barrier.arrived.any():
                self.release(number)

    def report_deadlock(self) -> None:
        launch = self.launch
        for number, barrier in self.named.items():
            for waiting in barrier.waiting:
                cta = int(waiting.threads[0] // launch.threads_per_cta)
                expected = int(barrier.expected[cta]) or int(launch.live_warps()[cta])
                absent = np.flatnonzero(~barrier.members[cta])
                names = ", ".join(map(str, absent[:8])) + (", ..." if absent.size > 8 else "")
                launch.found(
                    "deadlock",
                    f"waits for ever at barrier {number}: {barrier.arrived[cta]} "
                    f"of {expected} warps have arrived in CTA {cta}; "
                    f"missing: warps {names}",
                    waiting.op,
                    waiting.threads,
                )
