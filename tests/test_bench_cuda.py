"""The hardware benchmark without hardware: statistics, refusals, the small kernels on the virtual GPU, the whole
course of a measurement on a stand-in GPU, and data files."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from stand_in_driver import Launch, StandIn, StandInGpu, bf16_at

from oproj_lib import cli_hardware, measured_tables, provenance, vgpu
from oproj_lib.bench import (
    alternatives,
    candidates,
    chain,
    cublaslt,
    hardware,
    measure,
    now,
    results,
    small_kernels,
)
from oproj_lib.bench.measure import Ceilings, ImpossibleTimeError, Statistics, WrongOutputError, summarise
from oproj_lib.bundle import Bundle, Entry
from oproj_lib.devices import CudaError
from oproj_lib.problem import N, Problem
from oproj_lib.program import Parameter, Program
from oproj_lib.recorded import bench_statement, recorded_bench

CEILINGS = Ceilings(copy_tb_s=4.0, read_tb_s=4.2)

# ---- statistics and refusals ----


def test_quartiles_are_numpys() -> None:
    rounds = [[5.0, 1.0, 4.0], [2.0, 9.0, 3.5]]
    found = summarise(rounds)
    flat = [sample for one in rounds for sample in one]
    assert (found.q1_us, found.median_us, found.q3_us) == pytest.approx(np.percentile(flat, [25, 50, 75]))
    assert (found.least_us, found.samples, found.rounds_us) == (1.0, 6, (4.0, 3.5))
    assert summarise([[2.0]]).q3_us == 2.0


@pytest.mark.parametrize("rounds", [[], [[]], [[1.0], []], [[0.0]], [[float("nan")]], [[-1.0]]])
def test_samples_that_make_no_sense(rounds: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="samples"):
        summarise(rounds)


def test_a_baseline_is_taken_off_everything() -> None:
    less = summarise([[10.0, 12.0], [11.0]]).minus(8.0)
    assert (less.median_us, less.least_us, less.rounds_us) == (3.0, 2.0, (3.0, 3.0))


def test_a_time_below_the_floor_is_an_error() -> None:
    """22 MB at 4.2 TB/s take 5.243 us."""
    moved = 2 * 7168 * 1536
    assert CEILINGS.floor_us(moved) == pytest.approx(5.243, abs=1e-3)
    CEILINGS.check("x", 5.25, moved)
    with pytest.raises(
        ImpossibleTimeError, match=r"x: 5\.200 us for 22,020,096 bytes is 4\.23 TB/s.*not cold"
    ):
        CEILINGS.check("x", 5.2, moved)


def test_weights_are_copied_until_they_cannot_be_in_the_cache() -> None:
    """60 MiB of L2: 960 MiB of copies; without a large L2 still 512 MiB."""
    assert measure.copies_needed(2 * 7168 * 1536, 60 * 2**20) == 46
    assert measure.copies_needed(2 * 7168 * 768, 60 * 2**20) == 92
    assert measure.copies_needed(2**20, 2**20) == 512


def test_outputs_that_were_never_written_or_are_wrong() -> None:
    reference = torch.ones(2, 3, dtype=torch.float64)
    out = torch.ones(2, 3, dtype=torch.bfloat16)
    assert measure.check_output("x", out, reference, 2.5e-3) == 0.0
    for value in (float("nan"), 1.0078125):  # one bfloat16 step on one of six elements is 3.2e-3
        out[1, 2] = value
        with pytest.raises(WrongOutputError, match=r"x: relative error (nan|3\.189e-03) against float64"):
            measure.check_output("x", out, reference, 2.5e-3)


def test_nothing_is_measured_no_times() -> None:
    with pytest.raises(ValueError, match="rounds = 0: at least 1"):
        hardware.Plan(rounds=0)
    with pytest.raises(ValueError, match="replays = -1: at least 1"):
        hardware.Plan(replays=-1)


def test_alternatives_by_name() -> None:
    assert alternatives.chosen("none") == ()
    assert "torch.compile" in alternatives.chosen("all") and "torch.compile" not in alternatives.chosen(None)
    assert alternatives.chosen("mm,empty") == ("torch.mm", "empty kernel")
    with pytest.raises(ValueError, match="alternative 'cutlass' is unknown; choose from mm, mm-lt, cublaslt"):
        alternatives.chosen("mm,cutlass")
    assert set(alternatives.SHORT.values()) == set(alternatives.MAKERS)


# ---- the small kernels, on the virtual GPU ----


def test_predecessor_and_consumer_copy() -> None:
    gpu = vgpu.VirtualGPU()
    data = np.arange(4 * 100, dtype=np.uint32).reshape(100, 4)
    source = gpu.upload(data, "source")
    for text, entry, extra in (
        (small_kernels.PREDECESSOR, "predecessor", [50]),
        (small_kernels.CONSUMER, "consumer", []),
    ):
        target = gpu.empty((100, 4), np.uint32, "target")
        report = gpu.launch(
            vgpu.load(text),
            entry,
            grid=(2, 1, 1),
            block=(32, 1, 1),
            args=[target, source, 100, *extra],
            checks=True,
        )
        assert report.ok and np.array_equal(target.array, data)


def test_the_reading_predecessor_reads_its_rounds_and_then_copies() -> None:
    """Two rounds of 64 threads with 8 loads of 16 bytes; the last word shows in one thread's XOR."""
    gpu = vgpu.VirtualGPU()
    rounds, threads = 2, 64
    memory = np.zeros((rounds * threads * small_kernels.LOADS, 4), np.uint32)
    memory[-1, 3] = 0x5EED5EED
    x = np.arange(400, dtype=np.uint32).reshape(100, 4)
    target, never = gpu.empty((100, 4), np.uint32, "x"), gpu.upload(np.zeros(1, np.uint32), "never")
    report = gpu.launch(
        vgpu.load(small_kernels.reading_predecessor()), "reading_predecessor", grid=(2, 1, 1), block=(32, 1, 1),
        args=[target, gpu.upload(x, "source"), len(x), gpu.upload(memory, "memory"), rounds, never], checks=True,
    )  # fmt: skip
    assert report.ok and np.array_equal(target.array, x) and never.array[0] == 0x5EED5EED
    assert report.counters.totals()["global_load_bytes"] == memory.nbytes + x.nbytes


def test_the_reading_predecessor_reads_other_memory_every_time() -> None:
    reads = chain.Reads(StandInGpu(StandIn(lambda launch: None, count=1)), size=110_000_000)
    assert reads.bytes == 132 * 512 * 8 * 16 * 4 == 34_603_008
    starts = [reads.values(index)[0].value - reads.data.data_ptr() for index in range(4)]
    assert starts == [0, 34_603_008, 69_206_016, 0]  # three fit


def test_the_reader_reads_every_byte_once() -> None:
    """The last word is seen in some thread's XOR, and the bytes are counted."""
    gpu = vgpu.VirtualGPU()
    threads, rounds = 64, 2
    data = np.zeros((threads * small_kernels.LOADS * rounds, 4), np.uint32)
    data[-1, 3] = 0x5EED5EED
    never = gpu.upload(np.zeros(1, np.uint32), "never")
    report = gpu.launch(
        vgpu.load(small_kernels.reader()), "reader", grid=(2, 1, 1), block=(32, 1, 1),
        args=[gpu.upload(data, "data"), never, len(data)], checks=True,
    )  # fmt: skip
    assert report.ok and never.array[0] == 0x5EED5EED
    assert report.counters.totals()["global_load_bytes"] == data.nbytes


def test_the_bandwidth_counts_what_the_reader_reads() -> None:
    """528 CTAs of 512 threads with 8 loads of 16 bytes: 34,603,008 bytes a round, and only whole rounds."""
    seen: list[int] = []
    gpu = StandInGpu(StandIn(lambda launch: seen.append(launch.value(2, ctypes.c_uint32)), count=3))
    source = torch.empty(2 * 34_603_008 + 5000, dtype=torch.uint8)
    launch, read_bytes = measure.reader_launch(gpu, source, source)
    launch()
    assert (read_bytes, seen) == (69_206_016, [69_206_016 // 16])
    with pytest.raises(ValueError, match="5000 bytes are less than a round of 34603008"):
        measure.reader_launch(gpu, source[:5000], source)


def test_the_empty_kernel_waits_and_triggers() -> None:
    gpu = vgpu.VirtualGPU()
    assert gpu.launch(
        vgpu.load(small_kernels.EMPTY), "empty", grid=(2, 1, 1), block=(32, 1, 1), args=[], checks=True
    ).ok


def test_the_triton_kernel_adds_its_parts_in_order_and_resets_its_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for sm_90 by Triton, run on the virtual GPU with every check; twice, for the count."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from oproj_lib.bench import triton_split_k

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    block_n, block_k, parts, warps, stages = triton_split_k.CONFIGURATIONS[2]
    assert parts == 2
    types = {
        "x": "*bf16", "weight": "*bf16", "out": "*bf16", "partial": "*fp32", "count": "*i32", "batch": "i32",
        "columns": "i32", "k": "i32",
    }  # fmt: skip
    constants = {"BLOCK_M": 16, "BLOCK_N": block_n, "BLOCK_K": block_k, "PARTS": parts}
    aligned: dict[Any, Any] = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 3, 4, 6, 7)}
    source = ASTSource(
        triton_split_k.split_k, types | dict.fromkeys(constants, "constexpr"), constants, aligned
    )
    kernel = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages}
    )
    gpu, rng = vgpu.VirtualGPU(), np.random.default_rng(0)
    batch, columns, k = 5, 2 * block_n, 512
    x, weight = (rng.standard_normal((rows, k)).astype(ml_dtypes.bfloat16) for rows in (batch, columns))
    count = gpu.upload(np.zeros(2, np.int32), "count")
    partial = gpu.empty((parts, 16, columns), np.float32, "partial")
    reference = x.astype(np.float64) @ weight.astype(np.float64).T
    for _ in range(2):
        out = gpu.empty((batch, columns), ml_dtypes.bfloat16, "out")
        arguments = [gpu.upload(x, "x"), gpu.upload(weight, "weight"), out, partial, count, batch, columns, k]
        report = gpu.launch(
            vgpu.load(kernel.asm["ptx"]), kernel.metadata.name, grid=(2, parts, 1), block=(32 * warps, 1, 1),
            args=[*arguments, 0, 0], dynamic_shared_bytes=kernel.metadata.shared, checks=True,
        )  # fmt: skip
        assert report.ok and not count.array.any()
        error = np.linalg.norm(out.array.astype(np.float64) - reference) / np.linalg.norm(reference)
        assert error < 2.5e-3


def test_triton_configurations_divide_both_k() -> None:
    from oproj_lib.bench import triton_split_k

    for k in (768, 1536):
        fitting = triton_split_k.fitting(k)
        assert len(fitting) == len(triton_split_k.CONFIGURATIONS)
        assert all(N % block_n == 0 for block_n, *_ in fitting)
    assert [triton_split_k.block_m(batch) for batch in (1, 16, 17, 33, 64)] == [16, 16, 32, 64, 64]


# ---- cublasLt through a stand-in library ----


class LtLibrary:
    """Answers like libcublasLt: two heuristics, the second of which failed. refuse: a function that fails."""

    def __init__(self, refuse: str = "") -> None:
        self.refuse = refuse
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            if name == self.refuse:
                return 7
            if name == "cublasLtMatmulAlgoGetHeuristic":
                found, count = arguments[8], arguments[9]._obj
                found[0].algo[0], found[1].state, count.value = 99, 15, 2
            return 0

        return call

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


def test_cublaslt_gets_column_major_operands() -> None:
    library = LtLibrary()
    lt = cublaslt.CublasLt(StandInGpu(StandIn()), library=library)
    x, weight = torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(16, 64, dtype=torch.bfloat16)
    out = torch.zeros(3, 16, dtype=torch.bfloat16)
    ((settings, launch),) = lt.choices(x, weight, out)  # the heuristic that failed is left out
    assert settings == {"heuristic": 0}
    shapes = [
        (call[2].value, call[3].value, call[4].value) for call in library.named("cublasLtMatrixLayoutCreate")
    ]
    assert shapes == [(64, 16, 64), (64, 3, 64), (16, 3, 16)]  # rows, columns, leading dimension
    launch(x, weight, out)
    ((_, _, one, a, _, b, _, zero, c, _, d, _, algorithm, _, _, stream),) = library.named("cublasLtMatmul")
    assert (one._obj.value, zero._obj.value, stream.value) == (1.0, 0.0, 7)
    assert [p.value for p in (a, b, c, d)] == [t.data_ptr() for t in (weight, x, out, out)]
    assert algorithm._obj[0] == 99


def test_cublaslt_errors() -> None:
    with pytest.raises(CudaError, match="cublasLtCreate of cublasLt answered status 7"):
        cublaslt.CublasLt(StandInGpu(StandIn()), library=LtLibrary("cublasLtCreate"))
    if torch.version.cuda is None:
        with pytest.raises(CudaError, match="is built without CUDA"):
            cublaslt.open_library()


def test_the_heuristic_has_the_size_of_the_c_structure() -> None:
    """cublasLtMatmulHeuristicResult_t: 64 bytes of algo, size_t, int, float, int[4]."""
    assert ctypes.sizeof(cublaslt.Heuristic) == 64 + 8 + 4 + 4 + 16


# ---- a whole measurement on a stand-in GPU ----

PROBLEM = Problem(16, 1)
ENTRY = Entry(
    "one",
    "producer",
    "sm_90a",
    16,
    1,
    768,
    {"staged_blocks": 0, "rows": 1, "group_tiles": 0},
    "unicast:1",
    True,
    (),
)


def program() -> Program:
    """The metadata of a K = 768, M = 1 producer; its code is never run here."""
    return Program(
        name="producer", target="sm_90a", entry="projection", ptx="", cubin=b"\x7fELF", grid=(112, 1, 1),
        block=(512, 1, 1), cluster=(1, 1, 1), dynamic_shared_bytes=1024,
        parameters=(
            Parameter("x", "tensor", "bfloat16", (1, 768)), Parameter("weight", "tensor", "bfloat16", (N, 768)),
            Parameter("mailbox", "tensor", "bfloat16", (2, 1, N)), Parameter("mc", "address", "int64", ()),
            Parameter("slot", "scalar", "int32", ()),
        ),
        pdl=True, compiler="", key="",
        config={"transport": "unicast:1", "policy": "latent", "mailbox_slots": 2, "mailbox_tokens": 1},
    )  # fmt: skip


class OneProgram(Bundle):
    def program(self, entry: Entry) -> Program:
        return program()


BUNDLE = OneProgram(Path("nowhere"), "sm_90a", "", {}, (ENTRY,))


class Machine:
    """What the kernels of a chain do, in NumPy; wrong: makes one of them misbehave."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.log: list[Launch] = []

    def __call__(self, launch: Launch) -> None:
        self.log.append(launch)
        pointer = [launch.value(i, ctypes.c_uint64) for i in range(2)] if launch.entry != "empty" else []
        if launch.entry in ("predecessor", "reading_predecessor") and self.wrong != "stale x":
            bf16_at(pointer[0], (1, 768))[:] = bf16_at(pointer[1], (1, 768))
        if launch.entry == "consumer":
            bf16_at(pointer[0], (1, N))[:] = bf16_at(pointer[1], (1, N))
        if launch.entry == "projection":
            x, weight = bf16_at(pointer[0], (1, 768)), bf16_at(pointer[1], (N, 768))
            out = (x.astype(np.float32) @ weight.astype(np.float32).T).astype(ml_dtypes.bfloat16)
            mailbox = bf16_at(launch.value(2, ctypes.c_uint64), (2, 1, N))
            columns = N - 64 if self.wrong == "one CTA missing" else N
            mailbox[launch.value(4, ctypes.c_int32), 0, :columns] = out[0, :columns]


class NowGraph:
    """Replays by calling: what a captured graph would do."""

    def __init__(self, launch: Callable[[int], None], launches: int) -> None:
        self.launch, self.launches = launch, launches

    def replay(self) -> None:
        for index in range(self.launches):
            self.launch(index)


class NowTimed(measure.Graph):
    """3.2 us per projection, 9 us per predecessor, 12.5 us per chain."""

    us: float

    def sample(self, replays: int, warmup: int = 3) -> list[float]:
        return [self.us] * replays


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "copies_needed", lambda weight, l2: 2)
    times = {"launch": 3.2, "precede": 9.0, "repetition": 12.5}

    def capture(launch: Callable[[int], None], launches: int) -> measure.Graph:
        graph = NowTimed(NowGraph(launch, launches), launches)
        graph.us = times[launch.__name__]
        return graph

    monkeypatch.setattr(hardware, "capture", capture)
    monkeypatch.setattr(chain, "capture", capture)


def run(machine: Machine, ceilings: Ceilings = CEILINGS, names: tuple[str, ...] = ()) -> results.JobResult:
    gpu = StandInGpu(StandIn(machine))
    return hardware.measure_job(gpu, BUNDLE, PROBLEM, names, ceilings, hardware.Plan(2, 3))


def test_a_measurement_from_end_to_end(graphs: None) -> None:
    machine = Machine()
    job = run(machine, names=("empty kernel",))
    projection, empty = job.rows
    assert (projection.name, projection.settings) == (ENTRY.engine, ENTRY.settings)
    assert projection.alone and projection.alone.median_us == 3.2 and projection.alone.samples == 6
    assert projection.exposed.median_us == pytest.approx(3.5) and empty.exposed.median_us == pytest.approx(
        3.5
    )
    assert projection.error and 0 < projection.error < 2.5e-3
    assert (empty.alone, empty.error, job.weight_copies) == (None, None, 2)
    # The last replay was that of the empty kernel's chain, which has no output to check; before it, the projection's.
    entries = [launch.entry for launch in machine.log if launch.entry != "empty"]
    assert entries[-4:] == ["predecessor", "projection"] * 2
    assert all(launch.attributes for launch in machine.log)  # all may start early
    first = next(launch for launch in machine.log if launch.entry == "predecessor")
    assert first.grid == (132, 1, 1) and first.block == (128, 1, 1)


def test_one_size_measured_now(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What notebook 14 calls where there is a GPU, and how it stands beside recorded numbers."""
    smi = dict.fromkeys(provenance.SMI_FIELDS, "1")
    monkeypatch.setattr(provenance, "smi", lambda index: smi)
    monkeypatch.setattr(measure, "ceilings", lambda gpu: CEILINGS)
    gpu = StandInGpu(StandIn(Machine()))
    found = now.measure_now("sm_90a", PROBLEM, gpu=gpu, programs=BUNDLE, names=("empty kernel",))
    assert (found.provenance.gpu, found.ceilings, found.rounds) == ("NVIDIA stand-in", CEILINGS, 1)
    assert [row.name for row in found.rows] == ["producer", "empty kernel"]
    assert found.rows[0].exposed.median_us == pytest.approx(3.5) and found.rows[0].error
    assert set(found.provenance.clocks) == {"before", "after"}
    table = measured_tables.beside_table(synthetic_bench(), found, 768, 1)
    cells = {name: list(column.cells) for name, column in zip("rbn", table.columns, strict=True)}
    assert cells["n"][cells["r"].index("producer")] == "3.50 [3.50, 3.50]"
    assert cells["n"][cells["r"].index("torch.mm")] == "not measured"
    assert "measured now: NVIDIA stand-in" in str(table.caption)
    alone = measured_tables.beside_table(synthetic_bench(), None, 768, 1)
    assert len(alone.columns) == 2 and "recorded numbers only" in str(alone.caption)


def test_a_consumer_of_its_own(graphs: None) -> None:
    machine = Machine()
    plan = hardware.Plan(1, 1, consumer="copy")
    hardware.measure_job(StandInGpu(StandIn(machine)), BUNDLE, PROBLEM, (), CEILINGS, plan)
    assert [launch.entry for launch in machine.log[-6:]] == ["predecessor", "projection", "consumer"] * 2
    with pytest.raises(
        ValueError, match=r"consumer = 'scatter': choose from \('next', 'copy', 'reduce', 'attnres'\)"
    ):
        hardware.Plan(consumer="scatter")


def test_a_predecessor_that_reads_memory(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "Reads", partial(chain.Reads, size=70_000_000))
    machine, rounds = Machine(), set()

    def run(launch: Launch) -> None:
        machine(launch)
        if launch.entry == "reading_predecessor":
            rounds.add(launch.value(4, ctypes.c_uint32))

    plan = hardware.Plan(1, 1, predecessor="read")
    gpu = StandInGpu(StandIn(run, count=6))
    hardware.measure_job(gpu, BUNDLE, PROBLEM, (), CEILINGS, plan)
    assert [launch.entry for launch in machine.log[-4:]] == ["reading_predecessor", "projection"] * 2
    before = machine.log[-2]
    assert (before.grid, before.block, before.shared_bytes) == ((132, 1, 1), (512, 1, 1), 120 * 1024)
    assert rounds == {4}
    with pytest.raises(ValueError, match=r"predecessor = 'sleep': choose from \('spin', 'read'\)"):
        hardware.Plan(predecessor="sleep")


def test_carveouts_by_name() -> None:
    assert [cli_hardware.carveout_of(text) for text in ("driver", "0", "100")] == [None, 0, 100]
    with pytest.raises(ValueError, match="--carveout = '101': a percentage from 0 to 100, or driver"):
        cli_hardware.carveout_of("101")


def test_the_kernels_around_the_projection_share_a_carveout(graphs: None) -> None:
    driver = StandIn(Machine())
    plan = hardware.Plan(1, 1, carveout=100)
    hardware.measure_job(StandInGpu(driver), BUNDLE, PROBLEM, (), CEILINGS, plan)
    granted = [value for _, which, value in driver.named("cuFuncSetAttribute") if "CARVEOUT" in which.name]
    assert granted == [100, 100]  # predecessor, consumer


def test_the_predecessor_spins_for_its_microseconds() -> None:
    spins: list[int] = []
    gpu = StandInGpu(StandIn(lambda launch: spins.append(launch.value(3, ctypes.c_uint64)), count=4))
    x, other = (torch.zeros(1, 768, dtype=torch.bfloat16) for _ in range(2))
    job = candidates.Job(gpu, PROBLEM, x, (x, other), (), ())
    chain.Chain(job).precede(0)
    assert spins == [15840]  # 8 us at 1.98 GHz


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("one CTA missing", "^producer .*: relative error nan"),
        ("stale x", "^in the chain, producer .*: relative error 1"),
    ],
)
def test_wrong_outputs_are_not_reported_as_times(graphs: None, wrong: str, message: str) -> None:
    with pytest.raises(WrongOutputError, match=message):
        run(Machine(wrong))


def test_times_that_cannot_be_are_not_reported(graphs: None) -> None:
    with pytest.raises(ImpossibleTimeError, match=r"producer .* K = 768, M = 1: 3\.200 us"):
        run(Machine(), Ceilings(3.0, 3.0))


def test_an_alternative_that_fails_is_reported(graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, job: candidates.Job) -> candidates.Candidate:
        raise OSError("no such library")

    monkeypatch.setitem(alternatives.MAKERS, "torch.mm", fail)
    job = run(Machine(), names=("torch.mm",))
    assert job.failures == {"torch.mm": "OSError: no such library"} and len(job.rows) == 1
    assert hardware.failures([job]) == ["K = 768, M = 1: torch.mm: OSError: no such library"]


def test_sizes_that_a_bundle_does_not_have() -> None:
    assert hardware.problems(BUNDLE, [768, 1536], None, "next") == [PROBLEM]
    with pytest.raises(
        ValueError, match=r"no timed program for K in \[1536\] .* the bundle has K = 768 M = 1"
    ):
        hardware.problems(BUNDLE, [1536], [1], "next")


# ---- data files ----


def synthetic_bench() -> results.HardwareBench:
    """Invented numbers for tests of files, tables and pictures; never data."""

    def spread(us: float) -> Statistics:
        return Statistics(us, us - 0.1, us + 0.2, us - 0.2, 90, (us, us + 0.05, us))

    def rows(k: int, batch: int) -> tuple[results.Row, ...]:
        scale = k / 768
        moved = 2 * (N * k + batch * (k + N))
        times = {
            "producer": (3.4, 1.2),
            "wgmma": (3.9, 2.0),
            "torch.mm": (5.4, 5.5),
            "Triton split-K": (4.8, 4.9),
        }
        found = [
            results.Row(k, batch, name, {}, name in ("producer", "wgmma"), spread(alone * scale + batch / 60),
                        spread(exposed * scale), 1.7e-3, moved)
            for name, (alone, exposed) in times.items()
        ]  # fmt: skip
        return (*found, results.Row(k, batch, "empty kernel", {}, True, None, spread(0.45), None, moved))

    jobs = tuple(
        results.JobResult(k, batch, 46, spread(9.0), rows(k, batch), {})
        for k in (768, 1536)
        for batch in (1, 2, 4, 8, 16, 32, 64)
    )
    source = provenance.Provenance(
        gpu="SYNTHETIC GPU", capability="9.0", multiprocessors=132, l2_bytes=60 * 2**20, driver="0.0",
        cuda_driver_api="13.0", system="", processor="", cores=1, python="3.12", packages={"torch": "0.0"},
        clocks={"before": {}, "after": {}}, date="2000-01-01T00:00:00+00:00", command="invented for a test",
    )  # fmt: skip
    return results.HardwareBench(source, CEILINGS, 3, 30, None, "next", jobs)


def test_a_data_file_reads_back(tmp_path: Path) -> None:
    bench = synthetic_bench()
    path = tmp_path / "synthetic.json"
    results.write_bench(path, bench)
    assert results.read_bench(path) == bench
    fields = json.loads(path.read_text())
    assert fields["method"] and fields["exposed_method"] and fields["provenance"]["command"]
    best = bench.best(1536, 8, "producer")
    assert best and best.exposed.median_us == 2.4 and bench.best(1536, 8, "cutlass") is None
    assert bench.batches(768) == (1, 2, 4, 8, 16, 32, 64)


def test_data_files_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "synthetic.json"
    path.write_text('{"what": "a shopping list"}')
    with pytest.raises(ValueError, match="is no data file of `bench --device cuda` in format 1"):
        results.read_bench(path)
    fields = synthetic_bench().as_dict()
    del fields["ceilings"]
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"lacks a field of `bench --device cuda`.*'ceilings'"):
        results.read_bench(path)


def test_tables_say_whether_numbers_are_recorded() -> None:
    bench = synthetic_bench()
    titles = [table.title for table in results.bench_tables(bench, recorded=True)]
    assert titles == [
        f"K = {k}: recorded on SYNTHETIC GPU, 2000-01-01, torch 0.0, driver 0.0" for k in (768, 1536)
    ]
    assert "measured on" in str(results.bench_tables(bench, recorded=False)[0].title)
    broken = replace(bench, jobs=(replace(bench.jobs[0], failures={"torch.mm": "no\nreason"}),))
    cells = [list(column.cells) for column in results.bench_tables(broken, recorded=False)[0].columns]
    assert cells[1][-1] == "torch.mm" and cells[2][-1] == "not measured" and cells[4][-1] == "no"


def test_recorded_numbers_are_read_with_their_origin(tmp_path: Path) -> None:
    path = tmp_path / "synthetic.json"
    results.write_bench(path, synthetic_bench())
    bench = recorded_bench(path)
    text = bench_statement(bench, 1536, 8)
    assert text == (
        "recorded on SYNTHETIC GPU, 2000-01-01, torch 0.0, driver 0.0: at K = 1536, M = 8 a layer waits 2.40 us for "
        "producer and 11.00 us for torch.mm"
    )
    with pytest.raises(FileNotFoundError, match="python -m oproj_lib bench --device cuda --out"):
        recorded_bench(tmp_path / "nothing.json")


# ---- pictures ----


def test_pictures_say_what_they_show() -> None:
    from oproj_lib import figures

    bench = synthetic_bench()
    origin = "recorded on SYNTHETIC GPU, 2000-01-01, torch 0.0, driver 0.0"
    wanted = {
        "latency": (figures.latency(bench), "K = 768, producer: M 1 3.4, M 2 3.4"),
        "exposed": (figures.exposed(bench), "K = 1536, torch.mm: M 1 11.0, M 2 11.0"),
        "bandwidth": (figures.bandwidth(bench), "Percent of 4.20 TB/s"),
        "roofline": (figures.measured_roofline(bench, peak_tflops=790), "4.20 TB/s (measured) and 790 TFLOP/s (given)"),
    }  # fmt: skip
    for name, (picture, words) in wanted.items():
        assert origin in picture.alt and words in picture.alt, name
        assert len(picture.png()) > 20_000, name
    assert "empty kernel" in wanted["exposed"][0].alt and "empty kernel" not in wanted["latency"][0].alt
    assert "measured on SYNTHETIC GPU" in figures.latency(bench, recorded=False).alt
