"""The chain with a real consumer: predecessor -> projection -> mailbox -> MailboxReduce or AttnRes, on one rank.

    bundle/consumers/<label>/    the programs of one chain, as `ranks.programs.save` writes them, and its plan

Split: the consumer is the projection's programmatic dependent and polls while the projection runs. Fused: one kernel.
Either way generations are counted on the device and the mailbox is armed again, so one graph holds many repetitions.
Programs, memory and verdicts are those of `ranks`; a plan of one rank has R = 1 slots per generation.

What is timed is checked: partial sums and results against float64, the bits of the sum, of the new prefix after
every repetition of the graph, and of the armed mailbox.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oproj_lib import attnres_reference
from oproj_lib.bench.candidates import Job
from oproj_lib.bench.measure import WrongOutputError, check_output
from oproj_lib.bundle import Bundle
from oproj_lib.bundle_recipes import consumer_plans
from oproj_lib.devices.publishing import download, upload
from oproj_lib.kernels.attnres_configuration import AttnResConfiguration
from oproj_lib.layouts import mailbox as layout
from oproj_lib.layouts.mailbox import Role
from oproj_lib.problem import HIDDEN_K, TOLERANCE, N, Problem
from oproj_lib.ranks import programs, verdict
from oproj_lib.ranks.gpu_rank import CONSTANTS, first_rows, new_mailbox, new_state, table_of
from oproj_lib.ranks.memory import bind
from oproj_lib.ranks.plan import CONSUMERS, Plan

FOLDER = "consumers"
EXCHANGES = CONSUMERS
"""Consumers that have programs of their own in a bundle."""
POISON = float("nan")
SETTINGS = {"producer": ("staged_blocks", "rows", "group_tiles"), "direct": ("staged_blocks", "rows")}
"""By engine, what a row says about its build, as the rows of a projection alone do."""
SEED = 1


# ---- programs in a bundle ----


def label(plan: Plan) -> str:
    """`attnres-direct-k1536-m8-split`, a folder's name."""
    return f"{plan.consumer}-{plan.engine}-k{plan.k}-m{plan.tokens}-{form(plan)}"


def form(plan: Plan) -> str:
    return "fused" if plan.fused else "split"


def build_consumers(
    target: str,
    directory: Path | str,
    *,
    plans: Sequence[Plan] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> None:
    """Compile the chains of ``plans`` (all of ``consumer_plans(target)``) into a bundle's folder.

    Raises ValueError for an unknown target, RuntimeError where CuTe DSL is missing.
    """
    chosen = consumer_plans(target) if plans is None else plans
    for number, plan in enumerate(chosen, 1):
        programs.save(plan, Path(directory) / FOLDER / label(plan))
        progress(f"{number} of {len(chosen)}: {label(plan)}")


def plans_in(bundle: Bundle, consumer: str) -> list[Plan]:
    """The plans of a bundle's chains with this consumer: engine by engine, split before fused.

    Raises FileNotFoundError where there are none, with the command that makes them.
    """
    found = [
        programs.plan_of(index.parent) for index in bundle.directory.glob(f"{FOLDER}/*/{programs.INDEX}")
    ]
    found = [plan for plan in found if plan.consumer == consumer]
    if not found:
        raise FileNotFoundError(
            f"{bundle.directory} has no programs with the consumer {consumer!r}: add them with `python -m oproj_lib "
            f"build --part consumers --target {bundle.target} --out {bundle.directory}`, which needs CuTe DSL, no GPU"
        )
    engines = tuple(dict.fromkeys(plan.engine for plan in consumer_plans(bundle.target)))
    return sorted(found, key=lambda plan: (plan.k, plan.tokens, engines.index(plan.engine), plan.fused))


def problems_in(bundle: Bundle, consumer: str) -> list[Problem]:
    """The sizes of ``plans_in``, each once."""
    sizes = {(HIDDEN_K // plan.k, plan.tokens) for plan in plans_in(bundle, consumer)}
    return [Problem(ranks, batch) for ranks, batch in sorted(sizes)]


def exchange_candidates(
    bundle: Bundle, job: Job, consumer: str, carveout: int | None
) -> list[ExchangeCandidate]:
    """The bundle's chains with this consumer for one job."""
    size = (job.problem.k, job.problem.batch)
    plans = [plan for plan in plans_in(bundle, consumer) if (plan.k, plan.tokens) == size]
    kinds = {"reduce": ReduceCandidate, "attnres": AttnResCandidate}
    return [kinds[consumer](bundle.directory / FOLDER / label(plan), plan, job, carveout) for plan in plans]


# ---- candidates ----


class Judged(ABC):
    """A candidate that says itself whether a replay was right."""

    job: Job

    @abstractmethod
    def arm(self, sources: Sequence[int]) -> None:
        """Poison what the next replay writes, and fill x. sources: which x each of its repetitions will project."""

    @abstractmethod
    def judge(self, what: str) -> float:
        """The relative error after that replay. Raises WrongOutputError with what is wrong."""


class ExchangeCandidate(Judged):
    """One of our projections and its consumer, from a bundle.

    carveout: of the consumer, one of the kernels around the projection, see `bench.chain`.
    """

    pdl, projects = True, True

    def __init__(self, folder: Path, plan: Plan, job: Job, carveout: int | None) -> None:
        import torch

        device, gpu = job.gpu.tensors, job.gpu
        (chain,) = programs.load(plan, folder).values()
        self.plan, self.job = plan, job
        self.kernels = [
            gpu.program(program, carveout=carveout if place else None) for place, program in enumerate(chain)
        ]
        self.name = f"{plan.engine}, {form(plan)}"
        names = SETTINGS.get(plan.engine, ())
        self.settings: dict[str, int | str] = {name: chain[0].config[name] for name in names}
        shape, _ = plan.mailbox_shapes
        self.mailbox, self.state = new_mailbox(shape, device), new_state(device)
        self.out = torch.empty((plan.tokens, N), dtype=torch.bfloat16, device=device)
        table = table_of([self.mailbox.data_ptr()], device)
        self.memory: dict[str, Any] = {
            "rank": 0, "first": self.mailbox, "first_mc": table, "first_state": self.state, "result": self.mailbox,
            "result_mc": table, "result_state": self.state, "out": self.out, "x": job.x,
        }  # fmt: skip

    def launch(self, index: int) -> None:
        """Project job.x with the weights of launch ``index``, and consume, on torch's current stream."""
        self.memory["weight"] = self.job.weight(index)
        for kernel in self.kernels:
            kernel(*bind(kernel.program, self.memory, first_rows))

    def output(self) -> Any:
        return self.out

    def close(self) -> None:
        for kernel in self.kernels:
            kernel.function.unload()

    def published(self) -> tuple[int, Any]:
        """(generation, partial sums [M, 7168]) of the latest call, whose slot is not armed again yet."""
        following = int(self.state[Role.CONSUME, 0])
        generation = layout.previous_generation(following)
        return generation, self.mailbox[layout.slot(generation, 0, 1)]

    def memory_findings(self, what: str, generation: int) -> list[str]:
        """What is wrong with the mailbox: all must be armed but for the latest call's slot."""
        words = download(self.mailbox).view(np.uint32)
        return verdict.memory_findings(f"{what}, mailbox", words, generation, self.plan.tokens)


class ReduceCandidate(ExchangeCandidate):
    """With `MailboxReduce`: the sum of one rank is its partial sum, bit for bit."""

    def arm(self, sources: Sequence[int]) -> None:
        self.job.use(sources[0])  # back to back, nothing else fills x
        self.out.fill_(POISON)
        self.last = sources[-1]

    def judge(self, what: str) -> float:
        reference = self.job.references[self.last]
        error = check_output(what, self.out, reference, TOLERANCE)
        generation, published = self.published()
        out = download(self.out)
        exact = reference.cpu().numpy()[None]
        raise_findings(
            [
                *verdict.sum_findings(what, out, download(published)[None]),
                *verdict.float64_findings(what, out, exact, k=self.plan.k),
                *self.memory_findings(what, generation),
            ]
        )
        return error


class PrefixFollower(Judged):
    """With AttnRes: what all candidates with it share. prefix grows from call to call, so a verdict follows it through
    every repetition of a replay, in FP32 and rounded as the formula says.

    exactly: whether every element must be within its bound (ours), or the whole within the tolerance.
    """

    exactly = True

    def set_attnres(self, blocks: int) -> None:
        """Draw AttnRes' inputs for one rank and the job's tokens, and put them on the GPU."""
        device = self.job.gpu.tensors
        self.config = AttnResConfiguration(blocks, 1, self.job.problem.batch)
        self.inputs = attnres_reference.make_inputs(self.config, SEED)
        self.arrays = {name: upload(getattr(self.inputs, name), device) for name in ("prefix", *CONSTANTS)}
        self.arrays["prefix"] = self.arrays["prefix"].clone()  # written: on a CPU, uploading copies nothing

    @abstractmethod
    def launch(self, index: int) -> None:
        """Project and consume."""

    @abstractmethod
    def output(self) -> Any:
        """BF16 [M, 7168]."""

    @abstractmethod
    def delta(self) -> Any:
        """The projection of the latest call, BF16 [M, 7168]."""

    def memory_of(self, what: str) -> list[str]:
        """Findings about memory beside prefix and out."""
        del what
        return []

    def arm(self, sources: Sequence[int]) -> None:
        """Projects each source once, and checks it, to know what the replay adds to prefix."""
        self.sources, self.deltas = list(sources), {}
        for source in sorted(set(sources)):
            self.job.use(source)
            self.launch(0)
            self.job.gpu.synchronize("projecting once for the check")
            self.deltas[source] = self.delta().clone()
            check_output(
                f"projection of x {source}", self.deltas[source], self.job.references[source], TOLERANCE
            )
        self.job.use(sources[0])  # back to back, nothing else fills x
        self.arrays["prefix"].copy_(upload(self.inputs.prefix, self.job.gpu.tensors))
        self.output().fill_(POISON)

    def judge(self, what: str) -> float:
        *earlier, last = self.sources
        before = upload(self.inputs.prefix, self.job.gpu.tensors)
        for source in earlier:
            before = (before.float() + self.deltas[source].float()).bfloat16()
        inputs = replace(self.inputs, slots=download(self.deltas[last])[None], prefix=download(before))
        prefix, out = download(self.arrays["prefix"]), download(self.output())
        expected = attnres_reference.reference(self.config, inputs)
        error = float(np.linalg.norm(out.astype(np.float64) - expected.out) / np.linalg.norm(expected.out))
        found = self.memory_of(what)
        if not verdict.same_bits(download(self.delta()), download(self.deltas[last])):
            found.append(f"{what}: the projection is not that of x {last}, which was checked")
        if self.exactly:
            found += [
                f"{what}: {line}" for line in attnres_reference.findings(self.config, inputs, prefix, out)
            ]
        else:
            if not verdict.same_bits(prefix, expected.prefix):
                found.append(f"{what}: prefix: {verdict.difference(prefix, expected.prefix)}")
            if not error < TOLERANCE:
                found.append(f"{what}: relative error {error:.3e} against float64, limit {TOLERANCE:.1e}")
        raise_findings(found)
        return error


class AttnResCandidate(ExchangeCandidate, PrefixFollower):
    """With `AttnRes` over ``plan.blocks`` earlier blocks."""

    def __init__(self, folder: Path, plan: Plan, job: Job, carveout: int | None) -> None:
        ExchangeCandidate.__init__(self, folder, plan, job, carveout)
        self.set_attnres(plan.blocks)
        self.config = replace(self.config, threads=programs.attnres_threads(plan))
        self.settings["blocks"] = plan.blocks
        self.memory.update(self.arrays)

    def delta(self) -> Any:
        return self.published()[1]

    def memory_of(self, what: str) -> list[str]:
        return self.memory_findings(what, self.published()[0])


class MmThenAttnRes(PrefixFollower):
    """What a user would write instead: torch.mm, then the formula in torch operations, through torch.compile."""

    pdl, projects, exactly = False, True, False

    def __init__(self, name: str, job: Job, blocks: int) -> None:
        import torch

        self.name, self.job = name, job
        self.settings: dict[str, int | str] = {"blocks": blocks}
        self.set_attnres(blocks)
        shape = (job.problem.batch, N)
        self.product, self.out = (
            torch.empty(shape, dtype=torch.bfloat16, device=job.gpu.tensors) for _ in range(2)
        )
        # Without the option intermediate BF16 values stay in FP32, among them the new prefix that is scored: another
        # formula, whose out was seen 3.7e-3 away from this one's.
        self.consume: Callable[..., None] = torch.compile(
            attnres_formula, dynamic=False, options={"emulate_precision_casts": True}
        )

    def launch(self, index: int) -> None:
        import torch

        torch.mm(self.job.x, self.job.weight(index).t(), out=self.product)
        arrays = (self.arrays[name] for name in ("prefix", *CONSTANTS))
        self.consume(self.product, *arrays, self.out, self.config.eps, self.config.out_eps)

    def output(self) -> Any:
        return self.out

    def delta(self) -> Any:
        return self.product

    def close(self) -> None:
        """Nothing to give back."""


def attnres_formula(
    delta: Any,
    prefix: Any,
    blocks: Any,
    norm: Any,
    qk: Any,
    out_weight: Any,
    out: Any,
    eps: float,
    out_eps: float,
) -> None:
    """The formula of `kernels.attnres` in torch operations; stores the new prefix and out. Shapes as there."""
    import torch

    new = (prefix.float() + delta.float()).to(torch.bfloat16)
    prefix.copy_(new)
    values = torch.cat([blocks.float(), new.float()[:, None]], dim=1)
    weight = norm.float() * qk.float()
    scores = (values * weight).sum(-1) * torch.rsqrt(values.square().mean(-1) + eps)
    mix = (torch.softmax(scores, dim=-1)[:, :, None] * values).sum(1)
    scale = torch.rsqrt(mix.square().mean(-1, keepdim=True) + out_eps)
    out.copy_((mix * scale * out_weight.float()).to(torch.bfloat16))


def raise_findings(found: Sequence[str]) -> None:
    """Raises WrongOutputError with all of them."""
    if found:
        raise WrongOutputError("; ".join(found))
