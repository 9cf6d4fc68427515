"""Where the virtual GPU and the recorded hardware differ, and why. Everything else agrees bit for bit.

Approximate functions are not here: each of their cases carries the manual's bound (`Case.tolerance`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .case import Case

Words = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Difference:
    """One known difference. `where`: the result words [threads, columns] of a case that may differ, for `cases`."""

    instructions: str
    hardware: str
    virtual: str
    why: str
    cases: tuple[str, ...]
    where: Callable[[Case], Words]


def beyond_a_byte(case: Case) -> Words:
    """Rows whose start or length, operands b and c, exceeds the manual's range."""
    rows = (case.inputs["b"] > 255) | (case.inputs["c"] > 255)
    return np.broadcast_to(rows[:, None], case.output_shape)


def nwarpid(case: Case) -> Words:
    return np.broadcast_to(np.array(case.columns) == "%nwarpid", case.output_shape)


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "`bfe.u64`, `bfe.s64`, `bfi.b64` with a start or length above 255",
        "takes all 32 bits, so that such a start lies beyond the operand",
        "takes the low 8 bits",
        'PTX ISA, "bfe", "bfi": both operands "are restricted to the 8-bit value range 0..255", and the semantics mask '
        "them with 0xff",
        ("bfe u64", "bfe s64", "bfi b64"),
        beyond_a_byte,
    ),
    Difference(
        "`%nwarpid`",
        "64, the warps that an SM can hold",
        "the warps of the CTA",
        'PTX ISA, "Special Registers: %nwarpid": the maximum number of warp identifiers, a fact of the machine',
        ("special registers",),
        nwarpid,
    ),
)


def known(case: Case) -> Words:
    """The result words [threads, columns] of a case that may differ."""
    words = np.zeros(case.output_shape, bool)
    for difference in DIFFERENCES:
        if case.name in difference.cases:
            words |= difference.where(case)
    return words
