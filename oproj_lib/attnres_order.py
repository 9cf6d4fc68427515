"""What AttnRes does before it polls and what after: bytes, counted in a trace, and the machine code, from the cubin.

Nothing here needs CuTe DSL or a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from oproj_lib.kernels.attnres_configuration import AttnResConfiguration
from oproj_lib.layouts import attnres as rows
from oproj_lib.program import Program
from oproj_lib.sass import ASYNC_COPY, TRIGGER, WAIT, Instruction, disassemble
from oproj_lib.trace_steps import access_bytes, function
from oproj_lib.vgpu.trace import Trace

# ---- what moves when ----

BEFORE, DURING, AFTER = "before the first poll", "polls", "after the last poll"
PHASES = (BEFORE, DURING, AFTER)
WEIGHTS, WRITTEN, SUMS = "norm_w, qk_w, out_w", "prefix, blocks", "sums of all ranks"
PREFIX, OUT = "P", "out"
_ARRAYS = {
    "load_row": WEIGHTS,
    "load_written_row": WRITTEN,
    "poll": SUMS,
    "store_prefix": PREFIX,
    "store_out": OUT,
}


def planned_traffic(config: AttnResConfiguration) -> dict[tuple[str, str], int]:
    """Bytes of global memory that one token needs, by (phase, array): every row is touched once, but for block rows
    that a thread cannot keep. Threads that poll their chunks in several pieces (``polled_chunks``) store some of P
    between the polls; this is the plan of those that poll once."""
    row = rows.row_bytes()
    weights = 2 * config.scored + config.out_norm
    written = config.blocks * (1 if config.holds_blocks else 2) + (not config.replace_prefix)
    counted = {
        (BEFORE, WEIGHTS): weights * row,
        (BEFORE, WRITTEN): written * row,
        (DURING, SUMS): config.ranks * row,
        (AFTER, PREFIX): row,
        (AFTER, OUT): row,
    }
    return {place: count for place, count in counted.items() if count}


def traffic(trace: Trace) -> dict[tuple[str, str], int]:
    """The same, counted in a trace of the CTA that consumed a token. A chunk that is polled in vain is not counted
    again. Each warp has its own first and last poll."""
    polls: dict[int, list[int]] = {}
    accesses: list[tuple[int, int, str, int]] = []
    for event in trace.events:
        if event.kind != "execute" or "global" not in event.op.instruction.opcode:
            continue
        what = _ARRAYS.get(function(event.op))
        if what == SUMS:
            polls.setdefault(event.warp, []).append(event.order)
        if what and event.op.guard is None:  # the loads of later rounds have a guard
            accesses.append((event.warp, event.order, what, event.lanes * access_bytes(event.op)))
    moved: Counter[tuple[str, str]] = Counter()
    for warp, order, what, count in accesses:
        mine = polls.get(warp, [0])
        phase = BEFORE if order < mine[0] else AFTER if order > mine[-1] else DURING
        moved[phase, what] += count
    return {
        (phase, what): moved[phase, what]
        for phase in PHASES
        for what in _ARRAYS.values()
        if moved[phase, what]
    }


# ---- the machine code ----

RELEASE, POLL, PARK, STORE, FIRST = (
    "release dependents",
    "poll the mailbox",
    "park sum e_s v_s",
    "store P, out",
    "copy W and x",
)
CODE_ROWS = (FIRST, RELEASE, WEIGHTS, WRITTEN, PARK, POLL, STORE, WAIT)


@dataclass(frozen=True)
class CodeOrder:
    """places: where in the machine code (number of the instruction) what of ``CODE_ROWS`` stands; length:
    instructions."""

    name: str
    places: Mapping[str, tuple[int, ...]]
    length: int

    @property
    def first_poll(self) -> int:
        return self.places[POLL][0]

    def before_the_poll(self, what: str) -> tuple[int, int]:
        """(how many stand above the first poll, how many there are)."""
        places = self.places[what]
        return sum(place < self.first_poll for place in places), len(places)


def code_order(program: Program) -> CodeOrder:
    """Disassembles the cubin of a kernel with AttnRes in it. Raises FileNotFoundError without nvdisasm."""
    code = disassemble(program.cubin)[program.entry]
    places: dict[str, list[int]] = {what: [] for what in CODE_ROWS}
    for number, instruction in enumerate(code):
        if what := _row_of(instruction):
            places[what].append(number)
    return CodeOrder(program.name, {what: tuple(found) for what, found in places.items()}, len(code))


def _row_of(instruction: Instruction) -> str | None:
    """What of ``CODE_ROWS`` an instruction is. All rows move in 16-byte accesses."""
    name, modifiers = instruction.name, instruction.opcode.split(".")
    if name in (TRIGGER, WAIT, ASYNC_COPY):
        return {TRIGGER: RELEASE, WAIT: WAIT, ASYNC_COPY: FIRST}[name]
    if "128" not in modifiers:
        return None
    if name == "LDG":
        if "STRONG" not in modifiers:
            return WEIGHTS
        return POLL if "SYS" in modifiers else WRITTEN
    if name == "STG":
        return None if "STRONG" in modifiers else STORE  # strong: arms the mailbox again
    return PARK if name == "STS" else None
