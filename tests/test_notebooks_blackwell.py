"""Notebooks 04, 06 and 08 by papermill: a few parameter sets, and every own parameter does something."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from notebook_checks import Runs, check_committed, check_pictures, numbered, results

from oproj_lib.notebooks import NotebookFailed, declared_parameters, run_notebook
from oproj_lib.perfetto import validate_chrome_trace

pytestmark = pytest.mark.xdist_group("notebooks_blackwell")  # one worker makes each run once for all tests
NOTEBOOKS = {name: numbered(name) for name in ("04", "06", "08")}
COMMON = {"device", "target", "ranks", "batch"}

# Per notebook: another value of every own parameter, and the cell that must show it. What else the run changes
# (WITH_THEM) must not change these cells.
CHANGES: dict[str, dict[str, tuple[Any, str]]] = {
    "04": {
        "group_tiles": (2, "ring"),
        "staged_blocks": (0, "gantt"),
        "stages": (5, "umma"),
        "remove": ("cp.async.wait_group", "break-run"),
        "occurrence": (1, "break-run"),
        "predecessor_cycles": (9000.0, "waits-table"),
    },
    "06": {
        "stages": (2, "count"),
        "expected": (33, "break-run"),
        "arriving": (30, "break-run"),
        "flip": (1, "break-run"),
        "rounds": (2, "small-run"),
        "solutions": (True, "exercise-parity-check"),
    },
    "08": {
        "stages": (3, "gantt"),
        "seed": (1, "staircase"),
        "predecessor_cycles": (3000.0, "waits"),
        "mistake": ("no commit", "mistake-report"),
        "trace_file": ("trace.json", "perfetto-run"),
    },
}
WITH_THEM: dict[str, dict[str, Any]] = {"04": {}, "06": {"batch": 33}, "08": {}}
OTHER_SIZES: dict[str, dict[str, Any]] = {
    "04": {"target": "sm_100a", "ranks": 16, "batch": 17},
    "08": {"ranks": 16, "batch": 9, "stages": 12},
}
PICTURES = {"04": 4, "06": 3, "08": 3}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_as_it_should_be(name: str) -> None:
    check_committed(NOTEBOOKS[name])
    cells = nbformat.read(NOTEBOOKS[name], as_version=4).cells
    text = "\n".join(cell.source for cell in cells)
    assert "modelled" in cells[0].source and "measured" in text  # times are a model's, and the reader is told


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_with_its_own_values(name: str, runs: Runs) -> None:
    run = runs(NOTEBOOKS[name])
    assert run.seconds < 120  # 30 on two idle cores; a runner may be busy
    check_pictures(run, PICTURES[name])


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_other_sizes(name: str, runs: Runs) -> None:
    assert runs(NOTEBOOKS[name], OTHER_SIZES[name]).html.exists()


def test_every_own_parameter_is_changed() -> None:
    for name, path in NOTEBOOKS.items():
        assert set(declared_parameters(path)) - COMMON == set(CHANGES[name]), name
        assert set(declared_parameters(path)) & COMMON >= {"device", "ranks", "batch"}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_own_parameters_change_something(name: str, runs: Runs, tmp_path: Path) -> None:
    changes = {
        key: str(tmp_path / value) if key == "trace_file" else value
        for key, (value, _) in CHANGES[name].items()
    }
    run = run_notebook(NOTEBOOKS[name], {**WITH_THEM[name], **changes}, output_dir=tmp_path)
    changed, before = results(run), results(runs(NOTEBOOKS[name]))
    same = [key for key, (_, cell) in CHANGES[name].items() if changed[cell] == before[cell]]
    assert not same, f"changed nothing: {same}"
    if name == "08":
        assert validate_chrome_trace(json.loads((tmp_path / "trace.json").read_text())) > 100


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("04", {"stages": 13}, "choose 1 to 12"),
        ("06", {"ranks": 12}, "ranks = 12"),
        ("08", {"batch": 257}, "batch = 257"),
    ],
)
def test_a_nonsensical_parameter_fails_the_notebook(
    name: str, parameters: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(NotebookFailed, match=re.escape(message)):
        run_notebook(NOTEBOOKS[name], parameters, output_dir=tmp_path)
