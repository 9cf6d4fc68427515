"""Notebook 10 by papermill: with its own values, and (exhaustive) with every parameter changed, each of which shows."""

from __future__ import annotations

import re
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

pytestmark = pytest.mark.xdist_group("notebook_pdl")  # one worker runs the notebook once for all tests
NAME = "10"  # as test_notebooks.py looks for it: "10"
NOTEBOOK = numbered(NAME)
CHANGED: dict[str, Any] = {
    "target": "sm_100a", "ranks": 8, "batch": 9, "staged_blocks": 6, "schedule": 5, "work": 40, "preload": 12,
    "predecessor_threads": 256, "predecessor_registers": 64, "carveout_kib": 228, "predecessor_us": 3.0,
    "trigger_us": 1.0, "rest_us": 2.0, "solutions": True,
}  # fmt: skip
PICTURES = 10


def test_it_is_committed_as_it_should_be() -> None:
    code = check_committed(NOTEBOOK)
    assert sum("assert" in source for source in code) >= 12
    check_declared(NOTEBOOK, CHANGED)
    title = nbformat.read(NOTEBOOK, as_version=4).cells[0].source
    assert "modelled" in title and "recorded" in title


def test_with_its_own_values(runs: Runs) -> None:
    run = runs(NOTEBOOK)
    assert run.seconds < 120  # 15 on two idle cores; a runner may be busy
    check_pictures(run, PICTURES)
    shown = results(run)
    assert "no PDL                37 steps exposed" in shown["pair-check"]
    assert "weight loads to registers below the wait: 0 and 12" in shown["sass-check"]
    assert "0 of 12 16-byte LDG weight loads stand before ACQBULK" in shown["sass-check"]
    assert "started at least 4,704 ns after the predecessor" in shown["late-check"]
    assert "the consumer starts before the predecessor has ended" in shown["real-check"]
    assert "2.58 us of weights, 2.58 hidden; 1.75 us exposed" in shown["model-check"]
    assert "torch.mm exposes 3.8 (spin) and 1.4 (read) times as much" in shown["reading-check"]
    for name in ("order-steps", "registers-left", "exposed-ns"):
        assert "not tried yet" in shown[f"exercise-{name}-check"]


@pytest.mark.exhaustive
def test_every_parameter_shows(runs: Runs) -> None:
    usual, changed = runs(NOTEBOOK), runs(NOTEBOOK, CHANGED)
    check_pictures(changed, PICTURES)
    says = {
        "target": ("setup", "sm_100a (Blackwell)"),
        "ranks": ("recorded-picture", "K = 1536"),
        "batch": ("real-right", "outputs (9, 128)"),
        "staged_blocks": ("sass-listing", " 12 x LDGSTS.E.BYPASS.128"),
        "schedule": ("pair-opportunistic", "the one above is number 5"),
        "preload": ("pair-check", "no PDL                45 steps exposed"),  # 2 per load more
        "predecessor_threads": (
            "room-check",
            "registers: 4,096 + 16,384",
        ),  # 2 warps of 64 registers a thread
        "predecessor_registers": ("room-picture", "registers: 4,096 + 15,360"),
        "carveout_kib": ("room-picture", "11 staged blocks: fits"),
        "predecessor_us": ("model-picture", "triggers at its end: starts 3.45"),
        "trigger_us": ("model-picture", "as given: starts 1.45"),
        "rest_us": ("model-picture", "past its wait 6.62, ends 8.62"),
        "solutions": ("exercise-order-steps-check", "order_steps: right. (the solution)"),
    }
    check_shown(usual, changed, says)
    ends = [
        re.search(r"predecessor starts 0, triggers \d+, ends (\d+)", results(run)["pair-run"])
        for run in (usual, changed)
    ]
    assert ends[0] and ends[1] and int(ends[1][1]) > int(ends[0][1])  # work
