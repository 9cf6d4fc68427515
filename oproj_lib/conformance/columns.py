"""Cases of instructions from registers to registers: one thread per operand tuple, one result column per
instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .case import (
    Array,
    Case,
    entry_name,
    entry_text,
    load_operand,
    register_type,
    row_pointer,
    store_result,
    word_bits,
)
from .operands import BLOCK, table
from .tolerance import Tolerance

NAMES = "abc"


@dataclass(frozen=True)
class Column:
    """An instruction with the types of its results. `text` has {d} (and {e}) for the results, %a, %b, %c for the
    operands; lines are separated by newlines."""

    text: str
    results: tuple[str, ...]

    @property
    def label(self) -> str:
        return " ".join(
            self.text.replace("{d}", "d").replace("{e}", "e").replace("%", "").rstrip(";").split()
        )


def simple(opcodes: Sequence[str], sources: int, result: str) -> list[Column]:
    """`add.rn.f32` becomes `add.rn.f32 d, a, b;`."""
    operands = ", ".join(f"%{name}" for name in NAMES[:sources])
    return [Column(f"{opcode} {{d}}, {operands};", (result,)) for opcode in opcodes]


def register_case(
    name: str,
    family: str,
    sources: Sequence[str],
    columns: Sequence[Column],
    *,
    operands: tuple[Array, ...] | None = None,
    tolerance: Tolerance | None = None,
    types: Sequence[str] | None = None,
) -> Case:
    """One case: loads %a, %b, %c of the types `sources`, executes every column's instruction, stores the results.

    `operands`: one array per source (default: the operand table of these types, or of `types`).
    """
    arrays = operands or table(tuple(types or sources))
    widths = [word_bits(kind) for column in columns for kind in column.results]
    slot = max(widths) // 8
    declarations = [f".reg .{register_type(kind)} %{n};" for n, kind in zip(NAMES, sources, strict=False)]
    body = [line for n, kind in zip(NAMES, sources, strict=False) for line in load_operand(n, kind)]
    body += row_pointer("output", slot * len(widths), "%slot")
    stores: list[str] = []
    labels: list[str] = []
    for column in columns:
        registers = [f"%d{len(labels) + i}" for i in range(len(column.results))]
        for register, kind in zip(registers, column.results, strict=True):
            declarations.append(f".reg .{register_type(kind)} {register};")
            stores += store_result(register, kind, slot * len(labels))
            labels.append(
                column.label
                + (
                    f" ({'de'[len(registers) > 1 and register == registers[1]]})"
                    if len(registers) > 1
                    else ""
                )
            )
        body += column.text.format(d=registers[0], e=registers[-1]).splitlines()
    threads = len(arrays[0])
    inputs = dict(zip(NAMES, arrays, strict=False))
    return Case(
        name, family, entry_text(name, body + stores, list(inputs), declarations), entry_name(name),
        (threads // BLOCK, 1, 1), (BLOCK, 1, 1), 0, inputs, tuple(labels), np.dtype(f"u{slot}"),
        opcodes(columns), tolerance,
    )  # fmt: skip


def opcodes(columns: Sequence[Column]) -> frozenset[str]:
    lines = [line for column in columns for line in column.text.splitlines()]
    words = [line.split()[1] if line.startswith("@") else line.split()[0] for line in lines]
    return frozenset(word.rstrip(";").split(".")[0] for word in words)
