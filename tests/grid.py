"""The configuration grid of the producer, and a subset that covers every pair of settings at the boundaries."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import astuple, dataclass
from functools import cache

import numpy as np

from oproj_lib.kernels.configuration import Configuration, configurations

BATCHES = (1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 24, 32, 33, 48, 63, 64)
BOUNDARIES = (1, 7, 8, 9, 17, 33, 63, 64)
"""One token; a tile less one, full, plus one; 3 and 5 tiles with one token in the last; the largest batches."""
TARGETS = ("sm_90a", "sm_100a")
TRANSPORTS = ("multicast", "unicast")
RANKS = {1536: 8, 768: 16}


@dataclass(frozen=True)
class Point:
    k: int
    staged_blocks: int
    rows: int
    group_tiles: int
    batch: int
    target: str
    transport: str

    def __str__(self) -> str:
        settings = f"K{self.k}-s{self.staged_blocks}-r{self.rows}-g{self.group_tiles}-M{self.batch}"
        return f"{settings}-{self.target}-{self.transport}"


@cache
def builds() -> tuple[tuple[int, int, int, int, int], ...]:
    """Every (K, staged blocks, rows, group tiles, M) that is valid."""
    found = []
    for k in RANKS:
        for settings in configurations(k):
            valid = Configuration(k, *settings).valid_batches()
            found += [(k, *settings, batch) for batch in BATCHES if batch in valid]
    return tuple(found)


@cache
def every_point() -> tuple[Point, ...]:
    return tuple(
        Point(*build, target, transport)
        for build in builds()
        for target in TARGETS
        for transport in TRANSPORTS
    )


@cache
def covering_points(seed: int = 0) -> tuple[Point, ...]:
    """Greedy pairwise covering: every pair of settings that occurs together anywhere at a boundary batch occurs in
    one of these points."""
    points = [point for point in every_point() if point.batch in BOUNDARIES]
    rows = [astuple(point) for point in points]
    numbers: dict[tuple[object, ...], int] = {}
    pairs = np.array(
        [
            [
                numbers.setdefault((i, row[i], j, row[j]), len(numbers))
                for i, j in itertools.combinations(range(len(row)), 2)
            ]
            for row in rows
        ]
    )
    open_pairs = np.ones(len(numbers), bool)
    shuffled = (
        np.random.default_rng(seed).permutation(len(points)).tolist()
    )  # ties are broken at random, but always alike
    heap = [(-pairs.shape[1], place, index) for place, index in enumerate(shuffled)]
    chosen = []
    while open_pairs.any():
        _, place, best = heapq.heappop(heap)
        gain = int(open_pairs[pairs[best]].sum())
        if heap and gain < -heap[0][0]:  # gains only shrink: look again when it is this point's turn
            heapq.heappush(heap, (-gain, place, best))
            continue
        open_pairs[pairs[best]] = False
        chosen.append(points[best])
    return tuple(chosen)
