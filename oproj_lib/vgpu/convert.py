"""`cvt` (PTX ISA, "Data Movement and Conversion Instructions: cvt"): integer, float and packed conversions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from .decode import Execute, Form, opcode
from .floats import canonical_nan, flush_subnormals, fmax, fmin
from .registers import DTYPES

PACKED_HALVES = {"f16x2": "f16", "bf16x2": "bf16"}
INTEGER_ROUNDING: dict[str, Callable[[Any], Any]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@opcode("cvt")
def build_cvt(form: Form) -> Execute:
    source_type = form.take_type()
    result_type = form.take_type()
    rounding = form.take("rn", "rz", "rm", "rp", "rna", *INTEGER_ROUNDING)
    ftz = form.take("ftz") is not None
    saturate = form.take("sat") is not None
    relu = form.take("relu") is not None
    if form.take("satfinite"):
        raise form.unsupported("cvt.satfinite is not modelled")
    if result_type in PACKED_HALVES:
        return packed(form, result_type, source_type, rounding, relu)
    read, write = form.read(form.operands[1], source_type), form.write(form.operands[0], result_type)
    form.finish(operands=2)
    function = converter(form, result_type, source_type, rounding, saturate)

    def execute(launch: Any, lanes: Any) -> None:
        value = np.asarray(read(launch, lanes.sel))
        if ftz and source_type == "f32":
            value = flush_subnormals(value)
        result = function(value)
        if relu:
            result = np.where(result < 0, result.dtype.type(0), result)
        if ftz and result_type == "f32":
            result = flush_subnormals(result)
        write(launch, lanes.sel, result)

    return execute


def packed(form: Form, result_type: str, source_type: str, rounding: str | None, relu: bool) -> Execute:
    """`cvt.rn.bf16x2.f32 d, a, b`: a becomes the upper half, b the lower."""
    if source_type != "f32":
        raise form.unsupported(f"packed conversion from .{source_type}")
    half = PACKED_HALVES[result_type]
    function = converter(form, half, "f32", rounding, False)
    upper, lower = form.read(form.operands[1], "f32"), form.read(form.operands[2], "f32")
    write = form.write(form.operands[0], result_type)
    form.finish(operands=3)

    def execute(launch: Any, lanes: Any) -> None:
        parts = [np.atleast_1d(function(np.asarray(r(launch, lanes.sel)))) for r in (lower, upper)]
        if relu:
            parts = [np.where(p < 0, p.dtype.type(0), p) for p in parts]
        low, high = (np.ascontiguousarray(p).view(np.uint16).astype(np.uint32) for p in parts)
        write(launch, lanes.sel, high << np.uint32(16) | low)

    return execute


def converter(form: Form, result_type: str, source_type: str, rounding: str | None, saturate: bool) -> Callable[[Any], Any]:
    source, result = DTYPES[source_type], DTYPES[result_type]
    from_float, to_float = source_type in ("f16", "bf16", "f32", "f64"), result_type in ("f16", "bf16", "f32", "f64", "tf32")
    if not from_float and not to_float:
        return integer_to_integer(source, result, saturate)
    if from_float and not to_float:
        if rounding not in INTEGER_ROUNDING:
            raise form.malformed("a conversion from float to integer needs .rni, .rzi, .rmi or .rpi")
        return float_to_integer(result, INTEGER_ROUNDING[rounding])
    if not from_float:
        if rounding not in (None, "rn"):
            raise form.unsupported(f"rounding .{rounding} from integer to float")
        return lambda v: round_nearest(v.astype(np.float64), result) if result.itemsize == 2 else v.astype(result)
    return float_to_float(form, result_type, source_type, rounding, saturate)


def float_to_float(form: Form, result_type: str, source_type: str, rounding: str | None, saturate: bool) -> Callable[[Any], Any]:
    result = DTYPES[result_type]
    if result_type == "tf32":
        return lambda v: to_tf32(v, rounding or "rna")
    if rounding in INTEGER_ROUNDING:
        function = INTEGER_ROUNDING[rounding]
        convert = lambda v: canonical_nan(function(v.astype(np.float64)).astype(result))  # noqa: E731
    elif rounding in ("rz", "rm", "rp"):
        convert = lambda v: round_directed(v, result, rounding)  # noqa: E731
    else:
        convert = lambda v: round_nearest(v, result)  # noqa: E731
    if not saturate:
        return convert
    return lambda v: fmin(fmax(convert(v), result.type(0)), result.type(1))


def integer_to_integer(source: np.dtype, result: np.dtype, saturate: bool) -> Callable[[Any], Any]:
    if not saturate:
        return lambda v: v.astype(result)
    low, high = np.iinfo(result).min, np.iinfo(result).max
    low, high = max(low, np.iinfo(source).min), min(high, np.iinfo(source).max)
    return lambda v: np.clip(v, source.type(low), source.type(high)).astype(result)


def float_to_integer(result: np.dtype, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Clamps to the integer's range; NaN gives 0 (for 64-bit results and for narrower ones alike)."""
    info = np.iinfo(result)

    def convert(value: Any) -> Any:
        exact = function(np.asarray(value).astype(np.float64))
        nan = np.isnan(exact)
        # The largest FP64 number that fits: (double)INT64_MAX would round up, out of range.
        top = np.nextafter(float(info.max), 0) if info.bits == 64 else float(info.max)
        clamped = np.clip(np.where(nan, 0.0, exact), float(info.min), top).astype(result)
        return np.where(exact >= float(info.max), result.type(info.max), clamped)

    return convert


def round_nearest(value: Any, result: np.dtype) -> Any:
    """To nearest, ties to even, one rounding (FP64 to BF16 goes through round-to-odd FP32)."""
    value = np.asarray(value)
    with np.errstate(over="ignore"):
        if result == ml_dtypes.bfloat16 and value.dtype == np.float64:
            return canonical_nan(round_to_odd(value).astype(result))
        converted = value.astype(result)
    return canonical_nan(converted) if value.dtype != result else converted


def round_to_odd(value: Any) -> Any:
    """FP64 -> FP32, inexact results get an odd last bit, so that a second rounding is as good as one."""
    nearest = value.astype(np.float32)
    toward_zero = np.where(np.abs(nearest.astype(np.float64)) > np.abs(value), np.nextafter(nearest, np.float32(0)), nearest)
    inexact = toward_zero.astype(np.float64) != value
    bits = np.ascontiguousarray(np.atleast_1d(toward_zero)).view(np.uint32)
    odd = np.where(np.atleast_1d(inexact & np.isfinite(value)), bits | np.uint32(1), bits).view(np.float32)
    return odd.reshape(np.shape(value))


def round_directed(value: Any, result: np.dtype, mode: str) -> Any:
    """Toward zero, down or up: correct the nearest value where it lies on the wrong side."""
    value = np.asarray(value)
    with np.errstate(over="ignore"):
        nearest = value.astype(result)
    wide, exact = nearest.astype(np.float64), value.astype(np.float64)
    down, up = result.type(-np.inf), result.type(np.inf)
    too_high, too_low = wide > exact, wide < exact
    lower, higher = np.nextafter(nearest, down), np.nextafter(nearest, up)
    if mode == "rm":
        fixed = np.where(too_high, lower, nearest)
    elif mode == "rp":
        fixed = np.where(too_low, higher, nearest)
    else:
        fixed = np.where(too_high & (exact > 0), lower, np.where(too_low & (exact < 0), higher, nearest))
    return canonical_nan(fixed.astype(result))


def to_tf32(value: Any, rounding: str) -> Any:
    """FP32 with a 10-bit mantissa; `rna`: ties away from zero, `rn`: ties to even, `rz`: truncation."""
    bits = np.ascontiguousarray(np.atleast_1d(value)).view(np.uint32)
    special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    if rounding == "rna":
        moved = bits + np.uint32(0x1000)
    elif rounding == "rn":
        moved = bits + np.uint32(0x0FFF) + (bits >> np.uint32(13) & np.uint32(1))
    else:
        moved = bits
    return (np.where(special, bits, moved) & np.uint32(0xFFFFE000)).view(np.float32).reshape(np.shape(value))
