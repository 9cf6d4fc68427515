"""Sectors of global requests and wavefronts of shared-memory accesses, counted per warp."""

from __future__ import annotations

import numba
import numpy as np

SECTOR_BYTES = 32
BANKS = 32
BANK_BYTES = 4


@numba.njit(cache=True)
def count_sectors(threads: np.ndarray, addresses: np.ndarray, size: int) -> tuple[int, int]:
    """(requests, sectors): warps with an active lane, and the distinct 32-byte sectors that each of them
    touches.

    `threads` are ascending thread numbers, 32 to a warp.
    """
    requests = 0
    sectors = 0
    seen = np.empty(32 * (size // SECTOR_BYTES + 1), np.int64)
    held = 0
    warp = -1
    for i in range(threads.size):
        if threads[i] >> 5 != warp:
            warp = threads[i] >> 5
            requests += 1
            held = 0
        first = addresses[i] >> 5
        last = (addresses[i] + size - 1) >> 5
        for sector in range(first, last + 1):
            known = False
            for j in range(held - 1, -1, -1):
                if seen[j] == sector:
                    known = True
                    break
            if not known:
                seen[held] = sector
                held += 1
                sectors += 1
    return requests, sectors


@numba.njit(cache=True)
def count_wavefronts(threads: np.ndarray, offsets: np.ndarray, size: int) -> tuple[int, int, int]:
    """(requests, wavefronts, ideal wavefronts) of a shared-memory access of `size` bytes per lane.

    A wavefront serves each of the 32 four-byte banks once. Accesses of 8 bytes go in two passes of 16 lanes,
    of 16 bytes in four passes of 8 lanes. Lanes that want the same word share it.
    """
    lanes_per_pass = 32 if size <= BANK_BYTES else 32 * BANK_BYTES // size
    words_per_lane = 1 if size <= BANK_BYTES else size // BANK_BYTES
    words = np.empty(64, np.int64)
    load = np.zeros(BANKS, np.int64)
    requests = 0
    wavefronts = 0
    ideal = 0
    i = 0
    last_warp = -1
    n = threads.size
    while i < n:
        warp = threads[i] >> 5
        if warp != last_warp:
            requests += 1
            last_warp = warp
        group = threads[i] // lanes_per_pass
        held = 0
        load[:] = 0
        worst = 0
        while i < n and threads[i] // lanes_per_pass == group:
            first = offsets[i] >> 2
            for word in range(first, first + words_per_lane):
                known = False
                for j in range(held - 1, -1, -1):
                    if words[j] == word:
                        known = True
                        break
                if not known:
                    words[held] = word
                    held += 1
                    load[word % BANKS] += 1
                    worst = max(worst, load[word % BANKS])
            i += 1
        wavefronts += worst
        ideal += (held + BANKS - 1) // BANKS
    return requests, wavefronts, ideal
