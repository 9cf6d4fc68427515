"""tcgen05.ld, tcgen05.st and their waits (PTX ISA, "Tensor Memory Load and Store Instructions"). A load delivers its
registers at tcgen05.wait::ld."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Execute, Form, Op
from .syntax import Imm, Reg, Sym, Vec
from .tmem import QUARTER, warp_wide
from .warp import on_warps, whole_warps

if TYPE_CHECKING:
    from .launch import Lanes, Launch


@dataclass
class Pieces:
    """What one warp-level load or store touches: per lane and register, the TMEM lane (within the quarter)
    and column."""

    lane: np.ndarray
    column: np.ndarray


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
