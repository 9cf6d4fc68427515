"""Kernel arguments from the command line: `i32:512`, `data.npy`, `random:f32:32x64`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from oproj_lib import vgpu

TYPES: dict[str, Any] = {
    **{f"i{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"u{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}
FILLS = ("random", "zeros", "ones", "arange", "empty")


def dtype_named(name: str, text: str) -> np.dtype:
    if name not in TYPES:
        raise ValueError(f"--arg {text}: type {name!r} is unknown; choose one of {', '.join(TYPES)}")
    return TYPES[name]


def upload_arguments(gpu: vgpu.VirtualGPU, texts: list[str], seed: int = 0) -> list[Any]:
    """Each text as a Buffer on `gpu` or a numpy scalar.

    Raises ValueError for a text that is neither a file, a `type:number` nor a `fill:type:shape`.
    """
    rng = np.random.default_rng(seed)
    return [one_argument(gpu, text, f"argument {index}", rng) for index, text in enumerate(texts)]


def one_argument(gpu: vgpu.VirtualGPU, text: str, name: str, rng: np.random.Generator) -> Any:
    if text.endswith(".npy"):
        if not Path(text).exists():
            raise ValueError(f"--arg {text}: no such file")
        return gpu.upload(np.ascontiguousarray(np.load(text)), name)
    parts = text.split(":")
    if len(parts) == 2:
        try:
            return dtype_named(parts[0], text).type(float(parts[1]) if "f" in parts[0] else int(parts[1], 0))
        except (ValueError, OverflowError) as error:
            raise ValueError(f"--arg {text}: {error}") from None
    if len(parts) != 3 or parts[0] not in FILLS:
        raise ValueError(
            f"--arg {text}: expected TYPE:NUMBER, FILE.npy, or FILL:TYPE:SHAPE with FILL one of {', '.join(FILLS)}"
        )
    fill, dtype = parts[0], dtype_named(parts[1], text)
    shape = parse_dimensions(parts[2].replace("x", ","), f"--arg {text}: shape")
    if fill == "empty":
        return gpu.empty(shape, dtype, name)
    if fill == "random":
        array = (
            rng.standard_normal(shape).astype(dtype)
            if "f" in parts[1]
            else rng.integers(0, 100, shape).astype(dtype)
        )
    else:
        count = int(np.prod(shape))
        array = (
            {"zeros": np.zeros(count), "ones": np.ones(count), "arange": np.arange(count)}[fill]
            .astype(dtype)
            .reshape(shape)
        )
    return gpu.upload(array, name)


def parse_dimensions(text: str, what: str) -> tuple[int, ...]:
    """`4` or `4,2,1`."""
    try:
        dimensions = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{what} {text!r}: expected whole numbers such as 4 or 4,2") from None
    if any(dimension < 1 for dimension in dimensions):
        raise ValueError(f"{what} {text!r}: dimensions are positive")
    return dimensions


def parse_saves(texts: list[str], arguments: int) -> dict[int, str]:
    """`2=out.npy` -> {2: "out.npy"}."""
    saves = {}
    for text in texts:
        index, _, path = text.partition("=")
        if not index.isdigit() or not path or int(index) >= arguments:
            raise ValueError(f"--save {text}: expected INDEX=FILE.npy with INDEX 0..{arguments - 1}")
        saves[int(index)] = path
    return saves
