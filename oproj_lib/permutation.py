"""The K permutation at work on arrays: one K block of weights and x, multiplied by the two MMAs that the
kernel uses."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from oproj_lib.layouts import fragments
from oproj_lib.layouts.fragments import BLOCK_K, CHUNK, HALVES, MMA_K, MMA_ROWS, MMA_TOKENS, WARP_LANES
from oproj_lib.mma_demo import multiply_registers
from oproj_lib.problem import Array


def k_orders() -> list[list[int]]:
    """For each of the two MMAs of a block, the column at K positions 0 to 15."""
    return [[int(fragments.mma_k_to_column(half, k)) for k in range(MMA_K)] for half in range(HALVES)]


def lane_chunks(weights: Array, x: Array) -> tuple[Array, Array]:
    """What the 32 lanes read of one K block, as 16-byte chunks: weights [32, 2, 8] (r = 0, 1) and x [32, 8].

    Args:
        weights: [16, 32] BF16, one row tile; x: [8, 32] BF16, one token tile.
    """
    if weights.shape != (MMA_ROWS, BLOCK_K) or x.shape != (MMA_TOKENS, BLOCK_K):
        raise ValueError(f"weights {weights.shape} and x {x.shape}; they must be (16, 32) and (8, 32)")
    lanes = np.arange(WARP_LANES)
    group, part = fragments.lane_group(lanes), fragments.lane_part(lanes)
    columns = fragments.block_column(0, 1, 0, part)[:, None] + np.arange(CHUNK)
    rows = np.stack([fragments.weight_row(0, group, r) for r in range(2)], axis=1)
    return weights[rows[:, :, None], columns[:, None, :]], x[group[:, None], columns]


def multiply_block(weights: Array, x: Array) -> Array:
    """weights [16, 32] @ x [8, 32]^T as the kernel does it: chunks as loaded, two MMAs, no shuffle. FP32
    [16, 8]."""
    chunks, x_chunks = lane_chunks(weights.astype(ml_dtypes.bfloat16), x.astype(ml_dtypes.bfloat16))
    words, x_words = chunks.reshape(WARP_LANES, 2, 4, 2), x_chunks.reshape(WARP_LANES, 4, 2)
    total = np.zeros((MMA_ROWS, MMA_TOKENS), np.float32)
    for half in range(HALVES):
        a = np.stack(
            [words[:, r, word] for r, word in (fragments.a_register(half, i) for i in range(4))], axis=1
        )
        b = np.stack([x_words[:, fragments.b_register(half, i)] for i in range(2)], axis=1)
        total += multiply_registers(a, b)
    return total
