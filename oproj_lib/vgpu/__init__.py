"""A virtual GPU: executes the PTX that compilers really produce, on a CPU, with the rules of the hardware.

>>> from oproj_lib import vgpu
>>> report = vgpu.run_ptx(ptx_text, "kernel", grid=4, block=128, args=[x, y, out, 512], checks=True)
>>> print(report)

Several grids, on streams and ranks, with programmatic dependent launch (see `streams` and `dependence`):

>>> gpu = vgpu.VirtualGPU(ranks=8)
>>> producer = gpu.enqueue(module, grid=112, block=512, args=[...], rank=3)
>>> consumer = gpu.enqueue(other, grid=112, block=128, args=[...], rank=3, pdl=True)
>>> reports = gpu.synchronize(schedule=0, skew={3: 2.0})
"""

from __future__ import annotations

from .dependence import GridTimes
from .machine import Module, VirtualGPU, load, run_ptx
from .memory import Buffer, MulticastWindow
from .report import Counters, Finding, FindingsError, Report
from .streams import GridHandle
from .syntax import MalformedPTX, SourceLine, UnsupportedPTX
from .warmup import warm_up

__all__ = [
    "Buffer",
    "Counters",
    "Finding",
    "FindingsError",
    "GridHandle",
    "GridTimes",
    "MalformedPTX",
    "Module",
    "MulticastWindow",
    "Report",
    "SourceLine",
    "UnsupportedPTX",
    "VirtualGPU",
    "load",
    "run_ptx",
    "warm_up",
]
