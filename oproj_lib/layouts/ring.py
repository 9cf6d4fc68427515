"""The ring of K blocks in shared memory, its barriers, and the FP32 tile that overlays it at the end.

One stage holds a W tile [64 rows, 64 columns] and then an x tile [n tokens, 64 columns], both BF16, K-major,
with the 128-byte swizzle: a row of 64 BF16 is exactly one swizzled row of 128 bytes, so every tile is a whole
number of 1024-byte atoms (n is a multiple of 8), and every stage starts at one. Block kb of ``k // 64`` uses
slot ``kb % stages`` in round ``kb // stages``. Units are bytes unless a name says otherwise.
"""

from __future__ import annotations

from oproj_lib.layouts.fragments import BF16_BYTES, CHUNK, CHUNK_BYTES, MMA_TOKENS, WARP_LANES, Whole
from oproj_lib.layouts.shared_memory import FLOAT_BYTES
from oproj_lib.layouts.swizzle import ROW_BYTES, tile_offset
from oproj_lib.problem import ROWS_PER_CTA

TILE_K = ROW_BYTES // BF16_BYTES
"""Columns of a K block: 64, one swizzled row."""
MMA_K = 16
"""Columns of one ``tcgen05.mma`` of kind::f16: 32 bytes."""
MMAS_PER_BLOCK = TILE_K // MMA_K
MMA_STEP_BYTES = MMA_K * BF16_BYTES
"""How far a descriptor advances from one MMA of a block to the next, inside the swizzled row."""
TOKEN_STEP = MMA_TOKENS
"""n is the batch rounded up to this: N of an MMA with M = 64 is a multiple of 8 (PTX ISA, "tcgen05.mma",
shapes)."""
MAX_N = 256
W_TILE_BYTES = ROWS_PER_CTA * ROW_BYTES
CHUNKS_PER_ROW = ROW_BYTES // CHUNK_BYTES

LOADERS = 128
"""Threads that copy: warps 0 to 3."""
ROWS_PER_PASS = LOADERS // CHUNKS_PER_ROW
"""8 threads copy one row, so 128 threads copy 16 rows at a time; a multiple of 8, hence a pass starts at an
atom."""
COPIES_PER_STAGE = 2
"""Each loader arrives once after its W copies and once after its x copies."""
FULL_ARRIVALS = LOADERS * COPIES_PER_STAGE
COMMIT_ARRIVALS = 1
"""One ``tcgen05.commit`` by one thread."""
BARRIER_BYTES = 8

TILE_ROW_WORDS = ROWS_PER_CTA + 4
"""Words per token of the FP32 epilogue tile, 64 padded to 68. Storing: 16 lanes write 16 consecutive words,
16 different banks. Loading 16 bytes: chunk 17 * token + 2 * chunk, see ``publish_chunk``."""
TOKENS_PER_PASS = LOADERS // (ROWS_PER_CTA // CHUNK)
"""Each loader publishes one 8-row chunk per pass, 8 chunks make a token: 16 tokens per pass."""
TOKENS_PER_WARP = WARP_LANES // (ROWS_PER_CTA // CHUNK)


def padded_tokens(batch: int) -> int:
    """n: the batch rounded up to a multiple of 8."""
    return -(-batch // TOKEN_STEP) * TOKEN_STEP


def x_tile_bytes(n: int) -> int:
    """Size of the x tile [n, 64]."""
    return n * ROW_BYTES


def stage_bytes(n: int) -> int:
    """Size of a stage: 8192 + 128 n."""
    return W_TILE_BYTES + x_tile_bytes(n)


def stage_count(k: int, n: int, budget: int) -> int:
    """Stages that fit ``budget`` bytes, no more than there are K blocks; 0 when not even one fits."""
    return min(k // TILE_K, budget // stage_bytes(n))


def slot_of(block: int, stages: int) -> int:
    """The slot that holds K block ``block``."""
    return block % stages


def full_parity(block: int, stages: int) -> int:
    """Parity that the MMA warp waits for on full[slot]: that of the round. Phase 0 is the first to
    complete."""
    return block // stages % 2


def empty_parity(block: int, stages: int) -> int:
    """Parity that a loader waits for on empty[slot] before it overwrites the block of the previous round.

    Raises ValueError in round 0: the slot was never in use, there is nothing to wait for.
    """
    if block < stages:
        raise ValueError(f"block {block} is the first in its slot of {stages}: nothing to wait for")
    return (block // stages - 1) % 2


def is_refilled(block: int, blocks: int, stages: int) -> bool:
    """True when the slot of ``block`` is used again, so that somebody waits for it to be empty."""
    return block + stages < blocks


def full_barrier(slot: int) -> int:
    """Offset of full[slot] in the barrier area: the full ones first."""
    return slot * BARRIER_BYTES


def empty_barrier(slot: int, stages: int) -> int:
    """Offset of empty[slot]."""
    return (stages + slot) * BARRIER_BYTES


def slot_barriers_bytes(stages: int) -> int:
    """full[stages], empty[stages]."""
    return 2 * stages * BARRIER_BYTES


def accumulator_barrier(stages: int) -> int:
    """Offset of the accumulator barrier, which UMMA has behind those of the slots."""
    return slot_barriers_bytes(stages)


def barrier_area_bytes(stages: int) -> int:
    """full[stages], empty[stages], the accumulator barrier."""
    return accumulator_barrier(stages) + BARRIER_BYTES


def copy_row(tid: Whole) -> Whole:
    """Row that a loader copies in pass 0; pass i is 16 rows further."""
    return tid // CHUNKS_PER_ROW


def copy_chunk(tid: Whole) -> Whole:
    """16-byte chunk of its row that a loader copies: 8 neighbouring lanes, one contiguous row."""
    return tid % CHUNKS_PER_ROW


def copy_offset(tid: Whole) -> Whole:
    """Swizzled offset of a loader's chunk in pass 0; pass i is ``copy_pass_bytes`` * i further, whatever the
    row."""
    return tile_offset(copy_row(tid), copy_chunk(tid))


def copy_pass_bytes() -> int:
    """16 rows are two atoms: the XOR does not change from pass to pass."""
    return ROWS_PER_PASS * ROW_BYTES


def tile_word_offset(token: Whole, row: Whole) -> Whole:
    """Byte offset of D[row, token] in the epilogue tile [n, 68]."""
    return (token * TILE_ROW_WORDS + row) * FLOAT_BYTES


def epilogue_bytes(n: int) -> int:
    """Size of the epilogue tile."""
    return tile_word_offset(n, 0)


def publish_passes(batch: int) -> int:
    """Passes of 16 tokens."""
    return -(-batch // TOKENS_PER_PASS)


def publish_chunk(tid: Whole) -> tuple[Whole, Whole]:
    """(token, chunk) of a loader in publish pass 0; pass i is 16 tokens further.

    A warp sends whole lines: 4 tokens x 8 chunks = 4 x 128 bytes. Which lane takes which is chosen for the
    loads from the tile: a 16-byte load runs in phases of 8 lanes, and these read chunk positions 17 * token +
    2 * chunk modulo 8, so two tokens times four neighbouring chunks cover all eight positions. Eight chunks
    of one token would cover four positions twice.
    """
    warp, lane = tid // WARP_LANES, tid % WARP_LANES
    token = lane // 4 % 2 + lane // 16 * 2
    return warp * TOKENS_PER_WARP + token, lane % 4 + lane // 8 % 2 * 4
