"""tcgen05.mma and tcgen05.commit (PTX ISA, "TensorCore 5th Generation Family Instructions").

MMAs are asynchronous: they read shared memory and write D in tensor memory when they complete (see
`asynchrony`); a commit arrives on its mbarrier after everything before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
from .shadow import CHUNK_BYTES
from .syntax import Addr, Vec
from .tensorcore import dot
from .tmem import LANES, build_alloc, build_dealloc, build_relinquish
from .tmem_access import build_ld, build_st, build_wait

if TYPE_CHECKING:
    from .launch import Lanes, Launch

K = 16  # of one kind::f16 MMA


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


def build_fence(form: Form) -> Execute:
    """Orders tcgen05 operations around thread synchronisation. The virtual GPU's order of tcgen05 operations
    follows from completion alone, so the fence moves nothing; that one is missing is not reported."""
    form.finish(operands=0)
    return lambda launch, lanes: None


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
    form.decoder.matrix_tiles = True

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
        if launch.shadow is not None and tile.k_major:
            launch.shadow.check_tile(op, threads, tile.offsets[:, :: CHUNK_BYTES // 2], name)
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
