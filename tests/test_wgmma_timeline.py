"""The timeline of the wgmma engine: a small trace with literal times, and what must hold in a real one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from test_timeline import PLAIN, check_invariants, op, trace

from oproj_lib.cost_model import CostModel
from oproj_lib.replay import modelled, warpgroup_n
from oproj_lib.timeline import Legend, ring_slots, umma_legend
from oproj_lib.traced import Traced, trace_engine, umma_with_stages, wgmma_with_stages
from oproj_lib.vgpu.ptx import Imm

MULTIPLY = op("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16")
COMMIT = op("wgmma.commit_group.sync.aligned", index=1)
WAIT_ONE, WAIT_ALL = (op("wgmma.wait_group.sync.aligned", Imm(n), index=2 + n) for n in (1, 0))


def test_groups_in_modelled_cycles() -> None:
    """A wgmma with N = 8 reads (64 + 8) * 32 bytes at 128: 18 cycles. The first begins at 0 and is done at 33,
    the latency of a matrix instruction; the second, issued at 2, begins at 18 and is done at 51. wait_group 1
    waits for the first."""
    run = {"lanes": 32}
    steps = [MULTIPLY, COMMIT, MULTIPLY, COMMIT, WAIT_ONE, WAIT_ALL]
    timeline = modelled(trace(*[("execute", 4, step, run) for step in steps]), Legend(), PLAIN)
    assert [(i.start, i.end) for i in timeline.of("tensor core 0")] == [(0, 18), (18, 36)]
    waits = timeline.of("warp 4", "wait")
    assert [(w.start, w.end, w.what) for w in waits] == [
        (4, 33, "multiplications"),
        (34, 51, "multiplications"),
    ]
    # A sub-partition per warp: warp 5 does not wait for warp 4.
    both = [("execute", warp, step, run) for warp in (4, 5) for step in steps]
    assert modelled(trace(*both), Legend(), PLAIN).makespan == timeline.makespan


def test_the_cost_of_a_wgmma() -> None:
    """N = 8: operands, 18 cycles. N = 256: 16 * 256 * 16 multiplications per sub-partition at 512 per cycle."""
    model = CostModel()
    assert (model.wgmma_occupancy(8), model.wgmma_occupancy(256)) == (18, 128)
    assert warpgroup_n(MULTIPLY) == 8
    with pytest.raises(ValueError, match=r"wgmma\.commit_group\S* is no wgmma of shape m64nNk16"):
        warpgroup_n(COMMIT)


@pytest.fixture(scope="module")
def by_stages() -> Mapping[int, Traced]:
    return {n: trace_engine(wgmma_with_stages(768, 16, n), target="sm_90a", batch=16) for n in (1, 4)}


@pytest.mark.parametrize("stages", [1, 4])
def test_invariants(by_stages: Mapping[int, Traced], stages: int) -> None:
    timeline = by_stages[stages].modelled(CostModel(predecessor_end=4000.0))
    check_invariants(timeline)
    assert not timeline.stuck and timeline.released == 4000
    for core in range(4):
        assert len(timeline.of(f"tensor core {core}")) == 12 * 4
    assert {i.role for i in timeline.of("warp 3")} == {"loader"}
    assert {i.role for i in timeline.of("warp 4")} == {"multiplier"}
    for slot in range(stages):
        arrivals = [a for a in timeline.arrivals if a.barrier == f"empty[{slot}]"]
        assert len(arrivals) == 4 * (12 // stages - 1)  # one lane of each of four warps, per refill
        assert all(a.lanes == 1 for a in arrivals)
    assert sum(i.bytes for i in timeline.of("copies")) == 2 * 768 * (64 + 16)  # W and x of the CTA, once
    states = ring_slots(timeline, stages)
    assert {s.block for s in states} == set(range(12)) and all(s.slot == s.block % stages for s in states)


def test_one_slot_is_slower_than_four(by_stages: Mapping[int, Traced]) -> None:
    late = CostModel(predecessor_end=10_000)
    one, four = (by_stages[n].modelled(late).makespan - 10_000 for n in (1, 4))
    assert four < one / 1.5


def test_the_logical_timeline_has_every_group(by_stages: Mapping[int, Traced]) -> None:
    timeline = by_stages[4].logical()
    flights = timeline.of("tensor core")
    assert len(flights) == 12 and all(flight.finished for flight in flights)  # one per K block
    assert [f.stage for f in flights] == [block % 4 for block in range(12)]


def test_part_of_a_timeline(by_stages: Mapping[int, Traced]) -> None:
    timeline = by_stages[4].modelled()
    part = timeline.only("warp 0", "copies")
    assert part.lanes == ("warp 0", "copies") and part.makespan == timeline.makespan
    assert part.of("warp 0") == timeline.of("warp 0")
    with pytest.raises(ValueError, match="lane 'warp 9': choose from warp 0, "):
        timeline.only("warp 9")


def test_a_legend_of_the_other_engine_does_not_fit(by_stages: Mapping[int, Traced]) -> None:
    with pytest.raises(ValueError, match=r"a ring of 1 stages from byte \d+ on has 3 mbarriers"):
        umma_legend(by_stages[4].trace, 1)
    with pytest.raises(ValueError, match="choose 1 to 12"):
        wgmma_with_stages(768, 16, 13)
    assert umma_with_stages(768, 16, 2).plan(16).stages == 2
    assert replace(PLAIN, clock_ghz=1.0).microseconds(1000) == 1.0
