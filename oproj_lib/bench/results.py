"""The data of a benchmark on hardware: rows, the file they live in, and tables. Everything here was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from oproj_lib.bench.measure import Ceilings, Statistics
from oproj_lib.provenance import Provenance, read_provenance

WHAT = "oproj_lib bench on hardware"
DATA_FORMAT = 1
METHOD = (
    "CUDA graph replays between events, cold weights (equal copies at other addresses, many times the L2), median "
    "and quartiles of replays, outputs checked against float64 after timing"
)
EXPOSED_METHOD = (
    "chain of a predecessor (lets its dependents start at once, works, then writes x), the projection and a consumer, "
    "all with programmatic dependent launch, minus predecessors alone, per repetition; predecessor: spin is 132 x 128 "
    "threads that leave the memory alone, read 132 x 512 that read 35 MB; "
    "consumer: next is the next predecessor, copy a kernel that copies the output"
)


@dataclass(frozen=True)
class Row:
    """One way to project at one (K, M).

    alone: launches back to back; None for a kernel that computes nothing. exposed: what the chain takes longer than
    its predecessor alone. error: relative Frobenius, of the output that was timed.
    """

    k: int
    batch: int
    name: str
    settings: Mapping[str, int | str]
    pdl: bool
    alone: Statistics | None
    exposed: Statistics
    error: float | None
    moved_bytes: int

    @property
    def title(self) -> str:
        """`producer (staged_blocks 4, rows 1, group_tiles 0)`"""
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        return f"{self.name} ({settings})" if settings else self.name

    @property
    def tb_s(self) -> float | None:
        """Bytes that must move over the time alone."""
        return self.moved_bytes / self.alone.median_us / 1e6 if self.alone else None


@dataclass(frozen=True)
class JobResult:
    """All rows of one (K, M), measured in turn in the same passes. failures: name -> why it was not measured."""

    k: int
    batch: int
    weight_copies: int
    predecessor: Statistics
    rows: tuple[Row, ...]
    failures: Mapping[str, str]


@dataclass(frozen=True)
class HardwareBench:
    """One benchmark session on one GPU."""

    provenance: Provenance
    ceilings: Ceilings
    rounds: int
    replays: int
    carveout: int | None
    consumer: str
    jobs: tuple[JobResult, ...]
    predecessor: str = "spin"

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for job in self.jobs for row in job.rows)

    @property
    def chain(self) -> str:
        """What stands around the projection: `predecessor spin, consumer next`."""
        return f"predecessor {self.predecessor}, consumer {self.consumer}"

    def best(self, k: int, batch: int, name: str, by: str = "exposed") -> Row | None:
        """The fastest row of a name at (k, batch), by its median "exposed" or "alone"; None where there is none."""
        rows = [row for row in self.rows_at(k, batch, name) if getattr(row, by)]
        return min(rows, key=lambda row: float(getattr(row, by).median_us), default=None)

    def rows_at(self, k: int, batch: int, name: str) -> tuple[Row, ...]:
        """The rows of a name at (k, batch); a bundle lists the build that is measured at every size first."""
        return tuple(row for row in self.rows if (row.k, row.batch, row.name) == (k, batch, name))

    def names(self) -> tuple[str, ...]:
        """Every name, in the order measured."""
        return tuple(dict.fromkeys(row.name for row in self.rows))

    def batches(self, k: int) -> tuple[int, ...]:
        """Tokens measured at K, ascending."""
        return tuple(sorted({job.batch for job in self.jobs if job.k == k}))

    def as_dict(self) -> dict[str, Any]:
        """The data file."""
        return {
            "format": DATA_FORMAT,
            "what": WHAT,
            "method": METHOD,
            "exposed_method": EXPOSED_METHOD,
            **asdict(self),
        }


def write_bench(path: Path | str, bench: HardwareBench) -> None:
    """Write the data file."""
    Path(path).write_text(json.dumps(bench.as_dict(), indent=1) + "\n", encoding="utf-8")


def read_bench(path: Path | str) -> HardwareBench:
    """Read a data file. Raises ValueError for one of another kind or version."""
    fields = json.loads(Path(path).read_text(encoding="utf-8"))
    if (fields.get("what"), fields.get("format")) != (WHAT, DATA_FORMAT):
        raise ValueError(f"{path} is no data file of `bench --device cuda` in format {DATA_FORMAT}")
    try:
        return HardwareBench(
            provenance=read_provenance(fields["provenance"]),
            ceilings=Ceilings(**fields["ceilings"]),
            rounds=fields["rounds"],
            replays=fields["replays"],
            carveout=fields["carveout"],
            consumer=fields["consumer"],
            jobs=tuple(_job(job) for job in fields["jobs"]),
            predecessor=fields.get("predecessor", "spin"),  # the only one of the first data files
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path} lacks a field of `bench --device cuda`, or has an unknown one: {error}"
        ) from error


def _job(fields: dict[str, Any]) -> JobResult:
    predecessor = _statistics(fields.pop("predecessor"))
    rows = tuple(_row(row) for row in fields.pop("rows"))
    return JobResult(**fields, predecessor=predecessor, rows=rows)


def _row(fields: dict[str, Any]) -> Row:
    alone, exposed = fields.pop("alone"), fields.pop("exposed")
    return Row(**fields, alone=_statistics(alone) if alone else None, exposed=_statistics(exposed))


def _statistics(fields: dict[str, Any]) -> Statistics:
    return Statistics(**{**fields, "rounds_us": tuple(fields["rounds_us"])})


def bench_tables(bench: HardwareBench, *, recorded: bool) -> list[Table]:
    """One table per K; recorded: whether the numbers come from a file, which the title then says."""
    how = "recorded on" if recorded else "measured on"
    tables = []
    for k in sorted({job.k for job in bench.jobs}):
        table = Table(
            title=f"K = {k}: {how} {bench.provenance.title}",
            caption=f"microseconds, median and quartiles; memory reached {bench.ceilings.best_tb_s:.2f} TB/s in the "
            f"same session; exposed: what a layer waits ({bench.chain})",
        )
        for name in ("M", "projection", "alone", "TB/s", "exposed", "error"):
            table.add_column(name, justify="left" if name == "projection" else "right")
        for job in (job for job in bench.jobs if job.k == k):
            for row in job.rows:
                table.add_row(str(job.batch), row.title, *_cells(row))
            for name, why in job.failures.items():
                table.add_row(
                    str(job.batch), name, "not measured", "", why.splitlines()[0][:60], "", style="red"
                )
            table.add_section()
        tables.append(table)
    return tables


def _cells(row: Row) -> Sequence[str]:
    def spread(statistics: Statistics | None) -> str:
        if statistics is None:
            return "–"
        return f"{statistics.median_us:.2f} [{statistics.q1_us:.2f}, {statistics.q3_us:.2f}]"

    tb_s = f"{row.tb_s:.2f}" if row.tb_s else "–"
    return spread(row.alone), tb_s, spread(row.exposed), f"{row.error:.1e}" if row.error else "–"
