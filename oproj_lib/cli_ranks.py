"""The command `ranks`: an exchange between virtual ranks, or between GPUs under torchrun."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

EXIT_OK, EXIT_FOUND = 0, 1
DEVICES = ("vgpu", "cuda")
ENGINE_TOKENS = 16
"""Largest number of tokens of a round by default where a virtual GPU multiplies: a full grid takes seconds."""
SHOWN = 20


def add_ranks_command(commands: Any) -> None:
    ranks = commands.add_parser(
        "ranks",
        help="ranks project, exchange partial sums and consume them, round after round; checked bit for bit",
        epilog="GPUs: torchrun --nproc-per-node R -m oproj_lib ranks --device cuda ...; or --device cuda --local "
        "--ranks R for R ranks on one GPU. Exit code: 0 right, 1 findings, 2 nothing was run, 3 a rank was lost",
    )
    add = ranks.add_argument
    add("-d", "--device", default="vgpu", help="vgpu or cuda (default vgpu)")
    add("-r", "--ranks", type=int, help="default 8; under torchrun the number of processes")
    add("--rounds", type=int, default=20, help="default 20")
    add("--shots", type=int, default=1, help="1 or 2 (default 1)")
    add(
        "-e",
        "--engine",
        default="producer",
        help="producer, umma, wgmma, or payload: given partial sums (default producer)",
    )
    add("-t", "--target", help="sm_90a or sm_100a (default sm_90a; sm_100a for umma)")
    add("--consumer", default="reduce", help="reduce or attnres (default reduce)")
    add("--fused", action="store_true", help="engine and consumer in one kernel")
    add(
        "--payload",
        default="random",
        help="random, nan, inf, ..., or nasty: all kinds in turn (default random)",
    )
    add("--tokens", type=int, default=64, help="capacity of the mailboxes, 1 to 64 (default 64)")
    add("--batches", help="numbers of tokens to choose from, such as 1,8,64 (default: four up to --tokens at random, "
        f"up to {ENGINE_TOKENS} where a virtual GPU multiplies)")  # fmt: skip
    add("--k", type=int, default=1536, help="columns of W on a rank (default 1536)")
    add("--blocks", type=int, default=1, help="attnres: earlier block outputs, 0 to 8 (default 1)")
    add("-s", "--seed", type=int, default=0, help="of inputs, order of batches and schedule (default 0)")
    add("--transport", help="multicast or unicast (default: multicast on the virtual GPU, unicast on GPUs)")
    add(
        "--ctas",
        type=int,
        help="vgpu: run only the first CTAs, each of which exchanges 64 columns (default: all)",
    )
    add("--in-flight", type=int, default=3, help="vgpu: most rounds enqueued at a time (default 3)")
    add("--skew", action="store_true", help="vgpu: ranks late and slow at random, random schedule")
    add("--checks", action="store_true", help="vgpu: track undefined data and races")
    add("--local", action="store_true", help="cuda: all ranks on one GPU, without torchrun")
    add("--gpu", type=int, default=0, help="cuda --local: index of the GPU (default 0)")
    add(
        "--multicast",
        action="store_true",
        help="cuda: publish through the multicast address of symmetric memory",
    )
    add(
        "--timeout",
        type=float,
        default=60.0,
        help="cuda: seconds until a rank that is missing ends the run (default 60)",
    )
    add(
        "--heartbeat",
        type=int,
        default=20,
        help="cuda: rounds between two checks that all ranks live (default 20)",
    )
    add("--programs", help="cuda: a folder that --build made; CuTe DSL is then not needed")
    add(
        "--suite",
        nargs="+",
        metavar="DIR",
        help="cuda, torchrun: folders that --build made, or folders of such, one after the other in one start, each "
        "with the options it was built with",
    )
    add("--build", metavar="DIR", help="only compile the programs of these options into a folder")
    add("--timeline", action="store_true", help="vgpu: when the grids of the last rounds ran")
    add("--json", action="store_true", help="JSON, a line per run")
    ranks.set_defaults(command=ranks_command, defaults=vars(ranks.parse_args([])))


VGPU_ONLY = {"ctas": None, "in_flight": 3, "skew": False, "checks": False, "timeline": False}
CUDA_ONLY = {
    "local": False, "gpu": 0, "multicast": False, "timeout": 60.0, "heartbeat": 20, "programs": None, "suite": None
}  # fmt: skip
"""Options of one device, with their defaults."""
SUITE = ("device", "suite", "timeout", "heartbeat", "json", "command")
"""Options that a suite leaves open."""


def check_options(arguments: argparse.Namespace) -> None:
    """Raises ValueError for an unknown device, and for an option that would change nothing there."""
    if arguments.device not in DEVICES:
        raise ValueError(f"device = {arguments.device!r}: choose one of {', '.join(DEVICES)}")
    foreign: Mapping[str, Any] = VGPU_ONLY if arguments.device == "cuda" else CUDA_ONLY
    for name, default in foreign.items():
        if getattr(arguments, name) != default:
            raise ValueError(
                f"--{name.replace('_', '-')} does not belong to ranks --device {arguments.device}"
            )
    if arguments.suite:
        check_suite_options(arguments)


def check_suite_options(arguments: argparse.Namespace) -> None:
    """Raises ValueError for an option of a single run beside --suite."""
    for name, default in arguments.defaults.items():
        if name not in SUITE and getattr(arguments, name) != default:
            raise ValueError(
                f"--{name.replace('_', '-')} beside --suite: every folder is run as it was built; give it with --build"
            )


def plan_of(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Any:
    """The plan that the options ask for. environment: torchrun's variables.

    Raises ValueError for what does not exist or does not fit.
    """
    from oproj_lib.cli_hardware import numbers
    from oproj_lib.ranks.plan import PAYLOAD, Plan, few_batches

    cuda = arguments.device == "cuda"
    world = int(environment.get("WORLD_SIZE", 0)) if cuda and not arguments.local else 0
    if cuda and not arguments.local and not world and not arguments.build:
        raise ValueError(
            "--device cuda needs one process per GPU: torchrun --nproc-per-node R -m oproj_lib ranks --device cuda, or "
            "--local for all ranks on one GPU"
        )
    if world and arguments.ranks not in (None, world):
        raise ValueError(
            f"--ranks {arguments.ranks} under torchrun with {world} processes: leave --ranks out"
        )
    most = arguments.tokens if cuda or arguments.engine == PAYLOAD else min(arguments.tokens, ENGINE_TOKENS)
    multicast = arguments.multicast if cuda else arguments.transport in (None, "multicast")
    if cuda and arguments.transport not in (None, "unicast"):
        raise ValueError(
            f"--transport {arguments.transport}: on GPUs choose --multicast, or nothing for unicast"
        )
    if arguments.transport not in (None, "multicast", "unicast"):
        raise ValueError(f"--transport {arguments.transport}: choose multicast or unicast")
    return Plan(
        ranks=world or (8 if arguments.ranks is None else arguments.ranks),
        rounds=arguments.rounds,
        shots=arguments.shots,
        engine=arguments.engine,
        target=arguments.target or ("sm_100a" if arguments.engine == "umma" else "sm_90a"),
        consumer=arguments.consumer,
        fused=arguments.fused,
        transport="multicast" if multicast else "unicast",
        tokens=arguments.tokens,
        batches=tuple(numbers(arguments.batches, "--batches"))
        if arguments.batches
        else few_batches(arguments.seed, most),
        k=arguments.k,
        payload=arguments.payload,
        seed=arguments.seed,
        ctas=arguments.ctas,
        in_flight=arguments.in_flight,
        blocks=arguments.blocks,
    )


def ranks_command(arguments: argparse.Namespace) -> int:
    check_options(arguments)
    if arguments.suite:
        from oproj_lib.ranks.programs import suite

        return under_torchrun(suite(arguments.suite), arguments)
    plan = plan_of(arguments, os.environ)
    if arguments.build:
        from oproj_lib.ranks import programs

        programs.save(plan, arguments.build, progress=lambda line: print(line, flush=True))
        return EXIT_OK
    if arguments.device == "cuda":
        return on_cuda(plan, arguments)
    from oproj_lib.ranks.virtual import run_virtual

    result = run_virtual(plan, skewed=arguments.skew, checks=arguments.checks)
    if arguments.timeline and not arguments.json:
        from oproj_lib import ranks

        Console().print(ranks.table(ranks.timeline(result.handles)))
    return report(result, arguments.json)


def on_cuda(plan: Any, arguments: argparse.Namespace) -> int:
    """Ranks on GPUs: all on one (--local), or one per process."""
    if arguments.local:
        from oproj_lib.ranks.local import run_local

        return report(run_local(plan, gpu=arguments.gpu, programs=arguments.programs), arguments.json)
    from oproj_lib.ranks.programs import Task

    return under_torchrun([Task(plan, arguments.programs)], arguments)


def under_torchrun(tasks: Sequence[Any], arguments: argparse.Namespace) -> int:
    """This process's rank of every task; each result is printed as soon as it is there, by rank 0, and by the others
    when they found something. EXIT_FOUND if any did."""
    from oproj_lib.ranks.distributed import run_distributed

    def show(result: Any) -> None:
        if result.rank == 0 or not result.ok:
            report(result, arguments.json)

    results = run_distributed(tasks, timeout=arguments.timeout, heartbeat=arguments.heartbeat, report=show)
    return EXIT_OK if all(result.ok for result in results) else EXIT_FOUND


def report(result: Any, as_json: bool) -> int:
    """Print what a run found; the exit code."""
    if as_json:
        print(json.dumps(result.as_dict()), flush=True)
        return EXIT_OK if result.ok else EXIT_FOUND
    plan = result.plan
    name = f"{result.name}: " if result.name else ""
    table = Table(
        title=f"{name}{plan.ranks} ranks, {plan.shots}-shot, {plan.engine} and {plan.consumer} on {result.device}"
    )
    for name in ("rounds", "M", "bit-exact sums", "payload", "seconds", "findings"):
        table.add_column(name)
    batches = ", ".join(map(str, result.batches))
    table.add_row(
        f"{result.rounds} of {plan.rounds}", batches, f"{result.exact} rounds", plan.payload, f"{result.seconds:.1f}",
        str(len(result.findings)),
    )  # fmt: skip
    console = Console()
    console.print(table)
    for line in result.findings[:SHOWN]:
        console.print(line, style="red", markup=False, highlight=False)
    return EXIT_OK if result.ok else EXIT_FOUND
