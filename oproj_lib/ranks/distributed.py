"""One process per GPU, started by torchrun: mailboxes in symmetric memory, a CUDA graph per number of tokens.

    torchrun --nproc-per-node 2 -m oproj_lib ranks --device cuda --rounds 200
    torchrun --nproc-per-node 2 -m oproj_lib ranks --device cuda --suite folder

A suite is one plan after the other in the same processes. Order of events, on every rank:

    1. programs: compiled, or read from folders; arguments checked        an error here ends all ranks
    2. the ranks find each other                                          one that is missing is named (``world``)
    then for every plan
    3. agreement on plan and programs, through torchrun's store           differences: an error, nothing launched
    4. memory: torch.distributed._symmetric_memory, peers' addresses
    5. every `heartbeat` rounds: agreement on their numbers of tokens, replay, wait with a timeout, hash exchange

A plan with findings does not keep the next one from running. A rank that fails or waits too long prints who is
missing and leaves through ``agreement.end_process``; the others see it in the store within their own timeout.
Multicast addresses are used only on request, and torch is told not to create any otherwise
(TORCH_SYMM_MEM_DISABLE_MULTICAST, NCCL_NVLS_ENABLE).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import numpy as np

from oproj_lib.devices.cuda import Gpu
from oproj_lib.devices.publishing import download
from oproj_lib.problem import Array
from oproj_lib.ranks import verdict
from oproj_lib.ranks.agreement import Agreement, Disagreement, RankLostError, Watchdog, end_process
from oproj_lib.ranks.gpu_rank import GpuRank, capture, digest, load_kernels, new_mailbox, table_of
from oproj_lib.ranks.inputs import Inputs
from oproj_lib.ranks.local import download64, published_findings
from oproj_lib.ranks.plan import PAYLOAD, Plan
from oproj_lib.ranks.programs import Chain, Task, attnres_threads
from oproj_lib.ranks.result import RanksResult
from oproj_lib.ranks.world import World, join, leave, place_of

JUDGES = 16
"""Most threads of a process that judge rounds; NumPy lets them run at the same time."""


def check_heartbeat(heartbeat: int) -> int:
    """``heartbeat`` itself. Raises ValueError unless it is a positive number of rounds."""
    if heartbeat < 1:
        raise ValueError(f"heartbeat = {heartbeat}: rounds between two checks, at least 1")
    return heartbeat


def run_distributed(
    tasks: Sequence[Task],
    *,
    timeout: float = 60.0,
    heartbeat: int = 20,
    report: Callable[[RanksResult], object] = lambda result: None,
) -> list[RanksResult]:
    """Runs this process's rank of every task, one after the other; ``report`` gets each result as soon as it is there.

    Does not return where a rank is lost after the first launch. Raises ValueError before anything is launched, for a
    plan or folder that does not fit, and on every rank where the ranks' plans differ or a rank is missing; CudaError
    where there is no GPU.
    """
    import torch.distributed as dist

    place = place_of(os.environ)
    for task in tasks:
        task.plan.check_rank(place.rank)
    check_heartbeat(heartbeat)
    multicast = {task.plan.transport == "multicast" for task in tasks}
    if len(multicast) != 1:
        raise ValueError("a suite has one transport: multicast or unicast, not both")
    loaded = [(task, task.chains()) for task in tasks]
    try:
        world = join(place, os.environ, timeout, multicast=multicast.pop())
    except RankLostError as error:
        raise_error(error)
    results, gpu = [], Gpu(place.local_rank)
    try:
        for number, (task, chains) in enumerate(loaded):
            result = run_task(world, f"task {number}", task.plan, chains, gpu, heartbeat)
            results.append(replace(result, name=task.name))
            report(results[-1])
    finally:
        leave(world)
    dist.destroy_process_group()
    return results


def run_task(
    world: World, topic: str, plan: Plan, chains: Mapping[int, Chain], gpu: Gpu, heartbeat: int
) -> RanksResult:
    """One plan. Raises and ends as ``run_distributed``."""
    agreement = world.agreement(topic)
    try:
        agree(agreement, plan, chains)
        run = DistributedRank(plan, chains, gpu, agreement, world.group)
    except (Disagreement, RankLostError) as error:
        raise_error(error)
    except Exception as error:
        agreement.fail(f"{type(error).__name__}: {error}")
        raise
    try:
        with Watchdog(agreement):
            result = run.rounds(heartbeat)
            agreement.exchange("end", "all rounds")
    except BaseException as error:  # a poller may run: no destructor must
        end_process(agreement, error)
    return result


def raise_error(error: Exception) -> NoReturn:
    """As an error of the command line: one line, exit code 2."""
    raise ValueError(str(error)) from error


def finish(agreement: Agreement, doing: str) -> None:
    """Wait for the stream, at most the timeout. Raises RankLostError with the ranks that are not there yet."""
    import torch

    event = torch.cuda.Event()
    event.record()
    topic = f"finished {doing}"

    def late() -> list[int]:
        return [rank for rank in agreement.missing(topic) if rank != agreement.rank]

    agreement.wait(event.query, f"its GPU, {doing}", late)
    agreement.exchange(topic, "done")


def agree(agreement: Agreement, plan: Plan, chains: Mapping[int, Chain]) -> None:
    """All ranks run one plan with the same programs. Raises Disagreement, RankLostError."""
    agreement.same("plan", json.dumps(plan.as_dict(), sort_keys=True), "the plan")
    keys = [program.key for batch in sorted(chains) for program in chains[batch]]
    agreement.same("programs", plan.digest(*keys), "plan and programs (hash)")


def announce(agreement: Agreement, first: int, batches: list[int]) -> None:
    """All ranks are about to run the same numbers of tokens. Raises Disagreement, RankLostError."""
    agreement.same(
        f"rounds {first}", json.dumps(batches), f"tokens of rounds {first} to {first + len(batches) - 1}"
    )


class DistributedRank:
    """This process's rank, its graphs, and what it compares with the others. record: as for ``local.run_local``."""

    def __init__(
        self,
        plan: Plan,
        chains: Mapping[int, Chain],
        gpu: Gpu,
        agreement: Agreement,
        group: Any,
        record: Callable[[Callable[[], None]], Callable[[], None]] = capture,
    ) -> None:
        self.plan, self.gpu, self.agreement, self.group = plan, gpu, agreement, group
        self.inputs = Inputs(plan)
        self.attnres = None
        if plan.consumer == "attnres":
            self.attnres = verdict.AttnResChecker(plan, attnres_threads(plan))
        first_shape, result_shape = plan.mailbox_shapes
        multicast = plan.transport == "multicast"
        first, first_mc = self._symmetric(first_shape, multicast and not plan.twoshot)
        result, result_mc = self._symmetric(result_shape, multicast) if result_shape else (None, None)
        self.rank = GpuRank(
            plan,
            agreement.rank,
            gpu.tensors,
            self.inputs,
            (first, result),
            (first_mc, result_mc),
            self.attnres,
        )
        kernels = load_kernels(gpu, dict(chains))
        self.graphs = {batch: record(self._launcher(chain)) for batch, chain in kernels.items()}
        gpu.synchronize("setting up the rank")
        agreement.exchange("armed", "ready")  # nobody publishes into memory that is being armed
        self.probes: list[tuple[str, Array]] = []

    def _symmetric(self, shape: tuple[int, ...], multicast: bool) -> tuple[Any, Any]:
        """An armed mailbox that all ranks reach, and what its writers get."""
        import torch.distributed._symmetric_memory as symmetric

        box = new_mailbox(shape, self.gpu.tensors, lambda size, **options: symmetric.empty(size, **options))
        handle = symmetric.rendezvous(box, self.group)
        if not multicast:
            return box, table_of(handle.buffer_ptrs, self.gpu.tensors)
        if not handle.multicast_ptr:
            raise ValueError("--multicast: these GPUs gave no multicast address; leave it out")
        return box, int(handle.multicast_ptr)

    def _launcher(self, chain: list[Any]) -> Any:
        def launch() -> None:
            for kernel in chain:
                self.rank.launch(kernel)

        return launch

    def rounds(self, heartbeat: int) -> RanksResult:
        """All rounds, a heartbeat at a time; stops after the first with findings on any rank."""
        start, number = time.perf_counter(), 0
        found: list[str] = []
        while number < self.plan.rounds:
            count = min(heartbeat, self.plan.rounds - number)
            found += self.block(number, count)
            number += count
            if any(int(one) for one in self.agreement.exchange(f"findings {number}", str(len(found)))):
                break
        if self.plan.engine != PAYLOAD and self.probes:
            found += verdict.probe_findings(self.probes)
        batches = tuple(sorted({self.plan.batch(i) for i in range(number)}))
        seconds = time.perf_counter() - start
        return RanksResult(
            self.plan, self.gpu.name, number, number, batches, seconds, tuple(found), self.agreement.rank
        )

    def block(self, first: int, count: int) -> list[str]:
        """Announce rounds, replay them without waiting in between, judge them: findings."""
        numbers = range(first, first + count)
        announce(self.agreement, first, [self.plan.batch(number) for number in numbers])
        inputs = self.rank.upload_inputs(numbers)
        made = []
        for number in numbers:
            self.rank.set_inputs(inputs[number])
            self.graphs[self.plan.batch(number)]()
            made.append((self.rank.out_of(number), self.rank.published(number)))
        self.finish(f"rounds {first} to {first + count - 1}")
        outs = [download(out) for out, _ in made]
        found = self.hash_findings(first, outs)
        found += self.judged(numbers, outs, [view for _, view in made])
        found += self.rank.memory_findings(first + count - 1)
        if self.attnres is not None:
            found += self.attnres.prefix_findings(f"after round {first + count - 1}", self.rank.prefix())
        self.agreement.exchange(f"judged {first}", "done")  # nobody publishes while another reads its mailbox
        return found

    def finish(self, doing: str) -> None:
        """Wait for the stream, see ``finish``."""
        finish(self.agreement, doing)

    def hash_findings(self, first: int, outs: list[Array]) -> list[str]:
        """Rank against rank, bit for bit, by hashes."""
        mine = [digest(out) for out in outs]
        found = []
        for rank, text in enumerate(self.agreement.exchange(f"hashes {first}", json.dumps(mine))):
            for place, (own, other) in enumerate(zip(mine, json.loads(text), strict=True)):
                if own != other:
                    found.append(f"round {first + place}: ranks {self.agreement.rank} and {rank} differ")
        return found

    def judged(self, numbers: Sequence[int], outs: list[Array], views: list[Any]) -> list[str]:
        """Findings of rounds on this rank, several judged at a time. views: what all ranks published into its first
        mailbox, on the GPU."""
        published = self.gathered(numbers, views)
        judges: list[Callable[[], list[str]]] = []
        for number, out, partials in zip(numbers, outs, published, strict=True):
            name = f"round {number} (M = {self.plan.batch(number)}), rank {self.agreement.rank}"
            judges.append(partial(self.transport_findings, name, number, out, partials))
            if self.attnres is not None:
                taken = self.attnres.take(len(out), partials)
                judges.append(partial(self.attnres.judge, name, out, *taken))
                continue
            self.probes.append((name, out[-1].copy()))
            judges.append(partial(verdict.sum_findings, name, out, partials))
        if self.attnres is None:
            for number, out, sums in zip(numbers, outs, self.reduced(numbers), strict=True):
                name = f"round {number} (M = {self.plan.batch(number)}), rank {self.agreement.rank}"
                judges.append(partial(self.value_findings, name, out, *sums))
        with ThreadPoolExecutor(min(JUDGES, max(1, (os.cpu_count() or 1) // self.plan.ranks))) as pool:
            return [line for lines in pool.map(lambda judge: judge(), judges) for line in lines]

    def transport_findings(self, name: str, number: int, out: Array, published: Array) -> list[str]:
        """Is everything written, and did given partial sums arrive as they were?"""
        return verdict.rank_findings(name, [out]) + published_findings(name, self.inputs, number, published)

    def value_findings(self, name: str, out: Array, partials: Array, total: Array) -> list[str]:
        """out against float64, this rank's sum of all partials and torch.distributed's."""
        found = verdict.float64_findings(name, out, partials, k=verdict.sum_length(self.plan))
        return found + verdict.reduced_findings(name, out, partials, total)

    def gathered(self, numbers: Sequence[int], views: list[Any]) -> list[Array]:
        """Of every round BF16 [R, M, 7168]: one-shot, the view itself; two-shot, every rank's shard of columns."""
        if not self.plan.twoshot:
            return [download(view) for view in views]
        import torch

        gathered = [
            all_gathered(view.view(torch.uint8), self.plan.ranks) for view in views
        ]  # NCCL has no int16
        self.finish(f"gathering rounds {numbers[0]} to {numbers[-1]}")
        return [
            np.concatenate([download(part.view(torch.bfloat16)) for part in parts], axis=2)
            for parts in gathered
        ]

    def reduced(self, numbers: Sequence[int]) -> list[tuple[Array, Array]]:
        """Of every round (float64 partials of all ranks [R, M, 7168], their sum by torch.distributed.all_reduce)."""
        made = [gathered_and_reduced(self.rank.exact(number), self.plan.ranks) for number in numbers]
        self.finish(f"reducing rounds {numbers[0]} to {numbers[-1]}")
        return [(np.stack([download64(part) for part in parts]), download64(total)) for parts, total in made]


def all_gathered(mine: Any, ranks: int) -> list[Any]:
    """Every rank's tensor, behind the stream."""
    import torch
    import torch.distributed as dist

    parts = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(parts, mine)
    return parts


def gathered_and_reduced(mine: Any, ranks: int) -> tuple[list[Any], Any]:
    """(every rank's tensor, their sum by torch.distributed), behind the stream."""
    import torch.distributed as dist

    parts, total = all_gathered(mine, ranks), mine.clone()
    dist.all_reduce(total)
    return parts, total
