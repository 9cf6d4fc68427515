"""The attention output projection of one rank, with ``mma.sync``: partial[t, n] = bf16(sum over k of x[t, k]
* W[n, k]).

Shapes: x [M, K] BF16, W [7168, K] BF16, both row-major; mailbox [slots, tokens, 7168] BF16. 112 CTAs of 64
rows of W, 512 threads. W does not depend on the previous kernel, so it is on its way before the
programmatic-dependent-launch wait; x and the MMAs follow it. One CTA:

    when                     what                                             waits for
    load_weight              cp.async of the last staged_blocks, one group;   nothing
                             16-byte loads of the other blocks to registers
    compute                  griddepcontrol.wait, then the dependents' go     previous kernel
      stage_x                x to shared memory (shared and ring paths)       that wait
      multiply               x fragments, MMAs, chains added                  staged weights, x, registers
      store_partials         FP32 sums of one K part to shared memory         -
      publish                K parts added in order, rounded, sent            barrier after store_partials

Roles of the 16 warps: warp w owns ``rows`` 16-row tiles and one of ``parts = 4 * rows`` K parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from oproj_lib.kernels import configuration, primitives
from oproj_lib.kernels.configuration import THREADS, Configuration, Plan, XPath
from oproj_lib.kernels.inputs import check_inputs
from oproj_lib.kernels.lane import Lane, Shared, XLane, this_lane
from oproj_lib.kernels.primitives import Floats4, Words4
from oproj_lib.kernels.publishing import Publishing
from oproj_lib.kernels.transport import Mailbox, Transport
from oproj_lib.layouts import fragments, shared_memory
from oproj_lib.layouts import publish as chunks
from oproj_lib.layouts import schedule as cut
from oproj_lib.layouts.fragments import (
    BF16_BYTES,
    BLOCK_K,
    CHUNK,
    CHUNK_BYTES,
    HALVES,
    MMA_TOKENS,
    WARP_LANES,
)
from oproj_lib.layouts.shared_memory import PARTIAL_TILE_BYTES
from oproj_lib.problem import CTAS, ROWS_PER_CTA

Fragment = tuple[Words4, Words4]
"""Weights of one lane for one K block and row tile: the upper (r = 0) and lower (r = 1) 16-byte chunk."""


class OprojProducer(Publishing):
    """Builds the projection kernel for one configuration.

    k: columns of W on this rank (1536 for TP8, 768 for TP16). staged_blocks, rows, group_tiles: see
    ``Configuration``. twoshot: a chunk goes to the owner of its column only; mailbox is the receive view
    [slots, tokens, 7168 / ranks] and mc the address of the table of the owners' receive views. transport:
    "multicast" (None), "unicast:<ranks>" or a Transport. policy: "latent" sends no -0.0 half, "plain" sends
    what rounding gave. generations: slot is the rank, the slot written is that of the generation that the
    device counts in ``state``, a further argument (see ``kernels.mailbox``).

    Raises ValueError for a configuration that does not exist; ``plan`` adds the rules that depend on the
    batch.
    """

    threads: ClassVar[int] = THREADS
    """Threads of a CTA."""

    def __init__(
        self,
        k: int,
        *,
        staged_blocks: int,
        rows: int = 1,
        group_tiles: int = 0,
        twoshot: bool = False,
        transport: Transport | str | None = None,
        policy: str = "latent",
        generations: bool = False,
    ) -> None:
        self.config = Configuration(k, staged_blocks, rows, group_tiles)
        self.set_publishing(twoshot, transport, policy, generations)

    @staticmethod
    def configurations(k: int) -> tuple[tuple[int, int, int], ...]:
        """Every valid (staged_blocks, rows, group_tiles) for ``k``."""
        return configuration.configurations(k)

    @classmethod
    def recommended(cls, k: int, batch: int, **options: Any) -> OprojProducer:
        """A producer with a good configuration for ``k`` and ``batch``; options as for the constructor."""
        settings: dict[str, Any] = {**configuration.recommended(k, batch).settings(), **options}
        return cls(k, **settings)

    def settings(self) -> dict[str, int]:
        """The arguments that choose the configuration: staged_blocks, rows, group_tiles."""
        return self.config.settings()

    def valid_batches(self) -> tuple[int, ...]:
        """Every batch size that this configuration can run."""
        batches = self.config.valid_batches()
        if not self.twoshot:
            return batches
        return tuple(batch for batch in batches if self.config.plan(batch).twoshot_fits)

    def schedule(self, batches: int) -> tuple[int, int, int]:
        """(8-token tiles, tiles per group, groups) of a batch of ``batches`` tokens."""
        return cut.schedule(batches, self.config.group_tiles)

    def plan(self, batch: int) -> Plan:
        """x path, shared memory and schedule for a batch. Raises ValueError when it does not fit."""
        plan = self.config.plan(batch)
        if self.twoshot and not plan.twoshot_fits:
            raise ValueError(
                f"two-shot: {plan.register_need} registers per thread + {configuration.TWOSHOT_REGISTERS} for "
                f"the owner's address and the slot, 512 threads have {configuration.REGISTER_LIMIT}; it fits "
                f"batches {self.valid_batches()}, or stage more blocks"
            )
        return plan

    def check(self, x: Any, weight: Any, mailbox: Any) -> Plan:
        """The plan for these arrays (NumPy, torch or CuTe). Raises ValueError, see ``check_inputs`` and
        ``plan``."""
        check_inputs(x, weight, mailbox, columns=self.published_columns(mailbox))
        if x.shape[1] != self.config.k:
            raise ValueError(
                f"x has K = {x.shape[1]} columns, this producer is built for k = {self.config.k}"
            )
        return self.plan(x.shape[0])

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

        state: address of the mailbox's generation records, with ``generations=True`` only.

        Raises ValueError while compiling, for tensors or a batch that this configuration cannot take.
        """
        self.check(x, weight, mailbox)
        self.check_state(state)
        self.kernel(x, weight, mailbox, mc, slot, state).launch(
            grid=[CTAS, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
            hint_smem_base_uniform=True,  # a shuffle at the start, then the base costs no lane a register
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
        """The split form: the producer alone, its dependents released right after its own wait."""
        self.project(x, weight, mailbox, mc, slot, state)

    def project(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        state: Int64 | None,
        trigger_after_wait: bool = True,
        then: Callable[[], None] | None = None,
    ) -> None:
        """The whole projection as a device function, whatever the engine.

        then: what the ``consumers`` threads of each CTA do after they have published, in the fused forms.
        """
        shared = self.allocate(x.shape[0])
        weights = self.load_weight(weight, shared)
        self.compute(x, weights, shared, mailbox, mc, slot, trigger_after_wait, state)
        if then is not None:
            then()

    def allocate(self, batch: int) -> Shared:
        """Reserve the CTA's shared memory for ``batch`` tokens (unused areas get no bytes)."""
        plan = self.plan(batch)
        memory = SmemAllocator()
        areas = [
            memory.allocate(size, byte_alignment=CHUNK_BYTES).toint() if size else None
            for size in (plan.staged_bytes, plan.x_bytes, plan.partial_bytes)
        ]
        return Shared(*areas)

    def load_weight(self, weight: cute.Tensor, shared: Shared) -> list[list[Fragment]]:
        """Start every weight of this lane: copies to shared memory first, then loads to registers.

        Returns the register-resident fragments, [register block][row tile of the warp]. Nothing here waits.
        """
        config, me = self.config, this_lane(self.config)
        row = me.cta * ROWS_PER_CTA + fragments.weight_row(me.row_tile, me.group, 0)
        column = fragments.block_column(me.k_part, config.kblocks, 0, me.part)
        address = weight.iterator.toint() + Int64(row * config.k + column) * BF16_BYTES

        def offset(block: int, tile: int, r: int) -> int:
            rows_below = fragments.weight_row(tile, 0, r)
            return (rows_below * config.k + fragments.block_column(0, config.kblocks, block, 0)) * BF16_BYTES

        if config.staged_blocks:
            staged = self.staged_address(shared, me)
            for block in range(config.staged_blocks):
                for tile in range(config.rows):
                    for r in range(2):
                        source = offset(config.register_blocks + block, tile, r)
                        primitives.copy_chunk_async(
                            staged, self.staged_offset(block, tile, r), address, source
                        )
            cute.arch.cp_async_commit_group()
        weights = []
        for block in range(config.register_blocks):
            tiles = []
            for tile in range(config.rows):
                upper = primitives.load_weight_chunk(address, offset(block, tile, 0))
                lower = primitives.load_weight_chunk(address, offset(block, tile, 1))
                tiles.append((upper, lower))
            weights.append(tiles)
        return weights

    def staged_address(self, shared: Shared, me: Lane) -> Int32:
        """Address of this lane's first staged chunk; the others are at ``staged_offset``."""
        unit = shared_memory.staged_unit(me.warp, 0, 0, self.config.staged_blocks, self.config.rows)
        return shared.staged + shared_memory.staged_offset(unit, 0, me.lane)

    def staged_offset(self, block: int, tile: int, r: int) -> int:
        """Bytes from the lane's first staged chunk to that of a staged block, row tile and tile half."""
        unit = shared_memory.staged_unit(0, block, tile, self.config.staged_blocks, self.config.rows)
        return shared_memory.staged_offset(unit, r, 0)

    def x_lane(self, x: cute.Tensor, shared: Shared) -> XLane:
        """Where this lane copies x from and to, and where its fragments begin. Addresses only: x itself may
        not exist yet."""
        k, me = self.config.k, this_lane(self.config)
        base = x.iterator.toint()
        column = fragments.block_column(me.k_part, self.config.kblocks, 0, me.part)
        if self.config.path is XPath.REGISTERS:
            return XLane(me, None, None, base + Int64(me.group * k + column) * BF16_BYTES)
        token, chunk = shared_memory.copy_token(me.warp), shared_memory.copy_chunk(me.warp, me.lane, k)
        return XLane(
            me,
            source=base + Int64(token * k + chunk * CHUNK) * BF16_BYTES,
            target=shared.x + shared_memory.x_offset(token, chunk, k),
            fragments=shared.x + shared_memory.x_offset(me.group, column // CHUNK, k),
        )

    def stage_x(self, lane: XLane, batch: int, first_token: int, tiles: int, buffer: int = 0) -> None:
        """Copy ``tiles`` 8-token tiles of x, from ``first_token`` on, to x buffer ``buffer`` as one cp.async
        group.

        Tokens beyond the batch: the ring zero-fills them, the shared path has no rows for them and skips.
        """
        k, me = self.config.k, lane.me
        token = shared_memory.copy_token(me.warp)
        row_chunks = shared_memory.copy_row_chunks(k)
        for tile in range(tiles):
            tile_token = first_token + tile * MMA_TOKENS
            ragged = token < batch - tile_token if tile_token + MMA_TOKENS > batch else None
            for first_chunk in range(0, row_chunks, WARP_LANES):
                valid = me.lane < row_chunks - first_chunk if first_chunk + WARP_LANES > row_chunks else None
                to = self.x_buffer(batch, buffer) + shared_memory.x_offset(tile * MMA_TOKENS, first_chunk, k)
                of = (tile_token * k + first_chunk * CHUNK) * BF16_BYTES
                if ragged is None:
                    primitives.copy_chunk_async(lane.target, to, lane.source, of, valid)
                elif self.config.path is XPath.RING:
                    source_bytes = Int32(ragged) * CHUNK_BYTES
                    primitives.copy_chunk_async_or_zero(lane.target, to, lane.source, of, source_bytes, valid)
                else:
                    copied = ragged if valid is None else cutlass.and_(ragged, valid)
                    primitives.copy_chunk_async(lane.target, to, lane.source, of, copied)
        cute.arch.cp_async_commit_group()

    def x_buffer(self, batch: int, buffer: int) -> int:
        """Offset of ring buffer ``buffer``; the shared path has buffer 0 only."""
        return buffer * shared_memory.x_buffer_bytes(MMA_TOKENS * self.schedule(batch)[1], self.config.k)

    def x_words(self, lane: XLane, batch: int, tile: int, block: int, buffer: int = 0) -> Words4:
        """This lane's 8 BF16 of x for one 8-token tile and K block; zeros for tokens beyond the batch.

        tile counts from the start of the batch, or of the group on the ring path.
        """
        path, k, first_token = self.config.path, self.config.k, tile * MMA_TOKENS
        shared_offset = shared_memory.x_offset(first_token, block * (BLOCK_K // CHUNK), k)
        if path is XPath.RING:
            return primitives.load_shared_chunk(lane.fragments, self.x_buffer(batch, buffer) + shared_offset)
        valid = lane.me.group < batch - first_token if first_token + MMA_TOKENS > batch else None
        if path is XPath.REGISTERS:
            return primitives.load_global_chunk(
                lane.fragments, (first_token * k + block * BLOCK_K) * BF16_BYTES, valid
            )
        return primitives.load_shared_chunk(lane.fragments, shared_offset, valid)

    def weight_fragment(self, weights: list[list[Fragment]], staged: Any, block: int, tile: int) -> Fragment:
        """The fragment of K block ``block`` and row tile ``tile`` of the warp, from registers or from its
        staged unit."""
        if block < self.config.register_blocks:
            return weights[block][tile]
        unit = block - self.config.register_blocks
        return (
            primitives.load_shared_chunk(staged, self.staged_offset(unit, tile, 0)),
            primitives.load_shared_chunk(staged, self.staged_offset(unit, tile, 1)),
        )

    def multiply(
        self,
        weights: list[list[Fragment]],
        shared: Shared,
        x_blocks: Callable[[int], Sequence[Words4]],
        tiles: int,
    ) -> list[list[Floats4]]:
        """All MMAs of ``tiles`` token tiles, side by side, and the sum of their chains.

        x_blocks(block) gives the x words of each tile. Returns FP32 accumulators, [token tile][row tile of
        the warp].
        """
        zero = Float32(0.0)
        chains = self.config.chains
        staged = self.staged_address(shared, this_lane(self.config)) if self.config.staged_blocks else None
        sums: list[list[list[Floats4]]] = [
            [[(zero, zero, zero, zero)] * chains for _ in range(self.config.rows)] for _ in range(tiles)
        ]
        for block in range(self.config.kblocks):
            x_words = x_blocks(block)
            for row in range(self.config.rows):
                fragment = self.weight_fragment(weights, staged, block, row)
                for half in range(HALVES):
                    chain = fragments.chain_of(block, half, chains)
                    a = [fragment[r][word] for r, word in (fragments.a_register(half, i) for i in range(4))]
                    for tile, words in enumerate(x_words):
                        b = [words[fragments.b_register(half, i)] for i in range(2)]
                        sums[tile][row][chain] = primitives.mma_bf16(sums[tile][row][chain], a, b)
        return [[self.add_chains(row) for row in tile] for tile in sums]

    def add_chains(self, chains: list[Floats4]) -> Floats4:
        """The chains added pairwise, ((0 + 1) + (2 + 3)), each add rounded to nearest."""
        while len(chains) > 1:
            chains = [_add4(chains[i], chains[i + 1]) for i in range(0, len(chains), 2)]
        return chains[0]

    def store_partials(self, shared: Shared, tile: int, rows: Sequence[Floats4]) -> None:
        """This K part's sums of one token tile (counted within the group) to shared memory."""
        parts, me = self.config.parts, this_lane(self.config)
        token, row = fragments.accumulator_token(me.part, 0), fragments.accumulator_row(me.group, 0)
        address = shared.partials + shared_memory.partial_offset(0, me.row_tile, me.k_part, token, row, parts)
        for row_tile, accumulators in enumerate(rows):
            for v, value in enumerate(accumulators):
                token_v, row_v = fragments.accumulator_token(0, v), fragments.accumulator_row(0, v)
                offset = shared_memory.partial_offset(tile, row_tile, 0, token_v, row_v, parts)
                primitives.store_shared_float(address, offset, value)

    @cute.jit
    def publish(
        self,
        shared: cutlass.Constexpr,
        mailbox: cutlass.Constexpr,
        mc: Int64,
        slot: Int32,
        first_token: cutlass.Constexpr,
        tokens: cutlass.Constexpr,
    ) -> None:
        """Add the K parts of ``tokens`` tokens in order, round, and send: one 16-byte chunk per thread."""
        tid, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(chunks.publish_threads(tokens) == THREADS):
            self.publish_chunk(shared, mailbox, mc, slot, first_token, tokens)
        else:
            if tid < chunks.publish_threads(tokens):
                self.publish_chunk(shared, mailbox, mc, slot, first_token, tokens)

    def publish_chunk(
        self, shared: Shared, mailbox: Mailbox, mc: Int64, slot: Int32, first_token: int, tokens: int
    ) -> None:
        """The work of one publishing thread."""
        me, parts = this_lane(self.config), self.config.parts
        if self.config.group_tiles:
            token, row_tile, half = chunks.grouped_chunk(me.tid, tokens)
        else:
            token, row_tile, half = chunks.ungrouped_chunk(me.tid)
        tile, token_in_tile = token // MMA_TOKENS, token % MMA_TOKENS
        offset = shared_memory.partial_offset(tile, row_tile, 0, token_in_tile, half * CHUNK, parts)
        address = shared.partials + offset
        sums: list[Float32] = []
        for part in range(parts):
            at = part * PARTIAL_TILE_BYTES
            low = primitives.load_shared_floats(address, at)
            high = primitives.load_shared_floats(address, at + CHUNK_BYTES)
            values = [*low, *high]
            sums = [primitives.add_float(a, b) for a, b in zip(sums, values, strict=True)] if sums else values
        words = self.round_chunk(sums)
        column = chunks.output_column(me.cta, row_tile, half)
        self.transport.store_chunk(mailbox, mc, slot, first_token + token, column, words)

    def compute(
        self,
        x: cute.Tensor,
        weights: list[list[Fragment]],
        shared: Shared,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        trigger_after_wait: bool = True,
        state: Int64 | None = None,
    ) -> None:
        """Everything that follows the previous kernel: wait, x, MMAs, partial sums, publish.

        trigger_after_wait: release the dependents right after the wait. Never earlier: a consumer that skips
        its own wait relies on this one. state: see the constructor's generations.
        """
        lane = self.x_lane(x, shared)
        cute.arch.griddepcontrol_wait()
        if trigger_after_wait:
            cute.arch.griddepcontrol_launch_dependents()
        box = Mailbox(*mailbox.shape)
        mc, slot, generation = self.route(box, mc, slot, state)
        if self.config.path is XPath.RING:
            self.compute_ring(lane, x, weights, shared, box, mc, slot)
        else:
            self.compute_ungrouped(lane, x, weights, shared, box, mc, slot)
        self.count_on(state, generation)

    def compute_ungrouped(
        self,
        lane: XLane,
        x: cute.Tensor,
        weights: Any,
        shared: Shared,
        mailbox: Mailbox,
        mc: Int64,
        slot: Int32,
    ) -> None:
        """Register and shared path: one pass per token tile, one publish at the end."""
        batch = x.shape[0]
        tiles, _, _ = self.schedule(batch)
        if self.config.path is XPath.SHARED:
            self.receive_x(lane, batch, tiles)
            for tile in range(tiles):
                self.multiply_tile(weights, shared, tile, partial(self.x_words, lane, batch, tile))
        else:
            self.multiply_from_registers(lane, x, weights, shared)
        self.publish_all(shared, mailbox, mc, slot, batch)

    def receive_x(self, lane: XLane, batch: int, tiles: int) -> None:
        """Shared path: all of x in shared memory, visible to every warp."""
        self.stage_x(lane, batch, 0, tiles)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()

    def publish_all(self, shared: Shared, mailbox: Mailbox, mc: Int64, slot: Int32, batch: int) -> None:
        """Once every warp has stored its partial sums: publish the batch."""
        cute.arch.sync_threads()
        self.publish(shared, mailbox, mc, slot, 0, batch)

    def multiply_from_registers(self, lane: XLane, x: cute.Tensor, weights: Any, shared: Shared) -> None:
        """Register path: x of the next token tile is on its way while this one is multiplied."""
        batch = x.shape[0]
        tiles, _, _ = self.schedule(batch)

        def load(mine: XLane, tile: int) -> list[Words4]:
            return [self.x_words(mine, batch, tile, block) for block in range(self.config.kblocks)]

        following = load(lane, 0)
        if self.config.staged_blocks:
            cute.arch.cp_async_wait_group(0)  # a lane reads only what it copied itself: no barrier
        for tile in range(tiles):
            words = following
            if tile + 1 < tiles:
                # Addresses are worked out again: registers are full of weights, these would be spilled.
                following = load(self.x_lane(x, shared), tile + 1)
            self.multiply_tile(weights, shared, tile, words.__getitem__)
            # One tile ahead and no more: without this ptxas fetches x of all tiles at once, and spills.
            cute.arch.sync_warp()

    def multiply_tile(
        self, weights: Any, shared: Shared, tile: int, x_words: Callable[[int], Words4]
    ) -> None:
        """Multiply one token tile and store its partial sums. x_words(block) gives its x."""
        accumulators = self.multiply(weights, shared, lambda block: [x_words(block)], 1)
        self.store_partials(shared, tile, accumulators[0])

    def compute_ring(
        self,
        lane: XLane,
        x: cute.Tensor,
        weights: Any,
        shared: Shared,
        mailbox: Mailbox,
        mc: Int64,
        slot: Int32,
    ) -> None:
        """Ring path. While group g is multiplied, x of g + 1 is on its way and g - 1 is published.

        The first barrier of a round makes x(g) and the partial sums of g - 1 visible, and says that everyone
        is done with the buffer that x(g + 1) overwrites; the second says that g - 1 is published, so its
        partial sums may be overwritten.
        """
        batch = x.shape[0]
        tiles, tiles_per_group, groups = self.schedule(batch)
        group_size = tiles_per_group * MMA_TOKENS

        def stage(group: int) -> None:
            # Later groups work their addresses out again: registers are full of weights, these would be
            # spilled.
            mine = self.x_lane(x, shared) if group else lane
            count = cut.group_tile_count(group, tiles, tiles_per_group)
            self.stage_x(mine, batch, group * group_size, count, shared_memory.ring_buffer(group))

        def publish(group: int) -> None:
            tokens = cut.group_tokens(group, batch, tiles_per_group)
            self.publish(shared, mailbox, mc, slot, group * group_size, tokens)

        stage(0)
        for group in range(groups):
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if group + 1 < groups:
                stage(group + 1)
            if group:
                publish(group - 1)
            count = cut.group_tile_count(group, tiles, tiles_per_group)
            buffer = shared_memory.ring_buffer(group)
            mine = self.x_lane(x, shared) if group else lane

            def x_blocks(block: int) -> list[Words4]:
                return [self.x_words(mine, batch, tile, block, buffer) for tile in range(count)]  # noqa: B023

            accumulators = self.multiply(weights, shared, x_blocks, count)
            cute.arch.sync_threads()
            for tile in range(count):
                self.store_partials(shared, tile, accumulators[tile])
        cute.arch.sync_threads()
        publish(groups - 1)


def _add4(first: Floats4, second: Floats4) -> Floats4:
    a, b, c, d = (primitives.add_float(x, y) for x, y in zip(first, second, strict=True))
    return a, b, c, d


OprojProducer.kernel.set_name_prefix("oproj_producer", remove_cutlass_symbol=True, keep_mangled_name=False)
