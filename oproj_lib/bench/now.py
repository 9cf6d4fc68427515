"""A small benchmark now, on the GPU of this machine: one size, our engines, and what stands beside them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace

from oproj_lib import bundle, provenance
from oproj_lib.bench import hardware, measure
from oproj_lib.bench.hardware import Plan
from oproj_lib.bench.results import HardwareBench
from oproj_lib.bundle import Bundle
from oproj_lib.bundle_recipes import Recipe, recipes
from oproj_lib.devices.cuda import Gpu
from oproj_lib.problem import Problem

SMALL = Plan(rounds=1, replays=10)
BESIDE = ("torch.mm", "empty kernel")


def size_recipes(target: str, problem: Problem) -> tuple[Recipe, ...]:
    """The first timed recipe of each engine at this size, the one that is measured at every size.

    Their outputs are checked against float64 by the measurement, so no expected bits are made for them. Raises
    ValueError for an unknown target, or a size that bundles don't have.
    """
    found: dict[str, Recipe] = {}
    there = [recipe for recipe in recipes(target) if recipe.timed]
    for recipe in there:
        if (recipe.ranks, recipe.batch) == (problem.ranks, problem.batch):
            found.setdefault(recipe.engine, replace(recipe, kinds=()))
    if not found:
        sizes = sorted({recipe.batch for recipe in there})
        raise ValueError(f"M = {problem.batch} is not measured; choose from {sizes}")
    return tuple(found.values())


def measure_now(
    target: str,
    problem: Problem,
    *,
    gpu: Gpu | None = None,
    programs: Bundle | None = None,
    names: Sequence[str] = BESIDE,
    plan: Plan = SMALL,
) -> HardwareBench:
    """Measure one size: bandwidth, then our engines and the alternatives ``names``, alone and in the chain.

    gpu: by default the first one. programs: by default they are built now, which needs CuTe DSL.

    Raises what `bench.hardware.measure_job` raises, and DeviceError without nvidia-smi.
    """
    gpu = gpu or Gpu(0)
    if programs is None:
        with tempfile.TemporaryDirectory() as folder:
            built = bundle.build(target, folder, chosen=size_recipes(target, problem))
            return measure_now(target, problem, gpu=gpu, programs=built, names=names, plan=plan)
    clocks = {"before": provenance.smi(gpu.index)}
    ceilings = measure.ceilings(gpu)
    job = hardware.measure_job(gpu, programs, problem, names, ceilings, plan)
    clocks["after"] = provenance.smi(gpu.index)
    command = f"oproj_lib.bench.now.measure_now({target!r}, {problem}, plan={plan})"
    source = provenance.collect(gpu, [command], clocks)
    return HardwareBench(source, ceilings, plan.rounds, plan.replays, plan.carveout, plan.consumer, (job,))


def now_if(
    device: str, target: str, problem: Problem, consumer: str = SMALL.consumer
) -> HardwareBench | None:
    """``measure_now`` where the device is "cuda", None where it is "vgpu": the virtual GPU has no clock."""
    plan = replace(SMALL, consumer=consumer)
    return measure_now(target, problem, plan=plan) if device == "cuda" else None
