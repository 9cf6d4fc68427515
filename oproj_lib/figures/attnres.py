"""Residual attention: whom a token listens to, what moves before and after the poll, where the machine code has it,
and where eps stands."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from oproj_lib import attnres_order as parts
from oproj_lib.attnres_order import CodeOrder
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
from oproj_lib.problem import Array

COLOURS = {
    parts.WEIGHTS: GREEN, parts.WRITTEN: SKY, parts.SUMS: ORANGE, parts.PREFIX: PURPLE, parts.OUT: YELLOW,
    parts.FIRST: MUTED, parts.RELEASE: PURPLE, parts.PARK: BLUE, parts.POLL: ORANGE, parts.STORE: YELLOW,
    parts.WAIT: VERMILLION,
}  # fmt: skip
NAMES = {
    parts.RELEASE: "release the dependents (PREEXIT)", parts.WAIT: "wait (ACQBULK)",
    parts.WRITTEN: "load prefix, blocks", parts.WEIGHTS: "load norm_w, qk_w, out_w",
}  # fmt: skip
SOURCES = (SKY, ORANGE, GREEN, PURPLE, YELLOW, PALE, "#9BC4E2", "#E8B98A", MUTED)
"""P, which comes last, is drawn in vermillion."""


def softmax_shares(scores: Array) -> Picture:
    """Bars of the shares that each token's mix takes of its sources. scores: [M, NB + 1], P's last.

    Raises ValueError for another shape.
    """
    if scores.ndim != 2 or not 1 <= scores.shape[1] <= len(SOURCES):
        raise ValueError(f"scores have shape {scores.shape}; [tokens, sources], 1 to {len(SOURCES)} sources")
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    tokens, sources = shares.shape
    picture = Picture(10.0, 1.3 + 0.34 * tokens)
    axes = plain(picture.subplots(), title="shares of the mix, with the scores", x="softmax(score)")
    left = np.zeros(tokens)
    for source in range(sources):
        last = source == sources - 1
        name, colour = ("P", VERMILLION) if last else (f"block {source}", SOURCES[source])
        axes.barh(range(tokens), shares[:, source], left=left, color=colour, edgecolor=PAPER, label=name)
        for token in range(tokens):
            if shares[token, source] > 0.06:
                middle = left[token] + shares[token, source] / 2
                text = f"{scores[token, source]:.2f}"
                axes.text(middle, token, text, ha="center", va="center", fontsize=8, color=INK)
        left += shares[:, source]
    axes.set(xlim=(0, 1), ylim=(tokens - 0.4, -0.6))
    axes.set_yticks(range(tokens), [f"token {token}" for token in range(tokens)])
    picture.legend(loc="outside lower center", ncols=sources, fontsize=8, frameon=False)
    most = shares.argmax(axis=1)
    told = ", ".join(
        f"token {token} mostly of {'P' if most[token] == sources - 1 else f'block {most[token]}'} "
        f"({shares[token].max():.0%})"
        for token in range(min(tokens, 4))
    )
    picture.alt = (
        f"One bar per token, divided into the softmax shares of its {sources} sources, {sources - 1} blocks and P, "
        f"each with its score. {tokens} tokens: {told}."
    )
    return picture


def poll_traffic(moved: Mapping[tuple[str, str], int]) -> Picture:
    """Bars of the bytes that a CTA moves before, during and after its polls. moved: as `attnres_order.traffic`.

    Raises ValueError if nothing moved.
    """
    if not moved:
        raise ValueError("nothing moved: trace a CTA that has a token")
    picture = Picture(10.0, 2.5)
    axes = plain(
        picture.subplots(),
        title="global memory of one CTA, that is of one token",
        x="KB (1000 bytes)",
        grid="x",
    )
    names = list(dict.fromkeys(what for _, what in moved))
    for row, phase in enumerate(parts.PHASES):
        left = 0.0
        for what in names:
            size = moved.get((phase, what), 0) / 1000
            if size:
                axes.barh(row, size, left=left, color=COLOURS[what], edgecolor=PAPER)
                axes.text(
                    left + size / 2, row, f"{size:.0f}", ha="center", va="center", fontsize=8, color=INK
                )
            left += size
    for what in names:
        axes.barh(0, 0, color=COLOURS[what], label=f"{what} {'stored' if what in ('P', 'out') else 'read'}")
    axes.set_yticks(range(len(parts.PHASES)), parts.PHASES)
    axes.set_ylim(len(parts.PHASES) - 0.5, -0.5)
    picture.legend(loc="outside lower center", ncols=len(names), fontsize=8, frameon=False)
    told = "; ".join(
        f"{phase}: "
        + (", ".join(f"{what} {size:,}" for (at, what), size in moved.items() if at == phase) or "nothing")
        for phase in parts.PHASES
    )
    picture.alt = f"Bars of the bytes of global memory that the CTA of one token moves. {told}."
    return picture


def code_places(order: CodeOrder) -> Picture:
    """Where loads, polls, stores and griddepcontrol stand in the machine code, with a line at the first poll."""
    shown = [what for what in parts.CODE_ROWS if order.places[what]]
    picture = Picture(10.0, 1.2 + 0.3 * len(shown))
    axes = plain(picture.subplots(), title=order.name, x="instruction of the machine code, in address order")
    for row, what in enumerate(shown):
        axes.plot([0, order.length], [row, row], color=PALE, lw=0.8, zorder=0)
        axes.vlines(order.places[what], row - 0.36, row + 0.36, color=COLOURS[what], lw=2)
    axes.axvline(order.first_poll, color=INK, lw=1, ls=":")
    axes.text(order.first_poll, -0.75, " first poll", fontsize=8, color=INK, va="center")
    axes.set_yticks(range(len(shown)), [NAMES.get(what, what) for what in shown])
    axes.set(xlim=(0, order.length), ylim=(len(shown) - 0.4, -1.0))
    told = ", ".join("{} {} of {}".format(what, *order.before_the_poll(what)) for what in shown)
    picture.alt = (
        f"A row of marks for each kind of instruction along the {order.length} machine instructions of {order.name}. "
        f"The first poll is instruction {order.first_poll}; above it stand: {told}."
    )
    return picture


def eps_placement(eps: float, sizes: Mapping[str, float]) -> Picture:
    """By how much 1 / (sqrt(mean) + eps) misses 1 / sqrt(mean + eps), against the root of the mean; sizes: marked
    roots of means, by name.

    Raises ValueError for an eps or a size that is not positive.
    """
    if not eps > 0 or not all(size > 0 for size in sizes.values()):
        raise ValueError(f"eps = {eps}, sizes {dict(sizes)}: all must be positive")
    roots = np.geomspace(1e-5, 1e2, 400)
    picture = Picture(10.0, 3.4)
    axes = plain(
        picture.subplots(),
        title=f"eps = {eps:g} outside the root in place of inside",
        x="root of the mean square of a source",
        y="relative change of its score",
        grid="both",
    )
    axes.loglog(roots, misplaced(roots, eps), color=BLUE, lw=2)
    axes.axhline(2.0**-9, color=VERMILLION, lw=1.2)
    axes.text(1.3e-5, 2.0**-9 * 1.5, "half a BF16 step, 2^-9", color=VERMILLION, fontsize=8.5)
    for name, size in sizes.items():
        change = float(misplaced(np.array(size), eps))
        axes.plot([size], [change], "o", color=ORANGE, mec=INK, ms=7)
        axes.annotate(
            name, (size, change), xytext=(6, 6), textcoords="offset points", fontsize=8.5, color=INK
        )
    axes.set(xlim=(roots[0], roots[-1]), ylim=(1e-9, 1e4))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")  # not as formulas, which are slow to draw
        axis.set_minor_locator(NullLocator())
    axes.legend(
        handles=[
            Line2D([], [], color=BLUE, lw=2, label="|wrong / right - 1|"),
            Line2D([], [], marker="o", ls="", color=ORANGE, mec=INK, label="sources of the inputs named"),
        ],
        fontsize=8,
        frameon=False,
    )
    told = ", ".join(f"{name} {float(misplaced(np.array(size), eps)):.1e}" for name, size in sizes.items())
    picture.alt = (
        f"Line on logarithmic axes: the relative change of a score if eps = {eps:g} stands outside the root, against "
        f"the root of the mean square: {float(misplaced(roots[:1], eps)[0]):.0f} at {roots[0]:g}, "
        f"{float(misplaced(roots[-1:], eps)[0]):.0e} at {roots[-1]:g}; for the inputs marked: {told}."
    )
    return picture


def misplaced(roots: Array, eps: float) -> Array:
    """|wrong / right - 1| of the inverse norm with eps outside the root, float64."""
    right, wrong = 1 / np.sqrt(roots**2 + eps), 1 / (roots + eps)
    change: Array = np.abs(wrong / right - 1)
    return change
