"""Integer arithmetic, bit fields and shifts, against literals worked out from the PTX ISA manual."""

from __future__ import annotations

import math

import numpy as np
import pytest
from vgpu_kernels import check, evaluate, refused

from oproj_lib import vgpu

INT_MIN, INT_MAX, UINT_MAX = -(2**31), 2**31 - 1, 2**32 - 1
LONG_MIN, LONG_MAX, ULONG_MAX = -(2**63), 2**63 - 1, 2**64 - 1
INF = math.inf
NAN, NAN16 = 0x7FFFFFFF, 0x7FFF
QNAN = 0x7FC00000
TINY = 0x00000001  # smallest FP32 subnormal
ULP = 2.0**-23


# -- integers ---------------------------------------------------------------------------------------


def test_integer_sums_wrap() -> None:
    check(
        "add.s32 %d, %a, %b;", "s32 s32 -> s32", [(INT_MAX, 1, INT_MIN), (INT_MIN, -1, INT_MAX), (-5, 3, -2)]
    )
    check("sub.s32 %d, %a, %b;", "s32 s32 -> s32", [(INT_MIN, 1, INT_MAX), (0, INT_MIN, INT_MIN)])
    check("add.u32 %d, %a, %b;", "u32 u32 -> u32", [(UINT_MAX, 1, 0), (UINT_MAX, UINT_MAX, UINT_MAX - 1)])
    check("add.u16 %d, %a, %b;", "u16 u16 -> u16", [(0xFFFF, 2, 1)])
    check("sub.u64 %d, %a, %b;", "u64 u64 -> u64", [(0, 1, ULONG_MAX)])
    check("add.s64 %d, %a, %b;", "s64 s64 -> s64", [(LONG_MAX, 1, LONG_MIN)])
    check("add.s16 %d, %a, -1;", "s16 -> s16", [(-(2**15), 2**15 - 1)])


def test_saturating_sums() -> None:
    rows = [(INT_MAX, 1, INT_MAX), (INT_MIN, -1, INT_MIN), (INT_MAX, INT_MIN, -1), (5, 6, 11)]
    check("add.sat.s32 %d, %a, %b;", "s32 s32 -> s32", rows)
    check(
        "sub.sat.s32 %d, %a, %b;",
        "s32 s32 -> s32",
        [(INT_MIN, 1, INT_MIN), (0, INT_MIN, INT_MAX), (3, 5, -2)],
    )


def test_low_and_high_products() -> None:
    check(
        "mul.lo.s32 %d, %a, %b;", "s32 s32 -> s32", [(INT_MIN, -1, INT_MIN), (65536, 65536, 0), (-3, 7, -21)]
    )
    check("mul.hi.s32 %d, %a, %b;", "s32 s32 -> s32", [(INT_MIN, INT_MIN, 2**30), (-1, 1, -1), (-1, -1, 0)])
    check("mul.hi.u32 %d, %a, %b;", "u32 u32 -> u32", [(UINT_MAX, UINT_MAX, UINT_MAX - 1), (65536, 65536, 1)])
    check("mul.hi.s16 %d, %a, %b;", "s16 s16 -> s16", [(-(2**15), -(2**15), 2**14), (-1, 1, -1)])
    check("mul.hi.u16 %d, %a, %b;", "u16 u16 -> u16", [(0xFFFF, 0xFFFF, 0xFFFE)])
    check("mul.lo.u64 %d, %a, %b;", "u64 u64 -> u64", [(ULONG_MAX, ULONG_MAX, 1), (2**32, 2**32, 0)])
    rows = [
        (ULONG_MAX, ULONG_MAX, ULONG_MAX - 1),
        (2**32, 2**32, 1),
        (2**63, 2, 1),
        (0x1234567890ABCDEF, 16, 1),
    ]
    check("mul.hi.u64 %d, %a, %b;", "u64 u64 -> u64", rows)
    rows = [
        (LONG_MIN, LONG_MIN, 2**62),
        (-1, 1, -1),
        (-1, -1, 0),
        (LONG_MIN, 1, -1),
        (LONG_MAX, LONG_MIN, -(2**62)),
    ]
    check("mul.hi.s64 %d, %a, %b;", "s64 s64 -> s64", rows)


def test_wide_products() -> None:
    check(
        "mul.wide.s32 %d, %a, %b;",
        "s32 s32 -> s64",
        [(INT_MIN, INT_MIN, 2**62), (-1, UINT_MAX >> 1, -INT_MAX)],
    )
    check("mul.wide.u32 %d, %a, %b;", "u32 u32 -> u64", [(UINT_MAX, UINT_MAX, 0xFFFFFFFE00000001)])
    check("mul.wide.s16 %d, %a, %b;", "s16 s16 -> s32", [(-(2**15), -(2**15), 2**30), (-1, 2, -2)])
    check("mul.wide.u16 %d, %a, %b;", "u16 u16 -> u32", [(0xFFFF, 0xFFFF, 0xFFFE0001)])


def test_multiply_add() -> None:
    check("mad.lo.s32 %d, %a, %b, %c;", "s32 s32 s32 -> s32", [(INT_MIN, -1, -1, INT_MAX), (3, -4, 5, -7)])
    check("mad.hi.u32 %d, %a, %b, %c;", "u32 u32 u32 -> u32", [(UINT_MAX, UINT_MAX, 3, 1)])
    check("mad.hi.s32 %d, %a, %b, %c;", "s32 s32 s32 -> s32", [(INT_MIN, INT_MIN, -1, 2**30 - 1)])
    check("mad.wide.u32 %d, %a, %b, %c;", "u32 u32 u64 -> u64", [(UINT_MAX, UINT_MAX, 2**33 - 1, 0)])
    check(
        "mad.wide.s32 %d, %a, %b, %c;", "s32 s32 s64 -> s64", [(-2, 3, 10, 4), (INT_MIN, 1, -1, -(2**31) - 1)]
    )
    check("mad.wide.u16 %d, %a, %b, %c;", "u16 u16 u32 -> u32", [(0xFFFF, 0xFFFF, 0x1FFFF, 0)])
    check("mad.lo.u64 %d, %a, %b, %c;", "u64 u64 u64 -> u64", [(2**63, 2, 7, 7)])


def test_division_rounds_toward_zero() -> None:
    rows = [
        (7, 2, 3),
        (-7, 2, -3),
        (7, -2, -3),
        (-7, -2, 3),
        (INT_MIN, 1, INT_MIN),
        (INT_MIN, 2, -(2**30)),
        (0, -5, 0),
    ]
    check("div.s32 %d, %a, %b;", "s32 s32 -> s32", rows)
    rows = [(7, 2, 1), (-7, 2, -1), (7, -2, 1), (-7, -2, -1), (INT_MIN, 3, -2), (6, 3, 0)]
    check("rem.s32 %d, %a, %b;", "s32 s32 -> s32", rows)
    check("div.u32 %d, %a, %b;", "u32 u32 -> u32", [(UINT_MAX, 2, INT_MAX), (1, UINT_MAX, 0)])
    check("rem.u64 %d, %a, %b;", "u64 u64 -> u64", [(ULONG_MAX, 10, 5)])
    check("div.u64 %d, %a, %b;", "u64 u64 -> u64", [(ULONG_MAX, 10, 1844674407370955161)])
    check("div.s64 %d, %a, %b;", "s64 s64 -> s64", [(LONG_MIN, 3, -3074457345618258602), (-1, LONG_MAX, 0)])
    check("rem.s16 %d, %a, %b;", "s16 s16 -> s16", [(-(2**15), 7, -1)])
    check("div.u16 %d, %a, %b;", "u16 u16 -> u16", [(0xFFFF, 256, 255)])


def test_division_of_the_smallest_integer_by_minus_one_wraps() -> None:
    check("div.s32 %d, %a, %b;", "s32 s32 -> s32", [(INT_MIN, -1, INT_MIN)])
    check("rem.s32 %d, %a, %b;", "s32 s32 -> s32", [(INT_MIN, -1, 0)])
    check("div.s64 %d, %a, %b;", "s64 s64 -> s64", [(LONG_MIN, -1, LONG_MIN)])


def test_division_by_zero() -> None:
    """The manual leaves it open; these are an H200's answers."""
    check("div.u32 %d, %a, %b;", "u32 u32 -> u32", [(5, 0, UINT_MAX), (0, 0, UINT_MAX)])
    check("rem.u32 %d, %a, %b;", "u32 u32 -> u32", [(5, 0, UINT_MAX), (0, 0, UINT_MAX)])
    check("div.s32 %d, %a, %b;", "s32 s32 -> s32", [(5, 0, -1), (-5, 0, -1), (0, 0, -1)])
    check("rem.s32 %d, %a, %b;", "s32 s32 -> s32", [(5, 0, -1), (-5, 0, -1)])
    check("div.u64 %d, %a, %b;", "u64 u64 -> u64", [(5, 0, ULONG_MAX)])
    check("rem.u64 %d, %a, %b;", "u64 u64 -> u64", [(5, 0, ULONG_MAX)])
    check("div.s64 %d, %a, %b;", "s64 s64 -> s64", [(5, 0, -1), (-5, 0, -1)])
    check("div.u16 %d, %a, %b;", "u16 u16 -> u16", [(5, 0, 0xFFFF)])
    check("rem.s16 %d, %a, %b;", "s16 s16 -> s16", [(5, 0, -1)])


def test_integer_sign_and_extremes() -> None:
    check("neg.s32 %d, %a;", "s32 -> s32", [(5, -5), (INT_MIN, INT_MIN), (0, 0)])
    check("abs.s32 %d, %a;", "s32 -> s32", [(-5, 5), (INT_MIN, INT_MIN), (INT_MAX, INT_MAX)])
    check("abs.s64 %d, %a;", "s64 -> s64", [(LONG_MIN, LONG_MIN), (-1, 1)])
    check("neg.s16 %d, %a;", "s16 -> s16", [(-(2**15), -(2**15)), (1, -1)])
    check("min.s32 %d, %a, %b;", "s32 s32 -> s32", [(-1, 1, -1), (INT_MIN, INT_MAX, INT_MIN)])
    check("min.u32 %d, %a, %b;", "u32 u32 -> u32", [(UINT_MAX, 1, 1)])
    check("max.u64 %d, %a, %b;", "u64 u64 -> u64", [(ULONG_MAX, 1, ULONG_MAX)])
    check("max.s16 %d, %a, %b;", "s16 s16 -> s16", [(-1, 1, 1)])
    check("min.relu.s32 %d, %a, %b;", "s32 s32 -> s32", [(-1, 5, 0), (3, 5, 3), (INT_MIN, INT_MIN, 0)])
    check("max.relu.s32 %d, %a, %b;", "s32 s32 -> s32", [(-1, -5, 0), (3, 5, 5)])


def test_sum_of_absolute_difference() -> None:
    check(
        "sad.u32 %d, %a, %b, %c;", "u32 u32 u32 -> u32", [(3, 7, 10, 14), (7, 3, 10, 14), (0, UINT_MAX, 1, 0)]
    )
    check("sad.s32 %d, %a, %b, %c;", "s32 s32 s32 -> s32", [(-3, 7, 1, 11), (INT_MAX, INT_MIN, 1, 0)])
    check("sad.u16 %d, %a, %b, %c;", "u16 u16 u16 -> u16", [(0, 0xFFFF, 2, 1)])
    check("sad.s64 %d, %a, %b, %c;", "s64 s64 s64 -> s64", [(-1, 1, 5, 7)])


def test_dot_product_of_bytes() -> None:
    a, b = 0xFF02_0304, 0x0110_FF01  # bytes from the top: -1|255, 2, 3, 4 and 1, 16, -1|255, 1
    check("dp4a.u32.u32 %d, %a, %b, %c;", "u32 u32 u32 -> u32", [(a, b, 7, 255 + 32 + 765 + 4 + 7)])
    check("dp4a.s32.s32 %d, %a, %b, %c;", "u32 u32 s32 -> s32", [(a, b, 7, -1 + 32 - 3 + 4 + 7)])
    check("dp4a.s32.u32 %d, %a, %b, %c;", "u32 u32 s32 -> s32", [(a, b, -7, -1 + 32 + 765 + 4 - 7)])
    check("dp4a.u32.s32 %d, %a, %b, %c;", "u32 u32 s32 -> s32", [(a, b, 0, 255 + 32 - 3 + 4)])
    check(
        "dp4a.u32.u32 %d, %a, %b, %c;", "u32 u32 u32 -> u32", [(UINT_MAX, UINT_MAX, UINT_MAX, 4 * 65025 - 1)]
    )


# -- bits -------------------------------------------------------------------------------------------


def test_bitwise_logic() -> None:
    a, b = 0b1100, 0b1010
    check("and.b32 %d, %a, %b;", "b32 b32 -> b32", [(a, b, 0b1000)])
    check("or.b32 %d, %a, %b;", "b32 b32 -> b32", [(a, b, 0b1110)])
    check("xor.b64 %d, %a, %b;", "b64 b64 -> b64", [(a, b, 0b0110), (ULONG_MAX, 1, ULONG_MAX - 1)])
    check("not.b16 %d, %a;", "b16 -> b16", [(0x00F0, 0xFF0F)])
    check("not.b64 %d, %a;", "b64 -> b64", [(0, ULONG_MAX)])
    check("cnot.b32 %d, %a;", "b32 -> b32", [(0, 1), (5, 0), (2**31, 0)])
    check("cnot.b64 %d, %a;", "b64 -> b64", [(0, 1), (2**63, 0)])


def test_predicate_logic() -> None:
    table = [(False, False), (False, True), (True, False), (True, True)]
    check("and.pred %d, %a, %b;", "pred pred -> pred", [(a, b, a and b) for a, b in table])
    check("or.pred %d, %a, %b;", "pred pred -> pred", [(a, b, a or b) for a, b in table])
    check("xor.pred %d, %a, %b;", "pred pred -> pred", [(a, b, a != b) for a, b in table])
    check("not.pred %d, %a;", "pred -> pred", [(False, True), (True, False)])
    check("mov.pred %d, %a;", "pred -> pred", [(False, False), (True, True)])
    check("and.pred %d, !%a, %b;", "pred pred -> pred", [(a, b, b and not a) for a, b in table])


def test_shifts_beyond_the_width() -> None:
    top = 2**31
    rows = [
        (1, 0, 1),
        (1, 31, top),
        (1, 32, 0),
        (1, 33, 0),
        (1, 255, 0),
        (UINT_MAX, UINT_MAX, 0),
        (3, 31, top),
    ]
    check("shl.b32 %d, %a, %b;", "b32 u32 -> b32", rows)
    check("shr.u32 %d, %a, %b;", "u32 u32 -> u32", [(top, 31, 1), (top, 32, 0), (top, 33, 0), (top, 255, 0)])
    check("shr.b32 %d, %a, %b;", "b32 u32 -> b32", [(UINT_MAX, 4, 0x0FFFFFFF), (UINT_MAX, 32, 0)])
    rows = [
        (INT_MIN, 31, -1),
        (INT_MIN, 32, -1),
        (INT_MIN, 255, -1),
        (INT_MAX, 31, 0),
        (-8, 1, -4),
        (5, 32, 0),
    ]
    check("shr.s32 %d, %a, %b;", "s32 u32 -> s32", rows)
    check("shl.b64 %d, %a, %b;", "b64 u32 -> b64", [(1, 63, 2**63), (1, 64, 0), (1, 32, 2**32)])
    check(
        "shr.s64 %d, %a, %b;", "s64 u32 -> s64", [(LONG_MIN, 63, -1), (LONG_MIN, 64, -1), (LONG_MAX, 62, 1)]
    )
    check("shl.b16 %d, %a, %b;", "b16 u32 -> b16", [(1, 15, 0x8000), (1, 16, 0), (0x8001, 1, 2)])
    check(
        "shr.s16 %d, %a, %b;", "s16 u32 -> s16", [(-(2**15), 15, -1), (-(2**15), 16, -1), (-(2**15), 31, -1)]
    )
    check("shr.u16 %d, %a, %b;", "u16 u32 -> u16", [(0x8000, 15, 1), (0x8000, 16, 0)])


def test_funnel_shift() -> None:
    low, high = 0x89ABCDEF, 0x01234567  # b:a = 0x01234567_89ABCDEF
    rows = [(low, high, n, r) for n, r in [(0, high), (4, 0x12345678), (32, low), (33, low), (255, low)]]
    check("shf.l.clamp.b32 %d, %a, %b, %c;", "b32 b32 u32 -> b32", rows)
    rows = [
        (low, high, n, r)
        for n, r in [(0, high), (4, 0x12345678), (32, high), (36, 0x12345678), (31, 0xC4D5E6F7)]
    ]
    check("shf.l.wrap.b32 %d, %a, %b, %c;", "b32 b32 u32 -> b32", rows)
    rows = [(low, high, n, r) for n, r in [(0, low), (4, 0x789ABCDE), (32, high), (33, high), (255, high)]]
    check("shf.r.clamp.b32 %d, %a, %b, %c;", "b32 b32 u32 -> b32", rows)
    rows = [(low, high, n, r) for n, r in [(0, low), (4, 0x789ABCDE), (32, low), (36, 0x789ABCDE)]]
    check("shf.r.wrap.b32 %d, %a, %b, %c;", "b32 b32 u32 -> b32", rows)


@pytest.mark.parametrize(
    ("table", "expected"),
    [  # a = 0xF0, b = 0xCC, c = 0xAA select every combination once: the result's low byte is the table itself
        (0x80, 0x80), (0xFE, 0xFE), (0x96, 0x96), (0xE8, 0xE8), (0xCA, 0xCA), (0x00, 0x00), (0xFF, 0xFF),
        (0x1A, 0x1A),
    ],
)  # fmt: skip
def test_lop3(table: int, expected: int) -> None:
    (got,) = evaluate(f"lop3.b32 %d, %a, %b, %c, {table};", "b32 b32 b32 -> b32", [(0xF0, 0xCC, 0xAA)])
    assert int(got[0]) & 0xFF == expected
    x, y, z = 0x12345678, 0x0F0F0F0F, 0xFEDCBA98
    meaning = {
        0x80: x & y & z,
        0xFE: x | y | z,
        0x96: x ^ y ^ z,
        0xE8: x & y | x & z | y & z,
        0xCA: x & y | ~x & z,
    }
    if table in meaning:
        check(
            f"lop3.b32 %d, %a, %b, %c, {table};", "b32 b32 b32 -> b32", [(x, y, z, meaning[table] & UINT_MAX)]
        )


def test_byte_permutation() -> None:
    a, b = 0x33221100, 0x77665544
    rows = [
        (a, b, 0x3210, a), (a, b, 0x7654, b), (a, b, 0x0123, 0x00112233), (a, b, 0x7531, 0x77553311),
        (a, b, 0x0000, 0), (a, b, 0xFFFF0000 | 0x4444, 0x44444444),
    ]  # fmt: skip
    check("prmt.b32 %d, %a, %b, %c;", "b32 b32 b32 -> b32", rows)
    rows = [(0x80FF7F01, 0x000000F0, 0xBA98, 0xFFFF0000), (0x80FF7F01, 0x000000F0, 0x4C3B, 0xF0FF80FF)]
    check("prmt.b32 %d, %a, %b, %c;", "b32 b32 b32 -> b32", rows)


def test_bit_field_extract() -> None:
    x = 0x89ABCDEF
    rows = [
        (x, 4, 8, 0xDE), (x, 0, 32, x), (x, 0, 0, 0), (x, 28, 8, 0x8), (x, 31, 1, 1), (x, 32, 4, 0), (x, 255,
        255, 0),
        (x, 0x100 + 4, 0x100 + 8, 0xDE),  # only the low 8 bits of position and length count
        (x, 4, 255, 0x089ABCDE),
    ]  # fmt: skip
    check("bfe.u32 %d, %a, %b, %c;", "u32 u32 u32 -> u32", rows)
    rows = [
        (0x0000_00F0, 4, 4, -1), (0x0000_0070, 4, 4, 7), (x, 28, 8, 0xFFFFFFF8), (x, 31, 1, -1), (x, 32, 4,
        -1),
        (x, 255, 255, -1), (x, 32, 0, 0), (0x7FFFFFFF, 40, 4, 0), (x, 0, 32, x), (x, 4, 0, 0), (x, 16, 16,
        0xFFFF89AB),
    ]  # fmt: skip
    check("bfe.s32 %d, %a, %b, %c;", "s32 u32 u32 -> s32", rows)
    y = 0xFEDCBA9876543210
    rows = [(y, 32, 32, 0xFEDCBA98), (y, 0, 64, y), (y, 60, 16, 0xF), (y, 64, 8, 0), (y, 4, 255, y >> 4)]
    check("bfe.u64 %d, %a, %b, %c;", "u64 u32 u32 -> u64", rows)
    rows = [(y, 60, 16, -1), (y, 64, 8, -1), (y, 0, 64, y), (y, 0, 5, -16), (y, 63, 1, -1), (y, 8, 8, 0x32)]
    check("bfe.s64 %d, %a, %b, %c;", "s64 u32 u32 -> s64", rows)


def test_bit_field_insert() -> None:
    rows = [
        (0xFF, 0, 8, 4, 0x00000F00), (0, UINT_MAX, 8, 8, 0xFFFF00FF), (UINT_MAX, 0, 28, 8, 0xF0000000),
        (UINT_MAX, 0, 32, 8, 0), (0xAB, 0x12345678, 0, 0, 0x12345678), (0xAB, 0x12345678, 0, 32, 0xAB),
        (0xAB, 0x12345678, 0, 255, 0xAB), (UINT_MAX, 5, 255, 255, 5), (1, 0, 0x100 + 3, 0x100 + 1, 8),
    ]  # fmt: skip
    check("bfi.b32 %d, %a, %b, %c, %e;", "b32 b32 u32 u32 -> b32", rows)
    rows = [
        (ULONG_MAX, 0, 60, 16, 0xF << 60), (0xAB, ULONG_MAX, 0, 64, 0xAB), (1, 0, 63, 1, 2**63),
        (ULONG_MAX, 7, 64, 1, 7), (0, ULONG_MAX, 32, 32, UINT_MAX),
    ]  # fmt: skip
    check("bfi.b64 %d, %a, %b, %c, %e;", "b64 b64 u32 u32 -> b64", rows)


def test_bit_counts() -> None:
    check("popc.b32 %d, %a;", "b32 -> u32", [(0, 0), (UINT_MAX, 32), (0x80000001, 2)])
    check("popc.b64 %d, %a;", "b64 -> u32", [(0, 0), (ULONG_MAX, 64), (2**63, 1)])
    check("clz.b32 %d, %a;", "b32 -> u32", [(0, 32), (1, 31), (2**31, 0), (0x00FF0000, 8)])
    check("clz.b64 %d, %a;", "b64 -> u32", [(0, 64), (1, 63), (2**63, 0)])
    check("brev.b32 %d, %a;", "b32 -> b32", [(1, 2**31), (0x0000000F, 0xF0000000), (0x12345678, 0x1E6A2C48)])
    check("brev.b64 %d, %a;", "b64 -> b64", [(1, 2**63), (0x3, 0xC << 60)])


def test_find_most_significant_bit() -> None:
    none = UINT_MAX
    check("bfind.u32 %d, %a;", "u32 -> u32", [(0, none), (1, 0), (UINT_MAX, 31), (0x00010000, 16)])
    check(
        "bfind.s32 %d, %a;",
        "s32 -> u32",
        [(0, none), (-1, none), (1, 0), (INT_MAX, 30), (INT_MIN, 30), (-2, 0)],
    )
    check("bfind.u64 %d, %a;", "u64 -> u32", [(0, none), (2**63, 63), (2**32, 32)])
    check("bfind.s64 %d, %a;", "s64 -> u32", [(-1, none), (LONG_MIN, 62), (LONG_MAX, 62)])
    check("bfind.shiftamt.u32 %d, %a;", "u32 -> u32", [(0, none), (1, 31), (UINT_MAX, 0), (0x00010000, 15)])
    check("bfind.shiftamt.s32 %d, %a;", "s32 -> u32", [(-1, none), (INT_MIN, 1), (1, 31)])
    check("bfind.shiftamt.u64 %d, %a;", "u64 -> u32", [(0, none), (1, 63), (2**63, 0)])


# -- random bits against the manual's pseudo-code ---------------------------------------------------

RANDOM = np.random.default_rng(1)


def words(count: int = 200) -> list[int]:
    return [int(x) for x in RANDOM.integers(0, 2**32, count, dtype=np.uint64)]


def test_random_bit_fields() -> None:
    rows, expected = [], []
    for x, p, n in zip(words(), words(), words(), strict=True):
        position, length = p % 40, n % 40
        sign = 0 if length == 0 else x >> min(position + length - 1, 31) & 1
        value = sum(
            (x >> position + i & 1 if i < length and position + i <= 31 else sign) << i for i in range(32)
        )
        rows.append((x, position, length))
        expected.append(value)
    (got,) = evaluate("bfe.s32 %d, %a, %b, %c;", "b32 u32 u32 -> b32", rows)
    assert got.tolist() == expected


def test_random_permutations() -> None:
    rows = list(zip(words(), words(), words(), strict=True))
    expected = []
    for a, b, c in rows:
        bytes_ = [(b << 32 | a) >> 8 * i & 0xFF for i in range(8)]
        value = 0
        for i in range(4):
            selector = c >> 4 * i & 15
            picked = bytes_[selector & 7]
            value |= (picked if selector < 8 else 0xFF * (picked >> 7)) << 8 * i
        expected.append(value)
    (got,) = evaluate("prmt.b32 %d, %a, %b, %c;", "b32 b32 b32 -> b32", rows)
    assert got.tolist() == expected


# -- what must be refused ---------------------------------------------------------------------------

REFUSED = """
add.cc.u32 %r0, %r1, %r2;
addc.u32 %r0, %r1, %r2;
add.b32 %r0, %r1, %r2;
add.u8 %h0, %h1, %h2;
add.sat.u32 %r0, %r1, %r2;
add.sat.s64 %rd0, %rd1, %rd2;
add.ftz.s32 %r0, %r1, %r2;
add %r0, %r1, %r2;
mul.s32 %r0, %r1, %r2;
mul.lo.sat.s32 %r0, %r1, %r2;
mul.wide.u64 %rd0, %rd1, %rd2;
mul.hi.b32 %r0, %r1, %r2;
mad.hi.sat.s32 %r0, %r1, %r2, %r3;
mad.lo.cc.u32 %r0, %r1, %r2, %r3;
mul24.lo.u32 %r0, %r1, %r2;
neg.u32 %r0, %r1;
abs.u64 %rd0, %rd1;
min.b32 %r0, %r1, %r2;
min.relu.u32 %r0, %r1, %r2;
min.NaN.s32 %r0, %r1, %r2;
dp4a.u32 %r0, %r1, %r2, %r3;
dp2a.lo.u32.u32 %r0, %r1, %r2, %r3;
""".strip().splitlines()


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_not_modelled_or_not_ptx_is_refused(line: str) -> None:
    refused(line)


@pytest.mark.parametrize(
    "line",
    [
        "add.s32 %r0, %r1;",
        "add.s32 %r0, %r1, %r2, %r3;",
        "mul.lo.s32 %r0, %r1;",
        "mad.lo.s32 %r0, %r1, %r2;",
        "sad.u32 %r0, %r1, %r2;",
        "dp4a.u32.u32 %r0, %r1, %r2;",
    ],
)
def test_wrong_operand_counts_are_refused(line: str) -> None:
    refused(line, kind=vgpu.MalformedPTX)
