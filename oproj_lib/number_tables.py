"""Tables of notebook 13: special BF16 values, settings and bits, three ways to add a dot product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
from rich.table import Table

from oproj_lib import bf16
from oproj_lib.fused_dot import EXAMPLES, example, fused_dot, plain_fp32
from oproj_lib.problem import Array
from oproj_lib.reproducibility import Setting
from oproj_lib.summation import differing

SPECIAL: Mapping[str, int] = {
    "zero": 0x0000,
    "smallest subnormal": 0x0001,
    "largest subnormal": 0x007F,
    "smallest normal": 0x0080,
    "one": 0x3F80,
    "256": 0x4380,
    "largest": 0x7F7F,
    "infinity": 0x7F80,
    "NaN, as a GPU writes it": 0x7FFF,
    "minus zero": 0x8000,
}


def special_values_table() -> Table:
    """Bits, fields and value of SPECIAL, and how far the next BF16 is."""
    table = Table(title="some BF16 values")
    for name in ("", "bits", "sign", "exponent", "fraction", "value", "to the next"):
        table.add_column(name, justify="right" if name else "left")
    for name, bits in SPECIAL.items():
        parts, value = bf16.fields(bits), bf16.value_of(bits)
        step = f"{float(bf16.spacing(np.array(value))):.3g}" if parts.exponent < 0xFF else "–"
        row = (str(parts.sign), f"{parts.exponent:08b}", f"{parts.fraction:07b}", f"{value:.6g}", step)
        table.add_row(name, f"{bits:#06x}", *row)
    return table


def settings_table(settings: Sequence[Setting], outs: Sequence[Array]) -> Table:
    """Every setting's order, and how many outputs have other bits than the first one's."""
    table = Table(title=f"bits of {outs[0].size:,} outputs, compared with the first row")
    for name in ("setting", "K parts", "chains", "other bits"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    for setting, out in zip(settings, outs, strict=True):
        parts, chains = setting.order
        count = differing(outs[0], out)
        table.add_row(setting.name, str(parts), str(chains), f"{count:,}" if count else "none")
    return table


def examples_table() -> Table:
    """The examples of `fused_dot`: exactly, by the tensor core, by FP32 in order."""
    table = Table(title="one dot product of 16 terms, three ways", caption="in brackets: the error")
    for name in ("example", "exactly", "tensor core", "FP32, one by one"):
        table.add_column(name, justify="left" if name == "example" else "right")
    for name in EXAMPLES:
        a, b, addend = example(name)
        dot = fused_dot(a, b, addend)
        by_core, by_fp32 = float(dot.result), float(plain_fp32(a, b, addend))
        cells = [f"{value:.10g} ({float(Fraction(value) - dot.exact):+.1e})" for value in (by_core, by_fp32)]
        table.add_row(name, f"{float(dot.exact):.10g}", *cells)
    return table
