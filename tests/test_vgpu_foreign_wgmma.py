"""Triton's Hopper kernels (wgmma) on the virtual GPU, against numpy: a compiler that knows nothing of this project."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from foreign.dots import (
    F32_STEP,
    RUNS,
    SHAPES,
    Compiler,
    Shape,
    check_dot,
    compile_kernel,
    kinds_by_schedule,
    launch,
    synchronisation,
    without,
)

from oproj_lib import vgpu

__all__ = ["compile_kernel"]  # a fixture

CAPABILITY = 90
PIPELINED = Shape(128, 64, 64, 2, 4, True, False, "bf16")
ITERATIONS = 4
SQUARE = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64}
DOT = {**SQUARE, "A_K_MAJOR": 1, "B_K_MAJOR": 0}


@pytest.mark.parametrize(("iterations", "schedule", "exact"), RUNS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dot(
    compile_kernel: Compiler, shape: Shape, iterations: int, schedule: str | int, exact: bool
) -> None:
    kernel = compile_kernel.dot(CAPABILITY, shape)
    ptx = kernel.asm["ptx"]
    multiplies = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(\w+)\.\w+ [^;]*;", ptx)
    assert {kind for _, kind in multiplies} == {shape.kind.replace("fp16", "f16")}
    # The last two operands say which operand is transposed, that is not K-major.
    flags = f"1, 1, {int(not shape.a_k_major)}, {int(not shape.b_k_major)};"
    assert all(found == flags for found in re.findall(r"wgmma\.mma_async[^;]*, (1, 1, \d, \d;)", ptx))
    assert flags in ptx
    for instruction in ("wgmma.fence", "wgmma.commit_group", "wgmma.wait_group", "fence.proxy.async"):
        assert instruction in ptx
    assert ("cp.async" in ptx) == (shape.stages > 1)
    report = check_dot(kernel, shape, iterations, schedule, exact)
    # Warpgroups share the tile: each instruction makes 64 x N of it.
    n = int(multiplies[0][0])
    assert report.counters.tensor_instructions == iterations * (shape.k // 16) * shape.m * shape.n // (64 * n)


@pytest.mark.parametrize(("schedule", "exact"), [("program", True), (1, False)])
def test_a_product_as_an_operand(compile_kernel: Compiler, schedule: str | int, exact: bool) -> None:
    """A of the second multiply comes from registers."""
    kernel = compile_kernel("chained", CAPABILITY, "a:*bf16 b:*bf16 v:*bf16 c:*fp32", SQUARE)
    assert re.search(r"wgmma\.mma_async[^;]*\},\s*\{[^}]*\}, %rd", kernel.asm["ptx"])
    rng = np.random.default_rng(5)
    bf16 = ml_dtypes.bfloat16
    a, b, v = (rng.standard_normal(size).astype(bf16) for size in ((128, 64), (64, 64), (64, 64)))
    c = np.full((128, 64), np.nan, np.float32)
    assert launch(kernel, [a, b, v, c], schedule=schedule, exact=exact).findings == ()
    left, right, last = (x.astype(np.float64) for x in (a, b, v))
    product = left @ right
    # The product is rounded to BF16: half a step, where FP32 accumulation may tip a tie by one step more.
    rounded = np.abs(product) * float(ml_dtypes.finfo(bf16).eps)
    accumulated = 64 * F32_STEP * (np.abs(left) @ np.abs(right))
    bound = (rounded + accumulated) @ np.abs(last) + 64 * F32_STEP * (np.abs(product) @ np.abs(last))
    assert (np.abs(c - product @ last) <= bound).all()


# -- synchronisation taken away -----------------------------------------------------------------------


def test_the_whole_kernel_has_no_findings(compile_kernel: Compiler) -> None:
    kernel = compile_kernel.dot(CAPABILITY, PIPELINED)
    assert kinds_by_schedule(kernel, PIPELINED, ITERATIONS, kernel.asm["ptx"]) == [set()] * 3


@pytest.mark.parametrize(
    ("opcode", "kind", "count"),
    [
        ("fence.proxy.async", "missing proxy fence", 1),
        ("wgmma.fence", "missing wgmma.fence", 1),
        ("wgmma.commit_group", "undefined data", 1),
        ("wgmma.wait_group.sync.aligned 1", "race", 1),  # the copies of the next turn overwrite its operands
        ("wgmma.wait_group.sync.aligned 0", "undefined data", 1),
    ],
)
def test_a_removed_synchronisation_is_reported(
    compile_kernel: Compiler, opcode: str, kind: str, count: int
) -> None:
    kernel = compile_kernel.dot(CAPABILITY, PIPELINED)
    ptx = kernel.asm["ptx"]
    points = synchronisation(ptx, opcode.replace(" ", r"\s+"))
    assert len(points) == count
    for point in points:
        for found in kinds_by_schedule(kernel, PIPELINED, ITERATIONS, without(ptx, point)):
            assert kind in found


def test_removed_copy_waits_and_barriers(compile_kernel: Compiler) -> None:
    """Each is reported in some schedule, except those that Triton does not need."""
    kernel = compile_kernel.dot(CAPABILITY, PIPELINED)
    ptx = kernel.asm["ptx"]
    silent = []
    for point in synchronisation(ptx, r"bar\.sync|cp\.async\.wait_group"):
        if not any(kinds_by_schedule(kernel, PIPELINED, ITERATIONS, without(ptx, point))):
            silent.append(point)
    # Only the one between the loop and the epilogue: the loop's last turn ends with a barrier too.
    assert [point[0].split()[0] for point in silent] == ["bar.sync"]
    assert silent[0].start() > synchronisation(ptx, r"wgmma\.wait_group")[-1].start()


# -- what is not modelled -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "types", "constants", "options", "message"),
    [
        ("described", "a:*bf16 b:*bf16 c:*fp32 k:i32", SQUARE, {}, "address with coordinates (tensor copies)"),
        ("dot", "a:*fp32 b:*fp32 c:*fp32 k:i32", DOT, {}, "wgmma f32.tf32.tf32; modelled: f32.f16.f16"),
        ("dot", "a:*fp8e4nv b:*fp8e4nv c:*fp32 k:i32", DOT, {}, "m64n64k32.f32.e4m3.e4m3"),
        (
            "dot", "a:*bf16 b:*bf16 c:*fp32 k:i32", {**DOT, "BLOCK_M": 256}, {"num_ctas": 2},
            "only clusters of one CTA are modelled",
        ),
    ],
    ids=["TMA", "TF32", "FP8", "a pair of CTAs"],
)  # fmt: skip
def test_what_is_not_modelled_is_refused_by_name(
    compile_kernel: Compiler, name: str, types: str, constants: dict[str, int], options: dict[str, int], message: str
) -> None:  # fmt: skip
    ptx = compile_kernel(name, CAPABILITY, types, constants, **options).asm["ptx"]
    with pytest.raises((vgpu.UnsupportedPTX, vgpu.MalformedPTX), match=re.escape(message)) as caught:
        vgpu.load(ptx)
    line = re.match(r"PTX line (\d+): ", str(caught.value))
    assert line is not None and ptx.splitlines()[int(line[1]) - 1].strip()
