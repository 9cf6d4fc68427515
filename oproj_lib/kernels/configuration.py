"""Which producer builds exist. Every rule stands here once; nothing here needs CuTe DSL or a GPU.

A configuration is (k, staged_blocks, rows, group_tiles); a plan is what it means for one batch size: x path, shared memory,
registers. Invalid ones raise ValueError with the arithmetic that failed and the choices that are left.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from oproj_lib.layouts import schedule as cut
from oproj_lib.layouts import shared_memory
from oproj_lib.layouts.fragments import BLOCK_K, WARP_LANES, chain_count

WARPS = 16
THREADS = WARPS * WARP_LANES
ROW_CHOICES = (1, 2, 4)
MAX_GROUP_TILES = 8
"""8 * tokens threads publish a group: 512 threads / 8 = 64 tokens = 8 tiles."""
MAX_BATCH = THREADS // 8
REGISTER_PATH_K = 768
"""The x fragments of one token tile fit beside the weights in registers at K = 768 and not at 1536."""
SHARED_LIMIT = 227 * 1024
"""Dynamic shared memory of one block on sm_90 and sm_100 (CUDA C++ Programming Guide, "Technical Specifications")."""
REGISTER_LIMIT = 65536 // THREADS
"""Registers per thread: a block of 512 threads has the SM's 64 K registers to itself."""


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
    register_bound: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the block."""
        return self.staged_bytes + self.x_bytes + self.partial_bytes


@dataclass(frozen=True)
class Configuration:
    """A producer build, checked when created.

    k: columns of W on this rank; staged_blocks: K blocks of 32 per warp whose weights go to shared memory, the rest stays in
    registers; rows: 16-row tiles per warp; group_tiles: 8-token tiles per ring group, 0 for no ring.
    """

    k: int
    staged_blocks: int
    rows: int = 1
    group_tiles: int = 0

    def __post_init__(self) -> None:
        if self.rows not in ROW_CHOICES:
            raise ValueError(
                f"rows = {self.rows}: a warp owns 1, 2 or 4 of the CTA's four row tiles; choose from {ROW_CHOICES}"
            )
        if not 0 <= self.group_tiles <= MAX_GROUP_TILES:
            raise ValueError(
                f"group_tiles = {self.group_tiles}: 8 tokens * 8 chunks * {self.group_tiles} tiles must be 0 to {THREADS} "
                f"publishing threads; choose 0 (no ring) to {MAX_GROUP_TILES}"
            )
        if self.k <= 0 or self.k % (BLOCK_K * self.parts):
            raise ValueError(
                f"k = {self.k} is not a positive multiple of 32 * parts = {BLOCK_K} * {self.parts} = {BLOCK_K * self.parts} "
                f"(rows = {self.rows}, parts = 4 * rows); rows that fit k: {_rows_that_fit(self.k)}"
            )
        if not 0 <= self.staged_blocks <= self.kblocks:
            raise ValueError(
                f"staged_blocks = {self.staged_blocks}: a warp has k / (32 * parts) = {self.k} / {BLOCK_K * self.parts} = "
                f"{self.kblocks} K blocks; choose 0 to {self.kblocks}"
            )
        self.path  # noqa: B018  raises when no x path exists
        if self.register_bound > REGISTER_LIMIT:
            raise ValueError(self._too_many_registers())
        smallest = self._plan(1)
        if smallest.shared_bytes > SHARED_LIMIT:
            raise ValueError(self._too_much_shared(smallest))

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
        if self.group_tiles:
            return XPath.RING
        if self.k == REGISTER_PATH_K:
            return XPath.REGISTERS
        if self.staged_blocks:
            return XPath.SHARED
        raise ValueError(
            f"k = {self.k}, staged_blocks = 0, group_tiles = 0 has no x path: choose k = {REGISTER_PATH_K} (x in registers), "
            f"staged_blocks 1 to {self.kblocks} (x in shared memory), or group_tiles 1 to {MAX_GROUP_TILES} (x in a ring)"
        )

    @property
    def weight_registers(self) -> int:
        """Registers that hold weights: 2 chunks of 4 words per block and row tile."""
        return 2 * 4 * self.register_blocks * self.rows

    @property
    def register_bound(self) -> int:
        """Upper bound of the registers a thread needs (TO CALIBRATE)."""
        return 0

    def plan(self, batch: int) -> Plan:
        """Shared memory and schedule for ``batch`` tokens.

        Raises ValueError when the batch is out of range, or its shared memory does not fit one block.
        """
        if not 1 <= batch <= MAX_BATCH:
            raise ValueError(
                f"batch = {batch}: 8 * batch = {8 * batch} threads publish and a CTA has {THREADS}; choose 1 to {MAX_BATCH}"
            )
        plan = self._plan(batch)
        if plan.shared_bytes > SHARED_LIMIT:
            raise ValueError(self._too_much_shared(plan))
        return plan

    def valid_batches(self) -> tuple[int, ...]:
        """Every batch size that fits."""
        return tuple(b for b in range(1, MAX_BATCH + 1) if self._plan(b).shared_bytes <= SHARED_LIMIT)

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
            register_bound=self.register_bound,
        )

    def _too_much_shared(self, plan: Plan) -> str:
        fitting = self.valid_batches()
        choices = (
            f"batches that fit: 1 to {fitting[-1]}"
            if fitting
            else "no batch fits; stage fewer blocks or group fewer tiles"
        )
        return (
            f"{self} at batch {plan.batch} needs staged weights {plan.staged_bytes} + x {plan.x_bytes} + partial sums "
            f"{plan.partial_bytes} = {plan.shared_bytes} bytes of shared memory, a block has {SHARED_LIMIT}; {choices}"
        )

    def _too_many_registers(self) -> str:
        return ""


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
