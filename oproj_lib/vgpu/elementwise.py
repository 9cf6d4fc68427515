"""What most register-to-register instructions share: which qualifiers a type may have, packed operands,
`.ftz`, NaNs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from .decode import Execute, Form
from .floats import SMALLEST_NORMAL, canonical_nan, clamp_to_one, flush_subnormals
from .registers import DTYPES

Function = Callable[..., Any]
Qualifiers = Mapping[str, tuple[str, ...]]

ROUNDING = ("rn", "rz", "rm", "rp")
FLOATS = ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2")
PACKED = {
    "f16x2": np.dtype(np.float16),
    "bf16x2": np.dtype(ml_dtypes.bfloat16),
    "f32x2": np.dtype(np.float32),
}


def types(*names: str, **qualifiers: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """A qualifier table: `names` take none, the keywords take those listed."""
    return {**dict.fromkeys(names, ()), **qualifiers}


SIGNED = ("s16", "s32", "s64")
INTEGERS = (*SIGNED, "u16", "u32", "u64")


def typed(form: Form, table: Qualifiers) -> str:
    """Takes the type, and refuses every qualifier that the table does not list for it.

    Raises UnsupportedPTX for a type or qualifier that PTX does not have there, or that is not modelled.
    """
    type_name = form.take_type(*table)
    for mod in form.mods:
        if mod not in table[type_name]:
            op = form.instruction.op
            raise form.unsupported(f"qualifier .{mod} of {op}.{type_name} is not valid, or not modelled")
    return type_name


def required(form: Form, *names: str) -> str:
    """Takes one of these qualifiers, which must be there."""
    found = form.take(*names)
    if found is None:
        raise form.malformed(f"{form.instruction.op} needs one of .{', .'.join(names)}")
    return found


def is_float(type_name: str) -> bool:
    return type_name in FLOATS


def element_dtype(type_name: str) -> np.dtype:
    """The numpy dtype of one element: f16 for f16x2."""
    return PACKED.get(type_name, DTYPES[type_name])


def unpack(value: Any, type_name: str) -> Any:
    """A packed operand as pairs: shape (..., 2), element 0 is the low half."""
    return np.atleast_1d(np.asarray(value)).reshape(-1, 1).view(PACKED[type_name])


def elementwise(
    form: Form, type_name: str, function: Function, sources: int, underflows: Function | None = None
) -> Execute:
    """destination = function(sources), all of one type; handles packed types, .ftz, .sat, NaNs.

    `underflows(*sources)`: where the result is the smallest normal number, whether `.ftz` flushes it all the
    same, because only the coarser steps of subnormal numbers lifted it there (seen on an H200).
    """
    ftz = form.take("ftz") is not None
    saturate = is_float(type_name) and form.take("sat") is not None
    form.finish(operands=1 + sources)
    reads = [form.read(operand, type_name) for operand in form.operands[1:]]
    write = form.write(form.operands[0], type_name)
    if not is_float(type_name):
        return lambda launch, lanes: write(
            launch, lanes.sel, function(*[r(launch, lanes.sel) for r in reads])
        )
    packed = type_name in PACKED

    def execute(launch: Any, lanes: Any) -> None:
        values = [r(launch, lanes.sel) for r in reads]
        if packed:
            values = [unpack(v, type_name) for v in values]
        if ftz:
            values = [flush_subnormals(v) for v in values]
        result = function(*values)
        if saturate:
            result = clamp_to_one(result)
        result = canonical_nan(result)
        if ftz:
            result = flush_subnormals(result)
            lifted = np.abs(result) == SMALLEST_NORMAL[result.dtype]
            if underflows is not None and lifted.any():
                zero = np.copysign(result.dtype.type(0), result)
                result = np.where(lifted & underflows(*values), zero, result)
        if packed:
            result = np.ascontiguousarray(result).view(DTYPES[type_name]).reshape(-1)
            result = result if result.size > 1 else result[0]
        write(launch, lanes.sel, result)

    return execute
