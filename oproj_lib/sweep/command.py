"""`check --part sweep`: builds in a pool, compares on the GPU, writes the data file as it goes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from oproj_lib import provenance
from oproj_lib.devices import cuda
from oproj_lib.doctor import CAPABILITY
from oproj_lib.sass import find_nvdisasm
from oproj_lib.sweep import builds, expected, record
from oproj_lib.sweep.comparison import Comparison
from oproj_lib.sweep.points import TARGET, members, points

LAUNCHES = 2
"""Per build and kind of inputs: one with the PDL attribute, one without."""
EVERY_SECONDS = 10.0
"""How often progress is printed, and the data file written."""
SHOWN = 40
"""Findings that are printed; the data file has all."""


def sweep(arguments: argparse.Namespace) -> bool:
    """Runs the sweep; whether everything agreed.

    Raises ValueError for options that do not belong to it and for numbers that make no sense, before a GPU is touched,
    and for another GPU than the builds are for; FileNotFoundError for --machine-code without nvdisasm.
    """
    check_options(arguments)
    jobs = builds.default_jobs() if arguments.jobs is None else arguments.jobs
    launches = LAUNCHES if arguments.launches is None else arguments.launches
    plan, wanted = members(), expected.read()
    gpu = cuda.Gpu(arguments.gpu)
    if gpu.capability != CAPABILITY[TARGET]:
        raise ValueError(f"the sweep builds for {TARGET}, and {gpu.name} has capability {gpu.capability}")
    comparison = Comparison(gpu, wanted, launches)
    clocks = {"before": provenance.smi(arguments.gpu)}
    source = provenance.collect(gpu, ["python", "-m", "oproj_lib", *sys.argv[1:]], clocks)
    options = {"jobs": jobs, "limit_seconds": arguments.limit_seconds}

    def write() -> dict[str, Any]:
        data = record.as_data(replace(source, clocks=clocks), comparison, plan, options)
        if arguments.out:
            record.write(arguments.out, data)
        return data

    recipes = points(plan)
    print(f"{len(plan)} configurations, {len(recipes)} builds in {jobs} processes", flush=True)
    try:
        with closing(builds.build_all(recipes, jobs, arguments.machine_code)) as ready:
            comparison.run(ready, arguments.limit_seconds, Progress(len(recipes), write))
    finally:  # after an error, too: what was compared before it stays
        clocks["after"] = provenance.smi(arguments.gpu)
        data = write()
    return show(data)


def check_options(arguments: argparse.Namespace) -> None:
    """What can be refused before a GPU is touched: see ``sweep``."""
    if arguments.programs or arguments.quick:
        raise ValueError(
            "the sweep compiles every configuration itself: leave out --programs and --quick; --limit-seconds ends "
            "it early"
        )
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ValueError(f"--jobs {arguments.jobs}: at least 1")
    if arguments.launches is not None and arguments.launches < 1:
        raise ValueError(f"--launches {arguments.launches}: at least 1")
    if arguments.limit_seconds is not None and arguments.limit_seconds <= 0:
        raise ValueError(f"--limit-seconds {arguments.limit_seconds:g}: more than 0, or leave it out")
    if arguments.machine_code:
        find_nvdisasm()  # says what to install


class Progress:
    """Prints a line and writes the data file every few seconds."""

    def __init__(self, total: int, write: Callable[[], Any]) -> None:
        self.total, self.write, self.last = total, write, time.monotonic()

    def __call__(self, comparison: Comparison) -> None:
        now = time.monotonic()
        if now - self.last < EVERY_SECONDS:
            return
        self.last = now
        wrong = sum(len(result.findings) for result in comparison.results)
        done = f"{len(comparison.results)} of {self.total} builds"
        print(f"{comparison.seconds:.0f} s: {done}, {wrong} findings", flush=True)
        self.write()


def show(data: Mapping[str, Any]) -> bool:
    """Print the table, findings and the statement; whether everything agreed."""
    console = Console()
    table = Table(title="every configuration, compared with the virtual GPU")
    names = ("engine", "k", "path", "configurations_compared", "builds_compared", "launches", "identical")
    for name in names:
        table.add_column(name.replace("_", " "))
    for family in data["families"]:
        good = family["identical"] == family["builds_compared"]
        table.add_row(*(str(family[name]) for name in names), style=None if good else "red")
    console.print(table)
    for line in data["findings"][:SHOWN]:
        console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)
    print(record.statement(data))
    return not data["findings"]
