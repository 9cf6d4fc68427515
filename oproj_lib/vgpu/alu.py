"""Arithmetic, logic, comparison and data movement between registers (PTX ISA, "Integer / Floating-Point Arithmetic",
"Comparison and Selection", "Logic and Shift", "Data Movement").

Every function works on arrays over threads. Float results with a NaN become the GPU's canonical NaN. The `.approx`
functions return the correctly rounded FP32 value, which hardware may miss by the few units that the PTX ISA allows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from .decode import Execute, Form, opcode
from .floats import canonical_nan, flush_subnormals, fma32, fma64, fmax, fmin
from .ptx import TYPE_BYTES, Imm, Pair, Reg, Vec
from .registers import DTYPES, register_class

INTEGERS = tuple(f"{k}{b}" for k in "bsu" for b in (8, 16, 32, 64))
FLOATS = ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2")
PACKED = {"f16x2": np.dtype(np.float16), "bf16x2": np.dtype(ml_dtypes.bfloat16), "f32x2": np.dtype(np.float32)}
Function = Callable[..., Any]


def is_float(type_name: str) -> bool:
    return type_name in FLOATS


def unpack(value: Any, type_name: str) -> Any:
    """A packed operand as pairs: shape (..., 2), element 0 is the low half."""
    element = PACKED[type_name]
    return np.atleast_1d(np.asarray(value)).reshape(-1, 1).view(element)


def elementwise(form: Form, type_name: str, function: Function, sources: int) -> Execute:
    """destination = function(sources), all of one type; handles packed types, .ftz and canonical NaNs."""
    ftz = form.take("ftz") is not None
    reads = [form.read(operand, type_name) for operand in form.operands[1 : 1 + sources]]
    write = form.write(form.operands[0], type_name)
    form.finish(operands=1 + sources)
    if not is_float(type_name):
        return lambda launch, lanes: write(launch, lanes.sel, function(*[r(launch, lanes.sel) for r in reads]))
    packed = type_name in PACKED

    def execute(launch: Any, lanes: Any) -> None:
        values = [r(launch, lanes.sel) for r in reads]
        if packed:
            values = [unpack(v, type_name) for v in values]
        if ftz:
            values = [flush_subnormals(v) for v in values]
        result = canonical_nan(function(*values))
        if ftz:
            result = flush_subnormals(result)
        if packed:
            result = np.ascontiguousarray(result).view(DTYPES[type_name]).reshape(-1)
            result = result if result.size > 1 else result[0]
        write(launch, lanes.sel, result)

    return execute


def rounded(form: Form, type_name: str, function: Function) -> Function:
    """Applies the rounding qualifier of add, sub, mul, fma. `function` rounds to nearest even; the directed modes exist
    for FP32, where the exact result is a sum of two FP64 numbers."""
    mode = form.take("rn", "rz", "rm", "rp")
    if mode in (None, "rn"):
        return function
    op = form.instruction.op
    if type_name != "f32":
        raise form.unsupported(f"rounding .{mode} is not modelled for {op}.{type_name}")
    terms: dict[str, Function] = {
        "add": lambda a, b: (a, b), "sub": lambda a, b: (a, -b),
        "mul": lambda a, b: (a * b, np.zeros_like(a)), "fma": lambda a, b, c: (a * b, c), "mad": lambda a, b, c: (a * b, c),
    }  # fmt: skip

    def directed(*values: Any) -> Any:
        wide = np.broadcast_arrays(*[np.asarray(v).astype(np.float64) for v in values])
        return round_sum(*terms[op](*wide), mode)

    return directed


def round_sum(x: np.ndarray, y: np.ndarray, mode: str) -> np.ndarray:
    """x + y, exactly, then to FP32 toward zero (rz), down (rm) or up (rp). The error of the FP64 sum comes from Knuth's
    TwoSum, so that the sign of (exact - nearest) is known even where FP64 cannot hold the sum."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = x + y
        part = total - x
        error = np.where(np.isfinite(total), (x - (total - part)) + (y - part), 0.0)
        nearest = total.astype(np.float32)
        above = (total > nearest) | ((total == nearest) & (error > 0))  # the exact sum lies above `nearest`
        below = (total < nearest) | ((total == nearest) & (error < 0))
        lower, higher = np.nextafter(nearest, np.float32(-np.inf)), np.nextafter(nearest, np.float32(np.inf))
    if mode == "rm":
        return np.where(below, lower, nearest)
    if mode == "rp":
        return np.where(above, higher, nearest)
    return np.where(below & (nearest > 0), lower, np.where(above & (nearest < 0), higher, nearest))


def saturate(function: Function, form: Form, type_name: str) -> Function:
    if form.take("sat") is None:
        return function
    if is_float(type_name):
        dtype = PACKED.get(type_name, DTYPES[type_name])
        return lambda *v: fmin(fmax(function(*v), dtype.type(0)), dtype.type(1))
    if type_name != "s32":
        raise form.unsupported(f".sat of .{type_name}")
    wide = lambda v: np.asarray(v).astype(np.int64)  # noqa: E731
    return lambda *v: np.clip(function(*map(wide, v)), -(1 << 31), (1 << 31) - 1).astype(np.int32)


@opcode("add", "sub")
def build_add(form: Form) -> Execute:
    type_name = form.take_type()
    function = np.add if form.instruction.op == "add" else np.subtract
    if form.take("cc"):
        raise form.unsupported("carry (.cc) is not modelled")
    rounding = rounded(form, type_name, function) if is_float(type_name) else function
    return elementwise(form, type_name, saturate(rounding, form, type_name), 2)


@opcode("mul")
def build_mul(form: Form) -> Execute:
    type_name = form.take_type()
    if is_float(type_name):
        return elementwise(form, type_name, saturate(rounded(form, type_name, np.multiply), form, type_name), 2)
    return integer_product(form, type_name, has_addend=False)


@opcode("mad")
def build_mad(form: Form) -> Execute:
    type_name = form.take_type()
    if is_float(type_name):  # mad.rn.f32 is fma.rn.f32 on every target with a virtual GPU (sm_20 and later)
        return fused(form, type_name)
    return integer_product(form, type_name, has_addend=True)


@opcode("mul24", "mad24")
def build_mul24(form: Form) -> Execute:
    raise form.unsupported("24-bit products are not modelled")


def integer_product(form: Form, type_name: str, *, has_addend: bool) -> Execute:
    half = form.take("lo", "hi", "wide")
    if half is None:
        raise form.malformed("an integer product needs .lo, .hi or .wide")
    result_type = type_name
    if half == "wide":
        result_type = f"{type_name[0]}{2 * int(type_name[1:])}"
    result = DTYPES[result_type]
    a, b = (form.read(operand, type_name) for operand in form.operands[1:3])
    addend = form.read(form.operands[3], result_type) if has_addend else None
    write = form.write(form.operands[0], result_type)
    form.finish(operands=4 if has_addend else 3)

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
    return fused(form, form.take_type(*FLOATS))


def fused(form: Form, type_name: str) -> Execute:
    relu = form.take("relu") is not None
    dtype = PACKED.get(type_name, DTYPES[type_name])

    def function(a: Any, b: Any, c: Any) -> Any:
        if dtype == np.float64:
            return fma64(a, b, c)
        if dtype == np.float32:
            return fma32(a, b, c)
        # The FP64 product and sum of 8- or 11-bit significands lose nothing that a 16-bit result could see.
        exact = np.asarray(a).astype(np.float64) * np.asarray(b).astype(np.float64) + np.asarray(c).astype(np.float64)
        result = exact.astype(np.float32).astype(dtype) if dtype == ml_dtypes.bfloat16 else exact.astype(dtype)
        return np.where(result < 0, dtype.type(0), result) if relu else result

    return elementwise(form, type_name, saturate(rounded(form, type_name, function), form, type_name), 3)


@opcode("div", "rem")
def build_div(form: Form) -> Execute:
    type_name = form.take_type()
    op = form.instruction.op
    if is_float(type_name):
        form.take("approx", "full")
        return elementwise(form, type_name, rounded(form, type_name, np.divide), 2)
    return elementwise(form, type_name, integer_quotient if op == "div" else integer_remainder, 2)


def integer_quotient(x: Any, y: Any) -> Any:
    """Toward zero. Division by zero gives all ones, as NVIDIA GPUs do (the PTX ISA leaves it unspecified)."""
    x, y = np.asarray(x), np.asarray(y)
    zero = y == 0
    divisor = np.where(zero, y.dtype.type(1), y)
    with np.errstate(over="ignore"):
        quotient = np.floor_divide(x, divisor)
        quotient = quotient + ((quotient * divisor != x) & ((x < 0) != (divisor < 0))).astype(x.dtype)
    return np.where(zero, np.array(-1, np.int64).astype(x.dtype), quotient)


def integer_remainder(x: Any, y: Any) -> Any:
    x, y = np.asarray(x), np.asarray(y)
    return np.where(y == 0, x, x - integer_quotient(x, y) * y)


@opcode("neg", "abs", "not", "cnot")
def build_unary(form: Form) -> Execute:
    type_name = form.take_type()
    op = form.instruction.op
    if op == "not":
        return elementwise(form, type_name, np.invert, 1)
    if op == "cnot":
        return elementwise(form, type_name, lambda v: (np.asarray(v) == 0).astype(np.asarray(v).dtype), 1)
    if not is_float(type_name):
        return elementwise(form, type_name, np.negative if op == "neg" else np.abs, 1)
    # neg and abs of floats work on the sign bit alone, NaNs included.
    ftz = form.take("ftz") is not None
    element = PACKED.get(type_name, DTYPES[type_name])
    bits = np.dtype(f"u{element.itemsize}")
    sign = bits.type(1 << (8 * element.itemsize - 1))
    read, write = form.read(form.operands[1], type_name), form.write(form.operands[0], type_name)
    form.finish(operands=2)

    def execute(launch: Any, lanes: Any) -> None:
        value = np.atleast_1d(np.ascontiguousarray(read(launch, lanes.sel)))
        raw = value.view(bits)
        raw = raw ^ sign if op == "neg" else raw & ~sign
        result = flush_subnormals(raw.view(element)) if ftz else raw.view(element)
        write(launch, lanes.sel, result.view(DTYPES[type_name]))

    return execute


@opcode("min", "max")
def build_minmax(form: Form) -> Execute:
    type_name = form.take_type()
    small = form.instruction.op == "min"
    if not is_float(type_name):
        return elementwise(form, type_name, np.minimum if small else np.maximum, 2)
    if form.take("NaN"):
        return elementwise(form, type_name, np.minimum if small else np.maximum, len(form.operands) - 1)
    return elementwise(form, type_name, fmin if small else fmax, 2)


@opcode("and", "or", "xor")
def build_logic(form: Form) -> Execute:
    type_name = form.take_type("pred", "b16", "b32", "b64")
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[form.instruction.op]
    return elementwise(form, type_name, function, 2)


@opcode("shl", "shr")
def build_shift(form: Form) -> Execute:
    type_name = form.take_type()
    left = form.instruction.op == "shl"
    value, amount = form.read(form.operands[1], type_name), form.read(form.operands[2], "u32")
    write = form.write(form.operands[0], type_name)
    form.finish(operands=3)
    dtype = DTYPES[type_name]
    bits = 8 * dtype.itemsize

    def execute(launch: Any, lanes: Any) -> None:
        x, n = np.asarray(value(launch, lanes.sel)), np.asarray(amount(launch, lanes.sel))
        inside = np.minimum(n, bits - 1).astype(dtype)
        shifted = np.left_shift(x, inside) if left else np.right_shift(x, inside)
        if left or dtype.kind == "u":  # shifting by the width or more gives 0; a signed right shift keeps the sign
            shifted = np.where(n >= bits, dtype.type(0), shifted)
        write(launch, lanes.sel, shifted)

    return execute


@opcode("shf")
def build_funnel_shift(form: Form) -> Execute:
    form.take_type("b32")
    left = form.take("l", "r") == "l"
    wrap = form.take("wrap", "clamp") == "wrap"
    low, high, amount = (form.read(operand, "u32") for operand in form.operands[1:4])
    write = form.write(form.operands[0], "b32")
    form.finish(operands=4)

    def execute(launch: Any, lanes: Any) -> None:
        n = np.asarray(amount(launch, lanes.sel))
        n = (n & np.uint32(31) if wrap else np.minimum(n, np.uint32(32))).astype(np.uint64)
        wide = np.asarray(high(launch, lanes.sel)).astype(np.uint64) << np.uint64(32) | np.asarray(low(launch, lanes.sel)).astype(np.uint64)
        result = (wide << n) >> np.uint64(32) if left else wide >> n
        write(launch, lanes.sel, (result & np.uint64(0xFFFFFFFF)).astype(np.uint32))

    return execute


@opcode("lop3")
def build_lop3(form: Form) -> Execute:
    form.take_type("b32")
    if form.take("or", "and"):
        raise form.unsupported("lop3 with a predicate result")
    table = form.operands[4]
    if not isinstance(table, Imm):
        raise form.malformed("the lookup table of lop3 is a literal")
    reads = [form.read(operand, "b32") for operand in form.operands[1:4]]
    write = form.write(form.operands[0], "b32")
    form.finish(operands=5)

    def execute(launch: Any, lanes: Any) -> None:
        a, b, c = (np.asarray(r(launch, lanes.sel)) for r in reads)
        result = np.uint32(0)
        for index in range(8):  # bit `index` of the table answers a = index[2], b = index[1], c = index[0]
            if table.value >> index & 1:
                result = result | (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
        write(launch, lanes.sel, result)

    return execute


@opcode("prmt")
def build_prmt(form: Form) -> Execute:
    form.take_type("b32")
    if mode := form.take("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        raise form.unsupported(f"prmt.{mode} is not modelled")
    reads = [form.read(operand, "b32") for operand in form.operands[1:4]]
    write = form.write(form.operands[0], "b32")
    form.finish(operands=4)

    def execute(launch: Any, lanes: Any) -> None:
        a, b, selector = (np.asarray(r(launch, lanes.sel)) for r in reads)
        both = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
        result = np.uint64(0)
        for byte in range(4):
            nibble = (selector >> np.uint32(4 * byte) & np.uint32(15)).astype(np.uint64)
            picked = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
            sign = np.where(picked & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            result = result | np.where(nibble & np.uint64(8), sign, picked) << np.uint64(8 * byte)
        write(launch, lanes.sel, np.asarray(result).astype(np.uint32))

    return execute


@opcode("bfe")
def build_bfe(form: Form) -> Execute:
    type_name = form.take_type("u32", "s32", "u64", "s64")
    value = form.read(form.operands[1], type_name)
    position, length = form.read(form.operands[2], "u32"), form.read(form.operands[3], "u32")
    write = form.write(form.operands[0], type_name)
    form.finish(operands=4)
    dtype = DTYPES[type_name]
    bits = 8 * dtype.itemsize

    def execute(launch: Any, lanes: Any) -> None:
        x = np.asarray(value(launch, lanes.sel)).astype(np.dtype(f"{dtype.kind}8"))
        start = np.asarray(position(launch, lanes.sel)).astype(np.int64) & 0xFF
        count = np.asarray(length(launch, lanes.sel)).astype(np.int64) & 0xFF
        # Bits beyond the top read as the sign (0 if unsigned); then keep `count` bits, sign-extended from the last one.
        stop = np.minimum(start + count, bits)
        shifted = np.right_shift(x, np.minimum(start, 63).astype(x.dtype))
        kept = np.clip(stop - start, 0, 63)
        mask = ((np.int64(1) << kept) - 1).astype(x.dtype)
        mask = np.where(stop - start >= 64, ~x.dtype.type(0), mask)
        field = shifted & mask
        if dtype.kind == "i":
            sign_at = np.clip(np.minimum(start + count, bits) - 1, 0, 63)
            negative = (x >> sign_at.astype(x.dtype) & x.dtype.type(1)).astype(bool) & (count > 0)
            field = np.where(negative, field | ~mask, field)
        write(launch, lanes.sel, field.astype(dtype))

    return execute


@opcode("bfi")
def build_bfi(form: Form) -> Execute:
    type_name = form.take_type("b32", "b64")
    inserted, base = form.read(form.operands[1], type_name), form.read(form.operands[2], type_name)
    position, length = form.read(form.operands[3], "u32"), form.read(form.operands[4], "u32")
    write = form.write(form.operands[0], type_name)
    form.finish(operands=5)
    bits = 8 * DTYPES[type_name].itemsize

    def execute(launch: Any, lanes: Any) -> None:
        a = np.asarray(inserted(launch, lanes.sel)).astype(np.uint64)
        b = np.asarray(base(launch, lanes.sel)).astype(np.uint64)
        start = np.asarray(position(launch, lanes.sel)).astype(np.uint64) & np.uint64(0xFF)
        count = np.asarray(length(launch, lanes.sel)).astype(np.uint64) & np.uint64(0xFF)
        full = np.where(count >= 64, ~np.uint64(0), (np.uint64(1) << np.minimum(count, np.uint64(63))) - np.uint64(1))
        mask = np.where(start >= bits, np.uint64(0), full << np.minimum(start, np.uint64(63)))
        result = b & ~mask | (a << np.minimum(start, np.uint64(63))) & mask
        write(launch, lanes.sel, result.astype(DTYPES[type_name]))

    return execute


@opcode("popc", "clz", "brev", "bfind", "ffs")
def build_bits(form: Form) -> Execute:
    type_name = form.take_type()
    op = form.instruction.op
    amount = form.take("shiftamt") is not None
    read = form.read(form.operands[1], type_name)
    dtype = DTYPES[type_name]
    bits = 8 * dtype.itemsize
    result_type = type_name if op == "brev" else "u32"
    write = form.write(form.operands[0], result_type)
    form.finish(operands=2)

    def execute(launch: Any, lanes: Any) -> None:
        x = np.atleast_1d(np.asarray(read(launch, lanes.sel)))
        if op == "bfind" and dtype.kind == "i":
            x = np.where(x < 0, ~x, x)
        octets = np.ascontiguousarray(x).reshape(-1, 1).view(np.uint8)
        digits = np.unpackbits(octets, axis=1, bitorder="little")  # digits[:, i] is bit i
        if op == "popc":
            result = digits.sum(axis=1).astype(np.uint32)
        elif op == "brev":
            result = np.packbits(digits[:, ::-1], axis=1, bitorder="little").view(dtype).reshape(-1)
        else:
            leading = np.where(digits.any(axis=1), digits[:, ::-1].argmax(axis=1), bits).astype(np.uint32)
            if op == "clz":
                result = leading
            else:  # bfind: position of the top set bit, or its distance from the top; all ones if there is none
                found = leading if amount else np.uint32(bits - 1) - leading
                result = np.where(leading == bits, np.uint32(0xFFFFFFFF), found)
        write(launch, lanes.sel, result)

    return execute


COMPARISONS: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def comparison(form: Form, type_name: str) -> Function:
    """The comparison qualifier. On floats `eq`.. are false and `equ`, `neu`.. true if either is NaN."""
    name = next((m for m in form.mods if m in COMPARISONS or m in ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")), None)
    if name is None:
        raise form.malformed("no comparison operator")
    form.mods.remove(name)
    if name in COMPARISONS:
        if name == "ne" and is_float(type_name):
            return lambda a, b: (a < b) | (a > b)
        return COMPARISONS[name]
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    base = COMPARISONS[name[:-1]]
    return lambda a, b: base(a, b) | np.isnan(a) | np.isnan(b)


@opcode("setp", "set")
def build_setp(form: Form) -> Execute:
    source_type = form.take_type()
    result_type = "pred" if form.instruction.op == "setp" else form.take_type()
    compare = comparison(form, source_type)
    ftz = form.take("ftz") is not None
    combine = form.take("and", "or", "xor")
    if source_type in PACKED:
        raise form.unsupported("packed comparisons")
    a, b = form.read(form.operands[1], source_type), form.read(form.operands[2], source_type)
    c = form.read(form.operands[3], "pred") if combine else None
    target = form.operands[0]
    first = form.write(target.first if isinstance(target, Pair) else target, result_type)
    second = form.write(target.second, "pred") if isinstance(target, Pair) else None
    form.finish(operands=4 if combine else 3)
    logic = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, None: None}[combine]
    true = {"pred": np.bool_(True), "f32": np.float32(1)}.get(result_type, np.array(-1, np.int64).astype(DTYPES[result_type]))

    def execute(launch: Any, lanes: Any) -> None:
        x, y = a(launch, lanes.sel), b(launch, lanes.sel)
        if ftz:
            x, y = flush_subnormals(x), flush_subnormals(y)
        result = np.asarray(compare(x, y))
        opposite = ~result
        if logic is not None and c is not None:
            other = c(launch, lanes.sel)
            result, opposite = logic(result, other), logic(opposite, other)
        if result_type != "pred":
            result = np.where(result, true, np.zeros((), DTYPES[result_type]))
        first(launch, lanes.sel, result)
        if second is not None:
            second(launch, lanes.sel, opposite)

    return execute


@opcode("selp")
def build_selp(form: Form) -> Execute:
    type_name = form.take_type()
    a, b = form.read(form.operands[1], type_name), form.read(form.operands[2], type_name)
    p = form.read(form.operands[3], "pred")
    write = form.write(form.operands[0], type_name)
    form.finish(operands=4)
    return lambda launch, lanes: write(launch, lanes.sel, np.where(p(launch, lanes.sel), a(launch, lanes.sel), b(launch, lanes.sel)))


@opcode("slct")
def build_slct(form: Form) -> Execute:
    by, type_name = form.take_type("s32", "f32"), form.take_type()
    form.take("ftz")
    a, b, c = form.read(form.operands[1], type_name), form.read(form.operands[2], type_name), form.read(form.operands[3], by)
    write = form.write(form.operands[0], type_name)
    form.finish(operands=4)
    return lambda launch, lanes: write(
        launch, lanes.sel, np.where(c(launch, lanes.sel) >= 0, a(launch, lanes.sel), b(launch, lanes.sel))
    )


@opcode("mov")
def build_mov(form: Form) -> Execute:
    type_name = form.take_type()
    target, source = form.operands[0], form.operands[1]
    if isinstance(target, Vec) or isinstance(source, Vec):
        return move_packed(form, type_name)
    form.finish(operands=2)
    read, write = form.read(source, type_name), form.write(target, type_name)
    return lambda launch, lanes: write(launch, lanes.sel, read(launch, lanes.sel))


def move_packed(form: Form, type_name: str) -> Execute:
    """`mov.b32 %r, {%rs, %rs}` and the reverse: pack or unpack, element 0 lowest."""
    target, source = form.operands[0], form.operands[1]
    form.finish(operands=2)
    items = target.items if isinstance(target, Vec) else form.vector(source)
    part_bytes = TYPE_BYTES[type_name] // len(items)
    part = f"b{8 * part_bytes}"
    whole_dtype, part_dtype = DTYPES[type_name], DTYPES[part]
    for item in items:
        if isinstance(item, Reg) and not item.name.startswith("%SR"):
            held = form.decoder.entry.registers.get(item.name)
            if held is not None and part_bytes > 1 and register_class(held) != register_class(part):
                raise form.malformed(f"{item.name} has the wrong width for {len(items)} parts of .{type_name}")
    if isinstance(target, Vec):
        read = form.read(source, type_name)
        writes = [form.write(item, part) for item in items]

        def unpack_parts(launch: Any, lanes: Any) -> None:
            value = np.atleast_1d(np.ascontiguousarray(read(launch, lanes.sel))).reshape(-1, 1).view(part_dtype)
            for i, write in enumerate(writes):
                write(launch, lanes.sel, value[:, i])

        return unpack_parts
    reads = [form.read(item, part) for item in items]
    write_whole = form.write(target, type_name)

    def pack_parts(launch: Any, lanes: Any) -> None:
        parts = np.broadcast_arrays(*[np.atleast_1d(r(launch, lanes.sel)) for r in reads])
        write_whole(launch, lanes.sel, np.ascontiguousarray(np.stack(parts, axis=1)).view(whole_dtype).reshape(-1))

    return pack_parts


MATH: dict[str, Function] = {
    "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
    "rcp": lambda v: 1.0 / v, "rsqrt": lambda v: 1.0 / np.sqrt(v),
}  # fmt: skip


@opcode(*MATH)
def build_math(form: Form) -> Execute:
    type_name = form.take_type("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
    form.take("approx", "rn")
    if mode := form.take("rz", "rm", "rp"):
        raise form.unsupported(f"rounding .{mode}")
    function = MATH[form.instruction.op]
    dtype = PACKED.get(type_name, DTYPES[type_name])

    def compute(value: Any) -> Any:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            exact = function(np.asarray(value).astype(np.float64))
        return exact.astype(np.float32).astype(dtype) if dtype.itemsize == 2 else exact.astype(dtype)

    return elementwise(form, type_name, compute, 1)


@opcode("copysign")
def build_copysign(form: Form) -> Execute:
    return elementwise(form, form.take_type("f32", "f64"), lambda sign, magnitude: np.copysign(magnitude, sign), 2)


@opcode("testp")
def build_testp(form: Form) -> Execute:
    type_name = form.take_type("f32", "f64")
    tiny = np.finfo(DTYPES[type_name]).tiny
    tests: dict[str, Function] = {
        "finite": np.isfinite, "infinite": np.isinf, "number": lambda v: ~np.isnan(v), "notanumber": np.isnan,
        "normal": lambda v: np.isfinite(v) & (np.abs(v) >= tiny), "subnormal": lambda v: (v != 0) & (np.abs(v) < tiny),
    }  # fmt: skip
    name = form.take(*tests)
    if name is None:
        raise form.malformed(f"testp needs one of {', '.join(tests)}")
    read, write = form.read(form.operands[1], type_name), form.write(form.operands[0], "pred")
    form.finish(operands=2)
    return lambda launch, lanes: write(launch, lanes.sel, np.asarray(tests[name](read(launch, lanes.sel))))


@opcode("sad")
def build_sad(form: Form) -> Execute:
    type_name = form.take_type("u32", "s32", "u16", "s16")
    return elementwise(form, type_name, lambda a, b, c: c + np.where(a > b, a - b, b - a), 3)


@opcode("dp4a")
def build_dot(form: Form) -> Execute:
    """Dot product of four bytes, plus a 32-bit addend."""
    b_type, a_type = form.take_type("u32", "s32"), form.take_type("u32", "s32")
    result_type = "s32" if "s32" in (a_type, b_type) else "u32"
    a, b = form.read(form.operands[1], a_type), form.read(form.operands[2], b_type)
    c, write = form.read(form.operands[3], result_type), form.write(form.operands[0], result_type)
    form.finish(operands=4)

    def octets(value: Any, type_name: str) -> Any:
        raw = np.ascontiguousarray(np.atleast_1d(value)).reshape(-1, 1)
        return raw.view(np.int8 if type_name == "s32" else np.uint8).astype(np.int64)

    def execute(launch: Any, lanes: Any) -> None:
        products = octets(a(launch, lanes.sel), a_type) * octets(b(launch, lanes.sel), b_type)
        total = products.sum(axis=1) + np.asarray(c(launch, lanes.sel)).astype(np.int64)
        write(launch, lanes.sel, total.astype(DTYPES[result_type]))

    return execute


@opcode("nanosleep")
def build_nanosleep(form: Form) -> Execute:
    form.take_type("u32")
    form.yields = True
    form.finish(operands=1)
    if not isinstance(form.operands[0], Imm):
        form.read(form.operands[0], "u32")
    return lambda launch, lanes: None


@opcode("createpolicy")
def build_createpolicy(form: Form) -> Execute:
    """A cache policy is a hint: it changes no value. The register receives a recognisable pattern."""
    if not {"fractional"} <= set(form.mods):
        raise form.unsupported("only createpolicy.fractional is modelled")
    form.mods.clear()
    write = form.write(form.operands[0], "b64")
    return lambda launch, lanes: write(launch, lanes.sel, np.uint64(0xCACE))


@opcode("cvta")
def build_cvta(form: Form) -> Execute:
    form.take_type("u64", "u32")
    to_space = form.take("to") is not None
    space = form.take("global", "shared", "shared::cta", "local", "const", "param")
    if space is None:
        raise form.malformed("cvta needs a state space")
    source = form.operands[1]
    read, write = form.read(source, "u64"), form.write(form.operands[0], "u64")
    form.finish(operands=2)
    window = space.removesuffix("::cta")

    def execute(launch: Any, lanes: Any) -> None:
        base = np.uint64(launch.generic_base(window))
        value = np.asarray(read(launch, lanes.sel))
        write(launch, lanes.sel, value - base if to_space else value + base)

    return execute


@opcode("isspacep")
def build_isspacep(form: Form) -> Execute:
    space = form.take("global", "shared", "shared::cta", "local", "const")
    if space is None:
        raise form.unsupported("isspacep of this state space")
    read, write = form.read(form.operands[1], "u64"), form.write(form.operands[0], "pred")
    form.finish(operands=2)
    window = space.removesuffix("::cta")
    return lambda launch, lanes: write(
        launch, lanes.sel, launch.in_window(window, np.asarray(read(launch, lanes.sel)).astype(np.int64))
    )


