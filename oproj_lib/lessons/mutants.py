"""Break a kernel on purpose: the same program with one instruction taken out of its PTX."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace

from oproj_lib.program import Program

_INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?(?P<opcode>[a-z][\w.:]*)[^;{}]*;\s*$")


def opcodes(program: Program) -> list[str]:
    """Every opcode that stands on a line of its own in the PTX, in order of first appearance."""
    found = [match["opcode"] for line in program.ptx.splitlines() if (match := _INSTRUCTION.match(line))]
    return list(dict.fromkeys(found))


def without(program: Program, opcode: str, *, occurrence: int = -1) -> Program:
    """The program without one instruction whose opcode starts with `opcode`; all other PTX lines keep their
    numbers.

    occurrence: which one, counted from 0; -1 is the last. Its cubin is gone: only the virtual GPU can run it.

    Raises:
        ValueError: if there is no such instruction, with the opcodes that exist.
    """
    lines = program.ptx.splitlines()
    found = [
        number
        for number, line in enumerate(lines)
        if (match := _INSTRUCTION.match(line)) and match["opcode"].startswith(opcode)
    ]
    if not -len(found) <= occurrence < len(found):
        raise ValueError(
            f"{program.name} has {len(found)} instruction(s) {opcode!r}, so there is no number "
            f"{occurrence}; its opcodes: " + ", ".join(opcodes(program))
        )
    number = found[occurrence]
    lines[number] = f"\t// removed: {lines[number].strip()}"
    ptx = "\n".join(lines) + "\n"
    key = hashlib.sha256(ptx.encode()).hexdigest()
    return replace(program, name=f"{program.name} without {opcode}", ptx=ptx, cubin=b"", key=key)
