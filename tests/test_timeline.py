"""Timelines: small traces by hand with literal times, and real ones with what must hold in any."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from oproj_lib import vgpu
from oproj_lib.cost_model import CostModel
from oproj_lib.lessons.mbarriers import HAND_OVER_LEGEND, hand_over
from oproj_lib.perfetto import chrome_trace, save_chrome_trace, validate_chrome_trace
from oproj_lib.replay import logical, modelled, tensor_shape
from oproj_lib.run import producer_for
from oproj_lib.timeline import (
    BarrierName,
    Interval,
    Legend,
    Timeline,
    covered,
    mbarrier_base,
    pack,
    producer_ring,
    ring_slots,
    umma_legend,
)
from oproj_lib.trace_steps import FAMILIES, family
from oproj_lib.traced import Traced, trace_engine, umma_with_stages
from oproj_lib.vgpu.decode import Op
from oproj_lib.vgpu.ptx import Imm
from oproj_lib.vgpu.trace import Event, Trace

# One number per thing, all different, so that a literal time says what went into it.
PLAIN = CostModel(
    issue=1, memory_issue=2, arithmetic=1, shared_load=30, l2_load=200, hbm_load=500, hbm_rate=16, l2_rate=32,
    tensor_issue=10, tensor_result=40, tensor_macs=4096, tensor_operands=128, barrier=5, fence=3,
)  # fmt: skip
FULL = Legend({0: "loader", 4: "MMA"}, {"mbarrier@0": BarrierName("full", 0)})


def op(opcode: str, *operands: Any, index: int = 0, control: str = "next", **registers: Any) -> Op:
    instruction = SimpleNamespace(opcode=opcode, operands=operands, source=None, text=opcode)
    rows = {"reads": (), "writes": (), "guard": None, **registers}
    return cast(Op, SimpleNamespace(instruction=instruction, index=index, control=control, **rows))


def trace(*events: tuple[str, int, Op, dict[str, Any]]) -> Trace:
    numbered = [Event(i, kind, warp, what, **more) for i, (kind, warp, what, more) in enumerate(events)]
    return Trace(0, 5, numbered)


COPY = op("cp.async.cg.shared.global", None, None, Imm(16))
ARRIVE = op("cp.async.mbarrier.arrive.noinc.shared::cta.b64", index=1)
TRY = op("mbarrier.try_wait.parity.shared::cta.b64", index=2, control="wait")
MMA = op("tcgen05.mma.cta_group::1.kind::f16", None, None, None, Imm(0x4040490), index=3)  # M 64, N 16
BAR = op("bar.sync", index=4, control="barrier")
PHASE = {"barrier": "mbarrier@0", "phase": 0}


def handover() -> Trace:
    """Warp 0 copies and arrives, warp 4 waits and starts an MMA."""
    return trace(
        ("execute", 4, TRY, {"lanes": 32}),
        ("wait", 4, TRY, {**PHASE, "lanes": 32}),
        ("execute", 0, COPY, {"lanes": 32}),
        ("execute", 0, ARRIVE, {"lanes": 32}),
        ("start", 0, ARRIVE, {"work": 1, "lanes": 32}),
        ("finish", 0, ARRIVE, {"work": 1, "lanes": 32}),
        ("arrive", -1, ARRIVE, {**PHASE, "work": 1, "lanes": 32}),
        ("complete", -1, ARRIVE, PHASE),
        ("execute", 4, TRY, {"lanes": 32}),
        ("pass", 4, TRY, {**PHASE, "lanes": 32}),
        ("execute", 4, MMA, {"lanes": 1}),
        ("start", 4, MMA, {"work": 2, "lanes": 1}),
        ("finish", 4, MMA, {"work": 2, "lanes": 1}),
    )


def test_a_hand_over_in_modelled_cycles() -> None:
    """512 bytes at 16 per cycle and 500 cycles of latency: 532. The barrier: 5 more. The MMA [64, 16, 16]
    reads 80 * 16 * 2 bytes at 128: 20 cycles, 10 after its issue."""
    timeline = modelled(handover(), FULL, PLAIN)
    (copy,) = timeline.of("copies")
    assert (copy.start, copy.end, copy.bytes, copy.stage, copy.phase) == (0, 532, 512, 0, 0)
    (wait,) = timeline.of("warp 4", "wait")
    assert (wait.start, wait.end, wait.what, wait.role) == (0, 537, "full[0]", "MMA")
    (mma,) = timeline.of("tensor core")
    assert (mma.start, mma.end, mma.stage, mma.phase) == (547, 567, 0, 0)
    assert timeline.makespan == 567 and not timeline.stuck
    (phase,) = timeline.phases
    assert (phase.barrier, phase.stage, phase.number, phase.parity, phase.end) == ("full[0]", 0, 0, 0, 537)
    assert [(a.barrier, a.time, a.lanes) for a in timeline.arrivals] == [("full[0]", 532, 32)]


def test_the_same_in_logical_steps() -> None:
    timeline = logical(handover(), FULL)
    (wait,) = timeline.of("warp 4", "wait")
    assert (wait.start, wait.end) == (1, 9)
    (copy,) = timeline.of("copies")
    assert (copy.start, copy.end) == (3, 5)
    assert timeline.makespan == 13 and timeline.clock == "logical steps"


def test_every_constant_has_an_effect_on_time_where_it_should() -> None:
    base = modelled(handover(), FULL, PLAIN).makespan
    for change, difference in (
        ({"hbm_load": 600.0}, 100),
        ({"hbm_rate": 32.0}, -16),
        ({"barrier": 9.0}, 4),
        ({"tensor_issue": 30.0}, 20),
        ({"tensor_operands": 64.0}, 20),
    ):
        assert modelled(handover(), FULL, replace(PLAIN, **change)).makespan - base == difference, change


def test_behind_griddepcontrol_wait_x_comes_from_the_l2() -> None:
    wait = op("griddepcontrol.wait", index=7)
    events = trace(("execute", 0, wait, {"lanes": 32}), ("execute", 0, COPY, {"lanes": 32}))
    timeline = modelled(events, FULL, replace(PLAIN, predecessor_end=1000.0))
    (copy,) = timeline.of("copies")
    assert (copy.start, copy.end) == (1001, 1001 + 512 / 32 + 200)
    (held,) = timeline.of("warp 0", "wait")
    assert (held.what, held.start, held.end) == ("previous kernel", 0, 1000) and timeline.released == 1000


def test_a_wait_for_groups_leaves_the_latest_ones_in_flight() -> None:
    commit = op("cp.async.commit_group", index=8)
    wait = op("cp.async.wait_group", Imm(1), index=9)
    pair = [("execute", 0, COPY, {"lanes": 32}), ("execute", 0, commit, {"lanes": 32})]
    timeline = modelled(trace(*pair, *pair, ("execute", 0, wait, {"lanes": 32})), FULL, PLAIN)
    assert [(c.phase, c.end) for c in timeline.of("copies")] == [(0, 532), (1, 564)]  # one after another
    (held,) = timeline.of("warp 0", "wait")
    assert (held.what, held.end) == ("copies", 532)


def test_a_named_barrier_waits_for_the_last() -> None:
    slow = op("add.s32", index=5)
    place = {"barrier": "barrier 0", "phase": 0, "lanes": 32}
    events = trace(
        ("arrive and wait", 0, BAR, place), *[("execute", 1, slow, {"lanes": 32})] * 7,
        ("arrive and wait", 1, BAR, place), ("complete", -1, BAR, {"barrier": "barrier 0", "phase": 0}),
    )  # fmt: skip
    timeline = modelled(events, Legend(), PLAIN)
    assert [(w.lane, w.start, w.end) for w in timeline.intervals if w.kind == "wait"] == [
        ("warp 0", 1, 13),  # 7 instructions, the barrier's own, 5 of latency
        ("warp 1", 8, 13),
    ]


def test_data_that_is_not_there_yet_stalls() -> None:
    load = op("ld.shared.b32", index=5, writes=("r1",))
    use = op("add.s32", index=6, reads=("r1",))
    timeline = modelled(
        trace(("execute", 0, load, {"lanes": 32}), ("execute", 0, use, {"lanes": 32})), Legend(), PLAIN
    )
    (stall,) = timeline.of("warp 0", "stall")
    assert (stall.what, stall.start, stall.end) == ("shared memory", 2, 30)


def test_warps_of_one_sub_partition_share_its_issue_slot() -> None:
    add = op("add.s32")
    events = [("execute", warp, add, {"lanes": 32}) for warp in (0, 4, 1)]
    ends = {i.lane: i.end for i in modelled(trace(*events), Legend(), PLAIN).intervals}
    assert ends == {"warp 0": 1, "warp 4": 2, "warp 1": 1}


def test_a_deadlock_gives_a_wait_that_never_ends() -> None:
    events = handover()
    events.events = [e for e in events.events if e.order not in (5, 6, 7, 8, 9, 10, 11, 12)]
    for timeline in (modelled(events, FULL, PLAIN), logical(events, FULL)):
        (stuck,) = timeline.stuck
        assert (stuck.lane, stuck.what, stuck.end) == ("warp 4", "full[0]", timeline.makespan)
        assert validate_chrome_trace(chrome_trace([timeline])) == len(timeline.intervals)


def test_an_empty_trace() -> None:
    timeline = modelled(trace(), Legend(), PLAIN)
    assert timeline.intervals == () and timeline.makespan == 0 and timeline.to_rows() == []
    assert validate_chrome_trace(chrome_trace([timeline])) == 0


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("cp.async.cg.shared.global", "copy"),
        ("cp.async.commit_group", "synchronisation"),
        ("cp.async.bulk.prefetch.L2.global", "prefetch"),
        ("ld.param.u64", "arithmetic"),
        ("ld.global.v4.b32", "global memory"),
        ("multimem.st.relaxed.sys.global.v4.bf16x2", "global memory"),
        ("st.shared.b32", "shared memory"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "shared memory"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "matrix"),
        ("tcgen05.commit.cta_group::1", "matrix"),
        ("tcgen05.ld.sync.aligned.32x32b.x16.b32", "tensor memory"),
        ("tcgen05.fence::after_thread_sync", "synchronisation"),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16", "matrix"),
        ("wgmma.fence.sync.aligned", "synchronisation"),
        ("wgmma.wait_group.sync.aligned", "synchronisation"),
        ("fma.rn.f32", "arithmetic"),
    ],
)
def test_families(opcode: str, expected: str) -> None:
    assert family(op(opcode)) == expected and expected in FAMILIES


def test_the_cost_of_a_tensor_mma() -> None:
    """M = 128, N = 256: 128 * 256 * 16 / 4096 = 128 cycles. M = 64 takes as long on half of the unit. N = 16:
    the operands, (64 + 16) * 16 * 2 / 128 = 20 cycles."""
    model = CostModel()
    assert (model.tensor_mma(128, 256, 16), model.tensor_mma(64, 256, 16)) == (128, 128)
    assert model.tensor_mma(64, 16, 16) == 20
    assert tensor_shape(MMA) == (64, 16, 16)
    assert tensor_shape(op("tcgen05.mma", None, None, None, "a register")) == (64, 64, 16)
    assert model.microseconds(1755) == pytest.approx(1.0)
    assert all(row["why"] for row in model.table())


@pytest.mark.parametrize(("name", "value"), [("hbm_rate", 0.0), ("barrier", -1.0), ("schedulers", 0.0)])
def test_impossible_costs(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} = {value}: choose (more than|at least) 0"):
        CostModel(**{name: value})


# Real runs


@pytest.fixture(scope="module")
def by_stages() -> dict[int, Traced]:
    return {n: trace_engine(umma_with_stages(768, 16, n), target="sm_100a", batch=16) for n in (1, 2, 4, 12)}


def check_invariants(timeline: Timeline) -> None:
    for lane in timeline.lanes:
        if lane.startswith(("warp", "tensor core")):
            for a, b in itertools.pairwise(timeline.of(lane)):
                assert a.end <= b.start, (a, b)
    completed = {(p.barrier, p.number): p.end for p in timeline.phases if p.completed}
    for item in timeline.intervals:
        assert 0 <= item.start <= item.end <= timeline.makespan
        if item.kind == "wait" and item.barrier and item.finished:
            assert item.end == completed[item.barrier, item.phase]
    arrivals = {(a.barrier, a.phase, a.time) for a in timeline.arrivals}
    for barrier, phase, time in arrivals:
        assert time <= completed.get((barrier, phase), timeline.makespan)


@pytest.mark.parametrize("stages", [1, 4, 12])
def test_invariants_of_the_umma_engine(by_stages: dict[int, Traced], stages: int) -> None:
    timeline = by_stages[stages].modelled()
    check_invariants(timeline)
    assert len(timeline.of("tensor core")) == 12 * 4
    for slot in range(stages):  # one phase of full[slot] per block, 256 arrivals each
        full = [p for p in timeline.phases if p.barrier == f"full[{slot}]"]
        assert len(full) == 12 // stages and all(p.completed for p in full)
        for phase in full:
            assert (
                sum(
                    a.lanes
                    for a in timeline.arrivals
                    if (a.barrier, a.phase) == (phase.barrier, phase.number)
                )
                == 256
            )
    assert sum(i.bytes for i in timeline.of("copies")) == 2 * 768 * (64 + 16)  # W and x of the CTA, once


def test_the_makespan_is_no_shorter_than_any_resource_needs(by_stages: dict[int, Traced]) -> None:
    model = CostModel()
    for traced in by_stages.values():
        timeline = traced.modelled(model)
        issued = max(sum(i.duration for i in timeline.of(f"warp {w}", "run")) for w in range(5))
        assert timeline.makespan >= max(issued, 48 * model.tensor_mma(64, 16, 16))
        assert timeline.makespan >= 2 * 768 * 64 / model.hbm_rate + model.hbm_load  # all of W has to come


def test_more_stages_are_never_slower_once_their_weights_are_there(by_stages: dict[int, Traced]) -> None:
    """Not so when the kernel starts cold: its first block waits for the weights of all stages."""
    late = CostModel(predecessor_end=10_000)
    exposed = [traced.modelled(late).makespan - 10_000 for traced in by_stages.values()]
    assert exposed == sorted(exposed, reverse=True) and exposed[-1] < exposed[0] / 2


def test_a_late_predecessor_hides_the_weights(by_stages: dict[int, Traced]) -> None:
    ends = (0.0, 1000.0, 2000.0, 10_000.0)
    exposed = [by_stages[12].modelled(CostModel(predecessor_end=end)).makespan - end for end in ends]
    assert exposed == sorted(exposed, reverse=True)


def test_the_order_between_warps_does_not_change_modelled_time() -> None:
    """The model replays what each warp did, not when the virtual GPU let it."""
    producer = producer_for(768, 16, group_tiles=1, staged_blocks=2)
    usual = trace_engine(producer, target="sm_90a", batch=16)
    other = trace_engine(producer, target="sm_90a", batch=16, program=usual.program, schedule=3)
    assert [e.warp for e in other.trace.events] != [e.warp for e in usual.trace.events]
    assert other.modelled().makespan == usual.modelled().makespan


def test_a_wait_that_was_over_before_anything_happened() -> None:
    """The wrong parity at a fresh barrier: "phase -1" is no phase that anybody could wait for."""
    early = ("pass", 4, TRY, {"barrier": "mbarrier@0", "phase": -1, "lanes": 32})
    timeline = modelled(trace(("execute", 4, TRY, {"lanes": 32}), early), FULL, PLAIN)
    assert not timeline.stuck and timeline.of("warp 4", "wait") == ()


def test_the_ring_of_the_umma_engine(by_stages: dict[int, Traced]) -> None:
    states = ring_slots(by_stages[4].modelled(), 4)
    assert {s.block for s in states} == set(range(12)) and all(s.slot == s.block % 4 for s in states)
    for slot in range(4):
        for a, b in itertools.pairwise([s for s in states if s.slot == slot]):
            assert a.end <= b.start


@pytest.mark.parametrize("staged_blocks", [0, 2])
def test_the_ring_of_the_producer(staged_blocks: int) -> None:
    producer = producer_for(768, 24, group_tiles=1, staged_blocks=staged_blocks)
    timeline = trace_engine(producer, target="sm_90a", batch=24).modelled()
    check_invariants(timeline)
    states = producer_ring(timeline, int(staged_blocks > 0))
    assert [s.block for s in states if s.state == "being read"] == [0, 1, 2]
    read = {s.block: s for s in states if s.state == "being read"}
    load = {s.block: s for s in states if s.state == "loading"}
    assert read[0].start <= load[1].start < read[0].end <= load[2].start


def test_names_follow_the_ring(by_stages: dict[int, Traced]) -> None:
    trace = by_stages[4].trace
    legend = umma_legend(trace, 4)
    base = mbarrier_base(trace)
    assert base == 4 * (8192 + 128 * 16)  # behind the ring
    assert str(legend.name(f"mbarrier@{base + 8 * 5}")) == "empty[1]"
    assert (legend.role(0), legend.role(4), legend.role(9)) == ("loader", "MMA", "")
    with pytest.raises(
        ValueError, match=r"a ring of 3 stages .* has 7 mbarriers; the trace also has mbarrier@"
    ):
        umma_legend(trace, 3)
    with pytest.raises(ValueError, match="this trace has no mbarriers"):
        mbarrier_base(Trace(0, 1))


def test_stages_that_do_not_exist() -> None:
    assert umma_with_stages(768, 16, 12).plan(16).stages == 12
    with pytest.raises(ValueError, match=r"stages = 13: .* k = 768 has 12 K blocks; choose 1 to 12"):
        umma_with_stages(768, 16, 13)
    with pytest.raises(ValueError, match=r"stages = 0: .*choose 1 to 14"):
        umma_with_stages(1536, 64, 0)


@pytest.mark.parametrize("settings", [{"expected": 33}, {"arriving": 31}, {"flip": 1}])
@pytest.mark.parametrize("make", [modelled, logical])
def test_kernels_that_hang_have_timelines(settings: dict[str, int], make: Any) -> None:
    import numpy as np

    gpu = vgpu.VirtualGPU()
    out = gpu.upload(np.zeros((3, 32), np.uint32), "out")
    report = gpu.launch(vgpu.load(hand_over(**settings)), grid=1, block=64, args=[out], trace=0)
    assert {finding.kind for finding in report.findings} == {"deadlock"} and report.trace is not None
    timeline = make(report.trace, HAND_OVER_LEGEND)
    assert {(i.role, i.what) for i in timeline.stuck} == {("reader", "full"), ("writer", "empty")}
    check_invariants(timeline)


# The table and its exports


def test_the_table(by_stages: dict[int, Traced]) -> None:
    timeline = by_stages[4].modelled()
    rows, columns = timeline.to_rows(), timeline.as_columns()
    assert list(rows[0]) == list(columns) and {len(column) for column in columns.values()} == {len(rows)}
    assert [row["end"] for row in rows] == columns["end"]
    load = next(row for row in rows if row["what"] == "copy")
    assert (
        load["file"] == "oproj_lib/kernels/ring_engine.py"
        and load["function"] == "load_weight_tile"
        and load["line"] > 0
    )


def interval(start: float, end: float) -> Interval:
    return Interval("copies", -1, "", "in flight", "x", "", -1, -1, start, end)


def test_packing_and_covering() -> None:
    items = [interval(0, 4), interval(1, 3), interval(3, 5), interval(4, 6)]
    assert [row for row, _ in pack(items)] == [0, 1, 1, 0]
    assert covered(items) == 6 and covered([interval(0, 1), interval(5, 6)]) == 2 and covered([]) == 0


def test_chrome_trace(by_stages: dict[int, Traced], tmp_path: Path) -> None:
    timeline = by_stages[4].modelled()
    path = save_chrome_trace([timeline, replace(timeline, cta=7)], tmp_path / "trace.json")
    trace = json.loads(path.read_text())
    assert validate_chrome_trace(trace) == 2 * len(timeline.intervals)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] in ("process_name", "thread_name")}
    assert {"CTA 0 (modelled cycles)", "CTA 7 (modelled cycles)", "warp 4: MMA", "tensor core"} <= names
    assert "never measured" in trace["otherData"]["clock"]
    assert any(e["name"] == "wait for full[0]" and e["cat"] == "wait" for e in trace["traceEvents"])


def test_timelines_that_do_not_go_together(by_stages: dict[int, Traced]) -> None:
    timeline = by_stages[1].modelled()
    with pytest.raises(ValueError, match=r"two timelines of one CTA: \[0, 0\]"):
        chrome_trace([timeline, timeline])
    with pytest.raises(ValueError, match="different clocks, logical steps and modelled cycles"):
        chrome_trace([timeline, replace(by_stages[1].logical(), cta=1)])


NAME = {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "warp 1"}}
SLICE = {"name": "a", "ph": "X", "pid": 0, "tid": 1, "ts": 0, "dur": 2}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (None, "no list"),
        ([{"name": "a", "ph": "X", "tid": 0}], "event 0 has no pid"),
        ([NAME, {**SLICE, "ph": "B"}], "event 1: phase 'B'"),
        ([NAME, {**SLICE, "dur": -1}], "event 1: ts and dur"),
        ([SLICE], "process 0, thread 1 has no name"),
        ([NAME, SLICE, {**SLICE, "ts": 1}], "slices overlap at 1"),
    ],
)
def test_invalid_chrome_traces(events: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_chrome_trace({"traceEvents": events})
    assert validate_chrome_trace({"traceEvents": [NAME, SLICE]}) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expected": 0}, "expected = 0: mbarrier.init takes 1 to 1048575"),
        ({"arriving": 33}, "arriving = 33: the writer has 32 lanes"),
        ({"flip": 2}, "flip = 2"),
        ({"rounds": 0}, "rounds = 0"),
    ],
)
def test_hand_overs_that_do_not_exist(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hand_over(**settings)


@pytest.mark.parametrize("ctas", [0, 113])
def test_ctas_that_do_not_exist(by_stages: dict[int, Traced], ctas: int) -> None:
    with pytest.raises(ValueError, match=rf"ctas = {ctas}: .* has 112, choose 1 to 112"):
        trace_engine(by_stages[1].engine, target="sm_100a", batch=16, ctas=ctas)
