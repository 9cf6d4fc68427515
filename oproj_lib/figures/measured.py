"""Benchmarks on hardware as pictures. Every title says which GPU, when, and with what; nothing is modelled but the
floor, and that is labelled.

Lines follow one build over all M: the first of its name in each job. (A bundle has more builds at M = 8; taking the
fastest only there would put a dent in every line.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from oproj_lib.bench.results import HardwareBench, Row
from oproj_lib.figures.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    VERMILLION,
    Picture,
    plain,
)
from oproj_lib.floor import work
from oproj_lib.problem import HIDDEN_K, Problem

STYLES = {
    "producer": ("o-", BLUE),
    "direct": ("D-", SKY),
    "wgmma": ("s-", GREEN),
    "umma": ("s-", GREEN),
    "torch.mm": ("^--", VERMILLION),
    "torch.mm, cublasLt": ("v--", ORANGE),
    "cublasLt, best heuristic": ("D--", PURPLE),
    "Triton split-K": ("x--", INK),
    "torch.compile": ("P--", MUTED),
    "producer, split": ("o-", BLUE),
    "producer, fused": ("o:", BLUE),
    "direct, split": ("D-", SKY),
    "direct, fused": ("D:", SKY),
    "wgmma, split": ("s-", GREEN),
    "wgmma, fused": ("s:", GREEN),
    "umma, split": ("s-", GREEN),
    "umma, fused": ("s:", GREEN),
    "torch.mm, then compiled AttnRes": ("^--", VERMILLION),
    "empty kernel": ("_:", MUTED),
}
OTHER = ("*:", MUTED)
LABEL_ROOM = 4.2
"""Octaves of M to the right of the last one, for the labels of the lines."""
LABEL_STEP = 0.062
"""Least distance of two labels, as a share of the axis."""


@dataclass(frozen=True)
class View:
    """What a picture against M shows of a row, and what stands around the lines.

    value: None for ``by`` with its quartiles. floor: (k, batch) -> what no line can be under. goals: k -> microseconds
    aimed at, for one token tile.
    """

    by: str
    label: str
    sentence: str
    value: Callable[[Row], float] | None = None
    floor: Callable[[int, int], float] | None = None
    goals: Mapping[int, float] | None = None


def latency(bench: HardwareBench, *, recorded: bool = True) -> Picture:
    """Microseconds of a projection alone against M, one panel per K, with the modelled floor."""
    view = View(
        "alone",
        "microseconds alone",
        "Microseconds per projection, back to back with cold weights",
        floor=lambda k, batch: bench.ceilings.floor_us(_problem_bytes(k, batch)),
    )
    return _against_m(bench, view, recorded)


def exposed(
    bench: HardwareBench, *, goals: Mapping[int, float] | None = None, recorded: bool = True
) -> Picture:
    """Microseconds that a layer waits for the projection, against M: the chain minus its predecessor.

    goals: k -> microseconds that were aimed at for one token tile.
    """
    view = View(
        "exposed",
        "microseconds exposed",
        f"Microseconds that a layer waits for the projection, with the consumer {bench.consumer!r}",
        goals=goals,
    )
    return _against_m(bench, view, recorded)


def bandwidth(bench: HardwareBench, *, recorded: bool = True) -> Picture:
    """Share of the memory bandwidth measured in the same session that each projection alone reaches."""
    best = bench.ceilings.best_tb_s
    view = View(
        "alone",
        f"% of {best:.2f} TB/s, measured",
        f"Percent of {best:.2f} TB/s, the memory bandwidth measured in the same session",
        value=lambda row: 100 * (row.tb_s or 0.0) / best,
    )
    return _against_m(bench, view, recorded)


def measured_roofline(bench: HardwareBench, *, peak_tflops: float, recorded: bool = True) -> Picture:
    """Operations per second against operations per byte, under the measured bandwidth and the given peak."""
    picture = Picture(10.5, 4.2)
    how = "recorded" if recorded else "measured"
    panels: Sequence[Axes] = picture.subplots(1, len(_ks(bench)), squeeze=False, sharey=True)[0]
    memory = bench.ceilings.best_tb_s
    roof = np.geomspace(0.7, 700, 200)
    reached: dict[str, float] = {}
    for axes, k in zip(panels, _ks(bench), strict=True):
        y = "TFLOP/s (logarithmic)" if axes is panels[0] else ""
        plain(axes, title=f"K = {k}", x="operations per byte (logarithmic)", y=y, grid="both")
        axes.loglog(roof, np.minimum(peak_tflops, roof * memory), color=INK, lw=2)
        axes.text(90, 30, f"sloping roof: memory,\n{memory:.2f} TB/s, {how}", fontsize=8, color=INK)
        axes.text(
            0.8,
            peak_tflops * 1.15,
            f"flat roof: tensor cores, {peak_tflops:g} TFLOP/s, given",
            fontsize=8,
            color=INK,
        )
        axes.set_xlim(0.7, 700)
        axes.set_ylim(1.0, peak_tflops * 2.2)
        for name in bench.names():
            if points := _roofline_points(bench, k, name):
                style, colour = STYLES.get(name, OTHER)
                axes.plot(*zip(*points, strict=True), style, color=colour, ms=5, lw=1, label=name)
                reached[name] = max(reached.get(name, 0.0), *(y for _, y in points))
        for batch in bench.batches(k):
            intensity = work(Problem(HIDDEN_K // k, batch)).intensity
            axes.text(intensity, 1.15, f"M {batch}", fontsize=7, color=MUTED, ha="center")
    picture.suptitle(f"{how} on {bench.provenance.title}", fontsize=9.5, color=INK, x=0.01, ha="left")
    panels[-1].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    texts = [f"{name} reaches {most:.0f}" for name, most in reached.items()]
    picture.alt = (
        f"Roofline, {how} on {bench.provenance.title}, logarithmic axes: a roof of {memory:.2f} TB/s (measured) and "
        f"{peak_tflops:g} TFLOP/s (given), and one point per K, M and projection, all far to the left of the ridge at "
        f"{peak_tflops / memory:.0f} operations per byte. Most TFLOP/s: {'; '.join(texts)}."
    )
    return picture


def _roofline_points(bench: HardwareBench, k: int, name: str) -> list[tuple[float, float]]:
    points = []
    for row in _line(bench, k, name, "alone"):
        assert row.alone is not None  # _line
        job = work(Problem(HIDDEN_K // k, row.batch))
        points.append((job.intensity, job.flops / row.alone.median_us / 1e6))
    return points


def _line(bench: HardwareBench, k: int, name: str, by: str) -> list[Row]:
    """The first build of a name at each M that has the value."""
    first = [bench.rows_at(k, batch, name)[:1] for batch in bench.batches(k)]
    return [row for rows in first for row in rows if getattr(row, by)]


def _against_m(bench: HardwareBench, view: View, recorded: bool) -> Picture:
    """A panel per K, with a line per name; a bar from the lower to the upper quartile."""
    picture = Picture(11.5, 4.2)
    panels: Sequence[Axes] = picture.subplots(1, len(_ks(bench)), squeeze=False)[0]
    how = "recorded" if recorded else "measured"
    texts = []
    for axes, k in zip(panels, _ks(bench), strict=True):
        y = view.label if axes is panels[0] else ""
        plain(axes, title=f"K = {k}", x="tokens M (logarithmic)", y=y, grid="y")
        batches = bench.batches(k)
        ends: list[tuple[float, float, str, str]] = []
        for name in bench.names():
            if rows := _line(bench, k, name, view.by):
                values = _draw(axes, rows, name, view)
                _, colour = STYLES.get(name, OTHER)
                shown = name if rows[-1].batch == batches[-1] else f"{name} (to M = {rows[-1].batch})"
                ends.append((rows[-1].batch, values[-1], shown, colour))
                said = ", ".join(
                    f"M {row.batch} {value:.1f}" for row, value in zip(rows, values, strict=True)
                )
                texts.append(f"K = {k}, {name}: {said}")
        texts += _surroundings(axes, bench, k, view, ends)
        axes.set_ylim(0, None)
        _label(axes, batches, ends)
    picture.suptitle(f"{how} on {bench.provenance.title}", fontsize=9.5, color=INK, x=0.01, ha="left")
    picture.alt = (
        f"{view.sentence}, against tokens M, medians with quartiles, {how} on {bench.provenance.title}. "
        + "; ".join(texts)
        + "."
    )
    return picture


def _surroundings(
    axes: Axes, bench: HardwareBench, k: int, view: View, ends: list[tuple[float, float, str, str]]
) -> list[str]:
    """Draw the floor and the goals, if there are any, and add their labels; what they say, as text."""
    said = []
    batches = bench.batches(k)
    empty = _line(bench, k, "empty kernel", view.by)
    if view.floor:
        floors = [view.floor(k, batch) for batch in batches]
        axes.plot(batches, floors, color=MUTED, lw=1.2, ls=":")
        axes.fill_between(batches, floors, color=PALE, lw=0, alpha=0.7)
        ends.append((batches[-1], floors[-1], "floor (modelled from bytes)", MUTED))
        said.append(f"K = {k}, floor modelled from bytes: M {batches[0]} {floors[0]:.1f}")
    elif empty:
        axes.fill_between(
            [row.batch for row in empty],
            [row.exposed.median_us for row in empty],
            color=PALE,
            lw=0,
            alpha=0.7,
        )
    if view.goals and k in view.goals:
        axes.hlines(view.goals[k], 0.8, 8, color=VERMILLION, lw=1)
        axes.text(
            0.8, view.goals[k] * 0.97, f"goal, M <= 8: {view.goals[k]:g}", fontsize=7.5, color=INK, va="top"
        )
        said.append(f"K = {k}, goal for M up to 8: {view.goals[k]:g}")
    return said


def _label(axes: Axes, batches: Sequence[int], ends: list[tuple[float, float, str, str]]) -> None:
    """Name the lines at their ends, a thin line leading to names that had to move apart."""
    low, high = axes.get_ylim()
    step = LABEL_STEP * (high - low)
    ordered = sorted(ends, key=lambda end: end[1])
    places = _apart([value for _, value, _, _ in ordered], step, low + step / 2, high - step / 4)
    x = batches[-1] * 2**0.6
    for (batch, value, name, colour), place in zip(ordered, places, strict=True):
        axes.plot([batch, x], [value, place], color=colour, lw=0.6, alpha=0.7)
        axes.text(x * 1.08, place, name, fontsize=7.5, color=INK, va="center")
    axes.set_xscale("log", base=2)
    axes.set_xlim(batches[0] / 2**0.35, batches[-1] * 2**LABEL_ROOM)
    axes.set_xticks(batches, map(str, batches))
    axes.minorticks_off()


def _apart(values: Sequence[float], step: float, low: float, high: float) -> list[float]:
    """Places for ascending values, at least ``step`` apart: those that are too close spread about their middle, and
    all stay between ``low`` and ``high``, in which they must fit."""
    groups: list[list[float]] = []
    for value in values:
        group = [value]
        while groups and _bottom(group, step, low, high) < _top(groups[-1], step, low, high) + step:
            group = groups.pop() + group
        groups.append(group)
    return [_bottom(group, step, low, high) + i * step for group in groups for i in range(len(group))]


def _bottom(group: Sequence[float], step: float, low: float, high: float) -> float:
    """Where the lowest label of a group of neighbours stands."""
    length = step * (len(group) - 1)
    return min(max(sum(group) / len(group) - length / 2, low), high - length)


def _top(group: Sequence[float], step: float, low: float, high: float) -> float:
    return _bottom(group, step, low, high) + step * (len(group) - 1)


def _draw(axes: Axes, rows: list[Row], name: str, view: View) -> list[float]:
    """Draw one line; its values."""
    style, colour = STYLES.get(name, OTHER)
    batches = [row.batch for row in rows]
    if view.value:
        values = [view.value(row) for row in rows]
    else:
        spreads = [getattr(row, view.by) for row in rows]
        values = [spread.median_us for spread in spreads]
        axes.vlines(
            batches, [s.q1_us for s in spreads], [s.q3_us for s in spreads], color=colour, lw=4, alpha=0.25
        )
    axes.plot(batches, values, style, color=colour, ms=5, lw=1.5, label=name)
    return values


def _ks(bench: HardwareBench) -> list[int]:
    return sorted({job.k for job in bench.jobs})


def _problem_bytes(k: int, batch: int) -> int:
    return work(Problem(HIDDEN_K // k, batch)).bytes
