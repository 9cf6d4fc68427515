"""Registers of ``wgmma.mma_async.m64nNk16``: which thread of the warpgroup holds which element of D.

Source: PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16" (accumulator D). A warpgroup is four warps;
warp w of it holds rows 16 w .. 16 w + 15 of D [64, N] and all N columns. Within a warp D is N / 8 accumulator
fragments of ``mma.m16n8k16`` side by side: register ``i`` of a lane is register ``i % 4`` of fragment ``i //
4`` (see ``fragments``).
"""

from __future__ import annotations

from oproj_lib.layouts.fragments import (
    MMA_ROWS,
    MMA_TOKENS,
    WARP_LANES,
    Whole,
    accumulator_row,
    accumulator_token,
    lane_group,
    lane_part,
)
from oproj_lib.problem import ROWS_PER_CTA

WARPS = 4
"""Warps of a warpgroup; the first has a number that is a multiple of 4."""
THREADS = WARPS * WARP_LANES
FRAGMENT_REGISTERS = MMA_ROWS * MMA_TOKENS // WARP_LANES
"""FP32 registers per thread for 8 columns of D: 4."""


def register_count(n: int) -> int:
    """FP32 registers per thread that hold D [64, n]: 64 * n / 128."""
    return ROWS_PER_CTA * n // THREADS


def thread_row(thread: Whole) -> Whole:
    """Row of D in register 0 of a thread (0..127) of the warpgroup."""
    return thread // WARP_LANES * MMA_ROWS + lane_group(thread % WARP_LANES)


def thread_column(thread: Whole) -> Whole:
    """Column of D, a token, in register 0 of a thread of the warpgroup."""
    return accumulator_token(lane_part(thread % WARP_LANES), 0)


def register_row(register: int) -> int:
    """How many rows below register 0's the element of a register is: 0 or 8, in every thread."""
    return accumulator_row(0, register % FRAGMENT_REGISTERS)


def register_column(register: int) -> int:
    """How many columns right of register 0's the element of a register is, in every thread."""
    return register // FRAGMENT_REGISTERS * MMA_TOKENS + accumulator_token(0, register % FRAGMENT_REGISTERS)
