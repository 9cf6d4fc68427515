"""Which producer builds exist. Every rule stands here once; nothing here needs CuTe DSL or a GPU.

A configuration is (k, staged_blocks, rows, group_tiles); a plan is what it means for one batch size: x path,
shared memory, registers. Invalid ones raise ValueError with the arithmetic that failed and the choices that
are left.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from oproj_lib.layouts import schedule as cut
from oproj_lib.layouts import shared_memory
from oproj_lib.layouts.fragments import BLOCK_K, MMA_TOKENS, WARP_LANES, chain_count

WARPS = 16
THREADS = WARPS * WARP_LANES
ROW_CHOICES = (1, 2, 4)
MAX_GROUP_TILES = 8
"""8 * tokens threads publish a group: 512 threads / 8 = 64 tokens = 8 tiles."""
MAX_BATCH = THREADS // 8
REGISTER_PATH_K = 768
"""The x fragments of one token tile fit beside the weights in registers at K = 768 and not at 1536."""
RECOMMENDED_STAGED = 4
SHARED_LIMIT = 227 * 1024
"""Dynamic shared memory of one block on sm_90 and sm_100 (CUDA C++ Programming Guide, "Technical
Specifications")."""
REGISTER_LIMIT = 65536 // THREADS
"""Registers per thread: a block of 512 threads has the SM's 64 K registers to itself."""

OTHER_REGISTERS = 12
"""Calibrated on 4.8.1's ptxas, see ``Configuration.register_need``."""
RING_OVERLAP_REGISTERS = {1: 8, 2: 20, 4: 36}
"""By rows per warp; calibrated likewise."""

DIRECT_OTHER_REGISTERS = 2
"""Calibrated likewise for direct builds."""

TWOSHOT_REGISTERS = 12
"""What the owner's address and the slot cost a ring of several groups, which keeps them through the MMAs;
calibrated likewise."""


class XPath(Enum):
    """How x reaches the MMAs."""

    REGISTERS = "registers"
    SHARED = "shared"
    RING = "ring"


@dataclass(frozen=True)
class Plan:
    """What a configuration means for one batch size."""

    batch: int
    path: XPath
    tiles: int
    tiles_per_group: int
    groups: int
    staged_bytes: int
    x_bytes: int
    partial_bytes: int
    register_need: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the block."""
        return self.staged_bytes + self.x_bytes + self.partial_bytes

    @property
    def twoshot_fits(self) -> bool:
        """Whether a two-shot build has the registers that it needs."""
        return self.groups == 1 or self.register_need + TWOSHOT_REGISTERS <= REGISTER_LIMIT


@dataclass(frozen=True)
class Configuration:
    """A producer build, checked when created.

    k: columns of W on this rank; staged_blocks: K blocks of 32 per warp whose weights go to shared memory,
    the rest stays in registers; rows: 16-row tiles per warp; group_tiles: 8-token tiles per ring group, 0 for
    no ring. direct: x straight to registers for any k, one token tile (`kernels.direct`).
    """

    k: int
    staged_blocks: int
    rows: int = 1
    group_tiles: int = 0
    direct: bool = False

    def __post_init__(self) -> None:
        if self.rows not in ROW_CHOICES:
            raise ValueError(
                f"rows = {self.rows}: a warp owns 1, 2 or 4 of four row tiles; choose from {ROW_CHOICES}"
            )
        if not 0 <= self.group_tiles <= MAX_GROUP_TILES:
            raise ValueError(
                f"group_tiles = {self.group_tiles}: {self.group_tiles} tiles * 8 tokens * 8 chunks = "
                f"{64 * self.group_tiles} publishing threads, a CTA has {THREADS}; choose 0 (no ring) to "
                f"{MAX_GROUP_TILES}"
            )
        step = BLOCK_K * self.parts
        if self.k <= 0 or self.k % step:
            raise ValueError(
                f"k = {self.k} is not a positive multiple of 32 * parts = 32 * {self.parts} = {step} "
                f"(parts = 4 * rows, rows = {self.rows}); rows that fit this k: {_rows_that_fit(self.k)}"
            )
        if not 0 <= self.staged_blocks <= self.kblocks:
            raise ValueError(
                f"staged_blocks = {self.staged_blocks}: a warp has k / (32 * parts) = {self.k} / {step} = "
                f"{self.kblocks} K blocks; choose 0 to {self.kblocks}"
            )
        self.path  # noqa: B018  raises when no x path exists
        self._check(self._plan(1))

    @property
    def parts(self) -> int:
        """K parts that are summed through shared memory: 16 warps over 4 / rows groups of row tiles."""
        return WARPS * self.rows // shared_memory.ROW_TILES

    @property
    def kblocks(self) -> int:
        """K blocks of 32 columns per warp."""
        return self.k // (BLOCK_K * self.parts)

    @property
    def register_blocks(self) -> int:
        """K blocks whose weights wait in registers."""
        return self.kblocks - self.staged_blocks

    @property
    def chains(self) -> int:
        """Independent accumulators per (row tile, token tile)."""
        return chain_count(self.rows, self.group_tiles)

    @property
    def path(self) -> XPath:
        """The x path. Raises ValueError where none is defined."""
        if self.direct and self.group_tiles:
            raise ValueError(
                f"group_tiles = {self.group_tiles}: a direct x goes to registers, there is no ring; choose 0"
            )
        if self.direct:
            return XPath.REGISTERS
        if self.group_tiles:
            return XPath.RING
        if self.k == REGISTER_PATH_K:
            return XPath.REGISTERS
        if self.staged_blocks:
            return XPath.SHARED
        raise ValueError(
            f"k = {self.k}, staged_blocks = 0, group_tiles = 0 has no x path: choose k = {REGISTER_PATH_K} "
            f"(x in registers), staged_blocks 1 to {self.kblocks} (x in shared memory), or group_tiles 1 to "
            f"{MAX_GROUP_TILES} (x in a ring)"
        )

    @property
    def max_batch(self) -> int:
        """The largest batch of the path, whatever the memory says."""
        return MMA_TOKENS if self.direct else MAX_BATCH

    def settings(self) -> dict[str, int]:
        """staged_blocks, rows and group_tiles, as keyword arguments."""
        return {"staged_blocks": self.staged_blocks, "rows": self.rows, "group_tiles": self.group_tiles}

    @property
    def weight_registers(self) -> int:
        """Registers that hold weights: 2 chunks of 4 words per block and row tile."""
        return 2 * 4 * self.register_blocks * self.rows

    def register_need(self, tiles_per_group: int, groups: int) -> int:
        """Registers per thread below which ptxas spills.

        Weights, accumulators and the x words of one K block are live together, whatever the schedule. What
        ptxas needs on top (addresses, a second x chunk in flight) is calibrated: every configuration compiled
        for both targets, local memory counted. Beyond one ring group the previous group is published beside
        the MMAs, which costs more with 16 K parts. The estimate errs on the safe side: a few ring builds that
        it refuses would just fit.
        """
        accumulators = 4 * self.chains * self.rows * tiles_per_group
        if self.direct:  # all of x is on its way at once
            return self.weight_registers + accumulators + 4 * self.kblocks + DIRECT_OTHER_REGISTERS
        x_words = 4 * tiles_per_group
        overlap = RING_OVERLAP_REGISTERS[self.rows] if groups > 1 else 0
        return self.weight_registers + accumulators + x_words + overlap + OTHER_REGISTERS

    def plan(self, batch: int) -> Plan:
        """Schedule, shared memory and registers for ``batch`` tokens.

        Raises ValueError when the batch is out of range, or does not fit a block's shared memory or a
        thread's registers.
        """
        if not 1 <= batch <= MAX_BATCH:
            raise ValueError(
                f"batch = {batch}: 8 * batch = {8 * batch} threads publish, a CTA has {THREADS}; "
                f"choose 1 to {MAX_BATCH}"
            )
        if batch > self.max_batch:
            raise ValueError(
                f"batch = {batch}: a direct build takes one tile of {self.max_batch} tokens; choose 1 to "
                f"{self.max_batch}, or OprojProducer"
            )
        plan = self._plan(batch)
        self._check(plan)
        return plan

    def valid_batches(self) -> tuple[int, ...]:
        """Every batch size that fits."""
        return tuple(batch for batch in range(1, self.max_batch + 1) if _fits(self._plan(batch)))

    def _plan(self, batch: int) -> Plan:
        tiles, tiles_per_group, groups = cut.schedule(batch, self.group_tiles)
        if self.path is XPath.RING:
            buffers = min(shared_memory.RING_BUFFERS, groups)
            x_bytes = buffers * shared_memory.x_buffer_bytes(8 * tiles_per_group, self.k)
        else:
            x_bytes = shared_memory.x_buffer_bytes(batch, self.k) if self.path is XPath.SHARED else 0
        return Plan(
            batch=batch,
            path=self.path,
            tiles=tiles,
            tiles_per_group=tiles_per_group,
            groups=groups,
            staged_bytes=shared_memory.staged_bytes(WARPS, self.staged_blocks, self.rows),
            x_bytes=x_bytes,
            partial_bytes=shared_memory.partial_bytes(tiles_per_group, self.parts),
            register_need=self.register_need(1 if not self.group_tiles else tiles_per_group, groups),
        )

    def _check(self, plan: Plan) -> None:
        """Raise ValueError, with the sum that is too large, unless the plan fits."""
        if _fits(plan):
            return
        needs = []
        if plan.shared_bytes > SHARED_LIMIT:
            needs.append(
                f"staged weights {plan.staged_bytes} + x {plan.x_bytes} + partial sums "
                f"{plan.partial_bytes} = {plan.shared_bytes} shared bytes, a block has {SHARED_LIMIT}"
            )
        if plan.register_need > REGISTER_LIMIT:
            needs.append(
                f"{plan.register_need} registers per thread ({self.weight_registers} of weights), "
                f"{THREADS} threads have 65536 / {THREADS} = {REGISTER_LIMIT} each"
            )
        batches = self.valid_batches()
        choices = (
            f"it fits batches {_ranges(batches)}"
            if batches
            else "it fits no batch: choose another staged_blocks"
        )
        raise ValueError(
            f"k = {self.k}, staged_blocks = {self.staged_blocks}, rows = {self.rows}, group_tiles = "
            f"{self.group_tiles} at batch {plan.batch} needs {' and '.join(needs)}; {choices}"
        )


def _fits(plan: Plan) -> bool:
    return plan.shared_bytes <= SHARED_LIMIT and plan.register_need <= REGISTER_LIMIT


def _ranges(numbers: tuple[int, ...]) -> str:
    """``1 to 8, 17 to 24``"""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(
        f"{start} to {end}" if start < end else f"{start}" for start, end in zip(starts, ends, strict=True)
    )


def _rows_that_fit(k: int) -> str:
    fitting = [rows for rows in ROW_CHOICES if k > 0 and k % (BLOCK_K * 4 * rows) == 0]
    return ", ".join(map(str, fitting)) or "none (k must be a multiple of 128)"


def configurations(k: int) -> tuple[tuple[int, int, int], ...]:
    """Every valid (staged_blocks, rows, group_tiles) for ``k``, in that order."""
    found = []
    for rows in ROW_CHOICES:
        for staged_blocks in range(k // (BLOCK_K * 4 * rows) + 1):
            for group_tiles in range(MAX_GROUP_TILES + 1):
                try:
                    Configuration(k, staged_blocks, rows, group_tiles)
                except ValueError:
                    continue
                found.append((staged_blocks, rows, group_tiles))
    return tuple(sorted(found))


def recommended(k: int, batch: int) -> Configuration:
    """A good configuration for ``batch`` tokens.

    The fewest staged blocks: weights in registers need no second trip. Where x goes through shared memory, 4
    (the best of 4 to 12 measured at K = 1536 on an H200), more only if registers or shared memory ask for it.
    Then the ring, two tiles a group.

    Raises ValueError when nothing fits.
    """
    fewest = 0 if k == REGISTER_PATH_K else RECOMMENDED_STAGED
    for group_tiles in (0, 2, 1):
        for staged_blocks in range(min(fewest, k // (BLOCK_K * 4)), k // (BLOCK_K * 4) + 1):
            try:
                candidate = Configuration(k, staged_blocks, 1, group_tiles)
                candidate.plan(batch)
            except ValueError:
                continue
            return candidate
    raise ValueError(f"no configuration of k = {k} takes batch = {batch}: choose batch 1 to {MAX_BATCH}")
