"""Triton's PTX on the virtual GPU, against numpy: a compiler that knows nothing of this project."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import triton
from foreign import triton_kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from oproj_lib import vgpu

SCHEDULES = ("program", 1, 2)
CAPABILITIES = (80, 90)
Array = npt.NDArray[Any]
Compile = Callable[..., Any]

FLOAT_TYPES = {
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32),
}
F32_STEP = 2.0**-23  # spacing of FP32 numbers relative to their size; truncation errs by less than one step


@pytest.fixture(scope="module")
def compile_kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compiles a kernel for compute capability 80 or 90, once per module; needs no GPU and no driver."""
    compiled: dict[object, Any] = {}

    def compile_(
        name: str,
        capability: int,
        types: str,
        aligned: Sequence[str],
        options: dict[str, int],
        **constants: int,
    ) -> Any:
        """types: "x:*fp32 n:i32"; aligned: parameters that are multiples of 16 (Triton vectorises)."""
        key = (name, capability, types, *aligned, *options.items(), *constants.items())
        if key not in compiled:
            function = getattr(triton_kernels, name)
            signature = dict(item.split(":") for item in types.split()) | dict.fromkeys(
                constants, "constexpr"
            )
            attributes = {(function.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
            source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
            target = GPUTarget("cuda", capability, 32)
            compiled[key] = triton.compile(
                source, target=target, options={"enable_fp_fusion": True, **options}
            )
        return compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield compile_


def run(
    kernel: Any, grid: tuple[int, ...], args: list[Any], schedule: str | int, exact: bool = False
) -> None:
    """Launches a compiled kernel with all checks; a finding is a failure."""
    # Triton appends two addresses to the parameters, scratch memory and the profiler's; neither is used here.
    assert kernel.metadata.global_scratch_size == kernel.metadata.profile_scratch_size == 0
    report = vgpu.run_ptx(
        kernel.asm["ptx"],
        kernel.metadata.name,
        grid,
        (32 * kernel.metadata.num_warps, 1, 1),
        [*args, 0, 0],
        dynamic_shared_bytes=kernel.metadata.shared,
        checks=True,
        schedule=schedule,
        exact=exact,
    )
    assert report.findings == ()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("n", (1, 511, 512, 513, 1504))
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_add(compile_kernel: Compile, capability: int, n: int, schedule: str | int) -> None:
    aligned = ["x", "y", "out"] + (["n"] if n % 16 == 0 else [])
    kernel = compile_kernel("add", capability, "x:*fp32 y:*fp32 out:*fp32 n:i32", aligned, {}, BLOCK=512)
    x, y = np.random.default_rng(n).standard_normal((2, n)).astype(np.float32)
    out = np.full(n + 3, 7.0, np.float32)
    run(kernel, (triton.cdiv(n, 512),), [x, y, out, n], schedule)
    np.testing.assert_array_equal(out[:n], x + y)
    np.testing.assert_array_equal(out[n:], 7.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("columns", (1, 100, 512))
@pytest.mark.parametrize("kind", ("fp16", "bf16"))
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_softmax(
    compile_kernel: Compile, capability: int, kind: str, columns: int, schedule: str | int
) -> None:
    types = f"x:*{kind} out:*{kind} columns:i32 stride:i32"
    kernel = compile_kernel("softmax", capability, types, ["x", "out"], {}, BLOCK=512)
    rows, stride, dtype = 3, columns + 5, FLOAT_TYPES[kind]
    x = (3 * np.random.default_rng(columns).standard_normal((rows, stride))).astype(dtype)
    out = np.full((rows, stride), 7.0, dtype)
    run(kernel, (rows,), [x, out, columns, stride], schedule)
    powers = np.exp(x[:, :columns].astype(np.float64))
    wanted = powers / powers.sum(axis=1, keepdims=True)
    # One rounding to the output type (half its spacing), with as much again for exp2's approximation. The
    # spacing of FP16's subnormals, 2**-24, is the absolute floor.
    step = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(out[:, :columns].astype(np.float64), wanted, rtol=step, atol=2.0**-24)
    np.testing.assert_array_equal(out[:, columns:].astype(np.float64), 7.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("columns", (1, 128, 300))
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_row_sums(compile_kernel: Compile, capability: int, columns: int, schedule: str | int) -> None:
    types = "x:*fp32 out:*fp32 columns:i32"
    kernel = compile_kernel("row_sums", capability, types, ["x", "out"], {}, ROWS=8, BLOCK=128)
    x = np.random.default_rng(columns).standard_normal((16, columns)).astype(np.float32)
    out = np.zeros(16, np.float32)
    run(kernel, (2,), [x, out, columns], schedule)
    bound = columns * F32_STEP * np.abs(x).sum(axis=1, dtype=np.float64)
    assert (np.abs(out - x.sum(axis=1, dtype=np.float64)) <= bound).all()


@pytest.mark.parametrize("exact, schedule", [*[(False, s) for s in SCHEDULES], (True, "program")])
@pytest.mark.parametrize("m, n, k", [(32, 64, 32), (45, 112, 160)])
@pytest.mark.parametrize("kind, out_kind", [("fp16", "fp16"), ("bf16", "fp32")])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_matmul(
    compile_kernel: Compile,
    capability: int,
    kind: str,
    out_kind: str,
    m: int,
    n: int,
    k: int,
    exact: bool,
    schedule: str | int,
) -> None:
    """Pipelined: cp.async into three stages, ldmatrix, mma.sync (32 rows are too few for wgmma)."""
    types = f"a:*{kind} b:*{kind} c:*{out_kind} m:i32 n:i32 k:i32"
    tiles = {"BLOCK_M": 32, "BLOCK_N": 32 if kind == "fp16" else 64, "BLOCK_K": 32}
    kernel = compile_kernel(
        "matmul", capability, types, ["a", "b", "c", "n", "k"], {"num_stages": 3}, **tiles
    )
    for instruction in (
        "cp.async.cg.shared.global",
        "cp.async.wait_group",
        "ldmatrix.sync",
        "mma.sync.aligned.m16n8k16",
    ):
        assert instruction in kernel.asm["ptx"]
    assert "wgmma" not in kernel.asm["ptx"]
    rng = np.random.default_rng(m)
    a, b = (rng.standard_normal(shape).astype(FLOAT_TYPES[kind]) for shape in ((m, k), (k, n)))
    c = np.full((m, n), 7.0, FLOAT_TYPES[out_kind])
    run(kernel, (triton.cdiv(m, 32), triton.cdiv(n, tiles["BLOCK_N"])), [a, b, c, m, n, k], schedule, exact)
    left, right = a.astype(np.float64), b.astype(np.float64)
    wanted = left @ right
    rounding = np.abs(wanted) * float(ml_dtypes.finfo(FLOAT_TYPES[out_kind]).eps)
    assert (np.abs(c - wanted) <= k * F32_STEP * (np.abs(left) @ np.abs(right)) + rounding).all()


def test_a_removed_synchronisation_is_reported(compile_kernel: Compile) -> None:
    """The pipelined matmul needs each barrier and wait: without one, some schedule has a finding.

    From the first wait on: before it nothing has been read, and Triton 3.7 puts a needless barrier there.
    """
    m, n, k = 45, 112, 160
    types = "a:*fp16 b:*fp16 c:*fp16 m:i32 n:i32 k:i32"
    aligned, tiles = ["a", "b", "c", "n", "k"], {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}
    kernel = compile_kernel("matmul", 90, types, aligned, {"num_stages": 3}, **tiles)
    text = kernel.asm["ptx"]
    a, b, c = (np.ones(shape, np.float16) for shape in ((m, k), (k, n), (m, n)))
    first = text.index("cp.async.wait_group")
    points = list(re.compile(r"(bar\.sync|cp\.async\.wait_group)[^;]*;").finditer(text, first))
    assert [point[1] for point in points].count(
        "bar.sync"
    ) >= 4  # loop top and bottom, and around the epilogue
    silent = []
    for point in points:
        broken = text[: point.start()] + text[point.end() :]
        shared = kernel.metadata.shared
        reports = [
            vgpu.run_ptx(
                broken,
                kernel.metadata.name,
                (2, 4),
                128,
                [a, b, c, m, n, k, 0, 0],
                dynamic_shared_bytes=shared,
                checks=True,
                schedule=schedule,
            )
            for schedule in SCHEDULES
        ]
        if all(report.ok for report in reports):
            silent.append(point[0])
    assert silent == []
