"""The commands for real GPUs: `build` (needs none), `check` and `bench --device cuda`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from tqdm.auto import tqdm

if TYPE_CHECKING:
    from oproj_lib.bundle import Bundle
    from oproj_lib.bundle_recipes import Recipe
    from oproj_lib.devices.cuda import Gpu

EXIT_OK, EXIT_FOUND = 0, 1
PARTS = ("all", "programs", "conformance")
BUILD_PARTS = (*PARTS, "consumers")
SWEEP = "sweep"
CHECK_PARTS = (*PARTS, SWEEP)
"""`all` is what a bundle holds; the sweep compiles every configuration where the GPU is."""
LAUNCHES, QUICK_LAUNCHES = 20, 3
SHOWN = 40
"""Findings that are printed; the data file has all."""


def add_build_command(commands: Any) -> None:
    build = commands.add_parser(
        "build",
        help="compile the programs of `check` and `bench --device cuda` into a folder; needs no GPU",
    )
    build.add_argument("--out", required=True, help="a new folder, to be carried to the machine with the GPU")
    build.add_argument("-t", "--target", default="sm_90a", help="sm_90a or sm_100a (default sm_90a)")
    build.add_argument("--quick", action="store_true", help="only the recommended programs at M = 1, 8, 64")
    build.add_argument(
        "--part",
        default="all",
        help=f"{', '.join(BUILD_PARTS)} (default all; consumers: chains for `bench --consumer reduce` and attnres, "
        "beside what is in the folder)",
    )
    build.set_defaults(command=build_command)


def add_check_command(commands: Any) -> None:
    check = commands.add_parser(
        "check", help="run every program of a bundle on the GPU and compare bit for bit with the virtual GPU"
    )
    check.add_argument(
        "-d", "--device", default="cuda", help="cuda (the only one: vgpu is what it compares with)"
    )
    check.add_argument(
        "--programs", help="a folder from `build` (default: build one now, which needs CuTe DSL)"
    )
    check.add_argument("--out", help="data file (JSON) with machine, versions, date and every result")
    check.add_argument(
        "--launches", type=int, help=f"per program and kind of inputs (default {LAUNCHES}; 2 in a sweep)"
    )
    check.add_argument("--quick", action="store_true", help="3 launches each; builds the quick bundle")
    check.add_argument("--part", default="all", help=f"{', '.join(CHECK_PARTS)} (default all)")
    check.add_argument("--gpu", type=int, default=0, help="index of the GPU (default 0)")
    check.add_argument("--jobs", type=int, help="sweep: processes that compile (default: one per processor)")
    check.add_argument(
        "--limit-seconds", type=float, help="sweep: stop after this time, all configurations seen"
    )
    check.add_argument(
        "--machine-code", action="store_true", help="sweep: disassemble every producer too (needs nvdisasm)"
    )
    check.set_defaults(command=check_command)


def add_bench_options(bench: argparse.ArgumentParser) -> None:
    """The options of `bench` that belong to --device cuda."""
    bench.add_argument("-d", "--device", default="vgpu", help="vgpu or cuda (default vgpu)")
    bench.add_argument("--programs", help="cuda: a folder from `build` (default: build one now)")
    bench.add_argument("--out", help="cuda: data file (JSON) with machine, versions, date and every number")
    bench.add_argument("--batches", help="cuda: tokens, such as 1,8,64 (default: all in the folder)")
    bench.add_argument("--k", help="cuda: 768, 1536 or both (default 768,1536)")
    bench.add_argument(
        "--alternatives",
        help="cuda: what to measure beside the folder's programs, or none (default: all but compile)",
    )
    bench.add_argument("--rounds", type=int, default=3, help="cuda: passes over everything (default 3)")
    bench.add_argument("--replays", type=int, default=30, help="cuda: graph replays per pass (default 30)")
    bench.add_argument(
        "--carveout",
        default="100",
        help="cuda: percent of L1 that the chain leaves to shared memory, or driver (default 100)",
    )
    bench.add_argument(
        "--consumer",
        default="next",
        help="cuda: what follows in the chain: next, copy, or with its mailbox reduce or attnres (default next)",
    )
    bench.add_argument(
        "--predecessor",
        default="spin",
        help="cuda: what comes before in the chain: spin leaves the memory alone, read reads 35 MB (default spin)",
    )
    bench.add_argument("--quick", action="store_true", help="cuda: the quick bundle, 1 pass of 10 replays")
    bench.add_argument("--gpu", type=int, default=0, help="cuda: index of the GPU (default 0)")


VGPU_BENCH = {"ranks": 8, "batch": 8, "target": "sm_90a", "repeat": 5, "json": False}
CUDA_BENCH = {"programs": None, "out": None, "batches": None, "k": None, "alternatives": None, "rounds": 3,
              "replays": 30, "quick": False, "carveout": "100", "consumer": "next", "predecessor": "spin",
              "gpu": 0}  # fmt: skip
"""Options of `bench` that belong to one device, with their defaults."""


def check_bench_options(arguments: argparse.Namespace) -> None:
    """Raises ValueError for an unknown device, and for an option that would change nothing there."""
    if arguments.device not in ("vgpu", "cuda"):
        raise ValueError(f"device = {arguments.device!r}: choose vgpu or cuda")
    own, foreign = (CUDA_BENCH, VGPU_BENCH) if arguments.device == "cuda" else (VGPU_BENCH, CUDA_BENCH)
    for name, default in foreign.items():
        if getattr(arguments, name) != default:
            have = ", ".join(f"--{option}" for option in own)
            raise ValueError(f"--{name} does not belong to bench --device {arguments.device}; it has {have}")


def bench_on_cuda(arguments: argparse.Namespace) -> int:
    """Measure the bundle's timed programs and the alternatives; the data file is written after every size."""
    from oproj_lib import provenance
    from oproj_lib.bench import alternatives, hardware, measure, results
    from oproj_lib.devices.cuda import Gpu

    names = alternatives.chosen(arguments.alternatives, arguments.consumer)
    ks = numbers(arguments.k or "768,1536", "--k")
    batches = numbers(arguments.batches, "--batches") if arguments.batches else None
    rounds, replays = (1, 10) if arguments.quick else (arguments.rounds, arguments.replays)
    plan = hardware.Plan(
        rounds, replays, carveout_of(arguments.carveout), arguments.consumer, arguments.predecessor
    )
    gpu = Gpu(arguments.gpu)
    clocks = {"before": provenance.smi(arguments.gpu)}
    with bundle_for(arguments, gpu) as programs:
        problems = hardware.problems(programs, ks, batches, plan.consumer)
        ceilings = measure.ceilings(gpu)

        def session(jobs: tuple[results.JobResult, ...]) -> results.HardwareBench:
            clocks["after"] = provenance.smi(arguments.gpu)
            source = provenance.collect(gpu, command_line(arguments), clocks)
            return results.HardwareBench(
                source, ceilings, rounds, replays, plan.carveout, plan.consumer, jobs, plan.predecessor
            )

        with progress_bar("sizes", len(problems)) as step:

            def on_job(jobs: tuple[results.JobResult, ...]) -> None:
                if arguments.out:
                    results.write_bench(arguments.out, session(jobs))
                step("")

            jobs = hardware.measure_all(gpu, programs, problems, names, ceilings, plan, on_job)
    console = Console()
    for table in results.bench_tables(session(jobs), recorded=False):
        console.print(table)
    print(
        f"memory: copy {ceilings.copy_tb_s:.2f} TB/s (read and written), read {ceilings.read_tb_s:.2f} TB/s"
    )
    failures = hardware.failures(jobs)
    for line in failures:
        console.print(line, style="red", markup=False, highlight=False)
    return EXIT_FOUND if failures else EXIT_OK


def carveout_of(text: str) -> int | None:
    """`--carveout`: a percentage, None for "driver". Raises ValueError for anything else."""
    if text == "driver":
        return None
    if not text.isdecimal() or int(text) > 100:
        raise ValueError(f"--carveout = {text!r}: a percentage from 0 to 100, or driver")
    return int(text)


def numbers(text: str, option: str) -> list[int]:
    """Numbers from "1,8,64". Raises ValueError for anything else."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} = {text!r}: numbers with commas between, such as 1,8,64") from None


def check_part(part: str, choices: Sequence[str] = PARTS) -> str:
    if part not in choices:
        raise ValueError(f"part = {part!r} is unknown; choose one of {', '.join(choices)}")
    return part


def build_command(arguments: argparse.Namespace) -> int:
    from oproj_lib import bundle

    part = check_part(arguments.part, BUILD_PARTS)
    out = Path(arguments.out)
    if part == "consumers" and (out / bundle.INDEX).exists():
        made = bundle.load(out)
        if made.target != arguments.target:
            raise ValueError(
                f"{out} is a bundle for {made.target}: give --target {made.target}, or another folder"
            )
    else:
        chosen: Sequence[Recipe] | None = [] if part in ("conformance", "consumers") else None
        made = bundle.build(
            arguments.target,
            out,
            quick=arguments.quick,
            chosen=chosen,
            progress=lambda line: print(line, flush=True),
        )
    if part in ("all", "conformance"):
        build_conformance(arguments.target, out)
    if part == "consumers" or (part == "all" and not arguments.quick):
        from oproj_lib.bench import consumers

        consumers.build_consumers(arguments.target, out, progress=lambda line: print(line, flush=True))
    print(
        f"{len(made.entries)} programs in {out}; carry it to the GPU: python -m oproj_lib check --programs {out}"
    )
    return EXIT_OK


def build_conformance(target: str, out: Path) -> None:
    """The unit kernels' cubins beside the programs, with the virtual GPU's results."""
    from oproj_lib import conformance, conformance_on_cuda
    from oproj_lib.conformance import case, cubins

    if target != conformance_on_cuda.TARGET:
        print(f"unit kernels: for {conformance_on_cuda.TARGET} only, left out of a bundle for {target}")
        return
    cases = conformance.cases()
    cubins.build(out / conformance_on_cuda.FOLDER, cases, {one.name: case.expected(one) for one in cases})
    print(f"{len(cases)} unit kernels in {out / conformance_on_cuda.FOLDER}")


def check_command(arguments: argparse.Namespace) -> int:
    from oproj_lib import bundle, hardware_check, provenance
    from oproj_lib.devices.cuda import Gpu

    part = check_part(arguments.part, CHECK_PARTS)
    if arguments.device != "cuda":
        raise ValueError(
            f"device = {arguments.device!r}: check compares a GPU with the virtual GPU; choose cuda, or use "
            "`run --exact` for the virtual GPU alone"
        )
    if part == SWEEP:
        from oproj_lib.sweep.command import sweep

        return EXIT_OK if sweep(arguments) else EXIT_FOUND
    check_no_sweep_options(arguments)
    if arguments.programs:  # before a GPU is touched
        check_folder(bundle.load(arguments.programs).directory, part, arguments.gpu)
    gpu = Gpu(arguments.gpu)
    clocks = {"before": provenance.smi(arguments.gpu)}
    launches = LAUNCHES if arguments.launches is None else arguments.launches
    launches = min(QUICK_LAUNCHES, launches) if arguments.quick else launches
    results: tuple[hardware_check.CaseResult, ...] = ()
    units: list[Any] = []

    def write(programs: Bundle) -> str:
        """The data file as far as it is known; the title of the session."""
        clocks["after"] = provenance.smi(arguments.gpu)
        source = provenance.collect(gpu, command_line(arguments), clocks)
        if arguments.out:
            units_data = [{**dataclasses.asdict(unit), "ok": unit.ok} for unit in units]
            data = hardware_check.as_data(source, programs, results, units_data)
            Path(arguments.out).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        return source.title

    with bundle_for(arguments, gpu) as programs:
        if part != "conformance":
            keep = Path(arguments.out).with_suffix(".different") if arguments.out else None
            total = sum(len(entry.expected) for entry in programs.entries)
            with progress_bar("programs", total) as step:
                results = hardware_check.check_bundle(
                    programs, gpu, launches=launches, keep=keep, progress=step
                )
        title = write(programs)  # an error in the second part loses nothing of the first
        if part != "programs":
            with tempfile.TemporaryDirectory(prefix="oproj-conformance-") as scratch:
                raw = Path(arguments.out).with_suffix(".conformance") if arguments.out else Path(scratch)
                units = check_units(programs.directory, raw, gpu)
            title = write(programs)
    return report(title, results, units)


def check_no_sweep_options(arguments: argparse.Namespace) -> None:
    """Raises ValueError for an option that would change nothing in the other parts."""
    for name, default in (("jobs", None), ("limit_seconds", None), ("machine_code", False)):
        if getattr(arguments, name) != default:
            raise ValueError(f"--{name.replace('_', '-')} belongs to check --part {SWEEP}")


def check_folder(directory: Path, part: str, gpu: int) -> None:
    """Raises ValueError where the folder or this Python lacks what a part needs."""
    if part == "programs":
        return
    if importlib.util.find_spec("numba") is None:
        raise ValueError(
            "the unit kernels are compared with the virtual GPU: pip install numba, or --part programs"
        )
    if gpu:
        raise ValueError(f"--gpu {gpu}: the unit kernels run on GPU 0; use --part programs for another one")
    if not (directory / "conformance" / "cases.json").exists():
        raise ValueError(
            f"{directory} has no unit kernels: build it with --part all, or check --part programs"
        )


def report(title: str, results: Any, units: list[Any]) -> int:
    """Print what was found; the exit code."""
    from oproj_lib import hardware_check

    console = Console()
    if results:
        console.print(hardware_check.check_table(results, f"programs on {title}"))
    if units:
        from oproj_lib import conformance_on_cuda

        console.print(conformance_on_cuda.conformance_table(tuple(units), f"instructions on {title}"))
    lines = [f"{result.label}, {result.kind}: {line}" for result in results for line in result.findings]
    lines += [line for unit in units for line in unit.lines]
    for line in lines[:SHOWN]:
        console.print(line, style="red", markup=False, highlight=False)
    launches = sum(result.launches for result in results)
    same = sum(result.identical for result in results)
    print(
        f"{same} of {len(results)} programs and inputs bit-identical over {launches} launches; "
        f"{sum(unit.ok for unit in units)} of {len(units)} unit kernels agree; {len(lines)} findings"
    )
    return EXIT_FOUND if lines else EXIT_OK


def check_units(directory: Path, out: Path, gpu: Gpu) -> list[Any]:
    """The conformance suite, where the GPU is one that its cubins run on; raw results go to ``out``."""
    from oproj_lib import conformance, conformance_on_cuda
    from oproj_lib.doctor import CAPABILITY

    wanted = CAPABILITY[conformance_on_cuda.TARGET]
    if gpu.capability != wanted:
        print(
            f"unit kernels: built for {conformance_on_cuda.TARGET} only, and {gpu.name} has {gpu.capability}"
        )
        return []
    out.mkdir(parents=True, exist_ok=True)
    cases = {case.name: case for case in conformance.cases()}
    return list(conformance_on_cuda.check_conformance(directory / conformance_on_cuda.FOLDER, out, cases))


@contextmanager
def bundle_for(arguments: argparse.Namespace, gpu: Gpu) -> Iterator[Bundle]:
    """The bundle that was named, or one built now for this GPU in a folder that goes away."""
    from oproj_lib import bundle
    from oproj_lib.bench import consumers
    from oproj_lib.doctor import CAPABILITY

    if arguments.programs:
        yield bundle.load(arguments.programs)
        return
    target = next((name for name, capability in CAPABILITY.items() if capability == gpu.capability), None)
    if target is None:
        raise ValueError(f"{gpu.name} has compute capability {gpu.capability}: no engine is built for it")
    with tempfile.TemporaryDirectory(prefix="oproj-programs-") as folder:
        out = Path(folder, "bundle")
        consumer = getattr(arguments, "consumer", "next")
        made = bundle.build(
            target,
            out,
            quick=arguments.quick,
            chosen=[] if consumer in consumers.EXCHANGES else None,
            progress=lambda line: print(line, flush=True),
        )
        if consumer in consumers.EXCHANGES:
            consumers.build_consumers(target, out, progress=lambda line: print(line, flush=True))
        if getattr(arguments, "part", "programs") != "programs":
            build_conformance(target, out)
        yield made


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; call the result after each piece."""
    with tqdm(total=total, desc=what, leave=False) as bar:

        def step(name: str) -> None:
            bar.update()

        yield step


def command_line(arguments: argparse.Namespace) -> list[str]:
    """The command as it could be typed again, without what was left at its default."""
    import sys

    return ["python", "-m", "oproj_lib", *sys.argv[1:]]
