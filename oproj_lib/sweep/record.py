"""The sweep's data file, and what it says in words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oproj_lib.provenance import Provenance
from oproj_lib.sweep.comparison import Comparison
from oproj_lib.sweep.expected import Expectations
from oproj_lib.sweep.points import Member, order_of

DATA = Path(__file__).resolve().parents[1] / "data" / "sweep_h200.json"
FORMAT = 1
WHAT = "every configuration on hardware, compared with the virtual GPU"
CHECKED = (
    "every bit of every mailbox (one or two, in turn) after every launch, armed words included",
    "no spills, registers within the launch's limit, dynamic shared memory as planned (when built); no local memory "
    "(as loaded)",
)
MACHINE_CODE = "weight loads above the PDL wait, in the disassembled producers"


def as_data(
    source: Provenance, comparison: Comparison, plan: Sequence[Member], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The data file of a sweep, ready for json.dumps. options: jobs and limit_seconds."""
    results = comparison.results
    checked = [*CHECKED, MACHINE_CODE] if any(result.machine_code for result in results) else [*CHECKED]
    return {
        "format": FORMAT,
        "what": WHAT,
        "provenance": source.as_dict(),
        "expected": _expected(comparison.expected),
        "options": dict(options),
        "checked": checked,
        "planned": sum(len(member.recipes) for member in plan),
        "compared": len(results),
        "stopped": comparison.stopped,
        "seconds": round(comparison.seconds, 1),
        "build_seconds": round(sum(result.build_seconds for result in results), 1),
        "launches_each": comparison.launches,
        "launches": sum(result.launches for result in results),
        "kinds": list(dict.fromkeys(kind for result in results for kind in result.recipe.kinds)),
        "orders": len({order_of(result.recipe) for result in results}),
        "families": _families(comparison, plan),
        "findings": [
            f"{result.recipe.label}: {finding}" for result in results for finding in result.findings
        ],
    }


def _expected(expected: Expectations) -> dict[str, Any]:
    return {"date": expected.date, "versions": dict(expected.versions)}


def _families(comparison: Comparison, plan: Sequence[Member]) -> list[dict[str, Any]]:
    """Per engine, K and x path: what was compared of what there is."""
    family = {
        recipe.label: (recipe.engine, recipe.k, member.path) for member in plan for recipe in member.recipes
    }
    name = {recipe.label: member.name for member in plan for recipe in member.recipes}
    found = []
    for engine, k, path in dict.fromkeys(family.values()):
        labels = {label for label, at in family.items() if at == (engine, k, path)}
        results = [result for result in comparison.results if result.recipe.label in labels]
        batches = Counter(result.recipe.batch for result in results)
        found.append(
            {
                "engine": engine,
                "k": k,
                "path": path,
                "configurations": len({name[label] for label in labels}),
                "configurations_compared": len({name[result.recipe.label] for result in results}),
                "builds": len(labels),
                "builds_compared": len(results),
                "identical": sum(not result.findings for result in results),
                "machine_code": sum(result.machine_code for result in results),
                "launches": sum(result.launches for result in results),
                "most_registers": max((result.registers for result in results), default=0),
                "batches": {str(batch): batches[batch] for batch in sorted(batches)},
            }
        )
    return found


def write(path: Path | str, data: Mapping[str, Any]) -> None:
    """Write a data file, whole or not at all: a sweep writes it again and again."""
    path = Path(path)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def read(path: Path | str = DATA) -> dict[str, Any]:
    """Raises FileNotFoundError where there is none, ValueError for a file of another kind."""
    data: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    if (data.get("what"), data.get("format")) != (WHAT, FORMAT):
        raise ValueError(f"{path} is no data file of the sweep in format {FORMAT}")
    return data


def statement(data: Mapping[str, Any]) -> str:
    """How much was compared, and what came out, in a sentence."""
    families = data["families"]
    total, seen = (
        sum(one[name] for one in families) for name in ("configurations", "configurations_compared")
    )
    identical = sum(one["identical"] for one in families)
    return (
        f"{seen} of {total} configurations, {data['compared']:,} of {data['planned']:,} builds, {data['launches']:,} "
        f"launches with {len(data['kinds'])} kinds of inputs: {identical:,} builds publish the bits of the virtual "
        f"GPU in every launch, {len(data['findings'])} findings"
    )


def markdown(data: Mapping[str, Any]) -> list[str]:
    """The section of docs/conformance.md, line by line."""
    source = data["provenance"]
    lines = [
        f"{statement(data)}.",
        "",
        f"* Hardware: {source['gpu']}, driver {source['driver']}; {source['date'][:10]}; {data['seconds']:.0f} s, "
        f"{data['options']['jobs']} processes that compile.",
        f"* Command: `{source['command']}` (needs CuTe DSL there).",
        "* Expected bits: `python -m oproj_lib.sweep expect`, one run of the virtual GPU per order of summation "
        f"({data['orders']} orders) and kind of inputs.",
        *(f"* Checked: {what}." for what in data["checked"]),
        "",
        "| Engine | K | x path | Configurations | Builds | Launches | Equal in every bit | Most registers |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in data["families"]:
        cells = (
            one["engine"],
            one["k"],
            one["path"],
            one["configurations_compared"],
            f"{one['builds_compared']:,}",
            f"{one['launches']:,}",
            f"{one['identical']:,}",
            one["most_registers"],
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines
