"""Bank conflicts of one warp-wide shared-memory access.

Shared memory has 32 banks of 4 bytes, so 128 bytes per cycle. Accesses of 8 and 16 bytes run as 2 and 4
phases of 16 and 8 lanes (CUDA C++ Programming Guide, "Shared Memory"). Lanes that touch the same word of a
bank share it.
"""

from __future__ import annotations

from collections.abc import Sequence

BANKS = 32
BANK_BYTES = 4


def bank(byte_offset: int) -> int:
    """The bank of a shared-memory byte."""
    return byte_offset // BANK_BYTES % BANKS


def wavefronts(byte_offsets: Sequence[int], access_bytes: int) -> int:
    """Cycles that the access needs: 1 per phase when nothing conflicts.

    byte_offsets: the first byte of every active lane, in lane order. access_bytes: 4, 8 or 16.
    Raises ValueError for another access size, or an offset that is no multiple of it.
    """
    if access_bytes not in (4, 8, 16):
        raise ValueError(f"access_bytes = {access_bytes}: a lane accesses 4, 8 or 16 bytes")
    lanes_per_phase = BANKS * BANK_BYTES // access_bytes
    total = 0
    for first in range(0, len(byte_offsets), lanes_per_phase):
        words: dict[int, set[int]] = {}
        for offset in byte_offsets[first : first + lanes_per_phase]:
            if offset % access_bytes:
                raise ValueError(f"offset {offset} is not a multiple of {access_bytes}: misaligned access")
            for byte in range(offset, offset + access_bytes, BANK_BYTES):
                words.setdefault(bank(byte), set()).add(byte // BANK_BYTES)
        total += max((len(entries) for entries in words.values()), default=0)
    return total
