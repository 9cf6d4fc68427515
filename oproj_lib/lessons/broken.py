"""Producers that break one rule each, to see what the virtual GPU says about it.

`BROKEN` maps a name to the producer class, a configuration in which the mistake matters, and the kind of
finding that names it. Each class overrides as little as it can, so that a reader sees the one line that is
wrong. The comment `# the mistake` marks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from oproj_lib.kernels import primitives
from oproj_lib.kernels.configuration import THREADS
from oproj_lib.kernels.lane import Shared, XLane, this_lane
from oproj_lib.kernels.primitives import Words4
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.transport import Mailbox
from oproj_lib.layouts import publish as chunks
from oproj_lib.layouts.fragments import BLOCK_K, CHUNK, CHUNK_BYTES


class NoCopyWait(OprojProducer):
    """Reads staged weights and x without waiting for the cp.async that brings them."""

    def receive_x(self, lane: XLane, batch: int, tiles: int) -> None:
        self.stage_x(lane, batch, 0, tiles)  # the mistake: cp_async_wait_group(0) should follow
        cute.arch.sync_threads()


class NoBarrierAfterX(OprojProducer):
    """Waits for its own copies of x and then reads what other warps copied."""

    def receive_x(self, lane: XLane, batch: int, tiles: int) -> None:
        self.stage_x(lane, batch, 0, tiles)
        cute.arch.cp_async_wait_group(0)  # the mistake: sync_threads() should follow


class NoBarrierBeforePublish(OprojProducer):
    """Adds the K parts up before all warps have stored theirs."""

    def publish_all(self, shared: Shared, mailbox: Mailbox, mc: Int64, slot: Int32, batch: int) -> None:
        self.publish(shared, mailbox, mc, slot, 0, batch)  # the mistake: sync_threads() should come first


class BarrierThatSomeWarpsSkip(OprojProducer):
    """A barrier for all 512 threads stands in a branch that only the publishing threads take."""

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
        tid, _, _ = cute.arch.thread_idx()
        if tid < chunks.publish_threads(tokens):
            cute.arch.barrier(
                barrier_id=1, number_of_threads=THREADS
            )  # the mistake: only the publishers come here
            self.publish_chunk(shared, mailbox, mc, slot, first_token, tokens)


class OneTokenTooMany(OprojProducer):
    """Publishes token M, for which the mailbox has no room."""

    def publish_chunk(
        self, shared: Shared, mailbox: Mailbox, mc: Int64, slot: Int32, first_token: int, tokens: int
    ) -> None:
        super().publish_chunk(shared, mailbox, mc, slot, first_token + 1, tokens)  # the mistake: + 1


class ForgottenPadding(OprojProducer):
    """Writes x rows with the 4-chunk padding and reads them without: part of each fragment is another
    row's."""

    def x_words(self, lane: XLane, batch: int, tile: int, block: int, buffer: int = 0) -> Words4:
        del batch, buffer
        me, k = lane.me, self.config.k
        unpadded = k // CHUNK * CHUNK_BYTES
        column_bytes = lane.fragments - (k // CHUNK + 4) * CHUNK_BYTES * me.group
        address = column_bytes + unpadded * me.group
        return primitives.load_shared_chunk(  # the mistake: the row stride is k // 8 chunks, not k // 8 + 4
            address, (tile * 8 * (k // CHUNK) + block * (BLOCK_K // CHUNK)) * CHUNK_BYTES
        )


class ForgottenToken(OprojProducer):
    """Publishes one token less than the batch has."""

    def publish_chunk(
        self, shared: Shared, mailbox: Mailbox, mc: Int64, slot: Int32, first_token: int, tokens: int
    ) -> None:
        last = this_lane(self.config).tid // 8 == tokens - 1
        offset = Int32(last) * -(tokens - 1)  # the mistake: the last token's threads write token 0 again
        super().publish_chunk(shared, mailbox, mc, slot, first_token + offset, tokens)


class ReadsXEarly(OprojProducer):
    """Stages x before griddepcontrol.wait, when the previous kernel may still be writing it."""

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
        self.stage_x(
            self.x_lane(x, shared), x.shape[0], 0, self.schedule(x.shape[0])[0]
        )  # the mistake: too early
        super().compute(x, weights, shared, mailbox, mc, slot, trigger_after_wait, state)


@dataclass(frozen=True)
class Broken:
    """producer: the class; settings: its configuration; batch: tokens; kind: the finding that names the
    mistake; method: where the finding must point (the method whose line is reported, or the one to blame)."""

    producer: type[OprojProducer]
    kind: str
    method: str
    k: int = 1536
    batch: int = 8
    staged_blocks: int = 4

    def build(self) -> OprojProducer:
        return self.producer(self.k, staged_blocks=self.staged_blocks)


BROKEN = {
    "no cp.async wait": Broken(NoCopyWait, "undefined data", "stage_x"),
    "no barrier after x": Broken(NoBarrierAfterX, "race", "x_words"),
    "no barrier before publish": Broken(NoBarrierBeforePublish, "race", "publish_chunk"),
    "a barrier that some warps skip": Broken(BarrierThatSomeWarpsSkip, "deadlock", "publish"),
    "one token too many": Broken(OneTokenTooMany, "out of bounds", "publish_chunk"),
    "forgotten padding": Broken(ForgottenPadding, "undefined data", "x_words"),
    "forgotten token": Broken(ForgottenToken, "unwritten output", ""),
    "x read early": Broken(ReadsXEarly, "too early", "stage_x"),
}
