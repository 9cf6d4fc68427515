"""What goes wrong when one rule of the mailbox is broken, beside the right kernel, which comes through."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mailbox_rounds import BF16, N, Rounds, consume, partials, publish, same_bits
from test_mailbox import SENTINEL, rank_order

from oproj_lib.exchange import Exchange
from oproj_lib.exchange_programs import build_fused_reduce, build_mailbox_reduce
from oproj_lib.kernels.fused_reduce import FusedMailboxReduce
from oproj_lib.kernels.mailbox_reduce import MailboxReduce
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.lessons.broken_mailbox import (
    ClearsAhead,
    ClearsThisCallsTokens,
    ClearsZerosBeforeRounding,
    PollsOneWord,
    PublishesTwo,
    RotatesTwo,
    TriggersBeforeWait,
    multicast_arguments,
)
from oproj_lib.program import build_producer
from oproj_lib.vgpu import Finding, Report

K = 128


def kinds(findings: tuple[Finding, ...]) -> set[str]:
    return {finding.kind for finding in findings}


@pytest.mark.parametrize("word", [1, 3])
def test_polling_one_word_of_four(word: int) -> None:
    """A later word that is still on its way is added up as -0.0; the right kernel polls on."""
    for kind in (PollsOneWord, MailboxReduce):
        exchange = Exchange(1, 1)
        publish(exchange, 0, 0, np.ones((1, N), BF16))
        exchange.first.generation(0, 0).view(np.uint32)[0, 0, word] = SENTINEL
        out, findings = consume(exchange, 0, 1, kind)
        if kind is PollsOneWord:
            assert not findings and (out[0].view(np.uint32)[word] == SENTINEL).all()
        else:
            assert kinds(findings) == {"polls for ever"}


def project(engine: OprojProducer, x: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, Report]:
    """What one rank publishes, uint16 [M, 7168], and the report."""
    exchange = Exchange(1, len(x))
    program = build_producer(engine, target="sm_90a", batch=len(x), mailbox_slots=3, mailbox_tokens=len(x))
    buffers = [exchange.gpu.upload(array, name) for array, name in ((x, "x"), (weight, "weight"))]
    exchange.enqueue(program, 0, exchange.producer_arguments(0, *buffers))
    (report,) = exchange.gpu.synchronize()
    return exchange.first.generation(0, 0)[0].view(np.uint16), report


def test_clearing_zeros_before_rounding() -> None:
    """-2**-140 is an FP32 number below half the smallest BF16, 2**-133: it rounds to -0.0."""
    x = np.zeros((1, K), BF16)
    weight = np.zeros((N, K), BF16)
    x[0, 0], weight[::2, 0], weight[1::2, 0] = 2.0**-70, -(2.0**-70), 1.0
    options: dict[str, Any] = {"staged_blocks": 1, "generations": True}
    wrong, report = project(ClearsZerosBeforeRounding(K, **options), x, weight)
    assert (wrong[0, ::2] == 0x8000).all()
    assert kinds(report.findings) == {"sentinel published"}
    right, report = project(OprojProducer(K, **options), x, weight)
    assert not report.findings and (right[0, ::2] == 0).all() and (right[0, 1::2] == wrong[0, 1::2]).all()


def run_calls(kind: type[MailboxReduce], batches: tuple[int, ...]) -> Exchange:
    """Calls of one rank, each batch published by the host; all results are right."""
    exchange = Exchange(1, 16)
    for call, tokens in enumerate(batches):
        values = partials(1, tokens, call)
        publish(exchange, 0, call % 3, values[0])
        out, findings = consume(exchange, 0, tokens, kind)
        assert not findings and same_bits(out, values[0])
    return exchange


def test_clearing_only_this_calls_tokens() -> None:
    """Nine tokens, then two: seven tokens of generation 0 stay there, and call 3 takes them for its own."""
    exchange = run_calls(ClearsThisCallsTokens, (9, 2, 2))
    left = ~exchange.first.armed_words(0, 0)
    assert not left[0, :2].any() and left[0, 2:9].all()
    out, findings = consume(exchange, 0, 9, ClearsThisCallsTokens)  # nobody has published call 3
    assert kinds(findings) == {"polls for ever"}  # tokens 0 and 1
    assert same_bits(out[2:], partials(1, 9, 0)[0, 2:])
    right = run_calls(MailboxReduce, (9, 2, 2))
    assert right.first.unarmed(0) == (2,)


def race(kind: type[MailboxReduce], generations: int) -> set[str]:
    """Rank 1 is one call ahead, which the protocol allows: it has published call 2 when rank 0 begins to consume
    call 1. The kinds of findings of rank 0's calls 1 and 2."""
    exchange = Exchange(2, 2)
    values = [partials(2, 2, 60 + call) for call in range(3)]

    def call(number: int) -> int:
        return number % generations

    for number in (0, 1):
        for writer in (0, 1):
            publish(exchange, writer, call(number), values[number][writer])
        if number == 0:
            for rank in (0, 1):
                assert not consume(exchange, rank, 2, kind)[1]
    assert not consume(exchange, 1, 2, kind)[1]  # rank 1 needs only what rank 0 has published
    publish(exchange, 1, call(2), values[2][1])
    out, findings = consume(exchange, 0, 2, kind)
    assert not findings and same_bits(out, rank_order(values[1]))
    publish(exchange, 0, call(2), values[2][0])
    out, findings = consume(exchange, 0, 2, kind)
    assert findings or same_bits(out, rank_order(values[2]))
    return kinds(findings)


@pytest.mark.parametrize(("kind", "generations"), [(ClearsAhead, 3), (RotatesTwo, 2)])
def test_clearing_what_a_faster_peer_has_published(kind: type[MailboxReduce], generations: int) -> None:
    """The slow rank wipes out the chunk of call 2, and polls for ever; three generations leave it alone."""
    assert race(kind, generations) == {"polls for ever"}
    assert race(MailboxReduce, 3) == set()


def test_two_generations_in_flight_on_skewed_ranks() -> None:
    """The same with everything on the device: five calls of two ranks, one of them slow."""
    batches = (2, 1, 2, 1, 2)
    two = PublishesTwo(Rounds.K, staged_blocks=1, generations=True)
    assert not Rounds(2, batches, engine=two, reduce=RotatesTwo).run(1, {0: 3.0})
    assert Rounds(2, batches).run(1, {0: 3.0})


def test_polling_through_the_multicast_address() -> None:
    exchange = Exchange(2, 1)
    for writer in range(2):
        publish(exchange, writer, 0, np.ones((1, N), BF16))
    _, findings = consume(exchange, 0, 1, arguments=multicast_arguments)
    assert "wrong address space" in kinds(findings)
    assert any("multicast" in finding.message for finding in findings)


def two_calls(kind: type[OprojProducer]) -> set[str]:
    """Two calls in flight on one rank, split form: kinds of findings, "wrong result" among them."""
    exchange = Exchange(1, 2)
    engine = kind(K, staged_blocks=1, generations=True)
    rng = np.random.default_rng(8)
    weight = rng.integers(-1, 2, (N, K)).astype(BF16)
    weight_buffer = exchange.gpu.upload(weight, "weight")
    shape: dict[str, Any] = {"target": "sm_90a", "batch": 1, "mailbox_tokens": 2}
    programs = [
        build_producer(engine, mailbox_slots=3, **shape),
        build_mailbox_reduce(MailboxReduce(1), **shape),
    ]
    results = []
    for _ in range(2):
        x = rng.integers(-2, 3, (1, K)).astype(BF16)
        out = exchange.gpu.empty((1, N), BF16, "out")
        x_buffer = exchange.gpu.upload(x, "x")
        exchange.enqueue(programs[0], 0, exchange.producer_arguments(0, x_buffer, weight_buffer))
        exchange.enqueue(programs[1], 0, exchange.reduce_arguments(0, out))
        results.append((out.array, (x.astype(np.int64) @ weight.astype(np.int64).T).astype(BF16)))
    found = {finding.kind for report in exchange.gpu.synchronize() for finding in report.findings}
    if not all((out == expected).all() for out, expected in results):
        found.add("wrong result")
    return found


def test_triggering_before_the_wait() -> None:
    """The consumer of call 2 may start while that of call 1 runs, and read its generation before it is there."""
    assert "too early" in two_calls(TriggersBeforeWait)
    assert two_calls(OprojProducer) == set()


def test_a_broken_part_does_not_get_the_right_program_from_the_cache() -> None:
    """What is broken is not the kernel's own class: its reader, its counting, the engine in a fused form."""
    shape: dict[str, Any] = {"target": "sm_90a", "batch": 1, "mailbox_tokens": 2}
    reduces = [build_mailbox_reduce(kind(1), **shape) for kind in (MailboxReduce, PollsOneWord, RotatesTwo)]
    options: dict[str, Any] = {"staged_blocks": 1, "generations": True}
    engines = (OprojProducer(K, **options), ClearsZerosBeforeRounding(K, **options))
    fused = [build_fused_reduce(FusedMailboxReduce(engine, 1), **shape) for engine in engines]
    assert len({program.ptx for program in (*reduces, *fused)}) == 5
