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
"""Where the recorded session of this package is, as soon as there is one."""
COMMAND = "`torchrun --nproc-per-node 2 -m oproj_lib.bench.exchange --programs ... --out ...`"
ALTERNATIVES = {
    "nccl": "torch.mm + NCCL all_reduce",
    "one_shot": "torch.mm + symm_mem one_shot_all_reduce",
    "two_shot": "torch.mm + symm_mem two_shot_all_reduce_",
}
METHOD = (
    "microseconds exposed: predecessor, projection, exchange and reduction, minus the predecessor alone, of the "
    "slowest rank; cold weights, CUDA graphs that all ranks begin together; median (quartiles) of replays"
)
TARGET_US, TARGET_RATIO = 5.0, 3.0
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


def recorded() -> MeasuredExchange | None:
    """The session of this package; None as long as there is none."""
    return read_exchange(FILE) if FILE.exists() else None


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


def target_lines(measured: MeasuredExchange) -> list[str]:
    """Met or missed, a line per M <= 8 at K = 1536."""
    lines = []
    for batch in (batch for batch in measured.batches(1536) if batch <= 8):
        ours, ratio = measured.best(1536, batch, ours=True), measured.ratio(1536, batch)
        lines.append(
            f"K = 1536, M = {batch}: {ours.median_us:.2f} us exposed ({measured.label(ours.candidate)}), "
            f"{'below' if ours.median_us < TARGET_US else 'not below'} {TARGET_US:g}; {ratio:.2f} times less than the "
            f"best alternative, {'at least' if ratio >= TARGET_RATIO else 'less than'} {TARGET_RATIO:g}"
        )
    return lines


def parts(measured: MeasuredExchange | None) -> list[Table | str]:
    """What there is to print: a table per K, the targets, and the command that measured it."""
    if measured is None:
        return [f"not measured yet: {COMMAND} writes {FILE.name}"]
    tables: list[Table | str] = [exchange_table(measured, k) for k in measured.ks]
    return [*tables, *target_lines(measured), f"command: {measured.provenance.command}"]


def main(path: str) -> None:
    """Print a data file."""
    console = Console(width=140)
    for part in parts(read_exchange(Path(path))):
        console.print(part, highlight=False)


if __name__ == "__main__":
    main(sys.argv[1])
