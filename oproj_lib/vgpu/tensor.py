"""Blackwell's tensor memory and tcgen05 instructions (PTX ISA, "TensorCore 5th Generation Family
Instructions").

Tensor memory: 128 lanes x 512 columns of 32 bits per CTA. A warp reaches the 32 lanes of its quarter, 32 *
(warp % 4). tcgen05.mma, .ld and .st are asynchronous: MMAs read shared memory and write D when they complete
(see `asynchrony`), loads deliver at tcgen05.wait::ld.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Execute, Form, Op, opcode
from .matrices import (
    DescriptorError,
    InstructionDescriptor,
    accumulator_lanes,
    decode_instruction,
    decode_shared,
    element_offsets,
)
from .mbarrier import by_offset
from .memory import Region
from .syntax import Addr, Imm, Reg, Sym, Vec
from .tensorcore import dot
from .warp import on_warps, takes_whole_warps, whole_warps

if TYPE_CHECKING:
    from .launch import Lanes, Launch

LANES, COLUMNS = 128, 512
QUARTER = 32
MIN_COLUMNS = 32
K = 16  # of one kind::f16 MMA


@dataclass
class Pieces:
    """What one warp-level load or store touches: per lane and register, the TMEM lane (within the quarter)
    and column."""

    lane: np.ndarray
    column: np.ndarray


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


# -- allocation and ordering ------------------------------------------------------------------------------------------


@opcode("tcgen05")
def build_tcgen05(form: Form) -> Execute:
    action = form.mods.pop(0) if form.mods else ""
    builders = {
        "alloc": build_alloc, "dealloc": build_dealloc, "relinquish_alloc_permit": build_relinquish, "mma": build_mma,
        "commit": build_commit, "ld": build_ld, "st": build_st, "wait::ld": build_wait, "wait::st": build_wait,
        "fence::before_thread_sync": build_fence, "fence::after_thread_sync": build_fence,
    }  # fmt: skip
    if action not in builders:
        raise form.unsupported(f"tcgen05.{action} is not modelled; modelled: {', '.join(builders)}")
    if form.take("cta_group::2"):
        raise form.unsupported("cta_group::2 (a pair of CTAs) is not modelled")
    form.take("cta_group::1")
    return builders[action](form)


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


def build_fence(form: Form) -> Execute:
    """Orders tcgen05 operations around thread synchronisation. The virtual GPU's order of tcgen05 operations
    follows from completion alone, so the fence moves nothing; that one is missing is not reported."""
    form.finish(operands=0)
    return lambda launch, lanes: None


def build_wait(form: Form) -> Execute:
    loads = form.instruction.opcode.startswith("tcgen05.wait::ld")
    warp_wide(form)
    form.finish(operands=0)
    form.waits_for_loads = loads

    def execute(launch: Launch, lanes: Lanes) -> None:
        launch.tmem.waited(np.unique(lanes.threads() >> 5), loads=loads)
        if loads:
            launch.deliver_loads(lanes)

    return execute


# -- ld, st -----------------------------------------------------------------------------------------------------------


def access_shape(form: Form, count: int, second: int) -> Pieces:
    """Per lane and register: lane of the quarter, column offset (PTX ISA, "Matrix fragments for tcgen05.ld /
    st")."""
    lane, register = np.arange(32)[:, None], np.arange(count)[None, :]
    if form.take("32x32b"):
        return Pieces(np.broadcast_to(lane, (32, count)), np.broadcast_to(register, (32, count)))
    if form.take(
        "16x32bx2"
    ):  # lanes 0-15 from the base column, lanes 16-31 the same rows `second` columns further
        return Pieces(np.broadcast_to(lane % 16, (32, count)), register + np.where(lane >= 16, second, 0))
    if form.take("16x128b"):
        half, step = register % 2, register // 2
        return Pieces(lane // 4 + 8 * half, lane % 4 + 4 * step)
    if form.take("16x256b"):
        within, step = register % 4, register // 4
        return Pieces(lane // 4 + 8 * (within // 2), 2 * (lane % 4) + within % 2 + 8 * step)
    raise form.unsupported("tcgen05 access shape; modelled: 32x32b, 16x128b, 16x256b, 16x32bx2")


def take_registers(form: Form, operand: Any) -> tuple[int, list[Any]]:
    items = list(operand.items) if isinstance(operand, Vec) else [operand]
    if form.take("pack::16b", "unpack::16b"):
        raise form.unsupported("16-bit packing")
    number = form.take(*(f"x{1 << i}" for i in range(8)))
    if number is None:
        raise form.malformed("tcgen05.ld and .st need .xN")
    per = {"16x128b": 2, "16x256b": 4}
    expected = int(number[1:]) * next((per[m] for m in form.mods if m in per), 1)
    if len(items) != expected:
        raise form.malformed(f"{expected} registers expected, {len(items)} given")
    return len(items), items


def build_ld(form: Form) -> Execute:
    warp_wide(form)
    form.take("b32")
    operands = form.operands
    count, items = take_registers(form, operands[0])
    second = int(operands[2].value) if len(operands) > 2 and isinstance(operands[2], Imm) else 0
    pieces = access_shape(form, count, second)
    address = form.address(operands[1])
    form.finish(operands=(2, 3))
    rows = [form.row(item, write=True) if not isinstance(item, Sym) else None for item in items]
    form.tracks_poison = True
    form.is_tensor_load = True

    def execute(launch: Launch, lanes: Lanes) -> None:
        located = locate(launch, lanes, address, pieces)
        if located is None:
            return
        warps, cta, lane, column = located
        values = launch.tmem.data[lane, column, cta]
        threads = (warps[:, None] * 32 + np.arange(32)).reshape(-1)
        origin = None
        if launch.shadow is not None:
            origin = read_checks(launch, warps, cta, lane, column)
        launch.loads_in_flight.append(LoadInFlight(launch.op, threads, rows, values, origin))
        part = launch.lanes(threads)
        blame = (
            launch.shadow.origin("a tcgen05.ld that nobody waited for", launch.op)
            if launch.shadow is not None
            else 0
        )
        for row in rows:
            if row is not None:
                launch.regs.files["w"][row.index, part.sel] = 0xFFFFFFFF
                if launch.shadow is not None:
                    launch.shadow.set(row, part, np.full(threads.size, blame, np.uint16))

    return execute


@dataclass
class LoadInFlight:
    """A tcgen05.ld that its warp has not waited for: values [warps, 32, registers]."""

    op: Op
    threads: np.ndarray
    rows: list[Any]
    values: np.ndarray
    origin: np.ndarray | None


def deliver(launch: Launch, load: LoadInFlight, keep: np.ndarray) -> None:
    """Writes a load's registers for the threads in `keep` (a mask)."""
    values = load.values.reshape(load.threads.size, -1)[keep]
    part = launch.lanes(load.threads[keep])
    for i, row in enumerate(load.rows):
        if row is None:
            continue
        launch.regs.files["w"][row.index, part.sel] = values[:, i]
        if launch.shadow is not None:
            origin = None if load.origin is None else load.origin.reshape(load.threads.size, -1)[keep][:, i]
            launch.shadow.set(row, part, origin if origin is not None and origin.any() else None)


def locate(launch: Launch, lanes: Lanes, address: Any, pieces: Pieces) -> tuple[np.ndarray, ...] | None:
    """(warps, CTA, TMEM lane, column), the last three [warps, 32, registers], of a warp-wide access; None if
    all is refused."""
    op = launch.op
    warps, _, sel = whole_warps(launch, lanes)
    bases = on_warps(address(launch, sel), warps).astype(np.int64)
    threads = warps * 32
    if (bases != bases[:, :1]).any():
        launch.found(
            "bad operand", "the lanes of a warp disagree about the tensor memory address", op, threads
        )
    base_lane, base_column = bases[:, 0] >> 16, bases[:, 0] & 0xFFFF
    quarter = warps % launch.warps_per_cta % 4 * QUARTER
    lane = base_lane[:, None, None] + pieces.lane
    column = base_column[:, None, None] + pieces.column
    outside = ((lane < quarter[:, None, None]) | (lane >= quarter[:, None, None] + QUARTER)).any(axis=(1, 2))
    if outside.any():
        w = int(np.flatnonzero(outside)[0])
        message = (
            f"warp {warps[w] % launch.warps_per_cta} reaches tensor "
            f"memory lanes {quarter[w]}..{quarter[w] + QUARTER - 1}, "
            f"not {lane[w].min()}..{lane[w].max()}"
        )
        launch.found("lane quarter", message, op, threads[outside])
    cta = warps // launch.warps_per_cta
    good = launch.tmem.check(op, threads, cta, column.reshape(warps.size, -1)) & ~outside
    if not good.any():
        return None
    shape = (int(good.sum()), 32, pieces.lane.shape[1])
    return (
        warps[good],
        np.broadcast_to(cta[good][:, None, None], shape),
        np.broadcast_to(lane[good], shape),
        np.broadcast_to(column[good], shape),
    )


def read_checks(
    launch: Launch, warps: np.ndarray, cta: np.ndarray, lane: np.ndarray, column: np.ndarray
) -> np.ndarray:
    """Origins of the values read; reports columns that an MMA in flight still writes."""
    shadow, tmem = launch.shadow, launch.tmem
    assert shadow is not None and tmem.undefined is not None
    busy = tmem.pending[cta, column].any(axis=(1, 2)) > 0
    if busy.any():
        message = (
            "tcgen05.ld of columns that a tcgen05.mma in flight still writes: wait for its tcgen05.commit"
        )
        launch.found("race", message, launch.op, warps[busy] * 32)
    tmem.touch(launch.op, warps, column, write=False)
    return tmem.undefined[lane, column, cta]


def build_st(form: Form) -> Execute:
    warp_wide(form)
    form.take("b32")
    operands = form.operands
    values_operand = operands[-1]
    count, items = take_registers(form, values_operand)
    second = int(operands[1].value) if len(operands) > 2 and isinstance(operands[1], Imm) else 0
    pieces = access_shape(form, count, second)
    address = form.address(operands[0])
    reads = [form.read(item, "b32") for item in items]
    rows = [form.row(item) if isinstance(item, Reg) else None for item in items]
    form.finish(operands=(2, 3))
    form.tracks_poison = True

    def execute(launch: Launch, lanes: Lanes) -> None:
        located = locate(launch, lanes, address, pieces)
        if located is None:
            return
        warps, cta, lane, column = located
        threads = (warps[:, None] * 32 + np.arange(32)).reshape(-1)
        part = launch.lanes(threads)
        tmem = launch.tmem
        values = np.stack([np.broadcast_to(r(launch, part.sel), (threads.size,)) for r in reads], axis=1)
        tmem.data[lane, column, cta] = values.reshape(cta.shape)
        if launch.shadow is None or tmem.undefined is None:
            return
        if tmem.pending[cta, column].any():
            message = (
                "tcgen05.st to columns that a tcgen05.mma in flight still writes: wait for its tcgen05.commit"
            )
            launch.found("race", message, launch.op, warps * 32)
        origins = np.zeros((threads.size, count), np.uint16)
        for i, row in enumerate(rows):
            if row is not None and (found := launch.shadow.get((row,), part)) is not None:
                origins[:, i] = found
        tmem.undefined[lane, column, cta] = origins.reshape(cta.shape)
        tmem.touch(launch.op, warps, column, write=True)

    return execute


# -- mma, commit ------------------------------------------------------------------------------------------------------


@dataclass
class Tile:
    """A shared-memory operand of an MMA: byte offsets [rows, K] within a CTA."""

    offsets: np.ndarray
    type: str
    k_major: bool


@dataclass
class MmaInFlight:
    """tcgen05.mma in `ctas`: D[lanes, columns] = A B^T (+ D where `accumulate`)."""

    op: Op
    threads: np.ndarray
    ctas: np.ndarray
    a: Tile
    b: Tile
    shape: InstructionDescriptor
    lanes: np.ndarray
    column: int
    accumulate: np.ndarray
    in_order: bool = True
    number: int = 0
    words: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def columns(self) -> slice:
        return slice(self.column, self.column + self.shape.n)

    def column_numbers(self) -> np.ndarray:
        return np.arange(self.column, self.column + self.shape.n)

    def complete(self, launch: Launch) -> None:
        tmem, region = launch.tmem, launch.memory.shared
        a, b = (gather(launch, region, tile, self.ctas) for tile in (self.a, self.b))
        everyone = self.ctas.size == launch.ctas
        where = (
            (self.lanes, self.columns()) if everyone else np.ix_(self.lanes, self.column_numbers(), self.ctas)
        )
        d = (
            tmem.data[where]
            if self.accumulate.any()
            else np.zeros((self.shape.m, self.shape.n, self.ctas.size), np.uint32)
        )
        if not self.accumulate.all():
            d = np.where(self.accumulate, d, np.uint32(0))
        result = dot(
            a, b.transpose(1, 0, 2), np.ascontiguousarray(d), self.shape.a_type, self.shape.b_type, "f32",
            exact=launch.exact, arch=launch.arch,
        )  # fmt: skip
        tmem.data[where] = result
        tmem.pending[self.ctas, self.columns()] -= 1
        if launch.shadow is not None and tmem.undefined is not None:
            launch.shadow.finish_async_reads(self.words)
            rows, columns = (undefined_of(launch, tile, self.ctas) for tile in (self.a, self.b))
            before = np.where(self.accumulate, tmem.undefined[where], np.uint16(0))
            tmem.undefined[where] = np.maximum(np.maximum(rows[:, None], columns[None]), before)


def gather(launch: Launch, region: Region, tile: Tile, ctas: np.ndarray) -> np.ndarray:
    """The 16-bit elements of a tile, uint32 [rows, K, CTAs]."""
    flat = tile.offsets[:, :, None] + ctas * launch.memory.shared_stride
    return region.view(np.dtype(np.uint16), 1)[:, 0][flat >> 1].astype(np.uint32)


def undefined_of(launch: Launch, tile: Tile, ctas: np.ndarray) -> np.ndarray:
    """The origin of undefined data per row of a tile: [rows, CTAs]."""
    shared = launch.memory.shared
    assert shared.undefined is not None
    granules = (
        tile.offsets[:, :: max(1, shared.granule // 2)] // shared.granule
        if tile.k_major
        else tile.offsets // shared.granule
    )
    flat = granules[:, :, None] + ctas * (launch.memory.shared_stride // shared.granule)
    return shared.undefined[flat].max(axis=1)


def build_mma(form: Form) -> Execute:
    if form.take("kind::f16") is None:
        raise form.unsupported("only tcgen05.mma kind::f16 is modelled")
    form.take("collector::a::discard", "collector::a::lastuse", "collector::a::fill", "collector::a::use")
    operands = form.operands
    if len(operands) < 5:
        raise form.malformed("tcgen05.mma takes d, a, b, instruction descriptor and enable-input-d")
    if isinstance(operands[1], Addr):
        raise form.unsupported("tcgen05.mma with A in tensor memory")
    if any(isinstance(o, Vec) for o in operands[4:]) or len(operands) > 5:
        raise form.unsupported("tcgen05.mma with disable-output-lane or scale-input-d")
    d = form.address(operands[0])
    a, b = form.read(operands[1], "b64"), form.read(operands[2], "b64")
    descriptor, accumulate = form.read(operands[3], "b32"), form.read(operands[4], "pred")
    form.finish(operands=5)
    form.decoder.smallest_shared = min(form.decoder.smallest_shared, 16)

    def execute(launch: Launch, lanes: Lanes) -> None:
        n, threads = lanes.count, lanes.threads()
        columns = [np.broadcast_to(r(launch, lanes.sel), (n,)) for r in (d, a, b, descriptor)]
        enable = np.broadcast_to(accumulate(launch, lanes.sel), (n,))
        keys = np.stack([column.astype(np.uint64) for column in columns], axis=1)
        for key in np.unique(keys, axis=0):  # mostly one: all CTAs use the same addresses
            which = np.flatnonzero((keys == key).all(axis=1))
            to, a_value, b_value, shape = (int(v) for v in key)
            issue(launch, threads[which], to, a_value, b_value, shape, enable[which])

    return execute


def issue(
    launch: Launch, threads: np.ndarray, d: int, a: int, b: int, descriptor: int, enable: np.ndarray
) -> None:
    """Starts one MMA in the CTAs of these threads."""
    op, tmem = launch.op, launch.tmem
    ctas = threads // launch.threads_per_cta
    if (np.bincount(ctas) > 1).any():
        launch.found("many issuers", "more than one thread of a CTA issues the same tcgen05.mma", op, threads)
    try:
        shape = decode_instruction(descriptor)
        tiles = [
            Tile(element_offsets(decode_shared(value, tcgen05=True), rows, K, major), kind, major)
            for value, rows, major, kind in (
                (a, shape.m, shape.a_major_k, shape.a_type),
                (b, shape.n, shape.b_major_k, shape.b_type),
            )
        ]
        if shape.negate_a or shape.negate_b:
            raise DescriptorError("negated operands are not modelled")
    except DescriptorError as error:
        launch.found("descriptor", str(error), op, threads)
        return
    base, column = d >> 16, d & 0xFFFF
    lanes = accumulator_lanes(shape.m, base)
    if lanes.max() >= LANES or base not in (0, 16):
        launch.found(
            "out of bounds",
            f"D at tensor memory lane {base} with M = {shape.m}: lane 0 (or 16 for M = 64)",
            op,
            threads,
        )
        return
    for tile, name in zip(tiles, "AB", strict=True):
        if tile.offsets.max() + 2 > launch.memory.shared_bytes:
            message = (
                f"operand {name} reaches shared byte {tile.offsets.max() + 1} "
                f"({launch.memory.shared_bytes} bytes there)"
            )
            launch.found("out of bounds", message, op, threads)
            return
    wanted = np.broadcast_to(np.arange(column, column + shape.n), (ctas.size, shape.n))
    good = tmem.check(op, threads, ctas, wanted)
    if not good.any():
        return
    mma = MmaInFlight(op, threads[good], ctas[good], tiles[0], tiles[1], shape, lanes, column, enable[good])
    if launch.shadow is not None:
        mma.words = launch.shadow.start_async_reads(op, mma.threads, [tile.offsets for tile in tiles])
        if tmem.touched(mma.ctas, mma.column_numbers()):
            for warp in mma.threads >> 5:
                tmem.check_order(op, int(warp), mma.column_numbers(), write=True, quarter=False)
    tmem.pending[mma.ctas, mma.columns()] += 1
    tmem.issued[mma.threads] += 1
    launch.counters.tensor_instructions += mma.ctas.size
    launch.asynchronous.add(mma)


@dataclass
class CommitInFlight:
    """tcgen05.commit: an arrival once everything in order before it has completed."""

    op: Op
    threads: np.ndarray
    offset: int
    known: np.ndarray | None
    fenced: np.ndarray | None
    in_order: bool = True
    number: int = 0

    def complete(self, launch: Launch) -> None:
        if launch.shadow is not None and self.known is not None and self.fenced is not None:
            ctas = self.threads // launch.threads_per_cta
            launch.shadow.order.release_snapshot(self.offset, ctas, self.known, self.fenced)
        launch.mbarriers.arrive(self.op, self.offset, self.threads, 1, releases=False, work=self.number)


def build_commit(form: Form) -> Execute:
    if form.take("multicast::cluster"):
        raise form.unsupported("multicast commits")
    if form.take("mbarrier::arrive::one") is None:
        raise form.malformed("tcgen05.commit needs .mbarrier::arrive::one")
    form.take("shared::cluster", "shared::cta")
    form.take("b64")
    address = form.address(form.operands[0])
    form.finish(operands=1)

    def execute(launch: Launch, lanes: Lanes) -> None:
        threads = lanes.threads()
        launch.tmem.check_commit(launch.op, threads)
        for offset, which in by_offset(launch, lanes, address(launch, lanes.sel)):
            known = fenced = None
            if launch.shadow is not None:
                warps = threads[which] >> 5
                order = launch.shadow.order
                known, fenced = order.known[warps].copy(), order.fenced[warps].copy()
                order.tick(np.unique(warps))
            launch.asynchronous.add(CommitInFlight(launch.op, threads[which], offset, known, fenced))

    return execute
