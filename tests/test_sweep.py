"""`check --part sweep`: which builds there are, what they must publish, the pool that compiles, and the comparison on a
stand-in GPU that answers rightly or wrongly."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stand_in_driver import Projections, StandIn, StandInGpu

from oproj_lib import provenance
from oproj_lib.bundle import sha256
from oproj_lib.bundle_recipes import Recipe, build_program
from oproj_lib.cli import EXIT_FOUND, EXIT_OK, EXIT_USAGE, main
from oproj_lib.conformance.document import document
from oproj_lib.devices import cuda
from oproj_lib.problem import KINDS, ROWS_PER_CTA
from oproj_lib.program import Program
from oproj_lib.run import SLOT, launch_on_vgpu
from oproj_lib.sweep import builds, command, expected, points, record
from oproj_lib.sweep.builds import Built
from oproj_lib.sweep.comparison import Comparison
from oproj_lib.sweep.points import TARGET, Member, Order

SMI = dict.fromkeys(provenance.SMI_FIELDS, "1") | {"driver_version": "580.1"}
ONE = Recipe(
    "producer", 16, 1, {"staged_blocks": 2, "rows": 1, "group_tiles": 0}, False, ("random", "nan"), 2
)
TINY = Member("producer-k768", "registers", (ONE, replace(ONE, kinds=("inf",))))


@pytest.fixture(scope="module")
def wanted() -> expected.Expectations:
    return expected.read()


@pytest.fixture(scope="module")
def program() -> Program:
    return build_program(ONE, TARGET)


# ---- which builds there are ----


def test_every_configuration_at_every_batch_size() -> None:
    """99 and 196 configurations of the producer (KERNELS: "What is checked"), and the other engines'."""
    found = points.members()
    members = Counter((member.recipes[0].engine, member.recipes[0].k) for member in found)
    assert members == {
        ("producer", 768): 99, ("producer", 1536): 196, ("direct", 768): 11, ("direct", 1536): 17,
        ("wgmma", 768): 4, ("wgmma", 1536): 4,
    }  # fmt: skip
    recipes = Counter((recipe.engine, recipe.k) for member in found for recipe in member.recipes)
    assert recipes[("producer", 768)] == 1472 and recipes[("producer", 1536)] == 1886
    assert recipes[("direct", 768)] == 11 * 6 and recipes[("wgmma", 1536)] == 4 * 16
    assert {recipe.kinds for member in found for recipe in member.recipes} == {KINDS}
    assert {member.path for member in found} == {"registers", "shared", "ring", "direct"}
    several = [member for member in found if len(member.recipes) > 1]
    assert len(several) > 300
    assert all({recipe.mailboxes for recipe in member.recipes} == {1, 2} for member in several)


def test_a_sweep_that_is_stopped_has_seen_all_configurations() -> None:
    found = points.members()
    every = points.points(found)
    labels = [recipe.label for recipe in every]
    assert len(set(labels)) == len(labels) == sum(len(member.recipes) for member in found)
    owner = {recipe.label: member.name for member in found for recipe in member.recipes}
    assert {owner[label] for label in labels[: len(found)]} == {member.name for member in found}
    assert {recipe.batch for recipe in every[: len(found)]} == set(points.BATCHES)


@pytest.mark.parametrize(
    ("engine", "settings", "order"),
    [
        ("producer", {"staged_blocks": 4, "rows": 1, "group_tiles": 0}, Order("mma.sync", 1536, 4, 4)),
        ("producer", {"staged_blocks": 4, "rows": 1, "group_tiles": 2}, Order("mma.sync", 1536, 4, 2)),
        ("producer", {"staged_blocks": 2, "rows": 4, "group_tiles": 1}, Order("mma.sync", 1536, 16, 1)),
        ("direct", {"staged_blocks": 1, "rows": 2}, Order("mma.sync", 1536, 8, 2)),
        ("wgmma", {"budget": 40000}, Order("wgmma", 1536)),
    ],
)
def test_what_the_order_of_a_sum_depends_on(engine: str, settings: dict[str, int], order: Order) -> None:
    """KERNELS: chains = max(1, 4 // (rows * max(1, group_tiles))), parts = 4 * rows."""
    assert points.order_of(Recipe(engine, 8, 8, settings, False)) == order


def test_other_engines_have_no_order() -> None:
    with pytest.raises(ValueError, match=r"engine = 'umma' has no mma\.sync configuration"):
        points.order_of(Recipe("umma", 8, 8, {}, False))


# ---- what they must publish ----


def test_expectations_are_complete(wanted: expected.Expectations) -> None:
    orders = {points.order_of(recipe) for member in points.members() for recipe in member.recipes}
    assert len(orders) == 13
    assert set(wanted.bits) == {(order, kind) for order in orders for kind in KINDS}
    assert all(set(bits.out) == set(points.BATCHES) for bits in wanted.bits.values())
    assert all(0 < bits.error < 2.5e-3 for bits in wanted.bits.values())
    random = {bits.out[64] for (_, kind), bits in wanted.bits.items() if kind == "random"}
    assert len(random) == 13  # another order, other bits


MEMBERS = [  # none of them is the build that was simulated for its order
    ("direct", 16, 3, {"staged_blocks": 1, "rows": 2}, "nan"),
    ("direct", 8, 2, {"staged_blocks": 12, "rows": 1}, "subnormal"),
    ("producer", 16, 2, {"staged_blocks": 6, "rows": 1, "group_tiles": 0}, "inf"),
    ("producer", 8, 1, {"staged_blocks": 12, "rows": 1, "group_tiles": 2}, "rounds_to_negative_zero"),
    ("producer", 8, 1, {"staged_blocks": 2, "rows": 4, "group_tiles": 0}, "cancellation"),
    ("wgmma", 16, 2, {"budget": 9216}, "negative_zero"),
]


@pytest.mark.parametrize(("engine", "ranks", "batch", "settings", "kind"), MEMBERS)
def test_other_builds_publish_what_is_expected(
    wanted: expected.Expectations, engine: str, ranks: int, batch: int, settings: dict[str, int], kind: str
) -> None:
    recipe = Recipe(engine, ranks, batch, settings, False)
    order = points.order_of(recipe)
    assert expected.simulated(points.members())[order].settings != settings
    out = published(recipe, wanted, kind)
    assert sha256(out) == wanted.bits[order, kind].out[batch]


@pytest.mark.parametrize(
    ("engine", "settings"),
    [("producer", {"staged_blocks": 4, "rows": 2, "group_tiles": 1}), ("wgmma", {"budget": 16384})],
)
def test_other_builds_at_64_tokens(
    wanted: expected.Expectations, engine: str, settings: dict[str, int]
) -> None:
    """One CTA's columns; other batch sizes take the first rows of the same run."""
    recipe = Recipe(engine, 8, 64, settings, False)
    order = points.order_of(recipe)
    columns = published(recipe, wanted, "random", ctas=1)
    assert sha256(columns) == wanted.bits[order, "random"].first_cta
    fewer = published(replace(recipe, batch=13), wanted, "random", ctas=1)
    assert np.array_equal(fewer.view(np.uint16), columns[:13].view(np.uint16))


def published(
    recipe: Recipe, wanted: expected.Expectations, kind: str, ctas: int | None = None
) -> np.ndarray:
    x, weight = wanted.draw(recipe.k, kind)
    x = x[: recipe.batch]
    mailboxes, _, _ = launch_on_vgpu(build_program(recipe, TARGET), x, weight, ranks=1, exact=True, ctas=ctas)
    columns = None if ctas is None else ctas * ROWS_PER_CTA
    return np.array(mailboxes[0].array[SLOT, :, :columns])


def test_other_random_numbers_are_noticed(wanted: expected.Expectations) -> None:
    inputs = {key: replace(one, x_sha256="0" * 64) for key, one in wanted.inputs.items()}
    with pytest.raises(ValueError, match="inputs for K = 768, random, differ from those of the expectations"):
        replace(wanted, inputs=inputs).draw(768, "random")


def test_an_order_that_nothing_simulates_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"no build for 64 tokens adds as .*k768-parts4-chains4"):
        expected.simulated([TINY])


def test_expectations_are_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an eighth of everything: one order, one kind, one token."""
    monkeypatch.setattr(expected, "KINDS", ("nan",))
    monkeypatch.setattr(expected, "MAX_BATCH", 1)
    monkeypatch.setattr(expected, "BATCHES", (1,))
    monkeypatch.setattr(expected, "members", lambda: [TINY])
    monkeypatch.setattr(expected, "seed_of", lambda kind: 1 + KINDS.index(kind))
    found = expected.read(expected.make(tmp_path / "expected.json"))
    ((order, kind), bits) = next(iter(found.bits.items()))
    assert (order, kind, bits.program) == (Order("mma.sync", 768, 4, 4), "nan", ONE.label)
    assert set(bits.out) == {1} and found.inputs[768, "nan"].seed == 5
    (tmp_path / "other.json").write_text('{"what": "other", "format": 1}')
    with pytest.raises(ValueError, match="does not hold the sweep's expectations in format 1"):
        expected.read(tmp_path / "other.json")
    monkeypatch.setattr("oproj_lib.delivery.judge", lambda *_: (1.0, ["wrong result: planted"]))
    with pytest.raises(RuntimeError, match="nan: the virtual GPU found wrong result: planted"):
        expected.make(tmp_path / "never.json")
    assert not (tmp_path / "never.json").exists()


# ---- builds ----


def test_a_build_that_fails_is_a_finding() -> None:
    built = builds.build_one(replace(ONE, settings={"staged_blocks": 99}))
    assert built.program is None
    assert built.problems[0].startswith("does not build: ValueError: staged_blocks = 99: a warp has")


def test_machine_code_is_read_where_asked_for(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    assert builds.build_one(ONE).machine_code is False
    good = builds.build_one(ONE, machine_code=True)
    assert good == replace(good, program=program, problems=(), machine_code=True)
    other = replace(program, config={**program.config, "staged_blocks": 3})  # 2 blocks are not above the wait
    monkeypatch.setattr(builds, "build_program", lambda recipe, target: other)
    assert "weight loads stand before ACQBULK" in builds.build_one(ONE, machine_code=True).problems[0]


def what_a_worker_sees(recipe: Recipe, machine_code: bool) -> Built:
    return Built(recipe, None, (os.environ["CUDA_VISIBLE_DEVICES"], str(os.getpid())), 0.0, machine_code)


def dies(recipe: Recipe, machine_code: bool) -> Built:
    os._exit(3)


def test_builds_in_other_processes_that_see_no_gpu() -> None:
    recipes = [replace(ONE, batch=batch) for batch in range(1, 10)]
    found = list(builds.build_all(recipes, 2, True, what_a_worker_sees))
    assert sorted(built.recipe.batch for built in found) == list(range(1, 10))
    assert {built.problems[0] for built in found} == {""}
    assert str(os.getpid()) not in {built.problems[1] for built in found}
    assert all(built.machine_code for built in found)


def test_a_process_that_dies_ends_the_sweep() -> None:
    with pytest.raises(BrokenProcessPool):
        list(builds.build_all([ONE], 1, False, dies))


def test_there_is_at_least_one_job() -> None:
    with pytest.raises(ValueError, match="jobs = 0: at least 1"):
        builds.build_all([ONE], 0)
    assert builds.default_jobs() >= 1


# ---- comparison ----


def stand_in(program: Program, spoil: Callable[[int, np.ndarray], None] = lambda n, out: None) -> StandInGpu:
    return StandInGpu(StandIn(Projections([program], spoil)))


def ready(program: Program) -> list[Built]:
    return [Built(ONE, program, (), 0.5, False)]


def test_hardware_that_agrees(wanted: expected.Expectations, program: Program) -> None:
    gpu = stand_in(program)
    comparison = Comparison(gpu, wanted, 2)
    comparison.run(ready(program) * 2)
    assert [result.findings for result in comparison.results] == [(), ()]
    assert [(result.launches, result.registers) for result in comparison.results] == [(4, 128), (4, 128)]
    run = gpu.api.driver.run
    assert [bool(launch.attributes) for launch in run.launches] == [True, False] * 4  # with and without PDL
    assert len(gpu.api.driver.named("cuModuleUnload")) == 2


def spoiled(launches: set[int], bits: int) -> Callable[[int, np.ndarray], None]:
    def spoil(number: int, out: np.ndarray) -> None:
        if number in launches:
            out[0, 7] = bits if bits == 0x8000 else out[0, 7] ^ bits

    return spoil


@pytest.mark.parametrize(
    ("launches", "bits", "message"),
    [
        ({1, 2}, 1, "random, launch 1: the bits differ from the virtual GPU's: SHA-256 "),
        ({2}, 1, "random, launch 2: the bits differ from the virtual GPU's: SHA-256 "),
        ({4}, 1, "nan, launch 2: the bits differ from the virtual GPU's: SHA-256 "),
        ({4}, 0x8000, "nan, launch 2: unwritten output: mailbox of rank 0: 1 elements never published"),
    ],
)
def test_one_wrong_bit_is_found(
    wanted: expected.Expectations, program: Program, launches: set[int], bits: int, message: str
) -> None:
    comparison = Comparison(stand_in(program, spoiled(launches, bits)), wanted, 2)
    comparison.run(ready(program))
    findings = comparison.results[0].findings
    assert findings[0].startswith(message) and comparison.results[0].launches == 4
    if 1 not in launches:  # a right launch came before: the difference has a place
        assert findings[-1].endswith("; 1 elements, first at token 0, column 7")


def test_a_stray_write_is_found(
    wanted: expected.Expectations, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slot 0 must stay armed; with a reference on the GPU already, too."""
    comparison = Comparison(stand_in(program), wanted, 1)
    comparison.run(ready(program))
    arm = cuda_arm()

    def spoil(publisher: Any) -> None:
        arm(publisher)
        publisher.mailboxes[1][0, 0, 0] = 1.0

    monkeypatch.setattr("oproj_lib.devices.publishing.Publisher.arm", spoil)
    comparison.run(ready(program))
    assert comparison.results[1].findings[0].startswith("random, launch 1: stray write: mailbox of rank 1")


def cuda_arm() -> Any:
    from oproj_lib.devices.publishing import Publisher

    return Publisher.arm


def test_what_does_not_build_is_not_launched(wanted: expected.Expectations, program: Program) -> None:
    gpu = stand_in(program)
    comparison = Comparison(gpu, wanted, 1)
    comparison.run([Built(ONE, None, ("does not build: planted",), 0.1, False)])
    assert comparison.results[0].findings == ("does not build: planted",)
    assert comparison.results[0].launches == 0 and not gpu.api.driver.named("cuModuleLoadData")
    with pytest.raises(ValueError, match="launches = 0: at least 1"):
        Comparison(gpu, wanted, 0)


def test_local_memory_is_a_finding(
    wanted: expected.Expectations, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oproj_lib.devices.cuda.Function.attribute", lambda self, name: 8)
    comparison = Comparison(stand_in(program), wanted, 1)
    comparison.run(ready(program))
    assert comparison.results[0].findings == (
        "the loaded code has 8 bytes of local memory per thread, expected none",
    )


# ---- the command ----


@pytest.fixture
def small_sweep(monkeypatch: pytest.MonkeyPatch, program: Program) -> StandIn:
    """One build, compared twice, compiled in this process."""

    def serially(recipes: Sequence[Recipe], jobs: int, machine_code: bool) -> Iterator[Built]:
        assert jobs == 3
        yield from (Built(recipe, program, (), 0.5, machine_code) for recipe in recipes)

    driver = StandIn(Projections([program]))
    monkeypatch.setattr(cuda, "Gpu", lambda index: StandInGpu(driver))
    monkeypatch.setattr(provenance, "smi", lambda index: SMI)
    monkeypatch.setattr(command, "members", lambda: [TINY])
    monkeypatch.setattr(command, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(builds, "build_all", serially)
    return driver


SWEEP = ["check", "--part", "sweep", "--jobs", "3"]


def test_the_command_writes_a_record(
    small_sweep: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep.json"
    assert main([*SWEEP, "--out", str(out)]) == EXIT_OK
    shown = capsys.readouterr().out
    assert "1 configurations, 2 builds in 3 processes" in shown and "1 of 2 builds, 0 findings" in shown
    data = record.read(out)
    assert shown.endswith(record.statement(data) + "\n")
    assert (data["planned"], data["compared"], data["stopped"], data["findings"]) == (2, 2, False, [])
    assert (data["launches"], data["launches_each"], data["kinds"]) == (6, 2, ["random", "nan", "inf"])
    assert data["build_seconds"] == 1.0 and data["options"] == {"jobs": 3, "limit_seconds": None}
    source = provenance.read_provenance(data["provenance"])
    assert source.gpu == "NVIDIA stand-in" and set(source.clocks) == {"before", "after"}
    assert len(data["checked"]) == 2 and [path.name for path in tmp_path.iterdir()] == ["sweep.json"]


def test_a_limit_ends_it_and_the_record_says_so(small_sweep: StandIn, tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    words = ["--out", str(out), "--limit-seconds", "0.001", "--launches", "1", "--machine-code"]
    assert main([*SWEEP, *words]) == EXIT_OK
    data = record.read(out)
    assert (data["planned"], data["compared"], data["stopped"], data["launches"]) == (2, 1, True, 2)
    assert data["checked"][-1] == record.MACHINE_CODE
    assert record.statement(data) == (
        "1 of 1 configurations, 1 of 2 builds, 2 launches with 2 kinds of inputs: 1 builds publish the bits of the "
        "virtual GPU in every launch, 0 findings"
    )


def test_a_difference_is_exit_code_1(
    small_sweep: StandIn, program: Program, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small_sweep.run = Projections([program], spoiled({1}, 1))
    assert main([*SWEEP, "--out", str(tmp_path / "sweep.json")]) == EXIT_FOUND
    assert "random, launch 1: the bits differ" in capsys.readouterr().out
    data = record.read(tmp_path / "sweep.json")
    assert data["findings"][0].startswith(f"{ONE.label}: random, launch 1: the bits differ")
    assert data["families"][0]["identical"] == 1 and data["families"][0]["builds_compared"] == 2


def test_an_error_of_the_gpu_loses_nothing(small_sweep: StandIn, program: Program, tmp_path: Path) -> None:
    """The second build's launch fails: the record has the first."""

    def break_down(number: int, out: np.ndarray) -> None:
        if number == 4:
            small_sweep.refuse["cuLaunchKernelEx"] = "CUDA_ERROR_LAUNCH_FAILED"

    small_sweep.run = Projections([program], break_down)
    assert main([*SWEEP, "--out", str(tmp_path / "sweep.json")]) not in (EXIT_OK, EXIT_FOUND)
    data = record.read(tmp_path / "sweep.json")
    assert (data["planned"], data["compared"], data["stopped"]) == (2, 1, False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*SWEEP, "--programs", "x"], "the sweep compiles every configuration itself: leave out --programs"),
        ([*SWEEP, "--quick"], "the sweep compiles every configuration itself"),
        (["check", "--part", "sweep", "--jobs", "0"], "--jobs 0: at least 1"),
        ([*SWEEP, "--launches", "0"], "--launches 0: at least 1"),
        ([*SWEEP, "--limit-seconds", "0"], "--limit-seconds 0: more than 0"),
        (["check", "--jobs", "2"], "--jobs belongs to check --part sweep"),
        (["check", "--limit-seconds", "2"], "--limit-seconds belongs to check --part sweep"),
        (["check", "--machine-code"], "--machine-code belongs to check --part sweep"),
        (
            ["build", "--out", "x", "--part", "sweep"],
            "part = 'sweep' is unknown; choose one of all, programs",
        ),
    ],
)
def test_mistakes_are_one_line(
    small_sweep: StandIn, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


def test_another_gpu_is_refused(small_sweep: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    small_sweep.attributes = small_sweep.attributes | {"COMPUTE_CAPABILITY_MAJOR": 10}
    assert main(SWEEP) == EXIT_USAGE
    assert (
        "the sweep builds for sm_90a, and NVIDIA stand-in has capability (10, 0)" in capsys.readouterr().err
    )


# ---- the record and the document ----


def test_the_document_has_the_record(
    small_sweep: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "DATA", tmp_path / "sweep.json")
    with pytest.raises(FileNotFoundError):
        document()
    assert main([*SWEEP, "--out", str(record.DATA)]) == EXIT_OK
    section = document().split("## Every configuration\n\n")[1]
    assert section.startswith(
        "1 of 1 configurations, 2 of 2 builds, 6 launches with 3 kinds of inputs: 2 builds"
    )
    assert "| producer | 768 | registers | 1 | 2 | 6 | 2 | 128 |" in section
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(ValueError, match="is no data file of the sweep in format 1"):
        record.read(tmp_path / "sweep.json")


def test_the_recorded_sweep_is_whole_and_agrees(wanted: expected.Expectations) -> None:
    data = record.read()
    assert data["findings"] == [] and data["planned"] == len(points.points(points.members()))
    assert all(one["configurations_compared"] == one["configurations"] for one in data["families"])
    assert all(one["identical"] == one["builds_compared"] for one in data["families"])
    assert data["kinds"] == list(KINDS) and data["expected"]["date"] == wanted.date
    assert data["provenance"]["gpu"] == "NVIDIA H200"
    builds, launches = (
        sum(one[name] for one in data["families"]) for name in ("builds_compared", "launches")
    )
    readme = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"{builds:,} builds in\n{launches:,} launches with seven kinds of inputs" in readme
    assert len(data["kinds"]) == 7
