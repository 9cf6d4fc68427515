"""Which wgmma builds exist: the rules of the ring, and registers. Nothing here needs CuTe DSL or a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from oproj_lib.kernels.ring_configuration import LOADER_WARPS, RingConfiguration, RingPlan
from oproj_lib.layouts import ring, wgmma

FIRST_MULTIPLIER = LOADER_WARPS
"""The warpgroup after the loaders: warps 4 to 7."""
THREADS = ring.LOADERS + wgmma.THREADS
EMPTY_ARRIVALS = wgmma.WARPS
"""One lane of each multiplying warp, behind the warp's own wait for its group."""
TARGETS = ("sm_90a",)


@dataclass(frozen=True)
class WgmmaPlan(RingPlan):
    """What a configuration means for one batch size. Bytes, except n (tokens)."""

    @property
    def in_flight(self) -> int:
        """Groups of wgmmas that may still run when the slot of the one before is given back.

        One, so that the tensor core has work while the loaders are told. None with a single slot: the next
        block needs the one that is being read.
        """
        return min(1, self.stages - 1)

    @property
    def accumulators(self) -> int:
        """FP32 registers per thread that hold D [64, n]; 128 at n = 256, the most that a wgmma has."""
        return wgmma.register_count(self.n)


@dataclass(frozen=True)
class WgmmaConfiguration(RingConfiguration):
    """A wgmma build, checked when created. k: columns of W on this rank; budget: bytes for the ring."""

    def plan(self, batch: int) -> WgmmaPlan:
        """Ring and registers for ``batch`` tokens. Raises ValueError, see ``RingConfiguration.plan``."""
        plan = super().plan(batch)
        assert isinstance(plan, WgmmaPlan)  # plan_of made it
        return plan

    def plan_of(self, batch: int, n: int, stage_bytes: int, stages: int) -> WgmmaPlan:
        """The ring's numbers, as the kind of plan that knows about registers."""
        return WgmmaPlan(batch, n, stage_bytes, stages)


def check_wgmma_target(target: str) -> str:
    """``target`` itself. Raises ValueError where there is no wgmma."""
    if target not in TARGETS:
        raise ValueError(
            f"target = {target!r} has no wgmma instructions: OprojWgmma needs {' or '.join(TARGETS)}; "
            "OprojProducer runs on both targets"
        )
    return target
