"""Who a thread is, and the addresses it works with: small records of traced values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from oproj_lib.kernels import primitives
from oproj_lib.kernels.configuration import THREADS, Configuration
from oproj_lib.layouts import fragments
from oproj_lib.layouts.fragments import WARP_LANES


@dataclass(frozen=True)
class Shared:
    """Shared-memory addresses (Int32) of a CTA: staged weights, x, partial sums. None for an area without
    bytes."""

    staged: Any
    x: Any
    partials: Any


@dataclass(frozen=True)
class Lane:
    """A thread of a CTA. group and part: its place in the MMA fragments; row_tile and k_part: its warp's
    share."""

    cta: Int32
    tid: Int32
    warp: Int32
    lane: Int32
    group: Int32
    part: Int32
    row_tile: Int32
    k_part: Int32


@dataclass(frozen=True)
class XLane:
    """Addresses of one lane's share of x.

    source (global) and target (shared) of its copies, None on the register path; fragments: where its first
    fragment is, in global memory on the register path and in shared memory on the others.
    """

    me: Lane
    source: Any
    target: Any
    fragments: Any


def this_lane(config: Configuration) -> Lane:
    """The executing thread. Read anew at every call, see ``primitives.thread_index``."""
    # The mask changes no value. It tells LLVM the range, so that divisions become shifts.
    tid = primitives.thread_index() & (THREADS - 1)
    cta, _, _ = cute.arch.block_idx()
    lane, warp = tid % WARP_LANES, tid // WARP_LANES
    return Lane(
        cta=cta,
        tid=tid,
        warp=warp,
        lane=lane,
        group=fragments.lane_group(lane),
        part=fragments.lane_part(lane),
        row_tile=fragments.warp_row_tile(warp, config.parts, config.rows),
        k_part=fragments.warp_k_part(warp, config.parts),
    )
