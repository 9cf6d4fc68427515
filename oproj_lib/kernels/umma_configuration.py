"""Which UMMA builds exist: the rules of the ring, and tensor memory. Nothing here needs CuTe DSL or a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from oproj_lib.kernels.ring_configuration import LOADER_WARPS, RingConfiguration, RingPlan
from oproj_lib.layouts import ring, tmem
from oproj_lib.layouts.fragments import WARP_LANES

MMA_WARP = LOADER_WARPS
"""The warp after the loaders."""
THREADS = ring.LOADERS + WARP_LANES
ADDRESS_BYTES = 4
"""``tcgen05.alloc`` leaves a 32-bit TMEM address in shared memory."""
TARGETS = ("sm_100a",)


@dataclass(frozen=True)
class UmmaPlan(RingPlan):
    """What a configuration means for one batch size. Bytes, except n (tokens) and tmem_columns."""

    tmem_columns: int

    @property
    def control_bytes(self) -> int:
        """Barriers and the TMEM address, behind the ring."""
        return ring.barrier_area_bytes(self.stages) + ADDRESS_BYTES


@dataclass(frozen=True)
class UmmaConfiguration(RingConfiguration):
    """A UMMA build, checked when created. k: columns of W on this rank; budget: bytes for the ring."""

    def plan(self, batch: int) -> UmmaPlan:
        """Ring and TMEM for ``batch`` tokens. Raises ValueError, see ``RingConfiguration.plan``."""
        plan = super().plan(batch)
        assert isinstance(plan, UmmaPlan)  # plan_of made it
        return plan

    def plan_of(self, batch: int, n: int, stage_bytes: int, stages: int) -> UmmaPlan:
        """The ring's numbers, and the TMEM columns that n tokens take."""
        return UmmaPlan(batch, n, stage_bytes, stages, tmem.allocation_columns(n))


def check_umma_target(target: str) -> str:
    """``target`` itself. Raises ValueError where there is no tcgen05."""
    if target not in TARGETS:
        raise ValueError(
            f"target = {target!r} has no tcgen05 instructions and no tensor memory: UMMA needs "
            f"{' or '.join(TARGETS)}; OprojProducer runs on both targets"
        )
    return target
