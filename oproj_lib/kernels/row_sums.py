"""Sums over a row of 7168 columns that a CTA shares, always added in the same order.

1. In a thread: word j of a 16-byte chunk holds columns 2 j and 2 j + 1; chain j adds the products of these, chunk
   after chunk, by fused multiply-adds; then (chain 0 + chain 1) + (chain 2 + chain 3).
2. In a warp: lanes 16 apart, then 8, 4, 2, 1 (a butterfly).
3. Over the warps, one after the other, through shared memory (``layouts.attnres``).
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Float32, Int32

from oproj_lib.kernels import float_primitives as fp32
from oproj_lib.kernels import primitives
from oproj_lib.kernels.attnres_lane import Row, Thread
from oproj_lib.kernels.mailbox_primitives import widen
from oproj_lib.kernels.primitives import Words4, add_float
from oproj_lib.layouts import attnres as layout
from oproj_lib.layouts.fragments import CHUNK, CHUNK_BYTES, WARP_LANES

SUMS_BARRIER = 4
"""Named barrier of the threads that share sums. Ids 0 to 2 are the engines', 3 is the mailbox's."""


class RowSums:
    """Device functions. The shared rows that ``share`` writes are read by ``shared_sum``."""

    def score_sums(self, row: Sequence[Words4], weights: Row) -> list[Float32]:
        """[sum v^2, sum v w] of this thread's columns. The products are exact (16 and 24 bits)."""
        values = [widen(words) for words in row]
        return [self.thread_sum(values, values), self.thread_sum(values, weights)]

    def thread_sum(self, first: Row, second: Row) -> Float32:
        """sum first * second of this thread's columns, in four chains: one per pair of columns."""
        chains: list[Float32] = []
        for pair in range(0, CHUNK, 2):
            chain = None
            for a, b in zip(first, second, strict=True):
                for column in (pair, pair + 1):
                    product = (a[column], b[column])
                    chain = fp32.multiply(*product) if chain is None else fp32.multiply_add(*product, chain)
            chains.append(chain)
        return add_float(add_float(chains[0], chains[1]), add_float(chains[2], chains[3]))

    def share(self, me: Thread, first_row: int, values: Sequence[Float32]) -> None:
        """Sums over each warp of a power of two of values, to shared memory, for all warps to read.

        A butterfly that halves the values as it goes: after the step of distance d a lane keeps the half that
        its bit d names. 16 values take 16 shuffles instead of 5 * 16, and every addition is the butterfly's.
        """
        distance = WARP_LANES // 2
        remaining = list(values)
        while distance:
            half = len(remaining) // 2
            if half:
                upper = me.lane // distance % 2 == 1
                pairs = list(zip(remaining[:half], remaining[half:], strict=True))
                remaining = [
                    add_float(
                        fp32.float_if(upper, high, low),
                        fp32.from_lane(fp32.float_if(upper, low, high), distance),
                    )
                    for low, high in pairs
                ]
            else:
                remaining = [add_float(remaining[0], fp32.from_lane(remaining[0], distance))]
            distance //= 2
        lanes_per_value = WARP_LANES // len(values)
        row = me.lane // lanes_per_value
        row_bytes = layout.sum_row_bytes(me.crew.threads)
        address = me.shared + row * row_bytes + me.warp * layout.FLOAT_BYTES
        fp32.store_shared_float_if(
            address, first_row * row_bytes, remaining[0], me.lane % lanes_per_value == 0
        )
        self.meet(me)

    def meet(self, me: Thread) -> None:
        """What the CTA's consuming threads have stored to shared memory is there for all of them."""
        cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=me.crew.threads)

    def shared_sum(self, me: Thread, first_row: int, row: Int32 | int = 0) -> Float32:
        """The warps' sums of a shared row, added in order."""
        row_bytes = layout.sum_row_bytes(me.crew.threads)
        address = me.shared + row * row_bytes
        sums: list[Float32] = []
        for vector in range(layout.sum_vectors(me.crew.threads)):
            sums += primitives.load_shared_floats(address, first_row * row_bytes + vector * CHUNK_BYTES)
        total = sums[0]
        for value in sums[1 : layout.warps(me.crew.threads)]:
            total = add_float(total, value)
        return total
