"""Memory rules of the virtual GPU: bounds, alignment, spaces, undefined data, asynchronous copies, multicast,
races.

Every rule has a kernel that keeps it (no findings) and one that breaks just this rule (one finding, with its
line).
"""

from __future__ import annotations

import numpy as np
import pytest

from oproj_lib import vgpu

HEAD = """.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p0, .param .u64 p1, .param .u32 p2)
{
.reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<40>; .reg .b64 %d<20>;
.shared .align 16 .b8 tile[1024];
ld.param.u64 %d0, [p0];
ld.param.u64 %d1, [p1];
ld.param.u32 %r0, [p2];
mov.u32 %r1, %tid.x;
mul.wide.u32 %d2, %r1, 4;
add.u64 %d3, %d0, %d2;
add.u64 %d4, %d1, %d2;
shl.b32 %r2, %r1, 2;
mov.u32 %r3, tile;
add.u32 %r4, %r3, %r2;
"""
TAIL = '\nret;\n}\n.file 1 "kernel.py"\n'


def kernel(body: str) -> vgpu.Module:
    """Line i of `body` (from 1) is line i of kernel.py."""
    lines = [f".loc 1 {i} 0\n{line}" for i, line in enumerate(body.strip().splitlines(), 1)]
    return vgpu.load(HEAD + "\n".join(lines) + TAIL)


def launch(
    body: str,
    x: np.ndarray,
    out: np.ndarray,
    *,
    block: int = 32,
    grid: int = 1,
    number: int = 0,
    **options: object,
) -> vgpu.Report:
    gpu = vgpu.VirtualGPU()
    args = [gpu.upload(x, "x"), gpu.upload(out, "out"), number]
    return gpu.launch(kernel(body), grid=grid, block=block, args=args, checks=True, **options)  # type: ignore[arg-type]


def words(n: int) -> np.ndarray:
    return np.arange(1, n + 1, dtype=np.uint32)


def only(report: vgpu.Report, kind: str, line: int) -> vgpu.Finding:
    """The report's one finding."""
    assert [(f.kind, f.source.line if f.source else None) for f in report.findings] == [(kind, line)]
    return report.findings[0]


COPY = "ld.global.u32 %r5, [%d3];\nst.global.u32 [%d4], %r5;"


def test_a_copy_is_a_copy() -> None:
    out = np.zeros(32, np.uint32)
    report = launch(COPY, words(32), out)
    assert report.ok
    np.testing.assert_array_equal(out, words(32))


@pytest.mark.parametrize(("elements", "bad"), [(32, 0), (31, 1), (1, 31)])
def test_loads_past_the_end_are_out_of_bounds(elements: int, bad: int) -> None:
    report = launch(COPY, words(elements), np.zeros(32, np.uint32))
    if not bad:
        assert report.ok
        return
    finding = only(report, "out of bounds", 1)
    assert finding.count == bad and finding.lane == elements
    assert f"x + {4 * elements} bytes, 0 past its end ({4 * elements} bytes)" in finding.message


def test_stores_past_the_end_are_out_of_bounds_and_touch_nothing() -> None:
    out = np.zeros(30, np.uint32)
    finding = only(launch(COPY, words(32), out), "out of bounds", 2)
    assert (finding.lane, finding.count) == (30, 2)
    np.testing.assert_array_equal(out, words(30))


def test_use_after_free() -> None:
    gpu = vgpu.VirtualGPU()
    x, out = gpu.upload(words(32), "x"), gpu.upload(np.zeros(32, np.uint32), "out")
    address = x.address
    gpu.free(x)
    report = gpu.launch(kernel(COPY), block=32, args=[address, out, 0])
    assert [finding.kind for finding in report.findings] == ["out of bounds"]


@pytest.mark.parametrize(("shift", "ok"), [(0, True), (2, False), (4, True)])
def test_misaligned_access(shift: int, ok: bool) -> None:
    body = f"ld.global.u32 %r5, [%d3+{shift}];\nst.global.u32 [%d4], %r5;"
    report = launch(body, words(34), np.zeros(32, np.uint32))
    assert report.ok == ok
    if not ok:
        finding = report.findings[0]
        assert (
            finding.kind == "misaligned"
            and "load of 4 bytes" in finding.message
            and "not a multiple of 4" in finding.message
        )


def test_vector_accesses_need_their_whole_alignment() -> None:
    report = launch("ld.global.v4.u32 {%r5,%r6,%r7,%r8}, [%d3];", words(64), np.zeros(32, np.uint32))
    assert (
        report.findings[0].kind == "misaligned" and report.findings[0].count == 24
    )  # 8 of 32 lanes sit at 16 bytes


def test_shared_memory_has_bounds() -> None:
    report = launch("st.shared.u32 [%r4+1020], %r1;", words(1), words(1))
    finding = only(report, "out of bounds", 1)
    assert (finding.lane, finding.count) == (
        1,
        31,
    ) and "shared byte 1024 (1024 bytes there)" in finding.message


def test_shared_memory_belongs_to_its_cta() -> None:
    body = "mov.u32 %r9, %ctaid.x;\nst.shared.u32 [%r4], %r9;\nld.shared.u32 %r10, [%r4];\nshl.b32 %r11, %r9, 7;\n"
    body += "cvt.u64.u32 %d5, %r11;\nadd.u64 %d6, %d4, %d5;\nst.global.u32 [%d6], %r10;"
    out = np.full(96, 7, np.uint32)
    assert launch(body, words(1), out, grid=3).ok
    np.testing.assert_array_equal(out, np.repeat([0, 1, 2], 32))


def test_generic_addresses_reach_shared_and_global() -> None:
    body = "cvta.shared.u64 %d5, %d2;\nst.u32 [%d5], %r1;\nld.shared.u32 %r5, [%r4];\nst.u32 [%d4], %r5;"
    out = np.zeros(32, np.uint32)
    assert launch(body, words(1), out).ok
    np.testing.assert_array_equal(out, np.arange(32))


# -- undefined data ---------------------------------------------------------------------------------------------------


def test_undefined_shared_memory_is_reported_where_it_reaches_global_memory() -> None:
    body = "ld.shared.u32 %r5, [%r4];\nadd.u32 %r6, %r5, 1;\nst.global.u32 [%d4], %r6;"
    finding = only(launch(body, words(1), np.zeros(32, np.uint32)), "undefined data", 3)
    assert "memory that nobody wrote, loaded (kernel.py:1)" in finding.message and finding.count == 32


def test_undefined_data_that_nobody_uses_is_legal() -> None:
    body = "ld.shared.u32 %r5, [%r4];\nadd.u32 %r6, %r5, 1;\nmov.u32 %r6, 3;\nst.global.u32 [%d4], %r6;"
    assert launch(body, words(1), np.zeros(32, np.uint32)).ok


@pytest.mark.parametrize(
    ("use", "what"),
    [
        ("cvt.u64.u32 %d7, %r5;\nld.global.u32 %r6, [%d7];", "this address"),
        ("setp.eq.u32 %p1, %r5, 0;\n@%p1 bra DONE;\nDONE: mov.u32 %r6, 1;", "this predicate"),
    ],
)
def test_undefined_data_in_an_address_or_a_branch(use: str, what: str) -> None:
    report = launch("ld.shared.u32 %r5, [%r4];\n" + use, words(1), np.zeros(32, np.uint32))
    found = [f for f in report.findings if f.kind == "undefined data"]
    assert len(found) == 1 and found[0].message.startswith(what)


def test_output_memory_remembers_what_was_written() -> None:
    gpu = vgpu.VirtualGPU()
    out = gpu.empty(40, np.uint32, "out")
    assert gpu.launch(kernel(COPY), block=32, args=[gpu.upload(words(32), "x"), out, 0]).ok
    assert (
        out.written is not None
        and out.written.reshape(40, 4).all(axis=1).tolist() == [True] * 32 + [False] * 8
    )


def test_reading_output_memory_that_nobody_wrote() -> None:
    gpu = vgpu.VirtualGPU()
    args = [gpu.empty(32, np.uint32, "x"), gpu.upload(words(32), "out"), 0]
    report = gpu.launch(kernel(COPY), block=32, args=args, checks=True)
    only(report, "undefined data", 2)


# -- asynchronous copies ----------------------------------------------------------------------------------------------

WAITED = """cp.async.ca.shared.global [%r4], [%d3], 4;
cp.async.commit_group;
cp.async.wait_group 0;
ld.shared.u32 %r5, [%r4];
st.global.u32 [%d4], %r5;"""


@pytest.mark.parametrize("schedule", ["program", 0, 1])
def test_cp_async_arrives_when_waited_for(schedule: str | int) -> None:
    out = np.zeros(32, np.uint32)
    assert launch(WAITED, words(32), out, schedule=schedule).ok
    np.testing.assert_array_equal(out, words(32))


@pytest.mark.parametrize(("operands", "kept"), [("4, %d5", 4), ("4, 2, %d5", 2), ("4, 0, %d5", 0)])
def test_cp_async_with_a_cache_policy(operands: str, kept: int) -> None:
    """The policy comes last, with or without a source size (PTX ISA, "cp.async")."""
    hinted = WAITED.replace(
        "cp.async.ca.shared.global [%r4], [%d3], 4;",
        "createpolicy.fractional.L2::evict_last.b64 %d5;\n"
        f"cp.async.ca.shared.global.L2::cache_hint [%r4], [%d3], {operands};",
    )
    out = np.zeros(32, np.uint32)
    x = words(32) * np.uint32(0x01010101)
    assert launch(hinted, x, out).ok
    np.testing.assert_array_equal(out, x & np.uint32((1 << 8 * kept) - 1))


@pytest.mark.parametrize(
    "line",
    [
        "cp.async.ca.shared.global.L2::cache_hint [%r4], [%d3], 4;",
        "cp.async.ca.shared.global [%r4], [%d3], 4, 2, %d5;",
        "cp.async.ca.shared.global.L2::cache_hint [%r4], [%d3], 4, 2, %d5, %d5;",
    ],
)
def test_a_cache_policy_needs_its_qualifier_and_the_reverse(line: str) -> None:
    with pytest.raises(vgpu.MalformedPTX, match="operands"):
        launch(WAITED.replace("cp.async.ca.shared.global [%r4], [%d3], 4;", line), words(32), words(32))


@pytest.mark.parametrize("schedule", ["program", 0, 1])
@pytest.mark.parametrize("broken", ["cp.async.wait_group 0;", "cp.async.commit_group;"])
def test_cp_async_without_its_wait_or_commit(broken: str, schedule: str | int) -> None:
    """A group that was never committed is not waited for either (PTX ISA, "cp.async.wait_group")."""
    report = launch(
        WAITED.replace(broken, "mov.u32 %r20, 0;"), words(32), np.zeros(32, np.uint32), schedule=schedule
    )
    finding = only(report, "undefined data", 5)
    assert "a cp.async that nobody waited for (kernel.py:1)" in finding.message


def test_cp_async_without_its_wait_moves_nothing_even_without_checks() -> None:
    gpu = vgpu.VirtualGPU()
    out = np.zeros(32, np.uint32)
    body = WAITED.replace("cp.async.wait_group 0;", "mov.u32 %r20, 0;")
    gpu.launch(kernel(body), block=32, args=[gpu.upload(words(32), "x"), gpu.upload(out, "out"), 0])
    np.testing.assert_array_equal(out, np.full(32, 0xFFFFFFFF, np.uint32))


@pytest.mark.parametrize(("left", "old", "new"), [(1, True, False), (0, True, True)])
def test_wait_group_leaves_the_latest_groups_in_flight(left: int, old: bool, new: bool) -> None:
    body = f"""cp.async.ca.shared.global [%r4], [%d3], 4;
cp.async.commit_group;
cp.async.ca.shared.global [%r4+128], [%d3+128], 4;
cp.async.commit_group;
cp.async.wait_group {left};
ld.shared.u32 %r5, [%r4];
ld.shared.u32 %r6, [%r4+128];
st.global.u32 [%d4], %r5;
st.global.u32 [%d4+128], %r6;"""
    out = np.zeros(64, np.uint32)
    report = launch(body, words(64), out)
    assert np.array_equal(out[:32], words(64)[:32]) == old and np.array_equal(out[32:], words(64)[32:]) == new
    assert report.ok == new


@pytest.mark.parametrize(
    ("valid", "expected"), [(16, [1, 2, 3, 4]), (8, [1, 2, 0, 0]), (6, [1, 2, 0, 0]), (0, [0, 0, 0, 0])]
)
def test_cp_async_fills_with_zeros(valid: int, expected: list[int]) -> None:
    body = f"""setp.eq.u32 %p1, %r1, 0;
mov.u32 %r9, {valid};
@%p1 cp.async.cg.shared.global [%r4], [%d3], 16, %r9;
cp.async.wait_all;
@%p1 ld.shared.v4.u32 {{%r5,%r6,%r7,%r8}}, [%r4];
@%p1 st.global.v4.u32 [%d4], {{%r5,%r6,%r7,%r8}};"""
    out = np.full(4, 9, np.uint32)
    assert launch(body, words(4), out).ok
    assert out.tolist() == expected


def test_cp_async_with_zero_source_bytes_reads_no_address() -> None:
    body = "mov.u64 %d3, 0;\nmov.u32 %r9, 0;\ncp.async.ca.shared.global [%r4], [%d3], 4, %r9;\ncp.async.wait_all;"
    assert launch(body, words(1), words(1)).ok


def test_cp_async_out_of_bounds() -> None:
    report = launch(WAITED, words(31), np.zeros(32, np.uint32))
    assert (report.findings[0].kind, report.findings[0].lane, report.findings[0].count) == (
        "out of bounds",
        31,
        1,
    )


# -- races ------------------------------------------------------------------------------------------------------------

EXCHANGE = """st.shared.u32 [%r4], %r1;
bar.sync 0;
xor.b32 %r5, %r2, 128;
add.u32 %r6, %r3, %r5;
ld.shared.u32 %r7, [%r6];
st.global.u32 [%d4], %r7;"""


@pytest.mark.parametrize("schedule", ["program", 0, 1, 2])
def test_an_exchange_between_warps_needs_its_barrier(schedule: str | int) -> None:
    out = np.zeros(64, np.uint32)
    assert launch(EXCHANGE, words(1), out, block=64, schedule=schedule).ok
    np.testing.assert_array_equal(out, np.arange(64) ^ 32)
    broken = EXCHANGE.replace("bar.sync 0;", "mov.u32 %r20, 0;")
    report = launch(broken, words(1), out, block=64, schedule=schedule)
    races = [finding for finding in report.findings if finding.kind == "race"]
    assert races and {(f.source.line if f.source else 0) for f in races} <= {1, 5}
    assert all("a barrier is missing between them" in finding.message for finding in races)


def test_a_buffer_that_is_reused_needs_a_second_barrier() -> None:
    again = EXCHANGE + "\nbar.sync 0;\nst.shared.u32 [%r4], %r0;"
    assert launch(again, words(1), np.zeros(64, np.uint32), block=64).ok
    broken = EXCHANGE + "\nmov.u32 %r20, 0;\nst.shared.u32 [%r4], %r0;"
    finding = only(launch(broken, words(1), np.zeros(64, np.uint32), block=64), "race", 8)
    assert "write to shared memory" in finding.message and "kernel.py:5" in finding.message


def test_two_warps_that_write_one_word() -> None:
    body = "mov.u32 %r9, tile;\nshr.u32 %r8, %r1, 5;\nst.shared.u32 [%r9], {};"
    assert launch(
        body.format("%r0"), words(1), words(1), block=64
    ).ok  # the same value: no matter who is last
    only(launch(body.format("%r8"), words(1), words(1), block=64), "race", 3)


def test_atomics_do_not_race_with_each_other_but_with_loads() -> None:
    body = """setp.eq.u32 %p1, %r1, 0;
mov.u32 %r9, tile;
@%p1 st.shared.u32 [%r9], %r0;
bar.sync 0;
atom.shared.add.u32 %r5, [%r9], 1;
bar.sync 0;
ld.shared.u32 %r6, [%r9];
st.global.u32 [%d4], %r6;"""
    out = np.zeros(96, np.uint32)
    assert launch(body, words(1), out, block=96).ok
    assert (out == 96).all()
    lines = body.splitlines()
    for line, where in ((4, 5), (6, 7)):
        broken = "\n".join([*lines[: line - 1], "mov.u32 %r20, 0;", *lines[line:]])
        report = launch(broken, words(1), out, block=96)
        assert (report.findings[0].kind, report.findings[0].source.line) == ("race", where)  # type: ignore[union-attr]


def test_a_barrier_between_two_warps_orders_only_these_two() -> None:
    """Warps 0 and 1 meet at barrier 1; warp 2 reads warp 0's word without having met it."""
    body = """setp.lt.u32 %p1, %r1, 64;
st.shared.u32 [%r4], %r1;
@%p1 bar.sync 1, 64;
sub.u32 %r6, %r4, 128;
setp.ge.u32 %p2, %r1, {first};
setp.lt.u32 %p3, %r1, {last};
and.pred %p2, %p2, %p3;
@%p2 ld.shared.u32 %r7, [%r6];"""
    assert launch(body.format(first=32, last=64), words(1), words(1), block=96).ok
    only(launch(body.format(first=64, last=96), words(1), words(1), block=96), "race", 8)


# -- multicast, dependent launch --------------------------------------------------------------------------------------


def test_multimem_store_reaches_every_member_and_nothing_else_may_use_the_window() -> None:
    gpu = vgpu.VirtualGPU(ranks=3)
    members = [gpu.empty(64, np.uint32, f"copy {rank}", rank) for rank in range(3)]
    window = gpu.multicast(members)
    x = gpu.upload(words(32), "x")
    body = "ld.global.u32 %r5, [%d3];\nmultimem.st.global.b32 [%d4], %r5;"
    assert gpu.launch(kernel(body), block=32, args=[x, window, 0], checks=True).ok
    for member in members:
        np.testing.assert_array_equal(member.array[:32], words(32))
        assert member.written is not None and member.written.sum() == 128
    only(gpu.launch(kernel(COPY), block=32, args=[x, window, 0]), "wrong address space", 2)
    only(gpu.launch(kernel(body), block=32, args=[x, members[0], 0]), "wrong address space", 2)
    only(gpu.launch(kernel(body.replace("[%d4]", "[%d4+2]")), block=32, args=[x, window, 0]), "misaligned", 2)
    finding = only(
        gpu.launch(kernel(body.replace("[%d4]", "[%d4+132]")), block=32, args=[x, window, 0]),
        "out of bounds",
        2,
    )
    assert (finding.lane, finding.count) == (31, 1)


def test_memory_of_another_rank_can_be_addressed() -> None:
    gpu = vgpu.VirtualGPU(ranks=2)
    out = gpu.empty(32, np.uint32, "peer", rank=1)
    assert gpu.launch(kernel(COPY), block=32, args=[gpu.upload(words(32), "x"), out, 0], rank=0).ok
    np.testing.assert_array_equal(out.array, words(32))


def test_reading_before_griddepcontrol_wait() -> None:
    def run(body: str) -> vgpu.Report:
        gpu = vgpu.VirtualGPU()
        x = gpu.upload(words(32), "x")
        out = gpu.upload(np.zeros(32, np.uint32), "out")
        return gpu.launch(kernel(body), block=32, args=[x, out, 0], predecessor_writes=(x,))

    assert run("griddepcontrol.wait;\n" + COPY).ok
    only(run(COPY + "\ngriddepcontrol.wait;"), "too early", 1)


# -- counters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stride_words", "wavefronts"), [(1, 1), (2, 2), (4, 4), (8, 8), (3, 1), (5, 1), (7, 1), (6, 2)]
)
def test_bank_conflicts_of_strided_loads(stride_words: int, wavefronts: int) -> None:
    """32 lanes, 32 banks of 4 bytes: stride s needs gcd(s, 32) wavefronts (CUDA C++ Programming Guide,
    "Shared Memory")."""
    body = f"mul.lo.u32 %r5, %r2, {stride_words};\nadd.u32 %r6, %r3, %r5;\nst.shared.u32 [%r6], %r1;"
    report = launch(body, words(1), words(1))
    assert report.ok
    assert report.counters.shared_wavefronts == wavefronts
    assert report.counters.bank_conflicts == wavefronts - 1


def test_one_word_for_all_lanes_is_a_broadcast() -> None:
    body = "st.shared.u32 [%r4], %r1;\nmov.u32 %r9, tile;\nld.shared.u32 %r5, [%r9];"
    assert launch(body, words(1), words(1)).counters.bank_conflicts == 0


@pytest.mark.parametrize(("stride", "sectors"), [(4, 4), (8, 8), (16, 16), (32, 32), (64, 32)])
def test_sectors_of_strided_loads(stride: int, sectors: int) -> None:
    body = f"mul.wide.u32 %d5, %r1, {stride};\nadd.u64 %d6, %d0, %d5;\nld.global.u32 %r5, [%d6];"
    assert launch(body, words(1024), words(1)).counters.global_sectors == sectors


def test_counters_of_a_copy() -> None:
    counters = launch(COPY, words(64), np.zeros(64, np.uint32), block=64).counters
    assert (counters.global_load_bytes, counters.global_store_bytes, counters.global_sectors) == (
        256,
        256,
        16,
    )
    assert counters.thread_instructions == 64 * (10 + 2 + 1)  # the 10 lines of HEAD, COPY, ret
    assert sum(counters.thread_instructions_by_line.values()) == counters.thread_instructions


# -- launches that the hardware refuses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 1025}, "1025 threads; at most 1024"),
        ({"block": 0}, "block 0: one to three positive numbers"),
        ({"grid": (1, 1, 1, 1)}, "one to three positive numbers"),
        ({"dynamic_shared_bytes": 232448}, "sm_90 has 232448"),
        ({"dynamic_shared_bytes": -1}, "is negative"),
        ({"cluster": 2}, "only clusters of one CTA are modelled"),
        ({"schedule": "random"}, '"program" or an integer seed'),
        ({"entry": "other"}, "this module has k"),
        ({"args": [1, 2]}, "takes 3 arguments, 2 given: p0 (.u64), p1 (.u64), p2 (.u32)"),
        ({"args": [1, 2, np.float64(3)]}, "argument for p2: 8 bytes where the parameter has 4"),
    ],
)
def test_impossible_launches(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        vgpu.VirtualGPU().launch(kernel("mov.u32 %r5, 1;"), **{"block": 32, "args": [0, 0, 0], **options})  # type: ignore[arg-type]
    assert message in str(error.value)


def test_arrays_that_cannot_be_uploaded() -> None:
    gpu = vgpu.VirtualGPU(ranks=2)
    with pytest.raises(ValueError, match="not contiguous"):
        gpu.upload(np.zeros((4, 4))[:, :2], "x")
    with pytest.raises(TypeError, match="not list"):
        gpu.upload([1, 2], "x")
    with pytest.raises(ValueError, match=r"ranks here are 0\.\.1"):
        gpu.upload(np.zeros(4), "x", rank=2)
    with pytest.raises(ValueError, match="members of one size"):
        gpu.multicast([gpu.upload(np.zeros(4), "a"), gpu.upload(np.zeros(5), "b")])
    with pytest.raises(ValueError, match="at least 1 rank"):
        vgpu.VirtualGPU(ranks=0)


def test_torch_tensors_are_used_in_place() -> None:
    torch = pytest.importorskip("torch")
    out = torch.zeros(32, dtype=torch.int32)
    report = vgpu.run_ptx(HEAD + COPY + TAIL, "k", 1, 32, [torch.arange(32, dtype=torch.int32), out, 0])
    assert report.ok and out.tolist() == list(range(32))
