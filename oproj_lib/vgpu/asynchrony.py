"""Work that runs beside the threads: cp.async arrivals on mbarriers, tensor-core operations, their commits.

Everything completes as late as the rules allow: only when no thread can run any more. A seeded schedule may
complete it earlier. Tensor-core operations complete in the order in which they were issued.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from .decode import Op

if TYPE_CHECKING:
    from .launch import Launch


class Work(Protocol):
    """Something in flight. `in_order`: completes after everything in order that was issued before."""

    op: Op
    threads: np.ndarray
    in_order: bool
    number: int

    def complete(self, launch: Launch) -> None: ...


class AsyncWork:
    """The queue of everything in flight, oldest first."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.items: list[Work] = []
        self.issued = 0

    def add(self, item: Work) -> None:
        self.issued += 1
        item.number = self.issued
        self.items.append(item)
        self.launch.writes += 1
        if self.launch.trace is not None:
            self.launch.trace.work("start", item.op, item.threads, item.number)

    def advance(self) -> bool:
        """Completes one item: the oldest, or a random one with a seed. False if nothing is in flight."""
        if not self.items:
            return False
        index = 0
        if self.launch.rng is not None:
            first_in_order = next((i for i, item in enumerate(self.items) if item.in_order), -1)
            free = [i for i, item in enumerate(self.items) if not item.in_order or i == first_in_order]
            index = free[int(self.launch.rng.integers(len(free)))]
        item = self.items.pop(index)
        self.launch.op = item.op
        if self.launch.trace is not None:
            self.launch.trace.work("finish", item.op, item.threads, item.number)
        item.complete(self.launch)
        self.launch.writes += 1
        return True


@dataclass
class CopyArrival:
    """cp.async.mbarrier.arrive: an arrival once all earlier cp.async of the thread have completed."""

    op: Op
    threads: np.ndarray
    offsets: np.ndarray
    issued_before: int  # copies with a smaller number belong to it
    in_order: bool = False
    number: int = 0

    def complete(self, launch: Launch) -> None:
        launch.copies.complete_issued_before(self.threads, self.issued_before)
        for offset in np.unique(self.offsets):
            launch.mbarriers.arrive(
                self.op, int(offset), self.threads[self.offsets == offset], 1, work=self.number
            )
