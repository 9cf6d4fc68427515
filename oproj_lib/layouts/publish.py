"""Which thread publishes which 16-byte chunk: 8 output rows of one token.

``8 * tokens`` threads each take one (token, row tile, half). A CTA has 4 row tiles of 16 rows, hence 8 chunks
per token.
"""

from __future__ import annotations

from oproj_lib.layouts.fragments import CHUNK, MMA_ROWS, MMA_TOKENS, Whole
from oproj_lib.layouts.shared_memory import ROW_TILES

CHUNKS_PER_TOKEN = ROW_TILES * MMA_ROWS // CHUNK


def publish_threads(tokens: int) -> int:
    """Threads that publish ``tokens`` tokens; the others skip."""
    return CHUNKS_PER_TOKEN * tokens


def ungrouped_chunk(tid: Whole) -> tuple[Whole, Whole, Whole]:
    """(token, row tile, half) of a thread: neighbouring lanes write neighbouring chunks of one token."""
    return tid // CHUNKS_PER_TOKEN, tid // 2 % ROW_TILES, tid % 2


def grouped_chunk(tid: Whole, tokens: int) -> tuple[Whole, Whole, Whole]:
    """(token of the group, row tile, half): lanes run over tokens first, so 8 lanes load partials 20 words
    apart."""
    chunk = tid // tokens
    return tid % tokens, chunk // 2, chunk % 2


PAIRS_PER_CHUNK = CHUNK // 2
PAIR_THREADS = MMA_TOKENS * ROW_TILES * MMA_ROWS // 2
"""Threads that each take two rows of one of 8 tokens."""


def pair(warp: Whole, lane: Whole) -> tuple[Whole, Whole, Whole]:
    """(token, row tile, first row within the tile) of a thread that adds two neighbouring rows.

    A warp has four tokens of one row tile, 8 lanes each. An 8-byte load runs as two phases of 16 lanes, which
    are two tokens: t and t + 4, because their rows start 4 * 20 = 80 words apart, that is 16 banks, and the
    16 words of each cover one half of the banks.
    """
    quarter = lane // 8
    token = warp % 2 * 2 + quarter // 2 + quarter % 2 * 4
    return token, warp // 2, lane % 8 * 2


def output_column(cta: Whole, row_tile: Whole, half: Whole) -> Whole:
    """First of the 8 output columns (rows of W) of a chunk."""
    return (cta * ROW_TILES + row_tile) * MMA_ROWS + half * CHUNK


def mailbox_offset(slot: Whole, token: Whole, column: Whole, tokens: int, columns: int) -> Whole:
    """Element offset in a mailbox [slots, tokens, columns]."""
    return (slot * tokens + token) * columns + column
