"""What notebook 10 stands on: chains of small kernels, the projection in one, machine code, residency, the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from test_figures import cut_off

from oproj_lib import figures, pdl_chain
from oproj_lib.load_order import GO, MATRIX, OTHER, STAGED, WEIGHTS, LoadOrder, X, kinds, load_order
from oproj_lib.overlap import Overlap, preload_us, sunk_loads
from oproj_lib.pdl_demo import IN_ORDER, first_overlapping_schedule, run_chain
from oproj_lib.problem import Problem
from oproj_lib.program import Program
from oproj_lib.ranks.grid_times import GridRow, timeline
from oproj_lib.recorded import recorded_h200
from oproj_lib.residency import Needs, beside
from oproj_lib.sass import WAIT, Instruction

# -- small kernels ----------------------------------------------------------------------------------------------------

SEEDS = ("program", 0, 3)
LATE_X = ("load W", "load table", "load x", "wait", "trigger", "multiply", "store y")
EARLY_TRIGGER = ("load W", "load table", "trigger", "wait", "load x", "multiply", "store y")


@pytest.mark.parametrize("schedule", SEEDS)
def test_a_chain_in_order_is_right(schedule: str | int) -> None:
    """y = 3 * (1000 + i), and the consumer adds x."""
    run = run_chain(schedule=schedule)
    assert run.seen.tolist() == [3 * (1000 + i) for i in range(64)] and run.findings == () and run.wrong == 0
    run = run_chain(consumer=True, schedule=schedule)
    assert run.seen.tolist() == [4 * (1000 + i) for i in range(64)] and run.findings == () and run.wrong == 0


@pytest.mark.parametrize(
    ("steps", "writes", "found"),
    [
        (LATE_X, "x", ("projection", "too early", 3)),
        (IN_ORDER, "table", ("projection", "too early", 2)),
        (IN_ORDER, "W", ("projection", "too early", 1)),
        (EARLY_TRIGGER, "x", ("consumer", "too early", 3)),
        (tuple(step for step in IN_ORDER if step != "wait"), "x", ("projection", "too early", 4)),
    ],
)
@pytest.mark.parametrize("schedule", SEEDS)
def test_what_is_too_early_is_found(
    steps: tuple[str, ...], writes: str, found: tuple[str, str, int], schedule: str | int
) -> None:
    run = run_chain(steps, writes=dict.fromkeys(("x", writes)), consumer=True, schedule=schedule)  # type: ignore[arg-type]
    places = {(grid, f.kind, f.source.line) for grid, f in run.findings if f.source}
    assert found in places


def test_early_starts_and_what_is_hidden() -> None:
    """A seed that overlaps hides what one grid after another exposes."""
    late, early = (run_chain(pdl=pdl) for pdl in (False, True))
    assert not late.started_early and not late.overlaps and early.started_early
    seed = first_overlapping_schedule(work=24)
    run = run_chain(schedule=seed, work=24)
    assert run.overlaps and run.exposed < late.exposed
    for steps, writes in ((LATE_X, ("x",)), (IN_ORDER, ("x", "table")), (IN_ORDER, ("x", "W"))):
        too_early = run_chain(steps, writes=writes, schedule=seed, work=24)
        assert too_early.findings and too_early.wrong > 0  # overtaking, they read what was there before
    with pytest.raises(ValueError, match="no overlap under the schedules 7 to 56"):
        first_overlapping_schedule(7, trigger="never", work=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": ("load z",)}, "steps: 'load z' unknown; choose from load W, load table"),
        ({"writes": ("y",)}, "writes: 'y' unknown; choose from x, W, table"),
        ({"trigger": "sometimes"}, "trigger = 'sometimes': choose from never, late, early"),
        ({"work": 0}, "work = 0, preload = 4: choose at least 1 of each"),
    ],
)
def test_refused_chains(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run_chain(**options)  # type: ignore[arg-type]


# -- the projection ---------------------------------------------------------------------------------------------------


@cache
def programs() -> Mapping[str, Program]:
    return pdl_chain.variants(768, 8, "sm_90a")


def test_the_projection_in_a_chain() -> None:
    """Without its wait it multiplies NaN where it overtakes; with an early trigger only the consumer is wrong."""
    x, weight = Problem(16, 8).inputs(0)
    run = {
        name: pdl_chain.run_behind(program, x, weight, ctas=1, consumer=True)
        for name, program in programs().items()
    }
    right = run["as it is"]
    wanted = x.astype(np.float64) @ weight[:64].astype(np.float64).T
    assert np.abs(right.out.astype(np.float64) - wanted).max() < 2**-8 * np.abs(wanted).max()
    assert not right.findings and not run["ld.global.nc"].findings
    assert run["ld.global.nc"].differing(right) == run["trigger before the wait"].differing(right) == 0
    assert np.isnan(run["wait missing"].out.astype(np.float32)).all()
    kinds_of = {name: {(grid, f.kind) for grid, f in one.findings} for name, one in run.items()}
    assert kinds_of["trigger before the wait"] == {("consumer", "too early")}
    assert ("projection", "too early") in kinds_of["wait missing"]


def test_refused_projections() -> None:
    x, weight = Problem(16, 8).inputs(0)
    program = programs()["as it is"]
    with pytest.raises(ValueError, match=r"ctas = 113: .* has 112, choose 1 to 112"):
        pdl_chain.run_behind(program, x, weight, ctas=113)
    with pytest.raises(ValueError, match=re.escape("staged_blocks = 7: a warp has k / (32 * parts)")):
        pdl_chain.variants(768, 8, "sm_90a", staged_blocks=7)
    other = replace(program, config={**program.config, "transport": "unicast:8"})
    with pytest.raises(ValueError, match="transport = 'unicast:8': build the program for 'multicast'"):
        pdl_chain.run_behind(other, x, weight)


# -- machine code -----------------------------------------------------------------------------------------------------


def test_opcodes_and_what_they_are_for() -> None:
    opcodes = {
        "LDG.E.NA.128": WEIGHTS, "LDG.E.NA.128.CONSTANT": WEIGHTS, "LDG.E.128": X, "LDG.E.64": OTHER,
        "LDGSTS.E.BYPASS.128": STAGED, "ACQBULK": WAIT, "PREEXIT": GO, "HMMA.16816.F32.BF16": MATRIX, "EXIT": OTHER,
    }  # fmt: skip
    assert kinds([Instruction(0, "", opcode, "") for opcode in opcodes]) == tuple(opcodes.values())


def test_the_order_of_both_forms() -> None:
    """12 loads of 16 bytes per lane at K = 768: 64 * 768 * 2 / (512 * 16)."""
    plain, sunk = (load_order(programs()[name]) for name in ("as it is", "ld.global.nc"))
    assert (plain.before(WEIGHTS), plain.after(WEIGHTS)) == (12, 0)
    assert (sunk.before(WEIGHTS), sunk.after(WEIGHTS)) == (0, 12)
    assert plain.before(X) == sunk.before(X) == 0 < plain.after(X)
    assert plain.listing().splitlines()[0] == " 12 x LDG.E.NA.128"
    assert programs()["ld.global.nc"].ptx.count("ld.global.nc.L1::no_allocate") == 12
    with pytest.raises(ValueError, match="has no cubin"):
        load_order(programs()["wait missing"])
    with pytest.raises(ValueError, match="x has no ACQBULK"):
        _ = LoadOrder("x", (), ()).wait


# -- room -------------------------------------------------------------------------------------------------------------


def test_registers_are_given_out_per_warp() -> None:
    """120 registers of 512 threads leave 4,096 of 65,536; 121 are 128, and leave nothing."""
    assert Needs("", 512, 120).registers_left == 4096
    assert Needs("", 512, 121).registers_left == 0
    assert Needs("", 33, 1).register_total == 2 * 256
    first = Needs("first", 128, 32)
    assert beside(first, Needs("", 512, 120), 100).fits  # 1 warp of 1,024 beside 4 of 3,840: exactly 16,384
    crowded = beside(Needs("first", 128, 40), Needs("", 512, 120), 100)
    assert crowded.problems == ("registers: 1,280 + 15,360 = 16,640 of a sub-partition's 16,384",)
    uneven = beside(
        Needs("first", 32, 64), Needs("", 512, 120), 100
    )  # 2,048 of 4,096, but all in one quarter
    assert uneven.problems == ("registers: 2,048 + 15,360 = 17,408 of a sub-partition's 16,384",)


def test_threads_and_shared_memory() -> None:
    assert beside(Needs("first", 1024, 8), Needs("", 1024, 8), 100).fits
    assert beside(Needs("first", 1024, 8), Needs("", 1024, 8), 0).problems == (
        "shared memory: 1 + 1 = 2 KiB of a carve-out of 0",
    )
    first, second = Needs("first", 128, 32, 30 * 1024), Needs("second", 512, 64, 32 * 1024)
    assert beside(first, second, 64).fits  # 31 + 33
    assert not beside(first, replace(second, shared_bytes=second.shared_bytes + 1), 64).fits
    for carveout in (48, 16):
        with pytest.raises(
            ValueError, match=f"carveout_kib = {carveout}: choose one of 0, 8, .* that holds the 31 KiB"
        ):
            beside(first, second, carveout)
    with pytest.raises(ValueError, match="has 1 to 1024 threads of 1 to 255 registers"):
        Needs("huge", 1025, 8)
    with pytest.raises(ValueError, match=r"32 warps x 8192 registers = 262144, a multiprocessor has 65536"):
        Needs("huge", 1024, 255)


def test_needs_of_the_builds() -> None:
    """No more staged blocks than a warp has; fewer weights in registers, more in shared memory."""
    few, most = pdl_chain.needs_by_staging(768, 8, "sm_90a", most=2)
    assert (few.name, most.name, few.threads) == ("0 staged blocks", "6 staged blocks", 512)
    assert few.registers > most.registers and most.shared_bytes - few.shared_bytes == 64 * 768 * 2


# -- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "exposed"),
    [
        ({}, 1.75),  # 0.45 + 1.3: all of the preload is hidden
        ({"trigger_us": 6.0}, 2.25),  # 2 of 2.5 hidden
        ({"trigger_us": 8.0}, 4.25),
        ({"fits": False}, 4.25),
        ({"above_wait": False}, 4.25),
        ({"preload_us": 0.0, "rest_us": 0.0}, 0.45),
    ],
)
def test_exposed(change: dict[str, Any], exposed: float) -> None:
    assert replace(Overlap(8.0, 0.0, 2.5, 1.3, 0.45), **change).exposed == pytest.approx(exposed)


def test_wrong_numbers() -> None:
    with pytest.raises(ValueError, match=r"rest_us = -1: choose at least 0"):
        Overlap(8, 0, 2, -1, 0)
    with pytest.raises(ValueError, match=r"trigger_us = 9 is after the end at 8"):
        Overlap(8, 9, 2, 1, 0)
    with pytest.raises(ValueError, match="bandwidth_tb_s = 0"):
        preload_us(1, 0)


def test_what_sinking_costs() -> None:
    """11,010,048 bytes at 4.26 TB/s are 2.58 us; recorded: 4.5 - 2.0."""
    rows = {(row.k, row.staged_blocks): row for row in sunk_loads(recorded_h200())}
    assert rows[768, 0].register_bytes == 7168 * 768 * 2
    assert rows[768, 0].derived_us == pytest.approx(2.5845, abs=1e-4) and rows[768, 0].recorded_us == 2.5
    assert rows[1536, 12].derived_us == rows[1536, 12].recorded_us == 0
    assert len(rows) == 8


# -- pictures ---------------------------------------------------------------------------------------------------------

HERE = Overlap(8.0, 0.5, 2.5, 1.3, 0.45)
LONG = GridRow(0, "predecessor", 0, 3, None, None, 90)
STUCK = GridRow(0, "projection", 3, None, 20, None, None)
PICTURES: dict[str, Callable[[], figures.Picture]] = {
    "chain_timelines": lambda: figures.chain_timelines(
        {"PDL, triggers early": timeline(run_chain(consumer=True).grids), "stuck": [LONG, STUCK]}
    ),
    "machine_code_order": lambda: figures.machine_code_order(
        [load_order(programs()[name], name) for name in ("as it is", "ld.global.nc")]
    ),
    "sunk_cost": lambda: figures.sunk_cost(sunk_loads(recorded_h200()), recorded_h200()),
    "overlap_bars": lambda: figures.overlap_bars({"as given": HERE, "no room": replace(HERE, fits=False)}),
    "exposed_by_trigger": lambda: figures.exposed_by_trigger(HERE),
    "multiprocessor": lambda: figures.multiprocessor(
        [
            beside(Needs("predecessor", 128, 40), Needs(f"{r} registers", 512, r, 102_400), 100)
            for r in (64, 120)
        ]
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_can_be_read(name: str) -> None:
    picture = PICTURES[name]()
    assert len(picture.alt) > 80
    assert cut_off(picture) == []


def test_alternatives_say_what_is_shown() -> None:
    assert "projection starts 3, first waits 20." in PICTURES["chain_timelines"]().alt
    assert (
        "as it is: 12 loads of weights to registers and 0 cp.async above"
        in PICTURES["machine_code_order"]().alt
    )
    assert (
        "no room: starts 8.45, past its wait 10.95, ends 12.25, 4.25 exposed"
        in PICTURES["overlap_bars"]().alt
    )
    assert "120 registers: does not fit (registers: 1,280 + 15,360" in PICTURES["multiprocessor"]().alt


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: figures.chain_timelines({}), "no chains"),
        (lambda: figures.chain_timelines({"a": [replace(LONG, start=None)]}), "a: predecessor never started"),
        (lambda: figures.machine_code_order([]), "no kernels"),
        (lambda: figures.overlap_bars({}), "no cases"),
        (lambda: figures.multiprocessor([]), "no pairs"),
    ],
)
def test_nothing_to_draw(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
