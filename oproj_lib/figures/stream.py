"""The instructions of a launch in program order, by the Python function they come from."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import Patch

from oproj_lib.attribution import ADDRESSES, KINDS, Step
from oproj_lib.figures.style import BLUE, INK, MUTED, ORANGE, PALE, VERMILLION, Picture, plain

COLOURS = dict(zip(KINDS, (BLUE, ORANGE, VERMILLION, MUTED), strict=True))


def wait_index(steps: Sequence[Step]) -> int:
    """Index of griddepcontrol.wait.

    Raises:
        ValueError: if there is none.
    """
    for step in steps:
        if step.opcode == "griddepcontrol.wait":
            return step.index
    raise ValueError("these instructions have no griddepcontrol.wait")


def instruction_stream(steps: Sequence[Step]) -> Picture:
    """One tick per PTX instruction: x is program order, y the Python function, colour what it is for.

    This is a model: it shows the order in which instructions are issued and how many threads execute them.
    It has no
    times, and memory instructions that take long on hardware are as wide as the others.
    """
    functions = list(
        dict.fromkeys(step.function for step in steps if step.function and step.function != ADDRESSES)
    )
    rows = [*functions, ADDRESSES]
    wait = wait_index(steps)
    total = sum(step.threads for step in steps)
    picture = Picture(11.5, 1.5 + 0.27 * len(rows))
    axes = plain(
        picture.subplots(), x="PTX instruction, in program order", title="modelled, not measured: no times"
    )
    axes.axvspan(-0.5, wait, color=PALE, zorder=0)
    width = max(0.7, len(steps) / 900)
    for kind in KINDS:
        shown = [step for step in steps if step.kind == kind and step.function]
        axes.bar(
            [step.index for step in shown], 0.76, bottom=[rows.index(step.function) - 0.38 for step in shown],
            color=COLOURS[kind], width=width,
        )  # fmt: skip
    axes.axvline(wait, color=VERMILLION, lw=1.5)
    axes.text(wait, -0.75, " griddepcontrol.wait", color=VERMILLION, fontsize=8.5, va="center")
    axes.text(wait, -0.75, "weights only ", color=INK, fontsize=8.5, va="center", ha="right")
    for step in steps:
        if step.opcode.startswith(("bar.sync", "barrier.sync")):
            axes.axvline(step.index, color=INK, lw=0.9, ls=":")
    axes.set_yticks(range(len(rows)), rows)
    axes.set(ylim=(len(rows) - 0.4, -1.2), xlim=(-0.5, len(steps)))
    right = axes.secondary_yaxis("right")
    share = [sum(step.threads for step in steps if step.function == name) for name in rows]
    right.set_yticks(range(len(rows)), [f"{n / 1e6:.2f} M  {n / total:4.0%}" for n in share])
    right.tick_params(labelsize=8, colors=INK, length=0)
    right.set_ylabel("thread-instructions", fontsize=9, color=INK)
    right.spines["right"].set_visible(False)
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in KINDS]
    picture.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8.5, frameon=False)
    before = sum(step.threads for step in steps if step.index < wait)
    picture.alt = (
        f"The {len(steps)} PTX instructions of the kernel in program order, one row per Python "
        f"function. {wait} stand before "
        f"griddepcontrol.wait, {before / total:.0%} of all thread-instructions: they compute addresses "
        "and start every load of "
        "weights. Behind it: x, the matrix instructions, the partial sums and the publish. Shares by "
        "function: "
        + ", ".join(f"{name} {n / total:.0%}" for name, n in zip(rows, share, strict=True))
        + ". Dotted lines are block-wide barriers. The order is modelled; no time is shown."
    )
    return picture
