"""Where slots, shards, chunks and generation records of a mailbox lie, in plain integer arithmetic.

A mailbox is BF16 [slots, tokens, columns] with slots = GENERATIONS * ranks: one slot per rank and generation.
Its one-shot form has all 7168 columns; the receive view of the two-shot form has the 7168 / ranks columns
that this rank owns; the result mailbox of the second shot has one slot per generation.

Call number n of the mailbox publishes into generation n % 3. Why three are enough, and two are not, is in
``oproj_lib.kernels.mailbox``. The generation is kept on the device, in an int32 array [ROLES, RECORDS], the
state of the mailbox. Every CTA has records of its own, so counting on needs no atomic operation and no CTA
waits for another. A record holds the generation and not the number of calls, which would overflow.
"""

from __future__ import annotations

from enum import IntEnum

from oproj_lib.layouts.fragments import CHUNK, WARP_LANES, Whole
from oproj_lib.problem import CTAS, MAX_BATCH, ROWS_PER_CTA, N

GENERATIONS = 3
SENTINEL = 0x80008000
"""An armed word: two BF16 -0.0. No published word has such a half."""
CHUNK_WORDS = 4
"""32-bit words of a chunk: 16 bytes, 8 columns."""
RECORDS = 512
"""CTAs of the largest grid that may publish into or consume from a mailbox."""
CHUNKS_PER_CTA = ROWS_PER_CTA // CHUNK
"""Chunks of one token among the 64 columns that a consuming CTA looks after."""
MIN_CONSUMER_THREADS = 128
"""Below 16 tokens some threads have nothing to poll, but all re-arm, also after a call with many tokens."""


class Role(IntEnum):
    """Rows of the state."""

    PUBLISH = 0
    """Generation that this CTA publishes into next, 0 to 2."""
    CONSUME = 1
    """Generation that this CTA consumes next."""
    TOKENS = 2
    """Tokens of the call consumed last: what has to be armed again."""


ROLES = len(Role)
STATE_SHAPE = (ROLES, RECORDS)
"""Shape of the int32 state of one mailbox; all zeros before the first call."""


# ---- slots and generations ----


def slots_of(ranks: int) -> int:
    """Slots of a mailbox that ``ranks`` ranks publish into."""
    return GENERATIONS * ranks


def ranks_of(slots: int) -> int:
    """Ranks that publish into a mailbox of ``slots`` slots. Raises ValueError unless it has three
    generations."""
    if slots < GENERATIONS or slots % GENERATIONS:
        raise ValueError(
            f"mailbox of {slots} slots: slots = {GENERATIONS} generations * ranks, so a positive multiple of "
            f"{GENERATIONS}"
        )
    return slots // GENERATIONS


def slot(generation: Whole, rank: Whole, ranks: int) -> Whole:
    """Slot of a rank in a generation."""
    return generation * ranks + rank


def next_generation(generation: Whole) -> Whole:
    """Generation of the call after."""
    return (generation + 1) % GENERATIONS


def previous_generation(generation: Whole) -> Whole:
    """Generation of the call before: the one to arm again."""
    return (generation + (GENERATIONS - 1)) % GENERATIONS


# ---- state ----


def record(role: int, cta: Whole) -> Whole:
    """Index of a CTA's record in the flat state."""
    return role * RECORDS + cta


def record_steps(grid: int, threads: int) -> int:
    """Steps in which the CTAs of a grid write all RECORDS records of a role, one per thread and step.

    A grid of fewer CTAs also advances the records of the CTAs that it lacks, so grids of any size can take
    turns: CTA c writes c, c + grid, c + 2 * grid, ..., and reads only its own. Raises ValueError for more
    CTAs than records.
    """
    if grid > RECORDS:
        raise ValueError(f"a grid of {grid} CTAs: the state of a mailbox has {RECORDS} records per role")
    return -(-RECORDS // (grid * threads))


# ---- shards of the two-shot form ----


def two_shot_ranks() -> tuple[int, ...]:
    """Numbers of ranks over which the columns can be sharded: those where a CTA has one owner."""
    return tuple(ranks for ranks in range(1, CTAS + 1) if CTAS % ranks == 0)


def receive_columns(ranks: int) -> int:
    """Columns of one owner, 7168 / ranks.

    Raises ValueError unless ``ranks`` divides 7168 and every CTA's 64 columns have one owner.
    """
    if ranks < 1 or N % ranks:
        raise ValueError(f"ranks = {ranks} does not divide the {N} columns: choose one of {two_shot_ranks()}")
    if N // ranks % ROWS_PER_CTA:
        raise ValueError(
            f"ranks = {ranks} gives shards of {N} / {ranks} = {N // ranks} columns, no multiple of the "
            f"{ROWS_PER_CTA} columns of a CTA, so some CTAs would have two owners: choose one of "
            f"{two_shot_ranks()}"
        )
    return N // ranks


def owner(column: Whole, shard: int) -> Whole:
    """Rank that owns an output column; shard: columns per owner."""
    return column // shard


def shard_column(column: Whole, shard: int) -> Whole:
    """Column within its owner's shard."""
    return column % shard


# ---- who consumes what ----


def check_batch(tokens: int) -> None:
    """Raises ValueError unless a kernel can consume this many tokens."""
    if not 1 <= tokens <= MAX_BATCH:
        raise ValueError(f"batch = {tokens}: choose 1 to {MAX_BATCH}")


def consumer_threads(tokens: int) -> int:
    """Threads of a consuming CTA: one per chunk of its 64 columns, whole warps, at least 128."""
    chunks = CHUNKS_PER_CTA * tokens
    return max(MIN_CONSUMER_THREADS, -(-chunks // WARP_LANES) * WARP_LANES)


def consumed_chunk(index: Whole) -> tuple[Whole, Whole]:
    """(token, first column within the CTA's 64) of chunk ``index``: 8 neighbours are one token's 128
    bytes."""
    return index // CHUNKS_PER_CTA, index % CHUNKS_PER_CTA * CHUNK


def passes(chunks: int, threads: int) -> int:
    """Rounds in which ``threads`` threads take ``chunks`` chunks, one each per round."""
    return -(-chunks // threads)


def dealt_chunk(cta: Whole, thread: Whole, grid: int) -> Whole:
    """The first chunk of a thread when a grid shares out chunks 128 bytes at a time, CTA after CTA.

    Few chunks then land on many SMs, and still 8 neighbouring threads read one line. Every further round adds
    grid * threads chunks; threads is a multiple of 8.
    """
    return (thread // CHUNKS_PER_CTA * grid + cta) * CHUNKS_PER_CTA + thread % CHUNKS_PER_CTA


def second_shot_threads(tokens: int, ranks: int) -> int:
    """Threads of a CTA of the second shot: one per chunk of the owner's shard over 112 CTAs, whole warps."""
    per_cta = -(-tokens * (receive_columns(ranks) // CHUNK) // CTAS)
    return -(-per_cta // WARP_LANES) * WARP_LANES
