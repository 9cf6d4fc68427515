"""Which Python function an executed instruction comes from, and what it moved: a report, read by function.

The virtual GPU counts per PTX line, and PTX lines name Python lines. Here both are joined, so that a
notebook can
say "the loads of `weight_fragment`" where the report says "PTX line 342".
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath

from rich.table import Table

from oproj_lib import vgpu
from oproj_lib.program import Program, source_path
from oproj_lib.run import decoded

ADDRESSES = "layouts (addresses)"
"""Name for the functions of layouts/ and kernels/lane.py: they only compute where things are."""
KINDS = ("memory", "matrix", "synchronisation", "arithmetic")
_END = "exit"  # the decoder's own last instruction, behind the `ret` of the PTX: nobody gets there
_SYNCHRONISATION = (
    "griddepcontrol",
    "bar.",
    "barrier.",
    "cp.async.commit",
    "cp.async.wait",
    "mbarrier",
    "fence",
)
_MEMORY = ("ld.global", "st.global", "ld.shared", "st.shared", "cp.async", "multimem", "red.", "atom.")


@dataclass(frozen=True)
class Step:
    """One PTX instruction of a launch.

    Attributes:
        index: its place in program order, from 0.
        line: its line in the PTX.
        opcode: such as "ld.shared.v4.b32".
        function: the Python function that made it; all of layouts/ is ADDRESSES.
        kind: one of KINDS.
        threads: how many threads of the whole grid executed it.
    """

    index: int
    line: int
    opcode: str
    function: str
    kind: str
    threads: int


@dataclass(frozen=True)
class Traffic:
    """What the memory instructions of one function and opcode moved, over the whole grid.

    instructions: PTX instructions per thread; requests: warps that executed one; bytes; sectors: 32-byte
    pieces
    of global memory; wavefronts: passes through shared memory, and how many it takes without bank conflicts.
    """

    instructions: int = 0
    requests: int = 0
    bytes: int = 0
    sectors: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        names = self.__dataclass_fields__
        return Traffic(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def sectors_per_request(self) -> float:
        return self.sectors / self.requests

    @property
    def conflicts(self) -> int:
        """Wavefronts that bank conflicts added."""
        return self.wavefronts - self.ideal_wavefronts


@cache
def _functions(file: str) -> tuple[tuple[int, int, str], ...]:
    """(first line, last line, name) of every function in a source file, outer ones first."""
    tree = ast.parse(source_path(file).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    # A decorated function begins at its decorator: that is the line the compiler gives to its prologue.
    return tuple(
        (min([node.lineno, *(line.lineno for line in node.decorator_list)]), node.end_lineno or 0, node.name)
        for node in found
    )


def function_of(source: vgpu.SourceLine | None) -> str:
    """The innermost function around a source line; "" where the compiler named no line."""
    if source is None:
        return ""
    path = PurePosixPath(source.file)
    if path.parent.name == "layouts" or path.name == "lane.py":
        return ADDRESSES
    around = [(first, name) for first, last, name in _functions(source.file) if first <= source.line <= last]
    return max(around)[1] if around else path.stem


def source_text(source: vgpu.SourceLine | None) -> str:
    """The source line itself, without its indentation; "" where the compiler named no line."""
    if source is None:
        return ""
    return source_path(source.file).read_text(encoding="utf-8").splitlines()[source.line - 1].strip()


def kind_of(opcode: str) -> str:
    """What an instruction is for, one of KINDS."""
    if opcode.startswith("mma."):
        return "matrix"
    if opcode.startswith(_SYNCHRONISATION):
        return "synchronisation"
    return "memory" if opcode.startswith(_MEMORY) else "arithmetic"


def steps(program: Program, report: vgpu.Report) -> tuple[Step, ...]:
    """Every PTX instruction of a launch in program order, with the threads that executed it."""
    ops = [op for op in decoded(program).code(program.entry).ops if op.instruction.text != _END]
    on_line = Counter(op.instruction.line for op in ops)
    executed = report.counters.thread_instructions_by_line
    return tuple(
        Step(
            op.index,
            op.instruction.line,
            op.instruction.opcode,
            function_of(op.instruction.source),
            kind_of(op.instruction.opcode),
            # Several instructions on one line come from one inline assembly text: all execute equally often.
            executed.get(op.instruction.line, 0) // on_line[op.instruction.line],
        )
        for op in ops
    )


def traffic(program: Program, report: vgpu.Report) -> Mapping[tuple[str, str], Traffic]:
    """(function, opcode) -> what it moved, in program order; only instructions that touch memory."""
    by_line = report.counters.by_line
    totals: dict[tuple[str, str], Traffic] = {}
    for step in steps(program, report):
        # The report counts per line, and an inline assembly text may put a predicated load beside moves.
        if step.kind != "memory" or step.line not in by_line:
            continue
        count = by_line[step.line]
        moved = Traffic(
            1, count.executions, count.bytes, count.sectors, count.wavefronts, count.ideal_wavefronts
        )
        key = step.function, step.opcode
        totals[key] = totals.get(key, Traffic()) + moved
    return totals


def traffic_of(program: Program, report: vgpu.Report, function: str, opcode: str = "") -> Traffic:
    """The sum over one function's instructions whose opcode starts with `opcode`.

    Raises:
        ValueError: if there are none, with the names that exist.
    """
    table = traffic(program, report)
    found = [moved for (name, op), moved in table.items() if name == function and op.startswith(opcode)]
    if not found:
        known = ", ".join(f"{name} ({op})" for name, op in table)
        raise ValueError(
            f"{function!r} has no memory instruction that starts with {opcode!r}; there are {known}"
        )
    return sum(found, Traffic())


def bytes_table(moved: Mapping[tuple[str, str], Traffic]) -> Table:
    """What each function moved between global memory and the SMs, as counted by the virtual GPU."""
    table = Table(title="global memory, whole grid, counted by the virtual GPU")
    for name in ("function", "instruction"):
        table.add_column(name)
    for name in ("per thread", "requests", "bytes", "sectors each", "bytes used of 32"):
        table.add_column(name, justify="right")
    for (function, opcode), step in moved.items():
        if step.sectors:
            table.add_row(
                function,
                opcode,
                f"{step.instructions}",
                f"{step.requests:,}",
                f"{step.bytes:,}",
                f"{step.sectors_per_request:g}",
                f"{step.bytes / step.sectors:g}",
            )
    return table
