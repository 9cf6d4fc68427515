"""The command line: `python -m oproj_lib doctor | run | ptx | build | check | ranks | bench | demo | book`.

Exit codes: 0 all right; 1 something was found or is out of tolerance; 2 the request itself makes no sense.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from oproj_lib.cli_hardware import (
    add_bench_options,
    add_build_command,
    add_check_command,
    bench_on_cuda,
    check_bench_options,
)
from oproj_lib.cli_ranks import add_ranks_command
from oproj_lib.devices import CudaError

NOTEBOOKS = Path("notebooks")
DEMO_NOTEBOOK = "00_start_here.ipynb"
EXIT_OK, EXIT_FOUND, EXIT_USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. What a user got wrong is one line on stderr."""
    arguments = parser().parse_args(argv)
    try:
        code: int = arguments.command(arguments)
    except (ValueError, FileNotFoundError, CudaError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return code


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m oproj_lib", description="The o_proj workbook.")
    commands = top.add_subparsers(required=True, metavar="command")

    doctor = commands.add_parser("doctor", help="what this machine can do, and where each engine will run")
    doctor.add_argument("--json", action="store_true", help="one JSON object")
    doctor.set_defaults(command=doctor_command)

    run = commands.add_parser(
        "run", help="build an engine, run it over the full grid, check it against float64"
    )
    add_run_options(run)
    run.set_defaults(command=run_command)

    ptx = commands.add_parser(
        "ptx",
        help="run anybody's PTX on the virtual GPU",
        epilog=PTX_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_ptx_options(ptx)
    ptx.set_defaults(command=ptx_command)

    add_build_command(commands)
    add_check_command(commands)
    add_ranks_command(commands)

    bench = commands.add_parser(
        "bench",
        help="how fast the virtual GPU is on this machine, or with --device cuda the kernels on a GPU",
    )
    add_bench_options(bench)
    bench.add_argument(
        "--ranks", type=int, default=8, help="tensor-parallel ranks, 8 or 16 (default 8: K = 1536)"
    )
    bench.add_argument("-m", "--batch", type=int, default=8, help="tokens, 1 to 64 (default 8)")
    bench.add_argument("--target", default="sm_90a", help="sm_90a or sm_100a (default sm_90a)")
    bench.add_argument(
        "--repeat", type=int, default=5, help="launches per mode; the median is shown (default 5)"
    )
    bench.add_argument("--json", action="store_true", help="one JSON object")
    bench.set_defaults(command=bench_command)

    demo = commands.add_parser("demo", help="run the start notebook; print its results and where the page is")
    demo.add_argument(
        "--output",
        default="build/demo",
        help="folder for the executed notebook and its page (default build/demo)",
    )
    demo.set_defaults(command=demo_command)

    book = commands.add_parser("book", help="run every notebook and build the HTML book")
    book.add_argument("--output", default="build/book", help="folder for the book (default build/book)")
    book.set_defaults(command=book_command)
    return top


def add_run_options(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "-e",
        "--engine",
        help="producer, umma or wgmma (default: the preset's; producer where a setting is given)",
    )
    run.add_argument("-d", "--device", default="auto", help="auto, vgpu or cuda (default auto)")
    run.add_argument("-t", "--target", help="sm_90a or sm_100a (default sm_90a; sm_100a for umma)")
    run.add_argument(
        "-r",
        "--ranks",
        type=int,
        default=8,
        help="tensor-parallel ranks: 8 (K = 1536) or 16 (K = 768); default 8",
    )
    run.add_argument("-m", "--batch", type=int, default=8, help="tokens, 1 to 64 (default 8)")
    run.add_argument(
        "--rows", type=int, help="16-row tiles per warp: 1, 2 or 4 (default: recommended for K and M)"
    )
    run.add_argument(
        "--staged-blocks", type=int, help="K blocks per warp in shared memory (default: recommended)"
    )
    run.add_argument(
        "--group-tiles", type=int, help="8-token tiles per ring group, 0 for no ring (default: recommended)"
    )
    run.add_argument(
        "--preset", help="recommended or tuned (default: tuned on a GPU when no engine or setting is given)"
    )
    run.add_argument("--budget", type=int, help="umma, wgmma: bytes of the ring (default: the engine's)")
    run.add_argument(
        "--transport", help="multicast or unicast (default: multicast on the virtual GPU, unicast on a GPU)"
    )
    run.add_argument("-s", "--seed", type=int, default=0, help="seed of the inputs (default 0)")
    run.add_argument(
        "--inputs", default="random", help="kind of inputs: random, negative_zero, nan, ... (default random)"
    )
    run.add_argument(
        "--schedule", default="program", help='"program" or an integer seed: the order in which warps run'
    )
    run.add_argument("--exact", action="store_true", help="tensor-core arithmetic bit for bit")
    run.add_argument("--checks", action="store_true", help="track undefined data and races")
    run.add_argument("--json", action="store_true", help="one JSON object")


def as_schedule(text: str) -> str | int:
    if text == "program":
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f'schedule = {text!r}: choose "program" or an integer seed') from None


def doctor_command(arguments: argparse.Namespace) -> int:
    from oproj_lib import doctor

    machine = doctor.examine()
    if arguments.json:
        print(json.dumps(machine.as_dict()))
    else:
        Console().print(doctor.render(machine))
    return EXIT_OK


PRODUCER_SETTINGS = ("rows", "staged_blocks", "group_tiles")
PRODUCER_OPTIONS = (*PRODUCER_SETTINGS, "preset")
RING_OPTIONS = ("budget",)


def run_command(arguments: argparse.Namespace) -> int:
    from oproj_lib.run import ENGINES, run_producer, run_projection, run_umma, run_wgmma

    engine = arguments.engine or "producer"
    if engine not in ENGINES:
        raise ValueError(f"engine = {engine!r} is unknown; choose one of {', '.join(ENGINES)}")
    ring = engine != "producer"
    own, foreign = (RING_OPTIONS, PRODUCER_OPTIONS) if ring else (PRODUCER_OPTIONS, RING_OPTIONS)
    for option in foreign:
        if getattr(arguments, option) is not None:
            names = ", ".join("--" + name.replace("_", "-") for name in own)
            flag = "--" + option.replace("_", "-")
            raise ValueError(f"{flag} does not belong to engine {engine}; it has {names}")
    settings = {name: getattr(arguments, name) for name in own}
    settings["target"] = arguments.target or ("sm_100a" if engine == "umma" else "sm_90a")
    for name in ("ranks", "batch", "device", "transport", "seed", "inputs", "exact", "checks"):
        settings[name] = getattr(arguments, name)
    run: dict[str, Callable[..., Any]] = {
        "producer": run_producer, "umma": run_umma, "wgmma": run_wgmma
    }  # fmt: skip
    chooses = run[engine]
    if not arguments.engine and all(settings[name] is None for name in PRODUCER_SETTINGS):
        chooses = run_projection
        for name in PRODUCER_SETTINGS:
            del settings[name]
    result = chooses(**settings, schedule=as_schedule(arguments.schedule))
    if arguments.json:
        print(json.dumps(result.as_dict()))
    else:
        from oproj_lib.tables import result_table

        console = Console()
        console.print(result_table([result]))
        if result.chosen and (arguments.preset or result.device == "cuda"):  # else it is the plainest build
            console.print(result.chosen, markup=False, highlight=False)
        for finding in result.findings:
            console.print(finding, style="red", markup=False, highlight=False)
    return EXIT_OK if result.ok else EXIT_FOUND


def bench_command(arguments: argparse.Namespace) -> int:
    check_bench_options(arguments)
    if arguments.device == "cuda":
        return bench_on_cuda(arguments)
    from oproj_lib.bench.vgpu import measure
    from oproj_lib.tables import bench_table

    result = measure(
        ranks=arguments.ranks,
        batch=arguments.batch,
        target=arguments.target,
        repeat=arguments.repeat,
        progress=not arguments.json,
    )
    if arguments.json:
        print(json.dumps(result.as_dict()))
    else:
        Console().print(bench_table(result))
    return EXIT_OK


def demo_command(arguments: argparse.Namespace) -> int:
    from oproj_lib.notebooks import run_notebook

    source = NOTEBOOKS / DEMO_NOTEBOOK
    if not source.exists():
        raise FileNotFoundError(f"{source} is not here; run this from the repository's top folder")
    run = run_notebook(source, output_dir=arguments.output, progress=True)
    for text in run.results:
        print(text)
    print(f"The page: {run.html}")
    return EXIT_OK


def book_command(arguments: argparse.Namespace) -> int:
    from oproj_lib.book import build_book

    if not NOTEBOOKS.is_dir():
        raise FileNotFoundError(f"no folder {NOTEBOOKS}/ here; run this from the repository's top folder")
    index = build_book(NOTEBOOKS, arguments.output, on_page=lambda run: print(f"  {run.html}", flush=True))
    print(f"The book: {index}")
    return EXIT_OK


PTX_HELP = """arguments, in the order of the kernel's parameters: --arg i32:512             a number (i32,
u32, i64, u64, f32, f64, ...) --arg data.npy            an array from a file --arg random:f32:1024     a new
array: random, zeros, ones, arange or empty (undefined), then its type and shape (32x64) results: --save
2=out.npy          writes argument 2 after the launch example: python -m oproj_lib ptx add.ptx --entry add
--grid 4 --block 256 \\ --arg random:f32:1024 --arg random:f32:1024 --arg empty:f32:1024 --arg i32:1024 --save
2=sum.npy"""


def add_ptx_options(ptx: argparse.ArgumentParser) -> None:
    ptx.add_argument("file", help="a PTX file")
    ptx.add_argument("--entry", help="the kernel (default: the only one)")
    ptx.add_argument("--grid", default="1", help="CTAs: X, X,Y or X,Y,Z")
    ptx.add_argument("--block", default="1", help="threads per CTA: X, X,Y or X,Y,Z")
    ptx.add_argument("--arg", action="append", default=[], metavar="VALUE", help="an argument (see below)")
    ptx.add_argument(
        "--save", action="append", default=[], metavar="I=FILE", help="save array argument I as FILE.npy"
    )
    ptx.add_argument("--shared", type=int, default=0, help="dynamic shared memory, bytes")
    ptx.add_argument("--schedule", default="program", help='"program" or an integer seed')
    ptx.add_argument("--seed", type=int, default=0, help="seed of random arguments")
    ptx.add_argument("--exact", action="store_true", help="tensor-core arithmetic bit for bit")
    ptx.add_argument("--no-checks", action="store_true", help="do not track undefined data and races")
    ptx.add_argument("--json", action="store_true", help="one JSON object")


def ptx_command(arguments: argparse.Namespace) -> int:
    from oproj_lib import vgpu
    from oproj_lib.ptx_arguments import parse_dimensions, parse_saves, upload_arguments

    text = Path(arguments.file).read_text()
    saves = parse_saves(arguments.save, len(arguments.arg))
    gpu = vgpu.VirtualGPU()
    values = upload_arguments(gpu, arguments.arg, arguments.seed)
    for index in saves:
        if not isinstance(values[index], vgpu.Buffer):
            raise ValueError(f"--save {index}=...: argument {index} is a number, only arrays can be saved")
    report = gpu.launch(
        vgpu.load(text), arguments.entry, grid=parse_dimensions(arguments.grid, "--grid"),
        block=parse_dimensions(arguments.block, "--block"), args=values, dynamic_shared_bytes=arguments.shared,
        schedule=as_schedule(arguments.schedule), exact=arguments.exact, checks=not arguments.no_checks,
    )  # fmt: skip
    for index, path in saves.items():
        import numpy as np

        np.save(path, values[index].array)
    if arguments.json:
        found = [finding.as_dict() for finding in report.findings]
        print(
            json.dumps(
                {
                    "entry": report.entry,
                    "seconds": report.seconds,
                    "findings": found,
                    "counters": report.counters.totals(),
                }
            )
        )
    else:
        print(report)
        for value in values:
            if isinstance(value, vgpu.Buffer):
                print(
                    f"{value.name}: {value.array.dtype} {value.array.shape}, first {value.array.reshape(-1)[:6]}"
                )
    return EXIT_OK if report.ok else EXIT_FOUND
