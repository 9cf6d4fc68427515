"""Warp-wide instructions: shuffles, votes, matrix fragments (PTX ISA, "Parallel Synchronization and
Communication", "Warp Level Matrix Instructions"). The scheduler hands them whole warps, or says which
lanes never came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .access import Piece, check_address, count_access, locate, note_shared_size, take_space, track_load
from .decode import Execute, Form, Reader, Writer, opcode
from .elementwise import required
from .memory import SHARED_BASE
from .registers import DTYPES, Row
from .syntax import Operand, Pair, Reg
from .tensorcore import mma_sync, supported_mma

if TYPE_CHECKING:
    from .launch import Lanes, Launch

LANES = np.arange(32)
LANE_BITS = np.uint32(1) << LANES.astype(np.uint32)
EVERYONE = np.uint32(0xFFFFFFFF)


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


def as_mask(flags: np.ndarray) -> np.ndarray:
    """Flags [..., 32] as 32-bit masks, lane 0 lowest."""
    return (flags * LANE_BITS).sum(axis=-1).astype(np.uint32)


def takes_member_mask(form: Form, operand: Any) -> Reader:
    """All lanes named in the mask must execute the instruction together; the scheduler gathers them."""
    form.control = "warp"
    form.member_mask = form.read(operand, "u32")
    return form.member_mask


class Team:
    """The lanes that execute one `.sync` instruction, and with whom each of them does it.

    Lanes of one warp may execute the same instruction with different masks, as disjoint groups; every
    group counts only its own members. A lane that its own mask does not name is reported.
    """

    def __init__(self, launch: Launch, lanes: Lanes, mask: Reader) -> None:
        self.launch, self.lanes = launch, lanes
        self.warps, self.active, self.sel = whole_warps(launch, lanes)
        given = np.asarray(mask(launch, self.sel))
        self.masks = on_warps(given, self.warps)
        self.uniform = given.ndim == 0 and given == EVERYONE  # all active lanes of a warp are one group
        if self.uniform:
            return
        outside = self.active & ((self.masks & LANE_BITS) == 0)
        if outside.any():
            what = f"{launch.op.instruction.op}.sync by a lane that its member mask does not name"
            launch.found("member mask", what, launch.op, self.threads(outside))
        present = as_mask(self.active)[:, None]
        self.uniform = bool(((self.masks & present) == present)[self.active].all())

    def threads(self, flags: np.ndarray) -> np.ndarray:
        return (self.warps[:, None] * 32 + LANES)[flags]

    def of_warps(self, value: Any) -> np.ndarray:
        """A value of all lanes: [warps, 32]."""
        return on_warps(value, self.warps)

    def members(self) -> np.ndarray:
        """[warps, 32, 32]: does lane j take part in what lane i does; [warps, 1, 32] if all lanes agree."""
        if self.uniform:
            return self.active[:, None, :]
        return (self.masks[:, :, None] & LANE_BITS != 0) & self.active[:, None, :]

    def write(self, writer: Writer, value: np.ndarray) -> None:
        """Writes a value per lane, [warps, 32] or [warps, 1], to the executing lanes."""
        full = np.broadcast_to(value, self.active.shape)
        writer(self.launch, self.lanes.sel, full[self.active])


def destinations(form: Form, type_name: str) -> tuple[Writer, Writer | None]:
    """`d` or `d|p`."""
    target = form.operands[0]
    if isinstance(target, Pair):
        return form.write(target.first, type_name), form.write(target.second, "pred")
    return form.write(target, type_name), None


def needs_sync(form: Form) -> None:
    if form.take("sync") is None:
        raise form.unsupported(f"{form.instruction.op} without .sync ended with sm_70")


def takes_whole_warps(form: Form) -> None:
    """All lanes of the warp must execute the instruction together."""
    form.control = "warp"


@opcode("shfl")
def build_shfl(form: Form) -> Execute:
    form.take_type("b32")
    needs_sync(form)
    mode = required(form, "up", "down", "bfly", "idx")
    form.finish(operands=5)
    write, predicate = destinations(form, "b32")
    value, b, c = (form.read(operand, "b32") for operand in form.operands[1:4])
    source_row, target_row = shuffled_rows(form)
    mask = takes_member_mask(form, form.operands[4])
    form.tracks_poison = True

    def execute(launch: Launch, lanes: Lanes) -> None:
        team = Team(launch, lanes, mask)
        warps, active, sel = team.warps, team.active, team.sel
        data = on_warps(value(launch, sel), warps)
        amount = on_warps(b(launch, sel), warps).astype(np.int64) & 31
        control = on_warps(c(launch, sel), warps).astype(np.int64)
        source, inside = shuffle_source(mode, amount, control)
        taken = np.take_along_axis(data, source, axis=1)
        members = np.broadcast_to(team.members(), (warps.size, 32, 32))
        missing = ~np.take_along_axis(members, source[:, :, None], axis=2)[:, :, 0] & active
        if missing.any():
            what = f"shfl.{mode} reads a lane that does not take part"
            launch.found("inactive lane", what, launch.op, team.threads(missing))
        team.write(write, taken)
        if predicate is not None:
            team.write(predicate, inside)
        if launch.shadow is not None and source_row is not None and target_row is not None:
            origin = None
            if source_row in launch.regs.poison:
                held = launch.regs.poison[source_row].reshape(-1, 32)[warps]
                moved = np.take_along_axis(held, source, axis=1)[active]
                origin = moved if moved.any() else None
            launch.shadow.set(target_row, lanes, origin)

    return execute


def shuffle_source(mode: str, amount: np.ndarray, control: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(source lane, whether it is in range), [warps, 32], as the pseudo-code of `shfl.sync` has it."""
    segment, clamp = control >> 8 & 31, control & 31
    lowest = LANES & segment
    limit = lowest | clamp & ~segment
    if mode == "up":
        source = LANES - amount
        inside = source >= limit
    else:
        choices = {"down": LANES + amount, "bfly": LANES ^ amount, "idx": lowest | amount & ~segment}
        source = choices[mode]
        inside = source <= limit
    return np.where(inside, source, LANES) & 31, inside


def shuffled_rows(form: Form) -> tuple[Row | None, Row | None]:
    """The register rows between which undefined data moves, where there are such."""
    target = form.operands[0]
    first = target.first if isinstance(target, Pair) else target
    source = form.operands[1]
    declared = isinstance(source, Reg) and source.name in form.decoder.entry.registers
    return (
        form.row(source) if declared else None,
        form.row(first, write=True) if isinstance(first, Reg) else None,
    )


@opcode("vote")
def build_vote(form: Form) -> Execute:
    type_name = form.take_type("pred", "b32")
    needs_sync(form)
    mode = required(form, "all", "any", "uni", "ballot")
    if (mode == "ballot") != (type_name == "b32"):
        raise form.malformed(f"vote.{mode} does not give .{type_name}")
    form.finish(operands=3)
    write = form.write(form.operands[0], type_name)
    p = form.read(form.operands[1], "pred")
    mask = takes_member_mask(form, form.operands[2])

    def execute(launch: Launch, lanes: Lanes) -> None:
        team = Team(launch, lanes, mask)
        value = team.of_warps(p(launch, team.sel))[:, None, :]
        members = team.members()
        yes, no = value & members, ~value & members
        if mode == "ballot":
            result = as_mask(yes)
        elif mode == "all":
            result = ~no.any(axis=2)
        elif mode == "any":
            result = yes.any(axis=2)
        else:
            result = ~(yes.any(axis=2) & no.any(axis=2))
        team.write(write, result)

    return execute


@opcode("match")
def build_match(form: Form) -> Execute:
    type_name = form.take_type("b32", "b64")
    needs_sync(form)
    everyone = required(form, "any", "all") == "all"
    form.finish(operands=3)
    if not everyone and isinstance(form.operands[0], Pair):
        raise form.malformed("match.any has no predicate result")
    write, predicate = destinations(form, "b32")
    value = form.read(form.operands[1], type_name)
    mask = takes_member_mask(form, form.operands[2])

    def execute(launch: Launch, lanes: Lanes) -> None:
        team = Team(launch, lanes, mask)
        data = team.of_warps(value(launch, team.sel))
        members = team.members()
        same = (data[:, :, None] == data[:, None, :]) & members
        result = as_mask(same)
        if everyone:
            agree = same.sum(axis=2) == members.sum(axis=2)
            result = np.where(agree, result, np.uint32(0))
            if predicate is not None:
                team.write(predicate, agree)
        team.write(write, result)

    return execute


@opcode("activemask")
def build_activemask(form: Form) -> Execute:
    form.take_type("b32")
    form.finish(operands=1)
    write = form.write(form.operands[0], "b32")

    def execute(launch: Launch, lanes: Lanes) -> None:
        _, active, _ = whole_warps(launch, lanes)
        write(launch, lanes.sel, np.repeat(as_mask(active), 32).reshape(-1, 32)[active])

    return execute


@opcode("redux")
def build_redux(form: Form) -> Execute:
    type_name = form.take_type("u32", "s32", "b32")
    needs_sync(form)
    if {"abs", "NaN"} & set(form.mods):
        raise form.unsupported("redux of floats is not modelled")
    name = required(form, *(("and", "or", "xor") if type_name == "b32" else ("add", "min", "max")))
    form.finish(operands=3)
    reductions: dict[str, np.ufunc] = {
        "add": np.add, "min": np.minimum, "max": np.maximum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip
    function, dtype = reductions[name], DTYPES[type_name]
    neutral = {"min": np.iinfo(dtype).max, "max": np.iinfo(dtype).min, "and": -1}.get(name, 0)
    write, value = form.write(form.operands[0], type_name), form.read(form.operands[1], type_name)
    mask = takes_member_mask(form, form.operands[2])

    def execute(launch: Launch, lanes: Lanes) -> None:
        team = Team(launch, lanes, mask)
        data = team.of_warps(value(launch, team.sel))[:, None, :]
        data = np.where(team.members(), data, np.array(neutral).astype(dtype))
        team.write(write, function.reduce(data, axis=2, dtype=dtype))

    return execute


@opcode("elect")
def build_elect(form: Form) -> Execute:
    """The leader is the lowest lane of the group (the manual only says that it is always the same one)."""
    needs_sync(form)
    form.finish(operands=2)
    if not isinstance(form.operands[0], Pair):
        raise form.malformed("elect.sync writes d|p")
    write, predicate = destinations(form, "b32")
    mask = takes_member_mask(form, form.operands[1])

    def execute(launch: Launch, lanes: Lanes) -> None:
        team = Team(launch, lanes, mask)
        leader = team.members().argmax(axis=2).astype(np.uint32)
        team.write(write, leader)
        if predicate is not None:
            team.write(predicate, leader == LANES)

    return execute


# -- matrices --------------------------------------------------------------------------------------


@opcode("mma")
def build_mma(form: Form) -> Execute:
    """mma.sync.aligned.m16n8kK.row.col.D.A.B.C; `tensorcore` takes the fragments' rows as they are."""
    if form.take("sp", "sp::ordered_metadata"):
        raise form.unsupported("sparse mma is not modelled")
    c_type, b_type, a_type, d_type = (form.take_type() for _ in range(4))
    if form.take("sync") is None or form.take("aligned") is None:
        raise form.malformed("mma needs .sync.aligned")
    shape = form.take("m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32")
    layouts = [mod for mod in form.mods if mod in ("row", "col")]
    if shape is None or layouts != ["row", "col"]:
        raise form.unsupported("mma shape or layout; modelled: m16n8k4, k8, k16, k32, .row.col")
    form.mods = [mod for mod in form.mods if mod not in layouts]
    form.finish(operands=4)
    form.control = "warp"
    form.tracks_poison = True
    d_op, a_op, b_op, c_op = form.operands
    name = f"{shape}.{d_type}.{a_type}.{b_type}.{c_type}"
    if name not in supported_mma():
        raise form.unsupported(f"mma {name} is not modelled; modelled: {', '.join(supported_mma())}")
    k, registers = int(shape.rpartition("k")[2]), 32 * 32  # bits of one register over the warp
    check_length(form, "D", d_op, 16 * 8 * DTYPES[d_type].itemsize * 8 // registers)
    check_length(form, "A", a_op, 16 * k * DTYPES[a_type].itemsize * 8 // registers)
    check_length(form, "B", b_op, 8 * k * DTYPES[b_type].itemsize * 8 // registers)
    check_length(form, "C", c_op, 16 * 8 * DTYPES[c_type].itemsize * 8 // registers)
    a, b = ([word_row(form, o) for o in form.vector(operand)] for operand in (a_op, b_op))
    c_items = form.vector(c_op)
    c_readers = [form.read(o, "b32") for o in c_items]
    c = [form.row(o) if isinstance(o, Reg) else None for o in c_items]
    d = [word_row(form, o, write=True) for o in form.vector(d_op)]

    def execute(launch: Launch, lanes: Lanes) -> None:
        warps, active, sel = whole_warps(launch, lanes)
        if not active.all():
            threads = (warps[:, None] * 32 + LANES)[~active]
            launch.found("missing lanes", "mma.sync needs all 32 lanes of the warp", launch.op, threads)
        file = launch.regs.files["w"]

        def gather(rows: list[Any]) -> np.ndarray:
            return np.stack([file[row.index, sel] for row in rows]).reshape(len(rows), -1, 32)

        addend = np.stack([on_warps(read(launch, sel), warps) for read in c_readers])
        result = mma_sync(
            shape, a_type, b_type, c_type, gather(a), gather(b), addend, launch.exact, launch.arch
        )
        for row, value in zip(d, result, strict=True):
            file[row.index, lanes.sel] = value[active] if lanes.count != value.size else value.reshape(-1)
        launch.counters.matrix_instructions += warps.size
        if launch.shadow is not None:
            spread_undefined(launch, lanes, sel, warps, active, a, b, c, d)

    return execute


def check_length(form: Form, name: str, operand: Operand, count: int) -> None:
    length = len(form.vector(operand))
    if length != count:
        raise form.malformed(f"matrix {name} takes {count} registers, not {length}")


def word_row(form: Form, operand: Operand, *, write: bool = False) -> Row:
    """The row of a 32-bit register of a matrix fragment."""
    row = form.row(operand, write=write)
    if row.kind != "w":
        raise form.malformed(f"{operand}: matrix fragments are held in 32-bit registers")
    return row


def spread_undefined(
    launch: Launch,
    lanes: Lanes,
    sel: Any,
    warps: np.ndarray,
    active: np.ndarray,
    a: list[Any],
    b: list[Any],
    c: list[Any],
    d: list[Any],
) -> None:
    """D(row, column) is undefined where A's row, B's column or C(row, column) is. Columns nobody reads may
    be garbage."""
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
    """8 x 8 matrices of 16-bit elements: lane 8 i + r points at row r of matrix i; a lane holds two
    neighbours of row lane // 4."""
    load = form.instruction.op == "ldmatrix"
    form.take_type("b16")
    if form.take("sync") is None or form.take("aligned") is None or form.take("m8n8") is None:
        raise form.unsupported("only .sync.aligned.m8n8 is modelled")
    transposed = form.take("trans") is not None
    count = int(required(form, "x1", "x2", "x4")[1:])
    space = take_space(form)
    if space not in ("shared", "generic"):
        raise form.malformed("matrices are loaded from and stored to shared memory")
    form.finish(operands=2)
    form.control = "warp"
    form.tracks_poison = True
    register_operand, address_operand = (
        (form.operands[0], form.operands[1]) if load else (form.operands[1], form.operands[0])
    )
    rows = [word_row(form, o, write=load) for o in form.vector(register_operand)]
    if len(rows) != count:
        raise form.malformed(f".x{count} needs {count} registers")
    read_address = form.address(address_operand)
    base = SHARED_BASE if space == "generic" else 0  # a generic address must lie in the shared window
    note_shared_size(form, "shared", 16)

    def execute(launch: Launch, lanes: Lanes) -> None:
        op = launch.op
        if launch.shadow is not None:
            check_address(launch, op, lanes)
        warps, active, sel = whole_warps(launch, lanes)
        if not active.all():
            launch.found(
                "missing lanes",
                f"{op.instruction.op} needs all 32 lanes",
                op,
                (warps[:, None] * 32 + LANES)[~active],
            )
            return
        addresses = np.broadcast_to(
            np.asarray(read_address(launch, sel), np.int64), (warps.size * 32,)
        ).reshape(-1, 32)[:, : 8 * count]
        pointing = launch.lanes((warps[:, None] * 32 + LANES[: 8 * count]).reshape(-1))
        offsets, verb = addresses.reshape(-1) - base, "load" if load else "store"
        for piece in locate(launch, op, pointing, offsets, 16, "shared", verb):
            if piece.which is not None:
                return  # already reported; a matrix with a missing row has no meaning
            if launch.counting:
                count_access(launch, op, pointing, piece, 16, write=not load)
            (load_matrices if load else store_matrices)(launch, sel, pointing, piece, rows, count, transposed)

    return execute


def load_matrices(
    launch: Launch, sel: Any, pointing: Lanes, piece: Piece, rows: list[Any], count: int, transposed: bool
) -> None:
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
        spread = (
            np.repeat(by_row.max(axis=1)[:, None], 32, axis=1) if transposed else np.repeat(by_row, 4, axis=1)
        )
        launch.shadow.set(row, everyone, spread.reshape(-1) if spread.any() else None)


def store_matrices(
    launch: Launch, sel: Any, pointing: Lanes, piece: Piece, rows: list[Any], count: int, transposed: bool
) -> None:
    words = np.stack([launch.regs.files["w"][row.index, sel].reshape(-1, 32) for row in rows], axis=1)
    halves = np.ascontiguousarray(words).view(np.uint16).reshape(-1, count, 8, 8)
    if transposed:
        halves = halves.transpose(0, 1, 3, 2)
    piece.region.view(np.dtype(np.uint16), 8)[piece.offsets // 16] = halves.reshape(-1, 8)
    if launch.shadow is not None:
        if launch.copies.pending:
            launch.shadow.check_in_flight(launch.op, pointing.threads(), piece.offsets, 16)
        launch.shadow.shared_access(launch.op, pointing.threads(), piece.offsets, 16, write=True)
        everyone = launch.lanes(np.arange(launch.threads)[sel])
        origin = launch.shadow.get(tuple(rows), everyone)
        launch.shadow.set_memory_origin(
            piece.region, piece.offsets, 16, 0 if origin is None else int(origin.max())
        )
