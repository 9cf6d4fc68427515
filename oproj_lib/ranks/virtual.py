"""Ranks on the virtual GPU, all in this process: every round's kernels are enqueued on every rank, several rounds
at a time, and nothing from the host comes in between.

    result = run_virtual(Plan(ranks=8, rounds=20))
    result.ok, result.findings
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oproj_lib import vgpu
from oproj_lib.exchange import Channel, Exchange
from oproj_lib.layouts.mailbox import GENERATIONS, Role
from oproj_lib.problem import CTAS, Array, N
from oproj_lib.program import Program
from oproj_lib.ranks import verdict
from oproj_lib.ranks.inputs import Inputs
from oproj_lib.ranks.memory import bind
from oproj_lib.ranks.plan import PAYLOAD, Plan
from oproj_lib.ranks.programs import Chain, attnres_threads, build_chains
from oproj_lib.ranks.result import RanksResult
from oproj_lib.run import ENGINES, decoded, one_line

CONSTANTS = ("blocks", "norm_weight", "qk_weight", "out_weight")
MOST_SKEW = 3.0
"""Skews are drawn from 0 to this: see ``VirtualGPU.synchronize``."""


@dataclass(frozen=True)
class Round:
    """A round in flight: outs of all ranks, [tokens, 7168]."""

    number: int
    batch: int
    outs: list[Array]

    @property
    def name(self) -> str:
        return f"round {self.number} (M = {self.batch})"


class VirtualRanks:
    """Memory of all ranks of a plan, and the means to run rounds on it."""

    def __init__(self, plan: Plan, chains: dict[int, Chain], *, checks: bool = False) -> None:
        self.plan, self.chains, self.checks = plan, chains, checks
        self.inputs = Inputs(plan)
        self.exchange = Exchange(plan.ranks, plan.tokens, twoshot=plan.twoshot, transport=plan.transport)
        self.gpu = self.exchange.gpu
        self.attnres: verdict.AttnResChecker | None = None
        if plan.consumer == "attnres":
            self.attnres = verdict.AttnResChecker(plan, attnres_threads(plan))
        self.memory = [self._fixed(rank) for rank in range(plan.ranks)]
        self.places = [
            [self._of_round(place, rank) for rank in range(plan.ranks)] for place in range(plan.in_flight)
        ]

    def _fixed(self, rank: int) -> dict[str, Any]:
        """What a rank keeps from round to round."""
        first, result = self.exchange.first, self.exchange.result
        memory: dict[str, Any] = {
            "rank": rank,
            "first": first.boxes[rank],
            "first_mc": first.mc[rank],
            "first_state": first.states[rank],
            "result": result.boxes[rank],
            "result_mc": result.mc[rank],
            "result_state": result.states[rank],
        }
        if self.plan.engine != PAYLOAD:
            memory["weight"] = self.gpu.upload(self.inputs.weight(rank), f"weight of rank {rank}", rank)
        if self.attnres is not None:
            given = self.attnres.inputs
            memory["prefix"] = self.gpu.upload(given.prefix.copy(), f"prefix of rank {rank}", rank)
            for name in CONSTANTS:
                memory[name] = self.gpu.upload(getattr(given, name).copy(), f"{name} of rank {rank}", rank)
        return memory

    def _of_round(self, place: int, rank: int) -> dict[str, Any]:
        """What belongs to one of the rounds in flight."""
        tokens = self.plan.tokens
        name, columns = ("payload", N) if self.plan.engine == PAYLOAD else ("x", self.plan.k)
        dtype = self.exchange.first.boxes[rank].array.dtype
        suffix = f"of rank {rank}, round {place} in flight"
        return {
            name: self.gpu.upload(np.zeros((tokens, columns), dtype), f"{name} {suffix}", rank),
            "out": self.gpu.upload(np.zeros((tokens, N), dtype), f"out {suffix}", rank),
        }

    def enqueue(self, first: int, count: int) -> tuple[list[Round], list[vgpu.GridHandle]]:
        """Put rounds ``first`` .. behind the others of every rank: (rounds, their grids)."""
        rounds, handles = [], []
        for place in range(count):
            round_, grids = self._enqueue(first + place, place)
            rounds.append(round_)
            handles += grids
        return rounds, handles

    def _enqueue(self, number: int, place: int) -> tuple[Round, list[vgpu.GridHandle]]:
        batch = self.plan.batch(number)
        handles, outs = [], []
        for rank in range(self.plan.ranks):
            mine = self.places[place][rank]
            if self.plan.engine == PAYLOAD:
                mine["payload"].array[:batch, : self.plan.columns] = self.inputs.payload(number, rank)
            else:
                mine["x"].array[:batch] = self.inputs.x(number, rank)
            mine["out"].array.view(np.uint16)[:batch] = verdict.UNWRITTEN
            outs.append(mine["out"].array)
            for program in self.chains[batch]:
                handles.append(self._launch(program, rank, {**self.memory[rank], **mine}))
        return Round(number, batch, outs), handles

    def _launch(self, program: Program, rank: int, memory: dict[str, Any]) -> vgpu.GridHandle:
        return self.gpu.enqueue(
            decoded(program),
            program.entry,
            grid=program.grid if self.plan.ctas is None else self.plan.ctas,
            block=program.block,
            args=bind(program, memory, lambda value, parameter: value),
            dynamic_shared_bytes=program.dynamic_shared_bytes,
            rank=rank,
            pdl=program.pdl,
            rearms=program.config["engine"] not in (*ENGINES, PAYLOAD),
            name=program.name,
            checks=self.checks,
            counting=False,
        )

    # -- what came out ------------------------------------------------------------------------------------------

    def published(self, round_: Round, last: bool) -> Array | None:
        """BF16 [R, M, 7168] that the ranks published: given, or read from the mailboxes as long as it is there."""
        given = [self.inputs.published(round_.number, rank) for rank in range(self.plan.ranks)]
        if given[0] is not None:
            return np.stack(given)  # type: ignore[arg-type]
        if not last:
            return None  # armed again
        generation = round_.number % GENERATIONS
        views = [self.exchange.first.generation(owner, generation) for owner in range(self.plan.ranks)]
        whole = np.concatenate(views, axis=2) if self.plan.twoshot else views[0]
        return np.array(whole[:, : round_.batch])

    def findings(self, round_: Round, *, last: bool) -> tuple[list[str], bool]:
        """(findings of a round, whether its sums were compared bit for bit). last: of the rounds in flight."""
        plan, name = self.plan, round_.name
        outs = [verdict.columns_of(plan, out[: round_.batch]) for out in round_.outs]
        found = verdict.rank_findings(name, outs)
        published = self.published(round_, last)
        if self.attnres is not None:
            if published is None:
                raise ValueError(
                    f"in_flight = {plan.in_flight}: AttnRes behind an engine is checked round by round"
                )
            return found + self.attnres.findings(name, outs[0], published), True
        if published is not None:
            found += verdict.sum_findings(name, outs[0], published[:, :, : plan.columns])
        exact = np.stack([self.inputs.exact(round_.number, rank) for rank in range(plan.ranks)])
        found += verdict.float64_findings(name, outs[0], exact, k=verdict.sum_length(plan))
        return found, published is not None

    def probe(self, round_: Round) -> Array:
        """What rank 0 made of the last token, which is the same in all rounds."""
        return np.array(round_.outs[0][round_.batch - 1, : self.plan.columns])

    def memory_findings(self, last: Round) -> list[str]:
        """Mailboxes, states and prefixes of all ranks after ``last``."""
        found = []
        channels = {id(channel): channel for channel in (self.exchange.first, self.exchange.result)}
        for channel in channels.values():
            for rank in range(self.plan.ranks):
                found += self._channel_findings(channel, rank, last)
        if self.attnres is not None:
            for rank in range(self.plan.ranks):
                where = f"after {last.name}, rank {rank}"
                found += self.attnres.prefix_findings(where, self.memory[rank]["prefix"].array)
        return found

    def _channel_findings(self, channel: Channel, rank: int, last: Round) -> list[str]:
        where = f"after {last.name}, {channel.name} of rank {rank}"
        words = channel.boxes[rank].array
        if self.plan.columns < N:
            words = np.ascontiguousarray(words[:, :, : self.plan.columns])
        found = verdict.memory_findings(where, words.view(np.uint32), last.number % GENERATIONS, last.batch)
        state = channel.states[rank].array[:, : self.plan.ctas or CTAS]
        expected = {
            Role.PUBLISH: (last.number + 1) % GENERATIONS,
            Role.CONSUME: (last.number + 1) % GENERATIONS,
            Role.TOKENS: last.batch,
        }
        for role, value in expected.items():
            if (state[role] != value).any():
                found.append(
                    f"{where}: record {role.name} is {np.unique(state[role]).tolist()}, expected {value}"
                )
        return found


def run_virtual(
    plan: Plan,
    *,
    skewed: bool = False,
    schedule: str | int | None = None,
    checks: bool = False,
    chains: dict[int, Chain] | None = None,
) -> RanksResult:
    """Runs all rounds of a plan; stops after the first rounds with findings.

    skewed: ranks start late and get turns more rarely, at random, anew for every few rounds. schedule: "program",
    or a seed; by default the plan's seed where ranks are skewed. checks: track undefined data and races too.

    Raises ValueError for a skew without a seeded schedule.
    """
    vgpu.warm_up()
    if skewed and schedule == "program":
        raise ValueError('skewed ranks need a seeded schedule: leave schedule = "program" out')
    if schedule is None:
        schedule = plan.seed if skewed else "program"
    plan = settled(plan)
    ranks = VirtualRanks(plan, chains or build_chains(plan), checks=checks)
    rng = np.random.default_rng([plan.seed, 0])
    found: list[str] = []
    probes: list[tuple[str, Array]] = []
    handles: list[vgpu.GridHandle] = []
    start, number, exact = time.perf_counter(), 0, 0
    batches: set[int] = set()
    while number < plan.rounds and not found:
        flight = min(int(rng.integers(1, plan.in_flight + 1)), plan.rounds - number)
        skew = dict(enumerate((rng.random(plan.ranks) * MOST_SKEW).tolist())) if skewed else None
        rounds, handles = ranks.enqueue(number, flight)
        reports = ranks.gpu.synchronize(
            schedule if isinstance(schedule, str) else schedule + number, skew=skew
        )
        found += report_findings(handles, reports)
        for round_ in rounds:
            lines, compared = ranks.findings(round_, last=round_ is rounds[-1])
            found += lines
            exact += compared
            batches.add(round_.batch)
            probes.append((round_.name, ranks.probe(round_)))
        found += ranks.memory_findings(rounds[-1])
        number += flight
    if plan.engine != PAYLOAD and plan.consumer == "reduce":
        found += verdict.probe_findings(probes)
    seconds = time.perf_counter() - start
    return RanksResult(
        plan, "vgpu", number, exact, tuple(sorted(batches)), seconds, tuple(found), handles=tuple(handles)
    )


def settled(plan: Plan) -> Plan:
    """The plan with one round in flight where every round's partials are needed: AttnRes keeps a prefix, and partials
    that an engine computed are there only until the next round arms them again."""
    if plan.consumer == "attnres" and plan.engine != PAYLOAD:
        return replace(plan, in_flight=1)
    return plan


def report_findings(handles: Sequence[vgpu.GridHandle], reports: Sequence[vgpu.Report]) -> list[str]:
    """Findings of the virtual GPU, each with its kernel's line."""
    return [
        f"rank {handle.rank}, {handle.name}: {one_line(finding)}"
        for handle, report in zip(handles, reports, strict=True)
        for finding in report.findings
    ]
