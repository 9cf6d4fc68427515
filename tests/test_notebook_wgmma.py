"""Notebook 09 by papermill: with its own values, and with every parameter changed, each of which shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest
from notebook_checks import check_committed, results

from oproj_lib.notebooks import NotebookFailed, NotebookRun, declared_parameters, run_notebook

pytestmark = pytest.mark.xdist_group("notebook_wgmma")  # one worker runs the notebook once for all tests
NAME = "09"  # as test_notebooks.py looks for it: "09"
NOTEBOOK = next((Path(__file__).parents[1] / "notebooks").glob(f"{NAME}_*.ipynb"))
CHANGED: dict[str, Any] = {
    "ranks": 8, "batch": 9, "stages": 5, "thread": 3, "seed": 1, "predecessor_cycles": 3000.0,
    "mistake": "one warp arrives for all", "solutions": True,
}  # fmt: skip
PICTURES = 6


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, NotebookRun]:
    """The notebook with its own values, and with all of them changed."""
    folder = tmp_path_factory.mktemp("wgmma")
    return {
        "usual": run_notebook(NOTEBOOK, output_dir=folder, name="usual"),
        "changed": run_notebook(NOTEBOOK, CHANGED, output_dir=folder, name="changed"),
    }


def test_it_is_committed_as_it_should_be() -> None:
    code = check_committed(NOTEBOOK)
    assert sum("assert" in source for source in code) >= 6
    declared = declared_parameters(NOTEBOOK)
    assert declared.keys() == papermill.inspect_notebook(NOTEBOOK).keys()
    assert declared.keys() - {"device"} == CHANGED.keys()
    assert "modelled" in nbformat.read(NOTEBOOK, as_version=4).cells[0].source


@pytest.mark.parametrize("name", ["usual", "changed"])
def test_pictures(name: str, runs: Mapping[str, NotebookRun]) -> None:
    shown = re.findall(r'<img alt="([^"]*)"', runs[name].html.read_text(encoding="utf-8"))
    assert len(shown) == PICTURES and all(len(alt) > 80 for alt in shown)


def test_with_its_own_values(runs: Mapping[str, NotebookRun]) -> None:
    assert runs["usual"].seconds < 120  # 15 on two idle cores; a runner may be busy
    shown = results(runs["usual"])
    assert "6 stages of 10,240 bytes; 8 FP32 registers" in shown["roles-check"]
    assert "Thread 77, lane 13 of warp 2, holds 8 elements: (35, 2), (35, 3)" in shown["fragment-picture"]
    assert "not tried yet" in shown["exercise-d-thread-check"]
    assert "needs a wgmma.fence before it" in shown["mistake-report"]


def test_every_parameter_shows(runs: Mapping[str, NotebookRun]) -> None:
    usual, changed = results(runs["usual"]), results(runs["changed"])
    says = {
        "ranks": ("instructions-table", "K = 1536"),
        "batch": ("instructions-table", "M = 9"),
        "stages": ("roles-check", "5 stages of 10,240 bytes"),
        "thread": ("fragment-picture", "Thread 3, lane 3 of warp 0"),
        "mistake": ("mistake-report", "One warp of the four says that the slot is free"),
        "solutions": ("exercise-d-thread-check", "right. (the solution)"),
    }
    for name, (cell, text) in says.items():
        assert text in changed[cell] and text not in usual[cell], name
    for cell in ("staircase", "waits"):  # seed, predecessor_cycles
        assert changed[cell] != usual[cell]


def test_a_nonsensical_parameter_fails_the_notebook(tmp_path: Path) -> None:
    with pytest.raises(NotebookFailed, match=re.escape("choose 1 to 12")):
        run_notebook(NOTEBOOK, {"stages": 13}, output_dir=tmp_path)
