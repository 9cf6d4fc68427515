"""Logic, shifts, bit fields, comparison, selection and moves (PTX ISA, "Logic and Shift Instructions",
"Comparison and Selection Instructions", "Data Movement and Conversion Instructions", bit-field part of
"Integer Arithmetic Instructions")."""

from __future__ import annotations

from typing import Any

import numpy as np

from .decode import Execute, Form, opcode
from .elementwise import INTEGERS, Function, elementwise, is_float, required, typed, types
from .floats import flush_subnormals
from .registers import DTYPES, register_class
from .syntax import TYPE_BYTES, Imm, Pair, Reg, Vec

BITS = ("b16", "b32", "b64")
VALUES = (*BITS, *INTEGERS, "f32", "f64")  # types of mov, selp and slct


# -- bitwise ---------------------------------------------------------------------------------------


@opcode("and", "or", "xor")
def build_logic(form: Form) -> Execute:
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[form.instruction.op]
    return elementwise(form, typed(form, types("pred", *BITS)), function, 2)


@opcode("not")
def build_not(form: Form) -> Execute:
    return elementwise(form, typed(form, types("pred", *BITS)), np.invert, 1)


@opcode("cnot")
def build_cnot(form: Form) -> Execute:
    """C's `!`: 1 for zero, 0 for everything else."""
    type_name = typed(form, types(*BITS))
    return elementwise(form, type_name, lambda v: (np.asarray(v) == 0).astype(DTYPES[type_name]), 1)


@opcode("shl", "shr")
def build_shift(form: Form) -> Execute:
    left = form.instruction.op == "shl"
    type_name = typed(form, types(*BITS) if left else types(*BITS, *INTEGERS))
    form.finish(operands=3)
    value, amount = form.read(form.operands[1], type_name), form.read(form.operands[2], "u32")
    write = form.write(form.operands[0], type_name)
    dtype = DTYPES[type_name]
    bits = 8 * dtype.itemsize

    def execute(launch: Any, lanes: Any) -> None:
        x, n = np.asarray(value(launch, lanes.sel)), np.asarray(amount(launch, lanes.sel))
        inside = np.minimum(n, bits - 1).astype(dtype)
        shifted = np.left_shift(x, inside) if left else np.right_shift(x, inside)
        if left or dtype.kind == "u":  # by the width or more: 0, but a signed right shift keeps the sign
            shifted = np.where(n >= bits, dtype.type(0), shifted)
        write(launch, lanes.sel, shifted)

    return execute


@opcode("shf")
def build_funnel_shift(form: Form) -> Execute:
    """Shifts the 64 bits b:a, keeps the upper (left) or lower (right) 32."""
    typed(form, types(b32=("l", "r", "wrap", "clamp")))
    left = required(form, "l", "r") == "l"
    wrap = required(form, "wrap", "clamp") == "wrap"
    form.finish(operands=4)
    low, high, amount = (form.read(operand, "u32") for operand in form.operands[1:4])
    write = form.write(form.operands[0], "b32")

    def execute(launch: Any, lanes: Any) -> None:
        n = np.asarray(amount(launch, lanes.sel))
        n = (n & np.uint32(31) if wrap else np.minimum(n, np.uint32(32))).astype(np.uint64)
        a, b = (np.asarray(r(launch, lanes.sel)).astype(np.uint64) for r in (low, high))
        wide = b << np.uint64(32) | a
        result = (wide << n) >> np.uint64(32) if left else wide >> n
        write(launch, lanes.sel, (result & np.uint64(0xFFFFFFFF)).astype(np.uint32))

    return execute


@opcode("lop3")
def build_lop3(form: Form) -> Execute:
    if {"or", "and"} & set(form.mods):
        raise form.unsupported("lop3 with a predicate result")
    typed(form, types("b32"))
    form.finish(operands=5)
    table = form.operands[4]
    if not isinstance(table, Imm) or not 0 <= table.value <= 0xFF:
        raise form.malformed("the lookup table of lop3 is a literal in 0 .. 255")
    lookup = table.value
    reads = [form.read(operand, "b32") for operand in form.operands[1:4]]
    write = form.write(form.operands[0], "b32")

    def execute(launch: Any, lanes: Any) -> None:
        a, b, c = (np.asarray(r(launch, lanes.sel)) for r in reads)
        result = np.zeros((), np.uint32)
        for index in range(8):  # bit `index` of the table answers a = index[2], b = index[1], c = index[0]
            if lookup >> index & 1:
                term = (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
                result = np.bitwise_or(result, term)
        write(launch, lanes.sel, result)

    return execute


@opcode("prmt")
def build_prmt(form: Form) -> Execute:
    """Picks four of the eight bytes of b:a; a selector's top bit replicates the byte's sign."""
    typed(form, types("b32"))
    form.finish(operands=4)
    reads = [form.read(operand, "b32") for operand in form.operands[1:4]]
    write = form.write(form.operands[0], "b32")

    def execute(launch: Any, lanes: Any) -> None:
        a, b, selector = (np.asarray(r(launch, lanes.sel)) for r in reads)
        both = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
        result = np.zeros((), np.uint64)
        for byte in range(4):
            nibble = (selector >> np.uint32(4 * byte) & np.uint32(15)).astype(np.uint64)
            picked = both >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(0xFF)
            sign = np.where(picked & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            chosen = np.where(nibble & np.uint64(8), sign, picked)
            result = np.bitwise_or(result, chosen << np.uint64(8 * byte))
        write(launch, lanes.sel, result.astype(np.uint32))

    return execute


# -- bit fields ------------------------------------------------------------------------------------


@opcode("bfe")
def build_bfe(form: Form) -> Execute:
    type_name = typed(form, types("u32", "s32", "u64", "s64"))
    form.finish(operands=4)
    value = form.read(form.operands[1], type_name)
    position, length = form.read(form.operands[2], "u32"), form.read(form.operands[3], "u32")
    write = form.write(form.operands[0], type_name)
    dtype = DTYPES[type_name]
    bits = 8 * dtype.itemsize

    def execute(launch: Any, lanes: Any) -> None:
        x = np.asarray(value(launch, lanes.sel)).astype(np.dtype(f"{dtype.kind}8"))
        start = np.asarray(position(launch, lanes.sel)).astype(np.int64) & 0xFF
        count = np.asarray(length(launch, lanes.sel)).astype(np.int64) & 0xFF
        # Bits beyond the top read as the sign (0 if unsigned); then keep `count` bits, sign-extended from the
        # last one.
        stop = np.minimum(start + count, bits)
        shifted = np.right_shift(x, np.minimum(start, 63).astype(x.dtype))
        kept = np.clip(stop - start, 0, 63)
        mask = ((np.int64(1) << kept) - 1).astype(x.dtype)
        mask = np.where(stop - start >= 64, ~x.dtype.type(0), mask)
        field = shifted & mask
        if dtype.kind == "i":
            sign_at = np.clip(stop - 1, 0, 63)
            negative = (x >> sign_at.astype(x.dtype) & x.dtype.type(1)).astype(bool) & (count > 0)
            field = np.where(negative, field | ~mask, field)
        write(launch, lanes.sel, field.astype(dtype))

    return execute


@opcode("bfi")
def build_bfi(form: Form) -> Execute:
    type_name = typed(form, types("b32", "b64"))
    form.finish(operands=5)
    inserted, base = form.read(form.operands[1], type_name), form.read(form.operands[2], type_name)
    position, length = form.read(form.operands[3], "u32"), form.read(form.operands[4], "u32")
    write = form.write(form.operands[0], type_name)
    bits = 8 * DTYPES[type_name].itemsize

    def execute(launch: Any, lanes: Any) -> None:
        a, b = (np.asarray(r(launch, lanes.sel)).astype(np.uint64) for r in (inserted, base))
        start = np.asarray(position(launch, lanes.sel)).astype(np.uint64) & np.uint64(0xFF)
        count = np.asarray(length(launch, lanes.sel)).astype(np.uint64) & np.uint64(0xFF)
        ones = (np.uint64(1) << np.minimum(count, np.uint64(63))) - np.uint64(1)
        full = np.where(count >= 64, ~np.uint64(0), ones)
        mask = np.where(start >= bits, np.uint64(0), full << np.minimum(start, np.uint64(63)))
        result = b & ~mask | (a << np.minimum(start, np.uint64(63))) & mask
        write(launch, lanes.sel, result.astype(DTYPES[type_name]))

    return execute


@opcode("popc", "clz", "brev", "bfind")
def build_bits(form: Form) -> Execute:
    op = form.instruction.op
    mods = ("shiftamt",)
    if op == "bfind":
        table = types(**dict.fromkeys(("u32", "u64", "s32", "s64"), mods))
    else:
        table = types("b32", "b64")
    type_name = typed(form, table)
    amount = form.take("shiftamt") is not None
    form.finish(operands=2)
    read = form.read(form.operands[1], type_name)
    dtype = DTYPES[type_name]
    bits = 8 * dtype.itemsize
    write = form.write(form.operands[0], type_name if op == "brev" else "u32")

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
            else:  # position of the top set bit, or its distance from the top; all ones if there is none
                found = leading if amount else np.uint32(bits - 1) - leading
                result = np.where(leading == bits, np.uint32(0xFFFFFFFF), found)
        write(launch, lanes.sel, result)

    return execute


# -- comparison and selection ----------------------------------------------------------------------

COMPARISONS: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
EQUALITY = ("eq", "ne")
ORDERED = (*EQUALITY, "lt", "le", "gt", "ge")
UNSIGNED = (*ORDERED, "lo", "ls", "hi", "hs")
UNORDERED = (*ORDERED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
LOGIC = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_COMPARED = types(
    **dict.fromkeys(BITS, (*EQUALITY, *LOGIC)),
    **dict.fromkeys(("s16", "s32", "s64"), (*ORDERED, *LOGIC)),
    **dict.fromkeys(("u16", "u32", "u64"), (*UNSIGNED, *LOGIC)),
    **dict.fromkeys(("f64", "bf16"), (*UNORDERED, *LOGIC)),
    **dict.fromkeys(("f32", "f16"), (*UNORDERED, *LOGIC, "ftz")),
)
_SET_RESULTS = ("u32", "s32", "f32", "f16", "bf16", "u16", "s16")


def comparison(form: Form, type_name: str) -> Function:
    """The comparison qualifier. On floats `eq`.. are false and `equ`, `neu`.. true if either is NaN."""
    name = required(form, *UNSIGNED, *UNORDERED)
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    if name == "ne" and is_float(type_name):
        return lambda a, b: (a < b) | (a > b)
    if name in COMPARISONS:
        return COMPARISONS[name]
    base = COMPARISONS[name[:-1]]
    return lambda a, b: base(a, b) | np.isnan(a) | np.isnan(b)


@opcode("setp", "set")
def build_setp(form: Form) -> Execute:
    source_type = form.take_type(*_COMPARED)
    is_set = form.instruction.op == "set"
    result_type = form.take_type(*_SET_RESULTS) if is_set else "pred"
    form.mods.append(source_type)
    typed(form, _COMPARED)
    compare = comparison(form, source_type)
    ftz = form.take("ftz") is not None
    combine = form.take(*LOGIC)
    form.finish(operands=4 if combine else 3)
    a, b = form.read(form.operands[1], source_type), form.read(form.operands[2], source_type)
    c = form.read(form.operands[3], "pred") if combine else None
    target = form.operands[0]
    if is_set and isinstance(target, Pair):
        raise form.malformed("set has one result")
    first = form.write(target.first if isinstance(target, Pair) else target, result_type)
    second = form.write(target.second, "pred") if isinstance(target, Pair) else None
    dtype = DTYPES[result_type]
    true = dtype.type(1) if result_type == "pred" or is_float(result_type) else np.array(-1).astype(dtype)

    def execute(launch: Any, lanes: Any) -> None:
        x, y = a(launch, lanes.sel), b(launch, lanes.sel)
        if ftz:
            x, y = flush_subnormals(x), flush_subnormals(y)
        result = np.asarray(compare(x, y))
        opposite = ~result
        if combine is not None and c is not None:
            other = c(launch, lanes.sel)
            result, opposite = LOGIC[combine](result, other), LOGIC[combine](opposite, other)
        first(launch, lanes.sel, np.where(result, true, dtype.type(0)) if is_set else result)
        if second is not None:
            second(launch, lanes.sel, opposite)

    return execute


@opcode("selp")
def build_selp(form: Form) -> Execute:
    type_name = typed(form, types(*VALUES))
    form.finish(operands=4)
    a, b = form.read(form.operands[1], type_name), form.read(form.operands[2], type_name)
    p = form.read(form.operands[3], "pred")
    write = form.write(form.operands[0], type_name)
    return lambda launch, lanes: write(
        launch, lanes.sel, np.where(p(launch, lanes.sel), a(launch, lanes.sel), b(launch, lanes.sel))
    )


@opcode("slct")
def build_slct(form: Form) -> Execute:
    """a if c >= 0, else b; a NaN in c selects b."""
    by = form.take_type("s32", "f32")
    type_name = typed(form, types(**dict.fromkeys(VALUES, ("ftz",) if by == "f32" else ())))
    ftz = form.take("ftz") is not None
    form.finish(operands=4)
    a, b = (form.read(operand, type_name) for operand in form.operands[1:3])
    c, write = form.read(form.operands[3], by), form.write(form.operands[0], type_name)

    def execute(launch: Any, lanes: Any) -> None:
        selector = c(launch, lanes.sel)
        selector = flush_subnormals(selector) if ftz else selector
        write(launch, lanes.sel, np.where(selector >= 0, a(launch, lanes.sel), b(launch, lanes.sel)))

    return execute


@opcode("copysign")
def build_copysign(form: Form) -> Execute:
    """The sign of a on b. Works on bits, so a NaN keeps its payload."""
    type_name = typed(form, types("f32", "f64"))
    form.finish(operands=3)
    bits = f"b{8 * TYPE_BYTES[type_name]}"
    sign_of, magnitude = form.read(form.operands[1], type_name), form.read(form.operands[2], type_name)
    write = form.write(form.operands[0], bits)
    dtype = DTYPES[bits]
    sign = dtype.type(1 << (8 * dtype.itemsize - 1))

    def execute(launch: Any, lanes: Any) -> None:
        a, b = (np.asarray(r(launch, lanes.sel)).view(dtype) for r in (sign_of, magnitude))
        write(launch, lanes.sel, a & sign | b & ~sign)

    return execute


@opcode("testp")
def build_testp(form: Form) -> Execute:
    """Properties of a float. Zeros count as normal numbers (PTX ISA, "testp")."""
    dtypes = {name: DTYPES[name] for name in ("f32", "f64")}
    names = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    type_name = typed(form, types(**dict.fromkeys(dtypes, names)))
    tiny = np.finfo(dtypes[type_name]).tiny
    tests: dict[str, Function] = {
        "finite": np.isfinite, "infinite": np.isinf, "number": lambda v: ~np.isnan(v), "notanumber": np.isnan,
        "normal": lambda v: np.isfinite(v) & ((np.abs(v) >= tiny) | (v == 0)),
        "subnormal": lambda v: (v != 0) & (np.abs(v) < tiny),
    }  # fmt: skip
    test = tests[required(form, *names)]
    form.finish(operands=2)
    read, write = form.read(form.operands[1], type_name), form.write(form.operands[0], "pred")
    return lambda launch, lanes: write(launch, lanes.sel, np.asarray(test(read(launch, lanes.sel))))


# -- moves and addresses ---------------------------------------------------------------------------


@opcode("mov")
def build_mov(form: Form) -> Execute:
    type_name = typed(form, types("pred", *VALUES))
    form.finish(operands=2)
    target, source = form.operands
    if isinstance(target, Vec) or isinstance(source, Vec):
        return move_packed(form, type_name)
    read, write = form.read(source, type_name), form.write(target, type_name)
    return lambda launch, lanes: write(launch, lanes.sel, read(launch, lanes.sel))


def move_packed(form: Form, type_name: str) -> Execute:
    """`mov.b32 %r, {%rs, %rs}` and the reverse: pack or unpack, element 0 lowest."""
    target, source = form.operands
    items = target.items if isinstance(target, Vec) else form.vector(source)
    if type_name not in BITS or (isinstance(target, Vec) and isinstance(source, Vec)):
        raise form.malformed("packing moves are mov.bN scalar, {vector} or mov.bN {vector}, scalar")
    if len(items) not in (2, 4) or TYPE_BYTES[type_name] < len(items):
        raise form.malformed(f"{len(items)} parts of .{type_name}")
    part_bytes = TYPE_BYTES[type_name] // len(items)
    part = f"b{8 * part_bytes}"
    whole_dtype, part_dtype = DTYPES[type_name], DTYPES[part]
    for item in items:
        held = form.decoder.entry.registers.get(item.name) if isinstance(item, Reg) else None
        if held is not None and part_bytes > 1 and register_class(held) != register_class(part):
            raise form.malformed(f"{item} has the wrong width for {len(items)} parts of .{type_name}")
    if isinstance(target, Vec):
        read = form.read(source, type_name)
        writes = [form.write(item, part) for item in items]

        def unpack_parts(launch: Any, lanes: Any) -> None:
            value = np.atleast_1d(np.ascontiguousarray(read(launch, lanes.sel))).reshape(-1, 1)
            value = value.view(part_dtype)
            for i, write in enumerate(writes):
                write(launch, lanes.sel, value[:, i])

        return unpack_parts
    reads = [form.read(item, part) for item in items]
    write_whole = form.write(target, type_name)

    def pack_parts(launch: Any, lanes: Any) -> None:
        parts = np.broadcast_arrays(*[np.atleast_1d(r(launch, lanes.sel)) for r in reads])
        whole = np.ascontiguousarray(np.stack(parts, axis=1)).view(whole_dtype).reshape(-1)
        write_whole(launch, lanes.sel, whole)

    return pack_parts


@opcode("cvta")
def build_cvta(form: Form) -> Execute:
    """Between a state space's addresses and generic ones."""
    spaces = ("global", "shared", "shared::cta", "local", "const")
    typed(form, types(u64=("to", *spaces)))
    to_space = form.take("to") is not None
    window = required(form, *spaces).removesuffix("::cta")
    form.finish(operands=2)
    read, write = form.read(form.operands[1], "u64"), form.write(form.operands[0], "u64")

    def execute(launch: Any, lanes: Any) -> None:
        base = np.uint64(launch.generic_base(window))
        value = np.asarray(read(launch, lanes.sel))
        write(launch, lanes.sel, value - base if to_space else value + base)

    return execute


@opcode("isspacep")
def build_isspacep(form: Form) -> Execute:
    window = form.take("global", "shared", "shared::cta", "local")
    if window is None:  # constant memory has no window of its own here
        raise form.unsupported("isspacep of this state space is not modelled")
    window = window.removesuffix("::cta")
    form.finish(operands=2)
    read, write = form.read(form.operands[1], "u64"), form.write(form.operands[0], "pred")

    def execute(launch: Any, lanes: Any) -> None:
        address = np.asarray(read(launch, lanes.sel)).astype(np.int64)
        write(launch, lanes.sel, launch.in_window(window, address))

    return execute


# -- no results ------------------------------------------------------------------------------------


@opcode("nanosleep")
def build_nanosleep(form: Form) -> Execute:
    form.take_type("u32")
    form.finish(operands=1)
    form.read(form.operands[0], "u32")
    return lambda launch, lanes: None


@opcode("createpolicy")
def build_createpolicy(form: Form) -> Execute:
    """A cache policy is a hint: it changes no value. The register receives a recognisable pattern."""
    form.take_type("b64")
    if form.take("fractional") is None:
        raise form.unsupported("only createpolicy.fractional is modelled")
    rules = ("evict_last", "evict_normal", "evict_first", "evict_unchanged")
    required(form, *(f"L2::{rule}" for rule in rules))
    form.take("L2::evict_first", "L2::evict_unchanged")
    form.finish(operands=(1, 2))
    if len(form.operands) == 2:
        form.read(form.operands[1], "f32")
    write = form.write(form.operands[0], "b64")
    return lambda launch, lanes: write(launch, lanes.sel, np.uint64(0xCACE))
