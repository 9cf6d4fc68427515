"""Benchmarks on hardware as pictures. Every title says which GPU, when, and with what; nothing is modelled but the
floor, and that is labelled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes

from oproj_lib.bench.results import HardwareBench, Row
from oproj_lib.figures.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
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
    "empty kernel": ("_:", MUTED),
}
OTHER = ("*:", MUTED)


def latency(bench: HardwareBench, *, recorded: bool = True) -> Picture:
    """Microseconds of a projection alone against M, one panel per K, with the modelled floor."""
    return _against_m(
        bench,
        "alone",
        "microseconds alone",
        "Microseconds per projection, back to back with cold weights",
        recorded,
        floor=lambda k, batch: bench.ceilings.floor_us(_problem_bytes(k, batch)),
    )


def exposed(bench: HardwareBench, *, recorded: bool = True) -> Picture:
    """Microseconds that a layer waits for the projection, against M: the chain minus its predecessor."""
    return _against_m(
        bench,
        "exposed",
        "microseconds exposed",
        "Microseconds that a layer waits for the projection",
        recorded,
    )


def bandwidth(bench: HardwareBench, *, recorded: bool = True) -> Picture:
    """Share of the memory bandwidth measured in the same session that each projection alone reaches."""
    return _against_m(
        bench,
        "alone",
        "% of measured bandwidth",
        f"Percent of {bench.ceilings.best_tb_s:.2f} TB/s, the memory bandwidth measured in the same session",
        recorded,
        value=lambda row: 100 * (row.tb_s or 0.0) / bench.ceilings.best_tb_s,
    )


def measured_roofline(bench: HardwareBench, *, peak_tflops: float, recorded: bool = True) -> Picture:
    """Operations per second against operations per byte, under the measured bandwidth and the given peak."""
    picture = Picture(8.5, 4.2)
    how = "recorded" if recorded else "measured"
    axes = plain(
        picture.subplots(),
        title=f"{how} on {bench.provenance.title}",
        x="operations per byte",
        y="TFLOP/s",
        grid="both",
    )
    roof = np.geomspace(0.5, 2000, 200)
    axes.loglog(roof, np.minimum(peak_tflops, roof * bench.ceilings.best_tb_s), color=INK, lw=2, label="roof")
    texts = []
    for name in bench.names():
        points = [point for k in _ks(bench) for point in _roofline_points(bench, k, name)]
        if not points:
            continue
        style, colour = STYLES.get(name, OTHER)
        axes.plot(*zip(*points, strict=True), style[0], color=colour, ms=6, label=name)
        texts.append(f"{name} reaches {max(y for _, y in points):.0f}")
    axes.legend(fontsize=8.5, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    picture.alt = (
        f"Roofline, {how} on {bench.provenance.title}: a roof of {bench.ceilings.best_tb_s:.2f} TB/s (measured) and "
        f"{peak_tflops:g} TFLOP/s (given), and one point per K, M and projection. Most TFLOP/s: "
        f"{'; '.join(texts)}."
    )
    return picture


def _roofline_points(bench: HardwareBench, k: int, name: str) -> list[tuple[float, float]]:
    points = []
    for batch in bench.batches(k):
        row = bench.best(k, batch, name, "alone")
        if row and row.alone:
            job = work(Problem(HIDDEN_K // k, batch))
            points.append((job.intensity, job.flops / row.alone.median_us / 1e6))
    return points


def _against_m(
    bench: HardwareBench,
    by: str,
    label: str,
    sentence: str,
    recorded: bool,
    *,
    value: Callable[[Row], float] | None = None,
    floor: Callable[[int, int], float] | None = None,
) -> Picture:
    """A panel per K: for each name its best row at each M, with a bar from the lower to the upper quartile."""
    picture = Picture(10.5, 3.6)
    panels: Sequence[Axes] = picture.subplots(1, len(_ks(bench)), squeeze=False)[0]
    how = "recorded" if recorded else "measured"
    texts = []
    for axes, k in zip(panels, _ks(bench), strict=True):
        plain(axes, title=f"K = {k}", x="tokens M", y=label if axes is panels[0] else "", grid="y")
        for name in bench.names():
            rows = [row for batch in bench.batches(k) if (row := bench.best(k, batch, name, by))]
            if rows:
                texts.append(f"K = {k}, {name}: {_draw(axes, rows, name, by, value)}")
        batches = bench.batches(k)
        if floor:
            floors = [floor(k, batch) for batch in batches]
            axes.plot(batches, floors, color=MUTED, lw=1.2, ls=":", label="floor (modelled from bytes)")
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, map(str, batches))
        axes.minorticks_off()
        axes.set_ylim(0, None)
    picture.suptitle(f"{how} on {bench.provenance.title}", fontsize=9.5, color=INK, x=0.01, ha="left")
    panels[-1].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    picture.alt = (
        f"{sentence}, against tokens M, medians with quartiles, {how} on {bench.provenance.title}. "
        + "; ".join(texts)
        + "."
    )
    return picture


def _draw(axes: Axes, rows: list[Row], name: str, by: str, value: Callable[[Row], float] | None) -> str:
    """Draw one line; its numbers as text."""
    style, colour = STYLES.get(name, OTHER)
    batches = [row.batch for row in rows]
    if value:
        values = [value(row) for row in rows]
    else:
        spreads = [getattr(row, by) for row in rows]
        values = [spread.median_us for spread in spreads]
        axes.vlines(
            batches, [s.q1_us for s in spreads], [s.q3_us for s in spreads], color=colour, lw=4, alpha=0.25
        )
    axes.plot(batches, values, style, color=colour, ms=5, lw=1.5, label=name)
    return ", ".join(f"M {batch} {value:.1f}" for batch, value in zip(batches, values, strict=True))


def _ks(bench: HardwareBench) -> list[int]:
    return sorted({job.k for job in bench.jobs})


def _problem_bytes(k: int, batch: int) -> int:
    return work(Problem(HIDDEN_K // k, batch)).bytes
