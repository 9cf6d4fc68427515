"""Projection and reduction in one kernel: each CTA publishes its 64 columns, then consumes 64 columns.

    FusedMailboxReduce    an engine, then MailboxReduce                      one exchange
    FusedTwoShotReduce    an engine, the second shot, then MailboxReduce     two exchanges

The threads that publish go on to consume (``engine.consumers`` of them), whatever the engine. The consumed
columns are those that the CTA published: of the ranks' 112 CTAs number c, all write what this one waits for,
and nothing else. All 112 CTAs run at once on a GPU of 132 or 148 SMs, so a CTA that polls keeps no other from
publishing.

The kernel waits for its predecessor like any other, hence needs no wait at the end. It releases its dependents
when it has published: their preloads then use the memory bandwidth that polling leaves idle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64

from oproj_lib.kernels.inputs import check_mailbox_and_out
from oproj_lib.kernels.mailbox import Crew
from oproj_lib.kernels.mailbox_reduce import MailboxReduce
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.second_shot import RESULT_RANKS, SecondShot
from oproj_lib.kernels.transport import Mailbox
from oproj_lib.problem import CTAS


def check_engine(engine: OprojProducer, twoshot: bool) -> None:
    """Raises ValueError for an engine that a fused form cannot use."""
    if not engine.generations:
        raise ValueError(
            "generations = False: a fused form consumes by generation; build the engine with True"
        )
    if engine.twoshot != twoshot:
        other = "FusedMailboxReduce" if twoshot else "FusedTwoShotReduce"
        raise ValueError(f"twoshot = {engine.twoshot}: this is an engine for {other}")
    if engine.policy != "latent":
        raise ValueError(f"policy = {engine.policy!r}: a polled mailbox needs 'latent'")


def launch_fused(kernel: Any, engine: OprojProducer, stream: cuda.CUstream) -> None:
    """Launch a fused kernel, given its arguments, like the engine's own: CTAs, threads, PDL."""
    kernel.launch(
        grid=[CTAS, 1, 1],
        block=[engine.threads, 1, 1],
        stream=stream,
        use_pdl=True,
        min_blocks_per_mp=1,
        hint_smem_base_uniform=True,
    )


def project_then(
    consume: Callable[[], None],
    engine: OprojProducer,
    x: cute.Tensor,
    weight: cute.Tensor,
    mailbox: cute.Tensor,
    mc: Int64,
    slot: Int32,
    state: Int64,
) -> None:
    """Project and publish; those who have published release the dependents, and consume."""

    def go_on() -> None:
        cute.arch.griddepcontrol_launch_dependents()
        consume()

    engine.project(x, weight, mailbox, mc, slot, state, trigger_after_wait=False, then=go_on)


class FusedMailboxReduce:
    """Builds an engine (``OprojProducer``, ``OprojUmma``, ...) and the one-shot reduction as one kernel.

    Raises ValueError for a two-shot engine, or one without generations.
    """

    def __init__(self, engine: OprojProducer, ranks: int) -> None:
        check_engine(engine, twoshot=False)
        self.engine = engine
        self.reduce = MailboxReduce(ranks)

    @property
    def ranks(self) -> int:
        """Ranks that publish into the mailbox."""
        return self.reduce.ranks

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        state: Int64,
        out: cute.Tensor,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on ``stream``. Raises ValueError while compiling, for tensors that do not fit."""
        self.check(x, weight, mailbox, out)
        launch_fused(self.kernel(x, weight, mailbox, mc, slot, state, out), self.engine, stream)

    def check(self, x: object, weight: object, mailbox: object, out: object) -> None:
        """Raises ValueError for arrays (NumPy, torch or CuTe) that do not fit."""
        self.engine.check(x, weight, mailbox)
        check_same_batch(x, out)
        self.reduce.check(mailbox, out)

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        state: Int64,
        out: cute.Tensor,
    ) -> None:
        """Project and publish, then consume."""

        def consume() -> None:
            self.reduce.consume(mailbox, out, state, crew_of(self.engine))

        project_then(consume, self.engine, x, weight, mailbox, mc, slot, state)


class FusedTwoShotReduce:
    """Builds an engine, the second shot and the final reduction as one kernel.

    mailbox, mc, slot and state are those of the first shot (the receive view, the table of the owners' views,
    the rank); result, result_mc and result_state those of the second. Raises ValueError for a one-shot engine,
    or one without generations.
    """

    def __init__(self, engine: OprojProducer, second: SecondShot) -> None:
        check_engine(engine, twoshot=True)
        self.engine = engine
        self.second = second
        self.reduce = MailboxReduce(RESULT_RANKS)

    @property
    def ranks(self) -> int:
        """Ranks that share the columns."""
        return self.second.ranks

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        state: Int64,
        result: cute.Tensor,
        result_mc: Int64,
        result_state: Int64,
        out: cute.Tensor,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on ``stream``. Raises ValueError while compiling, for tensors that do not fit."""
        self.check(x, weight, mailbox, result, out)
        launch_fused(
            self.kernel(x, weight, mailbox, mc, slot, state, result, result_mc, result_state, out),
            self.engine,
            stream,
        )

    def check(self, x: object, weight: object, mailbox: object, result: object, out: object) -> None:
        """Raises ValueError for arrays (NumPy, torch or CuTe) that do not fit."""
        self.engine.check(x, weight, mailbox)
        check_same_batch(x, out)
        self.second.check(mailbox, result)
        self.reduce.reader.check(Mailbox(*check_mailbox_and_out(result, out)))

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        state: Int64,
        result: cute.Tensor,
        result_mc: Int64,
        result_state: Int64,
        out: cute.Tensor,
    ) -> None:
        """Project and send to the owners, sum and send to everyone, then consume."""

        def consume() -> None:
            crew = crew_of(self.engine)
            self.second.forward(mailbox, result, result_mc, slot, state, result_state, crew)
            self.reduce.consume(result, out, result_state, crew)

        project_then(consume, self.engine, x, weight, mailbox, mc, slot, state)


def crew_of(engine: OprojProducer) -> Crew:
    """The threads of an engine that have published."""
    cta, _, _ = cute.arch.block_idx()
    return Crew(cta, engine.publisher(), CTAS, engine.consumers)


def check_same_batch(x: object, out: object) -> None:
    """Raises ValueError unless x and out have the same number of tokens."""
    batch, tokens = x.shape[0], out.shape[0]  # type: ignore[attr-defined]
    if batch != tokens:
        raise ValueError(f"x has M = {batch} tokens and out {tokens}: they must be equal")


for _fused, _name in ((FusedMailboxReduce, "fused_mailbox_reduce"), (FusedTwoShotReduce, "fused_two_shot")):
    _fused.kernel.set_name_prefix(_name, remove_cutlass_symbol=True, keep_mangled_name=False)
