"""The second shot of two: the owner of a column adds what all ranks sent it, and sends the sum to every rank.

    result[generation, 0, t, n] = bf16(sum over ranks of receive[generation, rank, t, n - first]), FP32, in
    rank order, for the columns n of this rank's shard (7168 / ranks of them, from first = rank * 7168 / ranks)

Shapes: receive [3 * ranks, tokens, 7168 / ranks] BF16, the own view; result [3, tokens, 7168] BF16, one copy
on every rank, reached through ``mc`` (a multicast address, or a table of addresses). Each has a state of its
own. Both are Lamport mailboxes: this kernel is a consumer of the first and the only kind of writer of the
second, whose consumers are built for one rank (``MailboxReduce(1)``).

One-shot sends 7168 BF16 per token to every rank, R times over; two-shot sends them once in shards and once as
sums, for one more latency. 112 CTAs, one thread per 16-byte chunk of the shard.

    when      what                                               waits for
    start     its dependents' go; both generations               nothing: the producer triggered after its wait
    re-arm    sentinels over the last call's tokens of receive   -
    poll      until all ranks' chunks are there                  the data itself
    publish   sums rounded, -0.0 cleared, sent to every rank     -
    end       griddepcontrol.wait, generations move on           producer, see ``kernels.mailbox``

Three generations are enough here too (the argument of ``kernels.mailbox``): whoever sends an owner its call n +
2, or the sums of its call n + 2, has consumed the sums of call n + 1 from *every* owner, and an owner sends
those after its own call n has completed, re-arming of both mailboxes included.

Its dependents may skip their own wait, as those of the producer may: this grid starts when the producer has
triggered, so everything before the producer has completed.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from oproj_lib.kernels import primitives
from oproj_lib.kernels.inputs import check_mailbox_shape
from oproj_lib.kernels.mailbox import Crew, MailboxReader, Turn
from oproj_lib.kernels.transport import Mailbox, Transport, choose_transport
from oproj_lib.layouts import mailbox as layout
from oproj_lib.layouts.fragments import CHUNK
from oproj_lib.problem import CTAS, N

POLICY = "latent"
"""The sum goes into a mailbox again. (Sums of words without -0.0 round to none either: every BF16 is a multiple
of 2**-133, the smallest one. The rule is kept where the publishing is.)"""
RESULT_RANKS = 1
"""Writers of a chunk of the result mailbox: the owner of its column."""


class SecondShot:
    """Builds the second shot for ``ranks`` ranks and ``batch`` tokens.

    transport: how the sums reach every rank, "multicast" or "unicast:<ranks>".

    Raises ValueError for ranks over which 7168 columns cannot be sharded, and for a batch outside 1..64.
    """

    def __init__(self, ranks: int, batch: int, *, transport: Transport | str | None = None) -> None:
        self.shard = layout.receive_columns(ranks)
        layout.check_batch(batch)
        self.batch = batch
        self.reader = MailboxReader(ranks)
        self.transport = choose_transport(False, transport)

    @property
    def ranks(self) -> int:
        """Ranks that share the columns."""
        return self.reader.ranks

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return layout.second_shot_threads(self.batch, self.ranks)

    # Host

    @cute.jit
    def __call__(
        self,
        receive: cute.Tensor,
        result: cute.Tensor,
        mc: Int64,
        rank: Int32,
        receive_state: Int64,
        result_state: Int64,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on ``stream``, behind the two-shot producer.

        Raises ValueError while compiling, for tensors that do not fit.
        """
        self.check(receive, result)
        self.kernel(receive, result, mc, rank, receive_state, result_state).launch(
            grid=[CTAS, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    def check(self, receive: object, result: object) -> None:
        """Raises ValueError for arrays (NumPy, torch or CuTe) that do not fit."""
        shape = check_mailbox_shape("receive view", receive, "the second shot", self.batch, self.shard)
        self.reader.check(Mailbox(*shape))
        shape = check_mailbox_shape("result mailbox", result, "the second shot", self.batch, N)
        MailboxReader(RESULT_RANKS).check(Mailbox(*shape))

    # Device

    @cute.kernel
    def kernel(
        self,
        receive: cute.Tensor,
        result: cute.Tensor,
        mc: Int64,
        rank: Int32,
        receive_state: Int64,
        result_state: Int64,
    ) -> None:
        """The split form."""
        cute.arch.griddepcontrol_launch_dependents()
        cta, _, _ = cute.arch.block_idx()
        crew = Crew(cta, primitives.thread_index(), CTAS, self.threads)
        self.forward(receive, result, mc, rank, receive_state, result_state, crew)
        cute.arch.griddepcontrol_wait()  # not before: see kernels.mailbox, "had completed"

    def forward(
        self,
        receive: cute.Tensor,
        result: cute.Tensor,
        mc: Int64,
        rank: Int32,
        receive_state: Int64,
        result_state: Int64,
        crew: Crew,
    ) -> None:
        """The device function: re-arm, poll, sum, publish, count on.

        Every thread of the crew must come here, and named barrier 3 must be free.
        """
        box, base = Mailbox(*receive.shape), receive.iterator.toint()
        result_box = Mailbox(*result.shape)
        generations = self.reader.generations
        turn = generations.consuming(receive_state, crew.cta)
        generation = generations.publishing(result_state, crew.cta)
        mc = self.transport.open(result_box, mc, Int32(0))
        self.reader.rearm(base, box, turn, crew)
        chunks = self.batch * (self.shard // CHUNK)
        for step in range(layout.passes(chunks, crew.size)):
            chunk = crew.first_chunk + step * crew.size
            self.forward_pass(base, box, turn, result_box, mc, generation, rank, chunk, chunks)
        self.reader.barrier(crew)
        generations.consumed(receive_state, turn, self.batch, crew)
        generations.published(result_state, generation, crew)

    @cute.jit
    def forward_pass(
        self,
        base: Int64,
        box: cutlass.Constexpr,
        turn: cutlass.Constexpr,
        result_box: cutlass.Constexpr,
        mc: Int64,
        generation: Int32,
        rank: Int32,
        chunk: Int32,
        chunks: cutlass.Constexpr,
    ) -> None:
        """One chunk per thread, as far as there are any."""
        if chunk < chunks:
            self.forward_chunk(base, box, turn, result_box, mc, generation, rank, chunk)

    def forward_chunk(
        self,
        base: Int64,
        box: Mailbox,
        turn: Turn,
        result_box: Mailbox,
        mc: Int64,
        generation: Int32,
        rank: Int32,
        chunk: Int32,
    ) -> None:
        """One thread: the sum of one chunk of the shard, rounded once, to every rank."""
        chunks_per_token = self.shard // CHUNK
        token, column = chunk // chunks_per_token, chunk % chunks_per_token * CHUNK
        sums = self.reader.sum_chunk(base, box, turn, token, column)
        words = primitives.pack8(sums, POLICY)
        slot = layout.slot(generation, 0, RESULT_RANKS)
        self.transport.store_chunk(result_box, mc, slot, token, rank * self.shard + column, words)


SecondShot.kernel.set_name_prefix("second_shot", remove_cutlass_symbol=True, keep_mangled_name=False)
