"""All ranks on one GPU, in one process: the kernels of a real exchange without a second GPU.

One stream holds stage after stage of a round: the producers of all ranks, then their second shots, then their
consumers. A GPU of 132 SMs cannot hold the 112 CTAs of every rank at once, and a CTA that polls keeps its SM; in
this order whoever polls waits only for grids that started before it, so nobody starves a producer. PDL stays on:
the edges between ranks are stricter than those of separate GPUs, never weaker. What this cannot show is ranks that
run at different speeds; for that there are virtual ranks and torchrun.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from oproj_lib.devices.cuda import CudaKernel, Gpu
from oproj_lib.devices.publishing import download
from oproj_lib.problem import Array
from oproj_lib.ranks import verdict
from oproj_lib.ranks.gpu_rank import GpuRank, capture, load_kernels, new_mailbox, table_of
from oproj_lib.ranks.inputs import Inputs
from oproj_lib.ranks.plan import PAYLOAD, Plan
from oproj_lib.ranks.programs import Chain, attnres_threads, build_chains, load
from oproj_lib.ranks.result import RanksResult

BLOCK = 20
"""Rounds that are enqueued before the host waits and judges them."""


def check_local(plan: Plan) -> None:
    """Raises ValueError for a plan that one GPU cannot run."""
    if plan.transport != "unicast":
        raise ValueError("--multicast needs several GPUs: leave it out with --local")
    if plan.fused and plan.ranks > 1:
        raise ValueError(
            f"fused = True with {plan.ranks} ranks on one GPU: each has 112 CTAs that poll until the others have "
            f"published, {plan.ranks} * 112 = {112 * plan.ranks} CTAs at once, and a GPU has 132 (H200) or 148 (B200) "
            "SMs; use the split form, --ranks 1, or one GPU per rank"
        )


def run_local(
    plan: Plan,
    *,
    gpu: Gpu | int = 0,
    programs: Path | str | None = None,
    record: Callable[[Callable[[], None]], Callable[[], None]] = capture,
) -> RanksResult:
    """Runs a plan's rounds on one GPU, each a CUDA graph; stops after the first block of rounds with findings.

    programs: a folder from ``programs.save``; None compiles them. record: makes a replayable function of launches.

    Raises ValueError for a plan that one GPU cannot run or that does not fit the folder, before anything is
    launched; CudaError when the GPU refuses or a kernel fails.
    """
    check_local(plan)
    chains = build_chains(plan) if programs is None else load(plan, programs)
    device = gpu if isinstance(gpu, Gpu) else Gpu(gpu)
    run = LocalRanks(plan, chains, device, record)
    start, number = time.perf_counter(), 0
    found: list[str] = []
    while number < plan.rounds and not found:
        count = min(BLOCK, plan.rounds - number)
        found += run.block(number, count)
        number += count
    if not found:
        found += run.final_findings()
    batches = tuple(sorted({plan.batch(i) for i in range(number)}))
    return RanksResult(
        plan, device.name, number, run.exact_rounds, batches, time.perf_counter() - start, tuple(found)
    )


class LocalRanks:
    """R ranks' memory on one GPU, and a graph per number of tokens."""

    def __init__(
        self,
        plan: Plan,
        chains: dict[int, Chain],
        gpu: Gpu,
        record: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        self.plan, self.gpu, self.inputs = plan, gpu, Inputs(plan)
        self.attnres = None
        if plan.consumer == "attnres":
            self.attnres = verdict.AttnResChecker(plan, attnres_threads(plan))
        first_shape, result_shape = plan.mailbox_shapes
        firsts = [new_mailbox(first_shape, gpu.tensors) for _ in range(plan.ranks)]
        results: list[Any] = [None] * plan.ranks
        if result_shape is not None:
            results = [new_mailbox(result_shape, gpu.tensors) for _ in range(plan.ranks)]
        first_mc = table_of([box.data_ptr() for box in firsts], gpu.tensors)
        result_mc = table_of([box.data_ptr() for box in results], gpu.tensors) if result_shape else None
        self.ranks = [
            GpuRank(plan, rank, gpu.tensors, self.inputs, boxes, (first_mc, result_mc), self.attnres)
            for rank, boxes in enumerate(zip(firsts, results, strict=True))
        ]
        kernels = load_kernels(gpu, chains)
        self.gpu.synchronize("setting up the ranks")
        self.rounds = {batch: record(self._launcher(chain)) for batch, chain in kernels.items()}
        self.probes: list[tuple[str, Array]] = []
        self.exact_rounds = 0

    def _launcher(self, chain: list[CudaKernel]) -> Callable[[], None]:
        def launch() -> None:
            for kernel in chain:  # stage by stage, see the module
                for rank in self.ranks:
                    rank.launch(kernel)

        return launch

    def block(self, first: int, count: int) -> list[str]:
        """Enqueue rounds ``first`` .. and judge them: findings."""
        made = []
        numbers = range(first, first + count)
        inputs = [rank.upload_inputs(numbers) for rank in self.ranks]
        for number in numbers:
            for rank in self.ranks:
                rank.set_inputs(inputs[rank.rank][number])
            self.rounds[self.plan.batch(number)]()
            made.append(([r.out_of(number) for r in self.ranks], [r.published(number) for r in self.ranks]))
        self.gpu.synchronize(f"rounds {first} to {first + count - 1}")
        found = []
        for number, (outs, views) in enumerate(made, first):
            found += self.findings(
                number, [download(out) for out in outs], [download(view) for view in views]
            )
        for rank in self.ranks:
            found += rank.memory_findings(first + count - 1)
            if self.attnres is not None:
                where = f"after round {first + count - 1}, rank {rank.rank}"
                found += self.attnres.prefix_findings(where, rank.prefix())
        return found

    def findings(self, number: int, outs: list[Array], views: list[Array]) -> list[str]:
        """Findings of one round. views: what each rank found in its first mailbox, [R, M, columns]."""
        name = f"round {number} (M = {self.plan.batch(number)})"
        found = verdict.rank_findings(name, outs)
        published = np.concatenate(views, axis=2) if self.plan.twoshot else views[0]
        if not self.plan.twoshot:
            for rank, view in enumerate(views):
                if not verdict.same_bits(
                    view.reshape(-1, view.shape[-1]), views[0].reshape(-1, view.shape[-1])
                ):
                    found.append(f"{name}: rank {rank} received other partial sums than rank 0")
        found += published_findings(name, self.inputs, number, published)
        self.exact_rounds += 1
        if self.attnres is not None:
            return found + self.attnres.findings(name, outs[0], published)
        found += verdict.sum_findings(name, outs[0], published)
        exact = np.stack([download64(rank.exact(number)) for rank in self.ranks])
        found += verdict.float64_findings(name, outs[0], exact, k=verdict.sum_length(self.plan))
        self.probes.append((name, outs[0][-1].copy()))
        return found

    def final_findings(self) -> list[str]:
        """What can be said after all rounds."""
        if self.plan.engine == PAYLOAD or not self.probes:
            return []
        return verdict.probe_findings(self.probes)


def published_findings(name: str, inputs: Inputs, number: int, published: Array) -> list[str]:
    """Given partial sums must arrive bit for bit."""
    found = []
    for rank in range(inputs.plan.ranks):
        expected = inputs.published(number, rank)
        if expected is not None and not verdict.same_bits(published[rank], expected):
            found.append(
                f"{name}: partial sums of rank {rank}: {verdict.difference(published[rank], expected)}"
            )
    return found


def download64(tensor: Any) -> Array:
    """A float64 tensor as a NumPy array."""
    array: Array = tensor.cpu().numpy()
    return array
