"""Every notebook, by papermill, over targets, ranks and batches; and each own parameter does something."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
from notebook_checks import FOLDER, Runs, check_committed, numbered, results

from oproj_lib.notebooks import NotebookFailed, NotebookRun, declared_parameters, run_notebook

pytestmark = pytest.mark.xdist_group("notebooks")  # one worker makes each run once for all tests
NOTEBOOKS = {name: numbered(name) for name in ("00", "01", "02", "03")}
TESTED_ELSEWHERE = {
    "test_notebooks_blackwell.py": ("04", "06", "08"),
    "test_notebooks_layouts.py": ("05", "07"),
    "test_notebook_wgmma.py": ("09",),
    "test_notebook_pdl.py": ("10",),
    "test_notebook_mailboxes.py": ("11",),
    "test_notebook_attnres.py": ("12",),
    "test_notebook_numbers.py": ("13",),
    "test_notebook_measure.py": ("14",),
}
COMMON = {"device": "auto", "target": "sm_90a", "ranks": 8, "batch": 8}

SMALL = {"ranks": 16, "batch": 1}

# Both targets, both K, and every batch size at which something changes: 1, a ragged tile, a full one, two. Every pair
# of values occurs in some notebook, here or at the smallest size, at which every notebook is run for its parameters;
# the kernels themselves have a complete grid of their own.
GRID: list[tuple[str, dict[str, Any]]] = [
    ("00", {}),
    ("00", {"target": "sm_100a", "ranks": 16, "batch": 16, "remove": "griddepcontrol.wait"}),
    ("01", {"target": "sm_100a", "ranks": 8, "batch": 7}),
    ("01", {"target": "sm_90a", "ranks": 16, "batch": 8}),
    ("02", {"target": "sm_90a", "ranks": 8, "batch": 16, "rows": 2}),
    ("02", {"target": "sm_100a", "ranks": 8, "batch": 1, "rows": 4, "block": 2}),
    ("03", {"target": "sm_100a", "ranks": 8, "batch": 8, "solutions": True}),
    ("03", {"target": "sm_90a", "ranks": 16, "batch": 7, "group_tiles": 2}),
]
# What `make test-all` adds: every notebook at every batch size.
MORE: list[tuple[str, dict[str, Any]]] = [
    ("00", {"target": "sm_100a", "ranks": 16, "batch": 7}),
    ("00", {"target": "sm_100a", "ranks": 8, "batch": 1, "remove": "cp.async.wait_group"}),
    ("00", {"target": "sm_90a", "ranks": 16, "batch": 16}),
    ("01", {"target": "sm_100a", "ranks": 8, "batch": 16}),
    ("01", {"target": "sm_90a", "ranks": 16, "batch": 1, "solutions": True}),
    ("02", {"target": "sm_100a", "ranks": 16, "batch": 1, "solutions": True}),
    ("02", {"target": "sm_100a", "ranks": 8, "batch": 7, "rows": 4, "block": 2}),
    ("02", {"target": "sm_90a", "ranks": 16, "batch": 8, "rows": 2}),
    ("03", {"target": "sm_90a", "ranks": 8, "batch": 1}),
    ("03", {"target": "sm_100a", "ranks": 16, "batch": 16}),
]

# Notebook, and per parameter another value and the cell that must show it. What one run changes together
# has cells that depend on that parameter alone, so a change there has one cause.
EFFECTS: list[tuple[str, dict[str, tuple[Any, str]]]] = [
    ("00", {"seed": (1, "staircase"), "remove": ("griddepcontrol.wait", "break-run")}),
    (
        "01",
        {
            "bandwidth_tb_s": (8.0, "roofline-plot"),
            "sms": (148, "why-112-table"),
            "solutions": (True, "exercise-floor-us-check"),
        },
    ),
    ("01", {"peak_tflops": (2250.0, "roofline-plot"), "latency_ns": (9000.0, "in-flight-check")}),
    (
        "02",
        {
            "rows": (2, "sectors-count"),
            "lane": (6, "maps-picture"),
            "seed": (1, "maps-check"),
            "solutions": (True, "exercise-k-order-check"),
        },
    ),
    ("02", {"block": (3, "lane-loads-check"), "staged_blocks": (3, "sectors-count")}),
    (
        "03",
        {
            "group_tiles": (1, "count"),
            "padding_chunks": (2, "padding-map"),
            "row_words": (17, "partials-map"),
            "solutions": (True, "exercise-x-offset-check"),
        },
    ),
]


def untimed_results(run: NotebookRun) -> dict[str, str]:
    """Cell id -> its output, without the times of this machine."""
    return {cell: untimed(output) for cell, output in results(run).items()}


def untimed(output: str) -> str:
    return re.sub(r"seconds per launch.*?checks", "", output, flags=re.S)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_as_it_should_be(name: str) -> None:
    check_committed(NOTEBOOKS[name])
    assert COMMON.keys() <= declared_parameters(NOTEBOOKS[name]).keys()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [*GRID, *(pytest.param(*point, marks=pytest.mark.exhaustive) for point in MORE)],
    ids=str,
)
def test_grid(name: str, parameters: dict[str, Any], runs: Runs) -> None:
    run = runs(NOTEBOOKS[name], parameters)
    page = run.html.read_text(encoding="utf-8")
    notebook = nbformat.read(run.executed, as_version=4)
    pictures = sum(
        "figures." in cell.source and "<img" in str(cell.outputs)
        for cell in notebook.cells
        if "outputs" in cell
    )
    assert page.count('<img alt="') == pictures >= 3
    if name == "00":
        assert len(run.results) == 1  # what `make demo` prints
        assert re.search(r"error\W+1\.\de-03|error\W+1\.\d+e-03", run.results[0])
        target = parameters.get("target", "sm_90a")
        assert target in run.results[0] and "none" in run.results[0]


def test_every_notebook_has_its_tests() -> None:
    elsewhere = [name for names in TESTED_ELSEWHERE.values() for name in names]
    assert sorted([*NOTEBOOKS, *elsewhere]) == sorted(path.stem[:2] for path in FOLDER.glob("*.ipynb"))
    for file, names in TESTED_ELSEWHERE.items():
        text = (Path(__file__).parent / file).read_text()
        assert all(f'"{name}"' in text for name in names), file


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_papermill_reads_every_parameter(path: Path) -> None:
    assert papermill.inspect_notebook(path).keys() == declared_parameters(path).keys()


def test_the_grid_covers_every_pair() -> None:
    assert {name for name, _ in GRID} == NOTEBOOKS.keys(), "every notebook has its points in the grid"
    assert {name for name, _ in EFFECTS} == NOTEBOOKS.keys(), "and is run at the smallest size"
    points = [{**COMMON, **parameters} for parameters in (SMALL, *(point for _, point in GRID))]
    values = {"target": ("sm_90a", "sm_100a"), "ranks": (8, 16), "batch": (1, 7, 8, 16)}
    for first, second in (("target", "ranks"), ("target", "batch"), ("ranks", "batch")):
        seen = {(point[first], point[second]) for point in points}
        assert seen >= {(a, b) for a in values[first] for b in values[second]}, (first, second)
    for name in NOTEBOOKS:
        sizes = [{**COMMON, **point} for where, point in (*GRID, *MORE, (name, SMALL)) if where == name]
        for parameter, wanted in values.items():
            assert {size[parameter] for size in sizes} == set(wanted), (name, parameter)


def test_every_own_parameter_has_an_effect_tested() -> None:
    tested = {(name, parameter) for name, changes in EFFECTS for parameter in changes}
    declared = {(name, key) for name, path in NOTEBOOKS.items() for key in declared_parameters(path)}
    assert {(name, key) for name, key in declared if key not in COMMON} == tested


@pytest.mark.parametrize(("name", "changes"), EFFECTS)
def test_own_parameters_change_something(
    name: str, changes: dict[str, tuple[Any, str]], runs: Runs, tmp_path: Path
) -> None:
    values = {parameter: value for parameter, (value, _) in changes.items()}
    small = untimed_results(runs(NOTEBOOKS[name], SMALL))
    changed = untimed_results(run_notebook(NOTEBOOKS[name], {**SMALL, **values}, output_dir=tmp_path))
    same = [p for p, (_, cell) in changes.items() if changed[cell] == small[cell]]
    assert not same, f"changed nothing: {same}"


def test_common_parameters_change_something(runs: Runs) -> None:
    other, small = (results(runs(NOTEBOOKS["00"], point)) for point in (GRID[1][1], SMALL))
    assert "sm_100a" in other["run-it"] and "sm_90a" in small["run-it"]
    assert "sm_90a" not in other["run-it"]


def test_runs_without_times_are_alike(runs: Runs, tmp_path: Path) -> None:
    """Otherwise a changed output would say nothing about a changed parameter."""
    small = untimed_results(runs(NOTEBOOKS["00"], SMALL))
    again = untimed_results(run_notebook(NOTEBOOKS["00"], SMALL, output_dir=tmp_path))
    for cell in ("staircase", "break-run", "stream", "run-it"):
        assert again[cell] == small[cell]


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("00", {"target": "sm_80"}, "target = 'sm_80'"),
        ("00", {"remove": "wgmma"}, "has 0 instruction"),
        ("02", {"lane": 32}, "lane = 32: a warp has lanes 0 to 31"),
        ("03", {"ranks": 12}, "choose 8"),
    ],
)
def test_a_nonsensical_parameter_fails_the_notebook(
    name: str, parameters: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(NotebookFailed, match=re.escape(message)):
        run_notebook(NOTEBOOKS[name], {**SMALL, **parameters}, output_dir=tmp_path)
