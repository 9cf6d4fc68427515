"""Branches, divergence, loops, barriers, ragged blocks, deadlocks and endless loops, under every schedule."""

from __future__ import annotations

import numpy as np
import pytest
from vgpu_kernels import SCHEDULES, SOURCE, refused, run

from oproj_lib import vgpu

ALL = 0xFFFFFFFF
schedules = pytest.mark.parametrize("schedule", SCHEDULES)
SHARED = [".shared .align 16 .b8 tile[4096];"]


def lines_of(report: vgpu.Report) -> list[tuple[str, int]]:
    """(kind, line of the kernel) of every finding."""
    return sorted((finding.kind, finding.source.line if finding.source else 0) for finding in report.findings)


# -- branches and loops -----------------------------------------------------------------------------


@schedules
def test_if_else(schedule: str | int) -> None:
    body = """
        setp.lt.u32 %p1, %lane, 10;
        @%p1 bra SMALL;
        mov.u32 %r1, 200;
        bra JOIN;
        SMALL:
        mov.u32 %r1, 100;
        JOIN:
        add.u32 %r1, %r1, %lane;
        st.global.u32 [%slot], %r1;
        ret;
    """
    words, report = run(body, out=128, grid=2, block=64, schedule=schedule)
    report.raise_for_findings()
    assert words.tolist() == [(100 if t % 32 < 10 else 200) + t % 32 for t in range(128)]


@schedules
def test_guards_both_ways(schedule: str | int) -> None:
    body = """
        setp.lt.u32 %p1, %lane, 10;
        mov.u32 %r1, 5;
        @%p1 mov.u32 %r1, 6;
        @!%p1 add.u32 %r1, %r1, 10;
        @%p1 st.global.u32 [%slot], %r1;
        @!%p1 st.global.u32 [%slot], %r1;
        ret;
    """
    words, report = run(body, schedule=schedule)
    report.raise_for_findings()
    assert words.tolist() == [6] * 10 + [15] * 22


@schedules
def test_loops_with_a_trip_count_per_thread(schedule: str | int) -> None:
    """Lane t adds 1 + 2 + ... + t."""
    body = """
        mov.u32 %r1, 0;
        mov.u32 %r2, 0;
        LOOP:
        setp.gt.u32 %p1, %r2, %lane;
        @%p1 bra DONE;
        add.u32 %r1, %r1, %r2;
        add.u32 %r2, %r2, 1;
        bra.uni LOOP;
        DONE:
        st.global.u32 [%slot], %r1;
        ret;
    """
    words, report = run(body, out=96, block=96, schedule=schedule)
    report.raise_for_findings()
    assert words.tolist() == [t % 32 * (t % 32 + 1) // 2 for t in range(96)]


@schedules
def test_nested_divergence(schedule: str | int) -> None:
    """An inner loop of lane % 4 rounds within an outer loop of lane // 8 rounds, with a branch in between."""
    body = """
        mov.u32 %r1, 0;
        shr.u32 %r2, %lane, 3;
        and.b32 %r3, %lane, 3;
        OUTER:
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra DONE;
        sub.u32 %r2, %r2, 1;
        mov.u32 %r4, %r3;
        and.b32 %r5, %r2, 1;
        setp.eq.u32 %p2, %r5, 1;
        @%p2 bra ODD;
        add.u32 %r1, %r1, 100;
        ODD:
        setp.eq.u32 %p3, %r4, 0;
        @%p3 bra OUTER;
        add.u32 %r1, %r1, 1;
        sub.u32 %r4, %r4, 1;
        bra ODD;
        DONE:
        st.global.u32 [%slot], %r1;
        ret;
    """
    words, report = run(body, out=64, block=64, schedule=schedule)
    report.raise_for_findings()
    expected = []
    for t in range(64):
        rounds, inner = t % 32 // 8, t % 4
        expected.append(100 * ((rounds + 1) // 2) + rounds * inner)
    assert words.tolist() == expected


@schedules
def test_indexed_branch(schedule: str | int) -> None:
    body = """
        and.b32 %r1, %lane, 3;
        TABLE:
        .branchtargets ZERO, ONE, TWO, ONE;
        brx.idx %r1, TABLE;
        ZERO:
        mov.u32 %r2, 10;
        bra DONE;
        ONE:
        mov.u32 %r2, 11;
        bra DONE;
        TWO:
        mov.u32 %r2, 12;
        DONE:
        st.global.u32 [%slot], %r2;
        ret;
    """
    words, report = run(body, schedule=schedule)
    report.raise_for_findings()
    assert words.tolist() == [10, 11, 12, 11] * 8


def test_indexed_branch_beyond_its_table_is_reported() -> None:
    body = """
        TABLE:
        .branchtargets ZERO, ONE;
        brx.idx %lane, TABLE;
        ZERO:
        st.global.u32 [%slot], 0;
        ret;
        ONE:
        st.global.u32 [%slot], 1;
        ret;
    """
    words, report = run(body)
    assert [(f.kind, f.lane, f.count) for f in report.findings] == [("bad operand", 2, 30)]
    assert words[:3].tolist() == [0, 1, ALL]


@schedules
def test_predicated_exit(schedule: str | int) -> None:
    body = """
        setp.ge.u32 %p1, %thread, 40;
        @%p1 exit;
        st.global.u32 [%slot], %thread;
        setp.ge.u32 %p1, %thread, 20;
        @!%p1 ret;
        st.global.u32 [%slot], 7;
        ret;
    """
    words, report = run(body, out=128, grid=2, block=64, schedule=schedule)
    report.raise_for_findings()
    assert words.tolist() == [*range(20), *[7] * 20, *[ALL] * 88]


def test_a_kernel_may_end_without_ret() -> None:
    """Running off the end is an implicit return, also after a guarded `ret`."""
    words, report = run("setp.lt.u32 %p1, %lane, 4;\n@%p1 ret;\nst.global.u32 [%slot], 1;\n@%p1 ret;")
    report.raise_for_findings()
    assert words.tolist() == [ALL] * 4 + [1] * 28


@schedules
def test_trap_is_reported(schedule: str | int) -> None:
    _, report = run(
        "setp.ne.u32 %p1, %lane, 9;\n@%p1 bra FINE;\ntrap;\nFINE:\nst.global.u32 [%slot], 1;\nret;",
        schedule=schedule,
    )
    assert [(f.kind, f.lane, f.count) for f in report.findings] == [("trap", 9, 1)]
    assert lines_of(report) == [("trap", 3)]


# -- shapes of grids and blocks ---------------------------------------------------------------------


@schedules
@pytest.mark.parametrize("block", [1, 31, 32, 33, 48, 63, 64, 65, 1024])
def test_ragged_blocks(block: int, schedule: str | int) -> None:
    """Threads write, meet at a barrier, read what the mirror thread wrote; a last warp's rest never runs."""
    body = f"""
        mov.u32 %r1, tile;
        mad.lo.u32 %r2, %id, 4, %r1;
        st.shared.u32 [%r2], %id;
        bar.sync 0;
        sub.u32 %r3, {block - 1}, %id;
        mad.lo.u32 %r2, %r3, 4, %r1;
        ld.shared.u32 %r4, [%r2];
        mad.lo.u32 %r4, %cta, 10000, %r4;
        st.global.u32 [%slot], %r4;
        ret;
    """
    words, report = run(
        body, out=2 * block + 64, grid=2, block=block, schedule=schedule, declarations=SHARED, checks=True
    )
    report.raise_for_findings()
    expected = [10000 * cta + block - 1 - t for cta in range(2) for t in range(block)]
    assert words.tolist() == expected + [ALL] * 64


@schedules
@pytest.mark.parametrize("block", [1, 33, 48, (5, 3, 3)])
def test_no_more_threads_run_than_the_block_has(block: int | tuple[int, ...], schedule: str | int) -> None:
    body = "st.global.u32 [%out+4], 0;\natom.global.add.u32 %r1, [%out], 1;\nret;"
    words, report = run(body, out=2, grid=3, block=block, schedule=schedule)
    report.raise_for_findings()
    threads = 3 * int(np.prod(block))
    assert words[0] == threads - 1  # counting began at 0xFFFFFFFF
    assert report.counters.thread_instructions % threads == 0


@schedules
def test_blocks_of_three_dimensions_meet_at_barriers(schedule: str | int) -> None:
    body = """
        mov.u32 %r1, %tid.z;
        mov.u32 %r2, %tid.y;
        mad.lo.u32 %r3, %r1, 3, %r2;
        mad.lo.u32 %r3, %r3, 5, %id;
        mov.u32 %r4, tile;
        mad.lo.u32 %r5, %r3, 4, %r4;
        st.shared.u32 [%r5], %r3;
        bar.sync 0;
        sub.u32 %r6, 59, %r3;
        mad.lo.u32 %r5, %r6, 4, %r4;
        ld.shared.u32 %r7, [%r5];
        mad.wide.u32 %rd1, %r3, 4, %out;
        st.global.u32 [%rd1], %r7;
        ret;
    """
    words, report = run(body, out=60, block=(5, 3, 4), schedule=schedule, declarations=SHARED, checks=True)
    report.raise_for_findings()
    assert words.tolist() == list(range(59, -1, -1))


# -- barriers ---------------------------------------------------------------------------------------


@schedules
def test_barrier_in_a_loop(schedule: str | int) -> None:
    """Four rounds of: every thread reads its right neighbour's word, then all write."""
    body = """
        mov.u32 %r1, tile;
        mad.lo.u32 %r2, %id, 4, %r1;
        add.u32 %r3, %id, 1;
        and.b32 %r3, %r3, 63;
        mad.lo.u32 %r4, %r3, 4, %r1;
        st.shared.u32 [%r2], %id;
        mov.u32 %r5, 0;
        LOOP:
        bar.sync 0;
        ld.shared.u32 %r6, [%r4];
        bar.sync 0;
        st.shared.u32 [%r2], %r6;
        add.u32 %r5, %r5, 1;
        setp.lt.u32 %p1, %r5, 4;
        @%p1 bra LOOP;
        st.global.u32 [%slot], %r6;
        ret;
    """
    words, report = run(body, out=128, grid=2, block=64, schedule=schedule, declarations=SHARED, checks=True)
    report.raise_for_findings()
    assert words.tolist() == [(t + 4) % 64 for t in range(64)] * 2
    assert report.counters.barriers == 2 * 8


@schedules
def test_named_barriers_between_subsets_of_warps(schedule: str | int) -> None:
    """Warps 0, 1 meet at barrier 1, warps 2, 3 at barrier 2, each pair exchanging its words."""
    body = """
        shr.u32 %r1, %id, 6;
        add.u32 %r2, %r1, 1;
        mov.u32 %r3, tile;
        mad.lo.u32 %r4, %id, 4, %r3;
        st.shared.u32 [%r4], %id;
        bar.sync %r2, 64;
        xor.b32 %r5, %id, 32;
        mad.lo.u32 %r4, %r5, 4, %r3;
        ld.shared.u32 %r6, [%r4];
        st.global.u32 [%slot], %r6;
        ret;
    """
    words, report = run(body, out=128, block=128, schedule=schedule, declarations=SHARED, checks=True)
    report.raise_for_findings()
    assert words.tolist() == [t ^ 32 for t in range(128)]


@schedules
def test_producer_arrives_consumer_waits(schedule: str | int) -> None:
    """Warp 0 produces and only arrives; warp 1 waits for 64 threads, then reads."""
    body = """
        mov.u32 %r1, tile;
        setp.ge.u32 %p1, %id, 32;
        @%p1 bra CONSUMER;
        mad.lo.u32 %r2, %id, 4, %r1;
        add.u32 %r3, %id, 1000;
        st.shared.u32 [%r2], %r3;
        bar.arrive 3, 64;
        st.global.u32 [%slot], 5;
        ret;
        CONSUMER:
        bar.sync 3, 64;
        mad.lo.u32 %r2, %lane, 4, %r1;
        ld.shared.u32 %r3, [%r2];
        st.global.u32 [%slot], %r3;
        ret;
    """
    words, report = run(body, out=64, block=64, schedule=schedule, declarations=SHARED, checks=True)
    report.raise_for_findings()
    assert words.tolist() == [5] * 32 + list(range(1000, 1032))


def test_without_the_barrier_the_race_is_reported_in_every_schedule() -> None:
    body = """
        mov.u32 %r1, tile;
        mad.lo.u32 %r2, %id, 4, %r1;
        st.shared.u32 [%r2], %id;
        xor.b32 %r5, %id, 32;
        mad.lo.u32 %r4, %r5, 4, %r1;
        ld.shared.u32 %r6, [%r4];
        st.global.u32 [%slot], %r6;
        ret;
    """
    for schedule in SCHEDULES:
        _, report = run(body, out=64, block=64, schedule=schedule, declarations=SHARED, checks=True)
        assert "race" in {finding.kind for finding in report.findings}, schedule


@schedules
def test_barriers_after_some_warps_exited(schedule: str | int) -> None:
    """Warps 1 and 3 leave at once; the others still meet."""
    body = """
        shr.u32 %r1, %id, 5;
        and.b32 %r2, %r1, 1;
        setp.eq.u32 %p1, %r2, 1;
        @%p1 ret;
        bar.sync 0;
        st.global.u32 [%slot], 3;
        bar.sync 0;
        ret;
    """
    words, report = run(body, out=128, block=128, schedule=schedule)
    report.raise_for_findings()
    assert words.reshape(4, 32)[:, 0].tolist() == [3, ALL, 3, ALL]


@schedules
def test_a_late_exit_releases_those_who_wait(schedule: str | int) -> None:
    body = """
        setp.lt.u32 %p1, %id, 32;
        @%p1 bra WAIT;
        mov.u32 %r1, 0;
        LOOP:
        add.u32 %r1, %r1, 1;
        setp.lt.u32 %p2, %r1, 50;
        @%p2 bra LOOP;
        ret;
        WAIT:
        bar.sync 0;
        st.global.u32 [%slot], 1;
        ret;
    """
    words, report = run(body, out=64, block=64, schedule=schedule)
    report.raise_for_findings()
    assert words.tolist() == [1] * 32 + [ALL] * 32


@schedules
def test_diverged_warps_converge_at_a_barrier(schedule: str | int) -> None:
    body = """
        setp.lt.u32 %p1, %lane, 7;
        @%p1 bra JOIN;
        mov.u32 %r1, 1;
        mov.u32 %r2, 2;
        JOIN:
        bar.sync 0;
        st.global.u32 [%slot], 9;
        ret;
    """
    words, report = run(body, out=64, block=64, schedule=schedule)
    report.raise_for_findings()
    assert (words == 9).all()
    assert report.counters.barriers == 1


# -- what goes wrong --------------------------------------------------------------------------------


@schedules
def test_deadlock_says_who_is_missing(schedule: str | int) -> None:
    """Warp 2 waits at barrier 1 instead of barrier 0."""
    body = """
        shr.u32 %r1, %id, 5;
        setp.eq.u32 %p1, %r1, 2;
        @%p1 bra OTHER;
        bar.sync 0;
        st.global.u32 [%slot], 1;
        ret;
        OTHER:
        bar.sync 1;
        ret;
    """
    words, report = run(body, out=128, block=128, schedule=schedule)
    assert lines_of(report) == [("deadlock", 4), ("deadlock", 8)]
    by_line = {finding.source.line: finding for finding in report.findings if finding.source}
    assert "3 of 4 warps" in by_line[4].message and "missing: warps 2" in by_line[4].message
    assert "1 of 4 warps" in by_line[8].message and "missing: warps 0, 1, 3" in by_line[8].message
    assert by_line[8].warp == 2 and by_line[4].count == 96
    assert (words == ALL).all()
    assert SOURCE in str(by_line[4])


@schedules
def test_too_large_a_count_never_completes(schedule: str | int) -> None:
    _, report = run("bar.sync 0, 96;\nret;", block=64, schedule=schedule)
    assert lines_of(report) == [("deadlock", 1)]
    assert "2 of 3 warps" in report.findings[0].message


def test_a_missing_arrival_of_one_block_leaves_the_others_alone() -> None:
    body = """
        setp.eq.u32 %p1, %cta, 1;
        @%p1 bra ODD;
        bar.arrive 2, 64;
        bra DONE;
        ODD:
        bar.sync 2, 64;
        DONE:
        st.global.u32 [%slot], 1;
        ret;
    """
    words, report = run(body, out=96, grid=3)
    assert [(f.kind, f.cta, f.count) for f in report.findings] == [("deadlock", 1, 32)]
    assert words.tolist() == [1] * 32 + [ALL] * 32 + [1] * 32


def test_wrong_barrier_operands_are_reported() -> None:
    for line, part in (
        ("bar.sync 16;", "0..15"),
        ("bar.sync 0, 33;", "multiple of 32"),
        ("bar.sync 0, 0;", "multiple of 32"),
    ):
        _, report = run(f"{line}\nret;", block=64)
        assert ("bad operand", 1) in lines_of(report), line
        assert any(part in finding.message for finding in report.findings)


def test_arriving_twice_in_one_phase_is_reported() -> None:
    body = """
        setp.ge.u32 %p1, %id, 32;
        @%p1 bra WAIT;
        bar.arrive 1, 96;
        bar.arrive 1, 96;
        ret;
        WAIT:
        bar.sync 1, 96;
        ret;
    """
    _, report = run(body, out=64, block=64)
    assert ("barrier reuse", 4) in lines_of(report)


def test_disagreeing_barrier_counts_are_reported() -> None:
    body = """
        mov.u32 %r1, 96;
        setp.ge.u32 %p1, %id, 32;
        @%p1 mov.u32 %r1, 64;
        bar.sync 1, %r1;
        ret;
    """
    _, report = run(body, out=96, block=96)
    assert "barrier count" in {finding.kind for finding in report.findings}


@schedules
def test_endless_loops_end(schedule: str | int) -> None:
    """One lane never leaves."""
    body = """
        LOOP:
        setp.eq.u32 %p1, %thread, 37;
        @%p1 bra LOOP;
        st.global.u32 [%slot], 1;
        ret;
    """
    words, report = run(body, out=64, block=64, schedule=schedule, step_budget=5000)
    assert {finding.kind for finding in report.findings} == {"endless"}
    (finding,) = report.findings
    assert (finding.warp, finding.lane, finding.count) == (1, 5, 1)
    assert finding.source is not None and finding.source.line in (2, 3)
    assert words.tolist() == [1] * 37 + [ALL] + [1] * 26


@schedules
def test_a_polling_thread_lets_the_others_run(schedule: str | int) -> None:
    """Thread 0 spins on a flag that thread 32 sets."""
    body = """
        setp.eq.u32 %p1, %id, 32;
        @%p1 bra SET;
        SPIN:
        ld.volatile.global.u32 %r1, [%out+252];
        setp.ne.u32 %p2, %r1, 5;
        @%p2 bra SPIN;
        st.global.u32 [%slot], 1;
        ret;
        SET:
        st.volatile.global.u32 [%out+252], 5;
        ret;
    """
    words, report = run(body, out=64, block=33, schedule=schedule)
    report.raise_for_findings()
    assert words.tolist() == [1] * 32 + [ALL] * 31 + [5]


# -- schedules and counters -------------------------------------------------------------------------


def test_counters_of_a_divergent_kernel() -> None:
    """7 head instructions, then 3 or, in 8 of 32 lanes, 5 of the body."""
    body = """
        setp.ge.u32 %p1, %lane, 8;
        @%p1 bra END;
        st.global.u32 [%slot], 1;
        add.u32 %r1, %lane, 1;
        END:
        ret;
    """
    _, report = run(body)
    assert report.counters.thread_instructions == 32 * 7 + 32 * 3 + 8 * 2
    assert report.counters.global_store_bytes == 32


def test_a_seed_repeats_its_schedule() -> None:
    body = """
        atom.global.add.u32 %r1, [%out], 1;
        st.global.u32 [%slot+4], %r1;
        ret;
    """
    orders = []
    for seed in (3, 3, 4):
        words, report = run(body, out=129, grid=2, block=64, schedule=seed)
        report.raise_for_findings()
        assert sorted(words[1:].tolist()) == sorted(range(-1, 127)) or set(words[1:].tolist()) == {
            x & ALL for x in range(-1, 127)
        }
        orders.append(words.tolist())
    assert orders[0] == orders[1]


@pytest.mark.parametrize("schedule", ["lowest", 1.5, True, None])
def test_unknown_schedules_are_refused(schedule: object) -> None:
    with pytest.raises(ValueError, match="integer seed"):
        run("ret;", schedule=schedule)


# -- what must be refused ---------------------------------------------------------------------------

REFUSED = """
bra NOWHERE;
bra %r1;
@%p1 bra NOWHERE;
bra.wide NOWHERE;
brx.idx %r1, NOTABLE;
call foo;
bar.red.popc.u32 %r1, 0, %p1;
bar.sync;
bar.sync 0, 64, 32;
bar.arrive 0;
bar.sync.acquire 0;
barrier.cluster.arrive;
bar.warp.sync;
fence.proxy.tensormap::generic.release.gpu;
griddepcontrol;
griddepcontrol.wait 0;
ret 1;
exit.sync;
""".strip().splitlines()


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_not_modelled_or_not_ptx_is_refused(line: str) -> None:
    refused(line)


def test_barrier_words_stay_in_their_block() -> None:
    """Shared memory of two blocks does not overlap, also at 4 KiB each."""
    body = """
        mov.u32 %r1, tile;
        mad.lo.u32 %r2, %id, 4, %r1;
        st.shared.u32 [%r2], %thread;
        bar.sync 0;
        ld.shared.u32 %r3, [%r2];
        st.global.u32 [%slot], %r3;
        ret;
    """
    words, report = run(body, out=4096, grid=4, block=1024, declarations=SHARED)
    report.raise_for_findings()
    np.testing.assert_array_equal(words, np.arange(4096))
