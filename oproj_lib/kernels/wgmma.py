"""The attention output projection of one rank with Hopper's ``wgmma.mma_async``.

112 CTAs of 64 rows of W, 256 threads. The ring, its loaders and the publishing are those of ``ring_engine``.
Here: a warpgroup of four warps that multiplies, and D [64, n], which stays in its registers (n / 2 per thread)
from the first wgmma to the last. sm_90a only.

    when           warps 0-3 (128 loaders)                          warps 4-7 (128 multipliers)
    set_up         -                                                barriers (warp 4)
                   ------------------------------ CTA barrier ------------------------------
    load           W of the first stages, the rest to L2            griddepcontrol.wait
                   griddepcontrol.wait, dependents' go              multiply: wait for full[0]
                   x block by block, W of the refilled slots        wgmmas block by block
    epilogue       (done)                                           wait for the last group, store D to the
                                                                    tile, pack, publish

What Blackwell changed, seen from here:

                   OprojWgmma (Hopper)                              OprojUmma (Blackwell)
    who multiplies four warps, each its 16 rows of D                one lane of one warp
    where D is     registers of these warps                         tensor memory, read back by other warps
    who knows      the warps themselves: wait_group, then they      whoever waits for the mbarrier at which
    it is done     arrive at empty[s] themselves                    tcgen05.commit arrives
    afterwards     an implicit proxy fence                          an explicit one

Proxies. All lanes of the four warps execute the fence between the copies and the wgmmas (``ring_engine`` says
why there has to be one). The other direction needs none: the completion of a wgmma, once observed with
``wait_group``, implies a fence from the async to the generic proxy (PTX ISA, "Async proxy" of wgmma). So a
loader that has seen empty[s] may overwrite the slot, and the multipliers the drained ring.

Accumulation order. One FP32 accumulator per output: K in steps of 16, in order, one wgmma each. So the result
does not depend on stages, schedule or the other tokens of the batch.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from oproj_lib.kernels import primitives
from oproj_lib.kernels import ring_primitives as sync
from oproj_lib.kernels import wgmma_primitives as wgmma
from oproj_lib.kernels.ring_engine import RingEngine
from oproj_lib.kernels.ring_lane import NamedBarrier, RingShared, this_thread, this_warp
from oproj_lib.kernels.transport import Mailbox
from oproj_lib.kernels.wgmma_configuration import (
    EMPTY_ARRIVALS,
    FIRST_MULTIPLIER,
    THREADS,
    WgmmaConfiguration,
    WgmmaPlan,
    check_wgmma_target,
)
from oproj_lib.layouts import ring
from oproj_lib.layouts import wgmma as registers
from oproj_lib.layouts.descriptors import WgmmaDescriptor, WgmmaSwizzle
from oproj_lib.layouts.swizzle import ATOM_BYTES


class OprojWgmma(RingEngine):
    """Builds the wgmma kernel for one ring budget.

    k: columns of W on this rank, a multiple of 64 (1536 for TP8, 768 for TP16). budget: bytes for the ring;
    as many stages as fit, at most k // 64. twoshot, transport, policy and generations: as in
    ``OprojProducer``. A batch may have 256 tokens, N of the largest wgmma: n / 2 = 128 accumulators per thread
    fit beside what else is in registers, and a stage of 8192 + 128 n bytes fits any sensible budget.

    Who waits for whom (s = slot of K block kb, round = kb // stages):

        warp  waits for            parity           signals   arrivals
        0-3   empty[s] (refill)    (round - 1) % 2  full[s]   128 threads x 2 copies = 256: when its W
                                                              chunks, and when its x chunks have landed
        4-7   full[s]              round % 2        -         -
        4-7   its group kb - 1     -                empty[s]  4 warps x 1 lane, for the slot of block
              (wait_group 1)                                  kb - 1, if it is refilled
        4-7   its last group       -                EPILOGUE  128: all four warps are done with the ring
        4-7   EPILOGUE             -                EPILOGUE  128: the tile is written

    With one stage block kb - 1 is waited for before block kb: wait_group 0. An arrival for x also covers
    every earlier copy of the thread, so the first block waits for W of all stages.

    Raises ValueError for a k or budget that does not exist; ``plan`` adds the rules that depend on the batch.
    """

    config: WgmmaConfiguration
    configuration = WgmmaConfiguration
    threads = THREADS
    entry = "oproj_wgmma"
    check_target = staticmethod(check_wgmma_target)
    tile_layout = WgmmaDescriptor(
        address=0, stride_byte_offset=ATOM_BYTES, swizzle=WgmmaSwizzle.BYTES_128
    ).encode()

    def geometry(self, batches: int) -> tuple[int, int, int, int]:
        """(n, bytes of a ring stage, stages, accumulators per thread) for a batch of ``batches`` tokens.

        n: the batch rounded up to 8; a stage: W tile [64, 64] and x tile [n, 64]. Raises ValueError, see
        ``plan``.
        """
        plan = self.plan(batches)
        return plan.n, plan.stage_bytes, plan.stages, plan.accumulators

    def plan(self, batch: int) -> WgmmaPlan:  # type: ignore[override]
        """Ring, shared memory and registers for a batch. Raises ValueError when it does not fit."""
        return self.config.plan(batch)

    # Device

    @cute.jit
    def project(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        state: Int64 | None,
        trigger_after_wait: cutlass.Constexpr = True,
        then: cutlass.Constexpr = None,
    ) -> None:
        """The whole projection as a device function; then: what the multipliers do after they have
        published."""
        batch = x.shape[0]
        shared = self.allocate(batch)
        warp = this_warp()
        if warp == FIRST_MULTIPLIER:
            self.set_up(shared, batch)
        cute.arch.sync_threads()
        if warp >= FIRST_MULTIPLIER:
            self.multiply_and_publish(shared, mailbox, mc, slot, batch, state)
            if cutlass.const_expr(then is not None):
                then()
        else:
            self.load(x, weight, shared, trigger_after_wait)

    @cute.jit
    def set_up(self, shared: cutlass.Constexpr, batch: cutlass.Constexpr) -> None:
        """Warp 4, before the CTA barrier, which publishes them: full and empty of every slot in use."""
        if sync.elect_one():
            self.init_barriers(shared, batch)

    def init_barriers(self, shared: RingShared, batch: int) -> None:
        """One thread: the barriers and how many arrivals each expects."""
        stages = self.plan(batch).stages
        for slot in range(stages):
            sync.barrier_init(shared.barriers, ring.full_barrier(slot), ring.FULL_ARRIVALS)
            sync.barrier_init(shared.barriers, ring.empty_barrier(slot, stages), EMPTY_ARRIVALS)

    # Multipliers

    def multiply_and_publish(
        self,
        shared: RingShared,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        batch: int,
        state: Int64 | None = None,
    ) -> None:
        """Warps 4-7, from the first full barrier to the mailbox."""
        # They wait for the previous kernel as the loaders do, because they write to the mailbox and may read
        # its generation. It delays nothing: the first full barrier needs x.
        cute.arch.griddepcontrol_wait()
        box = Mailbox(*mailbox.shape)
        mc, slot, generation = self.route(box, mc, slot, state)
        result = self.finish(self.multiply(shared, batch))
        self.epilogue(result, shared, box, mc, slot, batch)
        self.count_on(state, generation)

    def multiply(self, shared: RingShared, batch: int) -> list[Float32]:  # type: ignore[override]
        """Warps 4-7: every K block as it arrives, four wgmmas each. Returns the registers of D, in flight."""
        plan = self.plan(batch)
        a, b = self.tile_descriptors(shared)
        elected = sync.elect_one()
        accumulator: list[Float32] = []
        for block in range(self.config.kblocks):
            self.wait_until_full(shared, plan, block)
            accumulator = self.issue_block(accumulator, a, b, plan, block)
            self.release(elected, shared, plan, block)
        return accumulator

    def wait_until_full(self, shared: RingShared, plan: WgmmaPlan, block: int) -> None:
        """Wait until all copies of a K block have landed, and let this warp's wgmmas see them."""
        slot, parity = ring.slot_of(block, plan.stages), ring.full_parity(block, plan.stages)
        sync.barrier_wait(shared.barriers, ring.full_barrier(slot), parity)
        cute.arch.sync_warp()  # what follows is for whole warps
        sync.proxy_fence()

    def issue_block(
        self, accumulator: list[Float32], a: Int64, b: Int64, plan: WgmmaPlan, block: int
    ) -> list[Float32]:
        """The four K16 wgmmas of a K block, one group."""
        slot = ring.slot_of(block, plan.stages)
        if block == 0:
            self.hand_over_registers()
        for step in range(ring.MMAS_PER_BLOCK):
            advance = self.advance(plan, slot, step)
            accumulator = wgmma.multiply_bf16(accumulator, a + advance, b + advance, plan.n)
        wgmma.commit_group()
        return accumulator

    def hand_over_registers(self) -> None:
        """Before the first wgmma: order what this warp did with the registers that become D. Once is enough: up
        to the wait for the result only wgmmas of one shape touch them.

        (ptxas 13 puts a WARPGROUP.ARRIVE before every group, whether or not the PTX has this fence.)
        """
        wgmma.fence()

    def release(self, elected: Boolean, shared: RingShared, plan: WgmmaPlan, block: int) -> None:
        """Behind block ``block``: give back the slot of the last block that is not in flight, if a loader
        waits for it."""
        done = block - plan.in_flight
        if done >= 0 and ring.is_refilled(done, self.config.kblocks, plan.stages):
            self.wait_until_read(plan)
            slot = ring.slot_of(done, plan.stages)
            sync.barrier_arrive(shared.barriers, ring.empty_barrier(slot, plan.stages), elected)

    def wait_until_read(self, plan: WgmmaPlan) -> None:
        """Wait until this warp's wgmmas have read every block but those in flight."""
        wgmma.wait_group(plan.in_flight)

    def finish(self, accumulator: list[Float32]) -> list[Float32]:
        """Wait for this warp's last group: only now do the registers hold D."""
        return wgmma.wait_for_result(accumulator)

    # Epilogue, by the multipliers

    def epilogue(
        self, result: list[Float32], shared: RingShared, mailbox: Mailbox, mc: Int64, slot: Int32, batch: int
    ) -> None:
        """Multipliers: D from their registers to the mailbox, by way of a [n, 68] tile in the drained
        ring."""
        self.meet()  # the other warps' wgmmas have read the ring too
        self.store_tile(result, shared)
        self.meet()
        self.publish(shared, mailbox, mc, slot, 0, batch)

    def meet(self) -> None:
        """A barrier of the 128 multipliers."""
        cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=registers.THREADS)

    def store_tile(self, result: list[Float32], shared: RingShared) -> None:
        """Store this thread's elements of D to the epilogue tile, those of tokens beyond the batch too: nobody
        reads them.

        A warp stores one register at a time: rows ``group``, tokens ``2 * part``. With 68 words per token that
        is word 136 * part + group, 32 different banks.
        """
        thread = self.publisher()
        first = ring.tile_word_offset(registers.thread_column(thread), registers.thread_row(thread))
        for i, value in enumerate(result):
            offset = ring.tile_word_offset(registers.register_column(i), registers.register_row(i))
            primitives.store_shared_float(shared.ring + first, offset, value)

    def publisher(self) -> Int32:
        """Which of the 128 multipliers this thread is: they hold D, so they publish it."""
        return this_thread() % registers.THREADS
