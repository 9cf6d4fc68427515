"""A whole exchange on several GPUs: predecessor -> projection -> mailbox -> consumer, against torch's own.

    torchrun --nproc-per-node 2 -m oproj_lib.bench.exchange --programs folder ... --out exchange.json

folders: from `python -m oproj_lib ranks --device cuda --local --ranks 2 ... --build folder`, or folders of such.
Measured in the same run, behind the same predecessor: torch.mm and then NCCL's all_reduce, one_shot_all_reduce or
two_shot_all_reduce_ of symmetric memory, whose result every rank has as BF16, as ours.

What is timed is a CUDA graph of many repetitions of predecessor and candidate, every one with other copies of the
weights (cold, see ``bench.measure``). Ours is launched with PDL throughout, as in ``bench.chain``; torch's kernels
start when the predecessor has ended, which is what a user gets. Exposed time: the graph, minus the graph of
predecessors alone, per repetition. Both are those of the slowest rank, and every pass replays all graphs once, so that
drift meets all alike. Medians and quartiles over passes.

Two hosts never start a graph at the same moment, and the earlier rank's first consumer waits for the later rank: host
time, of which every repetition would get its share. So the stream of each replay is

    spin (while the host enqueues the rest) | barrier of all ranks on the GPUs | event | graph | event

and what is between the events begins on all GPUs within a few microseconds, in hundreds of repetitions. Ranks keep in
step through the exchange itself from then on. Multicast is off. Every candidate's output is compared with float64, on
memory that was spoiled before.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oproj_lib import provenance
from oproj_lib.bench import small_kernels
from oproj_lib.bench.chain import PREDECESSOR_US
from oproj_lib.bench.measure import WrongOutputError, copies_needed
from oproj_lib.devices.cuda import Gpu
from oproj_lib.devices.publishing import download, upload
from oproj_lib.measured_exchange import ALTERNATIVES, SCHEMA
from oproj_lib.problem import MAX_BATCH, Array, N
from oproj_lib.ranks import verdict
from oproj_lib.ranks.agreement import Agreement, RankLostError, Watchdog, end_process
from oproj_lib.ranks.distributed import DistributedRank, agree, finish, gathered_and_reduced
from oproj_lib.ranks.gpu_rank import CARVEOUT, capture
from oproj_lib.ranks.inputs import Inputs
from oproj_lib.ranks.local import download64
from oproj_lib.ranks.plan import PAYLOAD, Plan
from oproj_lib.ranks.programs import Task, suite
from oproj_lib.ranks.world import World, join, leave, place_of

REPETITIONS = 200
"""Per graph."""
WARM_UP = 3
"""Repetitions before a graph is captured: modules are loaded, memory is allocated."""
LEAD_US = 1500.0
"""How long the GPU spins while the host enqueues a replay."""
PREDECESSOR = "predecessor"
SIGNALS = 1024
"""Bytes of symmetric memory; only the signals that come with it are used."""


@dataclass(frozen=True)
class Candidate:
    """launch: one repetition, with the weights of an index; result: what it leaves, BF16 [M, 7168]."""

    launch: Callable[[int], None]
    result: Any


class Bench:
    """One rank's side of all measurements with one K. runs: this rank's run of every plan, by the plan's name."""

    def __init__(
        self, k: int, runs: Mapping[str, DistributedRank], gpu: Gpu, agreement: Agreement, group: Any
    ) -> None:
        import torch

        self.torch, self.runs, self.gpu, self.agreement, self.group = torch, runs, gpu, agreement, group
        rank, self.ranks = agreement.rank, agreement.ranks
        self.inputs = Inputs(
            Plan(self.ranks, k=k, transport="unicast", tokens=MAX_BATCH, batches=(MAX_BATCH,))
        )
        weight = upload(self.inputs.weight(rank), gpu.tensors)
        count = copies_needed(weight.numel() * 2, gpu.attribute("L2_CACHE_SIZE"))
        self.weights = [weight, *(weight.clone() for _ in range(count - 1))]
        self.pool = upload(self.inputs.x(0, rank), gpu.tensors)
        self.x = torch.empty_like(self.pool)
        self.predecessor = gpu.load(small_kernels.PREDECESSOR.encode(), "predecessor", carveout=CARVEOUT)
        self.signals: Any = None
        self.steps = 0

    def weight(self, index: int) -> Any:
        """The weights of repetition ``index``."""
        return self.weights[index % len(self.weights)]

    def precede(self, batch: int, us: float = PREDECESSOR_US) -> None:
        """Write x [M, K], ``us`` microseconds after what came before has ended."""
        chunks = batch * self.x.shape[1] * self.x.element_size() // small_kernels.CHUNK_BYTES
        values = (
            ctypes.c_void_p(self.x.data_ptr()), ctypes.c_void_p(self.pool.data_ptr()), ctypes.c_uint32(chunks),
            ctypes.c_uint64(int(us * self.gpu.attribute("CLOCK_RATE") / 1e3)),
        )  # fmt: skip
        grid, block = (small_kernels.PREDECESSOR_GRID, 1, 1), (small_kernels.PREDECESSOR_BLOCK, 1, 1)
        self.predecessor.launch(grid, block, values, stream=self.gpu.current_stream(), pdl=True)

    def candidates(self, batch: int, alternatives: Sequence[str]) -> dict[str, Candidate]:
        """Everything for M tokens, by name: ours, then the alternatives."""
        ours = {name: self.ours(run, batch) for name, run in self.runs.items() if batch in run.plan.batches}
        return {**ours, **self.alternatives(batch, alternatives)}

    def ours(self, run: DistributedRank, batch: int) -> Candidate:
        """A plan's kernels, with this bench's x and weights."""

        def launch(index: int) -> None:
            run.rank.memory.update(x=self.x, weight=self.weight(index))
            run.graphs[batch]()

        return Candidate(launch, run.rank.out[:batch])

    def alternatives(self, batch: int, names: Sequence[str]) -> dict[str, Candidate]:
        """torch.mm and an all-reduce of torch's. Each has memory of its own; nothing is copied that need not be."""
        import torch.distributed as dist

        torch, x, group_name = self.torch, self.x[:batch], self.group.group_name
        plain, reduced = (
            torch.empty((batch, N), dtype=torch.bfloat16, device=self.gpu.tensors) for _ in range(2)
        )

        def nccl(index: int) -> None:
            torch.mm(x, self.weight(index).t(), out=plain)
            dist.all_reduce(plain)

        def one_shot(index: int) -> None:
            torch.mm(x, self.weight(index).t(), out=shared)
            torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", group_name, reduced)

        def two_shot(index: int) -> None:
            torch.mm(x, self.weight(index).t(), out=shared)
            torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group_name)

        made = {"nccl": Candidate(nccl, plain)} if "nccl" in names else {}
        if set(names) - {"nccl"}:
            shared = self.symmetric((batch, N), torch.bfloat16)[0]
            there = {"one_shot": Candidate(one_shot, reduced), "two_shot": Candidate(two_shot, shared)}
            made |= {name: there[name] for name in names if name in there}
        return made

    def symmetric(self, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
        """(symmetric memory, its handle)."""
        import torch.distributed._symmetric_memory as symmetric

        made = symmetric.empty(shape, dtype=dtype, device=self.torch.device(self.gpu.tensors))
        return made, symmetric.rendezvous(made, self.group)

    def line_up(self) -> None:
        """On the stream: all GPUs come to this point before any goes on."""
        if self.signals is None:  # memory and handle, since the one must live as long as the other
            self.signals = self.symmetric((SIGNALS,), self.torch.uint8)
        self.signals[1].barrier()

    def graph(self, batch: int, launch: Callable[[int], None] | None) -> Callable[[], None]:
        """A graph of REPETITIONS repetitions, replayed once. None: predecessors alone."""

        def launches(count: int = REPETITIONS) -> None:
            for index in range(count):
                self.precede(batch)
                if launch is not None:
                    launch(index)

        side = self.torch.cuda.Stream()
        side.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(side):
            launches(WARM_UP)
        self.torch.cuda.current_stream().wait_stream(side)
        self.finish("warm-up")
        replay = capture(launches)
        self.replay_us(replay, batch)
        return replay

    def replay_us(self, replay: Callable[[], None], batch: int) -> float:
        """Microseconds per repetition of one replay that all ranks begin together."""
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.precede(batch, LEAD_US)
        self.line_up()
        first.record()
        replay()
        last.record()
        self.finish("replay")
        return 1e3 * float(first.elapsed_time(last)) / REPETITIONS

    def finish(self, doing: str) -> None:
        """Wait for all ranks' GPUs. Raises RankLostError."""
        finish(self.agreement, f"{doing} {self._number()}")

    def _number(self) -> int:
        """A topic is used once; every rank counts alike."""
        self.steps += 1
        return self.steps

    def slowest(self, times: Mapping[str, Sequence[float]]) -> dict[str, Array]:
        """Replay by replay, the time of the slowest rank."""
        everybody = [
            json.loads(one) for one in self.agreement.exchange(f"times {self._number()}", json.dumps(times))
        ]
        return {name: np.max([one[name] for one in everybody], axis=0) for name in times}

    def partials(self, batch: int) -> tuple[Array, Array]:
        """(float64 partial sums of all ranks [R, M, 7168], their sum)."""
        mine = self.pool[:batch].double() @ self.weights[0].double().T
        parts, total = gathered_and_reduced(mine, self.ranks)
        self.finish("reference")
        return np.stack([download64(part) for part in parts]), download64(total)

    def check(
        self, batch: int, name: str, replay: Callable[[], None], result: Any, expected: tuple[Array, Array]
    ) -> None:
        """Replay on a spoiled result. Raises WrongOutputError."""
        result.view(self.torch.int16).fill_(verdict.UNWRITTEN - 2**16)
        self.replay_us(replay, batch)
        out, where = download(result), f"{name}, M = {batch}"
        found = verdict.rank_findings(where, [out]) + verdict.reduced_findings(where, out, *expected)
        if found or not np.isfinite(out.astype(np.float32)).all():
            raise WrongOutputError(found[0] if found else f"{where}: Inf or NaN")


def measure(bench: Bench, batch: int, alternatives: Sequence[str], replays: int) -> list[dict[str, Any]]:
    """A row per candidate for M = ``batch``. Raises WrongOutputError."""
    expected = bench.partials(batch)
    candidates = bench.candidates(batch, alternatives)
    graphs = {PREDECESSOR: bench.graph(batch, None)}
    for name, candidate in candidates.items():
        graphs[name] = bench.graph(batch, candidate.launch)
        bench.check(batch, name, graphs[name], candidate.result, expected)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(replays):
        for name, replay in graphs.items():
            times[name].append(bench.replay_us(replay, batch))
    slowest = bench.slowest(times)
    return [
        {
            "k": bench.x.shape[1],
            "batch": batch,
            "candidate": name,
            "ours": name in bench.runs,
            **quartiles(slowest[name] - slowest[PREDECESSOR]),
            "replays": replays,
            "predecessor_us": float(np.median(slowest[PREDECESSOR])),
        }
        for name in candidates
    ]


def quartiles(exposed: Array) -> dict[str, float]:
    """Median and quartiles of microseconds."""
    low, middle, high = (float(one) for one in np.percentile(exposed, [25, 50, 75]))
    return {"median_us": middle, "q1_us": low, "q3_us": high}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="torchrun ... -m oproj_lib.bench.exchange", description=__doc__.split("\n")[0]
    )
    add = top.add_argument
    add(
        "--programs",
        nargs="+",
        required=True,
        metavar="DIR",
        help="folders that `ranks --build` made for this many ranks, or folders of such",
    )
    add(
        "--batches",
        default="1,8,16,64",
        help="numbers of tokens, of those the programs have (default 1,8,16,64)",
    )
    add("--alternatives", default=",".join(ALTERNATIVES), help=f"of {', '.join(ALTERNATIVES)}, or none")
    add("--replays", type=int, default=50, help=f"of a graph of {REPETITIONS} repetitions (default 50)")
    add("--timeout", type=float, default=60.0, help="seconds until a missing rank ends the run")
    add("--out", help="data file (JSON), written by rank 0 after every number of tokens")
    return top


def check_task(task: Task, world: int) -> Task:
    """``task`` itself. Raises ValueError for a plan that this cannot measure."""
    plan = task.plan
    if plan.ranks != world:
        raise ValueError(f"{task.folder} was built for {plan.ranks} ranks, torchrun started {world}")
    if plan.engine == PAYLOAD:
        raise ValueError(
            f"{task.folder} holds engine {PAYLOAD!r}, which projects nothing: build producer or wgmma"
        )
    if plan.consumer != "reduce":
        raise ValueError(
            f"{task.folder} holds the consumer {plan.consumer!r}: the alternatives end in a sum, build reduce"
        )
    if plan.transport != "unicast":
        raise ValueError(f"{task.folder} was built for {plan.transport}: only unicast is measured")
    return task


def chosen(text: str) -> list[str]:
    """Alternatives from "nccl,one_shot". Raises ValueError for unknown ones."""
    names = [name for name in text.split(",") if name and name != "none"]
    for name in names:
        if name not in ALTERNATIVES:
            raise ValueError(
                f"alternative {name!r} is unknown; choose from {', '.join(ALTERNATIVES)}, or none"
            )
    return names


def chosen_batches(text: str, tasks: Sequence[Task]) -> list[int]:
    """Numbers of tokens from "1,8". Raises ValueError for one that no plan has."""
    from oproj_lib.cli_hardware import numbers

    batches = numbers(text, "--batches")
    have = sorted({batch for task in tasks for batch in task.plan.batches})
    if lacking := sorted(set(batches) - set(have)):
        raise ValueError(f"--batches: no program for M in {lacking}; choose from {have}")
    return batches


def measure_all(
    world: World,
    tasks: Sequence[Task],
    gpu: Gpu,
    batches: Sequence[int],
    alternatives: Sequence[str],
    replays: int,
    keep: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Every K, every number of tokens; ``keep`` gets the rows so far. Raises what a bench raises."""
    rows: list[dict[str, Any]] = []
    for k in sorted({task.plan.k for task in tasks}, reverse=True):
        runs = {}
        for task in tasks:
            if task.plan.k == k:
                agreement, chains = world.agreement(task.name), task.chains()
                agree(agreement, task.plan, chains)
                runs[task.name] = DistributedRank(
                    task.plan, chains, gpu, agreement, world.group, record=lambda launch: launch
                )
        bench = Bench(k, runs, gpu, world.agreement(f"bench {k}"), world.group)
        with Watchdog(bench.agreement):
            for batch in batches:
                if any(batch in run.plan.batches for run in runs.values()):
                    rows += measure(bench, batch, alternatives, replays)
                    keep(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure under torchrun. Raises ValueError for what does not fit, before anything is launched."""
    arguments = parser().parse_args(argv)
    names, place = chosen(arguments.alternatives), place_of(os.environ)
    tasks = [check_task(task, place.world) for task in suite(arguments.programs)]
    batches = chosen_batches(arguments.batches, tasks)
    if arguments.replays < 1:
        raise ValueError(f"--replays {arguments.replays}: at least 1")
    try:
        world = join(place, os.environ, arguments.timeout, multicast=False)
    except RankLostError as error:
        raise ValueError(str(error)) from error
    import torch.distributed as dist

    agreement = world.agreement("exchange")
    try:
        wanted = [arguments.batches, arguments.alternatives, arguments.replays, [task.name for task in tasks]]
        agreement.same("options", json.dumps(wanted), "what is measured")
        gpu = Gpu(place.local_rank)
        command = [
            "torchrun",
            "--nproc-per-node",
            str(place.world),
            "-m",
            "oproj_lib.bench.exchange",
            *sys.argv[1:],
        ]

        def keep(rows: list[dict[str, Any]]) -> None:
            if place.rank:
                return
            for row in rows:
                if row["batch"] == rows[-1]["batch"] and row["k"] == rows[-1]["k"]:
                    print(json.dumps(row), flush=True)
            if arguments.out:
                source = provenance.collect(gpu, command, {"after": provenance.smi(place.local_rank)})
                data = record(source.as_dict(), place.world, tasks, rows)
                Path(arguments.out).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

        measure_all(world, tasks, gpu, batches, names, arguments.replays, keep)
        agreement.exchange("end", "measured")
    except BaseException as error:  # a poller may run: no destructor must
        end_process(agreement, error)
    leave(world)
    dist.destroy_process_group()
    return 0


def record(
    source: Mapping[str, Any], ranks: int, tasks: Sequence[Task], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The contents of a data file, which ``measured_exchange`` reads."""
    return {
        "schema": SCHEMA,
        "provenance": dict(source),
        "ranks": ranks,
        "repetitions": REPETITIONS,
        "plans": {task.name: task.plan.as_dict() for task in tasks},
        "rows": [dict(row) for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main())
