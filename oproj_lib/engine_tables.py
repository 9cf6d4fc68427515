"""The two engines with a ring, side by side: what they share, and which instructions they issue."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from typing import Any

from rich.table import Table

from oproj_lib.kernels.ring_engine import RingEngine
from oproj_lib.kernels.umma import OprojUmma
from oproj_lib.kernels.wgmma import OprojWgmma
from oproj_lib.program import Program

ENGINES = (RingEngine, OprojWgmma, OprojUmma)
COMPARED = ("cp", "mbarrier", "fence", "wgmma", "tcgen05", "elect", "bar", "griddepcontrol", "multimem")
"""First words of the opcodes that say how an engine works; the rest is address arithmetic."""


def source_lines(owner: type, name: str) -> int:
    """Lines of a method that a class defines itself, documentation included; 0 where it inherits or lacks
    it."""
    member = vars(owner).get(name)
    if member is None:
        return 0
    function: Any = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    return len(inspect.getsourcelines(inspect.unwrap(function))[0])


def method_lines() -> dict[str, tuple[int, int, int]]:
    """Method -> lines in (RingEngine, OprojWgmma, OprojUmma), for every method that one of them defines."""
    names = [
        name
        for owner in ENGINES
        for name, member in vars(owner).items()
        if (callable(member) or isinstance(member, property | staticmethod | classmethod))
        and (not name.startswith("_") or name in ("__init__", "__call__"))
    ]
    wanted = [name for name in dict.fromkeys(names) if name != "configuration"]
    return {name: tuple(source_lines(owner, name) for owner in ENGINES) for name in wanted}  # type: ignore[misc]


def shared_table() -> Table:
    """Which method stands where, with its number of lines."""
    table = Table(title="lines of each method, and the class that has it")
    for name in ("method", "RingEngine", "OprojWgmma", "OprojUmma"):
        table.add_column(name, justify="left" if name == "method" else "right")
    total = Counter[int]()
    for name, lines in method_lines().items():
        table.add_row(name, *(str(count or "") for count in lines))
        total.update(dict(enumerate(lines)))
    table.add_section()
    table.add_row("all", *(str(total[i]) for i in range(len(ENGINES))))
    return table


def opcode_counts(program: Program) -> Counter[str]:
    """How often each instruction of ``COMPARED`` stands in a program's PTX, without its type qualifiers."""
    found: Counter[str] = Counter()
    pattern = re.compile(rf"(?<![\w.%/])(?:{'|'.join(COMPARED)})\.[\w.:]+")
    for line in program.ptx.splitlines():
        statement = line.split("//")[0].strip()
        if not statement.startswith("."):  # directives: file names
            found.update(plain_opcode(opcode) for opcode in pattern.findall(statement))
    return found


def plain_opcode(opcode: str) -> str:
    """``wgmma.mma_async.sync.aligned.m64n16k16...`` is ``wgmma.mma_async``: two words; three where the second
    says little."""
    words = opcode.split(".")
    count = 3 if words[:2] in (["cp", "async"], ["fence", "proxy"]) else 2
    kept = [word for word in words[:count] if word not in ("cg", "shared::cta")]
    if words[:3] == ["cp", "async", "mbarrier"]:
        kept.append("arrive")
    return ".".join(kept)


def instruction_table(hopper: Program, blackwell: Program) -> Table:
    """Instructions in the PTX of both programs; a count that only one of them has stands alone."""
    one, other = opcode_counts(hopper), opcode_counts(blackwell)
    table = Table(title=f"instructions in the PTX, K = {hopper.config['k']}, M = {hopper.config['batch']}")
    table.add_column("instruction")
    table.add_column("OprojWgmma", justify="right")
    table.add_column("OprojUmma", justify="right")
    names = sorted({*one, *other}, key=lambda name: (not (one[name] and other[name]), not one[name], name))
    for name in names:
        style = None if one[name] and other[name] else "bold"
        table.add_row(name, str(one[name] or ""), str(other[name] or ""), style=style)
    return table
