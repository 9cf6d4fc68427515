"""Tensor memory and tcgen05, one CTA at a time: allocation, lanes, operand layouts, order, and what is reported."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from canonical_layouts import packed_offsets
from tcgen05_kernels import (
    DTYPES,
    TILES,
    Array,
    Multiply,
    Operand,
    instruction_descriptor,
    multiplies,
    multiply,
    shared_descriptor,
)
from vgpu_kernels import SCHEDULES, refused, run

from oproj_lib import vgpu

NONE = ""
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def found(report: vgpu.Report) -> list[tuple[str, str]]:
    return [(finding.kind, finding.message) for finding in report.findings]


def kinds(report: vgpu.Report) -> set[str]:
    return {finding.kind for finding in report.findings}


def whole_numbers(rows: int, depth: int, kind: str = "bf16", seed: int = 0) -> Array:
    """Small ones, so that sums are exact in any order."""
    return np.random.default_rng(seed + rows).integers(-8, 9, (rows, depth)).astype(DTYPES[kind])


def lanes_of_rows(m: int) -> list[int]:
    """PTX ISA, "Data path layout organization": M = 128 takes every lane, M = 64 the first 16 of each quarter."""
    return list(range(128)) if m == 128 else [lane for lane in range(128) if lane % 32 < 16]


def problem(
    m: int = 64, n: int = 32, depth: int = 64, **operand: object
) -> tuple[Array, list[Multiply], Array]:
    a, b = whole_numbers(m, depth), whole_numbers(n, depth, seed=1)
    image, steps = multiplies(Operand(a, **operand), Operand(b, **operand))  # type: ignore[arg-type]
    return image, steps, a.astype(np.float64) @ b.astype(np.float64).T


# -- multiplying ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "n"),
    [(64, 8), (64, 24), (64, 64), (64, 200), (64, 256), (128, 16), (128, 48), (128, 128), (128, 256)],
)
def test_sizes_and_lanes(m: int, n: int) -> None:
    image, steps, expected = problem(m, n)
    d, report = multiply(image, steps, n, rows=m)
    assert found(report) == []
    assert (d[lanes_of_rows(m)] == expected).all()
    untouched = np.delete(d.view(np.uint32), lanes_of_rows(m), axis=0)
    assert (untouched == 0xFFFFFFFF).all()  # nothing was stored there
    assert report.counters.tensor_instructions == 4


@pytest.mark.parametrize("b_major", [True, False], ids=["B K-major", "B N-major"])
@pytest.mark.parametrize("a_major", [True, False], ids=["A K-major", "A M-major"])
@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("m", [64, 128])
def test_operand_layouts(m: int, span: int, a_major: bool, b_major: bool) -> None:
    """Built from the manual's canonical layouts; K-major spans hold 16, 32 or 64 elements of K."""
    kind = "f16" if a_major else "bf16"
    depth = {0: 32, 32: 16, 64: 32, 128: 64}[span]
    n = 64
    a, b = whole_numbers(m, depth, kind), whole_numbers(n, depth, kind, seed=1)
    image, steps = multiplies(Operand(a, span, a_major), Operand(b, span, b_major), kind)
    d, report = multiply(image, steps, n, rows=m, exact=True)
    assert found(report) == []
    assert (d[lanes_of_rows(m)] == a.astype(np.float64) @ b.astype(np.float64).T).all()


@pytest.mark.parametrize("wrong", ["stride", "span", "leading"])
def test_a_wrong_descriptor_gives_wrong_numbers(wrong: str) -> None:
    """Otherwise the tests above would prove nothing."""
    a, b = whole_numbers(64, 64), whole_numbers(64, 64, seed=1)
    span = 0 if wrong == "leading" else 128
    left, right = Operand(a, span), Operand(b, span)
    image, steps = multiplies(left, right)
    leading, stride = packed_offsets(64, 64, span, True)
    worse = {"stride": (leading, 512, 128), "span": (leading, 1024, 64), "leading": (128, stride, 0)}[wrong]
    steps = [
        Multiply(shared_descriptor((s.a & 0x3FFF) << 4, *worse), s.b, s.instruction, 0, s.accumulate)
        for s in steps
    ]
    d, _ = multiply(image, steps, 64, rows=64)
    assert (d[lanes_of_rows(64)] != a.astype(np.float64) @ b.astype(np.float64).T).any()


def test_accumulate_or_overwrite() -> None:
    image, steps, product = problem()
    again = [*steps, Multiply(steps[0].a, steps[0].b, steps[0].instruction)]
    d, report = multiply(image, again, 32, rows=64)
    first, _ = multiply(image, steps[:1], 32, rows=64)
    lanes = lanes_of_rows(64)
    assert found(report) == [] and (d[lanes] == product + first[lanes]).all()
    fresh = [*steps, Multiply(steps[0].a, steps[0].b, steps[0].instruction, accumulate=False)]
    d, report = multiply(image, fresh, 32, rows=64)
    assert found(report) == [] and (d[lanes] == first[lanes]).all()


def test_accumulating_onto_nothing_is_reported() -> None:
    image, steps, _ = problem()
    onto_nothing = [Multiply(steps[0].a, steps[0].b, steps[0].instruction)]
    assert kinds(multiply(image, onto_nothing, 32, rows=64)[1]) == {"undefined data"}


def test_upper_half_of_each_quarter() -> None:
    """D of M = 64 may begin at lane 16 (address bits 16 and up)."""
    image, steps, product = problem()
    shifted = [Multiply(s.a, s.b, s.instruction, 16 << 16, s.accumulate) for s in steps]
    d, report = multiply(image, shifted, 32, rows=128)
    assert (d[[lane + 16 for lane in lanes_of_rows(64)]] == product).all()
    assert kinds(report) == {"undefined data"}  # lanes 0 to 15 were stored too, and nobody wrote them


# -- allocation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [32, 64, 128, 256, 512])
def test_sizes_of_an_allocation(columns: int) -> None:
    image, steps, product = problem()
    d, report = multiply(image, steps, 32, rows=64, columns=columns)
    assert found(report) == [] and (d[lanes_of_rows(64)] == product).all()


@pytest.mark.parametrize("columns", [16, 48, 1024])
def test_other_sizes(columns: int) -> None:
    image, steps, _ = problem()
    _, report = multiply(image, steps, 32, rows=64, columns=columns)
    expected = ("bad operand", f"tcgen05.alloc of {columns} columns: a power of two from 32 to 512")
    assert found(report)[0] == expected


ALLOC = "@%p8 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], {};"
FREE = "@%p8 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, {};"
PERMIT = "@%p8 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"free": NONE}, "tensor memory leak", "32 columns of tensor memory are never freed (CTA 0"),
        (
            {"end": FREE.format(32)}, "tensor memory",
            "tcgen05.dealloc of 32 columns at column 0: nothing is allocated there",
        ),
        (
            {"free": FREE.format(64)}, "tensor memory",
            "tcgen05.dealloc of 64 columns at column 0: 32 columns are allocated there",
        ),
        (
            {"permit": PERMIT + "\n" + ALLOC.format(32)}, "tensor memory",
            "tcgen05.alloc after relinquish_alloc_permit in this CTA",
        ),
        (
            {"alloc": ALLOC.format(512) + "\n" + ALLOC.format(32)}, "tensor memory",
            "tcgen05.alloc of 32 columns blocks for ever: CTA 0 has no room",
        ),
        ({"alloc": NONE}, "out of bounds", "are not allocated"),
    ],
    ids=["leak", "double free", "wrong size", "no permit", "no room", "no allocation"],
)  # fmt: skip
def test_allocation_mistakes(changes: dict[str, Any], kind: str, message: str) -> None:
    image, steps, _ = problem()
    _, report = multiply(image, steps, 32, rows=64, **changes)
    assert any(k == kind and message in text for k, text in found(report)), found(report)


def test_columns_that_are_not_allocated() -> None:
    image, steps, _ = problem()
    beyond = [Multiply(s.a, s.b, s.instruction, 16, s.accumulate) for s in steps]
    _, report = multiply(image, beyond, 32, rows=64)
    assert ("out of bounds", "tensor memory columns 16..47 are not allocated") in found(report)


def test_free_while_a_multiply_writes() -> None:
    image, steps, _ = problem()
    _, report = multiply(image, steps, 32, rows=64, before_mma=NONE, commit=FREE.format(32), free=NONE)
    assert ("race", "tcgen05.dealloc of column 0 while a tcgen05.mma is still writing it") in found(report)


# -- who reaches what -------------------------------------------------------------------------------------------


@schedules
def test_a_warp_reaches_its_own_quarter(schedule: str | int) -> None:
    image, steps, _ = problem()
    _, report = multiply(image, steps, 32, rows=64, quarter="mov.u32 %r11, 0;", schedule=schedule)
    wrong = [text for kind, text in found(report) if kind == "lane quarter"]
    # Three warps, four loads; which warp is named is the schedule's choice.
    assert re.fullmatch(r"warp ([123]) reaches tensor memory lanes \d+\.\.\d+, not 0\.\.31", wrong[0])
    assert all(finding.count == 3 for finding in report.findings if finding.kind == "lane quarter")


def test_warps_4_to_7_reach_the_quarters_again() -> None:
    """128 threads of warps 4 to 7 read what warps 0 to 3 would: only the warp's number modulo 4 counts."""
    image, steps, product = problem()
    shift = "setp.ge.u32 %p6, %id, 128;\nsub.u32 %r14, %id, 128;\nmad.wide.u32 %rd12, %r14, 128, %out;"
    d, report = multiply(image, steps, 32, rows=64, block=256, before_ld=shift)
    assert found(report) == [] and (d[lanes_of_rows(64)] == product).all()


# -- access shapes ------------------------------------------------------------------------------------------------


def cells(shape: str, count: int, second: int = 0) -> list[list[tuple[int, int]]]:
    """[lane][register] -> (TMEM lane in the quarter, column). PTX ISA, "Matrix fragments for tcgen05.ld/st"."""
    table = []
    for lane in range(32):
        row = []
        for r in range(count):
            if shape == "32x32b":
                row.append((lane, r))
            elif shape == "16x32bx2":
                row.append((lane % 16, r + (second if lane >= 16 else 0)))
            elif shape == "16x128b":
                row.append((lane // 4 + (8 if r & 1 else 0), lane % 4 + 4 * (r >> 1)))
            else:  # 16x256b
                row.append((lane // 4 + (8 if r & 2 else 0), 2 * (lane % 4) + (r & 1) + 8 * (r >> 2)))
        table.append(row)
    return table


def access(
    store: str, load: str, stored: int, loaded: int, *, wait: bool = True
) -> tuple[Array, vgpu.Report]:
    """One warp stores registers 1000 * lane + i with one shape and loads with another."""
    body = "\n".join(
        [
            "mov.u32 %r0, area;",
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 32;",
            "ld.shared.b32 %r1, [%r0];",
            "mul.lo.u32 %r2, %lane, 1000;",
            *(f"add.u32 %s{i}, %r2, {i};" for i in range(stored)),
            f"tcgen05.st.sync.aligned.{store}, {{{', '.join(f'%s{i}' for i in range(stored))}}};",
            "tcgen05.wait::st.sync.aligned;" if wait else "",
            f"tcgen05.ld.sync.aligned.{load[: load.index('[')]}{{{', '.join(f'%t{i}' for i in range(loaded))}}}, "
            f"{load[load.index('[') :]};",
            "tcgen05.wait::ld.sync.aligned;",
            f"mad.wide.u32 %rd1, %lane, {4 * loaded}, %out;",
            *(f"st.global.b32 [%rd1+{4 * i}], %t{i};" for i in range(loaded)),
            "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
            "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;",
            "ret;",
        ]
    )
    out, report = run(
        body, out=32 * loaded, declarations=[".shared .align 16 .b8 area[16];", ".reg .b32 %s<32>, %t<32>;"],
        target="sm_100a", checks=True,
    )  # fmt: skip
    return out.reshape(32, loaded), report


SHAPES = [
    ("16x128b", 1, 2, 0, "[%r1]"),
    ("16x128b", 4, 8, 0, "[%r1]"),
    ("16x256b", 1, 4, 0, "[%r1]"),
    ("16x256b", 2, 8, 0, "[%r1]"),
    ("16x32bx2", 4, 4, 4, "[%r1], 4"),
    ("16x32bx2", 2, 2, 16, "[%r1], 16"),
    ("32x32b", 1, 1, 0, "[%r1]"),
]


@pytest.mark.parametrize(("shape", "repeat", "count", "second", "address"), SHAPES)
def test_loads_of_each_shape(shape: str, repeat: int, count: int, second: int, address: str) -> None:
    """Stored with 32x32b, so that cell (lane, column) holds 1000 * lane + column."""
    load = f"{shape}.x{repeat}.b32 {address}"
    out, report = access("32x32b.x32.b32 [%r1]", load, 32, count)
    assert found(report) == []
    expected = [[1000 * lane + column for lane, column in row] for row in cells(shape, count, second)]
    assert out.tolist() == expected


@pytest.mark.parametrize(("shape", "repeat", "count", "second", "address"), SHAPES)
def test_stores_of_each_shape(shape: str, repeat: int, count: int, second: int, address: str) -> None:
    """Stored with the shape and loaded with 32x32b; cells that no lane stored are undefined, and are reported."""
    table = cells(shape, count, second)
    out, report = access(f"{shape}.x{repeat}.b32 {address}", "32x32b.x32.b32 [%r1]", count, 32)
    held = {cell: 1000 * lane + r for lane, row in enumerate(table) for r, cell in enumerate(row)}
    assert len(held) == 32 * count  # each cell once
    assert all(out[cell] == value for cell, value in held.items())
    assert kinds(report) == {"undefined data"}


# -- order ---------------------------------------------------------------------------------------------------------


@schedules
def test_reading_d_without_waiting_is_reported(schedule: str | int) -> None:
    image, steps, _ = problem()
    _, report = multiply(image, steps, 32, rows=64, wait=NONE)
    assert (
        "race", "tcgen05.ld of columns that a tcgen05.mma in flight still writes: wait for its tcgen05.commit"
    ) in found(report)  # fmt: skip


def test_a_commit_that_never_comes() -> None:
    image, steps, _ = problem()
    _, report = multiply(image, steps, 32, rows=64, commit=NONE)
    assert "deadlock" in kinds(report)


@schedules
@pytest.mark.parametrize("committer", [0, 1, 32])
def test_a_commit_tracks_its_own_thread_s_multiplies(committer: int, schedule: str | int) -> None:
    image, steps, _ = problem()
    commit = "@%p3 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r0];"
    by = f"setp.eq.u32 %p3, %id, {committer};\n{commit}"
    _, report = multiply(image, steps, 32, rows=64, commit=by, schedule=schedule)
    texts = [text for _, text in found(report) if text.startswith("tcgen05.commit")]
    if committer == 0:
        assert found(report) == []
    elif schedule == "program":
        assert texts == [
            "tcgen05.commit tracks its own thread's tcgen05.mma, and this thread has issued none: it does not wait for "
            "those of warp 0, lane 0"
        ]
    else:
        assert not report.ok or committer == 32  # another warp may commit before anything has been issued


@schedules
def test_registers_before_wait_ld_are_undefined(schedule: str | int) -> None:
    image, steps, _ = problem()
    _, report = multiply(image, steps, 32, rows=64, wait_ld=NONE, schedule=schedule)
    causes = [text for kind, text in found(report) if kind == "undefined data"]
    assert causes and all("a tcgen05.ld that nobody waited for" in text for text in causes)


@schedules
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, set()),  # the writers fence, before they meet
        ({"writer_fence": NONE, "reader_fence": "fence.proxy.async.shared::cta;"}, set()),
        ({"writer_fence": NONE, "reader_fence": "fence.proxy.async;"}, set()),
        ({"writer_fence": NONE}, {"missing proxy fence"}),
        ({"meet": "bar.sync 0;\nbar.sync 0;"}, set()),
    ],
    ids=["writers", "reader", "reader, all spaces", "nobody", "twice"],
)
def test_proxy_fences(changes: dict[str, Any], expected: set[str], schedule: str | int) -> None:
    image, steps, product = problem()
    d, report = multiply(image, steps, 32, rows=64, schedule=schedule, **changes)
    assert kinds(report) == expected
    assert (d[lanes_of_rows(64)] == product).all()  # the virtual GPU is kind to the data; the report is not


@schedules
def test_a_fence_of_one_warp_does_not_cover_the_others(schedule: str | int) -> None:
    """Only warp 0 fences what it wrote; the MMA reads what the others wrote, too."""
    image, steps, _ = problem()
    only = "@%p8 fence.proxy.async.shared::cta;"
    _, report = multiply(image, steps, 32, rows=64, writer_fence=only, schedule=schedule)
    assert kinds(report) == {"missing proxy fence"}


@schedules
def test_operands_must_be_there(schedule: str | int) -> None:
    """Without the meeting, warp 0 multiplies what the other warps may not have written."""
    image, steps, _ = problem()
    _, report = multiply(image, steps, 32, rows=64, meet="bar.warp.sync -1;", schedule=schedule)
    assert "race" in kinds(report)


def test_operands_that_nobody_wrote() -> None:
    """Only the columns of D that depend on them are undefined."""
    image, steps, _ = problem(64, 32)
    beyond = [Multiply(s.a, s.b + (1024 >> 4), s.instruction, 0, s.accumulate) for s in steps]
    _, report = multiply(np.concatenate([image[:-1024]]), beyond, 32, rows=64)
    assert "out of bounds" in kinds(report)  # B reaches past the end of shared memory


@schedules
def test_overwriting_operands_in_flight(schedule: str | int) -> None:
    image, steps, _ = problem()
    early = "@%p4 st.shared.b32 [%r0+1024], %r2;"
    late = "W:\nmbarrier.try_wait.parity.shared::cta.b64 %p1, [%r0], 0;\n@!%p1 bra W;\n" + early
    _, report = multiply(image, steps, 32, rows=64, schedule=schedule, wait=late)
    assert found(report) == []
    commit = "@%p4 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r0];"
    _, report = multiply(image, steps, 32, rows=64, commit=f"{commit}\n{early}")
    assert any(
        kind == "race" and "is in flight and may still read it" in text for kind, text in found(report)
    )


STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r11], {%r2};"


@schedules
@pytest.mark.parametrize(
    ("before", "messages"),
    [
        (f"{STORE}\ntcgen05.wait::st.sync.aligned;\nbar.sync 0;", []),
        (f"{STORE}\nbar.sync 0;", ["tcgen05.mma may overtake warp 0's tcgen05.st of tensor memory that no "
                                   "tcgen05.wait::st has waited for"]),
        (f"{STORE}\ntcgen05.wait::st.sync.aligned;", ["tcgen05.mma may overtake warp 1's tcgen05.st of the same "
                                                      "tensor memory, and no barrier orders them"]),
    ],
    ids=["in order", "no wait", "no barrier"],
)  # fmt: skip
def test_stores_come_before_multiplies(before: str, messages: list[str], schedule: str | int) -> None:
    image, steps, _ = problem()
    _, report = multiply(image, steps, 32, rows=64, before_mma=before, schedule=schedule)
    texts = [text for _, text in found(report)]
    if not messages:
        assert texts == []
    elif schedule == "program":
        assert texts[0] == messages[0]
    else:
        assert kinds(report) == {"race"}  # a store may come after the MMA, and then it is what is reported


@pytest.mark.parametrize(
    ("free_order", "expected"),
    [("bar.sync 0;", []), (NONE, ["warp 1's tcgen05.ld of the same tensor memory"])],
)
def test_loads_come_before_the_release(free_order: str, expected: list[str]) -> None:
    image, steps, _ = problem()
    _, report = multiply(image, steps, 32, rows=64, before_free=free_order)
    assert [k for k, _ in found(report)] == ["race"] * len(expected)
    assert all(text in message for text, (_, message) in zip(expected, found(report), strict=True))


def test_a_load_before_its_own_store_has_been_waited_for() -> None:
    _, report = access("32x32b.x32.b32 [%r1]", "32x32b.x32.b32 [%r1]", 32, 32)
    assert found(report) == []
    _, report = access("32x32b.x32.b32 [%r1]", "32x32b.x32.b32 [%r1]", 32, 32, wait=False)
    what = "may overtake warp 0's tcgen05.st of tensor memory that no tcgen05.wait::st has waited for"
    assert found(report) == [("race", f"tcgen05.ld {what}"), ("race", f"tcgen05.dealloc {what}")]


def test_more_than_one_issuer() -> None:
    image, steps, _ = problem()
    _, report = multiply(image, steps, 32, rows=64, before_mma="setp.lt.u32 %p4, %id, 2;")
    assert "many issuers" in kinds(report)


# -- descriptors at run time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"a": 0}, "descriptor", "bits 46-48 are 0, must be 1"),
        ({"b": 1 << 46 | 3 << 61}, "descriptor", "swizzle code 3"),
        ({"instruction": instruction_descriptor(64, 264)}, "descriptor", "N = 264; M = 64"),
        ({"instruction": instruction_descriptor(64, 32) | 1 << 13}, "descriptor", "negated operands"),
        ({"a": shared_descriptor(1 << 17, 16, 1024, 128)}, "out of bounds", "operand A reaches shared byte"),
        ({"b": shared_descriptor(TILES, 16, 1 << 16, 128)}, "out of bounds", "operand B reaches shared byte"),
        (
            {"column": 8 << 16},
            "out of bounds",
            "D at tensor memory lane 8 with M = 64: lane 0 (or 16 for M = 64)",
        ),
    ],
)
def test_refused_descriptors(change: dict[str, int], kind: str, message: str) -> None:
    image, steps, _ = problem()
    wrong = Multiply(**{**vars(steps[0]), **change})
    _, report = multiply(image, [wrong], 32, rows=64)
    assert any(k == kind and message in text for k, text in found(report)), found(report)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tcgen05.cp.cta_group::1.128x256b [%r1], %rd1;", "tcgen05.cp is not modelled"),
        ("tcgen05.shift.cta_group::1.down [%r1];", "tcgen05.shift is not modelled"),
        (
            "tcgen05.mma.cta_group::2.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;",
            r"cta_group::2 \(a pair of CTAs\) is not modelled",
        ),
        ("tcgen05.mma.cta_group::1.kind::tf32 [%r1], %rd1, %rd2, %r2, %p1;", "only tcgen05.mma kind::f16"),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r3], %rd2, %r2, %p1;", "A in tensor memory"),
        (
            "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, {%r4, %r5, %r6, %r7}, %p1;",
            "disable-output-lane",
        ),
        ("tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r1}, [%r2];", "access shape; modelled: 32x32b"),
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1}, [%r2];", "2 registers expected, 1 given"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32 {%r1}, [%r2];", "16-bit packing"),
        ("tcgen05.ld.aligned.32x32b.x1.b32 {%r1}, [%r2];", "needs .sync.aligned"),
        ("tcgen05.commit.cta_group::1.b64 [%r1];", "needs .mbarrier::arrive::one"),
    ],
)
def test_refused_by_name(line: str, message: str) -> None:
    refused(line, message)
