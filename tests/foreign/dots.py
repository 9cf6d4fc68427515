"""Matrix products compiled by Triton for the asynchronous tensor cores: what the tests of wgmma and tcgen05 share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from foreign import triton_kernels
from oproj_lib import vgpu

Array = npt.NDArray[Any]
FLOAT_TYPES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
SCHEDULES: tuple[str | int, ...] = ("program", 1, 2)
F32_STEP = 2.0**-23  # spacing of FP32 numbers relative to their size; truncation errs by less than one step
SCRATCH = [
    0,
    0,
]  # Triton appends two addresses to the parameters, scratch memory and the profiler's; unused here


@dataclass(frozen=True)
class Shape:
    """One configuration of the kernel `dot`."""

    m: int
    n: int
    k: int  # per iteration
    stages: int
    warps: int
    a_k_major: bool
    b_k_major: bool
    kind: str

    def __str__(self) -> str:
        majors = "".join(
            "k" if k_major else "mn"[i] for i, k_major in enumerate((self.a_k_major, self.b_k_major))
        )
        return f"{self.m}x{self.n}x{self.k}-{self.stages}stages-{self.warps}warps-{majors}-{self.kind}"


# Every tile shape once; both types, all four pairs of layouts, 1 to 3 stages, 4 and 8 warps; inner rows of 32,
# 64 and 128 bytes, that is all three swizzles; N from 16 to 256; M of one instruction (64, 128) and of two.
SHAPES = [
    Shape(64, 64, 32, 1, 4, True, False, "bf16"),
    Shape(64, 64, 64, 2, 4, True, True, "fp16"),
    Shape(128, 64, 64, 2, 4, False, False, "bf16"),
    Shape(128, 128, 64, 3, 4, False, True, "fp16"),
    Shape(128, 128, 32, 2, 8, True, False, "bf16"),
    Shape(128, 256, 64, 3, 8, True, False, "fp16"),
    Shape(64, 256, 32, 2, 4, True, True, "bf16"),
    Shape(64, 128, 16, 1, 8, False, False, "fp16"),
    Shape(128, 32, 64, 3, 4, True, False, "bf16"),
    Shape(64, 16, 64, 2, 4, True, False, "bf16"),
    Shape(128, 64, 16, 3, 4, True, True, "bf16"),
    Shape(256, 64, 32, 1, 8, False, True, "fp16"),
]
# (iterations, schedule, exact arithmetic): no loop at all, one turn of the pipeline, and several.
RUNS: list[tuple[int, str | int, bool]] = [
    (1, "program", True),
    (2, 1, False),
    (5, "program", False),
    (5, 2, True),
]


class Compiler:
    """Compiles Triton kernels without a GPU, each once. types: "x:*fp32 n:i32"; all of them are multiples of 16."""

    def __init__(self) -> None:
        self._compiled: dict[object, Any] = {}

    def __call__(
        self, name: str, capability: int, types: str, constants: dict[str, int], **options: int
    ) -> Any:
        key = (name, capability, types, *constants.items(), *options.items())
        if key not in self._compiled:
            function = getattr(triton_kernels, name)
            signature = dict(item.split(":") for item in types.split()) | dict.fromkeys(
                constants, "constexpr"
            )
            aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(types.split()))}
            source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
            self._compiled[key] = triton.compile(
                source, target=GPUTarget("cuda", capability, 32), options=options
            )
        return self._compiled[key]

    def dot(self, capability: int, shape: Shape) -> Any:
        constants = {
            "BLOCK_M": shape.m, "BLOCK_N": shape.n, "BLOCK_K": shape.k,
            "A_K_MAJOR": shape.a_k_major, "B_K_MAJOR": shape.b_k_major,
        }  # fmt: skip
        types = f"a:*{shape.kind} b:*{shape.kind} c:*fp32 k:i32"
        return self("dot", capability, types, constants, num_stages=shape.stages, num_warps=shape.warps)


@pytest.fixture(scope="module")
def compile_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield Compiler()


def launch(
    kernel: Any, args: Sequence[Any], *, ptx: str = "", grid: tuple[int, ...] = (1,), schedule: str | int = "program",
    exact: bool = False,
) -> vgpu.Report:  # fmt: skip
    """Runs a compiled kernel, or other PTX in its place, with all checks."""
    assert kernel.metadata.global_scratch_size == kernel.metadata.profile_scratch_size == 0
    return vgpu.run_ptx(
        ptx or kernel.asm["ptx"], kernel.metadata.name, grid, 32 * kernel.metadata.num_warps, [*args, *SCRATCH],
        dynamic_shared_bytes=kernel.metadata.shared, checks=True, schedule=schedule, exact=exact,
    )  # fmt: skip


def operands(shape: Shape, k: int) -> tuple[Array, Array, Array, Array]:
    """(a, b) in float64 as [m, k] and [k, n], and as the kernel stores them."""
    rng = np.random.default_rng(k)
    a, b = (
        rng.standard_normal(size).astype(FLOAT_TYPES[shape.kind]) for size in ((shape.m, k), (k, shape.n))
    )
    stored_a, stored_b = (a if shape.a_k_major else a.T), (b.T if shape.b_k_major else b)
    return (
        a.astype(np.float64),
        b.astype(np.float64),
        np.ascontiguousarray(stored_a),
        np.ascontiguousarray(stored_b),
    )


def check_dot(kernel: Any, shape: Shape, iterations: int, schedule: str | int, exact: bool) -> vgpu.Report:
    """Runs `dot`: no findings, and every element within what FP32 accumulation may err."""
    k = iterations * shape.k
    a, b, stored_a, stored_b = operands(shape, k)
    c = np.full((shape.m, shape.n), np.nan, np.float32)
    report = launch(kernel, [stored_a, stored_b, c, k], schedule=schedule, exact=exact)
    assert report.findings == ()
    assert report.arithmetic == ("exact" if exact else "fp32")
    # Each of k additions errs by at most one step of the sum of absolute products.
    assert (np.abs(c - a @ b) <= k * F32_STEP * (np.abs(a) @ np.abs(b))).all()
    return report


def synchronisation(ptx: str, pattern: str) -> list[re.Match[str]]:
    """The instructions whose opcode matches, guards included, in order."""
    return list(re.finditer(rf"^\t(?:@!?%p\d+ )?(?:{pattern})[^;\n]*;", ptx, re.M))


def without(ptx: str, *removed: re.Match[str]) -> str:
    """The PTX without these instructions; lines keep their numbers."""
    for match in sorted(removed, key=lambda m: m.start(), reverse=True):
        ptx = ptx[: match.start()] + "\t// removed" + "\n" * match[0].count("\n") + ptx[match.end() :]
    return ptx


def kinds_by_schedule(kernel: Any, shape: Shape, iterations: int, ptx: str) -> list[set[str]]:
    """The kinds of findings of changed PTX, for each schedule."""
    k = iterations * shape.k
    _, _, a, b = operands(shape, k)
    reports = [
        launch(kernel, [a, b, np.zeros((shape.m, shape.n), np.float32), k], ptx=ptx, schedule=schedule)
        for schedule in SCHEDULES
    ]
    return [{finding.kind for finding in report.findings} for report in reports]
