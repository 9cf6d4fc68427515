"""All cases, and which opcodes of the virtual GPU have none."""

from __future__ import annotations

from functools import cache

from . import conversions, floats, integers, matrices, memory, synchronisation, warps, wgmma
from .case import Case

# Opcodes of `oproj_lib.vgpu.decode` without a case, and why.
NOT_COVERED = {
    "applypriority": "a hint to the L2 that PTX allows for 128-byte lines only; the virtual GPU ignores it",
    "brkpt": "stops the kernel, and the context with it, so there is no result to compare",
    "call": "refused by the virtual GPU: compilers inline device functions",
    "discard": "refused by the virtual GPU: it makes memory undefined",
    "mad24": "refused by the virtual GPU",
    "mul24": "refused by the virtual GPU",
    "multimem": "needs a multicast window over several GPUs",
    "tcgen05": "Blackwell only (sm_100a)",
    "trap": "ends the context, so there is no result to compare",
}


@cache
def cases() -> tuple[Case, ...]:
    """All cases, family by family. Names and entries are unique."""
    parts = (integers, floats, conversions, warps, memory, matrices, wgmma, synchronisation)
    return tuple(case for part in parts for case in part.cases())


def families() -> dict[str, int]:
    """Cases per family."""
    count: dict[str, int] = {}
    for case in cases():
        count[case.family] = count.get(case.family, 0) + 1
    return count
