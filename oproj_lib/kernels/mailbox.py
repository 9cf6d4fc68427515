"""The Lamport mailbox: data that is its own flag, three generations, and who may touch what when.

A mailbox is BF16 [slots, tokens, columns], one copy per rank, slots = 3 generations x ranks. Memory is *armed*
with the word 0x80008000. A writer publishes 16-byte chunks without a -0.0 half; a reader polls a chunk until
none of its four words is armed. Nothing else may be inferred from an arrived word: not that its neighbours are
there, nor that any other store of the writer is.

Call n (one after the other on every rank) does, on rank r:

    publish   into generation n % 3 of every rank's copy, slot of r
    re-arm    generation (n - 1) % 3 of the own copy, all slots, the tokens of call n - 1
    poll      generation n % 3 of the own copy, and sum

Why three generations are enough. A slot that call n re-arms is written next by call n + 2 of a peer p. p starts
call n + 2 after it has consumed call n + 1, which needs what r published in call n + 1, which r did after its
own call n had completed, re-arming included. And it is armed in time: what p publishes in call n + 2 falls on
memory that r re-armed in call n. With two generations the next writer is call n + 1 of p, which needs
only what r *published* in call n: a slow r would wipe out fresh data while re-arming, and poll for ever. Ranks
are at most one call apart at a publish for the same reason, so a fourth generation would stay unused.

Why "had completed" holds although consumers skip ``griddepcontrol.wait`` before they poll (P = producer of a
call, C = its consumer, programmatic dependents of each other, in this order on one stream). P triggers after
its own wait, so C of call n starts when everything before P has completed; it may read its own generation
record (past L1, see ``mailbox_primitives.load_word``) and re-arm right away. C waits *after* it has polled, as
its last act: it cannot complete before P has, so whoever waits for C has waited for P too, and P's record of
the next generation is there when P of call n + 1 reads it, after *its* wait. The kernels between C and the
next P need their own waits, or launches without the PDL attribute. Completion of a grid brings its stores to
L2, where stores of peers arrive too, hence re-arming comes before the peer's next store although neither is a
release.

The generation is kept in records that the CTAs write for themselves (``layouts.mailbox``): a captured CUDA
graph replays with new generations, and no host argument changes. Kernels built for different batches and
grids share a mailbox and its state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from oproj_lib.kernels import mailbox_primitives, primitives
from oproj_lib.kernels.mailbox_primitives import ALL_WORDS
from oproj_lib.kernels.transport import MAX_RANKS, Mailbox
from oproj_lib.layouts import mailbox as layout
from oproj_lib.layouts.fragments import BF16_BYTES, CHUNK, CHUNK_BYTES
from oproj_lib.layouts.mailbox import Role

RECORD_BYTES = 4
POLLED_TOGETHER = 16
"""Slots whose loads are in flight together: 4 registers each."""
CONSUMERS_BARRIER = 3
"""Named barrier of the consuming threads of a CTA. Ids 0 to 2 are the engines'."""


@dataclass(frozen=True)
class Turn:
    """This call as a consumer sees it: Int32 generations, and the tokens of the last call."""

    generation: Int32
    previous: Int32
    previous_tokens: Int32


@dataclass(frozen=True)
class Crew:
    """Who consumes. cta and thread are traced; grid: CTAs; threads: consuming threads per CTA.

    Threads of a CTA that do not consume (the MMA warp of ``OprojUmma``) are not counted.
    """

    cta: Int32
    thread: Int32
    grid: int
    threads: int

    @property
    def first_chunk(self) -> Int32:
        """The first chunk of this thread when the whole grid shares out chunks; the next is ``size`` later."""
        return layout.dealt_chunk(self.cta, self.thread, self.grid)

    @property
    def size(self) -> int:
        """Consuming threads of the grid."""
        return self.grid * self.threads


class Generations:
    """Reads and advances the state of one mailbox. ``state`` arguments are its Int64 address."""

    def load(self, state: Int64, role: Role, cta: Int32) -> Int32:
        """This CTA's record of a role, in every calling thread."""
        address = state + Int64(layout.record(role, cta)) * RECORD_BYTES
        return mailbox_primitives.load_word(address, 0)

    def next(self, generation: Int32) -> Int32:
        """Generation of the call after."""
        return layout.next_generation(generation)

    def previous(self, generation: Int32) -> Int32:
        """Generation of the call before: the one to arm again."""
        return layout.previous_generation(generation)

    def publishing(self, state: Int64, cta: Int32) -> Int32:
        """Generation to publish into. Only after ``griddepcontrol.wait``."""
        return self.load(state, Role.PUBLISH, cta)

    def consuming(self, state: Int64, cta: Int32) -> Turn:
        """Generations to poll and to arm again. Needs no wait where the producer triggers after its own."""
        generation = self.load(state, Role.CONSUME, cta)
        return Turn(
            generation=generation,
            previous=self.previous(generation),
            previous_tokens=self.load(state, Role.TOKENS, cta),
        )

    def published(self, state: Int64, generation: Int32, crew: Crew) -> None:
        """The publish records move on. All threads of the CTA have read theirs: a barrier lies between."""
        self.store(state, Role.PUBLISH, self.next(generation), crew)

    def consumed(self, state: Int64, turn: Turn, tokens: int, crew: Crew) -> None:
        """The consume records move on, and remember the tokens of this call; a barrier as for
        ``published``."""
        self.store(state, Role.CONSUME, self.next(turn.generation), crew)
        self.store(state, Role.TOKENS, Int32(tokens), crew)

    def store(self, state: Int64, role: Role, word: Int32, crew: Crew) -> None:
        """Write this CTA's record and those of the CTAs that this grid lacks."""
        for step in range(layout.record_steps(crew.grid, crew.threads)):
            lacking = (step * crew.threads + crew.thread) * crew.grid
            cta = crew.cta + lacking
            address = state + Int64(layout.record(role, cta)) * RECORD_BYTES
            mailbox_primitives.store_word(address, 0, word, cta < layout.RECORDS)


class MailboxReader:
    """Device functions of whoever consumes a mailbox of ``ranks`` ranks.

    Raises ValueError for a number of ranks that no NVLink domain has.
    """

    def __init__(self, ranks: int) -> None:
        if not 1 <= ranks <= MAX_RANKS:
            raise ValueError(f"mailbox of {ranks} ranks: choose 1 to {MAX_RANKS}")
        self.ranks = ranks
        self.generations = Generations()

    def check(self, box: Mailbox) -> None:
        """Raises ValueError unless the mailbox has a slot per rank and generation."""
        slots = layout.slots_of(self.ranks)
        if box.slots != slots:
            raise ValueError(
                f"mailbox of {box.slots} slots: {layout.GENERATIONS} generations * {self.ranks} ranks = {slots}"
            )

    def slot_bytes(self, box: Mailbox) -> int:
        """Bytes of one slot."""
        return box.tokens * box.columns * BF16_BYTES

    @cute.jit
    def rearm(
        self, base: Int64, box: cutlass.Constexpr, turn: cutlass.Constexpr, crew: cutlass.Constexpr
    ) -> None:
        """Arm every slot of the generation that the last call read, over that call's tokens.

        base: address of the own copy, never the multicast one. The chunks are dealt out to all consuming
        threads of the grid: which of them reads which chunk does not matter, the last call has completed.
        """
        first = base + self.generation_offset(turn.previous, box)
        chunks = turn.previous_tokens * (box.columns // CHUNK)
        for chunk in cutlass.range(crew.first_chunk, chunks, crew.size, unroll=1):
            address = first + Int64(chunk) * CHUNK_BYTES
            for rank in cutlass.range_constexpr(self.ranks):
                self.arm(address, rank * self.slot_bytes(box))

    def arm(self, address: Int64, offset: int) -> None:
        """One chunk of the generation read last call."""
        mailbox_primitives.arm_chunk(address, offset)

    def generation_offset(self, generation: Int32, box: Mailbox) -> Int64:
        """Bytes from the start of the mailbox to a generation."""
        return Int64(layout.slot(generation, 0, self.ranks)) * self.slot_bytes(box)

    def sum_chunk(self, base: Int64, box: Mailbox, turn: Turn, token: Int32, column: Int32) -> list[Float32]:
        """Wait for a chunk of every rank, and add them in rank order: 8 FP32, each add rounded to nearest.

        token and column (a multiple of 8) say where in a slot. One rank's chunk is passed on as it is.
        """
        chunk = Int64(token * box.columns + column) * BF16_BYTES
        address = base + self.generation_offset(turn.generation, box) + chunk
        sums: list[Float32] = []
        for first in range(0, self.ranks, POLLED_TOGETHER):
            ranks = range(first, min(first + POLLED_TOGETHER, self.ranks))
            for words in self.poll(address, [rank * self.slot_bytes(box) for rank in ranks]):
                values = mailbox_primitives.widen(words)
                sums = (
                    [primitives.add_float(a, b) for a, b in zip(sums, values, strict=True)]
                    if sums
                    else values
                )
        return sums

    def poll(self, address: Int64, offsets: Sequence[int]) -> list[primitives.Words4]:
        """The chunks at ``address + offsets`` when they have arrived."""
        return mailbox_primitives.poll_chunks(address, offsets, ALL_WORDS)

    def barrier(self, crew: Crew) -> None:
        """All consuming threads of the CTA have read their records, so they may be written."""
        cute.arch.barrier(barrier_id=CONSUMERS_BARRIER, number_of_threads=crew.threads)
