"""MailboxReduce: out[t, n] = bf16(sum over ranks of mailbox[generation, rank, t, n]), FP32, in rank order.

Shapes: mailbox [3 * ranks, tokens, 7168] BF16, out [M, 7168] BF16 with M <= tokens, state int32 [3, 512].
112 CTAs, one per 64 columns, one thread per 16-byte chunk; all ranks' loads of a chunk are in flight together.

    when      what                                               waits for
    start     its dependents' go; its generation                 nothing: the producer triggered after its wait
    re-arm    sentinels over the last call's tokens              -
    poll      until all ranks' chunks are there                  the data itself
    out       sums rounded, stored                               -
    end       griddepcontrol.wait, generation moves on           producer, see ``kernels.mailbox``

A reduction of one rank (``ranks=1``) consumes the result mailbox of the second shot, bit for bit.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from oproj_lib.kernels import mailbox_primitives, primitives
from oproj_lib.kernels.inputs import check_mailbox_and_out
from oproj_lib.kernels.mailbox import Crew, MailboxReader, Turn
from oproj_lib.kernels.transport import Mailbox
from oproj_lib.layouts import mailbox as layout
from oproj_lib.layouts.fragments import BF16_BYTES
from oproj_lib.problem import CTAS, ROWS_PER_CTA


class MailboxReduce:
    """Builds the reduction for a mailbox of ``ranks`` ranks. Raises ValueError for ranks outside 1..72."""

    def __init__(self, ranks: int) -> None:
        self.reader = self.make_reader(ranks)

    def make_reader(self, ranks: int) -> MailboxReader:
        """How the mailbox is read."""
        return MailboxReader(ranks)

    @property
    def ranks(self) -> int:
        """Ranks that publish into the mailbox."""
        return self.reader.ranks

    # Host

    @cute.jit
    def __call__(self, mailbox: cute.Tensor, out: cute.Tensor, state: Int64, stream: cuda.CUstream) -> None:
        """Launch on ``stream``, behind the producer. M is the static first extent of out.

        Raises ValueError while compiling, for tensors that do not fit.
        """
        self.check(mailbox, out)
        self.kernel(mailbox, out, state).launch(
            grid=[CTAS, 1, 1],
            block=[layout.consumer_threads(out.shape[0]), 1, 1],
            stream=stream,
            use_pdl=True,
        )

    def check(self, mailbox: object, out: object) -> None:
        """Raises ValueError for arrays (NumPy, torch or CuTe) that this reduction cannot take."""
        self.reader.check(Mailbox(*check_mailbox_and_out(mailbox, out)))

    # Device

    @cute.kernel
    def kernel(self, mailbox: cute.Tensor, out: cute.Tensor, state: Int64) -> None:
        """The split form."""
        cute.arch.griddepcontrol_launch_dependents()
        cta, _, _ = cute.arch.block_idx()
        threads = layout.consumer_threads(out.shape[0])
        self.consume(mailbox, out, state, Crew(cta, primitives.thread_index(), CTAS, threads))
        cute.arch.griddepcontrol_wait()  # not before: see kernels.mailbox, "had completed"

    def consume(self, mailbox: cute.Tensor, out: cute.Tensor, state: Int64, crew: Crew) -> None:
        """The device function: re-arm, poll, sum, store, count on. ``crew`` has 112 CTAs.

        Every thread of the crew must come here, and named barrier 3 must be free.
        """
        box, base = Mailbox(*mailbox.shape), mailbox.iterator.toint()
        tokens = out.shape[0]
        turn = self.turn(state, crew, tokens)
        self.reader.rearm(base, box, turn, crew)
        chunks = layout.CHUNKS_PER_CTA * tokens
        for step in range(layout.passes(chunks, crew.threads)):
            self.reduce_pass(base, box, turn, crew, out, step * crew.threads, chunks)
        self.reader.barrier(crew)
        self.reader.generations.consumed(state, turn, tokens, crew)

    def turn(self, state: Int64, crew: Crew, tokens: int) -> Turn:
        """This call's generation, and what to arm again."""
        del tokens
        return self.reader.generations.consuming(state, crew.cta)

    @cute.jit
    def reduce_pass(
        self,
        base: Int64,
        box: cutlass.Constexpr,
        turn: cutlass.Constexpr,
        crew: cutlass.Constexpr,
        out: cute.Tensor,
        first: cutlass.Constexpr,
        chunks: cutlass.Constexpr,
    ) -> None:
        """Chunks ``first`` .. of the CTA, one per thread, as far as there are any."""
        if cutlass.const_expr(first + crew.threads <= chunks):
            self.reduce_chunk(base, box, turn, crew, out, crew.thread + first)
        else:
            if crew.thread + first < chunks:
                self.reduce_chunk(base, box, turn, crew, out, crew.thread + first)

    def reduce_chunk(
        self, base: Int64, box: Mailbox, turn: Turn, crew: Crew, out: cute.Tensor, index: Int32
    ) -> None:
        """One thread: the sum of one chunk, rounded, to ``out``."""
        token, column = layout.consumed_chunk(index)
        column = crew.cta * ROWS_PER_CTA + column
        sums = self.reader.sum_chunk(base, box, turn, token, column)
        words = primitives.pack8(sums, "plain")
        offset = Int64(token * box.columns + column) * BF16_BYTES
        mailbox_primitives.store_result(out.iterator.toint() + offset, words)


MailboxReduce.kernel.set_name_prefix("mailbox_reduce", remove_cutlass_symbol=True, keep_mangled_name=False)
