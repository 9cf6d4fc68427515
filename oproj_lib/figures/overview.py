"""The whole kernel in one picture: which warp owns which rows and K part, and who publishes what."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from oproj_lib.figures.style import INK, MUTED, PALE, PAPER, PARTS, VERMILLION, Picture, bare
from oproj_lib.kernels.configuration import THREADS, WARPS, Configuration, recommended
from oproj_lib.layouts import fragments, publish
from oproj_lib.layouts.fragments import BLOCK_K, CHUNK, MMA_ROWS
from oproj_lib.layouts.schedule import group_tokens, schedule
from oproj_lib.layouts.shared_memory import ROW_TILES
from oproj_lib.problem import CTAS, ROWS_PER_CTA, TP8, N


def work_split(config: Configuration, batch: int, *, cta: int = 17) -> Picture:
    """W [7168, K] cut into CTAs, one CTA cut into warps, and the chunks that its threads publish.

    Raises:
        ValueError: for a CTA that does not exist, or a batch that does not fit.
    """
    if not 0 <= cta < CTAS:
        raise ValueError(f"cta = {cta}: there are {CTAS}, choose 0 to {CTAS - 1}")
    config.plan(batch)
    picture = Picture(11.5, 4.9)
    axes = picture.subplots(1, 3, gridspec_kw={"width_ratios": [1.0, 6.4, 3.0]})
    _grid_of_ctas(axes[0], cta)
    _warps(axes[1], config, cta)
    _chunks(axes[2], config, batch, cta)
    rows = f"{MMA_ROWS * config.rows} rows"
    picture.alt = (
        f"Left: the {N} rows of W as {CTAS} bands of {ROWS_PER_CTA} rows, one per CTA, with CTA {cta} "
        "marked. Middle: the "
        f"{ROWS_PER_CTA} rows by {config.k} columns of that CTA as a grid of {WARPS} rectangles, one "
        f"per warp: {rows} by "
        f"{config.k // config.parts} columns each. The last {config.staged_blocks} of a warp's "
        f"{config.kblocks} K blocks are "
        "hatched: they wait in shared memory, the others in registers. Right: the output of the CTA, "
        f"{ROWS_PER_CTA} columns "
        f"by {batch} tokens, cut into 16-byte chunks that carry the number of the thread that publishes them."
    )
    return picture


def _grid_of_ctas(axes: Axes, chosen: int) -> None:
    bare(axes, title=f"W: {CTAS} CTAs")
    for cta in range(CTAS):
        colour = VERMILLION if cta == chosen else PALE
        axes.add_patch(
            Rectangle((0, cta * ROWS_PER_CTA), 1, ROWS_PER_CTA, facecolor=colour, edgecolor=PAPER, lw=0.5)
        )
    middle = (chosen + 0.5) * ROWS_PER_CTA
    axes.annotate(f"CTA {chosen}", (1, middle), (1.15, middle), va="center", fontsize=9, color=VERMILLION)
    axes.set(xlim=(0, 2.2), ylim=(N, 0))
    axes.set_yticks([0, N // 2, N], ["0", str(N // 2), str(N)], fontsize=8)
    axes.set_ylabel("row of W = output column", fontsize=9, color=INK)


def _warps(axes: Axes, config: Configuration, cta: int) -> None:
    bare(
        axes,
        title=f"rows {cta * ROWS_PER_CTA} to {(cta + 1) * ROWS_PER_CTA - 1} of W: one rectangle per warp",
    )
    width = config.kblocks * BLOCK_K
    for warp in range(WARPS):
        tile = fragments.warp_row_tile(warp, config.parts, config.rows)
        part = fragments.warp_k_part(warp, config.parts)
        left, top = fragments.block_column(part, config.kblocks, 0, 0), MMA_ROWS * tile
        height = MMA_ROWS * config.rows
        colour = PARTS[part % len(PARTS)]
        axes.add_patch(Rectangle((left, top), width, height, facecolor=colour, edgecolor=PAPER, lw=2))
        staged = config.staged_blocks * BLOCK_K
        if staged:
            start = fragments.block_column(part, config.kblocks, config.register_blocks, 0)
            axes.add_patch(
                Rectangle(
                    (start, top),
                    staged,
                    height,
                    facecolor="none",
                    edgecolor=INK,
                    hatch="////",
                    lw=0,
                    alpha=0.45,
                )
            )
        box = {"facecolor": PAPER, "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
        size = 9 if config.parts <= 8 else 7
        label = f"warp {warp}" if config.parts <= 8 else str(warp)
        axes.text(left + width / 2, top + height / 2, label, ha="center",
                  va="center", fontsize=size, color=INK, bbox=box)  # fmt: skip
    axes.set(xlim=(0, config.k), ylim=(ROWS_PER_CTA, 0))
    axes.set_yticks([MMA_ROWS * tile for tile in range(ROW_TILES + 1)])
    axes.set_xticks([width * part for part in range(config.parts + 1)])
    axes.tick_params(axis="x", labelsize=8 if config.parts <= 8 else 6)
    where = (
        f"hatched: {config.staged_blocks} of {config.kblocks} K blocks wait in shared memory, the rest "
        "in registers"
        if config.staged_blocks
        else f"all {config.kblocks} K blocks of a warp wait in registers"
    )
    axes.set_xlabel(f"K: one colour per K part, {config.parts} parts\n{where}", fontsize=9, color=INK)
    axes.set_ylabel("row of the CTA", fontsize=9, color=INK)


def _chunks(axes: Axes, config: Configuration, batch: int, cta: int) -> None:
    _, tiles_per_group, groups = schedule(batch, config.group_tiles)
    bare(axes, title="what its threads publish")
    first = 0
    for group in range(groups):
        tokens = group_tokens(group, batch, tiles_per_group)
        for tid in range(publish.publish_threads(tokens)):
            token, row_tile, half = (
                publish.grouped_chunk(tid, tokens) if config.group_tiles else publish.ungrouped_chunk(tid)
            )
            column = publish.output_column(cta, row_tile, half) - cta * ROWS_PER_CTA
            axes.add_patch(
                Rectangle(
                    (column, first + token),
                    CHUNK,
                    1,
                    facecolor=PALE,
                    edgecolor=PAPER,
                    lw=1.5 if batch <= 24 else 0.3,
                )
            )
            if batch <= 24:
                axes.text(
                    column + CHUNK / 2,
                    first + token + 0.5,
                    str(tid),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color=INK,
                )
        first += tokens
    axes.set(xlim=(0, ROWS_PER_CTA), ylim=(max(batch, 1), 0))
    axes.set_xticks(
        range(0, ROWS_PER_CTA + 1, MMA_ROWS),
        [str(cta * ROWS_PER_CTA + c) for c in range(0, ROWS_PER_CTA + 1, MMA_ROWS)],
    )
    axes.set_yticks(sorted({0, batch}))
    axes.set_ylabel("token", fontsize=9, color=INK)
    in_group = publish.publish_threads(group_tokens(0, batch, tiles_per_group))
    numbers = "number: the thread. " if batch <= 24 else ""
    axes.set_xlabel(
        f"output column, 8 to a 16-byte chunk\n{numbers}{in_group} of {THREADS} threads publish",
        fontsize=9,
        color=INK,
    )
    axes.tick_params(colors=MUTED)


def readme_picture() -> Picture:
    """docs/kernel.png: the recommended kernel of TP8 with 8 tokens."""
    return work_split(recommended(TP8.k, 8), 8)
