"""Small kernels in one stream, to see what programmatic dependent launch does: who starts when, and what goes wrong.

Three kernels of one warp per CTA, written in PTX from named steps:

    predecessor   works for a while, then writes what the others need ("x", and more if asked)
    projection    any order of ``STEPS``: y = W * x, stored where the table says
    consumer      polls y and then reads x as well, the residual, without a griddepcontrol.wait of its own

Everything is a whole number, so a result is right or wrong. Sources: PTX ISA, "griddepcontrol"; CUDA Programming
Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from oproj_lib import vgpu

CTAS, LANES = 2, 32
WORDS = CTAS * LANES
LOADS = ("load W", "load table", "load x")
STEPS = (*LOADS, "multiply", "store y", "wait", "trigger")
"""What the projection consists of. `load table` reads the address of y, `wait` is griddepcontrol.wait, `trigger`
griddepcontrol.launch_dependents."""
IN_ORDER = ("load W", "load table", "wait", "trigger", "load x", "multiply", "store y")
"""Nothing waits that need not, and nothing is too early."""
BUFFERS = ("x", "W", "table")
"""What the predecessor may write."""
TRIGGERS = ("never", "late", "early")
"""When the predecessor triggers: implicitly, as its CTAs exit; after its last store; as its first instruction."""
X, WEIGHT = 1000, 3
"""x[i] = 1000 + i, W[i] = 3: what y must be follows."""

_HEAD = """.version 8.0
.target sm_90
.address_size 64
.file 1 "{name}"
.visible .entry {name}(.param .u64 p_x, .param .u64 p_w, .param .u64 p_table, .param .u64 p_y, .param .u64 p_seen)
{{
    .reg .pred %p<3>;
    .reg .b32 %lane, %cta, %thread, %i, %w, %x, %value, %part;
    .reg .b64 %bytes, %px, %pw, %ptable, %py, %pseen, %to, %t;
    mov.u32 %lane, %tid.x;
    mov.u32 %cta, %ctaid.x;
    mad.lo.u32 %thread, %cta, 32, %lane;
    mul.wide.u32 %bytes, %thread, 4;
    ld.param.u64 %px, [p_x];
    ld.param.u64 %pw, [p_w];
    ld.param.u64 %ptable, [p_table];
    ld.param.u64 %py, [p_y];
    ld.param.u64 %pseen, [p_seen];
    add.u64 %px, %px, %bytes;
    add.u64 %pw, %pw, %bytes;
    add.u64 %pseen, %pseen, %bytes;
"""


def _loop(times: int) -> list[str]:
    """Work that takes its time: `times` rounds of three instructions."""
    return [
        "mov.u32 %i, 0;",
        "again:",
        "add.u32 %i, %i, 1;",
        f"setp.lt.u32 %p0, %i, {times};",
        "@%p0 bra again;",
    ]


def _step(name: str, preload: int) -> list[str]:
    """PTX of one step of the projection. preload: loads of W, all of the same word."""
    body = {
        "load W": ["mov.u32 %w, 0;", *["ld.global.u32 %part, [%pw];", "max.u32 %w, %w, %part;"] * preload],
        "load table": ["ld.global.u64 %to, [%ptable];"],
        "load x": ["ld.global.u32 %x, [%px];"],
        "multiply": ["mul.lo.u32 %value, %w, %x;"],
        "store y": ["add.u64 %to, %to, %bytes;", "st.relaxed.gpu.global.u32 [%to], %value;"],
        "wait": ["griddepcontrol.wait;"],
        "trigger": ["griddepcontrol.launch_dependents;"],
    }
    return body[name]


def _kernel(name: str, steps: Sequence[Sequence[str]]) -> vgpu.Module:
    """Line n of a finding is step n, counted from 1."""
    lines = [_HEAD.format(name=name)]
    for number, step in enumerate(steps, 1):
        for instruction in step:
            if not instruction.endswith(":"):
                lines.append(f"    .loc 1 {number} 0")
            lines.append(f"    {instruction}")
    return vgpu.load("\n".join([*lines, "    .loc 1 0 0", "    ret;", "}", ""]))


def _predecessor(trigger: str, work: int, writes: Sequence[str]) -> vgpu.Module:
    stores = {
        "x": [f"add.u32 %x, %thread, {X};", "st.global.u32 [%px], %x;"],
        "W": [f"mov.u32 %w, {WEIGHT};", "st.global.u32 [%pw], %w;"],
        "table": ["setp.eq.u32 %p1, %thread, 0;", "@%p1 st.global.u64 [%ptable], %py;"],
    }
    go = _step("trigger", 0)
    steps = [_loop(work), *(stores[name] for name in writes)]
    return _kernel("predecessor", {"never": steps, "late": [*steps, go], "early": [go, *steps]}[trigger])


_CONSUMER = [
    ["poll:", "ld.volatile.global.u32 %value, [%py];", "setp.eq.u32 %p0, %value, 0;", "@%p0 bra poll;"],
    ["ld.global.u32 %x, [%px];"],
    ["add.u32 %value, %value, %x;", "st.global.u32 [%pseen], %value;"],
]


@dataclass(frozen=True)
class ChainRun:
    """What became of a chain. grids: in the order of the stream; seen: what came out, y or (with a consumer)
    y + x, [64] u32; wrong: how many of these are not what they must be."""

    grids: tuple[vgpu.GridHandle, ...]
    seen: np.ndarray
    wrong: int

    @property
    def findings(self) -> tuple[tuple[str, vgpu.Finding], ...]:
        """(grid, finding) of all grids."""
        return tuple((grid.name, finding) for grid in self.grids for finding in grid.report.findings)

    @property
    def started_early(self) -> bool:
        """Whether the projection ran beside the predecessor."""
        first, second = self.grids[0].times, self.grids[1].times
        return first.end is not None and second.start is not None and second.start < first.end

    @property
    def overlaps(self) -> bool:
        """Whether a thread of the projection was at its wait before the predecessor had ended."""
        first, second = self.grids[0].times, self.grids[1].times
        return None not in (first.end, second.wait_begin) and second.wait_begin < first.end  # type: ignore[operator]

    @property
    def exposed(self) -> int:
        """Steps from the end of the predecessor to the end of the projection."""
        first, second = self.grids[0].times, self.grids[1].times
        if first.end is None or second.end is None:
            raise ValueError("a grid of this chain never ended, so nothing can be said about its time")
        return second.end - first.end


def run_chain(
    steps: Sequence[str] = IN_ORDER,
    *,
    trigger: str = "early",
    pdl: bool = True,
    work: int = 16,
    preload: int = 4,
    writes: Sequence[str] = ("x",),
    consumer: bool = False,
    schedule: str | int = "program",
) -> ChainRun:
    """Runs predecessor, projection and, if asked, consumer in one stream of the virtual GPU.

    steps: the projection's, in this order. trigger: the predecessor's, see ``TRIGGERS``. pdl: whether projection
    and consumer have the launch attribute. work: rounds of the predecessor's loop. preload: loads of W. writes:
    what the predecessor writes, of ``BUFFERS``; what it does not write is there from the start. schedule: see
    `VirtualGPU.synchronize`.

    Raises ValueError for unknown steps, triggers or buffers, and for no work or no loads.
    """
    for what, given, known in (("steps", steps, STEPS), ("writes", writes, BUFFERS)):
        if unknown := [name for name in given if name not in known]:
            raise ValueError(
                f"{what}: {', '.join(map(repr, unknown))} unknown; choose from {', '.join(known)}"
            )
    if trigger not in TRIGGERS:
        raise ValueError(f"trigger = {trigger!r}: choose from {', '.join(TRIGGERS)}")
    if work < 1 or preload < 1:
        raise ValueError(f"work = {work}, preload = {preload}: choose at least 1 of each")
    gpu = vgpu.VirtualGPU()
    ready = {"x": np.arange(X, X + WORDS, dtype=np.uint32), "W": np.full(WORDS, WEIGHT, np.uint32)}
    x, weights = (gpu.upload(np.zeros_like(v) if n in writes else v, n) for n, v in ready.items())
    y, seen = (gpu.upload(np.zeros(WORDS, np.uint32), name) for name in ("y", "seen"))
    stale = gpu.upload(np.zeros(WORDS, np.uint32), "where y was before")
    table = gpu.upload(np.array([(stale if "table" in writes else y).address], np.uint64), "table")
    modules = {
        "predecessor": _predecessor(trigger, work, writes),
        "projection": _kernel("projection", [_step(name, preload) for name in steps]),
    }
    if consumer:
        modules["consumer"] = _kernel("consumer", [["add.u64 %py, %py, %bytes;"], *_CONSUMER])
    grids = tuple(
        gpu.enqueue(module, grid=CTAS, block=LANES, args=[x, weights, table, y, seen], name=name,
                    pdl=pdl and name != "predecessor")
        for name, module in modules.items()
    )  # fmt: skip
    gpu.synchronize(schedule)
    product = ready["W"] * ready["x"]
    out = np.array((seen if consumer else y).array)
    return ChainRun(grids, out, int((out != (product + ready["x"] if consumer else product)).sum()))


def first_overlapping_schedule(first: int = 0, **options: Any) -> int:
    """The first seed, from this one on, under which the projection comes to its wait while the predecessor runs: a
    GPU need not start it early, nor give it a turn. Options: as for ``run_chain``.

    Raises ValueError if none of 50 does.
    """
    for seed in range(first, first + 50):
        if run_chain(schedule=seed, **options).overlaps:
            return seed
    raise ValueError(
        f"no overlap under the schedules {first} to {first + 49}: does the predecessor trigger long before its end?"
    )
