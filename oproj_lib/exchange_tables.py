"""Tables of notebook 11: where chunks went, what pollers took, broken rules, one shot against two, recorded times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from oproj_lib.exchange_costs import Cost, RecordedExchange
from oproj_lib.lessons.mailbox_runs import BROKEN, Delivery, ExchangeRun, Polled
from oproj_lib.program import Program


def _table(title: str, *columns: str, caption: str | None = None) -> Table:
    """The first column to the left, the others to the right."""
    table = Table(title=title, caption=caption)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


def deliveries_table(found: Sequence[Delivery]) -> Table:
    """Bytes that changed in each rank's copy, and the 16-byte stores that did it, as the virtual GPU counted them."""
    ranks = len(found[0].bytes_at)
    names = [f"copy of rank {rank}" for rank in range(ranks)]
    table = _table(
        f"rank {found[0].writer} publishes: bytes that changed", "form", *names, "stores", "per chunk"
    )
    for delivery in found:
        arrived = [f"{count:,}" for count in delivery.bytes_at]
        table.add_row(
            delivery.form, *arrived, f"{delivery.stores:,}", f"{delivery.stores / delivery.chunks:g}"
        )
    return table


def torn_table(polled: Mapping[str, Sequence[Polled]]) -> Table:
    """What each poller did with a chunk of ones of which a word had not arrived."""
    table = Table(title="a chunk of ones, one word still on its way")
    table.add_column("word on its way", justify="right")
    for name in polled:
        table.add_column(f"tests {name}")
    for rows in zip(*polled.values(), strict=True):
        cells = [
            "polls on" if row.findings else "took " + " ".join(f"{word:08x}" for word in row.words)
            for row in rows
        ]
        table.add_row(str(rows[0].missing[0]), *cells)
    return table


def poll_loop(program: Program) -> str:
    """The polling loop of a consumer's PTX, an instruction per line.

    Raises ValueError for a program without one.
    """
    for line in program.ptx.splitlines():
        if "TEST_" in line and "DONE_" in line:
            body = line.strip().removeprefix("{").removesuffix("}")
            parts = [part.strip() for part in body.replace(":", ":;").split(";")]
            return "\n".join(part if part.endswith(":") else f"    {part};" for part in parts if part)
    raise ValueError(f"{program.name} has no polling loop")


def broken_table(runs: Mapping[str, Sequence[ExchangeRun]]) -> Table:
    """Per broken rule: its story, in how many runs it did what, and what was reported."""
    table = Table(title="rules broken, two ranks, one of them slow: number of runs")
    table.add_column("mistake", style="bold")
    table.add_column("what it does")
    for name in ("no harm", "reported", "only wrong sums"):
        table.add_column(name, justify="right", width=8)
    table.add_column("reported as")
    for name, tried in runs.items():
        reported = sum(bool(run.findings) for run in tried)
        silent = sum(not run.findings and run.wrong > 0 for run in tried)
        counts = [
            str(count) if count else "-" for count in (len(tried) - reported - silent, reported, silent)
        ]
        kinds = sorted({finding.kind for run in tried for finding in run.findings})
        table.add_row(name, BROKEN[name].story, *counts, ", ".join(kinds) or "-")
    return table


def costs_table(costs: Sequence[Cost], ranks: int, tokens: int) -> Table:
    """The four forms of an exchange, by formula."""
    table = _table(
        f"computed: one exchange of {tokens} x 7168 over {ranks} ranks, per rank",
        "form",
        "KB leave",
        "KB arrive",
        "KB polled",
        "stores per chunk",
        "additions",
        "crossings",
        caption="KB = 1000 bytes; leaving and arriving: between GPUs only",
    )
    for row in costs:
        kilobytes = [f"{count / 1e3:,.1f}" for count in (row.leaves, row.arrives, row.polled)]
        table.add_row(
            row.form, *kilobytes, f"{float(row.stores):g}", f"{row.additions:,}", str(row.crossings)
        )
    return table


def recorded_exchange_table(recorded: RecordedExchange) -> Table:
    """Recorded microseconds of exchanges by themselves."""
    table = _table(
        f"recorded on {recorded.machine}, {recorded.date}, {recorded.software}",
        "exchange",
        *(f"M = {batch}" for batch in recorded.batches),
        caption=recorded.method,
    )
    for name, times in recorded.us.items():
        table.add_row(
            name,
            *(f"{times[batch]:.1f}" if batch in times else "not recorded" for batch in recorded.batches),
        )
    return table
