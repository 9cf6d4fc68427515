"""Polling: it must work, end when the data comes, and be reported at once, in the kernel's own terms, when nobody
is left to write."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from vgpu_kernels import module, run

from oproj_lib import vgpu

SEEDS = range(5)
schedules = pytest.mark.parametrize("schedule", ["program", *SEEDS])
ARMED = 0x80008000
DECLARED = (
    ".reg .pred %p<9>;",
    ".reg .b32 %id, %cta, %r<16>;",
    ".reg .b64 %mail, %out, %rd<9>;",
    ".shared .align 16 .b8 tile[1024];",
    "ld.param.u64 %mail, [p_mail];",
    "ld.param.u64 %out, [p_out];",
    "mov.u32 %id, %tid.x;",
    "mov.u32 %cta, %ctaid.x;",
)


@cache
def kernel(body: str) -> vgpu.Module:
    return vgpu.load(module(body, declarations=DECLARED, parameters=["p_mail", "p_out"]))


# Thread i of CTA c polls chunk 8 i of token c in slot 0, then 1, 2, ... of a mailbox [4 slots, tokens, 256 columns].
POLL_SLOTS = """mad.lo.u32 %r1, %cta, 512, 0;
mad.lo.u32 %r1, %id, 16, %r1;
cvt.u64.u32 %rd1, %r1;
add.u64 %rd1, %mail, %rd1;
mov.u32 %r9, 0;
SLOT:
ld.volatile.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd1];
setp.eq.u32 %p1, %r2, 0x80008000;
setp.eq.or.u32 %p1, %r3, 0x80008000, %p1;
setp.eq.or.u32 %p1, %r4, 0x80008000, %p1;
setp.eq.or.u32 %p1, %r5, 0x80008000, %p1;
@%p1 bra SLOT;
add.u64 %rd1, %rd1, {stride};
add.u32 %r9, %r9, 1;
setp.lt.u32 %p2, %r9, 4;
@%p2 bra SLOT;
ret;"""


def mailbox(gpu: vgpu.VirtualGPU, tokens: int = 2, rank: int = 0) -> vgpu.Buffer:
    """Four slots of `tokens` x 256 BF16, all armed."""
    words = np.full((4, tokens, 256), 0x8000, np.uint16)
    buffer = gpu.upload(words, f"mailbox of rank {rank}", rank, axes=("slot", "token", "column"))
    buffer.writer_of = lambda index: f"rank {index[0]} (slot {index[0]})"
    gpu.watch_sentinel(buffer)
    return buffer


def poll_slots(tokens: int) -> vgpu.Module:
    return kernel(POLL_SLOTS.replace("{stride}", str(tokens * 512)))


@schedules
def test_words_that_never_come_are_named(schedule: str | int) -> None:
    """Rank 2's data of slot 2 is missing, but for one word of the chunk of token 1, columns 128 to 135, and all of
    token 0."""
    gpu = vgpu.VirtualGPU()
    mail = mailbox(gpu)
    mail.array[[0, 1, 3]] = 0x3F80
    mail.array[2, 0] = 0x3F80
    mail.array[2, 1, 130:132] = 0x4000
    gpu.enqueue(poll_slots(2), grid=2, block=32, args=[mail, mail])
    (report,) = gpu.synchronize(schedule)
    (finding,) = report.findings
    assert (finding.kind, finding.cta, finding.count) == ("polls for ever", 1, 32)
    assert finding.source is not None and finding.source.line == 7
    assert finding.message == (
        "rank 0 polls mailbox of rank 0 [slot 2, token 1, column 0], which holds 80008000 80008000 80008000 80008000 "
        "(words 0, 1, 2, 3 still armed); to be written by rank 2 (slot 2); nobody is left to write it "
        "(32 threads wait for 32 such places)"
    )
    mail.array[2, 1] = 0x3F80
    mail.array[2, 1, 128:136] = [0x3F80, 0x4000, 0x4000, 0x4000, 0x8000, 0x8000, 0x4000, 0x4000]
    report = gpu.launch(poll_slots(2), grid=2, block=32, args=[mail, mail], schedule=schedule)
    (finding,) = report.findings
    assert (finding.cta, finding.lane, finding.count) == (1, 16, 1)
    assert (
        "[slot 2, token 1, column 128], which holds 40003f80 40004000 80008000 40004000 (word 2 still armed)"
    ) in finding.message
    mail.array[2, 1, 132:134] = 0x4000
    assert gpu.launch(poll_slots(2), grid=2, block=32, args=[mail, mail], schedule=schedule).ok


def test_a_full_grid_that_polls_for_ever_is_found_within_a_few_thousand_instructions_per_warp() -> None:
    gpu = vgpu.VirtualGPU()
    mail = mailbox(gpu, tokens=112)
    report = gpu.launch(poll_slots(112), grid=112, block=32, args=[mail, mail])
    (finding,) = report.findings
    assert finding.count == 112 * 32
    assert report.counters.warp_instructions < 112 * 1000


@schedules
def test_a_bounded_number_of_retries_is_not_endless(schedule: str | int) -> None:
    """500 attempts, then a give-up value."""
    body = """mov.u32 %r1, 0;
    AGAIN:
    ld.volatile.global.u32 %r2, [%mail];
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra DONE;
    add.u32 %r1, %r1, 1;
    setp.lt.u32 %p2, %r1, 500;
    @%p2 bra AGAIN;
    DONE:
    st.global.u32 [%out], %r1;
    ret;"""
    gpu = vgpu.VirtualGPU()
    mail, out = gpu.upload(np.zeros(1, np.uint32), "mail"), gpu.upload(np.zeros(1, np.uint32), "out")
    assert gpu.launch(kernel(body), block=1, args=[mail, out], schedule=schedule).ok
    assert out.array[0] == 500


def test_a_deadline_on_the_clock_is_not_endless() -> None:
    body = """AGAIN:
    ld.volatile.global.u32 %r2, [%mail];
    mov.u64 %rd1, %globaltimer;
    setp.gt.u64 %p1, %rd1, 3000;
    setp.ne.or.u32 %p1, %r2, 0, %p1;
    @!%p1 bra AGAIN;
    st.global.u32 [%out], 1;
    ret;"""
    gpu = vgpu.VirtualGPU()
    mail, out = gpu.upload(np.zeros(1, np.uint32), "mail"), gpu.upload(np.zeros(1, np.uint32), "out")
    assert gpu.launch(kernel(body), block=1, args=[mail, out]).ok
    assert out.array[0] == 1


TEAM = """AGAIN:
setp.ne.u32 %p1, %id, 0;
@%p1 bra MEET;
ld.relaxed.gpu.global.u32 %r2, [%mail];
st.shared.u32 [tile], %r2;
MEET:
bar.sync 0;
ld.shared.u32 %r3, [tile];
bar.sync 0;
setp.eq.u32 %p2, %r3, 0;
@%p2 bra AGAIN;
st.global.u32 [%out], %r3;
ret;"""


@schedules
def test_a_block_that_polls_through_shared_memory_and_barriers(schedule: str | int) -> None:
    """One thread polls for all, and stores the same zero into shared memory again and again."""
    gpu = vgpu.VirtualGPU()
    mail, out = gpu.upload(np.zeros(1, np.uint32), "mail"), gpu.upload(np.zeros(1, np.uint32), "out")
    report = gpu.launch(kernel(TEAM), block=96, args=[mail, out], schedule=schedule, step_budget=300_000)
    assert [(f.kind, f.source.line, f.count) for f in report.findings if f.source] == [
        ("polls for ever", 4, 1)
    ]
    mail.array[0] = 6
    gpu.launch(kernel(TEAM), block=96, args=[mail, out], schedule=schedule).raise_for_findings()
    assert out.array[0] == 6


COUNT_IN_MEMORY = """AGAIN:
ld.volatile.global.u32 %r1, [%out];
add.u32 %r1, %r1, 1;
st.volatile.global.u32 [%out], %r1;
setp.lt.u32 %p1, %r1, 700;
mov.u32 %r1, 0;
@%p1 bra AGAIN;
ret;"""
COUNT_IN_MBARRIER = """mbarrier.init.shared.b64 [tile], 700;
AGAIN:
mbarrier.arrive.shared.b64 _, [tile];
mbarrier.test_wait.parity.shared.b64 %p1, [tile], 0;
@!%p1 bra AGAIN;
st.global.u32 [%out], 700;
ret;"""


@pytest.mark.parametrize("body", [COUNT_IN_MEMORY, COUNT_IN_MBARRIER])
def test_a_loop_whose_registers_repeat_while_memory_changes_is_not_endless(body: str) -> None:
    gpu = vgpu.VirtualGPU()
    out = gpu.upload(np.zeros(1, np.uint32), "out")
    gpu.launch(kernel(body), block=1, args=[out, out]).raise_for_findings()
    assert out.array[0] == 700


def test_a_cycle_of_several_rounds_after_a_way_into_it_is_found() -> None:
    """The address goes round four words, and a back-off time grows to 5000 before it stays."""
    body = """AGAIN:
    add.u32 %r1, %r1, 4;
    and.b32 %r1, %r1, 12;
    cvt.u64.u32 %rd1, %r1;
    add.u64 %rd1, %mail, %rd1;
    add.u32 %r4, %r4, 4;
    min.u32 %r4, %r4, 5000;
    ld.volatile.global.u32 %r2, [%rd1];
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra AGAIN;
    ret;"""
    gpu = vgpu.VirtualGPU()
    mail = gpu.upload(np.zeros(4, np.uint32), "mail")
    report = gpu.launch(kernel(body), block=32, args=[mail, mail], step_budget=100_000)
    (finding,) = report.findings
    assert finding.kind == "polls for ever"
    assert finding.message.endswith("(32 threads wait for 4 such places)")


def test_a_compare_and_swap_that_never_succeeds() -> None:
    body = "LOCK:\natom.global.cas.b32 %r1, [%mail], 0, 1;\nsetp.ne.u32 %p1, %r1, 0;\n@%p1 bra LOCK;\nret;"
    gpu = vgpu.VirtualGPU()
    lock = gpu.upload(np.array([1], np.uint32), "lock")
    report = gpu.launch(kernel(body), block=64, args=[lock, lock])
    (finding,) = report.findings
    assert (finding.kind, finding.count) == ("polls for ever", 64)
    assert finding.message.startswith(
        "rank 0 polls lock [0], which holds 00000001; nobody is left to write it"
    )


def test_a_loop_that_writes_new_values_ends_with_the_budget() -> None:
    body = "AGAIN:\nadd.u32 %r1, %r1, 1;\nst.global.u32 [%out], %r1;\nbra AGAIN;"
    gpu = vgpu.VirtualGPU()
    out = gpu.upload(np.zeros(1, np.uint32), "out")
    report = gpu.launch(kernel(body), block=1, args=[out, out], step_budget=20_000)
    (finding,) = report.findings
    assert finding.kind == "endless" and "still running after 20,000 steps" in finding.message


def test_a_loop_that_does_nothing_is_endless() -> None:
    _, report = run("LOOP:\nbra LOOP;", block=64)
    (finding,) = report.findings
    assert (finding.kind, finding.count) == ("endless", 64)
    assert report.counters.warp_instructions < 2000


def test_out_of_budget_names_who_waits_at_an_mbarrier() -> None:
    body = """setp.ge.u32 %p1, %id, 32;
    @%p1 bra WAIT;
    setp.eq.u32 %p3, %id, 0;
    @%p3 mbarrier.init.shared.b64 [tile], 1;
    bar.sync 0;
    AGAIN:
    add.u32 %r1, %r1, 1;
    st.global.u32 [%out], %r1;
    bra AGAIN;
    WAIT:
    bar.sync 0;
    mbarrier.try_wait.parity.shared.b64 %p2, [tile], 0;
    ret;"""
    gpu = vgpu.VirtualGPU()
    out = gpu.upload(np.zeros(1, np.uint32), "out")
    report = gpu.launch(kernel(body), block=64, args=[out, out], step_budget=20_000)
    messages = [f.message for f in report.findings if f.kind == "endless"]
    assert len(messages) == 1
    assert messages[0].endswith("; 32 threads wait at the mbarrier at shared byte 0 for parity 0")


@schedules
def test_polling_an_mbarrier_lets_asynchronous_copies_arrive(schedule: str | int) -> None:
    """test_wait never suspends a thread: the copy must complete although everybody can run."""
    body = """setp.ne.u32 %p1, %id, 0;
    @!%p1 mbarrier.init.shared.b64 [tile], 32;
    bar.sync 0;
    mul.lo.u32 %r1, %id, 16;
    mov.u32 %r2, tile;
    add.u32 %r2, %r2, %r1;
    cvt.u64.u32 %rd1, %r1;
    add.u64 %rd2, %mail, %rd1;
    cp.async.cg.shared.global [%r2+16], [%rd2], 16;
    cp.async.mbarrier.arrive.noinc.shared.b64 [tile];
    AGAIN:
    mbarrier.test_wait.parity.shared.b64 %p2, [tile], 0;
    @!%p2 bra AGAIN;
    ld.shared.v4.u32 {%r3, %r4, %r5, %r6}, [%r2+16];
    add.u64 %rd2, %out, %rd1;
    st.global.v4.u32 [%rd2], {%r3, %r4, %r5, %r6};
    ret;"""
    gpu = vgpu.VirtualGPU()
    mail = gpu.upload(np.arange(128, dtype=np.uint32), "mail")
    out = gpu.upload(np.zeros(128, np.uint32), "out")
    gpu.launch(kernel(body), block=32, args=[mail, out], schedule=schedule, checks=True).raise_for_findings()
    np.testing.assert_array_equal(out.array, mail.array)


# -- the sentinel -----------------------------------------------------------------------------------------------------

STORE = "st.volatile.global.v4.u32 [%mail], {%r1, %r2, %r3, %r4};\nret;"


def store(words: list[int], *, rearms: bool = False, halves: bool = True, text: str = STORE) -> vgpu.Report:
    """Stores four words into a watched mailbox."""
    moves = "\n".join(f"mov.u32 %r{i}, {word:#x};" for i, word in enumerate(words, 1))
    gpu = vgpu.VirtualGPU()
    mail = gpu.upload(np.full((2, 8), 0x8000, np.uint16), "mail", axes=("slot", "column"))
    gpu.watch_sentinel(mail, halves=halves)
    window = gpu.multicast([mail])
    target: Any = window if "multimem" in text else mail
    gpu.enqueue(kernel(moves + "\n" + text), block=1, args=[target, mail], rearms=rearms)
    return gpu.synchronize()[0]


@pytest.mark.parametrize(
    ("words", "options", "found"),
    [
        ([0x3F800000, 0, 0x7FFF, 0xFFFFFFFF], {}, False),
        ([0x3F800000, 0x80000000, 0, 0], {}, True),  # the high half is -0.0
        ([0, 0, 0, 0x00018000], {}, True),  # the low half
        ([0, 0, 0, 0x00800080], {}, False),  # 0x8000 across the bytes of two halves
        ([0, 0, 0, 0x00018000], {"halves": False}, False),
        ([0, ARMED, 0, 0], {"halves": False}, True),
        ([ARMED] * 4, {}, True),
        ([ARMED] * 4, {"rearms": True}, False),
        ([ARMED, ARMED, ARMED, 0], {"rearms": True}, True),  # a chunk is re-armed as a whole
    ],
)
def test_the_sentinel_must_not_be_published(words: list[int], options: dict[str, Any], found: bool) -> None:
    report = store(words, **options)
    places = [(f.kind, f.source.line if f.source else 0) for f in report.findings]
    assert places == ([("sentinel published", 5)] if found else [])


def test_rearming_through_a_multicast_address_is_reported() -> None:
    text = "multimem.st.relaxed.sys.global.v4.bf16x2 [%mail], {%r1, %r2, %r3, %r4};\nret;"
    assert store([0x3F80] * 4, rearms=True, text=text).ok
    report = store([ARMED] * 4, rearms=True, text=text)
    assert [f.kind for f in report.findings] == ["sentinel published"]
    assert report.findings[0].message == (
        "80008000 80008000 80008000 80008000 stored to mail [slot 0, column 0]: a reader takes 0x80008000 or half of "
        "it for data that has not arrived"
    )


def test_rearming_word_by_word_is_reported() -> None:
    """A reader could see the first words of fresh data and the last of the old."""
    report = store([ARMED] * 4, rearms=True, text="st.volatile.global.u32 [%mail], %r1;\nret;")
    assert [f.kind for f in report.findings] == ["sentinel published"]


def test_names_of_axes_must_fit() -> None:
    with pytest.raises(ValueError, match="2 names for the 1 axes"):
        vgpu.VirtualGPU().upload(np.zeros(4), "x", axes=("slot", "token"))
    with pytest.raises(ValueError, match="32 bits"):
        gpu = vgpu.VirtualGPU()
        gpu.watch_sentinel(gpu.upload(np.zeros(4), "x"), 1 << 32)
