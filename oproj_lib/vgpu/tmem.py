"""Blackwell's tensor memory and its allocator (PTX ISA, "Tensor Memory" and "tcgen05.alloc, tcgen05.dealloc,
tcgen05.relinquish_alloc_permit").

128 lanes x 512 columns of 32 bits per CTA. A warp reaches the 32 lanes of its quarter, 32 * (warp % 4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .decode import Execute, Form, Op
from .warp import takes_whole_warps, whole_warps

if TYPE_CHECKING:
    from .launch import Lanes, Launch

LANES, COLUMNS = 128, 512
QUARTER = 32
MIN_COLUMNS = 32


class TensorMemory:
    """Tensor memory of every CTA of a launch, with its allocator."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        n = launch.ctas
        # CTAs last: an MMA over all CTAs then reads and writes D without rearranging it.
        self.data = np.full((LANES, COLUMNS, n), 0xFFFFFFFF, np.uint32)
        self.owner = np.full((n, COLUMNS), -1, np.int64)  # index of the allocating instruction, -1: free
        self.size: dict[tuple[int, int], int] = {}  # (CTA, first column) -> columns
        self.relinquished = np.zeros(n, bool)
        self.pending = np.zeros((n, COLUMNS), np.int32)  # MMAs in flight that write the column
        self.issued = np.zeros(launch.threads, np.int64)  # MMAs of each thread
        self.committed = np.zeros(launch.threads, np.int64)  # those that it has committed
        self.undefined = np.ones((LANES, COLUMNS, n), np.uint16) if launch.shadow is not None else None
        # Per column and warp of the CTA: when it was last read or written by tcgen05.ld and .st, and whether
        # the warp has yet to wait for one of them (kept with checks only).
        self.read_clock = np.zeros((n, COLUMNS, launch.warps_per_cta), np.uint16)
        self.write_clock = np.zeros((n, COLUMNS, launch.warps_per_cta), np.uint16)
        self.loading = np.zeros((n, COLUMNS, launch.warps_per_cta), bool)
        self.storing = np.zeros((n, COLUMNS, launch.warps_per_cta), bool)

    def allocate(self, op: Op, cta: int, columns: int) -> int:
        """First column of a new allocation, or -1 if it does not fit (hardware would block)."""
        launch, thread = self.launch, np.array([cta * self.launch.threads_per_cta])
        if self.relinquished[cta]:
            launch.found(
                "tensor memory", "tcgen05.alloc after relinquish_alloc_permit in this CTA", op, thread
            )
        if columns < MIN_COLUMNS or columns > COLUMNS or columns & (columns - 1):
            message = f"tcgen05.alloc of {columns} columns: a power of two from {MIN_COLUMNS} to {COLUMNS}"
            launch.found("bad operand", message, op, thread)
            return -1
        for start in range(0, COLUMNS, columns):
            if (self.owner[cta, start : start + columns] < 0).all():
                self.owner[cta, start : start + columns] = op.index
                self.size[cta, start] = columns
                return start
        launch.found(
            "tensor memory",
            f"tcgen05.alloc of {columns} columns blocks for ever: CTA {cta} has no room",
            op,
            thread,
        )
        return -1

    def free(self, op: Op, cta: int, column: int, columns: int) -> None:
        launch, thread = self.launch, np.array([cta * self.launch.threads_per_cta])
        size = self.size.pop((cta, column), None)
        if size != columns:
            held = "nothing is allocated there" if size is None else f"{size} columns are allocated there"
            launch.found(
                "tensor memory",
                f"tcgen05.dealloc of {columns} columns at column {column}: {held}",
                op,
                thread,
            )
            return
        if self.pending[cta, column : column + columns].any():
            message = f"tcgen05.dealloc of column {column} while a tcgen05.mma is still writing it"
            launch.found("race", message, op, thread)
        self.owner[cta, column : column + columns] = -1

    def waited(self, warps: np.ndarray, *, loads: bool) -> None:
        """tcgen05.wait: nothing of these warps (numbered across CTAs) is under way any more."""
        under_way = self.loading if loads else self.storing
        under_way[warps // self.launch.warps_per_cta, :, warps % self.launch.warps_per_cta] = False

    def touched(self, ctas: np.ndarray, columns: np.ndarray) -> bool:
        """Whether any tcgen05.ld or .st has accessed these columns."""
        at = np.ix_(ctas, columns)
        return bool(self.read_clock[at].any() or self.write_clock[at].any())

    def touch(self, op: Op, warps: np.ndarray, columns: np.ndarray, *, write: bool) -> None:
        """A tcgen05.ld or .st of these warps (numbered across CTAs) begins; `columns` [warps, ...]."""
        shadow = self.launch.shadow
        assert shadow is not None
        clock, under_way = (self.write_clock, self.storing) if write else (self.read_clock, self.loading)
        for warp, accessed in zip(warps, columns, strict=True):
            cta, me = divmod(int(warp), self.launch.warps_per_cta)
            mine = np.unique(accessed)
            self.check_order(op, int(warp), mine, write=write, quarter=True)
            clock[cta, mine, me] = shadow.order.known[warp, me]
            under_way[cta, mine, me] = True

    def check_order(self, op: Op, warp: int, columns: np.ndarray, *, write: bool, quarter: bool) -> None:
        """An access of a warp must come after what the others wrote, and a write also after what they read:
        ordered, and waited for. `quarter`: it touches the warp's own lanes only, so only warps of the same
        quarter matter."""
        launch = self.launch
        assert launch.shadow is not None
        cta, me = divmod(warp, launch.warps_per_cta)
        others = np.arange(launch.warps_per_cta)
        if quarter:
            others = others[others % 4 == me % 4]
        known, at = launch.shadow.order.known[warp, others], (cta, columns[:, None], others)
        kinds = [("tcgen05.st", "wait::st", self.storing, self.write_clock)]
        if write:
            kinds.append(("tcgen05.ld", "wait::ld", self.loading, self.read_clock))
        for name, wait, under_way, clock in kinds:
            open_, late = under_way[at].any(axis=0), (clock[at] > known).any(axis=0) & (others != me)
            if open_.any():
                who = (
                    f"warp {others[open_][0]}'s {name} of tensor memory that no tcgen05.{wait} has waited for"
                )
            elif late.any():
                who = f"warp {others[late][0]}'s {name} of the same tensor memory, and no barrier orders them"
            else:
                continue
            what = ".".join(op.instruction.opcode.split(".")[:2])
            launch.found("race", f"{what} may overtake {who}", op, np.array([warp * 32]))

    def check_commit(self, op: Op, threads: np.ndarray) -> None:
        """tcgen05.commit tracks what its own thread has issued (PTX ISA, "tcgen05.commit"). A thread that never issued
        anything, while others have MMAs that nobody has committed, is not the one that was meant."""
        per_cta = self.launch.threads_per_cta
        for thread in threads[self.issued[threads] == 0]:
            first = thread // per_cta * per_cta
            open_ = np.flatnonzero((self.issued > self.committed)[first : first + per_cta])
            if open_.size:
                message = (
                    "tcgen05.commit tracks its own thread's tcgen05.mma, and this thread has issued none: "
                    f"it does not wait for those of warp {open_[0] // 32}, lane {open_[0] % 32}"
                )
                self.launch.found("race", message, op, np.array([thread]))
        self.committed[threads] = self.issued[threads]

    def report_leaks(self) -> None:
        leaked = self.owner >= 0
        if leaked.any():
            cta, column = np.argwhere(leaked)[0]
            op = self.launch.code.ops[int(self.owner[cta, column])]
            columns = int(leaked[cta].sum())
            message = (
                f"{columns} columns of tensor memory are never freed (CTA {cta} ends without tcgen05.dealloc)"
            )
            threads = np.flatnonzero(leaked.any(axis=1)) * self.launch.threads_per_cta
            self.launch.found("tensor memory leak", message, op, threads)

    def check(self, op: Op, threads: np.ndarray, ctas: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Which accesses stay inside allocated columns; `columns` [accesses, columns each]."""
        inside = (columns >= 0).all(axis=1) & (columns < COLUMNS).all(axis=1)
        allocated = (self.owner[ctas[:, None], np.clip(columns, 0, COLUMNS - 1)] >= 0).all(axis=1)
        bad = ~(inside & allocated)
        if bad.any():
            message = (
                "tensor memory columns "
                f"{int(columns[bad][0].min())}..{int(columns[bad][0].max())} are not allocated"
            )
            self.launch.found("out of bounds", message, op, threads[bad])
        return ~bad


def warp_wide(form: Form) -> None:
    if form.take("sync") is None or form.take("aligned") is None:
        raise form.malformed("this instruction needs .sync.aligned")
    takes_whole_warps(form)


def build_alloc(form: Form) -> Execute:
    warp_wide(form)
    form.take("b32")
    form.take("shared::cta", "shared")
    address, columns = form.address(form.operands[0]), form.read(form.operands[1], "u32")
    form.finish(operands=2)
    form.decoder.smallest_shared = min(form.decoder.smallest_shared, 4)

    def execute(launch: Launch, lanes: Lanes) -> None:
        warps, _, _ = whole_warps(launch, lanes)
        first = np.searchsorted(lanes.threads() >> 5, warps)
        offsets = np.broadcast_to(address(launch, lanes.sel), (lanes.count,))[first]
        counts = np.broadcast_to(columns(launch, lanes.sel), (lanes.count,))[first]
        memory = launch.memory
        for warp, offset, count in zip(warps, offsets, counts, strict=True):
            cta = int(warp // launch.warps_per_cta)
            column = launch.tmem.allocate(launch.op, cta, int(count))
            if offset < 0 or offset + 4 > memory.shared_bytes or offset % 4:
                launch.found(
                    "out of bounds",
                    f"tcgen05.alloc writes shared byte {offset}",
                    launch.op,
                    np.array([warp * 32]),
                )
                continue
            flat = np.array([cta * memory.shared_stride + offset])
            memory.shared.view(np.dtype(np.uint32), 1)[flat // 4] = np.uint32(max(column, 0))
            if launch.shadow is not None:
                launch.shadow.set_memory_origin(memory.shared, flat, 4, 0)
                launch.shadow.shared_access(launch.op, np.array([warp * 32]), flat, 4, write=True)

    return execute


def build_dealloc(form: Form) -> Execute:
    warp_wide(form)
    form.take("b32")
    address, columns = form.read(form.operands[0], "u32"), form.read(form.operands[1], "u32")
    form.finish(operands=2)

    def execute(launch: Launch, lanes: Lanes) -> None:
        warps, _, _ = whole_warps(launch, lanes)
        first = np.searchsorted(lanes.threads() >> 5, warps)
        starts = np.broadcast_to(address(launch, lanes.sel), (lanes.count,))[first]
        counts = np.broadcast_to(columns(launch, lanes.sel), (lanes.count,))[first]
        tmem = launch.tmem
        for warp, start, count in zip(warps, starts, counts, strict=True):
            cta, column = int(warp // launch.warps_per_cta), int(start) & 0xFFFF
            if launch.shadow is not None:
                freed = np.arange(column, min(column + int(count), COLUMNS))
                tmem.check_order(launch.op, int(warp), freed, write=True, quarter=False)
            tmem.free(launch.op, cta, column, int(count))

    return execute


def build_relinquish(form: Form) -> Execute:
    warp_wide(form)
    form.finish(operands=0)

    def execute(launch: Launch, lanes: Lanes) -> None:
        launch.tmem.relinquished[np.unique(lanes.threads() // launch.threads_per_cta)] = True

    return execute
