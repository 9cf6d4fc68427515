"""`OprojProducer` tuned for the fewest tokens: what stands between the previous kernel and the result is shorter.

Beside the x paths of `OprojProducer`, with the same bits out, for one token tile (M <= 8) and any K:

* x goes from L2 straight to registers, whatever K is. Through shared memory it costs a barrier and a second
  trip; with ``rows = 2`` two warps instead of four load the same x, and a thread has registers for it even at
  K = 1536 (one staged block).
* The K parts are added by 256 threads, two rows each, instead of by 8 threads per token, eight rows each: the
  same additions in the same order, less of it in one thread. Three shuffles bring a chunk's words together.
* With one rank, the mailbox's address is looked up before the wait and kept, where two registers are left for it.
* The address translations of x and of the mailbox are fetched before the wait, by a prefetch into L2 (which
  is coherent, so it does no harm that x is not written yet; no value is read).

docs/latency.md has the measurements, and those of the ideas that did not help.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.arch import shuffle_sync_down

from oproj_lib.kernels import primitives
from oproj_lib.kernels.configuration import REGISTER_LIMIT, Configuration
from oproj_lib.kernels.lane import Shared, this_lane
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.transport import Transport, UnicastTransport
from oproj_lib.layouts import publish as chunks
from oproj_lib.layouts import shared_memory
from oproj_lib.layouts.fragments import BF16_BYTES, CHUNK
from oproj_lib.layouts.shared_memory import PARTIAL_TILE_BYTES
from oproj_lib.problem import ROWS_PER_CTA

ADDRESS_REGISTERS = 2
"""A 64-bit address."""


class OprojProducerDirect(OprojProducer):
    """`OprojProducer` for M <= 8. Arguments as there, without ``group_tiles``.

    Raises ValueError for a configuration that does not exist, or whose x does not fit the registers beside its
    weights.
    """

    def __init__(
        self,
        k: int,
        *,
        staged_blocks: int,
        rows: int = 2,
        group_tiles: int = 0,
        twoshot: bool = False,
        transport: Transport | str | None = None,
        policy: str = "latent",
        generations: bool = False,
    ) -> None:
        self.config = Configuration(k, staged_blocks, rows, group_tiles, direct=True)
        self.set_publishing(twoshot, transport, policy, generations)
        if self.transport == UnicastTransport() and self.has_registers_for_address():
            self.transport = UnicastTransport(held=True)

    def has_registers_for_address(self) -> bool:
        """Whether a thread can keep a 64-bit address from before the wait to its last store."""
        need = self.config.plan(1).register_need  # the same for every batch: there is one tile
        return need + ADDRESS_REGISTERS <= REGISTER_LIMIT

    # Device

    def compute(
        self,
        x: cute.Tensor,
        weights: Any,
        shared: Shared,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        trigger_after_wait: bool = True,
        state: Int64 | None = None,
    ) -> None:
        """As `OprojProducer.compute`, with the mailbox's address and translation, and x's, fetched before the wait.

        The table of addresses is the host's, no kernel writes it, so it may be read that early.
        """
        cta, _, _ = cute.arch.block_idx()
        primitives.prefetch_l2(x.iterator.toint())
        primitives.prefetch_l2(mailbox.iterator.toint() + Int64(cta * ROWS_PER_CTA) * BF16_BYTES)
        if self.transport == UnicastTransport(held=True):
            mc = primitives.load_address(mc, 0)
        super().compute(x, weights, shared, mailbox, mc, slot, trigger_after_wait, state)

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
        """Add the K parts of ``tokens`` tokens in order, round, and send: two rows per thread."""
        tid, _, _ = cute.arch.thread_idx()
        if tid < chunks.PAIR_THREADS:
            self.publish_pair(shared, mailbox, mc, slot, first_token, tokens)

    @cute.jit
    def publish_pair(
        self,
        shared: cutlass.Constexpr,
        mailbox: cutlass.Constexpr,
        mc: Int64,
        slot: Int32,
        first_token: cutlass.Constexpr,
        tokens: cutlass.Constexpr,
    ) -> None:
        """The work of one thread. All lanes shuffle; the first of each four stores, if its token exists."""
        me = this_lane(self.config)
        token, row_tile, row = chunks.pair(me.warp, me.lane)
        words = self.gather_chunk(self.sum_pair(shared, token, row_tile, row))
        column = chunks.output_column(me.cta, row_tile, row // CHUNK)
        if cutlass.and_(me.lane % chunks.PAIRS_PER_CHUNK == 0, token < tokens):
            self.transport.store_chunk(mailbox, mc, slot, first_token + token, column, words)

    def sum_pair(self, shared: Shared, token: Int32, row_tile: Int32, row: Int32) -> tuple[Float32, Float32]:
        """The K parts of two neighbouring rows, added in order."""
        parts = self.config.parts
        address = shared.partials + shared_memory.partial_offset(0, row_tile, 0, token, row, parts)
        low, high = primitives.load_shared_pair(address, 0)
        for part in range(1, parts):
            a, b = primitives.load_shared_pair(address, part * PARTIAL_TILE_BYTES)
            low, high = primitives.add_float(low, a), primitives.add_float(high, b)
        return low, high

    def gather_chunk(self, pair: tuple[Float32, Float32]) -> primitives.Words4:
        """The four words of the chunk that begins with this lane's."""
        word = primitives.pack2(*pair, self.policy)
        return (
            word,
            shuffle_sync_down(word, 1),
            shuffle_sync_down(word, 2),
            shuffle_sync_down(word, 3),
        )
