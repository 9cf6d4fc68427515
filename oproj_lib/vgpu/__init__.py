"""A virtual GPU: executes the PTX that compilers really produce, on a CPU, with the rules of the hardware.

>>> from oproj_lib import vgpu
>>> report = vgpu.run_ptx(ptx_text, "kernel", grid=4, block=128, args=[x, y, out, 512], checks=True)
>>> print(report)
"""

from __future__ import annotations

from .machine import Module, VirtualGPU, load, run_ptx
from .memory import Buffer, MulticastWindow
from .report import Counters, Finding, FindingsError, Report
from .syntax import MalformedPTX, SourceLine, UnsupportedPTX
from .warmup import warm_up

__all__ = [
    "Buffer",
    "Counters",
    "Finding",
    "FindingsError",
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
