"""Special registers (PTX ISA, "Special Registers"): who a thread is, and how the grid is laid out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .launch import Launch

CLOCKS = ("%clock", "%clock64", "%globaltimer")


def read_clock(launch: Launch, name: str) -> Any:
    """Logical time: %globaltimer counts the steps of all grids, the others those of this grid."""
    if name == "%clock":
        return np.uint32(launch.steps & 0xFFFFFFFF)
    return np.uint64(launch.now if name == "%globaltimer" else launch.steps)


def special_register(launch: Launch, name: str) -> Any:
    """The value of a register that never changes: an array over threads, or a scalar."""
    base, _, axis = name.removeprefix("%").partition(".")
    value = _by_axis(launch, base, "xyz".index(axis)) if axis else _without_axis(launch, base)
    return np.asarray(value).astype(np.uint32)


def _by_axis(launch: Launch, base: str, i: int) -> Any:
    within, cta = np.arange(launch.threads_per_cta), np.arange(launch.ctas)
    below_block = int(np.prod(launch.block[:i], dtype=np.int64))
    below_grid = int(np.prod(launch.grid[:i], dtype=np.int64))
    values: dict[str, Any] = {
        "tid": np.tile(within // below_block % launch.block[i], launch.ctas),
        "ntid": launch.block[i],
        "ctaid": np.repeat(cta // below_grid % launch.grid[i], launch.threads_per_cta),
        "clusterid": np.repeat(cta // below_grid % launch.grid[i], launch.threads_per_cta),
        "nctaid": launch.grid[i],
        "nclusterid": launch.grid[i],
        "cluster_ctaid": 0,
        "cluster_nctaid": 1,
    }
    return values[base]


def _without_axis(launch: Launch, base: str) -> Any:
    lane = np.tile(np.arange(32, dtype=np.uint32), launch.threads // 32)
    one = np.uint32(1)
    values: dict[str, Any] = {
        "laneid": lane,
        "warpid": np.tile(np.arange(launch.threads_per_cta) // 32, launch.ctas),
        "nwarpid": launch.warps_per_cta,
        "smid": np.repeat(np.arange(launch.ctas), launch.threads_per_cta),
        "nsmid": launch.ctas,
        "gridid": 0,
        "lanemask_eq": one << lane,
        "lanemask_lt": (one << lane) - one,
        "lanemask_le": ((one << lane) - one) | one << lane,
        "lanemask_gt": ~(((one << lane) - one) | one << lane),
        "lanemask_ge": ~((one << lane) - one),
        "cluster_ctarank": 0,
        "cluster_nctarank": 1,
        "dynamic_smem_size": launch.shared_bytes - launch.code.static_shared_bytes,
        "total_smem_size": launch.shared_bytes,
    }
    return values[base]
