"""MailboxReduce on the virtual GPU: the sums bit for bit, three generations, and memory armed again."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from mailbox_rounds import BF16, TOKENS, N, Rounds, consume, partials, publish, same_bits

from oproj_lib.cubin import resources
from oproj_lib.exchange import Exchange, sum_in_rank_order
from oproj_lib.exchange_programs import build_fused_reduce, build_mailbox_reduce
from oproj_lib.kernels.fused_reduce import FusedMailboxReduce, FusedTwoShotReduce
from oproj_lib.kernels.inputs import check_mailbox_and_out
from oproj_lib.kernels.mailbox_reduce import MailboxReduce
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.second_shot import SecondShot
from oproj_lib.kernels.umma import OprojUmma
from oproj_lib.kernels.wgmma import OprojWgmma
from oproj_lib.program import Program, build_producer
from oproj_lib.sass import check_sass, disassemble

SENTINEL = 0x80008000


def rank_order(values: np.ndarray) -> np.ndarray:
    """The contract's sum: FP32, rank after rank, rounded once."""
    total = values[0].astype(np.float32)
    with np.errstate(all="ignore"):
        for rank in range(1, len(values)):
            total += values[rank].astype(np.float32)
        return total.astype(BF16)


# Rounds


@pytest.mark.parametrize("ranks", [8, 16])
def test_rounds_with_growing_and_shrinking_batches(ranks: int) -> None:
    """Every rank-order sum bit for bit, and after each call all memory armed but what it has just read."""
    exchange = Exchange(ranks, TOKENS)
    state, rank = exchange.first.states[3].array, 3
    for call, tokens in enumerate((5, 64, 3, 8) if ranks == 8 else (17, 2)):
        values = partials(ranks, tokens, seed=call)
        for writer in range(ranks):
            exchange.first.generation(rank, call % 3)[writer, :tokens] = values[writer]
        out, findings = consume(exchange, rank, tokens, schedule=call if call % 2 else "program")
        assert not findings
        assert same_bits(out, rank_order(values))
        assert not same_bits(out, rank_order(values[::-1]))
        exact = values.astype(np.float64).sum(axis=0)
        assert np.linalg.norm(out.astype(np.float64) - exact) < 2.5e-3 * np.linalg.norm(exact)
        for generation in range(3):
            words = exchange.first.generation(rank, generation).view(np.uint32)
            if generation == call % 3:  # untouched until the next call
                assert same_bits(exchange.first.generation(rank, generation)[:, :tokens], values)
                words = words[:, tokens:]
            assert (words == SENTINEL).all()
        assert state[1].tolist() == [(call + 1) % 3] * 512 and state[2].tolist() == [tokens] * 512


def test_calls_in_flight_on_skewed_ranks() -> None:
    """Seven calls of three ranks, one slow, one slower; nothing from the host in between."""
    assert Rounds(3, (1, 3, 9, 1, 1, 9, 3)).run(2, {2: 1.0, 0: 2.0})


@pytest.mark.parametrize(
    ("engine", "target", "fused"),
    [
        (OprojProducer, "sm_90a", False),
        (OprojProducer, "sm_90a", True),
        (OprojUmma, "sm_100a", True),
        (OprojWgmma, "sm_90a", True),
    ],
)
def test_every_engine_and_form(engine: Any, target: str, fused: bool) -> None:
    """Two ranks, a full and a ragged pass over the tokens, then fewer."""
    options: dict[str, Any] = {"staged_blocks": 1} if engine is OprojProducer else {}
    made = engine(Rounds.K, generations=True, **options)
    assert Rounds(2, (17, 2), engine=made, target=target, fused=fused).run("program")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "calls"), [(2, 200), (8, 30)])
def test_many_calls_in_flight(ranks: int, calls: int) -> None:
    batches = tuple(int(tokens) for tokens in np.random.default_rng(ranks).choice((1, 3, 9, 16), calls))
    assert Rounds(ranks, batches).run(7, {ranks - 1: 1.5})


def test_special_values_pass_through() -> None:
    """Columns 0..7 of token 0, three ranks; the expected bits are IEEE 754's, worked out by hand."""
    nan, inf, tiny = float("nan"), float("inf"), 2.0**-133
    cases = {  # column: values by rank, expected bits
        0: ([nan, 1.0, 2.0], 0x7FFF),
        1: ([inf, -inf, 0.0], 0x7FFF),
        2: ([1.0, -inf, 2.0], 0xFF80),
        3: ([tiny, tiny, tiny], 0x0003),  # subnormals are not flushed
        4: ([2.0**24, 1.0, -(2.0**24)], 0x0000),  # in rank order 1 is lost in 2**24; another order gives 1
        5: ([3.0e38, 3.0e38, -3.0e38], 0x7F80),  # overflows on the way
        6: ([1.0, 2.0**-8, 2.0**-20], 0x3F81),  # a tie and a little: rounded once, not per rank
        7: ([1.0, -1.0, 0.0], 0x0000),
    }
    exchange = Exchange(3, 1)
    values = np.zeros((3, 1, N), BF16)
    for column, (ranks, _) in cases.items():
        values[:, 0, column] = np.array(ranks, np.float32).astype(BF16)
    for writer in range(3):
        publish(exchange, writer, 0, values[writer])
    out, findings = consume(exchange, 0, 1)
    assert not findings
    assert out[0, :8].view(np.uint16).tolist() == [bits for _, bits in cases.values()]
    assert not out[0, 8:].any()


def test_a_payload_that_looks_almost_armed_arrives() -> None:
    """Halves 0x8000 next to others, which "plain" would publish: only the whole word means "not yet"."""
    exchange = Exchange(1, 1)
    words = exchange.first.generation(0, 0).view(np.uint32)
    words[0, 0] = 0x80000000
    words[0, 0, 1::2] = 0x00008000
    expected = words[0].copy()
    out, findings = consume(exchange, 0, 1)
    assert not findings
    assert (out.view(np.uint32) == expected).all()


@pytest.mark.parametrize("word", range(4))
def test_every_word_of_a_chunk_is_waited_for(word: int) -> None:
    """One armed word of one chunk of the last rank: the kernel polls, and the finding names the place."""
    exchange = Exchange(2, 2)
    for writer in range(2):
        publish(exchange, writer, 0, partials(2, 2, 0)[writer])
    exchange.first.generation(0, 0).view(np.uint32)[1, 1, 4 * 77 + word] = SENTINEL
    _, findings = consume(exchange, 0, 2)
    assert [finding.kind for finding in findings] == ["polls for ever"]
    assert re.search(rf"word {word} still armed", str(findings[0]))


def test_the_library_sums_in_rank_order_too() -> None:
    values = partials(8, 2, 9)
    assert same_bits(sum_in_rank_order(values), rank_order(values))
    assert not same_bits(sum_in_rank_order(values[::-1]), rank_order(values))


# Machine code


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_all_ranks_are_polled_before_any_is_tested(target: str) -> None:
    program = build_mailbox_reduce(MailboxReduce(8), target=target, batch=8, mailbox_tokens=8)
    (code,) = disassemble(program.cubin).values()
    names = [instruction.opcode for instruction in code]
    loads = [i for i, name in enumerate(names) if name == "LDG.E.128.STRONG.SYS"]
    assert len(loads) == 16  # a round of all eight, and one of those still missing
    assert [code[i].predicate for i in loads[:8]] == [""] * 8 and all(code[i].predicate for i in loads[8:])
    assert not [name for name in names[loads[0] : loads[7]] if name.startswith(("ISETP", "BRA"))]
    assert names.index("ACQBULK") > loads[-1]  # the wait comes after the poll
    assert names.index("PREEXIT") < loads[0]
    used = resources(program.cubin, program.entry)
    assert used.stack_bytes == 0 and used.registers <= 64


def test_generations_leave_the_preload_alone() -> None:
    for twoshot in (False, True):
        engine = OprojProducer(1536, staged_blocks=4, generations=True, twoshot=twoshot)
        program = build_producer(
            engine, target="sm_90a", batch=8, mailbox_slots=24, mailbox_tokens=8,
            ranks=8 if engine.twoshot else 1,
        )  # fmt: skip
        check_sass(program).raise_for_problems()
        assert [parameter.name for parameter in program.parameters][-1] == "state"


# A producer and its consumer, in one kernel and in two


def project(exchange: Exchange, fused: bool, batches: tuple[int, ...], schedule: Any) -> list[np.ndarray]:
    """Calls of one rank with a small K, all enqueued before the first runs: out per call."""
    k = 128
    engine = OprojProducer(k, staged_blocks=1, transport="multicast", generations=True)
    rng = np.random.default_rng(11)
    weight = exchange.gpu.upload(rng.standard_normal((N, k), np.float32).astype(BF16), "weight")
    outs = []
    for batch in batches:
        x = exchange.gpu.upload(rng.standard_normal((batch, k), np.float32).astype(BF16), "x")
        out = exchange.gpu.empty((batch, N), BF16, "out")
        shape: dict[str, Any] = {"target": "sm_90a", "batch": batch, "mailbox_tokens": exchange.tokens}
        if fused:
            program: Program = build_fused_reduce(FusedMailboxReduce(engine, 1), **shape)
            exchange.enqueue(program, 0, exchange.fused_arguments(0, x, weight, out))
        else:
            exchange.enqueue(
                build_producer(engine, mailbox_slots=3, **shape),
                0,
                exchange.producer_arguments(0, x, weight),
            )
            exchange.enqueue(
                build_mailbox_reduce(MailboxReduce(1), **shape), 0, exchange.reduce_arguments(0, out)
            )
        outs.append(out.array)
    for report in exchange.gpu.synchronize(schedule):
        report.raise_for_findings()
    return outs


def test_split_and_fused_forms_share_a_mailbox() -> None:
    """Two calls split, two fused, on one state, without anything from the host in between: the same bits."""
    exchange = Exchange(1, 16)
    batches = (9, 2)
    split = project(exchange, False, batches, "program")
    assert exchange.first.unarmed(0) == (1,)
    fused = project(exchange, True, batches, "program")
    assert exchange.first.unarmed(0) == (0,)
    for a, b in zip(split, fused, strict=True):
        assert same_bits(a, b) and a.astype(np.float32).std() > 5
    assert (exchange.first.states[0].array[:, 200] == [1, 1, 2]).all()


# What is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MailboxReduce(0), "mailbox of 0 ranks: choose 1 to 72"),
        (lambda: MailboxReduce(73), "mailbox of 73 ranks"),
        (lambda: SecondShot(3, 8), "ranks = 3 does not divide the 7168 columns"),
        (lambda: SecondShot(8, 65), "batch = 65: choose 1 to 64"),
        (lambda: SecondShot(8, 8, transport="twoshot"), "twoshot = False with transport = 'twoshot'"),
        (lambda: Exchange(2, 8, transport="smoke"), r"choose from \('multicast', 'unicast'\)"),
        (lambda: FusedMailboxReduce(OprojUmma(768), 16), "generations = False"),
        (
            lambda: FusedMailboxReduce(OprojUmma(768, generations=True, twoshot=True), 16),
            "twoshot = True: this is an engine for FusedTwoShotReduce",
        ),
        (
            lambda: FusedTwoShotReduce(OprojUmma(768, generations=True), SecondShot(16, 8)),
            "twoshot = False: this is an engine for FusedMailboxReduce",
        ),
        (
            lambda: FusedMailboxReduce(OprojUmma(768, generations=True, policy="plain"), 16),
            "policy = 'plain': a polled mailbox needs 'latent'",
        ),
        (
            lambda: build_mailbox_reduce(MailboxReduce(2), target="sm_90a", batch=65, mailbox_tokens=65),
            "batch = 65: choose 1 to 64",
        ),
        (
            lambda: build_mailbox_reduce(MailboxReduce(2), target="sm_90a", batch=9, mailbox_tokens=8),
            "mailbox_tokens = 8 < batch = 9",
        ),
        (
            lambda: build_mailbox_reduce(MailboxReduce(2), target="sm_80", batch=8, mailbox_tokens=8),
            "target = 'sm_80'",
        ),
        (
            lambda: build_producer(
                OprojProducer(768, staged_blocks=0, generations=True), target="sm_90a", batch=8,
                mailbox_slots=8, mailbox_tokens=8,
            ),
            r"mailbox of 8 slots: slots = 3 generations \* ranks",
        ),
        (
            lambda: build_producer(
                OprojProducer(768, staged_blocks=0), target="sm_90a", batch=8,
                mailbox_slots=8, mailbox_tokens=8, ranks=8,
            ),
            "ranks = 8: only a two-shot engine shards its columns",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("mailbox", "out", "message"),
    [
        (((24, 8, N), BF16), ((8, N), np.float32), "out has dtype float32: it must be bfloat16"),
        (((24, 8, N), np.float16), ((8, N), BF16), "mailbox has dtype float16"),
        (((24, 7, N), BF16), ((8, N), BF16), "mailbox has 7 tokens per slot and out has M = 8"),
        (((24, 8, 896), BF16), ((8, N), BF16), "mailbox has 896 columns, it must have N = 7168"),
        (((24, 8, N), BF16), ((8, 896), BF16), "out has 896 columns"),
        (((24, 80, N), BF16), ((65, N), BF16), "out has M = 65 tokens: choose 1 to 64"),
        (((16, 8, N), BF16), ((8, N), BF16), r"mailbox of 16 slots: 3 generations \* 8 ranks = 24"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(mailbox: Any, out: Any, message: str) -> None:
    arrays = [np.broadcast_to(np.zeros((), dtype), shape) for shape, dtype in (mailbox, out)]
    for i, array in enumerate(arrays):  # contiguous by its strides, and no memory behind it
        strides = [array.itemsize]
        for extent in array.shape[:0:-1]:
            strides.insert(0, strides[0] * extent)
        arrays[i] = np.lib.stride_tricks.as_strided(array, array.shape, strides)
    with pytest.raises(ValueError, match=message):
        MailboxReduce(8).check(*arrays)


def test_arrays_that_fit_pass() -> None:
    assert check_mailbox_and_out(np.zeros((3, 2, N), BF16), np.zeros((1, N), BF16)) == (3, 2, N)


def test_a_state_belongs_to_generations() -> None:
    OprojProducer(768, staged_blocks=0).check_state(None)
    with pytest.raises(ValueError, match="generations = True and state is missing"):
        OprojProducer(768, staged_blocks=0, generations=True).check_state(None)
    with pytest.raises(ValueError, match="generations = False and state is given"):
        OprojUmma(768).check_state(1)
