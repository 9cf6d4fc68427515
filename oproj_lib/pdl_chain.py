"""The real projection as a programmatic dependent of a small kernel that writes its x, on the virtual GPU; and what
its builds need of a multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from oproj_lib import vgpu
from oproj_lib.bench.small_kernels import CHUNK_BYTES, PREDECESSOR
from oproj_lib.kernels.configuration import Configuration
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.lessons.broken_pdl import NonCoherentWeights, TriggersBeforeWait
from oproj_lib.lessons.mutants import without
from oproj_lib.problem import ROWS_PER_CTA, N
from oproj_lib.program import Program
from oproj_lib.residency import Needs, needs_of
from oproj_lib.run import SENTINEL, SLOT, SLOTS, decoded
from oproj_lib.traced import build

PREDECESSOR_CTAS, PREDECESSOR_THREADS = 4, 128
CONSUMER_THREADS = ROWS_PER_CTA // 2
"""One 32-bit word, two outputs, per thread."""

RESIDUAL_CONSUMER = """.version 8.0
.target sm_90
.address_size 64
.file 1 "residual_consumer"
.visible .entry residual_consumer(.param .u64 p_partial, .param .u64 p_x, .param .u64 p_seen)
{
    .reg .pred %p0;
    .reg .b32 %lane, %size, %cta, %thread, %word, %x;
    .reg .b64 %partial, %px, %seen, %at, %row;
    mov.u32 %lane, %tid.x;
    mov.u32 %size, %ntid.x;
    mov.u32 %cta, %ctaid.x;
    mad.lo.u32 %thread, %cta, %size, %lane;
    mul.wide.u32 %at, %thread, 4;
    mul.wide.u32 %row, %lane, 4;
    ld.param.u64 %partial, [p_partial];
    ld.param.u64 %px, [p_x];
    ld.param.u64 %seen, [p_seen];
    add.u64 %partial, %partial, %at;
    add.u64 %px, %px, %row;
    add.u64 %seen, %seen, %at;
poll:
    .loc 1 1 0
    ld.volatile.global.b32 %word, [%partial];
    setp.eq.u32 %p0, %word, ARMED;
    @%p0 bra poll;
    .loc 1 2 0
    ld.global.b32 %x, [%px];
    .loc 1 3 0
    xor.b32 %word, %word, %x;
    st.global.b32 [%seen], %word;
    ret;
}
""".replace("ARMED", f"{SENTINEL}")
"""Polls the first token's partials (data is the flag), then reads x as well, without a griddepcontrol.wait."""


@dataclass(frozen=True)
class ProjectionRun:
    """grids: predecessor, projection and perhaps consumer, in the order of the stream. out: what the first CTAs
    published, [M, 64 * CTAs] BF16."""

    grids: tuple[vgpu.GridHandle, ...]
    out: np.ndarray

    @property
    def findings(self) -> tuple[tuple[str, vgpu.Finding], ...]:
        """(grid, finding) of all grids."""
        return tuple((grid.name, finding) for grid in self.grids for finding in grid.report.findings)

    def differing(self, other: ProjectionRun) -> int:
        """How many outputs have other bits."""
        return int((self.out.view(np.uint16) != other.out.view(np.uint16)).sum())


def run_behind(
    program: Program,
    x: np.ndarray,
    weight: np.ndarray,
    *,
    ctas: int = 2,
    cycles: int = 400,
    consumer: bool = False,
    schedule: str | int = "program",
) -> ProjectionRun:
    """Runs the first ``ctas`` CTAs of a projection behind ``bench.small_kernels.PREDECESSOR``, which copies x to
    where the projection reads it after it has worked for ``cycles`` steps.

    x [M, K], weight [7168, K] BF16. Before the predecessor has written it, x is all NaN. consumer: a third kernel,
    ``RESIDUAL_CONSUMER``. schedule: as for `VirtualGPU.synchronize`.

    Raises ValueError for a program of another transport than multicast, or another number of CTAs.
    """
    if not 1 <= ctas <= program.grid[0]:
        raise ValueError(
            f"ctas = {ctas}: {program.name} has {program.grid[0]}, choose 1 to {program.grid[0]}"
        )
    if program.config["transport"] != "multicast":
        raise ValueError(f"transport = {program.config['transport']!r}: build the program for 'multicast'")
    vgpu.warm_up()
    gpu = vgpu.VirtualGPU()
    source = gpu.upload(x, "the predecessor's own x")
    there = gpu.upload(np.full_like(x, np.nan), "x")
    mailbox = gpu.empty((SLOTS, x.shape[0], N), ml_dtypes.bfloat16, "mailbox")
    mailbox.array.view(np.uint32)[:] = SENTINEL
    chunks = x.size * x.itemsize // CHUNK_BYTES
    grids = [
        gpu.enqueue(
            vgpu.load(PREDECESSOR), grid=PREDECESSOR_CTAS, block=PREDECESSOR_THREADS,
            args=[there, source, chunks, cycles], name="predecessor",
        ),
        gpu.enqueue(
            decoded(program), program.entry, grid=(ctas, 1, 1), block=program.block, pdl=True, name="projection",
            args=[there, gpu.upload(weight, "weight"), mailbox, gpu.multicast([mailbox]), SLOT],
            dynamic_shared_bytes=program.dynamic_shared_bytes,
        ),
    ]  # fmt: skip
    if consumer:
        grids.append(_consumer(gpu, mailbox, there, ctas))
    gpu.synchronize(schedule)
    return ProjectionRun(tuple(grids), np.array(mailbox.array[SLOT, :, : ctas * ROWS_PER_CTA]))


def _consumer(gpu: vgpu.VirtualGPU, mailbox: vgpu.Buffer, x: vgpu.Buffer, ctas: int) -> vgpu.GridHandle:
    seen = gpu.empty((ctas * CONSUMER_THREADS,), np.uint32, "seen")
    partial = mailbox.address + SLOT * mailbox.array[0].nbytes
    options: dict[str, Any] = {"grid": ctas, "block": CONSUMER_THREADS, "name": "consumer", "pdl": True}
    return gpu.enqueue(vgpu.load(RESIDUAL_CONSUMER), args=[partial, x, seen], **options)


def variants(k: int, batch: int, target: str, staged_blocks: int | None = None) -> dict[str, Program]:
    """The producer "as it is", and with one mistake each: "wait missing", "trigger before the wait", "ld.global.nc".

    staged_blocks: None for the recommended configuration. Raises ValueError for what does not exist or fit.
    """
    given: dict[str, Any] = {} if staged_blocks is None else {"staged_blocks": staged_blocks}
    engine = OprojProducer.recommended(k, batch, **given)
    engine.plan(batch)
    program = build(engine, target=target, batch=batch)
    kinds = {"trigger before the wait": TriggersBeforeWait, "ld.global.nc": NonCoherentWeights}
    settings: dict[str, Any] = engine.settings()
    return {
        "as it is": program,
        "wait missing": without(program, "griddepcontrol.wait"),
        **{name: build(kind(k, **settings), target=target, batch=batch) for name, kind in kinds.items()},
    }


def needs_by_staging(k: int, batch: int, target: str, most: int = 3) -> list[Needs]:
    """What a CTA of the producer takes, by how many K blocks are staged: the fewest, the most, some in between."""
    tiles = OprojProducer.recommended(k, batch).config.group_tiles
    fitting = [n for n in range(k // 128 + 1) if _fits(k, n, tiles, batch)]
    chosen = [fitting[i * (len(fitting) - 1) // max(1, most - 1)] for i in range(most)]
    found = []
    for blocks in dict.fromkeys(chosen):
        engine = OprojProducer(k, staged_blocks=blocks, group_tiles=tiles)
        found.append(needs_of(build(engine, target=target, batch=batch), f"{blocks} staged blocks"))
    return found


def _fits(k: int, staged_blocks: int, group_tiles: int, batch: int) -> bool:
    try:
        Configuration(k, staged_blocks, group_tiles=group_tiles).plan(batch)
    except ValueError:
        return False
    return True
