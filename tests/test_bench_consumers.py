"""The benchmark's chains with a real consumer, without a GPU: their programs run on the virtual GPU behind the stand-in
driver, in the memory that each launch names, and the verdicts see what is wrong."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from stand_in_driver import Launch, StandIn, StandInGpu, bf16_at
from test_bench_cuda import synthetic_bench

from oproj_lib import bundle, cli, figures, measured_tables, vgpu
from oproj_lib.bench import alternatives, candidates, chain, consumers, hardware, measure, now
from oproj_lib.bench.measure import Ceilings, WrongOutputError
from oproj_lib.bundle import Bundle
from oproj_lib.bundle_recipes import consumer_plans
from oproj_lib.problem import Problem
from oproj_lib.program import Program
from oproj_lib.ranks import programs
from oproj_lib.run import decoded

PROBLEM = Problem(16, 1)  # K = 768
CEILINGS = Ceilings(copy_tb_s=4.0, read_tb_s=4.2)


def plans(engine: str, consumer: str) -> list[Any]:
    """Split and fused, K = 768, M = 1."""
    every = [plan for plan in consumer_plans("sm_90a") if (plan.k, plan.tokens) == (768, 1)]
    return [replace(plan, blocks=1) for plan in every if (plan.engine, plan.consumer) == (engine, consumer)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("bundle")
    bundle.build("sm_90a", folder, chosen=[])
    chosen = [*plans("direct", "reduce"), *plans("direct", "attnres")]
    consumers.build_consumers("sm_90a", folder, plans=chosen)
    return bundle.load(folder)


class Machine(StandIn):
    """Runs the programs on the virtual GPU, one after the other; the chain's small kernels in NumPy.

    spoil: called after every launch with the program's engine and its arrays by name.
    """

    def __init__(
        self, made: Bundle, spoil: Callable[[str, dict[str, np.ndarray]], None] = lambda engine, arrays: None
    ) -> None:
        super().__init__(self.execute)
        self.spoil = spoil
        self.programs: dict[bytes, Program] = {}
        for index in made.directory.glob(f"{consumers.FOLDER}/*/{programs.INDEX}"):
            for loaded in programs.load(programs.plan_of(index.parent), index.parent).values():
                self.programs |= {program.cubin: program for program in loaded}
        self.carveouts: dict[str, int] = {}
        self.log: list[str] = []

    def _cuModuleGetFunction(self, module: bytes, entry: bytes) -> tuple[SimpleNamespace]:
        return (SimpleNamespace(entry=entry.decode(), program=self.programs.get(module)),)

    def _cuFuncSetAttribute(self, function: Any, which: Any, value: int) -> tuple[()]:
        if "CARVEOUT" in which.name:
            self.carveouts[function.program.config["engine"] if function.program else function.entry] = value
        return ()

    def _cuLaunchKernelEx(self, config: Any, function: Any, pointers: int, extra: int) -> tuple[()]:
        self.program = function.program
        self.count = (
            len(self.program.parameters) if self.program else {"predecessor": 4, "empty": 0}[function.entry]
        )
        return super()._cuLaunchKernelEx(config, function, pointers, extra)

    def execute(self, launch: Launch) -> None:
        assert "PROGRAMMATIC_STREAM_SERIALIZATION" in launch.attributes
        if self.program is None:
            self.log.append(launch.entry)
            if launch.entry == "predecessor":
                x, source = (bf16_at(launch.value(i, ctypes.c_uint64), (1, 768)) for i in range(2))
                x[:] = source
            return
        engine = str(self.program.config["engine"])
        self.log.append(engine)
        gpu = vgpu.VirtualGPU()
        arguments: list[Any] = []
        arrays: dict[str, np.ndarray] = {}
        for i, parameter in enumerate(self.program.parameters):
            value = launch.value(i, ctypes.c_int32 if parameter.dtype == "int32" else ctypes.c_int64)
            if parameter.kind == "tensor":
                array = bf16_at(value, parameter.shape)
            elif parameter.name == "state":
                array = np.ctypeslib.as_array((ctypes.c_int32 * 1536).from_address(value)).reshape(3, 512)
            elif parameter.name == "mc":
                array = np.array([arguments[-1].address], np.int64)  # of the mailbox, in front of it
            else:
                arguments.append(value)
                continue
            arguments.append(gpu.upload(array, parameter.name))
            arrays[parameter.name] = arguments[-1].array
        report = gpu.launch(
            decoded(self.program), self.program.entry, grid=launch.grid, block=launch.block, args=arguments,
            dynamic_shared_bytes=launch.shared_bytes,
        )  # fmt: skip
        assert report.ok, report.findings
        self.spoil(engine, arrays)


class Replayed(measure.Graph):
    """Launches again where a graph would be replayed; samples are invented."""

    def sample(self, replays: int, warmup: int = 3) -> list[float]:
        return [{"precede": 9.0, "launch": 5.0, "repetition": 12.5}[self.graph.name]] * replays


def capture(launch: Callable[[int], None], launches: int) -> measure.Graph:
    def replay() -> None:
        for index in range(launches):
            launch(index)

    return Replayed(SimpleNamespace(replay=replay, name=launch.__name__), launches)


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "copies_needed", lambda weight, l2: 2)
    monkeypatch.setattr(hardware, "capture", capture)
    monkeypatch.setattr(chain, "capture", capture)


def measured(machine: Machine, made: Bundle, consumer: str, names: Sequence[str] = ()) -> Any:
    plan = hardware.Plan(1, 1, consumer=consumer)
    return hardware.measure_job(StandInGpu(machine), made, PROBLEM, names, CEILINGS, plan)


@pytest.mark.parametrize("consumer", ["reduce", "attnres"])
def test_a_chain_is_measured_and_checked(made: Bundle, consumer: str) -> None:
    machine = Machine(made)
    job = measured(machine, made, consumer, ("empty kernel",))
    assert [row.name for row in job.rows] == ["direct, split", "direct, fused", "empty kernel"]
    blocks = {"blocks": 1} if consumer == "attnres" else {}
    for row in job.rows[:2]:
        assert row.settings == {"staged_blocks": 0, "rows": 2, **blocks}
        assert row.exposed.median_us == pytest.approx(3.5) and row.alone and row.alone.median_us == 5.0
        assert row.error and 1e-4 < row.error < 2.5e-3
    name = {"reduce": "mailbox_reduce", "attnres": "attnres"}[consumer]
    fused = {"reduce": "fused_reduce", "attnres": "fused_attnres"}[consumer]
    assert machine.log[-4:] == ["predecessor", fused] * 2
    split = machine.log[: machine.log.index(fused)]
    assert split[-6:] == ["predecessor", "producer", name] * 2
    # The kernels around the projection leave it as much shared memory as they can; a projection asks for nothing.
    assert machine.carveouts == {"predecessor": 100, "consumer": 100, name: 100}


def candidate(machine: Machine, made: Bundle, consumer: str, which: int) -> Any:
    """Split (0) or fused (1), with a job of its own."""
    job = candidates.make_job(StandInGpu(machine), PROBLEM)
    return consumers.exchange_candidates(made, job, consumer, 100)[which]


def replay(one: Any, sources: Sequence[int]) -> float:
    """What `hardware.check` does, with launches in place of a graph."""
    one.arm(sources)
    for index, source in enumerate(sources):
        one.job.use(source)
        one.launch(index)
    return float(one.judge("x"))


def test_a_mailbox_that_is_not_armed_again_is_noticed(made: Bundle) -> None:
    machine = Machine(made)
    one = candidate(machine, made, "reduce", 0)
    assert replay(one, [0, 1]) < 2.5e-3
    assert one.published()[0] == 1  # two calls: generations 0 and 1

    def leave(engine: str, arrays: dict[str, np.ndarray]) -> None:
        if engine == "mailbox_reduce":
            arrays["mailbox"][0, 0, 3] = 1.0

    machine.spoil = leave
    with pytest.raises(WrongOutputError, match="x, mailbox: generation 0: 1 words are not armed again"):
        replay(one, [0])


def test_a_sum_with_a_wrong_last_bit_is_noticed(made: Bundle) -> None:
    def flip(engine: str, arrays: dict[str, np.ndarray]) -> None:
        if engine == "fused_reduce":
            arrays["out"].view(np.uint16)[0, 5] ^= 1

    message = "x: not the sum in rank order: 1 of 7168 elements, first token 0, column 5"
    with pytest.raises(WrongOutputError, match=message):
        replay(candidate(Machine(made, flip), made, "reduce", 1), [0])


def test_a_lost_repetition_and_a_wrong_result_are_noticed(made: Bundle) -> None:
    machine = Machine(made)
    one = candidate(machine, made, "attnres", 1)
    before = one.inputs.prefix.copy()
    machine.spoil = lambda engine, arrays: arrays["prefix"].__setitem__(slice(None), before)
    with pytest.raises(
        WrongOutputError, match="elements of the new prefix differ, first at token 0, column 0"
    ):
        replay(one, [0, 1])
    assert np.array_equal(one.inputs.prefix, before)

    def off(engine: str, arrays: dict[str, np.ndarray]) -> None:
        arrays["out"].view(np.uint16)[0, 7] ^= 2

    machine.spoil = off
    message = "1 outputs are off by more than rounding explains, worst at token 0, column 7"
    with pytest.raises(WrongOutputError, match=message):
        replay(one, [0])


# ---- the alternative ----


def test_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula in torch operations against float64, and one that leaves prefix alone is refused."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    job = candidates.make_job(StandInGpu(StandIn()), Problem(16, 3))
    one = alternatives.MAKERS[alternatives.MM_ATTNRES](alternatives.MM_ATTNRES, job)
    assert isinstance(one, consumers.MmThenAttnRes) and one.settings == {"blocks": 8}
    assert 1e-4 < replay(one, [0, 1, 0]) < 2.5e-3
    add = one.consume
    one.consume = lambda delta, prefix, *rest: add(delta, prefix.clone(), *rest)
    with pytest.raises(WrongOutputError, match="x: prefix: "):
        replay(one, [0, 1])


@pytest.mark.exhaustive
def test_torch_compiles_it() -> None:
    """By Inductor, for the CPU here: prefix and out are written in place."""
    job = candidates.make_job(StandInGpu(StandIn()), PROBLEM)
    assert replay(consumers.MmThenAttnRes("x", job, 8), [0, 1]) < 2.5e-3


def test_alternatives_belong_to_a_consumer() -> None:
    assert alternatives.chosen(None, "attnres") == ("torch.mm, then compiled AttnRes", "empty kernel")
    assert "torch.compile" in alternatives.chosen("all", "reduce")
    assert "torch.compile" not in alternatives.chosen(None, "reduce")
    with pytest.raises(ValueError, match="'mm' has no place in a chain with the consumer 'attnres'; choose"):
        alternatives.chosen("mm", "attnres")


# ---- bundles ----


def test_every_engine_at_three_sizes() -> None:
    found = consumer_plans("sm_90a")
    sizes = {(plan.engine, plan.k, plan.tokens) for plan in found}
    assert {size[0] for size in sizes} == {"producer", "direct", "wgmma"}
    assert {(k, m) for engine, k, m in sizes if engine == "wgmma"} == {
        (k, m) for k in (768, 1536) for m in (1, 8, 64)
    }
    assert {m for engine, _, m in sizes if engine == "direct"} == {1, 8}
    assert len({consumers.label(plan) for plan in found}) == len(found) == 64
    assert {plan.engine for plan in consumer_plans("sm_100a")} == {"producer", "direct", "umma"}


def test_sizes_that_are_not_there(made: Bundle, tmp_path: Path) -> None:
    assert hardware.problems(made, [768, 1536], None, "attnres") == [PROBLEM]
    with pytest.raises(
        ValueError, match=r"no chain with reduce for K in \[1536\] .* the bundle has K = 768 M = 1"
    ):
        hardware.problems(made, [1536], None, "reduce")
    with pytest.raises(
        FileNotFoundError, match="no programs with the consumer 'reduce': add them with `python -m"
    ):
        hardware.problems(replace(made, directory=tmp_path), [768], None, "reduce")
    with pytest.raises(ValueError, match=r"M = 2 is not measured with reduce; choose from \[1, 8, 64\]"):
        now.size_plans("sm_90a", Problem(16, 2), "reduce")
    assert len(now.size_plans("sm_90a", Problem(16, 1), "reduce")) == 6


def test_the_build_command_adds_consumers(
    made: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To a bundle that is there, whose programs stay, or to a new one without others."""
    built: list[tuple[str, Path]] = []
    monkeypatch.setattr(
        consumers, "build_consumers", lambda target, out, progress: built.append((target, out))
    )
    index = (made.directory / bundle.INDEX).read_text()
    assert cli.main(["build", "--part", "consumers", "--out", str(made.directory)]) == 0
    assert (made.directory / bundle.INDEX).read_text() == index
    assert cli.main(["build", "--part", "consumers", "--out", str(tmp_path / "new")]) == 0
    assert built == [("sm_90a", made.directory), ("sm_90a", tmp_path / "new")]
    assert bundle.load(tmp_path / "new").entries == ()
    assert cli.main(["build", "--part", "consumers", "-t", "sm_100a", "--out", str(made.directory)]) == 2
    assert "is a bundle for sm_90a: give --target sm_90a" in capsys.readouterr().err
    assert cli.main(["build", "--part", "smoke", "--out", str(tmp_path)]) == 2
    assert "choose one of all, programs, conformance, consumers" in capsys.readouterr().err


# ---- tables of recorded sessions ----


def test_tables_take_the_faster_form_beside_what_a_user_would_call() -> None:
    """On an invented session, never data."""
    bench = synthetic_bench()
    names = {"producer": "direct, split", "wgmma": "direct, fused", "torch.mm": alternatives.MM_ATTNRES}
    jobs = tuple(
        replace(job, rows=tuple(replace(row, name=names.get(row.name, row.name)) for row in job.rows))
        for job in bench.jobs
    )
    session = replace(bench, consumer="attnres", jobs=jobs)
    assert measured_tables.ours(session, 768, 8).name == "direct, split"  # 1.2 us, the other takes 2.0
    assert measured_tables.ratio(session, 768, 8) == pytest.approx(5.5 / 1.2)
    table = measured_tables.results_markdown(session)
    assert "| exposed | torch.mm, then compiled AttnRes | ratio |" in table
    assert "| 768 | 8 | direct, split | 1.20 | 5.50 | 4.58 |" in table
    with pytest.raises(
        ValueError, match="a projection with the consumer attnres at K = 768, M = 8 is not in this"
    ):
        measured_tables.ours(replace(bench, consumer="attnres"), 768, 8)
    with pytest.raises(
        ValueError, match="consumer = 'reduce' is not recorded; choose from next, or record it"
    ):
        measured_tables.session_of("reduce", {"next": bench})
    picture = figures.exposed(session)
    assert "K = 768, direct, split: M 1 1.2" in picture.alt and "attnres" in picture.alt


def test_the_notes_have_what_is_recorded() -> None:
    """After a new recording: `python -m oproj_lib.measured_tables`, into docs/latency.md."""
    notes = (Path(__file__).resolve().parents[1] / "docs" / "latency.md").read_text(encoding="utf-8")
    for consumer, session in measured_tables.recorded_consumers().items():
        assert session.consumer == consumer
        assert measured_tables.results_markdown(session) in notes, consumer
