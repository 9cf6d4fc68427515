"""The producer's arithmetic written out from the contract, in numpy, with nothing of the kernels or the
layout code.

For one output: K is cut into `parts` parts and each part into blocks of 32 columns. Half h of a block is one
m16n8k16 MMA. Its K index runs over lanes' columns in this order: register pair 2h of the four lane parts
(columns 8 part + 4 h + {0, 1}), then pair 2h + 1 (columns 8 part + 4 h + 2 + {0, 1}). MMA number 2 j + h adds
to chain (2 j + h) mod chains; chains are added pairwise, parts in order, all FP32 round-to-nearest; the sum
is rounded to BF16 and -0.0 becomes +0.0.

`mma` is the virtual GPU's fast arithmetic: one FP32 addition per product in K order (BF16 products are exact
in FP32).
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

Mma = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def mma_columns(half: int) -> list[int]:
    """Columns of a 32-column block in the K order of MMA `half`."""
    return [8 * part + 4 * half + 2 * pair + i for pair in (0, 1) for part in range(4) for i in (0, 1)]


def fast_mma(accumulator: np.ndarray, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """accumulator [M, N] + x [M, 16] weight [N, 16]^T, one FP32 addition per product."""
    result, columns = accumulator.copy(), np.ascontiguousarray(weight.T)
    for k in range(16):
        result += x[:, k, None] * columns[k]
    return result


def chains_of(rows: int, group_tiles: int) -> int:
    return max(1, 4 // (rows * max(1, group_tiles)))


def expected_bits(
    x: np.ndarray, weight: np.ndarray, rows: int, chains: int, mma: Mma = fast_mma
) -> np.ndarray:
    """The published BF16 bits, uint16 [M, N], for x [M, K] and weight [N, K] of BF16."""
    bits = expected_sums(x, weight, rows, chains, mma).astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.where(bits == 0x8000, np.uint16(0), bits)


def expected_sums(
    x: np.ndarray, weight: np.ndarray, rows: int, chains: int, mma: Mma = fast_mma
) -> np.ndarray:
    """The sums before rounding, float32 [M, N]."""
    k = x.shape[1]
    parts = 4 * rows
    blocks = k // (32 * parts)
    wide_x, wide_w = x.astype(np.float32), weight.astype(np.float32)
    total: np.ndarray | None = None
    for part in range(parts):
        sums = [np.zeros((x.shape[0], weight.shape[0]), np.float32) for _ in range(chains)]
        for block in range(blocks):
            start = (part * blocks + block) * 32
            for half in range(2):
                columns = [start + column for column in mma_columns(half)]
                chain = (2 * block + half) % chains
                sums[chain] = mma(sums[chain], wide_x[:, columns], wide_w[:, columns])
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
        total = sums[0] if total is None else total + sums[0]
    assert total is not None
    return total
