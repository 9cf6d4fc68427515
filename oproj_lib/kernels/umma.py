"""The attention output projection of one rank with ``tcgen05.mma``.

partial[t, n] = bf16(sum over k of x[t, k] * W[n, k])

112 CTAs of 64 rows of W, 160 threads. The ring, its loaders and the publishing are those of ``ring_engine``.
Here: one warp that starts the MMAs, and D [64, n], which stays in tensor memory from the first MMA to the
last. For M > 8, sm_100a only.

    when           warps 0-3 (128 loaders)                          warp 4
    set_up         -                                                barriers, tensor memory
                   ------------------------------ CTA barrier ------------------------------
    load           W of the first stages, the rest to L2            multiply: waits for full[0]
                   griddepcontrol.wait, dependents' go
                   x block by block, W of the refilled slots        MMAs block by block
    epilogue       waits for the accumulator, reads tensor memory   waits for these reads
                   transposes, packs, publishes                     frees tensor memory

Proxies. All 32 lanes of warp 4 execute the fence between the copies and the MMAs (``ring_engine`` says why
there has to be one), so the elected one has. In the other direction, a slot that the MMAs have read is written
again. The commit says when they are done; as the manual promises no implicit fence for tcgen05 (for wgmma it
does), the loaders execute one after the wait for the empty barrier, and one after that for the accumulator,
before the epilogue tile overwrites the ring.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from oproj_lib.kernels import ring_primitives as sync
from oproj_lib.kernels import umma_primitives as umma
from oproj_lib.kernels.ring_configuration import RingPlan
from oproj_lib.kernels.ring_engine import RingEngine
from oproj_lib.kernels.ring_lane import NamedBarrier, RingShared, this_thread, this_warp
from oproj_lib.kernels.transport import Mailbox
from oproj_lib.kernels.umma_configuration import (
    MMA_WARP,
    THREADS,
    UmmaConfiguration,
    UmmaPlan,
    check_umma_target,
)
from oproj_lib.kernels.umma_lane import UmmaShared
from oproj_lib.layouts import ring, tmem
from oproj_lib.layouts.descriptors import InstructionDescriptor, SharedDescriptor, SwizzleMode
from oproj_lib.layouts.fragments import WARP_LANES
from oproj_lib.layouts.swizzle import ATOM_BYTES
from oproj_lib.problem import ROWS_PER_CTA

EPILOGUE_COLUMNS = 64
"""Accumulator columns that are in registers at a time."""


class OprojUmma(RingEngine):
    """Builds the UMMA kernel for one ring budget.

    k: columns of W on this rank, a multiple of 64 (1536 for TP8, 768 for TP16). budget: bytes for the ring;
    as many stages as fit, at most k // 64. twoshot, transport, policy and generations: as in
    ``OprojProducer``.

    Who waits for whom (s = slot of K block kb, round = kb // stages):

        warp  waits for          parity           signals      arrivals
        0-3   empty[s] (refill)  (round - 1) % 2  full[s]      128 threads x 2 copies = 256: when its W
                                                               chunks, and when its x chunks have landed
        4     full[s]            round % 2        empty[s]     1: tcgen05.commit, if the slot is refilled
        4     -                  -                accumulator  1: tcgen05.commit behind the last MMA
        0-3   accumulator        0                TMEM_READ    128 of the named barrier's 160, no wait
        4     TMEM_READ          -                -            its own 32

    An arrival for x also covers every earlier copy of the thread, so the first block waits for W of all
    stages.

    Raises ValueError for a k or budget that does not exist; ``plan`` adds the rules that depend on the batch.
    """

    config: UmmaConfiguration
    configuration = UmmaConfiguration
    threads = THREADS
    entry = "oproj_umma"
    check_target = staticmethod(check_umma_target)
    tile_layout = SharedDescriptor(
        address=0, stride_byte_offset=ATOM_BYTES, swizzle=SwizzleMode.BYTES_128
    ).encode()

    def geometry(self, batches: int) -> tuple[int, int, int, int]:
        """(n, bytes of a ring stage, stages, TMEM columns) for a batch of ``batches`` tokens.

        n: the batch rounded up to 8; a stage: W tile [64, 64] and x tile [n, 64]. Raises ValueError, see
        ``plan``.
        """
        plan = self.plan(batches)
        return plan.n, plan.stage_bytes, plan.stages, plan.tmem_columns

    def plan(self, batch: int) -> UmmaPlan:  # type: ignore[override]
        """Ring, shared memory and TMEM for a batch. Raises ValueError when it does not fit."""
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
        """The whole projection as a device function; then: what the loaders do after they have published."""
        batch = x.shape[0]
        shared = self.allocate(batch)
        warp = this_warp()
        if warp == MMA_WARP:
            self.set_up(shared, batch)
        cute.arch.sync_threads()
        if warp == MMA_WARP:
            self.multiply(shared, batch)
            self.free(shared, batch)
        else:
            self.load(x, weight, shared, trigger_after_wait)
            self.epilogue(shared, mailbox, mc, slot, batch, state)
            if cutlass.const_expr(then is not None):
                then()

    def allocate(self, batch: int) -> UmmaShared:  # type: ignore[override]
        """Reserve the CTA's shared memory; behind the barriers, the word for the TMEM address."""
        shared = super().allocate(batch)
        tmem_slot = shared.barriers + ring.barrier_area_bytes(self.plan(batch).stages)
        return UmmaShared(shared.ring, shared.barriers, tmem_slot)

    @cute.jit
    def set_up(self, shared: cutlass.Constexpr, batch: cutlass.Constexpr) -> None:
        """Warp 4, before the CTA barrier: initialise the barriers, allocate tensor memory, give up the
        permit."""
        if sync.elect_one():
            self.init_barriers(shared, batch)
        umma.tmem_allocate(shared.tmem_slot, self.plan(batch).tmem_columns)
        umma.tmem_relinquish_permit()

    def init_barriers(self, shared: UmmaShared, batch: int) -> None:
        """full and empty of every slot in use, and the accumulator's; the CTA barrier publishes them."""
        stages = self.plan(batch).stages
        for slot in range(stages):
            sync.barrier_init(shared.barriers, ring.full_barrier(slot), ring.FULL_ARRIVALS)
            sync.barrier_init(shared.barriers, ring.empty_barrier(slot, stages), ring.COMMIT_ARRIVALS)
        sync.barrier_init(shared.barriers, ring.accumulator_barrier(stages), ring.COMMIT_ARRIVALS)
        umma.barrier_init_fence()

    # Loaders

    def wait_until_empty(self, shared: RingShared, plan: RingPlan, block: int) -> None:
        """Wait until the MMAs have read what the slot held, and order this thread's writes behind their
        reads."""
        super().wait_until_empty(shared, plan, block)
        sync.proxy_fence()

    # MMA warp

    def multiply(self, shared: UmmaShared, batch: int) -> None:  # type: ignore[override]
        """Warp 4: every K block as it arrives, four MMAs each, started by one lane."""
        plan = self.plan(batch)
        accumulator = umma.load_shared_word(shared.tmem_slot)
        a, b = self.tile_descriptors(shared)
        elected = sync.elect_one()
        for block in range(self.config.kblocks):
            slot, parity = ring.slot_of(block, plan.stages), ring.full_parity(block, plan.stages)
            sync.barrier_wait(shared.barriers, ring.full_barrier(slot), parity)
            # Nobody waits for the lanes that are not elected: without this, one that lags behind could find the
            # barrier two phases on, and wait for a parity that never comes back (docs/sentryward.md).
            cute.arch.sync_warp()
            sync.proxy_fence()
            umma.tcgen05_fence_after()
            self.issue(elected, accumulator, a, b, shared, batch, block)

    @cute.jit
    def issue(
        self,
        elected: Boolean,
        accumulator: Uint32,
        a: Int64,
        b: Int64,
        shared: cutlass.Constexpr,
        batch: cutlass.Constexpr,
        block: cutlass.Constexpr,
    ) -> None:
        """The elected lane's part of a K block."""
        if elected:
            self.issue_block(accumulator, a, b, shared, batch, block)

    def issue_block(
        self, accumulator: Uint32, a: Int64, b: Int64, shared: UmmaShared, batch: int, block: int
    ) -> None:
        """One thread: four K16 MMAs, then the commits that tell who waits for them."""
        plan = self.plan(batch)
        instruction = InstructionDescriptor(m=ROWS_PER_CTA, n=plan.n).encode()
        slot = ring.slot_of(block, plan.stages)
        for step in range(ring.MMAS_PER_BLOCK):
            advance = self.advance(plan, slot, step)
            umma.umma_f16(accumulator, a + advance, b + advance, instruction, accumulate=block + step > 0)
        self.commit(shared, plan, block)

    def commit(self, shared: UmmaShared, plan: UmmaPlan, block: int) -> None:
        """When the MMAs so far are done, arrive where a loader waits: for the slot, or for the result."""
        if ring.is_refilled(block, self.config.kblocks, plan.stages):
            slot = ring.slot_of(block, plan.stages)
            umma.umma_commit(shared.barriers, ring.empty_barrier(slot, plan.stages))
        if block == self.config.kblocks - 1:
            umma.umma_commit(shared.barriers, ring.accumulator_barrier(plan.stages))

    def free(self, shared: UmmaShared, batch: int) -> None:
        """Warp 4: free tensor memory once all loaders have read it."""
        address = umma.load_shared_word(shared.tmem_slot)
        cute.arch.barrier(barrier_id=NamedBarrier.TMEM_READ, number_of_threads=THREADS)
        umma.tcgen05_fence_after()
        umma.tmem_free(address, self.plan(batch).tmem_columns)

    # Epilogue, by the loaders

    def epilogue(
        self,
        shared: UmmaShared,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        batch: int,
        state: Int64 | None = None,
    ) -> None:
        """Loaders: the accumulator from tensor memory to the mailbox, by way of a [n, 68] tile in the drained
        ring."""
        plan, box = self.plan(batch), Mailbox(*mailbox.shape)
        mc, slot, generation = self.route(box, mc, slot, state)
        sync.barrier_wait(shared.barriers, ring.accumulator_barrier(plan.stages), 0)
        umma.tcgen05_fence_after()
        sync.proxy_fence()
        self.transpose(shared, batch)
        umma.tcgen05_fence_before()
        cute.arch.barrier_arrive(barrier_id=NamedBarrier.TMEM_READ, number_of_threads=THREADS)
        cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=ring.LOADERS)
        self.publish(shared, box, mc, slot, 0, batch)
        self.count_on(state, generation)

    def transpose(self, shared: UmmaShared, batch: int) -> None:
        """Bring the warp's 16 rows of D from tensor memory to the epilogue tile.

        Row 16 * warp + lane of D is in TMEM lane 32 * warp + lane, lane < 16; the other lanes hold nothing.
        """
        lane, warp = this_thread() % WARP_LANES, this_warp()
        self.transpose_rows(
            shared,
            batch,
            first_lane=tmem.first_lane(warp),
            row=warp * tmem.ROWS_PER_QUARTER + lane,
            holds_row=lane < tmem.ROWS_PER_QUARTER,
        )

    def transpose_rows(
        self, shared: UmmaShared, batch: int, *, first_lane: Int32, row: Int32, holds_row: Boolean
    ) -> None:
        """Read the 32 TMEM lanes from ``first_lane`` and store this thread's as row ``row``, token by
        token."""
        base = umma.load_shared_word(shared.tmem_slot)
        address = tmem.tmem_address(base, Uint32(first_lane), 0)
        tile = shared.ring + ring.tile_word_offset(0, row)
        for first in range(0, batch, EPILOGUE_COLUMNS):
            columns = min(EPILOGUE_COLUMNS, ring.padded_tokens(batch) - first)
            words: list[Uint32] = []
            for column, count in tmem.load_pieces(columns):
                words += umma.tmem_load(address + (first + column), count)
            umma.tmem_load_wait()
            for token, word in enumerate(words[: batch - first], first):
                umma.store_shared_word(tile, ring.tile_word_offset(token, 0), word, holds_row)
