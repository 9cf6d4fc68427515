"""Byte offsets in the producer's shared memory: staged weights, x rows, partial sums.

Shared memory has 32 banks of 4 bytes. A 16-byte access of a warp runs as four phases of 8 lanes; a phase is
free of conflicts when its 8 chunks differ in ``chunk index % 8``. Units are bytes unless a name says chunks
or words.
"""

from __future__ import annotations

from oproj_lib.layouts.fragments import CHUNK, CHUNK_BYTES, MMA_ROWS, MMA_TOKENS, WARP_LANES, Whole

FLOAT_BYTES = 4
ROW_TILES = 4
"""16-row tiles of a CTA: 64 output rows."""
X_PAD_CHUNKS = 4
"""Padding of an x row. ``k // 8`` is a multiple of 8 chunks (k a multiple of 128, see ``x_row_chunks``), so
without it all rows would start at the same bank; with it row g starts at chunk ``4 * g % 8``, and the 8 lanes
of a phase (2 rows x 4 parts) cover all 8 chunk positions."""
PARTIAL_ROW_WORDS = MMA_ROWS + 4
"""Words per token of a partial tile, 16 padded to 20. Storing: lane (group, part) writes token 2 * part, row
group, that is word 40 * part + group, bank 8 * part + group: 32 different banks. Loading 16 bytes for 8
tokens: chunk 5 * token, all different modulo 8."""
PARTIAL_TILE_BYTES = MMA_TOKENS * PARTIAL_ROW_WORDS * FLOAT_BYTES
RING_BUFFERS = 2
COPY_WARPS_PER_ROW = 2
"""16 warps copy the 8 rows of a token tile."""


def staged_unit(warp: Whole, block: int, row: int, staged_blocks: int, rows: int) -> Whole:
    """Number of the staged unit: the fragments of one warp, staged K block ``block``, row tile ``row`` of the
    warp."""
    return (warp * staged_blocks + block) * rows + row


def staged_offset(unit: Whole, r: int, lane: Whole) -> Whole:
    """Offset of one lane's 16 bytes in a unit of 2 x 32 chunks (r = 0, then r = 1): neighbouring lanes,
    neighbouring chunks."""
    return unit * (2 * WARP_LANES * CHUNK_BYTES) + (r * WARP_LANES + lane) * CHUNK_BYTES


def staged_bytes(warps: int, staged_blocks: int, rows: int) -> int:
    """Size of the staged weights."""
    return warps * staged_blocks * rows * 2 * WARP_LANES * CHUNK_BYTES


def x_row_chunks(k: int) -> int:
    """Row stride of x in shared memory, in 16-byte chunks. ``k`` is a multiple of 128: at least four K parts
    of 32."""
    return k // CHUNK + X_PAD_CHUNKS


def x_offset(token: Whole, chunk: Whole, k: int) -> Whole:
    """Offset of 16-byte chunk ``chunk`` (columns 8 * chunk ..) of row ``token`` in an x buffer."""
    return (token * x_row_chunks(k) + chunk) * CHUNK_BYTES


def x_buffer_bytes(tokens: int, k: int) -> int:
    """Size of an x buffer of ``tokens`` rows."""
    return tokens * x_row_chunks(k) * CHUNK_BYTES


def copy_token(warp: Whole) -> Whole:
    """Token within an 8-token tile that a warp copies: two of the 16 warps share a row, so every offset is a
    constant."""
    return warp // COPY_WARPS_PER_ROW


def copy_chunk(warp: Whole, lane: Whole, k: int) -> Whole:
    """First chunk of its half row that a lane copies; the next ones are 32 chunks further each."""
    return warp % COPY_WARPS_PER_ROW * copy_row_chunks(k) + lane


def copy_row_chunks(k: int) -> int:
    """Chunks of the part of an x row that one warp copies."""
    return k // CHUNK // COPY_WARPS_PER_ROW


def ring_buffer(group: int) -> int:
    """Which of the two ring buffers holds the x of token group ``group``."""
    return group % RING_BUFFERS


def partial_offset(
    tile: Whole, row_tile: Whole, k_part: Whole, token: Whole, row: Whole, parts: int
) -> Whole:
    """Offset of one FP32 partial in the (tiles per group, 4 row tiles, parts, 8 tokens, 20 words) array.

    ``token`` is within its 8-token tile, ``row`` within its 16-row tile.
    """
    tile_index = (tile * ROW_TILES + row_tile) * parts + k_part
    return tile_index * PARTIAL_TILE_BYTES + (token * PARTIAL_ROW_WORDS + row) * FLOAT_BYTES


def partial_bytes(tiles_per_group: int, parts: int) -> int:
    """Size of the partial sums of one token group."""
    return tiles_per_group * ROW_TILES * parts * PARTIAL_TILE_BYTES
