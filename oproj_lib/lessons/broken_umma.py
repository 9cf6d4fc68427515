"""UMMA kernels that break one rule each, to see what the virtual GPU says about it.

`BROKEN_UMMA` maps a name to the class, a configuration in which the mistake matters, and the kind of finding
that names it. As in `broken`: each class overrides as little as it can, and the comment `# the mistake` marks
the one line that is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from oproj_lib.kernels import ring_primitives as sync
from oproj_lib.kernels import umma_primitives as umma
from oproj_lib.kernels.ring_lane import Loader, NamedBarrier, RingShared, this_thread, this_warp
from oproj_lib.kernels.umma import OprojUmma
from oproj_lib.kernels.umma_configuration import THREADS, UmmaPlan
from oproj_lib.kernels.umma_lane import UmmaShared
from oproj_lib.layouts import ring, tmem
from oproj_lib.layouts.descriptors import ADDRESS_UNIT_SHIFT, SharedDescriptor, SwizzleMode
from oproj_lib.layouts.fragments import CHUNK_BYTES, WARP_LANES
from oproj_lib.layouts.swizzle import ATOM_BYTES, ROW_BYTES


class NoProxyFence(OprojUmma):
    """Multiplies what cp.async has written without a fence between the generic and the async proxy."""

    def multiply(self, shared: UmmaShared, batch: int) -> None:  # type: ignore[override]
        plan = self.plan(batch)
        accumulator = umma.load_shared_word(shared.tmem_slot)
        a, b = self.tile_descriptors(shared)
        elected = sync.elect_one()
        for block in range(self.config.kblocks):
            slot, parity = ring.slot_of(block, plan.stages), ring.full_parity(block, plan.stages)
            sync.barrier_wait(shared.barriers, ring.full_barrier(slot), parity)
            cute.arch.sync_warp()
            umma.tcgen05_fence_after()  # the mistake: proxy_fence() should come first
            self.issue(elected, accumulator, a, b, shared, batch, block)


class WrongParity(OprojUmma):
    """Waits for the phase before the right one, which is always over already."""

    def multiply(self, shared: UmmaShared, batch: int) -> None:  # type: ignore[override]
        plan = self.plan(batch)
        accumulator = umma.load_shared_word(shared.tmem_slot)
        a, b = self.tile_descriptors(shared)
        elected = sync.elect_one()
        for block in range(self.config.kblocks):
            slot, parity = ring.slot_of(block, plan.stages), ring.full_parity(block, plan.stages)
            sync.barrier_wait(shared.barriers, ring.full_barrier(slot), 1 - parity)  # the mistake: 1 -
            cute.arch.sync_warp()
            sync.proxy_fence()
            umma.tcgen05_fence_after()
            self.issue(elected, accumulator, a, b, shared, batch, block)


class OneThreadDoesNotArrive(OprojUmma):
    """The last loader copies, but never says that its copies have landed."""

    @cute.jit
    def arrive(self, shared: cutlass.Constexpr, slot: cutlass.Constexpr) -> None:
        if this_thread() < ring.LOADERS - 1:  # the mistake: < LOADERS, or no condition at all
            sync.barrier_arrive_after_copies(shared.barriers, ring.full_barrier(slot))


class NoCommit(OprojUmma):
    """Never says that the accumulator is complete."""

    def commit(self, shared: UmmaShared, plan: UmmaPlan, block: int) -> None:
        if block < self.config.kblocks - 1:  # the mistake: the last block commits too
            super().commit(shared, plan, block)


class FreesTooEarly(OprojUmma):
    """Frees tensor memory without waiting for those who read it."""

    def free(self, shared: UmmaShared, batch: int) -> None:
        address = umma.load_shared_word(shared.tmem_slot)
        umma.tmem_free(address, self.plan(batch).tmem_columns)  # the mistake: TMEM_READ should come first


class NeverFrees(OprojUmma):
    """Leaves its tensor memory allocated: the next kernel that wants it waits for ever."""

    def free(self, shared: UmmaShared, batch: int) -> None:
        cute.arch.barrier(barrier_id=NamedBarrier.TMEM_READ, number_of_threads=THREADS)
        umma.tcgen05_fence_after()  # the mistake: tmem_free() should follow


class AnotherWarpsQuarter(OprojUmma):
    """Reads the lanes of the next warp, which the hardware does not let it reach."""

    def transpose(self, shared: UmmaShared, batch: int) -> None:
        lane, warp = this_thread() % WARP_LANES, (this_warp() + 1) % tmem.QUARTERS  # the mistake: + 1
        self.transpose_rows(
            shared,
            batch,
            first_lane=tmem.first_lane(warp),
            row=warp * tmem.ROWS_PER_QUARTER + lane,
            holds_row=lane < tmem.ROWS_PER_QUARTER,
        )


class LanesOf128Rows(OprojUmma):
    """Takes row r to be in lane r, as it is when an MMA has 128 rows."""

    def transpose(self, shared: UmmaShared, batch: int) -> None:
        lane, warp = this_thread() % WARP_LANES, this_warp()
        self.transpose_rows(
            shared,
            batch,
            first_lane=tmem.first_lane(warp),
            row=warp * WARP_LANES + lane,  # the mistake: 16 rows per warp, lanes 16-31 hold nothing
            holds_row=warp < 2,
        )


class UnswizzledStores(OprojUmma):
    """Stores the tiles row by row, and tells the MMA that they are swizzled."""

    def loader(self, x: cute.Tensor, weight: cute.Tensor, shared: RingShared) -> Loader:
        lane = super().loader(x, weight, shared)
        plain = ring.copy_row(lane.tid) * ROW_BYTES + ring.copy_chunk(lane.tid) * CHUNK_BYTES
        return replace(lane, target=shared.ring + plain)  # the mistake: the chunk is not XORed with the row


class WrongStride(OprojUmma):
    """Gives the MMA half the distance between groups of 8 rows."""

    def tile_descriptors(self, shared: RingShared) -> tuple[Int64, Int64]:
        layout = SharedDescriptor(
            address=0,
            stride_byte_offset=ATOM_BYTES // 2,  # the mistake: 8 rows of 128 bytes are 1024
            swizzle=SwizzleMode.BYTES_128,
        )
        a = Int64(shared.ring >> ADDRESS_UNIT_SHIFT) + layout.encode()
        return a, a + (ring.W_TILE_BYTES >> ADDRESS_UNIT_SHIFT)


class ClearsTheTileEarly(OprojUmma):
    """Clears the epilogue tile while it waits for the accumulator: the MMAs still read that memory."""

    def epilogue(
        self,
        shared: UmmaShared,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        batch: int,
        state: Int64 | None = None,
    ) -> None:
        always = this_thread() < ring.LOADERS
        tile = shared.ring + ring.tile_word_offset(0, this_thread() % ring.ROWS_PER_PASS)
        for token in range(batch):
            offset = ring.tile_word_offset(token, 0)
            umma.store_shared_word(tile, offset, Uint32(0), always)  # the mistake: too early
        super().epilogue(shared, mailbox, mc, slot, batch, state)


@dataclass(frozen=True)
class BrokenUmma:
    """engine: the class; kind: the finding that names the mistake; method: where the finding points; stages:
    ring stages in which the mistake matters."""

    engine: type[OprojUmma]
    kind: str
    method: str
    k: int = 768
    batch: int = 8
    stages: int = 2

    def build(self) -> OprojUmma:
        budget = self.stages * ring.stage_bytes(ring.padded_tokens(self.batch))
        return self.engine(self.k, budget=budget)


BROKEN_UMMA = {
    "no proxy fence": BrokenUmma(NoProxyFence, "missing proxy fence", "issue_block"),
    "wrong parity": BrokenUmma(WrongParity, "race", "load_weight_tile"),
    "one thread does not arrive": BrokenUmma(OneThreadDoesNotArrive, "deadlock", "multiply"),
    "no commit": BrokenUmma(NoCommit, "deadlock", "epilogue"),
    "tensor memory freed too early": BrokenUmma(FreesTooEarly, "race", "free"),
    "tensor memory never freed": BrokenUmma(NeverFrees, "tensor memory leak", "set_up"),
    "another warp's quarter": BrokenUmma(AnotherWarpsQuarter, "lane quarter", "transpose_rows"),
    "lanes of 128 rows": BrokenUmma(LanesOf128Rows, "undefined data", "publish_chunk"),
    "unswizzled stores": BrokenUmma(UnswizzledStores, "descriptor", "issue_block"),
    "wrong stride": BrokenUmma(WrongStride, "descriptor", "issue_block"),
    "tile cleared early": BrokenUmma(ClearsTheTileEarly, "race", "epilogue"),
}
