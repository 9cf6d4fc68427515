"""Two-shot: chunks at their owners, sums at everybody, the same bits as one-shot."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from mailbox_rounds import BF16, TOKENS, N, consume, forward, partials, publish, same_bits
from test_mailbox import SENTINEL, rank_order

from oproj_lib.exchange import Exchange
from oproj_lib.exchange_programs import build_fused_reduce, build_second_shot
from oproj_lib.kernels.fused_reduce import FusedTwoShotReduce
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.second_shot import SecondShot
from oproj_lib.kernels.umma import OprojUmma
from oproj_lib.program import build_producer, build_umma

K = 128  # small: what is tested is where the sums go


@pytest.mark.parametrize(("ranks", "transport"), [(8, "multicast"), (16, "unicast:16")])
def test_sums_reach_every_rank_and_memory_is_armed_again(ranks: int, transport: str) -> None:
    """Two calls, the second with fewer tokens: rank-order sums bit for bit, and the same on every rank."""
    exchange = Exchange(ranks, 8, twoshot=True, transport=transport.partition(":")[0])
    for call, tokens in enumerate((5, 2)):
        values = partials(ranks, tokens, seed=40 + call)
        for writer in range(ranks):
            publish(exchange, writer, call, values[writer])
        forward(exchange, tokens, transport)
        for rank in (0, ranks - 1):
            out, findings = consume(exchange, rank, tokens)
            assert not findings
            assert same_bits(out, rank_order(values))
        for rank in range(ranks):
            assert exchange.first.unarmed(rank) == (call,)
            sums = exchange.result.generation(rank, call)[0]
            assert same_bits(sums[:tokens], rank_order(values))
            assert (sums[tokens:].view(np.uint32) == SENTINEL).all()
    assert exchange.result.unarmed(0) == exchange.result.unarmed(ranks - 1) == (1,)


@pytest.mark.parametrize(
    ("engine", "ranks", "target"), [(OprojProducer, 8, "sm_90a"), (OprojUmma, 56, "sm_100a")]
)
def test_a_chunk_goes_to_its_owner_only(engine: Any, ranks: int, target: str) -> None:
    """One rank's first shot, generation 2 by its state: every chunk in its owner's slot, nothing elsewhere."""
    batch, rank = 3, 5
    options: dict[str, Any] = {"staged_blocks": 1} if engine is OprojProducer else {}
    build: Any = build_producer if engine is OprojProducer else build_umma
    rng = np.random.default_rng(3)
    x: np.ndarray = rng.integers(-2, 3, (batch, K)).astype(BF16)  # small integers: every sum is exact
    weight = rng.integers(-1, 2, (N, K)).astype(BF16)
    expected = (x.astype(np.int64) @ weight.astype(np.int64).T).astype(BF16)
    exchange = Exchange(ranks, 4, twoshot=True)
    exchange.first.states[rank].array[0] = 2
    two = engine(K, twoshot=True, generations=True, **options)
    program = build(two, target=target, batch=batch, mailbox_slots=3 * ranks, mailbox_tokens=4, ranks=ranks)
    buffers = [exchange.gpu.upload(array, name, rank) for array, name in ((x, "x"), (weight, "weight"))]
    exchange.enqueue(program, rank, exchange.producer_arguments(rank, *buffers))
    (report,) = exchange.gpu.synchronize()
    report.raise_for_findings()
    shard = N // ranks
    for owner in range(ranks):
        box = exchange.first.boxes[owner].array.copy()
        mine = box[2 * ranks + rank, :batch]
        np.testing.assert_array_equal(mine, expected[:, owner * shard : (owner + 1) * shard])
        mine.view(np.uint32)[:] = SENTINEL
        assert (box.view(np.uint32) == SENTINEL).all()
    assert (exchange.first.states[rank].array[0] == 0).all()


@pytest.mark.parametrize("schedule", ["program", 5])
def test_fused_two_shot_on_two_ranks(schedule: str | int) -> None:
    """Project, own, publish, consume in one kernel per rank, two calls in flight; sums of small integers."""
    ranks, batches = 2, (2, 1)
    exchange = Exchange(ranks, TOKENS, twoshot=True)
    rng = np.random.default_rng(4)
    weight = rng.integers(-1, 2, (ranks, N, K)).astype(BF16)
    buffers = [exchange.gpu.upload(weight[rank], "weight", rank) for rank in range(ranks)]
    outs, expected = [], []
    for batch in batches:
        x = rng.integers(-2, 3, (ranks, batch, K)).astype(BF16)
        engine = OprojProducer(K, staged_blocks=1, twoshot=True, generations=True)
        program = build_fused_reduce(
            FusedTwoShotReduce(engine, SecondShot(ranks, batch)),
            target="sm_90a", batch=batch, mailbox_tokens=TOKENS,
        )  # fmt: skip
        for rank in range(ranks):
            out = exchange.gpu.empty((batch, N), BF16, "out", rank)
            x_buffer = exchange.gpu.upload(x[rank], "x", rank)
            exchange.enqueue(program, rank, exchange.fused_arguments(rank, x_buffer, buffers[rank], out))
            outs.append(out.array)
            expected.append(np.einsum("rtk,rnk->tn", *(a.astype(np.int64) for a in (x, weight))).astype(BF16))
    for report in exchange.gpu.synchronize(schedule):
        report.raise_for_findings()
    for got, sums in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(got, sums)
    for rank in range(ranks):
        assert exchange.first.unarmed(rank) == exchange.result.unarmed(rank) == (1,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 3}, "ranks = 3 does not divide the 7168 columns"),
        ({"ranks": 32}, "ranks = 32 gives shards of 7168 / 32 = 224 columns"),
        ({"mailbox_tokens": 7}, "mailbox_tokens = 7 < batch = 8"),
        ({"batch": 64, "mailbox_tokens": 64}, r"two-shot: 124 registers per thread \+ 12 .* batches \(1, 2,"),
    ],
)
def test_first_shots_that_cannot_work_are_refused(change: dict[str, int], message: str) -> None:
    engine = OprojProducer(1536, staged_blocks=2, group_tiles=2, twoshot=True)
    arguments: dict[str, Any] = {"batch": 8, "mailbox_slots": 8, "mailbox_tokens": 8, "ranks": 8, **change}
    with pytest.raises(ValueError, match=message):
        build_producer(engine, target="sm_90a", **arguments)


def test_second_shots_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="mailbox_tokens = 7 < batch = 8"):
        build_second_shot(SecondShot(8, 8), target="sm_90a", mailbox_tokens=7)
    second, view = SecondShot(8, 8), np.zeros((24, 8, 896), BF16)
    result = np.zeros((3, 8, N), BF16)
    second.check(view, result)
    for arrays, message in (
        ((view[:23], result), r"mailbox of 23 slots: 3 generations \* 8 ranks = 24"),
        ((view, result[:1]), r"mailbox of 1 slots: 3 generations \* 1 ranks = 3"),
        ((view, view), "result mailbox has 896 columns, it must have N = 7168"),
        ((result, result), "receive view has 7168 columns, it must have 896"),
    ):
        with pytest.raises(ValueError, match=re.compile(message)):
            second.check(*arrays)
    engine = OprojProducer(768, staged_blocks=0, twoshot=True)
    x, weight = np.zeros((8, 768), BF16), np.broadcast_to(np.zeros(768, BF16), (N, 768)).copy()
    engine.check(x, weight, view)
    with pytest.raises(ValueError, match="ranks = 0 does not divide"):
        engine.check(x, weight, np.zeros((24, 8, 900), BF16))
