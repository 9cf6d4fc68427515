"""What the engines with a ring have in common: everything but who multiplies and where D lives.

partial[t, n] = bf16(sum over k of x[t, k] * W[n, k])

Shapes: x [M, K] BF16, W [7168, K] BF16, both row-major; mailbox [slots, tokens, 7168] BF16. 112 CTAs of 64
rows of W. W is the A operand (64 rows), x the B operand (n = M rounded up to 8 tokens), D is [64, n]. Both
operands come through a ring of K blocks of 64 columns in shared memory (``layouts.ring``), which warps 0-3
fill. Here: the loaders, the descriptors of a stage, and the publishing of the [n, 68] FP32 tile that overlays
the drained ring. ``OprojUmma`` and ``OprojWgmma`` add the multiplication, and bring D to that tile.

Proxies. ``cp.async`` is an ordinary asynchronous copy: only cp.async.*bulk* and the operations of the tensor
core are said to use the async proxy (PTX ISA, "Async proxy"). So the tiles are *written* through the generic
proxy and *read* by the MMAs through the async proxy, and a ``fence.proxy.async`` has to stand between. It takes
effect in the thread that executes it and in what that thread has synchronised with, hence it stands behind the
wait for the full barrier, in the warps that start the MMAs. A loader could not execute it: its copies land
after it has gone on, and the fence does not wait for them (on an H200 it takes 20 cycles with 60 copies in
flight that need 8000 more).
"""

from __future__ import annotations

from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import CuTeDSL
from cutlass.memory import SmemAllocator

from oproj_lib.kernels import primitives
from oproj_lib.kernels import ring_primitives as sync
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.ring_configuration import DEFAULT_BUDGET, RingConfiguration, RingPlan
from oproj_lib.kernels.ring_lane import Loader, RingShared, this_cta, this_thread
from oproj_lib.kernels.transport import Mailbox, Transport
from oproj_lib.layouts import ring
from oproj_lib.layouts import schedule as cut
from oproj_lib.layouts.descriptors import ADDRESS_UNIT_SHIFT
from oproj_lib.layouts.fragments import BF16_BYTES, CHUNK, CHUNK_BYTES
from oproj_lib.layouts.swizzle import ATOM_BYTES
from oproj_lib.problem import CTAS, ROWS_PER_CTA


class RingEngine(OprojProducer):
    """The common part of a kernel with a ring, for one ring budget.

    k: columns of W on this rank, a multiple of 64 (1536 for TP8, 768 for TP16). budget: bytes for the ring;
    as many stages as fit, at most k // 64. twoshot, transport, policy and generations: as in
    ``OprojProducer``.

    A subclass says which rules hold (``configuration``), how many threads a CTA has, what the kernel is called in
    the PTX (``entry``), on which targets it runs, what a shared-memory descriptor of its tensor core looks like
    (``tile_layout``), and does the work (``project``).

    Raises ValueError for a k or budget that does not exist; ``plan`` adds the rules that depend on the batch.
    """

    config: RingConfiguration  # type: ignore[assignment]  # these engines' rules instead of the producer's
    configuration: ClassVar[type[RingConfiguration]]
    threads: ClassVar[int]
    entry: ClassVar[str]
    tile_layout: ClassVar[int]
    """The shared-memory descriptor of a tile at address 0: K-major, 128-byte swizzle."""

    def __init__(
        self,
        k: int,
        *,
        twoshot: bool = False,
        budget: int = DEFAULT_BUDGET,
        transport: Transport | str | None = None,
        policy: str = "latent",
        generations: bool = False,
    ) -> None:
        # Not super().__init__: it checks mma.sync settings that do not exist here.
        self.config = self.configuration(k, budget)
        self.set_publishing(twoshot, transport, policy, generations)

    @staticmethod
    def check_target(target: str) -> str:
        """``target`` itself. Raises ValueError where the engine's instructions do not exist."""
        raise NotImplementedError(target)

    @staticmethod
    def configurations(k: int) -> tuple[tuple[int, int, int], ...]:
        """None: (staged_blocks, rows, group_tiles) are settings of mma.sync; these engines have a budget."""
        del k
        return ()

    @classmethod
    def recommended(cls, k: int, batch: int, **options: Any) -> RingEngine:
        """An engine that takes ``batch``; options as for the constructor. Raises ValueError when none
        does."""
        engine = cls(k, **options)
        engine.plan(batch)
        return engine

    def schedule(self, batches: int) -> tuple[int, int, int]:
        """(8-token tiles, tiles per group, groups): one MMA takes all tokens, so there is one group."""
        return cut.schedule(batches, 0)

    def valid_batches(self) -> tuple[int, ...]:
        """Every batch size that this budget can run."""
        return self.config.valid_batches()

    def plan(self, batch: int) -> RingPlan:  # type: ignore[override]
        """Ring and shared memory for a batch. Raises ValueError when it does not fit."""
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
        state: Int64 | None = None,
    ) -> None:
        """Launch the split kernel on ``stream``. M is the static first extent of x.

        Raises ValueError while compiling, for tensors or a batch that this configuration cannot take, and for
        a target without the engine's instructions.
        """
        self.check_target(CuTeDSL._get_dsl().get_arch_enum().name)
        self.check(x, weight, mailbox)
        self.check_state(state)
        # The name belongs to the function, which the engines share.
        self.kernel.set_name_prefix(self.entry, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(x, weight, mailbox, mc, slot, state).launch(
            grid=[CTAS, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
        )

    # Device

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        state: Int64 | None,
    ) -> None:
        """The split form, its dependents released right after its own wait."""
        self.project(x, weight, mailbox, mc, slot, state)

    def allocate(self, batch: int) -> RingShared:  # type: ignore[override]
        """Reserve the CTA's shared memory: the ring at a multiple of 1024 bytes, where the swizzle's pattern
        starts."""
        plan = self.plan(batch)
        memory = SmemAllocator()
        ring_address = memory.allocate(plan.ring_bytes, byte_alignment=ATOM_BYTES).toint()
        barriers = memory.allocate(plan.control_bytes, byte_alignment=ring.BARRIER_BYTES).toint()
        return RingShared(ring_address, barriers)

    def tile_descriptors(self, shared: RingShared) -> tuple[Int64, Int64]:
        """Descriptors of the W tile and the x tile of slot 0; later slots and K steps only move the
        address."""
        # The address field is the lowest: adding to the word adds to it. Shared memory ends below 2**18
        # bytes, the field's limit, so nothing carries out of it.
        a = Int64(shared.ring >> ADDRESS_UNIT_SHIFT) + self.tile_layout
        return a, a + (ring.W_TILE_BYTES >> ADDRESS_UNIT_SHIFT)

    @staticmethod
    def advance(plan: RingPlan, slot: int, step: int) -> int:
        """What to add to a descriptor of slot 0 for MMA number ``step`` of the block in ``slot``."""
        return (slot * plan.stage_bytes + step * ring.MMA_STEP_BYTES) >> ADDRESS_UNIT_SHIFT

    # Loaders

    def load(
        self, x: cute.Tensor, weight: cute.Tensor, shared: RingShared, trigger_after_wait: bool = True
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

    def loader(self, x: cute.Tensor, weight: cute.Tensor, shared: RingShared) -> Loader:
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

    def load_weight_tile(self, lane: Loader, shared: RingShared, plan: RingPlan, block: int) -> None:
        """Copy the W tile of a K block to its slot, and arrive when it has landed."""
        slot = ring.slot_of(block, plan.stages)
        for i in range(ROWS_PER_CTA // ring.ROWS_PER_PASS):
            to = slot * plan.stage_bytes + i * ring.copy_pass_bytes()
            primitives.copy_chunk_async(lane.target, to, lane.weight, self.source_offset(block, i))
        self.arrive(shared, slot)

    def load_x_tile(self, lane: Loader, shared: RingShared, plan: RingPlan, block: int) -> None:
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

    def arrive(self, shared: RingShared, slot: int) -> None:
        """Arrive on full[slot] when all of this thread's copies so far have landed."""
        sync.barrier_arrive_after_copies(shared.barriers, ring.full_barrier(slot))

    def source_offset(self, block: int, copy_pass: int) -> int:
        """Bytes from a thread's first chunk in W or x to that of K block ``block``, pass ``copy_pass``."""
        return (copy_pass * ring.ROWS_PER_PASS * self.config.k + block * ring.TILE_K) * BF16_BYTES

    def wait_until_empty(self, shared: RingShared, plan: RingPlan, block: int) -> None:
        """Wait until the MMAs have read what the slot held."""
        slot = ring.slot_of(block, plan.stages)
        parity = ring.empty_parity(block, plan.stages)
        sync.barrier_wait(shared.barriers, ring.empty_barrier(slot, plan.stages), parity)

    def prefetch_weight(self, lane: Loader, plan: RingPlan) -> None:
        """Bring the W columns that have no slot yet to L2, one bulk prefetch per row.

        Eight threads copy chunks of one row; the one with chunk 0 asks for the rest of it, in all four
        passes.
        """
        rest = self.config.k - plan.stages * ring.TILE_K
        if not rest:
            return
        first_chunk = ring.copy_chunk(lane.tid) == 0
        for i in range(ROWS_PER_CTA // ring.ROWS_PER_PASS):
            sync.prefetch_to_l2(
                lane.weight, self.source_offset(plan.stages, i), rest * BF16_BYTES, first_chunk
            )

    # Publishing

    @property
    def consumers(self) -> int:
        """The 128 threads that publish; the others may still be busy."""
        return ring.LOADERS

    def publisher(self) -> Int32:
        """Which of the 128 publishing threads this one is."""
        return this_thread()

    def publish(
        self,
        shared: RingShared,
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
            if ring.publish_chunk(self.publisher())[0] < tokens - pass_token:
                self.publish_chunk(shared, mailbox, mc, slot, first_token, pass_token)

    def publish_chunk(  # type: ignore[override]
        self,
        shared: RingShared,
        mailbox: Mailbox,
        mc: Int64,
        slot: Int32,
        first_token: int,
        pass_token: int,
    ) -> None:
        """One thread's chunk: 8 FP32 of the tile, rounded, sent to 8 neighbouring output columns."""
        token, chunk = ring.publish_chunk(self.publisher())
        address = shared.ring + ring.tile_word_offset(token, chunk * CHUNK)
        at = ring.tile_word_offset(pass_token, 0)
        low = primitives.load_shared_floats(address, at)
        high = primitives.load_shared_floats(address, at + CHUNK_BYTES)
        words = self.round_chunk([*low, *high])
        column = this_cta() * ROWS_PER_CTA + chunk * CHUNK
        self.transport.store_chunk(mailbox, mc, slot, first_token + pass_token + token, column, words)
