"""`bench --device cuda`: every timed program of a bundle beside the alternatives, alone and in the chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oproj_lib.bench import alternatives
from oproj_lib.bench.candidates import (
    SOURCES,
    Candidate,
    Job,
    asked_for,
    make_job,
    program_candidates,
    timed_problems,
)
from oproj_lib.bench.chain import CONSUMERS, PREDECESSORS, Chain
from oproj_lib.bench.consumers import EXCHANGES, Judged, exchange_candidates, problems_in
from oproj_lib.bench.measure import Ceilings, Graph, capture, check_output, summarise
from oproj_lib.bench.results import JobResult, Row
from oproj_lib.bundle import Bundle
from oproj_lib.devices.cuda import Gpu
from oproj_lib.problem import TOLERANCE, Problem

POISON = float("nan")


@dataclass(frozen=True)
class Plan:
    """How often: passes over all candidates, and replays per pass and graph.

    carveout: percent of the L1 cache that the kernels around the projection leave to shared memory, None for the
    driver's choice. consumer, predecessor: what stands behind and before the projection in the chain, see `chain`.

    Raises ValueError for fewer than one, or an unknown consumer or predecessor.
    """

    rounds: int = 3
    replays: int = 30
    carveout: int | None = 100
    consumer: str = CONSUMERS[0]
    predecessor: str = PREDECESSORS[0]

    def __post_init__(self) -> None:
        for name in ("rounds", "replays"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: at least 1")
        if self.consumer not in CONSUMERS:
            raise ValueError(f"consumer = {self.consumer!r}: choose from {CONSUMERS}")
        if self.predecessor not in PREDECESSORS:
            raise ValueError(f"predecessor = {self.predecessor!r}: choose from {PREDECESSORS}")


@dataclass
class Timed:
    """A candidate with its graphs, where their outputs land, and its samples by pass."""

    candidate: Candidate
    alone: Graph | None
    alone_out: Any
    chain: Graph
    alone_rounds: list[list[float]]
    chain_rounds: list[list[float]]


def measure_job(
    gpu: Gpu, bundle: Bundle, problem: Problem, names: Sequence[str], ceilings: Ceilings, plan: Plan
) -> JobResult:
    """Measure one (K, M).

    names: of alternatives; one that cannot be made or captured is reported as a failure. Raises
    ImpossibleTimeError or WrongOutputError for a result that cannot be, CudaError when the GPU refuses.
    """
    job = make_job(gpu, problem)
    chain = Chain(job, carveout=plan.carveout, consumer=plan.consumer, predecessor=plan.predecessor)
    repetitions = len(job.weights) + len(job.weights) % 2
    timed = [prepare(candidate, chain, repetitions) for candidate in own_candidates(bundle, job, plan)]
    failures: dict[str, str] = {}
    for name in names:
        try:
            timed.append(prepare(alternatives.MAKERS[name](name, job), chain, repetitions))
        except (
            Exception
        ) as error:  # reported, and the exit code says so: the others are still worth measuring
            failures[name] = f"{type(error).__name__}: {error}"
    baseline = chain.alone(repetitions)
    before: list[list[float]] = []
    for number in range(plan.rounds):
        before.append(baseline.sample(plan.replays))
        for one in (
            timed[number % len(timed) :] + timed[: number % len(timed)]
        ):  # another first one every pass
            if one.alone:
                one.alone_rounds.append(one.alone.sample(plan.replays))
            one.chain_rounds.append(one.chain.sample(plan.replays))
    predecessor = summarise(before)
    rows = tuple(row_of(one, chain, repetitions, predecessor.median_us, ceilings) for one in timed)
    loaded = [one.candidate for one in timed]
    timed.clear()  # graphs go before the modules that they launch from
    del baseline
    gpu.synchronize("finishing a size")
    for candidate in loaded:
        candidate.close()
    chain.close()
    return JobResult(problem.k, problem.batch, len(job.weights), predecessor, rows, failures)


def own_candidates(bundle: Bundle, job: Job, plan: Plan) -> Sequence[Candidate]:
    """What the bundle has for a job: projections, or projections with the plan's consumer."""
    if plan.consumer in EXCHANGES:
        return exchange_candidates(bundle, job, plan.consumer, plan.carveout)
    return program_candidates(bundle, job)


def problems(
    bundle: Bundle, ks: Sequence[int], batches: Sequence[int] | None, consumer: str
) -> list[Problem]:
    """The sizes that a bundle has for a consumer and that were asked for. Raises ValueError where there is none,
    FileNotFoundError where the bundle has no programs with the consumer."""
    if consumer in EXCHANGES:
        return asked_for(problems_in(bundle, consumer), ks, batches, f"chain with {consumer}")
    return asked_for(timed_problems(bundle), ks, batches, "timed program")


def prepare(candidate: Candidate, chain: Chain, repetitions: int) -> Timed:
    """Capture both graphs."""
    chain.job.use(0)
    alone = capture(candidate.launch, 2 * repetitions) if candidate.projects else None
    alone_out = candidate.output()
    return Timed(candidate, alone, alone_out, chain.around(candidate, repetitions), [], [])


def row_of(one: Timed, chain: Chain, repetitions: int, predecessor_us: float, ceilings: Ceilings) -> Row:
    """Check what was timed, hold it against the hardware, and sum it up."""
    job: Job = chain.job
    candidate = one.candidate
    what = f"{candidate.name} {candidate.settings}, K = {job.problem.k}, M = {job.problem.batch}"
    error = check(one, chain, repetitions, what) if candidate.projects else None
    alone = summarise(one.alone_rounds) if one.alone else None
    if alone:
        ceilings.check(what, alone.median_us, job.moved_bytes)
    return Row(
        k=job.problem.k,
        batch=job.problem.batch,
        name=candidate.name,
        settings=dict(candidate.settings),
        pdl=candidate.pdl,
        alone=alone,
        exposed=summarise(one.chain_rounds).minus(predecessor_us),
        error=error,
        moved_bytes=job.moved_bytes,
    )


def check(one: Timed, chain: Chain, repetitions: int, what: str) -> float:
    """Poison, replay each graph once more, compare with float64: the larger error of the two."""
    job = chain.job
    assert one.alone is not None
    if isinstance(one.candidate, Judged):
        alone = replay_and_judge(one.candidate, one.alone, [0] * one.alone.launches, what)
        sources = [index % SOURCES for index in range(repetitions)]
        return max(alone, replay_and_judge(one.candidate, one.chain, sources, f"in the chain, {what}"))
    job.use(0)
    one.alone_out.fill_(POISON)
    one.alone.graph.replay()
    job.gpu.synchronize(f"replaying {what}")
    alone = check_output(what, one.alone_out, job.references[0], TOLERANCE)
    seen = chain.seen if chain.copies else one.candidate.output()
    seen.fill_(POISON)
    one.candidate.output().fill_(POISON)
    one.chain.graph.replay()
    job.gpu.synchronize(f"replaying the chain of {what}")
    return max(alone, check_output(f"in the chain, {what}", seen, chain.expected(repetitions), TOLERANCE))


def replay_and_judge(candidate: Judged, graph: Graph, sources: Sequence[int], what: str) -> float:
    """One replay of a graph whose repetitions project ``sources``; the relative error."""
    candidate.arm(sources)
    candidate.job.gpu.synchronize(f"arming {what}")
    graph.graph.replay()
    candidate.job.gpu.synchronize(f"replaying {what}")
    return candidate.judge(what)


def measure_all(
    gpu: Gpu,
    bundle: Bundle,
    problems: Sequence[Problem],
    names: Sequence[str],
    ceilings: Ceilings,
    plan: Plan,
    on_job: Callable[[tuple[JobResult, ...]], None],
) -> tuple[JobResult, ...]:
    """``measure_job`` for each problem; on_job gets all results so far after each, so that a later error loses
    none."""
    done: tuple[JobResult, ...] = ()
    for problem in problems:
        done = (*done, measure_job(gpu, bundle, problem, names, ceilings, plan))
        on_job(done)
    return done


def failures(jobs: Sequence[JobResult]) -> list[str]:
    """What was not measured, one line each."""
    return [
        f"K = {job.k}, M = {job.batch}: {name}: {why}" for job in jobs for name, why in job.failures.items()
    ]
