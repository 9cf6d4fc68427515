"""Compiles in a pool of processes, while the process that started them has the GPU.

Workers are spawned, not forked (a CUDA context does not survive a fork), and see no GPU. The DSL keeps global state
while it compiles, so a process compiles one kernel at a time; programs go through the cache as everywhere else.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass

from oproj_lib.bundle_recipes import Recipe, build_program
from oproj_lib.program import Program
from oproj_lib.sweep.points import TARGET

AHEAD = 4
"""Builds per process that are started or done before they are needed."""


@dataclass(frozen=True)
class Built:
    """A build: its program, or problems. Problems of the machine code leave a program that can be launched.

    seconds: processor time of this process's worker. machine_code: whether it was disassembled and read.
    """

    recipe: Recipe
    program: Program | None
    problems: tuple[str, ...]
    seconds: float
    machine_code: bool


Build = Callable[[Recipe, bool], Built]


def build_one(recipe: Recipe, machine_code: bool = False) -> Built:
    """Compile; the library refuses spills, too many registers, and shared memory other than the plan's.

    machine_code: disassemble producers as well, and look for the weight loads above the PDL wait.
    """
    from oproj_lib.sass import check_sass

    start = time.process_time()
    try:
        program = build_program(recipe, TARGET)
        looked = machine_code and program.config["engine"] == "producer"
        problems = check_sass(program).problems if looked else ()
    except Exception as error:  # whatever it is, it is a finding of this build; the others go on
        problem = f"does not build: {type(error).__name__}: {error}"
        return Built(recipe, None, (problem,), time.process_time() - start, False)
    return Built(recipe, program, problems, time.process_time() - start, looked)


def default_jobs() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hide_gpus() -> None:
    """In a worker, before anything is imported that could open a GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def build_all(
    recipes: Sequence[Recipe], jobs: int, machine_code: bool = False, build: Build = build_one
) -> Generator[Built, None, None]:
    """The builds as they get ready, in about the order of ``recipes``. Closing the iterator ends the processes.

    Raises ValueError for fewer than 1 job; BrokenProcessPool where a process dies.
    """
    if jobs < 1:
        raise ValueError(f"jobs = {jobs}: at least 1")
    return _build_all(recipes, jobs, machine_code, build)


def _build_all(
    recipes: Sequence[Recipe], jobs: int, machine_code: bool, build: Build
) -> Generator[Built, None, None]:
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=spawn, initializer=hide_gpus)
    waiting: set[Future[Built]] = set()
    rest = iter(recipes)
    try:
        while True:
            while len(waiting) < AHEAD * jobs and (recipe := next(rest, None)):
                waiting.add(pool.submit(build, recipe, machine_code))
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)
