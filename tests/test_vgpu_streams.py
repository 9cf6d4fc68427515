"""Streams, virtual ranks, schedules with skew, and races between grids that nothing orders."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from vgpu_kernels import module

from oproj_lib import vgpu

SEEDS = range(5)
schedules = pytest.mark.parametrize("schedule", ["program", *SEEDS])
DECLARED = (
    ".reg .pred %p<9>;",
    ".reg .b32 %id, %cta, %size, %thread, %n, %r<16>;",
    ".reg .b64 %a, %b, %at, %bt, %rd<9>;",
    "ld.param.u64 %a, [p_a];",
    "ld.param.u64 %b, [p_b];",
    "ld.param.u64 %rd0, [p_n];",
    "cvt.u32.u64 %n, %rd0;",
    "mov.u32 %id, %tid.x;",
    "mov.u32 %cta, %ctaid.x;",
    "mov.u32 %size, %ntid.x;",
    "mad.lo.u32 %thread, %cta, %size, %id;",
    "mad.wide.u32 %at, %thread, 4, %a;",
    "mad.wide.u32 %bt, %thread, 4, %b;",
)


@cache
def kernel(body: str) -> vgpu.Module:
    """A kernel of two addresses and a number, %a, %b and %n; %at and %bt are this thread's words. Line n of the
    body is line n of kernel.py."""
    return vgpu.load(module(body, declarations=DECLARED, parameters=["p_a", "p_b", "p_n"]))


def zeros(gpu: vgpu.VirtualGPU, name: str, count: int = 64, rank: int = 0) -> vgpu.Buffer:
    return gpu.upload(np.zeros(count, np.uint32), name, rank)


def places(report: vgpu.Report) -> list[tuple[str, int]]:
    return [(f.kind, f.source.line if f.source else 0) for f in report.findings]


PRODUCE = "add.u32 %r1, %thread, %n;\nst.relaxed.sys.global.u32 [%bt], %r1;"
CONSUME = """SPIN:
ld.volatile.global.u32 %r1, [%at];
setp.eq.u32 %p1, %r1, 0;
@%p1 bra SPIN;
add.u32 %r1, %r1, %n;
st.global.u32 [%bt], %r1;"""


@schedules
@pytest.mark.parametrize("where", [{"stream": "side"}, {"rank": 1}])
def test_a_consumer_may_poll_before_its_producer_is_enqueued(
    where: dict[str, Any], schedule: str | int
) -> None:
    gpu = vgpu.VirtualGPU(ranks=2)
    x, mail, out = (zeros(gpu, name) for name in ("x", "mail", "out"))
    gpu.enqueue(kernel(CONSUME), grid=2, block=32, args=[mail, out, 100], checks=True)
    gpu.enqueue(kernel(PRODUCE), grid=2, block=32, args=[x, mail, 7], checks=True, **where)
    for report in gpu.synchronize(schedule):
        report.raise_for_findings()
    assert out.array.tolist() == [i + 107 for i in range(64)]


def test_in_one_stream_the_same_consumer_polls_for_ever() -> None:
    gpu = vgpu.VirtualGPU()
    x, mail, out = (zeros(gpu, name) for name in ("x", "mail", "out"))
    gpu.enqueue(kernel(CONSUME), block=32, args=[mail, out, 100], name="consumer")
    gpu.enqueue(kernel(PRODUCE), block=32, args=[x, mail, 7], name="producer")
    consumer, producer = gpu.synchronize()
    assert places(consumer) == [("polls for ever", 2)]
    assert [f.message for f in producer.findings] == [
        "producer never starts: consumer before it in its stream never completes"
    ]


def test_reports_come_in_the_order_of_enqueueing() -> None:
    gpu = vgpu.VirtualGPU(ranks=3)
    x, out = zeros(gpu, "x"), zeros(gpu, "out", 96)
    for rank in (2, 0, 1):
        handle = gpu.enqueue(
            kernel(PRODUCE), block=32 * (rank + 1), args=[x, out, 1], rank=rank, name=f"of rank {rank}"
        )
        assert (handle.name, handle.rank, handle.stream) == (f"of rank {rank}", rank, "main")
    reports = gpu.synchronize()
    # 13 instructions: 10 before the body, add, st, exit.
    assert [r.counters.warp_instructions for r in reports] == [3 * 13, 1 * 13, 2 * 13]
    assert gpu.synchronize() == []


@schedules
def test_work_of_one_stream_runs_in_order_and_streams_beside_each_other(schedule: str | int) -> None:
    """Stream 1 waits for stream 2's second grid, whose first grid has to come before it."""
    gpu = vgpu.VirtualGPU()
    x, mail, out = (zeros(gpu, name) for name in ("x", "mail", "out"))
    gpu.enqueue(kernel(CONSUME), block=64, args=[mail, out, 0], stream="one")
    add = "ld.global.u32 %r1, [%at];\nadd.u32 %r1, %r1, %n;\nst.relaxed.sys.global.u32 [%bt], %r1;"
    first = gpu.enqueue(kernel(add), block=64, args=[x, x, 5], stream="two")
    second = gpu.enqueue(kernel(add), block=64, args=[x, mail, 5], stream="two")
    for report in gpu.synchronize(schedule):
        report.raise_for_findings()
    assert out.array.tolist() == [10] * 64
    assert first.times.end is not None and second.times.start is not None
    assert first.times.end <= second.times.start


RING = """mov.u32 %r3, 0;
mad.lo.u32 %r1, %thread, 3, %n;
ROUND:
st.relaxed.sys.global.u32 [%bt], %r1;
SPIN:
ld.relaxed.sys.global.u32 %r2, [%at];
setp.eq.u32 %p1, %r2, 0xFFFFFFFF;
@%p1 bra SPIN;
add.u32 %r1, %r2, 1;
add.u64 %at, %at, 256;
add.u64 %bt, %bt, 256;
add.u32 %r3, %r3, 1;
setp.lt.u32 %p2, %r3, 5;
@%p2 bra ROUND;
ld.param.u64 %rd1, [p_n];
st.relaxed.sys.global.u32 [%bt], %r1;"""


def ring(
    schedule: str | int, ranks: int = 4, **options: Any
) -> tuple[list[list[int]], list[vgpu.GridHandle]]:
    """Every rank passes 64 values round, five times: rank r's mailbox [6 rounds, 64] is written by rank r - 1."""
    gpu = vgpu.VirtualGPU(ranks)
    mail = [gpu.upload(np.full((6, 64), 0xFFFFFFFF, np.uint32), f"mail {r}", r) for r in range(ranks)]
    handles = [
        gpu.enqueue(
            kernel(RING),
            grid=2,
            block=32,
            args=[mail[r], mail[(r + 1) % ranks], 1000 * r],
            rank=r,
            checks=True,
        )
        for r in range(ranks)
    ]
    for report in gpu.synchronize(schedule, **options):
        report.raise_for_findings()
    return [m.array[5].tolist() for m in mail], handles


@schedules
def test_a_ring_of_ranks(schedule: str | int) -> None:
    """What rank r finds in its last round started five ranks before its neighbour, plus one per hop."""
    last, _ = ring(schedule)
    assert last == [[3 * i + 1000 * ((r - 1 - 5) % 4) + 5 for i in range(64)] for r in range(4)]


COUNT = """COUNT:
add.u32 %r1, %r1, 1;
setp.lt.u32 %p1, %r1, 100;
@%p1 bra COUNT;
st.global.u32 [%bt], %r1;"""


@pytest.mark.parametrize("seed", [0, 1])
def test_a_skewed_rank_starts_late_and_is_slow(seed: int) -> None:
    """Two equal grids of 100 rounds of 3 steps for each of 8 warps. With skew 9 one starts 9000 steps late, or when the
    other has ended; with skew 0.5 it starts 500 steps late, and then gets two turns for three of the other."""
    for rank, skew in ((0, 0.5), (1, 9.0)):
        gpu = vgpu.VirtualGPU(ranks=2)
        grids = [
            gpu.enqueue(
                kernel(COUNT), block=256, args=[zeros(gpu, "x", 256, r), zeros(gpu, "y", 256, r), 0], rank=r
            )
            for r in range(2)
        ]
        gpu.synchronize(seed, skew={rank: skew})
        late, other = grids[rank].times, grids[1 - rank].times
        assert late.start is not None and other.end is not None and late.end is not None
        assert other.start == 0 and other.end < late.end
        assert late.start >= min(skew * 1000, other.end)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_skewed_rank_gets_fewer_turns(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal grids, started together, one of them with a tenth of the other's turns: when the fast one ends, the
    slow one has most of its work before it."""
    monkeypatch.setattr("oproj_lib.vgpu.streams.LATE_START", 0)
    gpu = vgpu.VirtualGPU(ranks=2)
    fast, slow = (
        gpu.enqueue(
            kernel(COUNT), block=256, args=[zeros(gpu, "x", 256, r), zeros(gpu, "y", 256, r), 0], rank=r
        )
        for r in range(2)
    )
    gpu.synchronize(seed, skew={1: 9.0})
    assert fast.times.end is not None and slow.times.end is not None
    assert fast.times.start == slow.times.start == 0
    assert fast.times.end < 0.75 * slow.times.end


def test_a_rank_that_is_behind_makes_the_others_wait() -> None:
    """However late it is, it starts once the others only poll for it: an absurd skew costs no steps."""
    for skew in (6.0, 1e6):
        values, grids = ring(1, skew={2: skew})
        assert values == ring(0)[0]
        starts = [grid.times.start for grid in grids]
        ends = [grid.times.end for grid in grids]
        assert starts[0] == starts[1] == starts[3] == 0
        assert starts[2] is not None and 0 < starts[2] < min(end for end in ends if end is not None)


@pytest.mark.parametrize(
    ("schedule", "skew", "message"),
    [
        ("program", {0: 1.0}, "skew needs a seeded schedule"),
        (0, {0: -1.0}, "skew -1.0 of rank 0"),
        (0, {2: 1.0}, r"rank 2: ranks 0\.\.1"),
        (0, {0: float("nan")}, "skew nan"),
        (0.5, {}, "integer seed"),
    ],
)
def test_bad_schedules_are_refused(schedule: Any, skew: dict[int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vgpu.VirtualGPU(ranks=2).synchronize(schedule, skew=skew)


def test_what_is_never_written_across_ranks_is_reported_by_every_poller() -> None:
    """Rank 1's kernel stores to the wrong rank: both consumers poll for ever, each in its own mailbox."""
    gpu = vgpu.VirtualGPU(ranks=2)
    mail = [
        gpu.upload(np.zeros((2, 32), np.uint32), f"mail of rank {r}", r, axes=("slot", "column"))
        for r in range(2)
    ]
    for buffer in mail:
        buffer.writer_of = lambda index: f"rank {index[0]}"
    out = [zeros(gpu, f"out {r}", rank=r) for r in range(2)]
    for r in range(2):
        gpu.enqueue(kernel(CONSUME), block=64, args=[mail[r], out[r], 0], rank=r, name=f"consumer {r}")
    gpu.enqueue(kernel(PRODUCE), block=32, args=[out[0], mail[0], 1], stream="p", name="producer of rank 0")
    reports = gpu.synchronize()
    assert [places(report) for report in reports] == [[("polls for ever", 2)]] * 2 + [[]]
    assert [(f.message, f.count) for report in reports for f in report.findings] == [
        ("rank 0 polls mail of rank 0 [slot 1, column 0], which holds 00000000; to be written by rank 1; "
         "nobody is left to write it (32 threads wait for 32 such places)", 32),
        ("rank 1 polls mail of rank 1 [slot 0, column 0], which holds 00000000; to be written by rank 0, rank 1; "
         "nobody is left to write it (64 threads wait for 64 such places)", 64),
    ]  # fmt: skip


def test_grids_behind_a_deadlock_say_so() -> None:
    gpu = vgpu.VirtualGPU()
    x, out = zeros(gpu, "x"), zeros(gpu, "out")
    gpu.enqueue(
        kernel("griddepcontrol.launch_dependents;\nbar.sync 1, 64;"), block=32, args=[x, out, 0], name="first"
    )
    gpu.enqueue(kernel("griddepcontrol.wait;"), block=32, args=[x, out, 0], pdl=True, name="second")
    first, second = gpu.synchronize()
    assert places(first) == [("deadlock", 2)] and places(second) == [("deadlock", 1)]
    assert second.findings[0].message == "griddepcontrol.wait waits for ever for first, which never completes"


# -- races between grids ----------------------------------------------------------------------------------------------

READ = "ld.global.u32 %r1, [%at];\nst.global.u32 [%bt], %r1;"
WRITE = "add.u32 %r1, %thread, %n;\nst.global.u32 [%bt], %r1;"


def pair(
    first: str, second: str, schedule: str | int = "program", *, checks: bool = True, strict: bool = False,
    where: dict[str, Any] | None = None,
) -> list[list[tuple[str, int]]]:  # fmt: skip
    """The findings of two grids: the first on x and y, the second on z and x."""
    gpu = vgpu.VirtualGPU(ranks=2)
    x, y, z = (zeros(gpu, name) for name in "xyz")
    gpu.enqueue(kernel(first), block=64, args=[x, y, 1], checks=checks, name="first")
    gpu.enqueue(
        kernel(second),
        block=64,
        args=[z, x, 1],
        checks=checks,
        name="second",
        **({"rank": 1} if where is None else where),
    )
    return [places(report) for report in gpu.synchronize(schedule, strict=strict)]


@schedules
@pytest.mark.parametrize("where", [{"rank": 1}, {"stream": "side"}])
def test_a_write_that_nothing_orders_with_a_read(where: dict[str, Any], schedule: str | int) -> None:
    found = pair(READ, WRITE, schedule, where=where)
    assert found == [[], [("grid race", 2)]], "the writer is named, whoever came first"
    assert pair(READ, WRITE, schedule, where={}) == [[], []], "one stream: ordered"


def test_the_message_names_both_sides() -> None:
    gpu = vgpu.VirtualGPU(ranks=2)
    x, y = gpu.upload(np.zeros((2, 32), np.uint32), "x", axes=("row", "column")), zeros(gpu, "y")
    gpu.enqueue(kernel(READ), block=64, args=[x, y, 1], checks=True, name="reader")
    gpu.enqueue(kernel(WRITE), block=32, args=[y, x, 1], checks=True, name="writer", rank=1)
    _, report = gpu.synchronize()
    assert [f.message for f in report.findings] == [
        "write of x [row 0, column 0] by writer is not ordered with reader, which reads it at kernel.py:1"
    ]
    assert report.findings[0].count == 32


@pytest.mark.parametrize(
    ("first", "second", "plain", "strict"),
    [
        (READ, READ.replace("%at", "%bt").replace("st", "//"), 0, 0),  # two reads
        (WRITE.replace("%bt", "%at"), WRITE, 1, 1),
        (READ, WRITE.replace("st.", "st.relaxed.sys."), 0, 1),
        (READ.replace("ld.", "ld.volatile."), WRITE, 0, 1),
        (READ.replace("ld.", "ld.volatile."), WRITE.replace("st.", "st.volatile."), 0, 0),
        (READ, "red.global.add.u32 [%bt], 1;", 0, 1),
        (READ, WRITE.replace("[%bt]", "[%bt+4]"), 1, 1),
        (READ, "st.global.u8 [%b+3], %id;", 1, 1),  # one byte of a word
        (READ, "setp.lt.u32 %p1, %id, 0;\n@%p1 st.global.u32 [%bt], 1;", 0, 0),  # nobody writes
    ],
)
def test_which_pairs_race(first: str, second: str, plain: int, strict: int) -> None:
    second = second.replace(
        "st.global.u32 [%bt+4], %r1;", "setp.lt.u32 %p1, %id, 63;\n@%p1 st.global.u32 [%bt+4], %r1;"
    )
    for rule, expected in ((False, plain), (True, strict)):
        kinds = [kind for found in pair(first, second, strict=rule) for kind, _ in found]
        assert kinds == ["grid race"] * expected


def test_races_between_grids_need_checks_on_both() -> None:
    assert pair(READ, WRITE, checks=False) == [[], []]


@schedules
def test_message_passing_is_not_a_race(schedule: str | int) -> None:
    """Data, fence, flag; flag with acquire, data."""
    send = "st.global.u32 [%bt+128], 5;\nbar.sync 0;\nfence.acq_rel.sys;\nst.relaxed.sys.global.u32 [%b], 1;"
    receive = """SPIN:
    ld.acquire.sys.global.u32 %r1, [%a];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra SPIN;
    ld.global.u32 %r2, [%at+128];
    st.global.u32 [%bt], %r2;"""
    gpu = vgpu.VirtualGPU(ranks=2)
    x, y, z = (zeros(gpu, name) for name in "xyz")
    gpu.enqueue(kernel(receive), block=32, args=[x, y, 1], checks=True)
    gpu.enqueue(kernel(send), block=32, args=[z, x, 1], checks=True, rank=1)
    for report in gpu.synchronize(schedule):
        report.raise_for_findings()
    assert y.array[:32].tolist() == [5] * 32


def test_grids_of_two_synchronizes_are_ordered() -> None:
    gpu = vgpu.VirtualGPU(ranks=2)
    x, y = zeros(gpu, "x"), zeros(gpu, "y")
    for rank, body, args in ((1, WRITE, [y, x, 3]), (0, READ, [x, y, 0])):
        gpu.enqueue(kernel(body), block=64, args=args, rank=rank, checks=True)
        gpu.synchronize()[0].raise_for_findings()
    assert y.array.tolist() == [i + 3 for i in range(64)]


# -- a limited number of resident CTAs --------------------------------------------------------------------------------


@schedules
@pytest.mark.parametrize("places_per_rank", [1, 2, 3, 8])
def test_ctas_start_when_there_is_room(places_per_rank: int, schedule: str | int) -> None:
    gpu = vgpu.VirtualGPU(resident_ctas=places_per_rank)
    x, y = zeros(gpu, "x", 256), zeros(gpu, "y", 256)
    gpu.launch(
        kernel("bar.sync 0;\n" + WRITE), grid=8, block=32, args=[x, y, 1], schedule=schedule, checks=True
    ).raise_for_findings()
    assert y.array.tolist() == [i + 1 for i in range(256)]


def test_a_poller_that_fills_the_gpu_keeps_its_producer_out() -> None:
    """Two CTAs poll, on a GPU with room for two or three."""
    for room, found in ((2, ["polls for ever", "deadlock"]), (3, [])):
        gpu = vgpu.VirtualGPU(resident_ctas=room)
        x, mail, out = (zeros(gpu, name) for name in ("x", "mail", "out"))
        gpu.enqueue(kernel(CONSUME), grid=2, block=32, args=[mail, out, 0])
        gpu.enqueue(kernel(PRODUCE), grid=2, block=32, args=[x, mail, 7], stream="side", name="producer")
        reports = gpu.synchronize()
        assert [f.kind for report in reports for f in report.findings] == found
        if found:
            assert reports[1].findings[0].message == (
                "2 of 2 CTAs of producer never become resident: all 2 places of rank 0 are taken by CTAs that wait "
                "or poll"
            )


def test_room_for_no_cta_is_refused() -> None:
    with pytest.raises(ValueError, match="resident_ctas = 0"):
        vgpu.VirtualGPU(resident_ctas=0)
    gpu = vgpu.VirtualGPU(ranks=2)
    with pytest.raises(ValueError, match=r"rank 2: ranks here are 0\.\.1"):
        gpu.enqueue(kernel(WRITE), args=[zeros(gpu, "x"), zeros(gpu, "y"), 0], rank=2)
