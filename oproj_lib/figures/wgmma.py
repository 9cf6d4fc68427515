"""D of a wgmma: which warp, lane and register of the warpgroup hold it."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from oproj_lib.figures.style import INK, PALE, PAPER, PARTS, VERMILLION, Picture, bare
from oproj_lib.layouts import wgmma
from oproj_lib.layouts.fragments import MMA_ROWS, MMA_TOKENS, WARP_LANES, lane_part
from oproj_lib.problem import ROWS_PER_CTA

MOST_COLUMNS = 64
"""More would be too narrow to see."""


def places(thread: int, n: int) -> list[tuple[int, int]]:
    """(row, column) of D [64, n] in each register of a thread of the warpgroup."""
    row, column = wgmma.thread_row(thread), wgmma.thread_column(thread)
    return [
        (row + wgmma.register_row(i), column + wgmma.register_column(i))
        for i in range(wgmma.register_count(n))
    ]


def warpgroup_fragment(n: int, thread: int) -> Picture:
    """D [64, n] over the four warps, with the registers of one thread; and its warp's first 8 columns, lane by
    lane.

    Raises:
        ValueError: for a thread outside 0..127, or an n that is no multiple of 8 from 8 to 64.
    """
    if not 0 <= thread < wgmma.THREADS:
        raise ValueError(f"thread = {thread}: a warpgroup has threads 0 to {wgmma.THREADS - 1}")
    if n % MMA_TOKENS or not MMA_TOKENS <= n <= MOST_COLUMNS:
        raise ValueError(f"n = {n}: choose a multiple of {MMA_TOKENS} from {MMA_TOKENS} to {MOST_COLUMNS}")
    picture = Picture(11.0, 6.0)
    whole, part = picture.subplots(1, 2, width_ratios=[1.25, 1])
    _whole(whole, n, thread)
    _part(part, thread)
    warp, lane = divmod(thread, WARP_LANES)
    held = places(thread, n)
    picture.alt = (
        f"Left: D, 64 rows by {n} columns, in four bands of 16 rows, one per warp of the warpgroup. Thread {thread}, "
        f"lane {lane} of warp {warp}, holds {len(held)} elements: "
        f"{', '.join(f'({row}, {column})' for row, column in held[:4])} in registers 0 to 3, and the same again every "
        f"8 columns. Right: the 16 by 8 elements of warp {warp} at columns 0 to 7, each with its lane and register: "
        "lane = 4 * (row % 8) + column // 2, register = 2 * (row // 8) + column % 2, as in mma.m16n8k16."
    )  # fmt: skip
    return picture


def _whole(axes: Axes, n: int, thread: int) -> None:
    bare(axes, title=f"D [64, {n}]: {wgmma.register_count(n)} registers in each of 128 threads")
    for warp in range(wgmma.WARPS):
        top = warp * MMA_ROWS
        axes.add_patch(Rectangle((0, top), n, MMA_ROWS, facecolor=PARTS[warp], edgecolor=PAPER, lw=2))
        axes.text(-n * 0.03, top + 8, f"warp {warp}", ha="right", va="center", fontsize=9.5, color=INK)
    for column in range(MMA_TOKENS, n, MMA_TOKENS):
        axes.plot([column, column], [0, ROWS_PER_CTA], color=PAPER, lw=1)
    for register, (row, column) in enumerate(places(thread, n)):
        axes.add_patch(Rectangle((column, row), 1, 1, facecolor=VERMILLION, edgecolor=PAPER, lw=0.6))
        if n <= 24:
            axes.text(
                column + 0.5, row + 0.5, str(register), ha="center", va="center", fontsize=7, color=PAPER
            )
    axes.set(xlim=(-n * 0.2, n), ylim=(ROWS_PER_CTA + 0.5, -0.5))
    axes.set_xticks(range(0, n + 1, MMA_TOKENS), map(str, range(0, n + 1, MMA_TOKENS)))
    axes.set_yticks(range(0, ROWS_PER_CTA + 1, MMA_ROWS), map(str, range(0, ROWS_PER_CTA + 1, MMA_ROWS)))
    axes.tick_params(length=0, labelsize=8, colors=INK)
    axes.set_xlabel(f"column: token; in red the registers of thread {thread}", fontsize=9, color=INK)
    axes.set_ylabel("row of W", fontsize=9, color=INK)


def _part(axes: Axes, thread: int) -> None:
    warp, lane = divmod(thread, WARP_LANES)
    bare(axes, title=f"warp {warp}, columns 0 to 7: lane, and below it the register")
    for other in range(WARP_LANES):
        for register, (row, column) in enumerate(places(warp * WARP_LANES + other, MMA_TOKENS)):
            top = row - warp * MMA_ROWS
            mine = other == lane
            colour = VERMILLION if mine else PARTS[lane_part(other)] if other // 4 % 2 else PALE
            axes.add_patch(Rectangle((column, top), 1, 1, facecolor=colour, edgecolor=PAPER, lw=1))
            ink = PAPER if mine else INK
            axes.text(column + 0.5, top + 0.36, str(other), ha="center", va="center", fontsize=8.5, color=ink)
            small = PAPER if mine else INK
            axes.text(
                column + 0.5, top + 0.74, str(register), ha="center", va="center", fontsize=6.5, color=small
            )
    axes.set(xlim=(-0.2, MMA_TOKENS + 0.2), ylim=(MMA_ROWS + 0.2, -0.2))
    axes.set_xticks([i + 0.5 for i in range(MMA_TOKENS)], map(str, range(MMA_TOKENS)))
    rows = range(warp * MMA_ROWS, (warp + 1) * MMA_ROWS)
    axes.set_yticks([i + 0.5 for i in range(MMA_ROWS)], map(str, rows))
    axes.tick_params(length=0, labelsize=8, colors=INK)
