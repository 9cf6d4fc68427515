"""`build` and `check`: a bundle made here, run on a stand-in GPU that answers rightly, wrongly, or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from stand_in_driver import Projections, StandIn, StandInGpu

from oproj_lib import bundle, cli_hardware, hardware_check, provenance
from oproj_lib.bundle import Bundle
from oproj_lib.bundle_recipes import Recipe, corners, recipes
from oproj_lib.cli import EXIT_FOUND, EXIT_OK, EXIT_USAGE, main
from oproj_lib.devices import DeviceError, cuda
from oproj_lib.kernels.configuration import Configuration, configurations
from oproj_lib.problem import KINDS
from oproj_lib.program import Program

SMI = dict.fromkeys(provenance.SMI_FIELDS, "1") | {"driver_version": "580.1"}
RECIPE = Recipe(
    "producer", 16, 1, {"staged_blocks": 0, "rows": 1, "group_tiles": 0}, True, ("random", "nan"), 2
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """One program, two kinds of inputs."""
    return bundle.build("sm_90a", tmp_path_factory.mktemp("bundle"), chosen=[RECIPE])


def copy(made: Bundle, folder: Path) -> Path:
    shutil.copytree(made.directory, folder)
    return folder


def stand_in(made: Bundle, spoil: Callable[[int, np.ndarray], None] = lambda n, out: None) -> StandInGpu:
    return StandInGpu(StandIn(Projections([made.program(entry) for entry in made.entries], spoil)))


@pytest.fixture
def on_stand_in(monkeypatch: pytest.MonkeyPatch, made: Bundle) -> None:
    monkeypatch.setattr(cuda, "Gpu", lambda index: stand_in(made))
    monkeypatch.setattr(provenance, "smi", lambda index: SMI)


# ---- what a bundle holds ----


def test_a_full_bundle_covers_every_path_and_kind() -> None:
    found = recipes("sm_90a")
    producers = [recipe for recipe in found if recipe.engine == "producer"]
    assert {recipe.batch for recipe in producers if recipe.timed} == {1, 2, 4, 8, 16, 32, 64}
    assert {recipe.settings["rows"] for recipe in producers} == {1, 2, 4}
    assert {kind for recipe in producers for kind in recipe.kinds} == set(KINDS)
    swept = {
        r.settings["staged_blocks"]
        for r in producers
        if r.timed and (r.k, r.batch, r.settings["group_tiles"]) == (1536, 8, 0)
    }
    assert swept == set(range(1, 13))  # 12 K blocks per warp; 0 staged blocks has no x path at K = 1536
    assert len({recipe.label for recipe in found}) == len(found)
    direct = [recipe for recipe in found if recipe.engine == "direct"]
    assert {(r.k, r.batch) for r in direct if r.timed} == {(k, m) for k in (768, 1536) for m in (1, 2, 4, 8)}
    assert {recipe.settings["rows"] for recipe in direct} == {1, 2, 4}
    for recipe in producers:
        settings = recipe.settings
        Configuration(recipe.k, settings["staged_blocks"], settings["rows"], settings["group_tiles"]).plan(
            recipe.batch
        )


def test_quick_bundles_are_small_and_blackwell_has_its_own_engine() -> None:
    quick = recipes("sm_90a", quick=True)
    assert {(r.k, r.batch) for r in quick} == {(k, m) for k in (768, 1536) for m in (1, 8, 64)}
    assert {recipe.engine for recipe in recipes("sm_100a", quick=True)} == {"producer", "direct", "umma"}
    assert {recipe.engine for recipe in quick} == {"producer", "direct", "wgmma"}
    with pytest.raises(ValueError, match="target = 'sm_80': choose from"):
        recipes("sm_80")


def test_corners_hold_the_fewest_and_most_staged_blocks() -> None:
    every = [Configuration(768, *numbers) for numbers in configurations(768)]
    ring = [config for config in corners(every) if (config.rows, config.group_tiles) == (1, 1)]
    assert [config.staged_blocks for config in ring][:: len(ring) - 1] == [0, 6]


def test_a_bundle_reads_back_as_it_was_written(made: Bundle) -> None:
    assert bundle.load(made.directory) == made
    (entry,) = made.entries
    assert made.program(entry).config["transport"] == "unicast:2"
    assert {case.kind for case in entry.expected} == {"random", "nan"}
    assert all(0 < case.error < 2.5e-3 for case in entry.expected)


def test_bundles_that_do_not_hold_together(made: Bundle, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="oproj_lib build --target sm_90a --out"):
        bundle.load(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match="is not empty and holds no bundle"):
        bundle.build("sm_90a", tmp_path, chosen=[RECIPE])
    folder = copy(made, tmp_path / "old")
    index = folder / bundle.INDEX
    index.write_text(index.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(ValueError, match="is no bundle of this version: format 99, this version reads 1"):
        bundle.load(folder)
    index.write_text("{}")
    with pytest.raises(ValueError, match="is no bundle of this version"):
        bundle.load(folder)


def test_a_wrong_expectation_is_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from oproj_lib import delivery

    monkeypatch.setattr(delivery, "judge", lambda *_: (1.0, ["wrong result: planted"]))
    with pytest.raises(RuntimeError, match="random: the virtual GPU found wrong result: planted"):
        bundle.build("sm_90a", tmp_path / "new", chosen=[RECIPE])
    assert bundle.load(tmp_path / "new").entries == ()


def test_an_interrupted_build_goes_on(made: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is kept, unless the virtual GPU or the inputs changed; nothing is simulated again."""
    folder = copy(made, tmp_path / "again")
    lines: list[str] = []
    simulated: list[str] = []
    expected = made.entries[0].expected

    def expect(program: Program, recipe: Recipe, kind: str) -> bundle.Expected:
        simulated.append(kind)
        return expected[recipe.kinds.index(kind)]

    monkeypatch.setattr(bundle, "expect", expect)
    again = bundle.build("sm_90a", folder, chosen=[RECIPE], progress=lines.append)
    assert again == replace(made, directory=folder, date=again.date)
    assert lines == [f"1 of 1: {RECIPE.label} (kept)"] and simulated == []
    bundle.build("sm_90a", folder, chosen=[replace(RECIPE, kinds=("random",))], progress=lines.append)
    assert simulated == ["random"]
    monkeypatch.setattr(bundle, "versions", lambda: {**made.versions, "virtual GPU": "another"})
    bundle.build("sm_90a", folder, chosen=[replace(RECIPE, kinds=("random",))], progress=lines.append)
    assert simulated == ["random", "random"] and lines[-1].endswith("(built)")


# ---- check ----


def test_check_on_hardware_that_agrees(
    made: Bundle, on_stand_in: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "check.json"
    arguments = [
        "check",
        "--programs",
        str(made.directory),
        "--out",
        str(out),
        "--launches",
        "2",
        "--part",
        "programs",
    ]
    assert main(arguments) == EXIT_OK
    assert "2 of 2 programs and inputs bit-identical over 4 launches" in capsys.readouterr().out
    data = hardware_check.read_data(out)
    assert [(case["kind"], case["identical"], case["ok"]) for case in data["cases"]] == [
        ("random", True, True),
        ("nan", True, True),
    ]
    source = provenance.read_provenance(data["provenance"])
    assert (source.gpu, source.driver, source.multiprocessors) == ("NVIDIA stand-in", "580.1", 132)
    assert set(source.clocks) == {"before", "after"} and source.packages["torch"]
    assert data["bundle"]["versions"]["nvidia-cutlass-dsl"].startswith("4.8.")


def flip(launches: set[int]) -> Callable[[int, np.ndarray], None]:
    """One bit of one element wrong in these launches."""

    def spoil(number: int, out: np.ndarray) -> None:
        if number in launches:
            out[0, 7] ^= 1

    return spoil


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({1, 2}, "the bits differ from the virtual GPU's: SHA-256 "),
        ({2}, "launch 2 differs from launch 1 in 1 elements of rank 0's mailbox"),
    ],
)
def test_one_wrong_bit_is_found(made: Bundle, tmp_path: Path, wrong: set[int], message: str) -> None:
    results = hardware_check.check_bundle(made, stand_in(made, flip(wrong)), launches=2, keep=tmp_path)
    assert [result.ok for result in results] == [False, True]
    assert results[0].findings[0].startswith(message)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ([f"{RECIPE.label}-random.npy"] if 1 in wrong else [])


def test_a_difference_is_exit_code_1(
    made: Bundle, on_stand_in: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda, "Gpu", lambda index: stand_in(made, flip({1})))
    arguments = ["check", "--programs", str(made.directory), "--launches", "1", "--part", "programs"]
    assert main(arguments) == EXIT_FOUND
    shown = capsys.readouterr().out
    assert "DIFFERENT" in shown and "1 of 2 programs and inputs bit-identical" in shown


def test_other_random_numbers_are_no_difference_of_the_gpu(made: Bundle, tmp_path: Path) -> None:
    folder = copy(made, tmp_path / "other")
    index = folder / bundle.INDEX
    fields = json.loads(index.read_text())
    fields["entries"][0]["expected"][0]["weight_sha256"] = "0" * 64
    index.write_text(json.dumps(fields))
    other = bundle.load(folder)
    with pytest.raises(
        ValueError, match=r"weight for .* differs from the bundle's: the random numbers of numpy"
    ):
        hardware_check.check_bundle(other, stand_in(made), launches=1)


def test_a_changed_cubin_is_noticed(made: Bundle, tmp_path: Path) -> None:
    folder = copy(made, tmp_path / "changed")
    with (folder / bundle.PROGRAMS / RECIPE.label / "kernel.cubin").open("ab") as cubin:
        cubin.write(b"\0")
    with pytest.raises(ValueError, match="SHA-256 differs"):
        hardware_check.check_bundle(bundle.load(folder), stand_in(made))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "--device", "vgpu"), "device = 'vgpu': check compares a GPU with the virtual GPU"),
        (("check", "--part", "half"), "part = 'half' is unknown; choose one of all, programs, conformance"),
        (("check", "--programs", "nowhere"), "no bundle.json in nowhere"),
        (("build", "--out", "x", "--part", "half"), "part = 'half' is unknown"),
        (("bench", "--device", "tpu"), "device = 'tpu': choose vgpu or cuda"),
        (
            ("bench", "--device", "cuda", "--ranks", "16"),
            "--ranks does not belong to bench --device cuda; it has --pro",
        ),
        (
            ("bench", "--programs", "x"),
            "--programs does not belong to bench --device vgpu; it has --ranks, --batch",
        ),
        (("bench", "--device", "cuda", "--k", "many"), "--k = 'many': numbers with commas between"),
        (("bench", "--device", "cuda", "--rounds", "0"), "rounds = 0: at least 1"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(arguments) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_what_the_unit_kernels_need_is_checked_before_a_gpu_is_touched(
    made: Bundle, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = ["check", "--programs", str(made.directory)]
    assert main(check) == EXIT_USAGE
    assert "has no unit kernels: build it with --part all" in capsys.readouterr().err
    assert main([*check, "--gpu", "1"]) == EXIT_USAGE
    assert "--gpu 1: the unit kernels run on GPU 0" in capsys.readouterr().err
    monkeypatch.setattr(cli_hardware.importlib.util, "find_spec", lambda name: None)
    assert main(check) == EXIT_USAGE
    assert "pip install numba, or --part programs" in capsys.readouterr().err


def test_launches_are_at_least_one(made: Bundle) -> None:
    with pytest.raises(ValueError, match="launches = 0: at least 1"):
        hardware_check.check_bundle(made, stand_in(made), launches=0)


# ---- provenance ----


def test_nvidia_smi_is_read_by_field() -> None:
    line = "NVIDIA H200, 580.159.04, 96.00, 1980 MHz, 3201 MHz, 1980 MHz, 700.00 W, 31, P0\n"
    assert provenance.parse_smi(line)["clocks.sm"] == "1980 MHz"
    with pytest.raises(DeviceError, match="nvidia-smi gave 1 of 9 fields"):
        provenance.parse_smi("No devices were found\n")


def test_without_nvidia_smi_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance.shutil, "which", lambda name: None)
    with pytest.raises(DeviceError, match="nvidia-smi is not on the PATH"):
        provenance.smi()


def test_provenance_fields_are_checked() -> None:
    with pytest.raises(ValueError, match=r"provenance lacks .*'gpu'.* and has unknown \['x'\]"):
        provenance.read_provenance({"x": 1})


def test_data_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"what": "something", "format": 1}')
    with pytest.raises(ValueError, match="is no data file of `check` in format 1"):
        hardware_check.read_data(path)
