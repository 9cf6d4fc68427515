"""cublasLt called directly: torch takes its first heuristic, this offers every one that the library returns.

The C API through ctypes (cuBLAS documentation, "Using the cuBLASLt API"); the library is the one that torch loads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from oproj_lib.devices import CudaError
from oproj_lib.devices.cuda import Gpu

CUDA_R_32F, CUDA_R_16BF = 0, 14  # cudaDataType_t
CUBLAS_COMPUTE_32F = 68  # cublasComputeType_t
CUBLAS_OP_T = 1  # cublasOperation_t
MATMUL_DESC_TRANSA = 3  # cublasLtMatmulDescAttributes_t
PREF_MAX_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t
WORKSPACE_BYTES = 32 * 2**20
HEURISTICS = 16


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; algo is the opaque cublasLtMatmulAlgo_t of 64 bytes."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasLt:
    """A handle, a workspace, and matrix products out = x @ weight.T of BF16 with FP32 sums.

    library: a stand-in for the shared library. Raises CudaError where it is missing or refuses.
    """

    def __init__(self, gpu: Gpu, *, library: Any = None) -> None:
        import torch

        self.gpu = gpu
        self.library = library if library is not None else open_library()
        self.handle = ctypes.c_void_p()
        self.call("cublasLtCreate", ctypes.byref(self.handle))
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=gpu.tensors)
        self.one, self.zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def call(self, function: str, *arguments: Any) -> None:
        """Raises CudaError for a status other than success."""
        status = getattr(self.library, function)(*arguments)
        if status:
            raise CudaError(f"CUBLAS_STATUS_{status}", f"{function} of cublasLt answered status {status}")

    def choices(
        self, x: Any, weight: Any, out: Any
    ) -> list[tuple[dict[str, int | str], Callable[[Any, Any, Any], None]]]:
        """(settings, launch(x, weight, out)) per heuristic, for tensors of these shapes.

        Row-major out [M, N] is column-major [N, M] = weight [N, K] times x [M, K] transposed: the first operand is
        weight, column-major [K, N], transposed; the second is x, column-major [K, M].
        """
        (m, k), n = x.shape, weight.shape[0]
        description = ctypes.c_void_p()
        self.call("cublasLtMatmulDescCreate", ctypes.byref(description), CUBLAS_COMPUTE_32F, CUDA_R_32F)
        transpose = ctypes.c_int32(CUBLAS_OP_T)
        self.call(
            "cublasLtMatmulDescSetAttribute",
            description,
            MATMUL_DESC_TRANSA,
            ctypes.byref(transpose),
            ctypes.c_size_t(ctypes.sizeof(transpose)),
        )
        layouts = [self._layout(k, n), self._layout(k, m), self._layout(n, m)]
        found = self._heuristics(description, layouts)
        return [
            ({"heuristic": number}, self._launcher(description, layouts, heuristic))
            for number, heuristic in enumerate(found)
        ]

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        """A dense column-major BF16 matrix."""
        layout = ctypes.c_void_p()
        self.call(
            "cublasLtMatrixLayoutCreate",
            ctypes.byref(layout),
            CUDA_R_16BF,
            ctypes.c_uint64(rows),
            ctypes.c_uint64(columns),
            ctypes.c_int64(rows),
        )
        return layout

    def _heuristics(self, description: ctypes.c_void_p, layouts: list[ctypes.c_void_p]) -> list[Heuristic]:
        preference = ctypes.c_void_p()
        self.call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        most = ctypes.c_size_t(WORKSPACE_BYTES)
        self.call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            PREF_MAX_WORKSPACE_BYTES,
            ctypes.byref(most),
            ctypes.c_size_t(ctypes.sizeof(most)),
        )
        results, count = (Heuristic * HEURISTICS)(), ctypes.c_int()
        a, b, d = layouts
        self.call(
            "cublasLtMatmulAlgoGetHeuristic",
            self.handle,
            description,
            a,
            b,
            d,
            d,
            preference,
            HEURISTICS,
            results,
            ctypes.byref(count),
        )
        return [result for result in results[: count.value] if result.state == 0]

    def _launcher(
        self, description: ctypes.c_void_p, layouts: list[ctypes.c_void_p], heuristic: Heuristic
    ) -> Callable[[Any, Any, Any], None]:
        a, b, d = layouts

        def launch(x: Any, weight: Any, out: Any) -> None:
            self.call(
                "cublasLtMatmul",
                self.handle,
                description,
                ctypes.byref(self.one),
                ctypes.c_void_p(weight.data_ptr()),
                a,
                ctypes.c_void_p(x.data_ptr()),
                b,
                ctypes.byref(self.zero),
                ctypes.c_void_p(out.data_ptr()),
                d,
                ctypes.c_void_p(out.data_ptr()),
                d,
                ctypes.byref(heuristic.algo),
                ctypes.c_void_p(self.workspace.data_ptr()),
                ctypes.c_size_t(WORKSPACE_BYTES),
                ctypes.c_void_p(self.gpu.current_stream()),
            )

        return launch


def open_library() -> ctypes.CDLL:
    """The cublasLt of torch's CUDA version, which importing torch has loaded. Raises CudaError without one."""
    import torch

    if torch.version.cuda is None:
        raise CudaError("NO_CUBLASLT", f"cublasLt: torch {torch.__version__} is built without CUDA")
    name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise CudaError("NO_CUBLASLT", f"cublasLt: {name} cannot be loaded: {error}") from error
