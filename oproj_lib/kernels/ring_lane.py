"""Who a thread of an engine with a ring is, the addresses it works with, and the ids of its named barriers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import cutlass.cute as cute
from cutlass import Int32, Int64

from oproj_lib.layouts.fragments import WARP_LANES

THREAD_MASK = 255
"""The largest thread index of the largest block: 256 threads."""


class NamedBarrier(IntEnum):
    """Barrier ids of ``bar``. 0 is the one that ``sync_threads`` uses; 2 is UMMA's."""

    CTA = 0
    EPILOGUE = 1
    TMEM_READ = 2


@dataclass(frozen=True)
class RingShared:
    """Shared-memory addresses (Int32): the ring, the barriers."""

    ring: Int32
    barriers: Int32


@dataclass(frozen=True)
class Loader:
    """Addresses of one loader's first W chunk and first x chunk (global), and of its chunk in a tile."""

    tid: Int32
    weight: Int64
    x: Int64
    row: Int32
    target: Int32


def this_thread() -> Int32:
    """Thread index. The mask changes no value; it tells LLVM the range, so that divisions become shifts."""
    tid, _, _ = cute.arch.thread_idx()
    return tid & THREAD_MASK


def this_warp() -> Int32:
    """Warp index, from 0."""
    return this_thread() // WARP_LANES


def this_cta() -> Int32:
    """CTA index: which 64 rows of W."""
    cta, _, _ = cute.arch.block_idx()
    return cta
