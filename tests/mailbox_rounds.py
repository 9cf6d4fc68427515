"""What the mailbox tests share: partial sums published by the host, consumers run one after the other."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from oproj_lib import vgpu
from oproj_lib.exchange import Exchange
from oproj_lib.exchange_programs import build_fused_reduce, build_mailbox_reduce, build_second_shot
from oproj_lib.kernels.configuration import Configuration
from oproj_lib.kernels.fused_reduce import FusedMailboxReduce
from oproj_lib.kernels.mailbox_reduce import MailboxReduce
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.second_shot import SecondShot
from oproj_lib.kernels.umma_configuration import UmmaConfiguration
from oproj_lib.kernels.wgmma_configuration import WgmmaConfiguration
from oproj_lib.program import build_producer, build_umma, build_wgmma

BF16 = ml_dtypes.bfloat16
N = 7168
TOKENS = 64
BUILDERS: dict[type, Any] = {
    Configuration: build_producer,
    UmmaConfiguration: build_umma,
    WgmmaConfiguration: build_wgmma,
}


def partials(ranks: int, tokens: int, seed: int) -> np.ndarray:
    """BF16 [ranks, tokens, 7168] without -0.0, for which the order of an FP32 sum shows.

    Exponents are spread over 24 powers of two, and the last rank undoes the first: what the small values lost
    when they met the large ones is then visible. (Sums of a few BF16 of one magnitude are exact in FP32.)
    """
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((ranks, tokens, N), np.float32)
    values *= np.exp2(rng.integers(-12, 13, values.shape)).astype(np.float32)
    if ranks > 2:
        values[-1] = -values[0]
    result = values.astype(BF16)
    result[result == 0] = 0
    return result


def publish(exchange: Exchange, writer: int, generation: int, values: np.ndarray) -> None:
    """What the producer of rank ``writer`` does with its partial sums [tokens, 7168]."""
    tokens, ranks = len(values), exchange.ranks
    if not exchange.twoshot:
        for rank in range(ranks):
            exchange.first.generation(rank, generation)[writer, :tokens] = values
        return
    for owner, shard in enumerate(np.split(values, ranks, axis=1)):
        exchange.first.generation(owner, generation)[writer, :tokens] = shard


def consume(
    exchange: Exchange,
    rank: int,
    tokens: int,
    kind: type[MailboxReduce] = MailboxReduce,
    arguments: Any = None,
    **options: Any,
) -> tuple[np.ndarray, tuple[vgpu.Finding, ...]]:
    """Run the consumer of one rank now: (out [tokens, 7168], findings)."""
    writers = exchange.result.writers
    program = build_mailbox_reduce(
        kind(writers), target="sm_90a", batch=tokens, mailbox_tokens=exchange.tokens
    )
    out = exchange.gpu.empty((tokens, N), BF16, f"out of rank {rank}", rank)
    exchange.enqueue(program, rank, (arguments or Exchange.reduce_arguments)(exchange, rank, out))
    (report,) = exchange.gpu.synchronize(**options)
    return out.array, report.findings


def forward(exchange: Exchange, tokens: int, transport: str) -> None:
    """Run the second shot of every rank."""
    second = SecondShot(exchange.ranks, tokens, transport=transport)
    program = build_second_shot(second, target="sm_90a", mailbox_tokens=exchange.tokens)
    for rank in range(exchange.ranks):
        exchange.enqueue(program, rank, exchange.second_shot_arguments(rank), checks=True)
    for report in exchange.gpu.synchronize():
        report.raise_for_findings()


def same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    return bool((first.view(np.uint16) == second.view(np.uint16)).all())


class Rounds:
    """Calls of ``ranks`` ranks, one CTA of each grid; fused: one kernel a call. Ten calls are in flight at a time.

    x and weight are small integers, so every sum is exact, whatever rounds where.
    """

    K = 128
    COLUMNS = 64
    IN_FLIGHT = 10

    def __init__(
        self,
        ranks: int,
        batches: tuple[int, ...],
        *,
        engine: OprojProducer | None = None,
        reduce: type[MailboxReduce] = MailboxReduce,
        target: str = "sm_90a",
        fused: bool = False,
    ) -> None:
        self.exchange = Exchange(ranks, max(batches))
        self.batches, self.target, self.fused = batches, target, fused
        self.engine = engine or OprojProducer(self.K, staged_blocks=1, generations=True)
        self.reduce = reduce(ranks)
        self.rng = np.random.default_rng(len(batches))
        self.weights = self.rng.integers(-1, 2, (ranks, N, self.K)).astype(BF16)
        self.buffers = [
            self.exchange.gpu.upload(weight, "weight", rank) for rank, weight in enumerate(self.weights)
        ]

    def enqueue(self, tokens: int) -> tuple[list[np.ndarray], np.ndarray]:
        """One call of every rank: (out of each rank, the sums they must hold)."""
        exchange, outs = self.exchange, []
        x = self.rng.integers(-2, 3, (exchange.ranks, tokens, self.K)).astype(BF16)
        shape: dict[str, Any] = {
            "target": self.target, "batch": tokens, "mailbox_tokens": exchange.tokens
        }  # fmt: skip
        for rank in range(exchange.ranks):
            out = exchange.gpu.empty((tokens, N), BF16, f"out of rank {rank}", rank)
            x_buffer = exchange.gpu.upload(x[rank], "x", rank)
            if self.fused:
                program = build_fused_reduce(FusedMailboxReduce(self.engine, exchange.ranks), **shape)
                arguments = exchange.fused_arguments(rank, x_buffer, self.buffers[rank], out)
                exchange.enqueue(program, rank, arguments, ctas=1)
            else:
                build = BUILDERS[type(self.engine.config)]
                program = build(self.engine, mailbox_slots=3 * exchange.ranks, **shape)
                arguments = exchange.producer_arguments(rank, x_buffer, self.buffers[rank])
                exchange.enqueue(program, rank, arguments, ctas=1)
                program = build_mailbox_reduce(self.reduce, **shape)
                exchange.enqueue(program, rank, exchange.reduce_arguments(rank, out), ctas=1)
            outs.append(out.array)
        columns = self.weights[:, : self.COLUMNS]
        sums = np.einsum("rtk,rnk->tn", x.astype(np.int64), columns.astype(np.int64), optimize=True)
        return outs, sums

    def run(self, schedule: int | str, skew: dict[int, float] | None = None) -> bool:
        """Whether no finding came up, every sum is right, and all memory is armed but the last call's."""
        for first in range(0, len(self.batches), self.IN_FLIGHT):
            batches = self.batches[first : first + self.IN_FLIGHT]
            calls = [self.enqueue(tokens) for tokens in batches]
            seed = schedule if isinstance(schedule, str) else schedule + first
            if any(report.findings for report in self.exchange.gpu.synchronize(seed, skew=skew)):
                return False
            for outs, sums in calls:
                if any((out[:, : self.COLUMNS].astype(np.int64) != sums).any() for out in outs):
                    return False
            last = (first + len(batches) - 1) % 3
            if any(self.exchange.first.unarmed(rank) != (last,) for rank in range(self.exchange.ranks)):
                return False
        return True
