"""A whole exchange on several GPUs: predecessor -> projection -> mailbox -> consumer, against torch's own.

    torchrun --nproc-per-node 2 -m oproj_lib.bench.exchange --programs folder --out exchange.json

folder: from `python -m oproj_lib ranks --device cuda --local --ranks 2 ... --build folder`. Measured beside it, with
the same predecessor: torch.mm and then NCCL's all_reduce, one_shot_all_reduce or two_shot_all_reduce_ of symmetric
memory, whose result every rank has as BF16, as ours.

Each is a CUDA graph of many repetitions, every one with other copies of the weights (cold, see ``bench.measure``). A
time is microseconds per repetition: graph time, minus that of the predecessors alone, of the slowest rank. Ranks
keep in step through the exchange itself. Multicast is off. Every candidate's last output is compared with float64.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from oproj_lib import provenance
from oproj_lib.bench import small_kernels
from oproj_lib.bench.chain import PREDECESSOR_US
from oproj_lib.bench.measure import WrongOutputError, copies_needed
from oproj_lib.devices.cuda import Gpu, open_driver
from oproj_lib.devices.publishing import download, upload
from oproj_lib.problem import N
from oproj_lib.ranks import verdict
from oproj_lib.ranks.agreement import Agreement, end_process
from oproj_lib.ranks.distributed import DistributedRank, agree, place_of, set_multicast
from oproj_lib.ranks.gpu_rank import capture
from oproj_lib.ranks.plan import PAYLOAD, Plan
from oproj_lib.ranks.programs import INDEX, load

REPETITIONS = 40
"""Per graph."""
ALTERNATIVES = ("nccl", "one_shot", "two_shot")


class Bench:
    """One rank's side of all measurements of one plan."""

    def __init__(self, plan: Plan, run: DistributedRank, group: Any, carveout: int | None) -> None:
        import torch

        self.plan, self.run, self.group, self.gpu = plan, run, group, run.gpu
        self.memory = run.rank.memory
        weight = self.memory["weight"]
        count = copies_needed(weight.numel() * 2, self.gpu.attribute("L2_CACHE_SIZE"))
        self.weights = [weight, *(weight.clone() for _ in range(count - 1))]
        self.predecessor = self.gpu.load(small_kernels.PREDECESSOR.encode(), "predecessor", carveout=carveout)
        self.cycles = int(PREDECESSOR_US * self.gpu.attribute("CLOCK_RATE") / 1e3)
        self.source = upload(run.inputs.x(0, run.agreement.rank)[:1], self.gpu.tensors)
        self.torch = torch
        self.steps = 0

    def set_batch(self, number: int) -> int:
        """Take the inputs of a round; its tokens."""
        self.source = upload(self.run.inputs.x(number, self.run.agreement.rank), self.gpu.tensors)
        return len(self.source)

    def precede(self) -> None:
        """Write x, about 8 microseconds after what came before has ended."""
        x = self.memory["x"][: len(self.source)]
        chunks = x.numel() * x.element_size() // small_kernels.CHUNK_BYTES
        values = (
            ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(self.source.data_ptr()), ctypes.c_uint32(chunks),
            ctypes.c_uint64(self.cycles),
        )  # fmt: skip
        grid, block = (small_kernels.PREDECESSOR_GRID, 1, 1), (small_kernels.PREDECESSOR_BLOCK, 1, 1)
        self.predecessor.launch(grid, block, values, stream=self.gpu.current_stream(), pdl=True)

    def candidates(self, batch: int, names: Sequence[str]) -> dict[str, tuple[Callable[[int], None], Any]]:
        """name -> (one repetition, the tensor that its result is in)."""
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        torch, x = self.torch, self.memory["x"][:batch]
        device = torch.device(self.gpu.tensors)
        plain = torch.empty((batch, N), dtype=torch.bfloat16, device=device)
        shared = symmetric.empty((batch, N), dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(shared, self.group)
        group_name = self.group.group_name
        reduced = torch.empty_like(plain)

        def weight(index: int) -> Any:
            return self.weights[index % len(self.weights)]

        def ours(index: int) -> None:
            self.memory["weight"] = weight(index)
            self.run.graphs[batch]()

        def nccl(index: int) -> None:
            torch.mm(x, weight(index).t(), out=plain)
            dist.all_reduce(plain)

        def one_shot(index: int) -> None:
            torch.mm(x, weight(index).t(), out=shared)
            reduced.copy_(torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group_name))

        def two_shot(index: int) -> None:
            torch.mm(x, weight(index).t(), out=shared)
            torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group_name)

        there = {"nccl": (nccl, plain), "one_shot": (one_shot, reduced), "two_shot": (two_shot, shared)}
        return {"ours": (ours, self.run.rank.out[:batch]), **{name: there[name] for name in names}}

    def time(self, repetition: Callable[[int], None] | None, replays: int) -> list[float]:
        """Microseconds per repetition of every replay. None: predecessors alone."""

        def launches(count: int = REPETITIONS) -> None:
            for index in range(count):
                self.precede()
                if repetition is not None:
                    repetition(index)

        side = self.torch.cuda.Stream()
        side.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(side):
            launches(3)
        self.torch.cuda.current_stream().wait_stream(side)
        self.run.finish(f"warm-up {self._number()}")
        replay = capture(launches)
        replay()
        times = []
        for _ in range(replays):
            self.run.agreement.exchange(f"replay {self._number()}", "")
            first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            replay()
            last.record()
            self.run.finish(f"replay {self._number()}")
            times.append(1e3 * first.elapsed_time(last) / REPETITIONS)
        return times

    def _number(self) -> int:
        """A topic is used once; every rank counts alike."""
        self.steps += 1
        return self.steps

    def slowest(self, times: list[float]) -> list[float]:
        """Replay by replay, the time of the slowest rank."""
        everybody = self.run.agreement.exchange(f"times {self._number()}", json.dumps(times))
        return [max(column) for column in zip(*(json.loads(one) for one in everybody), strict=True)]


def measure(bench: Bench, number: int, names: Sequence[str], replays: int) -> dict[str, Any]:
    """All candidates for the number of tokens of round ``number``. Raises WrongOutputError."""
    batch = bench.set_batch(number)
    partials, _ = bench.run.reduced(number)
    base = statistics.median(bench.slowest(bench.time(None, replays)))
    row: dict[str, Any] = {"batch": batch, "predecessor_us": base, "candidates": {}}
    for name, (repetition, result) in bench.candidates(batch, names).items():
        times = bench.slowest(bench.time(repetition, replays))
        low, middle, high = (float(q) for q in np.percentile(times, [25, 50, 75]))
        found = []
        if bench.plan.consumer == "reduce" or name != "ours":
            found = verdict.reduced_findings(
                f"{name}, M = {batch}", download(result), partials, partials.sum(axis=0)
            )
        if found:
            raise WrongOutputError(found[0])
        row["candidates"][name] = {
            "median_us": middle - base, "q1_us": low - base, "q3_us": high - base, "replays": len(times)
        }  # fmt: skip
    return row


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="torchrun ... -m oproj_lib.bench.exchange", description=__doc__.split("\n")[0]
    )
    top.add_argument(
        "--programs", required=True, help="a folder that `ranks --build` made for this many ranks"
    )
    top.add_argument("--alternatives", default=",".join(ALTERNATIVES), help=f"of {', '.join(ALTERNATIVES)}")
    top.add_argument(
        "--replays", type=int, default=30, help=f"of a graph of {REPETITIONS} repetitions (default 30)"
    )
    top.add_argument("--timeout", type=float, default=60.0, help="seconds until a missing rank ends the run")
    top.add_argument("--out", help="data file (JSON), written by rank 0")
    return top


def read_plan(folder: str, world: int) -> Plan:
    """The plan of a folder. Raises FileNotFoundError, and ValueError for one that this cannot measure."""
    index = Path(folder, INDEX)
    if not index.exists():
        raise FileNotFoundError(
            f"no {INDEX} in {folder}: make it with `python -m oproj_lib ranks --device cuda --local --build {folder}`"
        )
    fields = json.loads(index.read_text(encoding="utf-8"))
    plan = Plan(**{**fields, "batches": tuple(fields["batches"])})
    if plan.ranks != world:
        raise ValueError(f"{folder} was built for {plan.ranks} ranks, torchrun started {world}")
    if plan.engine == PAYLOAD:
        raise ValueError(
            f"{folder} holds engine {PAYLOAD!r}, which projects nothing: build producer or wgmma"
        )
    return replace(plan, payload="random")


def chosen(text: str) -> list[str]:
    """Alternatives from "nccl,one_shot". Raises ValueError for unknown ones."""
    names = [name for name in text.split(",") if name and name != "none"]
    for name in names:
        if name not in ALTERNATIVES:
            raise ValueError(
                f"alternative {name!r} is unknown; choose from {', '.join(ALTERNATIVES)}, or none"
            )
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Measure under torchrun. Raises ValueError for what does not fit, before anything is launched."""
    arguments = parser().parse_args(argv)
    names, place = chosen(arguments.alternatives), place_of(os.environ)
    plan = read_plan(arguments.programs, place.world)
    chains = load(plan, arguments.programs)
    set_multicast(os.environ, False)
    import torch
    import torch.distributed as dist

    open_driver()  # says what is missing
    torch.cuda.set_device(place.local_rank)
    limit = timedelta(seconds=2 * arguments.timeout)
    dist.init_process_group("nccl", timeout=limit, device_id=torch.device("cuda", place.local_rank))
    store = dist.PrefixStore("oproj_lib", dist.distributed_c10d._get_default_store())
    agreement = Agreement(store, place.rank, place.world, arguments.timeout)
    try:
        agree(agreement, plan, chains)
        gpu = Gpu(place.local_rank)
        run = DistributedRank(plan, chains, gpu, agreement, dist.group.WORLD, record=lambda launch: launch)
        bench, rows = Bench(plan, run, dist.group.WORLD, carveout=100), []
        for number in range(len(plan.batches)):
            rows.append(measure(bench, number, names, arguments.replays))
            if place.rank == 0:
                print(json.dumps(rows[-1]), flush=True)
        if place.rank == 0 and arguments.out:
            command = [
                "torchrun",
                "--nproc-per-node",
                str(place.world),
                "-m",
                "oproj_lib.bench.exchange",
                *sys.argv[1:],
            ]
            source = provenance.collect(gpu, command, {"after": provenance.smi(place.local_rank)})
            data = {
                "provenance": source.as_dict(),
                "plan": plan.as_dict(),
                "repetitions": REPETITIONS,
                "rows": rows,
            }
            Path(arguments.out).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        agreement.exchange("end", "measured")
    except BaseException as error:  # a poller may run: no destructor must
        end_process(agreement, error)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
