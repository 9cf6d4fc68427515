"""What is measured: the programs of a bundle, and what a user would pick instead, behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from oproj_lib.bench import small_kernels
from oproj_lib.bench.measure import copies_needed
from oproj_lib.bundle import Bundle, Entry
from oproj_lib.delivery import SLOT
from oproj_lib.devices.cuda import Gpu
from oproj_lib.devices.publishing import Publisher, upload
from oproj_lib.floor import work
from oproj_lib.problem import CTAS, N, Problem

SOURCES = 2
"""Different x in turn, so that a projection that reads the x of the repetition before is found out."""


@dataclass
class Job:
    """One (K, M) on the GPU. x [M, K] is what projections read, sources what it is filled from; weights are equal
    copies [N, K] at different addresses; references are float64 [M, N], one per source."""

    gpu: Gpu
    problem: Problem
    x: Any
    sources: tuple[Any, ...]
    weights: tuple[Any, ...]
    references: tuple[Any, ...]

    @property
    def moved_bytes(self) -> int:
        """Bytes that one projection moves at least: weights, x, output."""
        return work(self.problem).bytes

    def weight(self, index: int) -> Any:
        """The weights of launch ``index``."""
        return self.weights[index % len(self.weights)]

    def use(self, source: int) -> None:
        """Fill x."""
        self.x.copy_(self.sources[source])


def make_job(gpu: Gpu, problem: Problem, seed: int = 1) -> Job:
    """Draw inputs, copy the weights often enough to be cold, and compute the references on the GPU."""
    x, weight = problem.inputs(seed)
    other, _ = problem.inputs(seed + 1)
    sources = (upload(x, gpu.tensors), upload(other, gpu.tensors))
    first = upload(weight, gpu.tensors)
    count = copies_needed(weight.nbytes, gpu.attribute("L2_CACHE_SIZE"))
    weights = (first, *(first.clone() for _ in range(count - 1)))
    transposed = first.double().t()
    references = tuple(source.double() @ transposed for source in sources)
    return Job(gpu, problem, sources[0].clone(), sources, weights, references)


class Candidate(Protocol):
    """A projection. pdl says whether it starts before its predecessor ends."""

    name: str
    settings: dict[str, int | str]
    pdl: bool
    projects: bool
    """False where nothing is computed: then only the chain means something."""

    def launch(self, index: int) -> None:
        """Project job.x with the weights of launch ``index``, on torch's current stream."""

    def output(self) -> Any:
        """The BF16 tensor [M, N] that the latest launch writes."""

    def close(self) -> None:
        """Give back what was loaded."""


class ProgramCandidate:
    """One of our kernels, from a bundle."""

    projects = True

    def __init__(self, bundle: Bundle, entry: Entry, job: Job) -> None:
        self.publisher = Publisher(bundle.program(entry), job.gpu)
        self.job = job
        self.name = entry.engine
        self.settings: dict[str, int | str] = {**entry.settings}
        self.pdl = self.publisher.program.pdl

    def launch(self, index: int) -> None:
        self.publisher.launch(self.job.x, self.job.weight(index), SLOT)

    def output(self) -> Any:
        return self.publisher.mailboxes[0][SLOT, : self.job.problem.batch]

    def close(self) -> None:
        self.publisher.close()


class EmptyCandidate:
    """A kernel of a projection's size that only waits and triggers: what a chain costs by itself."""

    name, pdl, projects = "empty kernel", True, False

    def __init__(self, job: Job) -> None:
        import torch

        self.job = job
        self.settings: dict[str, int | str] = {}
        self.function = job.gpu.load(small_kernels.EMPTY.encode(), "empty")
        shape = (job.problem.batch, N)
        self.nothing = torch.zeros(shape, dtype=torch.bfloat16, device=job.gpu.tensors)

    def launch(self, index: int) -> None:
        block = (small_kernels.EMPTY_BLOCK, 1, 1)
        self.function.launch((CTAS, 1, 1), block, (), stream=self.job.gpu.current_stream(), pdl=True)

    def output(self) -> Any:
        return self.nothing

    def close(self) -> None:
        self.function.unload()


def program_candidates(bundle: Bundle, job: Job) -> list[Candidate]:
    """The bundle's timed programs for this job."""
    wanted = (job.problem.k, job.problem.batch)
    return [
        ProgramCandidate(bundle, entry, job) for entry in bundle.timed() if (entry.k, entry.batch) == wanted
    ]


def timed_problems(bundle: Bundle) -> list[Problem]:
    """The (K, M) of a bundle's timed programs, each once."""
    sizes = {(entry.ranks, entry.batch) for entry in bundle.timed()}
    return [Problem(ranks, batch) for ranks, batch in sorted(sizes)]


def asked_for(
    there: Sequence[Problem], ks: Sequence[int], batches: Sequence[int] | None, what: str
) -> list[Problem]:
    """Those of the (K, M) of a bundle that were asked for; batches: None for all. Raises ValueError where there is
    none; what: a name for the error, "timed program"."""
    found = [p for p in there if p.k in ks and (batches is None or p.batch in batches)]
    if not found:
        have = ", ".join(f"K = {p.k} M = {p.batch}" for p in there)
        raise ValueError(f"no {what} for K in {list(ks)} and M in {batches}; the bundle has {have}")
    return found
