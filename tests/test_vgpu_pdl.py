"""Programmatic dependent launch: when a dependent starts, what griddepcontrol.wait waits for, and what a grid
must not touch before it. Expectations are those of the PTX ISA ("griddepcontrol") and the CUDA Programming Guide
("Programmatic Dependent Launch and Synchronization")."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from vgpu_kernels import module

from oproj_lib import vgpu

SEEDS = range(5)
schedules = pytest.mark.parametrize("schedule", ["program", *SEEDS])
REGISTERS = (
    ".reg .pred %p<9>;",
    ".reg .b32 %id, %cta, %size, %thread, %r<9>;",
    ".reg .b64 %a, %b, %at, %bt, %rd<9>;",
    "ld.param.u64 %a, [p_a];",
    "ld.param.u64 %b, [p_b];",
    "mov.u32 %id, %tid.x;",
    "mov.u32 %cta, %ctaid.x;",
    "mov.u32 %size, %ntid.x;",
    "mad.lo.u32 %thread, %cta, %size, %id;",
    "mad.wide.u32 %at, %thread, 4, %a;",
    "mad.wide.u32 %bt, %thread, 4, %b;",
)


@cache
def kernel(body: str) -> vgpu.Module:
    """A kernel of two addresses, %a and %b; %at and %bt are this thread's words there. Line n of the body is line n
    of kernel.py."""
    return vgpu.load(module(body, declarations=REGISTERS, parameters=["p_a", "p_b"]))


class Chain:
    """Grids of 2 x 32 threads in one stream, over buffers x, y and z of 64 words (x: 0, 1, 2, ...)."""

    def __init__(self) -> None:
        self.gpu = vgpu.VirtualGPU()
        self.buffers = {name: self.gpu.upload(np.zeros(64, np.uint32), name) for name in "xyz"}
        self.buffers["x"].array[:] = np.arange(64)
        self.grids: list[vgpu.GridHandle] = []

    def add(self, body: str, arguments: str, **options: Any) -> vgpu.GridHandle:
        name = f"grid {len(self.grids) + 1}"
        args = [self.buffers[item] for item in arguments]
        options = {"grid": 2, "block": 32, "args": args, "name": name, **options}
        self.grids.append(self.gpu.enqueue(kernel(body), **options))
        return self.grids[-1]

    def run(self, schedule: str | int = "program", **options: Any) -> list[tuple[int, str, int]]:
        """(grid, kind, line) of all findings."""
        reports = self.gpu.synchronize(schedule, **options)
        return [
            (number, finding.kind, finding.source.line if finding.source else 0)
            for number, report in enumerate(reports, 1)
            for finding in report.findings
        ]

    def words(self, name: str) -> list[int]:
        return list(self.buffers[name].array.tolist())


COPY = "ld.global.u32 %r1, [%at];\nadd.u32 %r1, %r1, 1;\nst.global.u32 [%bt], %r1;"
TRIGGER, WAIT = "griddepcontrol.launch_dependents;\n", "griddepcontrol.wait;\n"


@schedules
def test_a_dependent_that_waits_reads_what_its_predecessor_wrote(schedule: str | int) -> None:
    chain = Chain()
    first = chain.add(TRIGGER + COPY, "xy")
    second = chain.add(WAIT + COPY, "yz", pdl=True)
    assert chain.run(schedule) == []
    assert chain.words("z") == [i + 2 for i in range(64)]
    assert first.times.end is not None and second.times.wait_end is not None
    assert second.times.wait_end >= first.times.end


@schedules
def test_without_the_attribute_a_grid_starts_after_everything_before_it(schedule: str | int) -> None:
    chain = Chain()
    first = chain.add(TRIGGER + COPY, "xy")
    second = chain.add(COPY, "yz")
    assert chain.run(schedule) == []
    assert chain.words("z") == [i + 2 for i in range(64)]
    assert first.times.end is not None and second.times.start is not None
    assert second.times.start >= first.times.end


POLL_THEN_COPY = """griddepcontrol.launch_dependents;
SPIN:
ld.volatile.global.u32 %r2, [%b+128];
setp.ne.u32 %p1, %r2, 77;
@%p1 bra SPIN;
st.global.u32 [%bt], %thread;"""
FLAG = """mov.u32 %r1, 77;
st.volatile.global.u32 [%a+128], %r1;
griddepcontrol.wait;"""


def test_a_dependent_runs_beside_its_predecessor_once_that_has_triggered() -> None:
    """The predecessor cannot end before its dependent has started: only an early start lets both end."""
    chain = Chain()
    first = chain.add(POLL_THEN_COPY, "xy", grid=1)
    second = chain.add(FLAG, "yz", pdl=True)
    chain.run()
    assert chain.words("y")[:32] == list(range(32))
    times = first.times, second.times
    assert None not in (
        times[0].trigger,
        times[1].start,
        times[0].end,
        times[1].wait_begin,
        times[1].wait_end,
    )
    assert times[0].trigger <= times[1].start < times[1].wait_begin < times[0].end <= times[1].wait_end  # type: ignore[operator]


@pytest.mark.parametrize(
    "trigger", ["", "setp.eq.u32 %p2, %cta, 0;\n@%p2 griddepcontrol.launch_dependents;\n"]
)
def test_no_early_start_before_every_cta_has_triggered(trigger: str) -> None:
    """Nobody triggers, or CTA 1 does not and does not exit: the dependent never starts, and the flag never comes."""
    chain = Chain()
    chain.add(trigger + POLL_THEN_COPY.removeprefix(TRIGGER), "xy")
    chain.add(FLAG, "yz", pdl=True)
    line = 2 + trigger.count("\n")
    # Line numbers count from SPIN, which is the first or third line.
    assert chain.run() == [(1, "polls for ever", line), (2, "deadlock", 0)]


def test_without_the_attribute_a_trigger_lets_nobody_start() -> None:
    chain = Chain()
    chain.add(POLL_THEN_COPY, "xy", grid=1)
    chain.add(FLAG, "yz")
    assert chain.run() == [(1, "polls for ever", 3), (2, "deadlock", 0)]


def test_some_seeds_do_not_use_the_permission_to_start_early() -> None:
    """ "This behavior is opportunistic and not guaranteed": who relies on it deadlocks on some schedules."""
    outcomes = set()
    for seed in range(12):
        chain = Chain()
        chain.add(POLL_THEN_COPY, "xy", grid=1)
        second = chain.add(FLAG, "yz", pdl=True)
        chain.run(seed)
        outcomes |= {finding.message for finding in second.report.findings} or {"ended"}
    late = "grid 1 before it in its stream never completes (all its CTAs have triggered, but a GPU need not start a "
    assert f"grid 2 never starts: {late}dependent early)" in outcomes
    assert "ended" in outcomes


def test_ctas_that_exit_count_as_triggered() -> None:
    """CTA 0 triggers and polls, CTA 1 exits."""
    body = "setp.eq.u32 %p2, %cta, 1;\n@%p2 exit;\n" + POLL_THEN_COPY
    chain = Chain()
    chain.add(body, "xy")
    chain.add(FLAG, "yz", pdl=True)
    chain.run()
    assert chain.words("y")[:32] == list(range(32))


def test_wait_without_a_predecessor_in_flight_returns_at_once() -> None:
    chain = Chain()
    chain.add(WAIT + COPY, "xy", pdl=True)
    assert chain.run() == []
    chain.add(WAIT + COPY, "yz", pdl=True)  # the first has completed: synchronize() returned
    assert chain.run() == []
    assert chain.words("z") == [i + 2 for i in range(64)]


# -- what must not be touched before the wait -------------------------------------------------------------------------


@schedules
@pytest.mark.parametrize(
    ("first", "second", "lines"),
    [
        (COPY, COPY + "\n" + WAIT, (3, 1)),  # trigger by exit: also then only the wait makes results visible
        (TRIGGER + COPY, COPY + "\n" + WAIT, (4, 1)),
        (COPY + "\n" + TRIGGER, COPY + "\n" + WAIT, (3, 1)),
        (COPY, COPY, (3, 1)),  # never waits
    ],
)
def test_reading_what_the_predecessor_writes_before_the_wait(
    schedule: str | int, first: str, second: str, lines: tuple[int, int]
) -> None:
    chain = Chain()
    chain.add(first, "xy")
    chain.add(second, "yz", pdl=True)
    assert chain.run(schedule) == [(2, "too early", lines[1])]
    message = chain.grids[1].report.findings[0].message
    assert (
        message.startswith("read of y [")
        and "before a griddepcontrol.wait that orders it after grid 1" in message
    )
    assert f"which writes it at kernel.py:{lines[0]}" in message


READ_THEN_FLAG = """ld.global.u32 %r3, [%at];
mov.u32 %r1, 77;
st.volatile.global.u32 [%a+128], %r1;
griddepcontrol.wait;
st.global.u32 [%bt], %r3;"""


def test_an_early_read_is_found_when_the_write_comes_later() -> None:
    """The dependent reads y and then lets the predecessor go on, which writes it."""
    chain = Chain()
    chain.add(POLL_THEN_COPY, "xy", grid=1)
    chain.add(READ_THEN_FLAG, "yz", pdl=True, grid=1)
    assert chain.run() == [(2, "too early", 1)]
    assert chain.words("z")[:32] == [0] * 32, "the reads did come first"


@pytest.mark.parametrize(
    ("early", "found"),
    [
        ("ld.global.u32 %r3, [%at];", True),
        ("ld.weak.global.u32 %r3, [%at];", True),
        ("ld.global.nc.u32 %r3, [%at];", True),
        ("ld.global.L1::no_allocate.u32 %r3, [%at];", True),
        ("ld.volatile.global.u32 %r3, [%at];", False),  # polls
        ("ld.relaxed.sys.global.u32 %r3, [%at];", False),
        ("ld.acquire.gpu.global.u32 %r3, [%at];", False),
        ("atom.global.or.b32 %r3, [%at], 0;", True),  # it writes, too
        ("st.global.u32 [%at], %id;", True),  # overwrites what the predecessor writes
        ("prefetch.global.L2 [%at];", False),
    ],
)
def test_which_accesses_may_come_early(early: str, found: bool) -> None:
    chain = Chain()
    chain.add(TRIGGER + COPY, "xy")
    chain.add(early + "\n" + WAIT, "yz", pdl=True)
    assert chain.run() == ([(2, "too early", 1)] if found else [])


def test_cp_async_before_the_wait_is_too_early() -> None:
    early = "mov.u32 %r1, 0;\ncp.async.ca.shared.global [%r1], [%at], 4;\ncp.async.wait_all;\n" + WAIT
    chain = Chain()
    chain.add(TRIGGER + COPY, "xy")
    chain.add(early, "yz", pdl=True, dynamic_shared_bytes=16)
    assert chain.run() == [(2, "too early", 2)]


def test_an_early_read_of_what_the_predecessor_multicasts() -> None:
    chain = Chain()
    chain.buffers["w"] = chain.gpu.multicast([chain.buffers["y"]])  # type: ignore[assignment]
    chain.add(TRIGGER + "multimem.st.relaxed.sys.global.b32 [%bt], %id;", "xw")
    chain.add(COPY + "\n" + WAIT, "yz", pdl=True)
    assert chain.run() == [(2, "too early", 1)]


def test_writing_early_what_the_predecessor_reads() -> None:
    chain = Chain()
    chain.add(TRIGGER + COPY, "xy")
    chain.add("st.global.u32 [%at], %id;\n" + WAIT, "xz", pdl=True)
    assert chain.run() == [(2, "too early", 1)]
    assert "write of x [" in chain.grids[1].report.findings[0].message


@schedules
def test_what_the_predecessor_does_not_touch_may_be_read_early(schedule: str | int) -> None:
    """Neighbouring bytes: x[0..31] is read early, the predecessor writes x[32..63]."""
    chain = Chain()
    chain.add(TRIGGER + "st.global.u32 [%at+128], %id;", "xy", grid=1)
    chain.add(COPY + "\n" + WAIT, "xz", pdl=True, grid=1)
    assert chain.run(schedule) == []


def test_a_wait_counts_for_those_who_meet_it_at_a_barrier() -> None:
    """Thread 0 waits, bar.sync, everybody reads; warp 1 does not take part in the broken version."""
    wait = "setp.eq.u32 %p1, %id, 0;\n@%p1 griddepcontrol.wait;\n"
    for barrier, found in (("bar.sync 0;\n", []), ("", [(2, "too early", 3)])):
        chain = Chain()
        chain.add(TRIGGER + COPY, "xy")
        chain.add(wait + barrier + COPY, "yz", pdl=True, grid=1, block=64)
        assert chain.run() == found


def test_a_flag_with_acquire_and_release_replaces_the_wait() -> None:
    """The guide: "... or other means to verify that the result data from the primary is available"."""
    publish = TRIGGER + COPY + "\nbar.sync 0;\nfence.acq_rel.gpu;\nst.relaxed.gpu.global.u32 [%a+128], 77;"
    spin = "SPIN:\nld.ORDER.global.u32 %r2, [%b+128];\nsetp.ne.u32 %p1, %r2, 77;\n@%p1 bra SPIN;\n"
    for order, found in (("acquire.gpu", []), ("volatile", [(2, "too early", 5), (2, "too early", 7)])):
        chain = Chain()
        chain.add(publish, "xy", grid=1)
        chain.add(spin.replace("ORDER", order) + COPY, "yx", pdl=True, grid=1)
        assert chain.run() == found
        assert chain.words("x")[:32] == [i + 2 for i in range(32)]


# -- longer chains ----------------------------------------------------------------------------------------------------


@schedules
def test_what_the_predecessor_waited_for_is_ordered_too(schedule: str | int) -> None:
    """Grid 3 reads, before its own wait, what grid 1 wrote: right if grid 2 triggers after its wait."""
    for second, found in ((WAIT + TRIGGER, []), (TRIGGER + WAIT, [(3, "too early", 1)])):
        chain = Chain()
        chain.add(TRIGGER + COPY, "xy")
        chain.add(second, "xx", pdl=True)
        chain.add(COPY + "\n" + WAIT, "yz", pdl=True)
        assert chain.run(schedule) == found


@schedules
def test_waiting_is_not_transitive_through_a_grid_that_never_waits(schedule: str | int) -> None:
    for second, found in ((TRIGGER + WAIT, []), (TRIGGER, [(3, "too early", 2)])):
        chain = Chain()
        chain.add(TRIGGER + COPY, "xy")
        chain.add(second, "xx", pdl=True)
        chain.add(WAIT + COPY, "yz", pdl=True)
        assert chain.run(schedule) == found


def test_a_wait_returns_although_an_older_grid_still_runs() -> None:
    """Grid 1 polls for what grid 3 writes after its wait for grid 2, which never waits."""
    chain = Chain()
    first = chain.add(POLL_THEN_COPY, "xy", grid=1)
    chain.add(TRIGGER, "xx", pdl=True)
    third = chain.add(WAIT + FLAG, "yz", pdl=True)
    chain.run()
    assert third.times.wait_end is not None and first.times.end is not None
    assert third.times.wait_end < first.times.end


@schedules
def test_a_grid_without_the_attribute_is_ordered_after_all(schedule: str | int) -> None:
    chain = Chain()
    chain.add(TRIGGER + COPY, "xy")
    chain.add(TRIGGER, "xx", pdl=True)
    chain.add(COPY, "yz")
    assert chain.run(schedule) == []
    assert chain.words("z") == [i + 2 for i in range(64)]


def test_a_mailbox_may_be_polled_before_the_wait() -> None:
    """Relaxed stores against volatile loads; with a weak store only the strict rule, the letter of the manual,
    speaks."""
    spin = "SPIN:\nld.volatile.global.u32 %r1, [%at];\nsetp.eq.u32 %p1, %r1, 0;\n@%p1 bra SPIN;\n"
    for store, strict, found in (
        ("st.relaxed.sys.global.u32", True, []),
        ("st.global.u32", False, []),
        ("st.global.u32", True, [(2, "too early", 2)]),
    ):
        chain = Chain()
        chain.add(f"{TRIGGER}add.u32 %r1, %thread, 5;\n{store} [%bt], %r1;", "xy")
        chain.add(spin + "st.global.u32 [%bt], %r1;", "yz", pdl=True)
        assert chain.run(strict=strict) == found
        assert chain.words("z") == [i + 5 for i in range(64)]


# -- events -----------------------------------------------------------------------------------------------------------


def test_events_of_a_grid_are_on_the_clock_of_all() -> None:
    chain = Chain()
    first = chain.add(TRIGGER + COPY, "xy", trace=1)
    second = chain.add(WAIT + COPY, "yz", pdl=True, trace=0, block=64, grid=1)
    chain.run()
    traces = first.report.trace, second.report.trace
    assert traces[0] is not None and traces[1] is not None
    kinds = [[(event.kind, event.warp) for event in trace.grid_events] for trace in traces if trace]
    assert kinds[0] == [("start", -1), ("trigger", 0), ("end", -1)]
    assert kinds[1] == [("start", -1), ("wait end", 0), ("wait end", 1), ("end", -1)]
    assert [event.time for event in traces[0].grid_events] == [0, first.times.trigger, first.times.end]
    assert (traces[0].grid, traces[1].rank) == ("grid 1", 0)
    assert first.times.end is not None
    assert max(event.time for event in traces[0].events) == first.times.end
    assert min(event.time for event in traces[1].events) > first.times.end


def test_a_grid_has_no_report_before_it_has_run() -> None:
    chain = Chain()
    grid = chain.add(COPY, "xy")
    with pytest.raises(RuntimeError, match=r"grid 'grid 1' has not run: call synchronize\(\) first"):
        _ = grid.report
    with pytest.raises(RuntimeError, match="1 grids are enqueued"):
        chain.gpu.launch(kernel("ret;"), args=[chain.buffers["x"], chain.buffers["y"]])
