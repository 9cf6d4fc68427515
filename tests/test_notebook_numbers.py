"""Notebook 13 by papermill: with its own values, and with every parameter changed, each of which shows."""

from __future__ import annotations

import html
import re
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

from oproj_lib.fused_dot import fused_dot
from oproj_lib.problem import Problem
from oproj_lib.run import producer_for
from oproj_lib.summation import mma_operands

pytestmark = pytest.mark.xdist_group("notebook_numbers")  # one worker runs the notebook once for all tests
NAME = "13"  # as test_notebooks.py looks for it: "13"
NOTEBOOK = numbered(NAME)
CHANGED: dict[str, Any] = {
    "target": "sm_100a", "ranks": 16, "batch": 3, "rows": 2, "staged_blocks": 1, "value": -255.7, "token": 2,
    "column": 7167, "mma": 5, "example": "many small ones", "orders": 77, "seed": 5, "solutions": True,
}  # fmt: skip
PICTURES = 7


def test_it_is_committed_as_it_should_be() -> None:
    code = check_committed(NOTEBOOK)
    assert sum("assert" in source for source in code) >= 14
    check_declared(NOTEBOOK, CHANGED)


def test_with_its_own_values(runs: Runs) -> None:
    run = runs(NOTEBOOK)
    assert run.seconds < 90  # 10 on two idle cores; a runner may be busy
    check_pictures(run, PICTURES)
    shown = results(run)
    assert "0 of 57,344 outputs differ from the kernel's" in shown["tree-check"]
    assert re.search(r"normally distributed outputs:  1\.66\de-03", shown["error-run"])
    assert re.search(r"rows per warp: 2: 3\d,\d+ FP32 sums differ", shown["settings-check"])
    assert "7,168 of 57,344 outputs are -0.0" in shown["zero-kernel"]
    assert "32,769 FP32 values" in shown["zero-range"]


def test_every_parameter_shows(runs: Runs) -> None:
    usual, changed = runs(NOTEBOOK), runs(NOTEBOOK, CHANGED)
    says = {
        "target": ("setup", "sm_100a (Blackwell)"),
        "batch": ("tree-check", f"of {3 * 7168:,} outputs"),
        "rows": ("tree-picture", "Each of 8 K parts, 4 of them shown, has 6 MMAs in 2 chain(s)"),
        "staged_blocks": ("settings-run", "staged blocks: 0"),
        "value": ("bf16-picture", "goes to -256"),
        "example": ("core-examples-picture", "not 0, 16 of 17, as rows"),
        "orders": ("orders-picture", "in 77 random orders"),
        "solutions": ("exercise-contract-sum-check", "contract_sum: right. (the solution)"),
    }
    check_pictures(changed, PICTURES)
    check_shown(usual, changed, says)
    # Nothing but the seed changes that.
    assert results(usual)["bf16-check"] != results(changed)["bf16-check"]


def test_the_chosen_output_and_mma_are_shown(runs: Runs) -> None:
    """Its result is that of token, column, mma and seed together, and of no other choice of one of them."""

    def result(**changes: int) -> str:
        at = {**CHANGED, **changes}
        x, weight = Problem(16, 3).inputs(at["seed"])
        config = producer_for(768, 3, rows=at["rows"], staged_blocks=at["staged_blocks"]).config
        operands = mma_operands(x[at["token"]], weight[at["column"]], config, 0, at["mma"])
        return f"The FP32 result is {float(fused_dot(*operands).result)!r}, "

    shown = html.unescape(results(runs(NOTEBOOK, CHANGED))["core-picture"])
    assert result() in shown
    for change in ({"token": 0}, {"column": 100}, {"mma": 3}, {"seed": 0}):
        assert result(**change) not in shown, change
