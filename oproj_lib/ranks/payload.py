"""A producer without a projection: publishes given partial sums, through the same code as the engines.

payload [M, 7168] BF16 stands for what an engine has summed. One CTA per 64 columns, one thread per 16-byte chunk.
Waiting, triggering, generation, slot, rounding policy and transport are the engines' (``kernels.publishing``), so
hundreds of calls of a mailbox protocol cost seconds on the virtual GPU.

    when      what                                               waits for
    start     griddepcontrol.wait, then its dependents' go       the previous kernel
    publish   -0.0 cleared, sent                                 -
    end       generation moves on                                the CTA's other threads
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from oproj_lib.kernels import mailbox_primitives, primitives
from oproj_lib.kernels.inputs import check_mailbox_shape
from oproj_lib.kernels.publishing import Publishing
from oproj_lib.kernels.transport import Mailbox, Transport
from oproj_lib.layouts import mailbox as layout
from oproj_lib.layouts.fragments import BF16_BYTES
from oproj_lib.problem import CTAS, ROWS_PER_CTA, N
from oproj_lib.program import (
    DEFAULT_CACHE,
    STATE,
    Build,
    Parameter,
    Program,
    build_program,
    check_mailbox,
    kernel_identity,
    tensor,
)

ENGINE = "payload"


class PayloadPublisher(Publishing):
    """Publishes a payload of ``batch`` tokens. transport and twoshot as for ``OprojProducer``.

    Raises ValueError for a batch outside 1..64, and for a transport that contradicts twoshot.
    """

    def __init__(
        self,
        batch: int,
        *,
        twoshot: bool = False,
        transport: Transport | str | None = None,
        policy: str = "latent",
    ) -> None:
        layout.check_batch(batch)
        self.batch = batch
        self.threads = layout.consumer_threads(batch)  # type: ignore[misc]  # the engines have one number each
        self.set_publishing(twoshot, transport, policy, generations=True)

    @cute.jit
    def __call__(
        self,
        payload: cute.Tensor,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        state: Int64,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on ``stream``. Raises ValueError while compiling, for tensors that do not fit."""
        check_mailbox_shape("mailbox", mailbox, "payload", self.batch, self.published_columns(mailbox))
        self.kernel(payload, mailbox, mc, slot, state).launch(
            grid=[CTAS, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self, payload: cute.Tensor, mailbox: cute.Tensor, mc: Int64, slot: Int32, state: Int64
    ) -> None:
        """Wait, trigger, publish, count on."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        box = Mailbox(*mailbox.shape)
        mc, slot, generation = self.route(box, mc, slot, state)
        chunks = layout.CHUNKS_PER_CTA * self.batch
        for step in range(layout.passes(chunks, self.threads)):
            self.publish_pass(payload, box, mc, slot, step * self.threads, chunks)
        cute.arch.barrier()  # all threads have read the generation
        self.count_on(state, generation)

    @cute.jit
    def publish_pass(
        self,
        payload: cute.Tensor,
        box: cutlass.Constexpr,
        mc: Int64,
        slot: Int32,
        first: cutlass.Constexpr,
        chunks: cutlass.Constexpr,
    ) -> None:
        """Chunks ``first`` .. of the CTA, one per thread, as far as there are any."""
        index = primitives.thread_index() + first
        if index < chunks:
            self.publish_chunk(payload, box, mc, slot, index)

    def publish_chunk(self, payload: cute.Tensor, box: Mailbox, mc: Int64, slot: Int32, index: Int32) -> None:
        """One thread: one chunk of the payload, rounded again (which changes nothing but -0.0), to its readers."""
        token, column = layout.consumed_chunk(index)
        cta, _, _ = cute.arch.block_idx()
        column = cta * ROWS_PER_CTA + column
        address = payload.iterator.toint() + Int64(token * N + column) * BF16_BYTES
        words = mailbox_primitives.widen(primitives.load_global_chunk(address, 0))
        self.transport.store_chunk(box, mc, slot, token, column, self.round_chunk(words))


PayloadPublisher.kernel.set_name_prefix("payload", remove_cutlass_symbol=True, keep_mangled_name=False)


def build_payload(
    publisher: PayloadPublisher,
    *,
    target: str,
    ranks: int,
    mailbox_tokens: int,
    cache: Path | str | None = DEFAULT_CACHE,
) -> Program:
    """Compile ``publisher`` for a mailbox, or receive view, of ``ranks`` ranks, or find it cached.

    Raises ValueError for an unknown target, or a mailbox that cannot hold the batch.
    """
    columns = layout.receive_columns(ranks) if publisher.twoshot else N
    mailbox = (layout.slots_of(ranks), mailbox_tokens, columns)
    check_mailbox(publisher.batch, *mailbox)
    config: dict[str, Any] = {
        "engine": ENGINE,
        "batch": publisher.batch,
        "transport": publisher.transport.name,
        "policy": publisher.policy,
        "records": kernel_identity(type(publisher.records)),
        "columns": columns,
    }
    return build_program(
        Build(
            name=f"{ENGINE}_m{publisher.batch}_{target}",
            kernel=publisher,
            target=target,
            config=config,
            parameters=(
                tensor("payload", publisher.batch, N),
                tensor("mailbox", *mailbox),
                Parameter("mc", "address", "int64", ()),
                Parameter("slot", "scalar", "int32", ()),
                STATE,
            ),
            grid=CTAS,
            threads=publisher.threads,
        ),
        cache=cache,
    )
