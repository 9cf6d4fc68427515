"""`docs/conformance.md`: what was compared, where, the bounds of approximate functions, and the known differences."""

from __future__ import annotations

import math
from typing import Any

from oproj_lib.sweep import record as sweep_record

from .case import Array, Case, expected
from .differences import DIFFERENCES
from .record import decode, recorded
from .registry import NOT_COVERED, cases, families
from .synchronisation import MACHINE_DEPENDENT
from .tolerance import Tolerance, ulps_apart


def document() -> str:
    """The text, from the cases and the recorded run.

    Raises FileNotFoundError if no run is recorded.
    """
    run = recorded()
    sections = {
        "# Instructions against hardware": introduction(run),
        "## Families": family_table(),
        "## Known differences": difference_table(),
        "## Approximate functions": approximation_table(run),
        "## Not compared": [f"* `{name}`: {why}." for name, why in (NOT_COVERED | MACHINE_DEPENDENT).items()],
        "## Every configuration": sweep_record.markdown(sweep_record.read(sweep_record.DATA)),
    }
    return "\n".join(f"{title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections.items())


def introduction(run: dict[str, Any]) -> list[str]:
    words = sum(map(size, cases()))
    exact = sum(case.tolerance is None for case in cases())
    differing = len({name for difference in DIFFERENCES for name in difference.cases})
    return [
        f"{len(cases())} unit kernels of one instruction each, or of the shortest legal sequence, ran on an",
        f"{run['machine']} and on the virtual GPU, on the same operands: {words:,} result words.",
        f"Of {exact} exact kernels {exact - differing} agree in every bit, and {differing} differ only in",
        "the words listed under Known differences.",
        f"The other {len(cases()) - exact} are approximate functions, which stay within the manual's bound.",
        "",
        f"* Hardware: {run['machine']}, driver {run['kernel_driver']}, CUDA driver API {run['cuda_driver']};",
        f"  {run['date']}.",
        "* Command: `python -m oproj_lib.conformance build BUNDLE`, then, on the machine with the GPU,",
        f"  `{run['command']}` (needs numpy and cuda-bindings). Every kernel ran twice, with equal results.",
        "* Record: `python -m oproj_lib.conformance record OUT` keeps the answers in",
        "  `oproj_lib/data/conformance_h200.json`, which `tests/test_conformance.py` holds the virtual GPU to.",
        "* This page: `python -m oproj_lib.conformance table > docs/conformance.md`.",
    ]


def family_table() -> list[str]:
    lines = ["| Family | Kernels | Result words |", "| --- | ---: | ---: |"]
    for family, count in families().items():
        total = sum(size(case) for case in cases() if case.family == family)
        lines.append(f"| {family} | {count} | {total:,} |")
    return lines


def difference_table() -> list[str]:
    rows = [f"| {d.instructions} | {d.hardware} | {d.virtual} | {d.why} |" for d in DIFFERENCES]
    return ["| Instructions | Hardware | Virtual GPU | Source |", "| --- | --- | --- | --- |", *rows]


def approximation_table(run: dict[str, Any]) -> list[str]:
    lines = [
        "The virtual GPU gives the correctly rounded value. Bounds are the manual's. A correctly rounded value",
        "stands for the exact one, which adds half an ulp to bounds that are not in ulps (one ulp where the",
        "result is subnormal).",
        "",
        "| Instruction | Operands | Bound | Equal in every bit | Largest distance | Part of the bound | Source |",
        "| --- | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    for case in cases():
        if case.tolerance is not None:
            got = decode(case, run["cases"][case.name]["values"])
            lines.append(approximation(case, case.tolerance, got))
    return lines


def approximation(case: Case, tolerance: Tolerance, got: Array) -> str:
    """The row of one approximate function: what hardware gave against the virtual GPU."""
    want = expected(case)
    if not tolerance.absolute:
        distance = f"{int(ulps_apart(tolerance.type, got, want).max())} ulp"
    elif not tolerance.relative:  # near zero, ulps say nothing
        distance = power(float(tolerance.distance(got, want).max()))
    else:
        distance = ""
    cells = (
        f"`{case.columns[0].split()[0]}`",
        f"{size(case):,}",
        bound(tolerance),
        f"{float((got == want).mean()):.1%}",
        distance,
        f"{float(tolerance.share(got, want).max()):.2f}",
        tolerance.source,
    )
    return f"| {' | '.join(cells)} |"


def size(case: Case) -> int:
    return math.prod(case.output_shape)


def power(value: float) -> str:
    return f"2^{math.log2(value):.5g}"


def bound(tolerance: Tolerance) -> str:
    if tolerance.ulps:
        return f"{tolerance.ulps:g} ulp"
    parts = [(tolerance.absolute, "absolute"), (tolerance.relative, "relative")]
    return ", or ".join(f"{power(value)} {kind}" for value, kind in parts if value)
