"""Notebook 09 by papermill: with its own values, and with every parameter changed, each of which shows."""

from __future__ import annotations

import re
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

from oproj_lib.notebooks import NotebookFailed, run_notebook

pytestmark = pytest.mark.xdist_group("notebook_wgmma")  # one worker runs the notebook once for all tests
NAME = "09"  # as test_notebooks.py looks for it: "09"
NOTEBOOK = numbered(NAME)
CHANGED: dict[str, Any] = {
    "ranks": 8, "batch": 9, "stages": 5, "thread": 3, "seed": 1, "predecessor_cycles": 3000.0,
    "mistake": "one warp arrives for all", "solutions": True,
}  # fmt: skip
PICTURES = 7


def test_it_is_committed_as_it_should_be() -> None:
    code = check_committed(NOTEBOOK)
    assert sum("assert" in source for source in code) >= 6
    check_declared(NOTEBOOK, CHANGED)
    assert "modelled" in nbformat.read(NOTEBOOK, as_version=4).cells[0].source


def test_with_its_own_values(runs: Runs) -> None:
    run = runs(NOTEBOOK)
    assert run.seconds < 120  # 15 on two idle cores; a runner may be busy
    check_pictures(run, PICTURES)
    shown = results(run)
    assert "6 stages of 10,240 bytes; 8 FP32 registers" in shown["roles-check"]
    assert "Thread 77, lane 13 of warp 2, holds 8 elements: (35, 2), (35, 3)" in shown["fragment-picture"]
    assert "not tried yet" in shown["exercise-d-thread-check"]
    assert "needs a wgmma.fence before it" in shown["mistake-report"]


def test_every_parameter_shows(runs: Runs) -> None:
    usual, changed = runs(NOTEBOOK), runs(NOTEBOOK, CHANGED)
    says = {
        "ranks": ("instructions-table", "K = 1536"),
        "batch": ("instructions-table", "M = 9"),
        "stages": ("roles-check", "5 stages of 10,240 bytes"),
        "thread": ("fragment-picture", "Thread 3, lane 3 of warp 0"),
        "mistake": ("mistake-report", "One warp of the four says that the slot is free"),
        "solutions": ("exercise-d-thread-check", "right. (the solution)"),
    }
    check_pictures(changed, PICTURES)
    check_shown(usual, changed, says)
    for cell in ("staircase", "waits"):  # seed, predecessor_cycles
        assert results(changed)[cell] != results(usual)[cell]


def test_a_nonsensical_parameter_fails_the_notebook(tmp_path: Path) -> None:
    with pytest.raises(NotebookFailed, match=re.escape("choose 1 to 12")):
        run_notebook(NOTEBOOK, {"stages": 13}, output_dir=tmp_path)
