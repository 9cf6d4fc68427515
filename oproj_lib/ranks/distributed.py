"""One process per GPU, started by torchrun: mailboxes in symmetric memory, a CUDA graph per number of tokens.

    torchrun --nproc-per-node 2 -m oproj_lib ranks --device cuda --rounds 200

Order of events, on every rank:

    1. programs: compiled, or read from a folder; arguments checked        an error here ends all ranks
    2. agreement on plan and programs, through torchrun's store           differences: an error, nothing launched
    3. memory: torch.distributed._symmetric_memory, peers' addresses
    4. every `heartbeat` rounds: agreement on their numbers of tokens, replay, wait with a timeout, hash exchange

A rank that fails or waits too long prints who is missing and leaves through ``agreement.end_process``; the others see
it in the store within their own timeout. Multicast addresses are used only on request, and torch is told not to
create any otherwise (TORCH_SYMM_MEM_DISABLE_MULTICAST, NCCL_NVLS_ENABLE).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from oproj_lib.devices.cuda import Gpu, open_driver
from oproj_lib.devices.publishing import download
from oproj_lib.problem import Array
from oproj_lib.ranks import verdict
from oproj_lib.ranks.agreement import Agreement, Disagreement, RankLostError, Watchdog, end_process
from oproj_lib.ranks.gpu_rank import GpuRank, capture, digest, load_kernels, new_mailbox, table_of
from oproj_lib.ranks.inputs import Inputs
from oproj_lib.ranks.local import download64, published_findings
from oproj_lib.ranks.plan import PAYLOAD, Plan
from oproj_lib.ranks.programs import Chain, attnres_threads, build_chains, load
from oproj_lib.ranks.result import RanksResult

NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
"""Environment without which torch and NCCL create multicast objects of their own accord."""


@dataclass(frozen=True)
class Place:
    """Where torchrun has put this process."""

    rank: int
    world: int
    local_rank: int


def place_of(environment: Mapping[str, str]) -> Place:
    """From torchrun's variables. Raises ValueError where they are missing."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    lacking = [name for name in names if name not in environment]
    if lacking:
        raise ValueError(
            f"{', '.join(lacking)} not set: start with torchrun --nproc-per-node R -m oproj_lib ranks ..."
        )
    return Place(*(int(environment[name]) for name in names))


def set_multicast(environment: MutableMapping[str, str], wanted: bool) -> None:
    """Before torch.distributed starts: no multicast objects unless they are wanted.

    Raises ValueError where they are wanted and this environment forbids them.
    """
    if not wanted:
        environment.update(NO_MULTICAST)
    elif environment.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0") not in ("", "0"):
        raise ValueError(
            "--multicast, and TORCH_SYMM_MEM_DISABLE_MULTICAST = "
            f"{environment['TORCH_SYMM_MEM_DISABLE_MULTICAST']} in this environment forbids it: leave --multicast out"
        )


def check_heartbeat(heartbeat: int) -> int:
    """``heartbeat`` itself. Raises ValueError unless it is a positive number of rounds."""
    if heartbeat < 1:
        raise ValueError(f"heartbeat = {heartbeat}: rounds between two checks, at least 1")
    return heartbeat


def run_distributed(
    plan: Plan,
    *,
    programs: Path | str | None = None,
    timeout: float = 60.0,
    heartbeat: int = 20,
) -> RanksResult:
    """Runs this process's rank. Does not return where a rank is lost after the first launch.

    Raises ValueError before anything is launched, for a plan or folder that does not fit, and on every rank where the
    ranks' plans differ or a rank is missing; CudaError where there is no GPU.
    """
    place = place_of(os.environ)
    plan.check_rank(place.rank)
    check_heartbeat(heartbeat)
    set_multicast(os.environ, plan.transport == "multicast")
    import torch
    import torch.distributed as dist

    open_driver()  # says what is missing
    torch.cuda.set_device(place.local_rank)
    dist.init_process_group(
        "nccl", timeout=timedelta(seconds=2 * timeout), device_id=torch.device("cuda", place.local_rank)
    )
    store = dist.PrefixStore("oproj_lib", dist.distributed_c10d._get_default_store())
    agreement = Agreement(store, place.rank, place.world, timeout)
    try:
        chains = build_chains(plan) if programs is None else load(plan, programs)
        agree(agreement, plan, chains)
        run = DistributedRank(plan, chains, Gpu(place.local_rank), agreement, dist.group.WORLD)
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
    dist.destroy_process_group()
    return result


def raise_error(error: Exception) -> None:
    """As an error of the command line: one line, exit code 2."""
    raise ValueError(str(error)) from error


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
        for number, out, (_, view) in zip(numbers, outs, made, strict=True):
            found += self.findings(number, out, download(view))
        found += self.rank.memory_findings(first + count - 1)
        if self.attnres is not None:
            found += self.attnres.prefix_findings(f"after round {first + count - 1}", self.rank.prefix())
        self.agreement.exchange(f"judged {first}", "done")  # nobody publishes while another reads its mailbox
        return found

    def finish(self, doing: str) -> None:
        """Wait for the stream, at most the timeout. Raises RankLostError with the ranks that are not there yet."""
        import torch

        event = torch.cuda.Event()
        event.record()
        topic = f"finished {doing}"

        def late() -> list[int]:
            return [rank for rank in self.agreement.missing(topic) if rank != self.agreement.rank]

        self.agreement.wait(event.query, f"its GPU, {doing}", late)
        self.agreement.exchange(topic, "done")

    def hash_findings(self, first: int, outs: list[Array]) -> list[str]:
        """Rank against rank, bit for bit, by hashes."""
        mine = [digest(out) for out in outs]
        found = []
        for rank, text in enumerate(self.agreement.exchange(f"hashes {first}", json.dumps(mine))):
            for place, (own, other) in enumerate(zip(mine, json.loads(text), strict=True)):
                if own != other:
                    found.append(f"round {first + place}: ranks {self.agreement.rank} and {rank} differ")
        return found

    def findings(self, number: int, out: Array, view: Array) -> list[str]:
        """Findings of a round on this rank. view: what all ranks published into its first mailbox."""
        name = f"round {number} (M = {self.plan.batch(number)}), rank {self.agreement.rank}"
        published = self.gathered(view, number)
        found = verdict.rank_findings(name, [out])
        found += published_findings(name, self.inputs, number, published)
        if self.attnres is not None:
            return found + self.attnres.findings(name, out, published)
        found += verdict.sum_findings(name, out, published)
        partials, total = self.reduced(number)
        found += verdict.float64_findings(name, out, partials, k=verdict.sum_length(self.plan))
        found += verdict.reduced_findings(name, out, partials, total)
        self.probes.append((name, out[-1].copy()))
        return found

    def gathered(self, view: Array, number: int) -> Array:
        """BF16 [R, M, 7168]: one-shot, the view itself; two-shot, every rank's shard of columns."""
        if not self.plan.twoshot:
            return view
        import torch
        import torch.distributed as dist

        from oproj_lib.devices.publishing import upload

        mine = upload(view, self.gpu.tensors).view(
            torch.uint8
        )  # NCCL knows no 16-bit integers, and bits must stay
        parts = [torch.empty_like(mine) for _ in range(self.plan.ranks)]
        dist.all_gather(parts, mine)
        self.finish(f"gathering round {number}")
        return np.concatenate([download(part.view(torch.bfloat16)) for part in parts], axis=2)

    def reduced(self, number: int) -> tuple[Array, Array]:
        """(float64 partials of all ranks [R, M, 7168], their sum by torch.distributed.all_reduce)."""
        import torch
        import torch.distributed as dist

        mine = self.rank.exact(number)
        parts = [torch.empty_like(mine) for _ in range(self.plan.ranks)]
        dist.all_gather(parts, mine)
        total = mine.clone()
        dist.all_reduce(total)
        self.finish(f"reducing round {number}")
        return np.stack([download64(part) for part in parts]), download64(total)
