"""Recorded timelines: kernels with events, IKET's JSON, what is kept of it, and the model in the same steps."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stand_in_driver import Launch as Launched
from stand_in_driver import StandIn, StandInGpu, bf16_at

from oproj_lib import figures, vgpu
from oproj_lib.bench import candidates, iket_run, stamped_kernels
from oproj_lib.bench.measure import Graph
from oproj_lib.figures.timeline import honest
from oproj_lib.iket_timeline import (
    DATA,
    DRIVER_CARVEOUT,
    WGMMA,
    median_launch,
    read_iket,
    record_iket,
    recorded_engines,
    recorded_steps,
)
from oproj_lib.kernels.events import (
    END,
    LOADER_STEPS,
    MULTIPLIER_STEPS,
    STEPS,
    OprojProducerEvents,
    OprojWgmmaEvents,
)
from oproj_lib.kernels.producer import OprojProducer
from oproj_lib.kernels.wgmma import OprojWgmma
from oproj_lib.perfetto import chrome_trace, validate_chrome_trace
from oproj_lib.problem import N, Problem
from oproj_lib.program import Program, build_producer, build_wgmma
from oproj_lib.residency import CARVEOUTS_KIB, Needs, beside, needs_of
from oproj_lib.step_comparison import Comparison, compare_steps, modelled_steps
from oproj_lib.timeline import CYCLES, PREVIOUS, RECORDED_NS, Timeline
from oproj_lib.timeline_tables import waits_table

K, BATCH = 768, 8
RECORDED = {"date": "2026-11-30", "load_weight": 4416, "exposed": 1568}
"""Facts of the kept recording at K = 768, read off IKET's own JSON: ns, a median over warps and a whole."""
EVENT = re.compile(r"^\s*pmevent\.mask (\d+);", re.MULTILINE)


class UnmarkedProducer(OprojProducerEvents):
    """Events in the source, but CuTe DSL is not told to keep them."""

    compiler_options = ""


def build(kind: type[OprojProducer], k: int = K) -> Program:
    return build_producer(
        kind.recommended(k, BATCH, transport="unicast:1"),
        target="sm_90a", batch=BATCH, mailbox_slots=2, mailbox_tokens=BATCH,
    )  # fmt: skip


def instructions(program: Program) -> list[str]:
    """PTX without comments and source lines, which name the wrapping methods too."""
    lines = (line.split("//")[0].strip() for line in program.ptx.splitlines())
    return [line for line in lines if line and not line.startswith((".loc", ".file"))]


# ---- kernels with events ----


@pytest.fixture(scope="module")
def plain() -> Program:
    return build(OprojProducer)


@pytest.fixture(scope="module")
def marked() -> Program:
    return build(OprojProducerEvents)


def test_events_that_are_off_leave_no_trace(plain: Program) -> None:
    off = build(UnmarkedProducer)
    assert instructions(off) == instructions(plain)
    assert off.key != plain.key and not EVENT.findall(plain.ptx)


def test_events_that_are_on(plain: Program, marked: Program) -> None:
    """The register path has no receive_x. Without what an event adds, the instructions are the same in number."""
    assert [int(number) for number in EVENT.findall(marked.ptx)] == list(range(1, 9))
    names = re.findall(r"__iket_evt_decl_(\w+?)_\d+_attrs", marked.ptx)
    expected = [name.replace(" ", "_") for name in (*STEPS, END) if name != "receive_x"]
    assert names[::-1] == expected
    assert marked.key != plain.key and marked.config["kernel"] != plain.config["kernel"]
    assert marked.dynamic_shared_bytes == plain.dynamic_shared_bytes


class UnmarkedWgmma(OprojWgmmaEvents):
    """Events in the source, but CuTe DSL is not told to keep them."""

    compiler_options = ""


def test_events_of_both_roles_of_the_wgmma_engine() -> None:
    """An event that both roles have has one number."""
    off, on, without = (
        build_wgmma(
            kind(K, transport="unicast:1"), target="sm_90a", batch=16, mailbox_slots=2, mailbox_tokens=16
        )
        for kind in (OprojWgmma, OprojWgmmaEvents, UnmarkedWgmma)
    )
    assert instructions(without) == instructions(off) and without.key != off.key
    names = [name.replace("_", " ") for name in re.findall(r"__iket_evt_decl_(\w+?)_\d+_attrs", on.ptx)]
    both = [*MULTIPLIER_STEPS, END, *LOADER_STEPS]
    assert sorted(names) == sorted({name.replace("_", " ") for name in both})
    numbers = [int(number) for number in EVENT.findall(on.ptx)]
    assert len(numbers) == len(both) + 1 and len(set(numbers)) == len(names)  # both roles end
    shared = [number for number in set(numbers) if numbers.count(number) == 2]
    assert len(shared) == 2  # previous kernel, end
    behind = EVENT.split("\n".join(instructions(on)))[2::2]  # what comes after each event
    waits = [number for number, code in zip(numbers, behind, strict=True) if "griddepcontrol.wait;" in code]
    assert len(waits) == 2 and waits[0] == waits[1] == shared[0]  # each role waits right after the same event


# ---- IKET's JSON ----


def trace(*launches: dict[tuple[int, int], list[tuple[int, int]]]) -> dict[str, Any]:
    """IKET's JSON with (CTA, warp) -> (time, number of the name)."""
    places = [(cta, warp) for cta in (0, 3) for warp in (0, 1)]
    table = [
        {"ctaId": [cta, 0, 0], "gpcId": 1, "smId": 0, "tpcId": 0, "warpId": warp} for cta, warp in places
    ]
    items = [
        {
            "kernelName": "oproj_producer_0",
            "markers": [
                {"color": 0, "locIdx": places.index(place), "markerNameIdx": name, "timestamp": time}
                for place, marks in launch.items()
                for time, name in marks
            ],
        }
        for launch in launches
    ]
    names = ["load_weight", "previous kernel", "route", "end"]
    return {"graphLaunches": {}, "launches": items, "locationTable": table, "meta": {"version": 1},
            "stringTable": names}  # fmt: skip


def tiny(last: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Two CTAs of two warps; released at 1096, the last event at ``last``."""
    return {
        (0, 0): [(1000, 0), (1032, 1), (1096, 2), (1128, 3)],
        (0, 1): [(1032, 0), (1064, 1), (1096, 2), (1160, 3)],
        (3, 0): [(1000, 0), (1064, 1), (1128, 2), (last, 3)],
        (3, 1): [(1032, 0), (1032, 1), (1128, 2), (1160, 3)],
    }


def test_iket_json_is_read() -> None:
    (launch,) = read_iket(trace(tiny(1192)))
    assert (launch.kernel, launch.start, launch.released, launch.exposed) == (
        "oproj_producer_0",
        1000,
        1096,
        96,
    )
    assert launch.marks[3, 0] == (
        (1000, "load_weight"),
        (1064, "previous kernel"),
        (1128, "route"),
        (1192, "end"),
    )
    assert launch.durations() == {
        "load_weight": [32, 32, 64, 0], "previous kernel": [64, 32, 64, 96], "route": [32, 64, 64, 32]
    }  # fmt: skip
    with pytest.raises(
        ValueError, match="no event 'publish' in oproj_producer_0; there are load_weight, prev"
    ):
        launch.times("publish")


def test_events_out_of_order_in_the_file_are_sorted() -> None:
    shuffled = trace(tiny(1192))
    shuffled["launches"][0]["markers"].sort(key=lambda marker: -marker["timestamp"])  # keeps ties as they are
    assert read_iket(shuffled) == read_iket(trace(tiny(1192)))


def test_what_is_not_iket_json(tmp_path: Path) -> None:
    good = trace(tiny(1192))
    chrome: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ns"}
    with pytest.raises(
        ValueError, match="lacks launches, locationTable, stringTable, meta and has traceEvents, dis"
    ):
        read_iket(chrome)
    with pytest.raises(ValueError, match="version 2; version 1 can be read"):
        read_iket({**good, "meta": {"version": 2}})
    plane = copy.deepcopy(good)
    plane["locationTable"][0]["ctaId"] = [0, 1, 0]
    with pytest.raises(ValueError, match=r"CTA \[0, 1, 0\]: only grids of one dimension"):
        read_iket(plane)
    for text, message in (("\x89HDF", "is not JSON"), ("[]", "is a JSON list")):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_iket(tmp_path / "x.json")


def test_the_median_launch() -> None:
    launches = read_iket(trace(tiny(1320), tiny(1192), tiny(1288), tiny(1256)))
    assert [launch.exposed for launch in launches] == [224, 96, 192, 160]
    assert median_launch(launches).exposed == 160
    with pytest.raises(ValueError, match="no launches"):
        median_launch([])


# ---- what is kept ----


def times(program: str, graph: float, single: list[int]) -> dict[str, Any]:
    config = {"batch": 8, "staged_blocks": 0, "rows": 1, "group_tiles": 0, "transport": "unicast:1"}
    row = {"k": 768, "program": program, "config": config, "exposed_ns_eager": single}
    return {**row, "graph_us": [{"exposed_us": graph + drift} for drift in (0.0, 0.25, -0.25)]}


@pytest.fixture
def session(tmp_path: Path) -> tuple[Path, Path, Path]:
    """IKET's JSON of a warm-up and two launches, and both files of times."""
    facts = {"machine": "NVIDIA X", "date": "2026-11-29", "command": "one", "clock_khz": 2_000_000,
             "predecessor_cycles": 16000}  # fmt: skip
    off, events = times("off", 2.0, [2720]), times("events", 2.5, [2880])
    files = tmp_path / "t.json", tmp_path / "times.json", tmp_path / "launches.json"
    contents: tuple[dict[str, Any], ...] = (
        trace(tiny(9992), tiny(1224), tiny(1192)),
        {"facts": facts, "cases": [off, events]},
        {"facts": {**facts, "command": "two"}, "cases": [times("events", 0.0, [3200, 3300])]},
    )
    for file, content in zip(files, contents, strict=True):
        file.write_text(json.dumps(content))
    return files


def test_what_is_kept(session: tuple[Path, Path, Path], tmp_path: Path) -> None:
    out = record_iket(*session, tmp_path / "kept.json", ctas=(3,))
    kept = recorded_steps(768, out)
    assert kept.title == "recorded on an NVIDIA X, 2026-11-29, in steps of 32 ns"
    assert (kept.released, kept.grid["end"], kept.durations["route"]) == (96, (128, 160, 192), 32)
    assert kept.warps[3][0] == ((0, "load_weight"), (64, "previous kernel"), (128, "route"), (192, "end"))
    assert kept.times == {
        "graph_us": {"without": 2.0, "with": 2.5}, "eager_us": {"without": 2.72, "with": 2.88, "recording": 3.25}
    }  # fmt: skip
    assert "2.00 us exposed without events and 2.50 with" in kept.overhead()
    timeline = kept.timeline(3)
    assert [(i.what, i.kind, i.start, i.end) for i in timeline.of("warp 0")] == [
        ("load_weight", "run", 0, 64), ("previous kernel", "wait", 64, 128), ("route", "run", 128, 192),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="CTA 0 was not kept: choose from 3"):
        kept.timeline(0)
    with pytest.raises(
        ValueError, match=r"k = 1536 was not recorded for producer: choose from 768 \(producer\)"
    ):
        recorded_steps(1536, out)


def test_warps_of_two_roles_are_kept(session: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Warp 0 loads, warp 1 multiplies: other events, the same in every CTA; several engines in one file."""
    marks, plain, launches = session

    def wgmma(file: Path, **changes: Any) -> None:
        data = json.loads(file.read_text())
        config = {"batch": 64, "budget": 4096, "transport": "unicast:1"}
        more = [{**case, "engine": WGMMA, "config": config} for case in data["cases"]]
        file.write_text(json.dumps({**data, "cases": [*data["cases"], *more]}))

    def two_roles(launch: dict[tuple[int, int], list[tuple[int, int]]]) -> dict[Any, Any]:
        return {place: [m for m in events if place[1] or m[1] != 2] for place, events in launch.items()}

    wgmma(plain)
    wgmma(launches)
    loaders = [two_roles(tiny(last)) for last in (9992, 1224, 1192)]
    marks.write_text(json.dumps(trace(tiny(9992), tiny(1224), tiny(1192), *loaders)))
    out = record_iket(marks, plain, launches, tmp_path / "kept.json", ctas=(3,))
    assert recorded_engines(out) == ("producer", WGMMA)
    assert recorded_steps(768, out).settings == {"staged_blocks": 0, "rows": 1, "group_tiles": 0}
    kept = recorded_steps(768, out, WGMMA)
    assert (kept.batch, kept.settings, kept.released) == (64, {"budget": 4096}, 96)
    assert [name for _, name in kept.warps[3][0]] == ["load_weight", "previous kernel", "end"]
    assert [name for _, name in kept.warps[3][1]] == ["load_weight", "previous kernel", "route", "end"]
    assert kept.overhead().startswith("wgmma, K = 768, M = 64: 2.00 us exposed")
    assert {item.role for item in kept.timeline(3).intervals} == {"loader"}  # warps 0 to 3
    picture = figures.recorded_launch(kept, cta=3)
    assert (
        picture.axes[0]
        .get_title(loc="left")
        .startswith("OprojWgmma, K = 768, M = 64: recorded on an NVIDIA X")
    )
    assert "Medians over the warps shown, ns: load_weight 32, previous kernel" in picture.alt
    with pytest.raises(ValueError, match="start = 1: ns before the end"):
        figures.recorded_launch(kept, cta=3, start=1)

    loaders[1][3, 1] = loaders[1][3, 1][:-1]
    loaders[2][3, 1] = loaders[2][3, 1][:-1]
    marks.write_text(json.dumps(trace(tiny(9992), tiny(1224), tiny(1192), *loaders)))
    with pytest.raises(ValueError, match=r"CTA 3, warp 1 has the events .*, others have \['load_weight'"):
        record_iket(marks, plain, launches, out, ctas=(3,))


def test_files_that_do_not_belong_together(session: tuple[Path, Path, Path], tmp_path: Path) -> None:
    marks, plain, launches = session
    out = tmp_path / "kept.json"
    with pytest.raises(ValueError, match="CTA 5 has no events: choose from 0 to 3"):
        record_iket(marks, plain, launches, out, ctas=(5,))
    with pytest.raises(ValueError, match=r"has 3 launches, .* speaks of 2: choose files of one run"):
        record_iket(marks, plain, plain_with(plain, [times("events", 2.5, [1])], tmp_path), out)
    with pytest.raises(ValueError, match="producer, K = 768 was not timed with off"):
        record_iket(marks, plain_with(plain, [times("events", 2.5, [1])], tmp_path), launches, out)
    assert not out.exists()


def plain_with(path: Path, cases: list[dict[str, Any]], folder: Path) -> Path:
    (folder / "other.json").write_text(json.dumps({**json.loads(path.read_text()), "cases": cases}))
    return folder / "other.json"


# ---- the package's recording, and the model beside it ----


def test_the_recording_is_small_and_says_where_it_comes_from() -> None:
    assert DATA.stat().st_size < 200_000
    facts = recorded_steps(768).facts
    assert facts["machine"] == "NVIDIA H200" and facts["source"] == "recorded on hardware" and facts["driver"]
    for k, steps in ((768, set(STEPS) - {"receive_x"}), (1536, set(STEPS))):
        kept = recorded_steps(k)
        assert set(kept.durations) == steps and set(kept.grid) == {*steps, END}
        times = [time for warps in kept.warps.values() for marks in warps for time, _ in marks]
        assert all(time % 32 == 0 for time in times) and min(times) >= 0
        for cta in (0, 55, 111):
            timeline = kept.timeline(cta)
            assert timeline.clock == RECORDED_NS and len(timeline.lanes) == 16
            assert all(item.duration >= 0 for item in timeline.intervals)


def test_the_driver_s_own_carveout_makes_the_big_kernel_late() -> None:
    """The previous kernel works for 8 us; 100 KB of shared memory (K = 1536) found no room beside it."""
    small, big = (recorded_steps(k, DRIVER_CARVEOUT) for k in (768, 1536))
    assert small.facts["carveout"] is None and small.late_start == 0
    assert big.released == 3296 and big.late_start == 8000 - 3296 and big.late_end == 0
    assert (recorded_steps(1536).late_start, recorded_steps(1536).late_end) == (0, 11136 - 8000)


def test_a_recorded_timeline_goes_where_a_modelled_one_goes() -> None:
    timeline = recorded_steps(768).timeline(55)
    exported = chrome_trace([timeline])
    assert validate_chrome_trace(exported) == len(timeline.intervals)
    assert exported["otherData"]["clock"] == "ns, recorded on hardware: 1 us here is one of them; recorded"
    assert honest(timeline) == "recorded on hardware"
    assert RECORDED_NS in str(waits_table(timeline, ["warp 0"]).title)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return compare_steps(768)


def test_the_model_has_the_same_steps(comparison: Comparison) -> None:
    recorded = comparison.recording.timeline(0)
    for warp in range(16):
        steps = [
            [i.what for i in timeline.of(f"warp {warp}")] for timeline in (comparison.modelled, recorded)
        ]
        assert steps[0] == steps[1]
    waits = [i for i in comparison.modelled.intervals if i.what == "previous kernel"]
    assert min(i.end for i in waits) == pytest.approx(comparison.released, abs=10)
    modelled, measured = comparison.exposed
    assert measured == RECORDED["exposed"] and comparison.modelled.makespan - comparison.released == modelled
    assert comparison.late_start == 0


def test_what_differs_is_said_with_numbers(comparison: Comparison) -> None:
    """Steps after the wait are what a layer waits for. Before it, the model lets any number of loads be on their way
    and a GPU does not, which is said apart: it costs nothing while the previous kernel runs."""
    modelled, recorded = comparison.durations()["load_weight"]
    assert recorded > 10 * modelled
    said = comparison.statement()
    assert f"{modelled:,.0f} ns modelled, {RECORDED['load_weight']:,} ns recorded; the last warp" in said
    assert "had done so 2,528 ns before the end of the previous kernel." in said  # 8576 - 6048
    assert "the step that differs most is route, 7 ns modelled, 160 ns recorded" in said
    assert "started at least" not in said
    late = replace(comparison, recording=replace(comparison.recording, released=3296))
    assert "had done so 2,752 ns after the end of the previous kernel." in late.statement()  # 3296 - 6048
    assert "on the GPU this kernel started at least 4,704 ns after it" in late.statement()  # 8000 - 3296


def test_the_page_says_what_was_recorded() -> None:
    """docs/in_kernel_timelines.md: each number is that of the kept recordings."""
    page = " ".join((DATA.parents[2] / "docs" / "in_kernel_timelines.md").read_text(encoding="utf-8").split())
    kept = [recorded_steps(k, engine=engine) for engine in ("producer", WGMMA) for k in (768, 1536)]
    for k in (768, 1536):
        assert compare_steps(k).statement() in page
    for row, (kind, which) in {
        "CUDA graph, no events": ("graph_us", "without"),
        "CUDA graph, events, no tool": ("graph_us", "with"),
        "single launches, no events": ("eager_us", "without"),
        "single launches, events, no tool": ("eager_us", "with"),
        "single launches, IKET records": ("eager_us", "recording"),
    }.items():
        assert f"| {row} | {' | '.join(f'{one.times[kind][which]:.2f}' for one in kept)} |" in page
    for one in kept[2:]:
        whole = one.grid[END][2] - one.released
        steps = " | ".join(f"{time:,}" for step, time in one.durations.items() if step != PREVIOUS)
        assert f"| {one.k} | {steps} | {whole:,} |" in page
    before = {k: recorded_steps(k, DRIVER_CARVEOUT) for k in (768, 1536)}
    for one in kept[:2]:
        earlier = before[one.k]
        row = " | ".join(
            f"{old.times['graph_us']['without']:.2f} | {old.durations['load_weight']:,} | {old.late_start:,.0f}"
            for old in (earlier, one)
        )
        assert f"| {one.k} | {row} |" in page
    assert f"{kept[1].late_end:,.0f} ns, at K = 768 {kept[0].late_end:,.0f}" in page
    big = needs_of(compare_steps(1536).program, "K = 1536")
    assert big.shared_bytes == 98.5 * 1024 and "98.5 KiB of shared memory" in page
    previous = Needs("previous kernel", 128, 32)
    assert [kib for kib in CARVEOUTS_KIB if beside(previous, big, kib).fits] == [132, 164, 196, 228]
    timelines = compare_steps(768).modelled, kept[0].timeline(0)
    ends = [[item.end for item in line.intervals if item.what == "multiply"] for line in timelines]
    spread = [max(times) - min(times) for times in ends]
    assert f"within {spread[0]:,.0f} ns of each other, on the GPU within {spread[1]:,.0f}" in page


def test_both_timelines_side_by_side(comparison: Comparison) -> None:
    picture = figures.modelled_and_recorded(comparison, cta=55, start=-400)
    left, right = (axes.get_title(loc="left") for axes in picture.axes)
    assert left == "modelled, not measured: cycles at 1.755 GHz, CTA 0"
    assert right == f"recorded on an NVIDIA H200, {RECORDED['date']}, in steps of 32 ns: CTA 55"
    assert picture.axes[0].get_xlim() == picture.axes[1].get_xlim() and comparison.statement() in picture.alt
    assert len(picture.axes[1].patches) == len(comparison.recording.timeline(55).intervals)
    with pytest.raises(ValueError, match="start = 1: ns before the end"):
        figures.modelled_and_recorded(comparison, start=1)


def test_timelines_without_these_steps(comparison: Comparison) -> None:
    with pytest.raises(ValueError, match="the timeline is in modelled ns: choose one in modelled cycles"):
        modelled_steps(comparison.modelled, 1.0)
    other = Timeline(0, CYCLES, comparison.modelled.intervals, (), (), 0.0)
    with pytest.raises(
        ValueError, match="warp 0 has no step route, store_partials, CTA barrier, publish: choose a"
    ):
        modelled_steps(other, 1.0)


# ---- the kernels around it, and the whole course on a stand-in GPU ----


def test_the_stamping_kernels_on_the_virtual_gpu() -> None:
    source = np.arange(4 * 40, dtype=np.uint32)  # 40 chunks for 4 CTAs of 8 threads: more than one round
    x, stamps, gpu = np.zeros_like(source), np.zeros(2, dtype=np.uint64), vgpu.VirtualGPU()
    target, data, times = gpu.upload(x, "x"), gpu.upload(source, "source"), gpu.upload(stamps, "stamps")
    gpu.launch(vgpu.load(stamped_kernels.GATE), "gate", grid=1, block=32, args=[20], checks=True)
    module = vgpu.load(stamped_kernels.PREDECESSOR)
    gpu.launch(module, "predecessor", grid=4, block=8, args=[target, data, 40, 10, times], checks=True)
    assert (x == source).all() and stamps[0] > 0 and stamps[1] == 0
    gpu.launch(vgpu.load(stamped_kernels.AFTER), "after", grid=1, block=32, args=[times.address + 8])
    assert stamps[1] > 0


class Machine:
    """Executes the launches of a chain on the CPU, and has a clock: 3 us from predecessor to the last kernel."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.clock = 0

    def __call__(self, launch: Launched) -> None:
        self.entries.append(launch.entry)
        word = ctypes.c_uint64
        if launch.entry in ("predecessor", "after"):
            self.clock += 3000
            stamp = launch.value(4 if launch.entry == "predecessor" else 0, word)
            ctypes.c_int64.from_address(stamp).value = self.clock
        if launch.entry == "predecessor":
            ctypes.memmove(
                launch.value(0, word), launch.value(1, word), 16 * launch.value(2, ctypes.c_uint32)
            )
        elif launch.entry.startswith("oproj"):
            shapes = [(BATCH, K), (N, K), (2, BATCH, N)]
            x, weight, mailbox = (bf16_at(launch.value(i, word), shape) for i, shape in enumerate(shapes))
            mailbox[launch.value(4, ctypes.c_int32)] = x.astype(np.float32) @ weight.astype(np.float32).T


class Instant(Graph):
    def sample(self, replays: int, warmup: int = 3) -> list[float]:
        return [12.0 if self.graph == "chain" else 9.0] * replays


@pytest.fixture
def no_streams(monkeypatch: pytest.MonkeyPatch, plain: Program, marked: Program) -> Iterator[None]:
    programs = {OprojProducer: plain, OprojProducerEvents: marked}
    monkeypatch.setattr(iket_run, "SUBJECTS", iket_run.SUBJECTS[:1])
    monkeypatch.setattr(iket_run, "build", lambda engine, target, batch: programs[type(engine)])
    monkeypatch.setattr(iket_run, "capture", lambda launch, count: Instant(launch.__name__, count))
    monkeypatch.setattr(iket_run, "smi", lambda index: {"driver_version": "1.2.3"})
    monkeypatch.setattr(iket_run, "RANKS", (16,))
    monkeypatch.setattr(iket_run, "FLUSH_BYTES", 16)
    monkeypatch.setattr(iket_run, "LAUNCHES", {"times": 2, "launches": 2})
    monkeypatch.setattr(candidates, "copies_needed", lambda weight, l2: 2)
    job = candidates.make_job(StandInGpu(StandIn()), Problem(16, BATCH))
    monkeypatch.setattr(iket_run, "make_job", lambda gpu, problem: replace(job, gpu=gpu))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    yield


def test_a_run_from_end_to_end(no_streams: None, tmp_path: Path) -> None:
    machine = Machine()
    result = json.loads(iket_run.run("times", tmp_path, None, StandInGpu(StandIn(machine))).read_text())
    off, events = result["cases"]
    assert (off["program"], events["program"]) == ("off", "events")
    assert off["exposed_ns_eager"] == [3000, 3000] and off["graph_us"][2]["exposed_us"] == 3.0
    assert result["facts"]["predecessor_cycles"] == 15840 and result["facts"]["driver"] == "1.2.3"
    chain = ["gate", "predecessor", "oproj_producer_0", "after"]
    assert machine.entries == chain * 6  # a warm-up and two, without and with events

    machine = Machine()
    driver = StandIn(machine)
    path = iket_run.run("launches", tmp_path, 100, StandInGpu(driver))
    assert [case["program"] for case in json.loads(path.read_text())["cases"]] == ["events"]
    assert machine.entries == chain * 3
    carveouts = [call for call in driver.named("cuFuncSetAttribute") if "CARVEOUT" in call[1].name]
    assert [(call[0].entry, call[2]) for call in carveouts] == [
        ("gate", 100), ("predecessor", 100), ("after", 100)
    ]  # fmt: skip


def test_the_command_line_records(session: tuple[Path, Path, Path], tmp_path: Path, capsys: Any) -> None:
    marks, plain, _ = session
    words = ["record", str(plain.parent), str(marks), "--data", str(tmp_path / "kept.json")]
    assert iket_run.main(words) == 2 and "CTA 55 has no events" in capsys.readouterr().err
    assert iket_run.main([*words[:2], str(tmp_path / "none.json"), *words[3:]]) == 2
    capsys.readouterr()
    assert iket_run.main(["times", str(tmp_path), "--engines", "wgmma,umma"]) == 2
    assert "'umma' has no events; choose from producer, wgmma" in capsys.readouterr().err
    assert [one.batch for one in iket_run.subjects("wgmma,producer")] == [64, 8]
