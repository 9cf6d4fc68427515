"""Cycles of bank conflicts: the kernel on the virtual GPU, the measurement behind a stand-in driver whose launches the
virtual GPU runs, data files, and the recorded one."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stand_in_driver import Launch, StandIn, StandInGpu

from oproj_lib import figures, provenance, vgpu
from oproj_lib.bench import bank_conflicts
from oproj_lib.bench.bank_conflicts import BankConflicts, Case, Cycles
from oproj_lib.bench.measure import WrongOutputError
from oproj_lib.layouts import banks

CASES = {case.name: case for case in bank_conflicts.cases()}
SMALL = [
    CASES["one word for all lanes"],
    CASES["neighbouring chunks"],
    CASES["partial sums, 20 floats per token"],
]
SMI = dict.fromkeys(provenance.SMI_FIELDS, "1")


def test_patterns_and_their_wavefronts() -> None:
    """By the rule of the CUDA guide: a bank answers one word per pass, and 16-byte accesses run 8 lanes at a time."""
    expected = {
        "one word for all lanes": 1, "32 words of one bank": 32, "neighbouring chunks": 4,
        "x, rows padded by 0 chunks": 8, "x, rows padded by 1 chunks": 8, "x, rows padded by 2 chunks": 8,
        "x, rows padded by 4 chunks": 4, "x, rows padded by 8 chunks": 8, "partial sums, 16 floats per token": 4,
        "partial sums, 18 floats per token": 2, "partial sums, 20 floats per token": 1,
        "partial sums, 24 floats per token": 2, "partial sums read, no ring": 16, "partial sums read, ring": 4,
    }  # fmt: skip
    assert {name: case.wavefronts for name, case in CASES.items()} == expected
    assert all(4 * case.area_words <= 48 * 1024 for case in CASES.values())  # granted without asking


@pytest.mark.parametrize(
    "name", ["32 words of one bank", "x, rows padded by 4 chunks", "partial sums, 16 floats per token"]
)
def test_the_virtual_gpu_counts_them_on_the_kernel(name: str) -> None:
    assert bank_conflicts.counted_wavefronts(CASES[name]) == CASES[name].wavefronts


def on_vgpu(case: Case, wrong: str = "") -> StandIn:
    """A driver whose launches the virtual GPU runs, and whose clock is the wavefronts it counted; wrong: what is spoilt
    afterwards, "load" or "memory"."""
    arrays: dict[str, np.ndarray] = {}

    def at(launch: Launch, index: int, kind: Any, *shape: int) -> np.ndarray:
        count = int(np.prod(shape))
        return np.ctypeslib.as_array(
            (kind * count).from_address(launch.value(index, ctypes.c_uint64))
        ).reshape(shape)

    def run(launch: Launch) -> None:
        assert (launch.grid, launch.block, launch.shared_bytes) == (
            (1, 1, 1),
            (256, 1, 1),
            4 * case.area_words,
        )
        words, rounds = (launch.value(i, ctypes.c_uint32) for i in (4, 5))
        assert words == case.area_words
        arrays["offsets"], arrays["sums"] = (
            at(launch, 0, ctypes.c_uint32, 32),
            at(launch, 1, ctypes.c_uint32, 8, 32),
        )
        arrays["area"], arrays["cycles"] = (
            at(launch, 2, ctypes.c_uint32, words),
            at(launch, 3, ctypes.c_uint64, 1),
        )
        gpu = vgpu.VirtualGPU()
        report = gpu.launch(
            vgpu.load(bank_conflicts.kernel(case)), "bank_conflicts", grid=1, block=256,
            args=[*(gpu.upload(array, name) for name, array in arrays.items()), words, rounds],
            dynamic_shared_bytes=launch.shared_bytes,
        )  # fmt: skip
        report.raise_for_findings()
        arrays["cycles"][0] = 8 * 16 * rounds * case.wavefronts
        if wrong == "load":
            arrays["sums"][3, 7] += 1
        if wrong == "memory":
            arrays["area"][5] += 1

    return StandIn(run, count=6)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_case_is_measured(case: Case) -> None:
    found = bank_conflicts.measure_case(StandInGpu(on_vgpu(case)), case, rounds=2, launches=3)
    assert found == Cycles(case, case.wavefronts, case.wavefronts, case.wavefronts, 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [("load", "warp 3, lane 7 loaded words that sum to"), ("memory", "word 5 is 0x6 afterwards, not 0x5")],
)
def test_what_was_timed_is_what_was_asked(wrong: str, message: str) -> None:
    case = CASES["neighbouring chunks"]
    with pytest.raises(WrongOutputError, match=f"neighbouring chunks: {message}"):
        bank_conflicts.measure_case(StandInGpu(on_vgpu(case, wrong)), case, rounds=1, launches=2)


def test_a_lane_at_the_wrong_offset_is_found() -> None:
    """Sums and memory of another pattern with as many wavefronts are refused."""
    case, other = (
        SMALL[1],
        Case("turned", "ld.shared", 16, tuple(16 * ((lane + 1) % 32) for lane in range(32))),
    )
    sums = np.zeros((8, 32), np.uint32)
    area = np.arange(case.area_words, dtype=np.uint32)
    first_words = np.array(other.offsets) // 4
    sums[:] = 16 * (4 * first_words + 0 + 1 + 2 + 3)
    bank_conflicts.check(other, sums, area, 1)
    with pytest.raises(WrongOutputError, match="warp 0, lane 0 loaded"):
        bank_conflicts.check(case, sums, area, 1)


def synthetic(change: Callable[[Case], float] = lambda case: 1.0) -> BankConflicts:
    """Invented cycles; never data."""
    gpu = StandInGpu(StandIn())
    source = provenance.collect(gpu, ["invented", "for", "a", "test"], {"before": SMI})
    cycles = tuple(
        Cycles(case, change(case) * case.wavefronts, 0.9 * case.wavefronts, 1.1 * case.wavefronts, 30)
        for case in bank_conflicts.cases()
    )
    return BankConflicts(source, 64, cycles)


def test_a_data_file_reads_back(tmp_path: Path) -> None:
    path, measured = tmp_path / "synthetic.json", synthetic()
    bank_conflicts.write(path, measured)
    assert bank_conflicts.read(path) == measured
    found = bank_conflicts.cycles_by_name(measured)
    assert list(found["32 words of one bank"]) == pytest.approx([32.0, 28.8, 35.2])
    fields = json.loads(path.read_text())
    assert fields["method"] and fields["provenance"]["command"]
    path.write_text(json.dumps({**fields, "format": 2}))
    with pytest.raises(ValueError, match=r"is no data file of oproj_lib\.bench\.bank_conflicts in format 1"):
        bank_conflicts.read(path)
    fewer = BankConflicts(measured.provenance, 64, measured.cases[1:])
    with pytest.raises(ValueError, match="did not measure one word for all lanes as it is defined now"):
        bank_conflicts.cycles_by_name(fewer)


def test_where_cycles_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bank_conflicts, "recorded", synthetic)
    found, how = bank_conflicts.on_hardware("vgpu", "sm_90a")
    assert found.cases == synthetic().cases and how.startswith("recorded on NVIDIA stand-in, 20")
    monkeypatch.setattr(bank_conflicts, "choose_device", lambda device, engine, target: ("cuda", "a GPU"))
    monkeypatch.setattr(bank_conflicts, "Gpu", lambda index: StandInGpu(StandIn()))
    monkeypatch.setattr(bank_conflicts, "measure", lambda gpu, command: synthetic())
    assert bank_conflicts.on_hardware("auto", "sm_90a")[1].startswith("measured on NVIDIA stand-in")


def test_the_picture_says_what_it_shows() -> None:
    counted = {name: float(case.wavefronts) for name, case in CASES.items()}
    picture = figures.conflict_cycles(
        counted, bank_conflicts.cycles_by_name(synthetic()), "recorded on SYNTHETIC"
    )
    assert "recorded on SYNTHETIC" in picture.alt
    assert "rows padded by 4 chunks: 4 wavefronts, 4.00 cycles" in picture.alt
    with pytest.raises(ValueError, match="different patterns"):
        figures.conflict_cycles(counted, {"a": (1.0, 1.0, 1.0)}, "x")


def test_a_wavefront_is_a_cycle() -> None:
    """Recorded on a real GPU, for every pattern as it is now: between 0.95 and 1.05 cycles per wavefront."""
    found = bank_conflicts.recorded()
    assert "H200" in found.provenance.gpu
    assert found.provenance.command.startswith("python -m oproj_lib.bench.bank_conflicts")
    for name, (median, low, high) in bank_conflicts.cycles_by_name(found).items():
        case = CASES[name]
        assert low <= median <= high
        assert 0.95 < median / banks.wavefronts(case.offsets, case.access_bytes) < 1.05, name
