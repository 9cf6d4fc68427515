"""Which AttnRes builds exist. Every rule stands here once; nothing here needs CuTe DSL or a GPU.

Invalid configurations raise ValueError with the arithmetic that failed and the choices that are left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from oproj_lib.layouts import attnres as layout
from oproj_lib.layouts.attnres import ROW_CHUNKS
from oproj_lib.problem import MAX_BATCH, N

MAX_BLOCKS = 8
THREAD_CHOICES = (128, 224, 448, 896)
"""Whole warps, at least four, among which a row's 896 chunks divide evenly: 7, 4, 2, 1 chunks a thread."""
DEFAULT_THREADS = 448
"""16 columns a thread: half the shuffles of 896 threads, and the words of 8 ranks fit into registers at once."""
MAX_RANKS = 72
"""GPUs of the largest NVLink domain (NVL72)."""
DEFAULT_EPS = 1e-6
SMALLEST_EPS = 2.0**-126
"""Smallest normal FP32 number."""
WORDS = 4
"""32-bit words of a chunk."""
HELD_WORDS = 112
"""Words of block rows that a thread keeps in registers; more are read a second time."""
OTHER_REGISTERS = 20
"""Calibrated on 4.8.1's ptxas, see ``AttnResConfiguration.register_need``."""
MAX_POLLED_CHUNKS = 16
"""Chunks that a thread polls together, 4 registers each: 2 chunks of 8 ranks."""


@dataclass(frozen=True)
class AttnResConfiguration:
    """An AttnRes build, checked when created.

    blocks: earlier block outputs, NB; ranks: slots that are summed (1 for the result mailbox of the two-shot
    form); tokens: M; replace_prefix: P is delta alone; out_norm: normalise the mix; eps, out_eps: of the two
    norms; threads: per CTA, part of the summation order.
    """

    blocks: int
    ranks: int
    tokens: int
    replace_prefix: bool = False
    out_norm: bool = True
    eps: float = DEFAULT_EPS
    out_eps: float = DEFAULT_EPS
    threads: int = DEFAULT_THREADS

    def __post_init__(self) -> None:
        for name in ("blocks", "ranks", "tokens", "threads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} = {value!r} is a {type(value).__name__}; it must be an int")
        for name in ("replace_prefix", "out_norm"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} = {getattr(self, name)!r}: choose True or False")
        if not 0 <= self.blocks <= MAX_BLOCKS:
            raise ValueError(f"blocks = {self.blocks}: earlier block outputs; choose 0 to {MAX_BLOCKS}")
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"ranks = {self.ranks}: slots to sum; choose 1 to {MAX_RANKS}")
        if not 1 <= self.tokens <= MAX_BATCH:
            raise ValueError(f"tokens = {self.tokens}: one CTA per token; choose 1 to {MAX_BATCH}")
        if self.threads not in THREAD_CHOICES:
            raise ValueError(
                f"threads = {self.threads}: a row has {N} / 8 = {ROW_CHUNKS} chunks, and {ROW_CHUNKS} / "
                f"{self.threads} is not a whole number of chunks for whole warps; choose from {THREAD_CHOICES}"
            )
        for name in ("eps", "out_eps"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < SMALLEST_EPS:
                raise ValueError(
                    f"{name} = {value!r}: 1 / sqrt(0 + {name}) of a row of zeros must be an FP32 number; choose "
                    f"a finite {name} of at least 2**-126 = {SMALLEST_EPS:.3g}"
                )

    @property
    def chunks(self) -> int:
        """16-byte chunks of a row per thread."""
        return layout.chunks_per_thread(self.threads)

    @property
    def polled_chunks(self) -> int:
        """Chunks that a thread polls together: half of its registers, or less."""
        return min(MAX_POLLED_CHUNKS, registers_per_thread(self.threads) // 2 // WORDS)

    @property
    def scored(self) -> bool:
        """Whether there is anything to choose among: without blocks the mix is P."""
        return self.blocks > 0

    @property
    def holds_blocks(self) -> bool:
        """Whether a thread keeps its chunks of the block rows from the scores to the mix."""
        return self.blocks * self.chunks * WORDS <= HELD_WORDS

    @property
    def register_need(self) -> int:
        """Registers per thread below which ptxas spills.

        Alive together: the score weights in FP32, and either the block rows or, during the poll, the rows of prefix
        and out_w beside the polled words. What ptxas needs on top is calibrated on fused builds of 512 threads,
        which have 128 registers: 128, 224 and 448 threads, 0 to 8 blocks, 1 to 72 ranks, both targets. The estimate
        errs on the safe side: with 128 threads, no blocks and 2 ranks it refuses what would just fit.
        """
        row = WORDS * self.chunks
        weights = 2 * row if self.scored else 0
        held = row * self.blocks if self.holds_blocks else 0
        polled = WORDS * min(self.polled_chunks, self.ranks * self.chunks)
        early = row * (int(not self.replace_prefix) + int(self.out_norm))
        return weights + max(held, early + polled) + OTHER_REGISTERS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        return layout.area_bytes(self.blocks, self.threads)

    @property
    def block_rows(self) -> int:
        """Second extent of the ``blocks`` tensor: NB, and 1 that is never read where NB = 0."""
        return max(1, self.blocks)


def registers_per_thread(threads: int) -> int:
    """Registers of a thread when its CTA has the SM to itself: each of the SM's four partitions has 16384 for
    its quarter of the warps, dealt out by eights, and an instruction can name 255."""
    warps_per_partition = -(-threads // (4 * 32))
    return min(255, 16384 // (32 * warps_per_partition) // 8 * 8)
