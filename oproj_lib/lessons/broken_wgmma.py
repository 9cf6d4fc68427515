"""wgmma kernels that break one rule each, to see what the virtual GPU says about it.

`BROKEN_WGMMA` maps a name to the class, a configuration in which the mistake matters, and the kind of finding
that names it. As in `broken_umma`: each class overrides as little as it can, and the comment `# the mistake`
marks the one line that is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from oproj_lib.kernels import ring_primitives as sync
from oproj_lib.kernels import wgmma_primitives as wgmma
from oproj_lib.kernels.ring_lane import Loader, RingShared, this_thread
from oproj_lib.kernels.transport import Mailbox
from oproj_lib.kernels.wgmma import OprojWgmma
from oproj_lib.kernels.wgmma_configuration import WgmmaPlan
from oproj_lib.layouts import ring
from oproj_lib.layouts.descriptors import WgmmaDescriptor, WgmmaSwizzle
from oproj_lib.layouts.fragments import CHUNK_BYTES
from oproj_lib.layouts.swizzle import ATOM_BYTES, ROW_BYTES


class NoProxyFence(OprojWgmma):
    """Multiplies what cp.async has written without a fence between the generic and the async proxy."""

    def wait_until_full(self, shared: RingShared, plan: WgmmaPlan, block: int) -> None:
        slot, parity = ring.slot_of(block, plan.stages), ring.full_parity(block, plan.stages)
        sync.barrier_wait(shared.barriers, ring.full_barrier(slot), parity)
        cute.arch.sync_warp()  # the mistake: proxy_fence() should follow


class WrongParity(OprojWgmma):
    """Waits for the phase before the right one, which is always over already."""

    def wait_until_full(self, shared: RingShared, plan: WgmmaPlan, block: int) -> None:
        slot, parity = ring.slot_of(block, plan.stages), ring.full_parity(block, plan.stages)
        sync.barrier_wait(shared.barriers, ring.full_barrier(slot), 1 - parity)  # the mistake: 1 -
        cute.arch.sync_warp()
        sync.proxy_fence()


class NoRegisterFence(OprojWgmma):
    """Starts to multiply without a wgmma.fence. (The machine code of ptxas 13 does not even differ.)"""

    def hand_over_registers(self) -> None:
        pass  # the mistake: wgmma.fence()


class BiasedAccumulator(OprojWgmma):
    """Adds to the accumulator between two blocks: the group that computes it is still in flight."""

    def issue_block(
        self, accumulator: list[Float32], a: cutlass.Int64, b: cutlass.Int64, plan: WgmmaPlan, block: int
    ) -> list[Float32]:
        if block:
            accumulator = [value + Float32(0.5) for value in accumulator]  # the mistake: not theirs now
        return super().issue_block(accumulator, a, b, plan, block)


class ReleasesUnread(OprojWgmma):
    """Gives a slot back without waiting for the group that reads it."""

    def wait_until_read(self, plan: WgmmaPlan) -> None:
        pass  # the mistake: wgmma.wait_group(plan.in_flight)


class ReleasesTooMuch(OprojWgmma):
    """Leaves one group too many in flight: the block that is given back may be among them."""

    def wait_until_read(self, plan: WgmmaPlan) -> None:
        wgmma.wait_group(plan.in_flight + 1)  # the mistake: + 1


class OneWarpForAll(OprojWgmma):
    """One warp of the four says that the slot is free, for all of them."""

    def init_barriers(self, shared: RingShared, batch: int) -> None:
        stages = self.plan(batch).stages
        for slot in range(stages):
            sync.barrier_init(shared.barriers, ring.full_barrier(slot), ring.FULL_ARRIVALS)
            sync.barrier_init(shared.barriers, ring.empty_barrier(slot, stages), 1)  # the mistake: 4 warps

    def release(self, elected: Boolean, shared: RingShared, plan: WgmmaPlan, block: int) -> None:
        first = self.publisher() == 0
        super().release(first, shared, plan, block)


class OneThreadDoesNotArrive(OprojWgmma):
    """The last loader copies, but never says that its copies have landed."""

    @cute.jit
    def arrive(self, shared: cutlass.Constexpr, slot: cutlass.Constexpr) -> None:
        if this_thread() < ring.LOADERS - 1:  # the mistake: < LOADERS, or no condition at all
            sync.barrier_arrive_after_copies(shared.barriers, ring.full_barrier(slot))


class ReadsTooEarly(OprojWgmma):
    """Publishes what is in the registers without waiting for the last group."""

    def finish(self, accumulator: list[Float32]) -> list[Float32]:
        return accumulator  # the mistake: wgmma.wait_for_result(accumulator)


class OverwritesTheRing(OprojWgmma):
    """Writes the epilogue tile as soon as its own warp is done: the others still read the ring."""

    def epilogue(
        self, result: list[Float32], shared: RingShared, mailbox: Mailbox, mc: cutlass.Int64, slot: Int32, batch: int
    ) -> None:  # fmt: skip
        self.store_tile(result, shared)  # the mistake: meet() should come first
        self.meet()
        self.publish(shared, mailbox, mc, slot, 0, batch)


class UnswizzledStores(OprojWgmma):
    """Stores the tiles row by row, and tells the tensor core that they are swizzled."""

    def loader(self, x: cute.Tensor, weight: cute.Tensor, shared: RingShared) -> Loader:
        lane = super().loader(x, weight, shared)
        plain = ring.copy_row(lane.tid) * ROW_BYTES + ring.copy_chunk(lane.tid) * CHUNK_BYTES
        return replace(lane, target=shared.ring + plain)  # the mistake: the chunk is not XORed with the row


class WrongStride(OprojWgmma):
    """Gives the tensor core half the distance between groups of 8 rows."""

    tile_layout = WgmmaDescriptor(
        address=0,
        stride_byte_offset=ATOM_BYTES // 2,  # the mistake: 8 rows of 128 bytes are 1024
        swizzle=WgmmaSwizzle.BYTES_128,
    ).encode()


@dataclass(frozen=True)
class BrokenWgmma:
    """engine: the class; kind: the finding that names the mistake; method: where the finding points; stages:
    ring stages in which the mistake matters."""

    engine: type[OprojWgmma]
    kind: str
    method: str
    k: int = 768
    batch: int = 8
    stages: int = 2

    def build(self) -> OprojWgmma:
        budget = self.stages * ring.stage_bytes(ring.padded_tokens(self.batch))
        return self.engine(self.k, budget=budget)


BROKEN_WGMMA = {
    "no proxy fence": BrokenWgmma(NoProxyFence, "missing proxy fence", "issue_block"),
    "wrong parity": BrokenWgmma(WrongParity, "race", "load_weight_tile"),
    "no register fence": BrokenWgmma(NoRegisterFence, "missing wgmma.fence", "issue_block"),
    "accumulator changed in flight": BrokenWgmma(BiasedAccumulator, "missing wgmma.fence", "issue_block"),
    "slot released unread": BrokenWgmma(ReleasesUnread, "race", "load_weight_tile"),
    "slot released with its group in flight": BrokenWgmma(ReleasesTooMuch, "race", "load_weight_tile"),
    "one warp arrives for all": BrokenWgmma(OneWarpForAll, "race", "load_weight_tile"),
    "one thread does not arrive": BrokenWgmma(OneThreadDoesNotArrive, "deadlock", "wait_until_full"),
    "registers read too early": BrokenWgmma(ReadsTooEarly, "undefined data", "publish_chunk"),
    "ring overwritten": BrokenWgmma(OverwritesTheRing, "race", "store_tile"),
    "unswizzled stores": BrokenWgmma(UnswizzledStores, "descriptor", "issue_block"),
    "wrong stride": BrokenWgmma(WrongStride, "descriptor", "issue_block"),
}
