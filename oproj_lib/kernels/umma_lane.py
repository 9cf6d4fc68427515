"""The shared memory of the UMMA kernel: the ring's, and a word for tensor memory."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32

from oproj_lib.kernels.ring_lane import RingShared


@dataclass(frozen=True)
class UmmaShared(RingShared):
    """Shared-memory addresses (Int32): the ring, the barriers, the word that holds the TMEM address."""

    tmem_slot: Int32
