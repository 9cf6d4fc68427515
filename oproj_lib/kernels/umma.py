"""The attention output projection of one rank with ``tcgen05.mma``.

partial[t, n] = bf16(sum over k of x[t, k] * W[n, k])

Shapes: x [M, K] BF16, W [7168, K] BF16, both row-major; mailbox [slots, tokens, 7168] BF16. 112 CTAs of 64
rows of W, 160 threads. W is the A operand (64 rows), x the B operand (n = M rounded up to 8 tokens), and D
[64, n] stays in tensor memory from the first MMA to the last. For M > 8, sm_100a only.

    when           warps 0-3 (128 loaders)                          warp 4
    set_up         -                                                barriers, tensor memory
                   ------------------------------ CTA barrier ------------------------------
    load           W of the first stages, the rest to L2            multiply: waits for full[0]
                   griddepcontrol.wait, dependents' go
                   x block by block, W of the refilled slots        MMAs block by block
    epilogue       waits for the accumulator, reads tensor memory   waits for these reads
                   transposes, packs, publishes                     frees tensor memory

Proxies. ``cp.async`` is an ordinary asynchronous copy: only cp.async.*bulk* and the tcgen05 operations are
said to use the async proxy (PTX ISA, "Async proxy"). So the tiles are *written* through the generic proxy and
*read* by the MMAs through the async proxy, and a ``fence.proxy.async`` has to stand between. It takes effect
in the thread that executes it and in what that thread has synchronised with, hence it stands behind the wait
for the full barrier, in the warp that starts the MMAs. A loader could not execute it: its copies land after
it has gone on, and the fence does not wait for them (on an H200 it takes 20 cycles with 60 copies in flight
that need 8000 more). All 32 lanes execute it, so the elected one has.

In the other direction, a slot that the MMAs have read is written again. The commit says when they are done;
as the manual promises no implicit fence for tcgen05 (for wgmma it does), the loaders execute one after the
wait for the empty barrier, and one after that for the accumulator, before the epilogue tile overwrites the
ring.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass.cutlass_dsl import CuTeDSL
from cutlass.memory import SmemAllocator

from oproj_lib.kernels import primitives
from oproj_lib.kernels import umma_primitives as umma
from oproj_lib.kernels.producer import OprojProducer, check_options
from oproj_lib.kernels.transport import Mailbox, Transport, as_transport
from oproj_lib.kernels.umma_configuration import (
    DEFAULT_BUDGET,
    MMA_WARP,
    THREADS,
    UmmaConfiguration,
    UmmaPlan,
    check_umma_target,
)
from oproj_lib.kernels.umma_lane import Loader, NamedBarrier, UmmaShared, this_cta, this_thread, this_warp
from oproj_lib.layouts import ring, tmem
from oproj_lib.layouts import schedule as cut
from oproj_lib.layouts.descriptors import (
    ADDRESS_UNIT_SHIFT,
    InstructionDescriptor,
    SharedDescriptor,
    SwizzleMode,
)
from oproj_lib.layouts.fragments import BF16_BYTES, CHUNK, CHUNK_BYTES, WARP_LANES
from oproj_lib.layouts.swizzle import ATOM_BYTES
from oproj_lib.problem import CTAS, ROWS_PER_CTA

EPILOGUE_COLUMNS = 64
"""Accumulator columns that are in registers at a time."""


class OprojUmma(OprojProducer):
    """Builds the UMMA kernel for one ring budget.

    k: columns of W on this rank, a multiple of 64 (1536 for TP8, 768 for TP16). budget: bytes for the ring;
    as many stages as fit, at most k // 64. transport and policy: as in ``OprojProducer``.

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

    config: UmmaConfiguration  # type: ignore[assignment]  # this engine's rules instead of the producer's

    def __init__(
        self,
        k: int,
        *,
        twoshot: bool = False,
        budget: int = DEFAULT_BUDGET,
        transport: Transport | str = "multicast",
        policy: str = "latent",
    ) -> None:
        # Not super().__init__: it checks mma.sync settings that do not exist here.
        check_options(twoshot, policy)
        self.config = UmmaConfiguration(k, budget)
        self.twoshot = twoshot
        self.policy = policy
        self.transport = as_transport(transport)

    @staticmethod
    def configurations(k: int) -> tuple[tuple[int, int, int], ...]:
        """None: (staged_blocks, rows, group_tiles) are settings of mma.sync; this engine has a budget."""
        del k
        return ()

    @classmethod
    def recommended(cls, k: int, batch: int, **options: Any) -> OprojUmma:
        """An engine that takes ``batch``; options as for the constructor. Raises ValueError when none
        does."""
        engine = cls(k, **options)
        engine.plan(batch)
        return engine

    def schedule(self, batches: int) -> tuple[int, int, int]:
        """(8-token tiles, tiles per group, groups): one MMA takes all tokens, so there is one group."""
        return cut.schedule(batches, 0)

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

    # Host

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch the split kernel on ``stream``. M is the static first extent of x.

        Raises ValueError while compiling, for tensors or a batch that this configuration cannot take, and for
        a target without tcgen05.
        """
        check_umma_target(CuTeDSL._get_dsl().get_arch_enum().name)
        self.check(x, weight, mailbox)
        self.kernel(x, weight, mailbox, mc, slot).launch(
            grid=[CTAS, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    # Device

    @cute.kernel
    def kernel(
        self, x: cute.Tensor, weight: cute.Tensor, mailbox: cute.Tensor, mc: Int64, slot: Int32
    ) -> None:
        """The split form, its dependents released right after its own wait."""
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
            self.load(x, weight, shared)
            self.epilogue(shared, mailbox, mc, slot, batch)

    def allocate(self, batch: int) -> UmmaShared:  # type: ignore[override]
        """Reserve the CTA's shared memory: the ring at a multiple of 1024 bytes, where the swizzle's pattern
        starts."""
        plan = self.plan(batch)
        memory = SmemAllocator()
        ring_address = memory.allocate(plan.ring_bytes, byte_alignment=ATOM_BYTES).toint()
        control = memory.allocate(plan.control_bytes, byte_alignment=ring.BARRIER_BYTES).toint()
        return UmmaShared(ring_address, control, control + ring.barrier_area_bytes(plan.stages))

    @cute.jit
    def set_up(self, shared: cutlass.Constexpr, batch: cutlass.Constexpr) -> None:
        """Warp 4, before the CTA barrier: initialise the barriers, allocate tensor memory, give up the
        permit."""
        if umma.elect_one():
            self.init_barriers(shared, batch)
        umma.tmem_allocate(shared.tmem_slot, self.plan(batch).tmem_columns)
        umma.tmem_relinquish_permit()

    def init_barriers(self, shared: UmmaShared, batch: int) -> None:
        """full and empty of every slot in use, and the accumulator's; the CTA barrier publishes them."""
        stages = self.plan(batch).stages
        for slot in range(stages):
            umma.barrier_init(shared.barriers, ring.full_barrier(slot), ring.FULL_ARRIVALS)
            umma.barrier_init(shared.barriers, ring.empty_barrier(slot, stages), ring.COMMIT_ARRIVALS)
        umma.barrier_init(shared.barriers, ring.accumulator_barrier(stages), ring.COMMIT_ARRIVALS)
        umma.barrier_init_fence()

    # Loaders

    def load(
        self, x: cute.Tensor, weight: cute.Tensor, shared: UmmaShared, trigger_after_wait: bool = True
    ) -> None:
        """Loaders: W of the first stages and the rest of W to L2; then, after the previous kernel, x and
        refills.

        trigger_after_wait: release the dependents right after the wait. Never earlier: a consumer that skips
        its own wait relies on this one.
        """
        batch = x.shape[0]
        plan, lane = self.plan(batch), self.loader(x, weight, shared)
        for block in range(plan.stages):
            self.load_weight_tile(lane, shared, plan, block)
        self.prefetch_weight(lane, plan)
        cute.arch.griddepcontrol_wait()
        if trigger_after_wait:
            cute.arch.griddepcontrol_launch_dependents()
        for block in range(self.config.kblocks):
            if block >= plan.stages:
                self.wait_until_empty(shared, plan, block)
                self.load_weight_tile(lane, shared, plan, block)
            self.load_x_tile(lane, shared, plan, block)

    def loader(self, x: cute.Tensor, weight: cute.Tensor, shared: UmmaShared) -> Loader:
        """Where this thread copies from and to: row tid // 8 and chunk tid % 8 of a tile, then every 16th
        row."""
        tid, cta, k = this_thread(), this_cta(), self.config.k
        row, column = ring.copy_row(tid), ring.copy_chunk(tid) * CHUNK
        first = Int64((cta * ROWS_PER_CTA + row) * k + column) * BF16_BYTES
        return Loader(
            tid=tid,
            weight=weight.iterator.toint() + first,
            x=x.iterator.toint() + Int64(row * k + column) * BF16_BYTES,
            row=row,
            target=shared.ring + ring.copy_offset(tid),
        )

    def load_weight_tile(self, lane: Loader, shared: UmmaShared, plan: UmmaPlan, block: int) -> None:
        """Copy the W tile of a K block to its slot, and arrive when it has landed."""
        slot = ring.slot_of(block, plan.stages)
        for i in range(ROWS_PER_CTA // ring.ROWS_PER_PASS):
            to = slot * plan.stage_bytes + i * ring.copy_pass_bytes()
            primitives.copy_chunk_async(lane.target, to, lane.weight, self.source_offset(block, i))
        self.arrive(shared, slot)

    def load_x_tile(self, lane: Loader, shared: UmmaShared, plan: UmmaPlan, block: int) -> None:
        """Copy the x tile of a K block to its slot, and arrive when it has landed.

        Rows from M on are left alone: whatever they hold, it only reaches columns of D that nobody reads.
        """
        slot = ring.slot_of(block, plan.stages)
        for i in range(-(-plan.batch // ring.ROWS_PER_PASS)):
            first_row = i * ring.ROWS_PER_PASS
            ragged = first_row + ring.ROWS_PER_PASS > plan.batch
            valid = lane.row < plan.batch - first_row if ragged else None
            to = slot * plan.stage_bytes + ring.W_TILE_BYTES + i * ring.copy_pass_bytes()
            primitives.copy_chunk_async(lane.target, to, lane.x, self.source_offset(block, i), valid)
        self.arrive(shared, slot)

    def arrive(self, shared: UmmaShared, slot: int) -> None:
        """Arrive on full[slot] when all of this thread's copies so far have landed."""
        umma.barrier_arrive_after_copies(shared.barriers, ring.full_barrier(slot))

    def source_offset(self, block: int, copy_pass: int) -> int:
        """Bytes from a thread's first chunk in W or x to that of K block ``block``, pass ``copy_pass``."""
        return (copy_pass * ring.ROWS_PER_PASS * self.config.k + block * ring.TILE_K) * BF16_BYTES

    def wait_until_empty(self, shared: UmmaShared, plan: UmmaPlan, block: int) -> None:
        """Wait until the MMAs have read what the slot held, and order this thread's writes behind their
        reads."""
        slot = ring.slot_of(block, plan.stages)
        parity = ring.empty_parity(block, plan.stages)
        umma.barrier_wait(shared.barriers, ring.empty_barrier(slot, plan.stages), parity)
        umma.proxy_fence()

    def prefetch_weight(self, lane: Loader, plan: UmmaPlan) -> None:
        """Bring the W columns that have no slot yet to L2, one bulk prefetch per row.

        Eight threads copy chunks of one row; the one with chunk 0 asks for the rest of it, in all four
        passes.
        """
        rest = self.config.k - plan.stages * ring.TILE_K
        if not rest:
            return
        first_chunk = ring.copy_chunk(lane.tid) == 0
        for i in range(ROWS_PER_CTA // ring.ROWS_PER_PASS):
            umma.prefetch_to_l2(
                lane.weight, self.source_offset(plan.stages, i), rest * BF16_BYTES, first_chunk
            )

    # MMA warp

    def multiply(self, shared: UmmaShared, batch: int) -> None:  # type: ignore[override]
        """Warp 4: every K block as it arrives, four MMAs each, started by one lane."""
        plan = self.plan(batch)
        accumulator = umma.load_shared_word(shared.tmem_slot)
        a, b = self.tile_descriptors(shared)
        elected = umma.elect_one()
        for block in range(self.config.kblocks):
            slot, parity = ring.slot_of(block, plan.stages), ring.full_parity(block, plan.stages)
            umma.barrier_wait(shared.barriers, ring.full_barrier(slot), parity)
            # Nobody waits for the lanes that are not elected: without this, one that lags behind could find the
            # barrier two phases on, and wait for a parity that never comes back (docs/sentryward.md).
            cute.arch.sync_warp()
            umma.proxy_fence()
            umma.tcgen05_fence_after()
            self.issue(elected, accumulator, a, b, shared, batch, block)

    def tile_descriptors(self, shared: UmmaShared) -> tuple[Int64, Int64]:
        """Descriptors of the W tile and the x tile of slot 0; later slots and K steps only move the
        address."""
        layout = SharedDescriptor(address=0, stride_byte_offset=ATOM_BYTES, swizzle=SwizzleMode.BYTES_128)
        # The address field is the lowest: adding to the word adds to it. Shared memory ends below 2**18
        # bytes, the field's limit, so nothing carries out of it.
        a = Int64(shared.ring >> ADDRESS_UNIT_SHIFT) + layout.encode()
        return a, a + (ring.W_TILE_BYTES >> ADDRESS_UNIT_SHIFT)

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
            advance = (slot * plan.stage_bytes + step * ring.MMA_STEP_BYTES) >> ADDRESS_UNIT_SHIFT
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

    def epilogue(self, shared: UmmaShared, mailbox: cute.Tensor, mc: Int64, slot: Int32, batch: int) -> None:
        """Loaders: the accumulator from tensor memory to the mailbox, by way of a [n, 68] tile in the drained
        ring."""
        plan = self.plan(batch)
        umma.barrier_wait(shared.barriers, ring.accumulator_barrier(plan.stages), 0)
        umma.tcgen05_fence_after()
        umma.proxy_fence()
        self.transpose(shared, batch)
        umma.tcgen05_fence_before()
        cute.arch.barrier_arrive(barrier_id=NamedBarrier.TMEM_READ, number_of_threads=THREADS)
        cute.arch.barrier(barrier_id=NamedBarrier.EPILOGUE, number_of_threads=ring.LOADERS)
        self.publish(shared, Mailbox(*mailbox.shape), mc, slot, 0, batch)

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

    def publish(
        self,
        shared: UmmaShared,
        mailbox: Mailbox,
        mc: Int64,
        slot: Int32,
        first_token: int,
        tokens: int,
    ) -> None:
        """Round the tile's tokens and send them, one 16-byte chunk per thread and pass."""
        for i in range(ring.publish_passes(tokens)):
            self.publish_pass(shared, mailbox, mc, slot, first_token, tokens, i * ring.TOKENS_PER_PASS)

    @cute.jit
    def publish_pass(
        self,
        shared: cutlass.Constexpr,
        mailbox: cutlass.Constexpr,
        mc: Int64,
        slot: Int32,
        first_token: cutlass.Constexpr,
        tokens: cutlass.Constexpr,
        pass_token: cutlass.Constexpr,
    ) -> None:
        """16 tokens, or what is left of them."""
        if cutlass.const_expr(pass_token + ring.TOKENS_PER_PASS <= tokens):
            self.publish_chunk(shared, mailbox, mc, slot, first_token, pass_token)
        else:
            if ring.publish_chunk(this_thread())[0] < tokens - pass_token:
                self.publish_chunk(shared, mailbox, mc, slot, first_token, pass_token)

    def publish_chunk(  # type: ignore[override]
        self,
        shared: UmmaShared,
        mailbox: Mailbox,
        mc: Int64,
        slot: Int32,
        first_token: int,
        pass_token: int,
    ) -> None:
        """One thread's chunk: 8 FP32 of the tile, rounded, sent to 8 neighbouring output columns."""
        token, chunk = ring.publish_chunk(this_thread())
        address = shared.ring + ring.tile_word_offset(token, chunk * CHUNK)
        at = ring.tile_word_offset(pass_token, 0)
        low = primitives.load_shared_floats(address, at)
        high = primitives.load_shared_floats(address, at + CHUNK_BYTES)
        words = primitives.pack8([*low, *high], self.policy)
        column = this_cta() * ROWS_PER_CTA + chunk * CHUNK
        self.transport.store_chunk(mailbox, mc, slot, first_token + pass_token + token, column, words)


OprojUmma.kernel.set_name_prefix("oproj_umma", remove_cutlass_symbol=True, keep_mangled_name=False)
