"""Programmatic dependent launch: grids of a chain on one clock, the machine code's order, what is exposed, and who
fits beside whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from oproj_lib import load_order as machine
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
from oproj_lib.load_order import LoadOrder
from oproj_lib.overlap import Overlap, SunkLoads
from oproj_lib.ranks.grid_times import GridRow
from oproj_lib.recorded import Recorded
from oproj_lib.residency import PARTITIONS, REGISTERS, THREADS, Beside

STEPS = "steps of the virtual GPU: order, not time"
GRID_COLOURS = (ORANGE, SKY, PURPLE)
ORDER_COLOURS = {
    machine.WEIGHTS: GREEN, machine.STAGED: BLUE, machine.WAIT: VERMILLION, machine.GO: PURPLE, machine.X: ORANGE,
    machine.MATRIX: MUTED,
}  # fmt: skip
MODELLED = "modelled, not measured"


def chain_timelines(chains: Mapping[str, Sequence[GridRow]]) -> Picture:
    """One band per chain, one bar per grid; rows: `ranks.timeline` of a chain's grids, in the order of its stream.

    Hatched: from the first thread at griddepcontrol.wait to the last one past it. Triangle: all CTAs have triggered
    or exited. Raises ValueError without chains, or for a grid that never started.
    """
    if not chains:
        raise ValueError("no chains: give at least one")
    for name, rows in chains.items():
        if never := [row.grid for row in rows if row.start is None]:
            raise ValueError(f"{name}: {', '.join(never)} never started, so there is nothing to draw")
    edge = max(_last(row) for rows in chains.values() for row in rows)
    lanes = sum(len(rows) for rows in chains.values())
    picture = Picture(10.5, 1.35 + 0.27 * lanes + 0.2 * len(chains))
    axes = plain(picture.subplots(), x=STEPS, title="grids of a chain, on one clock: modelled, not measured")
    top, ticks, told = 0.0, [], []
    for name, rows in chains.items():
        ticks.append((top + len(rows) / 2, name))
        first = rows[0]
        if first.end is not None:
            axes.plot([first.end] * 2, [top, top + len(rows)], color=VERMILLION, lw=1.2)
        for number, row in enumerate(rows):
            _grid(axes, row, top + number, edge, GRID_COLOURS[number % len(GRID_COLOURS)])
        top += len(rows) + 0.6
        told.append(f"{name}: " + "; ".join(_told(row) for row in rows))
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
    axes.set(xlim=(0, edge * 1.01), ylim=(top - 0.3, -0.3))
    names = list(dict.fromkeys(row.grid for rows in chains.values() for row in rows))
    handles = [
        *(Patch(facecolor=GRID_COLOURS[i % len(GRID_COLOURS)], label=name) for i, name in enumerate(names)),
        Patch(facecolor=PAPER, edgecolor=MUTED, hatch="////", label="at griddepcontrol.wait"),
        Line2D([], [], marker="v", color=INK, ls="", ms=5, label="triggered"),
        Line2D([], [], color=VERMILLION, lw=1.2, label="the predecessor ends"),
    ]
    picture.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    picture.alt = f"Grids in {STEPS}, modelled. " + ". ".join(told) + "."
    return picture


def _last(row: GridRow) -> int:
    return max(time for time in (row.start, row.trigger, row.wait_end, row.end) if time is not None)


def _grid(axes: Axes, row: GridRow, top: float, edge: int, colour: str) -> None:
    start, end = row.start or 0, edge if row.end is None else row.end
    style = "--" if row.end is None else "-"
    box = {"facecolor": colour, "edgecolor": INK, "lw": 0.5, "ls": style}
    axes.add_patch(Rectangle((start, top + 0.1), end - start, 0.8, **box))  # type: ignore[arg-type]
    if row.wait_begin is not None:
        until = end if row.wait_end is None else row.wait_end
        axes.add_patch(
            Rectangle(
                (row.wait_begin, top + 0.1), until - row.wait_begin, 0.8, facecolor=PAPER, alpha=0.8, hatch="////",
                edgecolor=MUTED, lw=0,
            )
        )  # fmt: skip
    if row.trigger is not None:
        axes.plot([row.trigger], [top + 0.14], marker="v", color=INK, ms=5, clip_on=False, zorder=5)


def _told(row: GridRow) -> str:
    times = {
        "starts": row.start, "triggers": row.trigger, "first waits": row.wait_begin,
        "all past the wait": row.wait_end, "ends": row.end,
    }  # fmt: skip
    return f"{row.grid} " + ", ".join(f"{word} {time}" for word, time in times.items() if time is not None)


def machine_code_order(orders: Sequence[LoadOrder]) -> Picture:
    """One strip per kernel: its loads, wait, trigger and matrix instructions, in the order of their addresses.

    Raises ValueError without kernels, or for one without a wait.
    """
    if not orders:
        raise ValueError("no kernels: give at least one")
    picture = Picture(10.5, 1.2 + 0.62 * len(orders))
    axes = plain(picture.subplots(), x="instruction of the machine code, in the order of addresses; nothing of "
                 "these kinds follows")  # fmt: skip
    for row, order in enumerate(orders):
        axes.add_patch(Rectangle((0, row - 0.4), order.wait, 0.8, facecolor=PALE, lw=0))
        for at, kind in enumerate(order.kinds):
            if kind in ORDER_COLOURS:
                width = 3.0 if kind in (machine.WAIT, machine.GO) else 1.6
                axes.add_patch(Rectangle((at, row - 0.4), width, 0.8, facecolor=ORDER_COLOURS[kind], lw=0))
    axes.set_yticks(range(len(orders)), [order.name for order in orders])
    shown = max(at for order in orders for at, kind in enumerate(order.kinds) if kind in ORDER_COLOURS)
    axes.set(xlim=(0, shown + 8), ylim=(len(orders) - 0.5, -0.5))
    handles = [
        Patch(color=colour, label=f"{kind} (wait)" if kind == machine.WAIT else kind)
        for kind, colour in ORDER_COLOURS.items()
        if any(kind in order.kinds for order in orders)
    ]
    handles.append(Patch(color=PALE, label="above the wait"))
    picture.legend(handles=handles, loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    picture.alt = "Machine code in the order of addresses, from the cubins. " + " ".join(
        f"{order.name}: {order.before(machine.WEIGHTS)} loads of weights to registers and "
        f"{order.before(machine.STAGED)} cp.async above {machine.WAIT}, {order.after(machine.WEIGHTS)} loads of "
        f"weights below it."
        for order in orders
    )
    return picture


def sunk_cost(rows: Sequence[SunkLoads], recorded: Recorded) -> Picture:
    """How much longer a layer waits with ld.global.nc, recorded, against the bytes whose loads sank."""
    picture = Picture(7.0, 3.4)
    axes = plain(
        picture.subplots(),
        title=f"points: recorded on {recorded.machine}, {recorded.date}, M = 8",
        x="MB of weights that wait in registers",
        y="microseconds longer with ld.global.nc",
        grid="both",
    )
    most = max(row.register_bytes for row in rows) / 1e6
    axes.plot([0, most * 1.05], [0, most * 1.05 / recorded.copy_tb_s], color=MUTED, lw=1.3,
              label=f"bytes over the copy bandwidth, {recorded.copy_tb_s} TB/s")  # fmt: skip
    for k, colour, marker in ((768, BLUE, "o"), (1536, VERMILLION, "s")):
        mine = [row for row in rows if row.k == k]
        axes.plot([row.register_bytes / 1e6 for row in mine], [row.recorded_us for row in mine], marker, color=colour,
                  label=f"K = {k}, recorded")  # fmt: skip
    axes.set(xlim=(-0.4, most * 1.08), ylim=(-0.2, None))
    axes.legend(fontsize=8.5, frameon=False, loc="upper left")
    points = "; ".join(
        f"K = {r.k}, {r.staged_blocks} staged blocks, {r.register_bytes / 1e6:.1f} MB: {r.recorded_us:.1f} recorded, "
        f"{r.derived_us:.1f} derived"
        for r in rows
    )
    picture.alt = f"Microseconds that a layer waits longer with ld.global.nc than with ld.global. {points}."
    return picture


def overlap_bars(cases: Mapping[str, Overlap]) -> Picture:
    """One pair of bars per case: the predecessor, and the dependent below it with what the layer waits for.

    Raises ValueError without cases.
    """
    if not cases:
        raise ValueError("no cases: give at least one")
    picture = Picture(10.5, 1.2 + 0.78 * len(cases))
    axes = plain(picture.subplots(), x="modelled microseconds", title=f"what is exposed: {MODELLED}")
    last = max(case.end for case in cases.values())
    for row, case in enumerate(cases.values()):
        loading = case.wait_begin if case.above_wait else case.wait_end
        bars = [
            (0.0, case.predecessor_us, ORANGE, "", row - 0.38),
            (case.wait_begin, case.wait_end, PAPER, "////", row),
            (case.start if case.above_wait else case.wait_end, loading + (0 if case.above_wait else case.preload_us),
             GREEN, "", row),
            (case.end - case.rest_us, case.end, BLUE, "", row),
        ]  # fmt: skip
        for start, end, colour, hatch, y in bars:
            axes.add_patch(
                Rectangle((start, y), end - start, 0.34, facecolor=colour, edgecolor=MUTED if hatch else INK,
                          lw=0.4, hatch=hatch)
            )  # fmt: skip
        axes.plot([case.predecessor_us] * 2, [row - 0.42, row + 0.4], color=VERMILLION, lw=1.2)
        axes.plot([case.trigger_us], [row - 0.38], marker="v", color=INK, ms=5, clip_on=False)
        axes.text(
            case.end + last * 0.01, row + 0.17, f"{case.exposed:.2f} exposed", fontsize=8.5, va="center"
        )
    axes.set_yticks(range(len(cases)), list(cases))
    axes.set(xlim=(0, last * 1.16), ylim=(len(cases) - 0.45, -0.55))
    handles = [
        Patch(color=ORANGE, label="predecessor"), Patch(color=GREEN, label="weights arrive"),
        Patch(facecolor=PAPER, edgecolor=MUTED, hatch="////", label="at griddepcontrol.wait"),
        Patch(color=BLUE, label="x, MMAs, publish"),
        Line2D([], [], marker="v", color=INK, ls="", ms=5, label="triggered"),
        Line2D([], [], color=VERMILLION, lw=1.2, label="the predecessor ends"),
    ]  # fmt: skip
    picture.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    picture.alt = f"A predecessor and a dependent, {MODELLED}, microseconds. " + "; ".join(
        f"{name}: starts {case.start:.2f}, past its wait {case.wait_end:.2f}, ends {case.end:.2f}, "
        f"{case.exposed:.2f} exposed"
        for name, case in cases.items()
    )
    return picture


def exposed_by_trigger(case: Overlap) -> Picture:
    """Exposed time against when the predecessor triggers, for a preload that can be hidden and two that cannot."""
    picture = Picture(7.0, 3.2)
    axes = plain(
        picture.subplots(), title=MODELLED, x="the predecessor triggers, microseconds before its end",
        y="microseconds exposed", grid="y",
    )  # fmt: skip
    leads = [case.predecessor_us * i / 200 for i in range(201)]
    lines = {
        "preload above the wait": (replace(case, fits=True, above_wait=True), GREEN, "-"),
        "no room beside the predecessor": (replace(case, fits=False, above_wait=True), BLUE, "--"),
        "preload sunk below the wait": (replace(case, fits=True, above_wait=False), VERMILLION, ":"),
    }
    ends = []
    for label, (variant, colour, style) in lines.items():
        values = [replace(variant, trigger_us=case.predecessor_us - lead).exposed for lead in leads]
        axes.plot(leads, values, style, color=colour, lw=2, label=label)
        ends.append(f"{label}: {values[0]:.2f} when it triggers at its end, {values[-1]:.2f} at its start")
    lead = case.predecessor_us - case.trigger_us
    axes.plot(
        [lead], [case.exposed], "o", color=INK, label=f"here: {lead:.1f} before, {case.exposed:.2f} exposed"
    )
    axes.set(xlim=(0, case.predecessor_us), ylim=(0, None))
    axes.legend(fontsize=8.5, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    picture.alt = (
        f"Exposed microseconds, {MODELLED}, against the trigger's lead. {'; '.join(ends)}. "
        f"Here the trigger is {lead:.1f} before the end, and {case.exposed:.2f} are exposed."
    )
    return picture


def multiprocessor(pairs: Sequence[Beside]) -> Picture:
    """What two CTAs take of one multiprocessor's registers, threads and shared memory, in parts of what it has.

    Raises ValueError without pairs.
    """
    if not pairs:
        raise ValueError("no pairs: give at least one")
    picture = Picture(10.5, 1.2 + 0.42 * len(pairs))
    panels = picture.subplots(1, 3, sharey=True)
    for axes, what in zip(
        panels, ("registers of a sub-partition", "threads", "shared memory, KiB"), strict=True
    ):
        plain(axes, title=what)
        for row, pair in enumerate(pairs):
            taken, wanted, limit = _share(pair, what)
            axes.add_patch(Rectangle((0, row - 0.32), taken / limit, 0.64, facecolor=ORANGE, edgecolor=PAPER))
            over = taken + wanted > limit
            axes.add_patch(
                Rectangle((taken / limit, row - 0.32), wanted / limit, 0.64, facecolor=YELLOW if over else SKY,
                          edgecolor=VERMILLION if over else PAPER, hatch="xx" if over else "")
            )  # fmt: skip
            box = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.85, "pad": 1.0}
            text = f"{taken:,g} + {wanted:,g} of {limit:,g}"
            axes.text(0.03, row, text, fontsize=7.5, va="center", color=INK, bbox=box)
        axes.axvline(1, color=VERMILLION, lw=1.3)
        axes.set(xlim=(0, 1.5), ylim=(len(pairs) - 0.5, -0.5))
        axes.set_xticks([0, 0.5, 1], ["0", "half", "all"])
    panels[0].set_yticks(range(len(pairs)), [pair.second.name for pair in pairs])
    first = pairs[0].first
    handles = [
        Patch(color=ORANGE, label=f"{first.name}: {first.threads} threads, {first.registers} registers each"),
        Patch(color=SKY, label="the dependent"),
        Patch(facecolor=YELLOW, edgecolor=VERMILLION, hatch="xx", label="does not fit"),
    ]
    picture.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    picture.alt = f"One multiprocessor with a CTA of {first.name}, and beside it: " + " ".join(
        f"{pair.second.name}: {'fits' if pair.fits else 'does not fit (' + '; '.join(pair.problems) + ')'}."
        for pair in pairs
    )
    return picture


def _share(pair: Beside, what: str) -> tuple[float, float, float]:
    first, second = pair.first, pair.second
    if what.startswith("registers"):
        return first.partition_registers, second.partition_registers, REGISTERS // PARTITIONS
    if what == "threads":
        return first.threads, second.threads, THREADS
    return round(first.shared_kib, 1), round(second.shared_kib, 1), max(pair.carveout_kib, 1)
