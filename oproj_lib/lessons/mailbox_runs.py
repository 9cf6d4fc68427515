"""Notebook 11's experiments: calls of several virtual ranks, chunks that arrive in pieces, rules that are broken.

K is 128 on every rank, however many there are, so that a run takes seconds: the exchange does not see K. x and
weight are small whole numbers, so every partial sum is exact until it is rounded to BF16, and what must come out
is known without a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from oproj_lib import vgpu
from oproj_lib.exchange import Exchange, sum_in_rank_order
from oproj_lib.exchange_programs import build_mailbox_reduce, build_second_shot
from oproj_lib.kernels.mailbox_reduce import MailboxReduce
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.second_shot import SecondShot
from oproj_lib.layouts import mailbox as layout
from oproj_lib.layouts.fragments import CHUNK
from oproj_lib.layouts.mailbox import CHUNK_WORDS, SENTINEL
from oproj_lib.lessons.broken_mailbox import (
    ClearsAhead,
    ClearsThisCallsTokens,
    PollsOneWord,
    PublishesTwo,
    RotatesTwo,
    multicast_arguments,
)
from oproj_lib.problem import ROWS_PER_CTA, Array, N
from oproj_lib.program import Program, build_producer
from oproj_lib.ranks import GridRow, timeline

RANKS = (2, 4, 8)
STEP_BUDGET = 2_000_000
K = 128
LARGEST = 8
"""x and weight are whole numbers from -8 to 8: sums of 128 products often have more than BF16's 8 bits."""
BF16 = ml_dtypes.bfloat16
Arguments = Callable[[Exchange, int, Any], list[Any]]


def bits(values: Array) -> Array:
    """BF16 values as uint16."""
    return np.ascontiguousarray(values).view(np.uint16)


# ---- whole calls ----


@dataclass(frozen=True)
class ExchangeRun:
    """Calls of all ranks. batches: tokens per call; grids: see ``ranks.timeline``; outs: [calls][ranks] of BF16
    [tokens, columns]; expected: [calls] of the same; partials: [calls] of float64 [ranks, tokens, columns], exact."""

    ranks: int
    shots: int
    batches: tuple[int, ...]
    grids: tuple[GridRow, ...]
    outs: tuple[tuple[Array, ...], ...]
    expected: tuple[Array, ...]
    partials: tuple[Array, ...]
    findings: tuple[vgpu.Finding, ...]

    @property
    def outputs(self) -> int:
        """Outputs of one rank, over all calls."""
        return sum(expected.size for expected in self.expected)

    def of(self, rank: int, call: int) -> tuple[GridRow, ...]:
        """The grids of one call of one rank, in the order of its stream: the last one consumes."""
        mine = [row for row in self.grids if row.rank == rank]
        kernels = len(mine) // len(self.batches)
        return tuple(mine[kernels * call :][:kernels])

    @property
    def wrong(self) -> int:
        """Outputs of all ranks with other bits than expected."""
        return sum(
            int((bits(out) != bits(expected)).sum())
            for outs, expected in zip(self.outs, self.expected, strict=True)
            for out in outs
        )

    @property
    def different(self) -> int:
        """Outputs with other bits than rank 0 has there."""
        return sum(int((bits(out) != bits(outs[0])).sum()) for outs in self.outs for out in outs[1:])


class Ranks:
    """Virtual ranks with weights, mailboxes and programs; calls are enqueued, then run together.

    A one-shot exchange may run with the first ``ctas`` CTAs of each grid only, 64 columns each: they publish,
    consume and arm these columns among themselves. Raises ValueError for ranks other than 2, 4 and 8, for shots
    other than 1 and 2, and for ctas with two shots.
    """

    def __init__(
        self,
        ranks: int,
        tokens: int,
        *,
        shots: int = 1,
        transport: str = "multicast",
        target: str = "sm_90a",
        ctas: int | None = None,
        seed: int = 0,
        engine: type[OprojProducer] = OprojProducer,
        reduce: type[MailboxReduce] = MailboxReduce,
        reduce_arguments: Arguments = Exchange.reduce_arguments,
    ) -> None:
        if ranks not in RANKS:
            raise ValueError(
                f"ranks = {ranks}: this notebook runs {', '.join(map(str, RANKS))} virtual ranks"
            )
        if shots not in (1, 2):
            raise ValueError(f"shots = {shots}: choose 1 (everybody adds) or 2 (owners add)")
        self.ranks, self.shots, self.target = ranks, shots, target
        self.exchange = Exchange(ranks, tokens, twoshot=shots == 2, transport=transport)
        self.sending = f"unicast:{ranks}" if transport == "unicast" else transport
        self.ctas, self.reduce_arguments = ctas, reduce_arguments
        self.columns = N if ctas is None else ctas * ROWS_PER_CTA
        first = None if shots == 2 else self.sending
        self.engine = engine(K, staged_blocks=1, twoshot=shots == 2, transport=first, generations=True)
        self.reduce = reduce(self.exchange.result.writers)
        self.rng = np.random.default_rng(seed)
        self.weights = [whole_numbers(self.rng, N, K) for _ in range(ranks)]
        self.buffers = [
            self.exchange.gpu.upload(weight, "weight", rank) for rank, weight in enumerate(self.weights)
        ]

    def programs(self, tokens: int) -> dict[str, Program]:
        """The kernels of one call on every rank, in stream order."""
        shape: dict[str, Any] = {"target": self.target, "mailbox_tokens": self.exchange.tokens}
        made = {
            "producer": build_producer(
                self.engine,
                batch=tokens,
                mailbox_slots=layout.slots_of(self.ranks),
                ranks=self.ranks if self.shots == 2 else 1,
                **shape,
            )
        }
        if self.shots == 2:
            second = SecondShot(self.ranks, tokens, transport=self.sending)
            made["second shot"] = build_second_shot(second, **shape)
        made["reduce"] = build_mailbox_reduce(self.reduce, batch=tokens, **shape)
        return made

    def enqueue(self, tokens: int) -> tuple[list[vgpu.GridHandle], list[Array], Array]:
        """One call of every rank: (handles of its grids, the ranks' outs, exact partial sums)."""
        exchange = self.exchange
        x = [whole_numbers(self.rng, tokens, K) for _ in range(self.ranks)]
        programs, handles, outs = self.programs(tokens), [], []
        for rank in range(self.ranks):
            out = exchange.gpu.empty((tokens, N), BF16, f"out of rank {rank}", rank)
            arguments = {
                "producer": exchange.producer_arguments(
                    rank, exchange.gpu.upload(x[rank], "x", rank), self.buffers[rank]
                ),
                "reduce": self.reduce_arguments(exchange, rank, out),
            }
            if self.shots == 2:
                arguments["second shot"] = exchange.second_shot_arguments(rank)
            for kernel, program in programs.items():
                handles.append(exchange.enqueue(program, rank, arguments[kernel], ctas=self.ctas))
            outs.append(out.array[:, : self.columns])
        exact = np.stack(
            [
                a.astype(np.float64) @ weight[: self.columns].astype(np.float64).T
                for a, weight in zip(x, self.weights, strict=True)
            ]
        )
        return handles, outs, exact


def whole_numbers(rng: np.random.Generator, rows: int, columns: int) -> Array:
    """BF16 [rows, columns] of whole numbers from -8 to 8."""
    numbers: Array = rng.integers(-LARGEST, LARGEST + 1, (rows, columns)).astype(np.float32).astype(BF16)
    return numbers


def run_calls(
    ranks: int,
    batches: Sequence[int],
    *,
    schedule: str | int = "program",
    slow: Mapping[int, float] | None = None,
    step_budget: int = STEP_BUDGET,
    **options: Any,
) -> ExchangeRun:
    """Calls of ``ranks`` ranks, all in flight together. schedule: "program", or a seed, which draws another order in
    which grids and warps take turns; slow {rank: s}: with a seed, s + 1 times fewer turns; step_budget: of the virtual
    GPU. Other options: ``Ranks``.

    Raises ValueError as ``Ranks`` and ``VirtualGPU.synchronize``.
    """
    made = Ranks(ranks, max(batches), **options)
    calls = [made.enqueue(tokens) for tokens in batches]
    reports = made.exchange.gpu.synchronize(schedule, skew=slow, step_budget=step_budget)
    partials = tuple(exact for _, _, exact in calls)
    return ExchangeRun(
        ranks=ranks,
        shots=made.shots,
        batches=tuple(batches),
        grids=tuple(timeline(handle for handles, _, _ in calls for handle in handles)),
        outs=tuple(tuple(outs) for _, outs, _ in calls),
        expected=tuple(sum_in_rank_order(exact.astype(np.float32).astype(BF16)) for exact in partials),
        partials=partials,
        findings=tuple(finding for report in reports for finding in report.findings),
    )


# ---- who writes where ----


@dataclass(frozen=True)
class Delivery:
    """What one rank's producer did in a run: bytes that changed in every rank's copy, and 16-byte stores."""

    form: str
    writer: int
    bytes_at: tuple[int, ...]
    stores: int
    chunks: int


FORMS: Mapping[str, tuple[int, str]] = {
    "one shot, multicast": (1, "multicast"),
    "one shot, unicast": (1, "unicast"),
    "two shots, the first": (2, "multicast"),
}
_STORES = ("multimem.st", "st.relaxed.sys")


def deliveries(ranks: int, tokens: int, writer: int, *, target: str = "sm_90a") -> list[Delivery]:
    """Run the producer of one rank in every form, alone, and look where its chunks went.

    Raises ValueError for a rank that does not exist.
    """
    if not 0 <= writer < ranks:
        raise ValueError(f"rank {writer}: there are {ranks}, choose 0 to {ranks - 1}")
    found = []
    for form, (shots, transport) in FORMS.items():
        made = Ranks(ranks, tokens, shots=shots, transport=transport, target=target)
        exchange, program = made.exchange, made.programs(tokens)["producer"]
        x = exchange.gpu.upload(whole_numbers(made.rng, tokens, K), "x", writer)
        exchange.enqueue(program, writer, exchange.producer_arguments(writer, x, made.buffers[writer]))
        (report,) = exchange.gpu.synchronize()
        report.raise_for_findings()
        arrived = []
        for rank in range(ranks):
            changed = ~exchange.first.armed_words(rank, 0)
            assert not np.delete(changed, writer, axis=0).any()  # nobody else's slot
            arrived.append(4 * int(changed.sum()))
        lines = program.ptx.splitlines()
        stores = sum(
            count
            for line, count in report.counters.thread_instructions_by_line.items()
            if any(name in lines[line - 1] for name in _STORES) and ".v4" in lines[line - 1]
        )
        found.append(Delivery(form, writer, tuple(arrived), stores, tokens * N // CHUNK))
    return found


# ---- words that are late, or never come ----


@dataclass(frozen=True)
class Polled:
    """What a reduction made of a chunk of which some words had not arrived."""

    missing: tuple[int, ...]
    findings: tuple[vgpu.Finding, ...]
    words: tuple[int, ...]
    """The chunk of the result, four 32-bit words."""


def poll_torn_chunk(
    reduce: type[MailboxReduce], missing: tuple[int, ...], *, target: str = "sm_90a"
) -> Polled:
    """One rank has published ones, and of its first chunk the words ``missing`` are still on their way.

    They never come, so whoever waits for them waits for ever.
    """
    exchange = Exchange(1, 1)
    first = exchange.first.generation(0, 0)
    first[:] = 1
    for word in missing:
        first.view(np.uint32)[0, 0, word] = SENTINEL
    out, report = _reduce_now(exchange, reduce(1), 1, target, ctas=1)
    words = tuple(int(word) for word in out[0].view(np.uint32)[:CHUNK_WORDS])
    return Polled(missing, report.findings, words)


def never_arrives(
    ranks: int, tokens: int, rank: int, token: int, column: int, *, target: str = "sm_90a"
) -> vgpu.Report:
    """Rank 0 reduces; everything was published but the word of ``rank`` that holds (token, column).

    Raises ValueError for a place that does not exist.
    """
    for name, value, count in (("rank", rank, ranks), ("token", token, tokens), ("column", column, N)):
        if not 0 <= value < count:
            raise ValueError(f"{name} = {value}: choose 0 to {count - 1}")
    exchange = Exchange(ranks, tokens)
    first = exchange.first.generation(0, 0)
    first[:] = 1
    first.view(np.uint32)[rank, token, column // 2] = SENTINEL
    _, report = _reduce_now(exchange, MailboxReduce(ranks), tokens, target)
    return report


def _reduce_now(
    exchange: Exchange, reduce: MailboxReduce, tokens: int, target: str, ctas: int | None = None
) -> tuple[Array, vgpu.Report]:
    program = build_mailbox_reduce(reduce, target=target, batch=tokens, mailbox_tokens=exchange.tokens)
    out = exchange.gpu.empty((tokens, N), BF16, "out of rank 0")
    exchange.enqueue(program, 0, exchange.reduce_arguments(0, out), ctas=ctas)
    (report,) = exchange.gpu.synchronize()
    return out.array, report


# ---- broken rules ----


@dataclass(frozen=True)
class BrokenRule:
    """Calls of two ranks whose kernels break one rule. batches: tokens of the calls; schedules: seeds to run them with,
    more than one where the mistake does not always show."""

    story: str
    batches: tuple[int, ...]
    engine: type[OprojProducer] = OprojProducer
    reduce: type[MailboxReduce] = MailboxReduce
    arguments: Arguments = Exchange.reduce_arguments
    schedules: tuple[int, ...] = (0,)


BROKEN: Mapping[str, BrokenRule] = {
    "two generations": BrokenRule(
        "What a call arms is what the next call publishes into, and a faster peer is there already.",
        (1, 1, 1),
        engine=PublishesTwo,
        reduce=RotatesTwo,
        schedules=(0, 1),
    ),
    "arms ahead": BrokenRule(
        "Three generations, but a call arms the next one instead of the last one.",
        (1, 1, 1),
        reduce=ClearsAhead,
    ),
    "arms this call's tokens": BrokenRule(
        "After a call with 2 tokens, calls with 1 arm one: what stays is taken for the next call's data.",
        (2, 1, 1, 2),
        reduce=ClearsThisCallsTokens,
    ),
    "through the multicast address": BrokenRule(
        "Polls and arms through the address that means every rank's copy: peers still read theirs.",
        (1,),
        arguments=multicast_arguments,
    ),
}
BROKEN_RANKS = 2
SLOW = {0: 3.0}
"""Rank 0 gets a quarter of rank 1's turns, and so is the one whose data is in danger."""
ENOUGH_STEPS = 40_000
"""Of the virtual GPU, for a broken run. Right ones take less than half of it."""


def run_broken(name: str, *, target: str = "sm_90a", mend: bool = False) -> list[ExchangeRun]:
    """Run one of ``BROKEN`` under each of its schedules; mend: under the first, with the right kernels.

    Raises ValueError for an unknown name.
    """
    if name not in BROKEN:
        raise ValueError(f"mistake = {name!r}: choose from {', '.join(BROKEN)}")
    broken = BROKEN[name]
    kinds: dict[str, Any] = {}
    if not mend:
        kinds = {"engine": broken.engine, "reduce": broken.reduce, "reduce_arguments": broken.arguments}
    return [
        run_calls(
            BROKEN_RANKS,
            broken.batches,
            schedule=seed,
            slow=SLOW,
            step_budget=ENOUGH_STEPS,
            target=target,
            ctas=1,
            **kinds,
        )
        for seed in broken.schedules[: 1 if mend else None]
    ]


def find_run(runs: Mapping[str, Sequence[ExchangeRun]], name: str) -> ExchangeRun:
    """The first run of a mistake in which it did harm.

    Raises ValueError for an unknown name, and RuntimeError if there is none.
    """
    if name not in runs:
        raise ValueError(f"mistake = {name!r}: choose from {', '.join(runs)}")
    for run in runs[name]:
        if run.findings or run.wrong:
            return run
    raise RuntimeError(f"{name!r} did no harm in {len(runs[name])} runs")


POLLERS: Mapping[str, type[MailboxReduce]] = {"one word": PollsOneWord, "all four words": MailboxReduce}
