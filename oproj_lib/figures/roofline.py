"""The floor in pictures. Recorded times carry their machine and date in the title."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from oproj_lib.figures.style import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, SKY, VERMILLION, Picture, plain
from oproj_lib.floor import Roofline, work
from oproj_lib.problem import PRESETS, Problem
from oproj_lib.recorded import Recorded

MARKS = {"TP8": ("o", BLUE), "TP16": ("s", ORANGE)}


def roofline_plot(machine: Roofline, batches: Sequence[int], problem: Problem) -> Picture:
    """Where the projection stands under the roof for each batch size, both presets; `problem` is marked."""
    picture = Picture(8.5, 4.2)
    title = f"roof: {machine.bandwidth_tb_s:g} TB/s, {machine.peak_tflops:g} TFLOP/s"
    axes = plain(picture.subplots(), title=title, x="operations per byte", y="TFLOP/s at best", grid="both")
    intensities = np.geomspace(0.5, max(2000.0, 4 * machine.ridge), 200)
    axes.loglog(intensities, [machine.tflops(i) for i in intensities], color=INK, lw=2)
    axes.axvline(machine.ridge, color=MUTED, lw=1, ls=":")
    axes.text(machine.ridge, 4, f"ridge: {machine.ridge:.0f} ", fontsize=8.5, color=MUTED, ha="right")
    for name, preset in PRESETS.items():
        mark, colour = MARKS[name]
        points = [work(preset.with_batch(batch)).intensity for batch in batches]
        offset = 1.0 if name == "TP8" else 0.93  # the presets differ by a few percent: drawn a little apart
        axes.plot(
            points,
            [offset * machine.tflops(i) for i in points],
            mark,
            color=colour,
            ms=6,
            label=f"{name} (K = {preset.k})",
        )
    for batch in batches:
        intensity = work(problem.with_batch(batch)).intensity
        axes.annotate(
            f"M = {batch}",
            (intensity, machine.tflops(intensity)),
            (-6, 5),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=INK,
        )
    here = work(problem)
    axes.plot(
        here.intensity,
        machine.tflops(here.intensity),
        "o",
        ms=13,
        mfc="none",
        mec=VERMILLION,
        mew=2,
        label=f"this notebook: {problem.name}, M = {problem.batch}",
    )
    axes.legend(fontsize=8.5, frameon=False, loc="lower right")
    picture.alt = (
        f"Roofline on logarithmic axes: the roof rises with slope 1 to the ridge at {machine.ridge:.0f} "
        "operations per byte and is flat at "
        f"{machine.peak_tflops:g} TFLOP/s from there. M = {batches[0]} to {batches[-1]} stand at "
        f"{work(problem.with_batch(batches[0])).intensity:.1f} to "
        f"{work(problem.with_batch(batches[-1])).intensity:.0f} operations per byte. M = "
        f"{problem.batch} of {problem.name}, at {here.intensity:.1f}, is marked."
    )
    return picture


def time_floors(machine: Roofline, batches: Sequence[int]) -> Picture:
    """Microseconds that memory and tensor cores need at least, against the batch size."""
    picture = Picture(9.5, 3.4)
    panels = picture.subplots(1, 2, sharey=True)
    texts = []
    for axes, (name, preset) in zip(panels, PRESETS.items(), strict=True):
        jobs = [work(preset.with_batch(batch)) for batch in batches]
        plain(
            axes,
            title=f"{name}, K = {preset.k}: modelled floor",
            x="tokens M",
            y="microseconds" if name == "TP8" else "",
            grid="y",
        )
        memory, compute = [machine.memory_us(job) for job in jobs], [machine.compute_us(job) for job in jobs]
        axes.plot(batches, memory, "o-", color=BLUE, label="memory")
        axes.plot(batches, compute, "s-", color=ORANGE, label="tensor cores")
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, map(str, batches))
        axes.set_ylim(0, None)
        texts.append(
            f"{name}: memory {memory[0]:.1f} to {memory[-1]:.1f} us, tensor cores {compute[0]:.2f} to "
            f"{compute[-1]:.1f} us"
        )
    panels[0].legend(fontsize=8.5, frameon=False)
    picture.alt = (
        f"Two panels of least microseconds against M = {batches[0]} to {batches[-1]}. "
        + "; ".join(texts)
        + "."
    )
    return picture


def exposed_times(recorded: Recorded, k: int) -> Picture:
    """Recorded: microseconds that a decode layer waits for the projection, by how the weights are loaded."""
    rows = recorded.exposed[k]
    picture = Picture(8.5, 3.2)
    title = f"K = {k}, M = 8: recorded on {recorded.machine}, {recorded.date}"
    axes = plain(picture.subplots(), title=title, x="staged blocks", y="microseconds exposed", grid="y")
    staged = [row.staged_blocks for row in rows]
    lines: Mapping[str, tuple[str, str, list[float]]] = {
        "ld.global.nc, sunk below the wait": ("s--", VERMILLION, [row.nc_us for row in rows]),
        "ld.global, stays above the wait": ("o-", GREEN, [row.coherent_us for row in rows]),
    }
    for label, (style, colour, values) in lines.items():
        axes.plot(staged, values, style, color=colour, label=label)
    cublas = rows[0].cublas_us
    axes.axhline(cublas, color=PURPLE, lw=1.8, label="cuBLAS")
    axes.axhline(recorded.empty_kernel_exposed_us, color=SKY, lw=1.8, label="an empty kernel in its place")
    axes.set_xticks(staged)
    axes.set_ylim(0, None)
    axes.legend(fontsize=8.5, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    points = ", ".join(f"{row.staged_blocks}: {row.nc_us} and {row.coherent_us}" for row in rows)
    picture.alt = (
        f"{title}. Microseconds exposed against staged blocks, with ld.global.nc and with ld.global: "
        f"{points}. "
        f"cuBLAS {cublas}, an empty kernel {recorded.empty_kernel_exposed_us}."
    )
    return picture
