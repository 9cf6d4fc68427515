"""The register file: one row per register, one column per thread of the whole grid.

PTX registers are virtual and in the thousands; `allocate_rows` gives each one a row for the part of the
program in which it lives, so that a launch needs a few hundred rows and the hot ones stay in cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from .syntax import TYPE_BYTES

# Register classes by width. Predicates are Python booleans per thread, everything else raw bits.
CLASS_OF_BYTES = {1: "h", 2: "h", 4: "w", 8: "d"}
CLASS_DTYPE = {
    "p": np.dtype(bool),
    "h": np.dtype(np.uint16),
    "w": np.dtype(np.uint32),
    "d": np.dtype(np.uint64),
}

DTYPES: dict[str, np.dtype] = {
    "pred": np.dtype(bool),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "tf32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f16x2": np.dtype(np.uint32),
    "bf16x2": np.dtype(np.uint32),
    "f32x2": np.dtype(np.uint64),
}
for _bits in (8, 16, 32, 64):
    DTYPES[f"b{_bits}"] = DTYPES[f"u{_bits}"] = np.dtype(f"uint{_bits}")
    DTYPES[f"s{_bits}"] = np.dtype(f"int{_bits}")


def register_class(type_name: str) -> str:
    """The register class (`p`, `h`, `w` or `d`) of a `.reg` type."""
    return "p" if type_name == "pred" else CLASS_OF_BYTES[TYPE_BYTES[type_name]]


@dataclass(frozen=True)
class Row:
    """Where a register lives: row `index` of the file of class `kind`."""

    kind: str
    index: int


@dataclass
class Interval:
    first: int
    last: int
    first_is_read: bool


def live_intervals(
    accesses: Iterable[tuple[int, list[str], list[str]]], back_edges: list[tuple[int, int]]
) -> dict[str, Interval]:
    """For each register the range of instruction indices in which its row must not be reused.

    `accesses` lists (index, reads, writes) in program order; `back_edges` are (from, to) with to <= from. A
    register that is live into a loop stays live to the loop's end; one that is read before it is written
    inside a loop is carried round it.
    """
    intervals: dict[str, Interval] = {}
    for index, reads, writes in accesses:
        for is_read, names in ((True, reads), (False, writes)):
            for name in names:
                interval = intervals.get(name)
                if interval is None:
                    intervals[name] = Interval(index, index, is_read)
                else:
                    interval.last = index
    changed = True
    while changed:
        changed = False
        for source, target in back_edges:
            for interval in intervals.values():
                enters = interval.first < target <= interval.last
                carried = interval.first_is_read and target <= interval.first <= source
                if (enters or carried) and interval.last < source:
                    interval.last, changed = source, True
                if carried and interval.first > target:
                    interval.first, changed = target, True
    return intervals


def allocate_rows(
    intervals: dict[str, Interval], classes: dict[str, str]
) -> tuple[dict[str, Row], dict[str, int]]:
    """Linear scan: (row of each register, number of rows of each class)."""
    free: dict[str, list[int]] = {kind: [] for kind in CLASS_DTYPE}
    count = dict.fromkeys(CLASS_DTYPE, 0)
    rows: dict[str, Row] = {}
    active: list[tuple[int, str, int]] = []
    for name, interval in sorted(intervals.items(), key=lambda item: item[1].first):
        still = []
        for last, kind, index in active:
            if last < interval.first:
                free[kind].append(index)
            else:
                still.append((last, kind, index))
        active = still
        kind = classes[name]
        if free[kind]:
            index = free[kind].pop()
        else:
            index = count[kind]
            count[kind] += 1
        rows[name] = Row(kind, index)
        active.append((interval.last, kind, index))
    return rows, count


class RegisterFile:
    """Rows of raw bits for `threads` threads; `poison` maps a row to the origin id of its undefined data (0:
    defined)."""

    def __init__(self, counts: dict[str, int], threads: int) -> None:
        self.files = {kind: np.zeros((counts[kind], threads), dtype) for kind, dtype in CLASS_DTYPE.items()}
        self.poison: dict[Row, np.ndarray] = {}

    def __getitem__(self, row: Row) -> np.ndarray:
        return self.files[row.kind][row.index]
