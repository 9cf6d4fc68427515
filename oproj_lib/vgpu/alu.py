"""Arithmetic (PTX ISA, "Integer Arithmetic Instructions", "Floating Point Instructions", "Half Precision
Floating Point Instructions"). Logic, comparison and moves are in `logic`, conversions in `convert`.

Every function works on arrays over threads. Float results with a NaN become the GPU's canonical NaN. The
`.approx` functions return the correctly rounded FP32 value, which hardware may miss by the few units that
the PTX ISA allows.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from . import logic  # noqa: F401  (registers its instructions)
from .decode import Execute, Form, opcode
from .elementwise import (
    INTEGERS,
    ROUNDING,
    SIGNED,
    Function,
    element_dtype,
    elementwise,
    is_float,
    required,
    typed,
    types,
)
from .floats import (
    canonical_nan,
    carry_payload,
    clamp_negative,
    directed_product,
    directed_quotient,
    directed_root,
    directed_sum,
    flush_subnormals,
    fma32,
    fma64,
    fma_narrow,
    fmax,
    fmin,
    narrow,
    quiet,
    sum_underflows,
)
from .registers import DTYPES

# Which qualifiers each type may have, from the syntax boxes of the manual.
_SUM = types(
    *INTEGERS,
    s32=("sat",),
    f32=(*ROUNDING, "ftz", "sat"),
    f32x2=(*ROUNDING, "ftz"),
    f64=ROUNDING,
    f16=("rn", "ftz", "sat"),
    f16x2=("rn", "ftz", "sat"),
    bf16=("rn",),
    bf16x2=("rn",),
)
_INTEGER_PRODUCT = types(
    **{name: ("lo", "hi", "wide") if name[1:] != "64" else ("lo", "hi") for name in INTEGERS}
)
_PRODUCT = {**{name: mods for name, mods in _SUM.items() if is_float(name)}, **_INTEGER_PRODUCT}
_MAD = types(
    **{**_INTEGER_PRODUCT, "s32": ("lo", "hi", "wide", "sat")}, f32=(*ROUNDING, "ftz", "sat"), f64=ROUNDING
)
_FMA = types(
    f32=(*ROUNDING, "ftz", "sat"),
    f32x2=(*ROUNDING, "ftz"),
    f64=ROUNDING,
    f16=("rn", "ftz", "sat", "relu"),
    f16x2=("rn", "ftz", "sat", "relu"),
    bf16=("rn", "relu"),
    bf16x2=("rn", "relu"),
)
_DIV = types(*INTEGERS, f32=(*ROUNDING, "approx", "full", "ftz"), f64=ROUNDING)
_SIGN = types(*SIGNED, "f64", "bf16", "bf16x2", f32=("ftz",), f16=("ftz",), f16x2=("ftz",))
_HALF_MINMAX = ("NaN", "xorsign", "abs")
_MINMAX = types(
    *INTEGERS,
    "f64",
    s32=("relu",),
    f32=("ftz", *_HALF_MINMAX),
    f16=("ftz", *_HALF_MINMAX),
    f16x2=("ftz", *_HALF_MINMAX),
    bf16=_HALF_MINMAX,
    bf16x2=_HALF_MINMAX,
)


def rounded(form: Form, type_name: str, nearest: Function, directed: Function) -> Function:
    """Takes the rounding qualifier. `nearest(*values)` rounds to nearest even; `directed(*values, mode)`
    takes the FP32 operands as FP64."""
    mode = form.take(*ROUNDING)
    if mode in (None, "rn"):
        return nearest
    if type_name == "f64":  # its exact results do not fit into two FP64 numbers
        raise form.unsupported(f"rounding .{mode} of FP64 is not modelled")
    return lambda *values: directed(*(np.asarray(v).astype(np.float64) for v in values), mode)


def second_first(function: Function) -> Function:
    """An FP64 operation whose NaN comes from b, else from c, else from a (see `carry_payload`)."""
    return lambda a, *others: carry_payload(function(a, *others), *others, a)


# -- sums and products -----------------------------------------------------------------------------


@opcode("add", "sub")
def build_add(form: Form) -> Execute:
    if "cc" in form.mods:
        raise form.unsupported("carry (.cc) is not modelled")
    type_name = typed(form, _SUM)
    adds = form.instruction.op == "add"
    function: Function = np.add if adds else np.subtract
    if is_float(type_name):
        sign = 1.0 if adds else -1.0
        function = second_first(function) if type_name == "f64" else function
        return elementwise(
            form,
            type_name,
            rounded(form, type_name, function, lambda a, b, mode: directed_sum(a, sign * b, mode)),
            2,
        )
    if form.take("sat"):
        return elementwise(form, type_name, lambda a, b: saturated(function, a, b), 2)
    return elementwise(form, type_name, function, 2)


def saturated(function: Function, a: Any, b: Any) -> np.ndarray:
    """A sum of two s32, limited to [INT_MIN, INT_MAX]."""
    info = np.iinfo(np.int32)
    exact = function(np.asarray(a).astype(np.int64), np.asarray(b).astype(np.int64))
    return np.clip(exact, info.min, info.max).astype(np.int32)


@opcode("mul")
def build_mul(form: Form) -> Execute:
    type_name = typed(form, _PRODUCT)
    if is_float(type_name):
        underflows = underflow_of_products(form, type_name)
        nearest: Function = second_first(np.multiply) if type_name == "f64" else np.multiply
        function = rounded(form, type_name, nearest, directed_product)
        return elementwise(form, type_name, function, 2, underflows)
    return integer_product(form, type_name, has_addend=False)


def underflow_of_products(form: Form, type_name: str) -> Function:
    """For `elementwise`: a * b, or a * b + c, is too small for a normal number."""
    dtype = element_dtype(type_name)
    nearest = not {"rz", "rm", "rp"} & set(form.mods)

    def underflows(a: Any, b: Any, c: Any = 0.0) -> np.ndarray:
        x, y, z = (np.asarray(v).astype(np.float64) for v in (a, b, c))
        return sum_underflows(x * y, z, dtype, nearest=nearest)

    return underflows


@opcode("mad")
def build_mad(form: Form) -> Execute:
    type_name = typed(form, _MAD)
    if is_float(type_name):  # mad.f32 is fma.f32 on every target with a virtual GPU (sm_20 and later)
        return fused(form, type_name)
    if form.take("sat"):
        raise form.unsupported("mad.hi.sat is not modelled")
    return integer_product(form, type_name, has_addend=True)


@opcode("mul24", "mad24")
def build_mul24(form: Form) -> Execute:
    raise form.unsupported("24-bit products are not modelled")


def integer_product(form: Form, type_name: str, *, has_addend: bool) -> Execute:
    half = required(form, "lo", "hi", "wide")
    result_type = f"{type_name[0]}{2 * int(type_name[1:])}" if half == "wide" else type_name
    result = DTYPES[result_type]
    form.finish(operands=4 if has_addend else 3)
    a, b = (form.read(operand, type_name) for operand in form.operands[1:3])
    addend = form.read(form.operands[3], result_type) if has_addend else None
    write = form.write(form.operands[0], result_type)

    def execute(launch: Any, lanes: Any) -> None:
        x, y = a(launch, lanes.sel), b(launch, lanes.sel)
        if half == "hi":
            product = multiply_high(np.asarray(x), np.asarray(y))
        elif half == "wide":
            product = np.multiply(x, y, dtype=result, casting="unsafe")
        else:
            product = np.multiply(x, y)
        write(launch, lanes.sel, product if addend is None else np.add(product, addend(launch, lanes.sel)))

    return execute


def multiply_high(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The upper half of the double-width product."""
    if x.dtype.itemsize < 8:
        wide = np.dtype(f"{x.dtype.kind}{2 * x.dtype.itemsize}")
        return (x.astype(wide) * y.astype(wide) >> (8 * x.dtype.itemsize)).astype(x.dtype)
    mask = np.uint64(0xFFFFFFFF)
    a, b, s = x.astype(np.uint64), y.astype(np.uint64), np.uint64(32)
    a0, a1, b0, b1 = a & mask, a >> s, b & mask, b >> s
    middle = (a0 * b0 >> s) + (a1 * b0 & mask) + (a0 * b1 & mask)
    high = a1 * b1 + (a1 * b0 >> s) + (a0 * b1 >> s) + (middle >> s)
    if x.dtype.kind == "i":  # two's complement: subtract the other operand where one is negative
        high = high - np.where(x < 0, b, np.uint64(0)) - np.where(y < 0, a, np.uint64(0))
    return high.view(x.dtype)


@opcode("fma")
def build_fma(form: Form) -> Execute:
    return fused(form, typed(form, _FMA))


def fused(form: Form, type_name: str) -> Execute:
    if not set(ROUNDING) & set(form.mods):
        raise form.malformed(f"{form.instruction.op} needs a rounding qualifier")
    relu = form.take("relu") is not None
    if relu and "sat" in form.mods:
        raise form.malformed(".relu and .sat exclude each other")
    dtype = element_dtype(type_name)

    def nearest(a: Any, b: Any, c: Any) -> Any:
        if dtype == np.float64:
            return carry_payload(fma64(a, b, c), b, c, a)
        if dtype == np.float32:
            return fma32(a, b, c)
        result = fma_narrow(a, b, c, dtype)
        return clamp_negative(result) if relu else result

    def directed(a: Any, b: Any, c: Any, mode: str) -> Any:
        return directed_sum(a * b, c, mode)  # FP64 holds the product of two FP32 numbers exactly

    underflows = underflow_of_products(form, type_name)
    return elementwise(form, type_name, rounded(form, type_name, nearest, directed), 3, underflows)


# -- quotients -------------------------------------------------------------------------------------


@opcode("div")
def build_div(form: Form) -> Execute:
    type_name = typed(form, _DIV)
    if not is_float(type_name):
        return elementwise(form, type_name, integer_quotient, 2)
    if not set(form.mods) & {*ROUNDING, "approx", "full"}:
        raise form.malformed("div of floats needs a rounding qualifier, .approx or .full")
    if form.take("approx", "full") == "approx":
        return elementwise(form, type_name, approximate_quotient, 2)
    underflows = underflow_of_quotients(form, type_name)
    function = rounded(form, type_name, np.divide, directed_quotient)
    return elementwise(form, type_name, function, 2, underflows)


def underflow_of_quotients(form: Form, type_name: str) -> Function:
    """For `elementwise`: a / b is too small for a normal number."""
    nearest = not {"rz", "rm", "rp"} & set(form.mods)

    def underflows(a: Any, b: Any) -> np.ndarray:
        x, y = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
        quotient = x / y
        rest = fma64(-quotient, y, x) / y  # FP64 holds the remainder of two FP32 numbers
        return sum_underflows(quotient, rest, element_dtype(type_name), nearest=nearest)

    return underflows


def approximate_quotient(x: Any, y: Any) -> Any:
    """x * (1 / y): for 2^126 < |y| < 2^128 the reciprocal is lost, as if y were infinite (PTX ISA, "div")."""
    large = np.abs(y) > np.float32(2.0**126)
    return np.divide(x, np.where(large, np.copysign(np.float32(np.inf), y), y))


@opcode("rem")
def build_rem(form: Form) -> Execute:
    return elementwise(form, typed(form, types(*INTEGERS)), integer_remainder, 2)


def integer_quotient(x: Any, y: Any) -> Any:
    """Toward zero. Division by zero gives all ones, as an H200 does (the PTX ISA leaves it unspecified)."""
    x, y = np.asarray(x), np.asarray(y)
    zero = y == 0
    divisor = np.where(zero, y.dtype.type(1), y)
    with np.errstate(over="ignore"):
        quotient = np.floor_divide(x, divisor)
        quotient = quotient + ((quotient * divisor != x) & ((x < 0) != (divisor < 0))).astype(x.dtype)
    return np.where(zero, np.array(-1, np.int64).astype(x.dtype), quotient)


def integer_remainder(x: Any, y: Any) -> Any:
    """The sign of the dividend; all ones if the divisor is 0 (see `integer_quotient`)."""
    x, y = np.asarray(x), np.asarray(y)
    return np.where(y == 0, np.array(-1, np.int64).astype(x.dtype), x - integer_quotient(x, y) * y)


# -- sign, minimum, maximum, sums of small products ------------------------------------------------


@opcode("neg", "abs")
def build_sign(form: Form) -> Execute:
    type_name = typed(form, _SIGN)
    negates = form.instruction.op == "neg"
    if not is_float(type_name):
        return elementwise(form, type_name, np.negative if negates else np.abs, 1)
    # neg and abs of floats work on the sign bit. A NaN becomes the canonical one; in FP64 it is made quiet and keeps
    # sign and payload (seen on an H200).
    ftz = form.take("ftz") is not None
    element = element_dtype(type_name)
    bits = np.dtype(f"u{element.itemsize}")
    sign = bits.type(1 << (8 * element.itemsize - 1))
    form.finish(operands=2)
    read, write = form.read(form.operands[1], type_name), form.write(form.operands[0], type_name)

    def execute(launch: Any, lanes: Any) -> None:
        value = np.atleast_1d(np.ascontiguousarray(read(launch, lanes.sel)))
        raw = value.view(bits)
        raw = raw ^ sign if negates else raw & ~sign
        result = canonical_nan(raw.view(element))
        result = np.where(np.isnan(value), quiet(value), result) if element == np.float64 else result
        result = flush_subnormals(result) if ftz else result
        write(launch, lanes.sel, result.view(DTYPES[type_name]))

    return execute


@opcode("min", "max")
def build_minmax(form: Form) -> Execute:
    type_name = typed(form, _MINMAX)
    small = form.instruction.op == "min"
    if not is_float(type_name):
        pick: Function = np.minimum if small else np.maximum
        if form.take("relu"):
            return elementwise(form, type_name, lambda a, b: np.maximum(pick(a, b), np.int32(0)), 2)
        return elementwise(form, type_name, pick, 2)
    number = fmin if small else fmax
    nan = form.take("NaN") is not None
    xorsign = form.take("xorsign") is not None
    if xorsign != (form.take("abs") is not None):
        raise form.malformed(".xorsign and .abs come together")

    def function(a: Any, b: Any) -> Any:
        x, y = (np.abs(a), np.abs(b)) if xorsign else (a, b)
        result = number(x, y)
        if nan:  # .NaN: a NaN operand makes the result NaN
            result = np.where(np.isnan(a) | np.isnan(b), result.dtype.type(np.nan), result)
        if xorsign:
            result = np.where(np.signbit(a) != np.signbit(b), -result, result)
        return result

    if type_name == "f64":
        return elementwise(form, type_name, second_first(number), 2)
    return elementwise(form, type_name, function, 2)


@opcode("sad")
def build_sad(form: Form) -> Execute:
    """c + |a - b|."""
    type_name = typed(form, types(*INTEGERS))
    return elementwise(form, type_name, lambda a, b, c: c + np.where(a > b, a - b, b - a), 3)


@opcode("dp4a")
def build_dot(form: Form) -> Execute:
    """Dot product of four bytes, plus a 32-bit addend."""
    b_type, a_type = form.take_type("u32", "s32"), form.take_type("u32", "s32")
    result_type = "s32" if "s32" in (a_type, b_type) else "u32"
    form.finish(operands=4)
    a, b = form.read(form.operands[1], a_type), form.read(form.operands[2], b_type)
    c, write = form.read(form.operands[3], result_type), form.write(form.operands[0], result_type)

    def octets(value: Any, type_name: str) -> Any:
        raw = np.ascontiguousarray(np.atleast_1d(value)).reshape(-1, 1)
        return raw.view(np.int8 if type_name == "s32" else np.uint8).astype(np.int64)

    def execute(launch: Any, lanes: Any) -> None:
        products = octets(a(launch, lanes.sel), a_type) * octets(b(launch, lanes.sel), b_type)
        total = products.sum(axis=1) + np.asarray(c(launch, lanes.sel)).astype(np.int64)
        write(launch, lanes.sel, total.astype(DTYPES[result_type]))

    return execute


# -- elementary functions --------------------------------------------------------------------------

MATH: dict[str, Function] = {
    "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
    "rcp": lambda v: 1.0 / v, "rsqrt": lambda v: 1.0 / np.sqrt(v),
}  # fmt: skip
_ROUNDED_MATH = types(f32=("approx", *ROUNDING, "ftz"), f64=ROUNDING)
_MATH = {
    "rcp": _ROUNDED_MATH,
    "sqrt": _ROUNDED_MATH,
    "rsqrt": types(f32=("approx", "ftz"), f64=("approx",)),
    "ex2": types(
        f32=("approx", "ftz"),
        f16=("approx",),
        f16x2=("approx",),
        bf16=("approx", "ftz"),
        bf16x2=("approx", "ftz"),
    ),
    "tanh": types(f32=("approx",), f16=("approx",), f16x2=("approx",), bf16=("approx",), bf16x2=("approx",)),
    **dict.fromkeys(("lg2", "sin", "cos"), types(f32=("approx", "ftz"))),
}


@opcode(*MATH)
def build_math(form: Form) -> Execute:
    op = form.instruction.op
    type_name = typed(form, _MATH[op])
    if not set(form.mods) & {"approx", *ROUNDING}:
        raise form.malformed(f"{op} needs .approx or, where it exists, a rounding qualifier")
    if type_name.startswith("bf16") and op == "ex2" and "ftz" not in form.mods:
        raise form.malformed("ex2 of BF16 needs .ftz")
    form.take("approx")
    function = MATH[op]
    dtype = element_dtype(type_name)

    def nearest(value: Any) -> Any:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            exact = function(np.asarray(value).astype(np.float64))
        return narrow(exact, dtype) if dtype.itemsize == 2 else exact.astype(dtype)

    def directed(value: Any, mode: str) -> Any:
        return directed_root(value, mode) if op == "sqrt" else directed_quotient(1.0, value, mode)

    return elementwise(form, type_name, rounded(form, type_name, nearest, directed), 1)
