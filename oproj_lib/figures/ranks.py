"""Grids of several ranks on one clock: who runs, who waits, who has let whom go."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from oproj_lib.figures.style import INK, MUTED, ORANGE, PALE, PAPER, PURPLE, SKY, YELLOW, Picture, plain
from oproj_lib.ranks.grid_times import GridRow

COLOURS = (SKY, ORANGE, PURPLE, YELLOW)
LANE = 0.8
"""Height of a grid, where a lane is 1."""
INCHES_PER_LANE = 0.26
MAX_GRIDS = 400
SHAPE = re.compile(r"(k|m|r|nb)\d+|sm")
"""Where the shapes of a program's name begin."""


def rank_timeline(rows: Sequence[GridRow], *, title: str = "") -> Picture:
    """A bar per grid, a band per rank; grids that overlap lie in lanes of their own. rows: from `ranks.timeline`.

    Hatched: between the first thread at griddepcontrol.wait and the last one past it. Triangle: the dependents
    may start. A grid that did not end is drawn to the edge, with a dashed outline.

    Raises ValueError for no rows, or too many to be seen.
    """
    started = [row for row in rows if row.start is not None]
    if not started or len(started) > MAX_GRIDS:
        raise ValueError(f"{len(started)} grids that started: a picture shows 1 to {MAX_GRIDS}")
    last = max(
        time
        for row in started
        for time in (row.start, row.trigger, row.wait_end, row.end)
        if time is not None
    )
    edge = max(1, last)
    kinds = list(dict.fromkeys(kind(row) for row in started))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(kinds)}
    bands = {
        rank: _lanes([row for row in started if row.rank == rank], edge)
        for rank in sorted({r.rank for r in started})
    }
    lanes = sum(len(band) for band in bands.values())
    picture = Picture(10.5, 1.3 + INCHES_PER_LANE * lanes + 0.1 * len(bands))
    axes = plain(
        picture.subplots(), title=title or "grids of all ranks", x="steps of the virtual GPU: order, not time"
    )
    top, ticks = 0.0, []
    for rank, band in bands.items():
        ticks.append((top + len(band) / 2, f"rank {rank}"))
        for lane in band:
            for row in lane:
                _bar(axes, row, top, edge, colours[kind(row)])
            top += 1
        axes.axhline(top + 0.15, color=PALE, lw=0.8)
        top += 0.3
    axes.set(xlim=(0, edge * 1.01), ylim=(top, -0.2))
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    picture.legend(
        handles=_legend(colours), loc="outside lower center", ncols=len(kinds) + 2, fontsize=8, frameon=False
    )
    picture.alt = _alt(started, bands, edge)
    return picture


def kind(row: GridRow) -> str:
    """What the grid is, without shapes and target: ``producer`` of ``producer_k1536_m8_sm_90a``."""
    words = list(itertools.takewhile(lambda word: not SHAPE.fullmatch(word), row.grid.split("_")))
    return " ".join(words) or row.grid


def _lanes(rows: Sequence[GridRow], edge: int) -> list[list[GridRow]]:
    """Rows of one rank in as few lanes as possible, none of which overlap."""
    lanes: list[list[GridRow]] = []
    for row in sorted(rows, key=lambda row: row.start or 0):
        free = [lane for lane in lanes if _end(lane[-1], edge) <= (row.start or 0)]
        if free:
            free[0].append(row)
        else:
            lanes.append([row])
    return lanes


def _end(row: GridRow, edge: int) -> int:
    return edge if row.end is None else row.end


def _bar(axes: Axes, row: GridRow, top: float, edge: int, colour: str) -> None:
    start, end = row.start or 0, _end(row, edge)
    low = top + (1 - LANE) / 2
    style = "--" if row.end is None else "-"
    axes.add_patch(
        Rectangle((start, low), end - start, LANE, facecolor=colour, edgecolor=INK, lw=0.5, ls=style)
    )
    if row.wait_begin is not None:
        until = end if row.wait_end is None else row.wait_end
        axes.add_patch(
            Rectangle((row.wait_begin, low), until - row.wait_begin, LANE, facecolor=PAPER, alpha=0.75, hatch="////",
                      edgecolor=MUTED, lw=0)
        )  # fmt: skip
    if row.trigger is not None:
        axes.plot([row.trigger], [low], marker="v", color=INK, ms=3.5, clip_on=False)


def _legend(colours: dict[str, str]) -> list[Patch | Line2D]:
    return [
        *(Patch(facecolor=colour, edgecolor=INK, lw=0.5, label=name) for name, colour in colours.items()),
        Patch(facecolor=PAPER, edgecolor=MUTED, hatch="////", label="waits for the previous grid"),
        Line2D([], [], marker="v", color=INK, ls="", ms=4, label="dependents may start"),
    ]


def _alt(rows: Sequence[GridRow], bands: dict[int, list[list[GridRow]]], edge: int) -> str:
    """What the picture shows, in words."""
    overlapping = sum(
        1
        for rank in bands
        for first, second in itertools.pairwise(row for row in rows if row.rank == rank)
        if second.start is not None and second.start < _end(first, edge)
    )
    stuck = sum(row.end is None for row in rows)
    parts = []
    for rank in bands:
        mine = [row for row in rows if row.rank == rank]
        parts.append(
            f"rank {rank} from {min(r.start or 0 for r in mine)} to {max(_end(r, edge) for r in mine)}"
        )
    ended = f" {stuck} did not end." if stuck else ""
    return (
        f"Timeline of {len(rows)} grids on {len(bands)} ranks, in steps of the virtual GPU: {', '.join(parts)}. "
        f"{overlapping} grids start before the one ahead of them in their stream has ended.{ended}"
    )
