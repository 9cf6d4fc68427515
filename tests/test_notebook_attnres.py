"""Notebook 12 by papermill: with its own values, and with every parameter changed, each of which shows. And what it
reads from traces and machine code, against mistakes made on purpose."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
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

from oproj_lib import figures
from oproj_lib.attnres_order import (
    AFTER,
    BEFORE,
    DURING,
    OUT,
    PREFIX,
    SUMS,
    WEIGHTS,
    WRITTEN,
    planned_traffic,
    traffic,
)
from oproj_lib.figures.attnres import misplaced
from oproj_lib.kernels.attnres_configuration import AttnResConfiguration
from oproj_lib.lessons import attnres_runs
from oproj_lib.lessons.attnres import STEPS, is_before_the_poll
from oproj_lib.vgpu.trace import Trace

pytestmark = pytest.mark.xdist_group("notebook_attnres")  # one worker runs the notebook once for all tests
NAME = "12"  # as test_notebooks.py looks for it: "12"
NOTEBOOK = numbered(NAME)
CHANGED: dict[str, Any] = {
    "target": "sm_100a", "ranks": 1, "batch": 3, "blocks": 2, "replace_prefix": True, "out_norm": False, "eps": 1e-5,
    "form": "fused", "token": 1, "mistake": "prefix not stored", "seed": 5, "solutions": True,
}  # fmt: skip
PICTURES = 5


def test_it_is_committed_as_it_should_be() -> None:
    code = check_committed(NOTEBOOK)
    assert sum("assert" in source for source in code) >= 14
    check_declared(NOTEBOOK, CHANGED)


def test_with_its_own_values(runs: Runs) -> None:
    run = runs(NOTEBOOK)
    assert run.seconds < 100  # 12 on two idle cores; a runner may be busy
    check_pictures(run, PICTURES)
    shown = results(run)
    assert "split 4 grids on 2 rank(s), findings: none" in shown["run-it"]
    assert "fused 2 grids on 2 rank(s), findings: none" in shown["run-it"]
    # 3 weights, 3 blocks and the prefix; 2 ranks; P and out: 11 rows of 7168 * 2 bytes
    assert "100,352 of 157,696 bytes move before the first poll" in shown["traffic-check"]
    assert "P and out: 28,672 values; the same bits on 2 rank(s)" in shown["bits-check"]
    assert re.search(r"relative Frobenius error 1\.[67]\de-03, limit 2\.5e-03", shown["error-check"])
    assert shown["safety-run"].count("too early") == 2 * 2  # as a page and as text
    assert "0 of 7,168 outputs differ" in shown["invariance-run"]
    assert "nan" in shown["extremes-run"] and "not tried yet" in shown["exercise-before-the-poll-check"]


def test_every_parameter_shows(runs: Runs) -> None:
    usual, changed = runs(NOTEBOOK), runs(NOTEBOOK, CHANGED)
    says = {
        "target": ("setup", "sm_100a (Blackwell)"),
        "ranks": ("bits-check", "the same bits on 1 rank(s)"),
        "batch": ("prefix", "(3, 7168)"),
        "blocks": ("shares-picture", "2 blocks and P"),
        "replace_prefix": ("rounding-run", "by up to 0.0e+00,"),
        "out_norm": ("traffic-picture", "norm_w, qk_w, out_w 28,672"),  # 2 rows in place of 3
        "eps": ("eps-picture", "eps = 1e-05 stands outside the root"),
        "form": ("code-picture", "fused_attnres_producer"),
        "token": ("invariance-run", "token 1 alone"),
        "mistake": ("mistake-report", "Does not store P"),
        "solutions": ("exercise-online-softmax-check", "online_softmax: right. (the solution)"),
    }
    check_pictures(changed, PICTURES)
    check_shown(usual, changed, says)
    # Nothing but the seed changes that.
    assert results(usual)["extremes-run"] != results(changed)["extremes-run"]


# ---- what it reads from a trace ----

SMALL = AttnResConfiguration(2, ranks=1, tokens=1)


@pytest.fixture(scope="module")
def trace() -> Trace:
    run = attnres_runs.run_form("split", SMALL, trace=0)
    assert run.findings == ()
    return run.traces[0]


def moved_to_the_end(trace: Trace, opcode: str) -> Trace:
    """What warp 0 did, the first execution of an instruction being its last."""
    mine = [event for event in trace.events if event.warp == 0]
    event = next(event for event in mine if event.op.instruction.opcode.startswith(opcode))
    events = [*(other for other in mine if other is not event), event]
    return replace(trace, events=[replace(each, order=number) for number, each in enumerate(events)])


def test_traffic_of_a_trace(trace: Trace) -> None:
    """Rows of 14,336 bytes: norm_w, qk_w and out_w; prefix and two blocks; one rank; P; out."""
    row = 14336
    expected = {
        (BEFORE, WEIGHTS): 3 * row, (BEFORE, WRITTEN): 3 * row, (DURING, SUMS): row, (AFTER, PREFIX): row,
        (AFTER, OUT): row,
    }  # fmt: skip
    assert traffic(trace) == planned_traffic(SMALL) == expected
    late = traffic(moved_to_the_end(trace, "ld.relaxed.gpu.global.v4"))
    assert (
        late[AFTER, WRITTEN] == 32 * 16 and late[BEFORE, WRITTEN] == 3 * row // 14 - 32 * 16
    )  # one of 14 warps


def test_plan_of_other_configurations() -> None:
    nothing_to_choose = replace(SMALL, blocks=0, replace_prefix=True, out_norm=False, ranks=8)
    assert planned_traffic(nothing_to_choose) == {
        (DURING, SUMS): 8 * 14336, (AFTER, PREFIX): 14336, (AFTER, OUT): 14336,
    }  # fmt: skip
    read_twice = replace(SMALL, blocks=8, threads=128)  # 7 chunks of 8 blocks are 224 words of a thread
    assert planned_traffic(read_twice)[BEFORE, WRITTEN] == (2 * 8 + 1) * 14336


def test_the_exercise_agrees_with_the_kernel(trace: Trace) -> None:
    seen = attnres_runs.steps_before_the_poll(trace)
    assert set(seen) == {name for name, step in STEPS.items() if step.seen}
    assert seen == {name: is_before_the_poll(name) for name in seen}
    late = moved_to_the_end(trace, "griddepcontrol.launch_dependents")
    assert not attnres_runs.steps_before_the_poll(late)["launch the dependents"]


# ---- pictures and errors ----


def test_misplaced_eps() -> None:
    """A row of zeros: 1 / eps in place of 1 / sqrt(eps), 1000 times as much for 1e-6. Where the mean is eps:
    sqrt(2 eps) / (sqrt(eps) + eps) - 1."""
    change = misplaced(np.array([0.0, 1e-3]), 1e-6)
    np.testing.assert_allclose(change, [999.0, 2**0.5 / 1.001 - 1], rtol=1e-9)


def test_shares_are_those_of_the_softmax() -> None:
    scores = np.array([[0.0, np.log(3.0)], [1000.0, 0.0]])
    picture = figures.softmax_shares(scores)
    assert "token 0 mostly of P (75%), token 1 mostly of block 0 (100%)" in picture.alt


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: attnres_runs.run_form("both", SMALL), "form = 'both': choose from split, fused"),
        (
            lambda: attnres_runs.run_form("split", replace(SMALL, ranks=9)),
            "ranks = 9: this notebook runs 1 to 8 virtual ranks",
        ),
        (lambda: attnres_runs.check_token(1, SMALL), "token = 1: the batch has 1, choose 0 to 0"),
        (
            lambda: attnres_runs.order_findings("none"),
            "rule = 'none': choose from as they are, producer triggers",
        ),
        (
            lambda: attnres_runs.run_broken("none"),
            "mistake = 'none': choose from score of the unrounded prefix",
        ),
        (lambda: figures.softmax_shares(np.zeros(3)), r"scores have shape (3,); [tokens, sources]"),
        (lambda: figures.poll_traffic({}), "nothing moved: trace a CTA that has a token"),
        (lambda: figures.eps_placement(0.0, {}), "eps = 0.0, sizes {}: all must be positive"),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
