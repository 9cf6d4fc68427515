"""Timelines: who runs, who waits for what, what a ring holds, and the phases of barriers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text

from oproj_lib.figures.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PALE,
    PAPER,
    PARTS,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    Picture,
    plain,
)
from oproj_lib.timeline import (
    CYCLES,
    FLIGHT,
    FULL,
    LOADING,
    MODELLED_NS,
    READ,
    RECORDED_NS,
    RUN,
    STALL,
    WAIT,
    Interval,
    SlotState,
    Timeline,
    pack,
)

FAMILY = {
    "copy": SKY, "prefetch": "#A7D8F5", "global memory": BLUE, "shared memory": ORANGE, "matrix": VERMILLION,
    "tensor memory": PURPLE, "synchronisation": INK, "arithmetic": MUTED,
}  # fmt: skip
STATES = {LOADING: SKY, FULL: YELLOW, READ: GREEN}
STAGE_COLOURS = (*PARTS, YELLOW, BLUE)


def honest(timeline: Timeline) -> str:
    """What a reader must know about the time axis."""
    if timeline.clock == RECORDED_NS:
        return "recorded on hardware"
    return "modelled, not measured" if timeline.clock in (CYCLES, MODELLED_NS) else "order only: no times"


def gantt(timeline: Timeline, *, start: float = 0.0, end: float | None = None, title: str = "") -> Picture:
    """One row per warp and per kind of asynchronous work, from `start` to `end` of the timeline's clock.

    Raises ValueError for an empty stretch.
    """
    end = timeline.makespan if end is None else end
    if not start < end:
        raise ValueError(f"start = {start}, end = {end}: choose start < end")
    lanes = timeline.lanes
    packed = {lane: pack(timeline.of(lane)) for lane in lanes}
    heights = [max(1.0, 0.42 * (1 + max(row for row, _ in packed[lane]))) for lane in lanes]
    picture = Picture(11.5, 1.35 + 0.29 * sum(heights))
    axes = plain(picture.subplots(), x=timeline.clock, title=_title(title, timeline))
    labels: list[tuple[Text, float] | None] = []
    middles, top = [], 0.0
    for lane, height in zip(lanes, heights, strict=True):
        rows = 1 + max(row for row, _ in packed[lane])
        for row, item in packed[lane]:
            if item.end > start and item.start < end:
                strip = 0.84 * height / rows
                labels.append(_bar(axes, top + 0.08 * height + (row + 0.5) * strip, strip, item, start, end))
        middles.append(top + height / 2)
        top += height
    axes.set_yticks(middles, [_lane_name(timeline, lane) for lane in lanes])
    axes.set(xlim=(start, end), ylim=(top + 0.1, -0.1))
    _mark_release(axes, timeline, start)
    kinds = [kind for kind in FAMILY if any(i.what == kind and i.kind == RUN for i in timeline.intervals)]
    handles = [Patch(color=FAMILY[kind], label=kind) for kind in kinds]
    handles.append(
        Patch(facecolor=PALE, edgecolor=MUTED, hatch="////", label="waits for a barrier or a group")
    )
    if any(item.kind == STALL for item in timeline.intervals):
        handles.append(Patch(facecolor=PAPER, edgecolor=MUTED, hatch="....", label="waits for data"))
    if any(item.kind == FLIGHT for item in timeline.intervals):
        handles.append(Patch(facecolor=PAPER, edgecolor=MUTED, label="number: stage or group"))
    if timeline.released > start:
        handles.append(Patch(color=VERMILLION, fill=False, lw=0, label="red line: the previous kernel ends"))
    picture.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    _drop_wide(picture, axes, [label for label in labels if label])
    picture.alt = _gantt_alt(timeline)
    return picture


def _title(title: str, timeline: Timeline) -> str:
    return f"{title}{': ' if title else ''}{honest(timeline)}"


def _mark_release(axes: Axes, timeline: Timeline, start: float) -> None:
    """A line where the previous kernel ends."""
    if timeline.released > start:
        axes.axvline(timeline.released, color=VERMILLION, lw=1.3)


def _lane_name(timeline: Timeline, lane: str) -> str:
    role = timeline.of(lane)[0].role
    return f"{lane} ({role})" if role and len(role) < 12 else lane


def _bar(
    axes: Axes, y: float, strip: float, item: Interval, start: float, end: float
) -> tuple[Text, float] | None:
    """One interval around height y, and its label if it has one."""
    left, right = max(item.start, start), min(item.end, end)
    style: dict[str, object] = {"facecolor": FAMILY.get(item.what, MUTED), "edgecolor": "none", "lw": 0}
    label = ""
    if item.kind == WAIT:
        style = {
            "facecolor": PALE,
            "edgecolor": MUTED if item.finished else VERMILLION,
            "hatch": "////",
            "lw": 0.4,
        }
        label = item.what if item.finished else f"{item.what}, for ever"
    elif item.kind == STALL:
        style = {"facecolor": PAPER, "edgecolor": MUTED, "hatch": "....", "lw": 0.3}
    elif item.kind == FLIGHT:
        mark = item.stage if item.stage >= 0 else max(item.phase, 0)
        style = {
            "facecolor": STAGE_COLOURS[mark % len(STAGE_COLOURS)],
            "edgecolor": PAPER,
            "lw": 0.4,
            "alpha": 0.75,
        }
        label = str(mark)
    height = strip if item.kind != STALL else 0.65 * strip
    axes.add_patch(Rectangle((left, y - height / 2), right - left, height, **style))  # type: ignore[arg-type]
    if not label:
        return None
    box = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.9, "pad": 0.8} if item.kind == WAIT else None
    return axes.text(
        (left + right) / 2, y, label, ha="center", va="center", fontsize=7, color=INK, bbox=box
    ), right - left


def _drop_wide(picture: Picture, axes: Axes, labels: Sequence[tuple[Text, float]]) -> None:
    """Removes labels that are wider than what they stand on."""
    picture.draw_without_rendering()
    for text, width in labels:
        pixels = axes.transData.transform([(0, 0), (width, 0)])
        if text.get_window_extent().width > pixels[1][0] - pixels[0][0]:
            text.remove()


def _gantt_alt(timeline: Timeline) -> str:
    waits = sorted(timeline.waited().items(), key=lambda pair: -pair[1])[:4]
    text = "; ".join(f"{lane} for {what} {time:,.0f}" for (lane, what), time in waits)
    busy = ", ".join(f"{lane} {time:,.0f}" for lane, time in timeline.busy().items())
    stuck = f" {len(timeline.stuck)} waits never end." if timeline.stuck else ""
    return (
        f"Timeline of CTA {timeline.cta}: {timeline.makespan:,.0f} {timeline.clock} ({honest(timeline)}), one row "
        f"per warp and per kind of asynchronous work. Busy: {busy}. Longest waits in all: {text or 'none'}.{stuck}"
    )


def ring_occupancy(
    timeline: Timeline, states: Sequence[SlotState], *, what: str = "K block", start: float = 0.0
) -> Picture:
    """What every slot of a ring holds over time, from `start` on: one row per slot, one number per block.

    Raises ValueError without states.
    """
    if not states:
        raise ValueError("no slot was ever filled: there is no ring in this timeline")
    slots = 1 + max(state.slot for state in states)
    picture = Picture(11.5, 1.35 + 0.32 * slots)
    axes = plain(
        picture.subplots(), x=timeline.clock, y="slot", title=f"what the ring holds: {honest(timeline)}"
    )
    labels = []
    for state in states:
        width = state.end - state.start
        axes.add_patch(
            Rectangle(
                (state.start, state.slot - 0.4),
                width,
                0.8,
                facecolor=STATES[state.state],
                edgecolor=PAPER,
                lw=0.5,
            )
        )
        middle = (state.start + width / 2, state.slot)
        labels.append(
            (axes.text(*middle, str(state.block), ha="center", va="center", fontsize=7, color=INK), width)
        )
    axes.set_yticks(range(slots))
    axes.set(xlim=(start, timeline.makespan), ylim=(slots - 0.4, -0.6))
    _mark_release(axes, timeline, start)
    handles = [Patch(color=colour, label=name) for name, colour in STATES.items()]
    picture.legend(
        handles=handles,
        loc="outside lower center",
        ncols=3,
        fontsize=8.5,
        frameon=False,
        title=f"number: {what}",
        title_fontsize=8.5,
    )
    _drop_wide(picture, axes, labels)
    total = {name: sum(s.end - s.start for s in states if s.state == name) for name in STATES}
    span = slots * timeline.makespan
    picture.alt = (
        f"{slots} slots of a ring over {timeline.makespan:,.0f} {timeline.clock} ({honest(timeline)}). "
        + ", ".join(f"{name} {time / span:.0%} of the time" for name, time in total.items())
        + f", empty for the rest. {len({s.block for s in states})} blocks pass through: "
        + f"{what} i through slot i modulo {slots}."
    )
    return picture


def phase_diagram(timeline: Timeline, barriers: Sequence[str]) -> Picture:
    """Phases of barriers, light for parity 0 and dark for parity 1, with arrivals as ticks; below each, who waits.

    Raises ValueError for a barrier that the timeline does not have.
    """
    known = dict.fromkeys(phase.barrier for phase in timeline.phases)
    unknown = [name for name in barriers if name not in known]
    if unknown:
        raise ValueError(f"no barrier {', '.join(unknown)} here; there are {', '.join(known)}")
    picture = Picture(11.5, 1.4 + 0.72 * len(barriers))
    axes = plain(picture.subplots(), x=timeline.clock, title=f"phases and parities: {honest(timeline)}")
    labels = []
    for row, name in enumerate(barriers):
        for phase in timeline.phases:
            if phase.barrier == name:
                labels.append(
                    _phase(axes, row, timeline, phase.number, phase.start, phase.end, phase.completed)
                )
        ends = {
            phase.number: phase.end for phase in timeline.phases if phase.barrier == name and phase.completed
        }
        if ends and max(ends.values()) < timeline.makespan:  # what nobody arrives at any more
            labels.append(
                _phase(axes, row, timeline, max(ends) + 1, max(ends.values()), timeline.makespan, False)
            )
        for arrival in timeline.arrivals:
            if arrival.barrier == name:
                axes.vlines(arrival.time, row - 0.38, row - 0.22, color=VERMILLION, lw=0.9)
        for item in timeline.intervals:
            if item.kind == WAIT and item.barrier == name:
                colour = STAGE_COLOURS[item.phase % 2] if item.finished else VERMILLION
                axes.add_patch(
                    Rectangle(
                        (item.start, row + 0.18),
                        item.duration,
                        0.2,
                        facecolor=colour,
                        hatch="////",
                        edgecolor=MUTED,
                        lw=0.3,
                    )
                )
    axes.set_yticks(range(len(barriers)), barriers)
    axes.set(xlim=(0, timeline.makespan), ylim=(len(barriers) - 0.5, -0.6))
    _mark_release(axes, timeline, 0.0)
    handles = [
        Patch(facecolor=PALE, label="current phase even: parity 0"), Patch(facecolor=MUTED, label="odd: parity 1"),
        Patch(facecolor=VERMILLION, label="tick: arrivals"),
        Patch(facecolor=STAGE_COLOURS[0], hatch="////", label="a warp waits for parity 0"),
        Patch(facecolor=STAGE_COLOURS[1], hatch="////", label="for parity 1"),
    ]  # fmt: skip
    picture.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    _drop_wide(picture, axes, labels)
    counts = [(name, sum(p.barrier == name and p.completed for p in timeline.phases)) for name in barriers]
    picture.alt = (
        f"Barriers over {timeline.makespan:,.0f} {timeline.clock} ({honest(timeline)}), one row each, light while the "
        "current phase is even and dark while it is odd, with a tick per arrival and hatched bars while a warp waits. "
        "Completed phases: " + ", ".join(f"{name} {count}" for name, count in counts) + "."
    )
    return picture


def _phase(
    axes: Axes, row: int, timeline: Timeline, number: int, start: float, end: float, completed: bool
) -> tuple[Text, float]:
    colour = MUTED if number % 2 else PALE
    axes.add_patch(Rectangle((start, row - 0.2), end - start, 0.36, facecolor=colour, edgecolor=PAPER, lw=1))
    text = f"phase {number}" if (end - start) > timeline.makespan / 16 else str(number)
    ink = PAPER if number % 2 else INK
    label = axes.text((start + end) / 2, row - 0.02, text, ha="center", va="center", fontsize=7, color=ink)
    del completed
    return label, end - start


def exposed_by_stages(
    curves: Mapping[str, Mapping[int, float]], *, chosen: int, unit: str = CYCLES
) -> Picture:
    """Modelled time behind the wait against the number of stages, one curve per situation."""
    picture = Picture(7.5, 3.4)
    axes = plain(
        picture.subplots(),
        x="stages of the ring",
        y=unit,
        title="exposed time: modelled, not measured",
        grid="y",
    )
    for (name, curve), colour, marker in zip(
        curves.items(), (VERMILLION, BLUE, GREEN, PURPLE), "osD^", strict=False
    ):
        axes.plot(list(curve), list(curve.values()), marker=marker, color=colour, label=name)
    axes.axvline(chosen, color=MUTED, ls=":", lw=1)
    axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({stages for curve in curves.values() for stages in curve}))
    axes.legend(fontsize=8.5, frameon=False)
    picture.alt = (
        "Modelled cycles from the end of the previous kernel to the end of this one, by stages of the ring. "
        + "; ".join(
            f"{name}: " + ", ".join(f"{stages} stages {cycles:,.0f}" for stages, cycles in curve.items())
            for name, curve in curves.items()
        )
    )
    return picture
