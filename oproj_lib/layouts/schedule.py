"""How a batch is cut: 8-token tiles, and groups of tiles that share one pass over the weights."""

from __future__ import annotations

from oproj_lib.layouts.fragments import MMA_TOKENS


def schedule(batch: int, group_tiles: int) -> tuple[int, int, int]:
    """(8-token tiles, tiles per group, groups) of a batch of ``batch`` tokens.

    ``group_tiles`` 0 means ungrouped: one group holds every tile. A batch smaller than a group shrinks the
    group.
    """
    tiles = -(-batch // MMA_TOKENS)
    tiles_per_group = min(group_tiles, tiles) if group_tiles else tiles
    return tiles, tiles_per_group, -(-tiles // tiles_per_group)


def group_tile_count(group: int, tiles: int, tiles_per_group: int) -> int:
    """Tiles of one group: the last group may be short."""
    return min(tiles_per_group, tiles - group * tiles_per_group)


def group_tokens(group: int, batch: int, tiles_per_group: int) -> int:
    """Tokens of one group that belong to the batch (padding tokens are never published)."""
    size = tiles_per_group * MMA_TOKENS
    return min(size, batch - group * size)
