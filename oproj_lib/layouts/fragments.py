"""Register fragments of ``mma.sync.m16n8k16`` and the K permutation that makes them 16-byte loads.

Source: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type". With ``group = lane // 4`` and
``part = lane % 4`` the instruction wants, in A register ``i``, the two elements at row ``group + 8 * (i %
2)`` and columns ``2 * part + {0, 1} + 8 * (i // 2)``. Loaded literally that is four 4-byte loads per lane and
instruction. The sum over K does not care in which order K runs, as long as A and B agree, so a lane reads 8
neighbouring BF16 (16 bytes) of a 32-column block and *declares* them to be the elements the instruction wants
of two MMAs.

Units: elements unless a name says bytes. Every function takes and returns whole numbers.
"""

from __future__ import annotations

from typing import Any

WARP_LANES = 32
BF16_BYTES = 2
CHUNK = 8
"""BF16 elements of one 16-byte access: the widest load, store or ``cp.async`` of one thread."""
CHUNK_BYTES = CHUNK * BF16_BYTES
MMA_ROWS = 16
MMA_TOKENS = 8
MMA_K = 16
BLOCK_K = 32
"""Columns of a K block: 4 lanes (``part``) times one chunk, which is two MMAs."""
HALVES = BLOCK_K // MMA_K
MAX_CHAINS = 4
"""Independent accumulators that hide the latency of dependent MMAs."""

Whole = Any
"""An ``int``, a NumPy integer array, or a traced ``cutlass.Int32``."""


def lane_group(lane: Whole) -> Whole:
    """Row within a 16-row tile (its first half), and token within an 8-token tile, that a lane holds:
    0..7."""
    return lane // 4


def lane_part(lane: Whole) -> Whole:
    """Which 16-byte quarter of a 32-column K block a lane holds: 0..3."""
    return lane % 4


def warp_row_tile(warp: Whole, parts: int, rows: int) -> Whole:
    """First of the ``rows`` consecutive 16-row tiles of a warp: 0..3."""
    return warp // parts * rows


def warp_k_part(warp: Whole, parts: int) -> Whole:
    """The K part (0..parts-1) whose products a warp sums."""
    return warp % parts


def weight_row(row_tile: Whole, group: Whole, r: int) -> Whole:
    """Row of the CTA's 64 whose weights a lane holds: ``r`` 0 is the upper, 1 the lower half of the tile."""
    return MMA_ROWS * row_tile + group + 8 * r


def block_column(k_part: Whole, kblocks: int, block: Whole, part: Whole) -> Whole:
    """First of the 8 columns a lane reads of K block ``block``, of W and of x alike."""
    return k_part * (kblocks * BLOCK_K) + block * BLOCK_K + part * CHUNK


def a_register(half: int, i: int) -> tuple[int, int]:
    """(r, word): A register ``i`` of MMA ``half`` is 32-bit word ``word`` of the chunk of tile half ``r``.

    In the contract's words: (lo[2h], hi[2h], lo[2h+1], hi[2h+1]), lo = r 0, hi = r 1.
    """
    return i % 2, 2 * half + i // 2


def b_register(half: int, i: int) -> int:
    """B register ``i`` of MMA ``half`` is this 32-bit word of the lane's x chunk: (x[2h], x[2h+1])."""
    return 2 * half + i


def mma_k_to_column(half: Whole, k: Whole) -> Whole:
    """Column within the 32-column block that stands at K position ``k`` (0..15) of MMA ``half``: the
    permutation.

    K position k belongs to part ``k % 8 // 2``, register pair ``k // 8``, element ``k % 2``.
    """
    return k % 8 // 2 * CHUNK + (2 * half + k // 8) * 2 + k % 2


def accumulator_token(part: Whole, v: int) -> Whole:
    """Token within the 8-token tile of accumulator register ``v`` (0..3)."""
    return 2 * part + v % 2


def accumulator_row(group: Whole, v: int) -> Whole:
    """Row within the 16-row tile of accumulator register ``v`` (0..3)."""
    return group + 8 * (v // 2)


def chain_count(rows: int, group_tiles: int) -> int:
    """Independent FP32 accumulators per (row tile, token tile).

    Rows and token tiles that run side by side are independent already, so the more of them the fewer chains.
    """
    return max(1, MAX_CHAINS // (rows * max(1, group_tiles)))


def chain_of(block: int, half: int, chains: int) -> int:
    """The chain that MMA number ``2 * block + half`` adds to."""
    return (HALVES * block + half) % chains
