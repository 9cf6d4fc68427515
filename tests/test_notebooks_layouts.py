"""Notebooks 05 and 07 by papermill: with their own values, with every parameter changed, each of which shows, and with
values at their limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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

from oproj_lib import tile_demo
from oproj_lib.notebooks import NotebookFailed, run_notebook

pytestmark = pytest.mark.xdist_group("notebooks_layouts")  # one worker makes each run once for all tests
NOTEBOOKS = {name: numbered(name) for name in ("05", "07")}
CHANGED: dict[str, dict[str, Any]] = {
    "05": {
        "ranks": 16, "batch": 33, "width": 64, "chunk": 1, "slot": 3, "start": 640, "wrong_stride": 2048,
        "stored_width": 32, "seed": 1, "solutions": True,
    },
    "07": {
        "ranks": 8, "batch": 40, "m": 128, "row": 11, "warp": 3, "quarter": 1, "remove": "tcgen05.commit", "seed": 1,
        "solutions": True,
    },
}  # fmt: skip


def row_of_d(m: int, n: int, seed: int, row: int) -> str:
    """What NumPy prints of the first 8 elements of a row of D [m, n]."""
    weights, tokens = tile_demo.factors(m, n, seed)
    return str((weights.astype(float) @ tokens.astype(float).T)[row, :8].astype(int))


# Per parameter: the cell, and what it says with the changed value alone.
SAYS: dict[str, dict[str, tuple[str, str]]] = {
    "05": {
        "ranks": ("setup", "K = 768"),
        "batch": ("instruction-picture", "n: 40"),
        "width": ("atom-picture", "8 rows of 64 bytes"),
        "chunk": ("atom-check", "chunk 1 of 8 rows"),
        "slot": ("tiles-check", "slot 3: W tile"),
        "start": ("alignment-check", " 640: 100% of D wrong, with base offset 5"),
        "wrong_stride": ("wrong-picture", "stride 2048:"),
        "stored_width": ("wrong-picture", "stored with 32 B"),
        "seed": ("run-check", row_of_d(64, 40, 1, 0)),
        "solutions": ("exercise-chunk-offset-check", "chunk_offset: right. (the solution)"),
    },
    "07": {
        "ranks": ("kernel-run", "10,752 MMAs"),
        "batch": ("map-picture", "D of 40 columns"),
        "m": ("map-run-check", "M = 128: row"),
        "row": ("map-check", "row 11 is in lane 11"),
        "warp": ("reach-check", "warp 3 reads lanes"),
        "quarter": ("reach-check", "reads lanes 32 to 63"),
        "remove": ("allocate-run", "waits for ever at the mbarrier"),
        "seed": ("map-run-check", row_of_d(128, 16, 1, 11)),
        "solutions": ("exercise-tmem-lane-check", "tmem_lane: right. (the solution)"),
    },
}
OTHER: dict[str, dict[str, Any]] = {
    "05": {
        "ranks": 16, "batch": 64, "width": 32, "chunk": 1, "slot": 0, "start": 16, "wrong_stride": 1024,
        "stored_width": 32,
    },
    "07": {"batch": 1, "m": 128, "row": 63, "warp": 1, "quarter": 1, "remove": "tcgen05.fence::after_thread_sync"},
}  # fmt: skip
PICTURES = {"05": 4, "07": 3}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_as_it_should_be(name: str) -> None:
    code = check_committed(NOTEBOOKS[name])
    assert "lessons.check" in code[-1] and sum("assert" in source for source in code) >= 7


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_with_its_own_values(name: str, runs: Runs) -> None:
    run = runs(NOTEBOOKS[name])
    assert run.seconds < 60
    check_pictures(run, PICTURES[name])
    if name == "07":
        wrong = "lane quarter: warp 2 reaches tensor memory lanes 64..95, not 0..31"
        assert wrong in results(run)["reach-check"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_values_at_their_limits(name: str, runs: Runs) -> None:
    assert runs(NOTEBOOKS[name], OTHER[name]).html.exists()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_parameter_is_changed(name: str) -> None:
    check_declared(NOTEBOOKS[name], CHANGED[name])
    assert CHANGED[name].keys() == SAYS[name].keys()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_parameter_shows(name: str, runs: Runs) -> None:
    check_shown(runs(NOTEBOOKS[name]), runs(NOTEBOOKS[name], CHANGED[name]), SAYS[name])


def test_another_seed_gives_another_row() -> None:
    assert row_of_d(64, 40, 0, 0) != row_of_d(64, 40, 1, 0)
    assert row_of_d(128, 16, 0, 11) != row_of_d(128, 16, 1, 11)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("05", {"width": 16}, "swizzle width = 16 bytes: choose from (32, 64, 128)"),
        ("05", {"slot": 18}, "slot = 18: the ring has slots 0 to 17"),
        ("07", {"row": 64}, "row = 64: D has rows 0 to 63"),
    ],
)
def test_a_nonsensical_parameter_fails_the_notebook(
    name: str, parameters: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(NotebookFailed, match=re.escape(message)):
        run_notebook(NOTEBOOKS[name], parameters, output_dir=tmp_path)
