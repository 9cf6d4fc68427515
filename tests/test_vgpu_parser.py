"""The grammar of PTX: what is read, with which source line, and what is refused with which PTX line."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest
from vgpu_kernels import REGISTERS, check, load_line, module, refused, run

from oproj_lib import vgpu
from oproj_lib.vgpu.ptx import parse
from oproj_lib.vgpu.syntax import Addr, Imm, Pair, PTXFile, Reg, Sym, Vec

HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"


def entry(body: str, head: str = ".visible .entry k()") -> str:
    return f"{HEADER}{head}\n{{\n{textwrap.dedent(body).strip()}\n}}\n"


def parsed(body: str, head: str = ".visible .entry k()") -> PTXFile:
    return parse(entry(body, head))


def malformed(text: str, line: int, match: str, kind: type[ValueError] = vgpu.MalformedPTX) -> None:
    with pytest.raises(kind, match=match) as caught:
        vgpu.load(text)
    assert f"PTX line {line}:" in str(caught.value)


# -- what is read -----------------------------------------------------------------------------------


def test_operands() -> None:
    body = """
        .reg .b32 %r<4>;
        .reg .b64 %rd<4>;
        .reg .pred %p<4>, flag;
        @!%p1 add.s32 %r0, %r1, -5;
        ld.global.v2.b32 {%r1, _}, [%rd1+-8];
        ld.shared.b32 %r1, [tile];
        ld.global.b32 %r1, [4096];
        setp.lt.s32 %p0|flag, %r1, 0x10;
        mov.u64 %rd1, tile+16;
        mov.f32 %r1, 0f3F800000;
        mov.f64 %rd1, -0d3FF0000000000000;
        mov.u32 %r1, 0777;
        mov.u32 %r1, 0b11U;
        and.pred flag, !%p1, flag;
        ret;
    """
    instructions = parsed(body).entries["k"].instructions
    assert instructions[0].guard == "%p1" and instructions[0].guard_negated
    assert instructions[0].opcode == "add.s32"
    assert instructions[0].operands == (Reg("%r0"), Reg("%r1"), Imm(-5))
    assert instructions[1].operands == (Vec((Reg("%r1"), Sym("_"))), Addr(Reg("%rd1"), -8))
    assert instructions[2].operands == (Reg("%r1"), Addr(Sym("tile"), 0))
    assert instructions[3].operands == (Reg("%r1"), Addr(None, 4096))
    assert instructions[4].operands == (Pair(Reg("%p0"), Reg("flag")), Reg("%r1"), Imm(16))
    assert instructions[5].operands == (Reg("%rd1"), Addr(Sym("tile"), 16))
    assert instructions[6].operands == (Reg("%r1"), Imm(0x3F800000, 32))
    assert instructions[7].operands == (Reg("%rd1"), Imm(0xBFF0000000000000, 64))
    assert instructions[8].operands == (Reg("%r1"), Imm(511))
    assert instructions[9].operands == (Reg("%r1"), Imm(3))
    assert instructions[10].operands == (Reg("flag"), Reg("!%p1"), Reg("flag"))
    assert instructions[10].guard is None


def test_statements_may_share_and_span_lines() -> None:
    body = """
        .reg .b32 %r<4>; mov.u32 %r0, 1; mov.u32 %r1,
          2;
        LOOP: add.u32 %r0,
          %r1, %r1; ret;
    """
    found = parsed(body).entries["k"]
    assert [(i.opcode, i.line) for i in found.instructions] == [
        ("mov.u32", 6),
        ("mov.u32", 6),
        ("add.u32", 8),
        ("ret", 9),
    ]
    assert found.labels == {"LOOP": 2}


def test_comments_keep_line_numbers() -> None:
    body = """
        // one
        .reg .b32 %r<4>; /* two
        three */ mov.u32 %r0, /* inside */ 1; // mov.u32 %r1, 2;
        ret;
    """
    found = parsed(body).entries["k"].instructions
    assert [(i.opcode, i.line) for i in found] == [("mov.u32", 8), ("ret", 9)]


def test_source_lines_from_loc() -> None:
    text = f"""{HEADER}.file 1 "/src//a.py"
.file 2 "/src/b.py", 1234, 56
.visible .entry k()
{{
.reg .b32 %r<2>;
mov.u32 %r0, 1;
.loc 1 10 4
mov.u32 %r0, 2;
.loc 2 7 0, function_name $L__info_string0, inlined_at 1 20 3
mov.u32 %r0, 3;
.loc 2 8 0, function_name $L__info_string0+16, inlined_at 1 21 3
mov.u32 %r0, 4;
ret;
}}
"""
    sources = [i.source for i in parse(text).entries["k"].instructions]
    assert sources[0] is None
    assert sources[1] == vgpu.SourceLine("/src//a.py", 10, 4)
    assert sources[2] == vgpu.SourceLine("/src/b.py", 7, 0, vgpu.SourceLine("/src//a.py", 20, 3))
    assert sources[3] is not None and sources[3].chain() == "b.py:8 <- a.py:21"
    assert sources[4] == sources[3]


def test_inner_scopes_have_registers_of_their_own() -> None:
    body = """
        mov.u32 %r1, 5;
        {
        .reg .b32 %t;
        .reg .b64 %r1;
        mov.u32 %t, 7;
        mov.u64 %r1, 9;
        { .reg .pred %t; setp.eq.u64 %t, %r1, 9; @%t mov.u64 %r1, 11; }
        cvt.u32.u64 %t, %r1;
        st.global.u32 [%out], %t;
        }
        { .reg .b64 %t; mov.u64 %t, 3; st.global.u64 [%out+8], %t; }
        st.global.u32 [%out+4], %r1;
        ret;
    """
    words, report = run(body, out=4, block=1)
    report.raise_for_findings()
    assert words.tolist() == [11, 5, 3, 0]


def test_registers_without_percent_sign() -> None:
    body = "mov.u32 x, 5;\nadd.u32 y$1, x, x;\nst.global.u32 [%out], y$1;\nret;"
    words, report = run(body, out=1, block=1, declarations=[".reg .b32 x, y$1;"])
    report.raise_for_findings()
    assert words.tolist() == [10]


def test_parameters_and_variables() -> None:
    text = f"""{HEADER}
.global .align 4 .b32 table[4] = {{1, 2, 3, -4}};
.global .align 8 .b8 raw[8];
.const .f32 half = 0f3F000000;
.extern .shared .align 128 .b8 dynamic[];
.visible .entry k(
    .param .u64 .ptr .global .align 16 a,
    .param .align 8 .b8 b[24],
    .param .u32 c
)
.reqntid 128, 1, 1
.minnctapersm 2
{{
    .shared .align 16 .b8 tile[64];
    .local .align 8 .b8 frame[16];
    ret;
}}
"""
    file = parse(text)
    k = file.entries["k"]
    assert [(p.name, p.type, p.size, p.align) for p in k.parameters] == [
        ("a", "u64", 8, 8),
        ("b", "b8", 24, 8),
        ("c", "u32", 4, 4),
    ]
    assert k.required_threads == (128, 1, 1)
    assert [(v.name, v.space, v.size, v.align) for v in k.variables] == [
        ("tile", "shared", 64, 16),
        ("frame", "local", 16, 8),
    ]
    table, raw, half, dynamic = file.variables
    assert table.init == np.array([1, 2, 3, -4], np.int32).tobytes()
    assert (raw.size, raw.align, raw.init) == (8, 8, b"")
    assert half.init == np.float32(0.5).tobytes() and half.space == "const"
    assert dynamic.extern and dynamic.size == 0 and dynamic.align == 128
    assert (file.version, file.target) == ("8.6", "sm_90a")


def test_sections_pragmas_and_declarations_are_skipped() -> None:
    text = """.version 8.6
.target sm_90a, debug
.address_size 64
.extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
.visible .entry k()
{
.pragma "nounroll"; .reg .b32 %r<2>; mov.u32 %r0, 1;
ret;
}
.section .debug_str {
L: .b8 116, 101, 0
}
"""
    (found,) = parse(text).entries.values()
    assert [i.opcode for i in found.instructions] == ["mov.u32", "ret"]
    assert HEADER.startswith(".version")


def test_several_entries() -> None:
    text = entry("ret;") + "\n.weak .entry other()\n{\nret;\n}\n"
    assert vgpu.load(text).entries == ("k", "other")


def test_launch_limits_of_an_entry() -> None:
    text = entry("ret;", ".visible .entry k()\n.reqntid 64\n.maxntid 64")
    vgpu.run_ptx(text, "k", 1, 64)
    with pytest.raises(ValueError, match=r"requires \(64, 1, 1\)"):
        vgpu.run_ptx(text, "k", 1, 32)
    with pytest.raises(ValueError, match="allows 64"):
        vgpu.run_ptx(entry("ret;", ".visible .entry k()\n.maxntid 64"), "k", 1, 65)


# -- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "def f():\n    return 1\n",
        "\x7fELF\x02\x01",
        "; ModuleID = 'x'\ntarget triple = 'nvptx64'",
    ],
)
def test_text_that_is_not_ptx(text: str) -> None:
    malformed(text, 1, "not PTX")


def test_text_before_the_version() -> None:
    malformed("hello there;\n.version 8.6\n.target sm_90\n" + entry("ret;"), 1, "begins with .version")


@pytest.mark.parametrize(
    ("text", "line", "match", "kind"),
    [
        (HEADER, 1, "no .entry", vgpu.MalformedPTX),
        (".version 8.6\n.entry k()\n{\nret;\n}\n", 1, "no .target", vgpu.MalformedPTX),
        (".version 8.6 .target sm_90\n.entry k()\n{\nret;\n}\n", 1, "cannot read", vgpu.MalformedPTX),
        (".version 8.6\n.target sm_90 .address_size 64\n", 2, "cannot read", vgpu.MalformedPTX),
        (".version 8.6\n.target sm_90, map_f64_to_f32\n", 2, "target", vgpu.UnsupportedPTX),
        (".version 8.6\n.target sm_90\n.address_size 32\n", 3, "64-bit addresses", vgpu.UnsupportedPTX),
        (HEADER + ".func f()\n{\nret;\n}\n", 4, "device functions", vgpu.UnsupportedPTX),
        (HEADER + ".visible .func (.reg .b32 r) f(.reg .b32 a)\n{\nret;\n}\n", 4, "device functions",
        vgpu.UnsupportedPTX),
        (HEADER + ".alias f, g;\n", 4, "unknown directive", vgpu.UnsupportedPTX),
        (HEADER + "mov.u32 %r0, 1;\n", 4, "unknown directive", vgpu.UnsupportedPTX),
        (HEADER + ".visible .entry k();\n", 4, "without a body", vgpu.MalformedPTX),
        (HEADER + ".visible .entry k()\n{\nret;\n", 4, "without end", vgpu.MalformedPTX),
        (HEADER + ".visible .entry k(\n.param .q64 a)\n{\nret;\n}\n", 4, "q64", vgpu.UnsupportedPTX),
        (HEADER + ".global .b32 a[2] = {1, 2, 3};\n", 4, "12 bytes of initial values for 8",
        vgpu.MalformedPTX),
        (HEADER + ".global .u64 p = other;\n", 4, "not a number", vgpu.UnsupportedPTX),
        (HEADER + ".shared .b32 a = 1;\n", 4, "no initial value", vgpu.MalformedPTX),
        (HEADER + ".global .texref t;\n", 4, "texref", vgpu.UnsupportedPTX),
        (entry("ret;") + entry("ret;")[len(HEADER) :], 8, "defined twice", vgpu.MalformedPTX),
        (entry("ret;", ".entry k()\n.reqnctapercluster 2, 1, 1"), 4, "clusters of one CTA",
        vgpu.UnsupportedPTX),
        (entry("ret;", ".entry k()\n.noreturn"), 4, "noreturn", vgpu.UnsupportedPTX),
        (HEADER + ".version 8.6\n", 4, "second .version", vgpu.MalformedPTX),
    ],
)  # fmt: skip
def test_broken_modules(text: str, line: int, match: str, kind: type[ValueError]) -> None:
    malformed(text, line, match, kind)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("frobnicate.s32 %r0, %r1;", "frobnicate is not modelled"),
        ("ADD.s32 %r0, %r1, %r2;", "not modelled"),
        ("add.s33 %r0, %r1, %r2;", "last qualifier"),
        ("add.fast.s32 %r0, %r1, %r2;", "fast"),
        ("add.s32 %r0, %r1;", "takes 3 operands, not 2"),
        ("add.s32 %r0, %r1, %r2, %r3;", "takes 3 operands, not 4"),
        ("add.s32;", "takes 3 operands, not 0"),
        ("add.s32 %r0, %r1, %r2,;", "operand missing"),
        ("add.s32 %r0 %r1, %r2;", "expected `,`"),
        ("add.s32 %r0, %r1, %r99;", "%r99 is not declared"),
        ("add.s32 %x, %r1, %r2;", "%x is not declared"),
        ("add.s32 %r0, %r1, nothing;", "nothing is not declared"),
        ("@%p77 add.s32 %r0, %r1, %r2;", "%p77 is not declared"),
        ("@%r1 add.s32 %r0, %r1, %r2;", ""),
        ("add.s32 %r0, !%r1, %r2;", ""),
        ("add.s32 5, %r1, %r2;", "expected a register"),
        ("mov.u32 %tid.x, %r1;", ""),
        ("mov.u32 %r1, %tid.w;", "not declared"),
        ("mov.u32 %r1, %envreg3;", "not declared"),
        ("add.s32 %rd0, %r1, %r2;", ""),
        ("add.s32 %r0, %rd1, %r2;", ""),
        ("add.s64 %rd0, %r1, %rd2;", r"%r1 is \.b32"),
        ("add.s64 %r0, %rd1, %rd2;", r"%r0 is \.b32"),
        ("add.f64 %f0, %f1, %f2;", r"is \.f32 where \.f64"),
        ("add.f32 %fd0, %fd1, %fd2;", ""),
        ("add.s32 %h0, %h1, %h2;", r"is \.b16 where \.s32"),
        ("add.s32 %p0, %r1, %r2;", r"%p0 is \.pred"),
        ("and.pred %p0, %r1, %p2;", r"%r1 is \.b32 where \.pred"),
        ("add.s32 %f0, %r1, %r2;", ""),
        ("add.f32 %f0, %f1, 1;", ""),
        ("add.s32 %r0, %r1, 0f3F800000;", ""),
        ("add.s32 %r0, %r1, 1.5;", ""),
        ("add.s32 %r0, %r1, {%r2};", ""),
        ("add.s32 %r0, %r1, [%r2];", ""),
        ("add.s32 %r0|%p0, %r1, %r2;", ""),
        ("bra MISSING;", "unknown label"),
        ("ld.global.b32 %r0, [%rd1+%rd2];", "literal"),
        ("ld.global.b32 %r0, [%h1];", "32 or 64 bits"),
        ("ld.global.b32 %r0, %rd1;", "brackets"),
        ("ld.global.b32 %r0, [%rd1;", "without end"),
        ("ld.global.v2.b32 {%r0}, [%rd1];", "2 elements into 1"),
        ("mov.u32 %r0, -%r1;", "not a number"),
        ("mov.u32 %r0, 1 + 2;", ""),
        ("mov.u32 %r0, #5;", "cannot read operand"),
        ("call (%r0), foo, (%r1);", "not modelled"),
        (".reg .b99 %q;", "register declaration"),
        (".reg .b32 %r1;", "declared twice"),
        (".reg .v4 .f32 %v;", "register declaration"),
        (".reg .b32 a b;", "cannot read"),
        (".frobnicate 5;", "directive"),
        (".branchtargets A, B;", "without a label"),
        (".shared .b32;", "variable declaration"),
        ("123;", "cannot read this instruction"),
    ],
)  # fmt: skip
def test_broken_statements(line: str, match: str) -> None:
    refused(line, match or None)


def test_a_statement_without_semicolon() -> None:
    malformed(entry(".reg .b32 %r<3>;\nmov.u32 %r0, 1\nmov.u32 %r1, 2;\nret;"), 7, "expected `,`")
    malformed(entry("ret"), 6, "without `;`")


def test_a_label_defined_twice() -> None:
    malformed(entry("A:\nret;\nA:\nret;"), 8, "defined twice")


def test_registers_of_a_closed_scope_are_gone() -> None:
    body = "{ .reg .b32 %t; mov.u32 %t, 1; }\nmov.u32 %t, 2;\nret;"
    malformed(entry(body), 7, "%t is not declared")


def test_unreadable_loc() -> None:
    malformed(entry(".loc 1 5 mov.u32\nret;"), 6, "cannot read .loc")


def test_the_message_quotes_the_instruction() -> None:
    with pytest.raises(
        vgpu.UnsupportedPTX,
        match=r"PTX line \d+: .*`tex\.2d\.v4\.f32\.f32 \{%r0, %r1, %r2, %r3\}, \[%rd0, \{%f0, %f1\}\]`",
    ):
        load_line("tex.2d.v4.f32.f32 {%r0, %r1, %r2, %r3}, [%rd0, {%f0, %f1}];")


def test_every_register_of_the_tests_is_valid() -> None:
    load_line("ret;")
    assert len(REGISTERS) == 6
    assert "\t.loc\t1 1 0" in module("ret;")
    check("mov.u32 %d, %a;", "u32 -> u32", [(7, 7)])
