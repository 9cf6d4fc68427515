"""Happens-before between the warps of a CTA, as vector clocks.

`known[v, w]` is how much of warp w's history warp v comes after. Barriers join the knowledge of all who meet;
an mbarrier collects what its arrivals know (release) and gives it to whoever sees the phase complete
(acquire). `fenced[v, w]` is the part of that knowledge that a `fence.proxy.async` has made visible to the
asynchronous proxy (PTX ISA, "Async proxy"): the fence may be executed by the writer before it signals, or by
the reader after it has waited.
"""

from __future__ import annotations

import numpy as np

CLOCK_LIMIT = np.iinfo(np.uint16).max


def merge(into: np.ndarray, rows: np.ndarray, clocks: np.ndarray) -> None:
    """into[rows[i]] = max(into[rows[i]], clocks[i]) for every i; rows may repeat."""
    np.maximum.at(into, rows, clocks)


class HappensBefore:
    """Vector clocks of all warps of a launch. Warps are numbered across CTAs; columns are warps within the
    CTA."""

    def __init__(self, ctas: int, warps: int) -> None:
        self.warps = warps
        self.known = np.zeros((ctas * warps, warps), np.uint16)
        self.fenced = np.zeros((ctas * warps, warps), np.uint16)
        self.own = np.arange(ctas * warps) % warps
        self.tick(np.arange(ctas * warps))
        self._collected: dict[
            int, np.ndarray
        ] = {}  # offset -> [CTA, known or fenced, warp] of the phase under way
        self._released: dict[int, np.ndarray] = {}  # the same, of all phases that have completed
        self.ctas = ctas

    def tick(self, warps: np.ndarray) -> None:
        """What these warps do from now on is a new part of their history."""
        self.known[warps, self.own[warps]] += 1
        if (self.known[warps, self.own[warps]] == CLOCK_LIMIT).any():
            raise OverflowError(f"a warp synchronised more than {CLOCK_LIMIT - 1} times: run without checks")

    def join(self, cta: int, members: np.ndarray, waiting: np.ndarray) -> None:
        """Warps (numbers within the CTA) meet at a barrier; those that wait learn what all of them know."""
        rows, learners = cta * self.warps + members, cta * self.warps + waiting
        for clocks in (self.known, self.fenced):
            clocks[learners] = np.maximum(clocks[learners], clocks[rows].max(axis=0))
        self.tick(rows)

    def join_whole_ctas(self, ctas: np.ndarray) -> None:
        """`join` of all warps of many CTAs at once."""
        rows = (ctas[:, None] * self.warps + np.arange(self.warps)).reshape(-1)
        for clocks in (self.known, self.fenced):
            together = clocks[rows].reshape(len(ctas), self.warps, self.warps).max(axis=1)
            clocks[rows] = np.repeat(together, self.warps, axis=0)
        self.tick(rows)

    def fence_async_proxy(self, warps: np.ndarray) -> None:
        """fence.proxy.async: everything known so far is visible to the asynchronous proxy."""
        self.fenced[warps] = self.known[warps]
        self.tick(warps)

    def _slot(self, store: dict[int, np.ndarray], offset: int) -> np.ndarray:
        if offset not in store:
            store[offset] = np.zeros((self.ctas, 2, self.warps), np.uint16)
        return store[offset]

    def release(self, offset: int, warps: np.ndarray) -> None:
        """Warps arrive at the mbarrier at this offset."""
        warps = np.unique(warps)
        slot = self._slot(self._collected, offset)
        merge(slot[:, 0], warps // self.warps, self.known[warps])
        merge(slot[:, 1], warps // self.warps, self.fenced[warps])
        self.tick(warps)

    def release_snapshot(self, offset: int, ctas: np.ndarray, known: np.ndarray, fenced: np.ndarray) -> None:
        """An arrival with the knowledge of an earlier moment (tcgen05.commit)."""
        slot = self._slot(self._collected, offset)
        merge(slot[:, 0], ctas, known)
        merge(slot[:, 1], ctas, fenced)

    def complete(self, offset: int, ctas: np.ndarray) -> None:
        """The phase completes in these CTAs."""
        released, collected = self._slot(self._released, offset), self._slot(self._collected, offset)
        released[ctas] = np.maximum(released[ctas], collected[ctas])
        collected[ctas] = 0

    def acquire(self, offset: int, warps: np.ndarray) -> None:
        """Warps have seen the phase complete."""
        warps = np.unique(warps)
        released = self._slot(self._released, offset)[warps // self.warps]
        self.known[warps] = np.maximum(self.known[warps], released[:, 0])
        self.fenced[warps] = np.maximum(self.fenced[warps], released[:, 1])

    def forget(self, offset: int, ctas: np.ndarray) -> None:
        """mbarrier.init: a new object."""
        for store in (self._collected, self._released):
            self._slot(store, offset)[ctas] = 0
