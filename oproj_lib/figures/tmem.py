"""Tensor memory: which lane and column holds what, and which warp reaches it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.patches import Patch, Rectangle

from oproj_lib.figures.style import BLUE, GREEN, INK, MUTED, PALE, PAPER, PARTS, VERMILLION, Picture, bare
from oproj_lib.layouts import tmem
from oproj_lib.layouts.fragments import WARP_LANES


def accumulator_map(n: int, row: int, ms: tuple[int, ...] = tmem.ROW_COUNTS) -> Picture:
    """D [m, n] in tensor memory for each m: lanes downwards, columns to the right; `row` is marked.

    Raises:
        ValueError: if n columns cannot be allocated, or a map has no such row.
    """
    columns = tmem.allocation_columns(n)
    if not 0 <= row < min(ms):
        raise ValueError(f"row = {row}: D has rows 0 to {min(ms) - 1}")
    picture = Picture(10.5, 5.6)
    texts = []
    for axes, m in zip(picture.subplots(1, len(ms), squeeze=False)[0], ms, strict=True):
        bare(axes, title=f"M = {m}: {m * n} of {tmem.LANES * columns} cells allocated hold D")
        axes.add_patch(Rectangle((0, 0), columns, tmem.LANES, facecolor=PALE))
        for first in range(0, m, tmem.ROWS_PER_QUARTER):
            lane = tmem.lane_of_row(first, m)
            colour = PARTS[lane // WARP_LANES]
            axes.add_patch(
                Rectangle((0, lane), n, tmem.ROWS_PER_QUARTER, facecolor=colour, edgecolor=PAPER, lw=1)
            )
            last = first + tmem.ROWS_PER_QUARTER - 1
            axes.text(
                n / 2, lane + 8, f"rows {first}–{last}", ha="center", va="center", fontsize=8.5, color=INK
            )
        for quarter in range(1, tmem.QUARTERS):
            axes.plot([0, columns], [quarter * WARP_LANES] * 2, color=INK, lw=1)
        for quarter in range(tmem.QUARTERS):
            axes.text(
                columns * 1.02,
                quarter * WARP_LANES + 16,
                f"warp % 4\n= {quarter}",
                va="center",
                fontsize=8,
                color=INK,
            )
        mark = tmem.lane_of_row(row, m)
        axes.add_patch(Rectangle((0, mark), n, 1, facecolor=VERMILLION))
        axes.text(
            -columns * 0.02, mark + 0.5, f"row {row}", ha="right", va="center", fontsize=8, color=VERMILLION
        )
        axes.set(xlim=(-columns * 0.18, columns * 1.22), ylim=(tmem.LANES + 1, -1))
        axes.set_yticks([*range(0, tmem.LANES, 16)], map(str, range(0, tmem.LANES, 16)))
        axes.set_xticks([0, n, columns] if n < columns else [0, n])
        axes.tick_params(length=0, labelsize=8, colors=INK)
        axes.set_xlabel("TMEM column (32 bits)", fontsize=9, color=INK)
        axes.set_ylabel("TMEM lane", fontsize=9, color=INK)
        texts.append(f"M = {m}: row {row} in lane {mark}")
    handles = [
        Patch(color=PALE, label="allocated, holds nothing"),
        Patch(color=VERMILLION, label=f"row {row}"),
    ]
    picture.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8.5, frameon=False)
    picture.alt = (
        f"Tensor memory, 128 lanes by {columns} allocated columns, with D of {n} columns. With M = 128 row r lies in "
        "lane r. With M = 64 each quarter of 32 lanes holds 16 rows in its first 16 lanes, and the other 16 are empty. "
        f"{'; '.join(texts)}. Each quarter belongs to the warps of one number modulo 4."
    )  # fmt: skip
    return picture


def allocation_strip(tokens: Mapping[str, int]) -> Picture:
    """What each accumulator [*, n] of the mapping (name -> n) takes of the 512 columns: used, and rounded up.

    Raises:
        ValueError: if one does not fit.
    """
    picture = Picture(9.5, 1.2 + 0.42 * len(tokens))
    axes = bare(picture.subplots(), title="columns of tensor memory: used, allocated, of 512")
    texts = []
    for y, (name, n) in enumerate(tokens.items()):
        columns = tmem.allocation_columns(n)
        axes.add_patch(Rectangle((0, y + 0.1), tmem.COLUMNS, 0.8, facecolor=PALE))
        axes.add_patch(Rectangle((0, y + 0.1), columns, 0.8, facecolor=GREEN, alpha=0.45))
        axes.add_patch(Rectangle((0, y + 0.1), n, 0.8, facecolor=BLUE))
        axes.text(
            columns + 6, y + 0.5, f"{n} used, {columns} allocated", va="center", fontsize=8.5, color=INK
        )
        texts.append(f"{name}: {n} used, {columns} allocated")
    axes.set(xlim=(0, tmem.COLUMNS * 1.28), ylim=(len(tokens), 0))  # room for the label of a full bar
    axes.set_yticks([i + 0.5 for i in range(len(tokens))], list(tokens))
    axes.set_xticks(np.arange(0, tmem.COLUMNS + 1, 64).tolist())
    axes.tick_params(length=0, labelsize=8, colors=INK)
    picture.alt = f"Bars of tensor-memory columns, of {tmem.COLUMNS}: {'; '.join(texts)}."
    return picture


def reach_map(reached: Mapping[tuple[int, int], bool]) -> Picture:
    """Which warp may read which quarter: (warp, quarter) -> no finding. From runs, not from a rule."""
    warps = sorted({warp for warp, _ in reached})
    picture = Picture(6.4, 3.2)
    axes = bare(picture.subplots(), title="may this warp read these lanes?")
    for (warp, quarter), fine in reached.items():
        axes.add_patch(
            Rectangle((quarter, warp), 1, 1, facecolor=GREEN if fine else PALE, edgecolor=PAPER, lw=2)
        )
        text = "yes" if fine else "lane quarter"
        axes.text(
            quarter + 0.5,
            warp + 0.5,
            text,
            ha="center",
            va="center",
            fontsize=9,
            color=INK if fine else MUTED,
        )
    axes.set(xlim=(0, tmem.QUARTERS), ylim=(len(warps), 0))
    ranges = [f"lanes {32 * q}–{32 * q + 31}" for q in range(tmem.QUARTERS)]
    axes.set_xticks([q + 0.5 for q in range(tmem.QUARTERS)], ranges)
    axes.set_yticks([warp + 0.5 for warp in warps], [f"warp {warp}" for warp in warps])
    axes.tick_params(length=0, labelsize=8.5, colors=INK)
    yes = ", ".join(
        f"warp {w} lanes {32 * q} to {32 * q + 31}" for (w, q), fine in sorted(reached.items()) if fine
    )
    picture.alt = (
        f"A grid of {len(warps)} warps by 4 quarters of the lanes. Without a finding: {yes}. "
        "All other pairs are reported."
    )
    return picture
