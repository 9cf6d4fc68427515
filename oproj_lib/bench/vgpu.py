"""How fast the virtual GPU runs the producer on this machine, per mode: fast, exact, with all checks."""

from __future__ import annotations

import datetime
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from tqdm.auto import tqdm

from oproj_lib import doctor
from oproj_lib.problem import Problem
from oproj_lib.program import build_producer
from oproj_lib.run import SLOTS, launch_on_vgpu, producer_for

MODES: dict[str, dict[str, bool]] = {
    "fast": {},
    "exact": {"exact": True},
    "fast, all checks": {"checks": True},
    "exact, all checks": {"exact": True, "checks": True},
}


@dataclass(frozen=True)
class Mode:
    name: str
    seconds: float
    thread_instructions: int


@dataclass(frozen=True)
class Benchmark:
    """Median seconds per launch and mode; building and decoding are not in it."""

    target: str
    k: int
    batch: int
    configuration: dict[str, int]
    repeat: int
    machine: str
    date: str
    modes: tuple[Mode, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    *, ranks: int = 8, batch: int = 8, target: str = "sm_90a", repeat: int = 5, progress: bool = True
) -> Benchmark:
    """Launches the recommended producer `repeat` times per mode, after one launch that warms up.

    Raises ValueError for settings that do not exist, RuntimeError if a launch has findings.
    """
    if repeat < 1:
        raise ValueError(f"repeat = {repeat}: at least 1 launch per mode")
    shape = Problem(ranks, batch)
    producer = producer_for(shape.k, batch)
    program = build_producer(producer, target=target, batch=batch, mailbox_slots=SLOTS, mailbox_tokens=batch)
    x, weight = shape.inputs(seed=0)
    modes = []
    with tqdm(total=len(MODES) * (repeat + 1), disable=not progress, desc="launches", leave=False) as bar:
        for name, options in MODES.items():
            times, instructions = [], 0
            for launch in range(repeat + 1):
                _, report, _ = launch_on_vgpu(program, x, weight, ranks=1, **options)
                bar.update()
                if report.findings:
                    raise RuntimeError(f"mode {name}: {report.findings[0]}")
                instructions = report.counters.thread_instructions
                if launch:
                    times.append(report.seconds)
            modes.append(Mode(name, statistics.median(times), instructions))
    machine = doctor.examine()
    where = f"{machine.processor}, {machine.cores} cores, Python {machine.python}, numpy {machine.packages['numpy']}"
    date = datetime.date.today().isoformat()
    return Benchmark(target, shape.k, batch, producer.settings(), repeat, where, date, tuple(modes))
