"""mbarriers: phases, parity, counts, transactions, and what goes wrong with them (PTX ISA, "mbarrier")."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vgpu_kernels import SCHEDULES, refused, run

from oproj_lib import vgpu

SHARED = [".shared .align 16 .b8 area[256];"]
INIT = """
    mov.u32 %r20, area;
    setp.ne.u32 %p9, %id, 0;
    @%p9 bra READY;
    mbarrier.init.shared::cta.b64 [%r20], {count};
READY:
    bar.sync 0;
"""
WAIT = "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r20], {parity};\n@!%p1 bra {label};"
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def launch(
    body: str, *, count: int = 32, schedule: str | int = "program", block: int = 32, **options: Any
) -> tuple[np.ndarray, vgpu.Report]:
    return run(
        INIT.format(count=count) + body, block=block, out=block, declarations=SHARED, schedule=schedule,
        checks=True, **options,
    )  # fmt: skip


def messages(report: vgpu.Report) -> list[tuple[str, str]]:
    return [(finding.kind, finding.message) for finding in report.findings]


# -- phases -------------------------------------------------------------------------------------------


@schedules
def test_a_phase_completes_when_all_have_arrived(schedule: str | int) -> None:
    """Warp 1 writes, arrives; warp 0 waits, reads. No other barrier between them."""
    body = """
        setp.lt.u32 %p2, %id, 32;
        @%p2 bra READER;
        mad.lo.u32 %r1, %lane, 4, %r20;
        st.shared.u32 [%r1+64], %id;
        mbarrier.arrive.shared::cta.b64 %rd1, [%r20];
        ret;
    READER:
        mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r20], 0;
        @!%p1 bra READER;
        mad.lo.u32 %r1, %lane, 4, %r20;
        ld.shared.u32 %r2, [%r1+64];
        st.global.u32 [%slot], %r2;
        ret;
    """
    words, report = launch(body, block=64, schedule=schedule)
    assert messages(report) == []
    assert words[:32].tolist() == list(range(32, 64))
    assert report.counters.barriers >= 1


@schedules
def test_parities_over_five_phases(schedule: str | int) -> None:
    """Two warps take turns: each waits for the other's phase. test_wait sees the phases without blocking."""
    body = """
        mov.u32 %r1, 0;
        mov.u32 %r3, 0;
    NEXT:
        and.b32 %r2, %r1, 1;
        mbarrier.arrive.shared::cta.b64 _, [%r20];
    AGAIN:
        mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r20], %r2;
        @!%p1 bra AGAIN;
        mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r20], %r2;
        selp.u32 %r4, 1, 0, %p2;
        add.u32 %r3, %r3, %r4;
        add.u32 %r1, %r1, 1;
        setp.lt.u32 %p3, %r1, 5;
        bar.sync 0;
        @%p3 bra NEXT;
        st.global.u32 [%slot], %r3;
        ret;
    """
    words, report = launch(body, count=64, block=64, schedule=schedule)
    assert messages(report) == []
    assert words.tolist() == [5] * 64
    assert report.counters.barriers >= 5


@pytest.mark.parametrize(
    ("arrivals", "parity", "done"),
    [(0, 0, 0), (0, 1, 1), (1, 0, 0), (2, 0, 1), (2, 1, 0), (3, 0, 1), (4, 0, 0), (4, 1, 1)],
)
def test_test_wait_after_some_arrivals(arrivals: int, parity: int, done: int) -> None:
    """Count 2: phase 0 completes with the second arrival, phase 1 with the fourth. Before any, parity 1 has "passed":
    a fresh barrier's preceding phase counts as complete."""
    arrive = "@%p4 mbarrier.arrive.shared::cta.b64 _, [%r20];\n" * arrivals
    body = f"""
        setp.eq.u32 %p4, %id, 0;
        {arrive}
        mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r20], {parity};
        selp.u32 %r1, 1, 0, %p1;
        st.global.u32 [%slot], %r1;
        ret;
    """
    words, report = launch(body, count=2)
    assert messages(report) == []
    assert words[0] == done


def test_the_state_of_an_arrival_names_its_phase() -> None:
    body = """
        mbarrier.arrive.shared::cta.b64 %rd1, [%r20];
        mbarrier.test_wait.shared::cta.b64 %p1, [%r20], %rd1;
        selp.u32 %r1, 1, 0, %p1;
        st.global.u32 [%slot], %r1;
        ret;
    """
    words, report = launch(body, count=32)
    assert messages(report) == [] and words.tolist() == [1] * 32
    words, report = launch(body, count=33)
    assert messages(report) == [] and words.tolist() == [0] * 32


def test_arrivals_of_more_than_one() -> None:
    body = f"""
        setp.eq.u32 %p4, %id, 3;
        @%p4 mbarrier.arrive.shared::cta.b64 _, [%r20], 7;
    W:
        {WAIT.format(parity=0, label="W")}
        ret;
    """
    assert messages(launch(body, count=7)[1]) == []
    assert messages(launch(body, count=8)[1])[0][0] == "deadlock"


# -- transactions -----------------------------------------------------------------------------------------


def transaction(expected: int, *completed: int) -> vgpu.Report:
    done = "\n".join(f"@%p4 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r20], {n};" for n in completed)
    body = f"""
        setp.eq.u32 %p4, %id, 0;
        @%p4 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], {expected};
        {done}
    W:
        {WAIT.format(parity=0, label="W")}
        ret;
    """
    return launch(body, count=1)[1]


def test_a_phase_waits_for_its_bytes() -> None:
    assert messages(transaction(256, 128, 128)) == []
    kind, message = messages(transaction(256, 128))[0]
    assert kind == "deadlock"
    assert message == (
        "waits for ever at the mbarrier at shared byte 0 for parity 0: 1 of 1 arrivals of phase 0 have come in CTA 0, "
        "and 128 bytes"
    )  # fmt: skip


def test_too_many_bytes() -> None:
    found = messages(transaction(256, 300))
    assert found[0] == (
        "mbarrier overflow", "mbarrier at shared byte 0: more bytes have arrived than were expected"
    )  # fmt: skip


def test_more_bytes_than_the_object_can_count() -> None:
    limit = (1 << 20) - 1
    assert messages(transaction(limit, limit)) == []
    assert messages(transaction(limit + 1, limit + 1)) == [
        ("mbarrier overflow", f"mbarrier at shared byte 0: {limit + 1} bytes are expected, at most {limit}")
    ]


# -- what goes wrong ----------------------------------------------------------------------------------------


def test_a_deadlock_says_who_waits_where_for_what() -> None:
    body = f"""
        setp.lt.u32 %p4, %id, 5;
        @%p4 mbarrier.arrive.shared::cta.b64 _, [%r20];
    W:
        {WAIT.format(parity=0, label="W")}
        ret;
    """
    _, report = launch(body, count=32)
    (finding,) = report.findings
    assert finding.kind == "deadlock" and finding.count == 32
    assert finding.message == (
        "waits for ever at the mbarrier at shared byte 0 for parity 0: 5 of 32 arrivals of phase 0 have come in CTA 0"
    )  # fmt: skip
    assert finding.source is not None and finding.source.line == 11  # the try_wait


def test_the_wrong_parity_passes_too_early() -> None:
    """Parity 1 on a fresh barrier does not wait, and the reader races; if phase 0 is over, it waits for ever."""
    body = """
        setp.lt.u32 %p2, %id, 32;
        @%p2 bra READER;
        mad.lo.u32 %r1, %lane, 4, %r20;
        st.shared.u32 [%r1+64], %id;
        mbarrier.arrive.shared::cta.b64 %rd1, [%r20];
        ret;
    READER:
        mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r20], 1;
        @!%p1 bra READER;
        mad.lo.u32 %r1, %lane, 4, %r20;
        ld.shared.u32 %r2, [%r1+64];
        st.global.u32 [%slot], %r2;
        ret;
    """
    found = [{kind for kind, _ in messages(launch(body, block=64, schedule=n)[1])} for n in range(12)]
    assert all(kinds & {"race", "deadlock"} for kinds in found)
    assert any("race" in kinds for kinds in found) and any("deadlock" in kinds for kinds in found)


@pytest.mark.parametrize(
    "what", ["arrive.shared::cta.b64 _, [%r20+8];", "test_wait.parity.shared::cta.b64 %p1, [%r20+8], 0;"]
)
def test_a_barrier_that_nobody_made(what: str) -> None:
    found = messages(launch(f"mbarrier.{what}\nret;")[1])
    assert found[0] == ("uninitialised mbarrier", "no mbarrier has been initialised at shared byte 8")


def test_a_barrier_after_its_end() -> None:
    body = """
        setp.eq.u32 %p4, %id, 0;
        @%p4 mbarrier.inval.shared::cta.b64 [%r20];
        @%p4 mbarrier.arrive.shared::cta.b64 _, [%r20];
        ret;
    """
    assert messages(launch(body)[1])[0][0] == "uninitialised mbarrier"


def test_one_arrival_too_many() -> None:
    """Only bytes are missing, so the phase cannot take another arrival."""
    body = """
        setp.eq.u32 %p4, %id, 0;
        @%p4 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 16;
        @%p4 mbarrier.arrive.shared::cta.b64 _, [%r20];
        ret;
    """
    found = messages(launch(body, count=1)[1])
    assert found == [("mbarrier overflow", "mbarrier at shared byte 0: more arrivals than the 1 it expects")]


@pytest.mark.parametrize("count", [0, 1 << 20])
def test_counts_out_of_range(count: int) -> None:
    assert messages(launch("ret;", count=count)[1])[0] == (
        "bad operand", f"mbarrier.init with count {count}: 1 to {(1 << 20) - 1}"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("offset", "message"), [(4, "mbarrier at shared byte 4"), (256, "mbarrier at shared byte 256 (256 bytes")]
)
def test_addresses(offset: int, message: str) -> None:
    kind, text = messages(launch(f"mbarrier.arrive.shared::cta.b64 _, [%r20+{offset}];\nret;")[1])[0]
    assert kind == "out of bounds" and text.startswith(message) and text.endswith("8-byte aligned")


def test_init_twice() -> None:
    body = """
        setp.eq.u32 %p4, %id, 0;
        {inval}
        @%p4 mbarrier.init.shared::cta.b64 [%r20], 1;
        ret;
    """
    assert messages(launch(body.format(inval="@%p4 mbarrier.inval.shared::cta.b64 [%r20];"))[1]) == []
    assert messages(launch(body.format(inval=""))[1]) == [
        ("mbarrier reuse", "mbarrier.init of the mbarrier at shared byte 0 without mbarrier.inval before")
    ]


@schedules
@pytest.mark.parametrize("barrier", ["bar.sync 0;", ""])
def test_use_is_ordered_after_init(barrier: str, schedule: str | int) -> None:
    """Warp 1 makes a second barrier, warp 0 uses it: reported whatever the schedule was, unless bar.sync is between."""
    body = f"""
        setp.ne.u32 %p4, %id, 0;
        @%p4 bra OTHERS;
        mbarrier.init.shared::cta.b64 [%r20+8], 32;
    OTHERS:
        {barrier}
        setp.lt.u32 %p5, %id, 32;
        @%p5 bra DONE;
        mbarrier.arrive.shared::cta.b64 _, [%r20+8];
    DONE:
        ret;
    """
    found = messages(launch(body, block=64, schedule=schedule)[1])
    if barrier:
        assert found == []
    else:
        assert {kind for kind, _ in found} & {"race", "uninitialised mbarrier"}
        assert (
            any("is not ordered after its mbarrier.init" in text for _, text in found)
            or schedule != "program"
        )


@schedules
@pytest.mark.parametrize("barrier", ["bar.sync 0;", ""])
def test_inval_comes_after_every_use(barrier: str, schedule: str | int) -> None:
    body = f"""
        mbarrier.arrive.shared::cta.b64 _, [%r20];
    W:
        {WAIT.format(parity=0, label="W")}
        {barrier}
        setp.eq.u32 %p4, %id, 0;
        @%p4 mbarrier.inval.shared::cta.b64 [%r20];
        ret;
    """
    found = messages(launch(body, count=64, block=64, schedule=schedule)[1])
    if barrier:
        assert found == []
    else:
        assert ("race", "mbarrier.inval at shared byte 0 while warp 1 may still use the mbarrier") in found


# -- arrivals of copies ---------------------------------------------------------------------------------------


def copying(count: int, noinc: str, *, wait: bool = True) -> tuple[np.ndarray, vgpu.Report]:
    """Each of 32 threads copies 4 bytes and attaches an arrival; with `wait`, all wait and read them."""
    waiting = WAIT.format(parity=0, label="W") if wait else ""
    body = f"""
        mad.wide.u32 %rd1, %id, 4, %in0;
        mad.lo.u32 %r1, %id, 4, %r20;
        cp.async.ca.shared.global [%r1+64], [%rd1], 4;
        cp.async.mbarrier.arrive{noinc}.shared::cta.b64 [%r20];
    W:
        {waiting}
        ld.shared.u32 %r2, [%r1+64];
        st.global.u32 [%slot], %r2;
        ret;
    """
    return launch(body, count=count, inputs=[np.arange(100, 132, dtype=np.uint32)])


def test_noinc_uses_up_the_count() -> None:
    words, report = copying(32, ".noinc")
    assert messages(report) == [] and words.tolist() == list(range(100, 132))
    # Without .noinc each adds one to what is pending and takes it away again: 32 arrivals are still missing.
    kind, message = messages(copying(32, "")[1])[0]
    assert kind == "deadlock" and "0 of 32 arrivals of phase 0 have come" in message


def test_without_noinc_the_threads_arrive_too() -> None:
    """The usual pattern: a copy's arrival that does not count, and the thread's own that does."""
    body = f"""
        mad.wide.u32 %rd1, %id, 4, %in0;
        mad.lo.u32 %r1, %id, 4, %r20;
        cp.async.ca.shared.global [%r1+64], [%rd1], 4;
        cp.async.mbarrier.arrive.shared::cta.b64 [%r20];
        mbarrier.arrive.shared::cta.b64 _, [%r20];
    W:
        {WAIT.format(parity=0, label="W")}
        ld.shared.u32 %r2, [%r1+64];
        st.global.u32 [%slot], %r2;
        ret;
    """
    for schedule in SCHEDULES:
        words, report = launch(body, schedule=schedule, inputs=[np.arange(100, 132, dtype=np.uint32)])
        assert messages(report) == [] and words.tolist() == list(range(100, 132))


def test_reading_without_waiting_is_reported() -> None:
    assert "undefined data" in {kind for kind, _ in messages(copying(32, ".noinc", wait=False)[1])}


# -- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mbarrier.arrive_drop.shared::cta.b64 %rd1, [%r1];", "mbarrier.arrive_drop is not modelled"),
        ("mbarrier.arrive.noComplete.shared::cta.b64 %rd1, [%r1], 1;", "noComplete is not modelled"),
        ("mbarrier.pending_count.b64 %r1, %rd1;", "mbarrier.pending_count is not modelled"),
        ("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1];", "expect_tx needs a number of bytes"),
    ],
)
def test_refused_by_name(line: str, message: str) -> None:
    refused(line, message)
