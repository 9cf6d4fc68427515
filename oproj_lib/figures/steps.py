"""A kernel's steps, modelled and recorded on a GPU, side by side."""

from __future__ import annotations

import statistics

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
    SKY,
    VERMILLION,
    YELLOW,
    Picture,
    plain,
)
from oproj_lib.iket_timeline import WAITS
from oproj_lib.step_comparison import Comparison
from oproj_lib.timeline import PREVIOUS, WAIT, Timeline

COLOURS = {
    "load_weight": SKY, PREVIOUS: PALE, "route": BLUE, "receive_x": ORANGE, "multiply": VERMILLION,
    "store_partials": YELLOW, "CTA barrier": MUTED, "publish": GREEN,
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
    handles = [
        Patch(
            facecolor=COLOURS[step],
            edgecolor=PAPER,
            lw=0.4,
            hatch="////" if step in WAITS else "",
            label=text,
        )
        for step, text in words.items()
        if step in there
    ]
    picture.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
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
