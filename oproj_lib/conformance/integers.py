"""Integer arithmetic, logic, shifts, bit fields, comparison, selection and moves."""

from __future__ import annotations

from .case import Case
from .columns import Column, register_case, simple

INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")
BITS = ("b16", "b32", "b64")
# Truth tables of lop3: constants, single operands, xor, majority, choice, and irregular ones.
LOOKUPS = (0x00, 0xFF, 0xF0, 0xCC, 0xAA, 0x96, 0xE8, 0xCA, 0x80, 0xFE, 0x1B, 0x6A, 0x42)
EQUALITY = ("eq", "ne")
ORDERED = (*EQUALITY, "lt", "le", "gt", "ge")
UNSIGNED = (*ORDERED, "lo", "ls", "hi", "hs")
UNORDERED = (*ORDERED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def cases() -> list[Case]:
    return [*arithmetic(), *products(), *logic(), *bit_fields(), *comparisons(), *selections(), *moves()]


def arithmetic() -> list[Case]:
    family, found = "integer arithmetic", []
    for kind in INTEGERS:
        pairs = [f"{op}.{kind}" for op in ("add", "sub", "min", "max", "div", "rem")]
        if kind == "s32":
            pairs += ["add.sat.s32", "sub.sat.s32", "min.relu.s32", "max.relu.s32"]
        found.append(register_case(f"two operands {kind}", family, (kind, kind), simple(pairs, 2, kind)))
        found.append(register_case(f"sad {kind}", family, (kind,) * 3, simple([f"sad.{kind}"], 3, kind)))
        if kind[0] == "s":
            one = simple([f"neg.{kind}", f"abs.{kind}"], 1, kind)
            found.append(register_case(f"one operand {kind}", family, (kind,), one))
    for a in ("s32", "u32"):
        for b in ("s32", "u32"):
            c = "s32" if "s32" in (a, b) else "u32"
            column = simple([f"dp4a.{a}.{b}"], 3, c)
            found.append(register_case(f"dp4a {a} {b}", family, (a, b, c), column))
    return found


def products() -> list[Case]:
    family, found = "integer products", []
    for kind in INTEGERS:
        halves = simple([f"mul.lo.{kind}", f"mul.hi.{kind}"], 2, kind)
        sums = simple([f"mad.lo.{kind}", f"mad.hi.{kind}"], 3, kind)
        if kind[1:] != "64":
            wide = f"{kind[0]}{2 * int(kind[1:])}"
            halves += simple([f"mul.wide.{kind}"], 2, wide)
            column = simple([f"mad.wide.{kind}"], 3, wide)
            found.append(register_case(f"mad.wide {kind}", family, (kind, kind, wide), column))
        found.append(register_case(f"mul {kind}", family, (kind, kind), halves))
        found.append(register_case(f"mad {kind}", family, (kind,) * 3, sums))
    return found


def logic() -> list[Case]:
    family, found = "logic and shifts", []
    for kind in (*BITS, "pred"):
        pairs = simple([f"{op}.{kind}" for op in ("and", "or", "xor")], 2, kind)
        found.append(register_case(f"logic {kind}", family, (kind, kind), pairs))
        one = [f"not.{kind}"] + ([f"cnot.{kind}"] if kind != "pred" else [])
        found.append(register_case(f"not {kind}", family, (kind,), simple(one, 1, kind)))
    for kind in (*BITS, *INTEGERS):
        shifts = [f"shr.{kind}"] + ([f"shl.{kind}"] if kind[0] == "b" else [])
        column = simple(shifts, 2, kind)
        case = register_case(f"shift {kind}", family, (kind, "u32"), column, types=(kind, "b1_32"))
        found.append(case)
    funnels = [f"shf.{side}.{mode}.b32" for side in "lr" for mode in ("wrap", "clamp")]
    found.append(
        register_case(
            "shf", family, ("b32", "b32", "u32"), simple(funnels, 3, "b32"), types=("b32", "b32", "b1_32")
        )
    )
    lookups = [Column(f"lop3.b32 {{d}}, %a, %b, %c, {table:#x};", ("b32",)) for table in LOOKUPS]
    found.append(register_case("lop3", family, ("b32",) * 3, lookups))
    found.append(register_case("prmt", family, ("b32",) * 3, simple(["prmt.b32"], 3, "b32")))
    return found


def bit_fields() -> list[Case]:
    family, found = "bit fields", []
    for kind in ("u32", "s32", "u64", "s64"):
        column = simple([f"bfe.{kind}"], 3, kind)
        found.append(
            register_case(f"bfe {kind}", family, (kind, "u32", "u32"), column, types=(kind, "b1_32", "b1_32"))
        )
        bfind = simple([f"bfind.{kind}", f"bfind.shiftamt.{kind}"], 1, "u32")
        found.append(register_case(f"bfind {kind}", family, (kind,), bfind))
    for kind in ("b32", "b64"):
        # The value inserted is the base's complement, so that a wrong bit shows.
        text = f"not.{kind} {{d}}, %a;\nbfi.{kind} {{d}}, {{d}}, %a, %b, %c;"
        column = [Column(text, (kind,))]
        found.append(
            register_case(f"bfi {kind}", family, (kind, "u32", "u32"), column, types=(kind, "b1_32", "b1_32"))
        )
        counts = [*simple([f"popc.{kind}", f"clz.{kind}"], 1, "u32"), *simple([f"brev.{kind}"], 1, kind)]
        found.append(register_case(f"counts {kind}", family, (kind,), counts))
    return found


def comparisons() -> list[Case]:
    family, found = "comparison", []
    names = {"b": EQUALITY, "s": ORDERED, "u": UNSIGNED, "f": UNORDERED}
    for kind in (*BITS, *INTEGERS, "f32", "f64", "f16", "bf16"):
        compared = names["f" if kind == "bf16" else kind[0]]
        ftz = ("", ".ftz") if kind in ("f32", "f16") else ("",)
        columns = simple([f"setp.{name}{f}.{kind}" for name in compared for f in ftz], 2, "pred")
        found.append(register_case(f"setp {kind}", family, (kind, kind), columns))
    for kind in ("s32", "f32"):
        columns = [
            Column(f"setp.{name}.{combine}.{kind} {{d}}|{{e}}, %a, %b, {negate}%c;", ("pred", "pred"))
            for name in ("lt", "ne") for combine in ("and", "or", "xor") for negate in ("", "!")
        ]  # fmt: skip
        found.append(register_case(f"setp with a predicate {kind}", family, (kind, kind, "pred"), columns))
    for result, kind in (
        ("u32", "s32"), ("s32", "u32"), ("u32", "f32"), ("s32", "f32"), ("f32", "f32"), ("f32", "s32"), ("u32", "f64"),
        ("f32", "f64"), ("u32", "b32"), ("f16", "f16"), ("u16", "f16"), ("s32", "f16"), ("bf16", "bf16"),
    ):  # fmt: skip
        compared = ("eq", "ne") if kind[0] == "b" and kind != "bf16" else ("eq", "ne", "lt", "ge")
        compared += ("neu", "ltu", "num", "nan") if "f" in kind else ()
        columns = simple([f"set.{name}.{result}.{kind}" for name in compared], 2, result)
        found.append(register_case(f"set {result} {kind}", family, (kind, kind), columns))
    return found


def selections() -> list[Case]:
    family, found = "selection", []
    for kind in (*BITS, *INTEGERS, "f32", "f64"):
        found.append(
            register_case(f"selp {kind}", family, (kind, kind, "pred"), simple([f"selp.{kind}"], 3, kind))
        )
        by_integer = simple([f"slct.{kind}.s32"], 3, kind)
        found.append(register_case(f"slct {kind} by s32", family, (kind, kind, "s32"), by_integer))
    by_float = simple(["slct.b32.f32", "slct.ftz.b32.f32"], 3, "b32")
    found.append(register_case("slct b32 by f32", family, ("b32", "b32", "f32"), by_float))
    guarded = [
        Column("mov.b32 {d}, %a;\n@%c mov.b32 {d}, %b;", ("b32",)),
        Column("mov.b32 {d}, %a;\n@!%c add.u32 {d}, %a, %b;", ("b32",)),
        Column("mov.b32 {d}, 7;\n@%c mul.lo.u32 {d}, %a, %b;", ("b32",)),
    ]
    found.append(register_case("guards", "predication", ("b32", "b32", "pred"), guarded))
    return found


def moves() -> list[Case]:
    family, found = "moves", []
    for kind in (*BITS, *INTEGERS, "f32", "f64", "pred"):
        found.append(register_case(f"mov {kind}", family, (kind,), simple([f"mov.{kind}"], 1, kind)))
    unpack = Column("mov.b32 {{%h0, %h1}}, %a;\nmov.b32 {d}, {{%h1, %h0}};", ("b32",))
    found.append(register_case("mov halves of b32", family, ("b32",), [unpack]))
    found.append(register_case("mov of two words", family, ("b64",), [
        Column("mov.b64 {{%t1, %t2}}, %a;\nmov.b64 {d}, {{%t2, %t1}};", ("b64",)),
        Column("mov.b64 {{%h0, %h1, %h2, %h3}}, %a;\nmov.b64 {d}, {{%h3, %h0, %h2, %h1}};", ("b64",)),
    ]))  # fmt: skip
    return found
