"""What a layer waits: a model of a predecessor and a dependent in one chain, and what recorded times say of it.

Exposed time is the chain's time minus the predecessor's alone: a dependent that ran wholly beside its predecessor
would have none. The model has four numbers and a rule; what comes out of it is modelled, never measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oproj_lib.kernels.configuration import Configuration
from oproj_lib.layouts.fragments import BF16_BYTES
from oproj_lib.problem import N
from oproj_lib.recorded import Recorded


@dataclass(frozen=True)
class Overlap:
    """A predecessor that ends at predecessor_us and lets its dependents start at trigger_us, and a dependent that
    preloads for preload_us, waits, and has rest_us to do after that. Microseconds; 0 is the predecessor's start.

    boundary_us: from a permission (the trigger, the predecessor's end) to the first instruction that it permits.
    fits: whether a CTA of the dependent has room beside the predecessor's; if not, it starts when that has ended.
    above_wait: whether the preload stands above the wait in the machine code.

    Raises ValueError for negative times, and for a trigger after the end, which is implicit.
    """

    predecessor_us: float
    trigger_us: float
    preload_us: float
    rest_us: float
    boundary_us: float
    fits: bool = True
    above_wait: bool = True

    def __post_init__(self) -> None:
        times = ("predecessor_us", "trigger_us", "preload_us", "rest_us", "boundary_us")
        if negative := [name for name in times if getattr(self, name) < 0]:
            raise ValueError(f"{', '.join(f'{n} = {getattr(self, n)}' for n in negative)}: choose at least 0")
        if self.trigger_us > self.predecessor_us:
            raise ValueError(
                f"trigger_us = {self.trigger_us} is after the end at {self.predecessor_us}, which triggers itself: "
                f"choose 0 to {self.predecessor_us}"
            )

    @property
    def start(self) -> float:
        """When the dependent starts."""
        return (self.trigger_us if self.fits else self.predecessor_us) + self.boundary_us

    @property
    def wait_begin(self) -> float:
        """When it comes to its wait."""
        return self.start + (self.preload_us if self.above_wait else 0.0)

    @property
    def wait_end(self) -> float:
        """When it is past it: there, and the predecessor's end is known."""
        return max(self.wait_begin, self.predecessor_us + self.boundary_us)

    @property
    def end(self) -> float:
        """When it ends."""
        return self.wait_end + (0.0 if self.above_wait else self.preload_us) + self.rest_us

    @property
    def exposed(self) -> float:
        """What the layer waits for it."""
        return self.end - self.predecessor_us


def preload_us(weight_bytes: float, bandwidth_tb_s: float) -> float:
    """Microseconds to bring bytes from memory. Raises ValueError for a bandwidth that is none."""
    if bandwidth_tb_s <= 0:
        raise ValueError(f"bandwidth_tb_s = {bandwidth_tb_s}: choose more than 0")
    return weight_bytes / bandwidth_tb_s / 1e6


@dataclass(frozen=True)
class SunkLoads:
    """One recorded pair of builds, which differ in the load instruction of the weights in registers only.

    register_bytes: weights that wait in registers, of all CTAs; derived_us: their bytes over the bandwidth;
    recorded_us: how much longer the layer waited with ld.global.nc.
    """

    k: int
    staged_blocks: int
    register_bytes: int
    derived_us: float
    recorded_us: float


def sunk_loads(recorded: Recorded) -> Sequence[SunkLoads]:
    """What sinking cost, derived and recorded, for every recorded pair of builds."""
    found = []
    for k, rows in recorded.exposed.items():
        for row in rows:
            config = Configuration(k, row.staged_blocks)
            share = config.register_blocks / config.kblocks
            size = round(N * k * BF16_BYTES * share)
            derived = preload_us(size, recorded.copy_tb_s)
            found.append(SunkLoads(k, row.staged_blocks, size, derived, row.nc_us - row.coherent_us))
    return tuple(found)
