"""Recorded times of whole exchanges on several GPUs, as ``bench.exchange`` wrote them, and their table.

`python -m oproj_lib.measured_exchange exchange.json` prints a data file's table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from oproj_lib.provenance import Provenance, read_provenance
from oproj_lib.recorded import DATA

SCHEMA = "oproj_lib exchange 2"
FILE = DATA / "exchange_h200x2.json"
"""The recorded session of this package."""
COMMAND = "`torchrun --nproc-per-node 2 -m oproj_lib.bench.exchange --programs ... --out ...`"
ALTERNATIVES = {
    "nccl": "torch.mm + NCCL all_reduce",
    "one_shot": "torch.mm + one_shot_all_reduce",
    "two_shot": "torch.mm + two_shot_all_reduce_",
}
METHOD = (
    "microseconds exposed: predecessor, projection, exchange and reduction, minus the predecessor alone, of the "
    "slowest rank; cold weights, CUDA graphs that all ranks begin together; median (quartiles) of replays; one_shot "
    "and two_shot are those of torch's symmetric memory; in bold the least exposed of ours and of torch's"
)
TARGET_US, TARGET_RATIO, TARGET_BATCH = 5.0, 3.0, 8
"""What the exchange is built for at M <= 8, K = 1536: fewer exposed microseconds, and so many times fewer than the best
alternative."""


@dataclass(frozen=True)
class ExchangeRow:
    """One candidate at one (K, M). Microseconds exposed: median and quartiles of ``replays``; predecessor_us: the
    predecessor alone, per repetition."""

    k: int
    batch: int
    candidate: str
    ours: bool
    median_us: float
    q1_us: float
    q3_us: float
    replays: int
    predecessor_us: float


@dataclass(frozen=True)
class MeasuredExchange:
    """A recorded session. plans: of every candidate of ours, by its name."""

    provenance: Provenance
    ranks: int
    repetitions: int
    plans: Mapping[str, Mapping[str, Any]]
    rows: tuple[ExchangeRow, ...]

    @property
    def title(self) -> str:
        """`recorded on 2 x NVIDIA H200, 2026-11-30, torch 2.11.0, driver 580.159.04`"""
        return f"recorded on {self.ranks} x {self.provenance.title}"

    @property
    def ks(self) -> tuple[int, ...]:
        """Every K that was measured, the largest first."""
        return tuple(sorted({row.k for row in self.rows}, reverse=True))

    def batches(self, k: int) -> tuple[int, ...]:
        """Every M that was measured with this K."""
        return tuple(sorted({row.batch for row in self.rows if row.k == k}))

    def best(self, k: int, batch: int, *, ours: bool) -> ExchangeRow:
        """The least exposed of ours, or of the alternatives. Raises ValueError where there is none."""
        found = [row for row in self.rows if (row.k, row.batch, row.ours) == (k, batch, ours)]
        if not found:
            raise ValueError(f"nothing of {'ours' if ours else 'the alternatives'} at K = {k}, M = {batch}")
        return min(found, key=lambda row: row.median_us)

    def ratio(self, k: int, batch: int) -> float:
        """How many times more the best alternative exposes than the best of ours."""
        return self.best(k, batch, ours=False).median_us / self.best(k, batch, ours=True).median_us

    def label(self, candidate: str) -> str:
        """A candidate for people: `direct, fused, 1-shot`, `torch.mm + NCCL all_reduce`."""
        if candidate in ALTERNATIVES:
            return ALTERNATIVES[candidate]
        plan = self.plans[candidate]
        return f"{plan['engine']}, {'fused' if plan['fused'] else 'split'}, {plan['shots']}-shot"


def read_exchange(path: Path) -> MeasuredExchange:
    """A data file. Raises FileNotFoundError, and ValueError for one of another schema or with other fields."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise ValueError(
            f"{path.name}: schema {found!r}, this version reads {SCHEMA!r}: record it again with {COMMAND}"
        )
    wanted = {"schema", "provenance", "ranks", "repetitions", "plans", "rows"}
    _same_names(f"{path.name}", data, wanted)
    names = {field.name for field in fields(ExchangeRow)}
    for number, row in enumerate(data["rows"]):
        _same_names(f"{path.name}, row {number}", row, names)
        if row["candidate"] not in (data["plans"] if row["ours"] else ALTERNATIVES):
            raise ValueError(f"{path.name}, row {number}: candidate {row['candidate']!r} is not described")
        if not row["q1_us"] <= row["median_us"] <= row["q3_us"]:
            raise ValueError(f"{path.name}, row {number}: the median is not between the quartiles")
    if not data["rows"]:
        raise ValueError(f"{path.name}: no rows")
    return MeasuredExchange(
        read_provenance(data["provenance"]),
        data["ranks"],
        data["repetitions"],
        data["plans"],
        tuple(ExchangeRow(**row) for row in data["rows"]),
    )


def _same_names(where: str, found: Mapping[str, Any], wanted: set[str]) -> None:
    if set(found) != wanted:
        raise ValueError(
            f"{where}: lacks {sorted(wanted - set(found))}, unknown {sorted(set(found) - wanted)}"
        )


def recorded() -> MeasuredExchange:
    """The session of this package."""
    return read_exchange(FILE)


def exchange_table(measured: MeasuredExchange, k: int) -> Table:
    """All candidates of one K, ours first; the least exposed of ours and of the others in bold."""
    batches = measured.batches(k)
    table = Table(title=f"K = {k}: {measured.title}", caption=METHOD)
    table.add_column("exchange")
    for batch in batches:
        table.add_column(f"M = {batch}", justify="right")
    names = dict.fromkeys(row.candidate for row in measured.rows if row.k == k)
    cells = {(row.candidate, row.batch): row for row in measured.rows if row.k == k}
    best = {measured.best(k, batch, ours=ours) for batch in batches for ours in (True, False)}
    for name in names:
        texts = []
        for batch in batches:
            row = cells.get((name, batch))
            text = f"{row.median_us:.2f} ({row.q1_us:.2f}-{row.q3_us:.2f})" if row else "-"
            texts.append(f"[bold]{text}[/bold]" if row in best else text)
        table.add_row(measured.label(name), *texts)
    table.add_section()
    table.add_row(
        "best alternative / best of ours", *(f"{measured.ratio(k, batch):.2f}" for batch in batches)
    )
    return table


def exchange_markdown(measured: MeasuredExchange, k: int) -> str:
    """The table of docs/two_gpus.md for one K: medians, the least exposed of ours and of the others in bold."""
    batches = measured.batches(k)
    lines = [
        f"| K = {k} | {' | '.join(f'M = {batch}' for batch in batches)} |",
        f"| --- |{' ---: |' * len(batches)}",
    ]
    best = {measured.best(k, batch, ours=ours) for batch in batches for ours in (True, False)}
    cells = {(row.candidate, row.batch): row for row in measured.rows if row.k == k}
    for name in dict.fromkeys(row.candidate for row in measured.rows if row.k == k):
        rows = [cells.get((name, batch)) for batch in batches]
        texts = [
            f"**{row.median_us:.2f}**" if row in best else f"{row.median_us:.2f}" if row else ""
            for row in rows
        ]
        lines.append(f"| {measured.label(name)} | {' | '.join(texts)} |")
    ratios = " | ".join(f"{measured.ratio(k, batch):.2f}" for batch in batches)
    return "\n".join([*lines, f"| best alternative / best of ours | {ratios} |"])


def meets_target(measured: MeasuredExchange, batch: int) -> bool:
    """Whether M = ``batch`` at K = 1536 is as fast as it is meant to be, by itself and beside the alternatives."""
    ours = measured.best(1536, batch, ours=True).median_us
    return ours < TARGET_US and measured.ratio(1536, batch) >= TARGET_RATIO


def target_lines(measured: MeasuredExchange) -> list[str]:
    """Met or missed, a line per M <= 8 at K = 1536."""
    lines = []
    for batch in (batch for batch in measured.batches(1536) if batch <= TARGET_BATCH):
        ours, ratio = measured.best(1536, batch, ours=True), measured.ratio(1536, batch)
        lines.append(
            f"target {'met' if meets_target(measured, batch) else 'missed'} at K = 1536, M = {batch}: "
            f"{ours.median_us:.2f} us exposed ({measured.label(ours.candidate)}; wanted: under {TARGET_US:g}), "
            f"{ratio:.2f} times less than the best alternative (at least {TARGET_RATIO:g})"
        )
    return lines


def parts(measured: MeasuredExchange) -> list[Table | str]:
    """What there is to print: a table per K, the targets, and the command that measured it."""
    tables: list[Table | str] = [exchange_table(measured, k) for k in measured.ks]
    start, option, folders = measured.provenance.command.partition(" --programs ")
    plans = f"{option}..., {len(folders.split())} folders of programs, one a plan" if option else ""
    return [*tables, *target_lines(measured), f"command: {start}{plans}"]


def main(path: str) -> None:
    """Print a data file."""
    console = Console(width=140)
    for part in parts(read_exchange(Path(path))):
        console.print(part, highlight=False)


if __name__ == "__main__":
    main(sys.argv[1])
