"""Mailboxes of R virtual ranks, and who gets which of them as an argument.

    exchange = Exchange(ranks=8, tokens=64)                     one-shot: a mailbox per rank
    exchange = Exchange(ranks=8, tokens=64, twoshot=True)       two-shot: a receive view and a result mailbox

Arrays are armed and every state is zero, as before the first call. ``enqueue`` puts a program behind the others
of its rank's stream on the virtual GPU, as a programmatic dependent.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from oproj_lib import vgpu
from oproj_lib.layouts import mailbox as layout
from oproj_lib.layouts.mailbox import GENERATIONS, SENTINEL, STATE_SHAPE
from oproj_lib.problem import N
from oproj_lib.program import Program
from oproj_lib.run import ENGINES, decoded

TRANSPORTS = ("multicast", "unicast")


class Channel:
    """One mailbox per rank, with its state, and what its writers get as ``mc``.

    Arrays are BF16 [3 * writers, tokens, columns]; writers: ranks that publish into a generation.
    """

    def __init__(
        self, gpu: vgpu.VirtualGPU, name: str, *, ranks: int, writers: int, tokens: int, columns: int, mc: str
    ) -> None:
        shape = (layout.slots_of(writers), tokens, columns)
        self.gpu, self.name, self.writers = gpu, name, writers
        self.boxes = [
            gpu.upload(armed(shape), f"{name} of rank {rank}", rank, axes=("slot", "token", "column"))
            for rank in range(ranks)
        ]
        for box in self.boxes:
            gpu.watch_sentinel(box, SENTINEL)
            box.writer_of = self.sender
        self.states = [
            gpu.upload(np.zeros(STATE_SHAPE, np.int32), f"{name} state of rank {rank}", rank)
            for rank in range(ranks)
        ]
        self.mc: list[vgpu.Buffer | vgpu.MulticastWindow]
        if mc == "multicast":
            self.mc = [gpu.multicast(self.boxes)] * ranks
        else:
            addresses = np.array([box.address for box in self.boxes], np.int64)
            self.mc = [
                gpu.upload(addresses.copy(), f"{name} table of rank {rank}", rank) for rank in range(ranks)
            ]

    def sender(self, index: tuple[int, ...]) -> str:
        """Which rank writes an element, for findings about words that never arrive."""
        slot, _, column = index
        if self.writers == 1:  # the second shot's result: the owner of the column sends it
            return f"rank {layout.owner(column, N // len(self.boxes))}"
        return f"rank {slot % self.writers}"

    def generation(self, rank: int, generation: int) -> np.ndarray:
        """BF16 [writers, tokens, columns]: a generation of a rank's copy."""
        return np.asarray(self.boxes[rank].array[generation * self.writers :][: self.writers])

    def armed_words(self, rank: int, generation: int) -> np.ndarray:
        """bool [writers, tokens, columns / 2]: which words are armed."""
        return np.asarray(self.generation(rank, generation).view(np.uint32) == SENTINEL)

    def unarmed(self, rank: int) -> tuple[int, ...]:
        """Generations in which any word of a rank's copy is not armed."""
        return tuple(g for g in range(GENERATIONS) if not self.armed_words(rank, g).all())


class Exchange:
    """The mailboxes of one exchange on ``ranks`` virtual ranks, each for up to ``tokens`` tokens.

    transport: "multicast" or "unicast", how a chunk reaches every rank. Raises ValueError for another one, and
    for ranks over which two-shot cannot shard the columns.
    """

    def __init__(
        self, ranks: int, tokens: int, *, twoshot: bool = False, transport: str = "multicast", **gpu: Any
    ) -> None:
        if transport not in TRANSPORTS:
            raise ValueError(f"transport = {transport!r}: choose from {TRANSPORTS}")
        self.ranks, self.tokens, self.twoshot = ranks, tokens, twoshot
        columns = layout.receive_columns(ranks) if twoshot else N
        self.gpu = vgpu.VirtualGPU(ranks, **gpu)
        self.first = Channel(
            self.gpu,
            "receive view" if twoshot else "mailbox",
            ranks=ranks,
            writers=ranks,
            tokens=tokens,
            columns=columns,
            mc="table" if twoshot else transport,
        )
        self.result = self.first
        if twoshot:
            self.result = Channel(
                self.gpu, "result mailbox", ranks=ranks, writers=1, tokens=tokens, columns=N, mc=transport
            )

    def producer_arguments(self, rank: int, x: Any, weight: Any) -> list[Any]:
        """Arguments of an engine with generations."""
        first = self.first
        return [x, weight, first.boxes[rank], first.mc[rank], rank, first.states[rank]]

    def second_shot_arguments(self, rank: int) -> list[Any]:
        """Arguments of ``SecondShot``."""
        first, result = self.first, self.result
        return [
            first.boxes[rank],
            result.boxes[rank],
            result.mc[rank],
            rank,
            first.states[rank],
            result.states[rank],
        ]

    def reduce_arguments(self, rank: int, out: Any) -> list[Any]:
        """Arguments of ``MailboxReduce``: of all ranks, or of one rank on the result mailbox."""
        return [self.result.boxes[rank], out, self.result.states[rank]]

    def fused_arguments(self, rank: int, x: Any, weight: Any, out: Any) -> list[Any]:
        """Arguments of ``FusedMailboxReduce`` or ``FusedTwoShotReduce``."""
        arguments = self.producer_arguments(rank, x, weight)
        if self.twoshot:
            result = self.result
            arguments += [result.boxes[rank], result.mc[rank], result.states[rank]]
        return [*arguments, out]

    def enqueue(
        self,
        program: Program,
        rank: int,
        arguments: list[Any],
        *,
        ctas: int | None = None,
        **options: Any,
    ) -> vgpu.GridHandle:
        """Put a program behind the others of its rank's stream; options as for ``VirtualGPU.enqueue``.

        ctas: run only the first ones. In the one-shot forms a CTA publishes, consumes and arms 64 columns of
        its own, so a few CTAs are a small exchange in itself, as long as all kernels run the same ones.
        """
        if ctas is not None and self.twoshot:
            raise ValueError(f"ctas = {ctas}: in the two-shot form the CTAs depend on one another; run all")
        return self.gpu.enqueue(
            decoded(program),
            program.entry,
            grid=program.grid if ctas is None else ctas,
            block=program.block,
            args=arguments,
            dynamic_shared_bytes=program.dynamic_shared_bytes,
            rank=rank,
            pdl=program.pdl,
            rearms=str(program.config["engine"]) not in ENGINES,  # an engine only publishes
            name=program.name,
            **options,
        )


def armed(shape: tuple[int, int, int]) -> np.ndarray:
    """A BF16 array of sentinel words."""
    slots, tokens, columns = shape
    return np.full((slots, tokens, columns // 2), SENTINEL, np.uint32).view(ml_dtypes.bfloat16)


def sum_in_rank_order(partials: np.ndarray) -> np.ndarray:
    """bf16(sum over axis 0, one FP32 addition after the other), what ``MailboxReduce`` computes."""
    total = partials[0].astype(np.float32)
    with np.errstate(all="ignore"):
        for partial in partials[1:]:
            total = total + partial.astype(np.float32)
    return total.astype(ml_dtypes.bfloat16)
