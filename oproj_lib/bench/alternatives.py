"""What a user would pick instead of our kernels: cuBLAS, cublasLt, torch.compile, a Triton split-K kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from oproj_lib.bench.candidates import Candidate, EmptyCandidate, Job
from oproj_lib.bench.consumers import MmThenAttnRes
from oproj_lib.bench.cublaslt import CublasLt
from oproj_lib.bench.measure import capture
from oproj_lib.bundle_recipes import CONSUMER_BLOCKS
from oproj_lib.problem import N

TUNING_REPLAYS = 5
BLAS = {"torch.mm": "cublas", "torch.mm, cublasLt": "cublaslt"}
"""Name -> what torch.backends.cuda.preferred_blas_library is set to."""


def out_tensor(job: Job) -> Any:
    """An uninitialised output [M, N]."""
    import torch

    return torch.empty((job.problem.batch, N), dtype=torch.bfloat16, device=job.gpu.tensors)


class _Alternative:
    pdl, projects = False, True

    def __init__(self, name: str, job: Job) -> None:
        self.name, self.job = name, job
        self.settings: dict[str, int | str] = {}
        self.out = out_tensor(job)

    def output(self) -> Any:
        return self.out

    def close(self) -> None:
        """Nothing to give back."""


class Mm(_Alternative):
    """torch.mm into a given tensor, through the library that torch calls by that name."""

    def launch(self, index: int) -> None:
        import torch

        library = torch.backends.cuda.preferred_blas_library
        before = library()
        library(BLAS[self.name])
        torch.mm(self.job.x, self.job.weight(index).t(), out=self.out)
        library(before)


class Compiled(_Alternative):
    """torch.compile, mode max-autotune without its own CUDA graphs: the measurement captures one itself."""

    def __init__(self, name: str, job: Job) -> None:
        super().__init__(name, job)
        import torch

        def project(x: Any, weight: Any) -> Any:
            return x @ weight.t()

        torch._dynamo.reset()
        self.project: Callable[..., Any] = torch.compile(
            project, mode="max-autotune-no-cudagraphs", dynamic=False
        )

    def launch(self, index: int) -> None:
        self.out = self.project(self.job.x, self.job.weight(index))


class BestOf(_Alternative):
    """The fastest of several ways, chosen by short cold measurements. choices: settings -> launch(x, weight,
    out)."""

    def __init__(
        self, name: str, job: Job, choices: Sequence[tuple[dict[str, int | str], Callable[..., None]]]
    ) -> None:
        super().__init__(name, job)
        if not choices:
            raise ValueError(f"{name} offers nothing for K = {job.problem.k}, M = {job.problem.batch}")
        times = [(self._time(call), number) for number, (_, call) in enumerate(choices)]
        settings, self.call = choices[min(times)[1]]
        self.settings = {**settings, "tried": len(choices)}

    def _time(self, call: Callable[..., None]) -> float:
        graph = capture(
            lambda index: call(self.job.x, self.job.weight(index), self.out), len(self.job.weights)
        )
        return min(graph.sample(TUNING_REPLAYS))

    def launch(self, index: int) -> None:
        self.call(self.job.x, self.job.weight(index), self.out)


def _cublaslt(name: str, job: Job) -> Candidate:
    library = CublasLt(job.gpu)
    return BestOf(name, job, library.choices(job.x, job.weights[0], out_tensor(job)))


def _triton(name: str, job: Job) -> Candidate:
    from oproj_lib.bench import triton_split_k

    return BestOf(name, job, triton_split_k.choices(job.problem, job.gpu.tensors))


MM_ATTNRES = "torch.mm, then compiled AttnRes"
MAKERS: dict[str, Callable[[str, Job], Candidate]] = {
    "torch.mm": Mm,
    "torch.mm, cublasLt": Mm,
    "cublasLt, best heuristic": _cublaslt,
    "Triton split-K": _triton,
    "torch.compile": Compiled,
    MM_ATTNRES: lambda name, job: MmThenAttnRes(name, job, CONSUMER_BLOCKS),
    "empty kernel": lambda name, job: EmptyCandidate(job),
}
SHORT = {
    "mm": "torch.mm",
    "mm-lt": "torch.mm, cublasLt",
    "cublaslt": "cublasLt, best heuristic",
    "triton": "Triton split-K",
    "compile": "torch.compile",
    "mm-attnres": MM_ATTNRES,
    "empty": "empty kernel",
}
"""What the command line calls them."""
PROJECTIONS = ("mm", "mm-lt", "cublaslt", "triton", "compile", "empty")
"""For a chain whose consumer takes a projection: also "reduce", since the sum of one rank is its projection."""
WITH_ATTNRES = ("mm-attnres", "empty")
SLOW = ("compile",)
"""Left out unless asked for: autotuning takes 3 to 10 seconds per size on 16 cores."""


def offered(consumer: str) -> tuple[str, ...]:
    """What can stand beside our programs in a chain with this consumer."""
    return WITH_ATTNRES if consumer == "attnres" else PROJECTIONS


def chosen(text: str | None, consumer: str = "next") -> tuple[str, ...]:
    """Names from a comma-separated list, "all", "none", or None for all that are quick. Raises ValueError for others,
    and for one that does not belong to the consumer."""
    there = offered(consumer)
    if text == "none":
        return ()
    quick = [short for short in there if short not in SLOW]
    shorts = quick if text is None else list(there) if text == "all" else text.split(",")
    for short in shorts:
        if short not in SHORT:
            raise ValueError(f"alternative {short!r} is unknown; choose from {', '.join(there)}, all or none")
        if short not in there:
            raise ValueError(
                f"alternative {short!r} has no place in a chain with the consumer {consumer!r}; choose from "
                f"{', '.join(there)}, all or none"
            )
    return tuple(SHORT[short] for short in shorts)


def make(names: Sequence[str], job: Job) -> list[Candidate]:
    """The named alternatives for one job."""
    return [MAKERS[name](name, job) for name in names]
