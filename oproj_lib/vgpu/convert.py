"""`cvt` (PTX ISA, "Data Movement and Conversion Instructions: cvt"): integer, float and packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .decode import Execute, Form, opcode
from .elementwise import INTEGERS, ROUNDING
from .floats import (
    BF16,
    adjust,
    canonical_nan,
    clamp_negative,
    clamp_to_one,
    flush_subnormals,
    narrow,
    narrow_payload,
    quiet,
)
from .registers import DTYPES

Convert = Callable[[Any], Any]

PACKED_HALVES = {"f16x2": "f16", "bf16x2": "bf16"}
INTEGER_ROUNDING: dict[str, Convert] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
FLOAT_RANK = {"f16": 0, "bf16": 0, "f32": 1, "f64": 2}  # a conversion to a higher rank is exact
SOURCES = ("u8", "s8", *INTEGERS, *FLOAT_RANK)


@opcode("cvt")
def build_cvt(form: Form) -> Execute:
    if "satfinite" in form.mods:
        raise form.unsupported("cvt.satfinite is not modelled")
    source_type = form.take_type(*SOURCES)
    result_type = form.take_type(*SOURCES, "tf32", *PACKED_HALVES)
    rounding = form.take(*ROUNDING, "rna", *INTEGER_ROUNDING)
    check_qualifiers(form, result_type, source_type, rounding)
    ftz, saturate, relu = (form.take(name) is not None for name in ("ftz", "sat", "relu"))
    if result_type in PACKED_HALVES:
        return packed(form, result_type, rounding, relu)
    form.finish(operands=2)
    read, write = form.read(form.operands[1], source_type), form.write(form.operands[0], result_type)
    function = converter(form, result_type, source_type, rounding)
    to_float = result_type in FLOAT_RANK

    def execute(launch: Any, lanes: Any) -> None:
        value = np.asarray(read(launch, lanes.sel))
        if ftz and source_type == "f32" and result_type != "f16":  # an H200 does not flush there
            value = flush_subnormals(canonical_nan(value))
        if saturate and not to_float and source_type not in FLOAT_RANK:
            value = limit(value, DTYPES[result_type])
        result = function(value)
        if ftz and to_float and source_type != "f64":
            result = canonical_nan(result)
        if saturate and to_float:
            result = clamp_to_one(result)
        if relu:
            result = clamp_negative(result)
        if ftz and result_type == "f32":
            result = flush_subnormals(result)
        write(launch, lanes.sel, result)

    return execute


def check_qualifiers(form: Form, result_type: str, source_type: str, rounding: str | None) -> None:
    """The manual's rules on which conversion has which qualifier; raises MalformedPTX or UnsupportedPTX."""
    from_float, to_float = source_type in FLOAT_RANK, result_type in FLOAT_RANK
    narrow_result = result_type in ("f16", "bf16", "tf32", *PACKED_HALVES)
    if result_type in ("tf32", *PACKED_HALVES) and source_type != "f32":
        raise form.unsupported(f"conversion from .{source_type} to .{result_type}")
    allowed: tuple[str | None, ...]
    if result_type == "tf32":
        allowed = ("rna", "rn", "rz")
    elif result_type in PACKED_HALVES:
        allowed = ("rn", "rz")
    elif not to_float:
        allowed = tuple(INTEGER_ROUNDING) if from_float else (None,)
    elif not from_float:
        allowed = ROUNDING
    elif source_type == result_type:
        allowed = (None, *INTEGER_ROUNDING)
    elif FLOAT_RANK[result_type] > FLOAT_RANK[source_type]:
        allowed = (None,) if source_type != "bf16" else (None, *ROUNDING)
    else:
        allowed = ROUNDING
    if rounding not in allowed:
        what = "none" if allowed == (None,) else "one of ." + ", .".join(str(a) for a in allowed if a)
        raise form.malformed(f"rounding of a conversion from .{source_type} to .{result_type}: {what}")
    if "ftz" in form.mods and (
        "f32" not in (source_type, result_type) or result_type in ("tf32", *PACKED_HALVES)
    ):
        raise form.malformed(f".ftz does not apply to .{result_type}.{source_type}")
    if "sat" in form.mods and ((narrow_result and result_type != "f16") or source_type == "bf16"):
        raise form.malformed(f".sat does not apply to .{result_type}.{source_type}")
    if "sat" in form.mods and not from_float and not to_float and holds_all(result_type, source_type):
        raise form.malformed(
            f".sat of .{result_type}.{source_type}: .{result_type} holds every .{source_type}"
        )
    if "relu" in form.mods and not (narrow_result and source_type == "f32" and rounding in ("rn", "rz")):
        raise form.malformed(f".relu does not apply to .{result_type}.{source_type} with this rounding")
    if "relu" in form.mods and {"ftz", "sat"} & set(form.mods):
        raise form.malformed(".relu excludes .ftz and .sat")


def holds_all(result_type: str, source_type: str) -> bool:
    """Whether every value of one integer type is a value of the other."""
    result, source = np.iinfo(DTYPES[result_type]), np.iinfo(DTYPES[source_type])
    return bool(result.min <= source.min and source.max <= result.max)


def packed(form: Form, result_type: str, rounding: str | None, relu: bool) -> Execute:
    """`cvt.rn.bf16x2.f32 d, a, b`: a becomes the upper half, b the lower."""
    function = converter(form, PACKED_HALVES[result_type], "f32", rounding)
    form.finish(operands=3)
    upper, lower = form.read(form.operands[1], "f32"), form.read(form.operands[2], "f32")
    write = form.write(form.operands[0], result_type)

    def execute(launch: Any, lanes: Any) -> None:
        parts = [np.atleast_1d(function(np.asarray(r(launch, lanes.sel)))) for r in (lower, upper)]
        if relu:
            parts = [clamp_negative(p) for p in parts]
        low, high = (np.ascontiguousarray(p).view(np.uint16).astype(np.uint32) for p in parts)
        write(launch, lanes.sel, high << np.uint32(16) | low)

    return execute


def converter(form: Form, result_type: str, source_type: str, rounding: str | None) -> Convert:
    """The function from the source type's numpy dtype to the result's, without .ftz, .sat and .relu."""
    source, result = DTYPES[source_type], DTYPES[result_type]
    if result_type == "tf32":
        return lambda v: to_tf32(v, str(rounding))
    if source_type not in FLOAT_RANK:
        if result_type not in FLOAT_RANK:
            return lambda v: v.astype(result)
        return integer_to_float(form, source, result, rounding)
    if result_type not in FLOAT_RANK:
        wide = source_type == "f64" or result.itemsize == 8
        return float_to_integer(result, INTEGER_ROUNDING[str(rounding)], nan_is_zero=not wide)
    if rounding in INTEGER_ROUNDING:
        function = INTEGER_ROUNDING[str(rounding)]
        return lambda v: canonical_nan(function(v.astype(np.float64)).astype(result))
    exact = FLOAT_RANK[result_type] > FLOAT_RANK[source_type]
    directed = rounding in ("rz", "rm", "rp") and not exact
    if source_type == "f64" and result_type != "f64":
        if directed:
            return lambda v: narrow_payload(v, round_directed(v, result, str(rounding)))
        return lambda v: narrow_payload(v, round_nearest(v, result))
    if directed:
        return lambda v: round_directed(v, result, str(rounding))
    return lambda v: round_nearest(v, result)


# -- integers --------------------------------------------------------------------------------------


def limit(value: np.ndarray, result: np.dtype) -> np.ndarray:
    """`.sat` of integers: to the range of `result`, still in the source's dtype."""
    source, target = np.iinfo(value.dtype), np.iinfo(result)
    return np.clip(value, max(target.min, source.min), min(target.max, source.max)).astype(value.dtype)


def float_to_integer(result: np.dtype, function: Convert, *, nan_is_zero: bool) -> Convert:
    """Clamps to the integer's range. NaN gives 0 from FP32 or narrower to 32 bits or fewer, otherwise the
    top bit alone."""
    info = np.iinfo(result)
    of_nan = np.array(0 if nan_is_zero else 1 << (info.bits - 1), f"u{result.itemsize}").view(result)
    # The largest FP64 number that fits: (double)INT64_MAX would round up, out of range.
    top = np.nextafter(float(info.max), 0) if info.bits == 64 else float(info.max)

    def convert(value: Any) -> Any:
        exact = function(np.asarray(value).astype(np.float64))
        nan = np.isnan(exact)
        clamped = np.clip(np.where(nan, 0.0, exact), float(info.min), top).astype(result)
        clamped = np.where(exact >= float(info.max), result.type(info.max), clamped)
        return np.where(nan, of_nan, clamped)

    return convert


def integer_to_float(form: Form, source: np.dtype, result: np.dtype, rounding: str | None) -> Convert:
    if rounding == "rn":
        if result.itemsize > 2:
            return lambda v: v.astype(result)
        return lambda v: narrow(exact_enough(v), result)
    if source.itemsize == 8:
        raise form.unsupported(f"rounding .{rounding} of 64-bit integers is not modelled")
    return lambda v: round_directed(v.astype(np.float64), result, str(rounding))


def exact_enough(value: np.ndarray) -> np.ndarray:
    """An integer as FP64, odd where 53 bits cannot hold it, so that narrowing it rounds once."""
    if value.dtype.itemsize == 8:
        low = np.array(0x7FF).astype(value.dtype)
        odd = (value & ~low) | np.where(value & low, low + low.dtype.type(1), low.dtype.type(0))
        big = value >= 1 << 53 if value.dtype.kind == "u" else (value >= 1 << 53) | (value <= -(1 << 53))
        value = np.where(big, odd, value)
    return value.astype(np.float64)


# -- floats ----------------------------------------------------------------------------------------


def round_nearest(value: Any, result: np.dtype) -> Any:
    """To nearest, ties to even, one rounding.

    To FP64, and from BF16 to FP32, a NaN keeps sign and payload, as on an H200; other NaNs become canonical.
    """
    value = np.asarray(value)
    if value.dtype == result:
        return canonical_nan(value) if result.itemsize == 2 else value
    if value.dtype == BF16 and result == np.float32:
        bits = np.ascontiguousarray(value).view(np.uint16).reshape(value.shape).astype(np.uint32)
        return (bits << np.uint32(16)).view(np.float32)
    if result == np.float64:
        return quiet(value.astype(result))
    if value.dtype == np.float64 and result.itemsize == 2:
        return canonical_nan(narrow(value, result))
    with np.errstate(over="ignore"):
        return canonical_nan(value.astype(result))


def round_directed(value: Any, result: np.dtype, mode: str) -> Any:
    """Toward zero, down or up: correct the nearest value where it lies on the wrong side."""
    value = np.asarray(value)
    with np.errstate(over="ignore"):
        nearest = value.astype(result)
    wide, exact = nearest.astype(np.float64), value.astype(np.float64)
    return canonical_nan(adjust(nearest, exact > wide, exact < wide, mode).astype(result))


def to_tf32(value: Any, rounding: str) -> Any:
    """FP32 with a 10-bit mantissa; `rna`: ties away from zero, `rn`: ties to even, `rz`: truncation.

    `rna` of a NaN merely drops the low bits, which leaves infinity if nothing else was set (seen on an H200).
    """
    value = value if rounding == "rna" else canonical_nan(value)
    bits = np.ascontiguousarray(value).view(np.uint32).reshape(value.shape)
    special = ~np.isfinite(value)
    if rounding == "rna":
        moved = bits + np.uint32(0x1000)
    elif rounding == "rn":
        moved = bits + np.uint32(0x0FFF) + (bits >> np.uint32(13) & np.uint32(1))
    else:
        moved = bits
    return (np.where(special, bits, moved) & np.uint32(0xFFFFE000)).view(np.float32)
