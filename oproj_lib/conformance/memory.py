"""Loads and stores of every width and vector length, in every state space; atomics; asynchronous copies."""

from __future__ import annotations

import numpy as np

from .case import Array, Case, Result, kernel_case, load_operand, register_type, row_pointer
from .operands import seed_of, table

THREADS, GRID = 128, 2
ROW = 32  # bytes per thread
WIDTHS = (8, 16, 32, 64)


def cases() -> list[Case]:
    return [
        *loads(),
        *stores(),
        *addresses(),
        *atomics(),
        ordered_atomics(),
        *contended(),
        *copies(),
        *hints(),
    ]


def octets(text: str, rows: int = THREADS * GRID, width: int = ROW) -> Array:
    """[rows, width] random bytes."""
    return np.random.default_rng(seed_of(text)).integers(0, 256, (rows, width), np.uint8)


def pointer_into(space: str, rows: str = "%thread") -> list[str]:
    """Lines that fill this thread's row of a state space from input `a` and point %l0 at it.

    .global and .const are read where they lie.
    """
    fetch = ["ld.global.v4.b32 {%t4, %t5, %t6, %t7}, [%address];",
             "ld.global.v4.b32 {%t8, %t9, %t10, %t11}, [%address+16];"]  # fmt: skip
    own = row_pointer("a", ROW)
    if space == "global":
        return [*own, "mov.b64 %l0, %address;"]
    if space == "const":
        return ["mov.u64 %l0, constants;", "and.b32 %t1, %thread, 7;", f"mad.wide.u32 %l0, %t1, {ROW}, %l0;"]
    if space == "local":
        place = ["mov.u64 %l0, stack;"]
    else:
        place = ["mov.u64 %l0, rows;", f"mad.wide.u32 %l0, {rows}, {ROW}, %l0;"]
    inner = "shared" if space.startswith("generic") else space
    if space == "generic local":
        inner = "local"
        place = ["mov.u64 %l0, stack;"]
    store = [
        f"st.{inner}.v4.b32 [%l0], {{%t4, %t5, %t6, %t7}};",
        f"st.{inner}.v4.b32 [%l0+16], {{%t8, %t9, %t10, %t11}};",
    ]
    generic = [f"cvta.{inner}.u64 %l0, %l0;"] if space.startswith("generic") else []
    return [*own, *fetch, *place, *store, *generic]


SPACES = {"global": ".global", "shared": ".shared", "local": ".local", "const": ".const", "generic shared": "",
          "generic local": ""}  # fmt: skip
STORAGE = (f".shared .align 16 .b8 rows[{THREADS * ROW}];", f".local .align 16 .b8 stack[{ROW}];")


def loads() -> list[Case]:
    """Every type and vector length; bytes and halves are extended to wider registers by their sign."""
    family, found = "loads", []
    for space, dot in SPACES.items():
        body = pointer_into(space)
        results: list[Result] = []
        for bits in WIDTHS:
            for length in (1, 2, 4):
                if bits * length > 128:
                    continue
                for sign in "bus" if length == 1 else "b":
                    wide = "b64" if bits == 64 or (length == 1 and sign != "b") else "b32"
                    registers = [f"%d{len(results) + i}" for i in range(length)]
                    vector = f".v{length}" if length > 1 else ""
                    target = "{" + ", ".join(registers) + "}" if length > 1 else registers[0]
                    offset = bits * length // 8 if bits * length < 128 else 16
                    text = f"ld{dot}{vector}.{sign}{bits} {target}, [%l0+{offset}];"
                    body.append(text)
                    label = f"ld{dot}{vector}.{sign}{bits} ({space}, .{wide} registers)"
                    results += [Result(r, wide, label) for r in registers]
        found.append(
            kernel_case(f"ld {space}", family, body, results, covers="ld", inputs={"a": octets("ld")},
                        grid=GRID, declarations=STORAGE)
        )  # fmt: skip
    variants = (
        "ld.global.nc", "ld.global.ca", "ld.global.cg", "ld.global.cs", "ld.global.cv", "ld.volatile.global",
        "ld.weak.global",
        "ld.relaxed.gpu.global", "ld.acquire.sys.global", "ld.relaxed.cta.global", "ld.global.L1::no_allocate",
        "ld.global.L1::evict_last", "ld.global.nc.L1::no_allocate.L2::128B", "ldu.global", "ld",
    )  # fmt: skip
    body, results = pointer_into("global"), []
    for name in variants:
        register = f"%d{len(results)}"
        body.append(f"{name}.b32 {register}, [%l0+4];")
        results.append(Result(register, "b32", f"{name}.b32"))
    found.append(
        kernel_case("ld with hints and orders", family, body, results, covers="ld ldu", inputs={"a": octets("ld")},
                    grid=GRID)
    )  # fmt: skip
    guarded = [*row_pointer("a", ROW), "and.b32 %t1, %lane, 1;", "setp.eq.b32 %p1, %t1, 0;", "mov.b32 %d0, 5;",
               "mov.b32 %d1, 6;", "@%p1 ld.global.b32 %d0, [%address];",
               "@!%p1 ld.global.b32 %d1, [%address+8];"]  # fmt: skip
    results = [Result("%d0", "b32", "@p ld.global.b32"), Result("%d1", "b32", "@!p ld.global.b32")]
    found.append(
        kernel_case(
            "ld under a guard",
            "predication",
            guarded,
            results,
            covers="ld",
            inputs={"a": octets("ld")},
            grid=GRID,
        )
    )
    return found


def stores() -> list[Case]:
    """Each store goes into bytes that hold a pattern; the whole row is then read back."""
    family, found = "stores", []
    operands = {"a": octets("st rows"), "b": octets("st values")}
    read_values = [*row_pointer("b", ROW), "ld.global.v2.b64 {%l4, %l5}, [%address];",
                   "ld.global.v2.b64 {%l6, %l7}, [%address+16];", "cvt.u32.u64 %t12, %l4;", "cvt.u32.u64 %t13, %l5;",
                   "cvt.u32.u64 %t14, %l6;", "cvt.u32.u64 %t15, %l7;"]  # fmt: skip
    for space in ("shared", "local", "generic shared", "generic local"):
        dot = SPACES[space]
        for bits in WIDTHS:
            for length in (1, 2, 4):
                if bits * length > 128:
                    continue
                # Narrow scalars come from a wide register: only its low bits may reach memory.
                wide = bits == 64 or (length == 1 and bits < 32)
                chosen = (("%l6", "%l5") if wide else ("%t12", "%t13", "%t14", "%t15"))[:length]
                vector = f".v{length}" if length > 1 else ""
                value = "{" + ", ".join(chosen) + "}" if length > 1 else chosen[0]
                offset = bits * length // 8 if bits * length < 128 else 16
                text = f"st{dot}{vector}.b{bits}"
                body = [*read_values, *pointer_into(space), f"{text} [%l0+{offset}], {value};"]
                registers = [f"%d{i}" for i in range(4)]
                body += [f"ld{dot}.v2.b64 {{%d0, %d1}}, [%l0];", f"ld{dot}.v2.b64 {{%d2, %d3}}, [%l0+16];"]
                results = [
                    Result(r, "b64", f"{text} ({space}), bytes {8 * i}..{8 * i + 7}")
                    for i, r in enumerate(registers)
                ]
                found.append(
                    kernel_case(f"st{vector}.b{bits} {space}", family, body, results, covers="st", inputs=operands,
                                grid=GRID, declarations=STORAGE)
                )  # fmt: skip
    found.append(global_stores(operands["b"]))
    return found


def global_stores(values: Array) -> Case:
    """Global stores of all widths, with hints and orders, into this thread's row of the output itself."""
    body = [*row_pointer("b", ROW), "ld.global.v2.b64 {%l4, %l5}, [%address];",
            "ld.global.v2.b64 {%l6, %l7}, [%address+16];", "cvt.u32.u64 %t12, %l6;"]  # fmt: skip
    forms = ("st.global.b8", "st.global.b16", "st.global.wb.b32", "st.volatile.global.b32", "st.relaxed.gpu.global.b32",
             "st.release.sys.global.b32", "st.global.L1::no_allocate.b32", "st.b32")  # fmt: skip
    body += [
        f"{form} [%slot+{8 * i + 4}], {'%l7' if '8' in form or '16' in form else '%t12'};"
        for i, form in enumerate(forms)
    ]
    # The stores above write the upper halves of the slots; the results below write the lower ones.
    results = [Result(f"%d{i}", "b64", form) for i, form in enumerate(forms)]
    slots = len(forms)
    body = [*body, *(f"mov.b64 %d{i}, 0;" for i in range(slots)),
            *(f"ld.volatile.global.b64 %d{i}, [%slot+{8 * i}];" for i in range(slots))]  # fmt: skip
    return kernel_case("st global", "stores", body, results, covers="st", inputs={"b": values}, grid=GRID)


def addresses() -> list[Case]:
    """Generic addresses and windows. Only differences and predicates are stored: addresses are the machine's own."""
    body = ["mov.u64 %l0, rows;", "mov.u64 %l1, stack;", "ld.param.u64 %l2, [p_a];", "cvta.shared.u64 %l3, %l0;",
            "cvta.local.u64 %l4, %l1;", "cvta.global.u64 %l5, %l2;"]  # fmt: skip
    results: list[Result] = []
    pairs = [("shared", "%l3", "%l0"), ("local", "%l4", "%l1"), ("global", "%l5", "%l2")]
    for space, generic, plain in pairs:
        register = f"%d{len(results)}"
        body += [f"cvta.to.{space}.u64 {register}, {generic};", f"sub.u64 {register}, {register}, {plain};"]
        results.append(Result(register, "b64", f"cvta.to.{space}.u64 of cvta.{space}.u64, minus the operand"))
        for window in ("shared", "shared::cta", "local", "global"):
            flag = f"%d{len(results)}"
            body.append(f"isspacep.{window} {flag}, {generic};")
            results.append(Result(flag, "pred", f"isspacep.{window} of a {space} address"))
    body += [
        "cvt.u32.u64 %t1, %l0;",
        "mapa.shared::cluster.u32 %t2, %t1, 0;",
        f"sub.u32 %d{len(results)}, %t2, %t1;",
    ]
    results.append(
        Result(f"%d{len(results)}", "b32", "mapa.shared::cluster.u32 of rank 0, minus the operand")
    )
    case = kernel_case("cvta, isspacep, mapa", "addresses", body, results, covers="cvta isspacep mapa",
                       inputs={"a": octets("ld")}, grid=GRID, declarations=STORAGE)  # fmt: skip
    return [case]


# -- atomics ---------------------------------------------------------------------------------------

ATOMICS = {
    "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16"),
    "min": ("u32", "s32", "u64", "s64"),
    "max": ("u32", "s32", "u64", "s64"),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "exch": ("b32", "b64"),
    "inc": ("u32",),
    "dec": ("u32",),
    "cas": ("b16", "b32", "b64"),
}


def atomics() -> list[Case]:
    """Every thread owns its word: %a lies in memory, %b is the operand. Columns: old value, word afterwards, and
    the word after `red` of the same operation."""
    family, found = "atomics", []
    for op, kinds in ATOMICS.items():
        for kind in kinds:
            bits = {"f32": 32, "f64": 64, "f16": 16, "bf16": 16}.get(kind) or int(kind[1:])
            name = f"{op}.noftz.{kind}" if kind in ("f16", "bf16") else f"{op}.{kind}"
            a, b = table((kind, kind))
            if op == "cas":  # half of the comparisons hold
                b = np.where(np.arange(a.size) % 2 == 0, a, b)
            third = ", %new" if op == "cas" else ""
            columns = []
            for space, pointer in (("shared", "%t2"), ("global", "%slot")):
                store, load = (
                    f"st.{space}.b{bits} [{pointer}], %a;",
                    f"ld.{space}.b{bits} {{0}}, [{pointer}];",
                )
                place = (
                    ["mov.u32 %t2, words;", "mad.lo.u32 %t2, %thread, 8, %t2;"] if space == "shared" else []
                )
                columns.append(
                    (
                        f"atom.{space}.{name}",
                        [*place, store, f"atom.{space}.{name} {{0}}, [{pointer}], %b{third};"],
                        "old",
                    )
                )
                columns.append((f"atom.{space}.{name}", [load], "new"))
                if op not in ("exch", "cas"):
                    columns.append(
                        (f"red.{space}.{name}", [store, f"red.{space}.{name} [{pointer}], %b;", load], "new")
                    )
            kept = "b" + str(bits)
            body = [*load_operand("a", kind), *load_operand("b", kind)]
            body += [f"not.{kept} %new, %b;"] if third else []
            results: list[Result] = []
            for label, lines, what in columns:
                register = f"%d{len(results)}"
                body += [line.format(register) if "{0}" in line else line for line in lines]
                results.append(Result(register, kind if bits > 16 else f"b{bits}", f"{label} ({what})"))
            declared = (
                f".reg .{register_type(kind)} %a, %b;",
                f".reg .{kept} %new;",
                f".shared .align 16 .b8 words[{THREADS * 8}];",
            )
            found.append(
                kernel_case(f"atom {op} {kind}", family, body, results,
                            covers="atom" if op in ("exch", "cas") else "atom red", inputs={"a": a, "b": b},
                            grid=a.size // THREADS, declarations=declared)
            )  # fmt: skip
    return found


ORDERED_ATOMICS = (
    "atom.add.u32", "atom.relaxed.gpu.global.add.u32", "atom.acq_rel.sys.global.max.u32",
    "atom.acquire.cta.global.xor.b32",
    "atom.release.gpu.global.exch.b32", "atom.relaxed.cta.global.inc.u32", "red.add.u32",
    "red.relaxed.gpu.global.add.u32",
    "red.release.gpu.global.or.b32",
)  # fmt: skip


def ordered_atomics() -> Case:
    """Orders, scopes and generic addresses: one after another on the thread's own word, which is read after each."""
    body = [*load_operand("a", "b32"), "st.global.b32 [%slot], %a;"]
    results: list[Result] = []
    for name in ORDERED_ATOMICS:
        for what in ("old", "new") if name.startswith("atom") else ("new",):
            results.append(Result(f"%d{len(results)}", "b32", f"{name} ({what})"))
            register = results[-1].register
            if what == "old":
                body.append(f"{name} {register}, [%slot], %a;")
            else:
                body += [f"{name} [%slot], %a;"] if name.startswith("red") else []
                body.append(f"ld.volatile.global.b32 {register}, [%slot];")
    return kernel_case(
        "atomics with orders", "atomics", body, results, covers="atom red", inputs={"a": table(("b32",))[0]},
        grid=table(("b32",))[0].size // THREADS, declarations=(".reg .b32 %a;",),
    )  # fmt: skip


def contended() -> list[Case]:
    """Many threads on a few words, with operations whose final value does not depend on the order."""
    operations = ("add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "inc.u32")
    a = np.random.default_rng(seed_of("contended")).integers(0, 1 << 32, 512, np.uint64).astype(np.uint32)
    body = [
        *load_operand("a", "b32"),
        "rem.u32 %t1, %thread, 7;",
        "mov.u32 %t2, words;",
        "mad.lo.u32 %t2, %t1, 4, %t2;",
    ]
    results: list[Result] = []
    for name in operations:
        register = f"%d{len(results)}"
        start = "0xffffffff" if name == "and.b32" else "0"
        operand = "1000000" if name == "inc.u32" else "%a"
        body += ["bar.sync 0;", f"mov.b32 %t3, {start};", "st.shared.b32 [%t2], %t3;", "bar.sync 0;",
                 f"red.shared.{name} [%t2], {operand};", "bar.sync 0;",
                 f"ld.shared.b32 {register}, [%t2];"]  # fmt: skip
        results.append(Result(register, "b32", f"red.shared.{name} by many threads"))
    case = kernel_case("red, contended", "atomics", body, results, covers="red", inputs={"a": a}, grid=4,
                       declarations=(".reg .b32 %a;", ".shared .align 16 .b8 words[32];"))  # fmt: skip
    return [case]


# -- cp.async --------------------------------------------------------------------------------------


def copies() -> list[Case]:
    """cp.async of 4, 8 and 16 bytes into patterned shared memory, with every src-size; then groups."""
    family, found = "cp.async", []
    pattern = [f"mov.b32 %t3, {0xDEADBEEF:#x};", "st.shared.v4.b32 [%t2], {%t3, %t3, %t3, %t3};",
               "st.shared.v4.b32 [%t2+16], {%t3, %t3, %t3, %t3};"]  # fmt: skip
    place = ["mov.u32 %t2, rows;", f"mad.lo.u32 %t2, %thread, {ROW}, %t2;"]
    for size, cache in ((4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")):
        for sized in (False, True):
            lines = [
                *row_pointer("a", ROW),
                *place,
                *pattern,
                "bar.sync 0;",
                f"rem.u32 %t4, %thread, {size + 1};",
            ]
            text = f"cp.async.{cache}.shared.global [%t2+{size % 16}], [%address+16], {size}"
            lines += [f"{text}, %t4;" if sized else f"{text};", "cp.async.wait_all;"]
            lines += ["ld.shared.v2.b64 {%d0, %d1}, [%t2];", "ld.shared.v2.b64 {%d2, %d3}, [%t2+16];"]
            label = f"cp.async.{cache} {size} bytes" + (", src-size thread % (size + 1)" if sized else "")
            results = [Result(f"%d{i}", "b64", f"{label}, bytes {8 * i}..{8 * i + 7}") for i in range(4)]
            found.append(
                kernel_case(label, family, lines, results, covers="cp", inputs={"a": octets("cp")}, grid=GRID,
                            declarations=STORAGE)
            )  # fmt: skip
    groups = [*row_pointer("a", ROW), *place, *pattern]
    groups += ["cp.async.ca.shared.global [%t2], [%address], 8;", "cp.async.commit_group;",
               "cp.async.ca.shared.global [%t2+8], [%address+8], 8;",
               "cp.async.ca.shared.global [%t2+16], [%address+24], 4;",
               "cp.async.commit_group;", "cp.async.commit_group;", "cp.async.wait_group 2;",
               "ld.shared.b64 %d0, [%t2];",
               "cp.async.wait_group 1;", "ld.shared.b64 %d1, [%t2+8];", "ld.shared.b64 %d2, [%t2+16];",
               "cp.async.ca.shared.global [%t2], [%address+16], 8, 8;", "cp.async.commit_group;",
               "cp.async.wait_group 0;",
               "ld.shared.b64 %d3, [%t2];"]  # fmt: skip
    labels = (
        "group 0 after wait_group 2",
        "group 1 after wait_group 1",
        "group 1, second copy",
        "a copy over a copy",
    )
    results = [Result(f"%d{i}", "b64", f"cp.async: {label}") for i, label in enumerate(labels)]
    found.append(
        kernel_case("cp.async groups", family, groups, results, covers="cp", inputs={"a": octets("cp")}, grid=GRID,
                    declarations=STORAGE)
    )  # fmt: skip
    return found


def hints() -> list[Case]:
    """Instructions that change no value: the loads around them must still be right."""
    body = [*row_pointer("a", ROW), "createpolicy.fractional.L2::evict_last.b64 %l1, 1.0;",
            "createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 %l2, 0.5;",
            "prefetch.global.L1 [%address];",
            "prefetch.global.L2 [%address];", "prefetch.global.L2::evict_last [%address];", "prefetchu.L1 [%address];",
            "cp.async.bulk.prefetch.L2.global [%address], 32;", "nanosleep.u32 20;",
            "ld.global.L2::cache_hint.b32 %d0, [%address], %l1;",
            "ld.global.L2::cache_hint.v2.b32 {%d1, %d2}, [%address+8], %l2;",
            "mov.u32 %t2, rows;", f"mad.lo.u32 %t2, %thread, {ROW}, %t2;",
            "cp.async.cg.shared.global.L2::cache_hint [%t2], [%address+16], 16, 16, %l1;", "cp.async.wait_all;",
            "ld.shared.b32 %d3, [%t2+4];"]  # fmt: skip
    labels = (
        "ld with an evict_last policy",
        "ld.v2 with an evict_first policy (x)",
        "(y)",
        "cp.async with a policy",
    )
    results = [Result(f"%d{i}", "b32", label) for i, label in enumerate(labels)]
    case = kernel_case("hints", "hints", body, results, covers="createpolicy prefetch prefetchu cp nanosleep",
                       inputs={"a": octets("cp")}, grid=GRID, declarations=STORAGE)  # fmt: skip
    return [case]
