"""In which order ptxas left the loads and the PDL wait: what a preload is in the end.

Read from the cubin by nvdisasm (see ``sass``); no GPU. A load is known by its opcode: of the producer's kernels
only weights pass by the L1 (``ld.global.L1::no_allocate``, in SASS ``LDG...NA``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from oproj_lib.program import Program
from oproj_lib.sass import ASYNC_COPY, TRIGGER, WAIT, Instruction, disassemble

WEIGHTS, STAGED, X, MATRIX = "weights to registers", "cp.async", "x to registers", "matrix instruction"
GO, OTHER = "trigger", "anything else"
KINDS = (WEIGHTS, STAGED, WAIT, GO, X, MATRIX, OTHER)


@dataclass(frozen=True)
class LoadOrder:
    """The machine code of one kernel, in address order: every instruction and its kind."""

    name: str
    code: tuple[Instruction, ...]
    kinds: tuple[str, ...]

    @property
    def wait(self) -> int:
        """Index of ACQBULK. Raises ValueError if there is none."""
        if WAIT not in self.kinds:
            raise ValueError(f"{self.name} has no {WAIT}: nothing stands before or after it")
        return self.kinds.index(WAIT)

    def before(self, kind: str) -> int:
        """How many instructions of a kind stand above the wait."""
        return self.kinds[: self.wait].count(kind)

    def after(self, kind: str) -> int:
        """How many stand below it."""
        return self.kinds[self.wait :].count(kind)

    def listing(self) -> str:
        """Loads, wait and trigger, one line per run of the same opcode: `12 x LDG.E.NA.128`."""
        shown = [
            instruction.opcode
            for instruction, kind in zip(self.code, self.kinds, strict=True)
            if kind not in (MATRIX, OTHER)
        ]
        runs = [(opcode, len(list(group))) for opcode, group in itertools.groupby(shown)]
        return "\n".join(f"{count:3d} x {opcode}" for opcode, count in runs)


def load_order(program: Program, name: str = "") -> LoadOrder:
    """Disassembles a producer's cubin.

    Raises FileNotFoundError without nvdisasm, ValueError for a program without machine code.
    """
    if not program.cubin:
        raise ValueError(f"{program.name} has no cubin: it was changed after it was compiled")
    code = disassemble(program.cubin)[program.entry]
    return LoadOrder(name or program.name, code, kinds(code))


def kinds(code: Sequence[Instruction]) -> tuple[str, ...]:
    """What each instruction is for, of ``KINDS``."""
    return tuple(_kind(instruction) for instruction in code)


def _kind(instruction: Instruction) -> str:
    modifiers = instruction.opcode.split(".")
    if instruction.name == "LDG" and "128" in modifiers:
        return WEIGHTS if "NA" in modifiers else X
    names = {ASYNC_COPY: STAGED, WAIT: WAIT, TRIGGER: GO, "HMMA": MATRIX}
    return names.get(instruction.name, OTHER)
