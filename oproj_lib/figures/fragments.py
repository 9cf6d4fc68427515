"""Registers of the matrix instruction, and the K permutation that turns them into 16-byte loads."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from oproj_lib.figures.style import INK, MUTED, PALE, PAPER, PARTS, VERMILLION, Picture, bare
from oproj_lib.fragment_maps import SHAPES, holders
from oproj_lib.kernels.configuration import Configuration
from oproj_lib.layouts import fragments
from oproj_lib.layouts.fragments import BLOCK_K, CHUNK, HALVES, MMA_K, MMA_ROWS, WARP_LANES

COLUMN_AXIS = {"A": "k", "B": "n", "C": "n (token)"}
ROW_AXIS = {"A": "m (row of W)", "B": "k", "C": "m (row of W)"}


def operand_maps(lane: int) -> Picture:
    """A, B and C of m16n8k16 laid out as the product D = A B + C: which lane and register hold each element.

    Raises:
        ValueError: for a lane outside 0..31.
    """
    _check_lane(lane)
    picture = Picture(10.0, 8.2)
    grid = picture.add_gridspec(2, 2, width_ratios=[16, 8], height_ratios=[1, 1])
    places = {"B": grid[0, 1], "A": grid[1, 0], "C": grid[1, 1]}
    for operand, place in places.items():
        _operand(picture.add_subplot(place), operand, lane)
    legend = bare(picture.add_subplot(grid[0, 0]))
    mine = {
        name: [where for where, (holder, _, _) in sorted(holders(name).items()) if holder == lane]
        for name in SHAPES
    }
    lines = [
        "Each cell: lane, and below it the register.",
        "Colour: lane % 4. Shade: whether lane // 4 is odd.",
        "",
        f"lane {lane}, outlined, holds",
        f"  A (m, k): {', '.join(map(str, mine['A'][:4]))},",
        f"            {', '.join(map(str, mine['A'][4:]))}",
        f"  B (k, n): {', '.join(map(str, mine['B']))}",
        f"  C (m, n): {', '.join(map(str, mine['C']))}",
    ]
    legend.text(
        0,
        0.5,
        "\n".join(lines),
        fontsize=10,
        color=INK,
        va="center",
        family="monospace",
        transform=legend.transAxes,
    )
    picture.alt = (
        "Three grids placed as a matrix product: A, 16 by 16, at the lower left, B, 16 by 8, above, C, "
        "16 by 8, at the lower "
        "right. Each cell names the lane and register that hold it. In A, rows repeat every 8 and lane "
        "= 4 * (row % 8) + "
        "(column % 8) // 2; in B, lane = 4 * column + (row % 8) // 2; in C, lane = 4 * (row % 8) + "
        "column // 2. "
        f"Lane {lane} is outlined: A {mine['A']}, B {mine['B']}, C {mine['C']}."
    )
    return picture


def _operand(axes: Axes, operand: str, chosen: int) -> None:
    rows, columns = SHAPES[operand]
    names = {"A": "A: weights", "B": "B: x", "C": "C and D: FP32 sums"}
    bare(axes, title=names[operand])
    for (row, column), (lane, register, _) in holders(operand).items():
        colour = PARTS[lane % 4]
        alpha = 1.0 if lane // 4 % 2 else 0.55
        axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, alpha=alpha, edgecolor=PAPER, lw=0.8))
        axes.text(column + 0.5, row + 0.36, str(lane), ha="center", va="center", fontsize=7.5, color=INK)
        axes.text(column + 0.5, row + 0.76, f"r{register}", ha="center", va="center", fontsize=5.5, color=INK)
    for (row, column), (lane, _, _) in holders(operand).items():
        if lane == chosen:
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor="none", edgecolor="black", lw=2.2))
    axes.set(xlim=(-0.05, columns + 0.05), ylim=(rows + 0.05, -0.05), aspect="equal")
    axes.set_xticks([i + 0.5 for i in range(columns)], map(str, range(columns)), fontsize=7)
    axes.set_yticks([i + 0.5 for i in range(rows)], map(str, range(rows)), fontsize=7)
    axes.tick_params(length=0, colors=MUTED)
    axes.set_xlabel(COLUMN_AXIS[operand], fontsize=9, color=INK)
    axes.set_ylabel(ROW_AXIS[operand], fontsize=9, color=INK)


def _check_lane(lane: int) -> None:
    if not 0 <= lane < WARP_LANES:
        raise ValueError(f"lane = {lane}: a warp has lanes 0 to {WARP_LANES - 1}")


def k_permutation() -> Picture:
    """One K block of 32 columns: memory order above, and where each column stands in the two MMAs below."""
    picture = Picture(11.5, 4.0)
    axes = bare(
        picture.subplots(), title="one K block: 32 neighbouring columns of a row, of W and of x alike"
    )
    for column in range(BLOCK_K):
        part = column // CHUNK
        _cell(axes, column, 0, part, str(column))
    for part in range(BLOCK_K // CHUNK):
        axes.text(
            part * CHUNK + CHUNK / 2,
            -0.45,
            f"lane % 4 = {part}: 16 bytes",
            ha="center",
            fontsize=8.5,
            color=INK,
        )
    for half in range(HALVES):
        for k in range(MMA_K):
            column = int(fragments.mma_k_to_column(half, k))
            x = half * MMA_K + k
            _cell(axes, x, 4, column // CHUNK, str(column))
            axes.text(x + 0.5, 5.35, str(k), ha="center", va="center", fontsize=7, color=MUTED)
            axes.plot([column + 0.5, x + 0.5], [1.02, 3.98], color=PARTS[column // CHUNK], lw=1.3, alpha=0.9)
        axes.text(
            half * MMA_K + MMA_K / 2,
            6.1,
            f"MMA {half}: its K positions 0 to 15",
            ha="center",
            fontsize=9,
            color=INK,
        )
    axes.axvline(MMA_K, ymin=0.02, ymax=0.36, color=INK, lw=1)
    axes.set(xlim=(-0.2, BLOCK_K + 0.2), ylim=(6.4, -0.9))
    orders = [[int(fragments.mma_k_to_column(half, k)) for k in range(MMA_K)] for half in range(HALVES)]
    picture.alt = (
        "Above, the 32 columns of a K block in memory order; lane % 4 = 0 reads columns 0 to 7, 1 "
        "reads 8 to 15, 2 reads 16 to "
        "23, 3 reads 24 to 31. Below, the K positions 0 to 15 of the two matrix instructions with the "
        "columns that stand there: "
        f"MMA 0 has {orders[0]}, MMA 1 has {orders[1]}. Lines join each column with its position."
    )
    return picture


def _cell(axes: Axes, x: float, y: float, part: int, text: str) -> None:
    axes.add_patch(Rectangle((x, y), 1, 1, facecolor=PARTS[part], edgecolor=PAPER, lw=1))
    axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8, color=INK)


def lane_loads(config: Configuration, *, lane: int, block: int, warp: int = 0) -> Picture:
    """The 16 x 32 weights of one K block and row tile: which lane reads which 16 bytes, in two loads (r = 0
    and 1).

    Raises:
        ValueError: for a lane, block or warp that does not exist.
    """
    _check_lane(lane)
    if not 0 <= block < config.kblocks:
        raise ValueError(
            f"block = {block}: a warp has {config.kblocks} K blocks, choose 0 to {config.kblocks - 1}"
        )
    tile = fragments.warp_row_tile(warp, config.parts, config.rows)
    part = fragments.warp_k_part(warp, config.parts)
    picture = Picture(11.5, 4.3)
    where = "shared memory, by cp.async" if block >= config.register_blocks else "registers, by 16-byte loads"
    axes = bare(
        picture.subplots(),
        title=f"warp {warp}, K block {block}, row tile {tile}: which lane reads what (to {where})",
    )
    mine = []
    for r in range(2):
        for reader in range(WARP_LANES):
            row = fragments.weight_row(tile, fragments.lane_group(reader), r) - MMA_ROWS * tile
            column = fragments.block_column(part, config.kblocks, block, fragments.lane_part(reader))
            x = column - fragments.block_column(part, config.kblocks, block, 0)
            colour = PARTS[fragments.lane_part(reader)]
            axes.add_patch(
                Rectangle(
                    (x, row),
                    CHUNK,
                    1,
                    facecolor=colour,
                    alpha=1.0 if r == 0 else 0.5,
                    edgecolor=PAPER,
                    lw=1.5,
                )
            )
            label = f"lane {reader}, {'lo' if r == 0 else 'hi'}"
            axes.text(x + CHUNK / 2, row + 0.5, label, ha="center", va="center", fontsize=7.5, color=INK)
            if reader == lane:
                axes.add_patch(
                    Rectangle((x, row), CHUNK, 1, facecolor="none", edgecolor=VERMILLION, lw=2.5, zorder=5)
                )
                mine.append((row, column))
    left = fragments.block_column(part, config.kblocks, block, 0)
    axes.set(xlim=(-0.1, BLOCK_K + 0.1), ylim=(MMA_ROWS + 0.1, -0.1))
    ticks = range(0, BLOCK_K + 1, CHUNK)
    axes.set_xticks(ticks, [str(left + tick) for tick in ticks])
    axes.set_yticks([0.5, 7.5, 8.5, 15.5], [str(MMA_ROWS * tile + row) for row in (0, 7, 8, 15)])
    axes.tick_params(length=0, colors=MUTED)
    axes.set_xlabel("column of W (64 bytes of each row)", fontsize=9, color=INK)
    axes.set_ylabel("row of the CTA", fontsize=9, color=INK)
    for edge in range(0, BLOCK_K + 1, MMA_ROWS):
        axes.plot([edge, edge], [0, MMA_ROWS], color=PALE, lw=0.8)
    picture.alt = (
        "A 16 by 32 tile of weights cut into 64 pieces of 8 columns, 16 bytes. The upper 8 rows are "
        "the first load (lo), the "
        f"lower 8 the second (hi). Lane l reads row l // 4 and piece l % 4. Lane {lane} is outlined: it "
        "reads rows "
        f"{MMA_ROWS * tile + mine[0][0]} and {MMA_ROWS * tile + mine[1][0]} from column {mine[0][1]}."
    )
    return picture
