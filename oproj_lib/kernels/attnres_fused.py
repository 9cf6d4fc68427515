"""Projection and residual attention in one kernel: every CTA publishes its 64 columns, CTA t < M then consumes
token t.

    FusedAttnRes           an engine, then AttnRes                      one exchange
    FusedTwoShotAttnRes    an engine, the second shot, then AttnRes     two exchanges

112 CTAs, the engine's threads. All that have published share in arming the mailbox again; then the first
``attnres.config.threads`` of them, in CTAs t < M, have a token, and the others wait for the end of their CTA.
M is at most 64 and all 112 CTAs run at once (an H200 has 132 SMs, a B200 148), so a CTA that polls keeps no
other from publishing.

    when        what                                             waits for
    project     the engine: weights, wait, x, MMAs, publish      previous kernel
    consume     dependents' go, second shot if there is one,     own MMAs
                re-arming, then ``AttnRes.consume_token``

The blocks are scored after publishing, while the other ranks' sums are under way. Earlier there are no registers
for them: weights fill them until the MMAs are through. prefix and the blocks are read after this kernel's own
wait, so nothing has to be assumed about who wrote them. The wait also makes another at the end unnecessary.

Which configurations exist: AttnRes threads up to those that publish (128 for ``OprojUmma`` and ``OprojWgmma``, 448
for ``OprojProducer``, whose 512 threads have 128 registers each: 224 and 128 fit a few small exchanges only), every
batch that the engine takes up to 64 tokens, and shared memory for both: the engine's, and 30 KB where there are
blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from oproj_lib.kernels.attnres import AttnRes
from oproj_lib.kernels.attnres_configuration import THREAD_CHOICES, registers_per_thread
from oproj_lib.kernels.attnres_lane import Arrays
from oproj_lib.kernels.configuration import SHARED_LIMIT
from oproj_lib.kernels.fused_reduce import check_engine, crew_of, launch_fused, project_then
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.second_shot import RESULT_RANKS, SecondShot
from oproj_lib.kernels.transport import Mailbox
from oproj_lib.layouts.fragments import CHUNK_BYTES


class EngineAndAttnRes:
    """What the fused forms have in common: who consumes, and with which shared memory.

    Raises ValueError for an engine without generations or of the other kind (one-shot, two-shot), for AttnRes
    threads that the engine does not have, or that need more registers than its CTA leaves them, for a batch that
    it cannot take, and for shared memory that the two do not fit into.
    """

    def __init__(self, engine: OprojProducer, attnres: AttnRes, *, twoshot: bool) -> None:
        check_engine(engine, twoshot=twoshot)
        self.engine = engine
        self.attnres = attnres
        self.check_threads()
        config = attnres.config
        if self.shared_bytes > SHARED_LIMIT:
            raise ValueError(
                f"{engine.plan(config.tokens).shared_bytes} shared bytes of the engine, rounded up to a multiple "
                f"of {CHUNK_BYTES}, + {config.shared_bytes} of AttnRes = {self.shared_bytes}, a block has "
                f"{SHARED_LIMIT}: choose fewer staged blocks or ring bytes"
            )

    def check_threads(self) -> None:
        """Raises ValueError unless the engine has AttnRes' threads, and each of them its registers."""
        config, engine = self.attnres.config, self.engine
        name, registers = type(engine).__name__, registers_per_thread(engine.threads)
        choices = tuple(
            threads
            for threads in THREAD_CHOICES
            if threads <= engine.consumers and replace(config, threads=threads).register_need <= registers
        )
        if config.threads > engine.consumers:
            raise ValueError(
                f"threads = {config.threads}: only {engine.consumers} threads of {name} are free to consume; "
                f"choose from {choices}"
            )
        if config.register_need > registers:
            raise ValueError(
                f"threads = {config.threads}: with {config.chunks} chunks each of {config.blocks} blocks and "
                f"{config.ranks} ranks, AttnRes needs {config.register_need} registers per thread, and the "
                f"{engine.threads} threads of {name} have {registers}; choose from {choices}"
            )

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the engine's, then that of AttnRes at a multiple of 16 bytes."""
        engine = self.engine.plan(self.attnres.config.tokens).shared_bytes
        return -(-engine // CHUNK_BYTES) * CHUNK_BYTES + self.attnres.config.shared_bytes

    def check_tokens(self, x: Any) -> None:
        """Raises ValueError unless x has AttnRes' M."""
        if x.shape[0] != self.attnres.config.tokens:
            raise ValueError(
                f"x has M = {x.shape[0]} tokens, AttnRes is built for {self.attnres.config.tokens}"
            )

    def consume(self, arrays: Arrays, mailbox: cute.Tensor, state: Int64) -> None:
        """Those who have published re-arm, whatever their CTA; then CTA t < M consumes token t."""
        crew, reader = crew_of(self.engine), self.attnres.reader
        turn = reader.generations.consuming(state, crew.cta)
        reader.rearm(mailbox.iterator.toint(), Mailbox(*mailbox.shape), turn, crew)
        self.consume_token(arrays, mailbox, turn)
        reader.barrier(crew)
        reader.generations.consumed(state, turn, self.attnres.config.tokens, crew)

    @cute.jit
    def consume_token(self, arrays: cutlass.Constexpr, mailbox: cute.Tensor, turn: cutlass.Constexpr) -> None:
        """The threads that have a token's chunks; the others go on."""
        token, _, _ = cute.arch.block_idx()
        config = self.attnres.config
        if token < config.tokens and self.engine.publisher() < config.threads:
            self.attnres.consume_token(arrays, self.attnres.allocate(), mailbox, turn, self.engine.publisher)


class FusedAttnRes(EngineAndAttnRes):
    """Builds an engine (``OprojProducer``, ``OprojUmma``, ...) and ``AttnRes`` as one kernel.

    Raises ValueError as ``EngineAndAttnRes``.
    """

    def __init__(self, engine: OprojProducer, attnres: AttnRes) -> None:
        super().__init__(engine, attnres, twoshot=False)

    # Host

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        state: Int64,
        prefix: cute.Tensor,
        blocks: cute.Tensor,
        norm_weight: cute.Tensor,
        qk_weight: cute.Tensor,
        out_weight: cute.Tensor,
        out: cute.Tensor,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on ``stream``. Raises ValueError while compiling, for tensors that do not fit."""
        self.check(x, weight, mailbox, Arrays(prefix, blocks, norm_weight, qk_weight, out_weight, out))
        launch_fused(
            self.kernel(
                x, weight, mailbox, mc, slot, state, prefix, blocks, norm_weight, qk_weight, out_weight, out
            ),
            self.engine,
            stream,
        )

    def check(self, x: Any, weight: Any, mailbox: Any, arrays: Arrays) -> None:
        """Raises ValueError for arrays (NumPy, torch or CuTe) that do not fit."""
        self.engine.check(x, weight, mailbox)
        self.attnres.check(mailbox, arrays)
        self.check_tokens(x)

    # Device

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        mailbox: cute.Tensor,
        mc: Int64,
        slot: Int32,
        state: Int64,
        prefix: cute.Tensor,
        blocks: cute.Tensor,
        norm_weight: cute.Tensor,
        qk_weight: cute.Tensor,
        out_weight: cute.Tensor,
        out: cute.Tensor,
    ) -> None:
        """Project and publish, then consume."""
        arrays = Arrays(prefix, blocks, norm_weight, qk_weight, out_weight, out)

        def consume() -> None:
            self.consume(arrays, mailbox, state)

        project_then(consume, self.engine, x, weight, mailbox, mc, slot, state)


class FusedTwoShotAttnRes(EngineAndAttnRes):
    """Builds a two-shot engine, the second shot and ``AttnRes`` of one rank as one kernel.

    mailbox, mc, slot and state are those of the first shot (the receive view, the table of the owners' views,
    the rank); result, result_mc and result_state those of the second. Raises ValueError as ``EngineAndAttnRes``,
    for a second shot of another batch, and for an AttnRes that sums more than the one slot of the result.
    """

    def __init__(self, engine: OprojProducer, second: SecondShot, attnres: AttnRes) -> None:
        super().__init__(engine, attnres, twoshot=True)
        self.second = second
        if attnres.config.ranks != RESULT_RANKS:
            raise ValueError(
                f"ranks = {attnres.config.ranks}: the second shot has summed the ranks; choose {RESULT_RANKS}"
            )
        if second.batch != attnres.config.tokens:
            raise ValueError(
                f"the second shot is built for {second.batch} tokens, AttnRes for {attnres.config.tokens}"
            )

    # Host

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
        prefix: cute.Tensor,
        blocks: cute.Tensor,
        norm_weight: cute.Tensor,
        qk_weight: cute.Tensor,
        out_weight: cute.Tensor,
        out: cute.Tensor,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on ``stream``. Raises ValueError while compiling, for tensors that do not fit."""
        self.check(
            x, weight, mailbox, result, Arrays(prefix, blocks, norm_weight, qk_weight, out_weight, out)
        )
        launch_fused(
            self.kernel(
                x, weight, mailbox, mc, slot, state, result, result_mc, result_state,
                prefix, blocks, norm_weight, qk_weight, out_weight, out,
            ),
            self.engine,
            stream,
        )  # fmt: skip

    def check(self, x: Any, weight: Any, mailbox: Any, result: Any, arrays: Arrays) -> None:
        """Raises ValueError for arrays (NumPy, torch or CuTe) that do not fit."""
        self.engine.check(x, weight, mailbox)
        self.second.check(mailbox, result)
        self.attnres.check(result, arrays)
        self.check_tokens(x)

    # Device

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
        prefix: cute.Tensor,
        blocks: cute.Tensor,
        norm_weight: cute.Tensor,
        qk_weight: cute.Tensor,
        out_weight: cute.Tensor,
        out: cute.Tensor,
    ) -> None:
        """Project and send to the owners, sum and send to everyone, then consume."""
        arrays = Arrays(prefix, blocks, norm_weight, qk_weight, out_weight, out)

        def consume() -> None:
            crew = crew_of(self.engine)
            self.second.forward(mailbox, result, result_mc, slot, state, result_state, crew)
            self.consume(arrays, result, result_state)

        project_then(consume, self.engine, x, weight, mailbox, mc, slot, state)


for _fused, _name in ((FusedAttnRes, "fused_attnres"), (FusedTwoShotAttnRes, "fused_two_shot_attnres")):
    _fused.kernel.set_name_prefix(_name, remove_cutlass_symbol=True, keep_mangled_name=False)
