"""What the engines with a ring have in common: which (k, budget) exist, and how many stages a batch gets.

A configuration is (k, budget); a plan is what it means for one batch size. Invalid ones raise ValueError
with the arithmetic that failed and the choices that are left. Nothing here needs CuTe DSL or a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from oproj_lib.kernels.configuration import SHARED_LIMIT
from oproj_lib.layouts import ring
from oproj_lib.layouts.fragments import WARP_LANES

LOADER_WARPS = ring.LOADERS // WARP_LANES
DEFAULT_BUDGET = 184 * 1024
MAX_BATCH = ring.MAX_N
REGISTER_LIMIT = 255
"""Registers per thread that an instruction can name; 256 threads could share 65536 / 256 = 256."""


@dataclass(frozen=True)
class RingPlan:
    """What a configuration means for one batch size. Bytes, except n (tokens)."""

    batch: int
    n: int
    stage_bytes: int
    stages: int

    @property
    def ring_bytes(self) -> int:
        """The ring, or the epilogue tile that overlays it where that is larger (few stages, many tokens)."""
        return max(self.stages * self.stage_bytes, ring.epilogue_bytes(self.n))

    @property
    def control_bytes(self) -> int:
        """full and empty of every slot, behind the ring."""
        return ring.slot_barriers_bytes(self.stages)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the block."""
        return self.ring_bytes + self.control_bytes


@dataclass(frozen=True)
class RingConfiguration:
    """A build with a ring, checked when created. k: columns of W on this rank; budget: bytes for the ring."""

    k: int
    budget: int = DEFAULT_BUDGET

    def __post_init__(self) -> None:
        if self.k <= 0 or self.k % ring.TILE_K:
            raise ValueError(
                f"k = {self.k} is not a positive multiple of {ring.TILE_K}, a K block of the ring"
            )
        self.plan(1)

    @property
    def kblocks(self) -> int:
        """K blocks of 64 columns."""
        return self.k // ring.TILE_K

    def settings(self) -> dict[str, int]:
        """All but k, as keyword arguments."""
        return {"budget": self.budget}

    def plan(self, batch: int) -> RingPlan:
        """The ring for ``batch`` tokens.

        Raises ValueError when the batch is no N that an MMA has, when the budget holds not even one stage, or
        when the ring does not fit a block's shared memory.
        """
        if not 1 <= batch <= MAX_BATCH:
            raise ValueError(
                f"batch = {batch}: an MMA with M = 64 has N of at most {MAX_BATCH}; choose 1 to {MAX_BATCH}"
            )
        n = ring.padded_tokens(batch)
        stage = ring.stage_bytes(n)
        stages = ring.stage_count(self.k, n, self.budget)
        if stages < 1:
            raise ValueError(
                f"budget = {self.budget} bytes holds no stage at batch {batch}: {ring.W_TILE_BYTES} + "
                f"{ring.ROW_BYTES} * {n} = {stage} bytes; choose at least {stage}{self._smaller_batches()}"
            )
        plan = self.plan_of(batch, n, stage, stages)
        if plan.shared_bytes > SHARED_LIMIT:
            raise ValueError(
                f"{stages} stages * {stage} + {plan.control_bytes} bytes of barriers = {plan.shared_bytes} "
                f"shared bytes, a block has {SHARED_LIMIT}; choose budget {stage} to "
                f"{self._largest_budget(n)}"
            )
        return plan

    def plan_of(self, batch: int, n: int, stage_bytes: int, stages: int) -> RingPlan:
        """The plan with these numbers, unchecked: an engine's own kind of plan."""
        return RingPlan(batch, n, stage_bytes, stages)

    def valid_batches(self) -> tuple[int, ...]:
        """Every batch size that fits."""
        found = []
        for batch in range(1, MAX_BATCH + 1):
            try:
                self.plan(batch)
            except ValueError:
                continue
            found.append(batch)
        return tuple(found)

    def _smaller_batches(self) -> str:
        """``, or a batch of at most 24``, where one fits."""
        most = (self.budget - ring.W_TILE_BYTES) // ring.ROW_BYTES // ring.TOKEN_STEP * ring.TOKEN_STEP
        return f", or a batch of at most {most}" if most > 0 else ""

    def _largest_budget(self, n: int) -> int:
        """The largest budget whose stages leave room for their barriers."""
        stage = ring.stage_bytes(n)
        control, with_one = (self.plan_of(n, n, stage, stages).control_bytes for stages in (0, 1))
        most = (SHARED_LIMIT - control) // (stage + with_one - control)
        return (most + 1) * stage - 1
