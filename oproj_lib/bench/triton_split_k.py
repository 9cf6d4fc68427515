"""The projection as a Triton programmer would write it for few tokens: split-K, the last CTA of a column adds up.

One kernel, so that it can stand in a chain: every CTA of a column block writes FP32 partial sums of its part of K and
counts itself; the last to arrive adds the parts in order, rounds, and resets the count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from oproj_lib.problem import N, Problem

CONFIGURATIONS = (
    # columns per CTA, columns of K per step, parts of K, warps, pipeline stages
    (32, 128, 1, 4, 4),
    (64, 128, 1, 4, 4),
    (32, 128, 2, 4, 3),
    (64, 128, 2, 4, 4),
    (64, 64, 3, 4, 5),
    (128, 64, 2, 4, 5),
    (128, 64, 4, 4, 4),
    (128, 128, 3, 8, 3),
)


@triton.jit
def split_k(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, partial: tl.tensor, count: tl.tensor,
    batch: tl.tensor, columns: tl.tensor, k: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
) -> None:  # fmt: skip
    """out [batch, columns] = x [batch, k] @ weight [columns, k].T; k divisible by PARTS * BLOCK_K."""
    block, part = tl.program_id(0), tl.program_id(1)
    token = tl.arange(0, BLOCK_M)[:, None]
    column = (block * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    length = k // PARTS
    inner = part * length + tl.arange(0, BLOCK_K)
    x_at = x + token * k + inner[None, :]
    weight_at = weight + column * k + inner[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, length, BLOCK_K):
        a = tl.load(x_at + step, mask=token < batch, other=0.0)
        b = tl.load(weight_at + step)
        total = tl.dot(a, b, total)
    place = token * columns + column
    if PARTS == 1:
        tl.store(out + place, total.to(tl.bfloat16), mask=token < batch)
    else:
        size = BLOCK_M * columns
        tl.store(partial + part * size + place, total)
        tl.debug_barrier()  # every thread's stores stand before the count
        arrived = tl.atomic_add(count + block, 1, sem="acq_rel")
        if arrived == PARTS - 1:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for other in range(PARTS):
                total += tl.load(partial + other * size + place, cache_modifier=".cg")
            tl.store(out + place, total.to(tl.bfloat16), mask=token < batch)
            tl.store(count + block, 0)


def fitting(k: int) -> list[tuple[int, int, int, int, int]]:
    """The configurations that divide K."""
    return [numbers for numbers in CONFIGURATIONS if k % (numbers[1] * numbers[2]) == 0]


def block_m(batch: int) -> int:
    """Tokens of a tile: the next power of two, at least the 16 that tl.dot asks for."""
    return max(16, 1 << (batch - 1).bit_length())


def choices(
    problem: Problem, device: str
) -> list[tuple[dict[str, int | str], Callable[[Any, Any, Any], None]]]:
    """(settings, launch(x, weight, out)) per configuration."""
    return [_choice(problem, device, *numbers) for numbers in fitting(problem.k)]


def _choice(
    problem: Problem, device: str, block_n: int, block_k: int, parts: int, warps: int, stages: int
) -> tuple[dict[str, int | str], Callable[[Any, Any, Any], None]]:
    import torch

    tokens = block_m(problem.batch)
    partial = torch.empty((parts, tokens, N), dtype=torch.float32, device=device)
    count = torch.zeros(N // block_n, dtype=torch.int32, device=device)
    grid = (N // block_n, parts)

    def launch(x: Any, weight: Any, out: Any) -> None:
        split_k[grid](
            x, weight, out, partial, count, problem.batch, N, problem.k, BLOCK_M=tokens, BLOCK_N=block_n,
            BLOCK_K=block_k, PARTS=parts, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    settings: dict[str, int | str] = {
        "block_n": block_n,
        "block_k": block_k,
        "parts": parts,
        "warps": warps,
        "stages": stages,
    }
    return settings, launch
