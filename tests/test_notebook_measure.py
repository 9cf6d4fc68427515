"""Notebook 14 by papermill: with its own values, and (exhaustive) with every parameter changed; what its tables say,
held against numbers read from the data files another way; and the measurement on a GPU, with a stand-in for one."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
from notebook_checks import (
    Runs,
    check_committed,
    check_declared,
    check_pictures,
    check_shown,
    numbered,
    results,
)
from rich.console import Console
from rich.table import Table
from test_figures import cut_off

from oproj_lib import bundle, figures, hardware_check, measured_tables, provenance
from oproj_lib.bench import hardware, measure, now
from oproj_lib.bench.results import HardwareBench, JobResult
from oproj_lib.figures import measured
from oproj_lib.measured_tables import GOALS, at, goals_us, ours, ratio
from oproj_lib.notebooks import NotebookFailed, NotebookRun, run_notebook
from oproj_lib.problem import Problem
from oproj_lib.recorded import DATA, recorded_bench

pytestmark = pytest.mark.xdist_group("notebook_measure")  # one worker runs the notebook once for all tests
NAME = "14"  # as test_notebooks.py looks for it: "14"
ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = numbered(NAME)
CHANGED: dict[str, Any] = {
    "target": "sm_100a", "ranks": 16, "batch": 64, "consumer": "copy", "copies": 40, "outlier_us": 600.0,
    "peak_tflops": 790.0, "solutions": True,
}  # fmt: skip
PICTURES = 4


@pytest.fixture(scope="module")
def bench() -> HardwareBench:
    return recorded_bench()


def raw(name: str, k: int, batch: int) -> list[dict[str, Any]]:
    """Rows of a data file, as JSON has them."""
    jobs = json.loads((DATA / f"{name}.json").read_text())["jobs"]
    return next(job["rows"] for job in jobs if (job["k"], job["batch"]) == (k, batch))


def text(table: Table) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


# ---- the notebook ----


def test_it_is_committed_as_it_should_be() -> None:
    code = check_committed(NOTEBOOK)
    assert sum("assert" in source for source in code) >= 10
    check_declared(NOTEBOOK, CHANGED)
    assert "*recorded*" in nbformat.read(NOTEBOOK, as_version=4).cells[0].source


def check_recorded_pictures(run: NotebookRun) -> None:
    check_pictures(run, PICTURES)
    shown = re.findall(r'<img alt="([^"]*)"', run.html.read_text(encoding="utf-8"))
    assert all("recorded on NVIDIA H200" in alt for alt in shown)


def test_with_its_own_values(runs: Runs) -> None:
    usual = runs(NOTEBOOK)
    assert usual.seconds < 120  # 10 on two idle cores; a runner may be busy
    check_recorded_pictures(usual)
    shown = results(usual)
    by_name = {row["name"]: row for row in raw("bench_h200", 1536, 8)}
    tuned = next(
        row for row in raw("bench_h200", 1536, 8) if row["settings"] == {"staged_blocks": 1, "rows": 2}
    )
    waits, blas = (row["exposed"]["median_us"] for row in (tuned, by_name["torch.mm"]))
    assert f"a layer waits {waits:.2f} us for direct (staged_blocks 1, rows 2)" in shown["exposed-check"]
    assert f"{blas:.2f} for torch.mm: {blas / waits:.2f} times as long" in shown["exposed-check"]
    assert f"K = 1536, M = 8: {waits:.2f} us, {waits - 1.7:.2f} over the goal" in shown["goal-check"]
    assert "nothing was measured here" in shown["now-check"]
    assert "command:     python -m oproj_lib bench --device cuda" in shown["origin"]
    assert "driver:      580." in shown["origin"] and "date:        2026-" in shown["origin"]
    cases = json.loads((DATA / "check_h200.json").read_text())["cases"]
    assert (
        f"the bits of the virtual GPU in {len(cases)} of {len(cases)}, 0 findings" in shown["check-statement"]
    )
    for name in ("floor-and-share", "fault"):
        assert "not tried yet" in shown[f"exercise-{name}-check"]


@pytest.mark.exhaustive
def test_every_parameter_shows(runs: Runs) -> None:
    usual, changed = runs(NOTEBOOK), runs(NOTEBOOK, CHANGED)
    check_recorded_pictures(changed)
    says = {
        "target": ("setup", "for sm_100a nothing is recorded"),
        "ranks": ("now", "K = 768"),
        "batch": ("now", "M = 64"),
        "consumer": ("comparison-table", "consumer copy"),
        "copies": ("rotation-table", "40"),
        "outlier_us": ("median-check", "mean 35.98"),
        "peak_tflops": ("roofline-picture", "790 TFLOP/s (given)"),
        "solutions": ("exercise-fault-check", "fault: right. (the solution)"),
    }
    check_shown(usual, changed, says)


@pytest.mark.exhaustive
def test_a_size_that_was_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(
        NotebookFailed, match=r"wgmma at K = 1536, M = 9 .* it has M = 1, 2, 4, 8, 16, 32, 64"
    ):
        run_notebook(NOTEBOOK, {"batch": 9}, output_dir=tmp_path)


def test_experiments_are_quoted_as_the_notes_have_them() -> None:
    """The numbers of section 5 that are in no data file stand in docs/latency.md."""
    cells = {cell.id: cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells}
    notes = re.sub(r"\s+", " ", (ROOT / "docs" / "latency.md").read_text(encoding="utf-8"))
    assert (
        "0.47 is the boundary between two kernels, 0.2 the store and its way to L2, 0.4 the arrival of x"
        in notes
    )
    assert "| `OprojProducerDirect`, staged_blocks 0 / 1, rows 2 | 1.60 | 2.03 |" in notes
    assert "| ... without the MMAs (x is still loaded and used) | 1.50 | 1.59 |" in notes
    for words in ("0.47 are the boundary", "0.2 the store", "0.4 the arrival of x", "1.59 instead of 2.03"):
        assert words in cells["goals-why"]
    assert "8.7" not in cells["neighbours-note"] and "in no data file" in cells["neighbours-note"]


# ---- tables ----


def test_ours_is_the_preset_and_beyond_a_tile_the_ring_engine(bench: HardwareBench) -> None:
    assert dict(ours(bench, 768, 8).settings) == {"staged_blocks": 0, "rows": 2}
    assert [ours(bench, 1536, batch).name for batch in (1, 8, 16, 64)] == [
        "direct",
        "direct",
        "wgmma",
        "wgmma",
    ]
    with pytest.raises(
        ValueError, match=r"direct at K = 768, M = 3 is not in this measurement .* M = 1, 2, 4, 8"
    ):
        ours(bench, 768, 3)
    without = replace(bench, jobs=tuple(replace(job, rows=job.rows[:1]) for job in bench.jobs))
    with pytest.raises(ValueError, match=r"torch\.mm at K = 1536, M = 8 is not in this measurement"):
        at(without, 1536, 8, "torch.mm")


def test_goals_are_judged_by_the_numbers(bench: HardwareBench) -> None:
    """The recorded session misses at M = 8; the same with a third of the exposed time meets everything."""

    def faster(job: JobResult) -> JobResult:
        rows = tuple(
            replace(row, exposed=replace(row.exposed, median_us=row.exposed.median_us / 3))
            if row.name in ("producer", "direct")
            else row
            for row in job.rows
        )
        return replace(job, rows=rows)

    last = [line for line in text(measured_tables.goal_table(bench)).splitlines() if "│ 8 │" in line]
    assert len(last) == 2 and all("time missed, ratio missed" in line for line in last)
    fast = text(measured_tables.goal_table(replace(bench, jobs=tuple(map(faster, bench.jobs)))))
    assert fast.count("time met, ratio met") == 8
    copied = recorded_bench(DATA / "bench_copy_h200.json")
    assert goals_us(copied) == {} and goals_us(bench) == {768: 1.4, 1536: 1.7}
    with pytest.raises(ValueError, match="consumer = copy: the goals are for the chain with 'next'"):
        measured_tables.goal_table(copied)
    assert {k: goal.ratio for k, goal in GOALS.items()} == {768: 3.9, 1536: 4.8}


def test_the_notes_have_the_recorded_results(bench: HardwareBench) -> None:
    """After a new recording: `python -m oproj_lib.measured_tables`, into docs/latency.md."""
    notes = (ROOT / "docs" / "latency.md").read_text(encoding="utf-8")
    sessions = [bench, *measured_tables.recorded_consumers().values()]
    assert [session.consumer for session in sessions] == ["next", "reduce", "attnres"]
    for session in sessions:
        assert measured_tables.results_markdown(session) in notes
    assert measured_tables.predecessor_markdown(measured_tables.recorded_predecessors()) in notes
    row = f"| 1536 | 8 | direct (staged_blocks 1, rows 2) | {ours(bench, 1536, 8).exposed.median_us:.2f} |"
    assert row in notes and f"| {ratio(bench, 1536, 8):.2f} |" in notes


def test_ours_is_never_slower_than_what_was_measured_beside_it(bench: HardwareBench) -> None:
    """Alone and exposed, at every size; docs/latency.md says so."""
    for job in bench.jobs:
        mine = [row for row in job.rows if row.name in measured_tables.ENGINES]
        others = [row for row in job.rows if row.alone and row.name not in measured_tables.ENGINES]
        assert len({row.name for row in others}) == 5 and not job.failures
        for by in ("alone", "exposed"):
            least = min(getattr(row, by).median_us for row in mine)
            assert least < min(getattr(row, by).median_us for row in others), (job.k, job.batch, by)


def test_predecessors_are_compared_that_differ_in_nothing_else(bench: HardwareBench) -> None:
    """Numbers of the table, held against the data file read another way."""
    sessions = measured_tables.recorded_predecessors()
    assert [session.predecessor for session in sessions.values()] == ["spin", "read"]
    shown = text(measured_tables.predecessor_table(sessions, 768))
    least = [
        min(row["exposed"]["median_us"] for row in raw(name, 768, 8) if row["name"] == "wgmma")
        for name in ("bench_h200", "bench_read_h200")
    ]
    (line,) = [line for line in shown.splitlines() if "│  8 │ wgmma" in line]
    assert all(f" {value:.2f} " in line for value in least)
    copied = recorded_bench(DATA / "bench_copy_h200.json")
    with pytest.raises(ValueError, match=r"consumers \['copy', 'next'\]: sessions are compared that differ"):
        measured_tables.predecessor_table({"spin": bench, "copy": copied}, 768)


def test_copies_that_fit_are_warm() -> None:
    """22 MB of weights, 60 MiB of L2: two copies fit, three don't; 46 are 16 times the L2."""
    shown = text(measured_tables.rotation_table(1536, 22_159_360, 60 * 2**20, [1, 2, 3, 45]))
    states = [re.split(r"\s*│\s*", line)[1::3] for line in shown.splitlines() if line.startswith("│")]
    assert [state[0] for state in states] == ["1", "2", "3", "45", "46"]
    found = [line.split("│")[4].strip() for line in shown.splitlines() if line.startswith("│")]
    assert found == ["warm: all fit"] * 2 + ["not surely cold"] * 2 + ["cold"]


def test_neighbours_and_the_registers_they_get(bench: HardwareBench) -> None:
    """127 registers are given out as 128, 512 threads take all 65,536."""
    check = hardware_check.read_data(DATA / "check_h200.json")
    copied = recorded_bench(DATA / "bench_copy_h200.json")
    found = measured_tables.neighbours(bench, copied, check, 1536)
    assert [one.copied_us for one in found] == sorted(one.copied_us for one in found) and len(found) == 29
    greedy = next(one for one in found if dict(one.row.settings) == {"staged_blocks": 0, "rows": 4})
    assert (greedy.registers, greedy.registers_left) == (127, 0)
    shown = text(measured_tables.neighbour_table(found, ours(bench, 1536, 8)))
    assert shown.count("(the preset)") == 1 and "29. " in shown


def test_a_check_with_findings_says_so() -> None:
    case = {"label": "a", "kind": "random", "launches": 5, "identical": True, "findings": [], "error": 1e-3}
    bad = {**case, "kind": "nan", "identical": False, "findings": ["x", "y"], "error": 2e-3}
    said = measured_tables.check_statement({"cases": [{**one, "tolerance": 2.5e-3} for one in (case, bad)]})
    assert said == (
        "1 programs with 2 sets of inputs (random, nan), 10 launches: the bits of the virtual GPU in 1 of 2, "
        "2 findings, largest error 2.00e-03 of 2.5e-03 allowed"
    )


# ---- pictures ----


def test_labels_move_apart_and_stay_inside() -> None:
    assert measured._apart([1.0, 5.0], 1.0, 0.5, 9.0) == [1.0, 5.0]
    assert measured._apart([4.0, 4.0, 4.0], 1.0, 0.5, 9.0) == [3.0, 4.0, 5.0]
    assert measured._apart([0.0, 8.9, 9.0], 1.0, 0.5, 9.0) == [0.5, 8.0, 9.0]
    assert measured._apart([2.0, 3.5, 3.6], 1.0, 0.5, 9.0) == pytest.approx([2.0, 3.05, 4.05])


def test_a_line_follows_one_build(bench: HardwareBench) -> None:
    """At M = 8 the bundle has faster builds of the producer; the line shows the one of all other M."""
    first = raw("bench_h200", 1536, 8)[0]
    assert first["settings"]["staged_blocks"] == 4
    picture = figures.exposed(bench, goals=goals_us(bench))
    assert cut_off(picture) == []
    alt = picture.alt
    said = re.search(r"K = 1536, producer: [^;]*M 8 ([\d.]+)", alt)
    assert said and said[1] == f"{first['exposed']['median_us']:.1f}"
    assert "K = 768, goal for M up to 8: 1.4" in alt
    assert "goal" not in figures.exposed(bench).alt


# ---- measuring now, without a GPU ----


def test_what_would_be_built_to_measure_one_size() -> None:
    found = now.size_recipes("sm_90a", Problem(8, 8))
    assert [(one.engine, one.settings, one.kinds) for one in found] == [
        ("producer", {"staged_blocks": 4, "rows": 1, "group_tiles": 0}, ()),
        ("direct", {"staged_blocks": 1, "rows": 2}, ()),
        ("wgmma", {}, ()),
    ]
    assert [one.engine for one in now.size_recipes("sm_100a", Problem(16, 64))] == ["producer", "umma"]
    with pytest.raises(ValueError, match=r"M = 9 is not measured; choose from \[1, 2, 4, 8, 16, 32, 64\]"):
        now.size_recipes("sm_90a", Problem(8, 9))


def test_the_virtual_gpu_measures_nothing() -> None:
    assert now.now_if("vgpu", "sm_90a", Problem(8, 8)) is None


def test_programs_are_built_where_none_are_given(
    monkeypatch: pytest.MonkeyPatch, bench: HardwareBench, tmp_path: Path
) -> None:
    """What `now_if` asks of the rest, without compiling: one size's recipes, built, and the plan with the consumer."""
    asked: list[Any] = []
    made = bundle.Bundle(tmp_path, "sm_90a", "", {}, ())
    smi = dict.fromkeys(provenance.SMI_FIELDS, "1")

    def build(target: str, folder: str, *, chosen: Any) -> bundle.Bundle:
        asked.append((target, [one.engine for one in chosen]))
        return made

    def measure_job(
        gpu: Any, programs: Any, problem: Problem, names: Any, ceilings: Any, plan: Any
    ) -> JobResult:
        asked.append((programs is made, problem, names, plan))
        return bench.jobs[0]

    monkeypatch.setattr(bundle, "build", build)
    monkeypatch.setattr(now, "Gpu", lambda index: type("AGpu", (), {"index": index})())
    monkeypatch.setattr(measure, "ceilings", lambda gpu: bench.ceilings)
    monkeypatch.setattr(hardware, "measure_job", measure_job)
    monkeypatch.setattr(provenance, "smi", lambda index: smi)
    monkeypatch.setattr(provenance, "collect", lambda gpu, command, clocks: bench.provenance)
    found = now.now_if("cuda", "sm_90a", Problem(8, 16), "copy")
    assert asked == [
        ("sm_90a", ["producer", "wgmma"]),
        (True, Problem(8, 16), ("torch.mm", "empty kernel"), hardware.Plan(1, 10, consumer="copy")),
    ]
    assert found and found.jobs == (bench.jobs[0],) and found.consumer == "copy"
