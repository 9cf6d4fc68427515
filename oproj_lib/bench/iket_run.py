"""What to run on a GPU for a recorded timeline; ``docs/in_kernel_timelines.md`` has the three commands.

    times       without a tool: what events cost, in CUDA graphs and in single launches
    launches    under `run-iket profile`: a few single launches with events
    record      keeps the median launch of each K in this package's data

Chain: gate (single launches only), predecessor (132 CTAs of 128 threads, lets its dependents go at once, works for
8 us, writes x), projection (programmatic dependent launch), a last kernel that waits for it. Exposed time: from the
end of the predecessor to the start of the last kernel. Weights are cold.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oproj_lib import doctor
from oproj_lib.bench import stamped_kernels
from oproj_lib.bench.candidates import Job, make_job
from oproj_lib.bench.chain import PREDECESSOR_US
from oproj_lib.bench.measure import Graph, capture, check_output
from oproj_lib.bench.small_kernels import CHUNK_BYTES, PREDECESSOR_BLOCK, PREDECESSOR_GRID
from oproj_lib.delivery import SLOT
from oproj_lib.devices.cuda import Gpu
from oproj_lib.devices.publishing import Publisher
from oproj_lib.iket_timeline import DATA, PRODUCER, WGMMA, record_iket
from oproj_lib.kernels.events import OprojProducerEvents, OprojWgmmaEvents
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.wgmma import OprojWgmma
from oproj_lib.problem import TOLERANCE, Problem
from oproj_lib.program import COMPILER_PACKAGE
from oproj_lib.provenance import smi
from oproj_lib.traced import build

RANKS = (16, 8)
"""K = 768 and 1536."""


@dataclass(frozen=True)
class Subject:
    """An engine, without and with events, at one batch size."""

    engine: str
    batch: int
    off: type[OprojProducer]
    events: type[OprojProducer]

    def kind(self, program: str) -> type[OprojProducer]:
        """The class of a program, "off" or "events"."""
        return self.events if program == "events" else self.off


SUBJECTS = (
    Subject(PRODUCER, 8, OprojProducer, OprojProducerEvents),
    Subject(WGMMA, 64, OprojWgmma, OprojWgmmaEvents),
)
PROGRAMS = {"times": ("off", "events"), "launches": ("events",)}
"""By mode."""
GATE_PREDECESSORS = 50
"""How many predecessors' times the gate spins: 400 us, enough to queue four launches."""
FLUSH_BYTES = 512 * 2**20
"""Written before every single launch: weights leave the L2."""
LAUNCHES = {"times": 40, "launches": 4}
"""Single launches that count; one more warms up."""
TURNS, REPLAYS = 3, 30


class Case:
    """One program between the kernels around it. carveout: percent of the L1 that the predecessor leaves to
    shared memory; None for the driver's choice."""

    def __init__(self, job: Job, kind: type[OprojProducer], carveout: int | None) -> None:
        import torch

        self.job, self.gpu = job, job.gpu
        batch = job.problem.batch
        engine = kind.recommended(job.problem.k, batch, transport="unicast:1")
        self.publisher = Publisher(build(engine, target=target(self.gpu), batch=batch), self.gpu)
        self.cycles = predecessor_cycles(self.gpu)
        texts = (stamped_kernels.GATE, stamped_kernels.PREDECESSOR, stamped_kernels.AFTER)
        names = ("gate", "predecessor", "after")
        self.gate, self.predecessor, self.after = (
            self.gpu.load(text.encode(), name, carveout=carveout)
            for text, name in zip(texts, names, strict=True)
        )
        self.repetitions = len(job.weights)
        stamps = max(self.repetitions, *LAUNCHES.values())
        self.stamps = torch.zeros((stamps, 2), dtype=torch.int64, device=self.gpu.tensors)
        self.flush = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device=self.gpu.tensors)

    def precede(self, index: int) -> None:
        """The predecessor, which writes x."""
        source = self.job.sources[0]
        values = (
            ctypes.c_void_p(self.job.x.data_ptr()),
            ctypes.c_void_p(source.data_ptr()),
            ctypes.c_uint32(source.numel() * source.element_size() // CHUNK_BYTES),
            ctypes.c_uint64(self.cycles),
            ctypes.c_void_p(self.stamps[index].data_ptr()),
        )
        self.predecessor.launch(
            (PREDECESSOR_GRID, 1, 1), (PREDECESSOR_BLOCK, 1, 1), values, stream=self.gpu.current_stream()
        )

    def chain(self, index: int) -> None:
        """Predecessor, projection, and the kernel after it."""
        self.precede(index)
        self.publisher.launch(self.job.x, self.job.weight(index), SLOT)
        stamp = ctypes.c_void_p(self.stamps[index, 1].data_ptr())
        self.after.launch((1, 1, 1), (32, 1, 1), (stamp,), stream=self.gpu.current_stream(), pdl=True)

    def single(self, count: int) -> list[int]:
        """Exposed ns of ``count`` single launches, each behind a gate and with an L2 that holds no weights."""
        import torch

        stream = torch.cuda.Stream()  # not the default stream, which other streams wait for
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for index in range(count):
                self.flush.zero_()
                spin = (ctypes.c_uint64(self.cycles * GATE_PREDECESSORS),)
                self.gate.launch((1, 1, 1), (32, 1, 1), spin, stream=self.gpu.current_stream())
                self.chain(index)
        return self.exposed(count)

    def exposed(self, count: int) -> list[int]:
        """What the stamps of the latest launches say; they are cleared."""
        self.gpu.synchronize("a chain with events")
        rows = self.stamps[:count].tolist()
        self.stamps.zero_()
        self.gpu.synchronize("clearing stamps")
        return [after - before for before, after in rows]

    def check(self, what: str) -> float:
        """The relative error of what was published last."""
        out = self.publisher.mailboxes[0][SLOT, : self.job.problem.batch]
        return check_output(what, out, self.job.references[0], TOLERANCE)


def target(gpu: Gpu) -> str:
    """What to compile for. Raises ValueError for a GPU that no target runs on."""
    for name, capability in doctor.CAPABILITY.items():
        if capability == gpu.capability:
            return name
    raise ValueError(f"{gpu.name} has capability {gpu.capability}: choose from {doctor.CAPABILITY}")


def predecessor_cycles(gpu: Gpu) -> int:
    """Cycles of its fastest clock that the predecessor spins."""
    return int(PREDECESSOR_US * gpu.attribute("CLOCK_RATE") / 1e3)


def subjects(names: str) -> tuple[Subject, ...]:
    """Those of "producer,wgmma". Raises ValueError for an unknown engine."""
    known = {subject.engine: subject for subject in SUBJECTS}
    if unknown := [name for name in names.split(",") if name not in known]:
        raise ValueError(f"--engines {names}: {unknown[0]!r} has no events; choose from {', '.join(known)}")
    return tuple(known[name] for name in names.split(","))


def measure(
    gpu: Gpu, mode: str, carveout: int | None, chosen: Sequence[Subject] | None = None
) -> list[dict[str, Any]]:
    """One row per engine, K and program: single launches, and without a tool graphs, off and events in turn."""
    rows: list[dict[str, Any]] = []
    for subject in SUBJECTS if chosen is None else chosen:
        for ranks in RANKS:
            job = make_job(gpu, Problem(ranks, subject.batch))
            cases = {name: Case(job, subject.kind(name), carveout) for name in PROGRAMS[mode]}
            found = {name: _single(case, subject, name, LAUNCHES[mode]) for name, case in cases.items()}
            if mode == "times":
                graphs = {name: _graphs(case) for name, case in cases.items()}
                for _ in range(TURNS):  # in turn, so that drift hits both
                    for name, pair in graphs.items():
                        found[name].setdefault("graph_us", []).append(_exposed_us(*pair))
            rows += found.values()
    return rows


def _single(case: Case, subject: Subject, name: str, launches: int) -> dict[str, Any]:
    case.single(1)
    config = case.publisher.program.config
    row = {"engine": subject.engine, "k": case.job.problem.k, "program": name, "config": config}
    what = f"{subject.engine}, {name}, single launches"
    return {**row, "exposed_ns_eager": case.single(launches), "error": case.check(what)}


def _graphs(case: Case) -> tuple[Graph, Graph]:
    return capture(case.chain, case.repetitions), capture(case.precede, case.repetitions)


def _exposed_us(chain: Graph, alone: Graph) -> dict[str, float]:
    whole, predecessor = (statistics.median(graph.sample(REPLAYS)) for graph in (chain, alone))
    return {"chain": whole, "predecessor": predecessor, "exposed_us": whole - predecessor}


def facts(gpu: Gpu, command: str, carveout: int | None) -> dict[str, Any]:
    """Where, when and how."""
    return {
        "machine": gpu.name,
        "driver": smi(gpu.index)["driver_version"],
        "torch": doctor.version("torch"),
        "cutlass_dsl": doctor.version(COMPILER_PACKAGE),
        "clock_khz": gpu.attribute("CLOCK_RATE"),
        "predecessor_cycles": predecessor_cycles(gpu),
        "carveout": carveout,
        "date": datetime.date.today().isoformat(),
        "command": command,
    }


def run(
    mode: str, out: Path, carveout: int | None, gpu: Gpu | None = None, engines: str | None = None
) -> Path:
    """Measures in a mode and writes OUT/<mode>.json, whose path it returns. engines: "producer,wgmma", None for all.

    Raises ValueError for an unknown engine, before a GPU is touched.
    """
    chosen = None if engines is None else subjects(engines)
    gpu = gpu or Gpu(0)
    prefix = "" if mode == "times" else "run-iket profile --postprocess all -- "
    command = f"{prefix}python -m oproj_lib.bench.iket_run {mode} OUT"
    command += f" --carveout {carveout}" if carveout is not None else ""
    command += f" --engines {engines}" if engines is not None else ""
    result = {"facts": facts(gpu, command, carveout), "cases": measure(gpu, mode, carveout, chosen)}
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{mode}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def main(words: Sequence[str] | None = None, write: Callable[[str], Any] = print) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m oproj_lib.bench.iket_run", description=(__doc__ or "").split("\n")[0]
    )
    commands = parser.add_subparsers(dest="mode", required=True)
    for name in LAUNCHES:
        command = commands.add_parser(name)
        command.add_argument("out", type=Path)
        command.add_argument(
            "--carveout", type=int, help="percent of the L1 that the predecessor leaves to shared memory"
        )
        command.add_argument("--engines", help="such as producer,wgmma (default: all that have events)")
    record = commands.add_parser("record")
    record.add_argument("out", type=Path, help="where times and launches wrote")
    record.add_argument("trace", type=Path, help="IKET's .trace.json")
    record.add_argument("--data", type=Path, default=DATA)
    chosen = parser.parse_args(words)
    try:
        if chosen.mode == "record":
            path = record_iket(
                chosen.trace, chosen.out / "times.json", chosen.out / "launches.json", chosen.data
            )
        else:
            path = run(chosen.mode, chosen.out, chosen.carveout, engines=chosen.engines)
    except (ValueError, RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    write(str(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
