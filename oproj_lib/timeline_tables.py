"""Tables beside timelines: what the model costs, who waited for what, what broken kernels are reported for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from rich.table import Table

from oproj_lib.cost_model import CostModel
from oproj_lib.lessons.mistakes import MistakeReport
from oproj_lib.timeline import Timeline


def cost_table(model: CostModel) -> Table:
    """Every constant of the model, with its reason."""
    table = Table(title="the cost model: public numbers, rounded; none fitted to this kernel")
    table.add_column("constant", style="bold", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("why")
    for row in model.table():
        table.add_row(str(row["constant"]), f"{row['value']:g} {row['unit']}".strip(), str(row["why"]))
    return table


def waits_table(timeline: Timeline, lanes: Iterable[str]) -> Table:
    """What some lanes did and what they waited for, as shares of the whole time."""
    table = Table(title=f"of {timeline.makespan:,.0f} {timeline.clock}")
    for name in ("lane", "time", "share", "doing what"):
        table.add_column(name, justify="left" if name in ("lane", "doing what") else "right", no_wrap=True)
    busy = timeline.busy()
    waited: dict[tuple[str, str], float] = {}
    for (owner, what), time in timeline.waited().items():
        key = (owner, re.sub(r"\[\d+\]", " of any slot", what))
        waited[key] = waited.get(key, 0.0) + time
    for lane in lanes:
        rows = [("works", busy[lane])]
        rows += [(f"waits for {what}", time) for (owner, what), time in waited.items() if owner == lane]
        for what, time in sorted(rows, key=lambda row: -row[1]):
            table.add_row(lane, f"{time:,.0f}", f"{time / timeline.makespan:.0%}", what)
    return table


def mistakes_table(reports: Iterable[MistakeReport]) -> Table:
    """One row per broken kernel: what is wrong with it, and the first thing that is reported."""
    table = Table(title="what each mistake is reported as", show_lines=True)
    table.add_column("mistake", style="bold")
    table.add_column("reported as")
    table.add_column("at", no_wrap=True)
    for report in reports:
        table.add_row(report.name, f"{report.kind}: {report.message}", report.where)
    return table


def role_table(engine: type) -> str:
    """The part of a kernel's documentation that says who waits for whom.

    Raises ValueError for a class whose documentation has no such table.
    """
    text = inspect.getdoc(engine) or ""
    start, end = text.find("Who waits for whom"), text.find("Raises")
    if start < 0:
        raise ValueError(f"the documentation of {engine.__name__} has no table 'Who waits for whom'")
    return text[start : end if end > start else len(text)].strip()
