"""Triton kernels whose PTX the virtual GPU must execute.  Triton needs source, hence a file."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    """out[i] = x[i] + y[i]."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(out + i, tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside), mask=inside)


@triton.jit
def softmax(x, out, columns, stride, BLOCK: tl.constexpr):
    """One row per program: out[row] = softmax(x[row]), in FP32."""
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + i, mask=i < columns, other=-float("inf")).to(tl.float32)
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(
        out + row * stride + i, (powers / tl.sum(powers, axis=0)).to(out.dtype.element_ty), mask=i < columns
    )


@triton.jit
def row_sums(x, out, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = sum of x[row], ROWS rows per program, a loop over blocks of columns."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sums = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        i = start + tl.arange(0, BLOCK)
        sums += tl.sum(
            tl.load(x + rows[:, None] * columns + i[None, :], mask=i[None, :] < columns, other=0.0), axis=1
        )
    tl.store(out + rows, sums)


@triton.jit
def matmul(a, b, c, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """c[m, n] = a[m, k] @ b[k, n], FP32 accumulation; m and n are masked, k is a multiple of BLOCK_K."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    left = a + rows[:, None] * k + depth[None, :]
    right = b + depth[:, None] * n + columns[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, k, BLOCK_K):
        acc += tl.dot(
            tl.load(left, mask=rows[:, None] < m, other=0.0),
            tl.load(right, mask=columns[None, :] < n, other=0.0),
        )
        left += BLOCK_K
        right += BLOCK_K * n
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * n + columns[None, :], acc.to(c.dtype.element_ty), mask=inside)


@triton.jit
def dot(
    a, b, c, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    A_K_MAJOR: tl.constexpr, B_K_MAJOR: tl.constexpr,
):  # fmt: skip
    """One tile: c[m, n] = a @ b over k columns. A_K_MAJOR: a is stored as [m, k], else as [k, m]. B_K_MAJOR:
    b is stored as [n, k], else as [k, n]. Copies keep the order, so these choose the tensor cores' layouts."""
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        depth = start + tl.arange(0, BLOCK_K)
        if A_K_MAJOR:
            left = tl.load(a + m[:, None] * k + depth[None, :])
        else:
            left = tl.load(a + m[:, None] + depth[None, :] * BLOCK_M)
        if B_K_MAJOR:
            right = tl.load(b + depth[:, None] + n[None, :] * k)
        else:
            right = tl.load(b + depth[:, None] * BLOCK_N + n[None, :])
        acc = tl.dot(left, right, acc)
    tl.store(c + m[:, None] * BLOCK_N + n[None, :], acc)


@triton.jit
def chained(a, b, v, c, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """c[m, k] = (a[m, k] @ b[k, n], rounded to v's type) @ v[n, k]: the first product is an operand."""
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    left = tl.load(a + m[:, None] * BLOCK_K + k[None, :])
    product = tl.dot(left, tl.load(b + k[:, None] * BLOCK_N + n[None, :]))
    out = tl.dot(product.to(v.dtype.element_ty), tl.load(v + n[:, None] * BLOCK_K + k[None, :]))
    tl.store(c + m[:, None] * BLOCK_K + k[None, :], out)


@triton.jit
def described(a, b, c, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """c = a[m, k] @ b[k, n] with tensor descriptors, which become TMA copies."""
    left = tl.make_tensor_descriptor(a, [BLOCK_M, k], [k, 1], [BLOCK_M, BLOCK_K])
    right = tl.make_tensor_descriptor(b, [k, BLOCK_N], [BLOCK_N, 1], [BLOCK_K, BLOCK_N])
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        acc = tl.dot(left.load([0, start]), right.load([start, 0]), acc)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    tl.store(c + m[:, None] * BLOCK_N + n[None, :], acc)
