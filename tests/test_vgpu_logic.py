"""Comparison, selection, moves and addresses, against literals worked out from the PTX ISA manual.

Integers of float types are bit patterns: 0x7FFFFFFF is the canonical NaN of FP32 (PTX ISA,
"Floating-Point Instructions"), 0x7FFF that of F16 and BF16.
"""

from __future__ import annotations

import math

import pytest
from vgpu_kernels import check, refused, run

from oproj_lib import vgpu

INT_MIN, INT_MAX, UINT_MAX = -(2**31), 2**31 - 1, 2**32 - 1
LONG_MIN, LONG_MAX, ULONG_MAX = -(2**63), 2**63 - 1, 2**64 - 1
INF = math.inf
NAN, NAN16 = 0x7FFFFFFF, 0x7FFF
QNAN = 0x7FC00000
TINY = 0x00000001  # smallest FP32 subnormal
ULP = 2.0**-23


# -- comparison and selection -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "expected"),  # for (1, 2), (2, 2), (3, 2)
    [
        ("eq", (0, 1, 0)), ("ne", (1, 0, 1)), ("lt", (1, 0, 0)), ("le", (1, 1, 0)), ("gt", (0, 0, 1)), ("ge",
        (0, 1, 1)),
        ("lo", (1, 0, 0)), ("ls", (1, 1, 0)), ("hi", (0, 0, 1)), ("hs", (0, 1, 1)),
    ],
)  # fmt: skip
def test_integer_comparisons(operator: str, expected: tuple[int, ...]) -> None:
    rows = [(a, 2, bool(e)) for a, e in zip((1, 2, 3), expected, strict=True)]
    check(f"setp.{operator}.u32 %d, %a, %b;", "u32 u32 -> pred", rows)
    check(f"setp.{operator}.u64 %d, %a, %b;", "u64 u64 -> pred", rows)
    if operator in ("lo", "ls", "hi", "hs"):
        refused(f"setp.{operator}.s32 %p0, %r1, %r2;", operator)
    else:
        check(f"setp.{operator}.s16 %d, %a, %b;", "s16 s16 -> pred", rows)


def test_comparisons_are_signed_or_unsigned() -> None:
    check("setp.lt.s32 %d, %a, %b;", "s32 s32 -> pred", [(-1, 1, True), (INT_MIN, INT_MAX, True)])
    check("setp.lt.u32 %d, %a, %b;", "u32 u32 -> pred", [(UINT_MAX, 1, False), (2**31, INT_MAX, False)])
    check("setp.eq.b32 %d, %a, %b;", "b32 b32 -> pred", [(2**31, 2**31, True)])
    check("setp.ne.b64 %d, %a, %b;", "b64 b64 -> pred", [(2**63, 2**63, False), (2**63, 0, True)])


FLOAT_COMPARISONS = {  # for (1, 2), (2, 2), (3, 2), (NaN, 2), (NaN, NaN), (-0, +0)
    "eq": (0, 1, 0, 0, 0, 1), "ne": (1, 0, 1, 0, 0, 0), "lt": (1, 0, 0, 0, 0, 0), "le": (1, 1, 0, 0, 0, 1),
    "gt": (0, 0, 1, 0, 0, 0), "ge": (0, 1, 1, 0, 0, 1), "equ": (0, 1, 0, 1, 1, 1), "neu": (1, 0, 1, 1, 1, 0),
    "ltu": (1, 0, 0, 1, 1, 0), "leu": (1, 1, 0, 1, 1, 1), "gtu": (0, 0, 1, 1, 1, 0), "geu": (0, 1, 1, 1, 1,
    1),
    "num": (1, 1, 1, 0, 0, 1), "nan": (0, 0, 0, 1, 1, 0),
}  # fmt: skip


@pytest.mark.parametrize("operator", FLOAT_COMPARISONS)
def test_float_comparisons(operator: str) -> None:
    expected = [bool(e) for e in FLOAT_COMPARISONS[operator]]
    for type_name, nan in (("f32", QNAN), ("f64", 0x7FF8000000000000), ("f16", NAN16), ("bf16", NAN16)):
        pairs = [(1.0, 2.0), (2.0, 2.0), (3.0, 2.0), (nan, 2.0), (nan, nan), (-0.0, 0.0)]
        rows = [(*pair, e) for pair, e in zip(pairs, expected, strict=True)]
        check(f"setp.{operator}.{type_name} %d, %a, %b;", f"{type_name} {type_name} -> pred", rows)


def test_comparison_flushes_subnormals_only_with_ftz() -> None:
    rows = [(TINY, 0.0), (0x80000001, TINY)]
    check("setp.eq.f32 %d, %a, %b;", "f32 f32 -> pred", [(*row, False) for row in rows])
    check("setp.eq.ftz.f32 %d, %a, %b;", "f32 f32 -> pred", [(*row, True) for row in rows])
    check("setp.gt.ftz.f16 %d, %a, %b;", "f16 f16 -> pred", [(0x0001, 0.0, False), (0x0400, 0.0, True)])


def test_comparison_with_two_results_and_a_combining_predicate() -> None:
    # p = (a < b) BoolOp c, q = !(a < b) BoolOp c
    table = [(a, 2, c) for a in (1, 3) for c in (False, True)]
    for name, function in (
        ("and", lambda x, y: x and y),
        ("or", lambda x, y: x or y),
        ("xor", lambda x, y: x != y),
    ):
        rows = [(a, b, c, function(a < b, c), function(not a < b, c)) for a, b, c in table]
        check(f"setp.lt.{name}.s32 %d|%q, %a, %b, %c;", "s32 s32 pred -> pred pred", rows)
        negated = [(a, b, c, function(a < b, not c)) for a, b, c in table]
        check(f"setp.lt.{name}.s32 %d, %a, %b, !%c;", "s32 s32 pred -> pred", negated)
    check(
        "setp.lt.f32 %d|%q, %a, %b;",
        "f32 f32 -> pred pred",
        [(1.0, 2.0, True, False), (QNAN, 2.0, False, True)],
    )
    check("setp.eq.u32 %d|_, %a, %b;", "u32 u32 -> pred", [(4, 4, True)])
    check("setp.eq.u32 _|%d, %a, %b;", "u32 u32 -> pred", [(4, 4, False)])


def test_set_writes_all_ones_or_one() -> None:
    check("set.lt.u32.s32 %d, %a, %b;", "s32 s32 -> u32", [(-1, 1, UINT_MAX), (1, -1, 0)])
    check("set.lt.s32.f32 %d, %a, %b;", "f32 f32 -> s32", [(1.0, 2.0, -1), (QNAN, 2.0, 0)])
    check("set.lt.f32.u32 %d, %a, %b;", "u32 u32 -> f32", [(1, 2, 1.0), (2, 1, 0.0)])
    check("set.geu.f16.f16 %d, %a, %b;", "f16 f16 -> f16", [(1.0, 2.0, 0.0), (NAN16, 2.0, 1.0)])
    check("set.ge.bf16.bf16 %d, %a, %b;", "bf16 bf16 -> bf16", [(2.0, 2.0, 1.0)])
    check("set.eq.u16.f16 %d, %a, %b;", "f16 f16 -> u16", [(2.0, 2.0, 0xFFFF)])
    check(
        "set.eq.and.u32.s32 %d, %a, %b, %c;",
        "s32 s32 pred -> u32",
        [(2, 2, True, UINT_MAX), (2, 2, False, 0)],
    )


def test_select() -> None:
    check("selp.b32 %d, %a, %b, %c;", "b32 b32 pred -> b32", [(1, 2, True, 1), (1, 2, False, 2)])
    check("selp.f64 %d, %a, %b, %c;", "f64 f64 pred -> f64", [(1.5, -0.0, False, -0.0)])
    check("selp.b16 %d, %a, %b, !%c;", "b16 b16 pred -> b16", [(1, 2, True, 2)])
    check("selp.s64 %d, -1, 7, %a;", "pred -> s64", [(True, -1), (False, 7)])
    check(
        "selp.f32 %d, %a, %b, %c;", "f32 f32 pred -> f32", [(0xFFC12345, 1.0, True, 0xFFC12345)]
    )  # NaNs pass unchanged


def test_select_by_sign() -> None:
    check(
        "slct.u32.s32 %d, %a, %b, %c;",
        "u32 u32 s32 -> u32",
        [(1, 2, 0, 1), (1, 2, -1, 2), (1, 2, INT_MIN, 2)],
    )
    rows = [(1, 2, 0.0, 1), (1, 2, -0.0, 1), (1, 2, -1.0, 2), (1, 2, QNAN, 2), (1, 2, 0x80000001, 2)]
    check("slct.b64.f32 %d, %a, %b, %c;", "b64 b64 f32 -> b64", rows)
    check(
        "slct.ftz.f32.f32 %d, %a, %b, %c;",
        "f32 f32 f32 -> f32",
        [(1.0, 2.0, 0x80000001, 1.0), (1.0, 2.0, -1.0, 2.0)],
    )


def test_copysign_and_testp() -> None:
    check(
        "copysign.f32 %d, %a, %b;",
        "f32 f32 -> f32",
        [(-1.0, 5.0, -5.0), (0.0, -5.0, 5.0), (-0.0, 0x7FC12345, 0xFFC12345)],
    )
    check("copysign.f64 %d, %a, %b;", "f64 f64 -> f64", [(-0.0, 2.5, -2.5)])
    values = [1.0, -0.0, INF, QNAN, TINY, 2.0**-126]
    truth = {
        "finite": (1, 1, 0, 0, 1, 1), "infinite": (0, 0, 1, 0, 0, 0), "number": (1, 1, 1, 0, 1, 1),
        "notanumber": (0, 0, 0, 1, 0, 0), "normal": (1, 1, 0, 0, 0, 1), "subnormal": (0, 0, 0, 0, 1, 0),
    }  # fmt: skip
    for name, expected in truth.items():
        rows = [(value, bool(e)) for value, e in zip(values, expected, strict=True)]
        check(f"testp.{name}.f32 %d, %a;", "f32 -> pred", rows)
    check(
        "testp.subnormal.f64 %d, %a;", "f64 -> pred", [(2.0**-1074, True), (2.0**-1022, False), (0.0, False)]
    )


# -- moves and addresses ----------------------------------------------------------------------------


def test_moves_of_literals() -> None:
    check("mov.u32 %d, 0xFFFFFFFF;", "u32 -> u32", [(0, UINT_MAX)])
    check("mov.s32 %d, -1;", "u32 -> s32", [(0, -1)])
    check("mov.b32 %d, 0b101;", "u32 -> b32", [(0, 5)])
    check("mov.b32 %d, 0777;", "u32 -> b32", [(0, 511)])
    check("mov.u64 %d, 0x8000000000000000U;", "u32 -> u64", [(0, 2**63)])
    check("mov.f32 %d, 0fBF800000;", "u32 -> f32", [(0, -1.0)])
    check("mov.f32 %d, 0f7FC12345;", "u32 -> f32", [(0, 0x7FC12345)])
    check("mov.f32 %d, 2.5;", "u32 -> f32", [(0, 2.5)])
    check("mov.f32 %d, -1.5e1;", "u32 -> f32", [(0, -15.0)])
    check("mov.f64 %d, 0d3FF8000000000000;", "u32 -> f64", [(0, 1.5)])
    check("mov.f64 %d, -0d3FF8000000000000;", "u32 -> f64", [(0, -1.5)])
    check("mov.b32 %d, 0f3F800000;", "u32 -> b32", [(0, 0x3F800000)])
    check("mov.u32 %d, WARP_SZ;", "u32 -> u32", [(0, 32)])


def test_packing_moves() -> None:
    check("mov.b32 %d, {%a, %b};", "b16 b16 -> b32", [(0x1234, 0xABCD, 0xABCD1234)])
    check("mov.b64 %d, {%a, %b};", "b32 b32 -> b64", [(1, 2, 0x0000000200000001)])
    check("mov.b64 %d, {%a, %b, %c, %e};", "b16 b16 b16 b16 -> b64", [(1, 2, 3, 4, 0x0004000300020001)])
    check("mov.b32 {%d, %q}, %a;", "b32 -> b16 b16", [(0xABCD1234, 0x1234, 0xABCD)])
    check("mov.b64 {%d, %q}, %a;", "b64 -> b32 b32", [(0x0000000200000001, 1, 2)])
    check("mov.b64 {_, %d}, %a;", "b64 -> b32", [(0x0000000200000001, 2)])
    check("mov.b64 %d, {%a, 7};", "b32 -> b64", [(1, 0x0000000700000001)])


def test_special_registers_of_a_grid() -> None:
    names = [f"{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"]
    names += ["laneid", "warpid", "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_gt", "lanemask_ge"]
    grid, block = (3, 2, 2), (5, 4, 3)
    threads = 60
    body = ["mov.u32 %r1, 0;", "mov.u32 %r2, 0;"]
    for axis in "zyx":  # linear thread and block numbers: x runs fastest
        for register, kind in (("%r1", "tid"), ("%r2", "ctaid")):
            body += [f"mov.u32 %r5, %n{kind}.{axis};", f"mov.u32 %r6, %{kind}.{axis};"]
            body.append(f"mad.lo.u32 {register}, {register}, %r5, %r6;")
    body.append(f"mad.lo.u32 %r3, %r2, {threads}, %r1;")
    body.append(f"mad.wide.u32 %rd1, %r3, {4 * len(names)}, %out;")
    for i, name in enumerate(names):
        body += [f"mov.u32 %r4, %{name};", f"st.global.u32 [%rd1+{4 * i}], %r4;"]
    words, report = run("\n".join([*body, "ret;"]), out=12 * threads * len(names), grid=grid, block=block)
    report.raise_for_findings()
    got = words.reshape(12, threads, len(names))
    for cta in range(12):
        for thread in range(threads):
            lane = thread % 32
            expected = [
                thread % 5, thread // 5 % 4, thread // 20, 5, 4, 3, cta % 3, cta // 3 % 2, cta // 6, 3, 2, 2,
                lane, thread // 32,
                1 << lane, (1 << lane) - 1, (2 << lane) - 1, UINT_MAX - ((2 << lane) - 1),
                UINT_MAX - ((1 << lane) - 1),
            ]  # fmt: skip
            assert got[cta, thread].tolist() == expected


def test_address_spaces() -> None:
    body = """
        mov.u64 %rd1, buffer;
        cvta.shared.u64 %rd2, %rd1;
        cvta.to.shared.u64 %rd3, %rd2;
        isspacep.shared %p1, %rd2;
        isspacep.global %p2, %rd2;
        isspacep.global %p3, %out;
        isspacep.local %p4, %rd2;
        setp.eq.u64 %p5, %rd1, %rd3;
        selp.u32 %r1, 1, 0, %p1;
        selp.u32 %r2, 1, 0, %p2;
        selp.u32 %r3, 1, 0, %p3;
        selp.u32 %r4, 1, 0, %p4;
        selp.u32 %r5, 1, 0, %p5;
        cvta.global.u64 %rd4, %out;
        cvta.to.global.u64 %rd5, %rd4;
        st.global.v4.u32 [%rd5], {%r1, %r2, %r3, %r4};
        st.u32 [%rd4+16], %r5;
        st.u32 [%rd2+4], 77;
        ld.shared.u32 %r6, [buffer+4];
        st.global.u32 [%out+20], %r6;
        ret;
    """
    words, report = run(body, out=8, block=1, declarations=[".shared .align 16 .b8 buffer[64];"])
    report.raise_for_findings()
    assert words[:6].tolist() == [1, 0, 1, 0, 1, 77]


# -- what must be refused ---------------------------------------------------------------------------

REFUSED = """
and.u32 %r0, %r1, %r2;
not.s32 %r0, %r1;
cnot.u32 %r0, %r1;
shl.u32 %r0, %r1, %r2;
shl.wrap.b32 %r0, %r1, %r2;
shf.l.b32 %r0, %r1, %r2, %r3;
shf.wrap.b32 %r0, %r1, %r2, %r3;
shf.l.wrap.u32 %r0, %r1, %r2, %r3;
lop3.b32 %r0, %r1, %r2, %r3, %r4;
lop3.b32 %r0, %r1, %r2, %r3, 256;
lop3.b64 %rd0, %rd1, %rd2, %rd3, 0x80;
lop3.or.b32 %r0|%p1, %r1, %r2, %r3, 0x80, %p2;
prmt.b32.f4e %r0, %r1, %r2, %r3;
prmt.b64 %rd0, %rd1, %rd2, %r3;
bfe.b32 %r0, %r1, %r2, %r3;
bfi.u32 %r0, %r1, %r2, %r3, %r4;
popc.u32 %r0, %r1;
popc.shiftamt.b32 %r0, %r1;
clz.s32 %r0, %r1;
brev.u32 %r0, %r1;
bfind.b32 %r0, %r1;
ffs.b32 %r0, %r1;
fns.b32 %r0, %r1, %r2, %r3;
setp.lt.b32 %p0, %r1, %r2;
setp.equ.s32 %p0, %r1, %r2;
setp.s32 %p0, %r1, %r2;
setp.lt.ftz.f64 %p0, %fd1, %fd2;
setp.lt.ftz.s32 %p0, %r1, %r2;
setp.lt.ftz.bf16 %p0, %h1, %h2;
setp.lt.f16x2 %p0|%p1, %r1, %r2;
setp.lt.s32 %p0, %r1, %r2, %p1;
setp.lt.and.s32 %p0, %r1, %r2;
set.lt.b32.s32 %r0, %r1, %r2;
set.lt.u64.s32 %rd0, %r1, %r2;
set.lt.s32 %r0, %r1, %r2;
set.lt.u32.s32 %r0|%p1, %r1, %r2;
selp.pred %p0, %p1, %p2, %p3;
selp.u8 %h0, %h1, %h2, %p3;
slct.ftz.f32.s32 %f0, %f1, %f2, %r3;
slct.f32.f64 %f0, %f1, %f2, %fd3;
mov.u8 %h0, %h1;
mov.v2.b32 %r0, %r1;
mov.b32 {%h0, %h1}, {%h2, %h3};
mov.u32 %r0, {%h0, %h1};
mov.b32 %r0, {%r1, %r2};
mov.b64 %rd0, {%h0, %h1, %h2};
mov.sat.f32 %f0, %f1;
copysign.ftz.f32 %f0, %f1, %f2;
testp.f32 %p0, %f1;
testp.normal.f16 %p0, %h1;
cvta.u64 %rd0, %rd1;
cvta.to.global.u32 %r0, %r1;
cvta.to.shared::cluster.u64 %rd0, %rd1;
isspacep.const %p0, %rd1;
createpolicy.range.L2::evict_last.b64 %rd0, [%rd1], 4096, 8192;
createpolicy.fractional.bogus.L2::evict_last.b64 %rd0, 1.0;
createpolicy.fractional.b64 %rd0, 1.0;
nanosleep.s32 %r1;
""".strip().splitlines()


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_not_modelled_or_not_ptx_is_refused(line: str) -> None:
    refused(line)


@pytest.mark.parametrize(
    "line",
    [
        "and.b32 %r0, %r1;",
        "not.b32 %r0;",
        "shl.b32 %r0, %r1;",
        "shf.l.wrap.b32 %r0, %r1, %r2;",
        "lop3.b32 %r0, %r1, %r2, 0x80;",
        "prmt.b32 %r0, %r1, %r2;",
        "bfe.u32 %r0, %r1, %r2;",
        "bfi.b32 %r0, %r1, %r2, %r3;",
        "popc.b32 %r0;",
        "setp.lt.s32 %p0, %r1;",
        "set.lt.u32.s32 %r0, %r1;",
        "selp.b32 %r0, %r1, %r2;",
        "slct.b32.s32 %r0, %r1, %r2;",
        "mov.b32 %r0;",
        "mov.b32 %r0, %r1, %r2;",
        "copysign.f32 %f0, %f1;",
        "testp.normal.f32 %p0;",
        "cvta.global.u64 %rd0;",
        "isspacep.global %p0;",
        "createpolicy.fractional.L2::evict_last.b64;",
        "nanosleep.u32;",
    ],
)
def test_wrong_operand_counts_are_refused(line: str) -> None:
    refused(line, kind=vgpu.MalformedPTX)
