"""Every shared-memory access of the producer, predicted from the layout functions alone.

Nothing here runs the kernel. A notebook predicts wavefronts with these offsets, runs the PTX on the virtual
GPU,
which counts for itself, and compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from oproj_lib.kernels.configuration import THREADS, WARPS, Configuration, XPath
from oproj_lib.layouts import banks, fragments, shared_memory
from oproj_lib.layouts import publish as chunks
from oproj_lib.layouts.fragments import BLOCK_K, CHUNK, CHUNK_BYTES, HALVES, MMA_TOKENS, WARP_LANES
from oproj_lib.layouts.schedule import group_tile_count, group_tokens, schedule

LANES = range(WARP_LANES)


@dataclass(frozen=True)
class Request:
    """One warp-wide access of a CTA: byte offsets of the active lanes, in lane order, within its own area."""

    function: str
    opcode: str
    warp: int
    offsets: tuple[int, ...]
    access_bytes: int

    @property
    def wavefronts(self) -> int:
        return banks.wavefronts(self.offsets, self.access_bytes)


def weight_requests(config: Configuration) -> Iterator[Request]:
    """One pass over the staged weights: `weight_fragment` reads a unit's two halves."""
    for warp in range(WARPS):
        for block in range(config.staged_blocks):
            for row in range(config.rows):
                unit = shared_memory.staged_unit(warp, block, row, config.staged_blocks, config.rows)
                for r in range(2):
                    offsets = tuple(shared_memory.staged_offset(unit, r, lane) for lane in LANES)
                    yield Request("weight_fragment", "ld.shared", warp, offsets, CHUNK_BYTES)


def x_requests(config: Configuration, tile: int, tokens: int) -> Iterator[Request]:
    """`x_words` of one 8-token tile of an x buffer that has `tokens` rows in it (the others read nothing)."""
    for warp in range(WARPS):
        for block in range(config.kblocks):
            offsets = []
            for lane in LANES:
                token = tile * MMA_TOKENS + fragments.lane_group(lane)
                k_part = fragments.warp_k_part(warp, config.parts)
                column = fragments.block_column(k_part, config.kblocks, block, fragments.lane_part(lane))
                if token < tokens:
                    offsets.append(shared_memory.x_offset(token, column // CHUNK, config.k))
            yield Request("x_words", "ld.shared", warp, tuple(offsets), CHUNK_BYTES)


def partial_stores(config: Configuration, tile: int) -> Iterator[Request]:
    """`store_partials` of one 8-token tile: one 4-byte store per accumulator register."""
    for warp in range(WARPS):
        first = fragments.warp_row_tile(warp, config.parts, config.rows)
        k_part = fragments.warp_k_part(warp, config.parts)
        for row_tile in range(first, first + config.rows):
            for v in range(4):
                offsets = tuple(
                    shared_memory.partial_offset(
                        tile,
                        row_tile,
                        k_part,
                        fragments.accumulator_token(fragments.lane_part(lane), v),
                        fragments.accumulator_row(fragments.lane_group(lane), v),
                        config.parts,
                    )
                    for lane in LANES
                )
                yield Request("store_partials", "st.shared", warp, offsets, shared_memory.FLOAT_BYTES)


def partial_loads(config: Configuration, tokens: int) -> Iterator[Request]:
    """`publish_chunk`: each publishing thread reads its 8 sums of every K part, 16 bytes at a time."""
    threads = chunks.publish_threads(tokens)
    for warp in range(THREADS // WARP_LANES):
        active = [tid for tid in range(WARP_LANES * warp, WARP_LANES * (warp + 1)) if tid < threads]
        for part in range(config.parts if active else 0):
            for quarter in range(HALVES):
                offsets = tuple(_partial_load(config, tid, tokens, part, quarter) for tid in active)
                yield Request("publish_chunk", "ld.shared", warp, offsets, CHUNK_BYTES)


def _partial_load(config: Configuration, tid: int, tokens: int, part: int, quarter: int) -> int:
    if config.group_tiles:
        token, row_tile, half = chunks.grouped_chunk(tid, tokens)
    else:
        token, row_tile, half = chunks.ungrouped_chunk(tid)
    tile, token_in_tile = divmod(token, MMA_TOKENS)
    first = shared_memory.partial_offset(tile, row_tile, part, token_in_tile, half * CHUNK, config.parts)
    return first + quarter * CHUNK_BYTES


def requests(config: Configuration, batch: int) -> Iterator[Request]:
    """Every shared-memory load and store of one CTA (asynchronous copies, which nobody waits for one by one,
    are
    not among them)."""
    tiles, tiles_per_group, groups = schedule(batch, config.group_tiles)
    for group in range(groups):
        count = group_tile_count(group, tiles, tiles_per_group)
        # The ring zero-fills the rows of missing tokens; the shared path has no such rows, and lanes skip
        # them.
        rows = MMA_TOKENS * count if config.path is XPath.RING else batch
        for tile in range(count):
            if config.path is not XPath.REGISTERS:
                yield from x_requests(config, tile, rows)
            yield from partial_stores(config, tile)
        # One pass over the staged weights serves all tiles of a ring group, but one tile without a ring.
        for _ in range(1 if config.path is XPath.RING else count):
            yield from weight_requests(config)
        yield from partial_loads(config, group_tokens(group, batch, tiles_per_group))


def predicted_wavefronts(config: Configuration, batch: int, ctas: int) -> dict[tuple[str, str], int]:
    """(function, opcode) -> wavefronts of the whole grid."""
    totals: dict[tuple[str, str], int] = {}
    for request in requests(config, batch):
        key = request.function, request.opcode
        totals[key] = totals.get(key, 0) + ctas * request.wavefronts
    return totals


def x_row_offsets(
    k: int, padding_chunks: int, *, k_part: int = 0, kblocks: int = 12, block: int = 0
) -> list[int]:
    """Offsets that the 32 lanes of `x_words` would read if an x row were padded by `padding_chunks` chunks.

    With the kernel's own padding these are the offsets of the kernel.

    Raises:
        ValueError: for a negative padding.
    """
    if padding_chunks < 0:
        raise ValueError(f"padding_chunks = {padding_chunks}: a row cannot be padded by less than 0 chunks")
    stride = k // CHUNK + padding_chunks
    first = fragments.block_column(k_part, kblocks, block, 0) // CHUNK
    return [
        (fragments.lane_group(lane) * stride + first + fragments.lane_part(lane)) * CHUNK_BYTES
        for lane in LANES
    ]


def partial_store_offsets(row_words: int, v: int = 0) -> list[int]:
    """Offsets that the 32 lanes of `store_partials` would write if a token's 16 sums took `row_words` words.

    Raises:
        ValueError: if 16 sums do not fit.
    """
    if row_words < fragments.MMA_ROWS:
        raise ValueError(f"row_words = {row_words}: a token has {fragments.MMA_ROWS} sums")
    return [
        shared_memory.FLOAT_BYTES
        * (
            row_words * fragments.accumulator_token(fragments.lane_part(lane), v)
            + fragments.accumulator_row(fragments.lane_group(lane), v)
        )
        for lane in LANES
    ]


__all__ = [
    "BLOCK_K",
    "LANES",
    "Request",
    "partial_loads",
    "partial_store_offsets",
    "partial_stores",
    "predicted_wavefronts",
    "requests",
    "weight_requests",
    "x_requests",
    "x_row_offsets",
]
