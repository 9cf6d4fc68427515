"""The order in which the kernel adds, in numpy, and other orders to compare it with.

FP32 addition is not associative, so the order is part of the kernel's contract. MMA number i of a warp (two per K
block of 32 columns) adds 16 products to chain i % chains. The chains are added pairwise, a tree; the K parts, one
per warp, are then added one after the other, parts 0, 1, 2, ...; the sum is rounded to BF16 once.

Axes: M tokens, N rows of W, that is outputs. x is [M, K] and weight [N, K], both BF16; sums are FP32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oproj_lib.bf16 import spacing
from oproj_lib.fused_dot import fused_dot
from oproj_lib.kernels.configuration import Configuration
from oproj_lib.layouts.fragments import HALVES, MMA_ROWS, block_column, chain_of
from oproj_lib.permutation import k_orders
from oproj_lib.problem import Array, N
from oproj_lib.vgpu import tensorcore

HOPPER = 90  # compute capability whose tensor core is meant where none is given; Blackwell's adds alike


def check_output(token: int, column: int, batch: int) -> None:
    """Raises ValueError unless there is such an output."""
    for name, index, count in (("token", token, batch), ("column", column, N)):
        if not 0 <= index < count:
            raise ValueError(f"{name} = {index}: there are {count}, choose 0 to {count - 1}")


def mma_columns(config: Configuration, part: int, number: int) -> list[int]:
    """The 16 columns of K, in the order in which the instruction has them, of MMA `number` of one K part.

    Raises:
        ValueError: for a part or an MMA that does not exist.
    """
    if not 0 <= part < config.parts:
        raise ValueError(f"part = {part}: there are {config.parts} K parts, choose 0 to {config.parts - 1}")
    count = HALVES * config.kblocks
    if not 0 <= number < count:
        raise ValueError(
            f"mma = {number}: a warp has 2 * {config.kblocks} K blocks = {count} MMAs, choose 0 to {count - 1}"
        )
    first = int(block_column(part, config.kblocks, number // HALVES, 0))
    return [first + column for column in k_orders()[number % HALVES]]


def mma(sums: Array, x: Array, weight: Array, *, exact: bool = True, arch: int = HOPPER) -> Array:
    """sums [M, N] + x [M, 16] weight [N, 16]^T, FP32, as one MMA adds: the tensor core's arithmetic, or FP32's."""
    height = (
        MMA_ROWS if len(weight) % MMA_ROWS == 0 else 1
    )  # A is [height, 16] for N / height matrices at once
    batch = len(weight) // height
    a = weight.view(np.uint16).reshape(batch, height, 16).transpose(1, 2, 0).astype(np.uint32)
    b = np.broadcast_to(x.view(np.uint16).T[:, :, None], (16, len(x), batch)).astype(np.uint32)
    c = sums.view(np.uint32).T.reshape(batch, height, len(x)).transpose(1, 2, 0)
    d = tensorcore.dot(a, b, c, "bf16", "bf16", "f32", exact=exact, arch=arch)
    return np.ascontiguousarray(d.transpose(2, 0, 1).reshape(len(weight), len(x)).T).view(np.float32)


def chain_sums(
    x: Array, weight: Array, config: Configuration, *, exact: bool = True, arch: int = HOPPER
) -> Array:
    """Every chain's sum, [parts, chains, M, N]: what stands in the accumulators when the MMAs are through.

    Raises:
        ValueError: if K is not the configuration's.
    """
    if x.shape[1] != config.k or weight.shape[1] != config.k:
        raise ValueError(f"x has K = {x.shape[1]}, weight {weight.shape[1]}, the configuration {config.k}")
    sums = np.zeros((config.parts, config.chains, len(x), len(weight)), np.float32)
    for part in range(config.parts):
        for number in range(HALVES * config.kblocks):
            columns = mma_columns(config, part, number)
            chain = chain_of(number // HALVES, number % HALVES, config.chains)
            sums[part, chain] = mma(
                sums[part, chain], x[:, columns], weight[:, columns], exact=exact, arch=arch
            )
    return sums


def mma_operands(
    x_row: Array, weight_row: Array, config: Configuration, part: int, number: int, *, arch: int = HOPPER
) -> tuple[Array, Array, float]:
    """What MMA `number` of one K part is given for one output: 16 weights, 16 values of x, and the chain's sum so far.

    Raises:
        ValueError: for a part or an MMA that does not exist.
    """
    columns = mma_columns(config, part, number)
    chain = chain_of(number // HALVES, number % HALVES, config.chains)
    so_far = 0.0
    for earlier in range(chain, number, config.chains):
        before = mma_columns(config, part, earlier)
        so_far = float(fused_dot(weight_row[before], x_row[before], so_far, arch=arch).result)
    return weight_row[columns], x_row[columns], so_far


def add_pairwise(terms: Array) -> Array:
    """terms [n, ...] added as a tree: 0 + 1, 2 + 3, ..., then their sums likewise. n is a power of two."""
    while len(terms) > 1:
        terms = terms[::2] + terms[1::2]
    return np.asarray(terms[0])


def add_in_turn(terms: Array, order: Sequence[int] | None = None) -> Array:
    """terms [n, ...] added one after the other, in this order (by default 0, 1, 2, ...)."""
    turn = range(len(terms)) if order is None else order
    total = np.array(terms[turn[0]])
    with np.errstate(invalid="ignore"):  # Inf - Inf is NaN, here as there
        for index in turn[1:]:
            total = total + terms[index]
    return np.asarray(total)


def part_sums(chains: Array) -> Array:
    """[parts, M, N] from `chain_sums`: every part's tree."""
    return add_pairwise(chains.swapaxes(0, 1))


def contract_sums(
    x: Array, weight: Array, config: Configuration, *, exact: bool = True, arch: int = HOPPER
) -> Array:
    """The FP32 sums [M, N] that the kernel rounds, in the contract's order."""
    return add_in_turn(part_sums(chain_sums(x, weight, config, exact=exact, arch=arch)))


def products(x_row: Array, weight_row: Array) -> Array:
    """The K products of one output, FP32: exact, since 8 times 8 significant bits are 16 (and FP32 has 24)."""
    return x_row.astype(np.float32) * weight_row.astype(np.float32)


def sums_in_orders(terms: Array, orders: Array) -> Array:
    """FP32 sums of terms [n] for many orders [count, n] of its indices, each strictly from left to right."""
    return np.add.accumulate(terms[orders], axis=1, dtype=np.float32)[:, -1]


def sequential_sums(x: Array, weight: Array, *, backwards: bool = False) -> Array:
    """[M, N] in plain FP32, one product after the other along K: another order than the kernel's."""
    wide, columns = x.astype(np.float32), np.ascontiguousarray(weight.astype(np.float32).T)
    total = np.zeros((len(x), len(weight)), np.float32)
    for k in reversed(range(x.shape[1])) if backwards else range(x.shape[1]):
        total += wide[:, k, None] * columns[k]
    return total


def differing(first: Array, second: Array) -> int:
    """How many elements differ in their bits (so -0.0 is not 0.0, and a NaN is itself).

    Raises:
        ValueError: for different shapes or element types.
    """
    if first.shape != second.shape or first.dtype != second.dtype:
        raise ValueError(
            f"{first.dtype} {first.shape} and {second.dtype} {second.shape} cannot be compared bit by bit"
        )
    whole = f"u{first.dtype.itemsize}"
    return int((np.ascontiguousarray(first).view(whole) != np.ascontiguousarray(second).view(whole)).sum())


def expected_flips(first: Array, second: Array) -> float:
    """How many outputs should round to another BF16 if their FP32 sums are `second` instead of `first`.

    The rounded value changes if the middle between two BF16 lies between the two sums: the share of a BF16 step that
    they are apart.
    """
    wide = first.astype(np.float64)
    return float((np.abs(second - wide) / spacing(wide)).sum())
