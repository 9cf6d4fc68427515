"""Bank conflicts: which banks the lanes of a warp touch, and what the collisions cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from oproj_lib.figures.style import (
    BLUE,
    INK,
    MUTED,
    ORANGE,
    PALE,
    PAPER,
    SKY,
    VERMILLION,
    Picture,
    bare,
    plain,
)
from oproj_lib.layouts.banks import BANK_BYTES, BANKS, bank, wavefronts

COLLISION_COLOURS = (SKY, ORANGE, VERMILLION)  # 1, 2, and 4 or more words wanted from one bank in one phase


def collisions(offsets: Sequence[int], access_bytes: int) -> dict[tuple[int, int], int]:
    """(lane, bank) -> how many different words of that bank the lane's phase wants; 1 is free of
    conflicts."""
    lanes_per_phase = BANKS * BANK_BYTES // access_bytes
    wanted: dict[tuple[int, int], set[int]] = {}
    for lane, offset in enumerate(offsets):
        for byte in range(offset, offset + access_bytes, BANK_BYTES):
            wanted.setdefault((lane // lanes_per_phase, bank(byte)), set()).add(byte // BANK_BYTES)
    return {
        (lane, bank(byte)): len(wanted[lane // lanes_per_phase, bank(byte)])
        for lane, offset in enumerate(offsets)
        for byte in range(offset, offset + access_bytes, BANK_BYTES)
    }


def bank_map(accesses: Mapping[str, Sequence[int]], access_bytes: int) -> Picture:
    """One lane x bank map per access, side by side. accesses: title -> byte offset of each lane.

    A cell is filled where the lane touches the bank; its number says how many different words the lanes of
    its phase
    want from that bank, which is how often the bank has to answer.

    Raises:
        ValueError: from `wavefronts`, for misaligned offsets or another access size.
    """
    picture = Picture(5.7 * len(accesses), 5.2)
    panels = picture.subplots(1, len(accesses), squeeze=False)[0]
    texts = []
    for axes, (title, offsets) in zip(panels, accesses.items(), strict=True):
        passes = wavefronts(offsets, access_bytes)
        _bank_panel(axes, offsets, access_bytes, f"{title}: {passes} wavefronts")
        worst = max(collisions(offsets, access_bytes).values())
        texts.append(f"{title}: at most {worst} word(s) of a bank wanted at once, {passes} wavefronts")
    names = ("one word: no conflict", "2 or 3 words", "4 words or more")
    handles = [Patch(color=colour, label=name) for colour, name in zip(COLLISION_COLOURS, names, strict=True)]
    picture.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8.5, frameon=False)
    lanes = BANKS * BANK_BYTES // access_bytes
    picture.alt = (
        f"Maps of 32 lanes (rows) by {BANKS} banks (columns) of a {access_bytes}-byte access, in phases "
        f"of {lanes} lanes. " + "; ".join(texts) + "."
    )
    return picture


def _bank_panel(axes: Axes, offsets: Sequence[int], access_bytes: int, title: str) -> None:
    bare(axes, title=title)
    for (lane, number), words in collisions(offsets, access_bytes).items():
        colour = COLLISION_COLOURS[0 if words == 1 else 1 if words < 4 else 2]
        axes.add_patch(Rectangle((number, lane), 1, 1, facecolor=colour, edgecolor=PAPER, lw=0.6))
        if words > 1:
            axes.text(number + 0.5, lane + 0.5, str(words), ha="center", va="center", fontsize=5.5, color=INK)
    lanes_per_phase = BANKS * BANK_BYTES // access_bytes
    for edge in range(0, len(offsets) + 1, lanes_per_phase):
        axes.plot([0, BANKS], [edge, edge], color=MUTED, lw=1)
    for edge in range(0, BANKS + 1, 4):
        axes.plot([edge, edge], [0, len(offsets)], color=PALE, lw=0.8, zorder=0)
    axes.set(xlim=(-0.1, BANKS + 0.1), ylim=(len(offsets) + 0.1, -0.1))
    axes.set_xticks([i + 0.5 for i in range(0, BANKS, 4)], map(str, range(0, BANKS, 4)))
    axes.set_yticks([i + 0.5 for i in range(0, len(offsets), 4)], map(str, range(0, len(offsets), 4)))
    axes.tick_params(length=0, colors=MUTED)
    axes.set_xlabel("bank", fontsize=9, color=INK)
    axes.set_ylabel("lane (lines: phases)", fontsize=9, color=INK)


def padding_sweep(
    title: str,
    unit: str,
    values: Sequence[int],
    offsets: Callable[[int], Sequence[int]],
    access_bytes: int,
    chosen: int,
) -> Picture:
    """Wavefronts of one access against the padding; `chosen` is marked. offsets(padding) gives the lanes'
    offsets."""
    costs = [wavefronts(offsets(value), access_bytes) for value in values]
    ideal = min(costs)
    picture = Picture(7.2, 2.7)
    axes = plain(picture.subplots(), title=title, x=unit, y="wavefronts", grid="y")
    colours = [SKY if cost == ideal else ORANGE for cost in costs]
    edges = [INK if value == chosen else PAPER for value in values]
    bars = axes.bar(range(len(values)), costs, color=colours, edgecolor=edges, linewidth=2, width=0.75)
    axes.bar_label(bars, fontsize=8, color=INK)
    axes.set_xticks(range(len(values)), map(str, values))
    axes.set_ylim(0, max(costs) * 1.15)
    handles = [
        Patch(color=SKY, label="the fewest"),
        Patch(color=ORANGE, label="more: bank conflicts"),
        Patch(facecolor="none", edgecolor=INK, linewidth=2, label=f"chosen: {chosen}"),
    ]
    axes.legend(handles=handles, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    pairs = ", ".join(f"{value}: {cost}" for value, cost in zip(values, costs, strict=True))
    picture.alt = f"Bars: {title}. Wavefronts by {unit}: {pairs}. {chosen} is marked."
    return picture


def wavefront_bars(
    predicted: Mapping[str, int], counted: Mapping[str, int], ideal: Mapping[str, int]
) -> Picture:
    """Wavefronts of a launch per function: predicted from the layouts, counted by the virtual GPU, and
    without conflicts.

    Raises:
        ValueError: if the three do not name the same functions.
    """
    if not predicted.keys() == counted.keys() == ideal.keys():
        raise ValueError(
            f"different functions: predicted {list(predicted)}, counted {list(counted)}, ideal {list(ideal)}"
        )
    names = list(predicted)
    picture = Picture(9.5, 1.3 + 0.62 * len(names))
    axes = plain(
        picture.subplots(), title="wavefronts of one launch, whole grid", x="thousand wavefronts", grid="x"
    )
    series = (
        ("predicted from the layouts", predicted, SKY),
        ("counted by the virtual GPU", counted, BLUE),
        ("without conflicts", ideal, PALE),
    )
    for number, (label, values, colour) in enumerate(series):
        places = [row + (number - 1) * 0.26 for row in range(len(names))]
        bars = axes.barh(
            places, [values[name] / 1000 for name in names], height=0.24, color=colour, label=label
        )
        axes.bar_label(bars, [f"{values[name]:,}" for name in names], fontsize=7.5, color=INK, padding=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(max(values.values()) for values in (predicted, counted)) / 1000)
    picture.legend(loc="outside lower center", ncols=3, fontsize=8.5, frameon=False)
    rows = "; ".join(f"{name}: {predicted[name]:,}, {counted[name]:,}, {ideal[name]:,}" for name in names)
    picture.alt = f"Bars of wavefronts per function, predicted, counted, and without conflicts: {rows}."
    return picture


def conflict_cycles(
    counted: Mapping[str, float], cycles: Mapping[str, tuple[float, float, float]], source: str
) -> Picture:
    """Wavefronts of one warp-wide access per pattern, counted by the virtual GPU, and beside them what a real GPU took.

    cycles: pattern -> (median, lower and upper quartile). source: where they come from, and how ("recorded on ..."),
    for the title.

    Raises:
        ValueError: if the two name different patterns.
    """
    if counted.keys() != cycles.keys():
        raise ValueError(f"different patterns: counted {list(counted)}, cycles {list(cycles)}")
    names = list(counted)
    picture = Picture(9.5, 1.5 + 0.36 * len(names))
    axes = plain(picture.subplots(), title=source, x="wavefronts, cycles per access (logarithmic)", grid="x")
    medians = [cycles[name][0] for name in names]
    spread = [[max(m - cycles[n][1], 0.0) for n, m in zip(names, medians, strict=True)],
              [max(cycles[n][2] - m, 0.0) for n, m in zip(names, medians, strict=True)]]  # fmt: skip
    places = range(len(names))
    bars = axes.barh(
        [place - 0.2 for place in places], list(counted.values()), height=0.38, color=BLUE,
        label="wavefronts, counted by the virtual GPU",
    )  # fmt: skip
    axes.bar_label(bars, [f"{value:g}" for value in counted.values()], fontsize=7.5, color=INK, padding=3)
    bars = axes.barh(
        [place + 0.2 for place in places], medians, height=0.38, color=ORANGE, xerr=spread, ecolor=INK,
        label="cycles per access, median and quartiles",
    )  # fmt: skip
    axes.bar_label(bars, [f"{value:.2f}" for value in medians], fontsize=7.5, color=INK, padding=3)
    axes.set_xscale("log", base=2)
    most = max(*counted.values(), *medians)
    axes.set_xlim(0.5, most * 2)
    ticks = [2**power for power in range(int(most).bit_length() + 1)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    picture.legend(loc="outside lower center", ncols=2, fontsize=8.5, frameon=False)
    texts = [f"{name}: {counted[name]:g} wavefronts, {cycles[name][0]:.2f} cycles" for name in names]
    picture.alt = f"Bars per access pattern, {source}: {'; '.join(texts)}."
    return picture
