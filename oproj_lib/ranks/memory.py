"""Which memory of a rank each parameter of a program is, by its name: one rule for the virtual GPU and real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oproj_lib.program import Parameter, Program

READERS = ("mailbox_reduce", "attnres")
"""Programs whose mailbox is the one with the results."""
ARGUMENTS = {
    "mailbox": "first", "mc": "first_mc", "state": "first_state", "slot": "rank", "receive": "first",
    "receive_state": "first_state",
}  # fmt: skip
"""Parameters that are called otherwise than the memory. A one-shot exchange has one mailbox: first is result."""
READER_ARGUMENTS = {"mailbox": "result", "state": "result_state"}
SECOND_SHOT_ARGUMENTS = {**ARGUMENTS, "mc": "result_mc"}


def bind(program: Program, memory: Mapping[str, Any], view: Callable[[Any, Parameter], Any]) -> list[Any]:
    """One argument per parameter of ``program``.

    memory: arrays of one rank by name (x, weight, payload, out, prefix, blocks, ...; first, first_mc, first_state,
    result, result_mc, result_state) and its number, rank. view: makes the argument of the memory and the
    parameter, such as the first M rows.

    Raises ValueError for a parameter that the memory does not have.
    """
    engine = str(program.config["engine"])
    names = (
        READER_ARGUMENTS
        if engine in READERS
        else SECOND_SHOT_ARGUMENTS
        if engine == "second_shot"
        else ARGUMENTS
    )
    missing = [p.name for p in program.parameters if names.get(p.name, p.name) not in memory]
    if missing:
        raise ValueError(f"{program.name} needs {', '.join(missing)}: this rank has {', '.join(memory)}")
    return [view(memory[names.get(p.name, p.name)], p) for p in program.parameters]
