"""Hopper's warpgroup matrix instructions (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions").

D [64, N] += A [64, 16] B [N, 16]^T by four warps, 16 rows each; A from shared memory or registers, B from
shared memory, D in registers. A multiply reads shared memory and delivers D when its warp waits for its
group. With checks, a multiply whose registers anything else has touched since the warp's last `wgmma.fence`
is reported, and one whose descriptors contradict how cp.async stored the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Execute, Form, Op, opcode
from .matrices import CORE_BYTES, DescriptorError, decode_shared, element_offsets
from .registers import Row
from .shadow import WGMMA_IN_FLIGHT
from .syntax import Imm, Reg, Vec
from .tensorcore import dot
from .warp import on_warps, takes_whole_warps, whole_warps

if TYPE_CHECKING:
    from .launch import Lanes, Launch

M, K, WARP_ROWS = 64, 16, 16
LANE = np.arange(32)


@dataclass
class WarpgroupMultiply:
    """One wgmma in flight, over many warps (flat warp numbers, ascending)."""

    op: Op
    warps: np.ndarray
    group: np.ndarray  # the number of each warp's commit that it belongs to
    a_offsets: np.ndarray | None  # [16, K, warps] byte offsets in shared memory (flat), or None:
    a_bits: np.ndarray | None  # [16, K, warps] elements from registers
    b_offsets: np.ndarray  # [N, K, warps]
    kind: str
    rows: list[Row]
    accumulate: np.ndarray  # [warps]
    words: np.ndarray  # [warps, number] of the shared-memory words that each warp reads (none without checks)
    before: np.ndarray | None  # origins of D [registers, warps * 32] when it was issued
    number: int  # in the trace


def fragment(n: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, column) of D register i of a lane, [N / 2, 32] (PTX ISA, "Register fragment D of
    wgmma.mma_async.m64nNk16")."""
    i = np.arange(n // 2)[:, None]
    return LANE // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (LANE % 4) + i % 2


class WarpgroupMultiplies:
    """All wgmma in flight, with each warp's number of committed groups."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.committed = np.zeros(launch.threads // 32, np.int32)
        self.pending: list[WarpgroupMultiply] = []
        self.fenced = np.zeros(launch.threads // 32, bool)  # has the warp executed a wgmma.fence?
        # Since its last one: the latest instruction (-1: none), by register and warp, that is not a wgmma.
        self.touched: dict[str, np.ndarray] = {}

    def touch(self, op: Op, lanes: Lanes, names: tuple[str, ...]) -> None:
        """Something other than a wgmma has accessed registers of wgmmas."""
        if self.launch.shadow is None:
            return
        warps = np.unique(lanes.threads() >> 5)
        for name in names:
            if name not in self.touched:
                self.touched[name] = np.full(self.fenced.size, -1, np.int32)
            self.touched[name][warps] = op.index

    def fence(self, warps: np.ndarray) -> None:
        """wgmma.fence: what these warps did with their registers comes before their next wgmmas."""
        self.fenced[warps] = True
        for latest in self.touched.values():
            latest[warps] = -1

    def check_fence(self, op: Op, warps: np.ndarray, names: tuple[str, ...]) -> None:
        """Whether a fence stands between the last other access to these registers and a wgmma."""
        shadow = self.launch.shadow
        if shadow is None:
            return
        for name in names:
            latest = self.touched[name][warps] if name in self.touched else np.full(warps.size, -1)
            if (latest >= 0).any():
                where = shadow.place(int(latest[latest >= 0][0]))
                message = (
                    f"register {name} was accessed at {where}, and no wgmma.fence orders that before this"
                )
                self.launch.found("missing wgmma.fence", message, op, warps[latest >= 0] * 32)
                return
        if not self.fenced[warps].all():
            message = "the first wgmma of a warp needs a wgmma.fence before it"
            self.launch.found("missing wgmma.fence", message, op, warps[~self.fenced[warps]] * 32)
            self.fenced[warps] = True  # the first one is the finding

    def wait(self, warps: np.ndarray, left: int) -> None:
        """Completes, in order, all groups of these warps but the `left` most recently committed."""
        waiting = np.zeros(self.committed.size, bool)
        waiting[warps] = True
        remaining, completed = [], False
        for item in self.pending:
            done = waiting[item.warps] & (item.group < self.committed[item.warps] - left)
            if done.any():
                self.complete(part_of(item, done))
                completed = True
            if not done.all():
                remaining.append(part_of(item, ~done))
        self.pending = remaining
        if completed and self.launch.shadow is not None:
            for item in remaining:
                self.blame(item)

    def blame(self, item: WarpgroupMultiply) -> None:
        """Marks D as in flight; what it held stays with the multiply, which adds to it when it completes."""
        shadow = self.launch.shadow
        assert shadow is not None
        lanes = self.launch.lanes(threads_of(item.warps))
        origin = np.full(lanes.count, shadow.origin(WGMMA_IN_FLIGHT, item.op), np.uint16)
        for i, row in enumerate(item.rows):
            held = shadow.get((row,), lanes)
            if held is not None:
                if item.before is None:
                    item.before = np.zeros((len(item.rows), lanes.count), np.uint16)
                held = np.where(np.isin(held, shadow.in_flight), 0, held)
                item.before[i] = np.maximum(item.before[i], held)
            shadow.set(row, lanes, origin)

    def complete(self, item: WarpgroupMultiply) -> None:
        launch, n = self.launch, 2 * len(item.rows)
        if launch.trace is not None:
            launch.trace.work("finish", item.op, threads_of(item.warps), item.number)
        elements = launch.memory.shared.view(np.dtype(np.uint16), 1)[:, 0]
        a = item.a_bits if item.a_offsets is None else elements[item.a_offsets >> 1].astype(np.uint32)
        b = elements[item.b_offsets >> 1].astype(np.uint32).transpose(1, 0, 2)
        assert a is not None
        sel = threads_of(item.warps)
        file = launch.regs.files["w"]
        row, column = fragment(n)
        c = np.zeros((WARP_ROWS, n, item.warps.size), np.uint32)
        held = np.stack([file[r.index, sel] for r in item.rows]).reshape(len(item.rows), -1, 32)
        c[row, column] = np.where(item.accumulate[None, :, None], held, np.uint32(0)).transpose(0, 2, 1)
        d = dot(
            np.ascontiguousarray(a),
            np.ascontiguousarray(b),
            c,
            item.kind,
            item.kind,
            "f32",
            exact=launch.exact,
            arch=launch.arch,
        )
        delivered = d[row, column].transpose(0, 2, 1).reshape(len(item.rows), -1)
        for i, r in enumerate(item.rows):
            file[r.index, sel] = delivered[i]
        if launch.shadow is not None:
            self._spread(item, sel, row, column)

    def _spread(self, item: WarpgroupMultiply, sel: np.ndarray, row: np.ndarray, column: np.ndarray) -> None:
        """Origins of D: undefined rows of A, undefined columns of B, and what D held."""
        launch, shadow = self.launch, self.launch.shadow
        assert shadow is not None
        own = item.warps % launch.warps_per_cta
        for warp in np.unique(own):  # warps of one CTA read the same words of B: one at a time
            same = own == warp
            words = item.words[same]
            shadow.finish_async_reads(words)
            # The reads end here: whoever overwrites must come after this wait.
            shadow.read_clock[words, warp] = shadow.order.known[item.warps[same], warp][:, None]
            shadow.read_pc[words] = item.op.index
        shared = launch.memory.shared
        assert shared.undefined is not None
        origin = shared.undefined[item.b_offsets // shared.granule].max(axis=1)[
            column
        ]  # [registers, 32, warps]
        if item.a_offsets is not None:
            origin = np.maximum(origin, shared.undefined[item.a_offsets // shared.granule].max(axis=1)[row])
        origin = origin.transpose(0, 2, 1).reshape(len(item.rows), -1)
        keep = np.repeat(item.accumulate, 32)
        lanes = launch.lanes(sel)
        for i, r in enumerate(item.rows):
            now = shadow.get((r,), lanes)
            total = origin[i]
            for held in (now, None if item.before is None else item.before[i]):
                if held is not None:
                    total = np.maximum(
                        total, np.where(keep & ~np.isin(held, shadow.in_flight), held, 0).astype(np.uint16)
                    )
            shadow.set(r, lanes, total if total.any() else None)


def part_of(item: WarpgroupMultiply, mask: np.ndarray) -> WarpgroupMultiply:
    """The part of a multiply that belongs to some of its warps."""
    if mask.all():
        return item
    lanes = np.repeat(mask, 32)
    return WarpgroupMultiply(
        item.op, item.warps[mask], item.group[mask],
        None if item.a_offsets is None else item.a_offsets[:, :, mask],
        None if item.a_bits is None else item.a_bits[:, :, mask],
        item.b_offsets[:, :, mask], item.kind, item.rows, item.accumulate[mask],
        item.words[mask],
        None if item.before is None else item.before[:, lanes], item.number,
    )  # fmt: skip


def threads_of(warps: np.ndarray) -> np.ndarray:
    """All threads of some warps."""
    return (warps[:, None] * 32 + LANE).reshape(-1)


@opcode("wgmma")
def build_wgmma(form: Form) -> Execute:
    action = form.mods.pop(0) if form.mods else ""
    if form.take("sync") is None or form.take("aligned") is None:
        raise form.malformed("wgmma needs .sync.aligned")
    takes_whole_warps(form)
    if action == "mma_async":
        return build_mma_async(form)
    if action == "fence":
        form.finish(operands=0)
        return lambda launch, lanes: launch.multiplies.fence(np.unique(lanes.threads() >> 5))
    if action == "commit_group":
        form.finish(operands=0)

        def commit(launch: Launch, lanes: Lanes) -> None:
            launch.multiplies.committed[np.unique(lanes.threads() >> 5)] += 1

        return commit
    if action == "wait_group":
        if not form.operands or not isinstance(form.operands[0], Imm):
            raise form.malformed("wgmma.wait_group takes a literal")
        left = int(form.operands[0].value)
        form.finish(operands=1)
        form.waits_for_mmas = left == 0
        return lambda launch, lanes: launch.multiplies.wait(np.unique(lanes.threads() >> 5), left)
    raise form.unsupported(f"wgmma.{action} is not modelled")


def literal(form: Form, operand: Any, allowed: tuple[int, ...], what: str) -> int:
    if not isinstance(operand, Imm) or operand.value not in allowed:
        raise form.malformed(f"{what} is one of {', '.join(map(str, allowed))}")
    return int(operand.value)


def build_mma_async(form: Form) -> Execute:
    b_type, a_type, d_type = (form.take_type() for _ in range(3))
    if d_type != "f32" or a_type != b_type or a_type not in ("f16", "bf16"):
        raise form.unsupported(f"wgmma {d_type}.{a_type}.{b_type}; modelled: f32.f16.f16 and f32.bf16.bf16")
    shape = next((m for m in form.mods if m.startswith("m64n") and m.endswith("k16")), None)
    if shape is None:
        raise form.unsupported("wgmma shape; modelled: m64nNk16")
    form.mods.remove(shape)
    n = int(shape[4:-3])
    if n % 8 or not 8 <= n <= 256:
        raise form.malformed(f"N = {n}: a multiple of 8 from 8 to 256")
    d_op, a_op, b_op, *flags = form.operands
    registers_hold_a = isinstance(a_op, Vec)
    form.finish(operands=7 if registers_hold_a else 8)
    rows = [form.row(o, write=True) for o in form.vector(d_op)]
    for operand in form.vector(d_op):
        form.row(operand)
    if len(rows) != n // 2:
        raise form.malformed(f"D has {n // 2} registers, {len(rows)} given")
    a_rows = [form.row(o) for o in form.vector(a_op)] if registers_hold_a else []
    a = None if registers_hold_a else form.read(a_op, "b64")
    b = form.read(b_op, "b64")
    scale_d = form.read(flags[0], "pred") if isinstance(flags[0], Reg) else None
    constant = None if scale_d is not None else bool(literal(form, flags[0], (0, 1), "scale-d"))
    for operand, what in zip(flags[1:3], ("imm-scale-a", "imm-scale-b"), strict=True):
        if literal(form, operand, (-1, 1), what) != 1:
            raise form.unsupported(f"{what} = -1")
    transposes = [literal(form, operand, (0, 1), "a transpose flag") for operand in flags[3:]]
    majors = [not t for t in ([0, *transposes] if registers_hold_a else transposes)]
    form.tracks_poison = True
    form.is_async_mma = True
    form.decoder.matrix_tiles = True
    vectors = [d_op, a_op] if registers_hold_a else [d_op]
    names = tuple(o.name for vector in vectors for o in form.vector(vector) if isinstance(o, Reg))
    form.fragments = names
    form.decoder.smallest_shared = min(form.decoder.smallest_shared, 16)

    def execute(launch: Launch, lanes: Lanes) -> None:
        warps, _, sel = whole_warps(launch, lanes)
        launch.multiplies.check_fence(launch.op, warps, names)
        accumulate = (
            np.full(warps.size, constant) if scale_d is None else on_warps(scale_d(launch, sel), warps)[:, 0]
        )
        descriptors = [None if r is None else on_warps(r(launch, sel), warps)[:, 0] for r in (a, b)]
        values = np.stack([np.zeros(warps.size, np.uint64) if v is None else v for v in descriptors], axis=1)
        bits = registers_a(launch, sel, a_rows) if registers_hold_a else None
        for key in np.unique(values, axis=0):
            mine = np.flatnonzero((values == key).all(axis=1))
            part = None if bits is None else bits[:, :, mine]
            tiles = tiles_of(launch, warps[mine], None if a is None else int(key[0]), int(key[1]), n, majors)
            if tiles is not None:
                issue(launch, warps[mine], tiles, part, a_type, rows, accumulate[mine])

    return execute


def registers_a(launch: Launch, sel: Any, rows: list[Row]) -> np.ndarray:
    """A [16, K, warps] from the fragment of mma.m16n8k16."""
    held = np.stack(
        [launch.regs.files["w"][row.index, sel].reshape(-1, 32) for row in rows]
    )  # [4, warps, 32]
    a = np.zeros((WARP_ROWS, K, held.shape[1]), np.uint32)
    for r in range(4):
        for half in range(2):
            a[LANE // 4 + 8 * (r % 2), 2 * (LANE % 4) + half + 8 * (r // 2)] = (
                held[r] >> np.uint32(16 * half) & np.uint32(0xFFFF)
            ).T
    return a


def tiles_of(
    launch: Launch, warps: np.ndarray, a: int | None, b: int, n: int, majors: list[bool]
) -> tuple[np.ndarray | None, np.ndarray] | None:
    """Byte offsets (within a CTA) of A [64, K] and B [N, K]; None if a descriptor is refused."""
    op = launch.op
    try:
        tile_a = None if a is None else element_offsets(decode_shared(a, tcgen05=False), M, K, majors[0])
        tile_b = element_offsets(decode_shared(b, tcgen05=False), n, K, majors[1])
    except DescriptorError as error:
        launch.found("descriptor", str(error), op, warps * 32)
        return None
    for tile, name in ((tile_a, "A"), (tile_b, "B")):
        if tile is not None and tile.max() + 2 > launch.memory.shared_bytes:
            message = f"operand {name} reaches shared byte {tile.max() + 1} ({launch.memory.shared_bytes} bytes there)"
            launch.found("out of bounds", message, op, warps * 32)
            return None
        if tile is not None and launch.shadow is not None and majors["AB".index(name)]:
            launch.shadow.check_tile(op, warps * 32, tile[:, :: CORE_BYTES // 2], name)
    return tile_a, tile_b


def reads_of(launch: Launch, warps: np.ndarray, tiles: tuple[np.ndarray | None, np.ndarray]) -> np.ndarray:
    """Starts the reads of a multiply, for the race checks: [warps, number] of shared-memory words."""
    shadow = launch.shadow
    if shadow is None:
        return np.zeros((warps.size, 0), np.int64)
    own = warps % launch.warps_per_cta
    words: dict[int, np.ndarray] = {}
    for warp in np.unique(own):
        first = WARP_ROWS * (warp % 4)
        mine = tiles[1:] if tiles[0] is None else (tiles[0][first : first + WARP_ROWS], tiles[1])
        same = np.flatnonzero(own == warp)
        found = shadow.start_async_reads(launch.op, warps[same] * 32, list(mine)).reshape(same.size, -1)
        words.update(zip(same.tolist(), found, strict=True))
    return np.stack([words[i] for i in range(warps.size)])


def issue(
    launch: Launch, warps: np.ndarray, tiles: tuple[np.ndarray | None, np.ndarray],
    a_bits: np.ndarray | None, kind: str,
    rows: list[Row], accumulate: np.ndarray,
) -> None:  # fmt: skip
    """Starts one multiply in these warps: warp w of a warpgroup computes rows 16 (w % 4) .. + 15."""
    multiplies, shadow = launch.multiplies, launch.shadow
    base = warps // launch.warps_per_cta * launch.memory.shared_stride
    quarter = warps % launch.warps_per_cta % 4
    a_offsets = None
    if tiles[0] is not None:
        a_offsets = np.stack([tiles[0][WARP_ROWS * q : WARP_ROWS * (q + 1)] for q in quarter], axis=2) + base
    words = reads_of(launch, warps, tiles)
    b_offsets = tiles[1][:, :, None] + base
    launch.asynchronous.issued += 1
    item = WarpgroupMultiply(
        launch.op, warps, multiplies.committed[warps], a_offsets, a_bits, b_offsets, kind, rows, accumulate,
        words, None, launch.asynchronous.issued,
    )  # fmt: skip
    if launch.trace is not None:
        launch.trace.work("start", item.op, threads_of(warps), item.number)
    multiplies.pending.append(item)
    if shadow is not None:
        multiplies.blame(item)
    launch.counters.tensor_instructions += int((quarter == 0).sum())  # one per warpgroup
