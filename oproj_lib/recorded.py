"""Times recorded on hardware, kept as data with machine, date and method. Nothing here is modelled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from oproj_lib.bench.results import HardwareBench, read_bench

DATA = Path(__file__).resolve().parent / "data"


@dataclass(frozen=True)
class Exposed:
    """What a decode layer waits for the projection, microseconds, by load instruction and beside cuBLAS."""

    staged_blocks: int
    nc_us: float
    coherent_us: float
    cublas_us: float


@dataclass(frozen=True)
class Recorded:
    """One recording session on one machine. kernel_us: (k, batch) -> name -> microseconds."""

    machine: str
    date: str
    software: str
    method: str
    exposed_method: str
    copy_tb_s: float
    empty_kernel_us: float
    empty_kernel_exposed_us: float
    kernel_us: Mapping[tuple[int, int], Mapping[str, float]]
    exposed: Mapping[int, tuple[Exposed, ...]]


def recorded_h200() -> Recorded:
    """The session on an H200."""
    data = json.loads((DATA / "recorded_h200.json").read_text(encoding="utf-8"))
    kernel: dict[tuple[int, int], dict[str, float]] = {}
    for row in data["kernel_us"]:
        names = {name: us for name, us in row.items() if name not in ("k", "batch")}
        kernel[row["k"], row["batch"]] = names
    for row in data["prototype_us"]:
        kernel[row["k"], row["batch"]]["prototype"] = row["us"]
    tables = ("kernel_us", "prototype_us", "exposed_us")
    plain = {name: value for name, value in data.items() if name not in tables}
    return Recorded(**plain, kernel_us=kernel, exposed=_exposed(data["exposed_us"]))


def recorded_bench(path: Path | str = DATA / "bench_h200.json") -> HardwareBench:
    """The recorded benchmark session; show its numbers with ``bench_tables(bench, recorded=True)``.

    Raises FileNotFoundError where there is none, with the command that makes one.
    """
    if not Path(path).exists():
        raise FileNotFoundError(
            f"no recorded benchmark at {path}: `python -m oproj_lib bench --device cuda --out {path}` makes one"
        )
    return read_bench(path)


def bench_statement(bench: HardwareBench, k: int, batch: int) -> str:
    """One sentence for a reader: what a layer waits at (k, batch), for our best kernel and for torch.mm.

    Raises ValueError where the session has no such size.
    """
    ours = [row for name in ("direct", "producer", "wgmma", "umma") if (row := bench.best(k, batch, name))]
    blas = bench.best(k, batch, "torch.mm")
    if not ours or blas is None:
        raise ValueError(
            f"K = {k}, M = {batch} was not recorded with torch.mm; M at this K: {bench.batches(k)}"
        )
    best = min(ours, key=lambda row: row.exposed.median_us)
    return (
        f"recorded on {bench.provenance.title}: at K = {k}, M = {batch} a layer waits {best.exposed.median_us:.2f} us "
        f"for {best.title} and {blas.exposed.median_us:.2f} us for torch.mm"
    )


def _exposed(rows: list[dict[str, Any]]) -> dict[int, tuple[Exposed, ...]]:
    found: dict[int, list[Exposed]] = {}
    for row in rows:
        times = Exposed(row["staged_blocks"], row["ld.global.nc"], row["ld.global"], row["cuBLAS"])
        found.setdefault(row["k"], []).append(times)
    return {k: tuple(times) for k, times in found.items()}


def kernel_table(recorded: Recorded, k: int, floors_us: Mapping[int, float]) -> Table:
    """Recorded times at one K beside the floor, floors_us: batch -> microseconds (modelled, and labelled
    so)."""
    table = Table(
        title=f"K = {k}: recorded on {recorded.machine}, {recorded.date}, {recorded.software}",
        caption=f"{recorded.method}; the last column is bytes over bandwidth, modelled",
    )
    batches = [batch for known, batch in recorded.kernel_us if known == k]
    names = list(dict.fromkeys(name for batch in batches for name in recorded.kernel_us[k, batch]))
    for name in ("M", *names, "floor (modelled)"):
        table.add_column(name, justify="right")
    for batch in batches:
        times = recorded.kernel_us[k, batch]
        cells = [f"{times[name]:.1f}" if name in times else "not recorded" for name in names]
        table.add_row(str(batch), *cells, f"{floors_us[batch]:.1f}")
    return table
