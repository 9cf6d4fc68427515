"""Pictures and tables of timelines: what they show, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from oproj_lib import figures
from oproj_lib.cost_model import CostModel
from oproj_lib.figures.timeline import STATES
from oproj_lib.kernels.umma import OprojUmma
from oproj_lib.lessons.broken_umma import BROKEN_UMMA
from oproj_lib.lessons.mistakes import umma_mistake
from oproj_lib.timeline import Timeline, ring_slots
from oproj_lib.timeline_tables import cost_table, mistakes_table, role_table, waits_table
from oproj_lib.traced import Traced, trace_engine, umma_with_stages


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace_engine(umma_with_stages(768, 9, 3), target="sm_100a", batch=9)


@pytest.fixture(scope="module")
def timeline(traced: Traced) -> Timeline:
    return traced.modelled(CostModel(predecessor_end=1500))


def printed(table: object) -> str:
    console = Console(width=120, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_a_gantt_says_that_it_is_a_model(traced: Traced, timeline: Timeline, tmp_path: Path) -> None:
    picture = figures.gantt(timeline, title="TP16")
    assert picture.axes[0].get_title(loc="left") == "TP16: modelled, not measured"
    assert [label.get_text() for label in picture.axes[0].get_yticklabels()] == [
        "warp 0 (loader)", "warp 1 (loader)", "warp 2 (loader)", "warp 3 (loader)", "warp 4 (MMA)", "copies",
        "tensor core",
    ]  # fmt: skip
    assert (
        "full[0]" in picture.alt and "modelled" in picture.alt and picture.save(tmp_path / "a.png").exists()
    )
    order = figures.gantt(traced.logical())
    assert order.axes[0].get_title(loc="left") == "order only: no times" and "no times" in order.alt
    with pytest.raises(ValueError, match=r"start = 5, end = 5: choose start < end"):
        figures.gantt(timeline, start=5, end=5)


def test_a_gantt_shows_who_never_comes_through() -> None:
    broken = BROKEN_UMMA["one thread does not arrive"]
    stuck = trace_engine(broken.build(), target="sm_100a", batch=broken.batch)
    picture = figures.gantt(stuck.modelled())
    assert "5 waits never end" in picture.alt
    assert any("for ever" in text.get_text() for text in picture.axes[0].texts)


def test_ring_occupancy(timeline: Timeline) -> None:
    states = ring_slots(timeline, 3)
    picture = figures.ring_occupancy(timeline, states)
    assert len(picture.axes[0].patches) == len(states)
    assert "3 slots" in picture.alt and "12 blocks pass through" in picture.alt
    assert {state.state for state in states} == set(STATES)
    with pytest.raises(ValueError, match="no slot was ever filled"):
        figures.ring_occupancy(timeline, [])


def test_phase_diagram(timeline: Timeline) -> None:
    picture = figures.phase_diagram(timeline, ["full[0]", "empty[2]", "accumulator"])
    assert "full[0] 4, empty[2] 3, accumulator 1" in picture.alt  # 12 blocks through 3 slots
    with pytest.raises(ValueError, match=r"no barrier full\[3\] here; there are .*full\[0\]"):
        figures.phase_diagram(timeline, ["full[3]"])


def test_exposed_by_stages() -> None:
    picture = figures.exposed_by_stages(
        {"hidden": {1: 300.0, 2: 200.0}, "cold": {1: 400.0, 2: 350.0}}, chosen=2
    )
    assert "hidden: 1 stages 300, 2 stages 200" in picture.alt


def test_tables(timeline: Timeline) -> None:
    costs = printed(cost_table(CostModel()))
    assert "hbm_load" in costs and "700 cycles" in costs and "assumption" in costs
    waits = printed(waits_table(timeline, ["warp 4"]))
    assert "waits for full of any slot" in waits and "works" in waits


def test_the_role_table_is_the_kernel_s_own() -> None:
    table = role_table(OprojUmma)
    assert table.startswith("Who waits for whom") and "TMEM_READ" in table and "Raises" not in table
    with pytest.raises(ValueError, match="the documentation of Timeline has no table"):
        role_table(Timeline)


@pytest.mark.parametrize("name", ["no proxy fence", "unswizzled stores"])
def test_mistakes_are_reported(name: str) -> None:
    report = umma_mistake(name)
    assert report.kind == BROKEN_UMMA[name].kind and report.story
    assert report.findings
    assert report.kind in printed(mistakes_table([report]))


def test_an_unknown_mistake() -> None:
    with pytest.raises(ValueError, match=r"mistake = 'none': choose from no proxy fence, "):
        umma_mistake("none")
