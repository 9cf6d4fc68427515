"""Every instruction of the virtual GPU, one at a time, against hardware.

    from oproj_lib import conformance
    for case in conformance.cases():
        wrong = conformance.compare(case, run_on_hardware(case), conformance.expected(case))

`python -m oproj_lib.conformance build DIR` writes cubins and inputs; `python3 DIR/hardware.py DIR OUT` runs them on
a machine with a Hopper GPU, numpy and cuda-bindings; `python -m oproj_lib.conformance record OUT` keeps what it brought
back as `data/conformance_h200.json`, which the tests hold the virtual GPU to.
"""

from __future__ import annotations

from .case import Case, compare, digest, expected, mismatches
from .cubins import build, load
from .registry import cases, families

__all__ = ["Case", "build", "cases", "compare", "digest", "expected", "families", "load", "mismatches"]
