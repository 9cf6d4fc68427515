"""A kernel's steps, modelled and recorded on a GPU, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from oproj_lib.figures.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PALE,
    PAPER,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    Picture,
    plain,
)
from oproj_lib.iket_timeline import WAITS, WGMMA, WGMMA_ROLES, Recording
from oproj_lib.step_comparison import Comparison
from oproj_lib.timeline import PREVIOUS, WAIT, Timeline

COLOURS = {
    "load_weight": SKY, PREVIOUS: PALE, "route": BLUE, "receive_x": ORANGE, "multiply": VERMILLION,
    "store_partials": YELLOW, "CTA barrier": MUTED, "publish": GREEN, "load_x": ORANGE, "finish": PURPLE,
    "meet": MUTED, "store_tile": YELLOW,
}  # fmt: skip
WORDS = {
    "load_weight": "load_weight: issues the loads of its weights",
    PREVIOUS: "waits for the previous kernel",
    "route": "route: finds the mailbox",
    "receive_x": "receive_x: copies x, waits for it",
    "multiply": "multiply: weights and x arrive, MMAs",
    "store_partials": "store_partials",
    "CTA barrier": "waits for the CTA's other warps",
    "publish": "publish: adds K parts, sends",
}
WGMMA_WORDS = {
    "load_weight": "load_weight: W of the first stages, the rest to L2",
    PREVIOUS: "waits for the previous kernel",
    "route": "route: finds the mailbox",
    "load_x": "load_x: copies x, and W to slots that are free again",
    "multiply": "multiply: waits for K blocks, issues wgmmas",
    "finish": "finish: waits for the last wgmma",
    "meet": "meet: waits for the other multipliers",
    "store_tile": "store_tile: D to shared memory",
    "publish": "publish: rounds, sends",
}
"""The steps of `OprojWgmma`: warps 0-3 load, 4-7 multiply."""
REGISTER_ROUTE = "route: finds the mailbox, issues loads of x"


def modelled_and_recorded(comparison: Comparison, *, cta: int = 0, start: float | None = None) -> Picture:
    """Steps of each warp, left as the cost model has them (CTA 0), right as a GPU recorded them.

    Both axes are ns from the end of the previous kernel on, over the same stretch. start: where it begins, at
    most 0; None for the first event. Raises ValueError for a CTA that was not kept, or a start after 0.
    """
    recorded = comparison.recording.timeline(cta)
    released = comparison.released
    start = -released * 1.02 if start is None else start
    if start > 0:
        raise ValueError(f"start = {start}: ns before the end of the previous kernel, choose at most 0")
    end = 1.03 * (max(recorded.makespan, comparison.modelled.makespan) - released)
    picture = Picture(11.5, 4.6)
    left, right = picture.subplots(1, 2, sharey=True)
    ghz = comparison.model.clock_ghz
    _panel(left, comparison.modelled, released, f"modelled, not measured: cycles at {ghz} GHz, CTA 0")
    _panel(right, recorded, released, f"{comparison.recording.title}: CTA {cta}")
    left.set_xlabel("modelled ns from the end of the previous kernel on", fontsize=9)
    right.set_xlabel("ns from the end of the previous kernel on", fontsize=9)
    warps = len(recorded.lanes)
    left.set_yticks(range(warps), [f"warp {warp}" for warp in range(warps)])
    for axes in (left, right):
        axes.set(xlim=(start, end), ylim=(warps - 0.3, -0.7))
        axes.axvline(0, color=INK, lw=1.2)
    shown = [*recorded.intervals, *comparison.modelled.intervals]
    there = {i.what for i in shown if i.end - released > start}
    words = WORDS if "receive_x" in there else {**WORDS, "route": REGISTER_ROUTE}
    _legend(picture, {step: text for step, text in words.items() if step in there})
    recording = comparison.recording
    picture.suptitle(
        f"OprojProducer, K = {recording.k}, M = {recording.batch}; black line: the first warp of the grid is past "
        "griddepcontrol.wait",
        fontsize=10, color=INK, x=0.01, ha="left",
    )  # fmt: skip
    picture.alt = (
        f"Two timelines of the {warps} warps of a CTA. {comparison.statement()} Medians over the warps shown, ns: "
        f"modelled {_medians(comparison.modelled)}; {recording.title}, CTA {cta}: {_medians(recorded)}."
    )
    return picture


def recorded_launch(recording: Recording, *, cta: int = 0, start: float | None = None) -> Picture:
    """Steps of each warp of a CTA as a GPU recorded them. start: ns from the end of the previous kernel on, at most 0;
    None for the first event. Raises ValueError for a CTA that was not kept, or a start after 0."""
    timeline, released = recording.timeline(cta), recording.released
    start = -released * 1.02 if start is None else start
    if start > 0:
        raise ValueError(f"start = {start}: ns before the end of the previous kernel, choose at most 0")
    picture = Picture(11.5, 1.6 + 0.2 * len(timeline.lanes))
    axes = picture.subplots()
    engine = "OprojWgmma" if recording.engine == WGMMA else "OprojProducer"
    _panel(
        axes,
        timeline,
        released,
        f"{engine}, K = {recording.k}, M = {recording.batch}: {recording.title}, CTA {cta}",
    )
    axes.set_xlabel(
        "ns from the end of the previous kernel on; black line: the first warp of the grid is past "
        "griddepcontrol.wait",
        fontsize=9,
    )
    warps = len(timeline.lanes)
    roles = WGMMA_ROLES if recording.engine == WGMMA else {}
    names = [f"warp {warp}" + (f" ({roles[warp]})" if roles else "") for warp in range(warps)]
    axes.set_yticks(range(warps), names)
    axes.set(xlim=(start, 1.03 * (timeline.makespan - released)), ylim=(warps - 0.3, -0.7))
    axes.axvline(0, color=INK, lw=1.2)
    there = {item.what for item in timeline.intervals if item.end - released > start}
    words = WGMMA_WORDS if recording.engine == WGMMA else WORDS
    _legend(picture, {step: text for step, text in words.items() if step in there})
    picture.alt = (
        f"The {warps} warps of CTA {cta} of {engine}, K = {recording.k}, M = {recording.batch}, {recording.title}. "
        f"Zero, the end of the previous kernel, is {released:,} ns after the grid's first event; the last event is "
        f"{timeline.makespan - released:,.0f} ns after zero. Medians over the warps shown, ns: {_medians(timeline)}."
    )
    return picture


def _legend(picture: Picture, words: Mapping[str, str]) -> None:
    handles = [
        Patch(
            facecolor=COLOURS[step],
            edgecolor=PAPER,
            lw=0.4,
            hatch="////" if step in WAITS else "",
            label=text,
        )
        for step, text in words.items()
    ]
    picture.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _panel(axes: Axes, timeline: Timeline, released: float, title: str) -> None:
    plain(axes, title=title)
    axes.title.set_fontsize(9.5)
    for item in timeline.intervals:
        axes.add_patch(
            Rectangle(
                (item.start - released, item.warp - 0.42), item.duration, 0.84, facecolor=COLOURS[item.what],
                hatch="////" if item.kind == WAIT else "", edgecolor=PAPER, lw=0.4,
            )
        )  # fmt: skip


def _medians(timeline: Timeline) -> str:
    steps = dict.fromkeys(item.what for item in timeline.intervals)
    times = {step: [i.duration for i in timeline.intervals if i.what == step] for step in steps}
    return ", ".join(f"{step} {statistics.median(found):,.0f}" for step, found in times.items())
