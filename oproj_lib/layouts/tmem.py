"""Tensor memory (TMEM) of sm_100: 128 lanes x 512 columns of 32-bit cells per SM.

Source: PTX ISA, "Tensor Memory" (addressing, allocation, access restrictions) and "Data path layout
organization" (which lane holds which row of D). Units: lanes and columns; a TMEM address is lane << 16 |
column.
"""

from __future__ import annotations

from oproj_lib.layouts.fragments import WARP_LANES, Whole

LANES = 128
COLUMNS = 512
MIN_COLUMNS = 32
"""The smallest allocation; all are powers of two."""
LANE_SHIFT = 16
QUARTERS = LANES // WARP_LANES
"""A warp reaches one quarter of the lanes, that of its number modulo 4."""
ROW_COUNTS = (64, 128)
"""M of a one-CTA MMA."""
ROWS_PER_QUARTER = 16
"""With M = 64 each quarter holds 16 rows, in its lanes 0..15; lanes 16..31 hold nothing."""
LOAD_COLUMNS = (128, 64, 32, 16, 8, 4, 2, 1)
"""Repetition factors .x128 to .x1 of ``tcgen05.ld.32x32b``: 32-bit columns, and registers per thread."""


def allocation_columns(n: int) -> int:
    """Columns to allocate for ``n`` columns: max(32, the next power of two).

    Raises ValueError unless 1 <= n <= 512.
    """
    if not 1 <= n <= COLUMNS:
        raise ValueError(f"{n} TMEM columns: an SM has {COLUMNS}; choose 1 to {COLUMNS}")
    return max(MIN_COLUMNS, 1 << (n - 1).bit_length())


def lane_of_row(row: Whole, m: int) -> Whole:
    """TMEM lane of row ``row`` of D when the MMA has ``m`` rows (one CTA, no .ws).

    m = 128: lane = row. m = 64: 16 rows per quarter, lane = 32 * (row // 16) + row % 16.

    Raises ValueError for another m.
    """
    if m not in ROW_COUNTS:
        raise ValueError(f"m = {m}: an MMA of one CTA has {' or '.join(map(str, ROW_COUNTS))} rows")
    if m == LANES:
        return row
    return row // ROWS_PER_QUARTER * WARP_LANES + row % ROWS_PER_QUARTER


def tmem_address(base: Whole, lane: Whole, column: Whole) -> Whole:
    """Address of a cell in the allocation that starts at ``base``."""
    return base + lane * (1 << LANE_SHIFT) + column


def first_lane(warp: Whole) -> Whole:
    """First lane of the quarter that a warp reaches."""
    return warp % QUARTERS * WARP_LANES


def load_pieces(n: int, largest: int = 32) -> tuple[tuple[int, int], ...]:
    """(first column, columns) of the loads that cover ``n`` columns, each at most ``largest`` wide.

    Raises ValueError unless n >= 1 and largest is a repetition factor of tcgen05.ld.
    """
    if n < 1:
        raise ValueError(f"{n} columns to load: choose at least 1")
    if largest not in LOAD_COLUMNS:
        raise ValueError(f"largest = {largest} columns: choose from {LOAD_COLUMNS}")
    pieces = []
    column = 0
    while column < n:
        width = next(w for w in LOAD_COLUMNS if w <= min(largest, n - column))
        pieces.append((column, width))
        column += width
    return tuple(pieces)
