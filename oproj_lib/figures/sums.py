"""Sums: the kernel's tree for one output, where other orders end, and one dot product's bits side by side."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

from oproj_lib import bf16
from oproj_lib.figures.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PALE,
    PAPER,
    PARTS,
    VERMILLION,
    Picture,
    bare,
    plain,
)
from oproj_lib.fused_dot import FP32_BITS, FusedDot
from oproj_lib.kernels.configuration import Configuration
from oproj_lib.layouts.fragments import HALVES, chain_of
from oproj_lib.problem import Array
from oproj_lib.summation import add_in_turn, add_pairwise

BEYOND = 16  # bits shown below the last that is kept: those of a product
LIGHT = 0.35  # how dark a 0 is, compared with a 1


def sum_tree(config: Configuration, chains: Array) -> Picture:
    """The order in which one output is added: MMAs into chains, chains into a tree, parts in turn.

    Args:
        chains: [parts, chains] FP32, what the accumulators hold (`summation.chain_sums` at one output).

    Raises:
        ValueError: if that is not the configuration's shape.
    """
    if chains.shape != (config.parts, config.chains):
        raise ValueError(f"chains has shape {chains.shape}; it must be {(config.parts, config.chains)}")
    shown = min(config.parts, 4)
    picture = Picture(11.5, 4.9)
    axes = bare(picture.subplots(), title="one output: which numbers are added, from top to bottom")
    totals = add_pairwise(chains.T)
    running = [add_in_turn(totals[: n + 1]) for n in range(config.parts)]
    for index in range(shown):
        part = index if index < shown - 1 else config.parts - 1
        _part(axes, config, 10 * index, part, chains[part], float(totals[part]))
        _turn(axes, 10 * index, index, float(running[part]), skipped=part > index)
    axes.text(-1.1, -0.2, "chains", ha="right", va="center", fontsize=9, color=MUTED)
    axes.text(-1.1, -4.4, "tree", ha="right", va="center", fontsize=9, color=MUTED)
    axes.text(-1.1, -7.4, "in turn", ha="right", va="center", fontsize=9, color=MUTED)
    final = bf16.value_of(bf16.round_word(int(np.float32(running[-1]).view(np.uint32))))
    axes.text(
        10 * shown - 0.6,
        -7.4,
        f"to BF16:\n{final:.9g}",
        ha="left",
        va="center",
        fontsize=9.5,
        color=INK,
    )
    axes.set(xlim=(-3.6, 10 * shown + 4.2), ylim=(-8.4, 2.5))
    number = HALVES * config.kblocks
    picture.alt = (
        f"The sum of one output. Each of {config.parts} K parts, {shown} of them shown, has {number} MMAs in "
        f"{config.chains} chain(s); MMA i goes to chain i modulo {config.chains}. Chains are added pairwise to the "
        f"parts' sums {', '.join(f'{float(total):.6g}' for total in totals)}, which are added from left to right: "
        f"{', '.join(f'{float(total):.6g}' for total in running)}. The last is rounded to the BF16 {final:.9g}."
    )
    return picture


def _part(axes: Axes, config: Configuration, x: float, part: int, chains: Array, total: float) -> None:
    """One K part: its chains as boxes, and lines that add them pairwise."""
    axes.text(x + 4, 2.0, f"K part {part}", ha="center", fontsize=9.5, color=INK)
    width = 8.4 / config.chains
    centres = [x - 0.2 + width * (chain + 0.5) for chain in range(config.chains)]
    for chain, centre in enumerate(centres):
        numbers = [
            n
            for n in range(HALVES * config.kblocks)
            if chain_of(n // HALVES, n % HALVES, config.chains) == chain
        ]
        text = "\n".join(map(str, numbers[:2])) + ("\n⋮\n" + str(numbers[-1]) if len(numbers) > 3 else "")
        if len(numbers) == 3:
            text += f"\n{numbers[-1]}"
        axes.add_patch(
            Rectangle(
                (centre - 0.45 * width, -1.9), 0.9 * width, 3.4, facecolor=PARTS[chain], edgecolor=PAPER, lw=1
            )
        )
        axes.text(centre, 0.1, text, ha="center", va="center", fontsize=8, color=INK, linespacing=1.1)
        axes.text(
            centre, -1.55, f"{float(chains[chain]):+.3f}", ha="center", va="center", fontsize=6.5, color=INK
        )
    level = -1.9
    while len(centres) > 1:
        below = []
        for left, right in zip(centres[::2], centres[1::2], strict=True):
            middle = (left + right) / 2
            for end in (left, right):
                axes.plot([end, middle], [level, level - 1.2], color=INK, lw=1.2)
            below.append(middle)
        centres, level = below, level - 1.2
    axes.plot([centres[0]] * 2, [level, -5.0], color=INK, lw=1.2)
    axes.text(centres[0] + 0.3, -4.75, f"{total:+.6f}", ha="left", va="center", fontsize=8.5, color=INK)


def _turn(axes: Axes, x: float, index: int, running: float, *, skipped: bool) -> None:
    """The sum so far, below its part."""
    axes.plot([x + 4, x + 4], [-5.0, -6.8], color=INK, lw=1.2)
    axes.add_patch(Rectangle((x + 1.6, -8.0), 4.8, 1.2, facecolor=PALE, edgecolor=MUTED, lw=1))
    axes.text(x + 4, -7.4, f"{running:+.6f}", ha="center", va="center", fontsize=8.5, color=INK)
    if index:
        axes.annotate("", (x + 1.6, -7.4), (x - 3.6, -7.4), arrowprops={"arrowstyle": "->", "color": INK})
        axes.text(x - 1.0, -7.15, "… +" if skipped else "+", ha="center", va="bottom", fontsize=10, color=INK)


def order_histogram(sums: Array, kernel: float, exact: float) -> Picture:
    """Where FP32 sums of one output end in many random orders, in FP32 steps from the exact sum.

    Args:
        sums: [count] FP32; kernel: what the kernel's order gives; exact: float64.

    Raises:
        ValueError: if the exact sum is 0 or not finite: there is no step to count in.
    """
    if not np.isfinite(exact) or exact == 0:
        raise ValueError(f"exact = {exact}: it has no FP32 step")
    step = float(np.spacing(np.float32(abs(exact))))
    picture = Picture(10.5, 3.4)
    title = f"one output in {len(sums):,} random orders: {len(np.unique(sums))} different FP32 sums"
    axes = plain(picture.subplots(), title=title, x="(sum - exact) / FP32 step", y="orders", grid="y")
    places, counts = np.unique((sums.astype(np.float64) - exact) / step, return_counts=True)
    axes.bar(places, counts, width=0.8, color=BLUE)
    mine = (kernel - exact) / step
    axes.axvline(0, color=INK, lw=1.2)
    axes.axvline(mine, color=VERMILLION, lw=2)
    high = axes.get_ylim()[1]
    axes.set_ylim(0, 1.25 * high)
    axes.text(mine, 1.2 * high, "the kernel ", ha="right", va="top", fontsize=9, color=VERMILLION)
    axes.text(0, 1.08 * high, " exact", ha="left", va="top", fontsize=9, color=INK)
    picture.alt = (
        f"Histogram of FP32 sums of the same products in {len(sums)} random orders: they end between "
        f"{places.min():.1f} and {places.max():.1f} FP32 steps from the exact sum, in {len(places)} different values. "
        f"The kernel's own order ends at {mine:.1f}."
    )
    return picture


def alignment(dot: FusedDot) -> Picture:
    """Every term's bits at their weights: kept, cut off; below, the sum and what FP32 keeps of it.

    Raises:
        ValueError: if all terms are 0.
    """
    rows = [term for term in dot.terms if term.magnitude]
    if not rows:
        raise ValueError(f"all {len(dot.terms)} terms are 0: there are no bits to show")
    size = abs(dot.total)
    left = dot.top + 5  # 17 terms below 4 sum to less than 2**7
    right = min(dot.last - 2, *(max(term.weight, dot.last - BEYOND) for term in rows))
    fits = dot.last + max(size.bit_length() - FP32_BITS, 0)
    picture = Picture(11.5, 0.26 * len(rows) + 2.1)
    title = f"one step of the tensor core, bit by bit: aligned to 2^{dot.top}, kept down to 2^{dot.last}"
    axes = bare(picture.subplots(), title=title)
    image = np.ones((len(rows) + 2, left - right + 1, 4))
    image[:] = to_rgba(PALE)
    image[len(rows)] = to_rgba(PAPER)
    for y, term in enumerate(rows):
        _bits(image[y], term.magnitude, term.weight, left, dot.last, VERMILLION)
        axes.text(-0.4, y + 0.5, f"{'−' if term.negative else '+'} {term.name}", ha="right", va="center",
                  fontsize=8, color=INK)  # fmt: skip
    _bits(image[-1], size, dot.last, left, fits, ORANGE)
    below = len(rows) + 1.5
    axes.text(
        -0.4,
        below,
        f"{'−' if dot.total < 0 else '+'} sum of the kept",
        ha="right",
        va="center",
        fontsize=8,
        color=INK,
    )
    axes.imshow(image, extent=(0, left - right + 1, len(rows) + 2, 0), interpolation="nearest", aspect="auto")
    axes.vlines(range(1, left - right + 1), 0, len(rows) + 2, color=PAPER, lw=0.8)
    axes.hlines(range(1, len(rows) + 2), 0, left - right + 1, color=PAPER, lw=2.5)
    _legend(axes, dot, left - dot.last + 1, len(rows), fits)
    axes.set(xlim=(-6.5, left - right + 1.2), ylim=(len(rows) + 3.4, -1.3))
    gone = f"; {fits - dot.last} bits of the sum do not fit FP32" if fits > dot.last else ""
    picture.alt = (
        f"The terms of one tensor-core step that are not 0, {len(rows)} of {len(dot.terms)}, as rows of bits aligned "
        f"by weight. The largest exponent is {dot.top}; a line marks 2^{dot.last}, below which bits are cut off: "
        f"{len(dot.shortened)} of the terms lose some. The last row is their sum{gone}. The FP32 result is "
        f"{float(dot.result)!r}, the exact sum {float(dot.exact)!r}."
    )
    return picture


def _bits(row: Array, magnitude: int, weight: int, left: int, last: int, drop: str) -> None:
    """Colours the bits of magnitude * 2**weight, from the first 1 to the last digit; those below 2**last `drop`."""
    for place in range(magnitude.bit_length()):
        column = left - weight - place
        if column < len(row):
            colour = np.array(to_rgba(drop if weight + place < last else GREEN))
            row[column] = (
                colour if magnitude >> place & 1 else LIGHT * colour + (1 - LIGHT) * np.array(to_rgba(PAPER))
            )


def _legend(axes: Axes, dot: FusedDot, edge: int, rows: int, fits: int) -> None:
    """The line between kept and cut off, what the colours mean, and the result."""
    axes.plot([edge, edge], [-0.3, rows + 0.2], color=VERMILLION, lw=2.5)
    axes.text(edge + 0.3, -0.35, "cut off", ha="left", va="bottom", fontsize=8.5, color=VERMILLION)
    axes.text(edge - 0.3, -0.35, "kept", ha="right", va="bottom", fontsize=8.5, color=INK)
    orange = f"; orange: {fits - dot.last} bits that FP32 has no room for" if fits > dot.last else ""
    text = f"dark: 1, light: 0{orange}        FP32 result: {float(dot.result)!r}, exact: {float(dot.exact)!r}"
    axes.text(0, rows + 2.8, text, fontsize=9, color=INK, va="center")
