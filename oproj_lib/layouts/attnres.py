"""Where the values of the residual attention kernel lie: chunks of a row, and the sums that a CTA shares.

One CTA works on one token, whose row has 896 chunks of 8 columns. Thread ``tid`` of T has the chunks ``tid``,
``tid + T``, ``tid + 2 T``, ..., so the lanes of a warp read neighbouring chunks.

A sum over the whole row is made in three steps, always in the same order: within a thread, within a warp, and
over the warps through shared memory. There, every sum has a row of FP32, one per warp:

    rows                   sums
    0 .. H - 1             sum v_s^2 of block s             H = sources rounded up to a power of two
    H .. 2 H - 1           sum v_s norm_w qk_w of block s
    2 H, 2 H + 1           the same two of P
    2 H + 2                sum mix^2

Each group of sums has rows of its own, so one barrier (after the stores) per group is enough.
"""

from __future__ import annotations

from oproj_lib.layouts.fragments import BF16_BYTES, CHUNK, CHUNK_BYTES, WARP_LANES, Whole
from oproj_lib.problem import N

ROW_CHUNKS = N // CHUNK
FLOAT_BYTES = 4
VECTOR = CHUNK_BYTES // FLOAT_BYTES
"""FP32 of one 16-byte access."""
ROW_PADDING = VECTOR
"""Added to a row of 16 floats, so that 8 lanes that read 8 rows reach all 32 banks (20 i mod 32)."""


def chunks_per_thread(threads: int) -> int:
    """Chunks of a row that one thread has."""
    return ROW_CHUNKS // threads


def chunk_bytes(chunk: int, threads: int) -> int:
    """Bytes from a thread's first chunk of a row to its chunk number ``chunk``."""
    return chunk * threads * CHUNK_BYTES


def row_offset(row: Whole, tid: Whole) -> Whole:
    """Element offset of a thread's first chunk in row ``row`` of a [rows, 7168] array."""
    return row * N + tid * CHUNK


def row_bytes() -> int:
    """Bytes of a row of 7168 BF16."""
    return N * BF16_BYTES


def sum_slots(blocks: int) -> int:
    """H: sources that the warps' sums have room for, a power of two (a warp halves its sums step by step)."""
    slots = 1
    while slots < blocks:
        slots *= 2
    return slots


def warps(threads: int) -> int:
    return threads // WARP_LANES


def sum_vectors(threads: int) -> int:
    """16-byte accesses that read one sum of every warp."""
    return -(-warps(threads) // VECTOR)


def sum_row_bytes(threads: int) -> int:
    """Bytes from one row of sums to the next."""
    return (sum_vectors(threads) * VECTOR + ROW_PADDING) * FLOAT_BYTES


def token_row(blocks: int) -> int:
    """First of the two rows of P's sums."""
    return 2 * sum_slots(blocks)


def mix_row(blocks: int) -> int:
    """The row of sum mix^2."""
    return token_row(blocks) + 2


def sums_bytes(blocks: int, threads: int) -> int:
    """Shared memory of all sums."""
    return (mix_row(blocks) + 1) * sum_row_bytes(threads)


def kept_offset(chunk: int, column: int, blocks: int, threads: int) -> int:
    """Offset of columns ``column`` .. + 3 of thread 0's chunk among the kept FP32; thread t's are 16 t bytes on.

    Neighbouring lanes have neighbouring 16 bytes: no bank conflicts.
    """
    vector = chunk * (CHUNK // VECTOR) + column // VECTOR
    return sums_bytes(blocks, threads) + vector * threads * CHUNK_BYTES


def area_bytes(blocks: int, threads: int) -> int:
    """Shared memory of the sums, and of the kept values where there are blocks."""
    return sums_bytes(blocks, threads) + (N * FLOAT_BYTES if blocks else 0)
