"""Warp-wide instructions: shuffles, votes, matrix fragments (PTX ISA, "Parallel Synchronization and Communication",
"Warp Level Matrix Instructions"). The scheduler hands them whole warps, or says which lanes never came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .access import Piece, check_address, count_access, locate, note_shared_size, take_space, track_load
from .decode import Execute, Form, opcode
from .ptx import Pair, Reg
from .registers import DTYPES
from .tensorcore import mma_sync, supported_mma

if TYPE_CHECKING:
    from .launch import Lanes, Launch

LANES = np.arange(32)


def whole_warps(launch: Launch, lanes: Lanes) -> tuple[np.ndarray, np.ndarray, Any]:
    """(warp numbers, active mask [warps, 32], selection of all their lanes)."""
    if lanes.count == launch.threads:
        warps = np.arange(launch.threads // 32)
        return warps, np.ones((warps.size, 32), bool), slice(None)
    threads = lanes.threads()
    warps = np.unique(threads >> 5)
    active = np.zeros((warps.size, 32), bool)
    active[np.searchsorted(warps, threads >> 5), threads & 31] = True
    return warps, active, (warps[:, None] * 32 + LANES).reshape(-1)


def on_warps(value: Any, warps: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.asarray(value), (warps.size * 32,)).reshape(-1, 32)


def takes_member_mask(form: Form, operand: Any) -> None:
    """All lanes named in the mask must execute the instruction together; the scheduler gathers them."""
    form.control = "warp"
    form.member_mask = form.read(operand, "u32")


@opcode("shfl")
def build_shfl(form: Form) -> Execute:
    form.take_type("b32")
    form.take("sync")
    mode = form.take("up", "down", "bfly", "idx")
    target = form.operands[0]
    write = form.write(target.first if isinstance(target, Pair) else target, "b32")
    predicate = form.write(target.second, "pred") if isinstance(target, Pair) else None
    value, b, c = (form.read(operand, "b32") for operand in form.operands[1:4])
    source_row = form.row(form.operands[1]) if isinstance(form.operands[1], Reg) and form.operands[1].name in form.decoder.entry.registers else None
    target_row = next((form.row(o, write=True) for o in ([target.first] if isinstance(target, Pair) else [target]) if isinstance(o, Reg)), None)
    takes_member_mask(form, form.operands[4])
    form.finish(operands=5)
    form.tracks_poison = True

    def execute(launch: Launch, lanes: Lanes) -> None:
        warps, active, sel = whole_warps(launch, lanes)
        data = on_warps(value(launch, sel), warps)
        amount = on_warps(b(launch, sel), warps).astype(np.int64) & 31
        control = on_warps(c(launch, sel), warps).astype(np.int64)
        segment = control >> 8 & 31
        clamp = control & 31
        lowest = LANES & segment
        limit = lowest | clamp & ~segment
        if mode == "up":
            source = LANES - amount
            inside = source >= limit
        else:
            source = {"down": LANES + amount, "bfly": LANES ^ amount, "idx": lowest | amount & ~segment}[str(mode)]
            inside = source <= limit
        source = np.where(inside, source, LANES) & 31
        taken = np.take_along_axis(data, source, axis=1)
        missing = ~np.take_along_axis(active, source, axis=1) & active
        if missing.any():
            threads = (warps[:, None] * 32 + LANES)[missing]
            launch.found("inactive lane", f"shfl.{mode} reads a lane that does not take part", launch.op, threads)
        write(launch, lanes.sel, taken[active])
        if predicate is not None:
            predicate(launch, lanes.sel, inside[active])
        if launch.shadow is not None and source_row is not None and target_row is not None:
            origin = None
            if source_row in launch.regs.poison:
                moved = np.take_along_axis(launch.regs.poison[source_row].reshape(-1, 32)[warps], source, axis=1)[active]
                origin = moved if moved.any() else None
            launch.shadow.set(target_row, lanes, origin)

    return execute


@opcode("vote")
def build_vote(form: Form) -> Execute:
    type_name = form.take_type("pred", "b32")
    form.take("sync")
    mode = form.take("all", "any", "uni", "ballot")
    write = form.write(form.operands[0], type_name)
    p = form.read(form.operands[1], "pred")
    takes_member_mask(form, form.operands[2])
    form.finish(operands=3)

    def execute(launch: Launch, lanes: Lanes) -> None:
        warps, active, sel = whole_warps(launch, lanes)
        value = on_warps(p(launch, sel), warps)
        yes, no = value & active, ~value & active
        if mode == "ballot":
            result = (yes * (np.uint32(1) << LANES.astype(np.uint32))).sum(axis=1).astype(np.uint32)
        elif mode == "all":
            result = ~no.any(axis=1)
        elif mode == "any":
            result = yes.any(axis=1)
        else:
            result = ~(yes.any(axis=1) & no.any(axis=1))
        write(launch, lanes.sel, np.repeat(result[:, None], 32, axis=1)[active])

    return execute


@opcode("match")
def build_match(form: Form) -> Execute:
    type_name = form.take_type("b32", "b64")
    form.take("sync")
    everyone = form.take("any", "all") == "all"
    target = form.operands[0]
    write = form.write(target.first if isinstance(target, Pair) else target, "b32")
    predicate = form.write(target.second, "pred") if isinstance(target, Pair) else None
    value = form.read(form.operands[1], type_name)
    takes_member_mask(form, form.operands[2])
    form.finish(operands=3)

    def execute(launch: Launch, lanes: Lanes) -> None:
        warps, active, sel = whole_warps(launch, lanes)
        data = on_warps(value(launch, sel), warps)
        same = (data[:, :, None] == data[:, None, :]) & active[:, None, :]
        mask = (same * (np.uint32(1) << LANES.astype(np.uint32))).sum(axis=2).astype(np.uint32)
        if everyone:
            agree = (same.sum(axis=2) == active.sum(axis=1)[:, None]) & active
            mask = np.where(agree, mask, np.uint32(0))
            if predicate is not None:
                predicate(launch, lanes.sel, agree[active])
        write(launch, lanes.sel, mask[active])

    return execute


@opcode("activemask")
def build_activemask(form: Form) -> Execute:
    form.take_type("b32")
    write = form.write(form.operands[0], "b32")
    form.finish(operands=1)

    def execute(launch: Launch, lanes: Lanes) -> None:
        _, active, _ = whole_warps(launch, lanes)
        mask = (active * (np.uint32(1) << LANES.astype(np.uint32))).sum(axis=1).astype(np.uint32)
        write(launch, lanes.sel, np.repeat(mask[:, None], 32, axis=1)[active])

    return execute


@opcode("redux")
def build_redux(form: Form) -> Execute:
    type_name = form.take_type("u32", "s32", "b32")
    form.take("sync")
    name = form.take("add", "min", "max", "and", "or", "xor")
    if name is None:
        raise form.unsupported("this reduction is not modelled")
    function = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name]
    dtype = DTYPES[type_name]
    neutral = {"add": 0, "or": 0, "xor": 0}
    start = neutral.get(name, np.iinfo(dtype).max if name == "min" else np.iinfo(dtype).min if name == "max" else -1)
    write, value = form.write(form.operands[0], type_name), form.read(form.operands[1], type_name)
    takes_member_mask(form, form.operands[2])
    form.finish(operands=3)

    def execute(launch: Launch, lanes: Lanes) -> None:
        warps, active, sel = whole_warps(launch, lanes)
        data = np.where(active, on_warps(value(launch, sel), warps), np.array(start).astype(dtype))
        result = function.reduce(data, axis=1, dtype=dtype)
        write(launch, lanes.sel, np.repeat(result[:, None], 32, axis=1)[active])

    return execute


@opcode("elect")
def build_elect(form: Form) -> Execute:
    form.take("sync")
    target = form.operands[0]
    if not isinstance(target, Pair):
        raise form.malformed("elect.sync writes d|p")
    write, predicate = form.write(target.first, "b32"), form.write(target.second, "pred")
    takes_member_mask(form, form.operands[1])
    form.finish(operands=2)

    def execute(launch: Launch, lanes: Lanes) -> None:
        _, active, _ = whole_warps(launch, lanes)
        leader = active.argmax(axis=1).astype(np.uint32)
        write(launch, lanes.sel, np.repeat(leader[:, None], 32, axis=1)[active])
        predicate(launch, lanes.sel, (leader[:, None] == LANES)[active])

    return execute


# -- matrices ---------------------------------------------------------------------------------------------------------


@opcode("mma")
def build_mma(form: Form) -> Execute:
    """mma.sync.aligned.m16n8kK.row.col.D.A.B.C: the fragments' rows go to `tensorcore.mma_sync` as they are."""
    if form.take("sp", "sp::ordered_metadata"):
        raise form.unsupported("sparse mma is not modelled")
    c_type, b_type, a_type, d_type = (form.take_type() for _ in range(4))
    if form.take("sync") is None or form.take("aligned") is None:
        raise form.malformed("mma needs .sync.aligned")
    shape = form.take("m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32")
    if shape is None or form.take("row") is None or form.take("col") is None:
        raise form.unsupported("mma shape or layout; modelled: m16n8k4, k8, k16, k32, .row.col")
    if form.take("satfinite"):
        raise form.unsupported("mma.satfinite")
    form.finish(operands=4)
    form.control = "warp"
    form.tracks_poison = True
    d_op, a_op, b_op, c_op = form.operands
    a, b = ([form.row(o) for o in form.vector(operand)] for operand in (a_op, b_op))
    c_items = form.vector(c_op)
    c_readers = [form.read(o, "b32") for o in c_items]
    c = [form.row(o) if isinstance(o, Reg) else None for o in c_items]
    d = [form.row(o, write=True) for o in form.vector(d_op)]
    name = f"{shape}.{d_type}.{a_type}.{b_type}.{c_type}"
    if name not in supported_mma():
        raise form.unsupported(f"mma {name} is not modelled; modelled: {', '.join(supported_mma())}")

    def execute(launch: Launch, lanes: Lanes) -> None:
        warps, active, sel = whole_warps(launch, lanes)
        if not active.all():
            threads = (warps[:, None] * 32 + LANES)[~active]
            launch.found("missing lanes", "mma.sync needs all 32 lanes of the warp", launch.op, threads)
        file = launch.regs.files["w"]

        def gather(rows: list[Any]) -> np.ndarray:
            return np.stack([file[row.index, sel] for row in rows]).reshape(len(rows), -1, 32)

        addend = np.stack([on_warps(read(launch, sel), warps) for read in c_readers])
        result = mma_sync(shape, a_type, b_type, c_type, gather(a), gather(b), addend, launch.exact, launch.arch)
        for row, value in zip(d, result, strict=True):
            file[row.index, lanes.sel] = value[active] if lanes.count != value.size else value.reshape(-1)
        launch.counters.matrix_instructions += warps.size
        if launch.shadow is not None:
            spread_undefined(launch, lanes, sel, warps, active, a, b, c, d)

    return execute


def spread_undefined(
    launch: Launch, lanes: Lanes, sel: Any, warps: np.ndarray, active: np.ndarray, a: list[Any], b: list[Any], c: list[Any], d: list[Any]
) -> None:
    """D(row, column) is undefined where A's row, B's column or C(row, column) is. Columns nobody reads may be garbage."""
    shadow, poison = launch.shadow, launch.regs.poison
    assert shadow is not None
    if not any(row in poison for row in [*a, *b, *c] if row is not None):
        for row in d:
            shadow.set(row, lanes, None)
        return

    def origins(rows: list[Any]) -> np.ndarray:
        """The largest origin over some registers: [warps, 8 groups, 4]."""
        found = np.zeros(warps.size * 32, np.uint16)
        for row in rows:
            if row in poison:
                found = np.maximum(found, poison[row][sel])
        return found.reshape(-1, 8, 4)

    columns = origins(b).max(axis=2)  # [warps, n]: B column n is held by lanes 4 n .. 4 n + 3
    results = []
    for i, addend in enumerate(c):
        half = i // 2 % 2  # D registers 0, 1 are row `group`, 2, 3 are row `group + 8`
        rows = origins([r for j, r in enumerate(a) if j % 2 == half or len(a) == 1]).max(axis=2)
        at = 2 * np.arange(4) + i % 2
        value = np.maximum(rows[:, :, None], columns[:, None, :][:, :, at])
        results.append(np.maximum(value, origins([addend])).reshape(-1, 32))
    for row, value in zip(d, results, strict=True):
        picked = value[active]
        shadow.set(row, lanes, picked if picked.any() else None)


@opcode("ldmatrix", "stmatrix")
def build_ldmatrix(form: Form) -> Execute:
    """8 x 8 matrices of 16-bit elements: lane 8 i + r points at row r of matrix i; a lane holds two neighbours of row lane // 4."""
    load = form.instruction.op == "ldmatrix"
    form.take_type("b16", "b8")
    if form.take("sync") is None or form.take("aligned") is None or form.take("m8n8") is None:
        raise form.unsupported("only .sync.aligned.m8n8 is modelled")
    transposed = form.take("trans") is not None
    count = int((form.take("x1", "x2", "x4") or "x1")[1:])
    space = take_space(form)
    form.finish(operands=2)
    form.control = "warp"
    form.tracks_poison = True
    register_operand, address_operand = (form.operands[0], form.operands[1]) if load else (form.operands[1], form.operands[0])
    rows = [form.row(o, write=load) for o in form.vector(register_operand)]
    if len(rows) != count:
        raise form.malformed(f".x{count} needs {count} registers")
    read_address = form.address(address_operand)
    space = "shared" if space == "generic" else space
    note_shared_size(form, space, 16)

    def execute(launch: Launch, lanes: Lanes) -> None:
        op = launch.op
        if launch.shadow is not None:
            check_address(launch, op, lanes)
        warps, active, sel = whole_warps(launch, lanes)
        if not active.all():
            launch.found("missing lanes", f"{op.instruction.op} needs all 32 lanes", op, (warps[:, None] * 32 + LANES)[~active])
            return
        addresses = np.broadcast_to(np.asarray(read_address(launch, sel), np.int64), (warps.size * 32,)).reshape(-1, 32)[:, : 8 * count]
        pointing = launch.lanes((warps[:, None] * 32 + LANES[: 8 * count]).reshape(-1))
        for piece in locate(launch, op, pointing, addresses.reshape(-1), 16, space, "load" if load else "store"):
            if piece.which is not None:
                return  # already reported; a matrix with a missing row has no meaning
            if launch.counting:
                count_access(launch, op, pointing, piece, 16, write=not load)
            (load_matrices if load else store_matrices)(launch, sel, pointing, piece, rows, count, transposed)

    return execute


def load_matrices(launch: Launch, sel: Any, pointing: Lanes, piece: Piece, rows: list[Any], count: int, transposed: bool) -> None:
    halves = piece.region.view(np.dtype(np.uint16), 8)[piece.offsets // 16].reshape(-1, count, 8, 8)
    if transposed:
        halves = halves.transpose(0, 1, 3, 2)
    words = np.ascontiguousarray(halves).view(np.uint32).reshape(-1, count, 32)
    for i, row in enumerate(rows):
        launch.regs.files["w"][row.index, sel] = words[:, i].reshape(-1)
    if launch.shadow is None:
        return
    track_load(launch, launch.op, pointing, piece, 16, [None])
    origin = launch.shadow.memory_origin(piece.region, piece.offsets, 16)
    everyone = launch.lanes(np.arange(launch.threads)[sel])
    for i, row in enumerate(rows):
        if origin is None:
            launch.shadow.set(row, everyone, None)
            continue
        by_row = origin.reshape(-1, count, 8)[:, i]  # undefined per matrix row
        spread = np.repeat(by_row.max(axis=1)[:, None], 32, axis=1) if transposed else np.repeat(by_row, 4, axis=1)
        launch.shadow.set(row, everyone, spread.reshape(-1) if spread.any() else None)


def store_matrices(launch: Launch, sel: Any, pointing: Lanes, piece: Piece, rows: list[Any], count: int, transposed: bool) -> None:
    words = np.stack([launch.regs.files["w"][row.index, sel].reshape(-1, 32) for row in rows], axis=1)
    halves = np.ascontiguousarray(words).view(np.uint16).reshape(-1, count, 8, 8)
    if transposed:
        halves = halves.transpose(0, 1, 3, 2)
    piece.region.view(np.dtype(np.uint16), 8)[piece.offsets // 16] = halves.reshape(-1, 8)
    if launch.shadow is not None:
        launch.shadow.shared_access(launch.op, pointing.threads(), piece.offsets, 16, write=True)
        everyone = launch.lanes(np.arange(launch.threads)[sel])
        origin = launch.shadow.get(tuple(rows), everyone)
        launch.shadow.set_memory_origin(piece.region, piece.offsets, 16, 0 if origin is None else int(origin.max()))


