"""Triton's Blackwell kernels (tcgen05, tensor memory, mbarriers) on the virtual GPU, against numpy: a compiler that
knows nothing of this project."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from foreign.dots import (
    F32_STEP,
    FLOAT_TYPES,
    RUNS,
    SHAPES,
    Compiler,
    Shape,
    check_dot,
    compile_kernel,
    kinds_by_schedule,
    launch,
    operands,
    synchronisation,
    without,
)

from oproj_lib import vgpu

__all__ = ["compile_kernel"]  # a fixture

CAPABILITY = 100
PIPELINED = Shape(128, 64, 64, 2, 4, True, False, "bf16")
ITERATIONS = 4
SQUARE = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64}
DOT = {**SQUARE, "A_K_MAJOR": 1, "B_K_MAJOR": 0}


def instruction_descriptor(shape: Shape) -> int:
    """PTX ISA, "Instruction descriptor", kind::f16: what this shape's MMAs must carry."""
    kind = {"fp16": 0, "bf16": 1}[shape.kind]
    majors = (not shape.a_k_major) << 15 | (not shape.b_k_major) << 16
    return 1 << 4 | kind << 7 | kind << 10 | majors | shape.n >> 3 << 17 | min(shape.m, 128) >> 4 << 24


@pytest.mark.parametrize(("iterations", "schedule", "exact"), RUNS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dot(
    compile_kernel: Compiler, shape: Shape, iterations: int, schedule: str | int, exact: bool
) -> None:
    kernel = compile_kernel.dot(CAPABILITY, shape)
    ptx = kernel.asm["ptx"]
    for instruction in (
        "tcgen05.alloc", "tcgen05.dealloc", "tcgen05.mma.cta_group::1.kind::f16", "tcgen05.commit", "tcgen05.ld",
        "tcgen05.wait::ld", "mbarrier.try_wait", "fence.proxy.async",
    ):  # fmt: skip
        assert instruction in ptx
    assert ("tcgen05.ld.sync.aligned.16x32bx2" if shape.m == 64 else "tcgen05.ld.sync.aligned.32x32b") in ptx
    assert ("cp.async" in ptx) == (shape.stages > 1)
    assert re.search(
        rf"\b{instruction_descriptor(shape)};", ptx
    )  # the type, the layouts and the size are in it
    report = check_dot(kernel, shape, iterations, schedule, exact)
    assert report.counters.tensor_instructions == iterations * shape.k // 16 * -(-shape.m // 128)


@pytest.mark.parametrize("schedule", ["program", 1])
@pytest.mark.parametrize(("kind", "out_kind"), [("fp16", "fp16"), ("bf16", "fp32")])
def test_masked_matmul_over_a_grid(
    compile_kernel: Compiler, kind: str, out_kind: str, schedule: str | int
) -> None:
    """Four CTAs at once, with rows and columns outside the matrices (cp.async fills zeros)."""
    m, n, k = 112, 80, 96  # multiples of 16, as the compiler was told
    tiles = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
    types = f"a:*{kind} b:*{kind} c:*{out_kind} m:i32 n:i32 k:i32"
    kernel = compile_kernel("matmul", CAPABILITY, types, tiles, num_stages=3)
    assert "tcgen05.mma" in kernel.asm["ptx"] and "cp.async" in kernel.asm["ptx"]
    out_type = {**FLOAT_TYPES, "fp32": np.dtype(np.float32)}[out_kind]
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(size).astype(FLOAT_TYPES[kind]) for size in ((m, k), (k, n)))
    c = np.full((m, n), 7.0, out_type)
    assert launch(kernel, [a, b, c, m, n, k], grid=(2, 2), schedule=schedule).findings == ()
    left, right = a.astype(np.float64), b.astype(np.float64)
    rounding = np.abs(left @ right) * float(ml_dtypes.finfo(out_type).eps)
    bound = k * F32_STEP * (np.abs(left) @ np.abs(right)) + rounding
    assert (np.abs(c.astype(np.float64) - left @ right) <= bound).all()


# -- synchronisation taken away -----------------------------------------------------------------------


def test_the_whole_kernel_has_no_findings(compile_kernel: Compiler) -> None:
    kernel = compile_kernel.dot(CAPABILITY, PIPELINED)
    assert kinds_by_schedule(kernel, PIPELINED, ITERATIONS, kernel.asm["ptx"]) == [set()] * 3


@pytest.mark.parametrize(
    ("opcode", "kinds"),
    [
        ("tcgen05.wait::st", {"race"}),  # the first MMA may overtake the zeros
        ("tcgen05.wait::ld", {"undefined data"}),
        ("fence.proxy.async", {"missing proxy fence"}),
        ("tcgen05.commit", {"deadlock"}),
        ("tcgen05.dealloc", {"tensor memory leak"}),
        ("mbarrier.init", {"uninitialised mbarrier"}),
    ],
)
def test_a_removed_synchronisation_is_reported(
    compile_kernel: Compiler, opcode: str, kinds: set[str]
) -> None:
    kernel = compile_kernel.dot(CAPABILITY, PIPELINED)
    ptx = kernel.asm["ptx"]
    points = synchronisation(ptx, re.escape(opcode))
    assert points
    for point in points:
        for found in kinds_by_schedule(kernel, PIPELINED, ITERATIONS, without(ptx, point)):
            assert kinds <= found


def test_a_removed_wait_is_reported(compile_kernel: Compiler) -> None:
    """Inside the loop it lets the next copies overwrite operands; at its end, tensor memory be read too early."""
    kernel = compile_kernel.dot(CAPABILITY, PIPELINED)
    ptx = kernel.asm["ptx"]
    waits = list(re.finditer(r"^\tmbarrier\.try_wait[^;]*;\s*@!complete bra\.uni waitLoop;", ptx, re.M))
    assert len(waits) == 2
    for wait in waits:
        for found in kinds_by_schedule(kernel, PIPELINED, ITERATIONS, without(ptx, wait)):
            assert "race" in found


def test_removed_copy_waits_and_barriers(compile_kernel: Compiler) -> None:
    """Each is reported in some schedule, except those that Triton does not need."""
    kernel = compile_kernel.dot(CAPABILITY, PIPELINED)
    ptx = kernel.asm["ptx"]
    silent = []
    for point in synchronisation(ptx, r"bar\.sync|cp\.async\.wait_group"):
        if not any(kinds_by_schedule(kernel, PIPELINED, ITERATIONS, without(ptx, point))):
            silent.append((point.start(), point[0].split()[0]))
    # After reading the address of tensor memory, which nothing overwrites; after tcgen05.st, since another
    # follows before the first MMA; at the top of the loop and after its wait, since every thread waits for the
    # mbarrier itself; before the release, since the epilogue has barriers after the loads.
    assert [name for _, name in silent] == ["bar.sync"] * 5
    first, last = ptx.index("tcgen05.alloc"), ptx.index("tcgen05.dealloc")
    loop_end = synchronisation(ptx, "tcgen05.commit")[-1].start()
    places = [place for place, _ in silent]
    assert (
        first < places[0]
        and places[3] < loop_end < synchronisation(ptx, "tcgen05.wait::ld")[0].start() < places[4] < last
    )


def test_invalidating_a_barrier_that_others_may_still_use(compile_kernel: Compiler) -> None:
    kernel = compile_kernel.dot(CAPABILITY, PIPELINED)
    ptx = kernel.asm["ptx"]
    end = ptx.index("mbarrier.inval")
    last = [point for point in synchronisation(ptx, r"bar\.sync") if point.start() < end][-1]
    k = ITERATIONS * PIPELINED.k
    _, _, a, b = operands(PIPELINED, k)
    for schedule in ("program", 1, 2):
        c = np.zeros((PIPELINED.m, PIPELINED.n), np.float32)
        report = launch(kernel, [a, b, c, k], ptx=without(ptx, last), schedule=schedule)
        messages = [finding.message for finding in report.findings]
        assert any(
            re.match(r"mbarrier\.inval at shared byte \d+ while warp \d may still", m) for m in messages
        )


# -- what is not modelled -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "types", "constants", "options", "message"),
    [
        ("chained", "a:*bf16 b:*bf16 v:*bf16 c:*fp32", SQUARE, {}, "tcgen05.mma with A in tensor memory"),
        ("described", "a:*bf16 b:*bf16 c:*fp32 k:i32", SQUARE, {}, "address with coordinates (tensor copies)"),
        ("dot", "a:*fp32 b:*fp32 c:*fp32 k:i32", DOT, {}, "only tcgen05.mma kind::f16 is modelled"),  # TF32
        ("dot", "a:*fp8e4nv b:*fp8e4nv c:*fp32 k:i32", DOT, {}, "only tcgen05.mma kind::f16 is modelled"),
        (
            "dot", "a:*bf16 b:*bf16 c:*fp32 k:i32", {**DOT, "BLOCK_M": 256}, {"num_ctas": 2},
            "only clusters of one CTA are modelled",
        ),
    ],
    ids=["A in tensor memory", "TMA", "TF32", "FP8", "a pair of CTAs"],
)  # fmt: skip
def test_what_is_not_modelled_is_refused_by_name(
    compile_kernel: Compiler, name: str, types: str, constants: dict[str, int], options: dict[str, int], message: str
) -> None:  # fmt: skip
    ptx = compile_kernel(name, CAPABILITY, types, constants, **options).asm["ptx"]
    with pytest.raises(vgpu.UnsupportedPTX, match=re.escape(message)) as caught:
        vgpu.load(ptx)
    line = re.match(r"PTX line (\d+): ", str(caught.value))
    assert line is not None and ptx.splitlines()[int(line[1]) - 1].strip()
