"""Warp-wide instructions, against the manual's pseudo-code and figures, written out lane by lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from vgpu_kernels import SCHEDULES, SOURCE, load_line, refused, run

from oproj_lib import vgpu

ALL = 0xFFFFFFFF
INT_MIN = -(2**31)
Words = npt.NDArray[np.uint32]

schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def lanes_of(mask: int) -> list[int]:
    return [lane for lane in range(32) if mask >> lane & 1]


def kinds(report: vgpu.Report) -> set[str]:
    return {finding.kind for finding in report.findings}


# -- shuffles ---------------------------------------------------------------------------------------


def shuffle(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """(source lane, predicate): the pseudo-code of `shfl.sync` (PTX ISA)."""
    bval, cval, segmask = b & 31, c & 31, c >> 8 & 31
    max_lane = (lane & segmask) | (cval & ~segmask & 31)
    min_lane = lane & segmask
    if mode == "up":
        j = lane - bval
        inside = j >= max_lane
    elif mode == "down":
        j = lane + bval
        inside = j <= max_lane
    elif mode == "bfly":
        j = lane ^ bval
        inside = j <= max_lane
    else:
        j = min_lane | (bval & ~segmask & 31)
        inside = j <= max_lane
    return (j if inside else lane), inside


@schedules
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize(
    ("b", "c"),
    [
        (1, 0x1F), (1, 0), (31, 0x1F), (31, 0), (0, 0x1F), (33, 0x1F), (5, 0x181F), (5, 0x1800), (3, 0x1C1F),
        (3, 0x1C00), (16, 0x1003),
        (2, 0x0F07), (7, 0x1E1F), (32 + 9, 0x000A), (1, 0xFFFFE0FF),
    ],
)  # fmt: skip
def test_shuffle_modes(mode: str, b: int, c: int, schedule: str | int) -> None:
    body = f"""
        mad.lo.u32 %r1, %lane, 3, 100;
        shfl.sync.{mode}.b32 %r2|%p1, %r1, {b}, {c}, -1;
        selp.u32 %r3, 1, 0, %p1;
        mul.wide.u32 %rd1, %thread, 8;
        add.u64 %rd1, %rd1, %out;
        st.global.v2.u32 [%rd1], {{%r2, %r3}};
        ret;
    """
    words, report = run(body, out=128, block=64, schedule=schedule)
    report.raise_for_findings()
    expected = []
    for lane in list(range(32)) * 2:
        source, inside = shuffle(mode, lane, b, c)
        expected += [3 * source + 100, int(inside)]
    assert words.tolist() == expected


def test_shuffle_literals() -> None:
    """The manual's usage examples: a step of a scan, a step of a reduction, a broadcast."""
    body = """
        shfl.sync.up.b32 %r1|%p1, %lane, 1, 0, -1;
        @!%p1 mov.u32 %r1, 99;
        shfl.sync.bfly.b32 %r2, %lane, 16, 31, -1;
        shfl.sync.idx.b32 %r3, %lane, 7, 31, -1;
        shfl.sync.down.b32 %r4, %lane, 8, 31, -1;
        shl.b32 %r5, %lane, 4;
        cvt.u64.u32 %rd1, %r5;
        add.u64 %rd1, %rd1, %out;
        st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4};
        ret;
    """
    words, report = run(body, out=128)
    report.raise_for_findings()
    table = words.reshape(32, 4)
    assert table[:, 0].tolist() == [99, *range(31)]
    assert table[:, 1].tolist() == [*range(16, 32), *range(16)]
    assert table[:, 2].tolist() == [7] * 32
    assert table[:, 3].tolist() == [*range(8, 32), *range(24, 32)]


def test_shuffle_takes_its_operands_per_lane() -> None:
    body = """
        sub.u32 %r1, 31, %lane;
        shfl.sync.idx.b32 %r2, %lane, %r1, 31, -1;
        st.global.u32 [%slot], %r2;
        ret;
    """
    words, report = run(body)
    report.raise_for_findings()
    assert words.tolist() == list(range(31, -1, -1))


def test_shuffle_from_a_lane_outside_is_reported() -> None:
    """Only the lower half takes part; lane 15 + 1 does not."""
    body = """
        setp.ge.u32 %p1, %lane, 16;
        @%p1 bra DONE;
        shfl.sync.down.b32 %r1, %lane, 1, 31, 0xFFFF;
        st.global.u32 [%slot], %r1;
        DONE:
        ret;
    """
    words, report = run(body)
    assert [(f.kind, f.lane, f.count) for f in report.findings] == [("inactive lane", 15, 1)]
    assert words[:15].tolist() == list(range(1, 16))
    source = report.findings[0].source
    assert source is not None and (source.file, source.line) == (SOURCE, 3)


# -- groups within a warp ---------------------------------------------------------------------------

GROUPS = [0x0000FFFF, 0x00FF0000, 0xFF000000]


@schedules
@pytest.mark.parametrize("diverged", [False, True])
def test_disjoint_groups_of_one_warp_do_not_see_each_other(diverged: bool, schedule: str | int) -> None:
    """Lanes may name different masks at one instruction, as cooperative groups do after match.any."""
    branch = "@%p1 bra LATER;" if diverged else ""
    # Diverged: the upper half runs the first copy of nothing and arrives later at the same instruction.
    body = f"""
        mov.u32 %r1, 0xFFFF;
        setp.ge.u32 %p1, %lane, 16;
        @%p1 mov.u32 %r1, 0x00FF0000;
        setp.ge.u32 %p2, %lane, 24;
        @%p2 mov.u32 %r1, 0xFF000000;
        {branch}
        mov.u32 %r2, 0;
        LATER:
        redux.sync.add.u32 %r3, %lane, %r1;
        and.b32 %r4, %lane, 1;
        setp.eq.u32 %p3, %r4, 1;
        vote.sync.ballot.b32 %r5, %p3, %r1;
        elect.sync %r6|%p4, %r1;
        selp.u32 %r7, 1, 0, %p4;
        match.any.sync.b32 %r8, %r4, %r1;
        match.all.sync.b32 %r9|%p5, %lane, %r1;
        vote.sync.any.pred %p6, %p2, %r1;
        selp.u32 %r10, 1, 0, %p6;
        shfl.sync.idx.b32 %r11, %lane, %lane, 31, %r1;
        shl.b32 %r12, %lane, 5;
        cvt.u64.u32 %rd1, %r12;
        add.u64 %rd1, %rd1, %out;
        st.global.v4.u32 [%rd1], {{%r3, %r5, %r6, %r7}};
        st.global.v4.u32 [%rd1+16], {{%r8, %r9, %r10, %r11}};
        ret;
    """
    words, report = run(body, out=256, schedule=schedule)
    report.raise_for_findings()
    for lane, got in enumerate(words.reshape(32, 8).tolist()):
        group = next(g for g in GROUPS if g >> lane & 1)
        members = lanes_of(group)
        odd = sum(1 << i for i in members if i % 2)
        same = odd if lane % 2 else group & ~odd
        expected = [
            sum(members),
            odd,
            members[0],
            int(lane == members[0]),
            same,
            0,
            int(group == GROUPS[2]),
            lane,
        ]
        assert got == expected, lane


def test_a_lane_outside_its_own_mask_is_reported() -> None:
    words, report = run("redux.sync.add.u32 %r1, %lane, 0xFFFF;\nst.global.u32 [%slot], %r1;\nret;")
    assert [(f.kind, f.lane, f.count, f.ptx) for f in report.findings] == [
        ("member mask", 16, 16, "redux.sync.add.u32 %r1, %lane, 0xFFFF")
    ]
    assert words[:16].tolist() == [120] * 16


# -- votes, matches, reductions ---------------------------------------------------------------------


@schedules
@pytest.mark.parametrize(
    ("condition", "ballot"),
    [
        ("setp.lt.u32 %p1, %lane, 5;", 0x1F),
        ("setp.eq.u32 %p1, %lane, 31;", 0x80000000),
        ("setp.ge.u32 %p1, %lane, 0;", ALL),
        ("setp.gt.u32 %p1, %lane, 31;", 0),
    ],
)
def test_votes(condition: str, ballot: int, schedule: str | int) -> None:
    body = f"""
        {condition}
        vote.sync.all.pred %p2, %p1, -1;
        vote.sync.any.pred %p3, %p1, -1;
        vote.sync.uni.pred %p4, %p1, -1;
        vote.sync.any.pred %p5, !%p1, -1;
        vote.sync.ballot.b32 %r1, %p1, -1;
        vote.sync.ballot.b32 %r2, !%p1, -1;
        selp.u32 %r3, 1, 0, %p2;
        selp.u32 %r4, 2, 0, %p3;
        selp.u32 %r5, 4, 0, %p4;
        selp.u32 %r6, 8, 0, %p5;
        or.b32 %r3, %r3, %r4;
        or.b32 %r5, %r5, %r6;
        or.b32 %r3, %r3, %r5;
        mul.wide.u32 %rd1, %thread, 16;
        add.u64 %rd1, %rd1, %out;
        st.global.v4.u32 [%rd1], {{%r1, %r2, %r3, %r3}};
        ret;
    """
    words, report = run(body, out=4 * 64, block=64, schedule=schedule)
    report.raise_for_findings()
    flags = (ballot == ALL) + 2 * (ballot != 0) + 4 * (ballot in (0, ALL)) + 8 * (ballot != ALL)
    assert words.reshape(64, 4).tolist() == [[ballot, ballot ^ ALL, flags, flags]] * 64


@schedules
def test_matches(schedule: str | int) -> None:
    body = """
        shr.u32 %r1, %lane, 3;
        match.any.sync.b32 %r2, %r1, -1;
        match.all.sync.b32 %r3|%p1, %r1, -1;
        cvt.u64.u32 %rd2, %warpid;
        shl.b64 %rd2, %rd2, 40;
        match.all.sync.b64 %r4|%p2, %rd2, -1;
        match.any.sync.b64 %r5, %rd2, -1;
        selp.u32 %r6, 1, 0, %p1;
        selp.u32 %r7, 1, 0, %p2;
        mul.wide.u32 %rd1, %thread, 32;
        add.u64 %rd1, %rd1, %out;
        st.global.v4.u32 [%rd1], {%r2, %r3, %r4, %r5};
        st.global.v4.u32 [%rd1+16], {%r6, %r7, 0, 0};
        ret;
    """
    words, report = run(body, out=8 * 64, block=64, schedule=schedule)
    report.raise_for_findings()
    for thread, got in enumerate(words.reshape(64, 8).tolist()):
        assert got == [0xFF << 8 * (thread % 32 // 8), 0, ALL, ALL, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("operation", "values", "expected"),
    [
        ("add.u32", [2**31] * 32, 0),
        ("add.s32", [ALL] * 32, -32 & ALL),
        ("min.u32", [5, ALL, *[7] * 30], 5),
        ("min.s32", [5, ALL, *[7] * 30], ALL),
        ("max.u32", [5, 2**31, *[7] * 30], 2**31),
        ("max.s32", [5, 2**31, *[7] * 30], 7),
        ("max.s32", [INT_MIN & ALL] * 32, INT_MIN & ALL),
        ("and.b32", [0xFF0F] * 16 + [0x0FFF] * 16, 0x0F0F),
        ("or.b32", [1 << i for i in range(32)], ALL),
        ("xor.b32", [*range(32)], 0),
        ("xor.b32", [*range(31), 0], 31),
    ],
)
@schedules
def test_reductions(operation: str, values: list[int], expected: int, schedule: str | int) -> None:
    body = f"""
        mul.wide.u32 %rd1, %lane, 4;
        add.u64 %rd1, %rd1, %in0;
        ld.global.u32 %r1, [%rd1];
        redux.sync.{operation} %r2, %r1, -1;
        st.global.u32 [%slot], %r2;
        ret;
    """
    words, report = run(body, inputs=[np.array(values, np.uint32)], schedule=schedule)
    report.raise_for_findings()
    assert words.tolist() == [expected] * 32


@schedules
def test_reduction_of_some_lanes(schedule: str | int) -> None:
    """The others have left; the mask names the rest, and the neutral element must not show."""
    body = """
        setp.lt.u32 %p1, %lane, 30;
        @%p1 ret;
        redux.sync.and.b32 %r1, %lane, 0xC0000000;
        redux.sync.min.s32 %r2, %lane, 0xC0000000;
        activemask.b32 %r3;
        elect.sync _|%p2, 0xC0000000;
        @!%p2 ret;
        st.global.v2.u32 [%out], {%r1, %r2};
        st.global.u32 [%out+8], %lane;
        ret;
    """
    words, report = run(body, schedule=schedule)
    report.raise_for_findings()
    assert words[:3].tolist() == [30, 30, 30]


def test_active_mask_of_a_converged_warp() -> None:
    body = "setp.gt.u32 %p1, %lane, 9;\n@%p1 ret;\nactivemask.b32 %r1;\nst.global.u32 [%slot], %r1;\nret;"
    words, report = run(body)
    report.raise_for_findings()
    assert words.tolist() == [0x3FF] * 10 + [ALL] * 22


# -- convergence ------------------------------------------------------------------------------------


@schedules
def test_a_sync_instruction_gathers_lanes_that_diverged(schedule: str | int) -> None:
    """Lanes take paths of different length, then reduce together."""
    body = """
        and.b32 %r1, %lane, 7;
        mov.u32 %r2, 0;
        LOOP:
        setp.ge.u32 %p1, %r2, %r1;
        @%p1 bra OUT;
        add.u32 %r2, %r2, 1;
        bra LOOP;
        OUT:
        redux.sync.add.u32 %r3, %r2, -1;
        st.global.u32 [%slot], %r3;
        ret;
    """
    words, report = run(body, out=96, block=96, schedule=schedule)
    report.raise_for_findings()
    assert words.tolist() == [4 * 28] * 96


@schedules
def test_lanes_that_never_come_are_reported(schedule: str | int) -> None:
    """Lane 3 waits at a barrier that needs the whole warp; the rest wait for lane 3."""
    body = """
        setp.eq.u32 %p1, %lane, 3;
        @%p1 bra OTHER;
        redux.sync.add.u32 %r1, %lane, -1;
        st.global.u32 [%slot], %r1;
        ret;
        OTHER:
        bar.warp.sync -1;
        ret;
    """
    words, report = run(body, schedule=schedule)
    assert kinds(report) == {"deadlock"}
    assert sorted((f.lane, f.count) for f in report.findings) == [(0, 31), (3, 1)]
    lines = sorted(f.source.line for f in report.findings if f.source)
    assert lines == [3, 7]
    assert (words == ALL).all()


@schedules
def test_exited_lanes_are_not_waited_for(schedule: str | int) -> None:
    body = """
        setp.eq.u32 %p1, %lane, 3;
        @%p1 ret;
        redux.sync.add.u32 %r1, 1, -1;
        st.global.u32 [%slot], %r1;
        ret;
    """
    words, report = run(body, schedule=schedule)
    report.raise_for_findings()
    assert words.tolist() == [31] * 3 + [ALL] + [31] * 28


@schedules
def test_barrier_of_part_of_a_warp(schedule: str | int) -> None:
    body = """
        setp.ge.u32 %p1, %lane, 8;
        @%p1 bra REST;
        bar.warp.sync 0xFF;
        st.global.u32 [%slot], %lane;
        ret;
        REST:
        bar.warp.sync 0xFFFFFF00;
        st.global.u32 [%slot], 77;
        ret;
    """
    words, report = run(body, schedule=schedule)
    report.raise_for_findings()
    assert words.tolist() == [*range(8), *[77] * 24]


# -- matrices in shared memory ----------------------------------------------------------------------


def load_matrices_body(count: int, transposed: str, generic: bool = False) -> str:
    registers = ", ".join(f"%r{10 + i}" for i in range(count))
    stores = "\n".join(f"st.global.u32 [%rd3+{4 * i}], %r{10 + i};" for i in range(count))
    convert, space, address = (
        ("cvta.shared.u64 %rd4, %rd4;", "", "%rd4") if generic else ("", ".shared", "%r2")
    )
    return f"""
        mul.wide.u32 %rd1, %lane, 16;
        add.u64 %rd2, %rd1, %in0;
        ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%rd2];
        mov.u32 %r1, tile;
        mad.lo.u32 %r2, %lane, 16, %r1;
        st.shared.v4.u32 [%r2], {{%r4, %r5, %r6, %r7}};
        bar.sync 0;
        cvt.u64.u32 %rd4, %r2;
        {convert}
        ldmatrix.sync.aligned.m8n8.x{count}{transposed}{space}.b16 {{{registers}}}, [{address}];
        mad.wide.u32 %rd3, %lane, {4 * count}, %out;
        {stores}
        ret;
    """


@schedules
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_ldmatrix(count: int, transposed: str, schedule: str | int) -> None:
    """Lane t receives elements 2 (t % 4) and + 1 of row t // 4, of the transposed matrix with .trans.

    Element (row r, column c) of matrix m is 256 m + 16 r + c here; lane 8 m + r points at row r of matrix m.
    """
    matrices = np.array(
        [[256 * m + 16 * r + c for r in range(8) for c in range(8)] for m in range(4)], np.uint16
    )
    words, report = run(
        load_matrices_body(count, transposed), out=32 * count, inputs=[matrices.view(np.uint32)],
        schedule=schedule,
        declarations=[".shared .align 16 .b8 tile[512];"],
    )  # fmt: skip
    report.raise_for_findings()
    for lane in range(32):
        for m in range(count):
            row, column = lane // 4, 2 * (lane % 4)
            if transposed:
                low, high = 256 * m + 16 * column + row, 256 * m + 16 * (column + 1) + row
            else:
                low, high = 256 * m + 16 * row + column, 256 * m + 16 * row + column + 1
            assert words[lane * count + m] == high << 16 | low


def test_ldmatrix_with_a_generic_address() -> None:
    matrices = np.arange(256, dtype=np.uint16).view(np.uint32)
    declarations = [".shared .align 16 .b8 tile[512];"]
    generic, report = run(
        load_matrices_body(4, "", generic=True), out=128, inputs=[matrices], declarations=declarations
    )
    report.raise_for_findings()
    named, _ = run(load_matrices_body(4, ""), out=128, inputs=[matrices], declarations=declarations)
    assert generic.tolist() == named.tolist()


@schedules
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_stmatrix(count: int, transposed: str, schedule: str | int) -> None:
    """The reverse: the pair that lane t holds goes to row t // 4, columns 2 (t % 4) and + 1."""
    registers = ", ".join(f"%r{10 + i}" for i in range(count))
    fill = "\n".join(f"add.u32 %r{10 + i}, %r3, {i * 0x02000200};" for i in range(count))
    body = f"""
        mov.u32 %r1, tile;
        mad.lo.u32 %r2, %lane, 16, %r1;
        st.shared.v4.u32 [%r2], {{0, 0, 0, 0}};
        bar.sync 0;
        mad.lo.u32 %r3, %lane, 2, 1;
        shl.b32 %r3, %r3, 16;
        mad.lo.u32 %r3, %lane, 2, %r3;
        {fill}
        stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 [%r2], {{{registers}}};
        bar.sync 0;
        ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r2];
        mad.wide.u32 %rd3, %lane, 16, %out;
        st.global.v4.u32 [%rd3], {{%r4, %r5, %r6, %r7}};
        ret;
    """
    words, report = run(body, out=128, schedule=schedule, declarations=[".shared .align 16 .b8 tile[512];"])
    report.raise_for_findings()
    expected = np.zeros((4, 8, 8), np.uint16)
    for m in range(count):
        for lane in range(32):
            for half in range(2):
                row, column = lane // 4, 2 * (lane % 4) + half
                at = (m, column, row) if transposed else (m, row, column)
                expected[at] = 512 * m + 2 * lane + half
    assert words.view(np.uint16).tolist() == expected.reshape(-1).tolist()


def test_matrix_rows_must_be_aligned_and_inside() -> None:
    body = """
        mov.u32 %r1, tile;
        mad.lo.u32 %r2, %lane, 16, %r1;
        add.u32 %r3, %r2, 8;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r3];
        add.u32 %r3, %r2, 16;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r3];
        ret;
    """
    _, report = run(body, declarations=[".shared .align 16 .b8 tile[512];"])
    found = [(f.kind, f.lane, f.count, f.source.line if f.source else 0) for f in report.findings]
    assert found == [("misaligned", 0, 32, 4), ("out of bounds", 31, 1, 6)]


@pytest.mark.parametrize(("block", "lane"), [(33, 1), (48, 16)])
def test_matrix_instructions_need_whole_warps(block: int, lane: int) -> None:
    body = """
        mov.u32 %r1, tile;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%r1];
        ret;
    """
    _, report = run(body, block=block, declarations=[".shared .align 16 .b8 tile[512];"])
    assert [(f.kind, f.warp, f.lane, f.count) for f in report.findings] == [
        ("missing lanes", 1, lane, 64 - block)
    ]


# -- mma --------------------------------------------------------------------------------------------


def fragment_positions(k: int) -> dict[str, Callable[[int, int], tuple[int, int]]]:
    """(lane, element) -> (row, column) in A (16 x k), B (k x 8) and C (16 x 8), from the figures of
    "Matrix Fragments for mma.m16n8k8" and "mma.m16n8k16" with 16-bit elements."""

    def a(lane: int, i: int) -> tuple[int, int]:
        group, thread = lane >> 2, lane % 4
        row = group if (i % 4) < 2 else group + 8
        return row, thread * 2 + (i & 1) + (8 if i >= 4 else 0)

    def b(lane: int, i: int) -> tuple[int, int]:
        group, thread = lane >> 2, lane % 4
        return thread * 2 + (i & 1) + (8 if i >= 2 else 0), group

    def c(lane: int, i: int) -> tuple[int, int]:
        group, thread = lane >> 2, lane % 4
        return (group if i < 2 else group + 8), thread * 2 + (i & 1)

    return {"a": a, "b": b, "c": c}


def fragments(
    matrix: npt.NDArray[np.generic], position: Callable[[int, int], tuple[int, int]], count: int
) -> Words:
    values = np.array([[matrix[position(lane, i)] for i in range(count)] for lane in range(32)], matrix.dtype)
    return np.ascontiguousarray(values).view(np.uint32)


def mma_body(instruction: str, sizes: Sequence[int]) -> str:
    """Loads A, B, C fragments of the given numbers of registers, multiplies, stores D."""
    loads, names = [], []
    first = 4
    for i, size in enumerate(sizes):
        loads.append(f"mad.wide.u32 %rd{i + 1}, %lane, {4 * size}, %in{i};")
        registers = [f"%r{first + j}" for j in range(size)]
        loads += [f"ld.global.u32 {register}, [%rd{i + 1}+{4 * j}];" for j, register in enumerate(registers)]
        names.append("{" + ", ".join(registers) + "}")
        first += size
    d = [f"%r{first + j}" for j in range(sizes[2])]
    stores = [f"st.global.u32 [%rd9+{4 * j}], {register};" for j, register in enumerate(d)]
    multiply = f"{instruction} {{{', '.join(d)}}}, {', '.join(names)};"
    return "\n".join([*loads, multiply, f"mad.wide.u32 %rd9, %lane, {4 * sizes[2]}, %out;", *stores, "ret;"])


@pytest.mark.parametrize("k", [8, 16])
@pytest.mark.parametrize("type_name", ["f16", "bf16"])
@pytest.mark.parametrize("exact", [False, True])
def test_mma_against_a_plain_product(k: int, type_name: str, exact: bool) -> None:
    """Small integers, so that every order of summation gives the same bits."""
    random = np.random.default_rng(3)
    dtype = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[type_name]
    a = random.integers(-8, 9, (16, k)).astype(dtype)
    b = random.integers(-8, 9, (k, 8)).astype(dtype)
    c = random.integers(-100, 101, (16, 8)).astype(np.float32)
    position = fragment_positions(k)
    inputs = [
        fragments(a, position["a"], k // 2),
        fragments(b, position["b"], k // 4),
        fragments(c, position["c"], 4),
    ]
    instruction = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{type_name}.{type_name}.f32"
    words, report = run(mma_body(instruction, [k // 4, k // 8, 4]), out=128, inputs=inputs, exact=exact)
    report.raise_for_findings()
    expected = a.astype(np.float64) @ b.astype(np.float64) + c
    got = words.view(np.float32).reshape(32, 4)
    for lane in range(32):
        for i in range(4):
            assert got[lane, i] == expected[position["c"](lane, i)]
    assert report.counters.matrix_instructions == 1


def test_mma_with_16_bit_accumulators() -> None:
    random = np.random.default_rng(4)
    a, b = (
        random.integers(-3, 4, (16, 16)).astype(np.float16),
        random.integers(-3, 4, (16, 8)).astype(np.float16),
    )
    c = random.integers(-9, 10, (16, 8)).astype(np.float16)
    position = fragment_positions(16)
    inputs = [fragments(a, position["a"], 8), fragments(b, position["b"], 4), fragments(c, position["c"], 4)]
    words, report = run(
        mma_body("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", [4, 2, 2]), out=64, inputs=inputs
    )
    report.raise_for_findings()
    expected = a.astype(np.float64) @ b.astype(np.float64) + c.astype(np.float64)
    got = words.view(np.float16).reshape(32, 4)
    assert all(got[lane, i] == expected[position["c"](lane, i)] for lane in range(32) for i in range(4))


@schedules
def test_mma_gathers_its_warp(schedule: str | int) -> None:
    """Lanes of odd number come late; A = 0, so that D = C = 1.0."""
    body = """
        and.b32 %r1, %lane, 1;
        setp.eq.u32 %p1, %r1, 0;
        @%p1 bra MULTIPLY;
        mov.u32 %r2, 5;
        MULTIPLY:
        mov.b32 %r4, 0;
        mov.f32 %f1, 0f3F800000;
        MMA {%f2, %f3, %f4, %f5}, {%r4, %r4}, {%r4}, {%f1, %f1, %f1, %f1};
        st.global.f32 [%slot], %f5;
        ret;
    """
    body = body.replace("MMA", "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32")
    words, report = run(body, out=64, block=64, schedule=schedule)
    report.raise_for_findings()
    assert words.tolist() == [0x3F800000] * 64
    assert report.counters.matrix_instructions == 2


def test_mma_with_missing_lanes_is_reported() -> None:
    body = """
        setp.eq.u32 %p1, %lane, 5;
        @%p1 ret;
        mov.b32 %r4, 0;
        MMA {%f2, %f3, %f4, %f5}, {%r4, %r4}, {%r4}, {%f2, %f3, %f4, %f5};
        ret;
    """
    body = body.replace("MMA", "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32")
    _, report = run(body)
    assert [(f.kind, f.lane, f.count, f.source.line if f.source else 0) for f in report.findings] == [
        ("missing lanes", 5, 1, 4)
    ]


# -- what must be refused ---------------------------------------------------------------------------

REFUSED = """
shfl.idx.b32 %r0, %r1, %r2, %r3;
shfl.sync.b32 %r0, %r1, %r2, %r3, -1;
shfl.sync.idx.u32 %r0, %r1, %r2, %r3, -1;
shfl.sync.idx.b64 %rd0, %rd1, %r2, %r3, -1;
shfl.sync.idx.b32 %r0, %r1, %r2, %r3;
shfl.sync.xor.b32 %r0, %r1, %r2, %r3, -1;
vote.all.pred %p0, %p1;
vote.sync.pred %p0, %p1, -1;
vote.sync.ballot.pred %p0, %p1, -1;
vote.sync.any.b32 %r0, %p1, -1;
vote.sync.any.pred %p0, %p1;
match.sync.b32 %r0, %r1, -1;
match.any.sync.b32 %r0|%p1, %r1, -1;
match.any.sync.b16 %r0, %h1, -1;
match.any.b32 %r0, %r1, -1;
redux.sync.add.b32 %r0, %r1, -1;
redux.sync.and.u32 %r0, %r1, -1;
redux.sync.min.f32 %f0, %f1, -1;
redux.sync.add.u32 %r0, %r1;
redux.add.u32 %r0, %r1, -1;
elect.sync %r0, -1;
elect.sync %r0|%p1;
activemask.u32 %r0;
ldmatrix.sync.aligned.m8n8.shared.b16 {%r0}, [%r4];
ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r0}, [%r4];
ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%rd0}, [%r4];
ldmatrix.sync.aligned.m8n8.x1.global.b16 {%r0}, [%rd4];
ldmatrix.sync.aligned.m8n8.x1.shared.b8 {%r0}, [%r4];
ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r0, %r1}, [%r4];
ldmatrix.aligned.m8n8.x1.shared.b16 {%r0}, [%r4];
stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r4], {%r0};
stmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%r4];
MMA.sync.m16n8k8.row.col.f32.bf16.bf16.f32 D4, A2, B1, C4;
MMA.sync.aligned.m16n8k8.col.row.f32.bf16.bf16.f32 D4, A2, B1, C4;
MMA.sync.aligned.m16n8k8.row.row.f32.bf16.bf16.f32 D4, A2, B1, C4;
MMA.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 D4, A2, B1, C4;
MMA.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 A2, A2, B1, C4;
MMA.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 D4, B1, B1, C4;
MMA.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 D4, A2, A2, C4;
MMA.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 D4, A2, B1, A2;
MMA.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 D4, {%rd0, %rd1}, B1, C4;
MMA.sync.aligned.m16n8k8.row.col.f32.f16.bf16.f32 D4, A2, B1, C4;
MMA.sync.aligned.m16n8k8.row.col.satfinite.f32.bf16.bf16.f32 D4, A2, B1, C4;
MMA.sp.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 D4, A2, A2, C4, %r4, 0;
MMA.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 D4, A2, B1;
""".strip().splitlines()
FRAGMENTS = {
    "MMA": "mma", "D4": "{%f0, %f1, %f2, %f3}", "C4": "{%f4, %f5, %f6, %f7}", "A2": "{%r0, %r1}",
    "B1": "{%r2}",
}  # fmt: skip


def spelled_out(line: str) -> str:
    """`MMA` is `mma`, and D4, C4, A2, B1 are fragments of so many registers."""
    for short, long in FRAGMENTS.items():
        line = line.replace(short, long)
    return line


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_not_modelled_or_not_ptx_is_refused(line: str) -> None:
    refused(spelled_out(line))


def test_a_valid_product_is_not_refused() -> None:
    load_line(spelled_out("MMA.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 D4, A2, B1, C4;"))
