"""When the grids of all ranks started, let their dependents go, waited and ended: one row per grid.

    reports = gpu.synchronize(...)
    rows = timeline(handles)              # rank by rank, in the order of each rank's stream
    table(rows)                           # as text
    figures.rank_timeline(rows)           # as a picture

The clock is the virtual GPU's, which all ranks share: steps, one instruction of one group of threads each. It
shows order and overlap, and no duration on hardware.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:  # a GPU machine need not have what the virtual GPU needs
    from oproj_lib import vgpu


@dataclass(frozen=True)
class GridRow:
    """One grid of one rank; times in steps. trigger: the last CTA has triggered or exited; wait_begin: the first
    thread is at griddepcontrol.wait; wait_end: the last one is past it. None: it did not happen."""

    rank: int
    grid: str
    start: int | None
    trigger: int | None
    wait_begin: int | None
    wait_end: int | None
    end: int | None


def timeline(handles: Iterable[vgpu.GridHandle]) -> list[GridRow]:
    """Rows of grids that `synchronize` has run: by rank, and on a rank in the order of its stream.

    Raises RuntimeError for a grid that has not run.
    """
    rows = []
    for handle in sorted(handles, key=lambda handle: handle.rank):  # stable: the order of a stream stays
        _ = handle.report  # raises before it has run
        times = handle.times
        rows.append(
            GridRow(
                handle.rank,
                handle.name,
                times.start,
                times.trigger,
                times.wait_begin,
                times.wait_end,
                times.end,
            )
        )
    return rows


def table(rows: Iterable[GridRow], title: str = "grids of all ranks, in steps of the virtual GPU") -> Table:
    """The rows as a table for a terminal or a notebook."""
    shown = Table(title=title)
    for field in fields(GridRow):
        left = field.name == "grid"
        shown.add_column(
            field.name.replace("_", " "),
            justify="left" if left else "right",
            overflow="fold",
            no_wrap=not left,
        )
    for row in rows:
        shown.add_row(*("-" if value is None else str(value) for value in astuple(row)))
    return shown
