"""A small benchmark now, on the GPU of this machine: one size, our engines, and what stands beside them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace

from oproj_lib import bundle, provenance
from oproj_lib.bench import alternatives, hardware, measure
from oproj_lib.bench.consumers import EXCHANGES, build_consumers
from oproj_lib.bench.hardware import Plan
from oproj_lib.bench.results import HardwareBench
from oproj_lib.bundle import Bundle
from oproj_lib.bundle_recipes import Recipe, consumer_plans, recipes
from oproj_lib.devices.cuda import Gpu
from oproj_lib.problem import Problem
from oproj_lib.ranks import plan as ranks_plan

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


def size_plans(target: str, problem: Problem, consumer: str) -> list[ranks_plan.Plan]:
    """The chains with this consumer at this size. Raises ValueError for a size that bundles don't have."""
    there = [plan for plan in consumer_plans(target) if plan.consumer == consumer]
    found = [plan for plan in there if (plan.k, plan.tokens) == (problem.k, problem.batch)]
    if not found:
        sizes = sorted({plan.tokens for plan in there})
        raise ValueError(f"M = {problem.batch} is not measured with {consumer}; choose from {sizes}")
    return found


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
            exchange = plan.consumer in EXCHANGES
            built = bundle.build(target, folder, chosen=[] if exchange else size_recipes(target, problem))
            if exchange:
                build_consumers(target, folder, plans=size_plans(target, problem, plan.consumer))
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
    names = alternatives.chosen(None, consumer) if consumer == "attnres" else BESIDE
    return measure_now(target, problem, plan=plan, names=names) if device == "cuda" else None
