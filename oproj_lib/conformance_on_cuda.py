"""The instruction conformance suite as the second part of `check`: `conformance.hardware` runs it, this judges.

Its kernels run in a process of their own, so a unit kernel that hangs or faults is one error among results.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from oproj_lib.conformance import case as unit
from oproj_lib.conformance import cubins, differences, hardware

FOLDER = "conformance"
"""Inside a bundle."""
TARGET = unit.TARGET


@dataclass(frozen=True)
class UnitResult:
    """One unit kernel. identical: bit for bit to the virtual GPU; lines: what is wrong, one each."""

    name: str
    family: str
    words: int
    exact: bool
    identical: bool
    lines: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.lines


def check_conformance(directory: Path, out: Path, cases: Mapping[str, unit.Case]) -> tuple[UnitResult, ...]:
    """Run every case of ``directory`` (from `conformance.cubins.build`) on the first GPU and judge each.

    out: a folder for the raw results, which `python -m oproj_lib.conformance record` can keep. cases: by name.

    Raises FileNotFoundError where there are no cubins, ValueError where they were made from other cases.
    """
    rows = {row["name"]: row for row in json.loads((directory / cubins.BUNDLE).read_text(encoding="utf-8"))}
    for name in sorted({*rows, *cases}):
        case, row = cases.get(name), rows.get(name)
        if case is None or row is None or case.fingerprint != row["fingerprint"]:
            raise ValueError(
                f"{directory} was built from other unit kernels ({name}): build the bundle again"
            )
    with contextlib.redirect_stdout(sys.stderr):
        hardware.main(directory.resolve(), out.resolve())
    run = json.loads((out / "conformance.json").read_text(encoding="utf-8"))["cases"]
    with np.load(out / "conformance.npz") as arrays:
        return tuple(judge(cases[name], run[name], row["expected"], arrays) for name, row in rows.items())


def judge(
    case: unit.Case, item: Mapping[str, Any], expected_sha256: str, arrays: Mapping[str, np.ndarray]
) -> UnitResult:
    """One case's answer: an error, results that change from run to run, or words that differ where no known
    difference allows it."""
    identical = item.get("sha256") == expected_sha256
    lines: list[str] = []
    if "error" in item:
        lines = [f"{case.name}: {item['error']}"]
    else:
        if not item["stable"]:
            lines.append(f"{case.name}: two runs of the same kernel gave different results")
        if not identical:
            lines += unit.compare(case, arrays[case.entry], unit.expected(case), differences.known(case))
    words = int(np.prod(case.output_shape))
    return UnitResult(case.name, case.family, words, case.tolerance is None, identical, tuple(lines))


def conformance_table(results: Sequence[UnitResult], title: str) -> Table:
    """One row per family."""
    table = Table(
        title=title,
        caption="identical: bit for bit to the virtual GPU; the rest within the manual's bound, or a known difference",
    )
    table.add_column("family")
    for name in ("kernels", "words", "identical", "wrong"):
        table.add_column(name, justify="right")
    for family in dict.fromkeys(result.family for result in results):
        members = [result for result in results if result.family == family]
        wrong = sum(not result.ok for result in members)
        cells = (len(members), sum(m.words for m in members), sum(m.identical for m in members), wrong)
        table.add_row(family, *(f"{cell:,}" for cell in cells), style="red" if wrong else None)
    return table
