"""A rank's process as `python -m oproj_lib` starts it, on a machine without GPUs; the arguments are the command's.

Everything between processes is real (store, process group, agreement, kills); the GPU is a stand-in whose kernels are
NumPy, its collectives are gloo's, and symmetric memory is mapped files.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rank_kernels
import torch
import torch.distributed as dist
from rank_kernels import RankKernels, replayed
from stand_in_driver import Launch, StandInGpu, bf16_at

from oproj_lib import cli, provenance
from oproj_lib.bench import exchange
from oproj_lib.ranks import distributed, programs, world
from oproj_lib.ranks.gpu_rank import new_mailbox, table_of
from oproj_lib.ranks.plan import Plan

rank_kernels.PATIENCE = 1.0
SPOILED = os.environ.get("SPOILED", "")


class Event:
    """An event of a GPU that has always done all its work."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        return 1e3 * (end.at - self.at)


class Stream:
    """A stream that has always done all its work."""

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)


class ProcessRank(distributed.DistributedRank):
    """Mailboxes in files that all ranks map."""

    def __init__(
        self, plan: Plan, chains: Any, gpu: Any, agreement: Any, group: Any, record: Any = replayed
    ) -> None:
        self.boxes: list[Any] = []  # kept: the kernels have only their addresses
        super().__init__(plan, chains, gpu, agreement, group, record)

    def _symmetric(self, shape: tuple[int, ...], multicast: bool) -> tuple[Any, Any]:
        size = 2 * shape[0] * shape[1] * shape[2]
        descriptor, mine = tempfile.mkstemp(prefix="mailbox")
        os.truncate(descriptor, size)
        boxes = []
        for name in self.agreement.exchange(f"name {shape}", mine):
            with Path(name).open("r+b") as file:
                memory = mmap.mmap(file.fileno(), size)
            boxes.append(torch.frombuffer(memory, dtype=torch.bfloat16).view(shape))
        self.agreement.exchange(f"mapped {shape}", "all")
        os.unlink(mine)  # it stays as long as somebody has it mapped
        self.boxes += boxes
        box = boxes[self.agreement.rank]
        box.copy_(new_mailbox(shape, "cpu"))
        return box, table_of([one.data_ptr() for one in boxes], "cpu")


class Spoiler(RankKernels):
    """Puts another value into the payloads of the programs whose name begins with ``SPOILED``, on rank 1."""

    def execute(self, launch: Launch) -> None:
        program = self.programs.get(launch.entry)
        if SPOILED and os.environ["RANK"] == "1" and program is not None and program.name.startswith(SPOILED):
            place = [parameter.name for parameter in program.parameters].index("payload")
            bf16_at(launch.value(place, ctypes.c_int64), program.parameters[place].shape)[0, 5] = 123
        super().execute(launch)


def stand_in_gpu(index: int) -> StandInGpu:
    folders = exchange.parser().parse_args(sys.argv[2:]).programs if sys.argv[1] == "exchange" else None
    if folders is None:
        arguments = cli.parser().parse_args(sys.argv[1:])
        folders = arguments.suite or [arguments.programs]
    chains = [chain for task in programs.suite(folders) for chain in task.chains().values()]
    there = {program.key: program for chain in chains for program in chain}
    return StandInGpu(Spoiler(list(there.values())))


def start_gloo(backend: str, *, device_id: Any, **options: Any) -> None:
    assert (backend, device_id.type) == ("nccl", "cuda")
    START(backend="gloo", **options)


START = dist.init_process_group


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' BF16 tensors."""
    total = tensor.float()
    dist.all_reduce(total)
    return total.bfloat16()


def add_torchs_exchanges() -> None:
    """The operators of symmetric memory, which have schemas but no kernels without CUDA."""
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    library.impl("one_shot_all_reduce_out", lambda tensor, operation, group, out: out.copy_(summed(tensor)))
    library.impl("two_shot_all_reduce_", lambda tensor, operation, group: tensor.copy_(summed(tensor)))
    LIBRARIES.append(library)


LIBRARIES: list[Any] = []
"""Kept: a library that goes takes its kernels along."""


def barrier_memory(bench: exchange.Bench, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    return torch.empty(shape, dtype=dtype), SimpleNamespace(barrier=dist.barrier)


def prepare() -> None:
    """Put the stand-ins where the package takes torch's."""
    torch.set_num_threads(1)
    put = pytest.MonkeyPatch().setattr
    put(torch.cuda, "set_device", lambda index: None)
    put(torch.cuda, "Event", Event)
    put(torch.cuda, "Stream", Stream)
    put(torch.cuda, "current_stream", lambda: Stream())
    put(torch.cuda, "stream", lambda stream: nullcontext())
    put(dist, "init_process_group", start_gloo)
    put(world, "open_driver", lambda: None)
    for module in (distributed, exchange):
        put(module, "Gpu", stand_in_gpu)
        put(module, "DistributedRank", ProcessRank)
    put(exchange, "capture", replayed)
    put(exchange, "REPETITIONS", 2)
    put(exchange, "copies_needed", lambda weight, l2: 2)
    put(exchange.Bench, "symmetric", barrier_memory)
    put(provenance, "smi", lambda index: {"driver_version": "1.2"})
    add_torchs_exchanges()


if __name__ == "__main__":
    prepare()
    if sys.argv[1] == "exchange":
        sys.exit(exchange.main(sys.argv[2:]))
    sys.exit(cli.main(sys.argv[1:]))
